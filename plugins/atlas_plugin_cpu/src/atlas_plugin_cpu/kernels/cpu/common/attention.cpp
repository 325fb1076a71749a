// Keys and values in pages, and causal attention over them.
//
// A page of a layer is [2, kv heads, page_tokens, head_dim] floats, keys first. Attention walks over keys in blocks of
// 64 absolute positions with a running maximum (Milakov and Gimelshein, 2018). What a query gets depends on its own
// position, its window and the keys alone: never on other queries, on how a prompt was cut into chunks, or on the
// number of tasks.

#include "atlas_step.h"
#include "simd.h"

namespace {

constexpr int kKeys = 64;  // positions in a block
constexpr int kHeads = 8;  // query heads that share one walk over the keys
constexpr int kMaxDim = 256;

ATLAS_INLINE int smaller(int a, int b) { return a < b ? a : b; }
ATLAS_INLINE int greater(int a, int b) { return a > b ? a : b; }

// One head's keys and values through a block table; ``values`` is the distance from a key to its value.
struct Pages {
    const float* base;
    const int32_t* table;
    int page_tokens, dim;
    size_t page, values;

    ATLAS_INLINE const float* key(int position) const {
        const int block = position / page_tokens, place = position - block * page_tokens;
        return base + static_cast<size_t>(table[block]) * page + static_cast<size_t>(place) * dim;
    }
};

struct Running {
    float maximum;
    f32x16 total;  // lane i sums positions i modulo 16
};

// Vectors of kChunks * 16 floats, or of any multiple of 8 when kChunks is 0.
template <int kChunks>
struct Width {
    int whole;
    bool half;
    explicit ATLAS_INLINE Width(int dim) : whole(kChunks ? kChunks : dim / kLanes), half(!kChunks && dim % kLanes) {}

    template <class Each>
    ATLAS_INLINE void each(Each f) const {
        if (kChunks) {
#pragma GCC unroll 16
            for (int c = 0; c < kChunks; ++c) f(c * kLanes, kLanes);
        } else {
            for (int c = 0; c < whole; ++c) f(c * kLanes, kLanes);
            if (half) f(whole * kLanes, kLanes / 2);
        }
    }
};

ATLAS_INLINE f32x16 take(const float* from, int lanes) {
    return lanes == kLanes ? load(from) : load_first(from, kLanes / 2);
}

// Attention of the query at position ``last`` in ``heads`` heads that share keys; q and y are [heads, dim].
template <int kChunks>
void attend(const float* q, const Pages& pages, int first, int last, int heads, float scale, float* y) {
    const Width<kChunks> width(pages.dim);
    alignas(64) float out[kHeads][kMaxDim];
    Running running[kHeads];
    for (int h = 0; h < heads; ++h) {
        running[h] = {-INFINITY, f32x16{}};
        for (int d = 0; d < pages.dim; d += kLanes) store(out[h] + d, f32x16{});
    }
    for (int start = first / kKeys * kKeys; start <= last; start += kKeys) {
        const int from = greater(first - start, 0), end = smaller(last - start + 1, kKeys);
        const float* keys[kKeys];
        for (int i = from; i < end; ++i) keys[i] = pages.key(start + i);
        for (int h = 0; h < heads; ++h) {
            const float* query = q + h * pages.dim;
            alignas(64) float score[kKeys];
            for (int i = 0; i < kKeys; ++i) score[i] = -INFINITY;
            for (int i = from; i < end; ++i) {
                f32x16 dot = {};
                width.each([&](int d, int n) ATLAS_FLAT { dot = fma(take(query + d, n), take(keys[i] + d, n), dot); });
                score[i] = sum(dot) * scale;
            }
            f32x16 best = load(score);
            for (int i = kLanes; i < kKeys; i += kLanes) best = larger(best, load(score + i));
            Running& run = running[h];
            const float maximum = largest(best) > run.maximum ? largest(best) : run.maximum;
            if (maximum != run.maximum) {
                const f32x16 fade = exponential(splat(run.maximum - maximum));
                width.each([&](int d, int n) ATLAS_FLAT { store(out[h] + d, load(out[h] + d) * fade); });
                run.total *= fade;
                run.maximum = maximum;
            }
            for (int i = 0; i < kKeys; i += kLanes) {
                const f32x16 s = load(score + i);
                const f32x16 p = s == -INFINITY ? f32x16{} : exponential(s - maximum);
                run.total += p;
                store(score + i, p);
            }
            if constexpr (kChunks > 0) {
                f32x16 sums[kChunks];
                width.each([&](int d, int n) ATLAS_FLAT { sums[d / kLanes] = load(out[h] + d); });
                for (int i = from; i < end; ++i) {
                    const f32x16 p = splat(score[i]);
                    const float* value = keys[i] + pages.values;
                    width.each([&](int d, int n)
                                   ATLAS_FLAT { sums[d / kLanes] = fma(load(value + d), p, sums[d / kLanes]); });
                }
                width.each([&](int d, int n) ATLAS_FLAT { store(out[h] + d, sums[d / kLanes]); });
            } else {
                for (int i = from; i < end; ++i) {
                    const f32x16 p = splat(score[i]);
                    const float* value = keys[i] + pages.values;
                    width.each([&](int d, int n)
                                   ATLAS_FLAT { store(out[h] + d, fma(take(value + d, n), p, load(out[h] + d))); });
                }
            }
        }
    }
    for (int h = 0; h < heads; ++h) {
        const f32x16 total = splat(sum(running[h].total));
        width.each([&](int d, int n) ATLAS_FLAT { store_first(y + h * pages.dim + d, load(out[h] + d) / total, n); });
    }
}

// The row whose tokens include ``token``.
ATLAS_INLINE int row_of(const int32_t* cu_q, int rows, int token) {
    int low = 0, high = rows - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (cu_q[middle] <= token) low = middle;
        else high = middle - 1;
    }
    return low;
}

}  // namespace

