// The instructions and reductions that every kernel here uses; all of them exist from sm_90 on.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

#include "atlas_step.h"

namespace atlas {

constexpr int WARP = 32;
constexpr float LOG2E = 1.4426950408889634f;

// bf16 values travel as their bits, two to a 32-bit register, lower address first.
__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float widen(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ inline uint16_t narrow(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
__device__ inline uint32_t pack(float first, float second) {
    return narrow(first) | static_cast<uint32_t>(narrow(second)) << 16;
}

// Programmatic dependent launch: a kernel may begin while its predecessor still runs. Whatever the step writes
// (activations, pages) may be touched only behind wait_for_predecessor(); weights, constants and inputs may be read
// before it. Every block must call it before it exits: a grid that ends without waiting would end before its
// predecessor and break the chain.
//
// Slots, positions and token rows may be read before it as well, by kernels with a hidden state: step_begin writes
// them and admits nobody, nor does embed, which alone can follow it; so both have ended before any later kernel
// begins.
__device__ inline void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the successor begin as soon as every block has begun; it then asks for its weights while this kernel still
// works. For kernels with one block on every processor and no room for a second; others let their successors in as
// their blocks end.
__device__ inline void admit_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Weights are read once a step: they pass by the L1 cache.
__device__ inline uint4 load_weights(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Activations are written by the predecessor, which may overlap: an ordinary load, never the read-only path.
__device__ inline uint4 load16(const void* address) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ inline uint4 zero16() { return make_uint4(0, 0, 0, 0); }

__device__ inline void unpack(const uint4& v, float (&out)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = low(words[i]);
        out[2 * i + 1] = high(words[i]);
    }
}

__device__ inline uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// acc[16x8] += a[16x16] b[16x8], bf16 with float32 sums. Lane 4g+t holds of a: rows g, g+8 at columns 2t.. and 2t+8..;
// of b: column g at rows 2t.. and 2t+8..; of acc: rows g (first two) and g+8 (last two) at columns 2t, 2t+1.
__device__ inline void mma(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void load_matrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ inline void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// 16 bytes from global to shared memory in the background; zeros when not valid (the source must still be an address).
__device__ inline void copy_async(uint32_t target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(target), "l"(source), "r"(valid ? 16 : 0) : "memory");
}
// The same for weights, which are read once: the L2 cache fetches the neighbourhood as well.
__device__ inline void copy_weights(uint32_t target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(target), "l"(source), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}

// Sine and cosine of position * frequency. The product is reduced in double: in float the phase of position 100,000
// is off by 0.004 rad.
__device__ inline void rotation(int position, float frequency, float scale, float& sine, float& cosine) {
    const double angle = static_cast<double>(position) * static_cast<double>(frequency);
    const double turns = rint(angle * 0.15915494309189535);
    __sincosf(static_cast<float>(fma(-turns, 6.283185307179586, angle)), &sine, &cosine);
    sine *= scale;
    cosine *= scale;
}

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }

// Where one page holds a token of one head, in elements from the start of the layer: order kv, head, token, dim.
__device__ inline int64_t page_element(int64_t page, int kv, int head, int token, int kv_heads, int page_tokens,
                                       int head_dim) {
    return (((page * 2 + kv) * kv_heads + head) * page_tokens + token) * head_dim;
}

}  // namespace atlas
