// silu(x · gateᵀ) * (x · upᵀ) for normalised tokens of prompts, or those that norm_factors completes: half of a tile's weight
// rows are of gate, half the same of up.
#include "prompt_product.cuh"
#include "silu.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
gate_up_tma(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap gate,
            const __grid_constant__ CUtensorMap up, const float* squares, uint16_t* y, int32_t rows, int32_t width, int32_t parts,
            float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ float factors[PROMPT_TOKENS];  // of a tile's tokens; each is the four lanes' that have the token
    admit_successor();
    const int live = counts[ATLAS_TOKENS];
    prompt_product(
        &x, live, (rows + SHARE - 1) / SHARE, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            constexpr uint32_t SECOND = SHARE * PROMPT_DEPTH * 2;
            if constexpr (SHARE_TOKENS) {
                copy_tile(to, &gate, depth, column * SHARE, barrier);
                copy_tile(to + SECOND, &up, depth, column * SHARE, barrier);
            } else {
                copy_tile_to_all(to + peer * SECOND, peer ? &up : &gate, depth, column * SHARE, barrier);
            }
        },
        // Tiles that follow one another are mostly of the same tokens.
        [&, known = -1, fresh = false](const Tile& tile) mutable {
            if (tile.which == 0) {
                fresh = of_warp(tile.token != known);
                known = tile.token;
            }
            if (!fresh) return 0;
            float of[2];
            norm_factors(squares, parts, tile.token, live, width, eps, of);
            __syncwarp();
            if (threadIdx.x % 4 < 2) factors[tile.token % PROMPT_TOKENS + threadIdx.x % 4 * 8] = threadIdx.x % 4 ? of[1] : of[0];
            __syncwarp();
            return 0;
        },
        [&](Sums& acc, const Tile& tile, int) {
            const int first = tile.column * SHARE, place = tile.token % PROMPT_TOKENS;
            const float by[2] = {factors[place], factors[place + 8]};
#pragma unroll
            for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float(&gate)[4] = acc[j];
                    const float(&up)[4] = acc[j + SHARE / 8];
                    const float2 two = silu_mul(make_float2(gate[2 * half], gate[2 * half + 1]),
                                              make_float2(up[2 * half], up[2 * half + 1]), by[half]);
                    gate[2 * half] = two.x;
                    gate[2 * half + 1] = two.y;
                }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = tile.token + half * 8;
                const int64_t line = static_cast<int64_t>(token) * rows;
                store_elements<0, SHARE / 8>(acc, half, rows - first, token < live, y + line + first);
            }
        });
}
