// y = x · weightᵀ (+ residual) for many tokens: tiles of TILE_M tokens and TILE_N weight rows on the tensor cores,
// GEMM_STAGES stages of 64 summed elements in shared memory. Rows of 128 bytes are swizzled by 16-byte pieces, so that
// neither the copies nor ldmatrix meet bank conflicts. Where tiles are few, the blocks of a cluster share out the
// summed dimension of one tile, and each stores some of its tokens.
#include <cooperative_groups.h>

#include "device.cuh"

#ifndef TILE_M
#define TILE_M 64
#endif
#ifndef TILE_N
#define TILE_N 128
#endif
#ifndef GEMM_STAGES
#define GEMM_STAGES 4
#endif

using namespace atlas;
namespace cg = cooperative_groups;

namespace {

constexpr int DEPTH = 64, PIECES = DEPTH / 8;
constexpr int WARPS_M = 2, WARPS_N = TILE_N / 32, THREADS = WARPS_M * WARPS_N * WARP;
constexpr int FRAGMENTS_M = TILE_M / WARPS_M / 16, FRAGMENTS_N = 4;
constexpr int X_BYTES = TILE_M * DEPTH * 2, STAGE_BYTES = X_BYTES + TILE_N * DEPTH * 2;
constexpr int SUM_STRIDE = TILE_N + 8;  // floats: rows of finished sums, apart by a quarter of the banks
static_assert(TILE_M * SUM_STRIDE * 4 <= GEMM_STAGES * STAGE_BYTES, "finished sums lie where the stages were");

__device__ uint32_t piece(uint32_t tile, int row, int index) {
    return tile + row * DEPTH * 2 + ((index ^ (row & 7)) * 16);
}

// Rows [first, first + COUNT) of a matrix of `rows` rows, columns from k on; zeros outside.
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
    admit_successor();
    const int live = counts[live_word], m0 = blockIdx.x * TILE_M, n0 = blockIdx.y * TILE_N;
    if (m0 >= live) {
        wait_for_predecessor();
        return;
    }
    cg::cluster_group cluster = cg::this_cluster();
    const int splits = gridDim.z, split = blockIdx.z;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int warp_m = warp / WARPS_N * (TILE_M / WARPS_M), warp_n = warp % WARPS_N * 32;
    const uint32_t base = shared_address(shared);
    const int all_steps = (width + DEPTH - 1) / DEPTH, each = (all_steps + splits - 1) / splits;
    const int first_step = split * each, steps = max(0, min(each, all_steps - first_step));
    auto stage_x = [&](int step) {
        const uint32_t tile = base + step % GEMM_STAGES * STAGE_BYTES;
        if (step < steps) fetch<TILE_M>(tile, x, m0, live, (first_step + step) * DEPTH, width);
    };
    auto stage_weight = [&](int step) {
        const uint32_t tile = base + step % GEMM_STAGES * STAGE_BYTES + X_BYTES;
        if (step < steps) fetch<TILE_N>(tile, weight, n0, rows, (first_step + step) * DEPTH, width);
    };
    // Groups complete in order, and the first one holds all the weights so far: the loop below needs no other start.
    for (int s = 0; s < GEMM_STAGES - 1; ++s) stage_weight(s);
    wait_for_predecessor();
    for (int s = 0; s < GEMM_STAGES - 1; ++s) {
        stage_x(s);
        commit_copies();
    }
    float acc[FRAGMENTS_M][FRAGMENTS_N][4] = {};
    for (int step = 0; step < steps; ++step) {
        wait_copies<GEMM_STAGES - 2>();
        __syncthreads();
        stage_weight(step + GEMM_STAGES - 1);
        stage_x(step + GEMM_STAGES - 1);
        commit_copies();
        const uint32_t a_tile = base + step % GEMM_STAGES * STAGE_BYTES, b_tile = a_tile + X_BYTES;
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
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* to = sums + (warp_m + i * 16 + lane / 4 + half * 8) * SUM_STRIDE + warp_n + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j) {
                *reinterpret_cast<float2*>(to + j * 8) = make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
            }
        }
    }
    cluster.sync();
    const int tokens = min(TILE_M, live - m0);
    for (int e = threadIdx.x; e < (TILE_M / splits) * TILE_N; e += THREADS) {
        const int token = e / TILE_N * splits + split, row = n0 + e % TILE_N;
        if (token >= tokens || row >= rows) continue;
        const int64_t element = static_cast<int64_t>(m0 + token) * rows + row;
        const int place = token * SUM_STRIDE + e % TILE_N;
        float value = residual ? residual[element] : 0.0f;
        for (int s = 0; s < splits; ++s) value += cluster.map_shared_rank(sums, s)[place];
        if (y_f32) static_cast<float*>(y)[element] = value;
        else static_cast<uint16_t*>(y)[element] = narrow(value);
    }
    cluster.sync();  // nobody leaves while others still read its shared memory
}
