// Ops on rows, 8 elements a thread: rows of an embedding or of a hidden state, sums, SwiGLU. Grids cover the bucket.
#include "device.cuh"

using namespace atlas;

namespace {

// Which 8 elements this thread owns: row and column, or no row when there is nothing live to do.
struct Place {
    bool live;
    int row, column;
    int64_t element;
};

__device__ Place place(int rows, int width) {
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    const int row = static_cast<int>(index / width);
    return {row < rows, row, static_cast<int>(index % width), index};
}

__device__ void store(uint16_t* y, int64_t element, const uint4& v) { *reinterpret_cast<uint4*>(y + element) = v; }

}  // namespace

// The beginning of the residual stream: rows of a table, widened.
extern "C" __global__ void __launch_bounds__(256)
embed(const int32_t* counts, int32_t live_word, const int32_t* tokens, const uint16_t* table, float* y, int32_t width) {
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float v[8];
    unpack(load16(table + static_cast<int64_t>(tokens[p.row]) * width + p.column), v);
    store_floats(y + p.element, v);
}

// Rows of the residual stream, as they are.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const int32_t* counts, int32_t live_word, const int32_t* index, const float* x, float* y, int32_t width) {
    admit_successor();
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float v[8];
    load_floats(x + static_cast<int64_t>(index[p.row]) * width + p.column, v);
    store_floats(y + p.element, v);
}

// Onto the residual stream.
extern "C" __global__ void __launch_bounds__(256)
add(const int32_t* counts, int32_t live_word, const float* x, const uint16_t* z, float* y, int32_t width) {
    admit_successor();
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float a[8], b[8];
    load_floats(x + p.element, a);
    unpack(load16(z + p.element), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    store_floats(y + p.element, a);
}

// Of activations.
extern "C" __global__ void __launch_bounds__(256)
add_activations(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* z, uint16_t* y,
                int32_t width) {
    admit_successor();
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float a[8], b[8];
    unpack(load16(x + p.element), a);
    unpack(load16(z + p.element), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    store(y, p.element, pack8(a));
}

extern "C" __global__ void __launch_bounds__(256)
bias_add(const int32_t* counts, int32_t live_word, const uint16_t* x, const void* bias, uint16_t* y, int32_t width,
         int32_t bias_type) {
    admit_successor();
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float a[8], b[8];
    unpack(load16(x + p.element), a);
    load_vector(bias, p.column, bias_type, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    store(y, p.element, pack8(a));
}

// act(gate) * up.
template <typename Act>
__device__ inline void gated(const int32_t* counts, int32_t live_word, const uint16_t* gate, const uint16_t* up,
                             uint16_t* y, int32_t width, Act act) {
    admit_successor();
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float a[8], b[8];
    unpack(load16(gate + p.element), a);
    unpack(load16(up + p.element), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = act(a[i]) * b[i];
    store(y, p.element, pack8(a));
}

extern "C" __global__ void __launch_bounds__(256)
silu_mul(const int32_t* counts, int32_t live_word, const uint16_t* gate, const uint16_t* up, uint16_t* y,
         int32_t width) {
    gated(counts, live_word, gate, up, y, width, [](float x) { return silu(x); });
}

// gelu by tanh: with u = sqrt(2/pi) * (x + 0.044715 * x^3), (1 + tanh(u)) / 2 is the sigmoid of 2u.
__device__ inline float gelu(float x) { return x * sigmoid(1.59576912160573071176f * x * (1.0f + 0.044715f * x * x)); }

extern "C" __global__ void __launch_bounds__(256)
gelu_mul(const int32_t* counts, int32_t live_word, const uint16_t* gate, const uint16_t* up, uint16_t* y,
         int32_t width) {
    gated(counts, live_word, gate, up, y, width, [](float x) { return gelu(x); });
}

// A gate for each feature, or one for the row (``gates`` is 1).
extern "C" __global__ void __launch_bounds__(256)
sigmoid_mul(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* gate, uint16_t* y,
            int32_t width, int32_t gates) {
    admit_successor();
    wait_for_predecessor();
    const Place p = place(counts[live_word], width);
    if (!p.live) return;
    float a[8], b[8];
    unpack(load16(x + p.element), a);
    if (gates == 1) {
        const float one = widen(*static_cast<const volatile uint16_t*>(gate + p.row));
#pragma unroll
        for (int i = 0; i < 8; ++i) b[i] = one;
    } else {
        unpack(load16(gate + p.element), b);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] *= sigmoid(b[i]);
    store(y, p.element, pack8(a));
}
