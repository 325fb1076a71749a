// Tiles of weights that are codes, widened by the threads that bring them: some while others are on their way.
//
// float4 and its scales are exact in bfloat16; float8 times the scale of its 128 columns is rounded to it.
#pragma once
#include "expert_codes.cuh"

namespace atlas {

__device__ inline void put_shared(uint32_t target, const uint4& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 ::"r"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Some rows of a stack: ``left`` from ``row`` on, if any.
struct SomeRows {
    CodedExperts stack;
    int64_t row;
    int left;
};

// The 16-byte pieces of the codes of a tile's ROWS rows that this one of THREADS threads widens, WIDTH columns at a time. The
// tile is PARTS runs of rows, one behind another.
template <int ROWS, int PARTS, int WIDTH, int THREADS>
struct WideCodes {
    static constexpr int ACROSS = WIDTH / CODE_COLUMNS, COUNT = ROWS * ACROSS / THREADS, APART = THREADS / ACROSS;
    static constexpr int EACH = ROWS / PARTS, RUNS = COUNT < PARTS ? COUNT : PARTS, OF_RUN = COUNT / RUNS;
    static constexpr int STEP = WIDTH * CODE_BITS / 8;
    static_assert(COUNT * APART == ROWS && APART % 8 == 0, "every thread has as many pieces, whole eights of rows apart");
    static_assert(WIDTH == 64, "steps are halves of chunks");
    const unsigned char *codes[RUNS], *scales[RUNS];
    int left[RUNS], chunks;
    static constexpr int AHEAD = COUNT < 4 ? COUNT : 4;  // pieces on their way
    uint4 found[AHEAD];
    uint32_t scale[AHEAD];
    int step = 0;

    // rows_of(part): its SomeRows, the first of which is a multiple of 8.
    template <class RowsOf>
    __device__ WideCodes(RowsOf rows_of) {
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            const int row = row_of(r * OF_RUN);
            const SomeRows rows = rows_of(row / EACH);
            const int64_t first = rows.row + row % EACH;
            chunks = rows.stack.chunks;
            left[r] = rows.left - row % EACH;
            codes[r] = rows.stack.codes_of(left[r] > 0 ? first : 0) + across() * 16;
            scales[r] = rows.stack.scales_of(left[r] > 0 ? first - row % 8 : 0);
            if constexpr (CODE_BITS == 4) scales[r] += row % 8 * chunks * 8 + across() * 2;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load(i, 0);
    }

    // put(row, piece of 8 columns, values) for a step, the next pieces on their way. ``steps``: of the whole product.
    template <class Put>
    __device__ void fetch(int steps, Put put) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const uint4 here = found[i % AHEAD];
            const uint32_t q[4] = {here.x, here.y, here.z, here.w};
#if CODE_BITS == 4
            uint32_t by[2];
            widen_scales(static_cast<uint16_t>(scale[i % AHEAD]), by);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t pair[4];
                widen(q[j], by[j / 2], pair);
                put(row_of(i), across() * 4 + j, in_order(pair));
            }
#else
            const float by = __uint_as_float(scale[i % AHEAD]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint2 first = four(q[2 * j], by), second = four(q[2 * j + 1], by);
                put(row_of(i), across() * 2 + j, make_uint4(first.x, first.y, second.x, second.y));
            }
#endif
            if (i + AHEAD < COUNT) load(i + AHEAD, step);
            else if (step + 1 < steps) load(i + AHEAD - COUNT, step + 1);
        }
        ++step;
    }

  private:
    static __device__ int row_of(int i) { return threadIdx.x / ACROSS + i * APART; }
    static __device__ int across() { return threadIdx.x % ACROSS; }

    // Piece i of step ``at``.
    __device__ void load(int i, int at) {
        const int r = i / OF_RUN, behind = i % OF_RUN;
        const bool exists = behind * APART < left[r];
        const int row = exists ? behind * APART * chunks : 0;
        found[i % AHEAD] = exists ? load_weights(codes[r] + row * CODE_ROW + at * STEP) : zero16();
        const unsigned char* from = scales[r] + row / 8 * SCALE_BYTES;
        if constexpr (CODE_BITS == 4) scale[i % AHEAD] = __ldg(reinterpret_cast<const uint16_t*>(from + at * 4));
        else scale[i % AHEAD] = __ldg(reinterpret_cast<const uint32_t*>(from) + at / 2);
    }

#if CODE_BITS == 8
    static __device__ uint2 four(uint32_t q, float by) {
        uint32_t even, odd;
        widen(q, even, odd);
        return make_uint2(pack(low(even) * by, low(odd) * by), pack(high(even) * by, high(odd) * by));
    }
    static __device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
    static __device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
#endif
};

}  // namespace atlas
