// x / sqrt(mean(x²) + eps) * weight, one block a row of the residual stream.
#include "device.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(256)
rms_norm(const int32_t* counts, int32_t live_word, const float* x, const void* weight, uint16_t* y, int32_t width,
         float eps, int32_t weight_type) {
    __shared__ float partial[8];
    admit_successor();
    wait_for_predecessor();
    const int row = blockIdx.x;
    if (row >= counts[live_word]) return;
    const float* from = x + static_cast<int64_t>(row) * width;
    float square = 0.0f;
    for (int k = threadIdx.x * 8; k < width; k += blockDim.x * 8) {
        float v[8];
        load_floats(from + k, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) square += v[i] * v[i];
    }
    square = warp_sum(square);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = square;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += partial[w];
    const float factor = rsqrtf(sum / static_cast<float>(width) + eps);
    for (int k = threadIdx.x * 8; k < width; k += blockDim.x * 8) {
        float v[8], w[8];
        load_floats(from + k, v);
        load_vector(weight, k, weight_type, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= factor * w[i];
        *reinterpret_cast<uint4*>(y + static_cast<int64_t>(row) * width + k) = pack8(v);
    }
}
