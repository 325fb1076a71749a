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

}  // namespace

extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
linear_tma(const int32_t* counts, int32_t live_word, const __grid_constant__ CUtensorMap x,
           const __grid_constant__ CUtensorMap weight, const float* residual, void* y, int32_t rows, int32_t width,
           int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    const int live = counts[live_word];
    prompt_product(
        &x, live, (rows + PROMPT_ROWS - 1) / PROMPT_ROWS, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            bring_rows(to, &weight, depth, column * PROMPT_ROWS, peer, barrier);
        },
        [](int, int) { return 0; },
        [&](const Sums& acc, int token, int column, int) {
            const int first = column * PROMPT_ROWS;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (token + half * 8 >= live) continue;
                const int64_t line = static_cast<int64_t>(token + half * 8) * rows;
                if (y_f32) store_floats(acc, half, first, rows, residual, static_cast<float*>(y), line);
                else store_elements<0, PROMPT_ROWS / 8>(acc, half, rows - first, static_cast<uint16_t*>(y) + line + first);
            }
        });
}
