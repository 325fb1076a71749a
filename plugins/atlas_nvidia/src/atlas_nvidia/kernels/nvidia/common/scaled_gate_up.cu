// Norm, gate and up projections and SwiGLU in one launch, for up to 8 tokens, with FP8 or NVFP4 weights. A tile is a unit of
// gate and one of up.
#include "scaled_gemv.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
scaled_gate_up(const int32_t* counts, const float* x, const void* norm_weight, const uint8_t* gate_weight,
               const uint8_t* up_weight, uint16_t* y, int32_t rows, int32_t width, int32_t capacity, float eps,
               int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    NormChunks norm = norm_chunks(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    const ScaledMatrix gate(gate_weight, rows, width), up(up_weight, rows, width);
    scaled_gemv(
        rows / UNIT_ROWS, gate.chunks, shared, [&](int tile, int half) { return (half ? up : gate).unit(tile); },
        [&] { norm.begin(norm_weight, norm_type, x, eps); },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float by, float with, int) {
            if (token >= norm.live) return;
            y[static_cast<int64_t>(token) * rows + tile * UNIT_ROWS + i] =
                narrow(silu(by * norm.scale) * (with * norm.scale));
        });
}
