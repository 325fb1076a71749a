// All layers of a dense decoder for one token in one launch. Clusters of 16 blocks share out a layer as tensor-parallel
// machines do: one has a key head, the queries that share it and the columns of the output projection behind them,
// others have a part of the inner width. What a cluster does by itself goes through shared memory
// (cluster_words.cuh); twice a layer all clusters hand on their parts of sums through memory, as words with flags
// (resident_words.cuh):
//
//   hidden vector -> norm, rows of q, k, v | rotation, keys and values into pages, attention over a part of the keys
//   | the parts together, output projection -> the middle vector: sums of the clusters' parts, added to the hidden one
//   -> norm, rows of gate and up, SwiGLU | rows of down -> the next hidden vector: sums again.
//
// Arrows are between clusters, bars within one. Every block keeps the whole residual stream, a pair a lane.
#ifndef HIDDEN
#define HIDDEN 576
#define INNER 1536
#define Q_HEADS 9
#define KV_HEADS 3
#define HEAD_DIM 64
#define INNER_CLUSTERS 4
#endif
#include "cluster_attention.cuh"
#include "resident_words.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = CONSUMERS + WARP, CLUSTERS = KV_HEADS + INNER_CLUSTERS;
constexpr int GROUP_WIDTH = GROUP * HEAD_DIM, Q_WIDTH = Q_HEADS * HEAD_DIM, PART = INNER / INNER_CLUSTERS;
constexpr int WIDE_ROWS = HIDDEN / CLUSTER, QUERY_ROWS = GROUP_WIDTH / CLUSTER, HEAD_ROWS = QUERY_ROWS + 2 * 4;
constexpr int INNER_ROWS = PART / CLUSTER;
constexpr int CHUNK_PAIRS = HIDDEN / WARPS / 2;
static_assert(FOURS_OF_HEAD == CLUSTER, "a block has four rows of the key and the value");
static_assert(CHUNK_PAIRS <= WARP && HIDDEN % (2 * CLUSTER) == 0 && INNER % (2 * CLUSTER * INNER_CLUSTERS) == 0);

using Heads = Share<HIDDEN, HEAD_ROWS>;
using Output = Share<GROUP_WIDTH, WIDE_ROWS>;
using GateUp = Share<HIDDEN, 2 * INNER_ROWS>;
using Down = Share<PART, WIDE_ROWS>;

// chains.py makes the table and knows how many words there are.
struct Layer {
    const uint16_t *input_norm, *q, *k, *v, *output, *inner_norm, *gate, *up, *down;
    uint16_t* cache;
};

// Words in memory: the flag of the last layer; then sums of the clusters, for layers of even and odd flags, in copies,
// so that not all blocks ask the same part of the L2 cache. A word is written again two layers later: in between its
// writer has heard from every block about a layer whose words that block sent behind its reading.
constexpr int AT_SUMS = 16, COPIES = GATHERERS, VECTOR_WORDS = HIDDEN / 2;

// A warp's chunk of a vector as fragments, times the weights of a norm and as it is; parts of sums.
struct Common {
    uint32_t vector[WARPS][2 * CHUNK_PAIRS / 2], plain[WARPS][2 * CHUNK_PAIRS / 2];
};
struct HeadRoom {
    Common common;
    float heads[HEAD_ROWS + 1][WARPS], output[WIDE_ROWS][WARPS];
    AttentionRoom attention;
    Received received;
};
struct InnerRoom {
    Common common;
    float inner[2 * INNER_ROWS + 1][WARPS], down[WIDE_ROWS][WARPS];
    __align__(16) uint32_t received[PART / 2];
};
constexpr int NORM_BYTES = 2 * HIDDEN;
constexpr int HEAD_BYTES = NORM_BYTES + Heads::BYTES + Output::BYTES;
constexpr int INNER_BYTES = NORM_BYTES + GateUp::BYTES + Down::BYTES;
static_assert(STAGES * HEAD_BYTES + sizeof(HeadRoom) <= 226 * 1024 && HEAD_BYTES % 16 == 0);
static_assert(STAGES * INNER_BYTES + sizeof(InnerRoom) <= 226 * 1024 && INNER_BYTES % 16 == 0);

// A warp's chunk of the residual stream: a lane has two elements of it, and lanes beyond the chunk the last two again.
struct Residual {
    float x, y;

