// What one warp does with 16 keys and values of one key head for up to GROUP query heads (flash decoding; Dao et al.,
// 2023). Scores are tensor-core products with keys as the left matrix (the summed dimension is permuted as in gemv.cuh).
// Each lane copies the keys and values that it will use itself to shared memory.
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
constexpr int TILE_BYTES = 2 * KEYS * HEAD_DIM * 2;  // 16 bytes a lane and load: keys g, keys g + 8, values

// Room of one warp: exp2(score - running maximum), and by what the sums so far are to be multiplied.
struct TileWeights {
    float weight[KEYS][8];
    float rescale[8];
};

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
#pragma unroll
    for (int i = 0; i < LOADS; ++i, to += 512) {
        const int at = i * AT_ONCE + lane / LANES;
        copy_async(to, values + at * HEAD_DIM + lane % LANES * 8, key + at >= first && key + at < length);
    }
}

// What a lane has found so far: of heads 2 * place and 2 * place + 1 the maximum and the sum of its keys' weights, of
// all heads 8 elements of the weighted values of its tokens.
struct Found {
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    float out[GROUP][8] = {};

    // query(c) is the lane's part of chunk c: head `group`, elements 32 c + 8 place onwards.
    template <class Query>
    __device__ void add(const unsigned char* raw, TileWeights& room, int key, int first, int length, float scale,
                        Query query) {
        const int lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
        const uint4* tile = reinterpret_cast<const uint4*>(raw) + lane;
        float score[4] = {};  // of keys group and group + 8 with heads 2 * place and 2 * place + 1
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 q = query(c), upper = tile[2 * c * WARP], lower = tile[(2 * c + 1) * WARP];
            mma(score, upper.x, lower.x, upper.y, lower.y, q.x, q.y);
            mma(score, upper.z, lower.z, upper.w, lower.w, q.z, q.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = key + group + i / 2 * 8;
            score[i] = at >= first && at < length ? score[i] * (scale * LOG2E) : -INFINITY;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float best = fmaxf(score[h], score[h + 2]);
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) {
                best = fmaxf(best, __shfl_xor_sync(~0u, best, distance));
            }
            best = fmaxf(best, top[h]);
            const float against = best == -INFINITY ? 0.0f : best;
            const float rescale = exp2f(top[h] - against);
            const float p0 = exp2f(score[h] - against), p1 = exp2f(score[h + 2] - against);
            total[h] = total[h] * rescale + p0 + p1;
            top[h] = best;
            room.weight[group][2 * place + h] = p0;
            room.weight[group + 8][2 * place + h] = p1;
            if (group == 0) room.rescale[2 * place + h] = rescale;
        }
        __syncwarp();
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            const float rescale = room.rescale[h];
#pragma unroll
            for (int d = 0; d < 8; ++d) out[h][d] *= rescale;
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            float v[8];
            unpack(tile[(2 * CHUNKS + i) * WARP], v);
#pragma unroll
            for (int h = 0; h < GROUP; ++h) {
                const float p = room.weight[i * AT_ONCE + lane / LANES][h];
#pragma unroll
                for (int d = 0; d < 8; ++d) out[h][d] += p * v[d];
            }
        }
        __syncwarp();
    }

    // Of the lanes of the warp: maxima and sums by head, and the values, [GROUP][HEAD_DIM].
    __device__ void gather(float* tops, float* totals, float* part) {
        const int lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) {
                total[h] += __shfl_xor_sync(~0u, total[h], distance);
            }
            if (group == 0) {
                tops[2 * place + h] = top[h];
                totals[2 * place + h] = total[h];
            }
        }
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
#pragma unroll
            for (int d = 0; d < 8; ++d) {
#pragma unroll
                for (int distance = LANES; distance < WARP; distance *= 2) {
                    out[h][d] += __shfl_xor_sync(~0u, out[h][d], distance);
                }
            }
            if (lane < LANES) {
#pragma unroll
                for (int d = 0; d < 8; ++d) part[h * HEAD_DIM + lane * 8 + d] = out[h][d];
            }
        }
    }
};

__device__ inline float against_nothing(float best) { return best == -INFINITY ? 0.0f : best; }

}  // namespace atlas
