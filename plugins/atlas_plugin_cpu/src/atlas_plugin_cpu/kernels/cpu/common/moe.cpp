// Mixtures of experts: the choice of experts, and the products of each token with those it chose.
//
// Tokens are sorted by expert once; then tasks own outputs, for all experts and tokens, so that no two tasks write to one
// place. An output's bits depend on its token's row, its experts and their weights alone: columns are added as in
// linear.cpp, and experts in ascending order, whatever tokens are beside it.

#include "atlas_step.h"
#include "rows.h"
#include "weights.h"

namespace {

constexpr int kMaxExperts = 1024;
constexpr int kTile = 8;  // rows that share one decoded column

ATLAS_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// The place of the largest of n values that comes after (value, place) in descending order, of equal ones the first.
ATLAS_INLINE int next_best(const float* values, int n, float value, int place) {
    int best = -1;
    for (int i = 0; i < n; ++i) {
        const bool after = values[i] < value || (values[i] == value && i > place);
        if (after && (best < 0 || values[i] > values[best])) best = i;
    }
    return best;
}

// Writes the places of the count largest values, largest first.
ATLAS_INLINE void choose(const float* values, int n, int count, int32_t* places) {
    float value = INFINITY;
    int place = -1;
    for (int j = 0; j < count; ++j) {
        place = next_best(values, n, value, place);
        value = values[place];
        places[j] = place;
    }
}

// One group of 16 outputs for a tile of rows.
template <class Format, int T>
ATLAS_INLINE void products(const float* const* x, const uint8_t* group, int columns, f32x16* totals) {
    for (int t = 0; t < T; ++t) totals[t] = f32x16{};
    for (int k0 = 0; k0 < columns; k0 += kBlock) {
        f32x16 part[T] = {};
        const uint8_t* chunk = group + static_cast<size_t>(k0 / Format::kColumns) * Format::kBytes;
        Format::each(chunk, k0 % Format::kColumns / kBlock, smaller(kBlock, columns - k0),
                     [&](int k, f32x16 w) ATLAS_FLAT {
#pragma GCC unroll 8
                         for (int t = 0; t < T; ++t) part[t] = fma(w, splat(x[t][k0 + k]), part[t]);
                     });
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) totals[t] += part[t];
    }
}

// As many rows as one call can take; returns how many.
template <class Format>
int some_products(int rows, const float* const* x, const uint8_t* group, int columns, f32x16* totals) {
    if (rows >= kTile) return products<Format, kTile>(x, group, columns, totals), kTile;
    if (rows >= 4) return products<Format, 4>(x, group, columns, totals), 4;
    if (rows >= 2) return products<Format, 2>(x, group, columns, totals), 2;
    return products<Format, 1>(x, group, columns, totals), 1;
}

// Entries of ``order`` are token * top_k + place; those of expert e are offsets[e] to offsets[e + 1].
struct Sorted {
    const int32_t *offsets, *order;
    int experts, top_k;
};

template <class Format>
void gate_up(const float* x, const uint8_t* gate, const uint8_t* up, const Sorted& sorted, float* inner, int hidden,
             int size, int task, int ntasks) {
    const int groups = (size + kLanes - 1) / kLanes;
    const size_t bytes = group_bytes<Format>(hidden);
    const Share mine = share(groups, task, ntasks);
    for (int e = 0; e < sorted.experts; ++e) {
        for (int first = sorted.offsets[e], last = sorted.offsets[e + 1]; first < last; first += kTile) {
            const int count = smaller(kTile, last - first);
            const float* rows[kTile];
            for (int t = 0; t < count; ++t)
                rows[t] = x + static_cast<size_t>(sorted.order[first + t] / sorted.top_k) * hidden;
            for (int g = mine.first; g < mine.last; ++g) {
                const size_t at = (static_cast<size_t>(e) * groups + g) * bytes;
                f32x16 gates[kTile], ups[kTile];
                for (int done = 0; done < count;)
                    done += some_products<Format>(count - done, rows + done, gate + at, hidden, gates + done);
                for (int done = 0; done < count;)
                    done += some_products<Format>(count - done, rows + done, up + at, hidden, ups + done);
                for (int t = 0; t < count; ++t)
                    put(inner + static_cast<size_t>(first + t) * size + g * kLanes,
                        gates[t] * sigmoid(gates[t]) * ups[t], smaller(kLanes, size - g * kLanes));
            }
        }
    }
}

