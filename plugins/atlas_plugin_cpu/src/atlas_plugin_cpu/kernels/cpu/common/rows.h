// Walking over rows of any length in steps of 16 floats.
#pragma once

#include "simd.h"

// Calls f(column, lanes) for every 16 columns of a row; the last call may have fewer lanes.
template <class Each>
ATLAS_INLINE void across(int columns, Each f) {
    int k = 0;
    for (; k + kLanes <= columns; k += kLanes) f(k, kLanes);
    if (k < columns) f(k, columns - k);
}

ATLAS_INLINE f32x16 take(const float* from, int lanes) {
    return lanes == kLanes ? load(from) : load_first(from, lanes);
}

ATLAS_INLINE void put(float* to, f32x16 value, int lanes) {
    if (lanes == kLanes) store(to, value);
    else store_first(to, value, lanes);
}

// The sum of squares of a row, in 16 lanes.
ATLAS_INLINE float sum_of_squares(const float* x, int columns) {
    f32x16 squares = {};
    across(columns, [&](int k, int n) ATLAS_FLAT {
        const f32x16 v = take(x + k, n);
        squares = fma(v, v, squares);
    });
    return sum(squares);
}

ATLAS_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exponential(-x)); }
