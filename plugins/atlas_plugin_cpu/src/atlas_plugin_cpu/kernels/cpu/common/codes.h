// Pieces of packed weights in registers: float16 and bytes as floats, and codes of 4 columns of 16 rows.
#pragma once

#include "simd.h"

typedef uint8_t u8x64 __attribute__((vector_size(64)));

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

// 16 bytes as floats.
ATLAS_INLINE f32x16 widen_u8(const void* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))));
#else
    typedef uint8_t u8x16 __attribute__((vector_size(16)));
    u8x16 bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, i32x16), f32x16);
#endif
}

ATLAS_INLINE u8x64 load_codes(const uint8_t* from) {
    u8x64 codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

// Quad j out of a vector for each 8 columns: even quads in the low halves of the bytes.
ATLAS_INLINE u8x64 nibbles(const uint8_t* from, int j) {
    const u32x16 words = reinterpret_cast<u32x16>(load_codes(from + 64 * (j / 2)));
    return reinterpret_cast<u8x64>((j % 2 ? words >> 4 : words) & 0x0F0F0F0Fu);
}

// Adds 16 to every byte whose bit is set in the 64 bits at ``from``.
ATLAS_INLINE u8x64 with_fifth_bits(u8x64 codes, const uint8_t* from) {
    uint64_t bits;
    memcpy(&bits, from, sizeof bits);
#if defined(__AVX512BW__)
    const __m512i plain = reinterpret_cast<__m512i>(codes);
    return reinterpret_cast<u8x64>(_mm512_mask_add_epi8(plain, bits, plain, _mm512_set1_epi8(16)));
#else
    // Each of the eight bytes is spread over eight: the multiplication and the mask leave bit c of it in byte c, the sum
    // carries it to the top of that byte.
    for (int i = 0; i < 8; ++i) {
        const uint64_t spread = ((bits >> (8 * i)) & 255) * 0x0101010101010101u & 0x8040201008040201u;
        uint64_t word;
        memcpy(&word, reinterpret_cast<const uint8_t*>(&codes) + 8 * i, sizeof word);
        word |= ((spread + 0x7F7F7F7F7F7F7F7Fu) & 0x8080808080808080u) >> 3;
        memcpy(reinterpret_cast<uint8_t*>(&codes) + 8 * i, &word, sizeof word);
    }
    return codes;
#endif
}

// The values of ggml's iq4 tables plus 128, so that they are bytes.
alignas(16) constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

ATLAS_INLINE u8x64 look_up_iq4(u8x64 numbers) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kIq4)));
    return reinterpret_cast<u8x64>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(numbers)));
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kIq4)));
    __m256i part[2];
    memcpy(part, &numbers, sizeof part);
    for (__m256i& bytes : part) bytes = _mm256_shuffle_epi8(table, bytes);
    memcpy(&numbers, part, sizeof part);
    return numbers;
#elif defined(__aarch64__)
    const uint8x16_t table = vld1q_u8(kIq4);
    uint8x16_t part[4];
    memcpy(part, &numbers, sizeof part);
    for (uint8x16_t& bytes : part) bytes = vqtbl1q_u8(table, bytes);
    memcpy(&numbers, part, sizeof part);
    return numbers;
#else
    for (int i = 0; i < 64; ++i) numbers[i] = kIq4[numbers[i]];
    return numbers;
#endif
}

// Codes below 16 in the lowest bytes of lanes whose other bytes do not matter, as floats counted from ``least``.
ATLAS_INLINE f32x16 widen_nibbles(u32x16 words, float least) {
#if defined(__AVX512F__)
    // The permutation looks at the lowest four bits alone: it replaces mask, conversion and subtraction.
    const f32x16 table = f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + least;
    return reinterpret_cast<f32x16>(
        _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words), reinterpret_cast<__m512>(table)));
#else
    return __builtin_convertvector(reinterpret_cast<i32x16>(words & 15u), f32x16) + least;
#endif
}

// A float for each of 16 rows by which codes are multiplied, and one that is added in formats with a minimum.
template <bool kMinimum>
struct Scales {
    f32x16 scale;
    ATLAS_INLINE f32x16 apply(f32x16 code) const { return code * scale; }
};

template <>
struct Scales<true> {
    f32x16 scale, minimum;
    ATLAS_INLINE f32x16 apply(f32x16 code) const { return fma(code, scale, minimum); }
};
