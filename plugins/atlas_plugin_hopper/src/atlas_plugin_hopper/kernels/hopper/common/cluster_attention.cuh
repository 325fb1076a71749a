// Attention of one token within a cluster that has one key head and the query heads that share it: a block takes a part
// of the keys, a warp 32 tokens of them at a time, the query heads being rows of tensor-core products (flash decoding;
// Dao et al., 2023). Keys and values of the next layer are fetched while the rest of this one goes on; those of the new
// token come from the blocks that have computed them, into their place among the others.
#pragma once
#include "cluster_product.cuh"
#include "cluster_words.cuh"

namespace atlas {

constexpr int CLUSTER = 16;
constexpr int GROUP = Q_HEADS / KV_HEADS, PAIRS = HEAD_DIM / 2, GROUP_PAIRS = GROUP * PAIRS;
// Tokens of a product, of a warp, of a block at once.
constexpr int HALF = 16, TOKENS = 2 * HALF, PASS = WARPS * TOKENS;
constexpr int KEY_PITCH = 2 * HEAD_DIM + 16, TILE = TOKENS * KEY_PITCH;
constexpr int FOURS_OF_HEAD = HEAD_DIM / 4;  // pairs of elements with those half a head on, which turn together
constexpr int MERGERS = GROUP_PAIRS / WARP;  // warps that put the parts of a block together
static_assert(HEAD_DIM == 64 && GROUP <= 4, "query heads of a key head are rows of a product, their levels a vector");

// What a block finds: means of values, and for every head the logarithm of the sum of its weights.
struct Part {
    uint32_t pairs[GROUP_PAIRS];
    float level[4];
};
constexpr int PART_VECTORS = sizeof(Part) / 16;
static_assert(PART_VECTORS <= WARP, "a lane sends a vector");

struct AttentionRoom {
    __align__(16) unsigned char tiles[WARPS][2][TILE];  // keys and values
    float part[WARPS][GROUP * HEAD_DIM];
    float2 turn[PAIRS];  // sine and cosine of the new token's position
    float top[GROUP][WARPS], total[GROUP][WARPS];
    __align__(16) Part own;
};
// What other blocks put here. Rows are padded so that those read together lie in different banks.
struct Received {
    __align__(8) uint32_t query[GROUP][2 * FOURS_OF_HEAD + 8], key[2 * FOURS_OF_HEAD], value[2 * FOURS_OF_HEAD];
    __align__(16) Part part[CLUSTER];
};

struct Attention {
    AttentionRoom& room;
    Received& received;
    Mail queries, parts;
    const int32_t* pages;  // of the slot
    int page_tokens, kv_head, known, begin, end;
    bool live;
    int soon[2], newest;  // where this warp's first tokens and the new one lie in a layer's pages, in rows of HEAD_DIM

    __device__ int row_of(int token) const {
        return (pages[token / page_tokens] * 2 * KV_HEADS + kv_head) * page_tokens + token % page_tokens;
    }
    template <class Element>
    __device__ static Element* at(Element* cache, int row) { return cache + static_cast<int64_t>(row) * HEAD_DIM; }
    __device__ int64_t to_values() const { return static_cast<int64_t>(KV_HEADS) * page_tokens * HEAD_DIM; }
    __device__ bool has_newest() const { return end > known; }
    __device__ int query_bytes() const {
        int last = known;
        asm volatile("" : "+r"(last));  // or it would be kept in a register
        return 2 * HEAD_DIM * (GROUP + (end > last ? 2 : 0));
    }

    __device__ void prepare(const float* inv_freq, float rope_scale, int thread) const {
        if (thread < PAIRS) rotation(known, inv_freq[thread], rope_scale, room.turn[thread].x, room.turn[thread].y);
    }
    __device__ void start(const uint16_t* cache, int warp, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = begin + warp * TOKENS + half * HALF;
            soon[half] = token < end ? row_of(token) : 0;
        }
        newest = has_newest() ? row_of(known) : 0;
        fetch_first(cache, warp, lane);
    }
    __device__ void fetch_first(const uint16_t* cache, int warp, int lane) const {
        const int token = begin + warp * TOKENS;
        if (token < end) fetch(at(cache, soon[0]), at(cache, soon[1]), token, warp, lane);
    }
    // This warp's keys and values of a pass, in the background; those that are not there become zeros.
    __device__ void fetch(const uint16_t* from, const uint16_t* second, int token, int warp, int lane) const {
        const int there = min(end, known), row = lane / 8, piece = lane % 8;
        const uint32_t to = shared_address(room.tiles[warp][0]) + row * KEY_PITCH + piece * 16;
        from += row * HEAD_DIM + piece * 8;
        second += row * HEAD_DIM + piece * 8;
#pragma unroll
        for (int j = 0; j < TOKENS / 4; ++j) {
            const uint16_t* source = (j < HALF / 4 ? from : second) + j % (HALF / 4) * 4 * HEAD_DIM;
            copy_async(to + j * 4 * KEY_PITCH, source, token + row + 4 * j < there);
            copy_async(to + j * 4 * KEY_PITCH + TILE, source + to_values(), token + row + 4 * j < there);
        }
        commit_copies();
    }

