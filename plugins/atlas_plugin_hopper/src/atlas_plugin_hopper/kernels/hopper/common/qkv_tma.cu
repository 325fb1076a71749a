// Query, key and value projections of normalised tokens of prompts, norms of heads where there are any, rotation, and the
// write into pages. A tile is whole heads of one kind, and a thread has both dimensions of every pair that it turns.
#include "prompt_product.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

using namespace atlas;

namespace {

constexpr int GROUPS = HEAD_DIM / 8, HALF = GROUPS / 2, HEADS = PROMPT_ROWS / HEAD_DIM;
static_assert(PROMPT_ROWS % HEAD_DIM == 0, "whole heads");

// Of a thread's two tokens: their positions and pages.
struct Places {
    int position[2], page[2];
};

// What each head of both tokens is divided by.
__device__ void sizes(const Sums& acc, float eps, float (&factor)[2][HEADS]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float v = acc[head * GROUPS + j][2 * half + e];
                    square += v * v;
                }
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            factor[half][head] = rsqrtf(square / HEAD_DIM + eps);
        }
}

// Heads of both tokens turned, `normed` before. Both vectors lie in shared memory.
__device__ void turn(Sums& acc, const Places& places, bool normed, const float* norm, float eps, const float* inv_freq, float scale) {
    float factor[2][HEADS];
    if (normed) sizes(acc, eps, factor);
#pragma unroll
    for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int pair = j * 8 + threadIdx.x % 4 * 2 + e;
            const float frequency = inv_freq[pair];
            const float low_by = normed ? norm[pair] : 1.0f;
            const float high_by = normed ? norm[HEAD_DIM / 2 + pair] : 1.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sine, cosine;
                rotation(places.position[half], frequency, scale, sine, cosine);
#pragma unroll
                for (int head = 0; head < HEADS; ++head) {
                    float& low = acc[head * GROUPS + j][2 * half + e];
                    float& high = acc[head * GROUPS + HALF + j][2 * half + e];
                    if (normed) {
                        low *= factor[half][head] * low_by;
                        high *= factor[half][head] * high_by;
                    }
                    const float turned = low * cosine - high * sine;
                    high = high * cosine + low * sine;
                    low = turned;
                }
            }
        }
}

}  // namespace

// Without norms of heads q_norm and k_norm are null.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
qkv_tma(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap q_weight,
        const __grid_constant__ CUtensorMap k_weight, const __grid_constant__ CUtensorMap v_weight, const void* q_norm,
        const void* k_norm, const float* inv_freq, const int32_t* positions, const int32_t* token_row,
        const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q, int32_t width, int32_t q_heads,
        int32_t kv_heads, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t q_type, int32_t k_type,
        float rope_scale, float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ float norms[2][HEAD_DIM], frequencies[HEAD_DIM / 2];
    admit_successor();
    for (int i = threadIdx.x; i < HEAD_DIM; i += PROMPT_THREADS) {
        if (i < HEAD_DIM / 2) frequencies[i] = inv_freq[i];
        if (q_norm == nullptr) continue;
        norms[0][i] = load_element(q_norm, i, q_type);
        norms[1][i] = load_element(k_norm, i, k_type);
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
            const int kind = kind_of(column), head = column * HEADS, room = ((kind == 0 ? q_heads : kv_heads) - head) * HEAD_DIM;
            if (kind < 2) {
                turn(acc, places, q_norm != nullptr, norms[kind], eps, frequencies, rope_scale);
            }
            const int64_t next = static_cast<int64_t>(page_tokens) * HEAD_DIM;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = tile.token + half * 8;
                if (token >= live) continue;
                if (kind == 0) {
                    uint16_t* to = q + (static_cast<int64_t>(token) * q_heads + head) * HEAD_DIM;
                    store_elements<0, PROMPT_ROWS / 8>(acc, half, room, to);
                    continue;
                }
                uint16_t* to = cache + page_element(places.page[half], kind - 1, head, places.position[half] % page_tokens,
                                                    kv_heads, page_tokens, HEAD_DIM);
                store_elements<0, GROUPS>(acc, half, room, to);
                if constexpr (HEADS > 1) store_elements<GROUPS, GROUPS>(acc, half, room - HEAD_DIM, to + next);
                if constexpr (HEADS > 2) {
                    store_elements<2 * GROUPS, GROUPS>(acc, half, room - 2 * HEAD_DIM, to + 2 * next);
                    store_elements<3 * GROUPS, GROUPS>(acc, half, room - 3 * HEAD_DIM, to + 3 * next);
                }
            }
        });
}
