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

// Of one token, heads side by side: each divided by its own size, times the weights of `norm`.
__device__ void normalise(Sums& acc, int half, const void* norm, int type, float eps) {
    const uint32_t members = 0xfu << (threadIdx.x % WARP / 4 * 4);
    float factor[HEADS];
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
        square += __shfl_xor_sync(members, square, 1);
        square += __shfl_xor_sync(members, square, 2);
        factor[head] = rsqrtf(square / HEAD_DIM + eps);
    }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float by = load_element(norm, j * 8 + threadIdx.x % 4 * 2 + e, type);
#pragma unroll
            for (int head = 0; head < HEADS; ++head) acc[head * GROUPS + j][2 * half + e] *= factor[head] * by;
        }
}

__device__ void rotate(Sums& acc, int half, int position, const float* inv_freq, float scale) {
#pragma unroll
    for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sine, cosine;
            rotation(position, inv_freq[j * 8 + threadIdx.x % 4 * 2 + e], scale, sine, cosine);
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                float& low = acc[head * GROUPS + j][2 * half + e];
                float& high = acc[head * GROUPS + HALF + j][2 * half + e];
                const float turned = low * cosine - high * sine;
                high = high * cosine + low * sine;
                low = turned;
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
    admit_successor();
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
            copy_tile_to_all(to, map, depth, column * PROMPT_ROWS + peer * SHARE, barrier);
        },
        [&](Sums& acc, int first_token, int column) {
            const int kind = kind_of(column), heads = kind == 0 ? q_heads : kv_heads;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = first_token + half * 8;
                if (token >= live) continue;
                const int position = positions[token];
                if (kind < 2) {
                    const void* norm = kind == 0 ? q_norm : k_norm;
                    if (norm != nullptr) normalise(acc, half, norm, kind == 0 ? q_type : k_type, eps);
                    rotate(acc, half, position, inv_freq, rope_scale);
                }
                const int head = column * HEADS, room = (heads - head) * HEAD_DIM;
                if (kind == 0) {
                    uint16_t* to = q + (static_cast<int64_t>(token) * q_heads + head) * HEAD_DIM;
                    store_elements<0, PROMPT_ROWS / 8>(acc, half, room, to);
                    continue;
                }
                const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
                const int64_t page = slots[slot + table_offset + position / page_tokens];
                const int64_t next = static_cast<int64_t>(page_tokens) * HEAD_DIM;
                uint16_t* to = cache + page_element(page, kind - 1, head, position % page_tokens, kv_heads, page_tokens, HEAD_DIM);
                store_elements<0, GROUPS>(acc, half, room, to);
                if constexpr (HEADS > 1) store_elements<GROUPS, GROUPS>(acc, half, room - HEAD_DIM, to + next);
                if constexpr (HEADS > 2) {
                    store_elements<2 * GROUPS, GROUPS>(acc, half, room - 2 * HEAD_DIM, to + 2 * next);
                    store_elements<3 * GROUPS, GROUPS>(acc, half, room - 3 * HEAD_DIM, to + 3 * next);
                }
            }
        });
}
