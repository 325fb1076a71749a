// All layers of a dense decoder for one token in one launch: a block a processor, all of them resident at once. A layer
// is five phases, each of which hands its results on as words with flags (resident_words.cuh):
//
//   hidden vector -> norm, rows of q, k, v -> rotation, keys and values into pages, attention over a part of the keys
//   -> the parts together, rows of the output projection, residual -> norm, rows of gate and up, SwiGLU
//   -> rows of down, residual: the next hidden vector.
//
// Every block owns the same share of the rows of each matrix in all layers, and keeps its rows of the residual stream.
#ifndef HIDDEN
#define HIDDEN 576
#define INNER 1536
#define Q_HEADS 9
#define KV_HEADS 3
#define HEAD_DIM 64
#define DECODER_WARPS 12
#define STAGE_BYTES 10512
#endif
#ifndef COPIES
#define COPIES 4
#endif
#include "resident_attention.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = CONSUMERS + WARP;
constexpr int BLOCKS = 132;  // for which a block's rows are one round of products; fewer blocks take several
constexpr int QKV_ROWS = Q_WIDTH + 2 * KV_WIDTH, AT_ONCE = 4;
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int WIDEST = most(most(HIDDEN, INNER), Q_WIDTH) / WARPS;
constexpr int tiles_of(int units, int rows) { return ((units + BLOCKS - 1) / BLOCKS * rows + 7) / 8; }

using Qkv = Share<HIDDEN, tiles_of(QKV_ROWS, 1), true>;
using Output = Share<Q_WIDTH, tiles_of(HIDDEN / 2, 2), false>;
using GateUp = Share<HIDDEN, tiles_of(INNER / 2, 4), true>;
using Down = Share<INNER, tiles_of(HIDDEN / 2, 2), false>;

// chains.py makes the table and knows how many words there are.
struct Layer {
    const uint16_t *input_norm, *q, *k, *v, *output, *inner_norm, *gate, *up, *down;
    uint16_t* cache;
};

// Words: the flag of the last layer; queries, keys and values; then copies of what all blocks read, so that not all of
// them ask the same part of the L2 cache.
constexpr int AT_QKV = 16, AT_COPIES = AT_QKV + QKV_ROWS;
constexpr int AT_HIDDEN = 0, AT_MIDDLE = AT_HIDDEN + HIDDEN / 2, AT_INNER = AT_MIDDLE + HIDDEN / 2;
constexpr int AT_TOPS = AT_INNER + INNER / 2, AT_PARTS = AT_TOPS + MAX_SPLITS * Q_HEADS * 2;
constexpr int COPY_WORDS = AT_PARTS + MAX_SPLITS * Q_HEADS * PAIRS;

struct Shared {
    AttentionRoom attention;
    // A warp's chunk of what is multiplied, as fragments; parts of sums.
    uint32_t vector[WARPS][WIDEST / 2], plain[WARPS][Qkv::CHUNK / 2];
    float qkv[Qkv::ROWS + 1][WARPS], output[Output::ROWS][WARPS], inner[GateUp::ROWS + 1][WARPS];
    float down[Down::ROWS][WARPS];
    float residual[HIDDEN];  // of the block's rows
};
constexpr int STAGES = (226 * 1024 - static_cast<int>(sizeof(Shared))) / STAGE_BYTES;

// The block's rows: of q, k, v one behind the other, of matrices [HIDDEN, .], of gate and of up.
struct Owned {
    Span qkv, wide, inner;
};
__device__ inline Owned owned() {
    const Span wide = span(HIDDEN / 2), inner = span(INNER / 2);
    return {span(QKV_ROWS), {2 * wide.first, 2 * wide.count}, {2 * inner.first, 2 * inner.count}};
}

// The warp that copies. Its order is that in which the others load.
__device__ void copy_rows(Ring<STAGES>& ring, const Layer* all, int layers, const Owned& own, int lane) {
#pragma unroll 1
    for (int i = 0; i < layers; ++i) {
        const Layer layer = all[i];
        for (int done = 0; done < own.qkv.count; done += Qkv::ROWS) {
            ring.fill<HIDDEN>(1 + min(Qkv::ROWS, own.qkv.count - done), lane, [&](int j) {
                if (j == 0) return layer.input_norm;
                const int row = own.qkv.first + done + j - 1;
                if (row < Q_WIDTH) return layer.q + static_cast<int64_t>(row) * HIDDEN;
                if (row < Q_WIDTH + KV_WIDTH) return layer.k + static_cast<int64_t>(row - Q_WIDTH) * HIDDEN;
                return layer.v + static_cast<int64_t>(row - Q_WIDTH - KV_WIDTH) * HIDDEN;
            });
        }
        for (int done = 0; done < own.wide.count; done += Output::ROWS) {
            ring.fill<Q_WIDTH>(min(Output::ROWS, own.wide.count - done), lane, [&](int j) {
                return layer.output + static_cast<int64_t>(own.wide.first + done + j) * Q_WIDTH;
            });
        }
        for (int done = 0; done < own.inner.count; done += GateUp::ROWS / 2) {
            const int count = min(GateUp::ROWS / 2, own.inner.count - done);
            ring.fill<HIDDEN>(1 + 2 * count, lane, [&](int j) {
                if (j == 0) return layer.inner_norm;
                const bool up = j > count;
                return (up ? layer.up : layer.gate) +
                       static_cast<int64_t>(own.inner.first + done + j - 1 - (up ? count : 0)) * HIDDEN;
            });
        }
        for (int done = 0; done < own.wide.count; done += Down::ROWS) {
            ring.fill<INNER>(min(Down::ROWS, own.wide.count - done), lane, [&](int j) {
                return layer.down + static_cast<int64_t>(own.wide.first + done + j) * INNER;
            });
        }
    }
}

