// The first half of few tokens' experts whose weights are codes (expert_codes.cuh): silu(gate x) * (up x), times the
// weight of the choice, for each choice.
//
// Blocks share out the tiles of all units (moe.cuh), an equal run each, and teams of ``team`` warps those of a block's run.
// A tile is 8 rows of gate and the same of up, so that a lane finishes both by itself; the warps of a team have a part of
// the columns each. The tokens of a unit lie in shared memory, ``buffers`` of them: with two the next unit's are brought
// while warps work on one.
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 16
#endif
#include "expert_codes.cuh"
#include "moe.cuh"

#ifndef CODE_DEPTH
#define CODE_DEPTH 6
#endif

using namespace atlas;

namespace {

// Bytes of a token in shared memory; 64 more than its chunks, so that neighbours are read from different banks.
__host__ __device__ constexpr int stride_of(int hidden) { return code_chunks(hidden) * CODE_CHUNK * 2 + 64; }

constexpr int TEAM_SUMS = WARP * COLUMN_TILES;
static_assert(MOE_WARPS <= 30, "a team of two or more has a barrier of its own, behind the block's");

__device__ inline void meet_team(int index, int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(team * WARP) : "memory");
}

}  // namespace

extern "C" __global__ void __launch_bounds__(MOE_THREADS, 1)
moe_coded_gate_up(const int32_t* counts, int32_t live_word, const uint16_t* x, const int32_t* experts,
                  const float* weights, const void* gate, const void* up, uint16_t* inner, int32_t hidden, int32_t size,
                  int32_t expert_count, int32_t top_k, int32_t capacity, int32_t buffers, int32_t team) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float of_column[2][UNIT_TOKENS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, part = lane % 4;
    const int live = min(counts[live_word], capacity), stride = stride_of(hidden), columns = min(UNIT_TOKENS, capacity);
    // [2][MOE_WARPS][TEAM_SUMS], if anything is exchanged, and [buffers][columns][stride]
    float4* exchanged = reinterpret_cast<float4*>(shared + MOE_WARPS * CODE_DEPTH * CODE_SLOT);
    unsigned char* tokens = reinterpret_cast<unsigned char*>(exchanged + (team > 1 ? 2 * MOE_WARPS * TEAM_SUMS : 0));
    wait_for_predecessor();
    // Not before: the successor reads the choices without waiting, so they must be complete when it begins.
    admit_successor();
    if (live <= 0) return;
    Units units(tokens + buffers * columns * stride, expert_count, capacity * top_k);
    units.build(experts, live, expert_count, top_k, capacity, false);

    const CodedExperts gates(gate, expert_count, size, hidden), ups(up, expert_count, size, hidden);
    const int per_unit = size / 8, all = units.count * per_unit, chunks = gates.chunks;
    const int first = static_cast<int>(static_cast<int64_t>(all) * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(static_cast<int64_t>(all) * (blockIdx.x + 1) / gridDim.x);
    if (first >= end) return;

    const int teams = MOE_WARPS / team, own_team = warp / team, member = warp % team;
    const int first_chunk = chunks * member / team, end_chunk = chunks * (member + 1) / team;
    unsigned char* ring = shared + warp * CODE_DEPTH * CODE_SLOT;
    const uint32_t ring_address = shared_address(ring);
    int coming = first_chunk < end_chunk ? first + own_team : end, coming_chunk = first_chunk, fetched = 0;
    CodedRows rows;
    auto locate = [&] {
        if (coming >= end) return;
        const int64_t row = static_cast<int64_t>(units.list[coming / per_unit].expert) * size + coming % per_unit * 8;
        rows.locate(gates, row, ups, row);
    };
    auto fetch = [&] {
        if (coming < end) {
            rows.fetch(ring_address + fetched * CODE_SLOT, coming_chunk);
            if (++coming_chunk == end_chunk) {
                coming_chunk = first_chunk;
                coming += teams;
                locate();
            }
        }
        commit_copies();
        fetched = fetched + 1 == CODE_DEPTH ? 0 : fetched + 1;
    };
    locate();
    for (int d = 0; d < CODE_DEPTH; ++d) fetch();

    // The tokens of a unit and the weights of its choices.
    auto load_tokens = [&](int unit, int buffer) {
        const Unit u = units.list[unit];
        const int pieces = chunks * CODE_CHUNK / 8;
        unsigned char* to = tokens + buffer * columns * stride;
        for (int e = threadIdx.x; e < u.size * pieces; e += MOE_THREADS) {
            const int c = e / pieces, p = e % pieces, choice = units.order[u.first + c];
            const uint4 raw =
                p * 8 < hidden ? load16(x + static_cast<int64_t>(choice / top_k) * hidden + p * 8) : zero16();
            *reinterpret_cast<uint4*>(to + c * stride + p / 16 * 256 + piece_place(p % 16)) = in_pairs(raw);
        }
        if (static_cast<int>(threadIdx.x) < u.size) {
            of_column[buffer][threadIdx.x] = __ldcg(weights + units.order[u.first + threadIdx.x]);
        }
    };
    const int last_unit = (end - 1) / per_unit;
    int tile = first + own_team, slot = 0, turn = 0, storing = 0;
    // One tile of ``unit``, whose tokens are in ``buffer``.
    auto work = [&](const Unit& unit, int buffer, auto tiles) {
        constexpr int TILES = decltype(tiles)::value;
        const unsigned char* columns_of[TILES];
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            // Of a column that is not there any other, whose results nobody stores.
            columns_of[c] = tokens + (buffer * columns + min(8 * c + group, unit.size - 1)) * stride + part * 16;
        }
        const int64_t row = static_cast<int64_t>(unit.expert) * size + tile % per_unit * 8 + group;
        const float gate_factor = __ldg(gates.factors + row), up_factor = __ldg(ups.factors + row);
        SlotSums<TILES> sums;
        for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
            wait_copies<CODE_DEPTH - 1>();
            __syncwarp();  // scales are copied by other lanes than those that use them
            sums.multiply(ring + slot * CODE_SLOT, [&](int c, int j) {
                return *reinterpret_cast<const uint4*>(columns_of[c] + chunk * 256 + j * 64);
            });
            __syncwarp();
            fetch();
            slot = slot + 1 == CODE_DEPTH ? 0 : slot + 1;
        }
        if (team > 1) {
            float4* mine = exchanged + (turn * MOE_WARPS + warp) * TEAM_SUMS + lane;
#pragma unroll
            for (int c = 0; c < TILES; ++c) {
                mine[c * WARP] = make_float4(sums.sum(c, 0), sums.sum(c, 1), sums.sum(c, 2), sums.sum(c, 3));
            }
            meet_team(own_team, team);
        }
        // The members of a team store in turns; who is not it goes on.
        if (storing == member) {
#pragma unroll
            for (int c = 0; c < TILES; ++c) {
                float total[4] = {};
                if (team == 1) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[i] = sums.sum(c, i);
                }
                for (int m = 0; m < team && team > 1; ++m) {
                    const float4 v = exchanged[(turn * MOE_WARPS + own_team * team + m) * TEAM_SUMS + c * WARP + lane];
                    total[0] += v.x;
                    total[1] += v.y;
                    total[2] += v.z;
                    total[3] += v.w;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = 8 * c + 2 * part + i;
                    if (column >= unit.size) continue;
                    const float a = total[i] * gate_factor * CODE_FACTOR, b = total[i + 2] * up_factor * CODE_FACTOR;
                    const int64_t choice = units.order[unit.first + column];
                    inner[choice * size + tile % per_unit * 8 + place_of(group)] =
                        narrow(silu(a) * b * of_column[buffer][column]);
                }
            }
        }
        turn ^= 1;
        storing = storing + 1 == team ? 0 : storing + 1;
    };
    load_tokens(first / per_unit, 0);
    if (buffers == 2 && first / per_unit < last_unit) load_tokens(first / per_unit + 1, 1);
    __syncthreads();
    for (int now = first / per_unit, buffer = 0; now <= last_unit; ++now) {
        const Unit unit = units.list[now];
        const int tiles_end = min(end, (now + 1) * per_unit);
        for (; tile < tiles_end; tile += teams) {
            if constexpr (COLUMN_TILES == 2) {
                if (unit.size > 8) work(unit, buffer, Number<2>());
                else work(unit, buffer, Number<1>());
            } else {
                work(unit, buffer, Number<1>());
            }
        }
        if (now == last_unit) break;
        __syncthreads();  // nobody needs the tokens of this unit any more; of two units those of the next are there
        if (buffers == 2) {
            if (now + 2 <= last_unit) load_tokens(now + 2, buffer);
            buffer ^= 1;
        } else {
            load_tokens(now + 1, 0);
            __syncthreads();
        }
    }
    wait_copies<0>();
}