template <class Format>
void down(const float* inner, const uint8_t* weight, const Sorted& sorted, const float* weights, float* y, int tokens,
          int size, int hidden, int task, int ntasks) {
    const int groups = (hidden + kLanes - 1) / kLanes;
    const size_t bytes = group_bytes<Format>(size);
    const Share mine = share(groups, task, ntasks);
    const int begin = mine.first * kLanes, width = smaller(mine.last * kLanes, hidden) - begin;
    if (width <= 0) return;
    for (int t = 0; t < tokens; ++t)
        memset(y + static_cast<size_t>(t) * hidden + begin, 0, static_cast<size_t>(width) * sizeof(float));
    for (int e = 0; e < sorted.experts; ++e) {
        for (int first = sorted.offsets[e], last = sorted.offsets[e + 1]; first < last; first += kTile) {
            const int count = smaller(kTile, last - first);
            const float* rows[kTile];
            for (int t = 0; t < count; ++t) rows[t] = inner + static_cast<size_t>(first + t) * size;
            for (int g = mine.first; g < mine.last; ++g) {
                const uint8_t* group = weight + (static_cast<size_t>(e) * groups + g) * bytes;
                const int lanes = smaller(kLanes, hidden - g * kLanes);
                f32x16 sums[kTile];
                for (int done = 0; done < count;)
                    done += some_products<Format>(count - done, rows + done, group, size, sums + done);
                for (int t = 0; t < count; ++t) {
                    const int32_t entry = sorted.order[first + t];
                    float* out = y + static_cast<size_t>(entry / sorted.top_k) * hidden + g * kLanes;
                    put(out, fma(sums[t], splat(weights[entry]), take(out, lanes)), lanes);
                }
            }
        }
    }
}

}  // namespace

void moe_route(const int32_t* counts, int32_t live, const float* logits, int32_t* experts, float* weights,
               int32_t count, int32_t top_k, int32_t normalise, float scale, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row) {
        const float* in = logits + static_cast<size_t>(row) * count;
        int32_t* chosen = experts + static_cast<size_t>(row) * top_k;
        float* out = weights + static_cast<size_t>(row) * top_k;
        choose(in, count, top_k, chosen);
        const float largest = in[chosen[0]];
        float total = 0;
        for (int j = 0; j < top_k; ++j) {
            out[j] = exponential(splat(in[chosen[j]] - largest))[0];
            total += out[j];
        }
        if (!normalise) {
            f32x16 sums = {};
            across(count, [&](int i, int n) ATLAS_FLAT {
                const f32x16 odds = exponential(take(in + i, n) - largest);
                sums += n == kLanes ? odds : load_first(reinterpret_cast<const float*>(&odds), n);
            });
            total = sum(sums);
        }
        for (int j = 0; j < top_k; ++j) out[j] = out[j] / total * scale;
    }
}

