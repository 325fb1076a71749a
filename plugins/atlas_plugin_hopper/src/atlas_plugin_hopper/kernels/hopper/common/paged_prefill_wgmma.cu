// Causal attention of any number of queries a sequence over pages, on Hopper's warpgroup products (FlashAttention-3;
// Shah et al., 2024).
//
// An item is some queries of one sequence and all heads that share a key head: a row is one query of one head, 64 of
// them a warpgroup. A warp of a third warpgroup asks the copy engine for keys and values. Keys come from the newest to
// the oldest, so that only the first tiles (and with a window the last) need a mask. While the sums of one tile turn
// into weights of values, the tensor cores work at the next tile's scores and at the products of the last tile's
// weights. The two warpgroups take turns in asking for products, so that one's exponentials hide behind the other's
// products. Items of no more than 16 rows, as that of a single query, are narrow_items.cuh's.
//
// Blocks stay: each first does its share of the line (attention_items.cuh), then draws items until there are none,
// and copies for the next item run ahead of the products of the last. Blocks that share out an item's keys leave
// their sums in memory, and the last one that comes adds them up, in the order of the keys.
#include "narrow_items.cuh"

using namespace atlas;

namespace {

// Widths of the products with values: head sizes above 128 take two.
constexpr int OUT_N = HEAD_DIM < 128 ? HEAD_DIM : 128, OUTS = HEAD_DIM / OUT_N;

// Holds back what follows until `sum` is known: the assembler would otherwise move a wait for products before the
// exponentials that are to hide behind them. The barrier is never arrived at: no sum of weights up to 1 is so large.
__device__ void after(float sum) {
    asm volatile("{ .reg .pred p; setp.gt.f32 p, %0, 0f7149F2CA; @p bar.arrive %1, 256; }" ::"f"(sum), "n"(NEVER)
                 : "memory");
}

// Of four lanes with four words each: lane i has then word i of all.
__device__ void transpose_four(uint32_t (&word)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? word[i] : word[i + 1], 1);
        (odd ? word[i] : word[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, upper ? word[i] : word[i + 2], 2);
        (upper ? word[i] : word[i + 2]) = other;
    }
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

// 64 rows against an item's tiles of keys. Behind the last product with queries, `ask_for_next` asks for the next
// item's.
template <typename Ask>
__device__ void consume(const Item& item, uint16_t* y, float4* sums, int32_t* arrived, int q_heads, int window,
                        float scale, uint32_t query, uint32_t keys, uint32_t values, Barriers barriers,
                        Ask ask_for_next) {
    const Range& range = item.range;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    const int before = item.before % (2 * STAGES), first_row = group * 64;
    const uint32_t own_queries = query + group * QUERY_BYTES;
    wait_copies<0>();
    publish_shared();
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);

    const int tiles = range.count, turn = TURN + group, others_turn = TURN + (1 - group);
    const bool turns = range.has(64);
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
        if (lane == 0) barrier_arrive(barriers.empty(value, (before + tile) % STAGES));
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

