// Items of up to 16 rows, as that of a single query: eight warps have some keys of every tile each, on products of 16
// rows, and put their sums together at the end. What they take is the time in which tiles come, so that a tile's place
// is given back as early as can be.
#pragma once
#include "attention_queries.cuh"
#include "attention_sums.cuh"

namespace atlas {

// Its places in shared memory and its barriers: NARROW_BARRIER and the next one are free. Rows 16 to 63 of the queries'
// panels, of PANEL_BYTES each, are where warps leave sums: the next item's queries may come to the first 16 meanwhile.
template <int DIM, int TILE_KEYS>
struct NarrowSums {
    static constexpr int WARPS = 8, ROWS_AT_ONCE = 4, THREADS = WARPS * WARP;
    static constexpr int KEYS_EACH = TILE_KEYS / WARPS, KEY_BLOCKS = KEYS_EACH / 8;
    static constexpr int EACH = DIM * ROWS_AT_ONCE / THREADS;  // elements that a thread adds up
    static constexpr int QUERY_PANEL = 64 * 128, PITCH = DIM * 4 + 32, SLOT = ROWS_AT_ONCE * PITCH;
    static constexpr int FREE = 16 * 128, SLOTS = 256 / DIM;  // of a panel
    static_assert(FREE + SLOTS * SLOT <= QUERY_PANEL && DIM / PANEL * SLOTS == WARPS / 2, "four warps a warpgroup");
    static_assert(KEY_BLOCKS == 1 || KEY_BLOCKS == 2, "products of 8 or 16 keys a warp are written");

    __device__ static int warp() { return threadIdx.x / WARP - WARPGROUP / WARP; }
    __device__ static uint32_t slot(uint32_t queries, int warp) {
        const int inside = warp % (WARPS / 2);
        return queries + warp / (WARPS / 2) * (DIM / PANEL * QUERY_PANEL) + inside / SLOTS * QUERY_PANEL + FREE +
               inside % SLOTS * SLOT;
    }

    // score[16 x KEYS_EACH] = the queries' fragments times this warp's keys.
    template <typename Fragment>
    __device__ static void multiply_keys(float (&score)[KEY_BLOCKS][4], uint32_t keys, int key_panel,
                                         Fragment fragment) {
        const int lane = threadIdx.x % WARP, first = warp() * KEYS_EACH + lane % 8;
        float odd[KEY_BLOCKS][4] = {};
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[j][e] = 0.0f;
#pragma unroll
        for (int k = 0; k < DIM / 16; k += 2) {
            uint32_t a[2][4], b[2][4];
            fragment(a[0], k);
            fragment(a[1], k + 1);
            const uint32_t panel = keys + k / 4 * key_panel;
            if constexpr (KEY_BLOCKS == 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    load_matrix(b[i], swizzled(panel, first + lane / 16 * 8, (k + i) % 4 * 2 + lane / 8 % 2));
                    float(&sum)[KEY_BLOCKS][4] = i ? odd : score;
                    mma(sum[0], a[i][0], a[i][1], a[i][2], a[i][3], b[i][0], b[i][1]);
                    mma(sum[1], a[i][0], a[i][1], a[i][2], a[i][3], b[i][2], b[i][3]);
                }
            } else {
                load_matrix(b[0], swizzled(panel, first, k % 4 * 2 + lane / 8));
                mma(score[0], a[0][0], a[0][1], a[0][2], a[0][3], b[0][0], b[0][1]);
                mma(odd[0], a[1][0], a[1][1], a[1][2], a[1][3], b[0][2], b[0][3]);
            }
        }
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[j][e] += odd[j][e];
    }

