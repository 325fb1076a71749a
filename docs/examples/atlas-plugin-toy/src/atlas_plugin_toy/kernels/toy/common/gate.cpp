// y = gate / (1 + e^-gate) * up, row by row.

#include <math.h>
#include <stddef.h>

void silu_mul(const int32_t* counts, int32_t live, const float* gate, const float* up, float* y, int32_t columns, int task,
              int ntasks) {
    // The launch was fixed when the step was captured; how many rows there are this time is read now.
    const int32_t rows = counts[live];
    for (int32_t row = task; row < rows; row += ntasks) {
        const size_t base = static_cast<size_t>(row) * columns;
        for (int32_t k = 0; k < columns; ++k) y[base + k] = gate[base + k] / (1.0f + expf(-gate[base + k])) * up[base + k];
    }
}
