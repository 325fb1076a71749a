// The blocks of a cluster. cooperative_groups.h says the same in templates that take a second of every compilation.
#pragma once
#include <stdint.h>

namespace atlas {

// What a thread has written before it arrives is seen by all who have waited.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

__device__ inline uint32_t cluster_blocks() {
    uint32_t blocks;
    asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(blocks));
    return blocks;
}
__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of the same place in another block of the cluster: of shared memory, and as a pointer.
__device__ inline uint32_t of_block(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
template <class T>
__device__ inline T* of_block(T* shared, uint32_t rank) {
    return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
}

}  // namespace atlas
