// Linear attention: the short convolution and the gated delta rule, token by token over states in memory.
//
// Tasks own channels, or 16 values of a head: states of different ones never meet. A token's result depends on the state
// before it and on itself, so that its bits are the same however a sequence was cut into steps, and whoever runs beside it.

#include "atlas_step.h"
#include "rows.h"

namespace {

constexpr int kMaxWidth = 8;
constexpr int kMaxKey = 256;
constexpr int kChains = 4;  // independent sums, which hide the latency of an addition

// A row of the step: its tokens, where its state is read and written, and whether it starts from nothing instead.
struct Row {
    int first, last;
    size_t in, out;
    bool fresh;
};

ATLAS_INLINE Row row_at(const int32_t* cu_q, const int32_t* row_slot, const int32_t* words, int slot_stride, int row) {
    const int32_t* slot = words + static_cast<size_t>(row_slot[row]) * slot_stride;
    return {cu_q[row], cu_q[row + 1], static_cast<size_t>(slot[ATLAS_STATE_IN]),
            static_cast<size_t>(slot[ATLAS_STATE_OUT]), slot[ATLAS_POSITION] == 0};
}

ATLAS_INLINE double softplus(double x) { return x > 40.0 ? x : log1p(exp(x)); }

}  // namespace

// ``weight`` is [width, channels], the own input's tap last; ``state`` is one layer, [places, width - 1, channels].
void causal_conv1d(const int32_t* counts, const float* x, const float* weight, const int32_t* cu_q,
                   const int32_t* row_slot, const int32_t* words, float* state, float* y, int32_t channels,
                   int32_t width, int32_t slot_stride, int task, int ntasks) {
    const Share mine = share((channels + kLanes - 1) / kLanes, task, ntasks);
    const int taps = width - 1;
    for (int block = mine.first; block < mine.last; ++block) {
        const int c = block * kLanes, lanes = channels - c < kLanes ? channels - c : kLanes;
        f32x16 w[kMaxWidth], past[kMaxWidth];
        for (int i = 0; i < width; ++i) w[i] = take(weight + static_cast<size_t>(i) * channels + c, lanes);
        for (int r = 0; r < counts[ATLAS_SEQUENCES]; ++r) {
            const Row row = row_at(cu_q, row_slot, words, slot_stride, r);
            if (row.first == row.last) continue;
            const float* before = state + row.in * taps * channels + c;
            float* after = state + row.out * taps * channels + c;
            for (int i = 0; i < taps; ++i)
                past[i] = row.fresh ? f32x16{} : take(before + static_cast<size_t>(i) * channels, lanes);
            for (int t = row.first; t < row.last; ++t) {
                const size_t at = static_cast<size_t>(t) * channels + c;
                const f32x16 own = take(x + at, lanes);
                f32x16 total = {};
                for (int i = 0; i < taps; ++i) total = fma(past[i], w[i], total);
                total = fma(own, w[taps], total);
                put(y + at, total * sigmoid(total), lanes);
                for (int i = 0; i + 1 < taps; ++i) past[i] = past[i + 1];
                past[taps - 1] = own;
            }
            for (int i = 0; i < taps; ++i) put(after + static_cast<size_t>(i) * channels, past[i], lanes);
        }
    }
}

// ``state`` is one layer, [places, value_heads, key_dim, value_dim].
void gated_delta_rule(const int32_t* counts, const float* qkv, const float* a, const float* b, const float* a_log,
                      const float* dt_bias, const int32_t* cu_q, const int32_t* row_slot, const int32_t* words,
                      float* state, float* y, int32_t key_heads, int32_t value_heads, int32_t key_dim,
                      int32_t value_dim, float scale, int32_t slot_stride, int task, int ntasks) {
    const int parts = (value_dim + kLanes - 1) / kLanes, keys = key_heads * key_dim, values = value_heads * value_dim;
    const size_t width = 2 * static_cast<size_t>(keys) + values;
    const int64_t items = static_cast<int64_t>(counts[ATLAS_SEQUENCES]) * value_heads * parts;
    for (int64_t item = task; item < items; item += ntasks) {
        const int head = static_cast<int>(item / parts % value_heads), c = static_cast<int>(item % parts) * kLanes;
        const int lanes = value_dim - c < kLanes ? value_dim - c : kLanes;
        const Row row =
            row_at(cu_q, row_slot, words, slot_stride, static_cast<int>(item / parts / value_heads));
        if (row.first == row.last) continue;
        const float* before = state + (row.in * value_heads + head) * key_dim * value_dim + c;
        float* after = state + (row.out * value_heads + head) * key_dim * value_dim + c;
        f32x16 s[kMaxKey];
        for (int d = 0; d < key_dim; ++d)
            s[d] = row.fresh ? f32x16{} : take(before + static_cast<size_t>(d) * value_dim, lanes);
        const double rate = exp(static_cast<double>(a_log[head]));
        for (int t = row.first; t < row.last; ++t) {
            const float* q = qkv + t * width + head / (value_heads / key_heads) * key_dim;
            const float *k = q + keys, *v = qkv + t * width + 2 * keys + head * value_dim + c;
            const size_t gates = static_cast<size_t>(t) * value_heads + head;
            const double step = softplus(static_cast<double>(a[gates]) + static_cast<double>(dt_bias[head]));
            const f32x16 decay = splat(static_cast<float>(exp(-rate * step)));
            const f32x16 beta = sigmoid(splat(b[gates]));
            f32x16 seen[kChains] = {}, out[kChains] = {};
            for (int d = 0; d < key_dim; ++d) {
                s[d] *= decay;
                seen[d % kChains] = fma(s[d], splat(k[d]), seen[d % kChains]);
            }
            const f32x16 error = (take(v, lanes) - ((seen[0] + seen[1]) + (seen[2] + seen[3]))) * beta;
            for (int d = 0; d < key_dim; ++d) {
                s[d] = fma(error, splat(k[d]), s[d]);
                out[d % kChains] = fma(s[d], splat(q[d]), out[d % kChains]);
            }
            put(y + static_cast<size_t>(t) * values + head * value_dim + c,
                ((out[0] + out[1]) + (out[2] + out[3])) * scale, lanes);
        }
        for (int d = 0; d < key_dim; ++d) put(after + static_cast<size_t>(d) * value_dim, s[d], lanes);
    }
}
