// Experts of a token from its logits, one block a token.
#include "route.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = 128;

// The token's logits into shared memory. False when there is no token.
__device__ bool load_scores(const int32_t* counts, int32_t live_word, const float* logits, int count, float* scores) {
    admit_successor();
    wait_for_predecessor();
    const int token = blockIdx.x;
    if (token >= counts[live_word]) return false;
    const volatile float* from = logits + static_cast<int64_t>(token) * count;
    for (int e = threadIdx.x; e < count; e += THREADS) scores[e] = from[e];
    fill_up(scores, count);
    __syncthreads();
    return true;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
moe_route(const int32_t* counts, int32_t live_word, const float* logits, int32_t* experts, float* weights,
          int32_t count, int32_t top_k, int32_t normalise, float scale) {
    __shared__ __align__(16) float scores[MAX_EXPERTS];
    __shared__ float odds[MAX_CHOICES], partial[THREADS / WARP];
    if (!load_scores(counts, live_word, logits, count, scores)) return;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * top_k;
    route_softmax<THREADS>(scores, odds, partial, count, top_k, normalise != 0, scale, experts + first,
                           weights + first);
}

// The bias counts for the choice only. Groups whose two best experts have the largest sum are open, the others closed.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_route_sigmoid(const int32_t* counts, int32_t live_word, const float* logits, const void* bias, int32_t* experts,
                  float* weights, int32_t count, int32_t top_k, int32_t groups, int32_t top_groups, int32_t normalise,
                  float scale, int32_t bias_type) {
    __shared__ float scores[MAX_EXPERTS], biased[MAX_EXPERTS], strength[MAX_EXPERTS], chosen[MAX_CHOICES];
    __shared__ float best[MAX_EXPERTS][2];
    __shared__ float partial[THREADS / WARP];
    if (!load_scores(counts, live_word, logits, count, scores)) return;
    const int each = count / groups;
    for (int e = threadIdx.x; e < count; e += THREADS) {
        scores[e] = 1.0f / (1.0f + expf(-scores[e]));
        biased[e] = scores[e] + load_element(bias, e, bias_type);
    }
    for (int g = threadIdx.x; g < groups; g += THREADS) best[g][1] = 0.0f;  // of groups of one expert
    __syncthreads();
    for (int e = threadIdx.x; e < count; e += THREADS) {
        const int group = e / each, place = beaten_by(biased, e, group * each, (group + 1) * each);
        if (place < 2) best[group][place] = biased[e];
    }
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += THREADS) strength[g] = best[g][0] + best[g][1];
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += THREADS) best[g][0] = beaten_by(strength, g, 0, groups);
    __syncthreads();
    for (int e = threadIdx.x; e < count; e += THREADS) {
        if (best[e / each][0] >= static_cast<float>(top_groups)) biased[e] = -INFINITY;
    }
    __syncthreads();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * top_k;
    for (int e = threadIdx.x; e < count; e += THREADS) {
        const int place = beaten_by(biased, e, 0, count);
        if (place >= top_k) continue;
        chosen[place] = scores[e];
        experts[first + place] = e;
    }
    __syncthreads();
    float total = 1.0f;
    if (normalise) total = block_sum<THREADS>(partial, top_k, [&](int i) { return chosen[i]; }) + 1e-20f;
    for (int i = threadIdx.x; i < top_k; i += THREADS) weights[first + i] = chosen[i] / total * scale;
}
