// The gated delta rule token by token, for heads of any size: a block has one value head of one row, a thread one of its
// values, the state lies in shared memory. For few tokens, and where no other kernel takes the sizes.
#include "recurrent.cuh"

using namespace atlas;

extern "C" __global__ void __launch_bounds__(256)
gated_delta_rule(const int32_t* counts, const uint16_t* qkv, const uint16_t* a, const uint16_t* b, const void* a_log,
                 const void* dt_bias, const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots, float* state,
                 uint16_t* y, int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim,
                 int32_t slot_stride, float scale, int32_t a_log_type, int32_t dt_bias_type) {
    extern __shared__ __align__(16) float shared[];
    admit_successor();
    wait_for_predecessor();
    const int head = blockIdx.x, key_head = head / (value_heads / key_heads), value = threadIdx.x;
    if (static_cast<int>(blockIdx.y) >= counts[ATLAS_SEQUENCES]) return;
    const StateRow row = state_row(cu_q, row_slot, slots, slot_stride, blockIdx.y);
    if (row.tokens == 0) return;
    const bool real = value < value_dim;
    float* s = shared;                        // [key_dim][value_dim]
    float* query = s + key_dim * value_dim;   // [key_dim]
    float* key = query + key_dim;             // [key_dim]
    const int64_t size = static_cast<int64_t>(key_dim) * value_dim;
    const float* before = state + (static_cast<int64_t>(row.in) * value_heads + head) * size;
    for (int k = 0; k < key_dim && real; ++k) {
        s[k * value_dim + value] = row.fresh() ? 0.0f : before[k * value_dim + value];
    }
    const float rate = load_element(a_log, head, a_log_type), bias = load_element(dt_bias, head, dt_bias_type);
    const int features = key_heads * key_dim, width = 2 * features + value_heads * value_dim;
    for (int token = row.first; token < row.first + row.tokens; ++token) {
        const uint16_t* from = qkv + static_cast<int64_t>(token) * width;
        for (int k = threadIdx.x; k < key_dim; k += blockDim.x) {
            query[k] = widen(from[key_head * key_dim + k]);
            key[k] = widen(from[features + key_head * key_dim + k]);
        }
        const int64_t gate = static_cast<int64_t>(token) * value_heads + head;
        const float decay = exp2f(decay_log2(widen(a[gate]), rate, bias)), beta = sigmoid(widen(b[gate]));
        __syncthreads();
        if (real) {
            float known = 0.0f, out = 0.0f;
            for (int k = 0; k < key_dim; ++k) known += s[k * value_dim + value] * key[k];
            const float v = widen(from[2 * features + head * value_dim + value]);
            const float error = beta * (v - decay * known);
            for (int k = 0; k < key_dim; ++k) {
                const float now = decay * s[k * value_dim + value] + key[k] * error;
                s[k * value_dim + value] = now;
                out += now * query[k];
            }
            y[gate * value_dim + value] = narrow(scale * out);
        }
        __syncthreads();
    }
    float* after = state + (static_cast<int64_t>(row.out) * value_heads + head) * size;
    for (int k = 0; k < key_dim && real; ++k) after[k * value_dim + value] = s[k * value_dim + value];
}
