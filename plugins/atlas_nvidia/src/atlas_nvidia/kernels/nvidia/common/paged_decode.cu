// Attention of one query a sequence over pages (flash decoding; Dao et al., 2023).
//
// A cluster owns one sequence and up to GROUP query heads of one key head; its blocks share out the keys, 16 at a
// time to each warp, STAGES tiles ahead, and send what they found to each other's shared memory: no second launch, no
// counters.
#include "attention_tile.cuh"
#include "cluster.cuh"

#ifndef DECODE_WARPS
#define DECODE_WARPS 8
#endif
#ifndef DECODE_STAGES
#define DECODE_STAGES 2
#endif

using namespace atlas;

namespace {

constexpr int WARPS = DECODE_WARPS, THREADS = WARPS * WARP, STAGES = DECODE_STAGES;
constexpr int MAX_SPLITS = 8;  // blocks of a cluster that every device can hold together

struct Shared {
    union {
        unsigned char ring[WARPS][STAGES][TILE_BYTES];
        float part[WARPS][GROUP][HEAD_DIM];  // when the ring is empty
    };
    uint4 query[CHUNKS][WARP];  // as the lanes of every warp want it
    float top[WARPS][8], total[WARPS][8];
    // Written by all blocks of the cluster: tops and totals, and sums of the elements that this block stores.
    float tops[MAX_SPLITS][8], totals[MAX_SPLITS][8];
    float sums[GROUP * HEAD_DIM];
};

// The maximum of a head's scores in this block.
__device__ float best_of_warps(const Shared& shared, int head) {
    float best = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) best = fmaxf(best, shared.top[w][head]);
    return best;
}

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
    cluster_arrive();
    const int splits = gridDim.x, split = blockIdx.x;
    const int heads_each = q_heads / kv_heads, tiles = (heads_each + GROUP - 1) / GROUP;
    const int kv_head = blockIdx.y / tiles, first_head = kv_head * heads_each + blockIdx.y % tiles * GROUP;
    const int heads = min(GROUP, (kv_head + 1) * heads_each - first_head);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int length = slot[ATLAS_POSITION] + 1, first = window > 0 ? max(0, length - window) : 0;

    const int stride = splits * WARPS * KEYS;
    auto page_of = [&](int key) { return slot[table_offset + key / page_tokens]; };
    auto fetch = [&](int key, int stage, int page) {
        const int inside = key % page_tokens;
        const uint16_t* keys = cache + page_element(page, 0, kv_head, inside, kv_heads, page_tokens, HEAD_DIM);
        const uint16_t* values = cache + page_element(page, 1, kv_head, inside, kv_heads, page_tokens, HEAD_DIM);
        fetch_tile(shared.ring[warp][stage], keys, values, key, first, length);
    };
    int key = (first / KEYS + split * WARPS + warp) * KEYS;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (key + s * stride + KEYS < length) fetch(key + s * stride, s, page_of(key + s * stride));
    }
    wait_for_predecessor();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        const int at = key + s * stride;
        if (at < length && at + KEYS >= length) fetch(at, s, page_of(at));
        commit_copies();
    }

    for (int c = warp; c < CHUNKS; c += WARPS) {
        const int group = lane / 4, place = lane % 4;
        const int64_t head = static_cast<int64_t>(token) * q_heads + first_head + group;
        const uint16_t* from = q + head * HEAD_DIM + c * 32 + place * 8;
        shared.query[c][lane] = group < heads ? load16(from) : zero16();
    }
    __syncthreads();
    Found found;
    for (int stage = 0; key < length; key += stride, stage = (stage + 1) % STAGES) {
        // Where the tile lies that is fetched into this place behind the products.
        const int next = key + STAGES * stride, page = next < length ? page_of(next) : 0;
        wait_copies<STAGES - 1>();
        found.add(shared.ring[warp][stage], key, first, length, scale,
                  [&](int c) { return shared.query[c][lane]; });
        if (next < length) fetch(next, stage, page);
        commit_copies();
    }
    wait_copies<0>();
    __syncthreads();  // the ring becomes room for sums

    // Of the lanes of a warp, of the warps of a block, of the blocks of the cluster.
    found.gather(shared.top[warp], shared.total[warp], &shared.part[warp][0][0]);
    __syncthreads();
    cluster_wait();  // nobody writes into the shared memory of a block that has not begun
    // Of a block's GROUP * HEAD_DIM elements each block of the cluster stores an equal run.
    const int run = GROUP * HEAD_DIM / splits;
    for (int e = threadIdx.x; e < GROUP * HEAD_DIM; e += THREADS) {
        const int h = e / HEAD_DIM, d = e % HEAD_DIM;
        const float against = against_nothing(best_of_warps(shared, h));
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += exp2f(shared.top[w][h] - against) * shared.part[w][h][d];
        of_block(&shared, e / run)->sums[split * run + e % run] = sum;
    }
    for (int e = threadIdx.x; e < splits * GROUP; e += THREADS) {
        const int h = e % GROUP;
        const float best = best_of_warps(shared, h), against = against_nothing(best);
        float total_of_block = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total_of_block += exp2f(shared.top[w][h] - against) * shared.total[w][h];
        Shared* other = of_block(&shared, e / GROUP);
        other->tops[split][h] = best;
        other->totals[split][h] = total_of_block;
    }
    cluster_sync();
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
