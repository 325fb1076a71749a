// silu(x · gateᵀ) * (x · upᵀ) for normalised tokens of prompts, or those that norm_factors completes: half of a tile's weight
// rows are of gate, half the same of up.
#include "prompt_product.cuh"
#include "silu.cuh"

using namespace atlas;

namespace {

// Of a thread's two tokens.
struct Factors {
    float of[2];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
gate_up_tma(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap gate,
            const __grid_constant__ CUtensorMap up, const float* squares, uint16_t* y, int32_t rows, int32_t width, int32_t parts,
            float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    const int live = counts[ATLAS_TOKENS];
    prompt_product(
        &x, live, (rows + SHARE - 1) / SHARE, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            copy_tile_to_all(to + peer * SHARE * PROMPT_DEPTH * 2, peer ? &up : &gate, depth, column * SHARE, barrier);
        },
        // Tiles that follow one another are mostly of the same tokens.
        [&, known = -1, factors = Factors{}](const Tile& tile) mutable {
            if (tile.token != known) norm_factors(squares, parts, tile.token, live, width, eps, factors.of);
            known = tile.token;
            return factors;
        },
        [&](Sums& acc, const Tile& tile, const Factors& factors) {
            const int first = tile.column * SHARE;
#pragma unroll
            for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float(&gate)[4] = acc[j];
                    const float(&up)[4] = acc[j + SHARE / 8];
                    const float2 two = silu_mul(make_float2(gate[2 * half], gate[2 * half + 1]),
                                              make_float2(up[2 * half], up[2 * half + 1]), factors.of[half]);
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
