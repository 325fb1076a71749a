// Causal attention of any number of queries a sequence over pages, on Hopper's warpgroup products (FlashAttention-3;
// Shah et al., 2024).
//
// An item is some queries of one sequence and all heads that share a key head: a row is one query of one head, 64 of
// them a warpgroup. One more warpgroup sees to keys and values, whole tiles by the copy engine. Keys come from the
// newest to the oldest, so that only the first tiles (and with a window the last) need a mask. While the sums of one
// tile turn into weights of values, the tensor cores work at the next tile's scores and at the products of the last
// tile's weights. Where there are two warpgroups they take turns in asking for products, so that one's exponentials
// hide behind the other's products. Where an item has no more than 16 rows, as that of a single query has, they take
// every second tile of keys each instead, and their sums are put together.
//
// Blocks stay: each first does its share of the line (attention_items.cuh), then draws items until there are none,
// and copies for the next item run ahead of the products of the last. Blocks that share out an item's keys leave
// their sums in memory, and the last one that comes adds them up, in the order of the keys.
#include "attention_items.cuh"
#include "attention_sums.cuh"
#include "tma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KEYS
#define KEYS 128
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif

using namespace atlas;

namespace {

constexpr int ROWS = 64 * CONSUMERS, THREADS = (1 + CONSUMERS) * WARPGROUP, STAGES = 2;
constexpr int PANELS = HEAD_DIM / PANEL, PIECES = HEAD_DIM / 8;
constexpr int KEY_PANEL = KEYS * 128, TILE_BYTES = PANELS * KEY_PANEL;
constexpr int QUERY_PANEL = 64 * 128, QUERY_BYTES = PANELS * QUERY_PANEL;
constexpr int PAGE_PART = 16;  // pages are a multiple of so many tokens
// Named barriers, one each for a warpgroup.
constexpr int QUERIES_ARE_THERE = 1, TURN = QUERIES_ARE_THERE + CONSUMERS, JOIN = 8, NEVER = 15;  // JOIN has two
constexpr bool TURNS = CONSUMERS == 2;
// Warpgroups that take a narrow item's tiles of keys in turns: each has a stage of its own. Any other lets tiles go
// as they come.
constexpr int SHARERS = 2;
static_assert(SHARERS == STAGES && SHARERS <= CONSUMERS, "a stage each");
constexpr bool BOXES = CONSUMERS == 2;  // beside three warpgroups there are no registers for asking the copy engine
// Widths of the products with values: head sizes above 128 take two.
constexpr int OUT_N = HEAD_DIM < 128 ? HEAD_DIM : 128, OUTS = HEAD_DIM / OUT_N;
static_assert(HEAD_DIM % PANEL == 0 && KEYS % PAGE_PART == 0, "whole panels and whole parts of pages");

// Holds back what follows until `sum` is known: the assembler would otherwise move a wait for products before the
// exponentials that are to hide behind them. The barrier is never arrived at: no sum of weights up to 1 is so large.
__device__ void after(float sum) {
    asm volatile("{ .reg .pred p; setp.gt.f32 p, %0, 0f7149F2CA; @p bar.arrive %1, 256; }" ::"f"(sum), "n"(NEVER)
                 : "memory");
}

__device__ void barrier_arrive_for(uint32_t barrier, int arrivals) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0], %1; }" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Tiles of keys and of values go through a ring each, and descriptions of items through one of ITEMS.
struct Barriers {
    static constexpr int ITEMS = 2, COUNT = 4 * STAGES + 2 * ITEMS;
    uint32_t base;
    __device__ uint32_t full(int value, int stage) const { return base + (value * STAGES + stage) * 8; }
    __device__ uint32_t empty(int value, int stage) const { return base + ((2 + value) * STAGES + stage) * 8; }
    __device__ uint32_t told(int item) const { return base + (4 * STAGES + item % ITEMS) * 8; }
    __device__ uint32_t done(int item) const { return base + (4 * STAGES + ITEMS + item % ITEMS) * 8; }
};

using Step = Division<ROWS, KEYS>;
using Range = Step::Range;
using Item = Step::Item;

// Where keys and values are: also as a matrix of vectors, of which a box has `box_tokens`, no more than a page.
struct Pages {
    const CUtensorMap* map;
    const uint16_t* cache;
    int kv_heads, page_tokens, box_tokens;
    __device__ int vector(const int32_t* table, int value, int kv_head, int position) const {
        const int page = position / page_tokens, inside = position - page * page_tokens;
        return ((table[page] * 2 + value) * kv_heads + kv_head) * page_tokens + inside;
    }
};

