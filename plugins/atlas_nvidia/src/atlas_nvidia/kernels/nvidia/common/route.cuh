// The choice of experts. An expert's place in the order of its scores is the number of those that beat it, which all
// experts count at once: no search, and of equal scores the first is taken.
#pragma once
#include "device.cuh"

namespace atlas {

constexpr int MAX_EXPERTS = 1024, MAX_CHOICES = 32;

// Scores [first, end) that come before score `index`. Scores are never NaN.
__device__ inline int beaten_by(const float* scores, int index, int first, int end) {
    const float mine = scores[index];
    int count = 0;
    for (int other = first; other < end; ++other) {
        const float theirs = scores[other];
        count += theirs > mine || (theirs == mine && other < index);
    }
    return count;
}

// The same for all `count` scores of an array that is aligned to 16 bytes and ends with a multiple of four.
__device__ inline int beaten_by_all(const float* scores, int index, int count) {
    const float mine = scores[index];
    int beaten = 0;
#pragma unroll 4
    for (int other = 0; other < count; other += 4) {
        const float4 theirs = *reinterpret_cast<const float4*>(scores + other);
        beaten += theirs.x > mine || (theirs.x == mine && other < index);
        beaten += theirs.y > mine || (theirs.y == mine && other + 1 < index);
        beaten += theirs.z > mine || (theirs.z == mine && other + 2 < index);
        beaten += theirs.w > mine || (theirs.w == mine && other + 3 < index);
    }
    return beaten;
}

// What fills up an array of scores: it beats nobody.
__device__ inline void fill_up(float* scores, int count) {
    if (threadIdx.x < 4 && count + threadIdx.x < (count + 3) / 4 * 4) scores[count + threadIdx.x] = -INFINITY;
}

// The sum of value(i) for i < count over a block whose threads all call this, in one order whatever happens.
// `partial` has room for a value of each warp, and is free again behind the next barrier.
template <int THREADS, class Value>
__device__ inline float block_sum(float* partial, int count, Value value) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += value(i);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / WARP; ++w) total += partial[w];
    return total;
}

// softmax over `count` logits in shared memory, of which the `top_k` likeliest are stored, likeliest first.
// All threads call it; `logits` must be complete and filled up, and `odds` [top_k] and `partial` [warps] are its own.
template <int THREADS>
__device__ inline void route_softmax(const float* logits, float* odds, float* partial, int count, int top_k,
                                     bool normalise, float scale, int32_t* experts, float* weights) {
    for (int e = threadIdx.x; e < count; e += THREADS) {
        const int place = beaten_by_all(logits, e, count);
        if (place >= top_k) continue;
        odds[place] = logits[e];
        experts[place] = e;
    }
    __syncthreads();
    const float best = odds[0];
    const float total = normalise ? block_sum<THREADS>(partial, top_k, [&](int i) { return expf(odds[i] - best); })
                                  : block_sum<THREADS>(partial, count, [&](int i) { return expf(logits[i] - best); });
    for (int i = threadIdx.x; i < top_k; i += THREADS) weights[i] = expf(odds[i] - best) / total * scale;
}

}  // namespace atlas
