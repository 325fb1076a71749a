// Bias, mask and penalties, CHUNK tokens of one row a block; with skip_plain only of rows that have any. Every operation is rounded by itself, as in the reference.
#include "logits.cuh"

using namespace atlas;

namespace {
constexpr int CHUNK = 2048, PROMPT_BIT = 1 << 30;
}

extern "C" __global__ void __launch_bounds__(256)
process_logits(const int32_t* counts, const float* logits, const int32_t* sample_row, const int32_t* row_slot,
               const int32_t* slots, const int32_t* penalty, const uint32_t* mask, float* y, int32_t vocabulary,
               int32_t slot_stride, int32_t bias_start, int32_t skip_plain) {
    __shared__ float value[CHUNK];
    admit_successor();
    wait_for_predecessor();
    const int index = blockIdx.y, first = blockIdx.x * CHUNK, end = min(first + CHUNK, vocabulary);
    if (index >= counts[ATLAS_ROWS]) return;
    const float* from = logits + static_cast<int64_t>(index) * vocabulary;
    float* to = y + static_cast<int64_t>(index) * vocabulary;
    const int row = sample_row[index];
    if (skip_plain && (row < 0 || plain_logits(slots + static_cast<int64_t>(row_slot[row]) * slot_stride))) return;
    if (row < 0) {
        for (int id = first + threadIdx.x; id < end; id += blockDim.x) to[id] = from[id];
        return;
    }
    const int slot_index = row_slot[row];
    const int32_t* slot = slots + static_cast<int64_t>(slot_index) * slot_stride;
    for (int id = first + threadIdx.x; id < end; id += blockDim.x) value[id - first] = from[id];
    __syncthreads();
    const int32_t* pairs = slots + bias_start + 2 * static_cast<int64_t>(slot[ATLAS_BIAS_START]);
    for (int pair = threadIdx.x; pair < slot[ATLAS_BIAS_COUNT]; pair += blockDim.x) {
        const int id = pairs[2 * pair];
        if (id >= first && id < end) atomicAdd(&value[id - first], __int_as_float(pairs[2 * pair + 1]));
    }
    __syncthreads();
    const int64_t mask_row = slot_index, penalty_row = slot[ATLAS_PENALTY_ROW];
    const uint32_t* words = slot[ATLAS_MASK] ? mask + mask_row * ((vocabulary + 31) / 32) : nullptr;
    const int32_t* seen = penalty_row >= 0 ? penalty + penalty_row * vocabulary : nullptr;
    const float repetition = __int_as_float(slot[ATLAS_REPETITION]), frequency = __int_as_float(slot[ATLAS_FREQUENCY]);
    const float presence = __int_as_float(slot[ATLAS_PRESENCE]);
    for (int id = first + threadIdx.x; id < end; id += blockDim.x) {
        float v = value[id - first];
        if (words && !(words[id / 32] >> id % 32 & 1)) v = -INFINITY;
        const int count = seen ? seen[id] : 0;
        if (count != 0) {
            v = v > 0.0f ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
            const int generated = count & (PROMPT_BIT - 1);
            v = __fsub_rn(v, __fmul_rn(frequency, static_cast<float>(generated)));
            v = __fsub_rn(v, generated > 0 ? presence : 0.0f);
        }
        to[id] = v;
    }
}
