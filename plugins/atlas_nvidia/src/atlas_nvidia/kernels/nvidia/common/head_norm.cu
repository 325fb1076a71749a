// Root mean square norms of single heads, alone and with the rotation and the write into pages that follow.
// A head is held by 2^n neighbouring lanes, 8 dimensions each; lanes behind the head have zeros.
#include "device.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = 256, MOST_PAIRS = 128;

// Which head of which row this lane has a part of.
struct Part {
    int64_t row;
    int head, dim;

    __device__ Part(int lanes, int heads) {
        const int64_t thread = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x, index = thread / lanes;
        row = index / heads;
        head = static_cast<int>(index % heads);
        dim = static_cast<int>(thread % lanes) * 8;
    }
};

// 1 / the root mean square of a head of which this lane has 8 dimensions.
__device__ float norm_factor(const float (&v)[8], int head_dim, int lanes, float eps) {
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) square += v[i] * v[i];
    for (int distance = lanes / 2; distance > 0; distance /= 2) square += __shfl_xor_sync(~0u, square, distance);
    return rsqrtf(square / static_cast<float>(head_dim) + eps);
}

__device__ void fetch(const uint16_t* from, bool exists, float (&v)[8]) {
    unpack(exists ? load16(from) : zero16(), v);
}

__device__ void store(uint16_t* to, const float (&v)[8]) { *reinterpret_cast<uint4*>(to) = pack8(v); }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
head_rms_norm(const int32_t* counts, int32_t live_word, const uint16_t* x, const void* weight, uint16_t* y,
              int32_t heads, int32_t head_dim, int32_t lanes, float eps, int32_t weight_type) {
    admit_successor();
    wait_for_predecessor();
    const Part part(lanes, heads);
    const bool mine = part.row < counts[live_word] && part.dim < head_dim;
    const int64_t element = (part.row * heads + part.head) * head_dim + part.dim;
    float v[8];
    fetch(x + element, mine, v);
    const float factor = norm_factor(v, head_dim, lanes, eps);
    if (!mine) return;
    float w[8];
    load_vector(weight, part.dim, weight_type, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= factor * w[i];
    store(y + element, v);
}

// Norms and rotation of queries and keys, and the write of keys and values into pages. A block has some heads of one token,
// which turn by the same angles; grid: (tokens, groups of heads). Rotated dimensions come first in a head; ``half`` of
// them, a power of two of at least 8 and at most MOST_PAIRS, are first partners.
extern "C" __global__ void __launch_bounds__(THREADS)
heads_rope_append(const int32_t* counts, const uint16_t* q_plain, const uint16_t* k_plain, const uint16_t* v,
                  const void* q_weight, const void* k_weight, const int32_t* positions, const float* inv_freq,
                  const int32_t* token_row, const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q,
                  int32_t q_heads, int32_t kv_heads, int32_t head_dim, int32_t half, int32_t lanes, int32_t page_tokens,
                  int32_t slot_stride, int32_t table_offset, float eps, float rope_scale, int32_t q_type,
                  int32_t k_type) {
    __shared__ __align__(16) float sines[MOST_PAIRS], cosines[MOST_PAIRS];
    admit_successor();
    const int64_t token = blockIdx.x;
    if (token >= counts[ATLAS_TOKENS]) {
        wait_for_predecessor();
        return;
    }
    // All of this is older than the predecessor.
    const int position = positions[token], dim = threadIdx.x % lanes * 8;
    if (threadIdx.x < half) {
        rotation(position, inv_freq[threadIdx.x], rope_scale, sines[threadIdx.x], cosines[threadIdx.x]);
    }
    const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
    const int64_t page = slots[slot + table_offset + position / page_tokens];
    const int any = blockIdx.y * (THREADS / lanes) + threadIdx.x / lanes;
    const bool mine = any < q_heads + 2 * kv_heads && dim < head_dim;
    const int kind = any < q_heads ? 0 : any < q_heads + kv_heads ? 1 : 2;
    const int head = any - (kind == 0 ? 0 : kind == 1 ? q_heads : q_heads + kv_heads);
    float weight[8] = {};
    if (mine && kind != 2) load_vector(kind == 0 ? q_weight : k_weight, dim, kind == 0 ? q_type : k_type, weight);
    __syncthreads();
    const bool first = dim < half, rotated = dim < 2 * half;
    float sine[8] = {}, cosine[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) cosine[i] = 1.0f;
    if (rotated) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 s = *reinterpret_cast<const float4*>(sines + dim % half + i);
            const float4 c = *reinterpret_cast<const float4*>(cosines + dim % half + i);
            sine[i] = s.x, sine[i + 1] = s.y, sine[i + 2] = s.z, sine[i + 3] = s.w;
            cosine[i] = c.x, cosine[i + 1] = c.y, cosine[i + 2] = c.z, cosine[i + 3] = c.w;
        }
    }
    wait_for_predecessor();
    const int64_t element = (token * (kind == 0 ? q_heads : kv_heads) + head) * head_dim + dim;
    float values[8];
    fetch((kind == 0 ? q_plain : kind == 1 ? k_plain : v) + element, mine, values);
    // Heads of every kind may meet in one warp: all of its lanes take part in every exchange.
    const float factor = norm_factor(values, head_dim, lanes, eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float normed = values[i] * factor * weight[i];
        const float other = __shfl_xor_sync(~0u, normed, half / 8);
        if (kind != 2) values[i] = normed * cosine[i] + (first ? -other : other) * sine[i];
    }
    if (!mine) return;
    if (kind == 0) {
        store(q + element, values);
    } else {
        const int64_t at = page_element(page, kind - 1, head, position % page_tokens, kv_heads, page_tokens, head_dim);
        store(cache + at + dim, values);
    }
}
