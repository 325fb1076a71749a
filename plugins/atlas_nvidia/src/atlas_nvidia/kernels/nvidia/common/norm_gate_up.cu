// Norm, gate and up projections and SwiGLU in one launch, for up to 8 tokens. A tile is 8 rows of gate, 8 of up.
#include "gemv.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
norm_gate_up_silu(const int32_t* counts, const float* x, const void* norm_weight, const uint16_t* gate_weight,
                  const uint16_t* up_weight, uint16_t* y, int32_t rows, int32_t width, int32_t capacity, float eps,
                  int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    NormColumns norm = norm_columns(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    gemv<1>(
        rows / 8, width, shared,
        [&](int tile, int i) {
            return (i < 8 ? gate_weight : up_weight) + static_cast<int64_t>(tile * 8 + i % 8) * width;
        },
        [&] { norm.begin(norm_weight, norm_type, x, eps); },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float gate, float up, int) {
            if (token >= norm.live) return;
            const float value = silu(gate * norm.scale) * (up * norm.scale);
            y[static_cast<int64_t>(token) * rows + tile * 8 + i] = narrow(value);
        });
}
