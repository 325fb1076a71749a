// Products of prompts with their experts (moe_ring.cuh): a warpgroup brings the tiles, weights by the tensor memory accelerator,
// tokens of gate and up, which lie anywhere, piece by piece.
#include "moe_ring.cuh"

using namespace atlas;

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
