// Packed weights: rows of a matrix in groups of 16, interleaved so that one load brings columns of a whole group.
//
// A group is a sequence of chunks of kColumns columns, a chunk a sequence of blocks of 32 columns (the last block may be
// shorter in plain formats). Every format offers
//   kColumns, kBytes          columns and bytes of one whole chunk of a group
//   each(chunk, b, n, f)      calls f(k, w) for the first n columns k of block b in order; w holds a float for each row
// and block formats offer what integer products need besides (see the end of this file).
#pragma once

#include "codes.h"

constexpr int kBlock = 32;

struct F32 {
    static constexpr int kColumns = kBlock, kBytes = 64 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* chunk, int, int n, Each f) {
        for (int k = 0; k < n; ++k) {
            f32x16 w;
            memcpy(&w, chunk + 64 * k, sizeof w);
            f(k, w);
        }
    }
};

struct Bf16 {
    static constexpr int kColumns = kBlock, kBytes = 32 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* chunk, int, int n, Each f) {
        typedef uint16_t u16x16 __attribute__((vector_size(32)));
        for (int k = 0; k < n; ++k) {
            u16x16 half;
            memcpy(&half, chunk + 32 * k, sizeof half);
            f(k, reinterpret_cast<f32x16>(__builtin_convertvector(half, u32x16) << 16));
        }
    }
};

struct F16 {
    static constexpr int kColumns = kBlock, kBytes = 32 * kBlock;
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* chunk, int, int n, Each f) {
        for (int k = 0; k < n; ++k) f(k, widen_f16(chunk + 32 * k));
    }
};

// Columns of a block out of its codes: w = (code - kOffset) * scale (+ minimum).
template <class Format>
struct Coded {
    template <class Each>
    static ATLAS_INLINE void each(const uint8_t* chunk, int b, int, Each f) {
        for (int half = 0; half < 2; ++half) {
            const Scales<Format::kMinimum> scales = Format::scales(chunk, b, half);
#pragma GCC unroll 4
            for (int j = 4 * half; j < 4 * half + 4; ++j) {
                const u32x16 words = reinterpret_cast<u32x16>(Format::codes(chunk, b, j));
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c) {
                    const u32x16 code = words >> (8 * c);
                    if constexpr (Format::kCodes == 16) {
                        f(4 * j + c, scales.apply(widen_nibbles(code, -Format::kOffset)));
                    } else {
                        const i32x16 value = reinterpret_cast<i32x16>(code & 255u) - Format::kOffset;
                        f(4 * j + c, scales.apply(__builtin_convertvector(value, f32x16)));
                    }
                }
            }
        }
    }
};

// What block formats say of block b of a chunk:
//   codes(chunk, b, j)        columns 4j to 4j + 3: byte 4 * row + c is the code of column 4j + c, from 0 to 255
//   scales(chunk, b, half)    the scales of columns 16 * half to 16 * half + 15
//   kOffset                   what is subtracted from a code
//   kMinimum                  whether a minimum is added
//   kHalves                   2 when the halves of a block differ in scale, else 1
//   kCodes                    codes are below this

// 16 float16 scales, then nibbles: a vector of 64 bytes for each 8 columns, columns 0 to 3 in the low halves.
struct Q4_0 : Coded<Q4_0> {
    static constexpr int kColumns = 32, kBytes = 32 + 256, kOffset = 8, kCodes = 16, kHalves = 1;
    static constexpr bool kMinimum = false;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int, int j) { return nibbles(chunk + 32, j); }
    static ATLAS_INLINE Scales<false> scales(const uint8_t* chunk, int, int) { return {widen_f16(chunk)}; }
};

// As Q4_0, with 16 float16 minima behind the scales.
struct Q4_1 : Coded<Q4_1> {
    static constexpr int kColumns = 32, kBytes = 64 + 256, kOffset = 0, kCodes = 16, kHalves = 1;
    static constexpr bool kMinimum = true;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int, int j) { return nibbles(chunk + 64, j); }
    static ATLAS_INLINE Scales<true> scales(const uint8_t* chunk, int, int) {
        return {widen_f16(chunk), widen_f16(chunk + 32)};
    }
};

// As Q4_0, with the fifth bits behind the nibbles: 64 bits for each 4 columns, bit i for byte i of the codes.
struct Q5_0 : Coded<Q5_0> {
    static constexpr int kColumns = 32, kBytes = 32 + 256 + 64, kOffset = 16, kCodes = 32, kHalves = 1;
    static constexpr bool kMinimum = false;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int, int j) {
        return with_fifth_bits(nibbles(chunk + 32, j), chunk + 288 + 8 * j);
    }
    static ATLAS_INLINE Scales<false> scales(const uint8_t* chunk, int, int) { return {widen_f16(chunk)}; }
};

