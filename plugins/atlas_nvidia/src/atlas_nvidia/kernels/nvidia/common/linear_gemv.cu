// y = x · weightᵀ (+ residual) for a few tokens. An instance takes up to 8 * GEMV_COLUMN_TILES of them.
#include "gemv.cuh"

#ifndef GEMV_COLUMN_TILES
#define GEMV_COLUMN_TILES 1
#endif

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
linear_gemv(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* weight, const uint16_t* residual, void* y,
            int32_t rows, int32_t width, int32_t capacity, int32_t y_f32) {
    extern __shared__ __align__(16) unsigned char shared[];
    StreamedColumns columns{x, shared + gemv_shared(GEMV_COLUMN_TILES), width, capacity};
    gemv<GEMV_COLUMN_TILES>(
        (rows + TILE_ROWS - 1) / TILE_ROWS, width, shared,
        [&](int tile, int i) { return weight + static_cast<int64_t>(min(tile * TILE_ROWS + i, rows - 1)) * width; },
        [&] {
            admit_successor();
            wait_for_predecessor();
            columns.live = min(counts[live_word], capacity);
        },
        columns,
        [&](int tile, int i, int column, float a, float b) {
            if (column >= columns.live) return;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = tile * TILE_ROWS + i + 8 * half;
                if (row >= rows) continue;
                const int64_t element = static_cast<int64_t>(column) * rows + row;
                float value = half ? b : a;
                // The product is an activation of its own in the decomposition: it is rounded before the sum.
                if (residual) value = widen(narrow(value)) + widen(residual[element]);
                if (y_f32) static_cast<float*>(y)[element] = value;
                else static_cast<uint16_t*>(y)[element] = narrow(value);
            }
        });
}
