// What a block of moe_decoder_layers owns, the words in which blocks hand on what they compute, the rings of weights, and
// what the warps do that copy them: one what every token needs, in its order, the other the experts that are chosen.
#pragma once
#include "resident_heads.cuh"

namespace atlas {

// Two warpgroups multiply, of a third two warps copy.
constexpr int THREADS = CONSUMERS + 4 * WARP, FOR_ALL = WARPS, FOR_EXPERTS = WARPS + 1;
constexpr int BLOCKS = 132;  // the fewest
constexpr int QKV_ROWS = Q_WIDTH + 2 * KV_WIDTH, INNER_WORDS = CHOSEN * INNER / 2;
constexpr int of_block(int all) { return (all + BLOCKS - 1) / BLOCKS; }
constexpr int most(int a, int b) { return a > b ? a : b; }
// Tiles of eight rows that a block may have, and how many of them wait for the vector in registers.
constexpr int QKV_TILES = (of_block(QKV_ROWS) + 7) / 8, QKV_AHEAD = 3, WIDE_TILES = (2 * of_block(HIDDEN / 2) + 7) / 8;
constexpr int INNER_TILES = (4 * of_block(INNER_WORDS) + 7) / 8, DOWN_AHEAD = 4;
constexpr int STASHED = WIDE_RANGE ? 2 : 4;  // times four registers that there are too few
// Stages of what is not needed soon that are under way at once: words of blocks wait behind what memory was asked for.
constexpr int PACE = 2;
constexpr int SUM_ROWS = 8 * most(QKV_TILES, most(WIDE_TILES, INNER_TILES));
constexpr int HIDDEN_CHUNK = HIDDEN / WARPS, HEADS_CHUNK = Q_WIDTH / WARPS, INNER_CHUNK = INNER / WARPS;
constexpr int EACH = HIDDEN_CHUNK / 2 / WARP;  // pairs of a lane
static_assert(HIDDEN_CHUNK % (4 * WARP) == 0 && HEADS_CHUNK % (4 * WARP) == 0 && CHOSEN * INNER_CHUNK % (4 * WARP) == 0);
static_assert(INNER_CHUNK % 16 == 0 && EXPERTS == 4 * WARP && CHOSEN <= WARP && EXPERTS <= BLOCKS);
static_assert(WIDE_TILES == 2 && QKV_TILES > QKV_AHEAD && WIDE_TILES * 8 <= WARP && 8 * QKV_AHEAD <= QKV_ROWS / BLOCKS);

// chains.py makes the table and knows how many words there are.
struct Layer {
    const uint16_t *input_norm, *q, *k, *v, *q_norm, *k_norm, *output, *inner_norm, *router, *gate, *up, *down;
    uint16_t* cache;
};

// Words: the flag of the last layer; queries, keys and values; parts of attention; then copies of what all blocks read,
// so that not all of them ask the same part of the L2 cache.
constexpr int AT_QKV = 16, AT_TOPS = AT_QKV + QKV_ROWS, AT_PARTS = AT_TOPS + MAX_SPLITS * Q_HEADS * 2;
constexpr int AT_COPIES = AT_PARTS + MAX_SPLITS * Q_HEADS * PAIRS;
constexpr int AT_HIDDEN = 0, AT_ATTENDED = AT_HIDDEN + HIDDEN / 2, AT_MIDDLE = AT_ATTENDED + Q_WIDTH / 2;
constexpr int AT_LOGITS = AT_MIDDLE + HIDDEN / 2, AT_INNER = AT_LOGITS + EXPERTS, COPY_WORDS = AT_INNER + INNER_WORDS;

// Stages of two rows [HIDDEN] or one [Q_WIDTH]; of three rows [HIDDEN] or eight [INNER].
constexpr int STATIC_BYTES = 2 * HEADS_CHUNK * WARPS + 144, EXPERT_BYTES = 8 * (2 * INNER + 16) + 48, EXPERT_STAGES = 7;
static_assert(STATIC_BYTES % 128 == 16 && EXPERT_BYTES % 128 == 48);

// The block's rows: of q, k, v one behind the other, of matrices [HIDDEN, .], of the router; its words of inner values,
// two each.
struct Owned {
    Span qkv, wide, router, inner;
};

struct Shared {
    AttentionRoom attention;
    Owned own;
    int own_copy;  // where the words lie that it reads
    float residual[8 * WIDE_TILES];  // the stream at the block's rows
    // A warp's chunk of what is multiplied, as fragments; behind that of the hidden vector, the same as it is.
    __align__(16) uint32_t vector[WARPS][CHOSEN * INNER_CHUNK / 2];
    uint4 stash[STASHED][CONSUMERS];  // of what waits for a vector
    __align__(16) float sums[WARPS][SUM_ROWS];
    float squares[WARPS];
    float2 middle[WARPS];  // parts of a logit and of a sum of squares
};
constexpr int ROOM = 226 * 1024 - 128 - static_cast<int>(sizeof(Shared)) - EXPERT_STAGES * EXPERT_BYTES;
constexpr int STATIC_STAGES = ROOM / STATIC_BYTES;
static_assert(STATIC_STAGES >= 8 && EXPERT_STAGES * EXPERT_BYTES >= TILES_BYTES && TILES_BYTES >= SUMS_BYTES);
using StaticRing = WeightRing<STATIC_STAGES, STATIC_BYTES, WARPS, 64>;
using ExpertRing = WeightRing<EXPERT_STAGES, EXPERT_BYTES, WARPS>;
static_assert(StaticRing::ROWS<HIDDEN> == 2 && StaticRing::ROWS<Q_WIDTH> == 1);
static_assert(ExpertRing::ROWS<HIDDEN> == 3 && ExpertRing::ROWS<INNER> == 8);

__device__ inline Owned owned() {
    const Span wide = span(HIDDEN / 2);
    return {span(QKV_ROWS), {2 * wide.first, 2 * wide.count}, span(EXPERTS), span(INNER_WORDS)};
}

// A lane's EACH_LANE words of a vector when all are fresh, two each from where(i): take(j, word j). The first look is on
// its way while meanwhile() runs.
template <bool PAIRED, int EACH_LANE, class Where, class Meanwhile, class Take>
__device__ inline void receive(uint32_t flag, Where where, Meanwhile meanwhile, Take take) {
    uint64_t word[EACH_LANE];
    auto look_at_all = [&] {
#pragma unroll
        for (int i = 0; i < EACH_LANE; i += 2) look2(where(i / 2), word[i], word[i + 1]);
    };
    look_at_all();
    meanwhile();
    int turns = 0;
    while (true) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < EACH_LANE; ++i) all = all && (PAIRED ? fresh_pair(word[i], flag) : fresh(word[i], flag));
        if (all) break;
        lose_patience(turns);
        look_at_all();
    }
