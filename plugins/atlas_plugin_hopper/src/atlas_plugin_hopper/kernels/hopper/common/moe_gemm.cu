// moe_gemm.cuh with wgmma.
#include "moe_gemm.cuh"
#include "warpgroup_product.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
moe_gemm_gate_up(const void* tiles, const int32_t* order, const uint16_t* x, const float* weights, const uint16_t* gate,
                 const uint16_t* up, uint16_t* inner, int32_t hidden, int32_t size, int32_t top_k) {
    extern __shared__ __align__(1024) unsigned char shared[];
    moe_gemm_gate_up<WarpgroupProduct>(static_cast<const MoeTile*>(tiles), order, x, weights, gate, up, inner, hidden, size,
                                top_k, shared);
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
moe_gemm_down(const void* tiles, const int32_t* order, const uint16_t* inner, const uint16_t* down, uint16_t* outer,
              int32_t hidden, int32_t size) {
    extern __shared__ __align__(1024) unsigned char shared[];
    moe_gemm_down<WarpgroupProduct>(static_cast<const MoeTile*>(tiles), order, inner, down, outer, hidden, size, shared);
}
