// Ops that work on one row at a time: norms, sums, gates, rotations, and gathering of rows.

#include "atlas_step.h"
#include "rows.h"

namespace {

// Sine and cosine in double precision. The reduction to [-pi/4, pi/4] subtracts n * pi/2 in three parts, the first with
// 33 bits, so that it stays exact for every position below 2^20; then Taylor series to the 15th power.
ATLAS_INLINE void sine_cosine(double angle, double* sine, double* cosine) {
    const double n = __builtin_rint(angle * 0.63661977236758134308);
    double r = angle - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050630396597660e-11;
    r = r - n * 2.02226624879595063154e-21;
    const double z = r * r;
    double s = -1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = r + r * (z * s);
    double c = 1.0 / 20922789888000.0;
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = 1.0 - 0.5 * z + z * z * c;
    const int quadrant = static_cast<int>(n) & 3;
    const double first = quadrant & 1 ? c : s, second = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -first : first;
    *cosine = (quadrant + 1) & 2 ? -second : second;
}

constexpr int kMaxHalf = 128;

}  // namespace

void rms_norm(const int32_t* counts, int32_t live, const float* x, const float* weight, float* y, int32_t columns,
              float eps, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row) {
        const float* in = x + static_cast<size_t>(row) * columns;
        float* out = y + static_cast<size_t>(row) * columns;
        f32x16 squares = {};
        across(columns, [&](int k, int n) ATLAS_FLAT {
            const f32x16 v = take(in + k, n);
            squares = fma(v, v, squares);
        });
        const f32x16 scale = splat(1.0f / sqrtf(sum(squares) / static_cast<float>(columns) + eps));
        across(columns,
               [&](int k, int n) ATLAS_FLAT { put(out + k, take(in + k, n) * scale * take(weight + k, n), n); });
    }
}

void add(const int32_t* counts, int32_t live, const float* x, const float* z, float* y, int32_t columns, int task,
         int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    const size_t first = static_cast<size_t>(mine.first) * columns, last = static_cast<size_t>(mine.last) * columns;
    for (size_t i = first; i < last; ++i) y[i] = x[i] + z[i];
}

void bias_add(const int32_t* counts, int32_t live, const float* x, const float* bias, float* y, int32_t columns,
              int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row) {
        const size_t base = static_cast<size_t>(row) * columns;
        for (int k = 0; k < columns; ++k) y[base + k] = x[base + k] + bias[k];
    }
}

void silu_mul(const int32_t* counts, int32_t live, const float* gate, const float* up, float* y, int32_t columns,
              int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row) {
        const size_t base = static_cast<size_t>(row) * columns;
        across(columns, [&](int k, int n) ATLAS_FLAT {
            const f32x16 g = take(gate + base + k, n);
            put(y + base + k, g / (1.0f + exponential(-g)) * take(up + base + k, n), n);
        });
    }
}

// By tanh: with u = sqrt(2/pi) * (g + 0.044715 * g^3), (1 + tanh(u)) / 2 is the sigmoid of 2u.
void gelu_mul(const int32_t* counts, int32_t live, const float* gate, const float* up, float* y, int32_t columns,
              int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row) {
        const size_t base = static_cast<size_t>(row) * columns;
        across(columns, [&](int k, int n) ATLAS_FLAT {
            const f32x16 g = take(gate + base + k, n);
            const f32x16 twice = 1.59576912160573071176f * g * fma(g * g, splat(0.044715f), splat(1.0f));
            put(y + base + k, g / (1.0f + exponential(-twice)) * take(up + base + k, n), n);
        });
    }
}

void rope(const int32_t* counts, const float* x, const int32_t* positions, const float* inv_freq, float* y,
          int32_t heads, int32_t head_dim, int32_t half, float scale, int task, int ntasks) {
    const Share mine = share(counts[ATLAS_TOKENS], task, ntasks);
    for (int t = mine.first; t < mine.last; ++t) {
        float sine[kMaxHalf], cosine[kMaxHalf];
        for (int i = 0; i < half; ++i) {
            double s, c;
            sine_cosine(static_cast<double>(positions[t]) * static_cast<double>(inv_freq[i]), &s, &c);
            sine[i] = static_cast<float>(s * static_cast<double>(scale));
            cosine[i] = static_cast<float>(c * static_cast<double>(scale));
        }
        for (int head = 0; head < heads; ++head) {
            const size_t base = (static_cast<size_t>(t) * heads + head) * head_dim;
            const float *low = x + base, *high = low + half;
            float *to_low = y + base, *to_high = to_low + half;
            across(half, [&](int i, int n) ATLAS_FLAT {
                const f32x16 s = take(sine + i, n), c = take(cosine + i, n), a = take(low + i, n),
                             b = take(high + i, n);
                put(to_low + i, fma(a, c, -(b * s)), n);
                put(to_high + i, fma(b, c, a * s), n);
            });
            for (int i = 2 * half; i < head_dim; ++i) y[base + i] = x[base + i];
        }
    }
}

void gather_rows(const int32_t* counts, const float* x, const int32_t* logits_rows, float* y, int32_t columns, int task,
                 int ntasks) {
    const Share mine = share(counts[ATLAS_ROWS], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row)
        memcpy(y + static_cast<size_t>(row) * columns, x + static_cast<size_t>(logits_rows[row]) * columns,
               static_cast<size_t>(columns) * sizeof(float));
}
