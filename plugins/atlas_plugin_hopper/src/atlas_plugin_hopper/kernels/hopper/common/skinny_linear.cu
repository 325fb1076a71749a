// y = x · weightᵀ (+ residual) for up to 64 tokens. With a norm behind it also what that norm multiplies: y * weight, and
// sums of squares over each tile's part of a row, from which the consumer finds the factor.
#include "skinny.cuh"

#ifndef SKINNY_ROWS
#define SKINNY_ROWS 64
#endif

using namespace atlas;

namespace {

struct Found {
    float4 residual, weight;  // of the norm
};

}  // namespace

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1)
skinny_linear(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
              const __grid_constant__ CUtensorMap weight, const float* residual, void* y, const void* norm_weight,
              uint16_t* scaled, float* squares, int32_t rows, int32_t width, int32_t stages, int32_t y_f32,
              int32_t norm_type) {
    extern __shared__ __align__(1024) unsigned char shared[];
    auto element = [&](int tile, int token, int vector) {
        return static_cast<int64_t>(token) * rows + tile * SKINNY_ROWS + 4 * vector;
    };
    auto exists = [&](int tile, int vector) { return tile * SKINNY_ROWS + 4 * vector < rows; };
    constexpr int VECTORS = SKINNY_ROWS / 4;
    static_assert(WARP % VECTORS == 0, "the vectors of a token are lanes of one warp");
    const int tiles = (rows + SKINNY_ROWS - 1) / SKINNY_ROWS;
    skinny<SKINNY_ROWS, VECTORS>(
        &x, min(counts[live_word], SKINNY_TOKENS), tiles, width, stages, shared,
        [&](int tile, int column, uint32_t target, uint32_t barrier) {
            copy_tile(target, &weight, column, tile * SKINNY_ROWS, barrier);
        },
        [](int) {}, [](int) {},
        [&](int tile, int token, int vector) {
            Found found = {};
            if (!exists(tile, vector)) return found;
            if (residual) found.residual = *reinterpret_cast<const float4*>(residual + element(tile, token, vector));
            if (scaled) found.weight = load_four(norm_weight, tile * SKINNY_ROWS + 4 * vector, norm_type);
            return found;
        },
        [&](int tile, int token, int vector, auto four, const Found& found) {
            float square = 0.0f;
            if (exists(tile, vector)) {
                const float4 sum = four(4 * vector), &r = found.residual, &w = found.weight;
                const float4 v = make_float4(sum.x + r.x, sum.y + r.y, sum.z + r.z, sum.w + r.w);
                const int64_t to = element(tile, token, vector);
                if (y_f32) *reinterpret_cast<float4*>(static_cast<float*>(y) + to) = v;
                else store_narrow(static_cast<uint16_t*>(y) + to, v.x, v.y, v.z, v.w);
                if (scaled) store_narrow(scaled + to, v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
                square = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
            if (!scaled) return;
            const unsigned lanes = (VECTORS == WARP ? 0u : 1u << VECTORS % WARP) - 1;
#pragma unroll
            for (int distance = VECTORS / 2; distance > 0; distance /= 2) {
                square += __shfl_xor_sync(lanes << threadIdx.x % WARP / VECTORS * VECTORS, square, distance);
            }
            if (vector == 0) squares[token * tiles + tile] = square;
        });
}
