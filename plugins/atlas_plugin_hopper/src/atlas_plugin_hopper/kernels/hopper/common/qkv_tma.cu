// Query, key and value projections of normalised tokens of prompts, or those that norm_factors completes, norms of heads where there are any, rotation, and the
// write into pages. A tile is whole heads of one kind, and a thread has both dimensions of every pair that it turns.
#include "prompt_product.cuh"
#include "turns.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

using namespace atlas;

namespace {

constexpr int GROUPS = HEAD_DIM / 8, HALF = GROUPS / 2, HEADS = PROMPT_ROWS / HEAD_DIM;
static_assert(PROMPT_ROWS % HEAD_DIM == 0, "whole heads");

// Of a thread's two tokens: their positions, pages, and what completes their norm.
struct Places {
    int position[2], page[2];
    float factor[2];
};

// What every head is turned by, in shared memory: turns of pairs (turns.cuh), and the weights of the norms of query and key heads.
struct Turning {
    float4 turns[HEAD_DIM / 4];
    float2 norms[2][HEAD_DIM / 2];
};

// What each head of one token is multiplied by.
__device__ inline void sizes(const Sums& acc, int half, float eps, float (&factor)[HEADS]) {
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
        float square[2] = {};
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float v = acc[head * GROUPS + j][2 * half + e];
                square[e] += v * v;
            }
        square[0] += square[1];
        square[0] += __shfl_xor_sync(~0u, square[0], 1);
        square[0] += __shfl_xor_sync(~0u, square[0], 2);
        factor[head] = rsqrtf(square[0] / HEAD_DIM + eps);
    }
}

// Heads of one token turned, where NORMED multiplied by their factors and the weights of a norm before.
template <bool NORMED>
__device__ void turn(Sums& acc, int half, int position, const Turning& turning, const float2* norm, float eps, float scale) {
    float factor[HEADS];
    if constexpr (NORMED) sizes(acc, half, eps, factor);
    const float place = static_cast<float>(position);
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
        const int pairs = j * 4 + threadIdx.x % 4;
        const float4 turns = turning.turns[pairs];
        float2 low_by = make_float2(1.0f, 1.0f), high_by = low_by;
        if constexpr (NORMED) {
            low_by = norm[pairs];
            high_by = norm[HEAD_DIM / 4 + pairs];
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sine, cosine;
            rotation_of_turns(place, e ? make_float2(turns.z, turns.w) : make_float2(turns.x, turns.y), scale, sine, cosine);
            const float low_weight = e ? low_by.y : low_by.x, high_weight = e ? high_by.y : high_by.x;
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                float& low = acc[head * GROUPS + j][2 * half + e];
                float& high = acc[head * GROUPS + HALF + j][2 * half + e];
                if constexpr (NORMED) {
                    low *= factor[head] * low_weight;
                    high *= factor[head] * high_weight;
                }
                const float turned = low * cosine - high * sine;
                high = high * cosine + low * sine;
                low = turned;
            }
        }
    }
}

// The first `heads` heads of one token, `next` elements from one to the next.
template <int HEAD>
__device__ void store_heads(const Sums& acc, int half, int heads, bool live, int64_t next, uint16_t* to) {
    if (HEAD < heads) store_elements<HEAD * GROUPS, GROUPS>(acc, half, HEAD_DIM, live, to + HEAD * next);
    if constexpr (HEAD + 1 < HEADS) store_heads<HEAD + 1>(acc, half, heads, live, next, to);
}

}  // namespace

// Without norms of heads q_norm and k_norm are null.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
qkv_tma(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap q_weight,
        const __grid_constant__ CUtensorMap k_weight, const __grid_constant__ CUtensorMap v_weight, const void* q_norm,
        const void* k_norm, const float* squares, const float* inv_freq, const int32_t* positions,
        const int32_t* token_row, const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q, int32_t width, int32_t q_heads,
        int32_t kv_heads, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t q_type, int32_t k_type,
        int32_t parts, float rope_scale, float norm_eps, float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Turning turning;
    admit_successor();
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += PROMPT_THREADS) {
        reinterpret_cast<float2*>(turning.turns)[i] = turns_of(inv_freq[i]);
        if (q_norm == nullptr) continue;
        turning.norms[0][i] = make_float2(load_element(q_norm, 2 * i, q_type), load_element(q_norm, 2 * i + 1, q_type));
        turning.norms[1][i] = make_float2(load_element(k_norm, 2 * i, k_type), load_element(k_norm, 2 * i + 1, k_type));
    }
    __syncthreads();
    const int live = counts[ATLAS_TOKENS];
    const int q_columns = (q_heads + HEADS - 1) / HEADS, kv_columns = (kv_heads + HEADS - 1) / HEADS;
    // 0 queries, 1 keys, 2 values; `column` becomes that of the kind.
    auto kind_of = [&](int& column) {
        if (column < q_columns) return 0;
        column -= q_columns;
        if (column < kv_columns) return 1;
        column -= kv_columns;
        return 2;
    };
    prompt_product(
        &x, live, q_columns + 2 * kv_columns, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            const int kind = kind_of(column);
            const CUtensorMap* map = kind == 0 ? &q_weight : kind == 1 ? &k_weight : &v_weight;
            bring_rows(to, map, depth, column * PROMPT_ROWS, peer, barrier);
        },
        // Long before it is needed: one look-up leads to the next.
        [&](const Tile& tile) {
            Places places;
            norm_factors(squares, parts, tile.token, live, width, norm_eps, places.factor);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = min(tile.token + half * 8, live - 1);
                const int position = positions[token];
                const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
                places.position[half] = position;
                places.page[half] = slots[slot + table_offset + position / page_tokens];
            }
            return places;
        },
        [&](Sums& acc, const Tile& tile, const Places& places) {
            int column = tile.column;
            const int kind = kind_of(column), first = column * HEADS, heads = min(HEADS, (kind == 0 ? q_heads : kv_heads) - first);
            if (squares != nullptr) {
#pragma unroll
                for (int j = 0; j < PROMPT_ROWS / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[j][e] *= places.factor[e / 2];
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int position = places.position[half];
                if (kind == 2) break;
                if (q_norm != nullptr) {
                    turn<true>(acc, half, position, turning, turning.norms[kind], eps, rope_scale);
                } else {
                    turn<false>(acc, half, position, turning, nullptr, eps, rope_scale);
                }
            }
            const int64_t next = kind == 0 ? HEAD_DIM : static_cast<int64_t>(page_tokens) * HEAD_DIM;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = tile.token + half * 8;
                uint16_t* to = kind == 0 ? q + (static_cast<int64_t>(token) * q_heads + first) * HEAD_DIM
                                         : cache + page_element(places.page[half], kind - 1, first,
                                                                places.position[half] % page_tokens, kv_heads, page_tokens, HEAD_DIM);
                store_heads<0>(acc, half, heads, token < live, next, to);
            }
        });
}
