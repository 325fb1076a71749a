// Causal attention over keys and values in pages, with all factors rounded to bfloat16 and sums in float32.
//
// The walk is that of attention.cpp, and what a query gets depends on as little. The order of sums is that of the tile unit,
// whether it is there or not. Dimensions are taken by 32: products of the first 16 are added by fused multiply-adds from
// zero, one after the other, and so are those of the other 16; then both are added, and then to the score. Keys are taken by
// 32 in the same way, and what they give is added to the output. Factors below 2^-40 are taken for zero: then no sum of
// products is too small to be normal, and it does not matter that the tile unit knows no such numbers.

#include "atlas_step.h"
#include "bf16_tiles.h"
#include "pages.h"

namespace {

constexpr int kHalf = 16, kChunk = 2 * kHalf;  // terms of one chain, and of both
constexpr int kChunks = kKeys / kChunk;
constexpr int kQueries = 96;      // pairs of a query and a head that share one walk over the keys
constexpr int kAtOnce = 4;        // of them, by vectors
constexpr int kQueriesForTiles = 6;  // below, vectors are faster than a tile that is not full
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

// The nearest bfloat16 as a float, halves away from zero; zero for what is below 2^-40.
ATLAS_INLINE f32x16 brief(f32x16 v) {
    const u32x16 bits = reinterpret_cast<u32x16>(v), kept = (bits + 0x8000u) & 0xFFFF0000u;
    const u32x16 most = reinterpret_cast<u32x16>((bits & 0x7FFFFFFFu) >= 0x2B800000u);
    return reinterpret_cast<f32x16>(kept & most);
}

// Two vectors of such floats as pairs, the first in the lower halves.
ATLAS_INLINE u32x16 pairs(f32x16 first, f32x16 second) {
    return reinterpret_cast<u32x16>(first) >> 16 | reinterpret_cast<u32x16>(second);
}

// 2 to the x as bfloat16, for x from -40 to 0; zero below, and for what is no number. Five terms of the series are right
// within 3e-6, a thousandth of what rounding leaves.
ATLAS_INLINE f32x16 weight_of(f32x16 x) {
    // Adding 1.5 * 2^23 rounds to the nearest whole number, and leaves it in the lowest bits.
    const f32x16 rounder = splat(12582912.0f), shifted = x + rounder, r = x - (shifted - rounder);
    f32x16 p = fma(splat(1.3333558e-3f), r, splat(9.6181291e-3f));
    p = fma(p, r, splat(5.5504109e-2f));
    p = fma(p, r, splat(2.4022651e-1f));
    p = fma(p, r, splat(6.9314718e-1f));
    p = fma(p, r, splat(1.0f));
    const u32x16 bits = reinterpret_cast<u32x16>(p) + (reinterpret_cast<u32x16>(shifted) << 23);
    return reinterpret_cast<f32x16>((bits + 0x8000u) & 0xFFFF0000u & reinterpret_cast<u32x16>(x >= -40.0f));
}

ATLAS_INLINE int padded(int dim) { return (dim + kChunk - 1) / kChunk * kChunk; }

struct Running {
    float maximum;
    f32x16 total;  // lane i sums weights of positions i modulo 16
};

// Everything about up to kQueries queries that the walk keeps. Rows of q and out are ``padded`` dimensions long.
struct Walk {
    Query query[kQueries];
    Running running[kQueries];
    alignas(64) float out[kQueries * kMaxDim];
    alignas(64) uint8_t q[kQueries * kMaxDim * sizeof(float)];  // floats, or pairs for tiles
    alignas(64) uint8_t keys[kKeys * kMaxDim * sizeof(float)], values[kKeys * kMaxDim * sizeof(float)];
    alignas(64) float score[kHalf][kKeys];
    alignas(64) u32x16 weights[kHalf][kChunks];  // pairs, for tiles
};

// A block of keys: where they and their values are. Tiles of keys that nobody sees are stood for by one that somebody does:
// their scores are not used. Values that nobody sees are null.
struct Block {
    int start, from, end;  // positions of it that somebody sees are start + [from, end)
    const float *keys[kKeyTiles], *values[kKeys];
};

// The weights of one row of scores, handed to put(tile, weight); what the query has so far is turned to the new maximum.
template <class Put>
ATLAS_INLINE void weigh(Walk& walk, int query, const float* scores, int start, int width, Put put) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Query& of = walk.query[query];
    Running& run = walk.running[query];
    f32x16 score[kKeyTiles];
    for (int t = 0; t < kKeyTiles; ++t) score[t] = load(scores + t * kLanes);
    if (of.first > start || of.last < start + kKeys - 1) {
        for (int t = 0; t < kKeyTiles; ++t) {
            const i32x16 position = lanes + (start + t * kLanes);
            score[t] = ((position >= of.first) & (position <= of.last)) ? score[t] : splat(-INFINITY);
        }
    }
    const float most = largest(larger(larger(score[0], score[1]), larger(score[2], score[3])));
    const float maximum = most > run.maximum ? most : run.maximum;
    if (maximum != run.maximum) {
        const f32x16 fade = exponential(splat((run.maximum - maximum) * kLn2));
        float* out = walk.out + query * width;
        for (int d = 0; d < width; d += kLanes) store(out + d, load(out + d) * fade);
        run.total *= fade;
        run.maximum = maximum;
    }
    for (int t = 0; t < kKeyTiles; ++t) {
        const f32x16 weight = weight_of(score[t] - maximum);
        run.total += weight;
        put(t, weight);
    }
}

