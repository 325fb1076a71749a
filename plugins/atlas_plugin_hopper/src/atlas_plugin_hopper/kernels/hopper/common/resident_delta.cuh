// One token of linear attention (linear_attention.cu) within a launch of resident blocks: a block has a quarter of a
// value head, 32 values of each of 128 keys, and hands on what the norm of the head will scale when all quarters are
// known. States are asked for a phase before they are wanted.
#pragma once
#include "recurrent.cuh"
#include "streamed_product.cuh"

namespace atlas {

constexpr int KEY_HEADS = 16, VALUE_HEADS = 32;
constexpr int DIM = 128, QUARTERS = 4, PART = DIM / QUARTERS, TAPS = 4, BEFORE = TAPS - 1;
constexpr int FEATURES = KEY_HEADS * DIM, VALUES = VALUE_HEADS * DIM, CHANNELS = 2 * FEATURES + VALUES;
constexpr int PRODUCT_ROWS = CHANNELS + VALUES + 2 * VALUE_HEADS;  // queries, keys, values; gates; b; a
constexpr int AT_GATES = CHANNELS, AT_B = AT_GATES + VALUES, AT_A = AT_B + VALUE_HEADS;
constexpr int COLUMNS = PART / 4, KEYS = DIM * COLUMNS / CONSUMERS;  // of float4; of a thread
constexpr int HEADS_OF_KEY = VALUE_HEADS / KEY_HEADS;
constexpr int OF_BETA = 2 * PART, OF_DECAY = 2 * PART + WARP;  // threads that receive them
static_assert(CONSUMERS == 2 * DIM, "a thread has a channel of the query or of the key");

// Weights and states of a layer's linear attention; hybrid.py makes the table of them.
struct DeltaLayer {
    const void *filters, *a_log, *dt_bias, *norm;
    float *conv_state, *state;
};
struct DeltaTypes {
    int filters, a_log, dt_bias, norm;
};

constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;  // what createpolicy.fractional makes of evict_first and 1.0

struct DeltaRoom {  // what lies between two barriers only
    float4 products[WARPS][2][COLUMNS];  // with the key and with the query
    float inputs[2 * DIM + PART];        // query, key, values behind the convolution
    float gates[PART];
    float decay, beta;
};

__device__ inline void add4(float4& sum, const float4& v, float by) {
    sum.x += v.x * by;
    sum.y += v.y * by;
    sum.z += v.z * by;
    sum.w += v.w * by;
}
__device__ inline void add_lanes(float4& v, int distance) {
    v.x += __shfl_xor_sync(~0u, v.x, distance);
    v.y += __shfl_xor_sync(~0u, v.y, distance);
    v.z += __shfl_xor_sync(~0u, v.z, distance);
    v.w += __shfl_xor_sync(~0u, v.w, distance);
}

// Which part of which head a thread works on.
struct DeltaPlace {
    StateRow row;
    bool live;
    int thread, head, part;

    __device__ bool works() const { return head < VALUE_HEADS; }
};

// What it has in one layer.
struct DeltaPart : DeltaPlace {
    uint4 taps[2];
    float old[2][BEFORE], now[2];
    uint32_t rate, bias, weight[4];

    __device__ explicit DeltaPart(const DeltaPlace& place) : DeltaPlace(place) {}
    // The thread's channels; the second is one of the values, of threads below PART.
    __device__ int channel(int e) const {
        if (e == 1) return 2 * FEATURES + head * DIM + part * PART + thread % PART;
        const int key_head = head / HEADS_OF_KEY;
        return thread < DIM ? key_head * DIM + thread : FEATURES + key_head * DIM + thread - DIM;
    }
    // Where the thread's part of a state lies, in the j-th of its keys.
    __device__ int64_t place(int at, int j) const {
        const int own = thread + j * CONSUMERS;
        const int64_t of_head = (static_cast<int64_t>(at) * VALUE_HEADS + head) * DIM * DIM;
        return of_head + own / COLUMNS * DIM + part * PART + own % COLUMNS * 4;
    }
    // Asks for what is older than this step, and waits for nothing.
    __device__ void ask(const DeltaLayer& layer, const DeltaTypes& types, float4* state) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                             shared_address(state + thread + j * CONSUMERS)),
                         "l"(layer.state + place(row.in, j)), "r"(row.fresh() ? 0 : 16), "l"(EVICT_FIRST)
                         : "memory");
        }
        commit_copies();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (e == 1 && thread >= PART) break;
            taps[e] = ask_weights(layer.filters, static_cast<int64_t>(channel(e)) * TAPS, types.filters);
            const float* before = layer.conv_state + static_cast<int64_t>(row.in) * BEFORE * CHANNELS + channel(e);
