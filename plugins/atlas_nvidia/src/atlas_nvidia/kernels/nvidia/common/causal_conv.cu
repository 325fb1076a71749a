// silu of a depthwise convolution of four taps along each sequence, and the same with heads brought to length one
// behind it. A thread has 4 channels of a run of tokens of one row; runs begin at multiples of `run` tokens of their
// row, so that only the first of a row reads the state, and it alone writes the new one.
#include "recurrent.cuh"

using namespace atlas;

namespace {

constexpr int TAPS = 4, BEFORE = TAPS - 1, VECTOR = 4, THREADS = 256;
constexpr int AHEAD = 8;  // tokens that are asked for at once

__device__ uint2 load8(const void* address) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address) : "memory");
    return v;
}
__device__ void as_floats(const uint4& v, float (&out)[VECTOR]) {
    out[0] = __uint_as_float(v.x);
    out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z);
    out[3] = __uint_as_float(v.w);
}
__device__ void unpack(const uint2& v, float (&out)[VECTOR]) {
    out[0] = widen(static_cast<uint16_t>(v.x));
    out[1] = widen(static_cast<uint16_t>(v.x >> 16));
    out[2] = widen(static_cast<uint16_t>(v.y));
    out[3] = widen(static_cast<uint16_t>(v.y >> 16));
}

__device__ void store(uint16_t* to, const float (&v)[VECTOR]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// Finish: (token, column, values) → void; all threads of a block call it for the same tokens, those of columns that
// do not exist too.
template <class Finish>
__device__ void convolve(const int32_t* counts, const uint16_t* x, const void* weight, const int32_t* cu_q,
                         const int32_t* row_slot, const int32_t* slots, float* state, int channels, int slot_stride,
                         int capacity, int run, int weight_type, Finish finish) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    const bool real = column < channels;
    float taps[VECTOR][TAPS] = {};
    if (real) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) load_taps(weight, column + i, weight_type, taps[i]);
    }
    admit_successor();
    wait_for_predecessor();
    const RowPart at = locate(blockIdx.x, counts, cu_q, row_slot, slots, slot_stride, capacity,
                              [&](const StateRow& row) { return (row.tokens + run - 1) / run; });
    if (!at.found) return;
    const StateRow& row = at.row;
    const int64_t apart = static_cast<int64_t>(BEFORE) * channels;
    // What stood `index` tokens behind the beginning of the row; negative ones are in the state.
    auto input = [&](int index, float(&v)[VECTOR]) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) v[i] = 0.0f;
        if (!real) return;
        if (index >= 0) {
            unpack(load8(x + static_cast<int64_t>(row.first + index) * channels + column), v);
        } else if (!row.fresh()) {
            const float* from = state + row.in * apart + (BEFORE + index) * channels + column;
            as_floats(load16(from), v);
        }
    };
    const int first = at.part * run, last = min(first + run, row.tokens);
    float window[TAPS][VECTOR];
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) input(first - BEFORE + i, window[i]);
    if (first == 0) {
        float kept[BEFORE][VECTOR];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) input(row.tokens - BEFORE + i, kept[i]);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
            float* to = state + row.out * apart + static_cast<int64_t>(i) * channels + column;
            if (real) *reinterpret_cast<float4*>(to) = make_float4(kept[i][0], kept[i][1], kept[i][2], kept[i][3]);
        }
    }
    for (int index = first; index < last; index += AHEAD) {
        uint2 raw[AHEAD];
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const bool wanted = real && index + ahead < last;
            raw[ahead] = make_uint2(0, 0);
            if (wanted) raw[ahead] = load8(x + static_cast<int64_t>(row.first + index + ahead) * channels + column);
        }
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (index + ahead >= last) break;
            unpack(raw[ahead], window[BEFORE]);
            float v[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) sum += window[tap][i] * taps[i][tap];
                v[i] = quick_silu(sum);
#pragma unroll
                for (int tap = 0; tap < BEFORE; ++tap) window[tap][i] = window[tap + 1][i];
            }
            finish(row.first + index + ahead, column, v);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv1d(const int32_t* counts, const uint16_t* x, const void* weight, const int32_t* cu_q,
              const int32_t* row_slot, const int32_t* slots, float* state, uint16_t* y, int32_t channels,
              int32_t slot_stride, int32_t capacity, int32_t run, int32_t weight_type) {
    convolve(counts, x, weight, cu_q, row_slot, slots, state, channels, slot_stride, capacity, run, weight_type,
             [&](int token, int column, float(&v)[VECTOR]) {
                 if (column >= channels) return;
                 store(y + static_cast<int64_t>(token) * channels + column, v);
             });
}

extern "C" __global__ void __launch_bounds__(THREADS)
conv_l2_norm(const int32_t* counts, const uint16_t* x, const void* weight, const int32_t* cu_q,
             const int32_t* row_slot, const int32_t* slots, float* state, uint16_t* y, int32_t channels,
             int32_t slot_stride, int32_t capacity, int32_t run, int32_t weight_type, int32_t heads, int32_t head_dim, float eps) {
    convolve(counts, x, weight, cu_q, row_slot, slots, state, channels, slot_stride, capacity, run, weight_type,
             [&](int token, int column, float(&v)[VECTOR]) {
                 float square = 0.0f;
#pragma unroll
                 for (int i = 0; i < VECTOR; ++i) square += v[i] * v[i];
                 const float factor = rsqrtf(lanes_sum(square, head_dim / VECTOR) + eps);
                 if (column >= channels) return;
#pragma unroll
                 for (int i = 0; i < VECTOR; ++i) v[i] *= column < heads * head_dim ? factor : 1.0f;
                 store(y + static_cast<int64_t>(token) * channels + column, v);
             });
}
