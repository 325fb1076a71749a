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

// Where sums of part `part` of an item are in memory. A block has two places there: for the item that it shares with
// earlier blocks, and for that which it begins and later ones end.
template <int GROUPS, int OUTS, int N, typename Item>
__device__ float4* part_of(const Item& item, float4* sums, int part) {
    constexpr int VECTORS = OUTS * N + 1, PLACE = GROUPS * VECTORS * WARPGROUP;  // of four sums each
    const int number = 2 * (item.first_block + part) + (part ? 0 : 1);
    return sums + static_cast<int64_t>(number) * PLACE;
}

// Whether a warpgroup is the last of its number that has left its sums of an item. `arrived` has a counter for each
// warpgroup of each block, that of the item's first block counts. `barrier` is the warpgroup's.
template <int GROUPS, typename Item>
__device__ bool comes_last(const Item& item, int32_t* arrived, int barrier, int group) {
    __shared__ int earlier[GROUPS];
    named_wait(barrier, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        int before, *counter = arrived + item.first_block * GROUPS + group;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        if (before == item.parts - 1) *counter = 0;  // for the next launch
        earlier[group] = before;
    }
    named_wait(barrier, WARPGROUP);
    return earlier[group] == item.parts - 1;
}

// Whether all other parts have left their sums already.
template <int GROUPS, typename Item>
__device__ bool finds_all(const Item& item, int32_t* arrived, int barrier, int group) {
    __shared__ int earlier[GROUPS];
    if (threadIdx.x % WARPGROUP == 0) {
        int* counter = arrived + item.first_block * GROUPS + group;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(earlier[group]) : "l"(counter) : "memory");
        if (earlier[group] == item.parts - 1) *counter = 0;  // for the next launch
    }
    named_wait(barrier, WARPGROUP);
    return earlier[group] == item.parts - 1;
}

// Leaves a warpgroup's sums of an item for whoever comes last. True in that one, whose sums are then those over all
// keys.
template <int GROUPS, int OUTS, int N, typename Item>
__device__ bool gather(const Item& item, float4* sums, int32_t* arrived, int barrier, int group, float factor,
                       float (&out)[OUTS][N][4], float (&top)[2], float (&total)[2]) {
    constexpr int VECTORS = OUTS * N + 1;
    const int parts = item.parts;
    auto place = [&](int part) {
        return part_of<GROUPS, OUTS, N>(item, sums, part) + group * VECTORS * WARPGROUP + threadIdx.x % WARPGROUP;
    };
    // Of two parts, whoever finds the other's sums adds its own to them as they are, and need not leave them if it
    // finds them at once. For heads of 256 there are no registers for that.
    const bool pair = OUTS * N <= 16 && parts == 2;
    if (!pair || !finds_all<GROUPS>(item, arrived, barrier, group)) {
        float4* own = place(item.part);
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < N; ++d) {
                const float(&v)[4] = out[o][d];
                own[(o * N + d) * WARPGROUP] = make_float4(v[0], v[1], v[2], v[3]);
            }
        own[(VECTORS - 1) * WARPGROUP] = make_float4(top[0], top[1], total[0], total[1]);
        if (!comes_last<GROUPS>(item, arrived, barrier, group)) return false;
    }
    if (pair) {
        // Products are rounded before they are added, so that it is all the same who adds.
        auto add = [](float mine, float own, float its, float other) {
            return __fadd_rn(__fmul_rn(mine, own), __fmul_rn(other, its));
        };
        const float4* from = place(1 - item.part);
        const float4 each = __ldcg(from + (VECTORS - 1) * WARPGROUP);
        const float best[2] = {fmaxf(top[0], each.x), fmaxf(top[1], each.y)};
        const float own[2] = {part_weight(top[0], best[0], factor), part_weight(top[1], best[1], factor)};
        const float its[2] = {part_weight(each.x, best[0], factor), part_weight(each.y, best[1], factor)};
        total[0] = add(total[0], own[0], its[0], each.z);
        total[1] = add(total[1], own[1], its[1], each.w);
#pragma unroll
        for (int o = 0; o < OUTS; ++o)
#pragma unroll
            for (int d = 0; d < N; ++d) {
                const float4 v = __ldcg(from + (o * N + d) * WARPGROUP);
                float(&sum)[4] = out[o][d];
                sum[0] = add(sum[0], own[0], its[0], v.x);
                sum[1] = add(sum[1], own[0], its[0], v.y);
                sum[2] = add(sum[2], own[1], its[1], v.z);
                sum[3] = add(sum[3], own[1], its[1], v.w);
            }
        return true;
    }
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
