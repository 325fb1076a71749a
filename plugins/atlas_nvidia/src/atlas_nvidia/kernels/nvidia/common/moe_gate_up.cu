// The first half of few tokens' experts: silu(gate x) * (up x), times the weight of the choice, for each choice.
//
// Blocks share out the tiles of all units (moe.cuh), an equal run each, so that a block meets few experts and keeps the
// tokens of one in shared memory. A tile is 8 rows of gate and the same of up; weights stream as in gemv.cuh.
#include "moe.cuh"

#ifndef MOE_DEPTH
#define MOE_DEPTH 8
#endif

using namespace atlas;

namespace {

constexpr int SLOT = ROWS * CHUNK * 2, RING = MOE_WARPS * MOE_DEPTH * SLOT;
constexpr int SUMS = MOE_WARPS * ROWS * UNIT_TOKENS;
static_assert(8 * UNIT_TOKENS <= MOE_THREADS, "a thread finishes one pair of sums at most");

// A row of tokens in shared memory; 64 bytes more, so that neighbours are read from different banks.
__host__ __device__ constexpr int stride_of(int hidden) { return (hidden + 63) / 64 * 64 + 32; }

// Where a warp is: chunk ``k`` of tile ``tile``. The warps of a block share out a row in 8 runs.
struct Place {
    int tile, k, first_k, left, rounds;

