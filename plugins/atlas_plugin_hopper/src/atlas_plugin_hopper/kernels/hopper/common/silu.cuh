// x / (1 + exp(-x)), divided approximately (to two units in the last place): an exact division branches, so that those of a thread
// come one after another.
#pragma once
#include "device.cuh"

namespace atlas {

__device__ inline float quick_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// silu(by · gate) · (by · up) of two neighbours. The unit of transcendental functions is what a tile of products ends by: two exponentials
// and one reciprocal, of the product of both denominators, each of which is kept below 2^61. Off by a few units in the last place.
__device__ inline float2 silu_mul(float2 gate, float2 up, float by) {
    constexpr float MOST = 60.0f;
    auto denominator = [&](float x) {
        float power;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fminf(x * (-LOG2E * by), MOST)));
        return 1.0f + power;
    };
    const float a = denominator(gate.x), b = denominator(gate.y);
    float both;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(both) : "f"(a * b));
    both *= by * by;
    return make_float2(gate.x * up.x * (both * b), gate.y * up.y * (both * a));
}

}  // namespace atlas
