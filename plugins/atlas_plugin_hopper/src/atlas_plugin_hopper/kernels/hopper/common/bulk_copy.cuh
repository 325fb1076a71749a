// Copies of consecutive bytes to shared memory by the copy engine, which tells a barrier what has come.
#pragma once
#include "tma.cuh"

namespace atlas {

__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// The same of what is not read again soon, so that the L2 cache rather keeps other things.
__device__ inline void copy_bulk_once(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
                 "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], p; }"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

}  // namespace atlas