    // out[16 x DIM] += weights times this warp's values, of which `mask` leaves those that count: a lane has two halves
    // of eight keys each.
    __device__ static void multiply_values(float (&out)[DIM / 8][4], const float (&weight)[KEY_BLOCKS][4],
                                           uint32_t values, int value_panel, const uint32_t (&mask)[2]) {
        const int lane = threadIdx.x % WARP, first = warp() * KEYS_EACH + lane % 8;
        const uint32_t a0 = pack(weight[0][0], weight[0][1]), a1 = pack(weight[0][2], weight[0][3]);
        uint32_t b[4];
        if constexpr (KEY_BLOCKS == 2) {
            const uint32_t a2 = pack(weight[1][0], weight[1][1]), a3 = pack(weight[1][2], weight[1][3]);
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d) {
                const uint32_t panel = values + d / 4 * value_panel;
                load_matrix_transposed(b, swizzled(panel, first + lane / 8 % 2 * 8, d % 4 * 2 + lane / 16));
                mma(out[2 * d], a0, a1, a2, a3, b[0] & mask[0], b[1] & mask[1]);
                mma(out[2 * d + 1], a0, a1, a2, a3, b[2] & mask[0], b[3] & mask[1]);
            }
        } else {
#pragma unroll
            for (int d = 0; d < DIM / 32; ++d) {
                load_matrix_transposed(b, swizzled(values + d / 2 * value_panel, first, d % 2 * 4 + lane / 8));
#pragma unroll
                for (int i = 0; i < 4; ++i) mma(out[4 * d + i], a0, a1, 0, 0, b[i] & mask[0], 0);
            }
        }
    }

    // Leaves this warp's sums of four rows from `first_row` on in its slot.
    __device__ static void leave(uint32_t queries, const float (&out)[DIM / 8][4], int first_row) {
        const int lane = threadIdx.x % WARP, row = lane / 4, half = first_row / 8;
        if (row / ROWS_AT_ONCE != first_row / ROWS_AT_ONCE % 2) return;
        const uint32_t to = slot(queries, warp()) + row % ROWS_AT_ONCE * PITCH + lane % 4 * 8;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d) {
            const float a = half ? out[d][2] : out[d][0], b = half ? out[d][3] : out[d][1];
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + d * 32), "f"(a), "f"(b) : "memory");
        }
    }

    // This thread's EACH elements of row `row`, from `column` on, over all warps, of which `tops` has the largest
    // scores and the totals. Gives back those of all.
    __device__ static float2 add_up(uint32_t queries, const float2 (&tops)[WARPS][16], int row, int column,
                                    float factor, float (&sum)[EACH]) {
        float best = -INFINITY, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) best = fmaxf(best, tops[w][row].x);
#pragma unroll
        for (int e = 0; e < EACH; ++e) sum[e] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float its = part_weight(tops[w][row].x, best, factor);
            total += tops[w][row].y * its;
            const uint32_t from = slot(queries, w) + row % ROWS_AT_ONCE * PITCH + column * 4;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                float v;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from + e * 4) : "memory");
                sum[e] += v * its;
            }
        }
        return make_float2(best, total);
    }
};

using Narrow = NarrowSums<HEAD_DIM, KEYS>;
static_assert(Narrow::WARPS * WARP == CONSUMERS * WARPGROUP, "they have all warps");