// By every lane that has a row: the row's new sum of the residual stream, told to all blocks by pairs.
__device__ inline void add_row(Shared& shared, float sum, int row, int first, uint64_t* copies, uint32_t flag) {
    const float value = shared.residual[row] + sum;
    shared.residual[row] = value;
    const uint64_t word = two_numbers(value, __shfl_down_sync(__activemask(), value, 1), flag);
    uint64_t* to = copies + (first + row) / 2;
#pragma unroll
    for (int c = 0; c < COPIES; ++c) {
        if (row % 2 == 0) store_word(to + c * COPY_WORDS, word);
    }
}

// Parts of attention put together: a warp's chunk of the vector.
__device__ inline void join_parts(const uint64_t* words, uint32_t flag, int splits, uint32_t* vector, int warp,
                                  int lane) {
#pragma unroll
    for (int j = 0; j < Output::EACH; ++j) {
        const int pair = warp * (Output::CHUNK / 2) + Output::pair(j, lane);
        const uint64_t *parts = words + AT_PARTS + pair, *tops = words + AT_TOPS + 2 * (pair / PAIRS);
        vector[fragment_place(Output::pair(j, lane))] =
            join<Q_WIDTH / 2, 2 * Q_HEADS, AT_ONCE>(parts, tops, flag, splits);
    }
}

// What is the same in all layers would be computed once, and kept in registers that the layers need.
#define FORGET \
    asm volatile("" : "+r"(lane), "+r"(warp), "+r"(thread), "+l"(own_words), "+l"(copies), "+r"(ring.stages));

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
decoder_layers(const int32_t* counts, const void* table, const float* x, float* y, const float* inv_freq,
               const int32_t* row_slot, const int32_t* slots, uint64_t* words, int32_t layers, int32_t page_tokens,
               int32_t slot_stride, int32_t table_offset, float eps, float scale, float rope_scale) {
    extern __shared__ __align__(128) unsigned char raw[];
    __shared__ uint64_t barriers[2 * STAGES];
    Shared& shared = *reinterpret_cast<Shared*>(raw + STAGES * STAGE_BYTES);
    const Layer* const all = static_cast<const Layer*>(table);
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    Ring<STAGES> ring{shared_address(raw), shared_address(barriers), shared_address(barriers + STAGES)};
    if (thread == 0) ring.begin();
    __syncthreads();
    const Owned own = owned();
    if (warp == WARPS) {
        copy_rows(ring, all, layers, own, lane);
        return;
    }

    wait_for_predecessor();
    uint32_t flag = *reinterpret_cast<const volatile uint32_t*>(words);
    const bool live = counts[ATLAS_TOKENS] > 0;  // else nothing is written that anybody reads
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[0]) * slot_stride;
    const int known = slot[ATLAS_POSITION], splits = splits_of(known), split = blockIdx.x / KV_HEADS;
    const bool attends = split < splits;
    const int each = ((known + splits - 1) / splits + TOKENS - 1) / TOKENS * TOKENS, begin = min(known, split * each);
    const Attention attention{shared.attention, slot + table_offset, page_tokens,
                              static_cast<int>(blockIdx.x % KV_HEADS), known, begin, min(known, begin + each),
                              live && split == splits - 1};
    uint64_t* const qkv_words = words + AT_QKV;
    uint64_t* copies = words + AT_COPIES;
    const uint64_t* own_words = copies + static_cast<int64_t>(blockIdx.x % COPIES) * COPY_WORDS;
    if (attends) attention.start(all[0].cache, inv_freq, rope_scale, thread);
    if (warp == 0) {
        for (int row = lane; row < own.wide.count; row += WARP) shared.residual[row] = x[own.wide.first + row];
    }

