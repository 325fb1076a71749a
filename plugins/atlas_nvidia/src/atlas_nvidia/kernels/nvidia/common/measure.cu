// What benches measure the machine with: a stream of reads, and the time.
#include "device.cuh"

using namespace atlas;

// Reads `vectors` times 16 bytes and does as good as nothing with them.
extern "C" __global__ void __launch_bounds__(1024)
read_stream(const void* from, int64_t vectors, uint32_t* never) {
    admit_successor();
    wait_for_predecessor();
    constexpr int AT_ONCE = 8;
    const int stride = static_cast<int>(blockDim.x);
    const uint4* memory = static_cast<const uint4*>(from);
    uint32_t mixed = 0;
    // A block reads AT_ONCE of its widths in a row, then as much of what all blocks have not yet.
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * AT_ONCE * stride + threadIdx.x; at < vectors;
         at += static_cast<int64_t>(gridDim.x) * AT_ONCE * stride) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            v[i] = at + i * stride < vectors ? load_weights(memory + at + i * stride) : zero16();
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) mixed ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    if (mixed == 0x9e3779b9u) atomicAdd(never, 1u);
}

// at[0] counts pairs of stamps; pair n is at[1 + 2 n] (what 0) and at[2 + 2 n] (what 1, which ends it), in nanoseconds.
extern "C" __global__ void __launch_bounds__(32)
stamp(int64_t* at, int32_t what) {
    wait_for_predecessor();
    if (threadIdx.x > 0) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    const int64_t pair = at[0];
    at[1 + 2 * pair + what] = static_cast<int64_t>(now);
    if (what == 1) at[0] = pair + 1;
}
