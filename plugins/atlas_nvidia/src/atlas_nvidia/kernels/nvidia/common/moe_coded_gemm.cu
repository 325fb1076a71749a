// moe_gemm.cuh for weights that are codes (expert_codes.cuh): a thread widens what it has loaded a step before into the tile
// in shared memory, where mma.sync finds matrices as it always does.
#include "expert_codes.cuh"
#include "moe_gemm.cuh"
#include "warp_product.cuh"
#include "wide_codes.cuh"

using namespace atlas;

namespace {

template <int PARTS>
using Weights = WideCodes<TILE_N, PARTS, GEMM_DEPTH, GEMM_THREADS>;

template <class Part>
__device__ inline void widen_into(Part& part, uint32_t tile, int steps) {
    part.fetch(steps, [&](int row, int index, const uint4& v) { put_shared(piece(tile, row, index), v); });
}

__device__ inline float4 factors_of(const CodedExperts& stack, int64_t row) {
    const float4 f = __ldg(reinterpret_cast<const float4*>(stack.factors + row));
    return make_float4(f.x * CODE_FACTOR, f.y * CODE_FACTOR, f.z * CODE_FACTOR, f.w * CODE_FACTOR);
}

}  // namespace

// See moe_gemm.cuh.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
moe_coded_gemm_gate_up(const void* tiles, const int32_t* order, const uint16_t* x, const float* weights,
                       const void* gate, const void* up, uint16_t* inner, int32_t hidden, int32_t size, int32_t top_k,
                       int32_t expert_count) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int HALF = TILE_N / 2;
    admit_successor();
    wait_for_predecessor();
    const MoeTile tile = static_cast<const MoeTile*>(tiles)[blockIdx.y];
    if (tile.size == 0) return;
    const int n0 = blockIdx.x * HALF, steps = (hidden + GEMM_DEPTH - 1) / GEMM_DEPTH;
    const CodedExperts gates(gate, expert_count, size, hidden), ups(up, expert_count, size, hidden);
    const int64_t first = static_cast<int64_t>(tile.expert) * size + n0;
    Weights<2> part([&](int which) { return SomeRows{which ? ups : gates, first, size - n0}; });
    GatheredPart x_part(x, tile.size, hidden, [&](int row) { return order[tile.first + row] / top_k; });
    const float* sums =
        tile_sums<WarpProduct>(shared, hidden, tile.size, x_part, [&](uint32_t to) { widen_into(part, to, steps); });
    for (int e = threadIdx.x; e < tile.size * (HALF / 4); e += GEMM_THREADS) {
        const int row = e / (HALF / 4), column = e % (HALF / 4) * 4;
        if (n0 + column >= size) continue;
        const float4 g = *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + column);
        const float4 u = *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + HALF + column);
        const float4 a = factors_of(gates, first + column), b = factors_of(ups, first + column);
        const float by = weights[order[tile.first + row]];
        uint16_t* to = inner + static_cast<int64_t>(tile.first + row) * size + n0 + column;
        store_four(to, silu(g.x * a.x) * u.x * b.x * by, silu(g.y * a.y) * u.y * b.y * by,
                   silu(g.z * a.z) * u.z * b.z * by, silu(g.w * a.w) * u.w * b.w * by);
    }
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
moe_coded_gemm_down(const void* tiles, const int32_t* order, const uint16_t* inner, const void* down, uint16_t* outer,
                    int32_t hidden, int32_t size, int32_t expert_count) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    wait_for_predecessor();
    const MoeTile tile = static_cast<const MoeTile*>(tiles)[blockIdx.y];
    if (tile.size == 0) return;
    const int n0 = blockIdx.x * TILE_N, steps = (size + GEMM_DEPTH - 1) / GEMM_DEPTH;
    const CodedExperts downs(down, expert_count, hidden, size);
    const int64_t first = static_cast<int64_t>(tile.expert) * hidden + n0;
    Weights<1> part([&](int) { return SomeRows{downs, first, hidden - n0}; });
    GatheredPart x_part(inner, tile.size, size, [&](int row) { return tile.first + row; });
    const float* sums =
        tile_sums<WarpProduct>(shared, size, tile.size, x_part, [&](uint32_t to) { widen_into(part, to, steps); });
    for (int e = threadIdx.x; e < tile.size * (TILE_N / 4); e += GEMM_THREADS) {
        const int row = e / (TILE_N / 4), column = e % (TILE_N / 4) * 4;
        if (n0 + column >= hidden) continue;
        const float4 v = *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + column);
        const float4 f = factors_of(downs, first + column);
        store_four(outer + static_cast<int64_t>(order[tile.first + row]) * hidden + n0 + column, v.x * f.x, v.y * f.y,
                   v.z * f.z, v.w * f.w);
    }
}
