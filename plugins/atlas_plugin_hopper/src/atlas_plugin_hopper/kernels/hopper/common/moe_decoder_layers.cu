// All layers of a decoder with mixtures of experts for one token in one launch: a block a processor, all of them resident
// at once. Two warps copy weights: one what every token needs, in its order and as far ahead as there is room, the other
// the experts that have been chosen. Eight multiply. A layer is eight phases, each of which hands its results on as words
// with flags (resident_words.cuh):
//
//   hidden vector -> norm, rows of q, k, v -> norms of heads, rotation, key and value into their page, attention over a
//   part of the keys -> the parts together -> rows of the output projection, residual -> norm, a row of the router ->
//   the choice -> rows of gate and up of the experts, SwiGLU -> rows of down, residual: the next hidden vector.
//
// Who waits for words has loaded what it will multiply: into registers, so that the rings have room for what comes next.
#ifndef HIDDEN
#define HIDDEN 2048
#define INNER 768
#define EXPERTS 128
#define CHOSEN 8
#define Q_HEADS 32
#define KV_HEADS 4
#define HEAD_DIM 128
#endif
#ifndef COPIES
#define COPIES 4
#endif
#include "weight_ring.cuh"

namespace atlas {
constexpr int WARPS = 8, CONSUMERS = WARPS * WARP;
__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
}  // namespace atlas

#include "moe_layer_weights.cuh"

using namespace atlas;

namespace {

// Whether this is warp 0, which waits for what the others have written to shared memory; they go on.
__device__ inline bool gathered(int warp, int which) {
    __syncwarp();
    if (warp == 0) asm volatile("bar.sync %0, %1;" ::"r"(which), "n"(CONSUMERS) : "memory");
    else asm volatile("bar.arrive %0, %1;" ::"r"(which), "n"(CONSUMERS) : "memory");
    return warp == 0;
}
__device__ inline float sum_of(const float (&sums)[WARPS][SUM_ROWS], int row) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w][row];
    return sum;
}

// A warp's part of the sums of eight rows.
__device__ inline void keep(float (&sums)[SUM_ROWS], int first, const float (&acc)[4], int lane) {
    if (lane < 4) *reinterpret_cast<float2*>(&sums[first + 2 * lane]) = make_float2(acc[0], acc[1]);
}
// CHAINS: sums of a tile that do not wait for each other.
template <int CHAINS = 2, int TILES, int STEPS>
__device__ inline void multiply(const Tile<STEPS> (&tiles)[TILES], float (&acc)[TILES][4], const uint32_t* vector,
                                int lane) {
    float other[TILES][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint2 x = *reinterpret_cast<const uint2*>(vector + 8 * s + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            mma(s % CHAINS ? other[n] : acc[n], x.x, 0, x.y, 0, tiles[n].b[s][0], tiles[n].b[s][1]);
        }
    }
#pragma unroll
    for (int n = 0; CHAINS > 1 && n < TILES; ++n) acc[n][0] += other[n][0], acc[n][1] += other[n][1];
}

// By every lane that has a row: the row's new sum of the residual stream, told to all blocks by pairs.
__device__ inline void tell(float value, int row, int first, uint64_t* copies, uint32_t flag) {
    const uint64_t word = two_numbers(value, __shfl_down_sync(__activemask(), value, 1), flag);
    uint64_t* to = copies + (first + row) / 2;
#pragma unroll
    for (int c = 0; c < COPIES; ++c) {
        if (row % 2 == 0) store_word(to + c * COPY_WORDS, word);
    }
}