#pragma unroll 1
    for (int i = 0; i < layers; ++i) {
        ++flag;
        uint32_t *const vector = shared.vector[warp], *const plain = shared.plain[warp];
        FORGET
#pragma unroll 1
        for (int done = 0; done < own.qkv.count; done += Qkv::ROWS) {
            if (done > 0) sync_consumers();
            const int rows = min(Qkv::ROWS, own.qkv.count - done);
            Qkv share;
            share.load(ring, rows, warp, lane);
            if (i == 0) share.read(x, vector, plain, warp, lane);
            else share.receive(own_words + AT_HIDDEN, flag - 1, vector, plain, warp, lane);
            share.multiply(vector, plain, shared.qkv, rows, warp, lane);
            if (gathered(warp, 2)) {
                const float by = rsqrtf(sum_of(shared.qkv[Qkv::ROWS]) * (1.0f / HIDDEN) + eps);
#pragma unroll 1
                for (int r = lane; r < rows; r += WARP) {
                    send(qkv_words + own.qkv.first + done + r, __float_as_uint(sum_of(shared.qkv[r]) * by), flag);
                }
            }
        }
        FORGET
        if (attends) {
            uint16_t* const cache = all[i].cache;
            attention.receive(qkv_words, flag, cache, scale * LOG2E, warp, lane);
            sync_consumers();
            attention.attend(cache, thread, warp, lane, [&](int h, int pair, uint32_t bits, float top, float total) {
                const int head = split * Q_HEADS + attention.kv_head * GROUP + h;
#pragma unroll
                for (int c = 0; c < COPIES; ++c) {
                    uint64_t* copy = copies + c * COPY_WORDS;
                    send(copy + AT_PARTS + head * PAIRS + pair, bits, flag);
                    if (pair < 2) {
                        send(copy + AT_TOPS + 2 * head + pair, __float_as_uint(pair == 0 ? top : total), flag);
                    }
                }
            });
            wait_copies<0>();
            if (i + 1 < layers) attention.fetch_first(all[i + 1].cache, warp, lane);
        }
        FORGET
#pragma unroll 1
        for (int done = 0; done < own.wide.count; done += Output::ROWS) {
            if (done > 0) sync_consumers();
            const int rows = min(Output::ROWS, own.wide.count - done);
            Output share;
            share.load(ring, rows, warp, lane);
            join_parts(own_words, flag, splits, vector, warp, lane);
            share.multiply(vector, plain, shared.output, rows, warp, lane);
            if (gathered(warp, 3) && lane < rows) {
                add_row(shared, sum_of(shared.output[lane]), done + lane, own.wide.first, copies + AT_MIDDLE, flag);
            }
        }
        FORGET
#pragma unroll 1
        for (int done = 0; done < own.inner.count; done += GateUp::ROWS / 2) {
            if (done > 0) sync_consumers();
            const int rows = min(GateUp::ROWS / 2, own.inner.count - done);
            GateUp share;
            share.load(ring, 2 * rows, warp, lane);
            share.receive(own_words + AT_MIDDLE, flag, vector, plain, warp, lane);
            share.multiply(vector, plain, shared.inner, 2 * rows, warp, lane);
            if (gathered(warp, 4) && lane < rows) {
                const float by = rsqrtf(sum_of(shared.inner[GateUp::ROWS]) * (1.0f / HIDDEN) + eps);
                const float gate = sum_of(shared.inner[lane]) * by, up = sum_of(shared.inner[rows + lane]) * by;
                const float value = __fdividef(gate, 1.0f + __expf(-gate)) * up;
                const uint32_t bits = pack(value, __shfl_down_sync(__activemask(), value, 1));
                uint64_t* to = copies + AT_INNER + (own.inner.first + done + lane) / 2;
#pragma unroll
                for (int c = 0; c < COPIES; ++c) {
                    if (lane % 2 == 0) send(to + c * COPY_WORDS, bits, flag);
                }
            }
        }
        FORGET
#pragma unroll 1
        for (int done = 0; done < own.wide.count; done += Down::ROWS) {
            if (done > 0) sync_consumers();
            const int rows = min(Down::ROWS, own.wide.count - done);
            Down share;
            share.load(ring, rows, warp, lane);
            share.receive_pairs(own_words + AT_INNER, flag, vector, warp, lane);
            share.multiply(vector, plain, shared.down, rows, warp, lane);
            if (gathered(warp, 5) && lane < rows) {
                add_row(shared, sum_of(shared.down[lane]), done + lane, own.wide.first, copies + AT_HIDDEN, flag);
            }
        }
    }
    if (warp == 0) {
        __syncwarp();
        for (int row = lane; row < own.wide.count; row += WARP) y[own.wide.first + row] = shared.residual[row];
    }
    if (blockIdx.x == 0 && thread == 0) *reinterpret_cast<volatile uint32_t*>(words) = flag;
}
