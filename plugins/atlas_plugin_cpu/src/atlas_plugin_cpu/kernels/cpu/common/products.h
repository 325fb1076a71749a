// Products of prepared rows with one group of 16 rows of a packed weight.
//
// The bits of an output depend on its row and its weight alone: blocks are added in order, each as
//     total = fma(round(sum of integer products * scale of the weight), scale of the row, total)
// and, in formats with a minimum, total = fma(minimum, moment of the row, total). One row, several and tiles of 16 do the
// same.
#pragma once

#include "integers.h"
#include "tiles.h"
#include "weights.h"

// Where results go: ``lanes`` outputs of each row, rows ``stride`` floats apart in y and ``other_stride`` in other.
struct Target {
    // y = total; y = other + total; y = silu(other) * total; y = the sum of two rows' totals
    enum Mode { kStore, kAdd, kGate, kTwice };
    Mode mode;
    float* y;
    const float* other;
    int stride, other_stride, lanes;

    // Lines that are not near when they are written hold up every store behind them, those of tiles among them.
    ATLAS_INLINE void prefetch_row(int row) const {
        if (mode == kTwice) return;
        __builtin_prefetch(y + static_cast<size_t>(row) * stride, 1);
        if (mode == kAdd) __builtin_prefetch(other + static_cast<size_t>(row) * other_stride);
    }
    ATLAS_INLINE void prefetch_rows(int first, int count) const {
        for (int t = 0; t < count; ++t) prefetch_row(first + t);
    }

    ATLAS_INLINE void put_row(int row, f32x16 total) const {
        if (other != nullptr) {
            const f32x16 before = take(other + static_cast<size_t>(row) * other_stride, lanes);
            total = mode == kAdd ? before + total : before / (1.0f + exponential(-before)) * total;
        }
        put(y + static_cast<size_t>(row) * stride, total, lanes);
    }

    ATLAS_INLINE void put_rows(int first, int count, const f32x16* totals) const {
        if (mode == kTwice)
            for (int t = 0; t < count; t += 2) put_row((first + t) / 2, totals[t] + totals[t + 1]);
        else
            for (int t = 0; t < count; ++t) put_row(first + t, totals[t]);
    }
};

// Sums of products start from the bits of 1.5 * 2^23, so that as floats they are that number plus the sum: integers below
// 2^22 need no conversion.
constexpr int32_t kStartBits = 0x4B400000;
constexpr float kStart = 12582912.0f;

// The scales of a weight with what undoes the start. Scales have at most 17 bits, so the product is exact, and
// fma(start + sum, scale, -start * scale) is the sum times the scale, rounded once.
template <bool kMinimum>
struct Undo {
    Scales<kMinimum> weight;
    f32x16 undo;
    explicit ATLAS_INLINE Undo(Scales<kMinimum> of) : weight(of), undo(of.scale * -kStart) {}

    ATLAS_INLINE f32x16 add(f32x16 total, i32x16 bits, float scale, float moment) const {
        total = fma(fma(reinterpret_cast<f32x16>(bits), weight.scale, undo), splat(scale), total);
        if constexpr (kMinimum) total = fma(weight.minimum, splat(moment), total);
        return total;
    }
};

// T rows of one set of prepared rows, from ``row`` on.
template <class Format, int T>
void multiply_rows(const Prepared& x, int row, const uint8_t* group, f32x16* totals) {
    constexpr int kBlocks = Format::kColumns / kInts, kQuads = 8 / Format::kHalves;
    f32x16 total[T] = {};
    for (int block = 0; block < x.blocks(); group += Format::kBytes) {
#pragma GCC unroll 1
        for (int b = 0; b < kBlocks; ++b, ++block) {
            prefetch_block<Format::kBytes / kBlocks>(group + b * (Format::kBytes / kBlocks));
#pragma GCC unroll 2
            for (int half = 0; half < Format::kHalves; ++half) {
                const Undo<Format::kMinimum> scales(Format::scales(group, b, half));
                u8x64 codes[kQuads];
#pragma GCC unroll 8
                for (int j = 0; j < kQuads; ++j) codes[j] = Format::codes(group, b, half * kQuads + j);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const int8_t* ints = x.ints(block, row + t) + 4 * kQuads * half;
                    int32_t start = 0;
                    if constexpr (Format::kOffset != 0) {
                        start = x.sums(block, half)[row + t];
                        if constexpr (Format::kHalves == 1) start += x.sums(block, 1)[row + t];
                    }
                    i32x16 part = i32x16{} + (kStartBits - start * Format::kOffset), other = {};
#pragma GCC unroll 4
                    for (int j = 0; j < kQuads; j += 2) {
                        part = dot<Format::kCodes>(part, codes[j], ints + 4 * j);
                        other = dot<Format::kCodes>(other, codes[j + 1], ints + 4 * j + 4);
                    }
                    total[t] = scales.add(total[t], part + other, x.scales(block)[row + t], x.moments(block)[row + t]);
                }
            }
        }
    }
    for (int t = 0; t < T; ++t) totals[t] = total[t];
}

