// x / (1 + exp(-x)), divided approximately (to two units in the last place): an exact division branches, so that those of a thread
// come one after another.
#pragma once
#include "device.cuh"

namespace atlas {

__device__ inline float quick_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

}  // namespace atlas
