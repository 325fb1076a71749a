// Products of activations rounded to 8-bit integers with packed weights.
//
// Up to kAlone rows, every task rounds the rows for itself: that costs less than to wait for one another. More rows are
// prepared by a launch of their own.

#include "atlas_step.h"
#include "products.h"

namespace {

constexpr int kAlone = 4;
constexpr size_t kCached = 1 << 20;  // bytes of prepared rows that stay in a processor's own cache

typedef void (*Multiply)(Prepared x, int rows, const uint8_t* group, uint8_t* panel, const Target& target);

struct Layout {
    Multiply multiply;
    int columns, bytes;  // of a chunk
};

template <class Format>
constexpr Layout layout() {
    return {multiply_group<Format>, Format::kColumns, Format::kBytes};
}

// The numbers are those of atlas_plugin_cpu.fast.LAYOUTS.
constexpr Layout kLayouts[] = {layout<Q4_0>(), layout<Q4_1>(), layout<Q5_0>(), layout<Q5_1>(),  layout<Q8_0>(),
                               layout<Q4_K>(), layout<Q5_K>(), layout<Q6_K>(), layout<Iq4_Xs>()};

struct Weight {
    const uint8_t* data;
    int layout;
    float* y;
    int outputs;

    int groups() const { return data == nullptr ? 0 : (outputs + kLanes - 1) / kLanes; }
    const uint8_t* group(int g, int columns) const {
        const Layout& of = kLayouts[layout];
        return data + static_cast<size_t>(g) * (static_cast<size_t>(columns) / of.columns * of.bytes);
    }
};

ATLAS_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// Prepared rows for each row of x.
ATLAS_INLINE int times(int mode) { return mode == Target::kTwice ? 2 : 1; }

// Rounds one row, in mode kTwice as two; its norm is taken first when there are weights for that.
void prepare_row(const Prepared& to, int row, const float* x, const float* norm, float eps, int mode) {
    if (mode == Target::kTwice) {
        quantise_twice(to, row, [&](int k) ATLAS_FLAT { return load(x + k); });
        return;
    }
    if (norm == nullptr) {
        quantise(to, row, [&](int k) ATLAS_FLAT { return load(x + k); });
        return;
    }
    const f32x16 scale = splat(1.0f / sqrtf(sum_of_squares(x, to.columns) / static_cast<float>(to.columns) + eps));
    quantise(to, row, [&](int k) ATLAS_FLAT { return load(x + k) * scale * load(norm + k); });
}

// One group of the first weight, and in gates the same group of the second: what the gate gave waits in ``gates``, close
// together, since lines of y that are a power of two apart displace one another from every cache.
void multiply(const Weight* weights, int g, int columns, Target::Mode mode, const float* other, const Prepared& x,
              int first, int rows, uint8_t* panel, float* gates) {
    const Weight& weight = weights[0];
    const size_t at = static_cast<size_t>(first / times(mode)) * weight.outputs + g * kLanes;
    const int lanes = smaller(kLanes, weight.outputs - g * kLanes);
    Target target = {mode, weight.y + at, mode == Target::kAdd ? other + at : nullptr, weight.outputs, weight.outputs, lanes};
    if (mode == Target::kGate) {
        const Target gate = {Target::kStore, gates, nullptr, kLanes, 0, kLanes};
        kLayouts[weight.layout].multiply(x, rows, weight.group(g, columns), panel, gate);
        target.other = gates;
        target.other_stride = kLanes;
    }
    const Weight& last = weights[mode == Target::kGate ? 1 : 0];
    kLayouts[last.layout].multiply(x, rows, last.group(g, columns), panel, target);
}

}  // namespace

void fast_prepare(const int32_t* counts, int32_t live, const float* x, const float* norm, uint8_t* prepared,
                  int32_t columns, float eps, int32_t mode, int task, int ntasks) {
    const int each = times(mode);
    if (counts[live] * each <= kAlone) return;
    const Share mine = share(counts[live], task, ntasks);
    for (int i = mine.first; i < mine.last; ++i) {
        const int row = i * each;
        const size_t set = Prepared::bytes(columns, kTileRows) * (row / kTileRows);
        const Prepared to = {prepared + set, columns, kTileRows};
        prepare_row(to, row % kTileRows, x + static_cast<size_t>(i) * columns, norm, eps, mode);
    }
}

// ``room`` is own_bytes for each task: of a panel, or of the rows that it rounds itself, and of a group's gates. Weights that are absent have the address 0.
void fast_multiply(const int32_t* counts, int32_t live, const float* x, const float* norm, uint8_t* prepared,
                   uint8_t* room, int64_t own_bytes, int64_t gates_at, int32_t columns, float eps, int32_t mode, const float* other,
                   const uint8_t* weight0, int32_t layout0, float* y0, int32_t outputs0, const uint8_t* weight1,
                   int32_t layout1, float* y1, int32_t outputs1, const uint8_t* weight2, int32_t layout2, float* y2,
                   int32_t outputs2, int task, int ntasks) {
    const Weight weights[3] = {{weight0, layout0, y0, outputs0}, {weight1, layout1, y1, outputs1},
                               {weight2, layout2, y2, outputs2}};
    const int each = times(mode), rows = counts[live] * each, first = weights[0].groups();
    const bool gate = mode == Target::kGate;
    const Share mine = share(gate ? first : first + weights[1].groups() + weights[2].groups(), task, ntasks);
    if (mine.first == mine.last || rows == 0) return;
    uint8_t* own = room + task * own_bytes;
    Prepared source = {prepared, columns, kTileRows};
    float* gates = reinterpret_cast<float*>(own + gates_at);
    int step = rows;
    if (rows <= kAlone) {
        source = {own, columns, rows};
        for (int row = 0; row < rows; row += each)
            prepare_row(source, row, x + static_cast<size_t>(row / each) * columns, norm, eps, mode);
    } else {
        // As many sets of rows as stay in the cache while all groups pass.
        const size_t set = Prepared::bytes(columns, kTileRows);
        step = kTileRows * (set < kCached ? static_cast<int>(kCached / set) : 1);
    }
    for (int row = 0; row < rows; row += step) {
        Prepared part = source;
        part.base += Prepared::bytes(columns, source.width) * (row / source.width);
        for (int g = mine.first; g < mine.last; ++g) {
            int at = g, which = 0;
            while (!gate && at >= weights[which].groups()) at -= weights[which++].groups();
            multiply(weights + which, at, columns, static_cast<Target::Mode>(mode), other, part, row,
                     smaller(step, rows - row), own, gates);
        }
    }
}