// What is the same in all layers would be computed once, and kept in registers that the layers need.
#define FORGET \
    asm volatile("" : "+r"(lane), "+r"(warp), "+r"(thread)::"memory");

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_decoder_layers(const int32_t* counts, const void* table, const float* x, float* y, const float* inv_freq,
                   const int32_t* row_slot, const int32_t* slots, uint64_t* words, int32_t layers, int32_t page_tokens,
                   int32_t slot_stride, int32_t table_offset, float eps, float head_eps, float scale, float rope_scale,
                   int32_t normalise, float route_scale) {
    extern __shared__ __align__(128) unsigned char raw[];
    __shared__ uint64_t barriers[2 * STATIC_STAGES + 2 * EXPERT_STAGES + 1];
    unsigned char* const expert_stages = raw + StaticRing::SIZE;
    Shared& shared = *reinterpret_cast<Shared*>(raw + (StaticRing::SIZE + ExpertRing::SIZE + 127) / 128 * 128);
    const Layer* const all = static_cast<const Layer*>(table);
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    StaticRing fixed{shared_address(raw), shared_address(barriers), shared_address(barriers + STATIC_STAGES)};
    ExpertRing chosen{shared_address(expert_stages), shared_address(barriers + 2 * STATIC_STAGES),
                      shared_address(barriers + 2 * STATIC_STAGES + EXPERT_STAGES)};
    const uint32_t attended = shared_address(barriers + 2 * STATIC_STAGES + 2 * EXPERT_STAGES);
    if (thread == 0) {
        shared.own = owned();
        barrier_init(attended, WARPS);
        fixed.begin();
        chosen.begin();
    }
    __syncthreads();
    uint64_t* const qkv_words = words + AT_QKV;
    uint64_t* copies = words + AT_COPIES;
    const uint64_t* own_words = copies + static_cast<int64_t>(blockIdx.x % COPIES) * COPY_WORDS;
    if (warp >= WARPS) {
        if (warp == FOR_ALL) copy_for_all(fixed, all, layers, owned(), lane);
        if (warp == FOR_EXPERTS) copy_experts(chosen, all, layers, owned(), attended, own_words, words, lane);
        return;
    }
    wait_for_predecessor();
    uint32_t flag = *reinterpret_cast<const volatile uint32_t*>(words);
    const bool live = counts[ATLAS_TOKENS] > 0;  // else nothing is written that anybody reads
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[0]) * slot_stride;
    if (thread == 0) {
        shared.attention.pages = slot + table_offset;
        shared.own_copy = static_cast<int>(own_words - words);
    }
    const Attention attention{shared.attention, expert_stages, page_tokens};
    if (thread < PAIRS) {
        float2& turn = shared.attention.turn[thread];
        rotation(slot[ATLAS_POSITION], inv_freq[thread], rope_scale, turn.x, turn.y);
    }
    attention.prepare(slot[ATLAS_POSITION], live, thread);
    if (attention.takes_part()) attention.fetch_first(all[0].cache, warp, lane);
    if (warp == 0 && lane < shared.own.wide.count) shared.residual[lane] = x[shared.own.wide.first + lane];

#pragma unroll 1
    for (int i = 0; i < layers; ++i) {
        ++flag;
        uint32_t *const vector = shared.vector[warp], *const plain = vector + HIDDEN_CHUNK / 2;
        float(&sums)[SUM_ROWS] = shared.sums[warp];
        FORGET
        {
            uint32_t norm[EACH];
            const uint32_t norm_row = fixed.row<HIDDEN>(0) + 2 * (warp * HIDDEN_CHUNK + 4 * lane);
#pragma unroll
            for (int j = 0; j < EACH; j += 2) {
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(norm[j]), "=r"(norm[j + 1]) : "r"(norm_row + 4 * WARP * j) : "memory");
            }
            fixed.release(1, lane);
            Tile<HIDDEN_CHUNK / 16> ahead[QKV_AHEAD];
            auto load = [&] {
#pragma unroll
                for (int n = 0; n < QKV_AHEAD; ++n) {
                    ahead[n].load(fixed.row<HIDDEN>(lane % 8) + 2 * warp * HIDDEN_CHUNK, lane);
                    fixed.release(4, lane);
                }
            };
            auto take = [&](int j, float first, float second) {
                const int at = fragment_place(j / 2 * 2 * WARP + 2 * lane + j % 2);
                plain[at] = pack(first, second);
                vector[at] = pack(first * widen(static_cast<uint16_t>(norm[j])),
                                  second * widen(static_cast<uint16_t>(norm[j] >> 16)));
            };
            const int chunk = warp * (HIDDEN_CHUNK / 2) + 2 * lane;
            if (i == 0) {
                load();
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    const float* from = x + 2 * (chunk + j / 2 * 2 * WARP + j % 2);
                    take(j, from[0], from[1]);
                }
            } else {
                receive<true, EACH>(
                    flag - 1, [&](int j) { return words + shared.own_copy + AT_HIDDEN + chunk + j * 2 * WARP; }, load,
                    [&](int j, uint64_t word) { take(j, first_number(word), second_number(word)); });
            }
            __syncwarp();
            float acc[QKV_AHEAD][4] = {}, square[4] = {};
            multiply(ahead, acc, vector, lane);
