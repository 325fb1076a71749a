// A norm of the residual stream and four products with it in one launch, for up to 8 tokens: what linear attention and
// gated attention begin with. A tile is 16 rows of one matrix, so no matrix may end within one.
#include "gemv.cuh"

using namespace atlas;

namespace {

struct Outputs {
    const uint16_t* weight[4];
    uint16_t* y[4];
    int rows[4];
};

// The matrix of a tile and its first row there. Every index is known to the compiler, so that nothing lies in memory.
struct Tile {
    const uint16_t* weight;
    uint16_t* y;
    int rows, row;
};

__device__ Tile locate(const Outputs& outputs, int tile) {
    int row = tile * TILE_ROWS;
    Tile found = {outputs.weight[0], outputs.y[0], outputs.rows[0], row};
#pragma unroll
    for (int m = 1; m < 4; ++m) {
        if (row < outputs.rows[m - 1]) break;
        row -= outputs.rows[m - 1];
        found = {outputs.weight[m], outputs.y[m], outputs.rows[m], row};
    }
    return found;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
norm_linears(const int32_t* counts, const float* x, const void* norm_weight, const uint16_t* weight_0,
             const uint16_t* weight_1, const uint16_t* weight_2, const uint16_t* weight_3, uint16_t* y_0,
             uint16_t* y_1, uint16_t* y_2, uint16_t* y_3, int32_t rows_0, int32_t rows_1, int32_t rows_2,
             int32_t rows_3, int32_t width, int32_t capacity, float eps, int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Outputs outputs = {{weight_0, weight_1, weight_2, weight_3}, {y_0, y_1, y_2, y_3}, {rows_0, rows_1, rows_2, rows_3}};
    NormColumns norm = norm_columns(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    gemv<1>(
        (rows_0 + rows_1 + rows_2 + rows_3) / TILE_ROWS, width, shared,
        [&](int tile, int i) {
            const Tile t = locate(outputs, tile);
            return t.weight + static_cast<int64_t>(t.row + i) * width;
        },
        [&] { norm.begin(norm_weight, norm_type, x, eps); },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float a, float b, int) {
            if (token >= norm.live) return;
            const Tile t = locate(outputs, tile);
            uint16_t* to = t.y + static_cast<int64_t>(token) * t.rows + t.row + i;
            to[0] = narrow(a * norm.scale);
            to[8] = narrow(b * norm.scale);
        });
}
