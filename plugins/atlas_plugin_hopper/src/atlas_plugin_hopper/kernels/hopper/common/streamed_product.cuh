// Products of one token with rows of weights that stream through shared memory, tile after tile of 8 rows. One warp
// copies rows into a ring, the others share out the summed dimension: each has its chunk of the token as fragments, and
// a sum of its own a row.
#pragma once
#include "bulk_copy.cuh"
#include "resident_words.cuh"

namespace atlas {

constexpr int WARPS = 8, CONSUMERS = WARPS * WARP;
constexpr int STAGE_BYTES = 16656;  // 4 rows of 2,048, 2 of 4,096, 16 of 512

// 1 / (1 + e^-x) by a division of two instructions.
__device__ inline float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
// A block's share of so many things, which are fewer than 2^31 / blocks.
__device__ inline Span share_of(uint32_t all) {
    const uint32_t first = all * blockIdx.x / gridDim.x;
    return {static_cast<int>(first), static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first)};
}
__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ inline float sum_of(const float (&parts)[WARPS]) {
    const float4 a = *reinterpret_cast<const float4*>(parts), b = *reinterpret_cast<const float4*>(parts + 4);
    return (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
}

// How rows of K lie in a stage. Stages are 16 bytes longer than a multiple of 128, and rows are as much longer as it
// takes for 8 of them to meet no bank twice, wherever a stage ends among them.
template <int K>
struct Stage {
    static constexpr int MOST = STAGE_BYTES / (2 * K + 16), APART = MOST >= 8 ? 16 : 128 / MOST;
    static constexpr int PITCH = 2 * K + APART, ROWS = STAGE_BYTES / PITCH;
    static_assert(STAGE_BYTES % 128 == 16 && K % 64 == 0 && 8 % (MOST < 8 ? MOST : 8) == 0 && ROWS == MOST);
    static_assert(ROWS <= WARP, "a lane copies a row");
};

struct Ring {
    uint32_t stages, full, empty;  // `full` and `empty`: a barrier a stage
    int count, slot = 0, parity = 0;

    __device__ void begin() const {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ void advance(int by) {
        slot += by;
        if (slot >= count) {
            slot -= count;
            parity ^= 1;
        }
    }
    // Waits for so many stages from this slot on.
    __device__ void wait(int wanted) const {
#pragma unroll 1
        for (int i = 0; i < wanted; ++i) {
            const bool wrapped = slot + i >= count;
            barrier_wait(full + 8 * (wrapped ? slot + i - count : slot + i), parity ^ wrapped);
        }
    }
    // Where row j lies of those that begin at this slot.
    template <int K>
    __device__ uint32_t row(int j) const {
        const int at = slot + j / Stage<K>::ROWS;
        return stages + (at >= count ? at - count : at) * STAGE_BYTES + j % Stage<K>::ROWS * Stage<K>::PITCH;
    }
    __device__ void release(int released, int lane) {
        __syncwarp();
        if (lane < released) barrier_arrive(empty + 8 * (slot + lane >= count ? slot + lane - count : slot + lane));
        advance(released);
    }
    // By the warp that copies: so many rows, the addresses of which address(j) gives. They begin with a stage.
    template <int K, class Address>
    __device__ void fill(int rows, int lane, Address address) {
#pragma unroll 1
        for (int first = 0; first < rows; first += Stage<K>::ROWS) {
            const int some = min(Stage<K>::ROWS, rows - first);
            barrier_wait(empty + 8 * slot, parity ^ 1);
            if (lane == 0) barrier_expect(full + 8 * slot, some * 2 * K);
            __syncwarp();
            if (lane < some) {
                copy_bulk(stages + slot * STAGE_BYTES + lane * Stage<K>::PITCH, address(first + lane), 2 * K,
                          full + 8 * slot);
            }
            advance(1);
        }
    }
};

// Where a pair of a warp's chunk lies as a fragment. Of two steps of 16, lane l's four are neighbours: in the left operand
// of mma, row 0 is the first step and row 8 the second, so that one set of registers serves both.
__device__ inline uint32_t place_of(uint32_t pair) {
    return (pair & ~15u) | (pair & 3u) << 2 | (pair >> 1 & 2u) | (pair >> 3 & 1u);
}
constexpr int NEXT_PLACE = 4;  // how far behind that of an even pair lies that of the next one

// Of 8 rows the next 32 * TURNS elements, as fragments.
template <int TURNS>
struct Fragments {
    uint32_t b[TURNS][4];

    // That of row lane % 8 begins at `row`.
    __device__ void load(uint32_t row, int lane) {
#pragma unroll
        for (int t = 0; t < TURNS; ++t) load_matrix(b[t], row + lane / 8 * 16 + 64 * t);
    }
    // Adds the products with a vector of fragments, to the sums of first steps and of second ones.
    __device__ void multiply(float (&acc)[2][4], const uint32_t* vector, int lane) const {
        const uint4* x = reinterpret_cast<const uint4*>(vector) + lane % 4;
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const uint4 v = x[4 * t];
            mma(acc[0], v.x, v.y, v.z, v.w, b[t][0], b[t][1]);
            mma(acc[1], v.x, v.y, v.z, v.w, b[t][2], b[t][3]);
        }
    }
};
// What that makes of row 2 lane + i, in lanes 0 to 3.
__device__ inline float of_row(const float (&acc)[2][4], int i) { return acc[0][i] + acc[1][2 + i]; }

// What the warps leave of a phase: their parts of the sum of every row, and of the sum of squares. Phases take two of
// these in turns, so that one barrier a phase is enough.
template <int ROWS>
struct Sums {
    float rows[ROWS][WARPS], squares[WARPS];

    // 1 / root mean square of a vector of so many.
    __device__ float factor(int width, float eps) const {
        return rsqrtf(sum_of(squares) / static_cast<float>(width) + eps);
    }
};

// Up to 8 rows of K, the next of the ring: this warp's parts of their sums.
template <int K>
__device__ inline void multiply_tile(Ring& ring, int rows, const uint32_t* vector, float (*sums)[WARPS], int warp,
                                     int lane) {
    constexpr int CHUNK = K / WARPS, AT_ONCE = 256, EACH = Stage<K>::ROWS;
    static_assert(CHUNK % AT_ONCE == 0, "a chunk is loaded in whole parts");
    const int stages = (rows + EACH - 1) / EACH;
    ring.wait(stages);
    const uint32_t row = ring.row<K>(min(lane % 8, rows - 1)) + 2 * warp * CHUNK;
    float acc[2][4] = {};
#pragma unroll
    for (int k = 0; k < CHUNK; k += AT_ONCE) {
        Fragments<AT_ONCE / 32> part;
        part.load(row + 2 * k, lane);
        part.multiply(acc, vector + k / 2, lane);
    }
    ring.release(stages, lane);
    if (lane < 4) {
        sums[2 * lane][warp] = of_row(acc, 0);
        sums[2 * lane + 1][warp] = of_row(acc, 1);
    }
}
// So many rows.
template <int K>
__device__ inline void multiply_rows(Ring& ring, int rows, const uint32_t* vector, float (*sums)[WARPS], int warp,
                                     int lane) {
#pragma unroll 1
    for (int done = 0; done < rows; done += 8) {
        multiply_tile<K>(ring, min(8, rows - done), vector, sums + done, warp, lane);
    }
}

// A weight of bfloat16 or float32 as it lies in memory: whoever asks early must not wait for it where it asks, as a
// conversion would.
__device__ inline uint32_t ask_weight(const void* weights, int64_t index, int type) {
    return type == VECTOR_F32 ? __ldg(static_cast<const uint32_t*>(weights) + index)
                              : __ldg(static_cast<const uint16_t*>(weights) + index);
}
__device__ inline float as_weight(uint32_t bits, int type) {
    return __uint_as_float(type == VECTOR_F32 ? bits : bits << 16);
}
// Four neighbours of them.
__device__ inline uint4 ask_weights(const void* weights, int64_t index, int type) {
    uint4 four = {};
    if (type == VECTOR_F32) {
        four = __ldg(reinterpret_cast<const uint4*>(static_cast<const float*>(weights) + index));
    } else {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(weights) + index));
        four.x = v.x, four.y = v.y;
    }
    return four;
}
__device__ inline void as_weights(const uint4& four, int type, float (&out)[4]) {
    const bool wide = type == VECTOR_F32;
    out[0] = __uint_as_float(wide ? four.x : four.x << 16);
    out[1] = __uint_as_float(wide ? four.y : four.x & 0xffff0000u);
    out[2] = __uint_as_float(wide ? four.z : four.y << 16);
    out[3] = __uint_as_float(wide ? four.w : four.y & 0xffff0000u);
}

