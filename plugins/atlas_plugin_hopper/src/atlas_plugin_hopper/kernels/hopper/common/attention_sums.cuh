// Sums over parts of the keys, put together: those of a block's warpgroups, and those of several blocks.
//
// A thread has sums for columns of two rows, and of each row the largest score and the total of its weights. Parts
// are scaled to the largest score of all and added in a fixed order.
#pragma once
#include "wgmma.cuh"

namespace atlas {

// Without the care for results below 2^-126 that exp2f takes: they are nothing beside the largest, which is 1.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a part's sums count for whose largest score is `top` where the largest of all is `best`.
__device__ inline float part_weight(float top, float best, float factor) {
    return power_of_two((top - (best == -INFINITY ? 0.0f : best)) * factor);
}

__device__ inline void store_shared(uint32_t to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ inline float4 load_shared(uint32_t from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
}

// Of a warp of each of GROUPS warpgroups, which have 16 rows and every so-manieth tile of keys: the sums are the
// first one's then. The others' go through `bytes` each from `queries` on, which nobody multiplies any more.
// `barrier` and the next one are free.
template <int GROUPS, int OUTS, int N>
__device__ void join(uint32_t queries, int bytes, int barrier, int group, float factor, float (&out)[OUTS][N][4],
                     float (&top)[2], float (&total)[2]) {
    const int lane = threadIdx.x % WARP;
    auto at = [&](int of, int vector) { return queries + of * bytes + (vector * WARP + lane) * 16; };
    if (group > 0) {
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < N; ++d) {
                store_shared(at(group, o * N + d), out[o][d][0], out[o][d][1], out[o][d][2], out[o][d][3]);
            }
        store_shared(at(group, OUTS * N), top[0], top[1], total[0], total[1]);
        named_wait(barrier, GROUPS * WARP);
        named_wait(barrier + 1, GROUPS * WARP);
        return;
    }
    named_wait(barrier, GROUPS * WARP);
#pragma unroll
    for (int other = 1; other < GROUPS; ++other) {
        const float4 each = load_shared(at(other, OUTS * N));
        const float best[2] = {fmaxf(top[0], each.x), fmaxf(top[1], each.y)};
        const float own[2] = {part_weight(top[0], best[0], factor), part_weight(top[1], best[1], factor)};
        const float its[2] = {part_weight(each.x, best[0], factor), part_weight(each.y, best[1], factor)};
        const float totals[2] = {each.z, each.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = best[half];
            total[half] = total[half] * own[half] + totals[half] * its[half];
        }
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < N; ++d) {
                const float4 v = load_shared(at(other, o * N + d));
                float(&mine)[4] = out[o][d];
                mine[0] = mine[0] * own[0] + v.x * its[0];
                mine[1] = mine[1] * own[0] + v.y * its[0];
                mine[2] = mine[2] * own[1] + v.z * its[1];
                mine[3] = mine[3] * own[1] + v.w * its[1];
            }
    }
    named_arrive(barrier + 1, GROUPS * WARP);
}

// Leaves a warpgroup's sums of an item for whoever comes last. True in that one, whose sums are then those over all
// keys. A block has two places in `sums`: for the item that it shares with earlier blocks, and for that which it
// begins and later ones end. `arrived` has a counter for each warpgroup of each block, that of the item's first block
// counts. `barrier` is the warpgroup's.
template <int GROUPS, int OUTS, int N, typename Item>
__device__ bool gather(const Item& item, float4* sums, int32_t* arrived, int barrier, int group, float factor,
                       float (&out)[OUTS][N][4], float (&top)[2], float (&total)[2]) {
    constexpr int VECTORS = OUTS * N + 1, PLACE = GROUPS * VECTORS * WARPGROUP;  // of four sums each
    const int thread = threadIdx.x % WARPGROUP, parts = item.parts;
    auto place = [&](int part) {
        const int number = 2 * (item.first_block + part) + (part ? 0 : 1);
        return sums + static_cast<int64_t>(number) * PLACE + group * VECTORS * WARPGROUP + thread;
    };
    float4* own = place(item.part);
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < N; ++d) {
            const float(&v)[4] = out[o][d];
            own[(o * N + d) * WARPGROUP] = make_float4(v[0], v[1], v[2], v[3]);
        }
    own[(VECTORS - 1) * WARPGROUP] = make_float4(top[0], top[1], total[0], total[1]);
    named_wait(barrier, WARPGROUP);
    __shared__ int earlier[GROUPS];
    if (thread == 0) {
        int before, *counter = arrived + item.first_block * GROUPS + group;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        if (before == parts - 1) *counter = 0;  // for the next launch
        earlier[group] = before;
    }
    named_wait(barrier, WARPGROUP);
    if (earlier[group] != parts - 1) return false;
    float best[2] = {-INFINITY, -INFINITY};
    constexpr int AT_ONCE = 4;
    for (int part = 0; part < parts; part += AT_ONCE) {
        float4 each[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) each[i] = __ldcg(place(min(part + i, parts - 1)) + (VECTORS - 1) * WARPGROUP);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            best[0] = fmaxf(best[0], each[i].x);
            best[1] = fmaxf(best[1], each[i].y);
        }
    }
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int o = 0; o < OUTS; ++o)
#pragma unroll
        for (int d = 0; d < N; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[o][d][e] = 0.0f;
    for (int part = 0; part < parts; ++part) {
        const float4* from = place(part);
        const float4 each = __ldcg(from + (VECTORS - 1) * WARPGROUP);
        const float its[2] = {part_weight(each.x, best[0], factor), part_weight(each.y, best[1], factor)};
        total[0] += each.z * its[0];
        total[1] += each.w * its[1];
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < N; ++d) {
                const float4 v = __ldcg(from + (o * N + d) * WARPGROUP);
                float(&mine)[4] = out[o][d];
                mine[0] += v.x * its[0];
                mine[1] += v.y * its[0];
                mine[2] += v.z * its[1];
                mine[3] += v.w * its[1];
            }
    }
    return true;
}

}  // namespace atlas