// Keys and values of this block's head from the newest tile to the oldest, in the order in which they are used:
// keys 0, keys 1, values 0, keys 2, values 1 ...
template <typename Draw>
__device__ void produce(const Range range, int before, const int32_t* table, const Pages& pages, int kv_head,
                        uint32_t keys, uint32_t values, Barriers barriers, Draw draw) {
    constexpr int ROWS_AT_ONCE = WARPGROUP / PIECES, PARTS = KEYS / PAGE_PART, NONE = -1;
    const int lane = threadIdx.x % WARP, row = threadIdx.x / PIECES, column = threadIdx.x % PIECES;
    const int end = before + range.count, newest = range.newest_key + before * KEYS;
    const uint4* cached = reinterpret_cast<const uint4*>(pages.cache);
    auto copy = [&](int value, int turn) {
        const int stage = turn % STAGES, key = newest - turn * KEYS;
        const uint32_t to = (value ? values : keys) + stage * TILE_BYTES;
        if (BOXES && key >= range.oldest_key && key + KEYS <= range.length) {
            // Whole tiles come by the copy engine: each lane of the first warp asks for a panel of a box.
            const int part = lane / PANELS * pages.box_tokens, panel = lane % PANELS;
            const bool asks = threadIdx.x < WARP && part < KEYS;
            const int vector = asks ? pages.vector(table, value, kv_head, key + part) : 0;
            const uint32_t full = barriers.full(value, stage);
            barrier_wait(barriers.empty(value, stage), turn / STAGES % 2 ^ 1);
            if (threadIdx.x == 0) barrier_expect(full, TILE_BYTES);
            __syncwarp();
            if (asks) copy_tile(to + panel * KEY_PANEL + part * 128, pages.map, panel * PANEL, vector, full);
            if (lane == 0) barrier_arrive_for(full, threadIdx.x == 0 ? WARP - 1 : WARP);
            return;
        }
        // Each lane looks up one part of a page; the others ask it. Counted in 16 bytes.
        int part = NONE;
        if (lane < PARTS) {
            const int position = key + lane * PAGE_PART;
            if (position < range.length && position + PAGE_PART > range.oldest_key) {
                part = pages.vector(table, value, kv_head, position) * PIECES;
            }
        }
        barrier_wait(barriers.empty(value, stage), turn / STAGES % 2 ^ 1);
        const uint32_t panel = to + column / 8 * KEY_PANEL;
#pragma unroll 8
        for (int at = 0; at < KEYS; at += ROWS_AT_ONCE) {
            const int mine = at + row, from = __shfl_sync(~0u, part, at / PAGE_PART);
            const bool valid = from != NONE && key + mine < range.length;
            const int64_t piece = valid ? static_cast<uint32_t>(from) + (mine % PAGE_PART * PIECES + column) : 0;
            copy_async(swizzled(panel, mine, column % 8), cached + piece, valid);
        }
        barrier_arrive_after_copies(barriers.full(value, stage));
    };
    copy(0, before);
    for (int turn = before + 1; turn < end; ++turn) {
        copy(0, turn);
        copy(1, turn - 1);
    }
    draw();  // late, so that whoever is free has drawn before
    copy(1, end - 1);
}

// A warpgroup without rows lets tiles go as they come.
__device__ void pass(int before, int tiles, Barriers barriers) {
    for (int turn = before; turn < before + tiles; ++turn) {
        for (int value = 0; value < 2; ++value) {
            barrier_wait(barriers.full(value, turn % STAGES), turn / STAGES % 2);
            if (threadIdx.x % WARP == 0) barrier_arrive(barriers.empty(value, turn % STAGES));
        }
    }
}

// What is read through the result is not kept in registers before.
__device__ const Item& again(const Item& item) {
    const Item* same = &item;
    asm volatile("" : "+l"(same));
    return *same;
}

// Where a row's vector starts, in heads.
__device__ int64_t vector_of(const Item& item, int row, int q_heads) {
    const Range& rows = item.range;
    const int64_t token = item.first_token + rows.query(row);
    return token * q_heads + item.kv_head * rows.heads + row % rows.heads;
}

