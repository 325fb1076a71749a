// y = x · weightᵀ (+ residual) for many tokens: tiles of TILE_M tokens and TILE_N weight rows on the tensor cores,
// three stages of 64 summed elements in shared memory. Rows of 128 bytes are swizzled by 16-byte pieces, so that
// neither the copies nor ldmatrix meet bank conflicts.
#include "device.cuh"

#ifndef TILE_M
#define TILE_M 64
#endif
#ifndef TILE_N
#define TILE_N 64
#endif

using namespace atlas;

namespace {

constexpr int DEPTH = 64, STAGES = 3, PIECES = DEPTH / 8;
constexpr int WARPS_M = 2, WARPS_N = TILE_N / 32, THREADS = WARPS_M * WARPS_N * WARP;
constexpr int FRAGMENTS_M = TILE_M / WARPS_M / 16, FRAGMENTS_N = 4;
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * DEPTH * 2;

__device__ uint32_t piece(uint32_t tile, int row, int index) {
    return tile + row * DEPTH * 2 + ((index ^ (row & 7)) * 16);
}

// Rows [first, first + count) of a matrix of `rows` rows, columns from k on; zeros outside.
template <int COUNT>
__device__ void fetch(uint32_t tile, const uint16_t* matrix, int first, int rows, int k, int width) {
#pragma unroll
    for (int e = threadIdx.x; e < COUNT * PIECES; e += THREADS) {
        const int row = e / PIECES, index = e % PIECES, column = k + index * 8;
        const bool valid = first + row < rows && column < width;
        const int64_t element = valid ? static_cast<int64_t>(first + row) * width + column : 0;
        copy_async(piece(tile, row, index), matrix + element, valid);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
linear_gemm(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* weight,
            const float* residual, void* y, int32_t rows, int32_t width, int32_t y_f32) {
    extern __shared__ __align__(128) unsigned char shared[];
    wait_for_predecessor();
    const int live = counts[live_word], m0 = blockIdx.x * TILE_M, n0 = blockIdx.y * TILE_N;
    if (m0 >= live) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int warp_m = warp / WARPS_N * (TILE_M / WARPS_M), warp_n = warp % WARPS_N * 32;
    const uint32_t base = shared_address(shared);
    const int steps = (width + DEPTH - 1) / DEPTH;
    auto stage = [&](int step) {
        if (step < steps) {
            const uint32_t tile = base + step % STAGES * STAGE_BYTES;
            fetch<TILE_M>(tile, x, m0, live, step * DEPTH, width);
            fetch<TILE_N>(tile + TILE_M * DEPTH * 2, weight, n0, rows, step * DEPTH, width);
        }
        commit_copies();
    };
    float acc[FRAGMENTS_M][FRAGMENTS_N][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) stage(s);
    for (int step = 0; step < steps; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        stage(step + STAGES - 1);
        const uint32_t a_tile = base + step % STAGES * STAGE_BYTES, b_tile = a_tile + TILE_M * DEPTH * 2;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) {
            uint32_t a[FRAGMENTS_M][4], b[FRAGMENTS_N / 2][4];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                load_matrix(a[i], piece(a_tile, warp_m + i * 16 + lane % 16, 2 * k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N / 2; ++j) {
                load_matrix(b[j], piece(b_tile, warp_n + j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
                for (int j = 0; j < FRAGMENTS_N; ++j) {
                    mma(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = m0 + warp_m + i * 16 + lane / 4 + e / 2 * 8;
            if (token >= live) continue;
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j) {
                const int row = n0 + warp_n + j * 8 + lane % 4 * 2 + e % 2;
                if (row >= rows) continue;
                const int64_t element = static_cast<int64_t>(token) * rows + row;
                float value = acc[i][j][e];
                if (residual) value += residual[element];
                if (y_f32) static_cast<float*>(y)[element] = value;
                else static_cast<uint16_t*>(y)[element] = narrow(value);
            }
        }
    }
}