#pragma unroll
    for (int i = 0; i < EACH_LANE; ++i) take(i, word[i]);
}

__device__ inline void copy_for_all(StaticRing& ring, const Layer* all, int layers, const Owned& own, int lane) {
#pragma unroll 1
    for (int i = 0; i < layers; ++i) {
        const Layer layer = all[i];
        ring.fill<HIDDEN>(1, lane, [&](int) { return layer.input_norm; });
        auto qkv_row = [&](int j) {
            const int row = own.qkv.first + j;
            if (row < Q_WIDTH) return layer.q + static_cast<int64_t>(row) * HIDDEN;
            if (row < Q_WIDTH + KV_WIDTH) return layer.k + static_cast<int64_t>(row - Q_WIDTH) * HIDDEN;
            return layer.v + static_cast<int64_t>(row - Q_WIDTH - KV_WIDTH) * HIDDEN;
        };
        constexpr int AHEAD = 8 * QKV_AHEAD;
        ring.fill<HIDDEN, false, PACE>(AHEAD, lane, qkv_row);
        ring.fill<HIDDEN>(own.qkv.count - AHEAD, lane, [&](int j) { return qkv_row(AHEAD + j); });
        ring.fill<Q_WIDTH, false, PACE>(own.wide.count, lane, [&](int j) {
            return layer.output + static_cast<int64_t>(own.wide.first + j) * Q_WIDTH;
        });
        ring.fill<HIDDEN>(1 + own.router.count, lane, [&](int j) {
            return j == 0 ? layer.inner_norm : layer.router + static_cast<int64_t>(own.router.first) * HIDDEN;
        });
    }
}

