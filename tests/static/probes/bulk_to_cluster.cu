// What the gate against __cuda_syscall must catch: a bulk copy whose target is written as .shared::cluster.
#include <stdint.h>

extern "C" __global__ void copy(const void* from) {
    extern __shared__ unsigned char to[];
    __shared__ uint64_t barrier;
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const uint32_t arrived = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 4096, [%2];"
                 ::"r"(target), "l"(from), "r"(arrived) : "memory");
}
