// y = x · weightᵀ (+ residual) with FP8 or NVFP4 weights, by wgmma: weights are its left operand, out of registers, where their
// numbers have become the element type; the copy engine brings them and tiles of TILE_M tokens. Where tiles are few, the
// blocks of a cluster share out the summed dimension of one tile.
//
// Two warpgroups have 64 weight rows each, so that the tensor cores work for one while the other widens numbers or, with FP8,
// scales the sums of a chunk.
#include "bulk_copy.cuh"
#include "cluster_tile.cuh"
#include "scaled_weights.cuh"

#ifndef TILE_M
#define TILE_M 64
#endif
#ifndef TMA_STAGES
#define TMA_STAGES 6
#endif

using namespace atlas;

namespace {

constexpr int READERS = 2 * WARPGROUP, THREADS = READERS + WARPGROUP;
constexpr int PANEL_BYTES = TILE_M * 2 * PANEL, X_BYTES = 2 * PANEL_BYTES;  // a chunk of the tokens is two panels
constexpr int TILE_UNITS = TILE_N / UNIT_ROWS;
constexpr int STAGE_BYTES = X_BYTES + TILE_UNITS * PIECE_BYTES;
static_assert(STAGE_BYTES % 1024 == 0, "panels are aligned");
static_assert(TILE_M * SUM_STRIDE * 4 <= TMA_STAGES * STAGE_BYTES, "finished sums lie where the stages were");

#define ATLAS_S1(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define ATLAS_S4(i) ATLAS_S1(i), ATLAS_S1(i + 1), ATLAS_S1(i + 2), ATLAS_S1(i + 3)
#define ATLAS_R32                                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define ATLAS_R64                                                                                                      \
    ATLAS_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "  \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// acc[64 x TILE_M] (+)= a[64 x 16] b[TILE_M x 16]ᵀ, started, a being fragments in registers; `add` 0 begins the sum anew.
__device__ inline void widened_product(float (&acc)[TILE_M / 8][4], const uint32_t (&a)[4], uint64_t b, int add) {
#if TILE_M == 64
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT
                 " {" ATLAS_R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : ATLAS_S4(0), ATLAS_S4(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#else
    static_assert(TILE_M == 128, "an instruction for this width is not written");
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT
                 " {" ATLAS_R64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
                 : ATLAS_S4(0), ATLAS_S4(4), ATLAS_S4(8), ATLAS_S4(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
scaled_tma(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x, const uint8_t* weight,
           const float* residual, void* y, int32_t rows, int32_t width, int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t barriers[2 * TMA_STAGES];
    const int live = counts[live_word], m0 = blockIdx.x * TILE_M, n0 = blockIdx.y * TILE_N;
    if (m0 >= live) {
        admit_successor();
        wait_for_predecessor();
        return;
    }
    const ScaledMatrix matrix(weight, rows, width);
    const int each = (matrix.chunks + gridDim.z - 1) / gridDim.z, first = blockIdx.z * each;
    const int steps = max(0, min(each, matrix.chunks - first));
    const uint32_t ring = shared_address(shared), full = shared_address(barriers), empty = full + 8 * TMA_STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < TMA_STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, READERS / WARP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        publish_shared();
    }
    __syncthreads();

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float* sums = reinterpret_cast<float*>(shared);
    if (warp >= READERS / WARP) {
        give_registers<40>();
        // A warp asks for one copy after another, each of which takes it longer than its bytes: four warps share them out.
        constexpr int EACH = TILE_UNITS / (WARPGROUP / WARP);
        const int unit = (warp - READERS / WARP) * EACH + lane % EACH;
        const Unit mine = matrix.unit(min(n0 / UNIT_ROWS + unit, matrix.units - 1));
        auto weights = [&](int step, int stage) {
            if (unit == 0 && lane == 0) barrier_expect(full + 8 * stage, STAGE_BYTES);
            if (lane < EACH) {
                copy_bulk(ring + stage * STAGE_BYTES + X_BYTES + unit * PIECE_BYTES,
                          mine.pieces + static_cast<int64_t>(first + step) * PIECE_BYTES, PIECE_BYTES, full + 8 * stage);
            }
        };
        auto tokens = [&](int step, int stage) {
            if (unit < 2 && lane == unit) {
                copy_tile(ring + stage * STAGE_BYTES + lane * PANEL_BYTES, &x, (first + step) * SCALED_CHUNK + lane * PANEL,
                          m0, full + 8 * stage);
            }
        };
        const int early = min(TMA_STAGES, steps);
        for (int step = 0; step < early; ++step) weights(step, step);
        admit_successor();
        wait_for_predecessor();
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int step = 0; step < early; ++step) tokens(step, step);
        for (int step = early, stage = 0, parity = 0; step < steps; ++step) {
            barrier_wait(empty + 8 * stage, parity);
            weights(step, stage);
            tokens(step, stage);
            if (++stage == TMA_STAGES) stage = 0, parity ^= 1;
        }
        // The readers store by themselves: code that both would run had to do with these registers.
        cluster_sync();
        cluster_sync();
    } else {
        take_registers<232>();
        admit_successor();
        wait_for_predecessor();
        const Unit upper_unit = matrix.unit(min(n0 / UNIT_ROWS + 2 * warp, matrix.units - 2));
        const Unit lower_unit = matrix.unit(min(n0 / UNIT_ROWS + 2 * warp + 1, matrix.units - 1));
        float acc[TILE_M / 8][4] = {}, part[TILE_M / 8][4];
        float(&into)[TILE_M / 8][4] = CHUNKS_SCALED ? part : acc;
        float by[2] = {}, next[2] = {};
        auto look = [&](int step) {
            if (!CHUNKS_SCALED || step >= steps) return;
            next[0] = upper_unit.of_chunks[first + step];
            next[1] = lower_unit.of_chunks[first + step];
        };
        look(0);
        for (int step = 0, stage = 0, parity = 0; step < steps; ++step) {
            barrier_wait(full + 8 * stage, parity);
            by[0] = next[0], by[1] = next[1];
            look(step + 1);
            const unsigned char* pieces = shared + stage * STAGE_BYTES + X_BYTES + 2 * warp * PIECE_BYTES;
            const uint32_t tokens = ring + stage * STAGE_BYTES;
            Numbers upper, lower;
            upper.load(pieces, lane);
            lower.load(pieces + PIECE_BYTES, lane);
            uint32_t a[SCALED_STEPS][4];
#pragma unroll
            for (int s = 0; s < SCALED_STEPS; ++s) {
                upper.step(s, a[s][0], a[s][2]);
                lower.step(s, a[s][1], a[s][3]);
                begin_products();
                widened_product(into, a[s], summed_inside(tokens + s / 4 * PANEL_BYTES + s % 4 * 32), s > 0 || !CHUNKS_SCALED);
            }
            commit_products();
            wait_products<0>();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            if (CHUNKS_SCALED) {
#pragma unroll
                for (int j = 0; j < TILE_M / 8; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[j][i] += part[j][i] * by[i / 2];
                }
            }
            if (++stage == TMA_STAGES) stage = 0, parity ^= 1;
        }
        named_wait(1, READERS);  // all have read what the sums replace
        const float rows_by[2] = {upper_unit.of_rows[lane / 4], lower_unit.of_rows[lane / 4]};
        float* to = sums + lane % 4 * 2 * SUM_STRIDE + warp * 2 * UNIT_ROWS + lane / 4;
#pragma unroll
        for (int j = 0; j < TILE_M / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[(j * 8 + i % 2) * SUM_STRIDE + i / 2 * UNIT_ROWS] = acc[j][i] * rows_by[i / 2];
        }
        store_tile<TILE_M, READERS>(sums, {residual, y, rows, y_f32}, m0, n0, min(TILE_M, live - m0));
    }
}
