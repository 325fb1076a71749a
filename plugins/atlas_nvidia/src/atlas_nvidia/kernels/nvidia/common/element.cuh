// The 16-bit type of activations, matrices and pages: bfloat16, or float16 in instances that define ELEMENT_F16.
// Values travel as their bits, two to a 32-bit register, lower address first. CUDA's own headers of these types take a
// third of a second of every compilation.
#pragma once
#include <stdint.h>

#ifdef ELEMENT_F16
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

namespace atlas {

__device__ inline float widen_bf16(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ inline float widen_f16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline uint16_t narrow(float value) {
    uint16_t bits;
    asm("cvt.rn." ELEMENT ".f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#ifdef ELEMENT_F16
constexpr bool WIDE_RANGE = false;  // whether the type has the range of float32
__device__ inline float widen(uint16_t bits) { return widen_f16(bits); }
#else
constexpr bool WIDE_RANGE = true;
__device__ inline float widen(uint16_t bits) { return widen_bf16(bits); }
#endif

__device__ inline uint32_t pack(float first, float second) {
    uint32_t pair;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ inline void unpack(const uint4& v, float (&out)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = widen(static_cast<uint16_t>(words[i]));
        out[2 * i + 1] = widen(static_cast<uint16_t>(words[i] >> 16));
    }
}

__device__ inline uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// acc[16x8] += a[16x16] b[16x8] with float32 sums. Lane 4g+t holds of a: rows g, g+8 at columns 2t.. and 2t+8..;
// of b: column g at rows 2t.. and 2t+8..; of acc: rows g (first two) and g+8 (last two) at columns 2t, 2t+1.
__device__ inline void mma(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace atlas
