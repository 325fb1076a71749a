// The end of the down projections of a mixture's experts: sums of every warp of every block of a cluster.
#pragma once
#include "cluster.cuh"
#include "moe.cuh"

namespace atlas {

constexpr int MAX_BLOCKS = 8;  // of a cluster

// `sums` [MOE_WARPS][capacity][N] of this block, written before the call; the cluster has `blocks`, which store equal parts
// of y [live][hidden], from `first_row` on.
template <int N>
__device__ inline void store_experts(float* sums, int live, int capacity, int hidden, int first_row, int block, int blocks,
                                     const float* residual, void* y, int y_f32) {
    __syncthreads();
    // The sums of a block lie where those of its first warp were.
    for (int e = threadIdx.x; e < live * N; e += MOE_THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < MOE_WARPS; ++w) sum += sums[w * capacity * N + e];
        sums[e] = sum;
    }
    cluster_sync();
    for (int e = block * MOE_THREADS + threadIdx.x; e < live * N; e += blocks * MOE_THREADS) {
        float value = 0.0f;
#pragma unroll
        for (int b = 0; b < MAX_BLOCKS; ++b) {
            if (b < blocks) value += of_block(sums, b)[e];
        }
        const int64_t element = static_cast<int64_t>(e / N) * hidden + first_row + e % N;
        if (residual) value += residual[element];
        if (y_f32) static_cast<float*>(y)[element] = value;
        else static_cast<uint16_t*>(y)[element] = narrow(value);
    }
    cluster_sync();  // nobody leaves while others still read its sums
}

}  // namespace atlas
