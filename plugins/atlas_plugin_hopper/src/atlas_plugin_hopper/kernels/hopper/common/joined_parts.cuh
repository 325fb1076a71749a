// Parts of an attention that blocks have found, put together by those that need the whole (flash decoding; Dao et al., 2023).
#pragma once
#include "resident_words.cuh"

namespace atlas {

// A pair of elements put together from the parts of all blocks: of part s the elements are at parts[s * PART_APART], the
// highest score and the sum of weights at tops[s * TOP_APART]. AT_ONCE parts are asked for at once.
template <int PART_APART, int TOP_APART, int AT_ONCE>
__device__ inline uint32_t join(const uint64_t* parts, const uint64_t* tops, uint32_t flag, int splits) {
    float best = -INFINITY, sure = 0.0f, a = 0.0f, b = 0.0f;
#pragma unroll 1
    for (int first = 0; first < splits; first += AT_ONCE) {
        uint64_t part[AT_ONCE], top[AT_ONCE], total[AT_ONCE];
        bool all;
        int turns = 0;
        do {
            all = true;
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) {
                part[s] = top[s] = total[s] = static_cast<uint64_t>(flag) << 32;
                if (first + s >= splits) continue;
                part[s] = look(parts + (first + s) * PART_APART);
                look2(tops + (first + s) * TOP_APART, top[s], total[s]);
            }
#pragma unroll
            for (int s = 0; s < AT_ONCE; ++s) {
                all = all && fresh(part[s], flag) && fresh(top[s], flag) && fresh(total[s], flag);
            }
            lose_patience(turns);
        } while (!all);
        float above = best;
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) above = first + s < splits ? fmaxf(above, number(top[s])) : above;
        const float old = exp2f(best - above);
        best = above;
        sure *= old, a *= old, b *= old;
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            const float by = first + s < splits ? number(total[s]) * exp2f(number(top[s]) - best) : 0.0f;
            sure += by;
            a = fmaf(by, widen(static_cast<uint16_t>(part[s])), a);
            b = fmaf(by, widen(static_cast<uint16_t>(part[s] >> 16)), b);
        }
    }
    const float by = __fdividef(1.0f, sure);
    return pack(a * by, b * by);
}

}  // namespace atlas
