// The same copy as it must be written: one instruction on Hopper and on compute capability 12.x.
#include <stdint.h>

extern "C" __global__ void copy(const void* from) {
    extern __shared__ unsigned char to[];
    __shared__ uint64_t barrier;
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const uint32_t arrived = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], 4096, [%2];"
                 ::"r"(target), "l"(from), "r"(arrived) : "memory");
}
