// Weights of experts in few bits as implementations/expert_codes.py packs them, and their way into the registers of a
// product: float4 e2m1 with an e4m3 scale for 16 of a row, or float8 e4m3 with a float32 for 128 columns of 8 rows.
//
// A packed stack is [experts * rows] rows of codes, padded with zeros to whole chunks of 128 columns, their scales, and a
// factor for each row. A lane has 32 neighbours of a row of a chunk: these have two scales, or one. So the summed dimension
// is permuted, which is harmless because columns are read with the same permutation.
#pragma once
#include <cuda_fp16.h>

#include "device.cuh"

#ifndef CODE_BITS
#define CODE_BITS 4
#endif
#ifdef ELEMENT_F16
#error "the exponents of e2m1 and e4m3 are moved into those of bfloat16"
#endif

namespace atlas {

constexpr int CODE_CHUNK = 128;                          // columns of a warp's step
constexpr int CODE_PIECES = CODE_BITS / 4;               // of 16 bytes that a lane has of a row
constexpr int CODE_ROW = CODE_CHUNK * CODE_BITS / 8;     // bytes of a row of a chunk
constexpr int SCALE_BYTES = CODE_BITS == 4 ? 64 : 4;     // of 8 rows of a chunk
constexpr int CODE_COLUMNS = 128 / CODE_BITS;            // columns of 16 bytes
constexpr float CODE_FACTOR = CODE_BITS == 4 ? 256.0f : 1.0f;  // of sums of what widen() gives

__host__ __device__ constexpr int code_chunks(int columns) { return (columns + CODE_CHUNK - 1) / CODE_CHUNK; }

// One packed stack of [experts][rows][columns].
struct CodedExperts {
    const unsigned char *codes, *scales;
    const float* factors;
    int chunks;

    __device__ CodedExperts(const void* packed, int experts, int rows, int columns) : chunks(code_chunks(columns)) {
        const int64_t all = static_cast<int64_t>(experts) * rows;
        codes = static_cast<const unsigned char*>(packed);
        scales = codes + all * chunks * CODE_ROW;
        factors = reinterpret_cast<const float*>(scales + (all / 8 * chunks * SCALE_BYTES + 15) / 16 * 16);
    }
    __device__ const unsigned char* codes_of(int64_t row) const { return codes + row * chunks * CODE_ROW; }
    // Of a row that is a multiple of 8, for all 8: [8][chunks][8] bytes, or [chunks] floats.
    __device__ const unsigned char* scales_of(int64_t row) const { return scales + row / 8 * chunks * SCALE_BYTES; }
};

// A number of the type system.
template <int VALUE>
struct Number {
    static constexpr int value = VALUE;
};

__device__ inline uint32_t multiply(uint32_t pair, uint32_t by) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(by));
    return product;
}

#if CODE_BITS == 4

// Scales of two neighbouring groups, times 2^118, each in both halves. Of what a byte holds nothing is lost.
__device__ inline void widen_scales(uint16_t bytes, uint32_t (&scale)[2]) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    constexpr float BY = 0x1p118f;
    scale[0] = pack(values.x * BY, values.x * BY);
    scale[1] = pack(values.y * BY, values.y * BY);
}

// 8 codes, the first in the lowest bits: number times scale times 2^-8, exactly, elements i and i + 4 in pair i. Exponent
// and mantissa of e2m1 become the last bits of the exponent of bfloat16, and its first: the number times 2^-126.
__device__ inline void widen(uint32_t q, uint32_t scale, uint32_t (&pair)[4]) {
    constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x01c001c0u;
    pair[0] = multiply((q << 12 & SIGN) | (q << 6 & MAGNITUDE), scale);
    pair[1] = multiply((q << 8 & SIGN) | (q << 2 & MAGNITUDE), scale);
    pair[2] = multiply((q << 4 & SIGN) | (q >> 2 & MAGNITUDE), scale);
    pair[3] = multiply((q & SIGN) | (q >> 6 & MAGNITUDE), scale);
}

// Where element i of 8 neighbours is, in the order of the pairs.
__host__ __device__ constexpr int place_of(int i) { return i < 4 ? 2 * i : 2 * i - 7; }

// 8 neighbours in the order of the pairs.
__device__ inline uint4 in_pairs(const uint4& v) {
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                      __byte_perm(v.y, v.w, 0x7632));
}

// And back.
__device__ inline uint4 in_order(const uint32_t (&pair)[4]) {
    return make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                      __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
}

#else

// 4 codes: the numbers, exactly, elements i and i + 2 in pair i.
__device__ inline void widen(uint32_t q, uint32_t& first, uint32_t& second) {
    constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x07f007f0u, BY = 0x7b807b80u;  // 2^120
    first = multiply((q << 8 & SIGN) | (q << 4 & MAGNITUDE), BY);
    second = multiply((q & SIGN) | (q >> 4 & MAGNITUDE), BY);
}

__host__ __device__ constexpr int place_of(int i) { return i / 4 * 4 + (i % 4 < 2 ? 2 * (i % 4) : 2 * (i % 4) - 3); }

__device__ inline uint4 in_pairs(const uint4& v) {
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410),
                      __byte_perm(v.z, v.w, 0x7632));
}

#endif

// What a warp keeps of 16 rows of a chunk, in shared memory: each lane the codes of its rows g and g + 8 that it will use
// itself, then the scales of the rows.
constexpr int CODE_SLOT = 16 * CODE_ROW + 2 * 64;

