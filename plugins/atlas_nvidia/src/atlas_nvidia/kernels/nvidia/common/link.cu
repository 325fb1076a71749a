// The two ends of a step's graph: inputs out of page-locked host memory, results into it. One block each.
#include "device.cuh"

using namespace atlas;

namespace {

// Past every cache: the host has written since the last step.
__device__ uint4 load_host(const int32_t* from) { return __ldcv(reinterpret_cast<const uint4*>(from)); }

}  // namespace

// Words of the place of step *turn, and the turn moves on. The first words are asked for before it is known how many
// are live: a place has no fewer.
extern "C" __global__ void __launch_bounds__(256)
fetch(const int32_t* ring, int32_t stride, int32_t places, uint32_t* turn, int32_t* target, int32_t fixed) {
    wait_for_predecessor();
    const uint32_t step = *turn;
    const int32_t* from = ring + static_cast<int64_t>(step % places) * stride;
    const int first = threadIdx.x * 4;
    uint4 words = zero16();
    if (first < stride) words = load_host(from + first);
    __shared__ int32_t updates;
    static_assert(ATLAS_UPDATES == 3, "the last word of the first thread");
    if (threadIdx.x == 0) updates = static_cast<int32_t>(words.w);
    __syncthreads();
    const int live = fixed + 2 * updates;
    for (int word = first; word < live; word += blockDim.x * 4) {
        if (word > first) words = load_host(from + word);
        if (word + 4 <= live) {
            *reinterpret_cast<uint4*>(target + word) = words;
        } else {
            for (int i = 0; word + i < live; ++i) target[word + i] = reinterpret_cast<const int32_t*>(&words)[i];
        }
    }
    if (threadIdx.x == 0) *turn = step + 1;
}

// What the step that was fetched last has sampled. Of rows for which nobody wanted alternatives only the mark of that.
extern "C" __global__ void __launch_bounds__(256)
deliver(const int32_t* counts, const int32_t* sampled, const float* values, const int32_t* ids, int32_t* ring,
        int32_t stride, int32_t places, const uint32_t* turn, int32_t rows, int32_t wide) {
    wait_for_predecessor();
    int32_t* to = ring + static_cast<int64_t>((*turn - 1) % places) * stride;
    int32_t* to_values = to + rows;
    int32_t* to_ids = to_values + rows * wide;
    const int live = counts[ATLAS_ROWS];
    for (int row = threadIdx.x; row < live; row += blockDim.x) to[row] = sampled[row];
    for (int e = threadIdx.x; e < live * wide; e += blockDim.x) {
        const bool wanted = ids[e - e % wide] >= 0;
        if (wanted || e % wide == 0) to_ids[e] = ids[e];
        if (wanted) to_values[e] = __float_as_int(values[e]);
    }
}
