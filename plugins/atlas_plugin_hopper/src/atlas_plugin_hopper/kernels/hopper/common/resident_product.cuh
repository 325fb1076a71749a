// Products of one token with the rows of weights that a block owns, layer after layer: one warp copies rows into a ring
// as far ahead as there is room, the others share out the summed dimension of all rows and keep their chunks in
// registers before the token is there.
#pragma once
#include "weight_ring.cuh"

namespace atlas {

constexpr int WARPS = DECODER_WARPS, CONSUMERS = WARPS * WARP;

__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Whether this is warp 0, which waits for what the others have written to shared memory; they go on.
__device__ inline bool gathered(int warp, int which) {
    __syncwarp();
    if (warp == 0) asm volatile("bar.sync %0, %1;" ::"r"(which), "n"(CONSUMERS) : "memory");
    else asm volatile("bar.arrive %0, %1;" ::"r"(which), "n"(CONSUMERS) : "memory");
    return warp == 0;
}
__device__ inline float sum_of(const float (&parts)[WARPS]) {
    float sum = 0.0f, other = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w += 2) {
        const float2 two = *reinterpret_cast<const float2*>(parts + w);
        sum += two.x;
        other += two.y;
    }
    return sum + other;
}

template <int STAGES>
using Ring = WeightRing<STAGES, STAGE_BYTES, WARPS>;

// A warp's share of products of a vector [K] with up to 8 * TILES rows: of every row its chunk, as fragments of the
// right operand of mma. With NORM the vector is multiplied by the weights of a norm, which lie before the rows.
template <int K, int TILES, bool NORM>
struct Share {
    static_assert(K % (16 * WARPS) == 0, "a warp has whole steps of 16");
    static constexpr int CHUNK = K / WARPS, STEPS = CHUNK / 16, EACH = (CHUNK / 2 + WARP - 1) / WARP, ROWS = 8 * TILES;
    Tile<STEPS> tiles[TILES] = {};
    uint32_t norm[EACH] = {};

    // The pair of the chunk that a lane has; those beyond the end have the last once more.
    __device__ static int pair(int i, int lane) { return min(i * WARP + lane, CHUNK / 2 - 1); }

    template <class Rows>
    __device__ void load(Rows& ring, int rows, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            if (8 * n >= rows) break;
            const int row = NORM + min(8 * n + lane % 8, rows - 1);
            tiles[n].load(ring.template row<K>(row) + 2 * warp * CHUNK, lane);
        }
        if (NORM) {
            const uint32_t at = ring.template row<K>(0) + 2 * warp * CHUNK;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(norm[i]) : "r"(at + 4 * pair(i, lane)) : "memory");
            }
        }
        constexpr int OF_STAGE = Rows::template ROWS<K>;
        ring.release((NORM + rows + OF_STAGE - 1) / OF_STAGE, lane);
    }
    // Takes this warp's chunk of a vector of two_numbers, scaled to `vector` and as it is to `plain`.
    __device__ void receive(const uint64_t* words, uint32_t flag, uint32_t* vector, uint32_t* plain, int warp,
                            int lane) const {
        uint64_t word[EACH];
        bool all;
        int turns = 0;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < EACH; ++i) word[i] = look(words + warp * (CHUNK / 2) + pair(i, lane));
#pragma unroll
            for (int i = 0; i < EACH; ++i) all = all && fresh_pair(word[i], flag);
            lose_patience(turns);
        } while (!all);
#pragma unroll
        for (int i = 0; i < EACH; ++i) take(i, first_number(word[i]), second_number(word[i]), vector, plain, lane);
    }
    // The same of float32 numbers that are there.
    __device__ void read(const float* from, uint32_t* vector, uint32_t* plain, int warp, int lane) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float2 two = *reinterpret_cast<const float2*>(from + warp * CHUNK + 2 * pair(i, lane));
            take(i, two.x, two.y, vector, plain, lane);
        }
    }
    __device__ void take(int i, float first, float second, uint32_t* vector, uint32_t* plain, int lane) const {
        const int at = fragment_place(pair(i, lane));
        plain[at] = pack(first, second);
        vector[at] = pack(first * widen(static_cast<uint16_t>(norm[i])),
                          second * widen(static_cast<uint16_t>(norm[i] >> 16)));
    }
    // The same of pairs that are packed.
    __device__ void receive_pairs(const uint64_t* words, uint32_t flag, uint32_t* vector, int warp, int lane) const {
        static_assert(CHUNK % (4 * WARP) == 0, "a lane has two pairs at once");
        uint64_t word[EACH];
        bool all;
        int turns = 0;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < EACH; i += 2) {
                look2(words + warp * (CHUNK / 2) + i * WARP + 2 * lane, word[i], word[i + 1]);
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) all = all && fresh(word[i], flag);
            lose_patience(turns);
        } while (!all);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            vector[fragment_place((i & ~1) * WARP + 2 * lane + i % 2)] = static_cast<uint32_t>(word[i]);
        }
    }
    // This warp's part of every row's sum and, behind the rows, of the sum of squares.
    __device__ void multiply(const uint32_t* vector, const uint32_t* plain, float (*sums)[WARPS], int rows, int warp,
                             int lane) const {
        constexpr int TURNS = TILES == 1 ? 2 : 1;  // sums that do not wait for each other
        float acc[TILES][TURNS][4] = {}, square[4] = {};
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const uint2 x = *reinterpret_cast<const uint2*>(vector + 8 * s + lane % 4 * 2);
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                if (n == 0 || 8 * n < rows) mma(acc[n][s % TURNS], x.x, 0, x.y, 0, tiles[n].b[s][0], tiles[n].b[s][1]);
            }
            if (NORM) {
                const uint2 raw = *reinterpret_cast<const uint2*>(plain + 8 * s + lane % 4 * 2);
                mma(square, raw.x, 0, raw.y, 0, raw.x, raw.y);
            }
        }
        if (lane < 4) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sums[8 * n + 2 * lane + i][warp] = acc[n][0][i] + (TURNS == 2 ? acc[n][TURNS - 1][i] : 0.0f);
                }
            }
            if (NORM && lane == 0) sums[ROWS][warp] = square[0];
        }
    }
};

}  // namespace atlas