#pragma unroll
            for (int i = 0; i < BEFORE; ++i) old[e][i] = before[i * CHANNELS];
        }
        if (thread == OF_DECAY) {
            rate = ask_weight(layer.a_log, head, types.a_log);
            bias = ask_weight(layer.dt_bias, head, types.dt_bias);
        }
        if (thread < WARP) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weight[i] = ask_weight(layer.norm, part * PART + thread % COLUMNS * 4 + i, types.norm);
            }
        }
    }
    // send_pair(copy, pair, bits) and send_square(copy, value), for each of four copies.
    template <class SendPair, class SendSquare>
    __device__ void attend(const uint64_t* words, uint32_t flag, const DeltaLayer& layer, const DeltaTypes& types,
                           DeltaRoom& room, const float4* state, float scale, float l2_eps, SendPair send_pair,
                           SendSquare send_square) {
        const int warp = thread / WARP, lane = thread % WARP, column = thread % COLUMNS;
        const int second = thread < PART       ? channel(1)
                           : thread < 2 * PART ? AT_GATES + head * DIM + part * PART + thread - PART
                           : thread == OF_BETA ? AT_B + head
                           : thread == OF_DECAY ? AT_A + head
                                                : channel(0);
        uint64_t word[2];
        int turns = 0;
        do {
            word[0] = look(words + channel(0));
            word[1] = look(words + second);
            lose_patience(turns);
        } while (!fresh(word[0], flag) || !fresh(word[1], flag));
        now[0] = number(word[0]);
        now[1] = number(word[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (e == 1 && thread >= PART) break;
            float tap[TAPS];
            as_weights(taps[e], types.filters, tap);
            float sum = now[e] * tap[BEFORE];
#pragma unroll
            for (int i = 0; i < BEFORE; ++i) {
                if (row.fresh()) old[e][i] = 0.0f;
                sum += old[e][i] * tap[i];
            }
            room.inputs[e * 2 * DIM + thread] = quick_silu(sum);
        }
        if (warp == 1) room.gates[lane] = quick_silu(now[1]);
        if (thread == OF_BETA) room.beta = quick_sigmoid(now[1]);
        if (thread == OF_DECAY) {
            room.decay = exp2f(decay_log2(now[1], as_weight(rate, types.a_log), as_weight(bias, types.dt_bias)));
        }
        wait_copies<0>();  // every thread reads what it has copied
        sync_consumers();
        float4 known = {}, asked = {};
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int k = (thread + j * CONSUMERS) / COLUMNS;
            const float4 s = state[thread + j * CONSUMERS];
            add4(known, s, room.inputs[DIM + k]);
            add4(asked, s, room.inputs[k]);
        }
#pragma unroll
        for (int distance = COLUMNS; distance < WARP; distance *= 2) {
            add_lanes(known, distance);
            add_lanes(asked, distance);
        }
        if (lane < COLUMNS) room.products[warp][0][lane] = known, room.products[warp][1][lane] = asked;
        const float4 q = *reinterpret_cast<const float4*>(room.inputs + 4 * lane);
        const float4 k = *reinterpret_cast<const float4*>(room.inputs + DIM + 4 * lane);
        const float qq = warp_sum(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w);
        const float kk = warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w);
        const float qk = warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
        sync_consumers();
        known = asked = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            add4(known, room.products[w][0][column], 1.0f);
            add4(asked, room.products[w][1][column], 1.0f);
        }
        const float decay = room.decay, beta = room.beta, by_key = rsqrtf(kk + l2_eps);
        const float* values = room.inputs + 2 * DIM + column * 4;
        const float known_of[4] = {known.x, known.y, known.z, known.w};
        const float asked_of[4] = {asked.x, asked.y, asked.z, asked.w};
        float error[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) error[i] = beta * (values[i] - decay * by_key * known_of[i]) * by_key;
        if (warp == 0) {
            const float by_query = rsqrtf(qq + l2_eps) * scale;
            float out[4], square = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                out[i] = by_query * (decay * asked_of[i] + qk * error[i]);
                square += out[i] * out[i];
                out[i] *= as_weight(weight[i], types.norm) * room.gates[column * 4 + i];
            }
#pragma unroll
            for (int distance = 1; distance < COLUMNS; distance *= 2) square += __shfl_xor_sync(~0u, square, distance);
            const int copy = lane / COLUMNS, pair = (head * DIM + part * PART) / 2 + 2 * column;
            send_pair(copy, pair, pack(out[0], out[1]));
            send_pair(copy, pair + 1, pack(out[2], out[3]));
            if (column == 0) send_square(copy, square);
        }
        if (live) {
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const float by = room.inputs[DIM + (thread + j * CONSUMERS) / COLUMNS];
                const float4 s = state[thread + j * CONSUMERS];
                __stcs(reinterpret_cast<float4*>(layer.state + place(row.out, j)),
                       make_float4(decay * s.x + by * error[0], decay * s.y + by * error[1],
                                   decay * s.z + by * error[2], decay * s.w + by * error[3]));
            }
        }
        sync_consumers();  // the room is others' again
    }
    // The inputs of the convolution one token on, when nobody needs the old ones any more. Queries and keys are known
    // to all blocks of a key head: one writes them.
    __device__ void keep_inputs(const DeltaLayer& layer) const {
        if (!live) return;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (e == 0 ? head % HEADS_OF_KEY != 0 || part != 0 : thread >= PART) continue;
            float* to = layer.conv_state + static_cast<int64_t>(row.out) * BEFORE * CHANNELS + channel(e);
#pragma unroll
            for (int i = 0; i < BEFORE; ++i) to[i * CHANNELS] = i + 1 < BEFORE ? old[e][i + 1] : now[e];
        }
    }
};

}  // namespace atlas