// By vectors: four queries at once, over keys [dimension, 64] and values [64, dimension].

void put_queries(Walk& walk, int count, int dim, float scale) {
    float* to = reinterpret_cast<float*>(walk.q);
    for (int i = 0; i < count; ++i, to += padded(dim))
        across(dim, [&](int d, int n) ATLAS_FLAT { store(to + d, brief(take(walk.query[i].q + d, n) * scale)); });
}

void put_block(Walk& walk, const Block& block, int dim, int width) {
    float *keys = reinterpret_cast<float*>(walk.keys), *values = reinterpret_cast<float*>(walk.values);
    for (int t = 0; t < kKeyTiles; ++t)
        for (int d = 0; d < dim; ++d) store(keys + d * kKeys + t * kLanes, brief(load(block.keys[t] + d * kLanes)));
    for (int i = block.from; i < block.end; ++i)
        across(dim, [&](int d, int n) ATLAS_FLAT { store(values + i * width + d, brief(take(block.values[i] + d, n))); });
}

// Products of R queries with 64 keys, dimensions [d, end) one after the other.
template <int R>
ATLAS_INLINE void multiply_keys(const float* q, const float* keys, int stride, int d, int end, f32x16 (&sums)[R][kKeyTiles]) {
    for (; d < end; ++d) {
        f32x16 key[kKeyTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kKeyTiles; ++t) key[t] = load(keys + d * kKeys + t * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const f32x16 value = splat(q[r * stride + d]);
#pragma GCC unroll 4
            for (int t = 0; t < kKeyTiles; ++t) sums[r][t] = fma(key[t], value, sums[r][t]);
        }
    }
}

// Products of R rows of weights with values of keys [i, end), in C vectors.
template <int R, int C>
ATLAS_INLINE void multiply_values(const Walk& walk, const float* values, int width, int i, int end, f32x16 (&sums)[R][C]) {
    for (; i < end; ++i) {
        f32x16 value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) value[c] = load(values + i * width + c * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const f32x16 weight = splat(walk.score[r][i]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[r][c] = fma(value[c], weight, sums[r][c]);
        }
    }
}

template <int R>
void score_rows(Walk& walk, int query, int dim) {
    const int stride = padded(dim);
    const float *q = reinterpret_cast<const float*>(walk.q) + query * stride, *keys = reinterpret_cast<const float*>(walk.keys);
    for (int chunk = 0; chunk < dim; chunk += kChunk) {
        f32x16 first[R][kKeyTiles] = {}, second[R][kKeyTiles] = {};
        multiply_keys<R>(q, keys, stride, chunk, smaller(chunk + kHalf, dim), first);
        multiply_keys<R>(q, keys, stride, chunk + kHalf, smaller(chunk + kChunk, dim), second);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < kKeyTiles; ++t) {
                const f32x16 both = first[r][t] + second[r][t];
                store(walk.score[r] + t * kLanes, chunk == 0 ? both : load(walk.score[r] + t * kLanes) + both);
            }
    }
}

template <int R, int C>
void add_values(Walk& walk, int query, const Block& block, int width, int d) {
    const float* values = reinterpret_cast<const float*>(walk.values) + d;
    for (int chunk = 0; chunk < kKeys; chunk += kChunk) {
        f32x16 first[R][C] = {}, second[R][C] = {};
        multiply_values<R, C>(walk, values, width, greater(chunk, block.from), smaller(chunk + kHalf, block.end), first);
        multiply_values<R, C>(walk, values, width, greater(chunk + kHalf, block.from), smaller(chunk + kChunk, block.end),
                              second);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                float* out = walk.out + (query + r) * width + d + c * kLanes;
                store(out, load(out) + (first[r][c] + second[r][c]));
            }
    }
}

template <int R>
void attend_rows(Walk& walk, int query, const Block& block, int dim, int width) {
    score_rows<R>(walk, query, dim);
    for (int r = 0; r < R; ++r)
        weigh(walk, query + r, walk.score[r], block.start, width,
              [&](int t, f32x16 weight) ATLAS_FLAT { store(walk.score[r] + t * kLanes, weight); });
    int d = 0;
    for (; d + 4 * kLanes <= width; d += 4 * kLanes) add_values<R, 4>(walk, query, block, width, d);
    for (; d < width; d += kLanes) add_values<R, 1>(walk, query, block, width, d);
}

