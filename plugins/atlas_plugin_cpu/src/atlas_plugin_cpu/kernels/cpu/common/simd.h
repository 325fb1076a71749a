// Sixteen float lanes on every instruction set: one register of AVX-512, two of AVX2, four of NEON.
//
// Results have the same bits at every width: no operation mixes lanes except sum() and largest(), whose order is fixed
// here.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ATLAS_INLINE inline __attribute__((always_inline))
#define ATLAS_FLAT __attribute__((always_inline))

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

// Written out: a sum with zero would be kept as one, since it makes +0 of -0.
ATLAS_INLINE f32x16 splat(float v) { return f32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }

ATLAS_INLINE f32x16 load(const float* from) {
    f32x16 value;
    memcpy(&value, from, sizeof value);
    return value;
}

ATLAS_INLINE void store(float* to, f32x16 value) { memcpy(to, &value, sizeof value); }

// The first n lanes from memory, zero in the others.
ATLAS_INLINE f32x16 load_first(const float* from, int n) {
    f32x16 value = {};
    memcpy(&value, from, static_cast<size_t>(n) * sizeof(float));
    return value;
}

ATLAS_INLINE void store_first(float* to, f32x16 value, int n) {
    memcpy(to, &value, static_cast<size_t>(n) * sizeof(float));
}

// a * b + c, rounded once.
ATLAS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(
        _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
    typedef float f32x8 __attribute__((vector_size(32)));
    f32x8 low = _mm256_fmadd_ps(__builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7),
                                __builtin_shufflevector(b, b, 0, 1, 2, 3, 4, 5, 6, 7),
                                __builtin_shufflevector(c, c, 0, 1, 2, 3, 4, 5, 6, 7));
    f32x8 high = _mm256_fmadd_ps(__builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15),
                                 __builtin_shufflevector(b, b, 8, 9, 10, 11, 12, 13, 14, 15),
                                 __builtin_shufflevector(c, c, 8, 9, 10, 11, 12, 13, 14, 15));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__aarch64__)
    f32x16 result;
    float32x4_t part[4], left[4], right[4];
    memcpy(part, &c, sizeof part);
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
    for (int i = 0; i < 4; ++i) part[i] = vfmaq_f32(part[i], left[i], right[i]);
    memcpy(&result, part, sizeof result);
    return result;
#else
    for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Lanes 0..15 added as a balanced tree of halves.
ATLAS_INLINE float sum(f32x16 v) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    f32x4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// a > b ? a : b, also for numbers that are none and for zeros of both signs: what the instructions say of themselves.
// Compilers make a comparison and a choice of the plain form.
ATLAS_INLINE f32x16 larger(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}

ATLAS_INLINE f32x16 lesser(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
    return a < b ? a : b;
#endif
}

ATLAS_INLINE float largest(f32x16 v) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    const f32x8 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
    const f32x8 high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#if defined(__AVX__)
    const f32x8 eight = _mm256_max_ps(low, high);
    const f32x4 four = _mm_max_ps(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                                  __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
    const f32x8 eight = low > high ? low : high;
    const f32x4 first = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
    const f32x4 second = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    const f32x4 four = first > second ? first : second;
#endif
    const float left = four[0] > four[2] ? four[0] : four[2], right = four[1] > four[3] ? four[1] : four[3];
    return left > right ? left : right;
}

// e to the x, within 2 units in the last place; x is clamped to [-87.3, 88.3], where the result stays a normal number.
ATLAS_INLINE f32x16 exponential(f32x16 x) {
    x = larger(x, splat(-87.3f));
    x = lesser(x, splat(88.3f));
    // Adding 1.5 * 2^23 rounds to the nearest whole number.
    const f32x16 rounder = splat(12582912.0f);
    f32x16 n = fma(x, splat(1.44269504f), rounder) - rounder;
    // log 2 in two parts, the first with few enough bits for n times it to be exact.
    f32x16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return p * reinterpret_cast<f32x16>(exponent);
}

// The part [first, last) of n things that falls to a task.
struct Share {
    int first, last;
};

ATLAS_INLINE Share share(int n, int task, int ntasks) {
    return {static_cast<int>(static_cast<int64_t>(n) * task / ntasks),
            static_cast<int>(static_cast<int64_t>(n) * (task + 1) / ntasks)};
}