// By a whole warp: the best of all logits, lane c having expert c of them and its logit; of those alike in 16 bits of
// fraction the first counts. A lane has looked at four logits.
struct Choice {
    int expert = 0;
    float logit = 0.0f, logits[4];

    __device__ Choice(const uint64_t* words, uint32_t flag, int lane) {
        uint32_t key[4];  // in the order of the logits, of which it has the first 25 bits; then the first expert is best
        receive<false, 4>(
            flag, [&](int i) { return words + 4 * lane + 2 * i; }, [] {},
            [&](int i, uint64_t word) {
                logits[i] = number(word) + 0.0f;  // one zero
                const uint32_t bits = __float_as_uint(logits[i]);
                key[i] = ((bits >> 31 ? ~bits : bits | 1u << 31) & ~(EXPERTS - 1u)) | (EXPERTS - 1 - (4 * lane + i));
            });
#pragma unroll
        for (int c = 0; c < CHOSEN; ++c) {
            const uint32_t best = __reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3])));
#pragma unroll
            for (int i = 0; i < 4; ++i) key[i] = key[i] == best ? 0 : key[i];
            if (lane != c) continue;
            expert = EXPERTS - 1 - (best & (EXPERTS - 1u));
            const uint32_t bits = best & ~(EXPERTS - 1u);
            logit = __uint_as_float(bits >> 31 ? bits & ~(1u << 31) : ~bits);
        }
    }
    __device__ float weight(bool normalise, float scale, int lane) const {
        const float best = __shfl_sync(~0u, logit, 0);
        const float odds = lane < CHOSEN ? __expf(logit - best) : 0.0f;
        float all = odds;
        if (!normalise) {
            all = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) all += __expf(logits[i] - best);
        }
        return __fdividef(odds * scale, warp_sum(all));
    }
};

// Gate and up of an inner value lie one behind the other; down's rows expert after expert.
__device__ inline void copy_experts(ExpertRing& ring, const Layer* all, int layers, const Owned& own, uint32_t attended,
                                    const uint64_t* own_words, const uint64_t* words, int lane) {
    wait_for_predecessor();
    uint32_t flag = *reinterpret_cast<const volatile uint32_t*>(words);
    const int first = 2 * own.inner.first, last = first + 2 * own.inner.count - 1;
#pragma unroll 1
    for (int i = 0; i < layers; ++i) {
        ++flag;
        const uint16_t *const gate = all[i].gate, *const up = all[i].up, *const down = all[i].down;
        barrier_wait(attended, i % 2);  // the ring's memory is attention's until then
        const Choice choice(own_words + AT_LOGITS, flag, lane);
        const int low = __shfl_sync(~0u, choice.expert, first / INNER), high = __shfl_sync(~0u, choice.expert, last / INNER);
        ring.fill<HIDDEN, true>(4 * own.inner.count, lane, [&](int j) {
            const int value = first + j / 2;
            const int64_t row = (value / INNER == first / INNER ? low : high) * static_cast<int64_t>(INNER) + value % INNER;
            return (j % 2 ? up : gate) + row * HIDDEN;
        });
#pragma unroll 1
        for (int c = 0; c < CHOSEN; ++c) {
            const int64_t row = __shfl_sync(~0u, choice.expert, c) * static_cast<int64_t>(HIDDEN) + own.wide.first;
            ring.fill<INNER, true>(own.wide.count, lane, [&](int j) { return down + (row + j) * INNER; });
        }
    }
}

}  // namespace atlas
