// e2m1 conversions of whole arrays, each in the form of this architecture and as the twin: on a GB10 the two can be compared
// for every input. Element 2i of an array is in the lower half of byte i.
#include "sm12x.cuh"

using namespace atlas;

namespace {

template <class Convert>
__device__ void each_pair(int64_t pairs, Convert convert) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += step) convert(i);
}

}  // namespace

extern "C" __global__ void e2m1_encode(const float* x, uint8_t* codes, int64_t pairs) {
    each_pair(pairs, [&](int64_t i) { codes[i] = static_cast<uint8_t>(atlas::e2m1_encode(x[2 * i], x[2 * i + 1])); });
}

extern "C" __global__ void e2m1_encode_twin(const float* x, uint8_t* codes, int64_t pairs) {
    each_pair(pairs, [&](int64_t i) {
        codes[i] = static_cast<uint8_t>(atlas::e2m1_encode_twin(__float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1])));
    });
}

extern "C" __global__ void e2m1_decode(const uint8_t* codes, uint32_t* y, int64_t pairs) {
    each_pair(pairs, [&](int64_t i) { y[i] = atlas::e2m1_decode(codes[i]); });
}

extern "C" __global__ void e2m1_decode_twin(const uint8_t* codes, uint32_t* y, int64_t pairs) {
    each_pair(pairs, [&](int64_t i) { y[i] = atlas::e2m1_decode_twin(codes[i]); });
}
