// Products of up to 64 tokens with a weight [rows, width], bound by the speed at which weights arrive: the copy engine
// brings both in boxes of 64 summed elements (128 bytes, swizzled), a warpgroup multiplies them by wgmma, tokens being
// its left operand, so that a tile may have any number of weight rows that shares them out evenly.
//
// One thread asks for copies and fills the ring with weights before the predecessor has ended. Where tiles are fewer
// than processors, the blocks of a cluster share out the summed dimension of a tile: each pushes its sums to the blocks
// that store them, equal runs of tokens each.
#pragma once
#include <cooperative_groups.h>

#include <utility>

#include "tma.cuh"

namespace atlas {

constexpr int SKINNY_TOKENS = 64, SKINNY_DEPTH = 64, ROW_BYTES = 2 * SKINNY_DEPTH;
constexpr int SKINNY_THREADS = WARPGROUP + WARP;
constexpr int X_BYTES = SKINNY_TOKENS * ROW_BYTES;
constexpr int MAX_STAGES = 16;
constexpr int AHEAD = 4;  // vectors of a thread whose Ahead is asked for before the sums are there

// A box of four dimensions (copy_tile has two): both halves of some pairs of one head's dimensions.
__device__ inline void copy_pairs(uint32_t target, const CUtensorMap* map, int column, int pair, int head,
                                  uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, 0, %4}], [%5];"
                 ::"r"(target), "l"(map), "r"(column), "r"(pair), "r"(head), "r"(barrier) : "memory");
}

#define ATLAS_S1(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define ATLAS_S4(i) ATLAS_S1(i), ATLAS_S1(i + 1), ATLAS_S1(i + 2), ATLAS_S1(i + 3)
#define ATLAS_R32                                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define ATLAS_R48 ATLAS_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ATLAS_R64 ATLAS_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATLAS_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ELEMENT "." ELEMENT " "

// acc[64 x N] += a[64 x 16] b[N x 16]ᵀ, started. The sums of a thread are as those of mma.sync, warp w having rows 16 w.
template <int N>
__device__ inline void start_product(float (*acc)[4], uint64_t a, uint64_t b) {
    static_assert(N == 64 || N == 96 || N == 128, "no instruction is written for this width");
    if constexpr (N == 64) {
        asm volatile(ATLAS_WGMMA(64) "{" ATLAS_R32 "}, %32, %33, 1, 1, 1, 0, 0;"
                     : ATLAS_S4(0), ATLAS_S4(4) : "l"(a), "l"(b));
    } else if constexpr (N == 96) {
        asm volatile(ATLAS_WGMMA(96) "{" ATLAS_R48 "}, %48, %49, 1, 1, 1, 0, 0;"
                     : ATLAS_S4(0), ATLAS_S4(4), ATLAS_S4(8) : "l"(a), "l"(b));
    } else {
        asm volatile(ATLAS_WGMMA(128) "{" ATLAS_R64 "}, %64, %65, 1, 1, 1, 0, 0;"
                     : ATLAS_S4(0), ATLAS_S4(4), ATLAS_S4(8), ATLAS_S4(12) : "l"(a), "l"(b));
    }
}

// The same for all ROWS of a tile, in as few instructions as there are.
template <int ROWS>
__device__ inline void start_products(float (*acc)[4], uint32_t x, uint32_t weight) {
    constexpr int N = ROWS >= 128 ? 128 : ROWS;
    start_product<N>(acc, summed_inside(x), summed_inside(weight));
    if constexpr (ROWS > N) start_products<ROWS - N>(acc + N / 8, x, weight + N * ROW_BYTES);
}

template <int ROWS>
constexpr int STAGE_BYTES = X_BYTES + ROWS * ROW_BYTES;
template <int ROWS>
constexpr int PARTS_BYTES = SKINNY_TOKENS * (ROWS + 8) * 4;

// What the blocks of a cluster push to the one that stores: sums of its tokens, by the block they come from.
template <int ROWS>
struct Parts {
    static constexpr int STRIDE = ROWS + 8;  // floats: neighbouring tokens are apart by a quarter of the banks
    const float* sums;
    int splits, tokens;  // tokens that this block stores

    // Columns [column, column + 4) of one of them.
    __device__ float4 of(int token, int column) const {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int s = 0; s < splits; ++s) {
            const float* from = sums + (s * tokens + token) * STRIDE + column;
            const float4 part = *reinterpret_cast<const float4*>(from);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        return sum;
    }
};

