// Causal attention of any number of queries a sequence over pages, on Hopper's warpgroup products (FlashAttention-3;
// Shah et al., 2024).
//
// A block owns some queries of one sequence and all heads that share a key head: a row is one query of one head, 64 of
// them a warpgroup. One more warpgroup copies keys and values from their pages. Keys come from the newest to the oldest, so that only the first tiles (and with a window the last)
// need a mask. While the sums of one tile turn into weights of values, the tensor cores work at the next tile's scores
// and at the products of the last tile's weights. Where there are two warpgroups they take turns in asking for products, so
// that one's exponentials hide behind the other's products. Long rows of tiles come first, for an even end.
//
// Where the tiles of a long prompt's piece are few, several blocks share out the keys of each: every one leaves sums of its own,
// and the last one adds them up, in the order of the keys.
#include "wgmma.cuh"

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
constexpr int QUERIES_ARE_THERE = 1, TURN = QUERIES_ARE_THERE + CONSUMERS, ITEM_IS_THERE = 14, NEVER = 15;
constexpr bool TURNS = CONSUMERS == 2;
// Widths of the products with values: head sizes above 128 take two.
constexpr int OUT_N = HEAD_DIM < 128 ? HEAD_DIM : 128, OUTS = HEAD_DIM / OUT_N;
static_assert(HEAD_DIM % PANEL == 0 && KEYS % PAGE_PART == 0, "whole panels and whole parts of pages");

// Without the care for results below 2^-126 that exp2f takes: they are nothing beside the largest, which is 1.
__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Holds back what follows until `sum` is known: the assembler would otherwise move a wait for products before the
// exponentials that are to hide behind them. The barrier is never arrived at: no sum of weights up to 1 is so large.
__device__ void after(float sum) {
    asm volatile("{ .reg .pred p; setp.gt.f32 p, %0, 0f7149F2CA; @p bar.arrive %1, 256; }" ::"f"(sum), "n"(NEVER) : "memory");
}

// Tiles of keys and of values go through a ring each, and descriptions of what a block does next through one of ITEMS.
struct Barriers {
    static constexpr int ITEMS = 2, COUNT = 4 * STAGES + 2 * ITEMS;
    uint32_t base;
    __device__ uint32_t full(int value, int stage) const { return base + (value * STAGES + stage) * 8; }
    __device__ uint32_t empty(int value, int stage) const { return base + ((2 + value) * STAGES + stage) * 8; }
    __device__ uint32_t told(int item) const { return base + (4 * STAGES + item % ITEMS) * 8; }
    __device__ uint32_t done(int item) const { return base + (4 * STAGES + ITEMS + item % ITEMS) * 8; }
};

// The part of a sequence that a block looks at.
struct Range {
    int start;        // tokens before the first query of this step
    int first_query;  // of this block, within the step
    int queries;      // of the sequence, in the step
    int oldest_key, length;
    int heads;  // that share the key head: row r is query r / heads of the block
    int skipped, count;  // of all its tiles of keys, those that are others' work before this one's, and this one's
    __device__ int query(int row) const { return first_query + row / heads; }
    __device__ bool has(int row) const { return row < ROWS / heads * heads && query(row) < queries; }
    __device__ int first_tile() const { return oldest_key / KEYS; }
    __device__ int all_tiles() const { return (length + KEYS - 1) / KEYS - first_tile(); }
    // Tiles count from the newest.
    __device__ int key(int tile) const { return (first_tile() + all_tiles() - 1 - skipped - tile) * KEYS; }
};

// What a block does next: some tiles of keys for one tile of queries, as the one with number `part` of `parts` that share it out.
// Each of these leaves `SUMS` vectors of four a thread at its place, `place` being that of the first; there is also a counter of
// those that have, one a warpgroup.
struct Item {
    Range range;
    int row, kv_head, first_token;
    int part, parts, place;
    int before;  // tiles of keys that went through the rings before this item's
};
constexpr int SUMS = HEAD_DIM / 8 + 1, PART_SUMS = SUMS * CONSUMERS * WARPGROUP, MOST_PARTS = 3;

