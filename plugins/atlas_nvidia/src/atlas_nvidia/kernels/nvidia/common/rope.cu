// Rotary position embedding and the write of keys and values into pages, for any number of tokens.
#include "device.cuh"

using namespace atlas;

// One thread a pair (i, i + half) of one head of one token; dimensions behind the rotated part are copied.
extern "C" __global__ void __launch_bounds__(256)
rope(const int32_t* counts, const uint16_t* x, const int32_t* positions, const float* inv_freq, uint16_t* y,
     int32_t heads, int32_t head_dim, int32_t half, float scale) {
    admit_successor();
    wait_for_predecessor();
    const int pairs = head_dim - half;  // rotated pairs, then single dimensions
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t row = index / pairs;  // (token, head)
    const int i = static_cast<int>(index % pairs);
    const int token = static_cast<int>(row / heads);
    if (token >= counts[ATLAS_TOKENS]) return;
    const uint16_t* from = x + row * head_dim;
    uint16_t* to = y + row * head_dim;
    if (i >= half) {
        to[half + i] = from[half + i];
        return;
    }
    float sine, cosine;
    rotation(positions[token], inv_freq[i], scale, sine, cosine);
    const float a = widen(from[i]), b = widen(from[half + i]);
    to[i] = narrow(a * cosine - b * sine);
    to[half + i] = narrow(b * cosine + a * sine);
}

// 8 elements of keys and of values a thread. The layer's pages start at cache.
extern "C" __global__ void __launch_bounds__(256)
kv_append(const int32_t* counts, const uint16_t* k, const uint16_t* v, const int32_t* positions,
          const int32_t* token_row, const int32_t* row_slot, const int32_t* slots, uint16_t* cache, int32_t kv_heads,
          int32_t head_dim, int32_t page_tokens, int32_t slot_stride, int32_t table_offset) {
    admit_successor();
    wait_for_predecessor();
    const int width = kv_heads * head_dim;
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    const int token = static_cast<int>(index / width);
    if (token >= counts[ATLAS_TOKENS]) return;
    const int head = static_cast<int>(index % width) / head_dim, dim = static_cast<int>(index % head_dim);
    const int position = positions[token];
    const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
    const int page = slots[slot + table_offset + position / page_tokens];
    const int place = position % page_tokens;
    uint16_t* key = cache + page_element(page, 0, head, place, kv_heads, page_tokens, head_dim) + dim;
    uint16_t* value = cache + page_element(page, 1, head, place, kv_heads, page_tokens, head_dim) + dim;
    *reinterpret_cast<uint4*>(key) = load16(k + index);
    *reinterpret_cast<uint4*>(value) = load16(v + index);
}