// Asks for the rows of a warpgroup; true when it has any.
__device__ bool ask_for_queries(const Item& item, const uint16_t* q, int q_heads, uint32_t queries) {
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    if (item.last) return false;
    const bool narrow = item.range.narrow();
    const int first_row = narrow ? 0 : group * 64;
    if (!item.range.has(first_row) || (narrow && group >= SHARERS)) return false;
    for (int e = thread; e < (narrow ? Range::NARROW : 64) * PIECES; e += WARPGROUP) {
        const int row = e / PIECES, piece = e % PIECES;
        const bool valid = item.range.has(first_row + row);
        copy_async(swizzled(queries + group * QUERY_BYTES + piece / 8 * QUERY_PANEL, row, piece % 8),
                   valid ? q + vector_of(item, first_row + row, q_heads) * HEAD_DIM + piece * 8 : q, valid);
    }
    commit_copies();
    return true;
}

// 64 rows against an item's tiles of keys; of a narrow item, 16 rows against every tile whose turn it is. Behind the
// last product with queries, `ask_for_next` asks for the next item's.
template <bool NARROW, typename Ask>
__device__ void consume(const Item& item, uint16_t* y, float4* sums, int32_t* arrived, int q_heads, int window,
                        float scale, uint32_t query, uint32_t keys, uint32_t values, Barriers barriers,
                        Ask ask_for_next) {
    const Range& range = item.range;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    const int before = item.before % (2 * STAGES), first_row = NARROW ? 0 : group * 64;
    const uint32_t own_queries = query + group * QUERY_BYTES;
    wait_copies<0>();
    publish_shared();
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);

    const int tiles = range.count, turn = TURN + group, others_turn = TURN + (1 - group);
    const bool turns = TURNS && range.has(64);
    // No thread has a second row. For heads of 256 there are no registers for the difference.
    const bool few = NARROW && HEAD_DIM <= 128 && !range.has(8);
    const float factor = scale * LOG2E;
    const int mine = first_row + thread / WARP * 16 + lane / 4;
    const int oldest_query = range.start + range.query(first_row);
    const int newest_query = range.start + range.query(first_row + 63);
    float out[OUTS][OUT_N / 8][4];
    uint32_t weight[KEYS / 16][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {}, rescale[2] = {1.0f, 1.0f};
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < OUT_N / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[o][d][e] = 0.0f;

    auto start_scores = [&](float (&score)[KEYS / 8][4], int tile) {
        uint32_t query = own_queries;
        asm volatile("" : "+r"(query));  // descriptors are made anew: registers are few
        const uint32_t from = keys + (before + tile) % STAGES * TILE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
            const uint32_t inside = k % 4 * 32;
            product<KEYS>(score, summed_inside(query + k / 4 * QUERY_PANEL + inside),
                          summed_inside(from + k / 4 * KEY_PANEL + inside), k > 0);
        }
        commit_products();
    };
    auto start_values = [&](int tile) {
        const uint32_t from = values + (before + tile) % STAGES * TILE_BYTES;
        begin_products();
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) {
                product_across<OUT_N>(out[o], weight[k],
                                      summed_across(from + o * OUT_N / PANEL * KEY_PANEL + k * 2048, KEY_PANEL));
            }
        commit_products();
    };
    auto release = [&](int value, int tile) {
        if (lane == 0) barrier_arrive_for(barriers.empty(value, (before + tile) % STAGES), NARROW ? SHARERS : 1);
    };
    auto soften = [&](float (&score)[KEYS / 8][4], int tile) {
        const int key = range.key(tile);
        const bool masked = key + KEYS > oldest_query + 1 || (window > 0 && key <= newest_query - window);
        if (masked) {
            const Range& rows = again(item).range;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int last = rows.start + rows.query(mine + half * 8), oldest = window > 0 ? last - window + 1 : 0;
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = key + j * 8 + lane % 4 * 2 + e;
                        if (at > last || at < oldest) score[j][2 * half + e] = -INFINITY;
                    }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half && few) break;
            float best = top[half];
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) best = fmaxf(best, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float against = best == -INFINITY ? 0.0f : best * factor;
            rescale[half] = power_of_two(top[half] * factor - against);
            top[half] = best;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = score[j][2 * half + e];
                    s = power_of_two(fmaf(s, factor, -against));
                    sum += s;
                }
            total[half] = total[half] * rescale[half] + sum;
        }
    };
    auto narrow_weights = [&](const float (&score)[KEYS / 8][4]) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            weight[k][0] = pack(score[2 * k][0], score[2 * k][1]);
            weight[k][1] = pack(score[2 * k][2], score[2 * k][3]);
            weight[k][2] = pack(score[2 * k + 1][0], score[2 * k + 1][1]);
            weight[k][3] = pack(score[2 * k + 1][2], score[2 * k + 1][3]);
        }
    };

    auto await = [&](int value, int tile) {
        barrier_wait(barriers.full(value, (before + tile) % STAGES), (before + tile) / STAGES % 2);
        publish_shared();
    };

    auto rescale_sums = [&] {
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[o][d][e] *= rescale[e / 2];
    };
    auto end_totals = [&] {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half] += __shfl_xor_sync(~0u, total[half], 1);
            total[half] += __shfl_xor_sync(~0u, total[half], 2);
        }
    };

    if constexpr (NARROW) {
        // Only the first warp has rows. Little is to be computed, so that stages are given back as early as can be.
        for (int tile = group; tile < tiles; tile += SHARERS) {
            float score[KEYS / 8][4];
            await(0, tile);
            start_scores(score, tile);
            wait_products<0>();
            release(0, tile);
            if (thread < WARP) {
                soften(score, tile);
                rescale_sums();
                narrow_weights(score);
            }
            await(1, tile);
            start_values(tile);
            wait_products<0>();
            release(1, tile);
        }
        if (group == 0) ask_for_next();
        if (thread < WARP) {
            end_totals();
            join<SHARERS>(query, QUERY_BYTES, JOIN, group, factor, out, top, total);
        }
        if (group > 0) {
            ask_for_next();  // before, the sums were at its place
            return;
        }
    } else {
        {
            float score[KEYS / 8][4];
            await(0, 0);
            start_scores(score, 0);
            wait_products<0>();
            release(0, 0);
            soften(score, 0);
            narrow_weights(score);
        }
        for (int tile = 1; tile < tiles; ++tile) {
            float score[KEYS / 8][4];
            await(0, tile);
            if (turns) named_wait(turn, CONSUMERS * WARPGROUP);
            start_scores(score, tile);
            await(1, tile - 1);
            start_values(tile - 1);
            if (turns) named_arrive(others_turn, CONSUMERS * WARPGROUP);
            wait_products<1>();
            release(0, tile);
            soften(score, tile);
            after(total[0] + total[1]);
            wait_products<0>();
            release(1, tile - 1);
            rescale_sums();
            narrow_weights(score);
        }
        await(1, tiles - 1);
        start_values(tiles - 1);
        ask_for_next();
        end_totals();
        wait_products<0>();
        release(1, tiles - 1);
    }
    const int free_barrier = QUERIES_ARE_THERE + group;
    if (item.parts > 1 && !gather<CONSUMERS>(item, sums, arrived, free_barrier, group, factor, out, top, total)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = mine + half * 8;
        const Item& of = again(item);
        if (!of.range.has(row)) continue;
        const float share = 1.0f / total[half];
        uint16_t* to = y + vector_of(of, row, q_heads) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; ++d) {
                *reinterpret_cast<uint32_t*>(to + o * OUT_N + d * 8) =
                    pack(out[o][d][2 * half] * share, out[o][d][2 * half + 1] * share);
            }
    }
}

}  // namespace

