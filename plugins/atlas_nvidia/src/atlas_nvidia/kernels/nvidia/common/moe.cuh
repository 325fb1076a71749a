// A few tokens' choices of experts, sorted by every block for itself: a list of units, each an expert with up to
// UNIT_TOKENS of its tokens. All blocks have the same units; the order of tokens within one may differ between blocks and
// runs, and no result depends on it.
#pragma once
#include "device.cuh"

#ifndef UNIT_TOKENS
#define UNIT_TOKENS 8
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif

namespace atlas {

constexpr int MOE_WARPS = BLOCK_WARPS, MOE_THREADS = MOE_WARPS * WARP, COLUMN_TILES = UNIT_TOKENS / 8;
constexpr int CHUNK = 64, ROWS = 16;  // a warp's step: 16 rows of 64 weights

// What the predecessor of the predecessor has written: past the L1 cache, which may be older.
__device__ inline int load_choice(const int32_t* address) { return __ldcg(address); }

struct Unit {
    uint16_t expert, size, first, unused;  // its choices are order[first .. first + size)
};

// Bytes of the running sums and choices of Units, and of all of it; ``choices`` are those of all tokens, a shared
// expert's among them.
__host__ __device__ constexpr int sums_bytes(int experts, int choices) { return (experts + 1 + choices + 3) / 4 * 16; }
__host__ __device__ constexpr int units_bytes(int experts, int choices) {
    return sums_bytes(experts, choices) + (choices * 10 + 15) / 16 * 16;
}

// A choice is token * top_k + place. Behind those of the routed experts come those of one that every token has, if there
// is one (``shared``): expert ``experts``, choice ``capacity * top_k + token``.
struct Units {
    int32_t* counts;  // [experts + 1]: choices before an expert's own, in the upper half units
    int32_t* choice;  // [choices]: its expert, in the upper half its place there
    Unit* list;       // [choices]
    uint16_t* order;  // [choices]
    int count = 0;

    __device__ Units(unsigned char* memory, int experts, int choices) {
        counts = reinterpret_cast<int32_t*>(memory);
        choice = counts + experts + 1;
        list = reinterpret_cast<Unit*>(memory + sums_bytes(experts, choices));
        order = reinterpret_cast<uint16_t*>(list + choices);
    }

    __device__ void build(const int32_t* chosen, int live, int experts, int top_k, int capacity, bool shared) {
        const int routed = live * top_k;
        if (live == 1) {
            if (static_cast<int>(threadIdx.x) < top_k) {
                const uint16_t place = static_cast<uint16_t>(threadIdx.x);
                list[place] = {static_cast<uint16_t>(load_choice(chosen + place)), 1, place, 0};
                order[place] = place;
            }
            count = top_k;
        } else {
            for (int e = threadIdx.x; e < experts; e += MOE_THREADS) counts[e] = 0;
            __syncthreads();
            for (int c = threadIdx.x; c < routed; c += MOE_THREADS) {
                const int expert = load_choice(chosen + c);
                choice[c] = expert | atomicAdd(counts + expert, 1) << 16;
            }
            __syncthreads();
            if (threadIdx.x < WARP) scan(experts);
            __syncthreads();
            for (int e = threadIdx.x; e < experts; e += MOE_THREADS) {
                const int first = counts[e] & 0xffff, end = counts[e + 1] & 0xffff;
                Unit* to = list + (counts[e] >> 16);
                for (int at = first; at < end; at += UNIT_TOKENS, ++to) {
                    *to = {static_cast<uint16_t>(e), static_cast<uint16_t>(min(UNIT_TOKENS, end - at)),
                           static_cast<uint16_t>(at), 0};
                }
            }
            for (int c = threadIdx.x; c < routed; c += MOE_THREADS) {
                order[(counts[choice[c] & 0xffff] & 0xffff) + (choice[c] >> 16)] = static_cast<uint16_t>(c);
            }
            count = counts[experts] >> 16;
            if (live > UNIT_TOKENS) divide(routed);
        }
        if (shared) {
            for (int t = threadIdx.x; t < live; t += MOE_THREADS) {
                order[routed + t] = static_cast<uint16_t>(capacity * top_k + t);
                if (t % UNIT_TOKENS != 0) continue;
                list[count + t / UNIT_TOKENS] = {static_cast<uint16_t>(experts),
                                                 static_cast<uint16_t>(min(UNIT_TOKENS, live - t)),
                                                 static_cast<uint16_t>(routed + t), 0};
            }
            count += (live + UNIT_TOKENS - 1) / UNIT_TOKENS;
        }
        __syncthreads();
    }

  private:
    // Where an expert has several units, its choices ascend.
    __device__ void divide(int routed) {
        __syncthreads();
        for (int c = threadIdx.x; c < routed; c += MOE_THREADS) {
            const int expert = choice[c] & 0xffff, first = counts[expert] & 0xffff, end = counts[expert + 1] & 0xffff;
            if (end - first <= UNIT_TOKENS) continue;
            int place = 0;
            for (int at = first; at < end; ++at) place += order[at] < c;
            choice[c] = expert | place << 16;
        }
        __syncthreads();
        for (int c = threadIdx.x; c < routed; c += MOE_THREADS) {
            order[(counts[choice[c] & 0xffff] & 0xffff) + (choice[c] >> 16)] = static_cast<uint16_t>(c);
        }
    }

    // One warp turns counts into running sums.
    __device__ void scan(int experts) const {
        int before = 0;
        for (int start = 0; start < experts; start += WARP) {
            const int e = start + threadIdx.x, own = e < experts ? counts[e] : 0;
            const int value = own | (own + UNIT_TOKENS - 1) / UNIT_TOKENS << 16;
            int sum = value;
#pragma unroll
            for (int distance = 1; distance < WARP; distance *= 2) {
                const int other = __shfl_up_sync(~0u, sum, distance);
                if (static_cast<int>(threadIdx.x) >= distance) sum += other;
            }
            if (e < experts) counts[e] = before + sum - value;
            before += __shfl_sync(~0u, sum, WARP - 1);
        }
        if (threadIdx.x == 0) counts[experts] = before;
    }
};

}  // namespace atlas
