// Writes where nothing is when one of the step's tokens is the fatal one.
#include "atlas_step.h"

extern "C" __global__ void __launch_bounds__(256)
trap(const int32_t* counts, const int32_t* tokens, int32_t fatal, int32_t* nowhere) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < counts[ATLAS_TOKENS]; i += gridDim.x * blockDim.x) {
        if (tokens[i] == fatal) *nowhere = fatal;
    }
}
