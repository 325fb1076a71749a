// Reductions over one row of logits that a cluster of blocks shares out: each block has a contiguous range of token
// ids. Everything that is summed or compared is an integer, so that results do not depend on the order of arrival.
#pragma once
#include "cluster.cuh"
#include "device.cuh"

namespace atlas {

constexpr int ROW_BLOCKS = 8, ROW_THREADS = 512, ROW_WARPS = ROW_THREADS / WARP;

// Floats as unsigned integers of the same order.
__device__ inline uint32_t ordered(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_ordered(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Larger values first, then lower ids: the largest candidate is the choice.
__device__ inline uint64_t candidate(float value, int id) {
    return static_cast<uint64_t>(ordered(value)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ inline int candidate_id(uint64_t c) { return static_cast<int>(~static_cast<uint32_t>(c)); }
__device__ inline float candidate_value(uint64_t c) { return from_ordered(static_cast<uint32_t>(c >> 32)); }

struct Sum {
    static __device__ uint64_t of(uint64_t a, uint64_t b) { return a + b; }
};
struct Max {
    static __device__ uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

struct RowShared {
    uint64_t warps[ROW_WARPS];
    uint64_t blocks[2][ROW_BLOCKS];
};

// All threads of the cluster call the same sequence of methods. A cluster serves row blockIdx.x / ROW_BLOCKS.
class RowCluster {
  public:
    __device__ RowCluster(RowShared& shared, int vocabulary) : shared_(shared), phase_(0) {
        // Whole vectors, as far as there are any.
        const int rank = cluster_rank(), each = (vocabulary + 4 * ROW_BLOCKS - 1) / (4 * ROW_BLOCKS) * 4;
        first_ = min(rank * each, vocabulary) + threadIdx.x;
        end_ = min((rank + 1) * each, vocabulary);
        // Nobody writes into the shared memory of a block that has not begun.
        cluster_sync();
    }

    __device__ bool leader() const { return cluster_rank() == 0 && threadIdx.x == 0; }

    // The reduction of value(id) over all ids of the row, in every thread.
    template <class Reduce, class Value>
    __device__ uint64_t over(Value value) {
        uint64_t result = 0;
        for (int id = first_; id < end_; id += ROW_THREADS) result = Reduce::of(result, value(id));
        return all<Reduce>(result);
    }

    // The best candidate of a row of logits, which begins at a multiple of 16 bytes when its length is one of 4 logits.
    __device__ uint64_t best(const float* logits, int vocabulary) {
        if (vocabulary % 4 != 0) return over<Max>([&](int id) { return candidate(logits[id], id); });
        uint64_t result = 0;
        const int start = first_ - static_cast<int>(threadIdx.x);
#pragma unroll 8
        for (int id = start + 4 * threadIdx.x; id < end_; id += 4 * ROW_THREADS) {
            const float4 v = *reinterpret_cast<const float4*>(logits + id);
            const uint64_t first = Max::of(candidate(v.x, id), candidate(v.y, id + 1));
            const uint64_t second = Max::of(candidate(v.z, id + 2), candidate(v.w, id + 3));
            result = Max::of(result, Max::of(first, second));
        }
        return all<Max>(result);
    }

    // The largest t < 2^BITS for which reach(t) ≥ goal, where reach falls with t and reach(0) ≥ goal.
    template <int BITS, class Reach>
    __device__ uint32_t largest(uint64_t goal, Reach reach) {
        uint32_t result = 0;
        for (int bit = BITS - 1; bit >= 0; --bit) {
            const uint32_t attempt = result | 1u << bit;
            if (reach(attempt) >= goal) result = attempt;
        }
        return result;
    }

  private:
    // Of what every thread of the cluster has found.
    template <class Reduce>
    __device__ uint64_t all(uint64_t result) {
#pragma unroll
        for (int distance = WARP / 2; distance > 0; distance /= 2) {
            result = Reduce::of(result, __shfl_xor_sync(~0u, result, distance));
        }
        if (threadIdx.x % WARP == 0) shared_.warps[threadIdx.x / WARP] = result;
        __syncthreads();
        if (threadIdx.x < ROW_BLOCKS) {
            uint64_t block = 0;
#pragma unroll
            for (int w = 0; w < ROW_WARPS; ++w) block = Reduce::of(block, shared_.warps[w]);
            of_block(&shared_, threadIdx.x)->blocks[phase_][cluster_rank()] = block;
        }
        cluster_sync();
        result = 0;
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; ++b) result = Reduce::of(result, shared_.blocks[phase_][b]);
        phase_ ^= 1;
        return result;
    }

    RowShared& shared_;
    int phase_, first_, end_;
};

}  // namespace atlas
