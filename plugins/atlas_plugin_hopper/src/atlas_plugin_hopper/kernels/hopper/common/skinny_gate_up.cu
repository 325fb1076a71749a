// Gate and up projections and SwiGLU of normalised tokens (or those that norm_factors completes) in one launch, for up to 64 of them. A tile is as many rows
// of gate as of up, which one thread finds in its own sums.
#include "silu.cuh"
#include "skinny.cuh"

#ifndef SKINNY_ROWS
#define SKINNY_ROWS 64
#endif

using namespace atlas;

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
skinny_gate_up(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap gate,
               const __grid_constant__ CUtensorMap up, const float* squares, uint16_t* y, int32_t rows, int32_t width,
               int32_t stages, int32_t parts, float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ float factors[SKINNY_TOKENS];
    constexpr int HALF = SKINNY_ROWS / 2;
    skinny<SKINNY_ROWS, HALF / 4>(
        &x, min(counts[ATLAS_TOKENS], SKINNY_TOKENS), (rows + HALF - 1) / HALF, width, stages, shared,
        [&](int tile, int column, uint32_t target, uint32_t barrier) {
            copy_tile(target, &gate, column, tile * HALF, barrier);
            copy_tile(target + HALF * ROW_BYTES, &up, column, tile * HALF, barrier);
        },
        [](int) {}, [&](int lane) { norm_factors(lane, squares, parts, width, eps, factors); }, [](int, int, int) { return 0; },
        [&](int tile, int token, int vector, auto four, int) {
            const int row = tile * HALF + 4 * vector;
            if (row >= rows) return;
            const float4 g = four(4 * vector), u = four(HALF + 4 * vector);
            const float by = factors[token];
            store_narrow(y + static_cast<int64_t>(token) * rows + row, quick_silu(g.x * by) * (u.x * by),
                         quick_silu(g.y * by) * (u.y * by), quick_silu(g.z * by) * (u.z * by), quick_silu(g.w * by) * (u.w * by));
        });
}