    // What an element and the one half a head from it are multiplied by, so that their sum is turned and scaled.
    __device__ float2 turn_of(int index, bool low, bool is_value, float scale) const {
        const float2 turn = room.turn[index];
        return is_value ? make_float2(scale, 0.0f) : make_float2(turn.y * scale, (low ? -turn.x : turn.x) * scale);
    }
    // The queries as fragments of rows g: pairs t and t + 4 of every step.
    __device__ void take_queries(uint32_t (&query)[HEAD_DIM / 16][2], int g, int t) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 four = reinterpret_cast<const uint2*>(received.query[min(g, GROUP - 1)])[4 * i + t];
            query[i / 2][i % 2] = g < GROUP ? four.x : 0;
            query[i / 2 + 2][i % 2] = g < GROUP ? four.y : 0;
        }
    }
    // The new token's key and value, half a warp each, to their row of this warp's tile and to their page.
    __device__ void take_newest(uint16_t* cache, int row, int warp, int lane) const {
        const int pair = lane % 16;
        const bool is_value = lane >= 16;
        const uint2 four = reinterpret_cast<const uint2*>(is_value ? received.value : received.key)[pair];
        uint32_t* to = reinterpret_cast<uint32_t*>(room.tiles[warp][is_value] + row * KEY_PITCH) + pair;
        to[0] = four.x;
        to[PAIRS / 2] = four.y;
        if (live) {
            uint32_t* page = reinterpret_cast<uint32_t*>(at(cache, newest) + (is_value ? to_values() : 0)) + pair;
            page[0] = four.x;
            page[PAIRS / 2] = four.y;
        }
        __syncwarp();
    }

    // What this block finds, told to all of the cluster.
    __device__ void attend(int layer, uint16_t* cache, int thread, int warp, int lane) const {
        // Heads are rows g of products, g = lane / 4; a lane has tokens, and then elements, 2t and 2t + 1 of 8.
        const int g = lane / 4, t = lane % 4, warps = min(WARPS, (end - begin + TOKENS - 1) / TOKENS);
        if (warp < warps) {
            uint32_t query[HEAD_DIM / 16][2];
            float top = -INFINITY, total = 0.0f, sum[HEAD_DIM / 8][4] = {};
            queries.wait(layer);
            if (thread == 0) queries.expect(query_bytes());
            take_queries(query, g, t);
            const uint32_t keys = shared_address(room.tiles[warp][0]);
#pragma unroll 1
            for (int token = begin + warp * TOKENS; token < end; token += PASS) {
                wait_copies<0>();
                __syncwarp();
                const int row = known - token;
                if (row < TOKENS && has_newest()) take_newest(cache, row, warp, lane);
                float score[4][4] = {};
#pragma unroll
                for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        uint32_t b[4];
                        const int row_at = half * HALF + lane % 8 + lane / 16 * 8;
                        load_matrix(b, keys + row_at * KEY_PITCH + 2 * (16 * k + lane / 8 % 2 * 8));
                        mma(score[2 * half], query[k][0], 0, query[k][1], 0, b[0], b[1]);
                        mma(score[2 * half + 1], query[k][0], 0, query[k][1], 0, b[2], b[3]);
                    }
                }
                float best = top;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    float& one = score[j / 2][j % 2];
                    if (token + j / 2 * 8 + 2 * t + j % 2 >= end) one = -INFINITY;
                    best = fmaxf(best, one);
                }
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
                const float old = exp2f(top - best);
                top = best;
                total *= old;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    float& one = score[j / 2][j % 2];
                    one = exp2f(one - best);
                    total += one;
                }
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n) sum[n][0] *= old, sum[n][1] *= old;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float (&p)[4] = score[2 * half], (&q)[4] = score[2 * half + 1];
                    const uint32_t a0 = pack(p[0], p[1]), a2 = pack(q[0], q[1]);
