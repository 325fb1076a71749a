// Sums over a head whose rows are shared out to the blocks of a cluster, one tile of gemv.cuh each.
//
// Every block sends its part to all others' shared memory and counts them on a barrier there; only the threads that
// store sums wait for it, the others go on with the next tile. Two of each, used in turns: who sends for the next head
// but one has heard from all for the next, and they have read what was sent for this one.
#pragma once
#include "cluster.cuh"
#include "device.cuh"

namespace atlas {

constexpr int MAX_CLUSTER = 8;

struct HeadSums {
    uint64_t barrier[2];
    float part[2][MAX_CLUSTER][8];  // by block and column

    // By all threads, at the beginning; cluster_wait() must follow before the first sum.
    __device__ void begin() {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                             ::"r"(shared_address(&barrier[i])), "r"(cluster_blocks() * 8) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        cluster_arrive();
    }

    // The sum of `value` over the eight threads of a column in all blocks. Threads 8 * column + i for all eight columns
    // call it together, for the `turn`-th time.
    __device__ float of_head(float value, int turn) {
        const int column = threadIdx.x / 8, to = threadIdx.x % 8, place = turn & 1;
        const uint32_t parity = turn >> 1 & 1, blocks = cluster_blocks();
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
        if (to < static_cast<int>(blocks)) {
            const uint32_t there = of_block(shared_address(&part[place][cluster_rank()][column]), to);
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                         ::"r"(of_block(shared_address(&barrier[place]), to)) : "memory");
        }
        uint32_t done;
        do {
            asm volatile("{\n.reg .pred p;\n"
                         "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                         "selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(shared_address(&barrier[place])), "r"(parity) : "memory");
        } while (!done);
        float sum = 0.0f;
        for (uint32_t block = 0; block < blocks; ++block) {
            sum += *static_cast<volatile float*>(&part[place][block][column]);
        }
        return sum;
    }
};

}  // namespace atlas
