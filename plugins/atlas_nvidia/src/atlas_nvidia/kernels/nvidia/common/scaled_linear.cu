// y = x · weightᵀ (+ residual) for up to 8 tokens, with FP8 or NVFP4 weights.
#include "scaled_gemv.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 1)
scaled_linear(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint8_t* weight, const float* residual,
              void* y, int32_t rows, int32_t width, int32_t capacity, int32_t y_f32) {
    extern __shared__ __align__(16) unsigned char shared[];
    StreamedChunks columns{x, shared + scaled_shared(), width, capacity};
    columns.live = min(counts[live_word], capacity);
    const ScaledMatrix matrix(weight, rows, width);
    auto element = [&](int tile, int row, int column) {
        return static_cast<int64_t>(column) * rows + tile * TILE_ROWS + row;
    };
    auto exists = [&](int tile, int row) { return tile * TILE_ROWS + row < rows; };
    struct Pair {
        float first, second;
    };
    scaled_gemv(
        matrix.units / 2, matrix.chunks, shared, [&](int tile, int half) { return matrix.unit(2 * tile + half); },
        [&] {
            admit_successor();
            wait_for_predecessor();
        },
        columns,
        [&](int tile, int i, int column) {
            Pair found = {0.0f, 0.0f};
            if (residual && column < columns.live) {
                if (exists(tile, i)) found.first = residual[element(tile, i, column)];
                if (exists(tile, i + 8)) found.second = residual[element(tile, i + 8, column)];
            }
            return found;
        },
        [&](int tile, int i, int column, float a, float b, Pair found) {
            if (column >= columns.live) return;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!exists(tile, i + 8 * half)) continue;
                float value = half ? b : a;
                if (residual) value += half ? found.second : found.first;
                if (y_f32) static_cast<float*>(y)[element(tile, i + 8 * half, column)] = value;
                else static_cast<uint16_t*>(y)[element(tile, i + 8 * half, column)] = narrow(value);
            }
        });
}
