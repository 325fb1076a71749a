// Causal attention of any number of queries a sequence over pages, on Hopper's warpgroup products (FlashAttention-3;
// Shah et al., 2024).
//
// A block owns some queries of one sequence and all heads that share a key head: a row is one query of one head, 64 of
// them a warpgroup. One more warpgroup copies keys and values from their pages. Keys come from the newest to the oldest, so that only the first tiles (and with a window the last)
// need a mask. While the sums of one tile turn into weights of values, the tensor cores work at the next tile's scores
// and at the products of the last tile's weights. Where there are two warpgroups they take turns in asking for products, so
// that one's exponentials hide behind the other's products. Long rows of tiles come first, for an even end.
#include "wgmma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KEYS
#define KEYS 128
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif

using namespace atlas;

namespace {

constexpr int ROWS = 64 * CONSUMERS, THREADS = (1 + CONSUMERS) * WARPGROUP, STAGES = 2;
constexpr int PANELS = HEAD_DIM / PANEL, PIECES = HEAD_DIM / 8;
constexpr int KEY_PANEL = KEYS * 128, TILE_BYTES = PANELS * KEY_PANEL;
constexpr int QUERY_PANEL = 64 * 128, QUERY_BYTES = PANELS * QUERY_PANEL;
constexpr int PAGE_PART = 16;  // pages are a multiple of so many tokens
// Named barriers, one each for a warpgroup.
constexpr int QUERIES_ARE_THERE = 1, TURN = QUERIES_ARE_THERE + CONSUMERS, NEVER = 15;
constexpr bool TURNS = CONSUMERS == 2;
// Widths of the products with values: head sizes above 128 take two.
constexpr int OUT_N = HEAD_DIM < 128 ? HEAD_DIM : 128, OUTS = HEAD_DIM / OUT_N;
static_assert(HEAD_DIM % PANEL == 0 && KEYS % PAGE_PART == 0, "whole panels and whole parts of pages");

// Without the care for results below 2^-126 that exp2f takes: they are nothing beside the largest, which is 1.
__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Holds back what follows until `sum` is known: the assembler would otherwise move a wait for products before the
// exponentials that are to hide behind them. The barrier is never arrived at: no sum of weights up to 1 is so large.
__device__ void after(float sum) {
    asm volatile("{ .reg .pred p; setp.gt.f32 p, %0, 0f7149F2CA; @p bar.arrive %1, 256; }" ::"f"(sum), "n"(NEVER) : "memory");
}

struct Barriers {
    uint32_t base;
    __device__ uint32_t full(int value, int stage) const { return base + (value * STAGES + stage) * 8; }
    __device__ uint32_t empty(int value, int stage) const { return base + ((2 + value) * STAGES + stage) * 8; }
};

// The part of a sequence that a block looks at.
struct Range {
    int start;        // tokens before the first query of this step
    int first_query;  // of this block, within the step
    int queries;      // of the sequence, in the step
    int oldest_key, length;
    int heads;  // that share the key head: row r is query r / heads of the block
    __device__ int query(int row) const { return first_query + row / heads; }
    __device__ bool has(int row) const { return row < ROWS / heads * heads && query(row) < queries; }
    __device__ int first_tile() const { return oldest_key / KEYS; }
    __device__ int tiles() const { return (length + KEYS - 1) / KEYS - first_tile(); }
    // Tiles count from the newest.
    __device__ int key(int tile) const { return (first_tile() + tiles() - 1 - tile) * KEYS; }
};

// Keys and values of this block's head from the newest tile to the oldest, in the order in which they are used:
// keys 0, keys 1, values 0, keys 2, values 1 ...
__device__ void produce(const Range range, const int32_t* table, const uint16_t* cache, int kv_head, int kv_heads,
                        int page_tokens, uint32_t keys, uint32_t values, Barriers barriers) {
    constexpr int ROWS_AT_ONCE = WARPGROUP / PIECES, PARTS = KEYS / PAGE_PART, NONE = -1;
    const int lane = threadIdx.x % WARP, row = threadIdx.x / PIECES, column = threadIdx.x % PIECES;
    const int tiles = range.tiles();
    const uint4* cached = reinterpret_cast<const uint4*>(cache);
    auto copy = [&](int value, int tile) {
        const int stage = tile % STAGES, key = range.key(tile);
        // Each lane looks up one part of a page; the others ask it. Counted in 16 bytes.
        int part = NONE;
        if (lane < PARTS) {
            const int position = key + lane * PAGE_PART;
            if (position < range.length && position + PAGE_PART > range.oldest_key) {
                const int64_t element = page_element(table[position / page_tokens], value, kv_head,
                                                     position % page_tokens, kv_heads, page_tokens, HEAD_DIM);
                part = static_cast<int>(element / 8);
            }
        }
        barrier_wait(barriers.empty(value, stage), tile / STAGES % 2 ^ 1);
        const uint32_t panel = (value ? values : keys) + stage * TILE_BYTES + column / 8 * KEY_PANEL;
#pragma unroll 8
        for (int at = 0; at < KEYS; at += ROWS_AT_ONCE) {
            const int mine = at + row, from = __shfl_sync(~0u, part, at / PAGE_PART);
            const bool valid = from != NONE && key + mine < range.length;
            const int64_t piece = valid ? static_cast<uint32_t>(from) + (mine % PAGE_PART * PIECES + column) : 0;
            copy_async(swizzled(panel, mine, column % 8), cached + piece, valid);
        }
        barrier_arrive_after_copies(barriers.full(value, stage));
    };
    copy(0, 0);
    for (int tile = 1; tile < tiles; ++tile) {
        copy(0, tile);
        copy(1, tile - 1);
    }
    copy(1, tiles - 1);
    wait_copies<0>();
}

// 64 rows against all tiles.
__device__ void consume(const Range range, const uint16_t* q, uint16_t* y, int q_heads, int kv_head, int first_token,
                        int window, float scale, uint32_t query, uint32_t keys, uint32_t values, Barriers barriers) {
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    query += group * QUERY_BYTES;
    // Where a row's vector starts, in heads.
    auto vector = [&](int row) {
        return static_cast<int64_t>(first_token + range.query(row)) * q_heads + kv_head * range.heads + row % range.heads;
    };
    for (int e = thread; e < 64 * PIECES; e += WARPGROUP) {
        const int row = e / PIECES, piece = e % PIECES;
        const bool valid = range.has(group * 64 + row);
        copy_async(swizzled(query + piece / 8 * QUERY_PANEL, row, piece % 8),
                   valid ? q + vector(group * 64 + row) * HEAD_DIM + piece * 8 : q, valid);
    }
    commit_copies();
    wait_copies<0>();
    publish_shared();
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);