// `pages_map` is the layer's part of the cache as a matrix of vectors, in boxes of `box_tokens`. Of `shared_sums`
// there are two places a block, of `arrived` a counter for each warpgroup of a block; `drawn` and these begin at
// zero, and end so. Behind the tiles there is shared memory for all rows of the step.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_wgmma(const int32_t* counts, const uint16_t* q, const int32_t* cu_q, const int32_t* row_slot,
                    const int32_t* slots, const uint16_t* cache, uint16_t* y, int32_t q_heads, int32_t kv_heads,
                    int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t window, float scale,
                    const __grid_constant__ CUtensorMap pages_map, int32_t box_tokens, float* shared_sums,
                    int32_t* drawn, int32_t* arrived) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t barrier_words[Barriers::COUNT];
    __shared__ Item items[Barriers::ITEMS];
    __shared__ Cursor cursor;
    __shared__ Step step;
    __shared__ int number, before;  // the dealer's; tiles of keys that went through the rings before
    admit_successor();
    const Barriers barriers{shared_address(barrier_words)};
    if (threadIdx.x == 0) {
        for (int value = 0; value < 2; ++value) {
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(barriers.full(value, stage), WARPGROUP);
                barrier_init(barriers.empty(value, stage), CONSUMERS * WARPGROUP / WARP);
            }
            barrier_init(barriers.told(value), 1);
            barrier_init(barriers.done(value), (1 + CONSUMERS) * WARPGROUP / WARP - 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    StepRow* table = reinterpret_cast<StepRow*>(shared + CONSUMERS * QUERY_BYTES + 2 * STAGES * TILE_BYTES);
    const int sequences = counts[ATLAS_SEQUENCES];
    for (int row = threadIdx.x; row < sequences; row += THREADS) {
        look_up(table[row], cu_q + row, slots + static_cast<int64_t>(row_slot[row]) * slot_stride, table_offset);
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        const int heads = q_heads / kv_heads;
        Step own{kv_heads, heads, ROWS / heads, window, static_cast<int>(gridDim.x), sequences};
        own.measure(table);
        if (threadIdx.x == 0) {
            step = own;
            before = 0;
        }
    }
    __syncthreads();
    const uint32_t query = shared_address(shared), keys = query + CONSUMERS * QUERY_BYTES;
    const uint32_t values = keys + STAGES * TILE_BYTES;
    if (threadIdx.x < WARPGROUP) {
        give_registers<CONSUMERS == 2 ? 56 : 32>();
        const Dealer<ROWS, KEYS> dealer{step, table, cursor, number, drawn, static_cast<int>(blockIdx.x)};
        const Pages pages{&pages_map, cache, kv_heads, page_tokens, box_tokens};
        const bool deals = threadIdx.x < WARP;
        if (deals) dealer.begin();
        for (int turn = 0;; ++turn) {
            Item& item = items[turn % Barriers::ITEMS];
            if (deals) {
                barrier_wait(barriers.done(turn), turn / Barriers::ITEMS % 2 ^ 1);
                dealer.deal(item);
                if (threadIdx.x == 0) {
                    item.before = before;
                    before += item.range.count;
                    barrier_arrive(barriers.told(turn));
                }
                __syncwarp();
            } else {
                barrier_wait(barriers.told(turn), turn / Barriers::ITEMS % 2);
            }
            if (item.last) break;
            if (turn == 0) wait_for_predecessor();
            produce(item.range, item.before, item.pages, pages, item.kv_head, keys, values, barriers, [&] {
                if (threadIdx.x == 0 && dealer.share_is_done()) dealer.draw();
            });
            __syncwarp();
            asm volatile("" : "+r"(turn));  // its barrier's address is found anew: registers are few
            if (!deals && threadIdx.x % WARP == 0) barrier_arrive(barriers.done(turn));
        }
        wait_copies<0>();
        wait_for_predecessor();
    } else {
        take_registers<CONSUMERS == 2 ? 224 : 160>();
        wait_for_predecessor();
        const int group = threadIdx.x / WARPGROUP - 1;
        if (TURNS && group == 1) named_arrive(TURN, CONSUMERS * WARPGROUP);
        bool asked = false;
        for (int turn = 0;; ++turn) {
            auto ask = [&](int of) {
                barrier_wait(barriers.told(of), of / Barriers::ITEMS % 2);
                named_wait(QUERIES_ARE_THERE + group, WARPGROUP);  // nobody multiplies the last item's any more
                asked = ask_for_queries(items[of % Barriers::ITEMS], q, q_heads, query);
            };
            if (!asked) ask(turn);
            const Item& item = items[turn % Barriers::ITEMS];
            if (item.last) break;
            auto* sums = reinterpret_cast<float4*>(shared_sums);
            auto next = [&] { ask(turn + 1); };
            if (asked && item.range.narrow()) {
                consume<true>(item, y, sums, arrived, q_heads, window, scale, query, keys, values, barriers, next);
            } else if (asked) {
                consume<false>(item, y, sums, arrived, q_heads, window, scale, query, keys, values, barriers, next);
            } else {
                pass(item.before, item.range.count, barriers);
            }
            __syncwarp();
            if (threadIdx.x % WARP == 0) barrier_arrive(barriers.done(turn));
        }
    }
}
