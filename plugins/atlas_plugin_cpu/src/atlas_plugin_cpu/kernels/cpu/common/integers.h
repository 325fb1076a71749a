// Rows of activations as 8-bit integers, and products of them with the codes of packed weights.
//
// A row is cut into blocks of 32 columns. A block holds integers from -127 to 127 and the float by which they are
// multiplied. Sums of products of integers are exact, so their order, and with it the instruction, decides no bit.
#pragma once

#include "codes.h"
#include "rows.h"

constexpr int kInts = 32;  // columns of a block

// Rows that lie side by side, ``width`` of them: for each block the integers of every row, then for each block and row
// the scale, the scale times the sum of the integers, and the sums of both halves.
struct Prepared {
    uint8_t* base;
    int columns, width;

    static ATLAS_INLINE size_t bytes(int columns, int width) { return static_cast<size_t>(columns) * 3 / 2 * width; }
    ATLAS_INLINE int blocks() const { return columns / kInts; }
    ATLAS_INLINE int8_t* ints(int block, int row) const {
        return reinterpret_cast<int8_t*>(base) + (static_cast<size_t>(block) * width + row) * kInts;
    }
    ATLAS_INLINE float* scales(int block) const {
        return reinterpret_cast<float*>(base + static_cast<size_t>(columns) * width) + block * width;
    }
    ATLAS_INLINE float* moments(int block) const { return scales(block) + blocks() * width; }
    ATLAS_INLINE int32_t* sums(int block, int half) const {
        return reinterpret_cast<int32_t*>(scales(0) + 2 * blocks() * width) + (2 * block + half) * width;
    }
};

