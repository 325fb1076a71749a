// The second half of few tokens' experts whose weights are codes (expert_codes.cuh): down, summed up over a token's
// choices, and onto the residual stream if there is one.
//
// A block owns the outputs of CODE_ROWS rows for all tokens. Its warps, and those of the blocks of its cluster, share out
// the units (moe.cuh), CODE_TEAM of them a part of the columns of one each, and each has sums of its own, so that nothing
// is added in an order that could change.

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 16
#endif
#include "expert_codes.cuh"
#include "moe_sums.cuh"

#ifndef CODE_DEPTH
#define CODE_DEPTH 4
#endif
#ifndef CODE_TEAM
#define CODE_TEAM 2
#endif
#ifndef CODE_ROWS
#define CODE_ROWS 16
#endif

using namespace atlas;

namespace {

constexpr int ROW_TILES = CODE_ROWS / 16, CODES = ROW_TILES * CODE_SLOT;  // bytes of a slot; 256 a column lie behind

// Where a warp is: chunk ``chunk`` of unit ``unit``. Its part of every unit is [first, end).
struct Place {
    int unit, apart, first, end, chunk = first;

    // One chunk on; true when that ended a unit.
    __device__ bool advance() {
        if (++chunk != end) return false;
        chunk = first;
        unit += apart;
        return true;
    }
};

}  // namespace

// ``columns`` is the number of tokens of a unit that there is room for. grid: (blocks of a cluster, tiles of outputs).
extern "C" __global__ void __launch_bounds__(MOE_THREADS, 1)
moe_coded_down(const int32_t* counts, int32_t live_word, const uint16_t* inner, const int32_t* experts, const void* down,
               const float* residual, void* y, int32_t hidden, int32_t size, int32_t expert_count, int32_t top_k,
               int32_t capacity, int32_t columns, int32_t y_f32) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, part = lane % 4;
    const int live = min(counts[live_word], capacity), first_row = blockIdx.y * CODE_ROWS;
    if (live <= 0) {
        admit_successor();
        wait_for_predecessor();
        return;
    }
    const int slot_bytes = CODES + columns * CODE_CHUNK * 2;
    // [MOE_WARPS][capacity][CODE_ROWS]
    float* sums = reinterpret_cast<float*>(shared + MOE_WARPS * CODE_DEPTH * slot_bytes);
    Units units(reinterpret_cast<unsigned char*>(sums + MOE_WARPS * capacity * CODE_ROWS), expert_count,
                capacity * top_k);
    // Choices are older than the predecessor: it admitted this kernel when it had waited for them.
    units.build(experts, live, expert_count, top_k, capacity, false);

    const CodedExperts downs(down, expert_count, hidden, size);
    const int blocks = gridDim.x, block = blockIdx.x, chunks = downs.chunks, member = warp % CODE_TEAM;
    const int first_chunk = chunks * member / CODE_TEAM, end_chunk = chunks * (member + 1) / CODE_TEAM;
    unsigned char* ring = shared + warp * CODE_DEPTH * slot_bytes;
    const uint32_t ring_address = shared_address(ring);
    const int team = (block * MOE_WARPS + warp) / CODE_TEAM;
    Place weights{first_chunk < end_chunk ? team : units.count, blocks * MOE_WARPS / CODE_TEAM, first_chunk, end_chunk};
    Place inputs = weights, now = weights;
    CodedRows rows[ROW_TILES];
    auto locate = [&] {
        if (weights.unit >= units.count) return;
        const int64_t row = static_cast<int64_t>(units.list[weights.unit].expert) * hidden + first_row;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) rows[r].locate(downs, row + 16 * r, downs, row + 16 * r + 8);
    };
    auto fetch_weights = [&](int slot) {
        if (weights.unit >= units.count) return;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            rows[r].fetch(ring_address + slot * slot_bytes + r * CODE_SLOT, weights.chunk);
        }
        if (weights.advance()) locate();
    };
    // Which half of a column's 128 bytes comes first alternates, so that neighbours are read from different banks.
    auto fetch_columns = [&](int slot) {
        if (inputs.unit >= units.count) return;
        const Unit unit = units.list[inputs.unit];
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const int column = 8 * c + group;
            if (column >= unit.size) break;
            const uint16_t* from = inner + static_cast<int64_t>(units.order[unit.first + column]) * size;
            const uint32_t to = ring_address + slot * slot_bytes + CODES + column * 256, flip = column % 2 * 64;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int p = 4 * i + part, k = inputs.chunk * CODE_CHUNK + p * 8;
                copy_async(to + (piece_place(p) ^ flip), from + (k < size ? k : 0), k < size);
            }
        }
        inputs.advance();
    };
    locate();
    for (int d = 0; d < CODE_DEPTH; ++d) fetch_weights(d);
    float* mine = sums + warp * capacity * CODE_ROWS;
    for (int e = lane; e < live * CODE_ROWS; e += WARP) mine[e] = 0.0f;
    admit_successor();
    wait_for_predecessor();
    // Groups complete in order, and the first one holds all the weights so far.
    for (int d = 0; d < CODE_DEPTH; ++d) {
        fetch_columns(d);
        commit_copies();
    }
    int slot = 0;
    // This warp's part of ``unit``.
    auto work = [&](const Unit& unit, auto tiles) {
        constexpr int TILES = decltype(tiles)::value;
        SlotSums<TILES> acc[ROW_TILES];
        int column[TILES];
#pragma unroll
        for (int c = 0; c < TILES; ++c) column[c] = min(8 * c + group, unit.size - 1);
        do {
            wait_copies<CODE_DEPTH - 1>();
            __syncwarp();  // columns and scales are copied by other lanes than those that use them
            const unsigned char* from = ring + slot * slot_bytes;
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                acc[r].multiply(from + r * CODE_SLOT, [&](int c, int j) {
                    const unsigned char* at = from + CODES + column[c] * 256 + part * 16;
                    return *reinterpret_cast<const uint4*>(at + (j * 64 ^ column[c] % 2 * 64));
                });
            }
            __syncwarp();
            fetch_weights(slot);
            fetch_columns(slot);
            commit_copies();
            slot = slot + 1 == CODE_DEPTH ? 0 : slot + 1;
        } while (!now.advance());
        const float* factors = downs.factors + static_cast<int64_t>(unit.expert) * hidden + first_row;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const float factor[2] = {__ldg(factors + 16 * r + group) * CODE_FACTOR,
                                     __ldg(factors + 16 * r + group + 8) * CODE_FACTOR};
#pragma unroll
            for (int c = 0; c < TILES; ++c) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int own = 8 * c + 2 * part + (i & 1);
                    if (own >= unit.size) continue;
                    const int token = units.order[unit.first + own] / top_k;
                    mine[token * CODE_ROWS + 16 * r + group + 8 * (i >> 1)] += acc[r].sum(c, i) * factor[i >> 1];
                }
            }
        }
        __syncwarp();
    };
    while (now.unit < units.count) {
        const Unit unit = units.list[now.unit];
        if constexpr (COLUMN_TILES == 2) {
            if (unit.size > 8) work(unit, Number<2>());
            else work(unit, Number<1>());
        } else {
            work(unit, Number<1>());
        }
    }
    wait_copies<0>();
    store_experts<CODE_ROWS>(sums, live, capacity, hidden, first_row, block, blocks, residual, y, y_f32);
}
