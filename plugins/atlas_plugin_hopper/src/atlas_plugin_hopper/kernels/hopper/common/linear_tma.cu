// y = x · weightᵀ (+ residual) for prompts.
#include "prompt_product.cuh"

using namespace atlas;

namespace {

constexpr int AT_ONCE = 8;  // groups of 8 sums whose residuals are in flight together

// A thread's sums of one token, with the residual of that token; `line` is where the token's row begins.
__device__ void store_floats(const Sums& acc, int half, int first, int rows, const float* residual, float* y,
                             int64_t line) {
    const int mine = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int start = 0; start < PROMPT_ROWS / 8; start += AT_ONCE) {
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

#if PARTS > 1
constexpr int IN_FLIGHT = 4;  // groups of 8 sums that are fetched at once

// The first of two parts of a warp's sums, from the cluster that has it to the one that has the rest: through memory, announced
// by a flag of each warp, which whoever takes them lowers again for the next launch.
struct Handover {
    float4* sums;
    int32_t* flag;

    __device__ Handover(float* handed, int32_t* flags, const Tile& tile, int columns) {
        const int warp = tile.token / 16 * columns + tile.column;
        sums = reinterpret_cast<float4*>(handed) + static_cast<int64_t>(warp) * (PROMPT_ROWS / 8) * WARP + threadIdx.x % WARP;
        flag = flags + warp;
    }
    __device__ void give(const Sums& acc) const {
#pragma unroll
        for (int j = 0; j < PROMPT_ROWS / 8; ++j) sums[j * WARP] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
        __syncwarp();
        if (threadIdx.x % WARP == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
    }
    __device__ void take(Sums& acc) const {
        if (threadIdx.x % WARP == 0) {
            int raised = 0;
            while (!raised) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
            *flag = 0;
        }
        __syncwarp();
#pragma unroll
        for (int start = 0; start < PROMPT_ROWS / 8; start += IN_FLIGHT) {
            float4 first[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) first[i] = __ldcg(sums + (start + i) * WARP);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                float(&rest)[4] = acc[start + i];
                rest[0] = first[i].x + rest[0];
                rest[1] = first[i].y + rest[1];
                rest[2] = first[i].z + rest[2];
                rest[3] = first[i].w + rest[3];
            }
        }
    }
};
#endif

}  // namespace

// `handed` and `flags` are where the first parts of sums go, if a tile is summed in parts: 16 * PROMPT_ROWS numbers and a flag for
// each 16 tokens of whole tiles and each tile of rows; flags begin at zero.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
linear_tma(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
           const __grid_constant__ CUtensorMap weight, const float* residual, void* y, float* handed, int32_t* flags, int32_t rows,
           int32_t width, int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    const int live = counts[live_word], columns = (rows + PROMPT_ROWS - 1) / PROMPT_ROWS;
    prompt_product(
        &x, live, columns, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            bring_rows(to, &weight, depth, column * PROMPT_ROWS, peer, barrier);
        },
        [](const Tile&) { return 0; },
        [&](Sums& acc, const Tile& tile, int) {
#if PARTS > 1
            static_assert(PARTS == 2, "one hands over to the other");
            const Handover handover(handed, flags, tile, columns);
            if (tile.part == 0) return handover.give(acc);
            handover.take(acc);
#endif
            const int first = tile.column * PROMPT_ROWS;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = tile.token + half * 8;
                if (token >= live) continue;
                const int64_t line = static_cast<int64_t>(token) * rows;
                if (y_f32) store_floats(acc, half, first, rows, residual, static_cast<float*>(y), line);
                else store_elements<0, PROMPT_ROWS / 8>(acc, half, rows - first, static_cast<uint16_t*>(y) + line + first);
            }
        });
}
