// The product of gemm.cuh with mma.sync, which every architecture here has.
#pragma once
#include "gemm.cuh"

namespace atlas {

// A warp has 32 weight rows of 64 tokens.
class WarpProduct {
  public:
    __device__ void publish() const {}
    __device__ void start(uint32_t, uint32_t) const {}

    __device__ void finish(uint32_t x_tile, uint32_t weight_tile) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int k = 0; k < GEMM_DEPTH / 16; ++k) {
            uint32_t a[M][4], b[N / 2][4];
#pragma unroll
            for (int i = 0; i < M; ++i) {
                load_matrix(a[i], piece(x_tile, first_token() + i * 16 + lane % 16, 2 * k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < N / 2; ++j) {
                const int row = first_row() + j * 16 + lane / 16 * 8 + lane % 8;
                load_matrix(b[j], piece(weight_tile, row, 2 * k + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < M; ++i) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    mma(acc_[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

    __device__ void put(float* sums) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < M; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* to = sums + (first_token() + i * 16 + lane / 4 + half * 8) * SUM_STRIDE + first_row();
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    *reinterpret_cast<float2*>(to + j * 8 + lane % 4 * 2) =
                        make_float2(acc_[i][j][2 * half], acc_[i][j][2 * half + 1]);
                }
            }
        }
    }

  private:
    static constexpr int M = 4, N = 4, WARPS_N = TILE_N / 32;

    static __device__ int first_token() { return threadIdx.x / WARP / WARPS_N * 64; }
    static __device__ int first_row() { return threadIdx.x / WARP % WARPS_N * 32; }

    float acc_[M][N][4] = {};
};

}  // namespace atlas
