// How a step's attention is divided among blocks.
//
// An item is a tile of queries with one key head. Items of rows with many keys lie on a line, each as long as its
// work is, and every block owns an equal share of it: shares may end within an item, whose keys are then divided. All
// others are drawn by whoever has nothing else to do. Shares are so long that the items to be drawn fill what the
// line leaves. The division follows from the lengths alone, so that sums are added in the same order every time.
#pragma once
#include "device.cuh"

namespace atlas {

__device__ inline int warp_total(int v) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

// Sums up to and with this lane.
__device__ inline int warp_scan(int v) {
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int lower = __shfl_up_sync(~0u, v, distance);
        if (static_cast<int>(threadIdx.x % WARP) >= distance) v += lower;
    }
    return v;
}

// One sequence of the step.
struct StepRow {
    const int32_t* pages;
    int first_token, tokens, start;  // of this step; tokens before it
    int line, units;                 // its place on the line and its length there, 0 when its items are drawn
    int drawn;                       // items to be drawn before its own
};

__device__ inline void look_up(StepRow& row, const int32_t* cu_q, const int32_t* slot, int table_offset) {
    row.pages = slot + table_offset;
    row.first_token = cu_q[0];
    row.tokens = cu_q[1] - row.first_token;
    row.start = slot[ATLAS_POSITION];
}

// The queries of an item and their keys.
template <int TILE_ROWS, int TILE_KEYS>
struct ItemRange {
    static constexpr int NARROW = 16;  // rows that a warp has
    int start;                 // tokens before the first query of this step
    int first_query, queries;  // of this item: the first within the step, and how many
    int oldest_key, length;
    int heads, per_head;    // that share the key head: row r is query r / heads; 2^16 / heads, rounded up
    int newest_key, count;  // where the newest of the block's tiles of keys begins, and how many tiles it has
    bool narrow;            // it has no more than NARROW rows
    // r / heads, which is the same for all rows and heads up to 256.
    __device__ int query_inside(int row) const { return row * per_head >> 16; }
    __device__ int query(int row) const { return first_query + query_inside(row); }
    __device__ bool has(int row) const { return query_inside(row) < queries; }
    // Tiles count from the newest.
    __device__ int key(int tile) const { return newest_key - tile * TILE_KEYS; }
};

// What a block does next: some tiles of keys for one tile of queries. Those that share one out are `parts` blocks
// from `first_block` on.
template <int TILE_ROWS, int TILE_KEYS>
struct AttentionItem {
    ItemRange<TILE_ROWS, TILE_KEYS> range;
    const int32_t* pages;
    int kv_head, first_token;
    int first_block, part, parts;
    int before;  // tiles of keys that went through the rings before this item's
    bool last;   // there is none: the block ends
};

// What is divided how.
template <int TILE_ROWS, int TILE_KEYS>
struct Division {
    using Range = ItemRange<TILE_ROWS, TILE_KEYS>;
    using Item = AttentionItem<TILE_ROWS, TILE_KEYS>;
    // Work is counted in halves of what a full tile of queries takes with a tile of keys. OVERHEAD begins and ends an
    // item. Shares that would end within SNAP of an item's end do so at it. Below LEAST a share is not worth a block
    // of its own. A row is on the line from LONG tiles of keys on, unless there are CROWD such items a block, which
    // are shared well enough as they are.
    static constexpr int OVERHEAD = 6, NARROW_OVERHEAD = 4, SNAP = 5, LEAST = 12, LONG = 1536 / TILE_KEYS, CROWD = 3;
    static constexpr int SEVERAL = -1;  // tiles, whose work is to be added up
    int kv_heads, heads, queries, window, blocks;  // heads: that share a key head, queries: of a tile
    uint32_t per_tile;  // 2^32 / queries, rounded up
    int rows, share, on_line, drawn;  // share: of the line, which is on_line long; drawn: items to be drawn

    __device__ int tiles(int tokens) const { return __umulhi(tokens + queries - 1, per_tile); }
    __device__ int length(int start, int tokens, int tile) const { return start + min((tile + 1) * queries, tokens); }
    // Pages that no query looks at any more may have been given away.
    __device__ int oldest_key(int start, int tile) const {
        return window > 0 ? max(0, start + tile * queries - window + 1) : 0;
    }
    __device__ int key_tiles(int start, int tokens, int tile) const {
        return (length(start, tokens, tile) + TILE_KEYS - 1) / TILE_KEYS - oldest_key(start, tile) / TILE_KEYS;
    }
    __device__ int units(int start, int tokens, int tile) const {
        const int all = key_tiles(start, tokens, tile);
        return tokens * heads <= Range::NARROW ? NARROW_OVERHEAD + all * 3 / 2 : OVERHEAD + 2 * all;
    }
    __device__ bool is_long(const StepRow& r) const {
        return r.tokens > 0 && key_tiles(r.start, r.tokens, tiles(r.tokens) - 1) >= LONG;
    }