__device__ inline void copy_four(uint32_t target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// The 16 rows of a tile, 8 each of two places in packed stacks; what this lane copies of them.
struct CodedRows {
    const unsigned char *upper, *lower, *scales;

    // Rows ``first ..`` of ``a`` and ``second ..`` of ``b``, multiples of 8.
    __device__ void locate(const CodedExperts& a, int64_t first, const CodedExperts& b, int64_t second) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        upper = a.codes_of(first + g) + t * CODE_PIECES * 16;
        lower = b.codes_of(second + g) + t * CODE_PIECES * 16;
        if constexpr (CODE_BITS == 4) {
            // Four bytes a lane, half of what a row has for a chunk.
            scales = (t < 2 ? a.scales_of(first) : b.scales_of(second)) + g * a.chunks * 8 + t % 2 * 4;
        } else {
            scales = lane == 0 ? a.scales_of(first) : b.scales_of(second);
        }
    }

    __device__ void fetch(uint32_t slot, int chunk) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int p = 0; p < CODE_PIECES; ++p) {
            copy_weights(slot + (p * WARP + lane) * 16, upper + chunk * CODE_ROW + p * 16, true);
            copy_weights(slot + ((CODE_PIECES + p) * WARP + lane) * 16, lower + chunk * CODE_ROW + p * 16, true);
        }
        const uint32_t to = slot + 16 * CODE_ROW;
        if constexpr (CODE_BITS == 4) {
            copy_four(to + (lane / 4 + lane % 4 / 2 * 8) * 8 + lane % 2 * 4, scales + chunk * 8);
        } else {
            if (lane < 2) copy_four(to + lane * 4, scales + chunk * 4);
        }
    }
};

// Sums of products for TILES columns of 8: several for each, so that no product waits for the one before it.
template <int TILES>
struct SlotSums {
    static constexpr int CHAINS = TILES == 1 ? 4 : 2;
    float parts[TILES][CHAINS][4] = {};

    // ``sum`` of a tile of columns as mma() leaves it.
    __device__ float sum(int tile, int i) const {
        float total = parts[tile][0][i] + parts[tile][1][i];
        if constexpr (CHAINS == 4) total += parts[tile][2][i] + parts[tile][3][i];
        return total;
    }

    // The 16 rows of a slot. read(tile, j): elements 8j to 8j + 7 of this lane's 32 of column g of a tile, in the order of
    // the pairs.
    template <class Read>
    __device__ void multiply(const unsigned char* slot, Read read) {
        const int lane = threadIdx.x % WARP;
        const uint4* codes = reinterpret_cast<const uint4*>(slot) + lane;
        const unsigned char* scales = slot + 16 * CODE_ROW;
#if CODE_BITS == 4
        const uint4 upper = codes[0], lower = codes[WARP];
        const int own = lane / 4 * 8 + lane % 4 * 2;
        uint32_t upper_scales[2], lower_scales[2];
        widen_scales(*reinterpret_cast<const uint16_t*>(scales + own), upper_scales);
        widen_scales(*reinterpret_cast<const uint16_t*>(scales + 64 + own), lower_scales);
        const uint32_t u[4] = {upper.x, upper.y, upper.z, upper.w}, l[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t a[4], b[4];
            widen(u[j], upper_scales[j / 2], a);
            widen(l[j], lower_scales[j / 2], b);
            add(parts, a, b, j, read);
        }
#else
        const float upper_scale = *reinterpret_cast<const float*>(scales);
        const float lower_scale = *reinterpret_cast<const float*>(scales + 4);
        float fresh[TILES][CHAINS][4] = {};
#pragma unroll
        for (int p = 0; p < CODE_PIECES; ++p) {
            const uint4 upper = codes[p * WARP], lower = codes[(CODE_PIECES + p) * WARP];
            const uint32_t u[4] = {upper.x, upper.y, upper.z, upper.w}, l[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[4], b[4];
                widen(u[2 * half], a[0], a[1]);
                widen(u[2 * half + 1], a[2], a[3]);
                widen(l[2 * half], b[0], b[1]);
                widen(l[2 * half + 1], b[2], b[3]);
                add(fresh, a, b, 2 * p + half, read);
            }
        }
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
#pragma unroll
            for (int chain = 0; chain < CHAINS; ++chain) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    parts[c][chain][i] += fresh[c][chain][i] * (i < 2 ? upper_scale : lower_scale);
                }
            }
        }
#endif
    }

  private:
    template <class Read>
    static __device__ void add(float (&to)[TILES][CHAINS][4], const uint32_t (&a)[4], const uint32_t (&b)[4], int j,
                               Read read) {
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const uint4 x = read(c, j);
            mma(to[c][j % (CHAINS / 2)], a[0], b[0], a[1], b[1], x.x, x.y);
            mma(to[c][CHAINS / 2 + j % (CHAINS / 2)], a[2], b[2], a[3], b[3], x.z, x.w);
        }
    }
};

// Where the 16 bytes of elements 8p to 8p + 7 of a chunk are in a column of 256 bytes: those that the lanes of a row read
// together are neighbours.
__host__ __device__ constexpr int piece_place(int p) { return (p % 4 * 4 + p / 4) * 16; }

}  // namespace atlas