// Keys and values of this block's head from the newest tile to the oldest, in the order in which they are used:
// keys 0, keys 1, values 0, keys 2, values 1 ...
__device__ void produce(const Range range, int before, const int32_t* table, const uint16_t* cache, int kv_head, int kv_heads,
                        int page_tokens, uint32_t keys, uint32_t values, Barriers barriers) {
    constexpr int ROWS_AT_ONCE = WARPGROUP / PIECES, PARTS = KEYS / PAGE_PART, NONE = -1;
    const int lane = threadIdx.x % WARP, row = threadIdx.x / PIECES, column = threadIdx.x % PIECES;
    const int tiles = range.count;
    const uint4* cached = reinterpret_cast<const uint4*>(cache);
    auto copy = [&](int value, int tile) {
        const int turn = before + tile, stage = turn % STAGES, key = range.key(tile);
        // Each lane looks up one part of a page; the others ask it. Counted in 16 bytes.
        int part = NONE;
        if (lane < PARTS) {
            const int position = key + lane * PAGE_PART;
            if (position < range.length && position + PAGE_PART > range.oldest_key) {
                const int64_t element = page_element(table[position / page_tokens], value, kv_head,
                                                     position % page_tokens, kv_heads, page_tokens, HEAD_DIM);
                part = static_cast<int>(element / 8);
            }
        }
        barrier_wait(barriers.empty(value, stage), turn / STAGES % 2 ^ 1);
        const uint32_t panel = (value ? values : keys) + stage * TILE_BYTES + column / 8 * KEY_PANEL;
#pragma unroll 8
        for (int at = 0; at < KEYS; at += ROWS_AT_ONCE) {
            const int mine = at + row, from = __shfl_sync(~0u, part, at / PAGE_PART);
            const bool valid = from != NONE && key + mine < range.length;
            const int64_t piece = valid ? static_cast<uint32_t>(from) + (mine % PAGE_PART * PIECES + column) : 0;
            copy_async(swizzled(panel, mine, column % 8), cached + piece, valid);
        }
        barrier_arrive_after_copies(barriers.full(value, stage));
    };
    copy(0, 0);
    for (int tile = 1; tile < tiles; ++tile) {
        copy(0, tile);
        copy(1, tile - 1);
    }
    copy(1, tiles - 1);
}

using Out = float[OUTS][OUT_N / 8][4];

// Leaves a warpgroup's sums for whoever comes last. True in that one, whose sums are then those over all keys.
__device__ bool gather(const Item& item, float4* sums, int32_t* counters, int group, float factor, Out& out, float (&top)[2],
                       float (&total)[2]) {
    const int thread = threadIdx.x % WARPGROUP;
    const int parts = item.parts;
    float4* first = sums + static_cast<int64_t>(item.place) * PART_SUMS + group * SUMS * WARPGROUP + thread;
    float4* own = first + item.part * PART_SUMS;
    int32_t* arrived = counters + item.place * CONSUMERS + group;
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < OUT_N / 8; ++d) {
            const float(&v)[4] = out[o][d];
            own[(o * OUT_N / 8 + d) * WARPGROUP] = make_float4(v[0], v[1], v[2], v[3]);
        }
    own[(SUMS - 1) * WARPGROUP] = make_float4(top[0], top[1], total[0], total[1]);
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);
    __shared__ int earlier[CONSUMERS];
    if (thread == 0) {
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
        if (before == parts - 1) *arrived = 0;  // for the next launch
        earlier[group] = before;
    }
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);
    if (earlier[group] != parts - 1) return false;
    float weight[MOST_PARTS][2], best[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int part = 0; part < MOST_PARTS; ++part) {
        if (part >= parts) break;
        const float4 each = __ldcg(first + part * PART_SUMS + (SUMS - 1) * WARPGROUP);
        best[0] = fmaxf(best[0], weight[part][0] = each.x);
        best[1] = fmaxf(best[1], weight[part][1] = each.y);
    }
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int part = 0; part < MOST_PARTS; ++part) {
        if (part >= parts) break;
        const float4 each = __ldcg(first + part * PART_SUMS + (SUMS - 1) * WARPGROUP);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float against = best[half] == -INFINITY ? 0.0f : best[half];
            weight[part][half] = power_of_two((weight[part][half] - against) * factor);
            total[half] += weight[part][half] * (half ? each.w : each.z);
        }
    }
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < OUT_N / 8; ++d) {
            float(&v)[4] = out[o][d];
            v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
            for (int part = 0; part < MOST_PARTS; ++part) {
                if (part >= parts) break;
                const float4 each = __ldcg(first + part * PART_SUMS + (o * OUT_N / 8 + d) * WARPGROUP);
                v[0] += weight[part][0] * each.x;
                v[1] += weight[part][0] * each.y;
                v[2] += weight[part][1] * each.z;
                v[3] += weight[part][1] * each.w;
            }
        }
    return true;
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

