// Attention of one token within a resident launch, of heads of which queries and keys are normalised: a block takes a part
// of the keys of one key head, whose query heads are rows of tensor-core products (flash decoding; Dao et al., 2023), and
// then puts an equal share of that key head's elements together from the parts of all blocks.
#pragma once
#include "joined_parts.cuh"
#include "query_rows.cuh"
#include "weight_ring.cuh"

namespace atlas {

constexpr int GROUP = Q_HEADS / KV_HEADS, PAIRS = HEAD_DIM / 2, GROUP_PAIRS = GROUP * PAIRS;
constexpr int Q_WIDTH = Q_HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM;
constexpr int MAX_SPLITS = 33, AT_ONCE = 8;
constexpr int TOKENS = 16, PASS = WARPS * TOKENS;  // tokens of a warp, of a block at once
constexpr int KEY_TILE = TOKENS * KEY_PITCH;
constexpr int SUM_PITCH = HEAD_DIM + 8;  // so that the lanes of a half warp meet no bank twice
constexpr int TILES_BYTES = WARPS * 2 * KEY_TILE, SUMS_BYTES = WARPS * GROUP * SUM_PITCH * 4;
static_assert(GROUP == 8 && WARPS == 8 && PAIRS == 2 * WARP, "a warp normalises a query head, four elements a lane");

struct AttentionRoom {
    int64_t where, first[WARPS];     // the new token lies in a layer's pages, and a warp's first tile
    const int32_t* pages;            // of the slot
    int known, splits, begin, end;  // tokens before the new one, parts, this block's tokens
    bool newest;                    // whether the new token is this block's
    __align__(16) float key[HEAD_DIM], value[HEAD_DIM];
    float2 turn[PAIRS];  // sine and cosine of the new token's position
    float top[GROUP][WARPS + 1], total[GROUP][WARPS];
    __align__(16) uint16_t query[GROUP][HEAD_DIM + 8];
};

// Parts into which the keys of `known` tokens are divided: one pass of a block each, as far as there are blocks.
__device__ inline int splits_of(int known) {
    return max(1, min(min(MAX_SPLITS, static_cast<int>(gridDim.x) / KV_HEADS), (known + PASS - 1) / PASS));
}

// Norms of heads, and the words in which blocks hand on queries, keys and values, and parts.
struct HeadNorms {
    const uint16_t *q, *k;
    float eps;
};

// A head's words and weights: a lane has elements lane, lane + 32, ...
struct Head {
    const uint64_t* words;
    const uint16_t* weights;

    __device__ void ask(uint64_t (&word)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = look(words + j * WARP);
    }
    __device__ void weigh(uint16_t (&weight)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[j] = weights[j * WARP];
    }
    __device__ void await(uint64_t (&word)[4], uint32_t flag) const {
        int turns = 0;
        while (!(fresh(word[0], flag) && fresh(word[1], flag) && fresh(word[2], flag) && fresh(word[3], flag))) {
            lose_patience(turns);
#pragma unroll
            for (int j = 0; j < 4; ++j) word[j] = look(words + j * WARP);
        }
    }
};
__device__ inline void normalised(float (&x)[4], const uint64_t (&word)[4], const uint16_t (&weight)[4], float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        x[j] = number(word[j]);
        squares = fmaf(x[j], x[j], squares);
    }
    const float by = rsqrtf(warp_sum(squares) * (1.0f / HEAD_DIM) + eps);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] *= by * widen(weight[j]);
}

struct Attention {
    AttentionRoom& room;
    unsigned char* space;  // keys and values, then sums: TILES_BYTES, which somebody else uses between two layers
    int page_tokens;

    __device__ static int split() { return blockIdx.x / KV_HEADS; }
    __device__ static int kv_head() { return blockIdx.x % KV_HEADS; }
    __device__ bool takes_part() const { return split() < room.splits; }

    // By all consumers: what is the same in all layers.
    __device__ void prepare(int known, bool live, int thread) const {
        sync_consumers();  // pages are there
        const int splits = splits_of(known), each = ((known + splits - 1) / splits + TOKENS - 1) / TOKENS * TOKENS;
        const int begin = min(known, split() * each), end = min(known, begin + each), token = begin + thread * TOKENS;
        if (thread == 0) {
            room.known = known;
            room.splits = splits;
            room.begin = begin;
            room.end = end;
            room.newest = live && split() == splits - 1;
            if (split() < splits) room.where = element(known);
        }
        if (thread < WARPS && split() < splits) room.first[thread] = token < end ? element(token) : 0;
        sync_consumers();
    }
    // Where a token of this key head lies in a layer's pages.
    __device__ int64_t element(int token) const {
        const int64_t page = room.pages[token / page_tokens];
        return page_element(page, 0, kv_head(), token % page_tokens, KV_HEADS, page_tokens, HEAD_DIM);
    }
    __device__ int64_t to_values() const { return static_cast<int64_t>(KV_HEADS) * page_tokens * HEAD_DIM; }

    // This warp's keys and values from `token` on, in the background; those that are not there become zeros. `at`: its
    // element(token).
    __device__ void fetch(int token, int64_t first, const uint16_t* cache, int warp, int lane) const {
        const int end = room.end;
        if (token < end) {
            const uint16_t* from = cache + first;
            const uint32_t to = shared_address(space) + warp * 2 * KEY_TILE;
#pragma unroll 4
            for (int j = 0; j < TOKENS * HEAD_DIM / 8 / WARP; ++j) {
                const int row = (j * WARP + lane) / (HEAD_DIM / 8), piece = (j * WARP + lane) % (HEAD_DIM / 8);
                const uint32_t at = to + row * KEY_PITCH + piece * 16;
                const uint16_t* source = from + row * HEAD_DIM + piece * 8;
                copy_async(at, source, token + row < end);
                copy_async(at + KEY_TILE, source + to_values(), token + row < end);
            }
        }
        commit_copies();
    }

