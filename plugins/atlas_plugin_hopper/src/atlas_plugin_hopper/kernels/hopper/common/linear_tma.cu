// y = x · weightᵀ (+ residual) for prompts. With a norm behind it also what that norm multiplies: y * norm_weight, and sums of
// squares over parts of each row of y, from which the consumer finds the factor (norm_factors).
#include "prompt_product.cuh"

using namespace atlas;

namespace {

// Some of a thread's groups of sums.
template <int from, int many>
struct Groups {
    static constexpr int FIRST = from, COUNT = many;
};

constexpr int AT_ONCE = PROMPT_ROWS > 128 || PROMPT_ROWS == 96 || CONSUMERS > 2 ? 4 : 8;  // groups of 8 sums whose residuals are in flight together, those of both tokens

// What is added to such sums of a thread's two tokens, and the weights of the norm behind them, two neighbours in a word.
struct Added {
    float2 residual[2][AT_ONCE];
    uint32_t by[AT_ONCE];
};

// Where the sums of a tile go; `norm_weight` and what follows it may be null.
struct Target {
    int live, rows, columns;
    const float* residual;
    float* y;
    const uint16_t* norm_weight;
    uint16_t* scaled;
    float* squares;

    __device__ int64_t line(const Tile& tile, int half) const { return static_cast<int64_t>(tile.token + half * 8) * rows; }
    __device__ static int row(const Tile& tile, int group) { return tile.column * PROMPT_ROWS + group * 8 + threadIdx.x % 4 * 2; }

    // For AT_ONCE groups from `first` on.
    __device__ void look(const Tile& tile, int first, Added& added) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = row(tile, first + i);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool there = residual != nullptr && tile.token + half * 8 < live && at < rows;
                const float* from = residual + line(tile, half) + at;
                added.residual[half][i] = there ? *reinterpret_cast<const float2*>(from) : make_float2(0.0f, 0.0f);
            }
            added.by[i] = norm_weight != nullptr && at < rows ? *reinterpret_cast<const uint32_t*>(norm_weight + at) : 0;
        }
    }
    // COUNT groups of sums from FIRST on to y; `added` is for the first of them. Where a norm is behind them they become what it
    // multiplies, and `square` gains their squares before.
    template <int FIRST, int COUNT>
    __device__ void end(Sums& acc, const Tile& tile, Added& added, float (&square)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (tile.token + half * 8 >= live) continue;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = row(tile, FIRST + i);
                if (at >= rows) break;
                float2 value = added.residual[half][i];
                float(&sum)[4] = acc[FIRST + i];
                value.x += sum[2 * half];
                value.y += sum[2 * half + 1];
                *reinterpret_cast<float2*>(y + line(tile, half) + at) = value;
                square[half] += value.x * value.x + value.y * value.y;
                sum[2 * half] = value.x * widen(static_cast<uint16_t>(added.by[i]));
                sum[2 * half + 1] = value.y * widen(static_cast<uint16_t>(added.by[i] >> 16));
            }
        }
        if constexpr (COUNT > AT_ONCE) {
            look(tile, FIRST + AT_ONCE, added);
            end<FIRST + AT_ONCE, COUNT - AT_ONCE>(acc, tile, added, square);
        }
    }
    // What the norm multiplies, of COUNT groups from FIRST on, which are one of PARTS of the tile's.
    template <int FIRST, int COUNT>
    __device__ void leave(const Sums& acc, const Tile& tile, float (&square)[2]) const {
        const int from = tile.column * PROMPT_ROWS + FIRST * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            square[half] += __shfl_xor_sync(~0u, square[half], 1);
            square[half] += __shfl_xor_sync(~0u, square[half], 2);
            const int64_t token = tile.token + half * 8;
            store_elements<FIRST, COUNT>(acc, half, rows - from, token < live, scaled + token * rows + from);
            if (token < live && threadIdx.x % 4 == 0) squares[(token * columns + tile.column) * PARTS + FIRST / COUNT] = square[half];
        }
    }
};

#if PARTS > 1
static_assert(PARTS == 2, "one hands over to the other");
constexpr int IN_FLIGHT = 8;  // groups of 8 sums that are fetched at once

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
    // For what the one with `part` gives.
    __device__ void wait(int part) const {
        // All lanes look, as a warp: ptxas would take those that wait apart for good.
        int raised;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flags + part) : "memory");
        while (!__all_sync(~0u, raised));
        if (threadIdx.x % WARP == 0) flags[part] = 0;
        __syncwarp();
    }
    // Groups of that from FIRST on, added to one's own.
    template <int FIRST, int COUNT>
    __device__ void take(Sums& acc) const {
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
// tokens of whole tiles and each tile of rows; flags begin at zero. Sums of squares are PARTS for each token and tile of rows.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
linear_tma(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
           const __grid_constant__ CUtensorMap weight, const float* residual, void* y, float* handed, int32_t* flags,
           const uint16_t* norm_weight, uint16_t* scaled, float* squares, int32_t rows, int32_t width, int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    const int live = counts[live_word], columns = (rows + PROMPT_ROWS - 1) / PROMPT_ROWS;
    constexpr int GROUPS = PROMPT_ROWS / 8;
    const Target target{live, rows, columns, residual, static_cast<float*>(y), norm_weight, scaled, squares};
    // COUNT groups from FIRST on, the first of which `added` is for.
    auto store = [&](Sums& acc, const Tile& tile, auto groups, Added& added) {
        constexpr int FIRST = decltype(groups)::FIRST, COUNT = decltype(groups)::COUNT;
        if (!y_f32) {
            const int from = tile.column * PROMPT_ROWS + FIRST * 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool there = tile.token + half * 8 < live;
                store_elements<FIRST, COUNT>(acc, half, rows - from, there, static_cast<uint16_t*>(y) + target.line(tile, half) + from);
            }
            return;
        }
        float square[2] = {};
        target.end<FIRST, COUNT>(acc, tile, added, square);
        if (norm_weight != nullptr) target.leave<FIRST, COUNT>(acc, tile, square);
    };
    prompt_product(
        &x, live, columns, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            bring_rows(to, &weight, depth, column * PROMPT_ROWS, peer, barrier);
        },
        [](const Tile&) { return 0; },
        [&](Sums& acc, const Tile& tile, int) {
#if PARTS > 1
            // Clusters that are at work at once end half of the rows each; else the later one ends all.
            const Handover handover(handed, flags, tile, columns);
            constexpr int HALF = GROUPS / 2;
            const bool together = tile.together, first = tile.part == 0;
            if (!together && first) return handover.give<0, GROUPS>(acc, 0);
            if (together) {
                if (first) handover.give<HALF, HALF>(acc, 0);
                else handover.give<0, HALF>(acc, 1);
            }
            Added added;
            const int begin = together && !first ? HALF : 0;
            if (y_f32) target.look(tile, begin, added);  // in flight while the other is waited for
            handover.wait(first);
            if (begin == 0) {
                handover.take<0, HALF>(acc);
                store(acc, tile, Groups<0, HALF>(), added);
                if (together) return;
                if (y_f32) target.look(tile, HALF, added);
            }
            handover.take<HALF, HALF>(acc);
            store(acc, tile, Groups<HALF, HALF>(), added);
#else
            Added added;
            if (y_f32) target.look(tile, 0, added);
            store(acc, tile, Groups<0, GROUPS>(), added);
#endif
        });
}
