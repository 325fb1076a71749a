// How the blocks of one cluster hand on what they compute: they put it into the shared memory of who reads it, and the
// bytes count on a barrier there, so that readers sleep until all is there. Readers that look at words again and again
// instead keep what is sent from arriving.
//
// What is sent has one place, and the next layer writes it again. It has been read by then: who writes has received
// something that every block of the cluster, and every warp of it, has sent behind its reading (the next exchange among
// all clusters, decoder_clusters.cu).
#pragma once
#include "heads_of_cluster.cuh"
#include "tma.cuh"

namespace atlas {

// A barrier of every block for one kind of what is sent, once a layer.
struct Mail {
    uint32_t barrier;

    __device__ void begin() const { barrier_init(barrier, 1); }
    // By one thread, for the layer that comes next: so many bytes will be here.
    __device__ void expect(int bytes) const { barrier_expect(barrier, bytes); }
    __device__ void wait(int layer) const { barrier_wait(barrier, layer & 1); }

    // To the same address of another block.
    __device__ void send(uint32_t rank, uint32_t address, uint32_t bits) const {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     ::"r"(of_block(address, rank)), "r"(bits), "r"(of_block(barrier, rank)) : "memory");
    }
    __device__ void send(uint32_t rank, uint32_t address, const uint2& v) const {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                     ::"r"(of_block(address, rank)), "r"(v.x), "r"(v.y), "r"(of_block(barrier, rank)) : "memory");
    }
    __device__ void send(uint32_t rank, uint32_t address, const uint4& v) const {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(of_block(address, rank)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
                     "r"(of_block(barrier, rank)) : "memory");
    }
};

}  // namespace atlas
