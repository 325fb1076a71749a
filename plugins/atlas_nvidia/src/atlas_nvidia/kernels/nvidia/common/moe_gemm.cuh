// Products of many tokens with their experts: the tiles of gemm.cuh over choices sorted by expert (moe_sort.cu).
#pragma once
#include "gemm.cuh"
#include "moe_tiles.cuh"

namespace atlas {

// Rows of a tile that lie anywhere: as TilePart, with an offset for each row.
struct GatheredPart {
    static constexpr int APART = GEMM_THREADS / 8, COUNT = TILE_M / APART;
    const uint16_t* from;
    uint32_t offset[COUNT];
    int rows, column, width;
    uint32_t to;

    // Row i of the tile is row ``row_of(i)`` of the matrix, for i < live.
    template <class RowOf>
    __device__ GatheredPart(const uint16_t* matrix, int live, int row_width, RowOf row_of) : width(row_width) {
        const int row = threadIdx.x / 8, index = threadIdx.x % 8;
        rows = live - row;
        column = index * 8;
        from = matrix + column;
        to = piece(0, row, index);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            offset[i] = i * APART < rows ? static_cast<uint32_t>(row_of(row + i * APART)) * static_cast<uint32_t>(width) : 0;
        }
    }

    __device__ void fetch(uint32_t tile) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool exists = i * APART < rows && column < width;
            copy_async(tile + to + i * APART * GEMM_DEPTH * 2, from + (exists ? offset[i] : 0), exists);
        }
        from += GEMM_DEPTH;
        column += GEMM_DEPTH;
    }
};

// The sums of a tile into shared memory, [TILE_M][SUM_STRIDE] floats; of `live` rows, and of those beside them. Copies:
// fetch(weight tile) for the next columns.
template <class Product, class Copies>
__device__ inline float* tile_sums(unsigned char* shared, int width, int live, GatheredPart& x_part,
                                   Copies fetch_weights) {
    const uint32_t base = shared_address(shared);
    const int steps = (width + GEMM_DEPTH - 1) / GEMM_DEPTH;
    auto stage = [&](int step) {
        if (step < steps) {
            const uint32_t to = base + step % GEMM_STAGES * STAGE_BYTES;
            fetch_weights(to + X_BYTES);
            x_part.fetch(to);
        }
        commit_copies();
    };
    for (int s = 0; s < GEMM_STAGES - 1; ++s) stage(s);
    Product product;
    const bool works = static_cast<int>(threadIdx.x) / 128 * 64 < live;  // four warps have 64 rows
    for (int step = 0; step < steps; ++step) {
        wait_copies<GEMM_STAGES - 2>();
        product.publish();
        __syncthreads();
        const uint32_t tile = base + step % GEMM_STAGES * STAGE_BYTES;
        if (works) product.start(tile, tile + X_BYTES);
        stage(step + GEMM_STAGES - 1);
        if (works) product.finish(tile, tile + X_BYTES);
    }
    wait_copies<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    if (works) product.put(sums);
    __syncthreads();
    return sums;
}

__device__ inline void store_four(uint16_t* to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(a, b), pack(c, d));
}

// silu(gate x) * (up x), times the weight of the choice, at the choice's place in the order. A tile is 64 rows of gate
// and the same of up. grid: (tiles of rows, tiles of choices)
template <class Product>
__device__ inline void moe_gemm_gate_up(const MoeTile* tiles, const int32_t* order, const uint16_t* x,
                                        const float* weights, const uint16_t* gate, const uint16_t* up,
                                        uint16_t* inner, int hidden, int size, int top_k, unsigned char* shared) {
    constexpr int HALF = TILE_N / 2;
    admit_successor();
    wait_for_predecessor();
    const MoeTile tile = tiles[blockIdx.y];
    if (tile.size == 0) return;
    const int n0 = blockIdx.x * HALF;
    const int64_t matrix = static_cast<int64_t>(tile.expert) * size * hidden;
    GatheredPart x_part(x, tile.size, hidden, [&](int row) { return order[tile.first + row] / top_k; });
    TilePart<HALF> gate_part(gate + matrix, n0, size, 0, hidden), up_part(up + matrix, n0, size, 0, hidden);
    const float* sums = tile_sums<Product>(shared, hidden, tile.size, x_part, [&](uint32_t to) {
        gate_part.fetch(to);
        up_part.fetch(to + HALF * GEMM_DEPTH * 2);
    });
    for (int e = threadIdx.x; e < tile.size * (HALF / 4); e += GEMM_THREADS) {
        const int row = e / (HALF / 4), column = e % (HALF / 4) * 4;
        if (n0 + column >= size) continue;
        const float4 g = *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + column);
        const float4 u = *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + HALF + column);
        const float by = weights[order[tile.first + row]];
        store_four(inner + static_cast<int64_t>(tile.first + row) * size + n0 + column, silu(g.x) * u.x * by,
                   silu(g.y) * u.y * by, silu(g.z) * u.z * by, silu(g.w) * u.w * by);
    }
}

// down of what moe_gemm_gate_up made, at the choice's own place. grid: (tiles of rows, tiles of choices)
template <class Product>
__device__ inline void moe_gemm_down(const MoeTile* tiles, const int32_t* order, const uint16_t* inner,
                                     const uint16_t* down, uint16_t* outer, int hidden, int size,
                                     unsigned char* shared) {
    admit_successor();
    wait_for_predecessor();
    const MoeTile tile = tiles[blockIdx.y];
    if (tile.size == 0) return;
    const int n0 = blockIdx.x * TILE_N;
    GatheredPart x_part(inner, tile.size, size, [&](int row) { return tile.first + row; });
    TilePart<TILE_N> part(down + static_cast<int64_t>(tile.expert) * hidden * size, n0, hidden, 0, size);
    const float* sums = tile_sums<Product>(shared, size, tile.size, x_part, [&](uint32_t to) { part.fetch(to); });
    for (int e = threadIdx.x; e < tile.size * (TILE_N / 4); e += GEMM_THREADS) {
        const int row = e / (TILE_N / 4), column = e % (TILE_N / 4) * 4;
        if (n0 + column >= hidden) continue;
        const float4 v = *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + column);
        store_four(outer + static_cast<int64_t>(order[tile.first + row]) * hidden + n0 + column, v.x, v.y, v.z, v.w);
    }
}

}  // namespace atlas
