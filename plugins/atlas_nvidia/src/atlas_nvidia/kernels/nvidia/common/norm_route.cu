// Norm, router and choice of experts in one launch, for any number of tokens; made for few.
//
// A cluster of eight blocks has eight tokens. Its blocks share out the experts, and send the logits of the i-th token to
// the i-th block, which chooses.
#ifndef GEMV_DEPTH
#define GEMV_DEPTH 4
#endif
#include "gemv.cuh"
#include "heads_of_cluster.cuh"
#include "route.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
norm_route(const int32_t* counts, const float* x, const void* norm_weight, const uint16_t* router, uint16_t* normed,
           int32_t* experts, float* weights, int32_t width, int32_t expert_count, int32_t top_k, int32_t capacity,
           float eps, int32_t normalise, float scale, int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ __align__(16) float logits[MAX_EXPERTS];
    __shared__ float odds[MAX_CHOICES], partial[GEMV_WARPS];
    const int first = blockIdx.y * MAX_NORM_COLUMNS;
    NormColumns norm = norm_columns(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS] - first, capacity);
    if (norm.live <= 0) {
        admit_successor();
        wait_for_predecessor();
        return;
    }
    fill_up(logits, expert_count);
    cluster_arrive();
    const float* rows = x + static_cast<int64_t>(first) * width;
    gemv<1>(
        (expert_count + TILE_ROWS - 1) / TILE_ROWS, width, shared,
        [&](int tile, int i) { return router + static_cast<int64_t>(min(tile * TILE_ROWS + i, expert_count - 1)) * width; },
        [&] {
            norm.fetch(norm_weight, norm_type);
            cluster_wait();  // nobody writes into the shared memory of a block that has not begun
            admit_successor();
            wait_for_predecessor();
            norm.normalise(rows, eps);
        },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float a, float b, int) {
            if (token >= norm.live) return;
            const int expert = tile * TILE_ROWS + i;
            const uint32_t there = of_block(shared_address(logits + expert), token);
            if (expert < expert_count) {
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(a * norm.scale) : "memory");
            }
            if (expert + 8 < expert_count) {
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there + 32), "f"(b * norm.scale) : "memory");
            }
        });
    __syncwarp();
    cluster_arrive();
    const int mine = static_cast<int>(cluster_rank());
    const int64_t token = first + mine;
    if (mine < norm.live) {
        const float factor = norm.factor(mine, eps);
        for (int k = threadIdx.x * 8; k < width; k += GEMV_THREADS * 8) {
            float v[8];
            load_floats(rows + static_cast<int64_t>(mine) * width + k, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= factor * norm.weight[k + i];
            *reinterpret_cast<uint4*>(normed + token * width + k) = pack8(v);
        }
    }
    __syncwarp();
    cluster_wait();
    if (mine >= norm.live) return;
    route_softmax<GEMV_THREADS>(logits, odds, partial, expert_count, top_k, normalise != 0, scale,
                                experts + token * top_k, weights + token * top_k);
}