// How many items share out the keys of each of a sequence's tiles so that a step ends soonest on `processors`, counted in tiles of
// keys: an item takes OVERHEAD more than its own. Each of the `others`, sequences of one tile, takes OTHER, and fills what is left
// of the last round. There is `room` for so many items of a head that are shared.
__device__ int sharers(int tiles, int heads, int key_tiles, int others, int processors, int room) {
    constexpr int OVERHEAD = 5, OTHER = 8;
    int best = 1, least = 1 << 30;
    for (int parts = 1; parts <= min(MOST_PARTS, key_tiles); ++parts) {
        if (parts > 1 && tiles * parts > room) break;
        const int items = tiles * heads * parts, each = (key_tiles + parts - 1) / parts + OVERHEAD;
        const int rounds = (items + processors - 1) / processors * each;
        const int time = max(rounds, (items * each + others * heads * OTHER + processors - 1) / processors);
        if (time < least) {
            least = time;
            best = parts;
        }
    }
    return best;
}

// 64 rows against an item's tiles of keys.
__device__ void consume(const Item& item, const uint16_t* q, uint16_t* y, float4* sums, int32_t* arrived, int q_heads,
                        int window, float scale, uint32_t query, uint32_t keys, uint32_t values, Barriers barriers) {
    const Range& range = item.range;
    const int kv_head = item.kv_head, first_token = item.first_token, before = item.before % (2 * STAGES);
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    query += group * QUERY_BYTES;
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);  // nobody multiplies those of the last item any more
    // Where a row's vector starts, in heads.
    auto vector = [&](int row) {
        return static_cast<int64_t>(first_token + range.query(row)) * q_heads + kv_head * range.heads + row % range.heads;
    };
    for (int e = thread; e < 64 * PIECES; e += WARPGROUP) {
        const int row = e / PIECES, piece = e % PIECES;
        const bool valid = range.has(group * 64 + row);
        copy_async(swizzled(query + piece / 8 * QUERY_PANEL, row, piece % 8),
                   valid ? q + vector(group * 64 + row) * HEAD_DIM + piece * 8 : q, valid);
    }
    commit_copies();
    wait_copies<0>();
    publish_shared();
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);

    const int tiles = range.count, turn = TURN + group, others_turn = TURN + (1 - group);
    const bool turns = TURNS && range.has(64);
    const float factor = scale * LOG2E;
    const int mine = group * 64 + thread / WARP * 16 + lane / 4;
    const int oldest_query = range.start + range.query(group * 64);
    const int newest_query = range.start + range.query(group * 64 + 63);
    float out[OUTS][OUT_N / 8][4];
    uint32_t weight[KEYS / 16][4];
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {}, rescale[2];
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < OUT_N / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[o][d][e] = 0.0f;

    auto start_scores = [&](float (&score)[KEYS / 8][4], int tile) {
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
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int last = range.start + range.query(mine + half * 8), oldest = window > 0 ? last - window + 1 : 0;
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
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[o][d][e] *= rescale[e / 2];
        narrow_weights(score);
    }
    await(1, tiles - 1);
    start_values(tiles - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
    }
    wait_products<0>();
    release(1, tiles - 1);
    if (item.parts > 1 && !gather(item, sums, arrived, group, factor, out, top, total)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = mine + half * 8;
        if (!range.has(row)) continue;
        const float share = 1.0f / total[half];
        uint16_t* to = y + vector(row) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < OUT_N / 8; ++d) {
                *reinterpret_cast<uint32_t*>(to + o * OUT_N + d * 8) =
                    pack(out[o][d][2 * half] * share, out[o][d][2 * half + 1] * share);
            }
    }
}