#if defined(ATLAS_TILES)

// A group as signed bytes, which tiles multiply: for each block 8 vectors of codes less the offset, then the scales.
template <class Format>
struct Panel {
    static constexpr int kScales = Format::kHalves * (Format::kMinimum ? 2 : 1), kBytes = 512 + 64 * kScales;
    static constexpr int kBlocks = Format::kColumns / kInts;

    static void fill(uint8_t* panel, const uint8_t* group, int columns) {
        for (int k = 0; k < columns; k += Format::kColumns, group += Format::kBytes) {
            for (int b = 0; b < kBlocks; ++b, panel += kBytes) {
                prefetch_block<Format::kBytes / kBlocks>(group + b * (Format::kBytes / kBlocks));
                for (int j = 0; j < 8; ++j) {
                    const u8x64 ints = Format::codes(group, b, j) - static_cast<uint8_t>(Format::kOffset);
                    memcpy(panel + 64 * j, &ints, sizeof ints);
                }
                for (int half = 0; half < Format::kHalves; ++half) {
                    const Scales<Format::kMinimum> scales = Format::scales(group, b, half);
                    float* to = reinterpret_cast<float*>(panel + 512) + half * kLanes;
                    store(to, scales.scale);
                    if constexpr (Format::kMinimum) store(to + Format::kHalves * kLanes, scales.minimum);
                }
            }
        }
        __asm__ volatile("" : : : "memory");  // tiles read it behind the compiler's back
    }

    static ATLAS_INLINE Scales<Format::kMinimum> scales(const uint8_t* block, int half) {
        const float* from = reinterpret_cast<const float*>(block + 512) + half * kLanes;
        if constexpr (Format::kMinimum) return {load(from), load(from + Format::kHalves * kLanes)};
        else return {load(from)};
    }
};

// Sets of 16 rows, one after the other: a walk over their blocks (or halves of blocks) in which every product is begun
// four steps before its sums are scaled, and its tile stored two steps before. Tile and float instructions alternate in
// small groups: behind one another, neither unit works while the other does.
template <class Format>
struct TileWalk {
    static constexpr int kHalves = Format::kHalves, kBytes = Panel<Format>::kBytes;
    static constexpr int kIntBytes = kTileRows * kInts;
    const uint8_t* panel;
    size_t set_bytes;
    int blocks;
    TileSums* sums;
    // Rows of results that will be written: one is brought near in each step, since many at once hold up loads.
    const Target& target;
    int near, far;
    // What is scaled next, and what is begun next.
    const uint8_t *scaled, *begun;
    const float *scales, *moments;
    const int8_t* ints;
    int scaled_left, begun_left, sets_left;

    ATLAS_INLINE TileWalk(const Prepared& x, int sets, const uint8_t* panel, TileSums* sums, const Target& target,
                          int first, int count)
        : panel(panel), set_bytes(Prepared::bytes(x.columns, kTileRows)), blocks(x.blocks()), sums(sums), target(target),
          near(first), far(first + count), scaled(panel), begun(panel), scales(x.scales(0)), moments(x.moments(0)), ints(x.ints(0, 0)), scaled_left(blocks),
          begun_left(blocks), sets_left(sets) {}

    // To the product after the one that was begun; behind the last set the last set again, which nobody reads.
    template <int kSlot>
    ATLAS_INLINE void pass() {
        if constexpr (kHalves == 2 && kSlot % 2 == 0) return;
        ints += kIntBytes, begun += kBytes;
        if (--begun_left > 0) return;
        begun_left = blocks, begun = panel;
        const size_t ints_bytes = static_cast<size_t>(blocks) * kIntBytes;
        ints -= ints_bytes;
        if (--sets_left > 0) ints += set_bytes;
    }

    template <int kSlot>
    ATLAS_INLINE void load_rows() const { tile_load_rows<kSlot>(ints + kSlot % kHalves * (kInts / kHalves)); }
    template <int kSlot>
    ATLAS_INLINE void load_weights() const { tile_load_weights<kSlot>(begun + kSlot % kHalves * 256); }

    template <int kSlot>
    ATLAS_INLINE void begin() {
        load_rows<kSlot>(), load_weights<kSlot>();
        tile_multiply<kSlot>();
        pass<kSlot>();
    }

    template <int kSlot, int kFirst>
    ATLAS_INLINE void scale_rows(Undo<Format::kMinimum> weight, f32x16* total) const {
#pragma GCC unroll 4
        for (int t = kFirst; t < kFirst + 4; ++t) {
            i32x16 part;
            memcpy(&part, sums[kSlot].of[t], sizeof part);
            total[t] = weight.add(total[t], part + kStartBits, scales[t], moments[t]);
        }
    }

