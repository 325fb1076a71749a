// The beginning and the end of a step: bookkeeping of slots, one block each.
#include "device.cuh"

using namespace atlas;

namespace {

constexpr int PROMPT_BIT = 1 << 30;

// The row whose tokens [cu_q[row], cu_q[row + 1]) hold this one.
__device__ int row_of(const int32_t* cu_q, int sequences, int token) {
    int first = 0, last = sequences - 1;
    while (first < last) {
        const int middle = (first + last + 1) / 2;
        if (cu_q[middle] <= token) first = middle;
        else last = middle - 1;
    }
    return first;
}

// One warp, 32 updates at a time.
__device__ void apply_in_order(const int2* updates, int count, int32_t* slots) {
    const int lane = threadIdx.x;
    for (int start = 0; start < count; start += WARP) {
        const bool valid = start + lane < count;
        const int2 update = valid ? updates[start + lane] : make_int2(-1 - lane, 0);
        const unsigned same = __match_any_sync(~0u, update.x);
        if (valid && lane == 31 - __clz(same)) slots[update.x] = update.y;
        __syncwarp();
    }
}

// As if they were applied in order: where several name one word the last one wins. Nearly always none do: all threads
// write at once, and where a word then has another value than its update said, one warp does it again in order.
__device__ void apply_updates(const int2* updates, int count, int32_t* slots) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) slots[updates[i].x] = updates[i].y;
    __syncthreads();
    bool lost = false;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        lost |= *reinterpret_cast<volatile int32_t*>(&slots[updates[i].x]) != updates[i].y;
    }
    if (__syncthreads_or(lost) && threadIdx.x < WARP) apply_in_order(updates, count, slots);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024)
step_begin(const int32_t* counts, const int32_t* updates, const int32_t* token_ids, const int32_t* cu_q,
           const int32_t* row_slot, int32_t* slots, int32_t* penalty, int32_t* tokens, int32_t* positions,
           int32_t* token_row, int32_t slot_stride, int32_t vocabulary) {
    wait_for_predecessor();
    apply_updates(reinterpret_cast<const int2*>(updates), counts[ATLAS_UPDATES], slots);
    __syncthreads();
    const int sequences = counts[ATLAS_SEQUENCES];
    if (sequences == 0) return;
    const int total = cu_q[sequences];
    for (int index = threadIdx.x; index < total; index += blockDim.x) {
        const int row = row_of(cu_q, sequences, index);
        const int32_t* slot = slots + static_cast<int64_t>(row_slot[row]) * slot_stride;
        const int given = token_ids[index];
        const int token = given < 0 ? slot[ATLAS_LAST_TOKEN] : given;
        const int position = slot[ATLAS_POSITION] + index - cu_q[row];
        tokens[index] = token;
        positions[index] = position;
        token_row[index] = row;
        if (slot[ATLAS_PENALTY_ROW] >= 0) {
            int32_t* count = penalty + static_cast<int64_t>(slot[ATLAS_PENALTY_ROW]) * vocabulary + token;
            if (position < slot[ATLAS_PROMPT_LENGTH]) atomicOr(count, PROMPT_BIT);
            else atomicAdd(count, 1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
advance(const int32_t* counts, const int32_t* sampled, const int32_t* sample_row, const int32_t* row_slot,
        const int32_t* cu_q, int32_t* slots, int32_t slot_stride) {
    wait_for_predecessor();
    for (int index = threadIdx.x; index < counts[ATLAS_ROWS]; index += blockDim.x) {
        const int row = sample_row[index];
        if (row >= 0) slots[static_cast<int64_t>(row_slot[row]) * slot_stride + ATLAS_LAST_TOKEN] = sampled[index];
    }
    for (int row = threadIdx.x; row < counts[ATLAS_SEQUENCES]; row += blockDim.x) {
        slots[static_cast<int64_t>(row_slot[row]) * slot_stride + ATLAS_POSITION] += cu_q[row + 1] - cu_q[row];
    }
}
