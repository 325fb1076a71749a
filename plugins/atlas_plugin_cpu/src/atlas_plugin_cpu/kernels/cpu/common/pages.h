// Keys and values in pages, as attention reads them.
//
// A page of a layer is [2, kv heads, page_tokens, head_dim] floats, keys first; pages of one number, of all layers, lie side
// by side. Where a page holds whole tiles of 16 tokens (key_tile 16), the keys of a tile are turned, [head_dim, 16], so that
// one load brings one dimension of 16 keys; else they are turned on the way.
#pragma once

#include "rows.h"

constexpr int kKeys = 64;  // positions that a walk over keys takes at once, from a multiple of it on
constexpr int kKeyTiles = kKeys / kLanes;
constexpr int kMaxDim = 256;

ATLAS_INLINE int smaller(int a, int b) { return a < b ? a : b; }
ATLAS_INLINE int greater(int a, int b) { return a > b ? a : b; }

// One head's keys and values through a block table; ``values`` is the distance from keys to values.
struct Pages {
    const float* base;
    const int32_t* table;
    int page_tokens, dim, key_tile;
    size_t page, values;

    // Where the place of a position begins; the key itself lies there only where keys are not turned.
    ATLAS_INLINE const float* place(int position) const {
        const int block = position / page_tokens;
        return base + static_cast<size_t>(table[block]) * page +
               static_cast<size_t>(position - block * page_tokens) * dim;
    }

    // Keys ``first`` to ``last`` of the 16 from ``start`` on as [dim, 16]; ``room`` is used when they must be turned.
    const float* tile(int start, int first, int last, float* room) const {
        if (key_tile == kLanes) return place(start);
        for (int i = first; i <= last; ++i) {
            const float* key = place(start + i);
            for (int d = 0; d < dim; ++d) room[d * kLanes + i] = key[d];
        }
        return room;
    }
};

// One query in one head.
struct Query {
    const float* q;
    float* y;
    int first, last;  // positions that it sees
};

// What both attentions are asked, in the order of their kernels' parameters.
struct AttentionCall {
    const int32_t* counts;
    const float* q;
    const int32_t *cu_q, *row_slot, *state;
    const float* layer;
    float* y;
    int q_heads, kv_heads, head_dim, page_tokens, slot_stride, table_offset, key_tile, layers, window;
    int tokens, sequences, position;  // live counts, and the place of a sequence's position in its state
};

// Calls attend(count, pages) for this task's part; put(i, query) has been called before for the queries of it, at most
// ``most``, which share a head of keys.
template <class Put, class Attend>
ATLAS_INLINE void each_walk(const AttentionCall& call, int most, int task, int ntasks, Put put, Attend attend) {
    const int group = call.q_heads / call.kv_heads, dim = call.head_dim;
    // Heads that share keys are worked on together, unless that would leave tasks without work.
    const int together = 2 * call.tokens * call.kv_heads >= ntasks ? smaller(group, most) : 1;
    const int parts = (group + together - 1) / together, tile = greater(most / together, 1);
    const size_t head = static_cast<size_t>(call.page_tokens) * dim, page = 2 * call.layers * call.kv_heads * head;
    int64_t item = 0;
    for (int row = 0; row < call.sequences; ++row) {
        const int32_t* slot = call.state + static_cast<size_t>(call.row_slot[row]) * call.slot_stride;
        for (int begin = call.cu_q[row]; begin < call.cu_q[row + 1]; begin += tile) {
            const int count = smaller(tile, call.cu_q[row + 1] - begin);
            for (int part = 0; part < call.kv_heads * parts; ++part) {
                if (item++ % ntasks != task) continue;
                const int kv_head = part / parts, low = part % parts * together, heads = smaller(together, group - low);
                for (int i = 0; i < count * heads; ++i) {
                    const int token = begin + i / heads, last = slot[call.position] + token - call.cu_q[row];
                    const size_t at =
                        (static_cast<size_t>(token) * call.q_heads + kv_head * group + low + i % heads) * dim;
                    put(i, Query{call.q + at, call.y + at, call.window > 0 ? greater(last - call.window + 1, 0) : 0, last});
                }
                attend(count * heads, Pages{call.layer + kv_head * head, slot + call.table_offset, call.page_tokens, dim,
                                            call.key_tile, page, call.kv_heads * head});
            }
        }
    }
}
