// y = x · weightᵀ (+ residual) for prompts: tiles of 128 tokens and 256 weight rows, copied by the tensor memory
// accelerator and multiplied by two warpgroups of 64 tokens each (after CUTLASS's "cooperative" schedule).
//
// Two blocks of a cluster take the same weight rows and neighbouring tokens; each fetches half of the weights for both, which
// halves what the L2 cache has to give. Clusters are as many as the machine holds and walk over the tiles, so that the
// copies of the next tile run while the sums of the last are stored.
#include "tma.cuh"

#ifndef STAGES
#define STAGES 4
#endif

using namespace atlas;

namespace {

constexpr int TOKENS = 128, ROWS = 256, DEPTH = PANEL, CONSUMERS = 2, PEERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int X_BYTES = TOKENS * DEPTH * 2, SHARE_BYTES = ROWS / PEERS * DEPTH * 2;
constexpr int STAGE_BYTES = X_BYTES + PEERS * SHARE_BYTES;

__device__ uint32_t block_in_cluster() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ void meet_peer() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}

__device__ void arrive_at(uint32_t barrier, int block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(block)
                 : "memory");
}

// copy_tile into the shared memory of both blocks, announced at the barriers of both.
__device__ void copy_tile_to_all(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3)) : "memory");
}

// Which tile comes at which turn: the tokens of a pair of blocks vary fastest, so that clusters that run together share
// weights; past GROUP pairs of tiles of tokens the rows advance, so that they share tokens as well.
struct Walk {
    int pairs, columns;
    static constexpr int GROUP = 2;
    __device__ int count() const { return pairs * columns; }
    __device__ void at(int turn, int& pair, int& column) const {
        const int band = turn / (GROUP * columns), inside = turn % (GROUP * columns);
        const int height = min(GROUP, pairs - band * GROUP);
        pair = band * GROUP + inside % height;
        column = inside / height;
    }
};

constexpr int AT_ONCE = 8;  // groups of 8 sums whose residuals are in flight together

// A thread's sums of one token, two neighbours of each group of 8, with the residual of that token.
__device__ void store_floats(const float (&acc)[32][4], int half, int first, int rows, const float* residual, float* y,
                             int64_t line) {
    const int mine = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int start = 0; start < ROWS / 8; start += AT_ONCE) {
        float2 value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = mine + (start + i) * 8;
            const bool there = residual != nullptr && row < rows;
            value[i] = there ? *reinterpret_cast<const float2*>(residual + line + row) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = mine + (start + i) * 8;
            if (row >= rows) break;
            value[i].x += acc[start + i][2 * half];
            value[i].y += acc[start + i][2 * half + 1];
            *reinterpret_cast<float2*>(y + line + row) = value[i];
        }
    }
}

// The same narrowed. Neighbouring lanes exchange, so that each has four neighbours of every second group: whole sectors.
__device__ void store_elements(const float (&acc)[32][4], int half, int first, int rows, uint16_t* y, int64_t line) {
    const int lane = threadIdx.x % 4, odd = lane & 1;
    const uint32_t members = 0xfu << (threadIdx.x % WARP / 4 * 4);  // those of one token
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += 2) {
        const uint32_t even_group = pack(acc[j][2 * half], acc[j][2 * half + 1]);
        const uint32_t odd_group = pack(acc[j + 1][2 * half], acc[j + 1][2 * half + 1]);
        const uint32_t kept = odd ? odd_group : even_group;
        const uint32_t given = __shfl_xor_sync(members, odd ? even_group : odd_group, 1);
        const int row = first + (j + odd) * 8 + (lane - odd) * 2;
        if (row + 4 <= rows) {
            *reinterpret_cast<uint2*>(y + line + row) = odd ? make_uint2(given, kept) : make_uint2(kept, given);
        } else if (row < rows) {
            *reinterpret_cast<uint32_t*>(y + line + row) = odd ? given : kept;
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
linear_tma(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
           const __grid_constant__ CUtensorMap weight, const float* residual, void* y, int32_t rows, int32_t width,
           int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t barrier_words[2 * STAGES];
    admit_successor();
    const uint32_t base = shared_address(shared), barriers = shared_address(barrier_words);
    auto full = [&](int stage) { return barriers + stage * 8; };
    auto empty = [&](int stage) { return barriers + (STAGES + stage) * 8; };
    const int peer = static_cast<int>(block_in_cluster());
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), CONSUMERS * PEERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_peer();
    const int live = counts[live_word], steps = (width + DEPTH - 1) / DEPTH;
    const Walk walk{(live + PEERS * TOKENS - 1) / (PEERS * TOKENS), (rows + ROWS - 1) / ROWS};
    const int clusters = gridDim.x / PEERS, first = blockIdx.x / PEERS;
    if (threadIdx.x < WARPGROUP) {
        give_registers<40>();
        if (threadIdx.x == 0) {
            int stage = 0, parity = 1;
            bool waited = false;
            for (int turn = first; turn < walk.count(); turn += clusters) {
                int pair, column;
                walk.at(turn, pair, column);
                const int token = (pair * PEERS + peer) * TOKENS, row = column * ROWS + peer * (ROWS / PEERS);
                for (int step = 0; step < steps; ++step) {
                    barrier_wait(empty(stage), parity);
                    barrier_expect(full(stage), STAGE_BYTES);
                    const uint32_t to = base + stage * STAGE_BYTES;
                    copy_tile_to_all(to + X_BYTES + peer * SHARE_BYTES, &weight, step * DEPTH, row, full(stage));
                    if (!waited) {
                        wait_for_predecessor();
                        waited = true;
                    }
                    copy_tile(to, &x, step * DEPTH, token, full(stage));
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
            if (!waited) wait_for_predecessor();
        } else {
            wait_for_predecessor();
        }
    } else {
        take_registers<232>();
        wait_for_predecessor();
        const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
        int stage = 0, parity = 0;
        for (int turn = first; turn < walk.count(); turn += clusters) {
            int pair, column;
            walk.at(turn, pair, column);
            float acc[ROWS / 8][4];
            int last = 0;
            for (int step = 0; step < steps; ++step) {
                barrier_wait(full(stage), parity);
                const uint32_t tile = base + stage * STAGE_BYTES, mine = tile + group * 64 * DEPTH * 2;
                begin_products();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; ++k) {
                    wide_product(acc, summed_inside(mine + k * 32), summed_inside(tile + X_BYTES + k * 32), step + k);
                }
                commit_products();
                if (step) {
                    wait_products<1>();
                    if (thread < PEERS) arrive_at(empty(last), thread);
                }
                last = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            wait_products<0>();
            if (thread < PEERS) arrive_at(empty(last), thread);
            const int token = (pair * PEERS + peer) * TOKENS + group * 64 + thread / WARP * 16 + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (token + half * 8 >= live) continue;
                const int64_t line = static_cast<int64_t>(token + half * 8) * rows;
                if (y_f32) store_floats(acc, half, column * ROWS, rows, residual, static_cast<float*>(y), line);
                else store_elements(acc, half, column * ROWS, rows, static_cast<uint16_t*>(y), line);
            }
        }
    }
    meet_peer();  // nobody leaves while its peer still writes into its shared memory
}