    // Clears what is nobody's of an item's first and last tile of values, which may be no number.
    auto clear_values = [&](int tile) {
        const int key = range.key(tile), newer = range.length - key, older = range.oldest_key - key;
        if (newer >= KEYS && older <= 0) return;
        barrier_wait(barriers.full(1, (before + tile) % STAGES), (before + tile) / STAGES % 2);
        const uint32_t from = values + (before + tile) % STAGES * TILE_BYTES;
        for (int e = thread; e < KEYS * PIECES; e += WARPGROUP) {
            const int row = e / PIECES, piece = e % PIECES;
            if (row >= older && row < newer) continue;
            store_shared(swizzled(from + piece / 8 * KEY_PANEL, row, piece % 8), 0.0f, 0.0f, 0.0f, 0.0f);
        }
        publish_shared();
        named_wait(QUERIES_ARE_THERE + group, WARPGROUP);
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

    {
        float score[KEYS / 8][4];
        await(0, 0);
        start_scores(score, 0);
        wait_products<0>();
        release(0, 0);
        soften(score, 0);
        narrow_weights(score);
        clear_values(0);
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
    clear_values(tiles - 1);
    start_values(tiles - 1);
    ask_for_next();
    end_totals();
    wait_products<0>();
    release(1, tiles - 1);
    const int free_barrier = QUERIES_ARE_THERE + group;
    if (item.parts > 1 && !gather<CONSUMERS>(item, sums, arrived, free_barrier, group, factor, out, top, total)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = mine + half * 8;
        const Item& of = again(item);
        const bool valid = of.range.has(row);
        const float share = 1.0f / total[half];
        uint16_t* to = result_of(of, y, row, q_heads) + lane % 4 * 8;
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; d += 4) {
                uint32_t pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&v)[4] = out[o][d + i];
                    pairs[i] = pack(v[2 * half] * share, v[2 * half + 1] * share);
                }
                transpose_four(pairs);
                const uint4 vector = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                if (valid) *reinterpret_cast<uint4*>(to + o * OUT_N + d * 8) = vector;
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
    if (threadIdx.x == 0) barriers.init();
    StepRow* table = reinterpret_cast<StepRow*>(shared + CONSUMERS * QUERY_BYTES + 2 * STAGES * TILE_BYTES);
    const int sequences = counts[ATLAS_SEQUENCES];
    for (int row = threadIdx.x; row < sequences; row += THREADS) {
        look_up(table[row], cu_q + row, slots + static_cast<int64_t>(row_slot[row]) * slot_stride, table_offset);
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        const int heads = q_heads / kv_heads;
        const int queries = ROWS / heads;
        Step own{kv_heads, heads, queries, window, static_cast<int>(gridDim.x), ~0u / queries + 1, sequences};
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
        give_registers<56>();
        const Dealer<ROWS, KEYS> dealer{step, table, cursor, number, drawn, static_cast<int>(blockIdx.x)};
        const Pages pages{&pages_map, kv_heads, page_tokens, box_tokens};
        const Producer producer{pages, keys, values, barriers};
        const int warp = threadIdx.x / WARP;
        const bool first = threadIdx.x % WARP == 0;
        if (warp == DEALER) {
            dealer.begin();
            for (int turn = 0;; ++turn) {
                Item& item = items[turn % Barriers::ITEMS];
                barrier_wait(barriers.done(turn), Barriers::parity(turn) ^ 1);
                dealer.deal(item);
                if (first) {
                    item.before = before;
                    before += item.range.count;
                    barrier_arrive(barriers.told(turn));
                }
                __syncwarp();
                if (item.last) break;
                // Late, so that whoever is free has drawn before, but not so late that the next item is waited for.
                barrier_wait(barriers.near(turn), Barriers::parity(turn));
            }
        } else if (warp == ASKER) {
            auto next = [&](int turn) -> const Item& {
                barrier_wait(barriers.told(turn), Barriers::parity(turn));
                return items[turn % Barriers::ITEMS];
            };
            producer.run(next, [&](int turn) {
                if (first) barrier_arrive(barriers.near(turn));
            });
        }
        wait_for_predecessor();
    } else {
        take_registers<224>();
        wait_for_predecessor();
        const int group = threadIdx.x / WARPGROUP - 1;
        if (group == 1) named_arrive(TURN, CONSUMERS * WARPGROUP);
        bool asked = false;
        for (int turn = 0;; ++turn) {
            auto ask = [&](int of, bool only_narrow) {
                barrier_wait(barriers.told(of), Barriers::parity(of));
                named_wait(QUERIES_ARE_THERE + group, WARPGROUP);  // nobody multiplies the last item's any more
                const Item& item = items[of % Barriers::ITEMS];
                asked = !(only_narrow && !item.range.narrow) && ask_for_queries(item, q, q_heads, query);
            };
            if (!asked) ask(turn, false);
            const Item& item = items[turn % Barriers::ITEMS];
            if (item.last) break;
            auto* sums = reinterpret_cast<float4*>(shared_sums);
            if (asked && item.range.narrow) {
                consume_narrow(item, y, sums, arrived, q_heads, window, scale, query, keys, values, barriers,
                               [&] { ask(turn + 1, true); });
            } else if (asked) {
                consume(item, y, sums, arrived, q_heads, window, scale, query, keys, values, barriers,
                        [&] { ask(turn + 1, false); });
            } else {
                pass(item.before, item.range.count, barriers);
            }
            __syncwarp();
            if (threadIdx.x % WARP == 0) barrier_arrive(barriers.done(turn));
        }
    }
}