    // Adds parts of sums of so many clusters.
    template <int COUNT>
    __device__ void add(const uint64_t* words, uint32_t flag) {
        uint64_t word[COUNT];
        bool all;
        int turns = 0;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) word[i] = look(words + i * VECTOR_WORDS);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all = all && ((static_cast<uint32_t>(word[i]) ^ flag) & 0xff) == 0;
            lose_patience(turns);
        } while (!all);
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            a += __uint_as_float(static_cast<uint32_t>(word[i]) & ~0xffu);
            b += number(word[i] >> 32);
        }
        x += a;
        y += b;
    }
    // The chunk as fragments of a product, and this warp's sum of squares.
    template <int STEPS>
    __device__ float fragments(Common& common, uint32_t norm, uint32_t (&b)[STEPS][2], int warp, int lane) const {
        if (lane < CHUNK_PAIRS) {
            common.plain[warp][place_of(lane)] = pack(x, y);
            common.vector[warp][place_of(lane)] =
                pack(x * widen(static_cast<uint16_t>(norm)), y * widen(static_cast<uint16_t>(norm >> 16)));
        }
        __syncwarp();
        float square[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const uint2 two = *reinterpret_cast<const uint2*>(common.vector[warp] + 8 * s + lane % 4 * 2);
            const uint2 raw = *reinterpret_cast<const uint2*>(common.plain[warp] + 8 * s + lane % 4 * 2);
            b[s][0] = two.x, b[s][1] = two.y;
            mma(square, raw.x, 0, raw.y, 0, raw.x, raw.y);
        }
        return square[0];
    }
};
__device__ inline float inverse_rms(const float (&squares)[WARPS], float eps) {
    return rsqrtf(sum_of(squares) * (1.0f / HIDDEN) + eps);
}

// A word: two numbers, the first of 24 bits with the low part of the flag behind it.
__device__ inline uint64_t word_of(float first, float second, uint32_t flag) {
    const uint32_t low = ((__float_as_uint(first) + 0x80) & ~0xffu) | (flag & 0xff);
    return static_cast<uint64_t>(__float_as_uint(second)) << 32 | low;
}

struct Job {
    const Layer* all;
    uint64_t* words;
    int layers, cluster, rank;
    uint32_t flag;  // of the layer before the first
    float eps;

    __device__ uint64_t* sums(uint32_t flag, int copy, int cluster) const {
        return words + AT_SUMS + ((flag % 2 * COPIES + copy) * CLUSTERS + cluster) * VECTOR_WORDS;
    }
    // By a gatherer: half of this block's rows of its cluster's sums, a lane each, into two of the copies.
    __device__ void send_rows(const float (*parts)[WARPS], uint32_t flag, int warp, int lane) const {
        constexpr int HALF_ROWS = WIDE_ROWS / 2;
        const int row = warp % 2 * HALF_ROWS + min(lane, HALF_ROWS - 1);
        const float sum = sum_of(parts[row]), other = __shfl_down_sync(~0u, sum, 1);
        if (lane < HALF_ROWS && lane % 2 == 0) {
            const uint64_t word = word_of(sum, other, flag);
            uint64_t* to = sums(flag, warp / 2, cluster) + rank * (WIDE_ROWS / 2) + row / 2;
            store_word(to, word);
            store_word(to + 2 * CLUSTERS * VECTOR_WORDS, word);
        }
    }
};

// Row i of a four that turns together, all heads one behind another: two neighbours, and those half a head on.
__device__ inline int row_of(int four, int i) {
    return four / FOURS_OF_HEAD * HEAD_DIM + four % FOURS_OF_HEAD * 2 + i % 2 + i / 2 * (HEAD_DIM / 2);
}