#pragma unroll
            for (int n = 0; n < QKV_AHEAD; ++n) keep(sums, 8 * n, acc[n], lane);
#pragma unroll
            for (int s = 0; s < HIDDEN_CHUNK / 16; ++s) {
                const uint2 pair = *reinterpret_cast<const uint2*>(plain + 8 * s + lane % 4 * 2);
                mma(square, pair.x, 0, pair.y, 0, pair.x, pair.y);
            }
            if (lane == 0) shared.squares[warp] = square[0];
#pragma unroll 1
            for (int n = QKV_AHEAD; 8 * n < shared.own.qkv.count; ++n) {
                const int rows = min(8, shared.own.qkv.count - 8 * n);
                Tile<HIDDEN_CHUNK / 16> tile[1];
                tile[0].load(fixed.row<HIDDEN>(min(lane % 8, rows - 1)) + 2 * warp * HIDDEN_CHUNK, lane);
                fixed.release((rows + 1) / 2, lane);
                float one[1][4] = {};
                multiply(tile, one, vector, lane);
                keep(sums, 8 * n, one[0], lane);
            }
            if (gathered(warp, 2)) {
                float all_squares = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) all_squares += shared.squares[w];
                const float by = rsqrtf(all_squares * (1.0f / HIDDEN) + eps);