    // One step; true when it was the last of a set.
    template <int kSlot>
    ATLAS_INLINE bool step(f32x16* total) {
        const Undo<Format::kMinimum> weight(Panel<Format>::scales(scaled, kSlot % kHalves));
        if (near < far) target.prefetch_row(near++);
        load_rows<kSlot>();
        scale_rows<kSlot, 0>(weight, total);
        load_weights<kSlot>();
        scale_rows<kSlot, 4>(weight, total);
        constexpr int kStored = (kSlot + 2) % kTilesInFlight;
        tile_store<kStored>(sums + kStored);
        scale_rows<kSlot, 8>(weight, total);
        tile_multiply<kSlot>();
        pass<kSlot>();
        scale_rows<kSlot, 12>(weight, total);
        if constexpr (kHalves == 2 && kSlot % 2 == 0) return false;
        scaled += kBytes, scales += kTileRows, moments += kTileRows;
        return --scaled_left == 0;
    }

    // Gives the totals of a set, and turns to the next; false when there is none.
    ATLAS_INLINE bool finish(f32x16*& to, const f32x16* end, f32x16* total) {
#pragma GCC unroll 16
        for (int t = 0; t < kTileRows; ++t) to[t] = total[t], total[t] = f32x16{};
        to += kTileRows;
        scaled_left = blocks, scaled = panel;
        const size_t skip = set_bytes / sizeof(float) - static_cast<size_t>(blocks) * kTileRows;
        scales += skip, moments += skip;
        return to < end;
    }
};

template <class Format>
__attribute__((noinline)) void multiply_tiles(const Prepared& x, int sets, const uint8_t* panel, f32x16* totals,
                                              const Target& target, int first, int count) {
    TileSums sums[kTilesInFlight];
    f32x16 total[kTileRows] = {};
    const f32x16* end = totals + static_cast<size_t>(sets) * kTileRows;
    TileWalk<Format> walk(x, sets, panel, sums, target, first, count);
    walk.template begin<0>(), walk.template begin<1>();
    walk.template begin<2>(), walk.template begin<3>();
    tile_store<0>(sums), tile_store<1>(sums + 1);
    for (;;) {
        if (walk.template step<0>(total) && !walk.finish(totals, end, total)) return;
        if (walk.template step<1>(total) && !walk.finish(totals, end, total)) return;
        if (walk.template step<2>(total) && !walk.finish(totals, end, total)) return;
        if (walk.template step<3>(total) && !walk.finish(totals, end, total)) return;
    }
}

#endif

constexpr int kSetsAtOnce = 8;

// All rows of one group; ``x`` are sets of x.width rows, one behind the other, and ``panel`` is room for a group.
template <class Format>
void multiply_group(Prepared x, int rows, const uint8_t* group, [[maybe_unused]] uint8_t* panel, const Target& target) {
    f32x16 totals[kSetsAtOnce * kTileRows];
#if defined(ATLAS_TILES)
    const bool tiles = kHaveTiles && x.width == kTileRows && rows >= kRowsForTiles;
    if (tiles) {
        Panel<Format>::fill(panel, group, x.columns);
        tile_configure(kInts / Format::kHalves);
    }
#else
    constexpr bool tiles = false;
#endif
    const int step = tiles ? kSetsAtOnce * kTileRows : x.width;
    for (int first = 0; first < rows; first += step) {
        const int count = rows - first < step ? rows - first : step;
        if (!tiles) target.prefetch_rows(first, count);
#if defined(ATLAS_TILES)
        if (tiles) multiply_tiles<Format>(x, (count + kTileRows - 1) / kTileRows, panel, totals, target, first, count);
        else
#endif
            for (int done = 0; done < count;) {
#if defined(__AVX512F__)
                if (count - done >= 8) {
                    multiply_rows<Format, 8>(x, done, group, totals + done), done += 8;
                    continue;
                }
#endif
                if (count - done >= 4) multiply_rows<Format, 4>(x, done, group, totals + done), done += 4;
                else if (count - done >= 2) multiply_rows<Format, 2>(x, done, group, totals + done), done += 2;
                else multiply_rows<Format, 1>(x, done, group, totals + done), done += 1;
            }
        target.put_rows(first, count, totals);
        x.base += Prepared::bytes(x.columns, x.width) * (step / x.width);
    }
#if defined(ATLAS_TILES)
    if (tiles) tile_release();
#endif
}

// Bytes of a panel of any format.
ATLAS_INLINE size_t panel_bytes(int columns) { return static_cast<size_t>(columns) / kInts * (512 + 128); }