// All items of a step, in order: the last tile of the last sequence comes first, since causal rows grow and a long one at the end
// would keep the rest waiting; heads vary fastest, so that the longest tiles of all heads come first.
struct Items {
    const int32_t *cu_q, *row_slot, *slots;
    int kv_heads, heads, slot_stride, window, places, processors;
    // Where it has come to: a row, the number of its first item of a head, its tiles and their parts, and the places before it.
    struct State {
        int row, first, tiles, parts, taken;
    };
    State& state;

    __device__ void measure(State& at) const {
        const int queries = ROWS / heads, tokens = cu_q[at.row + 1] - cu_q[at.row];
        at.tiles = (tokens + queries - 1) / queries;
        at.parts = 1;
        if (at.tiles < 2) return;
        const int length = slots[static_cast<int64_t>(row_slot[at.row]) * slot_stride + ATLAS_POSITION] + tokens;
        const int seen = window > 0 ? min(length, window + queries) : length;
        at.parts = sharers(at.tiles, kv_heads, (seen + KEYS - 1) / KEYS, at.row, processors, places - at.taken);
    }
    __device__ void begin(int rows) const {
        State at{rows - 1, 0, 0, 0, 0};
        if (rows > 0) measure(at);
        state = at;
    }
    // Moves on to the row that has the item, whose number is not below that of the last one; false behind the last.
    __device__ bool find(int number) const {
        State at = state;
        while (at.row >= 0 && number >= (at.first + at.tiles * at.parts) * kv_heads) {
            at.first += at.tiles * at.parts;
            if (at.parts > 1) at.taken += at.tiles * at.parts;
            if (--at.row >= 0) measure(at);
        }
        state = at;
        return at.row >= 0;
    }
    __device__ void describe(int number, Item& item) const {
        const int row = state.row, first = state.first, tiles = state.tiles, parts = state.parts, taken = state.taken;
        const int queries = ROWS / heads, inside = number / kv_heads - first;
        Range& range = item.range;
        item.row = row;
        item.kv_head = number % kv_heads;
        item.first_token = cu_q[row];
        range.start = slots[static_cast<int64_t>(row_slot[row]) * slot_stride + ATLAS_POSITION];
        range.queries = cu_q[row + 1] - cu_q[row];
        range.first_query = (tiles - 1 - inside / parts) * queries;
        range.length = range.start + min(range.first_query + queries, range.queries);
        range.heads = heads;
        // Pages that no query looks at any more may have been given away.
        range.oldest_key = window > 0 ? max(0, range.start + range.first_query - window + 1) : 0;
        // The first tile of a sequence may have fewer tiles of keys than the last, and so fewer parts with any.
        const int all = range.all_tiles(), each = (all + parts - 1) / parts;
        item.part = inside % parts;
        item.parts = (all + each - 1) / each;
        item.place = (taken + inside - item.part) * kv_heads + item.kv_head * parts;
        range.skipped = item.part * each;
        range.count = max(0, min(each, all - range.skipped));
    }
};

}  // namespace

