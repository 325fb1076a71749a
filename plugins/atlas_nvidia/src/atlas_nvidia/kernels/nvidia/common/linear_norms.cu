// Norms of single heads in front of and behind linear attention. A thread has 8 features, and 2^n neighbouring threads
// a head: blocks are columns of rows, so that no head is divided between warps.
#include "recurrent.cuh"

using namespace atlas;

namespace {

constexpr int VECTOR = 8;

__device__ float square_sum(const float (&v)[VECTOR], int head_dim) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) square += v[i] * v[i];
    return lanes_sum(square, head_dim / VECTOR);
}

}  // namespace

// Heads over their length; features behind `heads` of them are copied.
extern "C" __global__ void __launch_bounds__(256)
l2_norm(const int32_t* counts, int32_t live_word, const uint16_t* x, uint16_t* y, int32_t width, int32_t heads,
        int32_t head_dim, float eps) {
    admit_successor();
    wait_for_predecessor();
    const int row = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
    if (row >= counts[live_word]) return;
    const int64_t element = static_cast<int64_t>(row) * width + column;
    float v[VECTOR] = {};
    if (column < width) unpack(load16(x + element), v);
    const float factor = rsqrtf(square_sum(v, head_dim) + eps);
    if (column >= width) return;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] *= column < heads * head_dim ? factor : 1.0f;
    *reinterpret_cast<uint4*>(y + element) = pack8(v);
}

// x / sqrt(mean(x²) + eps) * weight * silu(gate), head by head with one weight.
extern "C" __global__ void __launch_bounds__(256)
gated_rms_norm(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* gate, const void* weight,
               uint16_t* y, int32_t width, int32_t head_dim, float eps, int32_t weight_type) {
    admit_successor();
    wait_for_predecessor();
    const int row = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, live = counts[live_word];
    const int64_t element = static_cast<int64_t>(row) * width + column;
    // Rows that are not live hold anything: they are read beside the count, and not used.
    const bool real = column < width;
    const uint4 raw = real ? load16(x + element) : zero16(), gates = real ? load16(gate + element) : zero16();
    float v[VECTOR], g[VECTOR], w[VECTOR] = {};
    unpack(raw, v);
    unpack(gates, g);
    if (real) load_vector(weight, column % head_dim, weight_type, w);
    const float factor = rsqrtf(square_sum(v, head_dim) / static_cast<float>(head_dim) + eps);
    if (!real || row >= live) return;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] *= factor * w[i] * quick_silu(g[i]);
    *reinterpret_cast<uint4*>(y + element) = pack8(v);
}
