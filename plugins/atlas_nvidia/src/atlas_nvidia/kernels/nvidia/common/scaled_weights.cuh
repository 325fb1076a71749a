// FP8 and NVFP4 matrices as packing.py lays them: units of 8 rows, chunks of 128 summed elements, of which a lane has its
// part of the tensor cores' fragments. WEIGHTS_NVFP4 chooses; numbers become the element type in registers, exactly.
#pragma once
#include "device.cuh"

namespace atlas {

constexpr int SCALED_CHUNK = 128, SCALED_STEPS = SCALED_CHUNK / 16, UNIT_ROWS = 8;

// A unit: its chunks one behind another, a scale for each (FP8 alone), and one for each row.
struct Unit {
    const unsigned char* pieces;
    const float *of_chunks, *of_rows;
};

#ifdef ELEMENT_F16
#define ATLAS_MULTIPLY "mul.rn.f16x2"
#else
#define ATLAS_MULTIPLY "mul.rn.bf16x2"
#endif
__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t product;
    asm(ATLAS_MULTIPLY " %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

#ifdef WEIGHTS_NVFP4

constexpr bool CHUNKS_SCALED = false;
constexpr int PIECE_BYTES = 576, CODE_BYTES = 512;

// What a lane holds of one piece.
struct Numbers {
    uint4 codes;
    uint2 scales;  // of its row, a byte a step

    __device__ void load(const unsigned char* piece, int lane) {
        codes = *reinterpret_cast<const uint4*>(piece + lane * 16);
        scales = *reinterpret_cast<const uint2*>(piece + CODE_BYTES + lane / 4 * 8);
    }

    // Both pairs of a step. A code's bits are those of a number 2^-126 as large (float16: 2^-14), which the scale makes 2^-9.
    __device__ void step(int s, uint32_t& near, uint32_t& far) const {
        const uint32_t word = s / 2 == 0 ? codes.x : s / 2 == 1 ? codes.y : s / 2 == 2 ? codes.z : codes.w;
        constexpr uint32_t BITS = 0x81c081c0;
        if (s % 2 == 0) {
            near = word & BITS;
            far = word << 3 & BITS;
        } else {
            near = word << 6 & BITS;
            far = (word << 1 & 0x80008000) | (word >> 5 & 0x01400140) | (word >> 3 & 0x00800080);
        }
        const uint32_t twice = __byte_perm(s / 4 ? scales.y : scales.x, 0, 0x4040 | s % 4 * 0x0101);
#ifdef ELEMENT_F16
        const uint32_t by = twice * 128 + 0x10001000;  // five bits of exponent and three of mantissa, times 2^5
        near = (near & 0x80008000) | (near & 0x01c001c0) << 3;
        far = (far & 0x80008000) | (far & 0x01c001c0) << 3;
#else
        const uint32_t by = twice * 16 + 0x72007200;  // times 2^117
#endif
        near = multiply_pairs(near, by);
        far = multiply_pairs(far, by);
    }
};

#else

constexpr bool CHUNKS_SCALED = true;
constexpr int PIECE_BYTES = 1024, CODE_BYTES = 1024;

struct Numbers {
    uint4 codes[2];

    __device__ void load(const unsigned char* piece, int lane) {
        codes[0] = *reinterpret_cast<const uint4*>(piece + lane * 16);
        codes[1] = *reinterpret_cast<const uint4*>(piece + 512 + lane * 16);
    }

    __device__ void step(int s, uint32_t& near, uint32_t& far) const {
        const uint4& four = codes[s / 4];
        const uint32_t word = s % 4 == 0 ? four.x : s % 4 == 1 ? four.y : s % 4 == 2 ? four.z : four.w;
        // Sign, exponent and mantissa where the element type has them are a number 2^-120 as large (float16: 2^-8).
#ifdef ELEMENT_F16
        near = multiply_pairs((word << 8 & 0x80008000) | (word << 7 & 0x3f803f80), 0x5c005c00);
        far = multiply_pairs((word & 0x80008000) | (word >> 1 & 0x3f803f80), 0x5c005c00);
#else
        near = multiply_pairs((word << 8 & 0x80008000) | (word << 4 & 0x07f007f0), 0x7b807b80);
        far = multiply_pairs((word & 0x80008000) | (word >> 4 & 0x07f007f0), 0x7b807b80);
#endif
    }
};

#endif

// A matrix [rows, width], rows filled up to a multiple of 16.
struct ScaledMatrix {
    const unsigned char* data;
    int units, chunks;

    __device__ ScaledMatrix(const void* matrix, int rows, int width)
        : data(static_cast<const unsigned char*>(matrix)), units((rows + 15) / 16 * 2),
          chunks((width + SCALED_CHUNK - 1) / SCALED_CHUNK) {}

    __device__ Unit unit(int index) const {
        const int64_t pieces = static_cast<int64_t>(units) * chunks, before = static_cast<int64_t>(index) * chunks;
        const float* scales = reinterpret_cast<const float*>(data + pieces * PIECE_BYTES);
        return {data + before * PIECE_BYTES, scales + before, scales + (CHUNKS_SCALED ? pieces : 0) + index * UNIT_ROWS};
    }
};

}  // namespace atlas
