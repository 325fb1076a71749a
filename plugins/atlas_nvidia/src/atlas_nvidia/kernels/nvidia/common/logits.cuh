// What the kernels that handle logits share.
#pragma once
#include "device.cuh"

namespace atlas {

// Whether a slot's logits are sampled as they are: no bias, no mask, no penalties.
__device__ inline bool plain_logits(const int32_t* slot) {
    return slot[ATLAS_BIAS_COUNT] == 0 && slot[ATLAS_MASK] == 0 && slot[ATLAS_PENALTY_ROW] < 0;
}

}  // namespace atlas
