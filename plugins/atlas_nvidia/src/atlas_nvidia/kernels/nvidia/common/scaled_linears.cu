// A norm of the residual stream and three products with it in one launch, for up to 8 tokens, with FP8 or NVFP4 weights.
// A tile is 16 rows of one matrix, so no matrix may end within one.
#include "scaled_gemv.cuh"

using namespace atlas;

namespace {

struct Products {
    const uint8_t* weight[3];
    uint16_t* y[3];
    int rows[3];

    // The matrix of a tile, and the tile's first row there. Every index is known to the compiler, so that nothing lies in memory.
    __device__ int locate(int tile, int& row, const uint8_t*& matrix, uint16_t*& to) const {
        row = tile * TILE_ROWS;
        int height = rows[0];
        matrix = weight[0], to = y[0];
#pragma unroll
        for (int m = 1; m < 3; ++m) {
            if (row < rows[m - 1]) break;
            row -= rows[m - 1];
            height = rows[m], matrix = weight[m], to = y[m];
        }
        return height;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
scaled_linears(const int32_t* counts, const float* x, const void* norm_weight, const uint8_t* weight_0,
               const uint8_t* weight_1, const uint8_t* weight_2, uint16_t* y_0, uint16_t* y_1, uint16_t* y_2,
               int32_t rows_0, int32_t rows_1, int32_t rows_2, int32_t width, int32_t capacity, float eps,
               int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Products products = {{weight_0, weight_1, weight_2}, {y_0, y_1, y_2}, {rows_0, rows_1, rows_2}};
    NormChunks norm = norm_chunks(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    scaled_gemv(
        (rows_0 + rows_1 + rows_2) / TILE_ROWS, width / SCALED_CHUNK, shared,
        [&](int tile, int half) {
            int row;
            const uint8_t* matrix;
            uint16_t* to;
            const int rows = products.locate(tile, row, matrix, to);
            return ScaledMatrix(matrix, rows, width).unit(row / UNIT_ROWS + half);
        },
        [&] { norm.begin(norm_weight, norm_type, x, eps); },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float a, float b, int) {
            if (token >= norm.live) return;
            int row;
            const uint8_t* matrix;
            uint16_t* to;
            const int rows = products.locate(tile, row, matrix, to);
            to += static_cast<int64_t>(token) * rows + row + i;
            to[0] = narrow(a * norm.scale);
            to[8] = narrow(b * norm.scale);
        });
}
