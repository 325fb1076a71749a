// A decode step of linear attention in one launch: convolution, lengths of queries and keys, the gated delta rule and
// the gated norm behind it, for heads of 128. States are read and written once.
//
// A cluster has one key head of one row: SLICES blocks for each value head that shares it, each with DIM / SLICES
// values. A thread keeps 8 keys of 4 values of the state in registers, asked for before the predecessor has ended.
// Reads of the old state yield both products, with the key and with the query (Sᵀq after the update is Sᵀq before it
// plus the key's share), so that results are ready before the new state is written. Blocks of a cluster exchange the
// squares of their results; their barrier also keeps inputs of the convolution from being overwritten too early.
#include <cooperative_groups.h>

#include "recurrent.cuh"

#ifndef SLICES
#define SLICES 4
#endif

using namespace atlas;

namespace {

constexpr int DIM = 128, VALUES = DIM / SLICES, LANES = VALUES / 4, GROUPS = 16, KEYS = DIM / GROUPS;
constexpr int THREADS = LANES * GROUPS, WARPS = THREADS / WARP, TAPS = 4, BEFORE = TAPS - 1;
constexpr int CHANNELS = 2 * DIM + VALUES, EACH = (CHANNELS + THREADS - 1) / THREADS;

struct Shared {
    float inputs[CHANNELS];          // query, key, values behind the convolution
    float4 products[WARPS][2][LANES];  // with the key and with the query
    float squares[WARPS][3];         // of the query, of the key, and their product
    float results[SLICES];           // squares of the results of all blocks of this value head
};

__device__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ void add(float (&sum)[4], const float4& v, float by) {
    sum[0] += v.x * by;
    sum[1] += v.y * by;
    sum[2] += v.z * by;
    sum[3] += v.w * by;
}

__device__ float over_groups(float v) {
#pragma unroll
    for (int distance = LANES; distance < WARP; distance *= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
linear_attention_step(const int32_t* counts, const uint16_t* qkv, const uint16_t* a, const uint16_t* b,
                      const uint16_t* gate, const void* filters, const void* a_log, const void* dt_bias,
                      const void* norm_weight, const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots,
                      float* conv_state, float* state, uint16_t* y, int32_t key_heads, int32_t value_heads,
                      int32_t slot_stride, float scale, float l2_eps, float norm_eps, int32_t filters_type,
                      int32_t a_log_type, int32_t dt_bias_type, int32_t norm_type) {
    __shared__ Shared shared;
    admit_successor();
    const int rank = blockIdx.x, ranks = gridDim.x, key_head = blockIdx.y;
    const int head = key_head * (value_heads / key_heads) + rank / SLICES, slice = rank % SLICES;
    const StateRow row = live_row(counts, cu_q, row_slot, slots, slot_stride, blockIdx.z);
    if (row.tokens == 0) {
        wait_for_predecessor();
        return;
    }
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, warp = threadIdx.x / WARP;
    const int64_t size = DIM * DIM, own = static_cast<int64_t>(group) * DIM + slice * VALUES + lane * 4;
    const float* before = state + (static_cast<int64_t>(row.in) * value_heads + head) * size + own;
    float* after = state + (static_cast<int64_t>(row.out) * value_heads + head) * size + own;
    float4 s[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        s[j] = row.fresh() ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                           : *reinterpret_cast<const float4*>(before + j * GROUPS * DIM);
    }
    const int features = key_heads * DIM, channels = 2 * features + value_heads * DIM;
    int channel[EACH];
    float taps[EACH][TAPS], old[EACH][BEFORE];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        channel[e] = c < DIM ? key_head * DIM + c
                             : c < 2 * DIM ? features + key_head * DIM + c - DIM
                                           : 2 * features + head * DIM + slice * VALUES + c - 2 * DIM;
        if (c >= CHANNELS) continue;
        load_taps(filters, channel[e], filters_type, taps[e]);
        const float* from = conv_state + static_cast<int64_t>(row.in) * BEFORE * channels + channel[e];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) old[e][i] = row.fresh() ? 0.0f : from[i * channels];
    }
    const float rate = load_element(a_log, head, a_log_type), bias = load_element(dt_bias, head, dt_bias_type);
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = load_element(norm_weight, slice * VALUES + lane * 4 + i, norm_type);
    wait_for_predecessor();

    const int64_t token = row.first;
    float now[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        if (c < CHANNELS) now[e] = widen(qkv[token * channels + channel[e]]);
    }
    const float decay = exp2f(decay_log2(widen(a[token * value_heads + head]), rate, bias));
    const float beta = sigmoid(widen(b[token * value_heads + head]));
    const int64_t result = (token * value_heads + head) * DIM + slice * VALUES + lane * 4;
    const uint2 gates = *reinterpret_cast<const uint2*>(gate + result);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= CHANNELS) continue;
        float sum = now[e] * taps[e][BEFORE];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) sum += old[e][i] * taps[e][i];
        shared.inputs[c] = silu(sum);
    }
    arrive();  // here nobody needs the old inputs any more, and everybody has begun
    __syncthreads();
    const float *query = shared.inputs + group, *key = query + DIM;
    float known[4] = {}, asked[4] = {};
    float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float q = query[j * GROUPS], k = key[j * GROUPS];
        add(known, s[j], k);
        add(asked, s[j], q);
        qq += q * q;
        kk += k * k;
        qk += q * k;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        known[i] = over_groups(known[i]);
        asked[i] = over_groups(asked[i]);
    }
    qq = over_groups(qq);
    kk = over_groups(kk);
    qk = over_groups(qk);
    if (threadIdx.x % WARP < LANES) {
        shared.products[warp][0][lane] = make_float4(known[0], known[1], known[2], known[3]);
        shared.products[warp][1][lane] = make_float4(asked[0], asked[1], asked[2], asked[3]);
        if (lane == 0) {
            shared.squares[warp][0] = qq;
            shared.squares[warp][1] = kk;
            shared.squares[warp][2] = qk;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) known[i] = asked[i] = 0.0f;
    qq = kk = qk = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        add(known, shared.products[w][0][lane], 1.0f);
        add(asked, shared.products[w][1][lane], 1.0f);
        qq += shared.squares[w][0];
        kk += shared.squares[w][1];
        qk += shared.squares[w][2];
    }
    const float by_key = rsqrtf(kk + l2_eps), by_query = rsqrtf(qq + l2_eps) * scale;
    float error[4], out[4], square = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float value = shared.inputs[2 * DIM + lane * 4 + i];
        error[i] = beta * (value - decay * by_key * known[i]) * by_key;
        out[i] = by_query * (decay * asked[i] + qk * error[i]);
        square += out[i] * out[i];
    }
    square = lanes_sum(square, LANES);
    await();
    if (threadIdx.x < SLICES) {
        auto cluster = cooperative_groups::this_cluster();
        cluster.map_shared_rank(&shared, rank - slice + threadIdx.x)->results[slice] = square;
    }
    arrive();
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float k = key[j * GROUPS];
        *reinterpret_cast<float4*>(after + j * GROUPS * DIM) =
            make_float4(decay * s[j].x + k * error[0], decay * s[j].y + k * error[1], decay * s[j].z + k * error[2],
                        decay * s[j].w + k * error[3]);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        // Queries and keys are known to all blocks of the cluster: each writes some.
        if (c >= CHANNELS || (c < 2 * DIM && c / WARP % ranks != rank)) continue;
        float* to = conv_state + static_cast<int64_t>(row.out) * BEFORE * channels + channel[e];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) to[i * channels] = i + 1 < BEFORE ? old[e][i + 1] : now[e];
    }
    await();
    if (group != 0) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) total += shared.results[i];
    const float factor = rsqrtf(total / DIM + norm_eps);
    const uint32_t words[2] = {gates.x, gates.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[i] *= factor * weight[i] * silu(widen(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)));
    }
    *reinterpret_cast<uint2*>(y + result) = make_uint2(pack(out[0], out[1]), pack(out[2], out[3]));
}