// Weights: (tile, column, target, barrier) → void, asks for ROWS rows of 128 bytes.
// Prepare: () → void, before the predecessor has ended, in the threads that store; Begin: the same behind it.
// Vectors: of a token in a tile, each finished by one thread.
// Ahead:   (tile, token, vector) → any value that Store will want, behind the predecessor.
// Store:   (tile, token, vector, four, ahead) → void; four(column) has the sums of columns [column, column + 4).
//          Tokens are all below `live`.
// The ring has `stages` stages; the sums lie behind it, or in it where nothing can overlap.
template <int ROWS, int VECTORS, class Weights, class Prepare, class Begin, class Ahead, class Store>
__device__ inline void skinny(const CUtensorMap* x, int live, int tiles, int width, int stages, unsigned char* shared,
                              Weights weights, Prepare prepare, Begin begin, Ahead ahead, Store store) {
    constexpr int STAGE = STAGE_BYTES<ROWS>, STRIDE = Parts<ROWS>::STRIDE;
    __shared__ __align__(8) uint64_t barriers[2 * MAX_STAGES];
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int splits = gridDim.y, split = blockIdx.y;
    const int all_steps = (width + SKINNY_DEPTH - 1) / SKINNY_DEPTH, each = (all_steps + splits - 1) / splits;
    const int first = split * each, steps = max(0, min(each, all_steps - first));
    const uint32_t ring = shared_address(shared), full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
    const bool single = tiles <= static_cast<int>(gridDim.x);
    float* sums = reinterpret_cast<float*>(single && splits == 1 ? shared : shared + stages * STAGE);
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPGROUP / WARP);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    cooperative_groups::cluster_group::arrival_token begun;
    if (splits > 1) begun = cluster.barrier_arrive();

    if (threadIdx.x >= WARPGROUP) {
        const bool chosen = threadIdx.x == WARPGROUP;
        const int mine = (tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
        const int total = mine * steps, early = min(stages, total);
        auto column_of = [&](int step) { return (first + step % steps) * SKINNY_DEPTH; };
        auto stage_weights = [&](int step, int stage) {
            barrier_expect(full + 8 * stage, STAGE);
            const int tile = blockIdx.x + step / steps * gridDim.x;
            weights(tile, column_of(step), ring + stage * STAGE + X_BYTES, full + 8 * stage);
        };
        auto stage_x = [&](int step, int stage) {
            copy_tile(ring + stage * STAGE, x, column_of(step), 0, full + 8 * stage);
        };
        if (chosen) {
            for (int step = 0; step < early; ++step) stage_weights(step, step);
            admit_successor();
            wait_for_predecessor();
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        __syncwarp();
        // Nobody sends into the shared memory of a block that has not begun.
        if (splits > 1) cluster.barrier_wait(std::move(begun));
        if (chosen) {
            for (int step = 0; step < early; ++step) stage_x(step, step);
            for (int step = early, stage = 0, parity = 0; step < total; ++step) {
                barrier_wait(empty + 8 * stage, parity);
                stage_weights(step, stage);
                stage_x(step, stage);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
        // Nor does a block leave to which others still send.
        if (splits > 1) cluster.sync();
        return;
    }

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    admit_successor();
    prepare();
    wait_for_predecessor();
    begin();
    if (splits > 1) cluster.barrier_wait(std::move(begun));
    const int tokens = SKINNY_TOKENS / splits;
    const Parts<ROWS> parts{sums, splits, tokens};
    int stage = 0, parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float acc[ROWS / 8][4] = {};
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + 8 * stage, parity);
            const uint32_t at = ring + stage * STAGE;
            begin_products();
#pragma unroll
            for (int k = 0; k < SKINNY_DEPTH / 16; ++k) start_products<ROWS>(acc, at + k * 32, at + X_BYTES + k * 32);
            commit_products();
            wait_products<0>();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        // Of the vectors of its tokens, this thread finishes every WARPGROUP-th.
        using Found = decltype(ahead(0, 0, 0));
        Found found[AHEAD];
        auto look = [&](int start) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int e = start + i * WARPGROUP + threadIdx.x, token = split * tokens + e / VECTORS;
                if (e < tokens * VECTORS && token < live) found[i] = ahead(tile, token, e % VECTORS);
            }
        };
        look(0);
        // Not over what others still read.
        if (splits == 1) asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = warp * 16 + lane / 4 + half * 8;
            float* to = sums + (split * tokens + token % tokens) * STRIDE + lane % 4 * 2;
            if (splits > 1) to = cluster.map_shared_rank(to, token / tokens);
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j) {
                *reinterpret_cast<float2*>(to + j * 8) = make_float2(acc[j][2 * half], acc[j][2 * half + 1]);
            }
        }
        if (splits > 1) cluster.sync();
        else asm volatile("bar.sync 1, 128;" ::: "memory");
        for (int start = 0; start < tokens * VECTORS; start += AHEAD * WARPGROUP) {
            if (start > 0) look(start);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int e = start + i * WARPGROUP + threadIdx.x, token = split * tokens + e / VECTORS;
                if (e >= tokens * VECTORS || token >= live) continue;
                store(tile, token, e % VECTORS, [&](int column) { return parts.of(e / VECTORS, column); }, found[i]);
            }
        }
    }
}

// Of tokens whose norm is left to who multiplies them: 1 / sqrt(mean(x²) + eps), from sums of squares over parts of a
// row, [SKINNY_TOKENS][parts]; 1 where there are none. One pair of threads a token; a barrier has to follow.
__device__ inline void norm_factors(const float* squares, int parts, int width, float eps, float* factors) {
    const int token = threadIdx.x / 2;
    float sum = 0.0f;
    if (squares) {
#pragma unroll 8
        for (int part = threadIdx.x % 2; part < parts; part += 2) sum += squares[token * parts + part];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (threadIdx.x % 2 == 0) factors[token] = squares ? rsqrtf(sum / static_cast<float>(width) + eps) : 1.0f;
}

// 4 neighbours of a vector of weights.
__device__ inline float4 load_four(const void* vector, int k, int type) {
    if (type == VECTOR_F32) return *reinterpret_cast<const float4*>(static_cast<const float*>(vector) + k);
    const ushort4 raw = *reinterpret_cast<const ushort4*>(static_cast<const uint16_t*>(vector) + k);
    if (type == VECTOR_F16) return make_float4(widen_f16(raw.x), widen_f16(raw.y), widen_f16(raw.z), widen_f16(raw.w));
    return make_float4(widen_bf16(raw.x), widen_bf16(raw.y), widen_bf16(raw.z), widen_bf16(raw.w));
}

// 4 neighbours of the element type.
__device__ inline void store_narrow(uint16_t* to, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(a, b), pack(c, d));
}

}  // namespace atlas