// A warp's chunk of a vector behind its norm, where a lane has eight elements.
template <int K>
struct NormedChunk {
    static constexpr int CHUNK = K / WARPS, HALF = CHUNK / 2;
    static_assert(CHUNK == 8 * WARP, "a lane has two pairs of either half");
    int type;  // of the weights
    uint4 weight[2];

    __device__ static int element(int i, int warp, int lane) { return warp * CHUNK + i * HALF + 4 * lane; }

    __device__ void ask(const void* weights, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) weight[i] = ask_weights(weights, element(i, warp, lane), type);
    }
    // Of two_numbers that others send.
    __device__ void receive(const uint64_t* words, uint32_t flag, uint32_t* vector, float (&squares)[WARPS], int warp,
                            int lane) const {
        uint64_t word[4];
        bool all;
        int turns = 0;
        do {
            look2(words + element(0, warp, lane) / 2, word[0], word[1]);
            look2(words + element(1, warp, lane) / 2, word[2], word[3]);
            all = fresh_pair(word[0], flag) && fresh_pair(word[1], flag) && fresh_pair(word[2], flag) &&
                  fresh_pair(word[3], flag);
            lose_patience(turns);
        } while (!all);
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[2 * i] = first_number(word[i]), v[2 * i + 1] = second_number(word[i]);
        take(v, vector, squares, warp, lane);
    }
    // Of float32 numbers that are there.
    __device__ void read(const float* from, uint32_t* vector, float (&squares)[WARPS], int warp, int lane) const {
        float v[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 raw = load16(from + element(i, warp, lane));
            v[4 * i] = __uint_as_float(raw.x), v[4 * i + 1] = __uint_as_float(raw.y);
            v[4 * i + 2] = __uint_as_float(raw.z), v[4 * i + 3] = __uint_as_float(raw.w);
        }
        take(v, vector, squares, warp, lane);
    }

  private:
    __device__ void take(const float (&v)[8], uint32_t* vector, float (&squares)[WARPS], int warp, int lane) const {
        __syncwarp();  // others of the warp may still read what lay there
        uint32_t* const to = vector + place_of(2 * lane);
        float square = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float w[4];
            as_weights(weight[half], type, w);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float a = v[4 * half + 2 * i], b = v[4 * half + 2 * i + 1];
                square += a * a + b * b;
                to[half * (HALF / 2) + i * NEXT_PLACE] = pack(a * w[2 * i], b * w[2 * i + 1]);
            }
        }
        square = warp_sum(square);
        if (lane == 0) squares[warp] = square;
        __syncwarp();
    }
};

}  // namespace atlas