void kv_append(const int32_t* counts, const float* k, const float* v, const int32_t* positions,
               const int32_t* token_row, const int32_t* row_slot, const int32_t* state, float* layer, int32_t kv_heads,
               int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int task, int ntasks) {
    const size_t head = static_cast<size_t>(page_tokens) * head_dim, page = 2 * kv_heads * head;
    const size_t bytes = static_cast<size_t>(head_dim) * sizeof(float);
    const Share mine = share(counts[ATLAS_TOKENS], task, ntasks);
    for (int t = mine.first; t < mine.last; ++t) {
        const int32_t* table = state + static_cast<size_t>(row_slot[token_row[t]]) * slot_stride + table_offset;
        float* to = layer + static_cast<size_t>(table[positions[t] / page_tokens]) * page +
                    static_cast<size_t>(positions[t] % page_tokens) * head_dim;
        for (int h = 0; h < kv_heads; ++h) {
            const size_t from = (static_cast<size_t>(t) * kv_heads + h) * head_dim;
            memcpy(to + h * head, k + from, bytes);
            memcpy(to + (kv_heads + h) * head, v + from, bytes);
        }
    }
}

void paged_attention(const int32_t* counts, const float* q, const int32_t* cu_q, const int32_t* row_slot,
                     const int32_t* state, const float* layer, float* y, int32_t q_heads, int32_t kv_heads,
                     int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t window,
                     float scale, int task, int ntasks) {
    const int tokens = counts[ATLAS_TOKENS], rows = counts[ATLAS_SEQUENCES], group = q_heads / kv_heads;
    // Heads that share keys are worked on together, unless that would leave tasks without work.
    const int together = tokens * kv_heads >= 2 * ntasks ? smaller(group, kHeads) : 1;
    const int parts = (group + together - 1) / together;
    const size_t head = static_cast<size_t>(page_tokens) * head_dim;
    for (int64_t item = task; item < static_cast<int64_t>(tokens) * kv_heads * parts; item += ntasks) {
        const int token = static_cast<int>(item / (kv_heads * parts));
        const int rest = static_cast<int>(item % (kv_heads * parts));
        const int kv_head = rest / parts, begin = rest % parts * together, heads = smaller(together, group - begin);
        const int row = row_of(cu_q, rows, token);
        const int32_t* slot = state + static_cast<size_t>(row_slot[row]) * slot_stride;
        const int last = slot[ATLAS_POSITION] + token - cu_q[row];
        const int first = window > 0 ? greater(last - window + 1, 0) : 0;
        const Pages pages = {layer + kv_head * head, slot + table_offset, page_tokens, head_dim,
                             2 * kv_heads * head, kv_heads * head};
        const size_t at = (static_cast<size_t>(token) * q_heads + kv_head * group + begin) * head_dim;
        const auto run = head_dim == 64 ? attend<4> : head_dim == 128 ? attend<8> : attend<0>;
        run(q + at, pages, first, last, heads, scale, y + at);
    }
}