ATLAS_INLINE int32_t sum(i32x16 v) {
    typedef int32_t i32x8 __attribute__((vector_size(32)));
    typedef int32_t i32x4 __attribute__((vector_size(16)));
    const i32x8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const i32x4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                       __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The nearest whole number, ties to even, of values below 2^22.
ATLAS_INLINE i32x16 nearest(f32x16 v) {
    const f32x16 rounder = splat(12582912.0f);
    return reinterpret_cast<i32x16>(v + rounder) - reinterpret_cast<i32x16>(rounder);
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

// The sum of 16 bytes.
ATLAS_INLINE int32_t sum(i8x16 v) {
#if defined(__SSE2__)
    const __m128i raised = _mm_xor_si128(reinterpret_cast<__m128i>(v), _mm_set1_epi8(-128));
    const __m128i both = _mm_sad_epu8(raised, _mm_setzero_si128());
    return _mm_cvtsi128_si32(both) + _mm_extract_epi16(both, 4) - 16 * 128;
#else
    return sum(__builtin_convertvector(v, i32x16));
#endif
}

// Writes 32 integers below 128 as block ``block`` of a row, and what goes with them.
ATLAS_INLINE void put_block(Prepared to, int block, int row, const i32x16 (&whole)[2], float scale) {
    int32_t total = 0;
    for (int half = 0; half < 2; ++half) {
        const i8x16 narrow = __builtin_convertvector(whole[half], i8x16);
        memcpy(to.ints(block, row) + half * kLanes, &narrow, sizeof narrow);
        const int32_t part = sum(narrow);
        to.sums(block, half)[row] = part;
        total += part;
    }
    to.scales(block)[row] = scale;
    to.moments(block)[row] = scale * static_cast<float>(total);
}

// Writes one row; value(k) gives columns k to k + 15.
template <class Value>
ATLAS_INLINE void quantise(Prepared to, int row, Value value) {
    for (int block = 0; block < to.blocks(); ++block) {
        const f32x16 v[2] = {value(block * kInts), value(block * kInts + kLanes)};
        const float most = largest(larger(larger(v[0], -v[0]), larger(v[1], -v[1])));
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        put_block(to, block, row, {nearest(v[0] * inverse), nearest(v[1] * inverse)}, most / 127.0f);
    }
}

// Writes one row as two, ``row`` and the next: integers of 14 bits and a sign as 128 times one of 8 bits plus another.
template <class Value>
ATLAS_INLINE void quantise_twice(Prepared to, int row, Value value) {
    constexpr int kBase = 128;
    constexpr float kMost = 127.0f * kBase;
    for (int block = 0; block < to.blocks(); ++block) {
        const f32x16 v[2] = {value(block * kInts), value(block * kInts + kLanes)};
        const float most = largest(larger(larger(v[0], -v[0]), larger(v[1], -v[1])));
        const float scale = most / kMost, inverse = most > 0 ? kMost / most : 0.0f;
        const i32x16 whole[2] = {nearest(v[0] * inverse), nearest(v[1] * inverse)};
        const i32x16 upper[2] = {(whole[0] + kBase / 2) >> 7, (whole[1] + kBase / 2) >> 7};
        put_block(to, block, row, upper, scale * kBase);
        put_block(to, block, row + 1, {whole[0] - upper[0] * kBase, whole[1] - upper[1] * kBase}, scale);
    }
}

// sums + the products of 4 columns of 16 rows with 4 activations; codes are below kCodes.
template <int kCodes>
ATLAS_INLINE i32x16 dot(i32x16 sums, u8x64 codes, const int8_t* x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
#if defined(__AVX512VNNI__)
    return reinterpret_cast<i32x16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                        reinterpret_cast<__m512i>(codes), _mm512_set1_epi32(quad)));
#elif defined(__AVX2__)
    const __m256i four = _mm256_set1_epi32(quad);
    __m256i total[2], code[2];
    memcpy(total, &sums, sizeof total);
    memcpy(code, &codes, sizeof code);
    for (int i = 0; i < 2; ++i) {
#if defined(__AVXVNNI__)
        total[i] = _mm256_dpbusd_avx_epi32(total[i], code[i], four);
#else
        const __m256i ones = _mm256_set1_epi16(1);
        if constexpr (kCodes > 128) {
            // Sums of two products of bytes may exceed 16 bits: the top bit of the codes goes by itself.
            const __m256i top = _mm256_set1_epi8(-128);
            const __m256i low = _mm256_maddubs_epi16(_mm256_andnot_si256(top, code[i]), four);
            const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(top, code[i]), four);
            total[i] = _mm256_add_epi32(total[i], _mm256_madd_epi16(high, ones));
            total[i] = _mm256_add_epi32(total[i], _mm256_madd_epi16(low, ones));
        } else {
            const __m256i pairs = _mm256_maddubs_epi16(code[i], four);
            total[i] = _mm256_add_epi32(total[i], _mm256_madd_epi16(pairs, ones));
        }
#endif
    }
    memcpy(&sums, total, sizeof sums);
    return sums;
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD))
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    int32x4_t total[4];
    uint8x16_t code[4];
    memcpy(total, &sums, sizeof total);
    memcpy(code, &codes, sizeof code);
    for (int i = 0; i < 4; ++i) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        total[i] = vusdotq_s32(total[i], code[i], four);
#else
        if constexpr (kCodes > 128) {
            // Codes as signed bytes are less by 128, which is added again for every activation.
            const int8x16_t less = vreinterpretq_s8_u8(veorq_u8(code[i], vdupq_n_u8(128)));
            total[i] = vdotq_s32(total[i], less, four);
            total[i] = vmlaq_n_s32(total[i], vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), four), 128);
        } else {
            total[i] = vdotq_s32(total[i], vreinterpretq_s8_u8(code[i]), four);
        }
#endif
    }
    memcpy(&sums, total, sizeof sums);
    return sums;
#else
    const u32x16 words = reinterpret_cast<u32x16>(codes);
    for (int c = 0; c < 4; ++c) sums += reinterpret_cast<i32x16>((words >> (8 * c)) & 255u) * static_cast<int32_t>(x[c]);
    return sums;
#endif
}
