// A warp of one lane on a CPU, for what attention_items.cuh takes from the device.
#pragma once
#include <stdint.h>

#include <algorithm>

#include "atlas_step.h"

#define __device__

namespace atlas {

using std::max;
using std::min;

constexpr int WARP = 1;
struct {
    unsigned x;
} constexpr threadIdx{0};

inline int __shfl_xor_sync(unsigned, int value, int) { return value; }
inline int __shfl_up_sync(unsigned, int value, int) { return value; }
inline int __shfl_sync(unsigned, int value, int) { return value; }
inline unsigned __ballot_sync(unsigned, bool found) { return found; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline int atomicAdd(int* counter, int value) {
    const int before = *counter;
    *counter += value;
    return before;
}
inline void __syncwarp() {}
inline void wait_for_predecessor() {}

}  // namespace atlas
