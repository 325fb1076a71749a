// Many tokens' choices of experts, sorted: one block. The order within an expert may differ between runs; no result
// depends on it.
#include "moe_tiles.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = 1024, MOST_EXPERTS = 1024, AT_ONCE = 8;

// use(choice, expert) for all of them, with AT_ONCE loads of a thread in flight.
template <class Use>
__device__ inline void each_choice(const int32_t* experts, int choices, Use use) {
    for (int start = threadIdx.x; start < choices; start += THREADS * AT_ONCE) {
        int32_t found[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int c = start + i * THREADS;
            found[i] = c < choices ? __ldcg(experts + c) : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (found[i] >= 0) use(start + i * THREADS, found[i]);
        }
    }
}

}  // namespace

// order [choices]: choices by expert. tiles [most]: runs of up to ``tile_tokens`` of one expert; those without any are
// empty. A choice is token * top_k + place.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_sort(const int32_t* counts, int32_t live_word, const int32_t* experts, int32_t* order, void* tiles,
         int32_t expert_count, int32_t top_k, int32_t tile_tokens, int32_t most) {
    __shared__ int32_t next[MOST_EXPERTS];  // the next place of a choice of each expert
    __shared__ int32_t size[MOST_EXPERTS], first_tile[MOST_EXPERTS + 1];
    admit_successor();
    const int choices = counts[live_word] * top_k;
    for (int e = threadIdx.x; e < expert_count; e += THREADS) size[e] = 0;
    __syncthreads();
    wait_for_predecessor();
    each_choice(experts, choices, [&](int, int expert) { atomicAdd(size + expert, 1); });
    __syncthreads();
    if (threadIdx.x < WARP) {
        int before = 0, tiles_before = 0;
        for (int start = 0; start < expert_count; start += WARP) {
            const int e = start + threadIdx.x, own = e < expert_count ? size[e] : 0;
            const int own_tiles = (own + tile_tokens - 1) / tile_tokens;
            int sum = own, tile_sum = own_tiles;
#pragma unroll
            for (int distance = 1; distance < WARP; distance *= 2) {
                const int other = __shfl_up_sync(~0u, sum, distance), more = __shfl_up_sync(~0u, tile_sum, distance);
                if (static_cast<int>(threadIdx.x) >= distance) {
                    sum += other;
                    tile_sum += more;
                }
            }
            if (e < expert_count) {
                next[e] = before + sum - own;
                first_tile[e] = tiles_before + tile_sum - own_tiles;
            }
            before += __shfl_sync(~0u, sum, WARP - 1);
            tiles_before += __shfl_sync(~0u, tile_sum, WARP - 1);
        }
        if (threadIdx.x == 0) first_tile[expert_count] = tiles_before;
    }
    __syncthreads();
    MoeTile* list = static_cast<MoeTile*>(tiles);
    for (int t = threadIdx.x; t < most; t += THREADS) {
        if (t >= first_tile[expert_count]) list[t] = {0, 0, 0, 0};
    }
    for (int e = threadIdx.x; e < expert_count; e += THREADS) {
        for (int t = first_tile[e], at = 0; at < size[e]; at += tile_tokens, ++t) {
            list[t] = {e, next[e] + at, min(tile_tokens, size[e] - at), 0};
        }
    }
    __syncthreads();
    each_choice(experts, choices, [&](int c, int expert) { order[atomicAdd(next + expert, 1)] = c; });
}

// The sum of a token's choices, onto the residual stream if there is one; 8 elements a thread.
extern "C" __global__ void __launch_bounds__(256)
moe_combine(const int32_t* counts, int32_t live_word, const uint16_t* outer, const float* residual, void* y,
            int32_t hidden, int32_t top_k, int32_t y_f32) {
    admit_successor();
    wait_for_predecessor();
    const int64_t element = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    const int64_t token = element / hidden;
    if (token >= counts[live_word]) return;
    const uint16_t* from = outer + token * top_k * hidden + element % hidden;
    float sum[8] = {};
    for (int place = 0; place < top_k; ++place, from += hidden) {
        float v[8];
        unpack(load16(from), v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += v[i];
    }
    if (residual) {
        float v[8];
        load_floats(residual + element, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += v[i];
    }
    if (y_f32) store_floats(static_cast<float*>(y) + element, sum);
    else *reinterpret_cast<uint4*>(static_cast<uint16_t*>(y) + element) = pack8(sum);
}