struct Q5_1 : Coded<Q5_1> {
    static constexpr int kColumns = 32, kBytes = 64 + 256 + 64, kOffset = 0, kCodes = 32, kHalves = 1;
    static constexpr bool kMinimum = true;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int, int j) {
        return with_fifth_bits(nibbles(chunk + 64, j), chunk + 320 + 8 * j);
    }
    static ATLAS_INLINE Scales<true> scales(const uint8_t* chunk, int, int) {
        return {widen_f16(chunk), widen_f16(chunk + 32)};
    }
};

// 16 float16 scales, then a vector for each 4 columns: the int8 plus 128.
struct Q8_0 : Coded<Q8_0> {
    static constexpr int kColumns = 32, kBytes = 32 + 512, kOffset = 128, kCodes = 256, kHalves = 1;
    static constexpr bool kMinimum = false;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int, int j) { return load_codes(chunk + 32 + 64 * j); }
    static ATLAS_INLINE Scales<false> scales(const uint8_t* chunk, int, int) { return {widen_f16(chunk)}; }
};

// 16 float16 scales and 16 float16 minima; for each of 8 blocks 16 bytes by which the scale is multiplied and 16 for the
// minimum, which is subtracted; then the blocks, kBlockBytes each, nibbles first.
template <int kBits, int kBlockBytes>
struct Super {
    static constexpr int kColumns = 256, kHead = 64 + 8 * 32, kBytes = kHead + 8 * kBlockBytes;
    static constexpr int kOffset = 0, kCodes = 1 << kBits, kHalves = 1;
    static constexpr bool kMinimum = true;
    static ATLAS_INLINE const uint8_t* block(const uint8_t* chunk, int b) { return chunk + kHead + kBlockBytes * b; }
    static ATLAS_INLINE Scales<true> scales(const uint8_t* chunk, int b, int) {
        const uint8_t* factors = chunk + 64 + 32 * b;
        return {widen_f16(chunk) * widen_u8(factors), -(widen_f16(chunk + 32) * widen_u8(factors + 16))};
    }
};

struct Q4_K : Super<4, 256>, Coded<Q4_K> {
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int b, int j) { return nibbles(block(chunk, b), j); }
};

struct Q5_K : Super<5, 256 + 64>, Coded<Q5_K> {
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int b, int j) {
        return with_fifth_bits(nibbles(block(chunk, b), j), block(chunk, b) + 256 + 8 * j);
    }
};

// 16 float16 scales; for each 16 columns 16 int8 by which they are multiplied; then 8 blocks: nibbles, and two vectors of
// upper bits, two bits for each 4 columns of a half.
struct Q6_K : Coded<Q6_K> {
    static constexpr int kColumns = 256, kBytes = 32 + 256 + 8 * 384, kOffset = 32, kCodes = 64, kHalves = 2;
    static constexpr bool kMinimum = false;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int b, int j) {
        const uint8_t* block = chunk + 288 + 384 * b;
        const u32x16 upper = reinterpret_cast<u32x16>(load_codes(block + 256 + 64 * (j / 4)));
        const u32x16 bits = ((upper >> (2 * (j % 4))) & 0x03030303u) << 4;
        return reinterpret_cast<u8x64>(reinterpret_cast<u32x16>(nibbles(block, j)) | bits);
    }
    static ATLAS_INLINE Scales<false> scales(const uint8_t* chunk, int b, int half) {
        return {widen_f16(chunk) * widen_i8(chunk + 32 + 32 * b + 16 * half)};
    }
};

// 16 float16 scales; for each block 16 int8 by which they are multiplied; then 8 blocks of nibbles, which number 16 values.
struct Iq4_Xs : Coded<Iq4_Xs> {
    static constexpr int kColumns = 256, kBytes = 32 + 128 + 8 * 256, kOffset = 128, kCodes = 256, kHalves = 1;
    static constexpr bool kMinimum = false;
    static ATLAS_INLINE u8x64 codes(const uint8_t* chunk, int b, int j) {
        return look_up_iq4(nibbles(chunk + 160 + 256 * b, j));
    }
    static ATLAS_INLINE Scales<false> scales(const uint8_t* chunk, int b, int) {
        return {widen_f16(chunk) * widen_i8(chunk + 32 + 16 * b)};
    }
};

constexpr int kAheadBytes = 4096;

// Weights that one row passes come from memory; the processor's own prefetching leaves a third of its speed unused. They
// are brought to the second-level cache: what waits for the first one is few lines at a time.
template <int kBytes>
ATLAS_INLINE void prefetch_block(const uint8_t* at) {
#pragma GCC unroll 16
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(at + kAheadBytes + line, 0, 2);
}

// Bytes of one group of 16 rows; plain formats may end inside a chunk.
template <class Format>
ATLAS_INLINE size_t group_bytes(int columns) {
    return static_cast<size_t>(columns) * Format::kBytes / Format::kColumns;
}
