// The query heads of one token as rows g = lane / 4 of tensor-core products with a warp's keys and values, of which a lane
// has tokens, and then elements, 2t and 2t + 1 of 8, t = lane % 4 (flash decoding; Dao et al., 2023).
#pragma once
#include "device.cuh"

namespace atlas {

constexpr int KEY_PITCH = 2 * HEAD_DIM + 16;  // bytes from a token's key to the next one's

// Adds 16 tokens from `token` on, of which those before `end` count, to what a warp has found: a row's highest score, this
// lane's share of the sum of weights, sums of weighted values. Keys lie at `keys` in shared memory, values `apart` bytes
// behind; `query` is where row g has element 2t.
__device__ inline void attend_tokens(uint32_t keys, int apart, const uint16_t* query, int token, int end, int lane,
                                     float& top, float& total, float (&sum)[HEAD_DIM / 8][4]) {
    float score[2][4] = {};
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 16) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(query + k);
        uint32_t b[4];
        load_matrix(b, keys + (lane % 8 + lane / 16 * 8) * KEY_PITCH + 2 * (k + lane / 8 % 2 * 8));
        mma(score[0], pairs[0], 0, pairs[4], 0, b[0], b[1]);
        mma(score[1], pairs[0], 0, pairs[4], 0, b[2], b[3]);
    }
    const int t = lane % 4;
    float best = top;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float& one = score[j / 2][j % 2];
        if (token + j / 2 * 8 + 2 * t + j % 2 >= end) one = -INFINITY;
        best = fmaxf(best, one);
    }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    const float old = exp2f(top - best);
    top = best;
    total *= old;
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        p[j] = exp2f(score[j / 2][j % 2] - best);
        total += p[j];
    }
    const uint32_t a0 = pack(p[0], p[1]), a2 = pack(p[2], p[3]);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
        uint32_t b[4];
        const int row = lane % 8 + lane / 8 % 2 * 8;
        load_matrix_transposed(b, keys + apart + row * KEY_PITCH + 2 * (d + lane / 16 * 8));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float (&acc)[4] = sum[d / 8 + n];
            acc[0] *= old;
            acc[1] *= old;
            mma(acc, a0, 0, a2, 0, b[2 * n], b[2 * n + 1]);
        }
    }
}

}  // namespace atlas