void attend_by_vectors(Walk& walk, int count, const Block& block, int dim, int width) {
    put_block(walk, block, dim, width);
    for (int i = 0; i < count; i += kAtOnce) {
        const int left = count - i;
        const auto run = left >= 4 ? attend_rows<4> : left == 3 ? attend_rows<3> : left == 2 ? attend_rows<2> : attend_rows<1>;
        run(walk, i, block, dim, width);
    }
}

#if defined(ATLAS_BF16_TILES)

// By tiles: 16 queries at once. Keys are [tile of 16, chunk of dimensions] tiles, values [chunk of keys, 16 dimensions] ones.

constexpr int kTileBytes = 1024, kLine = 64;

// brief() of up to 16 floats; zeros where there are none.
ATLAS_INLINE f32x16 brief_of(const float* from, int lanes) {
    return from == nullptr || lanes <= 0 ? f32x16{} : brief(take(from, smaller(lanes, kLanes)));
}

void put_query_pairs(Walk& walk, int count, int dim, float scale) {
    uint8_t* to = walk.q;
    for (int i = 0; i < count; ++i)
        for (int d = 0; d < dim; d += kChunk, to += kLine) {
            f32x16 half[2] = {};
            for (int h = 0; h < 2; ++h) {
                const int at = d + h * kHalf, lanes = smaller(dim - at, kHalf);
                if (lanes > 0) half[h] = brief(take(walk.query[i].q + at, lanes) * scale);
            }
            const u32x16 both = pairs(half[0], half[1]);
            memcpy(to, &both, sizeof both);
        }
}

void put_block_pairs(Walk& walk, const Block& block, int dim, int width) {
    uint8_t *keys = walk.keys, *values = walk.values;
    for (int t = 0; t < kKeyTiles; ++t)
        for (int chunk = 0; chunk < dim; chunk += kChunk)
            for (int d = chunk; d < chunk + kHalf; ++d, keys += kLine) {
                const float* at = block.keys[t] + d * kLanes;
                const u32x16 both = pairs(brief_of(d < dim ? at : nullptr, kLanes),
                                          brief_of(d + kHalf < dim ? at + kHalf * kLanes : nullptr, kLanes));
                memcpy(keys, &both, sizeof both);
            }
    for (int chunk = 0; chunk < kKeys; chunk += kChunk)
        for (int d = 0; d < width; d += kLanes)
            for (int i = chunk; i < chunk + kHalf; ++i, values += kLine) {
                const float *first = block.values[i], *second = block.values[i + kHalf];
                const u32x16 both = pairs(brief_of(first == nullptr ? first : first + d, dim - d),
                                          brief_of(second == nullptr ? second : second + d, dim - d));
                memcpy(values, &both, sizeof both);
            }
}

// Products of 16 queries with 64 keys, into walk.score.
ATLAS_INLINE void score_tile(Walk& walk, int query, int dim) {
    const int chunks = padded(dim) / kChunk, stride = chunks * kLine;
    const uint8_t *q = walk.q + query * stride, *keys = walk.keys;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int chunk = 0; chunk < chunks; ++chunk, keys += kTileBytes) {
        tile_load<4>(q + chunk * kLine, stride);
        tile_load<6>(keys, kLine);
        tile_multiply_bf16<0, 4, 6>();
        tile_load<7>(keys + chunks * kTileBytes, kLine);
        tile_multiply_bf16<1, 4, 7>();
        tile_load<6>(keys + 2 * chunks * kTileBytes, kLine);
        tile_multiply_bf16<2, 4, 6>();
        tile_load<7>(keys + 3 * chunks * kTileBytes, kLine);
        tile_multiply_bf16<3, 4, 7>();
    }
    constexpr int kStride = kKeys * sizeof(float);
    tile_store<0>(walk.score[0], kStride), tile_store<1>(walk.score[0] + kLanes, kStride);
    tile_store<2>(walk.score[0] + 2 * kLanes, kStride), tile_store<3>(walk.score[0] + 3 * kLanes, kStride);
}

// Adds to 16 dimensions of 16 outputs, in a tile of their own.
template <int kSums>
ATLAS_INLINE void add_tile(float* out, int stride, const uint8_t* values, size_t next) {
    tile_load<kSums>(out, stride);
    tile_load<6>(values, kLine);
    tile_multiply_bf16<kSums, 4, 6>();
    tile_load<7>(values + next, kLine);
    tile_multiply_bf16<kSums, 5, 7>();
    tile_store<kSums>(out, stride);
}

