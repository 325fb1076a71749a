// Attention of one query a sequence over pages (flash decoding; Dao et al., 2023).
//
// A cluster owns one sequence and up to GROUP query heads of one key head; its blocks share out the keys, 16 at a
// time to each warp, and send what they found to each other's shared memory: no second launch, no counters. Scores
// are tensor-core products with keys as the left matrix (the summed dimension is permuted as in gemv.cuh). Each lane
// copies the keys and values that it will use itself to shared memory, STAGES tiles ahead.
#include <cooperative_groups.h>

#include <utility>

#include "device.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP
#define GROUP 4
#endif
#ifndef DECODE_WARPS
#define DECODE_WARPS 8
#endif
#ifndef DECODE_STAGES
#define DECODE_STAGES 2
#endif

using namespace atlas;
namespace cg = cooperative_groups;

namespace {

constexpr int WARPS = DECODE_WARPS, THREADS = WARPS * WARP, KEYS = 16;
constexpr int CHUNKS = HEAD_DIM / 32;              // of the summed dimension, 16 bytes a lane
constexpr int LANES = HEAD_DIM / 8;                // lanes that hold one value vector
constexpr int AT_ONCE = WARP / LANES;              // tokens of values that one load of a warp brings
constexpr int LOADS = KEYS / AT_ONCE;
constexpr int STAGES = DECODE_STAGES, TILE_BYTES = 2 * KEYS * HEAD_DIM * 2;
constexpr int MAX_SPLITS = 8;                      // blocks of a cluster that every device can hold together

struct Shared {
    union {
        unsigned char ring[WARPS][STAGES][TILE_BYTES];  // 16 bytes a lane and load: keys g, keys g + 8, values
        float part[WARPS][GROUP][HEAD_DIM];             // when the ring is empty
    };
    uint4 query[CHUNKS][WARP];                     // as the lanes of every warp want it
    float weight[WARPS][KEYS][8];                  // exp2(score - running maximum)
    float rescale[WARPS][8];
    float top[WARPS][8], total[WARPS][8];
    // Written by all blocks of the cluster: tops and totals, and sums of the elements that this block stores.
    float tops[MAX_SPLITS][8], totals[MAX_SPLITS][8];
    float sums[GROUP * HEAD_DIM];
};

// The maximum of a head's scores in this block, and what to subtract where there was none.
__device__ float best_of_warps(const Shared& shared, int head) {
    float best = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) best = fmaxf(best, shared.top[w][head]);
    return best;
}
__device__ float against_nothing(float best) { return best == -INFINITY ? 0.0f : best; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_decode(const int32_t* counts, const uint16_t* q, const int32_t* cu_q, const int32_t* row_slot,
             const int32_t* slots, const uint16_t* cache, uint16_t* y, int32_t q_heads, int32_t kv_heads,
             int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t window, float scale) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    // Slots are written by step_begin, which is long done (device.cuh); of the pages, only the last key is new.
    admit_successor();
    const int row = blockIdx.z, live = counts[ATLAS_SEQUENCES], token = cu_q[row], end = cu_q[row + 1];
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[row]) * slot_stride;
    if (row >= live || end == token) {
        wait_for_predecessor();
        return;
    }
    cg::cluster_group cluster = cg::this_cluster();
    auto begun = cluster.barrier_arrive();
    const int splits = gridDim.x, split = blockIdx.x;
    const int heads_each = q_heads / kv_heads, tiles = (heads_each + GROUP - 1) / GROUP;
    const int kv_head = blockIdx.y / tiles, first_head = kv_head * heads_each + blockIdx.y % tiles * GROUP;
    const int heads = min(GROUP, (kv_head + 1) * heads_each - first_head);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, place = lane % 4;
    const int length = slot[ATLAS_POSITION] + 1, first = window > 0 ? max(0, length - window) : 0;

    const int stride = splits * WARPS * KEYS;
    auto fetch = [&](int key, int stage) {
        const int page = slot[table_offset + key / page_tokens], inside = key % page_tokens;
        const uint16_t* keys = cache + page_element(page, 0, kv_head, inside, kv_heads, page_tokens, HEAD_DIM);
        const uint16_t* values = cache + page_element(page, 1, kv_head, inside, kv_heads, page_tokens, HEAD_DIM);
        uint32_t to = shared_address(shared.ring[warp][stage]) + lane * 16;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c, to += 1024) {
            copy_async(to, keys + group * HEAD_DIM + c * 32 + place * 8, true);
            copy_async(to + 512, keys + (group + 8) * HEAD_DIM + c * 32 + place * 8, true);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i, to += 512) {
            // Places of the page that hold no token yet may hold anything, and 0 · NaN is no 0.
            const int at = i * AT_ONCE + lane / LANES;
            copy_async(to, values + at * HEAD_DIM + lane % LANES * 8, key + at >= first && key + at < length);
        }
    };
    int key = (first / KEYS + split * WARPS + warp) * KEYS;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (key + s * stride + KEYS < length) fetch(key + s * stride, s);
    }
    wait_for_predecessor();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        const int at = key + s * stride;
        if (at < length && at + KEYS >= length) fetch(at, s);
        commit_copies();
    }

    for (int c = warp; c < CHUNKS; c += WARPS) {
        const int64_t head = static_cast<int64_t>(token) * q_heads + first_head + group;
        const uint16_t* from = q + head * HEAD_DIM + c * 32 + place * 8;
        shared.query[c][lane] = group < heads ? load16(from) : zero16();
    }
    __syncthreads();
    // This lane's scores are of keys group and group + 8 with heads 2 * place and 2 * place + 1.
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    float out[GROUP][8] = {};
    for (int stage = 0; key < length; key += stride, stage = (stage + 1) % STAGES) {
        wait_copies<STAGES - 1>();
        const uint4* tile = reinterpret_cast<const uint4*>(shared.ring[warp][stage]) + lane;
        float score[4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 query = shared.query[c][lane];
            const uint4 upper = tile[2 * c * WARP], lower = tile[(2 * c + 1) * WARP];
            mma(score, upper.x, lower.x, upper.y, lower.y, query.x, query.y);
            mma(score, upper.z, lower.z, upper.w, lower.w, query.z, query.w);
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
            shared.weight[warp][group][2 * place + h] = p0;
            shared.weight[warp][group + 8][2 * place + h] = p1;
            if (group == 0) shared.rescale[warp][2 * place + h] = rescale;
        }
        __syncwarp();
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            const float rescale = shared.rescale[warp][h];
#pragma unroll
            for (int d = 0; d < 8; ++d) out[h][d] *= rescale;
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            float v[8];
            unpack(tile[(2 * CHUNKS + i) * WARP], v);
#pragma unroll
            for (int h = 0; h < GROUP; ++h) {
                const float p = shared.weight[warp][i * AT_ONCE + lane / LANES][h];
#pragma unroll
                for (int d = 0; d < 8; ++d) out[h][d] += p * v[d];
            }
        }
        __syncwarp();
        if (key + STAGES * stride < length) fetch(key + STAGES * stride, stage);
        commit_copies();
    }
    wait_copies<0>();
    __syncthreads();  // the ring becomes room for sums

    // Of the lanes of a warp, of the warps of a block, of the blocks of the cluster.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2) total[h] += __shfl_xor_sync(~0u, total[h], distance);
        if (group == 0) {
            shared.top[warp][2 * place + h] = top[h];
            shared.total[warp][2 * place + h] = total[h];
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
            for (int d = 0; d < 8; ++d) shared.part[warp][h][lane * 8 + d] = out[h][d];
        }
    }
    __syncthreads();
    cluster.barrier_wait(std::move(begun));  // nobody writes into the shared memory of a block that has not begun
    // Of a block's GROUP * HEAD_DIM elements each block of the cluster stores an equal run.
    const int run = GROUP * HEAD_DIM / splits;
    for (int e = threadIdx.x; e < GROUP * HEAD_DIM; e += THREADS) {
        const int h = e / HEAD_DIM, d = e % HEAD_DIM;
        const float against = against_nothing(best_of_warps(shared, h));
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += exp2f(shared.top[w][h] - against) * shared.part[w][h][d];
        cluster.map_shared_rank(&shared, e / run)->sums[split * run + e % run] = sum;
    }
    for (int e = threadIdx.x; e < splits * GROUP; e += THREADS) {
        const int h = e % GROUP;
        const float best = best_of_warps(shared, h), against = against_nothing(best);
        float total_of_block = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total_of_block += exp2f(shared.top[w][h] - against) * shared.total[w][h];
        Shared* other = cluster.map_shared_rank(&shared, e / GROUP);
        other->tops[split][h] = best;
        other->totals[split][h] = total_of_block;
    }
    cluster.sync();
    for (int e = threadIdx.x; e < run; e += THREADS) {
        const int h = (split * run + e) / HEAD_DIM, d = (split * run + e) % HEAD_DIM;
        if (h >= heads) break;
        float best = -INFINITY, sum = 0.0f, all = 0.0f;
        for (int s = 0; s < splits; ++s) best = fmaxf(best, shared.tops[s][h]);
        for (int s = 0; s < splits; ++s) {
            const float factor = exp2f(shared.tops[s][h] - best);
            sum += factor * shared.sums[s * run + e];
            all += factor * shared.totals[s][h];
        }
        y[(static_cast<int64_t>(token) * q_heads + first_head + h) * HEAD_DIM + d] = narrow(sum / all);
    }
}
