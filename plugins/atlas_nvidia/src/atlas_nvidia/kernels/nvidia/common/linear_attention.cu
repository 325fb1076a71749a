// A decode step of linear attention in one launch: convolution, lengths of queries and keys, the gated delta rule and
// the gated norm behind it, for heads of 128. States are read and written once.
//
// A block has a value head of one row, its state in shared memory, asked for before the predecessor has ended; a
// processor has three of them under way. Reads of the old state yield both products, with the key and with the query:
// Sᵀq after the update is Sᵀq before it plus the key's share, so that nothing waits for the new state. Value heads of
// one key head are a cluster, only because they must not overwrite each other's inputs of the convolution.
#include "recurrent.cuh"

using namespace atlas;

namespace {

constexpr int DIM = 128, THREADS = 256, WARPS = THREADS / WARP, KEYS = DIM / WARPS, TAPS = 4, BEFORE = TAPS - 1;
// So many blocks fit into the shared memory of a processor.
#if __CUDA_ARCH__ >= 1000
constexpr int BLOCKS = 1;
#else
constexpr int BLOCKS = 3;
#endif
constexpr int CHANNELS = 3 * DIM, EACH = (CHANNELS + THREADS - 1) / THREADS;

struct Shared {
    float4 state[DIM][WARP];         // every thread reads what it has copied: 4 values of every 8th key
    float4 products[WARPS][2][WARP]; // with the key and with the query
    float inputs[CHANNELS];          // query, key, values behind the convolution
    float squares[WARPS][3];         // of the query, of the key, and their product
};

__device__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// States are read and written once a step: they leave the L2 cache first.
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;  // what createpolicy.fractional makes of evict_first and 1.0

__device__ void fetch_once(uint32_t target, const float* source, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 ::"r"(target), "l"(source), "r"(valid ? 16 : 0), "l"(EVICT_FIRST) : "memory");
}

__device__ void add(float (&sum)[4], const float4& v, float by) {
    sum[0] += v.x * by;
    sum[1] += v.y * by;
    sum[2] += v.z * by;
    sum[3] += v.w * by;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
linear_attention_step(const int32_t* counts, const uint16_t* qkv, const uint16_t* a, const uint16_t* b,
                      const uint16_t* gate, const void* filters, const void* a_log, const void* dt_bias,
                      const void* norm_weight, const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots,
                      float* conv_state, float* state, uint16_t* y, int32_t key_heads, int32_t value_heads,
                      int32_t slot_stride, float scale, float l2_eps, float norm_eps, int32_t filters_type,
                      int32_t a_log_type, int32_t dt_bias_type, int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    admit_successor();
    const int key_head = blockIdx.y, head = key_head * gridDim.x + blockIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const StateRow row = live_row(counts, cu_q, row_slot, slots, slot_stride, blockIdx.z);
    if (row.tokens == 0) {
        wait_for_predecessor();
        return;
    }
    const int64_t size = DIM * DIM, own = warp * DIM + lane * 4;
    const float* before = state + (static_cast<int64_t>(row.in) * value_heads + head) * size + own;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        fetch_once(shared_address(&shared.state[warp + j * WARPS][lane]), before + j * WARPS * DIM, !row.fresh());
    }
    commit_copies();
    const int features = key_heads * DIM, channels = 2 * features + value_heads * DIM;
    int channel[EACH];
    float taps[EACH][TAPS], old[EACH][BEFORE];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        channel[e] = c < DIM ? key_head * DIM + c
                             : c < 2 * DIM ? features + key_head * DIM + c - DIM : 2 * features + head * DIM + c - 2 * DIM;
        if (c >= CHANNELS) continue;
        load_taps(filters, channel[e], filters_type, taps[e]);
        const float* from = conv_state + static_cast<int64_t>(row.in) * BEFORE * channels + channel[e];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) old[e][i] = row.fresh() ? 0.0f : from[i * channels];
    }
    const float rate = load_element(a_log, head, a_log_type), bias = load_element(dt_bias, head, dt_bias_type);
    float weight[4] = {};
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[i] = load_element(norm_weight, lane * 4 + i, norm_type);
    }
    wait_for_predecessor();

    const int64_t token = row.first, result = (token * value_heads + head) * DIM + lane * 4;
    float now[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        if (c < CHANNELS) now[e] = widen(qkv[token * channels + channel[e]]);
    }
    const float decay = exp2f(decay_log2(widen(a[token * value_heads + head]), rate, bias));
    const float beta = sigmoid(widen(b[token * value_heads + head]));
    uint2 gates = make_uint2(0, 0);
    if (warp == 0) gates = *reinterpret_cast<const uint2*>(gate + result);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        if (c >= CHANNELS) continue;
        float sum = now[e] * taps[e][BEFORE];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) sum += old[e][i] * taps[e][i];
        shared.inputs[c] = silu(sum);
    }
    arrive();  // here nobody needs the old inputs any more
    wait_copies<0>();
    __syncthreads();
    const float *query = shared.inputs + warp, *key = query + DIM;
    float known[4] = {}, asked[4] = {}, qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float q = query[j * WARPS], k = key[j * WARPS];
        const float4 s = shared.state[warp + j * WARPS][lane];
        add(known, s, k);
        add(asked, s, q);
        qq += q * q;
        kk += k * k;
        qk += q * k;
    }
    shared.products[warp][0][lane] = make_float4(known[0], known[1], known[2], known[3]);
    shared.products[warp][1][lane] = make_float4(asked[0], asked[1], asked[2], asked[3]);
    if (lane == 0) {
        shared.squares[warp][0] = qq;
        shared.squares[warp][1] = kk;
        shared.squares[warp][2] = qk;
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
    const float by_key = rsqrtf(kk + l2_eps);
    float error[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        error[i] = beta * (shared.inputs[2 * DIM + lane * 4 + i] - decay * by_key * known[i]) * by_key;
    }
    float* after = state + (static_cast<int64_t>(row.out) * value_heads + head) * size + own;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const float k = key[j * WARPS];
        const float4 s = shared.state[warp + j * WARPS][lane];
        __stcs(reinterpret_cast<float4*>(after + j * WARPS * DIM),
               make_float4(decay * s.x + k * error[0], decay * s.y + k * error[1], decay * s.z + k * error[2],
                           decay * s.w + k * error[3]));
    }
    if (warp == 0) {
        const float by_query = rsqrtf(qq + l2_eps) * scale;
        float out[4], square = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = by_query * (decay * asked[i] + qk * error[i]);
            square += out[i] * out[i];
        }
        const float factor = rsqrtf(warp_sum(square) / DIM + norm_eps);
        const uint32_t words[2] = {gates.x, gates.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] *= factor * weight[i] * silu(widen(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)));
        }
        *reinterpret_cast<uint2*>(y + result) = make_uint2(pack(out[0], out[1]), pack(out[2], out[3]));
    }
    await();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = threadIdx.x + e * THREADS;
        // Queries and keys are known to all blocks of the cluster: each writes some.
        if (c >= CHANNELS || (c < 2 * DIM && c / WARP % gridDim.x != blockIdx.x)) continue;
        float* to = conv_state + static_cast<int64_t>(row.out) * BEFORE * channels + channel[e];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) to[i * channels] = i + 1 < BEFORE ? old[e][i + 1] : now[e];
    }
}
