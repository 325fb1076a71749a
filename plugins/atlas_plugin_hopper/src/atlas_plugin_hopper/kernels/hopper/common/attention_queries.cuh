// The queries of an item in shared memory, a row being one query of one head, and where its result comes to.
#pragma once
#include "attention_rings.cuh"

namespace atlas {

// Named barriers: one each for a warpgroup, and one for those that have a narrow item.
constexpr int QUERIES_ARE_THERE = 1, TURN = QUERIES_ARE_THERE + CONSUMERS, JOIN = 8, NEVER = 15;

// What is read through the result is not kept in registers before.
__device__ inline const Item& again(const Item& item) {
    const Item* same = &item;
    asm volatile("" : "+l"(same));
    return *same;
}

// Where a row's vector starts, in heads.
__device__ inline int64_t vector_of(const Item& item, int row, int q_heads) {
    const Range& rows = item.range;
    const int inside = rows.query_inside(row);
    const int64_t token = item.first_token + rows.first_query + inside;
    return token * q_heads + item.kv_head * rows.heads + row - inside * rows.heads;
}

// Asks for the rows of a warpgroup; true when it has any.
__device__ inline bool ask_for_queries(const Item& item, const uint16_t* q, int q_heads, uint32_t queries) {
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    if (item.last) return false;
    const bool narrow = item.range.narrow;
    const int first_row = narrow ? 0 : group * 64;
    if (!item.range.has(first_row)) return false;
    for (int e = thread; e < (narrow ? Range::NARROW : 64) * PIECES; e += WARPGROUP) {
        const int row = e / PIECES, piece = e % PIECES;
        const bool valid = item.range.has(first_row + row);
        copy_async(swizzled(queries + group * QUERY_BYTES + piece / 8 * QUERY_PANEL, row, piece % 8),
                   valid ? q + vector_of(item, first_row + row, q_heads) * HEAD_DIM + piece * 8 : q, valid);
    }
    commit_copies();
    return true;
}

// Where a row's vector comes to.
__device__ inline uint16_t* result_of(const Item& item, uint16_t* y, int row, int q_heads) {
    return y + vector_of(item, row, q_heads) * HEAD_DIM;
}

}  // namespace atlas
