// What products of prompts with their experts have in common (moe_tma.cu, moe_coded_tma.cu): tiles of 128 choices of one expert
// (moe_sort.cu) and 256 weight rows, multiplied by two warpgroups of 64 choices each out of a ring in shared memory. Blocks are as
// many as the machine has processors and walk over the tiles, rows varying fastest, so that those of one expert share its weights
// in the L2 cache.
#pragma once
#include "moe_tiles.cuh"
#include "silu.cuh"
#include "tma.cuh"

#ifndef STAGES
#define STAGES 4
#endif

namespace atlas {

constexpr int TOKENS = 128, ROWS = 256, HALF = ROWS / 2, DEPTH = PANEL, CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int X_BYTES = TOKENS * DEPTH * 2, STAGE_BYTES = X_BYTES + ROWS * DEPTH * 2;

// Where all warpgroups are in the ring.
struct Ring {
    uint32_t base, barriers;
    int stage = 0, parity = 0;

    __device__ Ring(const unsigned char* shared, const uint64_t* words)
        : base(shared_address(shared)), barriers(shared_address(words)) {}
    __device__ uint32_t full(int at) const { return barriers + at * 8; }
    __device__ uint32_t empty(int at) const { return barriers + (STAGES + at) * 8; }
    __device__ uint32_t x() const { return base + stage * STAGE_BYTES; }
    __device__ uint32_t weights() const { return x() + X_BYTES; }
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    // By one thread; `fillers` arrive at a stage that is full.
    __device__ void begin(int fillers) const {
        for (int at = 0; at < STAGES; ++at) {
            barrier_init(full(at), fillers);
            barrier_init(empty(at), CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// use(tile of choices, tile of rows) for each turn of this block. Tiles without choices are the last ones.
template <class Use>
__device__ inline void walk(const MoeTile* tiles, int most, int columns, Use use) {
    for (int turn = blockIdx.x; turn < most * columns; turn += gridDim.x) {
        const MoeTile tile = tiles[turn / columns];
        if (tile.size == 0) return;
        use(tile, turn % columns);
    }
}

// The sums of a warpgroup, 64 choices by 256 rows, out of the ring.
__device__ inline void sum_up(float (&acc)[ROWS / 8][4], Ring& ring, int steps, int group) {
    const bool speaks = threadIdx.x % WARPGROUP == 0;
    int last = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(ring.full(ring.stage), ring.parity);
        publish_shared();
        const uint32_t mine = ring.x() + group * 64 * DEPTH * 2, weights = ring.weights();
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) {
            wide_product(acc, summed_inside(mine + k * 32), summed_inside(weights + k * 32), step + k);
        }
        commit_products();
        if (step) {
            wait_products<1>();
            if (speaks) barrier_arrive(ring.empty(last));
        }
        last = ring.stage;
        ring.advance();
    }
    wait_products<0>();
    if (speaks) barrier_arrive(ring.empty(last));
}

// A warpgroup without choices lets its stages pass. All of its warps must have seen one before it is given back: products
// would hold them together, and without them a late warp would find the parity of the stage after the next.
__device__ inline void pass_by(Ring& ring, int steps, int group) {
    for (int step = 0; step < steps; ++step) {
        barrier_wait(ring.full(ring.stage), ring.parity);
        named_wait(1 + group, WARPGROUP);
        if (threadIdx.x % WARPGROUP == 0) barrier_arrive(ring.empty(ring.stage));
        ring.advance();
    }
}

}  // namespace atlas
