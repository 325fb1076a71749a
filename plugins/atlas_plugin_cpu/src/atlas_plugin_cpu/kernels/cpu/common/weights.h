// Packed weights: rows of a matrix in groups of 16, interleaved so that one load brings one column of a group.
//
// A group is a sequence of blocks of 32 columns (the last may be shorter in plain formats). Every format offers
//   kBlockBytes            bytes of one whole block of a group
//   each(block, n, f)      calls f(k, w) for k = 0..n-1 in order; w holds column k of the block, a float for each row
#pragma once

#include "simd.h"

constexpr int kBlock = 32;

ATLAS_INLINE f32x16 widen_f16(const void* from) {
#if defined(__AVX512F__)
    // The masked form: GCC 12 warns of an uninitialised variable inside the plain one.
    return reinterpret_cast<f32x16>(
        _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__F16C__)
    const __m128i* half = static_cast<const __m128i*>(from);
    float wide[kLanes];
    _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128(half)));
    _mm256_storeu_ps(wide + 8, _mm256_cvtph_ps(_mm_loadu_si128(half + 1)));
    return load(wide);
#else
    typedef _Float16 f16x16 __attribute__((vector_size(32)));
    f16x16 half;
    memcpy(&half, from, sizeof half);
    return __builtin_convertvector(half, f32x16);
#endif
}

// 16 int8 as floats. Compilers take a generic conversion apart into scalars.
ATLAS_INLINE f32x16 widen_i8(const void* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
    float wide[kLanes];
    _mm256_storeu_ps(wide, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    _mm256_storeu_ps(wide + 8, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
    return load(wide);
#elif defined(__aarch64__)
    const int8x16_t bytes = vld1q_s8(static_cast<const int8_t*>(from));
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
    float wide[kLanes];
    for (int i = 0; i < 2; ++i) {
        vst1q_f32(wide + 8 * i, vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[i]))));
        vst1q_f32(wide + 8 * i + 4, vcvtq_f32_s32(vmovl_s16(vget_high_s16(halves[i]))));
    }
    return load(wide);
#else
    float wide[kLanes];
    for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<const int8_t*>(from)[i];
    return load(wide);
#endif
}

struct F32 {
    static constexpr int kBlockBytes = 64 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* block, int n, Each f) {
        for (int k = 0; k < n; ++k) {
            f32x16 w;
            memcpy(&w, block + 64 * k, sizeof w);
            f(k, w);
        }
    }
};

struct Bf16 {
    static constexpr int kBlockBytes = 32 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* block, int n, Each f) {
        typedef uint16_t u16x16 __attribute__((vector_size(32)));
        for (int k = 0; k < n; ++k) {
            u16x16 half;
            memcpy(&half, block + 32 * k, sizeof half);
            f(k, reinterpret_cast<f32x16>(__builtin_convertvector(half, u32x16) << 16));
        }
    }
};

struct F16 {
    static constexpr int kBlockBytes = 32 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* block, int n, Each f) {
        for (int k = 0; k < n; ++k) f(k, widen_f16(block + 32 * k));
    }
};

// 16 float16 scales, then 32 columns of 16 int8.
struct Q8_0 {
    static constexpr int kBlockBytes = 32 + 16 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* block, int, Each f) {
        const f32x16 scale = widen_f16(block);
#pragma GCC unroll 8
        for (int k = 0; k < kBlock; ++k) f(k, widen_i8(block + 32 + 16 * k) * scale);
    }
};

// Field i (4 bits) of every word, as a float counted from ``least``.
ATLAS_INLINE f32x16 nibble(u32x16 words, int i, float least) {
#if defined(__AVX512F__)
    // A table look-up by the low four bits of each lane replaces mask, conversion and subtraction.
    const f32x16 table = f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + least;
    return reinterpret_cast<f32x16>(
        _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> (4 * i)), reinterpret_cast<__m512>(table)));
#else
    i32x16 field = reinterpret_cast<i32x16>((words >> (4 * i)) & 15u);
    return __builtin_convertvector(field, f32x16) + least;
#endif
}

// 16 float16 scales, then for every 8 columns one 32-bit word a row, column i of the eight in bits 4i to 4i + 3.
struct Q4_0 {
    static constexpr int kBlockBytes = 32 + 8 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* block, int, Each f) {
        const f32x16 scale = widen_f16(block);
        for (int j = 0; j < kBlock / 8; ++j) {
            u32x16 words;
            memcpy(&words, block + 32 + 64 * j, sizeof words);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) f(8 * j + i, nibble(words, i, -8.0f) * scale);
        }
    }
};

// As Q4_0, with 16 float16 minima behind the scales.
struct Q4_1 {
    static constexpr int kBlockBytes = 64 + 8 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* block, int, Each f) {
        const f32x16 scale = widen_f16(block), minimum = widen_f16(block + 32);
        for (int j = 0; j < kBlock / 8; ++j) {
            u32x16 words;
            memcpy(&words, block + 64 + 64 * j, sizeof words);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) f(8 * j + i, fma(nibble(words, i, 0.0f), scale, minimum));
        }
    }
};

// Bytes of one group of 16 rows. Columns are a multiple of 32 in every format but the plain ones.
template <class Format>
ATLAS_INLINE size_t group_bytes(int columns) {
    return static_cast<size_t>(columns) * (Format::kBlockBytes / kBlock);
}
