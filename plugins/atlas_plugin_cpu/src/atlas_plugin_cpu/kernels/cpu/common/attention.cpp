// Keys and values in pages, and causal attention over them in float32.
//
// Attention walks over keys in blocks of 64 absolute positions with a running maximum (Milakov and Gimelshein, 2018). What a
// query gets depends on its own position, its window and the keys alone: never on other queries, on how a prompt was cut
// into chunks, or on the number of tasks.

#include "atlas_step.h"
#include "pages.h"

namespace {

constexpr int kTiles = kKeyTiles;
constexpr int kQueries = 24;  // pairs of a query and a head that share one walk over the keys

struct Running {
    float maximum;
    f32x16 total;  // lane i sums positions i modulo 16
};

// Everything about up to kQueries queries that the walk keeps.
struct Walk {
    Query query[kQueries];
    Running running[kQueries];
    alignas(64) float out[kQueries][kMaxDim];
    alignas(64) float score[kQueries][kKeys];
};

// Scores of R queries for 64 keys: products of one dimension after the other.
template <int R>
void multiply_keys(Walk& walk, int query, const float* const* tiles, int dim, float scale) {
    f32x16 sums[R][kTiles] = {};
    for (int d = 0; d < dim; ++d) {
        f32x16 keys[kTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) keys[t] = load(tiles[t] + d * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const f32x16 value = splat(walk.query[query + r].q[d]);
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) sums[r][t] = fma(keys[t], value, sums[r][t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < kTiles; ++t) store(walk.score[query + r] + t * kLanes, sums[r][t] * scale);
}

// Adds values of positions [from, end) of a block, by weight, to C vectors of R queries; ``lanes`` of the last exist.
template <int R, int C>
void add_values(Walk& walk, int query, const float* const* values, int from, int end, int d, int lanes) {
    f32x16 sums[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = load(walk.out[query + r] + d + c * kLanes);
    for (int i = from; i < end; ++i) {
        f32x16 value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) value[c] = C == 1 ? take(values[i] + d, lanes) : load(values[i] + d + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const f32x16 weight = splat(walk.score[query + r][i]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[r][c] = fma(value[c], weight, sums[r][c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) store(walk.out[query + r] + d + c * kLanes, sums[r][c]);
}

// Turns the scores of one query into weights, and what it has so far to the new maximum.
ATLAS_INLINE void weigh(Walk& walk, int query, int start, int dim) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Query& of = walk.query[query];
    Running& run = walk.running[query];
    f32x16 score[kTiles], best = splat(-INFINITY);
    for (int t = 0; t < kTiles; ++t) {
        const i32x16 position = lanes + (start + t * kLanes);
        score[t] = load(walk.score[query] + t * kLanes);
        score[t] = (position >= of.first) & (position <= of.last) ? score[t] : splat(-INFINITY);
        best = larger(best, score[t]);
    }
    const float most = largest(best), maximum = most > run.maximum ? most : run.maximum;
    if (maximum != run.maximum) {
        const f32x16 fade = exponential(splat(run.maximum - maximum));
        for (int d = 0; d < dim; d += kLanes) store(walk.out[query] + d, load(walk.out[query] + d) * fade);
        run.total *= fade;
        run.maximum = maximum;
    }
    for (int t = 0; t < kTiles; ++t) {
        const f32x16 weight = score[t] == -INFINITY ? f32x16{} : exponential(score[t] - maximum);
        run.total += weight;
        store(walk.score[query] + t * kLanes, weight);
    }
}

template <int R>
void attend_block(Walk& walk, int query, const float* const* tiles, const float* const* values, int start, int from,
                  int end, int dim, float scale) {
    multiply_keys<R>(walk, query, tiles, dim, scale);
    for (int r = 0; r < R; ++r) weigh(walk, query + r, start, dim);
    int d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) add_values<R, 4>(walk, query, values, from, end, d, kLanes);
    for (; d < dim; d += kLanes) add_values<R, 1>(walk, query, values, from, end, d, smaller(dim - d, kLanes));
}

// Attention of ``count`` queries that share keys; walk.query says which.
void attend(Walk& walk, int count, const Pages& pages, float scale) {
    const int dim = pages.dim;
    alignas(64) float room[kTiles][kMaxDim * kLanes];
    int first = walk.query[0].first, last = walk.query[0].last;
    for (int i = 0; i < count; ++i) {
        first = smaller(first, walk.query[i].first), last = greater(last, walk.query[i].last);
        walk.running[i] = {-INFINITY, f32x16{}};
        for (int d = 0; d < dim; d += kLanes) store(walk.out[i] + d, f32x16{});
    }
    for (int start = first / kKeys * kKeys; start <= last; start += kKeys) {
        const int from = greater(first - start, 0), end = smaller(last - start + 1, kKeys);
        const float *tiles[kTiles], *values[kKeys];
        for (int t = from / kLanes; t * kLanes < end; ++t)
            tiles[t] = pages.tile(start + t * kLanes, greater(from - t * kLanes, 0),
                                  smaller(end - t * kLanes, kLanes) - 1, room[t]);
        // Tiles that nobody sees are stood for by one that somebody does: their scores are not used.
        for (int t = 0; t < kTiles; ++t)
            if (t < from / kLanes || t * kLanes >= end) tiles[t] = tiles[from / kLanes];
        for (int i = from; i < end; ++i) values[i] = pages.place(start + i) + pages.values;
        for (int i = 0; i < count;) {
            const int left = count - i;
            const auto run = left >= 4 ? attend_block<4> : left == 3 ? attend_block<3> : left == 2 ? attend_block<2>
                                                                                                : attend_block<1>;
            run(walk, i, tiles, values, start, from, end, dim, scale);
            i += smaller(left, 4);
        }
    }
    for (int i = 0; i < count; ++i) {
        const f32x16 total = splat(sum(walk.running[i].total));
        across(dim, [&](int d, int n) ATLAS_FLAT { put(walk.query[i].y + d, load(walk.out[i] + d) / total, n); });
    }
}

}  // namespace

void kv_append(const int32_t* counts, const float* k, const float* v, const int32_t* positions,
               const int32_t* token_row, const int32_t* row_slot, const int32_t* state, float* layer, int32_t kv_heads,
               int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t key_tile,
               int32_t layers, int task, int ntasks) {
    const size_t head = static_cast<size_t>(page_tokens) * head_dim, page = 2 * layers * kv_heads * head;
    const size_t bytes = static_cast<size_t>(head_dim) * sizeof(float);
    const Share mine = share(counts[ATLAS_TOKENS], task, ntasks);
    for (int t = mine.first; t < mine.last; ++t) {
        const int32_t* table = state + static_cast<size_t>(row_slot[token_row[t]]) * slot_stride + table_offset;
        const int place = positions[t] % page_tokens;
        float* to = layer + static_cast<size_t>(table[positions[t] / page_tokens]) * page;
        for (int h = 0; h < kv_heads; ++h) {
            const size_t from = (static_cast<size_t>(t) * kv_heads + h) * head_dim;
            float* key = to + h * head + static_cast<size_t>(place / key_tile) * key_tile * head_dim + place % key_tile;
            if (key_tile == 1) memcpy(key, k + from, bytes);
            else
                for (int d = 0; d < head_dim; ++d) key[static_cast<size_t>(d) * key_tile] = k[from + d];
            memcpy(to + (kv_heads + h) * head + static_cast<size_t>(place) * head_dim, v + from, bytes);
        }
    }
}

void paged_attention(const int32_t* counts, const float* q, const int32_t* cu_q, const int32_t* row_slot,
                     const int32_t* state, const float* layer, float* y, int32_t q_heads, int32_t kv_heads,
                     int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t key_tile,
                     int32_t layers, int32_t window, float scale, int task, int ntasks) {
    const AttentionCall call = {counts, q, cu_q, row_slot, state, layer, y, q_heads, kv_heads, head_dim, page_tokens,
                                slot_stride, table_offset, key_tile, layers, window, counts[ATLAS_TOKENS],
                                counts[ATLAS_SEQUENCES], ATLAS_POSITION};
    Walk walk;
    each_walk(call, kQueries, task, ntasks, [&](int i, const Query& query) ATLAS_FLAT { walk.query[i] = query; },
              [&](int count, const Pages& pages) ATLAS_FLAT { attend(walk, count, pages, scale); });
}
