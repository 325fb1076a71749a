// y = x · weightᵀ (+ residual) for up to 8 tokens, with FP8 or NVFP4 weights. Tokens lie in shared memory where there is room
// (`resident`), else they come with the chunks.
#include "scaled_gemv.cuh"

using namespace atlas;

namespace {

// The two rows of a place: i and i + 8 of the tile.
struct Pair {
    float first, second;
};

struct Result {
    const float* residual;
    void* y;
    int rows, live, y_f32;

    __device__ bool exists(int tile, int row) const { return tile * TILE_ROWS + row < rows; }
    __device__ int64_t element(int tile, int row, int column) const {
        return static_cast<int64_t>(column) * rows + tile * TILE_ROWS + row;
    }
    __device__ Pair ahead(int tile, int i, int column) const {
        Pair found = {0.0f, 0.0f};
        if (residual && column < live) {
            if (exists(tile, i)) found.first = residual[element(tile, i, column)];
            if (exists(tile, i + 8)) found.second = residual[element(tile, i + 8, column)];
        }
        return found;
    }
    __device__ void store(int tile, int i, int column, float a, float b, Pair found) const {
        if (column >= live) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!exists(tile, i + 8 * half)) continue;
            float value = half ? b : a;
            if (residual) value += half ? found.second : found.first;
            if (y_f32) static_cast<float*>(y)[element(tile, i + 8 * half, column)] = value;
            else static_cast<uint16_t*>(y)[element(tile, i + 8 * half, column)] = narrow(value);
        }
    }
};

template <class Columns, class Load>
__device__ inline void multiply(unsigned char* shared, const ScaledMatrix& matrix, Columns& columns, const Result& result,
                                Load load) {
    scaled_gemv(
        matrix.units / 2, matrix.chunks, shared, [&](int tile, int half) { return matrix.unit(2 * tile + half); },
        [&] {
            admit_successor();
            wait_for_predecessor();
            load();
        },
        columns, [&](int tile, int i, int column) { return result.ahead(tile, i, column); },
        [&](int tile, int i, int column, float a, float b, Pair found) { result.store(tile, i, column, a, b, found); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
scaled_linear(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint8_t* weight, const float* residual,
              void* y, int32_t rows, int32_t width, int32_t capacity, int32_t resident, int32_t y_f32) {
    extern __shared__ __align__(16) unsigned char shared[];
    const ScaledMatrix matrix(weight, rows, width);
    const int live = min(counts[live_word], capacity);
    const Result result{residual, y, rows, live, y_f32};
    if (resident) {
        ResidentChunks columns{x, shared + scaled_shared(), width, matrix.chunks, capacity, live};
        multiply(shared, matrix, columns, result, [&] { columns.load(); });
    } else {
        StreamedChunks columns{x, shared + scaled_shared(), width, capacity, live};
        multiply(shared, matrix, columns, result, [] {});
    }
}
