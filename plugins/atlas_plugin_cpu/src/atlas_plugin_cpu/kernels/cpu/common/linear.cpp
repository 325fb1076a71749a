// Products with packed weights, and rows of an embedding table packed the same way.
//
// The bits of an output depend on its row of x and its row of the weight alone: columns are added in blocks of 32,
// inside a block one after the other with fused multiply-adds from zero, the blocks' sums in order. However many rows
// of x there are, and however outputs fall to tasks, that order is the same.

#include "atlas_step.h"
#include "weights.h"

namespace {

constexpr int kPair = 2 * kLanes;  // outputs worked on at once
constexpr int kPanel = 256;        // columns of a pair that are kept as floats: 32 KiB, which stay in the first cache
#if defined(__AVX512F__)
constexpr int kTile = 12;  // rows of x at once: 24 sums in 32 registers
#else
constexpr int kTile = 2;
#endif

ATLAS_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// Where the chunk begins that holds column k of a group.
template <class Format>
ATLAS_INLINE const uint8_t* chunk_at(const uint8_t* group, int k) {
    return group + static_cast<size_t>(k / Format::kColumns) * Format::kBytes;
}

// One row of x times one group.
template <class Format>
ATLAS_INLINE f32x16 product(const float* x, const uint8_t* group, int columns) {
    f32x16 total = {};
    for (int k0 = 0; k0 < columns; k0 += kBlock) {
        f32x16 part = {};
        constexpr int kBlockBytes = Format::kBytes / (Format::kColumns / kBlock);
        prefetch_block<kBlockBytes>(group + static_cast<size_t>(k0 / kBlock) * kBlockBytes);
        Format::each(chunk_at<Format>(group, k0), k0 % Format::kColumns / kBlock, smaller(kBlock, columns - k0),
                     [&](int k, f32x16 w) ATLAS_FLAT { part = fma(w, splat(x[k0 + k]), part); });
        total += part;
    }
    return total;
}

// Adds n columns of a panel to T rows of one pair's sums.
template <int T>
void multiply(const float* x, int stride, const float* panel, int n, float (*sums)[kPair]) {
    for (int k0 = 0; k0 < n; k0 += kBlock) {
        f32x16 part[T][2] = {};
        const int end = smaller(k0 + kBlock, n);
        for (int k = k0; k < end; ++k) {
            const f32x16 low = load(panel + k * kPair), high = load(panel + k * kPair + kLanes);
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) {
                const f32x16 value = splat(x[static_cast<size_t>(t) * stride + k]);
                part[t][0] = fma(low, value, part[t][0]);
                part[t][1] = fma(high, value, part[t][1]);
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) {
            store(sums[t], load(sums[t]) + part[t][0]);
            store(sums[t] + kLanes, load(sums[t] + kLanes) + part[t][1]);
        }
    }
}

// As many rows as one call can take; returns how many.
int multiply_some(int rows, const float* x, int stride, const float* panel, int n, float (*sums)[kPair]) {
    if (rows >= kTile) return multiply<kTile>(x, stride, panel, n, sums), kTile;
#if defined(__AVX512F__)
    if (rows >= 8) return multiply<8>(x, stride, panel, n, sums), 8;
    if (rows >= 4) return multiply<4>(x, stride, panel, n, sums), 4;
    if (rows >= 2) return multiply<2>(x, stride, panel, n, sums), 2;
#endif
    return multiply<1>(x, stride, panel, n, sums), 1;
}

// Columns [k0, k0 + depth) of a pair of groups as floats; a group that does not exist gives zeros.
template <class Format>
void fill(float* panel, const uint8_t* weight, int pair, int groups, int columns, int k0, int depth) {
    for (int half = 0; half < 2; ++half) {
        float* to = panel + half * kLanes;
        const int g = 2 * pair + half;
        if (g >= groups) {
            for (int k = 0; k < depth; ++k) store(to + k * kPair, f32x16{});
            continue;
        }
        const uint8_t* group = weight + g * group_bytes<Format>(columns);
        for (int k = k0; k < k0 + depth; k += kBlock)
            Format::each(chunk_at<Format>(group, k), k % Format::kColumns / kBlock, smaller(kBlock, k0 + depth - k),
                         [&](int c, f32x16 w) ATLAS_FLAT { store(to + (k - k0 + c) * kPair, w); });
    }
}

template <class Format>
void linear(const int32_t* counts, int live, const float* x, const uint8_t* weight, float* y, int columns, int outputs,
            int task, int ntasks) {
    const int rows = counts[live], groups = (outputs + kLanes - 1) / kLanes;
    const Share mine = share((groups + 1) / 2, task, ntasks);
    if (rows == 1) {
        for (int g = 2 * mine.first; g < smaller(2 * mine.last, groups); ++g) {
            const f32x16 sum = product<Format>(x, weight + g * group_bytes<Format>(columns), columns);
            store_first(y + g * kLanes, sum, smaller(kLanes, outputs - g * kLanes));
        }
        return;
    }
    alignas(64) float panel[kPanel * kPair], sums[kTile][kPair];
    for (int pair = mine.first; pair < mine.last && rows > 0; ++pair) {
        const size_t width = static_cast<size_t>(smaller(kPair, outputs - pair * kPair)) * sizeof(float);
        for (int k0 = 0; k0 < columns; k0 += kPanel) {
            const int depth = smaller(kPanel, columns - k0);
            fill<Format>(panel, weight, pair, groups, columns, k0, depth);
            for (int row = 0; row < rows; row += kTile) {
                const int count = smaller(kTile, rows - row);
                float* out = y + static_cast<size_t>(row) * outputs + pair * kPair;
                // Between panels a row's sums wait in y.
                memset(sums, 0, sizeof sums);
                for (int t = 0; k0 > 0 && t < count; ++t)
                    memcpy(sums[t], out + static_cast<size_t>(t) * outputs, width);
                for (int done = 0; done < count;) {
                    const float* from = x + static_cast<size_t>(row + done) * columns + k0;
                    done += multiply_some(count - done, from, columns, panel, depth, sums + done);
                }
                for (int t = 0; t < count; ++t) memcpy(out + static_cast<size_t>(t) * outputs, sums[t], width);
            }
        }
    }
}

template <class Format>
void embed(const int32_t* counts, const int32_t* tokens, const uint8_t* weight, float* y, int columns, int task,
           int ntasks) {
    const Share mine = share(counts[ATLAS_TOKENS], task, ntasks);
    for (int t = mine.first; t < mine.last; ++t) {
        const int lane = tokens[t] % kLanes;
        const uint8_t* group = weight + tokens[t] / kLanes * group_bytes<Format>(columns);
        float* out = y + static_cast<size_t>(t) * columns;
        for (int k0 = 0; k0 < columns; k0 += kBlock)
            Format::each(chunk_at<Format>(group, k0), k0 % Format::kColumns / kBlock, smaller(kBlock, columns - k0),
                         [&](int k, f32x16 w) ATLAS_FLAT { out[k0 + k] = w[lane]; });
    }
}

}  // namespace

#define ATLAS_FORMAT(name, Format)                                                                                     \
    void linear_##name(const int32_t* counts, int32_t live, const float* x, const uint8_t* weight, float* y,           \
                       int32_t columns, int32_t outputs, int task, int ntasks) {                                       \
        linear<Format>(counts, live, x, weight, y, columns, outputs, task, ntasks);                                    \
    }                                                                                                                  \
    void embed_##name(const int32_t* counts, const int32_t* tokens, const uint8_t* weight, float* y, int32_t columns,  \
                      int task, int ntasks) {                                                                          \
        embed<Format>(counts, tokens, weight, y, columns, task, ntasks);                                               \
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
