// y = x · weightᵀ (+ residual) for prompts.
#include "prompt_product.cuh"

using namespace atlas;

namespace {

// Some of a thread's groups of sums.
template <int from, int many>
struct Groups {
    static constexpr int FIRST = from, COUNT = many;
};

constexpr int AT_ONCE = 8;  // groups of 8 sums whose residuals are in flight together

// A thread's sums of one token from group FIRST on, with the residual of that token; `line` is where the token's row begins, and
// `first` the row of the tile's first group.
template <int FIRST, int COUNT>
__device__ void store_floats(const Sums& acc, int half, int first, int rows, const float* residual, float* y, int64_t line) {
    const int mine = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int start = FIRST; start < FIRST + COUNT; start += AT_ONCE) {
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
static_assert(PARTS == 2, "one hands over to the other");
constexpr int IN_FLIGHT = 4;  // groups of 8 sums that are fetched at once

// A warp's sums of one part on their way to the cluster that has the other part of the same tile: through memory, announced by a
// flag of each warp and part, which whoever takes them lowers again for the next launch.
struct Handover {
    float4* sums;
    int32_t* flags;

    __device__ Handover(float* handed, int32_t* all_flags, const Tile& tile, int columns) {
        const int warp = tile.token / 16 * columns + tile.column;
        sums = reinterpret_cast<float4*>(handed) + static_cast<int64_t>(warp) * (PROMPT_ROWS / 8) * WARP + threadIdx.x % WARP;
        flags = all_flags + 2 * warp;
    }
    // Groups from FIRST on, by the one that has `part`.
    template <int FIRST, int COUNT>
    __device__ void give(const Sums& acc, int part) const {
#pragma unroll
        for (int j = FIRST; j < FIRST + COUNT; ++j) sums[j * WARP] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
        __syncwarp();
        if (threadIdx.x % WARP == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + part) : "memory");
    }
    // The same that the one with `part` gave, added to one's own.
    template <int FIRST, int COUNT>
    __device__ void take(Sums& acc, int part) const {
        if (threadIdx.x % WARP == 0) {
            int raised = 0;
            while (!raised) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flags + part) : "memory");
            flags[part] = 0;
        }
        __syncwarp();
#pragma unroll
        for (int start = FIRST; start < FIRST + COUNT; start += IN_FLIGHT) {
            float4 theirs[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) theirs[i] = __ldcg(sums + (start + i) * WARP);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                float(&mine)[4] = acc[start + i];
                mine[0] += theirs[i].x;
                mine[1] += theirs[i].y;
                mine[2] += theirs[i].z;
                mine[3] += theirs[i].w;
            }
        }
    }
};
#endif

}  // namespace

// `handed` and `flags` are where parts of sums go, if a tile is summed in two: 16 * PROMPT_ROWS numbers and two flags for each 16
// tokens of whole tiles and each tile of rows; flags begin at zero.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
linear_tma(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
           const __grid_constant__ CUtensorMap weight, const float* residual, void* y, float* handed, int32_t* flags, int32_t rows,
           int32_t width, int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    const int live = counts[live_word], columns = (rows + PROMPT_ROWS - 1) / PROMPT_ROWS;
    constexpr int GROUPS = PROMPT_ROWS / 8;
    auto store = [&](const Sums& acc, const Tile& tile, auto groups) {
        constexpr int FIRST = decltype(groups)::FIRST, COUNT = decltype(groups)::COUNT;
        const int first = tile.column * PROMPT_ROWS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = tile.token + half * 8;
            const int64_t line = static_cast<int64_t>(token) * rows;
            if (y_f32) {
                if (token >= live) continue;
                store_floats<FIRST, COUNT>(acc, half, first, rows, residual, static_cast<float*>(y), line);
            } else {
                const int from = first + FIRST * 8;
                store_elements<FIRST, COUNT>(acc, half, rows - from, token < live, static_cast<uint16_t*>(y) + line + from);
            }
        }
    };
    prompt_product(
        &x, live, columns, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            bring_rows(to, &weight, depth, column * PROMPT_ROWS, peer, barrier);
        },
        [](const Tile&) { return 0; },
        [&](Sums& acc, const Tile& tile, int) {
#if PARTS > 1
            const Handover handover(handed, flags, tile, columns);
            constexpr int HALF = GROUPS / 2;
            if (tile.together) {
                // Both are at work at once: each ends half of the rows.
                if (tile.part == 0) {
                    handover.give<HALF, HALF>(acc, 0);
                    handover.take<0, HALF>(acc, 1);
                    store(acc, tile, Groups<0, HALF>());
                } else {
                    handover.give<0, HALF>(acc, 1);
                    handover.take<HALF, HALF>(acc, 0);
                    store(acc, tile, Groups<HALF, HALF>());
                }
                return;
            }
            if (tile.part == 0) return handover.give<0, GROUPS>(acc, 0);
            handover.take<0, GROUPS>(acc, 0);
#endif
            store(acc, tile, Groups<0, GROUPS>());
        });
}
