// Products of up to 64 tokens with a weight [rows, width], bound by the speed at which weights arrive: the copy engine
// brings both in boxes of 64 summed elements (128 bytes, swizzled), a warpgroup multiplies them by wgmma, tokens being
// its left operand, so that a tile may have any number of weight rows that shares them out evenly.
//
// One thread asks for copies and fills the ring with weights before the predecessor has ended; a warp of its own looks
// up meanwhile what the stores will need. Where tiles are fewer than processors, the blocks of a cluster share out the
// summed dimension of a tile: each pushes its sums to the blocks that store them, equal runs of tokens each.
#pragma once
#include "tma.cuh"

namespace atlas {

constexpr int SKINNY_TOKENS = 64, SKINNY_DEPTH = 64, ROW_BYTES = 2 * SKINNY_DEPTH;
constexpr int SKINNY_THREADS = WARPGROUP + 2 * WARP;
constexpr int X_BYTES = SKINNY_TOKENS * ROW_BYTES;
constexpr int MAX_STAGES = 14;
constexpr int STORES = 1, PREPARED = 2;  // barriers of the processor: of the threads that store, and with who prepares
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

// Sums of the tokens that a block stores: its own, and those that the other block of the cluster sends it.
template <int ROWS>
struct Parts {
    static constexpr int STRIDE = ROWS + 8;  // floats: neighbouring tokens are apart by a quarter of the banks
    const float* sums;
    int sent;  // floats from a sum to what was sent for it; 0 where nothing is

    // Columns [column, column + 4) of one token.
    __device__ float4 of(int token, int column) const {
        const float* from = sums + token * STRIDE + column;
        float4 sum = *reinterpret_cast<const float4*>(from);
        if (sent) {
            const float4 other = *reinterpret_cast<const float4*>(from + sent);
            sum.x += other.x;
            sum.y += other.y;
            sum.z += other.z;
            sum.w += other.w;
        }
        return sum;
    }
};

// Two floats into the shared memory of another block of the cluster, announced at a barrier of that block.
__device__ inline void send(uint32_t to, float a, float b, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(to), "f"(a), "f"(b), "r"(barrier) : "memory");
}

// The same place in the shared memory of another block of the cluster.
__device__ inline uint32_t place_in(uint32_t address, int block) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

__device__ inline void begin_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void all_have_begun() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Where the next stage of a block's tiles is: counters, since divisions took longer than the copies they led to.
struct Cursor {
    int tile, step;

    __device__ int column(int first) const { return (first + step) * SKINNY_DEPTH; }
    __device__ void advance(int steps) {
        if (++step == steps) step = 0, tile += gridDim.x;
    }
};

