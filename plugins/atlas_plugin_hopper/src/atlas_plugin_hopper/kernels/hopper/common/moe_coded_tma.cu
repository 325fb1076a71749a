// The same as moe_tma.cu for experts whose weights are codes (expert_codes.cuh): the warpgroup that brings the tiles
// widens codes into them, those of a stage while others are multiplied. Of the 168 registers of each thread it gives 64,
// and takes none that were not there: who asks for more than all have together waits for ever.
#include "expert_codes.cuh"
#include "moe_ring.cuh"
#include "wide_codes.cuh"

using namespace atlas;

namespace {

__device__ inline float2 factors_of(const CodedExperts& stack, int64_t row) {
    const float2 f = __ldg(reinterpret_cast<const float2*>(stack.factors + row));
    return make_float2(f.x * CODE_FACTOR, f.y * CODE_FACTOR);
}

template <int PARTS>
using Weights = WideCodes<ROWS, PARTS, DEPTH, WARPGROUP>;

template <class Part>
__device__ inline void widen_into(Part& part, uint32_t tile, int steps) {
    part.fetch(steps, [&](int row, int index, const uint4& v) { put_shared(swizzled(tile, row, index), v); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_coded_tma_gate_up(const void* tiles, const int32_t* order, const uint16_t* x, const float* weights,
                      const void* gate, const void* up, uint16_t* inner, int32_t hidden, int32_t size, int32_t top_k,
                      int32_t most, int32_t expert_count) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t words[2 * STAGES];
    __shared__ uint32_t from[TOKENS];  // where the tokens of a tile begin
    Ring ring(shared, words);
    admit_successor();
    if (threadIdx.x == 0) ring.begin(2 * WARPGROUP);
    __syncthreads();
    wait_for_predecessor();
    const MoeTile* list = static_cast<const MoeTile*>(tiles);
    const CodedExperts gates(gate, expert_count, size, hidden), ups(up, expert_count, size, hidden);
    const int columns = (size + HALF - 1) / HALF, steps = (hidden + DEPTH - 1) / DEPTH;
    if (threadIdx.x < WARPGROUP) {
        give_registers<104>();
        constexpr int APART = WARPGROUP / 8, COUNT = TOKENS / APART;
        const int row = threadIdx.x / 8, part = threadIdx.x % 8;
        ring.parity = 1;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            named_wait(1 + CONSUMERS, WARPGROUP);  // nobody needs those of the tile before
            const int own = min(static_cast<int>(threadIdx.x), tile.size - 1);
            from[threadIdx.x] = static_cast<uint32_t>(order[tile.first + own] / top_k) * hidden;
            named_wait(1 + CONSUMERS, WARPGROUP);
            const int64_t first = static_cast<int64_t>(tile.expert) * size + column * HALF;
            Weights<2> codes([&](int which) { return SomeRows{which ? ups : gates, first, size - column * HALF}; });
            for (int step = 0; step < steps; ++step) {
                barrier_wait(ring.empty(ring.stage), ring.parity);
                const uint32_t full = ring.full(ring.stage);
                const bool inside = step * DEPTH + part * 8 < hidden;
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const bool exists = inside && row + i * APART < tile.size;
                    copy_async(swizzled(ring.x(), row + i * APART, part), x + from[row + i * APART] + (exists ? step * DEPTH + part * 8 : 0), exists);
                }
                barrier_arrive_after_copies(full);
                widen_into(codes, ring.weights(), steps);
                barrier_arrive(full);
                ring.advance();
            }
        });
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        take_registers<200>();
        const int group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % WARP;
        const int row = group * 64 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            if (group * 64 >= tile.size) {
                pass_by(ring, steps, group);
                return;
            }
            float acc[ROWS / 8][4];
            sum_up(acc, ring, steps, group);
            const int64_t first = static_cast<int64_t>(tile.expert) * size;
            int64_t place[2];
            float by[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                place[half] = tile.first + min(row + half * 8, tile.size - 1);
                by[half] = weights[order[place[half]]];
            }
#pragma unroll
            for (int j = 0; j < HALF / 8; ++j) {
                const int at = column * HALF + j * 8 + lane % 4 * 2;
                if (at >= size) break;
                const float2 a = factors_of(gates, first + at), b = factors_of(ups, first + at);
                const float(&gate)[4] = acc[j];
                const float(&up)[4] = acc[j + HALF / 8];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (row + half * 8 >= tile.size) continue;
                    const float2 two = silu_mul(make_float2(gate[2 * half] * a.x, gate[2 * half + 1] * a.y),
                                                make_float2(up[2 * half] * b.x, up[2 * half + 1] * b.y), 1.0f);
                    *reinterpret_cast<uint32_t*>(inner + place[half] * size + at) = pack(two.x * by[half], two.y * by[half]);
                }
            }
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
moe_coded_tma_down(const void* tiles, const int32_t* order, const __grid_constant__ CUtensorMap inner, const void* down,
                   uint16_t* outer, int32_t hidden, int32_t size, int32_t most, int32_t expert_count) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t words[2 * STAGES];
    Ring ring(shared, words);
    admit_successor();
    if (threadIdx.x == 0) ring.begin(1 + WARPGROUP);
    __syncthreads();
    wait_for_predecessor();
    const MoeTile* list = static_cast<const MoeTile*>(tiles);
    const CodedExperts downs(down, expert_count, hidden, size);
    const int columns = (hidden + ROWS - 1) / ROWS, steps = (size + DEPTH - 1) / DEPTH;
    if (threadIdx.x < WARPGROUP) {
        give_registers<104>();
        ring.parity = 1;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            const int64_t first = static_cast<int64_t>(tile.expert) * hidden + column * ROWS;
            Weights<1> codes([&](int) { return SomeRows{downs, first, hidden - column * ROWS}; });
            for (int step = 0; step < steps; ++step) {
                barrier_wait(ring.empty(ring.stage), ring.parity);
                const uint32_t full = ring.full(ring.stage);
                if (threadIdx.x == 0) {
                    barrier_expect(full, X_BYTES);
                    // Rows behind the tile's are another expert's, and their sums are not stored.
                    copy_tile(ring.x(), &inner, step * DEPTH, tile.first, full);
                }
                widen_into(codes, ring.weights(), steps);
                barrier_arrive(full);
                ring.advance();
            }
        });
    } else {
        take_registers<200>();
        const int group = threadIdx.x / WARPGROUP - 1, lane = threadIdx.x % WARP;
        const int row = group * 64 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
        walk(list, most, columns, [&](const MoeTile& tile, int column) {
            if (group * 64 >= tile.size) {
                pass_by(ring, steps, group);
                return;
            }
            float acc[ROWS / 8][4];
            sum_up(acc, ring, steps, group);
            const int64_t first = static_cast<int64_t>(tile.expert) * hidden;
            uint16_t* to[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to[half] = outer + static_cast<int64_t>(order[tile.first + min(row + half * 8, tile.size - 1)]) * hidden;
            }
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j) {
                const int at = column * ROWS + j * 8 + lane % 4 * 2;
                if (at >= hidden) break;
                const float2 by = factors_of(downs, first + at);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (row + half * 8 >= tile.size) continue;
                    *reinterpret_cast<uint32_t*>(to[half] + at) = pack(acc[j][2 * half] * by.x, acc[j][2 * half + 1] * by.y);
                }
            }
        });
    }
}
