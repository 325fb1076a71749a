// The end of a product in tiles of TILE_N weight rows, the summed dimension of one being shared out among the blocks of a
// cluster (its z): each stores some of the tokens.
#pragma once
#include "cluster.cuh"
#include "device.cuh"

namespace atlas {

constexpr int TILE_N = 128;
constexpr int MAX_SPLITS = 8;           // blocks of a cluster that every device can hold together
constexpr int SUM_STRIDE = TILE_N + 8;  // floats: rows of finished sums, apart by a quarter of the banks

struct Result {
    const float* residual;
    void* y;
    int rows, y_f32;
};

// `sums` [TOKENS][SUM_STRIDE] of this block, written before the call; m0, n0 and `tokens` say where the tile lies and how
// many of its tokens there are. EVEN: the blocks are a power of two, so that each has as many. By the first THREADS threads;
// others arrive at the cluster's barrier twice.
template <int TOKENS, int THREADS, bool EVEN = false>
__device__ inline void store_tile(float* sums, const Result& to, int m0, int n0, int tokens) {
    const int splits = gridDim.z, split = blockIdx.z;
    cluster_sync();
    for (int e = threadIdx.x; e < (EVEN ? TOKENS : TOKENS + splits - 1) / splits * (TILE_N / 4); e += THREADS) {
        const int token = e / (TILE_N / 4) * splits + split, column = e % (TILE_N / 4) * 4;
        const int left = min(4, to.rows - n0 - column);
        if (token >= tokens || left <= 0) continue;
        float4 parts[MAX_SPLITS];
        // All reads at once: each of them takes as long as one from the L2 cache.
#pragma unroll
        for (int s = 0; s < MAX_SPLITS; ++s) {
            if (s >= splits) break;
            const float* other = of_block(sums, s) + token * SUM_STRIDE + column;
            parts[s] = *reinterpret_cast<const float4*>(other);
        }
        float value[4] = {};
#pragma unroll
        for (int s = 0; s < MAX_SPLITS; ++s) {
            if (s >= splits) break;
            value[0] += parts[s].x;
            value[1] += parts[s].y;
            value[2] += parts[s].z;
            value[3] += parts[s].w;
        }
        const int64_t element = static_cast<int64_t>(m0 + token) * to.rows + n0 + column;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= left) break;
            if (to.residual) value[i] += to.residual[element + i];
            if (to.y_f32) static_cast<float*>(to.y)[element + i] = value[i];
            else static_cast<uint16_t*>(to.y)[element + i] = narrow(value[i]);
        }
    }
    cluster_sync();  // nobody leaves while others still read its shared memory
}

}  // namespace atlas