    const int tiles = range.tiles(), turn = TURN + group, others_turn = TURN + (1 - group);
    const float factor = scale * LOG2E;
    const int mine = group * 64 + thread / WARP * 16 + lane / 4;
    const int oldest_query = range.start + range.query(group * 64);
    const int newest_query = range.start + range.query(group * 64 + 63);
    const int last_key[2] = {range.start + range.query(mine), range.start + range.query(mine + 8)};
    float out[OUTS][OUT_N / 8][4];
    uint32_t weight[KEYS / 16][4];
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {}, rescale[2];
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < OUT_N / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[o][d][e] = 0.0f;

    auto start_scores = [&](float (&score)[KEYS / 8][4], int tile) {
        const uint32_t from = keys + tile % STAGES * TILE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
            const uint32_t inside = k % 4 * 32;
            product<KEYS>(score, summed_inside(query + k / 4 * QUERY_PANEL + inside),
                          summed_inside(from + k / 4 * KEY_PANEL + inside), k > 0);
        }
        commit_products();
    };
    auto start_values = [&](int tile) {
        const uint32_t from = values + tile % STAGES * TILE_BYTES;
        begin_products();
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) {
                product_across<OUT_N>(out[o], weight[k],
                                      summed_across(from + o * OUT_N / PANEL * KEY_PANEL + k * 2048, KEY_PANEL));
            }
        commit_products();
    };
    auto release = [&](int value, int tile) {
        if (lane == 0) barrier_arrive(barriers.empty(value, tile % STAGES));
    };
    auto soften = [&](float (&score)[KEYS / 8][4], int tile) {
        const int key = range.key(tile);
        const bool masked = key + KEYS > oldest_query + 1 || (window > 0 && key <= newest_query - window);
        if (masked) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int last = last_key[half], oldest = window > 0 ? last - window + 1 : 0;
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = key + j * 8 + lane % 4 * 2 + e;
                        if (at > last || at < oldest) score[j][2 * half + e] = -INFINITY;
                    }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float best = top[half];
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) best = fmaxf(best, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float against = best == -INFINITY ? 0.0f : best * factor;
            rescale[half] = power_of_two(top[half] * factor - against);
            top[half] = best;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = score[j][2 * half + e];
                    s = power_of_two(fmaf(s, factor, -against));
                    sum += s;
                }
            total[half] = total[half] * rescale[half] + sum;
        }
    };
    auto narrow_weights = [&](const float (&score)[KEYS / 8][4]) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            weight[k][0] = pack(score[2 * k][0], score[2 * k][1]);
            weight[k][1] = pack(score[2 * k][2], score[2 * k][3]);
            weight[k][2] = pack(score[2 * k + 1][0], score[2 * k + 1][1]);
            weight[k][3] = pack(score[2 * k + 1][2], score[2 * k + 1][3]);
        }
    };

    auto await = [&](int value, int tile) {
        barrier_wait(barriers.full(value, tile % STAGES), tile / STAGES % 2);
        publish_shared();
    };

    if (TURNS && group == 1) named_arrive(TURN, CONSUMERS * WARPGROUP);
    {
        float score[KEYS / 8][4];
        await(0, 0);
        start_scores(score, 0);
        wait_products<0>();
        release(0, 0);
        soften(score, 0);
        narrow_weights(score);
    }
    for (int tile = 1; tile < tiles; ++tile) {
        float score[KEYS / 8][4];
        await(0, tile);
        if (TURNS) named_wait(turn, CONSUMERS * WARPGROUP);
        start_scores(score, tile);
        await(1, tile - 1);
        start_values(tile - 1);
        if (TURNS) named_arrive(others_turn, CONSUMERS * WARPGROUP);
        wait_products<1>();
        release(0, tile);
        soften(score, tile);
        after(total[0] + total[1]);
        wait_products<0>();
        release(1, tile - 1);
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[o][d][e] *= rescale[e / 2];
        narrow_weights(score);
    }
    await(1, tiles - 1);
    start_values(tiles - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
    }
    wait_products<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = mine + half * 8;
        if (!range.has(row)) continue;
        const float share = 1.0f / total[half];
        uint16_t* to = y + vector(row) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; ++d) {
                *reinterpret_cast<uint32_t*>(to + o * OUT_N + d * 8) =
                    pack(out[o][d][2 * half] * share, out[o][d][2 * half + 1] * share);
            }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_wgmma(const int32_t* counts, const uint16_t* q, const int32_t* cu_q, const int32_t* row_slot,
                    const int32_t* slots, const uint16_t* cache, uint16_t* y, int32_t q_heads, int32_t kv_heads,
                    int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t window, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t barrier_words[4 * STAGES];
    admit_successor();
    const int sequences = counts[ATLAS_SEQUENCES];
    // The last tile of the last sequence comes first: causal rows grow, and a long one at the end would keep the rest waiting.
    const int heads = q_heads / kv_heads, queries = ROWS / heads;
    int row = sequences - 1, tile = blockIdx.y;
    for (; row >= 0; --row) {
        const int tiles = (cu_q[row + 1] - cu_q[row] + queries - 1) / queries;
        if (tile < tiles) {
            tile = tiles - 1 - tile;
            break;
        }
        tile -= tiles;
    }
    if (row < 0) {
        wait_for_predecessor();
        return;
    }
    const Barriers barriers{shared_address(barrier_words)};
    if (threadIdx.x == 0) {
        for (int value = 0; value < 2; ++value) {
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(barriers.full(value, stage), WARPGROUP);
                barrier_init(barriers.empty(value, stage), CONSUMERS * WARPGROUP / WARP);
            }
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[row]) * slot_stride;
    Range range;
    range.start = slot[ATLAS_POSITION];
    range.queries = cu_q[row + 1] - cu_q[row];
    range.first_query = tile * queries;
    range.length = range.start + min(range.first_query + queries, range.queries);
    range.heads = heads;
    // Pages that no query looks at any more may have been given away.
    range.oldest_key = window > 0 ? max(0, range.start + range.first_query - window + 1) : 0;
    const int kv_head = blockIdx.x;
    const uint32_t query = shared_address(shared), keys = query + CONSUMERS * QUERY_BYTES;
    const uint32_t values = keys + STAGES * TILE_BYTES;
    wait_for_predecessor();
    if (threadIdx.x < WARPGROUP) {
        give_registers<CONSUMERS == 2 ? 40 : 32>();
        produce(range, slot + table_offset, cache, kv_head, kv_heads, page_tokens, keys, values, barriers);
    } else {
        take_registers<CONSUMERS == 2 ? 232 : 160>();
        consume(range, q, y, q_heads, kv_head, cu_q[row], window, scale, query, keys, values, barriers);
    }
}
