// Sines and cosines of positions by single floats. Angles are counted in whole turns, of which only what is behind the point matters;
// frequencies are the sum of two floats each, so that it is right for every position that a float can hold.
#pragma once
#include "device.cuh"

namespace atlas {

// Turns a position, as two floats.
__device__ inline float2 turns_of(float inv_freq) {
    const double turns = static_cast<double>(inv_freq) * 0.15915494309189535;
    const float high = static_cast<float>(turns);
    return make_float2(high, static_cast<float>(turns - static_cast<double>(high)));
}

// As `rotation` gives them, within 1e-6, for |position · turns| below 2^22.
__device__ inline void rotation_of_turns(float position, float2 turns, float scale, float& sine, float& cosine) {
    constexpr float WHOLE = 12582912.0f;  // 1.5 · 2^23: a float above 2^23 has no digits behind the point
    const float product = __fmul_rn(position, turns.x);
    const float rest = __fmaf_rn(position, turns.y, __fmaf_rn(position, turns.x, -product));
    const float whole = __fadd_rn(__fadd_rn(product, WHOLE), -WHOLE);
    const float angle = __fmul_rn(__fadd_rn(__fadd_rn(product, -whole), rest), 6.283185307179586f);
    sine = __sinf(angle) * scale;
    cosine = __cosf(angle) * scale;
}

}  // namespace atlas
