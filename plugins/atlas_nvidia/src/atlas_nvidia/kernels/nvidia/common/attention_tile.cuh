// What one warp does with 16 keys and values of one key head for up to GROUP query heads (flash decoding; Dao et al.,
// 2023). Both products run on tensor cores: scores with heads as rows, so that what a lane holds of them is, rounded to the
// element type, what it holds of the right operand of the second, whose left one is values turned by ldmatrix.
#pragma once
#include "device.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP
#define GROUP 4
#endif

namespace atlas {

constexpr int KEYS = 16;
constexpr int CHUNKS = HEAD_DIM / 32;     // of the summed dimension, 16 bytes a lane
constexpr int LANES = HEAD_DIM / 8;       // lanes that hold one value vector
constexpr int AT_ONCE = WARP / LANES;     // tokens of values that one load of a warp brings
constexpr int LOADS = KEYS / AT_ONCE;
constexpr int ROW = 2 * HEAD_DIM;         // bytes of a token's values
constexpr int VALUES = KEYS * ROW;        // where they begin in a tile, behind 16 bytes a lane and load: keys g, keys g + 8
constexpr int TILE_BYTES = 2 * VALUES;

// Where 8 elements of a token's values lie in its row, so that ldmatrix finds those of 8 tokens in different banks.
__device__ inline int value_piece(int token, int piece) {
    return piece ^ (LANES >= 8 ? token & 7 : token / 2 % LANES);
}

// Asks for the tile that begins at `key`; `keys` and `values` point to it in its page. Places of the page that hold no
// token yet may hold anything, and 0 · NaN is no 0: values outside [first, length) become zeros.
__device__ inline void fetch_tile(unsigned char* tile, const uint16_t* keys, const uint16_t* values, int key, int first,
                                  int length) {
    const int lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
    uint32_t to = shared_address(tile) + lane * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c, to += 1024) {
        copy_async(to, keys + group * HEAD_DIM + c * 32 + place * 8, true);
        copy_async(to + 512, keys + (group + 8) * HEAD_DIM + c * 32 + place * 8, true);
    }
    to = shared_address(tile) + VALUES;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int at = i * AT_ONCE + lane / LANES, piece = lane % LANES;
        copy_async(to + at * ROW + value_piece(at, piece) * 16, values + at * HEAD_DIM + piece * 8,
                   key + at >= first && key + at < length);
    }
}

// What a lane has found so far: of head `group` the maximum and the sum of its keys' weights; of heads 2 * place and
// 2 * place + 1 weighted values, of dimensions 16 i + group (the first two) and 16 i + group + 8.
struct Found {
    float top = -INFINITY, total = 0.0f;
    float out[HEAD_DIM / 16][4] = {};

    // query(c) is the lane's part of chunk c: head `group`, elements 32 c + 8 place onwards; the summed dimension is permuted
    // as in gemv.cuh.
    template <class Query>
    __device__ void add(const unsigned char* raw, int key, int first, int length, float scale, Query query) {
        const int lane = threadIdx.x % WARP, place = lane % 4;
        __syncwarp();  // lanes read what others have copied
        const uint4* tile = reinterpret_cast<const uint4*>(raw) + lane;
        float score[2][4] = {};  // of keys 2 * place, 2 * place + 1, and those 8 further on; rows 8 and above are no heads
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 q = query(c), upper = tile[2 * c * WARP], lower = tile[(2 * c + 1) * WARP];
            mma(score[0], q.x, 0, q.y, 0, upper.x, upper.y);
            mma(score[1], q.x, 0, q.y, 0, lower.x, lower.y);
            mma(score[0], q.z, 0, q.w, 0, upper.z, upper.w);
            mma(score[1], q.z, 0, q.w, 0, lower.z, lower.w);
        }
        float best = top;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& each = score[i / 2][i % 2];
            const int at = key + i / 2 * 8 + 2 * place + i % 2;
            each = at >= first && at < length ? each * (scale * LOG2E) : -INFINITY;
            best = fmaxf(best, each);
        }
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        const float against = best == -INFINITY ? 0.0f : best, rescale = exp2f(top - against);
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[i] = exp2f(score[i / 2][i % 2] - against);
        total = total * rescale + (weight[0] + weight[1]) + (weight[2] + weight[3]);
        top = best;
        if (__any_sync(~0u, rescale != 1.0f)) {
            const float even = __shfl_sync(~0u, rescale, 8 * place), odd = __shfl_sync(~0u, rescale, 8 * place + 4);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; ++i) {
                out[i][0] *= even;
                out[i][1] *= odd;
                out[i][2] *= even;
                out[i][3] *= odd;
            }
        }
        const uint32_t near = pack(weight[0], weight[1]), far = pack(weight[2], weight[3]);
        const int token = lane / 16 * 8 + lane % 8;
        const uint32_t row = shared_address(raw) + VALUES + token * ROW;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            uint32_t values[4];
            load_matrix_transposed(values, row + value_piece(token, 2 * i + lane / 8 % 2) * 16);
            mma(out[i], values[0], values[1], values[2], values[3], near, far);
        }
        __syncwarp();
    }

    // Of the lanes of the warp: maxima and sums by head, and the values, [GROUP][HEAD_DIM].
    __device__ void gather(float* tops, float* totals, float* part) {
        const int lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (place == 0) {
            tops[group] = top;
            totals[group] = total;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int head = 2 * place + j % 2;
                if (head < GROUP) part[head * HEAD_DIM + 16 * i + group + j / 2 * 8] = out[i][j];
            }
        }
    }
};

__device__ inline float against_nothing(float best) { return best == -INFINITY ? 0.0f : best; }

}  // namespace atlas
