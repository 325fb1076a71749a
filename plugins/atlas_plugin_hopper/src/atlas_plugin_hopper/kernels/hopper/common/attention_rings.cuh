// Tiles of keys and values of an attention in shared memory: where they lie, who waits for them, and a producer that
// asks for those of one item after another.
#pragma once
#include "attention_items.cuh"
#include "tma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KEYS
#define KEYS 128
#endif

namespace atlas {

constexpr int CONSUMERS = 2;  // warpgroups with rows
constexpr int ROWS = 64 * CONSUMERS, THREADS = (1 + CONSUMERS) * WARPGROUP, STAGES = 2;
constexpr int PANELS = HEAD_DIM / PANEL, PIECES = HEAD_DIM / 8;
constexpr int KEY_PANEL = KEYS * 128, TILE_BYTES = PANELS * KEY_PANEL;
constexpr int QUERY_PANEL = 64 * 128, QUERY_BYTES = PANELS * QUERY_PANEL;
constexpr int ASKER = 0, DEALER = 1;  // warps of the other warpgroup; the rest of it is there for its registers
static_assert(HEAD_DIM % PANEL == 0, "whole panels");

using Step = Division<ROWS, KEYS>;
using Range = Step::Range;
using Item = Step::Item;

// Tiles of keys and of values go through a ring each, and descriptions of items through one of ITEMS: one is told, its
// producer comes near to its end, and it is done.
struct Barriers {
    static constexpr int ITEMS = 2, COUNT = 4 * STAGES + 3 * ITEMS;
    uint32_t base;
    __device__ uint32_t full(int value, int stage) const { return base + (value * STAGES + stage) * 8; }
    __device__ uint32_t empty(int value, int stage) const { return base + ((2 + value) * STAGES + stage) * 8; }
    __device__ uint32_t told(int item) const { return base + (4 * STAGES + item % ITEMS) * 8; }
    __device__ uint32_t done(int item) const { return base + (4 * STAGES + ITEMS + item % ITEMS) * 8; }
    __device__ uint32_t near(int item) const { return base + (4 * STAGES + 2 * ITEMS + item % ITEMS) * 8; }
    __device__ static int parity(int item) { return item / ITEMS % 2; }

    // By one thread.
    __device__ void init() const {
        for (int value = 0; value < 2; ++value) {
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(full(value, stage), 1);
                barrier_init(empty(value, stage), CONSUMERS * WARPGROUP / WARP);
            }
        }
        for (int item = 0; item < ITEMS; ++item) {
            barrier_init(told(item), 1);
            barrier_init(done(item), CONSUMERS * WARPGROUP / WARP + 1);
            barrier_init(near(item), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Where keys and values are: a matrix of vectors, of which a box has `box_tokens`, no more than a page.
struct Pages {
    const CUtensorMap* map;
    int kv_heads, page_tokens, box_tokens;
    __device__ int vector(int kv_head, int value, int page, int inside) const {
        return ((page * 2 + value) * kv_heads + kv_head) * page_tokens + inside;
    }
};

// Asks the copy engine for tiles, as one warp.
struct Producer {
    static constexpr int NONE = -1;
    struct Place {  // of a lane's box of a tile: its page, or NONE, and its first token there
        int page, inside;
    };
    const Pages& pages;
    uint32_t keys, values;
    Barriers barriers;

    // Tiles count from the newest. Looked up so early that nobody waits for it.
    __device__ Place look(const Item& item, int tile) const {
        Place place{NONE, 0};
        const Range& range = item.range;
        const int part = threadIdx.x % WARP / PANELS * pages.box_tokens, position = range.key(tile) + part;
        if (part < KEYS && tile < range.count && position < range.length &&
            position + pages.box_tokens > range.oldest_key) {
            const uint32_t page = static_cast<uint32_t>(position) / static_cast<uint32_t>(pages.page_tokens);
            place.inside = position - page * pages.page_tokens;
            place.page = item.pages[page];
        }
        return place;
    }

    // What is nobody's in the first and last tile of an item stays in shared memory as it was, or comes with a box:
    // scores with such keys do not count, and such values are cleared by whoever multiplies them.
    __device__ void copy(const Item& item, int value, int tile, const Place& place) const {
        const int turn = item.before + tile, stage = turn % STAGES;
        const int lane = threadIdx.x % WARP, panel = lane % PANELS, part = lane / PANELS * pages.box_tokens;
        const uint32_t to = (value ? values : keys) + stage * TILE_BYTES, full = barriers.full(value, stage);
        const bool asks = place.page != NONE;
        const int bytes = __popc(__ballot_sync(~0u, asks)) * pages.box_tokens * PANEL * 2;
        const int vector = pages.vector(item.kv_head, value, place.page, place.inside);
        barrier_wait(barriers.empty(value, stage), turn / STAGES % 2 ^ 1);
        if (lane == 0) barrier_expect(full, bytes);
        __syncwarp();
        if (asks) copy_tile(to + panel * KEY_PANEL + part * 128, pages.map, panel * PANEL, vector, full);
    }

    // All items, the newest tile of each first, in the order in which tiles are used: keys 0, keys 1, values 0, keys 2,
    // values 1 ... and the next item's keys 0 before the last values, so that the rings do not run dry. `next` gives
    // the item of a turn, `near` is called a few tiles before an item's end.
    template <typename Next, typename Near>
    __device__ void run(Next next, Near near) const {
        const Item* item = &next(0);
        Place newest = item->last ? Place{NONE, 0} : look(*item, 0);
        wait_for_predecessor();
        if (!item->last) copy(*item, 0, 0, newest);
        for (int turn = 0; !item->last; ++turn) {
            const int count = item->range.count, near_end = max(0, count - (item->range.narrow ? 3 : 1));
            Place last = newest, place = look(*item, 1);
            if (near_end == 0) near(turn);
            for (int tile = 1; tile < count; ++tile) {
                const Place after = look(*item, tile + 1);
                copy(*item, 0, tile, place);
                copy(*item, 1, tile - 1, last);
                if (tile == near_end) near(turn);
                last = place;
                place = after;
            }
            const Item& ending = *item;
            item = &next(turn + 1);
            if (!item->last) {
                newest = look(*item, 0);
                copy(*item, 0, 0, newest);
            }
            copy(ending, 1, count - 1, last);
            __syncwarp();
            if (threadIdx.x % WARP == 0) barrier_arrive(barriers.done(turn));
        }
    }
};

}  // namespace atlas
