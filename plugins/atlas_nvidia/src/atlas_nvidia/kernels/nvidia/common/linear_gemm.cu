// gemm.cuh with mma.sync.
#include "warp_product.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
linear_gemm(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* weight,
            const float* residual, void* y, int32_t rows, int32_t width, int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    gemm<WarpProduct>(counts, live_word, x, weight, residual, y, rows, width, y_f32, shared);
}