// Up to 16 rows against an item's tiles of keys. Behind the last product with queries, `ask_for_next` asks for the next
// item's if it is narrow too.
template <typename Ask>
__device__ void consume_narrow(const Item& item, uint16_t* y, float4* sums, int32_t* arrived, int q_heads, int window,
                               float scale, uint32_t query, uint32_t keys, uint32_t values, Barriers barriers,
                               Ask ask_for_next) {
    constexpr int BLOCKS = Narrow::KEY_BLOCKS, EACH = Narrow::EACH;
    constexpr bool KEPT = HEAD_DIM <= 128;  // for heads of 256 there are no registers for the queries
    const Range& range = item.range;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    const int warp = Narrow::warp(), before = item.before % (2 * STAGES), tiles = range.count;
    const uint32_t own_queries = query + group * QUERY_BYTES;
    wait_copies<0>();
    named_wait(QUERIES_ARE_THERE + group, WARPGROUP);
    auto load_fragment = [&](uint32_t (&a)[4], int k) {
        load_matrix(a, swizzled(own_queries + k / 4 * QUERY_PANEL, lane % 16, k % 4 * 2 + lane / 16));
    };
    uint32_t kept[KEPT ? HEAD_DIM / 16 : 1][4];
    if constexpr (KEPT) {
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) load_fragment(kept[k], k);
    }
    auto fragment = [&](uint32_t (&a)[4], int k) {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = kept[k][i];
        } else {
            load_fragment(a, k);
        }
    };
    const bool few = !range.has(8);  // no lane has a second row
    const float factor = scale * LOG2E;
    float out[HEAD_DIM / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        const int turn = before + tile, stage = turn % STAGES;
        float score[BLOCKS][4];
        barrier_wait(barriers.full(0, stage), turn / STAGES % 2);
        Narrow::multiply_keys(score, keys + stage * TILE_BYTES, KEY_PANEL, fragment);
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.empty(0, stage));
        const int key = range.key(tile), first = key + warp * Narrow::KEYS_EACH + lane % 4 * 2;
        uint32_t mask[2];  // what is nobody's may be no number
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int at = first + j * 8;
            mask[j] = (at >= range.oldest_key && at < range.length ? 0xffffu : 0) |
                      (at + 1 >= range.oldest_key && at + 1 < range.length ? 0xffff0000u : 0);
        }
        const bool masked = key + KEYS > range.start + range.first_query + 1 || window > 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half && few) {
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j) score[j][2] = score[j][3] = 0.0f;
                break;
            }
            if (masked) {
                const int last = range.start + range.query(lane / 4 + half * 8);
                const int oldest = window > 0 ? last - window + 1 : 0;
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = first + j * 8 + e;
                        if (at > last || at < oldest) score[j][2 * half + e] = -INFINITY;
                    }
            }
            float best = top[half];
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) best = fmaxf(best, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float against = best == -INFINITY ? 0.0f : best * factor;
            const float rescale = power_of_two(top[half] * factor - against);
            top[half] = best;
            total[half] *= rescale;
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = score[j][2 * half + e];
                    s = power_of_two(fmaf(s, factor, -against));
                    total[half] += s;
                }
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 8; ++d)
#pragma unroll
                for (int e = 0; e < 2; ++e) out[d][2 * half + e] *= rescale;
        }
        barrier_wait(barriers.full(1, stage), turn / STAGES % 2);
        Narrow::multiply_values(out, score, values + stage * TILE_BYTES, KEY_PANEL, mask);
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.empty(1, stage));
    }
    ask_for_next();
    __shared__ float2 tops[Narrow::WARPS][Range::NARROW];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        if (lane % 4 == 0) tops[warp][lane / 4 + half * 8] = make_float2(top[half], total[half]);
    }
    // Four rows at a time, a thread having EACH elements of one of them. Those that several blocks share go through
    // memory, two vectors a thread.
    constexpr int ROWS_AT_ONCE = Narrow::ROWS_AT_ONCE, PER_ROW = Narrow::THREADS / ROWS_AT_ONCE;
    const int of_all = group * WARPGROUP + thread, row_inside = of_all / PER_ROW, column = of_all % PER_ROW * EACH;
    auto store = [&](int row, const float (&sum)[EACH], float all) {
        const Item& of = again(item);
        if (!of.range.has(row)) return;
        uint16_t* to = result_of(of, y, row, q_heads) + column;
        const float share = 1.0f / all;
        if constexpr (EACH == 1) {
            *to = narrow(sum[0] * share);
        } else {
#pragma unroll
            for (int e = 0; e < EACH; e += 2) {
                *reinterpret_cast<uint32_t*>(to + e) = pack(sum[e] * share, sum[e + 1] * share);
            }
        }
    };
    auto place = [&](int part, int first_row) {
        const int vector = (first_row / ROWS_AT_ONCE * Narrow::THREADS + of_all) * 2;
        return part_of<CONSUMERS, 1, HEAD_DIM / 8>(item, sums, part) + vector;
    };
    const int parts = item.parts;
    for (int first_row = 0; first_row < Range::NARROW && range.has(first_row); first_row += ROWS_AT_ONCE) {
        float sum[EACH];
        Narrow::leave(query, out, first_row);
        named_wait(JOIN, Narrow::THREADS);
        const int row = first_row + row_inside;
        const float2 of_row = Narrow::add_up(query, tops, row, column, factor, sum);
        if (parts == 1) {
            store(row, sum, of_row.y);
        } else {
            float4* to = place(item.part, first_row);
            float four[4] = {};
#pragma unroll
            for (int e = 0; e < EACH; ++e) four[e] = sum[e];
            to[0] = make_float4(four[0], four[1], four[2], four[3]);
            to[1] = make_float4(of_row.x, of_row.y, 0.0f, 0.0f);
        }
        named_wait(JOIN, Narrow::THREADS);  // what warps left has been read
    }
    if (parts == 1 || !comes_last<CONSUMERS>(item, arrived, QUERIES_ARE_THERE + group, group)) return;
    for (int first_row = 0; first_row < Range::NARROW && range.has(first_row); first_row += ROWS_AT_ONCE) {
        float best = -INFINITY, all = 0.0f, sum[EACH] = {};
#pragma unroll 4
        for (int part = 0; part < parts; ++part) best = fmaxf(best, __ldcg(place(part, first_row) + 1).x);
#pragma unroll 4
        for (int part = 0; part < parts; ++part) {
            const float4* from = place(part, first_row);
            const float4 v = __ldcg(from), each = __ldcg(from + 1);
            const float its = part_weight(each.x, best, factor), of[4] = {v.x, v.y, v.z, v.w};
            all += each.y * its;
#pragma unroll
            for (int e = 0; e < EACH; ++e) sum[e] += of[e] * its;
        }
        store(first_row + row_inside, sum, all);
    }
}

}  // namespace atlas
