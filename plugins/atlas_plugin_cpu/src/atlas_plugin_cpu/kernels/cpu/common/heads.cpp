// Norms of single heads, and products with gates.

#include "rows.h"

namespace {

// 1 / sqrt(mean(x^2) + eps) of one head.
ATLAS_INLINE float inverse_rms(const float* x, int dim, float eps) {
    return 1.0f / sqrtf(sum_of_squares(x, dim) / static_cast<float>(dim) + eps);
}

}  // namespace

void head_rms_norm(const int32_t* counts, int32_t live, const float* x, const float* weight, float* y, int32_t columns,
                   int32_t head_dim, float eps, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (size_t at = static_cast<size_t>(mine.first) * columns; at < static_cast<size_t>(mine.last) * columns;
         at += head_dim) {
        const f32x16 scale = splat(inverse_rms(x + at, head_dim, eps));
        across(head_dim, [&](int k, int n)
                             ATLAS_FLAT { put(y + at + k, take(x + at + k, n) * scale * take(weight + k, n), n); });
    }
}

void gated_rms_norm(const int32_t* counts, int32_t live, const float* x, const float* gate, const float* weight,
                    float* y, int32_t columns, int32_t head_dim, float eps, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (size_t at = static_cast<size_t>(mine.first) * columns; at < static_cast<size_t>(mine.last) * columns;
         at += head_dim) {
        const f32x16 scale = splat(inverse_rms(x + at, head_dim, eps));
        across(head_dim, [&](int k, int n) ATLAS_FLAT {
            const f32x16 g = take(gate + at + k, n);
            put(y + at + k, take(x + at + k, n) * scale * take(weight + k, n) * (g * sigmoid(g)), n);
        });
    }
}

void l2_norm(const int32_t* counts, int32_t live, const float* x, float* y, int32_t columns, int32_t heads,
             int32_t head_dim, float eps, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    const int width = heads * head_dim;
    for (int row = mine.first; row < mine.last; ++row) {
        const float* in = x + static_cast<size_t>(row) * columns;
        float* out = y + static_cast<size_t>(row) * columns;
        for (int at = 0; at < width; at += head_dim) {
            const f32x16 scale = splat(1.0f / sqrtf(sum_of_squares(in + at, head_dim) + eps));
            across(head_dim, [&](int k, int n) ATLAS_FLAT { put(out + at + k, take(in + at + k, n) * scale, n); });
        }
        memcpy(out + width, in + width, static_cast<size_t>(columns - width) * sizeof(float));
    }
}

void sigmoid_mul(const int32_t* counts, int32_t live, const float* x, const float* gate, float* y, int32_t columns,
                 int32_t gates, int task, int ntasks) {
    const Share mine = share(counts[live], task, ntasks);
    for (int row = mine.first; row < mine.last; ++row) {
        const size_t base = static_cast<size_t>(row) * columns;
        const float* g = gate + static_cast<size_t>(row) * gates;
        if (gates == 1) {
            const f32x16 scale = sigmoid(splat(g[0]));
            across(columns, [&](int k, int n) ATLAS_FLAT { put(y + base + k, take(x + base + k, n) * scale, n); });
        } else {
            across(columns, [&](int k, int n)
                                ATLAS_FLAT { put(y + base + k, take(x + base + k, n) * sigmoid(take(g + k, n)), n); });
        }
    }
}