#pragma unroll
                    for (int d = 0; d < HEAD_DIM; d += 16) {
                        uint32_t b[4];
                        const int row_at = half * HALF + lane % 8 + lane / 8 % 2 * 8;
                        load_matrix_transposed(b, keys + TILE + row_at * KEY_PITCH + 2 * (d + lane / 16 * 8));
                        mma(sum[d / 8], a0, 0, a2, 0, b[0], b[1]);
                        mma(sum[d / 8 + 1], a0, 0, a2, 0, b[2], b[3]);
                    }
                }
                const int later = token + PASS;
                if (later < end) {
                    __syncwarp();
                    const uint16_t* second = at(cache, later + HALF < end ? row_of(later + HALF) : 0);
                    fetch(at(cache, row_of(later)), second, later, warp, lane);
                }
            }
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (warps == 1) {
                const float by = __fdividef(1.0f, total);
                if (g < GROUP) {
#pragma unroll
                    for (int n = 0; n < HEAD_DIM / 8; ++n) {
                        room.own.pairs[g * PAIRS + 4 * n + t] = pack(sum[n][0] * by, sum[n][1] * by);
                    }
                    if (t == 0) room.own.level[g] = top + __log2f(total);
                }
                __syncwarp();
                tell(0, 1, lane);
                return;
            }
            if (g < GROUP) {
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n) {
                    *reinterpret_cast<float2*>(room.part[warp] + g * HEAD_DIM + 8 * n + 2 * t) =
                        make_float2(sum[n][0], sum[n][1]);
                }
                if (t == 0) room.top[g][warp] = top, room.total[g][warp] = total;
            }
        }
        if (warps == 1) return;
        sync_consumers();
        if (warp >= MERGERS) return;
        const int h = thread / PAIRS;
        float best = -INFINITY, sure = 0.0f, a = 0.0f, b = 0.0f;
        for (int w = 0; w < warps; ++w) best = fmaxf(best, room.top[h][w]);
        for (int w = 0; w < warps; ++w) {
            const float by = exp2f(room.top[h][w] - best);
            const float2 part = *reinterpret_cast<const float2*>(room.part[w] + 2 * thread);
            sure = fmaf(by, room.total[h][w], sure);
            a = fmaf(by, part.x, a);
            b = fmaf(by, part.y, b);
        }
        const float by = __fdividef(1.0f, sure);
        room.own.pairs[thread] = pack(a * by, b * by);
        if (thread % PAIRS == 0) room.own.level[h] = best + __log2f(sure);
        asm volatile("bar.sync 4, %0;" ::"n"(MERGERS * WARP) : "memory");
        tell(warp, MERGERS, lane);
    }
    // One of so many warps tells the cluster's blocks in turn.
    __device__ void tell(int first, int warps, int lane) const {
        if (lane >= PART_VECTORS) return;
        const uint4 vector = reinterpret_cast<const uint4*>(&room.own)[lane];
        const uint32_t to = shared_address(received.part + cluster_rank()) + 16 * lane;
        for (int rank = first; rank < CLUSTER; rank += warps) parts.send(rank, to, vector);
    }

    // The parts of `splits` blocks together: this warp's 8 pairs, of one head, as fragments.
    __device__ void join(int layer, int splits, uint32_t (&vector)[1][2], int thread, int warp, int lane) const {
        constexpr int QUARTERS = 4, EACH = CLUSTER / QUARTERS;
        const int pair = 8 * warp + lane % 8, h = pair / PAIRS, first = lane / 8;
        parts.wait(layer);
        if (thread == 0) parts.expect(splits * sizeof(Part));
        uint32_t part[EACH];
        float level[EACH], best = -INFINITY;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int split = first + j * QUARTERS;
            part[j] = 0;
            level[j] = -INFINITY;
            if (split < splits) {
                part[j] = received.part[split].pairs[pair];
                level[j] = received.part[split].level[h];
            }
            best = fmaxf(best, level[j]);
        }
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
        float sure = 0.0f, a = 0.0f, b = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const float by = exp2f(level[j] - best);
            sure += by;
            a = fmaf(by, widen(static_cast<uint16_t>(part[j])), a);
            b = fmaf(by, widen(static_cast<uint16_t>(part[j] >> 16)), b);
        }
#pragma unroll
        for (int distance = 8; distance <= 16; distance *= 2) {
            sure += __shfl_xor_sync(~0u, sure, distance);
            a += __shfl_xor_sync(~0u, a, distance);
            b += __shfl_xor_sync(~0u, b, distance);
        }
        const float by = __fdividef(1.0f, sure);
        const uint32_t joined = pack(a * by, b * by);
        vector[0][0] = __shfl_sync(~0u, joined, lane % 4);
        vector[0][1] = __shfl_sync(~0u, joined, lane % 4 + 4);
    }
};

}  // namespace atlas