void attend_by_tiles(Walk& walk, int count, const Block& block, int dim, int width) {
    put_block_pairs(walk, block, dim, width);
    const int stride = width * static_cast<int>(sizeof(float)), groups = width / kLanes;
    const size_t next = static_cast<size_t>(groups) * kTileBytes;
    for (int i = 0; i < count; i += kTileRows) {
        const int rows = smaller(kTileRows, count - i);
        // Later queries see later keys.
        if (walk.query[i + rows - 1].last < block.start || walk.query[i].first >= block.start + kKeys) continue;
        score_tile(walk, i, dim);
        for (int r = 0; r < rows; ++r) {
            f32x16 weights[kKeyTiles];
            weigh(walk, i + r, walk.score[r], block.start, width,
                  [&](int t, f32x16 weight) ATLAS_FLAT { weights[t] = weight; });
            walk.weights[r][0] = pairs(weights[0], weights[1]);
            walk.weights[r][1] = pairs(weights[2], weights[3]);
        }
        tile_load<4>(walk.weights[0], kChunks * kLine), tile_load<5>(walk.weights[0] + 1, kChunks * kLine);
        float* out = walk.out + i * width;
        const uint8_t* values = walk.values;
        for (int g = 0; g < groups; g += 4, out += 4 * kLanes, values += 4 * kTileBytes) {
            add_tile<0>(out, stride, values, next);
            if (g + 1 < groups) add_tile<1>(out + kLanes, stride, values + kTileBytes, next);
            if (g + 2 < groups) add_tile<2>(out + 2 * kLanes, stride, values + 2 * kTileBytes, next);
            if (g + 3 < groups) add_tile<3>(out + 3 * kLanes, stride, values + 3 * kTileBytes, next);
        }
    }
}

#endif

// Attention of ``count`` queries that share keys; walk.query says which, in the order of their positions.
void attend(Walk& walk, int count, const Pages& pages, float scale) {
    const int dim = pages.dim, width = (dim + kLanes - 1) / kLanes * kLanes;
    alignas(64) float room[kKeyTiles][kMaxDim * kLanes];
    auto put_q = put_queries;
    auto run = attend_by_vectors;
#if defined(ATLAS_BF16_TILES)
    const bool tiles = kHaveTiles && count >= kQueriesForTiles;
    if (tiles) put_q = put_query_pairs, run = attend_by_tiles, tile_configure_whole();
#endif
    put_q(walk, count, dim, scale * kLog2E);
    const int first = walk.query[0].first, last = walk.query[count - 1].last;
    for (int i = 0; i < count; ++i) walk.running[i] = {-INFINITY, f32x16{}};
    memset(walk.out, 0, sizeof(float) * static_cast<size_t>(count) * width);
    for (int start = first / kKeys * kKeys; start <= last; start += kKeys) {
        Block block = {start, greater(first - start, 0), smaller(last - start + 1, kKeys), {}, {}};
        const int from = block.from / kLanes * kLanes;
        for (int t = from; t < block.end; t += kLanes)
            block.keys[t / kLanes] = pages.tile(start + t, greater(block.from - t, 0), smaller(block.end - t, kLanes) - 1,
                                                room[t / kLanes]);
        for (int t = 0; t < kKeyTiles; ++t)
            if (block.keys[t] == nullptr) block.keys[t] = block.keys[from / kLanes];
        for (int i = block.from; i < block.end; ++i) block.values[i] = pages.place(start + i) + pages.values;
        run(walk, count, block, dim, width);
    }
#if defined(ATLAS_BF16_TILES)
    if (tiles) tile_release();
#endif
    for (int i = 0; i < count; ++i) {
        const f32x16 total = splat(sum(walk.running[i].total));
        across(dim, [&](int d, int n) ATLAS_FLAT { put(walk.query[i].y + d, load(walk.out + i * width + d) / total, n); });
    }
}

}  // namespace

void fast_paged_attention(const int32_t* counts, const float* q, const int32_t* cu_q, const int32_t* row_slot,
                          const int32_t* state, const float* layer, float* y, int32_t q_heads, int32_t kv_heads,
                          int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset,
                          int32_t key_tile, int32_t layers, int32_t window, float scale, int task, int ntasks) {
    const AttentionCall call = {counts, q, cu_q, row_slot, state, layer, y, q_heads, kv_heads, head_dim, page_tokens,
                                slot_stride, table_offset, key_tile, layers, window, counts[ATLAS_TOKENS],
                                counts[ATLAS_SEQUENCES], ATLAS_POSITION};
    Walk walk;
    each_walk(call, kQueries, task, ntasks, [&](int i, const Query& query) ATLAS_FLAT { walk.query[i] = query; },
              [&](int count, const Pages& pages) ATLAS_FLAT { attend(walk, count, pages, scale); });
}
