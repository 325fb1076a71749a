// Products of one token with the rows of weights that a block owns, layer after layer: one warp copies a layer's rows
// while another layer is computed, the others share out the summed dimension of all rows and keep their chunks in
// registers, as fragments of the left operand of mma, before the token is there.
#pragma once
#include "tma.cuh"

namespace atlas {

constexpr int WARPS = 12, CONSUMERS = WARPS * WARP, GATHERERS = 4, STAGES = 2;

// Weights of layers are read once a step: they give way in the L2 cache to what stays there (narrow_head.cu).
__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    uint64_t once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(once) : "memory");
}
__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Whether this warp is one of those that wait for what all have written to shared memory; the others go on.
__device__ inline bool gathers(int warp, int which) {
    __syncwarp();
    if (warp < GATHERERS) asm volatile("bar.sync %0, %1;" ::"r"(which), "n"(CONSUMERS) : "memory");
    else asm volatile("bar.arrive %0, %1;" ::"r"(which), "n"(CONSUMERS) : "memory");
    return warp < GATHERERS;
}
__device__ inline float sum_of(const float (&parts)[WARPS]) {
    const float4* four = reinterpret_cast<const float4*>(parts);
    const float4 a = four[0], b = four[1], c = four[2];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)) + ((c.x + c.y) + (c.z + c.w));
}

// A layer's rows in shared memory, STAGES layers of them. `full` and `empty`: a barrier a stage.
struct Stages {
    uint32_t at, bytes, full, empty;

    __device__ void begin() const {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ uint32_t begin_fill(int layer, int expected, int lane) const {
        const int slot = layer % STAGES;
        barrier_wait(empty + 8 * slot, layer / STAGES % 2 ^ 1);
        if (lane == 0) barrier_expect(full + 8 * slot, expected);
        __syncwarp();
        return at + slot * bytes;
    }
    __device__ uint32_t begin_read(int layer) const {
        barrier_wait(full + 8 * (layer % STAGES), layer / STAGES % 2);
        return at + layer % STAGES * bytes;
    }
    __device__ void end_read(int layer, int lane) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * (layer % STAGES));
    }
};

// A warp's share of products of a vector [K] with ROWS rows.
template <int K, int ROWS>
struct Share {
    static_assert(K % (16 * WARPS) == 0, "a warp has whole steps of 16");
    static constexpr int CHUNK = K / WARPS, STEPS = CHUNK / 16, TILES = (ROWS + 15) / 16;
    static constexpr int PITCH = 2 * K + 16, BYTES = ROWS * PITCH;  // rows of ldmatrix meet no bank twice
    uint32_t a[TILES][STEPS][4];

    __device__ void load(uint32_t rows, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const uint32_t row = rows + min(16 * n + lane % 16, ROWS - 1) * PITCH + 2 * (warp * CHUNK + lane / 16 * 8);
#pragma unroll
            for (int s = 0; s < STEPS; ++s) load_matrix(a[n][s], row + 32 * s);
        }
    }
    // This warp's part of every row's sum; the vector's fragments are the same in all columns.
    __device__ void multiply(const uint32_t (&b)[STEPS][2], float (*sums)[WARPS], int warp, int lane) const {
        float acc[TILES][4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                mma(acc[n], a[n][s][0], a[n][s][1], a[n][s][2], a[n][s][3], b[s][0], b[s][1]);
            }
        }
        if (lane % 4 == 0) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const int row = 16 * n + lane / 4;
                if (row < ROWS) sums[row][warp] = acc[n][0];
                if (row + 8 < ROWS) sums[row + 8][warp] = acc[n][2];
            }
        }
    }
};

// Where a pair of elements lies among fragments, so that a lane's two of a step are neighbours.
__device__ inline int place_of(int pair) { return pair / 8 * 8 + pair % 4 * 2 + pair / 4 % 2; }

}  // namespace atlas
