// Attention of one token within a resident launch: a block takes a part of the keys of one key head, whose query heads
// are rows of tensor-core products (flash decoding; Dao et al., 2023). Keys and values of the next layer are fetched
// while the rest of this one goes on; the new key and value come from the blocks that have computed them.
#pragma once
#include "joined_parts.cuh"
#include "query_rows.cuh"
#include "resident_product.cuh"

namespace atlas {

constexpr int GROUP = Q_HEADS / KV_HEADS, PAIRS = HEAD_DIM / 2;
constexpr int Q_WIDTH = Q_HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM;
constexpr int MAX_SPLITS = 32;
constexpr int TOKENS = 16, PASS = WARPS * TOKENS, AHEAD = 2;  // tokens of a warp, of a block at once; passes under way
constexpr int TILE = TOKENS * KEY_PITCH;
static_assert(GROUP <= 8 && GROUP <= WARPS, "query heads of a key head are rows of a product");

struct AttentionRoom {
    __align__(16) unsigned char ahead[AHEAD][WARPS][2][TILE];  // keys and values
    float part[WARPS][GROUP * HEAD_DIM];
    float key[HEAD_DIM], value[HEAD_DIM];
    float2 turn[PAIRS];  // sine and cosine of the new token's position
    float top[GROUP][WARPS + 2], total[GROUP][WARPS], best[GROUP];
    uint16_t query[8][HEAD_DIM + 8];  // rows without a head are zeros
};

// Parts into which the keys of `known` tokens are divided: one pass of a block each, more where these would be many.
__device__ inline int splits_of(int known) {
    const int most = min(MAX_SPLITS, static_cast<int>(gridDim.x) / KV_HEADS);
    return max(1, min(most, min((known + PASS - 1) / PASS, 6 + known / 512)));
}

struct Attention {
    AttentionRoom& room;
    const int32_t* pages;  // of the slot
    int page_tokens, kv_head, known, begin, end;
    bool newest;  // whether the new token is this block's

    // Where a token of this key head lies in a layer's pages.
    __device__ int64_t element(int token) const {
        const int64_t page = pages[token / page_tokens];
        return page_element(page, 0, kv_head, token % page_tokens, KV_HEADS, page_tokens, HEAD_DIM);
    }
    __device__ int64_t to_values() const { return static_cast<int64_t>(KV_HEADS) * page_tokens * HEAD_DIM; }

    __device__ void start(const uint16_t* cache, const float* inv_freq, float rope_scale, int thread) const {
        for (int e = thread; e < 8 * HEAD_DIM; e += CONSUMERS) room.query[e / HEAD_DIM][e % HEAD_DIM] = 0;
        if (thread < PAIRS) rotation(known, inv_freq[thread], rope_scale, room.turn[thread].x, room.turn[thread].y);
        fetch_first(cache, thread / WARP, thread % WARP);
        sync_consumers();
    }
    __device__ void fetch_first(const uint16_t* cache, int warp, int lane) const {
#pragma unroll 1
        for (int pass = 0; pass < AHEAD; ++pass) fetch(pass, cache, warp, lane);
    }
    // This warp's keys and values of a pass, in the background; those that are not there become zeros.
    __device__ void fetch(int pass, const uint16_t* cache, int warp, int lane) const {
        const int token = begin + (pass * WARPS + warp) * TOKENS;
        if (token < end) {
            const uint16_t* from = cache + element(token);
            const uint32_t to = shared_address(room.ahead[pass % AHEAD][warp]);
#pragma unroll
            for (int j = 0; j < TOKENS * HEAD_DIM / 8 / WARP; ++j) {
                const int row = (j * WARP + lane) / (HEAD_DIM / 8), piece = (j * WARP + lane) % (HEAD_DIM / 8);
                const uint32_t at = to + row * KEY_PITCH + piece * 16;
                const uint16_t* source = from + row * HEAD_DIM + piece * 8;
                copy_async(at, source, token + row < end);
                copy_async(at + TILE, source + to_values(), token + row < end);
            }
        }
        commit_copies();
    }

