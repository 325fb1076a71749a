// The instructions and reductions that every kernel here uses; all of them exist from sm_90 on.
#pragma once
#include "atlas_step.h"
#include "element.cuh"

namespace atlas {

constexpr int WARP = 32;
constexpr float LOG2E = 1.4426950408889634f;

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
// works. Blocks that stream weights take so much shared memory that a processor has room for one, so early ones do not
// pile up where there is room first.
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

__device__ inline void as_floats(const uint4& v, float (&out)[8], int first) {
    out[first] = __uint_as_float(v.x);
    out[first + 1] = __uint_as_float(v.y);
    out[first + 2] = __uint_as_float(v.z);
    out[first + 3] = __uint_as_float(v.w);
}

// 8 neighbours of float32 activations, behind the predecessor.
__device__ inline void load_floats(const float* address, float (&out)[8]) {
    const uint4 first = load16(address), second = load16(address + 4);
    as_floats(first, out, 0);
    as_floats(second, out, 4);
}

__device__ inline void store_floats(float* address, const float (&v)[8]) {
    reinterpret_cast<float4*>(address)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(address)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Vectors of weights keep the type of their checkpoint; implementations/base.py knows these numbers too.
enum VectorType { VECTOR_BF16 = 0, VECTOR_F32 = 1, VECTOR_F16 = 2 };

// 8 neighbours of a vector of weights.
__device__ inline void load_vector(const void* vector, int k, int type, float (&out)[8]) {
    if (type == VECTOR_F32) {
        const float* from = static_cast<const float*>(vector) + k;
        as_floats(load_weights(from), out, 0);
        as_floats(load_weights(from + 4), out, 4);
        return;
    }
    const uint4 raw = load_weights(static_cast<const uint16_t*>(vector) + k);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
        out[i] = type == VECTOR_F16 ? widen_f16(bits) : widen_bf16(bits);
    }
}

// One of them.
__device__ inline float load_element(const void* vector, int64_t index, int type) {
    if (type == VECTOR_F32) return static_cast<const float*>(vector)[index];
    const uint16_t bits = static_cast<const uint16_t*>(vector)[index];
    return type == VECTOR_F16 ? widen_f16(bits) : widen_bf16(bits);
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
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// Where one page holds a token of one head, in elements from the start of the layer: order kv, head, token, dim.
__device__ inline int64_t page_element(int64_t page, int kv, int head, int token, int kv_heads, int page_tokens,
                                       int head_dim) {
    return (((page * 2 + kv) * kv_heads + head) * page_tokens + token) * head_dim;
}

}  // namespace atlas
