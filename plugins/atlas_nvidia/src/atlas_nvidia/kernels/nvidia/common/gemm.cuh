// y = x · weightᵀ (+ residual) for many tokens: tiles of TILE_M tokens and TILE_N weight rows on the tensor cores,
// GEMM_STAGES stages of 64 summed elements in shared memory. Rows of 128 bytes are swizzled by 16-byte pieces, so that
// neither the copies nor the products meet bank conflicts. Where tiles are few, the blocks of a cluster share out the
// summed dimension of one tile, and each stores some of its tokens.
#pragma once
#include "cluster_tile.cuh"
#include "device.cuh"

#ifndef TILE_M
#define TILE_M 64
#endif
#ifndef GEMM_STAGES
#define GEMM_STAGES 4
#endif

namespace atlas {

constexpr int GEMM_DEPTH = 64, GEMM_THREADS = 2 * TILE_M;
constexpr int X_BYTES = TILE_M * GEMM_DEPTH * 2, STAGE_BYTES = X_BYTES + TILE_N * GEMM_DEPTH * 2;
static_assert(TILE_M * SUM_STRIDE * 4 <= GEMM_STAGES * STAGE_BYTES, "finished sums lie where the stages were");

// Where 8 elements of a row lie in a tile of rows of 128 bytes, which is aligned to 1024.
__device__ inline uint32_t piece(uint32_t tile, int row, int index) {
    return tile + row * GEMM_DEPTH * 2 + ((index ^ (row & 7)) * 16);
}

// The 16-byte pieces of a tile's rows [first, first + COUNT) that this thread copies: one column of pieces, every
// GEMM_THREADS / 8 rows. Zeros stand for rows and columns that the matrix does not have; they are never read.
template <int COUNT>
struct TilePart {
    static constexpr int APART = GEMM_THREADS / 8;
    const uint16_t* from;
    int64_t apart;
    int rows, column, width;
    uint32_t to;

    __device__ TilePart(const uint16_t* matrix, int first, int all_rows, int k, int row_width) : width(row_width) {
        const int row = threadIdx.x / 8, index = threadIdx.x % 8;
        rows = all_rows - first - row;
        column = k + index * 8;
        from = matrix + static_cast<int64_t>(first + row) * width + column;
        apart = static_cast<int64_t>(APART) * width;
        to = piece(0, row, index);
    }

    // The next GEMM_DEPTH columns, into the tile.
    __device__ void fetch(uint32_t tile) {
#pragma unroll
        for (int i = 0; i < COUNT / APART; ++i) {
            copy_async(tile + to + i * APART * GEMM_DEPTH * 2, from + i * apart, i * APART < rows && column < width);
        }
        from += GEMM_DEPTH;
        column += GEMM_DEPTH;
    }
};

// Product: publish() follows this thread's copies and precedes a barrier; start(x tile, weight tile) begins to add one
// stage, finish(the same) has read it when it returns, and later copies are asked for in between; put(sums) writes what
// this thread holds of the tile, [TILE_M][SUM_STRIDE].
template <class Product>
__device__ inline void gemm(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint16_t* weight,
                            const float* residual, void* y, int rows, int width, int y_f32, unsigned char* shared) {
    admit_successor();
    const int live = counts[live_word], m0 = blockIdx.x * TILE_M, n0 = blockIdx.y * TILE_N;
    if (m0 >= live) {
        wait_for_predecessor();
        return;
    }
    const int splits = gridDim.z, split = blockIdx.z;
    const uint32_t base = shared_address(shared);
    const int all_steps = (width + GEMM_DEPTH - 1) / GEMM_DEPTH, each = (all_steps + splits - 1) / splits;
    const int first_step = split * each, steps = max(0, min(each, all_steps - first_step));
    TilePart<TILE_M> x_part(x, m0, live, first_step * GEMM_DEPTH, width);
    TilePart<TILE_N> weight_part(weight, n0, rows, first_step * GEMM_DEPTH, width);
    auto stage_x = [&](int step) {
        if (step < steps) x_part.fetch(base + step % GEMM_STAGES * STAGE_BYTES);
    };
    auto stage_weight = [&](int step) {
        if (step < steps) weight_part.fetch(base + step % GEMM_STAGES * STAGE_BYTES + X_BYTES);
    };
    // Groups complete in order, and the first one holds all the weights so far: the loop below needs no other start.
    for (int s = 0; s < GEMM_STAGES - 1; ++s) stage_weight(s);
    wait_for_predecessor();
    for (int s = 0; s < GEMM_STAGES - 1; ++s) {
        stage_x(s);
        commit_copies();
    }
    Product product;
    for (int step = 0; step < steps; ++step) {
        wait_copies<GEMM_STAGES - 2>();
        product.publish();
        __syncthreads();
        const uint32_t tile = base + step % GEMM_STAGES * STAGE_BYTES;
        product.start(tile, tile + X_BYTES);
        stage_weight(step + GEMM_STAGES - 1);
        stage_x(step + GEMM_STAGES - 1);
        commit_copies();
        product.finish(tile, tile + X_BYTES);
    }
    wait_copies<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    product.put(sums);
    store_tile<TILE_M, GEMM_THREADS, true>(sums, {residual, y, rows, y_f32}, m0, n0, min(TILE_M, live - m0));
}

}  // namespace atlas