// Weights: (tile, column, target, barrier) → void, asks for ROWS rows of 128 bytes.
// Prepare: (lane) → void, in one warp, before the predecessor has ended; Begin: the same behind it. Both fill shared
//          memory that only Store reads.
// Vectors: of a token in a tile, each finished by one thread.
// Ahead:   (tile, token, vector) → any value that Store will want, behind the predecessor.
// Store:   (tile, token, vector, four, ahead) → void; four(column) has the sums of columns [column, column + 4).
//          Tokens are all below `live`.
// The ring has `stages` stages; the sums lie behind it, or in it where nothing can overlap. A cluster, of two blocks,
// has one tile.
template <int ROWS, int VECTORS, class Weights, class Prepare, class Begin, class Ahead, class Store>
__device__ inline void skinny(const CUtensorMap* x, int live, int tiles, int width, int stages, unsigned char* shared,
                              Weights weights, Prepare prepare, Begin begin, Ahead ahead, Store store) {
    constexpr int STAGE = STAGE_BYTES<ROWS>, STRIDE = Parts<ROWS>::STRIDE;
    __shared__ __align__(8) uint64_t barriers[2 * MAX_STAGES + 1];
    const int splits = gridDim.y, split = blockIdx.y;
    const int all_steps = (width + SKINNY_DEPTH - 1) / SKINNY_DEPTH, each = (all_steps + splits - 1) / splits;
    const int first = split * each, steps = max(0, min(each, all_steps - first)), tokens = SKINNY_TOKENS / splits;
    const uint32_t ring = shared_address(shared), full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
    const uint32_t received = empty + 8 * MAX_STAGES;
    const bool single = tiles <= static_cast<int>(gridDim.x);
    float* sums = reinterpret_cast<float*>(single && splits == 1 ? shared : shared + stages * STAGE);
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, WARPGROUP / WARP);
        }
        barrier_init(received, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_expect(received, tokens * ROWS * 4);
    }
    __syncthreads();
    if (splits > 1) begin_in_cluster();

    if (threadIdx.x >= WARPGROUP + WARP) {
        const int lane = threadIdx.x % WARP;
        prepare(lane);
        admit_successor();
        wait_for_predecessor();
        begin(lane);
        named_arrive(PREPARED, WARPGROUP + WARP);
        if (splits > 1) all_have_begun();
        return;
    }
    if (threadIdx.x >= WARPGROUP) {
        if (threadIdx.x == WARPGROUP) {
            const int mine = (tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
            const int total = mine * steps, early = min(stages, total);
            Cursor next{static_cast<int>(blockIdx.x), 0}, next_x = next;
            auto stage_weights = [&](int stage) {
                barrier_expect(full + 8 * stage, STAGE);
                weights(next.tile, next.column(first), ring + stage * STAGE + X_BYTES, full + 8 * stage);
                next.advance(steps);
            };
            auto stage_x = [&](int stage) {
                copy_tile(ring + stage * STAGE, x, next_x.column(first), 0, full + 8 * stage);
                next_x.advance(steps);
            };
            for (int stage = 0; stage < early; ++stage) stage_weights(stage);
            admit_successor();
            wait_for_predecessor();
            asm volatile("fence.proxy.async;" ::: "memory");
            for (int stage = 0; stage < early; ++stage) stage_x(stage);
            for (int step = early, stage = 0, parity = 0; step < total; ++step) {
                barrier_wait(empty + 8 * stage, parity);
                stage_weights(stage);
                stage_x(stage);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
        if (splits > 1) all_have_begun();
        return;
    }

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    admit_successor();
    wait_for_predecessor();
    const Parts<ROWS> parts{sums, splits > 1 ? tokens * STRIDE : 0};
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
        if (splits > 1) all_have_begun();
        else named_wait(STORES, WARPGROUP);  // not over what others still read
        if (tile == static_cast<int>(blockIdx.x)) named_wait(PREPARED, WARPGROUP + WARP);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = warp * 16 + lane / 4 + half * 8, at = token % tokens * STRIDE + lane % 4 * 2;
            if (token / tokens == split) {
#pragma unroll
                for (int j = 0; j < ROWS / 8; ++j) {
                    *reinterpret_cast<float2*>(sums + at + j * 8) = make_float2(acc[j][2 * half], acc[j][2 * half + 1]);
                }
            } else {
                const uint32_t to = place_in(shared_address(sums + tokens * STRIDE + at), token / tokens);
                const uint32_t barrier = place_in(received, token / tokens);
#pragma unroll
                for (int j = 0; j < ROWS / 8; ++j) send(to + j * 32, acc[j][2 * half], acc[j][2 * half + 1], barrier);
            }
        }
        named_wait(STORES, WARPGROUP);
        if (splits > 1) barrier_wait(received, 0);
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
// row, [SKINNY_TOKENS][parts]; 1 where there are none. One warp.
__device__ inline void norm_factors(int lane, const float* squares, int parts, int width, float eps, float* factors) {
    for (int token = lane; token < SKINNY_TOKENS; token += WARP) {
        float sum = 0.0f;
        if (squares) {
#pragma unroll 16
            for (int part = 0; part < parts; ++part) sum += squares[token * parts + part];
        }
        factors[token] = squares ? rsqrtf(sum / static_cast<float>(width) + eps) : 1.0f;
    }
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
