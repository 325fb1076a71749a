// What qkv_tma.cu does without norms of heads, for few tokens: a tile is 48 pairs of rows that are turned together, of heads and kinds as
// they come, so that there is a tile for almost every processor where whole heads leave a quarter of them idle.
#define CONSUMERS 3
#define PROMPT_ROWS 96
#define STAGES 6
#include "prompt_product.cuh"
#include "turns.cuh"

using namespace atlas;

namespace {

constexpr int HEAD_DIM = 128, HALF = HEAD_DIM / 2, SOME = 16, SOMES = HALF / SOME;  // pairs of a head, of a copy; copies of a head
constexpr int COPIES = PROMPT_ROWS / 2 / SOME, HIGH = PROMPT_ROWS / 16;  // of a tile; its first group of the pairs' second rows
static_assert(COPIES * 2 * SOME == PROMPT_ROWS, "whole copies");

// Of a thread's two tokens: their positions, pages, and what completes their norm.
struct Places {
    int position[2], page[2];
    float factor[2];
};

// Of which kind some pairs are (0 queries, 1 keys, 2 values, 3 none), of which of its heads, and from which pair of it on.
struct Some {
    int kind, head, first;
    __device__ Some(int index, int q_heads, int kv_heads) {
        int at = index / SOMES;
        first = index % SOMES * SOME;
        kind = at < q_heads ? 0 : at < q_heads + kv_heads ? 1 : at < q_heads + 2 * kv_heads ? 2 : 3;
        head = kind == 0 ? at : at - q_heads - (kind - 1) * kv_heads;
    }
};

// Groups FIRST and HIGH + FIRST, with the one behind each, of one token, turned.
template <int FIRST>
__device__ void turn(Sums& acc, int half, float position, const float4* turns, float scale) {
#pragma unroll
    for (int j = FIRST; j < FIRST + 2; ++j) {
        const float4 by = turns[(j - FIRST) * 4];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sine, cosine;
            rotation_of_turns(position, e ? make_float2(by.z, by.w) : make_float2(by.x, by.y), scale, sine, cosine);
            float &low = acc[j][2 * half + e], &high = acc[HIGH + j][2 * half + e];
            const float turned = low * cosine - high * sine;
            high = high * cosine + low * sine;
            low = turned;
        }
    }
}

}  // namespace

// Parameters are those of qkv_tma.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
qkv_pairs(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap q_weight,
          const __grid_constant__ CUtensorMap k_weight, const __grid_constant__ CUtensorMap v_weight, const void*,
          const void*, const float* squares, const float* inv_freq, const int32_t* positions, const int32_t* token_row,
          const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q, int32_t width, int32_t q_heads,
          int32_t kv_heads, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t, int32_t,
          int32_t parts, float rope_scale, float norm_eps, float) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ float4 turns[HALF / 2];
    admit_successor();
    if (threadIdx.x < HALF) reinterpret_cast<float2*>(turns)[threadIdx.x] = turns_of(inv_freq[threadIdx.x]);
    const int live = counts[ATLAS_TOKENS], all = (q_heads + 2 * kv_heads) * SOMES;
    prompt_product(
        &x, live, (all + COPIES - 1) / COPIES, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const Some some(column * COPIES + i, q_heads, kv_heads);
                const CUtensorMap* map = some.kind == 0 ? &q_weight : some.kind == 1 ? &k_weight : &v_weight;
                const int row = some.head * HEAD_DIM + some.first;  // of those past the last, whatever
                const uint32_t here = to + i * SOME * PROMPT_DEPTH * 2;
                constexpr uint32_t SECOND = PROMPT_ROWS / 2 * PROMPT_DEPTH * 2;
                copy_tile_to_all(here + peer * SECOND, map, depth, row + peer * HALF, barrier);
            }
        },
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
            named_wait(1, CONSUMERS * WARPGROUP);  // `turns` is written
            return places;
        },
        [&](Sums& acc, const Tile& tile, const Places& places) {
            if (squares != nullptr) {
#pragma unroll
                for (int j = 0; j < PROMPT_ROWS / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[j][e] *= places.factor[e / 2];
            }
            auto end = [&](auto which) {
                constexpr int I = decltype(which)::value;
                const Some some(tile.column * COPIES + I, q_heads, kv_heads);
                if (some.kind > 2) return;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int token = tile.token + half * 8, position = places.position[half];
                    if (some.kind < 2) {
                        turn<2 * I>(acc, half, static_cast<float>(position), turns + some.first / 2 + threadIdx.x % 4, rope_scale);
                    }
                    uint16_t* to = some.kind == 0 ? q + (static_cast<int64_t>(token) * q_heads + some.head) * HEAD_DIM
                                                  : cache + page_element(places.page[half], some.kind - 1, some.head,
                                                                         position % page_tokens, kv_heads, page_tokens, HEAD_DIM);
                    store_elements<2 * I, 2>(acc, half, SOME, token < live, to + some.first);
                    store_elements<HIGH + 2 * I, 2>(acc, half, SOME, token < live, to + some.first + HALF);
                }
            };
            end(Number<0>());
            end(Number<1>());
            end(Number<2>());
        });
}