    // By one warp, once the table has its rows. From the last to the first: a step's prompts follow its single
    // queries.
    __device__ void measure(StepRow* table) {
        const int lane = threadIdx.x % WARP;
        int crowd = 0;
        for (int row = rows - 1 - lane; row >= 0; row -= WARP) {
            if (is_long(table[row])) crowd += tiles(table[row].tokens) * kv_heads;
        }
        const bool lined = warp_total(crowd) < CROWD * blocks;
        int work = 0, line = 0, items = 0;
        for (int first = rows - 1; first >= 0; first -= WARP) {
            const int row = first - lane;
            int own = 0, others = 0;
            if (row >= 0) {
                const StepRow& r = table[row];
                const int n = tiles(r.tokens);
                if (lined && is_long(r)) {
                    own = n == 1 ? units(r.start, r.tokens, 0) * kv_heads : SEVERAL;
                } else if (n > 0) {
                    others = n * kv_heads;
                    work += others * units(r.start, r.tokens, n / 2);
                }
            }
            for (unsigned left = __ballot_sync(~0u, own == SEVERAL); left; left &= left - 1) {
                const int whose = __ffs(left) - 1;
                const StepRow& r = table[first - whose];
                int sum = 0;
                for (int tile = lane; tile < tiles(r.tokens); tile += WARP) sum += units(r.start, r.tokens, tile);
                sum = warp_total(sum) * kv_heads;
                if (lane == whose) own = sum;
            }
            const int line_end = line + warp_scan(own), items_end = items + warp_scan(others);
            if (row >= 0) {
                StepRow& r = table[row];
                r.units = own;
                r.line = line_end - own;
                r.drawn = items_end - others;
            }
            line = __shfl_sync(~0u, line_end, WARP - 1);
            items = __shfl_sync(~0u, items_end, WARP - 1);
        }
        // A part that begins within an item costs OVERHEAD too, once a share, which those do not have who only draw.
        // Blocks whose shares have ended draw as well, so that those without a share need not do all of that work.
        const int all = line + warp_total(work) * 3 / 4, even = max(LEAST, all / blocks);
        share = max(even - OVERHEAD + OVERHEAD * (line / even) / blocks, max(LEAST, (line + blocks - 1) / blocks));
        on_line = line;
        drawn = items;
    }

    // The row that has place `at` of the line, or of the items to be drawn. By one warp; there is such a row.
    __device__ int row_at(const StepRow* table, int at, bool of_drawn) const {
        for (int first = rows - 1;; first -= WARP) {
            const int row = first - static_cast<int>(threadIdx.x % WARP);
            bool mine = false;
            if (row >= 0) {
                const StepRow& r = table[row];
                const int size = !of_drawn ? r.units : r.units ? 0 : tiles(r.tokens) * kv_heads;
                const int inside = at - (of_drawn ? r.drawn : r.line);
                mine = inside >= 0 && inside < size;
            }
            const unsigned found = __ballot_sync(~0u, mine);
            if (found) return first - (__ffs(found) - 1);
        }
    }

    // The blocks that have a part of the item at places [begin, end) of the line.
    __device__ int first_block(int begin, int end) const { return min(begin + SNAP, end - 1) / share; }
    __device__ int last_block(int begin, int end) const { return max(first_block(begin, end), (end - SNAP) / share); }
    // Of its tiles of keys, the first that belongs to `block`, which is not the first with a part.
    __device__ int first_key_tile(int block, int begin, int end, int all) const {
        const int inside = (block * share - begin - OVERHEAD) * all / (end - begin - OVERHEAD);
        return min(max(inside, 1), all - 1);
    }
};

// Where a block's share of the line has come to.
struct Cursor {
    int row, tile, head, begin;  // the item's place on the line; row is NOWHERE behind the share
    static constexpr int NOWHERE = -1;
};

// Deals a block its items, all of it by one warp. State is in shared memory, since that warp has few registers.
template <int TILE_ROWS, int TILE_KEYS>
struct Dealer {
    using Item = AttentionItem<TILE_ROWS, TILE_KEYS>;
    static constexpr int NONE = -1;
    const Division<TILE_ROWS, TILE_KEYS>& step;
    const StepRow* table;
    Cursor& cursor;
    int& number;     // of the item that was drawn for the block, or NONE
    int32_t* drawn;  // items that were drawn by all blocks
    int block;

