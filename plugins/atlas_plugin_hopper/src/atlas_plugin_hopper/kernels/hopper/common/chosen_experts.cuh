// The choice of experts by one warp, and what it means for the warp that copies: rows of gate and up, then of down, of
// the experts of one token. See route.cuh for the choice among many tokens.
#pragma once
#include "streamed_product.cuh"

namespace atlas {

template <int TOP_K>
struct Choice {
    int expert[TOP_K];
    float weight[TOP_K];
};

// A float as a number that is ordered as it is; 0 is below all of them.
__device__ inline uint32_t ordered(float v) {
    const uint32_t bits = __float_as_uint(v);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// Logits of one token that blocks send as words: lane l has MOST / 32 of them, from l * MOST / 32 on.
template <int MOST>
struct Logits {
    static constexpr int EACH = MOST / WARP;
    static_assert(EACH % 2 == 0, "words are read by two");
    uint64_t word[EACH];

    __device__ void receive(const uint64_t* words, uint32_t flag, int experts, int lane) {
        bool all;
        int turns = 0;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < EACH; i += 2) look2(words + lane * EACH + i, word[i], word[i + 1]);
#pragma unroll
            for (int i = 0; i < EACH; ++i) all = all && (lane * EACH + i >= experts || fresh(word[i], flag));
            lose_patience(turns);
        } while (!all);
        __syncwarp();
    }
    // The likeliest experts, likeliest first; of equal ones the first. All lanes of a warp call it. What is compared are
    // 24 bits of a logit, with the expert in the others: logits closer than 1/32,768 of themselves count as equal.
    template <int TOP_K>
    __device__ void choose(int experts, Choice<TOP_K>& choice, int lane) const {
        static_assert(MOST <= 256, "an expert has 8 bits");
        uint32_t left[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int e = lane * EACH + i;
            left[i] = e < experts ? (ordered(number(word[i])) & ~255u) | (255 - e) : 0;
        }
#pragma unroll 1
        for (int s = 0; s < TOP_K; ++s) {
            uint32_t best[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) best[i] = left[i];
#pragma unroll
            for (int apart = EACH / 2; apart > 0; apart /= 2) {
#pragma unroll
                for (int i = 0; i < apart; ++i) best[i] = max(best[i], best[i + apart]);
            }
            const uint32_t most = __reduce_max_sync(~0u, best[0]);
            if (lane == 0) choice.expert[s] = 255 - static_cast<int>(most & 255);
#pragma unroll
            for (int i = 0; i < EACH; ++i) left[i] = left[i] == most ? 0 : left[i];
        }
        __syncwarp();
    }
    // softmax over all logits, or over those that were chosen.
    template <int TOP_K>
    __device__ void weigh(const uint64_t* words, int experts, bool normalise, float scale, Choice<TOP_K>& choice,
                          int lane) const {
        const float mine = number(look(words + choice.expert[lane % TOP_K]));
        const float highest = __shfl_sync(~0u, mine, 0), odds = lane < TOP_K ? __expf(mine - highest) : 0.0f;
        float sum = odds;
        if (!normalise) {
            sum = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (lane * EACH + i < experts) sum += __expf(number(word[i]) - highest);
            }
        }
        sum = warp_sum(sum);
        if (lane < TOP_K) choice.weight[lane] = odds / sum * scale;
        __syncwarp();
    }
};

// Matrices of experts, [experts, SIZE, HIDDEN] and down [experts, HIDDEN, SIZE].
struct ExpertMatrices {
    const uint16_t *gate, *up, *down;
};

// A pair of inner features of an expert is a stage: two rows of gate, then two of up.
template <int HIDDEN>
__device__ inline const uint16_t* row_of_pair(const uint16_t* gate, const uint16_t* up, int64_t pair, int row) {
    return (row < 2 ? gate : up) + (2 * pair + row % 2) * HIDDEN;
}

// By the warp that copies: of gate and up the pairs [first, first + count) of all chosen experts, one behind the other.
template <int HIDDEN, int SIZE, int TOP_K>
__device__ inline void copy_pairs(Ring& ring, const ExpertMatrices& of, const Choice<TOP_K>& choice, int first,
                                  int count, int lane) {
    constexpr int PAIRS = SIZE / 2;
    ring.fill<HIDDEN>(4 * count, lane, [&](int j) {
        const int pair = first + j / 4;
        const int64_t before = static_cast<int64_t>(choice.expert[pair / PAIRS]) * PAIRS;
        return row_of_pair<HIDDEN>(of.gate, of.up, before + pair % PAIRS, j % 4);
    });
}
// The rows [row, row + rows) of down of each.
template <int HIDDEN, int SIZE, int TOP_K>
__device__ inline void copy_down(Ring& ring, const ExpertMatrices& of, const Choice<TOP_K>& choice, int row, int rows,
                                 int lane) {
#pragma unroll 1
    for (int e = 0; e < TOP_K; ++e) {
        const uint16_t* from = of.down + (static_cast<int64_t>(choice.expert[e]) * HIDDEN + row) * SIZE;
        ring.fill<SIZE>(rows, lane, [&](int j) { return from + static_cast<int64_t>(j) * SIZE; });
    }
}

// Products with what experts have of their middle: this warp's chunk of each, SIZE / WARPS values, and of every row of
// down that the block owns, up to 16.
template <int SIZE>
struct DownSums {
    static constexpr int CHUNK = SIZE / WARPS, WORDS = CHUNK / 2, EACH = Stage<SIZE>::ROWS;
    static_assert(CHUNK % 32 == 0, "a chunk has whole steps");
    using Rows = Fragments<CHUNK / 32>[2];  // of one expert
    float acc[2][2][4] = {};

    // Takes the next expert out of the ring.
    __device__ static void load(Ring& ring, int rows, Rows& of, int warp, int lane) {
        const int stages = (rows + EACH - 1) / EACH;
        ring.wait(stages);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            of[n].load(ring.row<SIZE>(min(8 * n + lane % 8, rows - 1)) + 2 * warp * CHUNK, lane);
        }
        ring.release(stages, lane);
    }
    __device__ void add(const Rows& of, const uint32_t* vector, int lane) {
#pragma unroll
        for (int n = 0; n < 2; ++n) of[n].multiply(acc[n], vector, lane);
    }
    __device__ void leave(float (*sums)[WARPS], int warp, int lane) const {
        if (lane >= 4) return;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            sums[8 * n + 2 * lane][warp] = of_row(acc[n], 0);
            sums[8 * n + 2 * lane + 1][warp] = of_row(acc[n], 1);
        }
    }
};

// This warp's chunk of the middle of so many experts, packed pairs that blocks send: EXPERTS runs of SIZE / 2 words.
template <int SIZE, int EXPERTS>
__device__ inline void receive_middle(const uint64_t* words, uint32_t flag, uint32_t* vector, int warp, int lane) {
    static_assert(SIZE / 2 / WARPS == WARP, "a lane has a pair of each expert");
    const uint64_t* const from = words + warp * WARP + lane;
    uint64_t word[EXPERTS];
    bool all;
    int turns = 0;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < EXPERTS; ++i) word[i] = look(from + i * (SIZE / 2));
#pragma unroll
        for (int i = 0; i < EXPERTS; ++i) all = all && fresh(word[i], flag);
        lose_patience(turns);
    } while (!all);
    __syncwarp();
    uint32_t* const to = vector + place_of(lane);
#pragma unroll
    for (int i = 0; i < EXPERTS; ++i) to[i * WARP] = static_cast<uint32_t>(word[i]);
    __syncwarp();
}

}  // namespace atlas
