// Products of prompts with their experts: tiles of 128 choices of one expert (moe_sort.cu) and 256 weight rows, multiplied by
// two warpgroups of 64 choices each as in linear_tma.cu. A third brings them: weights by the tensor memory accelerator,
// tokens of gate and up, which lie anywhere, piece by piece. Blocks are as many as the machine has processors and walk over
// the tiles, rows varying fastest, so that those of one expert share its weights in the L2 cache.
#include "moe_tiles.cuh"
#include "silu.cuh"
#include "tma.cuh"

#ifndef STAGES
#define STAGES 4
#endif

using namespace atlas;

namespace {

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

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_tma_gate_up(const void* tiles, const int32_t* order, const uint16_t* x, const float* weights,
                const __grid_constant__ CUtensorMap gate, const __grid_constant__ CUtensorMap up, uint16_t* inner,
                int32_t hidden, int32_t size, int32_t top_k, int32_t most) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t words[2 * STAGES];
    Ring ring(shared, words);
    admit_successor();
    if (threadIdx.x == 0) ring.begin(1 + WARPGROUP);
    __syncthreads();
    wait_for_predecessor();
    const MoeTile* list = static_cast<const MoeTile*>(tiles);
    const int columns = (size + HALF - 1) / HALF, steps = (hidden + DEPTH - 1) / DEPTH;
    if (threadIdx.x < WARPGROUP) {
        give_registers<56>();
        constexpr int APART = WARPGROUP / 8, COUNT = TOKENS / APART;
        const int row = threadIdx.x / 8, part = threadIdx.x % 8;
        ring.parity = 1;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            uint32_t from[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int at = row + i * APART;
                from[i] = at < tile.size ? static_cast<uint32_t>(order[tile.first + at] / top_k) * hidden + part * 8 : 0;
            }
            const int first = tile.expert * size + column * HALF;
            for (int step = 0; step < steps; ++step) {
                barrier_wait(ring.empty(ring.stage), ring.parity);
                const uint32_t full = ring.full(ring.stage);
                if (threadIdx.x == 0) {
                    barrier_expect(full, ROWS * DEPTH * 2);
                    copy_tile(ring.weights(), &gate, step * DEPTH, first, full);
                    copy_tile(ring.weights() + HALF * DEPTH * 2, &up, step * DEPTH, first, full);
                }
                const bool inside = step * DEPTH + part * 8 < hidden;
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const bool exists = inside && row + i * APART < tile.size;
                    copy_async(swizzled(ring.x(), row + i * APART, part), x + (exists ? from[i] + step * DEPTH : 0), exists);
                }
                barrier_arrive_after_copies(full);
                ring.advance();
            }
        });
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        take_registers<224>();
        const int group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % WARP;
        const int row = group * 64 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            if (group * 64 >= tile.size) {
                pass_by(ring, steps, group);
                return;
            }
            float acc[ROWS / 8][4];
            sum_up(acc, ring, steps, group);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row + half * 8 >= tile.size) continue;
                const int64_t place = tile.first + row + half * 8;
                const float by = weights[order[place]];
                uint16_t* to = inner + place * size;
#pragma unroll
                for (int j = 0; j < HALF / 8; ++j) {
                    const int at = column * HALF + j * 8 + lane % 4 * 2;
                    if (at >= size) break;
                    const float(&gate)[4] = acc[j];
                    const float(&up)[4] = acc[j + HALF / 8];
                    const float2 two = silu_mul(make_float2(gate[2 * half], gate[2 * half + 1]),
                                                make_float2(up[2 * half], up[2 * half + 1]), 1.0f);
                    *reinterpret_cast<uint32_t*>(to + at) = pack(two.x * by, two.y * by);
                }
            }
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_tma_down(const void* tiles, const int32_t* order, const __grid_constant__ CUtensorMap inner,
             const __grid_constant__ CUtensorMap down, uint16_t* outer, int32_t hidden, int32_t size, int32_t most) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t words[2 * STAGES];
    Ring ring(shared, words);
    admit_successor();
    if (threadIdx.x == 0) ring.begin(1);
    __syncthreads();
    wait_for_predecessor();
    const MoeTile* list = static_cast<const MoeTile*>(tiles);
    const int columns = (hidden + ROWS - 1) / ROWS, steps = (size + DEPTH - 1) / DEPTH;
    if (threadIdx.x < WARPGROUP) {
        give_registers<56>();
        if (threadIdx.x != 0) return;
        ring.parity = 1;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            for (int step = 0; step < steps; ++step) {
                barrier_wait(ring.empty(ring.stage), ring.parity);
                const uint32_t full = ring.full(ring.stage);
                barrier_expect(full, STAGE_BYTES);
                // Rows behind the tile's are another expert's, and their sums are not stored.
                copy_tile(ring.x(), &inner, step * DEPTH, tile.first, full);
                copy_tile(ring.weights(), &down, step * DEPTH, tile.expert * hidden + column * ROWS, full);
                ring.advance();
            }
        });
    } else {
        take_registers<224>();
        const int group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % WARP;
        const int row = group * 64 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            if (group * 64 >= tile.size) {
                pass_by(ring, steps, group);
                return;
            }
            float acc[ROWS / 8][4];
            sum_up(acc, ring, steps, group);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row + half * 8 >= tile.size) continue;
                uint16_t* to = outer + static_cast<int64_t>(order[tile.first + row + half * 8]) * hidden;
#pragma unroll
                for (int j = 0; j < ROWS / 8; ++j) {
                    const int at = column * ROWS + j * 8 + lane % 4 * 2;
                    if (at >= hidden) break;
                    *reinterpret_cast<uint32_t*>(to + at) = pack(acc[j][2 * half], acc[j][2 * half + 1]);
                }
            }
        });
    }
}
