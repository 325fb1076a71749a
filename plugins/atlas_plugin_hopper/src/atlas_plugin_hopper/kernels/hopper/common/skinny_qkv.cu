// Query, key and value projections of normalised tokens (or those that norm_factors completes), rotation and the write into pages in one launch, for up to 64
// tokens. A tile is SKINNY_ROWS / 32 groups of 16 pairs of one head: rows i, then rows i + half.
#include "skinny.cuh"

#ifndef SKINNY_ROWS
#define SKINNY_ROWS 64
#endif

using namespace atlas;

namespace {

constexpr int PAIRS = 16, GROUPS = SKINNY_ROWS / (2 * PAIRS), TURNS = GROUPS * PAIRS + 1;

// Groups of all query heads, then of key heads, then of value heads, then of none.
struct Group {
    int head, pair, kind;  // kind 0 query, 1 key, 2 value, 3 none
};

}  // namespace

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
skinny_qkv(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap q_weight,
           const __grid_constant__ CUtensorMap k_weight, const __grid_constant__ CUtensorMap v_weight,
           const float* squares, const float* inv_freq, const int32_t* positions, const int32_t* token_row, const int32_t* row_slot,
           const int32_t* slots, uint16_t* cache, uint16_t* q, int32_t width, int32_t q_heads, int32_t kv_heads,
           int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t stages,
           int32_t parts, float rope_scale, float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ int64_t place[SKINNY_TOKENS];
    __shared__ float factors[SKINNY_TOKENS];
    const int half = head_dim / 2, groups_each = half / PAIRS, live = min(counts[ATLAS_TOKENS], SKINNY_TOKENS);
    auto locate = [&](int index) {
        int head = index / groups_each;
        const int pair = index % groups_each * PAIRS;
        if (head < q_heads) return Group{head, pair, 0};
        head -= q_heads;
        if (head < kv_heads) return Group{head, pair, 1};
        head -= kv_heads;
        return Group{head, pair, head < kv_heads ? 2 : 3};
    };
    const int groups = groups_each * (q_heads + 2 * kv_heads);
    const int tokens = SKINNY_TOKENS / gridDim.y, first = blockIdx.y * tokens;
    // A block has one tile.
    Group mine[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) mine[g] = locate(blockIdx.x * GROUPS + g);
    // Sine and cosine, [tokens][TURNS], behind the sums.
    float2* turn = reinterpret_cast<float2*>(shared + stages * STAGE_BYTES<SKINNY_ROWS> + PARTS_BYTES<SKINNY_ROWS>);
    skinny<SKINNY_ROWS, PAIRS / 4 * GROUPS>(
        &x, live, (groups + GROUPS - 1) / GROUPS, width, stages, shared,
        [&](int, int column, uint32_t target, uint32_t barrier) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const CUtensorMap* map = mine[g].kind == 0 ? &q_weight : mine[g].kind == 1 ? &k_weight : &v_weight;
                copy_pairs(target + g * 2 * PAIRS * ROW_BYTES, map, column, mine[g].pair, mine[g].head, barrier);
            }
        },
        [&](int lane) {
            // Where each of this block's tokens goes and how it is rotated. Positions stay in the lanes, so that nothing
            // waits for memory between two rotations.
            constexpr int ROUNDS = SKINNY_TOKENS / WARP;
            int position[ROUNDS] = {};
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int mine = r * WARP + lane, token = first + mine;
                if (mine >= tokens || token >= live) continue;
                position[r] = positions[token];
                const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
                const int64_t page = slots[slot + table_offset + position[r] / page_tokens];
                place[mine] = page_element(page, 0, 0, position[r] % page_tokens, kv_heads, page_tokens, head_dim);
            }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                if (mine[g].kind > 1) continue;
                const int pair = lane % PAIRS;
                const float frequency = inv_freq[mine[g].pair + pair];
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll 4
                    for (int i = 0; i < WARP; i += WARP / PAIRS) {
                        const int from = i + lane / PAIRS, mine = r * WARP + from;
                        const int where = __shfl_sync(~0u, position[r], from);
                        if (mine >= tokens || first + mine >= live) continue;
                        float2& by = turn[mine * TURNS + g * PAIRS + pair];
                        rotation(where, frequency, rope_scale, by.x, by.y);
                    }
                }
            }
        },
        [&](int lane) { norm_factors(lane, squares, parts, width, eps, factors); }, [](int, int, int) { return 0; },
        [&](int, int token, int vector, auto four, int) {
            const int g = vector / (PAIRS / 4), pair = vector % (PAIRS / 4) * 4;
            Group at = mine[0];
#pragma unroll
            for (int other = 1; other < GROUPS; ++other) at = g == other ? mine[other] : at;
            if (at.kind > 2) return;
            const float4 low4 = four(g * 2 * PAIRS + pair), high4 = four(g * 2 * PAIRS + PAIRS + pair);
            float low[4] = {low4.x, low4.y, low4.z, low4.w}, high[4] = {high4.x, high4.y, high4.z, high4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low[i] *= factors[token];
                high[i] *= factors[token];
            }
            if (at.kind < 2) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 by = turn[(token - first) * TURNS + g * PAIRS + pair + i];
                    const float rotated = low[i] * by.y - high[i] * by.x;
                    high[i] = high[i] * by.y + low[i] * by.x;
                    low[i] = rotated;
                }
            }
            uint16_t* to;
            if (at.kind == 0) {
                to = q + (static_cast<int64_t>(token) * q_heads + at.head) * head_dim;
            } else {
                const int64_t head = static_cast<int64_t>((at.kind - 1) * kv_heads + at.head) * page_tokens * head_dim;
                to = cache + place[token - first] + head;
            }
            store_narrow(to + at.pair + pair, low[0], low[1], low[2], low[3]);
            store_narrow(to + half + at.pair + pair, high[0], high[1], high[2], high[3]);
        });
}