    __device__ Place(int first, int hidden) : tile(first) {
        rounds = ((hidden + CHUNK - 1) / CHUNK + MOE_WARPS - 1) / MOE_WARPS;
        first_k = threadIdx.x / WARP * rounds * CHUNK + threadIdx.x % 4 * 8;
        k = first_k;
        left = rounds;
    }
    __device__ bool advance() {
        k += CHUNK;
        if (--left != 0) return false;
        ++tile;
        k = first_k;
        left = rounds;
        return true;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(MOE_THREADS, 1)
moe_gate_up(const int32_t* counts, int32_t live_word, const uint16_t* x, const int32_t* experts, const float* weights,
            const uint16_t* gate, const uint16_t* up, const uint16_t* shared_gate, const uint16_t* shared_up,
            const uint16_t* shared_weight, uint16_t* inner, int32_t hidden, int32_t size, int32_t expert_count,
            int32_t top_k, int32_t capacity) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float of_column[UNIT_TOKENS], partial[MOE_WARPS][UNIT_TOKENS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, stride = stride_of(hidden);
    float* sums = reinterpret_cast<float*>(shared + RING);  // [2][SUMS]
    uint16_t* columns = reinterpret_cast<uint16_t*>(sums + 2 * SUMS);
    const int live = min(counts[live_word], capacity);
    wait_for_predecessor();
    // Not before: the successor reads the choices without waiting, so they must be complete when it begins.
    admit_successor();
    if (live <= 0) return;
    const int choices = capacity * (top_k + (shared_gate ? 1 : 0));
    Units units(reinterpret_cast<unsigned char*>(columns + min(UNIT_TOKENS, capacity) * stride), expert_count, choices);
    units.build(experts, live, expert_count, top_k, capacity, shared_gate != nullptr);

    const int per_unit = size / 8, all = units.count * per_unit;
    const int first = static_cast<int>(static_cast<int64_t>(all) * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(static_cast<int64_t>(all) * (blockIdx.x + 1) / gridDim.x);
    if (first >= end) return;
    unsigned char* ring = shared + warp * MOE_DEPTH * SLOT + lane * 16;
    const uint32_t ring_address = shared_address(ring);
    Place coming(first, hidden), now(first, hidden);
    const uint16_t *upper, *lower;
    auto locate = [&](int tile) {
        const int expert = units.list[tile / per_unit].expert, row = tile % per_unit * 8 + group;
        const bool routed = expert < expert_count;
        const int64_t at = (static_cast<int64_t>(routed ? expert : 0) * size + row) * hidden;
        upper = (routed ? gate : shared_gate) + at;
        lower = (routed ? up : shared_up) + at;
    };
    auto fetch = [&](int slot) {
        if (coming.tile >= end) return;
        const uint32_t to = ring_address + slot * SLOT;
        const int k = coming.k;
        const bool near = k < hidden, far = k + 32 < hidden;
        copy_weights(to, upper + (near ? k : 0), near);
        copy_weights(to + 512, upper + (far ? k + 32 : 0), far);
        copy_weights(to + 1024, lower + (near ? k : 0), near);
        copy_weights(to + 1536, lower + (far ? k + 32 : 0), far);
        if (coming.advance() && coming.tile < end) locate(coming.tile);
    };
    locate(first);
    for (int d = 0; d < MOE_DEPTH; ++d) {
        fetch(d);
        commit_copies();
    }

    Unit unit = units.list[first / per_unit];
    // The tokens of the unit and the weights of its choices. A barrier must be between this and the reads before it.
    auto load_columns = [&](bool again) {
        for (int c = 0; c < unit.size; ++c) {
            const int choice = units.order[unit.first + c];
            const bool routed = choice < capacity * top_k;
            const uint16_t* from = x + static_cast<int64_t>(routed ? choice / top_k : choice - capacity * top_k) * hidden;
            float product = 0.0f;
            const bool there = again && routed && live == 1;
            for (int k = threadIdx.x * 8; k < hidden && !there; k += MOE_THREADS * 8) {
                const uint4 raw = load16(from + k);
                *reinterpret_cast<uint4*>(columns + c * stride + k) = raw;
                if (routed) continue;
                float v[8], w[8];
                unpack(raw, v);
                unpack(load_weights(shared_weight + k), w);
#pragma unroll
                for (int i = 0; i < 8; ++i) product += v[i] * w[i];
            }
            if (routed) {
                if (threadIdx.x == 0) of_column[c] = __ldcg(weights + choice);
            } else {
                product = warp_sum(product);
                if (lane == 0) partial[warp][c] = product;
            }
        }
        __syncthreads();
        if (unit.expert == expert_count && threadIdx.x < unit.size) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < MOE_WARPS; ++w) sum += partial[w][threadIdx.x];
            of_column[threadIdx.x] = sigmoid(sum);  // read behind the barrier at the end of a tile
        }
    };
    load_columns(false);

    const int store_row = threadIdx.x % 8, store_column = threadIdx.x / 8;
    float acc[COLUMN_TILES][4] = {};
    int buffer = 0, slot = 0;
    while (now.tile < end) {
        wait_copies<MOE_DEPTH - 1>();
        const uint4* w = reinterpret_cast<const uint4*>(ring + slot * SLOT);
        const uint4 u0 = w[0], u1 = w[WARP], l0 = w[2 * WARP], l1 = w[3 * WARP];
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            if (8 * c >= unit.size) break;
            const int column = 8 * c + group;
            const uint16_t* from = columns + column * stride + now.k;
            const bool exists = column < unit.size;
            const uint4 x0 = exists && now.k < hidden ? *reinterpret_cast<const uint4*>(from) : zero16();
            const uint4 x1 = exists && now.k + 32 < hidden ? *reinterpret_cast<const uint4*>(from + 32) : zero16();
            mma(acc[c], u0.x, l0.x, u0.y, l0.y, x0.x, x0.y);
            mma(acc[c], u0.z, l0.z, u0.w, l0.w, x0.z, x0.w);
            mma(acc[c], u1.x, l1.x, u1.y, l1.y, x1.x, x1.y);
            mma(acc[c], u1.z, l1.z, u1.w, l1.w, x1.z, x1.w);
        }
        fetch(slot);
        commit_copies();
        slot = slot + 1 == MOE_DEPTH ? 0 : slot + 1;
        const int tile = now.tile;
        if (!now.advance()) continue;
        float* mine = sums + buffer * SUMS + warp * ROWS * UNIT_TOKENS;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                mine[(8 * c + 2 * (lane % 4) + (i & 1)) * ROWS + group + 8 * (i >> 1)] = acc[c][i];
                acc[c][i] = 0.0f;
            }
        }
        __syncthreads();
        if (store_column < unit.size) {
            const float* from = sums + buffer * SUMS + store_column * ROWS + store_row;
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (int other = 0; other < MOE_WARPS; ++other) {
                a += from[other * ROWS * UNIT_TOKENS];
                b += from[other * ROWS * UNIT_TOKENS + 8];
            }
            const int64_t row = units.order[unit.first + store_column];
            inner[row * size + tile % per_unit * 8 + store_row] = narrow(silu(a) * b * of_column[store_column]);
        }
        buffer ^= 1;
        if (now.tile < end && now.tile % per_unit == 0) {
            unit = units.list[now.tile / per_unit];
            __syncthreads();  // of_column may still be read
            load_columns(true);
        }
    }
    wait_copies<0>();
}