    // Queries of this key head, its new key and value: a warp a head, rotated, and the last two written to their page.
    __device__ void receive(const uint64_t* words, uint32_t flag, uint16_t* cache, float scale, int warp,
                            int lane) const {
#pragma unroll 1
        for (int h = warp; h < GROUP + 2; h += WARPS) {
            const bool is_query = h < GROUP, is_value = h == GROUP + 1;
            const uint64_t* from = words + lane +
                                   (is_query ? (kv_head * GROUP + h) * HEAD_DIM
                                             : Q_WIDTH + (is_value ? KV_WIDTH : 0) + kv_head * HEAD_DIM);
#pragma unroll
            for (int p = 0; p < PAIRS; p += WARP) {
                uint64_t low, high;
                int turns = 0;
                do {
                    low = look(from + p);
                    high = look(from + p + PAIRS);
                    lose_patience(turns);
                } while (!(fresh(low, flag) && fresh(high, flag)));
                const float2 turn = is_value ? make_float2(0.0f, 1.0f) : room.turn[p + lane];
                const float first = number(low) * turn.y - number(high) * turn.x;
                const float second = number(high) * turn.y + number(low) * turn.x;
                if (is_query) {
                    room.query[h][p + lane] = narrow(first * scale);
                    room.query[h][p + lane + PAIRS] = narrow(second * scale);
                    continue;
                }
                float* to = (is_value ? room.value : room.key) + p + lane;
                to[0] = first;
                to[PAIRS] = second;
                if (newest) {
                    uint16_t* page = cache + element(known) + (is_value ? to_values() : 0) + p + lane;
                    page[0] = narrow(first);
                    page[PAIRS] = narrow(second);
                }
            }
        }
    }

    // What this block finds; send(head of GROUP, pair, its two elements, highest score, sum of weights) tells it.
    template <class Send>
    __device__ void attend(const uint16_t* cache, int thread, int warp, int lane, Send send) const {
        // Heads are rows g of products, g = lane / 4; a lane has tokens, and then elements, 2t and 2t + 1 of 8.
        const int g = lane / 4, t = lane % 4;
        float top = -INFINITY, total = 0.0f, sum[HEAD_DIM / 8][4] = {};
#pragma unroll 1
        for (int pass = 0, token = begin + warp * TOKENS; token < end; ++pass, token += PASS) {
            wait_copies<AHEAD - 1>();
            __syncwarp();
            const uint32_t keys = shared_address(room.ahead[pass % AHEAD][warp]);
            attend_tokens(keys, TILE, &room.query[g][2 * t], token, end, lane, top, total, sum);
            __syncwarp();
            fetch(pass + AHEAD, cache, warp, lane);
        }
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (g < GROUP && t == 0) room.top[g][warp] = top;
        if (warp >= WARPS - GROUP) {  // the new key
            const int h = warp - (WARPS - GROUP);
            float score = 0.0f;
#pragma unroll
            for (int d = lane; d < HEAD_DIM; d += WARP) score = fmaf(widen(room.query[h][d]), room.key[d], score);
            score = warp_sum(score);
            if (lane == 0) room.top[h][WARPS] = newest ? score : -INFINITY;
        }
        sync_consumers();
        if (g < GROUP) {
            float best = room.top[g][WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; w += 2) {
                const float2 two = *reinterpret_cast<const float2*>(&room.top[g][w]);
                best = fmaxf(best, fmaxf(two.x, two.y));
            }
            const float factor = best == -INFINITY ? 0.0f : exp2f(top - best);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                *reinterpret_cast<float2*>(room.part[warp] + g * HEAD_DIM + 8 * n + 2 * t) =
                    make_float2(sum[n][0] * factor, sum[n][1] * factor);
            }
            if (t == 0) room.total[g][warp] = total * factor;
            if (warp == 0 && t == 0) room.best[g] = best;
        }
        sync_consumers();
#pragma unroll 1
        for (int e = thread; e < GROUP * PAIRS; e += CONSUMERS) {
            const int h = e / PAIRS, pair = e % PAIRS;
            const float highest = room.best[h];
            const float last = newest ? exp2f(room.top[h][WARPS] - highest) : 0.0f;
            const float sure = sum_of(room.total[h]) + last;
            float a = last * room.value[2 * pair], b = last * room.value[2 * pair + 1];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 part = *reinterpret_cast<const float2*>(room.part[w] + h * HEAD_DIM + 2 * pair);
                a += part.x;
                b += part.y;
            }
            const float by = sure > 0.0f ? __fdividef(1.0f, sure) : 0.0f;
            send(h, pair, pack(a * by, b * by), highest, sure);
        }
    }
};

}  // namespace atlas