__device__ void copy_heads(const Job& job, const Stages& stages, int lane) {
#pragma unroll 1
    for (int i = 0; i < job.layers; ++i) {
        const Layer layer = job.all[i];
        const uint32_t to = stages.begin_fill(i, NORM_BYTES + 2 * (HIDDEN * HEAD_ROWS + GROUP_WIDTH * WIDE_ROWS), lane);
        const uint32_t full = stages.full + 8 * (i % STAGES);
        if (lane == 0) copy_bulk(to, layer.input_norm, NORM_BYTES, full);
        const int key = job.cluster * HEAD_DIM + row_of(job.rank, lane % 4);
        for (int j = lane; j < HEAD_ROWS; j += WARP) {
            const int query = job.cluster * GROUP_WIDTH + row_of(job.rank * (QUERY_ROWS / 4) + j / 4, j % 4);
            const uint16_t* from = layer.q + query * HIDDEN;
            if (j >= QUERY_ROWS) from = (j < QUERY_ROWS + 4 ? layer.k : layer.v) + key * HIDDEN;
            copy_bulk(to + NORM_BYTES + j * Heads::PITCH, from, 2 * HIDDEN, full);
        }
        for (int j = lane; j < WIDE_ROWS; j += WARP) {
            copy_bulk(to + NORM_BYTES + Heads::BYTES + j * Output::PITCH,
                      layer.output + (job.rank * WIDE_ROWS + j) * Q_WIDTH + job.cluster * GROUP_WIDTH,
                      2 * GROUP_WIDTH, full);
        }
    }
}
__device__ void copy_inner(const Job& job, const Stages& stages, int lane) {
    const int part = job.cluster - KV_HEADS;
#pragma unroll 1
    for (int i = 0; i < job.layers; ++i) {
        const Layer layer = job.all[i];
        const uint32_t to = stages.begin_fill(i, NORM_BYTES + 2 * (HIDDEN * 2 * INNER_ROWS + PART * WIDE_ROWS), lane);
        const uint32_t full = stages.full + 8 * (i % STAGES);
        if (lane == 0) copy_bulk(to, layer.inner_norm, NORM_BYTES, full);
        for (int j = lane; j < 2 * INNER_ROWS; j += WARP) {
            const uint16_t* from = (j < INNER_ROWS ? layer.gate : layer.up) +
                                   (part * PART + job.rank * INNER_ROWS + j % INNER_ROWS) * HIDDEN;
            copy_bulk(to + NORM_BYTES + j * GateUp::PITCH, from, 2 * HIDDEN, full);
        }
        for (int j = lane; j < WIDE_ROWS; j += WARP) {
            copy_bulk(to + NORM_BYTES + GateUp::BYTES + j * Down::PITCH,
                      layer.down + (job.rank * WIDE_ROWS + j) * INNER + part * PART, 2 * PART, full);
        }
    }
}
__device__ inline uint32_t norm_pair(uint32_t stage, int warp, int pair) {
    uint32_t norm;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(norm) : "r"(stage + 4 * (warp * CHUNK_PAIRS + pair)) : "memory");
    return norm;
}

// What is the same in all layers would be computed once, and kept in registers that the layers need.
#define FORGET asm volatile("" : "+r"(lane), "+r"(warp), "+r"(thread));

// A block of a cluster that has a key head.
__device__ void run_heads(const Job& job, const Stages& stages, HeadRoom& room, Attention& attention,
                          Residual& residual, int splits, float scale, int thread, int warp, int lane) {
    const int word = warp * CHUNK_PAIRS + min(lane, CHUNK_PAIRS - 1), copy = blockIdx.x % COPIES;
    const bool attends = job.rank < splits;
#pragma unroll 1
    for (int i = 0; i < job.layers; ++i) {
        const uint32_t flag = job.flag + i + 1;
        FORGET
        uint16_t* const cache = job.all[i].cache;
        uint16_t* const next = job.all[min(i + 1, job.layers - 1)].cache;
        Heads heads;
        const uint32_t stage = stages.begin_read(i);
        const uint32_t norm = norm_pair(stage, warp, min(lane, CHUNK_PAIRS - 1));
        heads.load(stage + NORM_BYTES, warp, lane);
        // Fours of rows that turn together, a lane a row: of queries, and the last two of the key and the value. Of a
        // four's two words each goes to four blocks.
        constexpr int RANKS = CLUSTER / GATHERERS;
        static_assert(HEAD_ROWS <= WARP && RANKS == 4);
        const int row = min(lane, HEAD_ROWS - 1), four = row / 4, query = job.rank * (QUERY_ROWS / 4) + four;
        const int to_rank = warp * RANKS + row % 2 * 2;
        const bool is_query = row < QUERY_ROWS, is_value = row >= QUERY_ROWS + 4;
        uint32_t to = shared_address((is_query ? room.received.query[query / FOURS_OF_HEAD] + query % FOURS_OF_HEAD * 2
                                               : (is_value ? room.received.value : room.received.key) + job.rank * 2) +
                                     row % 4 / 2);
        float2 turn = attention.turn_of(2 * (is_query ? query % FOURS_OF_HEAD : job.rank) + row % 2, row % 4 / 2 == 0,
                                        is_value, is_query ? scale : 1.0f);
        int sends = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (lane < HEAD_ROWS && (is_query ? to_rank + j < splits : to_rank + j == splits - 1)) sends |= 1 << j;
        }
        asm volatile("" : "+r"(to), "+f"(turn.x), "+f"(turn.y), "+r"(sends));  // while it waits
        if (i > 0) {
            residual.add<KV_HEADS>(job.sums(flag - 1, copy, 0) + word, flag - 1);
            residual.add<INNER_CLUSTERS>(job.sums(flag - 1, copy, KV_HEADS) + word, flag - 1);
        }
        uint32_t b[Heads::STEPS][2];
        const float square = residual.fragments(room.common, norm, b, warp, lane);
        heads.multiply(b, room.heads, warp, lane);
        if (lane == 0) room.heads[HEAD_ROWS][warp] = square;
        if (gathers(warp, 2)) {
            const float by = inverse_rms(room.heads[HEAD_ROWS], job.eps), sum = sum_of(room.heads[row]) * by;
            const float turned = fmaf(sum, turn.x, __shfl_xor_sync(~0u, sum, 2) * turn.y);
            const float other = __shfl_xor_sync(~0u, turned, 1);
            const uint32_t word = row % 2 ? pack(other, turned) : pack(turned, other);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (sends & 1 << j) attention.queries.send(to_rank + j, to, word);
            }
        }
        FORGET
        if (attends) attention.attend(i, cache, thread, warp, lane);
        FORGET
        Output output;
        output.load(stage + NORM_BYTES + Heads::BYTES, warp, lane);
        stages.end_read(i, lane);
        uint32_t joined[1][2];
        attention.join(i, splits, joined, thread, warp, lane);
        output.multiply(joined, room.output, warp, lane);
        if (gathers(warp, 3)) job.send_rows(room.output, flag, warp, lane);
        FORGET
        if (attends) {
            wait_copies<0>();
            if (i + 1 < job.layers) attention.fetch_first(next, warp, lane);
        }
    }
}