    __device__ void rotated(float (&x)[4], int lane) const {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const float2 turn = room.turn[p * WARP + lane];
            const float low = x[p], high = x[p + 2];
            x[p] = low * turn.y - high * turn.x;
            x[p + 2] = high * turn.y + low * turn.x;
        }
    }

    __device__ void fetch_first(const uint16_t* cache, int warp, int lane) const {
        fetch(room.begin + warp * TOKENS, room.first[warp], cache, warp, lane);
    }

    // Queries of this key head, and where they are this block's the new key and value: a warp a head, normalised and
    // rotated; the last two are written to their page.
    __device__ void receive(const uint64_t* words, uint32_t flag, const HeadNorms& norms, uint16_t* cache, float scale,
                            int warp, int lane) const {
        const Head query{words + (kv_head() * GROUP + warp) * HEAD_DIM + lane, norms.q + lane};
        const bool is_key = warp == 0;  // or the value
        const bool second = room.newest && warp < 2;
        const Head newer{words + Q_WIDTH + (is_key ? 0 : KV_WIDTH) + kv_head() * HEAD_DIM + lane, norms.k + lane};
        uint64_t word[4], new_word[4];
        uint16_t weight[4];
        query.ask(word);
        query.weigh(weight);
        if (second) newer.ask(new_word);
        float x[4];
        query.await(word, flag);
        normalised(x, word, weight, norms.eps);
        rotated(x, lane);
#pragma unroll
        for (int j = 0; j < 4; ++j) room.query[warp][j * WARP + lane] = narrow(x[j] * scale);
        if (!second) return;
        newer.weigh(weight);
        newer.await(new_word, flag);
        if (is_key) {
            normalised(x, new_word, weight, norms.eps);
            rotated(x, lane);
        }
        uint16_t* page = cache + room.where + (is_key ? 0 : to_values()) + lane;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!is_key) x[j] = number(new_word[j]);
            (is_key ? room.key : room.value)[j * WARP + lane] = x[j];
            page[j * WARP] = narrow(x[j]);
        }
    }

    // What this block finds; send(pair of the group's, its two elements, highest score, sum of weights) tells it.
    template <class Send>
    __device__ void attend(const uint16_t* cache, int thread, int warp, int lane, Send send) const {
        // Heads are rows g of products, g = lane / 4; a lane has tokens, and then elements, 2t and 2t + 1 of 8.
        const int g = lane / 4, t = lane % 4;
        const uint32_t keys = shared_address(space) + warp * 2 * KEY_TILE;
        const int end = room.end;
        float top = -INFINITY, total = 0.0f, sum[HEAD_DIM / 8][4] = {};
#pragma unroll 1
        for (int token = room.begin + warp * TOKENS; token < end; token += PASS) {
            const int next = token + PASS;
            const int64_t where = next < end ? element(next) : 0;
            wait_copies<0>();
            __syncwarp();
            attend_tokens(keys, KEY_TILE, &room.query[g][2 * t], token, end, lane, top, total, sum);
            __syncwarp();
            fetch(next, where, cache, warp, lane);
        }
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (t == 0) room.top[g][warp] = top;
        if (room.newest) {  // a warp a head: the new key
            float score = 0.0f;
#pragma unroll
            for (int d = lane; d < HEAD_DIM; d += WARP) score = fmaf(widen(room.query[warp][d]), room.key[d], score);
            score = warp_sum(score);
            if (lane == 0) room.top[warp][WARPS] = score;
        } else if (lane == 0) {
            room.top[warp][WARPS] = -INFINITY;
        }
        if (t == 0) room.total[g][warp] = total;
        wait_copies<0>();
        sync_consumers();  // nobody needs keys and values any more: sums take their place
        float* const parts = reinterpret_cast<float*>(space);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            *reinterpret_cast<float2*>(parts + (warp * GROUP + g) * SUM_PITCH + 8 * n + 2 * t) =
                make_float2(sum[n][0], sum[n][1]);
        }
        sync_consumers();
#pragma unroll 1
        for (int e = thread; e < GROUP_PAIRS; e += CONSUMERS) {
            const int h = e / PAIRS, pair = e % PAIRS;
            float top_of[WARPS + 1], highest = -INFINITY;
#pragma unroll
            for (int w = 0; w <= WARPS; ++w) {
                top_of[w] = room.top[h][w];
                highest = fmaxf(highest, top_of[w]);
            }
            if (highest == -INFINITY) highest = 0.0f;  // a part without tokens
            const float last = room.newest ? exp2f(top_of[WARPS] - highest) : 0.0f;
            float sure = last, a = 0.0f, b = 0.0f;
            if (room.newest) a = last * room.value[2 * pair], b = last * room.value[2 * pair + 1];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float factor = exp2f(top_of[w] - highest);
                const float2 part = *reinterpret_cast<const float2*>(parts + (w * GROUP + h) * SUM_PITCH + 2 * pair);
                sure = fmaf(factor, room.total[h][w], sure);
                a = fmaf(factor, part.x, a);
                b = fmaf(factor, part.y, b);
            }
            const float by = sure > 0.0f ? __fdividef(1.0f, sure) : 0.0f;
            send(e, pack(a * by, b * by), sure > 0.0f ? highest : -INFINITY, sure);
        }
    }
};

}  // namespace atlas