    __device__ void begin() const {
        const int at = block * step.share;
        Cursor c{Cursor::NOWHERE, 0, 0, at};
        if (at < step.on_line) {
            c.row = step.row_at(table, at, false);
            const StepRow& r = table[c.row];
            // The last tile of a sequence comes first; heads vary fastest. Lanes look at a tile each.
            int inside = at - r.line;
            for (c.tile = step.tiles(r.tokens) - 1;; c.tile -= WARP) {
                const int tile = c.tile - static_cast<int>(threadIdx.x % WARP);
                const int own = tile < 0 ? 0 : step.units(r.start, r.tokens, tile);
                const int end = warp_scan(own * step.kv_heads);
                const unsigned behind = __ballot_sync(~0u, inside < end);
                const int found = behind ? __ffs(behind) - 1 : WARP - 1;
                const int units = __shfl_sync(~0u, own, found), tile_end = __shfl_sync(~0u, end, found);
                if (behind) {
                    inside -= tile_end - units * step.kv_heads;
                    c.tile -= found;
                    c.head = inside / units;
                    c.begin = at - inside % units;
                    break;
                }
                inside -= tile_end;
            }
        }
        if (threadIdx.x % WARP == 0) {
            cursor = c;
            number = NONE;
        }
        __syncwarp();
    }
    // By one thread, behind the predecessor, which may have the same counter.
    __device__ void draw() const { number = atomicAdd(drawn, 1); }
    // The next item.
    __device__ void deal(Item& item) const {
        if (deal_of_share(item)) return;
        wait_for_predecessor();
        if (threadIdx.x % WARP == 0 && number == NONE) draw();
        __syncwarp();
        const int mine = number;
        __syncwarp();
        if (threadIdx.x % WARP == 0) number = NONE;
        if (mine >= step.drawn) {
            // Each block draws once too often, and the last of these draws is the last of all: the next launch begins
            // at zero.
            if (threadIdx.x % WARP == 0) {
                if (mine == step.drawn + step.blocks - 1) *drawn = 0;
                item.last = true;
            }
            return;
        }
        const int row = step.row_at(table, mine, true), inside = mine - table[row].drawn;
        if (threadIdx.x % WARP == 0) {
            describe(item, row, step.tiles(table[row].tokens) - 1 - inside / step.kv_heads, inside % step.kv_heads);
        }
    }

   private:
    __device__ void describe(Item& item, int row, int tile, int kv_head) const {
        const StepRow& r = table[row];
        auto& range = item.range;
        range.start = r.start;
        range.first_query = tile * step.queries;
        range.queries = min(step.queries, r.tokens - range.first_query);
        range.oldest_key = step.oldest_key(r.start, tile);
        range.length = step.length(r.start, r.tokens, tile);
        range.heads = step.heads;
        range.per_head = (65536 + step.heads - 1) / step.heads;
        range.narrow = range.queries * step.heads <= range.NARROW;
        range.newest_key = (range.length - 1) / TILE_KEYS * TILE_KEYS;
        range.count = step.key_tiles(r.start, r.tokens, tile);
        item.pages = r.pages;
        item.kv_head = kv_head;
        item.first_token = r.first_token;
        item.first_block = block;
        item.part = 0;
        item.parts = 1;
        item.last = false;
    }
    // False when the share is done.
    __device__ bool deal_of_share(Item& item) const {
        while (cursor.row != Cursor::NOWHERE) {
            Cursor c = cursor;
            const StepRow& r = table[c.row];
            const int row = c.row, tile = c.tile, head = c.head, begin = c.begin;
            const int end = begin + step.units(r.start, r.tokens, tile);
            const int first = step.first_block(begin, end), last = step.last_block(begin, end);
            if (++c.head == step.kv_heads) {
                c.head = 0;
                --c.tile;
            }
            c.begin = end;
            if (first > block || end >= step.on_line) {
                c.row = Cursor::NOWHERE;
            } else if (c.tile < 0) {
                c.row = step.row_at(table, end, false);
                c.tile = step.tiles(table[c.row].tokens) - 1;
            }
            __syncwarp();
            if (threadIdx.x % WARP == 0) cursor = c;
            __syncwarp();
            if (first > block || last < block) continue;
            if (threadIdx.x % WARP == 0) {
                describe(item, row, tile, head);
                const int all = item.range.count;
                const int from = block > first ? step.first_key_tile(block, begin, end, all) : 0;
                const int to = block < last ? step.first_key_tile(block + 1, begin, end, all) : all;
                item.range.newest_key -= from * TILE_KEYS;
                item.range.count = to - from;
                item.first_block = first;
                item.part = block - first;
                item.parts = last - first + 1;
            }
            return true;
        }
        return false;
    }
};

}  // namespace atlas