// A block of a cluster that has a part of the inner width.
__device__ void run_inner(const Job& job, const Stages& stages, InnerRoom& room, const Mail& mail,
                          Residual& residual, int thread, int warp, int lane) {
    const int word = warp * CHUNK_PAIRS + min(lane, CHUNK_PAIRS - 1), copy = blockIdx.x % COPIES;
#pragma unroll 1
    for (int i = 0; i < job.layers; ++i) {
        const uint32_t flag = job.flag + i + 1;
        FORGET
        GateUp gate_up;
        Down down;
        const uint32_t stage = stages.begin_read(i);
        const uint32_t norm = norm_pair(stage, warp, min(lane, CHUNK_PAIRS - 1));
        gate_up.load(stage + NORM_BYTES, warp, lane);
        down.load(stage + NORM_BYTES + GateUp::BYTES, warp, lane);
        stages.end_read(i, lane);
        // A gatherer has a few rows, a lane each, several times over: each lane tells other blocks.
        constexpr int ROWS = INNER_ROWS / GATHERERS, AT_ONCE = 4;
        static_assert(ROWS % 2 == 0 && AT_ONCE * ROWS <= WARP && CLUSTER % (2 * AT_ONCE) == 0);
        const int row = warp % GATHERERS * ROWS + lane % ROWS, to_rank = lane / ROWS * 2 + row % 2;
        uint32_t to = shared_address(room.received + place_of(job.rank * (INNER_ROWS / 2) + row / 2));
        asm volatile("" : "+r"(to));  // while it waits
        if (i > 0) residual.add<INNER_CLUSTERS>(job.sums(flag - 1, copy, KV_HEADS) + word, flag - 1);
        residual.add<KV_HEADS>(job.sums(flag, copy, 0) + word, flag);
        uint32_t b[GateUp::STEPS][2];
        const float square = residual.fragments(room.common, norm, b, warp, lane);
        gate_up.multiply(b, room.inner, warp, lane);
        if (lane == 0) room.inner[2 * INNER_ROWS][warp] = square;
        if (gathers(warp, 2)) {
            const float by = inverse_rms(room.inner[2 * INNER_ROWS], job.eps);
            const float gate = sum_of(room.inner[row]) * by, up = sum_of(room.inner[INNER_ROWS + row]) * by;
            const float value = __fdividef(gate, 1.0f + __expf(-gate)) * up, other = __shfl_xor_sync(~0u, value, 1);
            const uint32_t word = row % 2 ? pack(other, value) : pack(value, other);
            if (lane < AT_ONCE * ROWS) {
#pragma unroll
                for (int j = 0; j < CLUSTER; j += 2 * AT_ONCE) mail.send(j + to_rank, to, word);
            }
        }
        uint32_t inner[Down::STEPS][2];
        mail.wait(i);
        if (thread == 0) mail.expect(2 * PART);
#pragma unroll
        for (int s = 0; s < Down::STEPS; ++s) {
            const int at = warp * (Down::CHUNK / 2) + 8 * s + lane % 4 * 2;
            const uint2 two = *reinterpret_cast<const uint2*>(room.received + at);
            inner[s][0] = two.x, inner[s][1] = two.y;
        }
        down.multiply(inner, room.down, warp, lane);
        if (gathers(warp, 3)) job.send_rows(room.down, flag, warp, lane);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
decoder_layers(const int32_t* counts, const void* table, const float* x, float* y, const float* inv_freq,
               const int32_t* row_slot, const int32_t* slots, uint64_t* words, int32_t layers, int32_t page_tokens,
               int32_t slot_stride, int32_t table_offset, float eps, float scale, float rope_scale) {
    extern __shared__ __align__(128) unsigned char raw[];
    __shared__ uint64_t barriers[2 * STAGES + 2];
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    Job job{static_cast<const Layer*>(table), words, layers, static_cast<int>(blockIdx.x / CLUSTER),
            static_cast<int>(cluster_rank()), 0, eps};
    const bool has_head = job.cluster < KV_HEADS;
    const Stages stages{shared_address(raw), static_cast<uint32_t>(has_head ? HEAD_BYTES : INNER_BYTES),
                        shared_address(barriers), shared_address(barriers + STAGES)};
    HeadRoom& heads = *reinterpret_cast<HeadRoom*>(raw + STAGES * HEAD_BYTES);
    InnerRoom& inner = *reinterpret_cast<InnerRoom*>(raw + STAGES * INNER_BYTES);
    // Queries and parts of attention, or the inner width.
    const Mail first_mail{shared_address(barriers + 2 * STAGES)};
    const Mail second_mail{shared_address(barriers + 2 * STAGES + 1)};
    if (thread == 0) {
        first_mail.begin();
        second_mail.begin();
        stages.begin();
    }
    __syncthreads();
    cluster_arrive();
    admit_successor();
    if (warp == WARPS) {
        if (has_head) copy_heads(job, stages, lane);
        else copy_inner(job, stages, lane);
        cluster_wait();
    } else {
        wait_for_predecessor();
        job.flag = *reinterpret_cast<const volatile uint32_t*>(words);
        const float2 first = reinterpret_cast<const float2*>(x)[warp * CHUNK_PAIRS + min(lane, CHUNK_PAIRS - 1)];
        Residual residual{first.x, first.y};
        if (has_head) {
            const int32_t* slot = slots + static_cast<int64_t>(row_slot[0]) * slot_stride;
            const int known = slot[ATLAS_POSITION], tiles = known / TOKENS + 1;
            const int each = (tiles + CLUSTER - 1) / CLUSTER * TOKENS, begin = job.rank * each;
            Attention attention{heads.attention, heads.received, first_mail, second_mail, slot + table_offset,
                                page_tokens, job.cluster, known, begin, min(known + 1, begin + each),
                                counts[ATLAS_TOKENS] > 0};
            const int splits = known / each + 1;
            if (thread == 0) {
                first_mail.expect(attention.query_bytes());
                second_mail.expect(splits * sizeof(Part));
            }
            attention.prepare(inv_freq, rope_scale, thread);
            if (job.rank < splits) attention.start(job.all[0].cache, warp, lane);
            sync_consumers();
            cluster_wait();
            run_heads(job, stages, heads, attention, residual, splits, scale * LOG2E, thread, warp, lane);
            if (blockIdx.x == 0) {
                const int word = warp * CHUNK_PAIRS + min(lane, CHUNK_PAIRS - 1);
                residual.add<KV_HEADS>(job.sums(job.flag + layers, 0, 0) + word, job.flag + layers);
                residual.add<INNER_CLUSTERS>(job.sums(job.flag + layers, 0, KV_HEADS) + word, job.flag + layers);
                if (lane < CHUNK_PAIRS) reinterpret_cast<float2*>(y)[word] = make_float2(residual.x, residual.y);
                if (thread == 0) *reinterpret_cast<volatile uint32_t*>(words) = job.flag + layers;
            }
        } else {
            if (thread == 0) first_mail.expect(2 * PART);
            cluster_wait();
            run_inner(job, stages, inner, first_mail, residual, thread, warp, lane);
        }
    }
    __syncwarp();
    cluster_arrive();  // nobody's shared memory goes while others write to it
    cluster_wait();
}