// A block takes items until there are none; the first has its own number, the next ones are drawn from `drawn`. Of `shared_sums` and
// `arrived` there is room for `places` parts of tiles of each key head. `drawn` and `arrived` begin at zero, and end so.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill_wgmma(const int32_t* counts, const uint16_t* q, const int32_t* cu_q, const int32_t* row_slot,
                    const int32_t* slots, const uint16_t* cache, uint16_t* y, int32_t q_heads, int32_t kv_heads,
                    int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t window, float scale,
                    float* shared_sums, int32_t* drawn, int32_t* arrived, int32_t places, int32_t processors) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) uint64_t barrier_words[Barriers::COUNT];
    __shared__ Item items[Barriers::ITEMS];
    __shared__ Items::State state;
    admit_successor();
    const Barriers barriers{shared_address(barrier_words)};
    if (threadIdx.x == 0) {
        for (int value = 0; value < 2; ++value) {
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(barriers.full(value, stage), WARPGROUP);
                barrier_init(barriers.empty(value, stage), CONSUMERS * WARPGROUP / WARP);
            }
            barrier_init(barriers.told(value), 1);
            barrier_init(barriers.done(value), CONSUMERS * WARPGROUP / WARP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const uint32_t query = shared_address(shared), keys = query + CONSUMERS * QUERY_BYTES;
    const uint32_t values = keys + STAGES * TILE_BYTES;
    if (threadIdx.x < WARPGROUP) {
        int before = 0;
        give_registers<CONSUMERS == 2 ? 40 : 32>();
        const Items all{cu_q, row_slot, slots, kv_heads, q_heads / kv_heads, slot_stride, window, places, processors, state};
        int number = blockIdx.x;
        if (threadIdx.x == 0) all.begin(counts[ATLAS_SEQUENCES]);
        for (int turn = 0;; ++turn) {
            if (threadIdx.x == 0) {
                barrier_wait(barriers.done(turn), turn / Barriers::ITEMS % 2 ^ 1);
                Item& item = items[turn % Barriers::ITEMS];
                if (all.find(number)) {
                    all.describe(number, item);
                    item.before = before;
                } else {
                    item.row = -1;
                    // For each item somebody drew once: this was the last draw of all.
                    if (turn && number == static_cast<int>(gridDim.x) + state.first * kv_heads - 1) *drawn = 0;
                }
                barrier_arrive(barriers.told(turn));
            }
            named_wait(ITEM_IS_THERE, WARPGROUP);
            if (turn == 0) wait_for_predecessor();
            const Item& item = items[turn % Barriers::ITEMS];
            if (item.row < 0) break;
            // Behind the wait: the last launch may have the same counter.
            if (threadIdx.x == 0) number = static_cast<int>(gridDim.x) + atomicAdd(drawn, 1);
            if (item.range.count > 0) {
                const int32_t* table = slots + static_cast<int64_t>(row_slot[item.row]) * slot_stride + table_offset;
                produce(item.range, before, table, cache, item.kv_head, kv_heads, page_tokens, keys, values, barriers);
                before += item.range.count;
            }
        }
        wait_copies<0>();
    } else {
        take_registers<CONSUMERS == 2 ? 232 : 160>();
        wait_for_predecessor();
        const int group = threadIdx.x / WARPGROUP - 1;
        if (TURNS && group == 1) named_arrive(TURN, CONSUMERS * WARPGROUP);
        for (int turn = 0;; ++turn) {
            barrier_wait(barriers.told(turn), turn / Barriers::ITEMS % 2);
            const Item& item = items[turn % Barriers::ITEMS];
            if (item.row < 0) break;
            const int count = item.range.count;
            if (count > 0) {
                if (item.range.has(group * 64)) {
                    consume(item, q, y, reinterpret_cast<float4*>(shared_sums), arrived, q_heads, window, scale, query, keys,
                            values, barriers);
                } else {
                    pass(item.before, count, barriers);
                }
            }
            __syncwarp();
            if (threadIdx.x % WARP == 0) barrier_arrive(barriers.done(turn));
        }
    }
}