#pragma unroll 1
                for (int r = lane; r < shared.own.qkv.count; r += WARP) {
                    send(qkv_words + shared.own.qkv.first + r, __float_as_uint(sum_of(shared.sums, r) * by), flag);
                }
            }
        }
        FORGET
        if (attention.takes_part()) {
            uint16_t* const cache = all[i].cache;
            const HeadNorms norms{all[i].q_norm, all[i].k_norm, head_eps};
            attention.receive(qkv_words, flag, norms, cache, scale * LOG2E, warp, lane);
            sync_consumers();
            attention.attend(cache, thread, warp, lane, [&](int e, uint32_t bits, float top, float total) {
                const int group = blockIdx.x;  // split by split
                send(words + AT_PARTS + group * GROUP_PAIRS + e, bits, flag);
                if (e % PAIRS < 2) {
                    send(words + AT_TOPS + 2 * (group * GROUP + e / PAIRS) + e % PAIRS,
                         __float_as_uint(e % PAIRS == 0 ? top : total), flag);
                }
            });
            publish_shared();  // the copies of experts come behind what was written here
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(attended);
        FORGET
        {
            constexpr int STEPS = HEADS_CHUNK / 16;
            Tile<STEPS> ahead[WIDE_TILES];
            uint32_t row = fixed.row<Q_WIDTH>(lane % 8) + 2 * warp * HEADS_CHUNK;
            reinterpret_cast<Tile<STEPS / 2>&>(ahead[0].b[0]).load(row, lane);  // while parts are on their way
            if (attention.takes_part()) {
                const int splits = shared.attention.splits, split = Attention::split();
                const int until = GROUP_PAIRS * (split + 1) / splits;
#pragma unroll 1
                for (int e = GROUP_PAIRS * split / splits + thread; e < until; e += CONSUMERS) {
                    const int pair = Attention::kv_head() * GROUP_PAIRS + e;
                    const uint32_t bits = join<Q_HEADS * PAIRS, 2 * Q_HEADS, AT_ONCE>(
                        words + AT_PARTS + pair, words + AT_TOPS + 2 * (pair / PAIRS), flag, splits);
#pragma unroll
                    for (int c = 0; c < COPIES; ++c) send(copies + c * COPY_WORDS + AT_ATTENDED + pair, bits, flag);
                }
            }
            reinterpret_cast<Tile<STEPS / 2>&>(ahead[0].b[STEPS / 2]).load(row + HEADS_CHUNK, lane);
            fixed.release(8, lane);
            const int rows = shared.own.wide.count - 8;
            ahead[1].load(fixed.row<Q_WIDTH>(min(lane % 8, rows - 1)) + 2 * warp * HEADS_CHUNK, lane);
#pragma unroll
            for (int k = 0; k < STASHED; ++k) {  // there are that many registers too few
                const uint32_t(&one)[2] = ahead[1].b[STEPS - 2 - 2 * k], (&two)[2] = ahead[1].b[STEPS - 1 - 2 * k];
                shared.stash[k][thread] = make_uint4(one[0], one[1], two[0], two[1]);
            }
            fixed.release(rows, lane);
            receive<false, HEADS_CHUNK / 2 / WARP>(
                flag,
                [&](int j) {
                    return words + shared.own_copy + AT_ATTENDED + warp * (HEADS_CHUNK / 2) + 2 * lane + j * 2 * WARP;
                },
                [] {},
                [&](int j, uint64_t word) {
                    vector[fragment_place(j / 2 * 2 * WARP + 2 * lane + j % 2)] = static_cast<uint32_t>(word);
                });
            __syncwarp();
#pragma unroll
            for (int k = 0; k < STASHED; ++k) {
                const uint4 four = shared.stash[k][thread];
                uint32_t(&one)[2] = ahead[1].b[STEPS - 2 - 2 * k], (&two)[2] = ahead[1].b[STEPS - 1 - 2 * k];
                one[0] = four.x, one[1] = four.y, two[0] = four.z, two[1] = four.w;
            }
            float acc[WIDE_TILES][4] = {};
            multiply(ahead, acc, vector, lane);
#pragma unroll
            for (int n = 0; n < WIDE_TILES; ++n) keep(sums, 8 * n, acc[n], lane);
            if (gathered(warp, 3) && lane < shared.own.wide.count) {
                const float residual = shared.residual[lane] += sum_of(shared.sums, lane);
                tell(residual, lane, shared.own.wide.first, copies + AT_MIDDLE, flag);
            }
        }
        FORGET
        float by = 0.0f;  // of warp 0: the factor of the norm
        {
            uint32_t norm[EACH], router[EACH];
            const uint32_t at = 2 * (warp * HIDDEN_CHUNK + 4 * lane);
            float logit = 0.0f, squares = 0.0f;
            receive<true, EACH>(
                flag,
                [&](int j) {
                    return words + shared.own_copy + AT_MIDDLE + warp * (HIDDEN_CHUNK / 2) + 2 * lane + j * 2 * WARP;
                },
                [&] {
                    const uint32_t norm_row = fixed.row<HIDDEN>(0) + at, router_row = fixed.row<HIDDEN>(1) + at;
#pragma unroll
                    for (int j = 0; j < EACH; j += 2) {
                        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                                     : "=r"(norm[j]), "=r"(norm[j + 1]) : "r"(norm_row + 4 * WARP * j) : "memory");
                        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                                     : "=r"(router[j]), "=r"(router[j + 1]) : "r"(router_row + 4 * WARP * j) : "memory");
                    }
                    fixed.release(1, lane);
                },
                [&](int j, uint64_t word) {
                    float first = first_number(word), second = second_number(word);
                    squares = fmaf(first, first, fmaf(second, second, squares));
                    first *= widen(static_cast<uint16_t>(norm[j]));
                    second *= widen(static_cast<uint16_t>(norm[j] >> 16));
                    logit = fmaf(first, widen(static_cast<uint16_t>(router[j])), logit);
                    logit = fmaf(second, widen(static_cast<uint16_t>(router[j] >> 16)), logit);
                    vector[fragment_place(j / 2 * 2 * WARP + 2 * lane + j % 2)] = pack(first, second);
                });
            logit = warp_sum(logit);
            squares = warp_sum(squares);
            if (lane == 0) shared.middle[warp] = make_float2(logit, squares);
            if (gathered(warp, 4)) {
                logit = squares = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float2 part = shared.middle[w];
                    logit += part.x;
                    squares += part.y;
                }
                by = rsqrtf(squares * (1.0f / HIDDEN) + eps);
                if (lane < COPIES && shared.own.router.count > 0) {
                    send(copies + lane * COPY_WORDS + AT_LOGITS + shared.own.router.first, __float_as_uint(logit * by), flag);
                }
            }
        }
        FORGET
        float weight = 0.0f;  // of warp 0, lane c: that of choice c
        if (warp == 0) weight = Choice(words + shared.own_copy + AT_LOGITS, flag, lane).weight(normalise, route_scale, lane);
        {
            const int rows = 4 * shared.own.inner.count;
            int released = 0;
#pragma unroll 1
            for (int first = 0; first < rows; first += 8) {
                const int count = min(8, rows - first);
                Tile<HIDDEN_CHUNK / 16> tile[1];
                tile[0].load(chosen.row<HIDDEN>(first - 3 * released + min(lane % 8, count - 1)) + 2 * warp * HIDDEN_CHUNK,
                             lane);
                const int whole = first + 8 >= rows ? (rows + 2) / 3 : (first + 8) / 3;
                chosen.release(whole - released, lane);
                released = whole;
                float acc[1][4] = {};
                multiply(tile, acc, vector, lane);
                keep(sums, first, acc[0], lane);
            }
            if (gathered(warp, 5)) {
                const int word = min(lane, shared.own.inner.count - 1);
                float row[4] = {};
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float4 four = *reinterpret_cast<const float4*>(&shared.sums[w][4 * word]);
                    row[0] += four.x, row[1] += four.y, row[2] += four.z, row[3] += four.w;
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) row[r] *= by;
                const float part = __shfl_sync(~0u, weight, (shared.own.inner.first + word) / (INNER / 2));
                const uint32_t bits = pack(__fdividef(row[0], 1.0f + __expf(-row[0])) * row[1] * part,
                                           __fdividef(row[2], 1.0f + __expf(-row[2])) * row[3] * part);
                if (lane < shared.own.inner.count) {
#pragma unroll
                    for (int c = 0; c < COPIES; ++c) {
                        send(copies + c * COPY_WORDS + AT_INNER + shared.own.inner.first + lane, bits, flag);
                    }
                }
            }
        }
        FORGET
        {
            constexpr int STEPS = INNER_CHUNK / 16, WORDS = INNER_CHUNK / 2;
            Tile<STEPS> ahead[DOWN_AHEAD][WIDE_TILES];
            auto load = [&](Tile<STEPS> (&tiles)[WIDE_TILES]) {
#pragma unroll
                for (int n = 0; n < WIDE_TILES; ++n) {
                    const int rows = min(8, shared.own.wide.count - 8 * n);
                    tiles[n].load(chosen.row<INNER>(min(lane % 8, rows - 1)) + 2 * warp * INNER_CHUNK, lane);
                    chosen.release(1, lane);
                }
            };
#pragma unroll
            for (int c = 0; c < DOWN_AHEAD; ++c) load(ahead[c]);
            receive<false, CHOSEN * WORDS / WARP>(
                flag,
                [&](int j) {
                    const int at = 2 * lane + j * 2 * WARP;  // of the warp's chunks, expert after expert
                    return words + shared.own_copy + AT_INNER + at / WORDS * (INNER / 2) + warp * WORDS + at % WORDS;
                },
                [] {},
                [&](int j, uint64_t word) {
                    vector[fragment_place(j / 2 * 2 * WARP + 2 * lane + j % 2)] = static_cast<uint32_t>(word);
                });
            __syncwarp();
            float acc[WIDE_TILES][4] = {};
#pragma unroll
            for (int c = 0; c < DOWN_AHEAD; ++c) multiply(ahead[c], acc, vector + c * WORDS, lane);
#pragma unroll 1
            for (int c = DOWN_AHEAD; c < CHOSEN; ++c) {
                Tile<STEPS> tiles[WIDE_TILES];
                load(tiles);
                multiply(tiles, acc, vector + c * WORDS, lane);
            }
#pragma unroll
            for (int n = 0; n < WIDE_TILES; ++n) keep(sums, 8 * n, acc[n], lane);
            sync_consumers();
            if (warp == 0 && lane < shared.own.wide.count) {
                const float residual = shared.residual[lane] += sum_of(shared.sums, lane);
                tell(residual, lane, shared.own.wide.first, copies + AT_HIDDEN, flag);
            }
            if (attention.takes_part() && i + 1 < layers) attention.fetch_first(all[i + 1].cache, warp, lane);
        }
    }
    if (warp == 0 && lane < shared.own.wide.count) y[shared.own.wide.first + lane] = shared.residual[lane];
    if (blockIdx.x == 0 && thread == 0) *reinterpret_cast<volatile uint32_t*>(words) = flag;
}
