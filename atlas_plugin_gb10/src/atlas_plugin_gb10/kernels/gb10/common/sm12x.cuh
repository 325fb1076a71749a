// The instructions that compute capability 12.x has and Hopper lacks, each beside a twin of integer arithmetic that gives the
// same bits for every input. Kernels call the plain name; elsewhere than on sm_12x it is the twin. Twins are plain C++, so that
// tests prove them on a CPU for all inputs.
//
// e2m1 is the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats 1.0, 5.3.3): sign, 2 bits of exponent (bias 1), 1 of
// mantissa. The magnitudes of codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; there is neither infinity nor NaN. A byte holds two
// codes, the first in its lower half.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define ATLAS_HOST_DEVICE __host__ __device__ inline
#else
#define ATLAS_HOST_DEVICE inline
#endif

// e2m1 conversions exist on the targets with a or f only: plain sm_120 and sm_121 refuse them.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1200 && __CUDA_ARCH_FAMILY_SPECIFIC__ < 1300
#define ATLAS_HAS_E2M1 1
#else
#define ATLAS_HAS_E2M1 0
#endif

namespace atlas {

// The code of a float given by its bits: nearest, ties to the even code, saturating at ±6; -0 and what rounds to it keep their
// sign, and NaN becomes +6 whatever its sign (PTX ISA, cvt: .satfinite with .e2m1x2).
ATLAS_HOST_DEVICE uint32_t e2m1_encode_one_twin(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    // The code counts the halfway points that lie below; a point itself goes up where the code above it is even. Bits of
    // positive floats are ordered as the floats are, with NaN above all.
    const uint32_t code = (magnitude > 0x3e800000u)     // 0.25
                        + (magnitude >= 0x3f400000u)    // 0.75
                        + (magnitude > 0x3fa00000u)     // 1.25
                        + (magnitude >= 0x3fe00000u)    // 1.75
                        + (magnitude > 0x40200000u)     // 2.5
                        + (magnitude >= 0x40600000u)    // 3.5
                        + (magnitude > 0x40a00000u);    // 5
    const uint32_t number = magnitude <= 0x7f800000u;
    return code | ((bits >> 31) & number) << 3;
}

// Two floats by their bits to one byte of codes, ``first`` in the lower half.
ATLAS_HOST_DEVICE uint32_t e2m1_encode_twin(uint32_t first, uint32_t second) {
    return e2m1_encode_one_twin(first) | e2m1_encode_one_twin(second) << 4;
}

// A byte of codes to two f16 in one register, the first in the lower half. Exact: f16 has every e2m1 value.
ATLAS_HOST_DEVICE uint32_t e2m1_decode_twin(uint32_t byte) {
    const uint32_t codes = (byte & 0x7u) | (byte & 0x70u) << 12, signs = (byte & 0x8u) << 12 | (byte & 0x80u) << 24;
    // Codes 2 to 7 keep exponent and mantissa, and the bias grows from 1 to 15. Code 1 has no hidden one and is half of code 2
    // in f16 as well: its mantissa is 0. Code 0 stays all zeros.
    const uint32_t normal = (codes >> 1 | codes >> 2) & 0x00010001u;
    const uint32_t half = codes & ~normal & 0x00010001u;
    const uint32_t magnitudes = (normal | half) * 0x3800u + (codes & normal * 7u) * 0x200u;
    return signs | magnitudes;
}

#ifdef __CUDACC__

__device__ inline uint32_t e2m1_encode(float first, float second) {
#if ATLAS_HAS_E2M1
    uint32_t byte;
    asm("{.reg .b8 c; cvt.rn.satfinite.e2m1x2.f32 c, %2, %1; cvt.u32.u8 %0, c;}" : "=r"(byte) : "f"(first), "f"(second));
    return byte;
#else
    return e2m1_encode_twin(__float_as_uint(first), __float_as_uint(second));
#endif
}

__device__ inline uint32_t e2m1_decode(uint32_t byte) {
#if ATLAS_HAS_E2M1
    uint32_t pair;
    asm("{.reg .b8 c; cvt.u8.u32 c, %1; cvt.rn.f16x2.e2m1x2 %0, c;}" : "=r"(pair) : "r"(byte));
    return pair;
#else
    return e2m1_decode_twin(byte);
#endif
}

#endif

}  // namespace atlas
