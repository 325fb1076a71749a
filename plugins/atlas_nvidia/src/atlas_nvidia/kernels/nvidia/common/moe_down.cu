// The second half of few tokens' experts: down, summed up over a token's choices, and onto the residual stream if there
// is one.
//
// A block owns 16 outputs of all tokens. Its warps, and those of the blocks of its cluster, share out the units (moe.cuh),
// and each has sums of its own, so that nothing is added in an order that could change.
#include "moe_sums.cuh"

#ifndef MOE_DEPTH
#define MOE_DEPTH 8
#endif

using namespace atlas;

namespace {

constexpr int WEIGHTS_BYTES = ROWS * CHUNK * 2;  // of a slot of the ring; 128 bytes a column lie behind

// Where a warp is: chunk ``k`` of the experts of unit ``unit``.
struct Place {
    int unit, apart, k, first_k, chunks, left;

    __device__ Place(int first, int step, int size) : unit(first), apart(step) {
        chunks = (size + CHUNK - 1) / CHUNK;
        first_k = threadIdx.x % 4 * 8;
        k = first_k;
        left = chunks;
    }
    __device__ bool advance() {
        k += CHUNK;
        if (--left != 0) return false;
        unit += apart;
        k = first_k;
        left = chunks;
        return true;
    }
};

}  // namespace

// ``columns`` is the number of tokens of a unit that there is room for. grid: (blocks of a cluster, tiles of outputs).
extern "C" __global__ void __launch_bounds__(MOE_THREADS, 1)
moe_down(const int32_t* counts, int32_t live_word, const uint16_t* inner, const int32_t* experts, const uint16_t* down,
         const uint16_t* shared_down, const float* residual, void* y, int32_t hidden, int32_t size,
         int32_t expert_count, int32_t top_k, int32_t capacity, int32_t columns, int32_t y_f32) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4;
    const int live = min(counts[live_word], capacity), first_row = blockIdx.y * ROWS;
    if (live <= 0) {
        admit_successor();
        wait_for_predecessor();
        return;
    }
    const int slot_bytes = WEIGHTS_BYTES + columns * CHUNK * 2;
    float* sums = reinterpret_cast<float*>(shared + MOE_WARPS * MOE_DEPTH * slot_bytes);  // [MOE_WARPS][capacity][ROWS]
    const int choices = capacity * (top_k + (shared_down ? 1 : 0));
    Units units(reinterpret_cast<unsigned char*>(sums + MOE_WARPS * capacity * ROWS), expert_count, choices);
    // Choices are older than the predecessor: it admitted this kernel when it had waited for them.
    units.build(experts, live, expert_count, top_k, capacity, shared_down != nullptr);

    const int blocks = gridDim.x, block = blockIdx.x, apart = blocks * MOE_WARPS, first = block * MOE_WARPS + warp;
    unsigned char* ring = shared + warp * MOE_DEPTH * slot_bytes;
    const uint32_t ring_address = shared_address(ring);
    Place weights(first, apart, size), inputs(first, apart, size), now(first, apart, size);
    const uint16_t* upper;
    auto locate = [&] {
        if (weights.unit >= units.count) return;
        const int expert = units.list[weights.unit].expert;
        const bool routed = expert < expert_count;
        const int64_t row = static_cast<int64_t>(routed ? expert : 0) * hidden + first_row + group;
        upper = (routed ? down : shared_down) + row * size;
    };
    auto fetch_weights = [&](int slot) {
        if (weights.unit >= units.count) return;
        const uint32_t to = ring_address + slot * slot_bytes + lane * 16;
        const uint16_t* lower = upper + static_cast<int64_t>(8) * size;
        const int k = weights.k;
        const bool near = k < size, far = k + 32 < size;
        copy_weights(to, upper + (near ? k : 0), near);
        copy_weights(to + 512, upper + (far ? k + 32 : 0), far);
        copy_weights(to + 1024, lower + (near ? k : 0), near);
        copy_weights(to + 1536, lower + (far ? k + 32 : 0), far);
        if (weights.advance()) locate();
    };
    // As in StreamedColumns of gemv.cuh.
    auto fetch_columns = [&](int slot) {
        if (inputs.unit >= units.count) return;
        const Unit unit = units.list[inputs.unit];
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const int column = 8 * c + group;
            if (column >= unit.size) break;
            const uint16_t* from = inner + static_cast<int64_t>(units.order[unit.first + column]) * size;
            const uint32_t to = ring_address + slot * slot_bytes + WEIGHTS_BYTES + column * 128 + lane % 4 * 16;
            const uint32_t flip = column % 2 * 64;
            const int k = inputs.k;
            copy_async(to + flip, from + (k < size ? k : 0), k < size);
            copy_async(to + (flip ^ 64), from + (k + 32 < size ? k + 32 : 0), k + 32 < size);
        }
        inputs.advance();
    };
    locate();
    for (int d = 0; d < MOE_DEPTH; ++d) fetch_weights(d);
    float* mine = sums + warp * capacity * ROWS;
    for (int e = lane; e < live * ROWS; e += WARP) mine[e] = 0.0f;
    admit_successor();
    wait_for_predecessor();
    // Groups complete in order, and the first one holds all the weights so far.
    for (int d = 0; d < MOE_DEPTH; ++d) {
        fetch_columns(d);
        commit_copies();
    }
    float acc[COLUMN_TILES][4] = {};
    int slot = 0;
    while (now.unit < units.count) {
        const Unit unit = units.list[now.unit];
        wait_copies<MOE_DEPTH - 1>();
        __syncwarp();
        const unsigned char* from = ring + slot * slot_bytes;
        const uint4* w = reinterpret_cast<const uint4*>(from) + lane;
        const uint4 u0 = w[0], u1 = w[WARP], l0 = w[2 * WARP], l1 = w[3 * WARP];
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const int column = 8 * c + group;
            if (8 * c >= unit.size) break;
            uint4 x0 = zero16(), x1 = zero16();
            if (column < unit.size) {
                const unsigned char* at = from + WEIGHTS_BYTES + column * 128 + lane % 4 * 16;
                x0 = *reinterpret_cast<const uint4*>(at + column % 2 * 64);
                x1 = *reinterpret_cast<const uint4*>(at + (column % 2 * 64 ^ 64));
            }
            mma(acc[c], u0.x, l0.x, u0.y, l0.y, x0.x, x0.y);
            mma(acc[c], u0.z, l0.z, u0.w, l0.w, x0.z, x0.w);
            mma(acc[c], u1.x, l1.x, u1.y, l1.y, x1.x, x1.y);
            mma(acc[c], u1.z, l1.z, u1.w, l1.w, x1.z, x1.w);
        }
        __syncwarp();  // columns are read by other lanes than those that copy them
        fetch_weights(slot);
        fetch_columns(slot);
        commit_copies();
        slot = slot + 1 == MOE_DEPTH ? 0 : slot + 1;
        if (!now.advance()) continue;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 8 * c + 2 * (lane % 4) + (i & 1);
                if (column < unit.size) {
                    const int choice = units.order[unit.first + column];
                    const int token = choice < capacity * top_k ? choice / top_k : choice - capacity * top_k;
                    mine[token * ROWS + group + 8 * (i >> 1)] += acc[c][i];
                }
                acc[c][i] = 0.0f;
            }
        }
        __syncwarp();
    }
    wait_copies<0>();
    store_experts<ROWS>(sums, live, capacity, hidden, first_row, block, blocks, residual, y, y_f32);
}
