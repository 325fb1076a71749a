// Four matrices that all read the same normalised tokens, up to 64 of them, in one launch: tiles of the first, then of the
// second, and so on. What linear attention, and attention with a gate behind it, make of the residual stream.
#include "skinny.cuh"

#ifndef SKINNY_ROWS
#define SKINNY_ROWS 64
#endif

using namespace atlas;

namespace {

constexpr int MATRICES = 4;

// Which matrix a tile is of, and its first row there.
struct Place {
    int matrix, row;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
skinny_linears(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
               const __grid_constant__ CUtensorMap weight_0, const __grid_constant__ CUtensorMap weight_1,
               const __grid_constant__ CUtensorMap weight_2, const __grid_constant__ CUtensorMap weight_3,
               uint16_t* y_0, uint16_t* y_1, uint16_t* y_2, uint16_t* y_3, int32_t rows_0, int32_t rows_1,
               int32_t rows_2, int32_t rows_3, int32_t width, int32_t stages) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int rows[MATRICES] = {rows_0, rows_1, rows_2, rows_3};
    int tiles = 0;
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) tiles += (rows[m] + SKINNY_ROWS - 1) / SKINNY_ROWS;
    auto locate = [&](int tile) {
        int left = tile, matrix = 0;
#pragma unroll
        for (int m = 0; m + 1 < MATRICES; ++m) {
            const int own = (rows[m] + SKINNY_ROWS - 1) / SKINNY_ROWS;
            if (matrix == m && left >= own) {
                left -= own;
                matrix = m + 1;
            }
        }
        return Place{matrix, left * SKINNY_ROWS};
    };
    skinny<SKINNY_ROWS, SKINNY_ROWS / 4>(
        &x, min(counts[live_word], SKINNY_TOKENS), tiles, width, stages, shared,
        [&](int tile, int column, uint32_t target, uint32_t barrier) {
            const Place at = locate(tile);
            const CUtensorMap* map = at.matrix == 0 ? &weight_0 : at.matrix == 1 ? &weight_1 : at.matrix == 2 ? &weight_2 : &weight_3;
            copy_tile(target, map, column, at.row, barrier);
        },
        [](int) {}, [](int) {}, [](int, int, int) { return 0; },
        [&](int tile, int token, int vector, auto four, int) {
            const Place at = locate(tile);
            const int own = at.matrix == 0 ? rows_0 : at.matrix == 1 ? rows_1 : at.matrix == 2 ? rows_2 : rows_3;
            uint16_t* y = at.matrix == 0 ? y_0 : at.matrix == 1 ? y_1 : at.matrix == 2 ? y_2 : y_3;
            const int row = at.row + 4 * vector;
            if (row >= own) return;
            const float4 sum = four(4 * vector);
            store_narrow(y + static_cast<int64_t>(token) * own + row, sum.x, sum.y, sum.z, sum.w);
        });
}