void moe_route_sigmoid(const int32_t* counts, int32_t live, const float* logits, const float* bias, int32_t* experts,
                       float* weights, int32_t count, int32_t top_k, int32_t groups, int32_t top_groups,
                       int32_t normalise, float scale, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    const int size = count / groups;
    for (int row = mine.first; row < mine.last; ++row) {
        alignas(64) float scores[kMaxExperts], biased[kMaxExperts], strength[kMaxExperts];
        const float* in = logits + static_cast<size_t>(row) * count;
        across(count, [&](int i, int n) ATLAS_FLAT {
            const f32x16 score = sigmoid(take(in + i, n));
            put(scores + i, score, n);
            put(biased + i, score + take(bias + i, n), n);
        });
        int32_t best[2], taken[kMaxExperts];
        for (int g = 0; g < groups; ++g) {
            const float* group = biased + g * size;
            choose(group, size, smaller(2, size), best);
            strength[g] = size > 1 ? group[best[1]] + group[best[0]] : group[best[0]];
        }
        choose(strength, groups, top_groups, taken);
        bool open[kMaxExperts] = {};
        for (int g = 0; g < top_groups; ++g) open[taken[g]] = true;
        for (int i = 0; i < count; ++i)
            if (!open[i / size]) biased[i] = -INFINITY;
        int32_t* chosen = experts + static_cast<size_t>(row) * top_k;
        float* out = weights + static_cast<size_t>(row) * top_k;
        choose(biased, count, top_k, chosen);
        float total = 1e-20f;
        for (int j = 0; j < top_k; ++j) total += scores[chosen[j]];
        for (int j = 0; j < top_k; ++j) out[j] = (normalise ? scores[chosen[j]] / total : scores[chosen[j]]) * scale;
    }
}

// Counting sort of the tokens' choices: within an expert they keep their order. One task.
void moe_sort(const int32_t* counts, int32_t live, const int32_t* experts, int32_t* offsets, int32_t* order,
              int32_t count, int32_t top_k, int task, int) {
    if (task > 0) return;
    const int entries = counts[live] * top_k;
    memset(offsets, 0, static_cast<size_t>(count + 1) * sizeof(int32_t));
    for (int i = 0; i < entries; ++i) ++offsets[experts[i] + 1];
    for (int e = 0; e < count; ++e) offsets[e + 1] += offsets[e];
    for (int i = 0; i < entries; ++i) order[offsets[experts[i]]++] = i;
    // Every offset has moved to its expert's end, which is the next one's start.
    for (int e = count; e > 0; --e) offsets[e] = offsets[e - 1];
    offsets[0] = 0;
}

#define ATLAS_FORMAT(name, Format)                                                                                     \
    void moe_gate_up_##name(const float* x, const uint8_t* gate, const uint8_t* up, const int32_t* offsets,            \
                            const int32_t* order, float* inner, int32_t hidden, int32_t size, int32_t experts,         \
                            int32_t top_k, int task, int ntasks) {                                                     \
        gate_up<Format>(x, gate, up, {offsets, order, experts, top_k}, inner, hidden, size, task, ntasks);             \
    }                                                                                                                  \
    void moe_down_##name(const int32_t* counts, int32_t live, const float* inner, const uint8_t* weight,               \
                         const int32_t* offsets, const int32_t* order, const float* weights, float* y, int32_t hidden, \
                         int32_t size, int32_t experts, int32_t top_k, int task, int ntasks) {                         \
        down<Format>(inner, weight, {offsets, order, experts, top_k}, weights, y, counts[live], size, hidden, task,    \
                     ntasks);                                                                                          \
    }

ATLAS_FORMAT(f32_x16, F32)
ATLAS_FORMAT(bf16_x16, Bf16)
ATLAS_FORMAT(f16_x16, F16)
ATLAS_FORMAT(q8_0_x16, Q8_0)
ATLAS_FORMAT(q4_0_x16, Q4_0)
ATLAS_FORMAT(q4_1_x16, Q4_1)
ATLAS_FORMAT(q5_0_x16, Q5_0)
ATLAS_FORMAT(q5_1_x16, Q5_1)
ATLAS_FORMAT(q4_k_x16, Q4_K)
ATLAS_FORMAT(q5_k_x16, Q5_K)
ATLAS_FORMAT(q6_k_x16, Q6_K)
ATLAS_FORMAT(iq4_xs_x16, Iq4_Xs)
