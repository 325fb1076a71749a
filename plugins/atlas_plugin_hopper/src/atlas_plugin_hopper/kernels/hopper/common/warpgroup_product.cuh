// The product of gemm.cuh with wgmma: a warpgroup multiplies 64 tokens with 128 weight rows, both from shared memory.
#pragma once
#include "gemm.cuh"
#include "wgmma.cuh"

namespace atlas {

#define SUMS(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])

// acc[64 x 128] += a[64 x 16] b[128 x 16]ᵀ, started. The sums of a thread are as those of mma.sync, warp w having rows
// 16 w of the warpgroup's 64.
__device__ inline void start_product(float (&acc)[TILE_N / 8][4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
                 " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                 " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
                 " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, 1, 1, 1, 0, 0;"
                 : SUMS(0), SUMS(1), SUMS(2), SUMS(3),
                   SUMS(4), SUMS(5), SUMS(6), SUMS(7),
                   SUMS(8), SUMS(9), SUMS(10), SUMS(11),
                   SUMS(12), SUMS(13), SUMS(14), SUMS(15)
                 : "l"(a), "l"(b));
}

#undef SUMS

class WarpgroupProduct {
  public:
    // The tensor cores read shared memory past the order of ordinary writes.
    __device__ void publish() const { publish_shared(); }

    __device__ void start(uint32_t x_tile, uint32_t weight_tile) {
        const uint32_t mine = x_tile + threadIdx.x / 128 * 64 * GEMM_DEPTH * 2;
        begin_products();
#pragma unroll
        for (int k = 0; k < GEMM_DEPTH / 16; ++k) {
            start_product(acc_, summed_inside(mine + k * 32), summed_inside(weight_tile + k * 32));
        }
        commit_products();
    }

    __device__ void finish(uint32_t, uint32_t) {
        wait_products<0>();
    }

    __device__ void put(float* sums) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* to = sums + (threadIdx.x / WARP * 16 + lane / 4 + half * 8) * SUM_STRIDE + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < TILE_N / 8; ++j) {
                *reinterpret_cast<float2*>(to + j * 8) = make_float2(acc_[j][2 * half], acc_[j][2 * half + 1]);
            }
        }
    }

  private:
    float acc_[TILE_N / 8][4] = {};
};

}  // namespace atlas
