// What kernels with recurrent states share: where a row's state lies, how far it decays, and which part of which row a
// block has. States are float32 [places, ...] of one layer.
#pragma once
#include "device.cuh"

namespace atlas {

// One row of a step: its tokens, the place that its state is read from (unless it is at position 0, and starts from
// zeros) and the one that it is written to.
struct StateRow {
    int first, tokens, position, in, out;
    __device__ bool fresh() const { return position == 0; }
};

__device__ inline StateRow state_row(const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots, int stride,
                                     int row) {
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[row]) * stride;
    const int first = cu_q[row];
    return {first, cu_q[row + 1] - first, slot[ATLAS_POSITION], slot[ATLAS_STATE_IN], slot[ATLAS_STATE_OUT]};
}

// The same row, or one without tokens where there is no such row. What does not depend on one another is asked for at
// once: three reads in a row instead of five stand before that of a state.
__device__ inline StateRow live_row(const int32_t* counts, const int32_t* cu_q, const int32_t* row_slot,
                                    const int32_t* slots, int stride, int row) {
    const int live = counts[ATLAS_SEQUENCES], first = cu_q[row], end = cu_q[row + 1], own = row_slot[row];
    if (row >= live || end == first) return {0, 0, 0, 0, 0};
    const int32_t* slot = slots + static_cast<int64_t>(own) * stride;
    return {first, end - first, slot[ATLAS_POSITION], slot[ATLAS_STATE_IN], slot[ATLAS_STATE_OUT]};
}

// Part `index` of all rows together, when a row has parts(row) of them: which row that is, and which of its parts. All
// lanes of a warp ask for the same. `capacity` bounds the rows that there is room for; what does not depend on one
// another is asked for at once.
struct RowPart {
    bool found;
    StateRow row;
    int part;
};

template <class Parts>
__device__ inline RowPart locate(int index, const int32_t* counts, const int32_t* cu_q, const int32_t* row_slot,
                                 const int32_t* slots, int stride, int capacity, Parts parts) {
    const int lane = threadIdx.x % WARP, live = counts[ATLAS_SEQUENCES];
    for (int start = 0; start < capacity; start += WARP) {
        const int at = min(start + lane, capacity - 1), first = cu_q[at], end = cu_q[at + 1], own_slot = row_slot[at];
        StateRow row = {first, 0, 0, 0, 0};
        if (start + lane < live) {
            const int32_t* slot = slots + static_cast<int64_t>(own_slot) * stride;
            row = {first, end - first, slot[ATLAS_POSITION], slot[ATLAS_STATE_IN], slot[ATLAS_STATE_OUT]};
        }
        const int own = row.tokens == 0 ? 0 : parts(row);
        int through = own;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int before = __shfl_up_sync(~0u, through, distance);
            if (lane >= distance) through += before;
        }
        const unsigned beyond = __ballot_sync(~0u, through > index);
        if (beyond) {
            const int owner = __ffs(beyond) - 1;
            auto of_owner = [&](int value) { return __shfl_sync(~0u, value, owner); };
            return {true,
                    {of_owner(row.first), of_owner(row.tokens), of_owner(row.position), of_owner(row.in), of_owner(row.out)},
                    index - of_owner(through - own)};
        }
        index -= __shfl_sync(~0u, through, WARP - 1);
    }
    return {};
}

// The four taps of a channel's convolution.
__device__ inline void load_taps(const void* filters, int64_t channel, int type, float (&taps)[4]) {
    if (type == VECTOR_F32) {
        const float4 v = static_cast<const float4*>(filters)[channel];
        taps[0] = v.x;
        taps[1] = v.y;
        taps[2] = v.z;
        taps[3] = v.w;
        return;
    }
    const uint2 raw = static_cast<const uint2*>(filters)[channel];
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
        taps[i] = type == VECTOR_F16 ? widen_f16(bits) : widen_bf16(bits);
    }
}

// log2 of what a token leaves of the state: -exp(a_log) softplus(a + dt_bias), in base 2.
__device__ inline float decay_log2(float a, float a_log, float dt_bias) {
    const float x = a + dt_bias;
    return -LOG2E * expf(a_log) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

// silu where it is most of the work: a division of two instructions instead of ten, off by two units of the last place.
__device__ inline float quick_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// The sum over 2^n neighbouring lanes, in all of them.
__device__ inline float lanes_sum(float v, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

}  // namespace atlas
