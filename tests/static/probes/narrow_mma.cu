// Tensor-core products of narrow floats that compute capability 12.x has and Hopper lacks (PTX ISA, mma). Operands are of no
// meaning: what counts is which instruction the assembler makes of each.
#include <stdint.h>

struct Operands {
    uint32_t a[4], b[2], scale_a, scale_b;
};

// e2m1 by e2m1 with a scale in ue4m3 for each 16 of the summed dimension: NVFP4.
extern "C" __global__ void nvfp4(const Operands* in, float4* out) {
    const Operands v = in[threadIdx.x];
    float4 d = out[threadIdx.x];
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0,0}, %11, {0,0};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(v.a[0]), "r"(v.a[1]), "r"(v.a[2]), "r"(v.a[3]), "r"(v.b[0]), "r"(v.b[1]), "r"(v.scale_a), "r"(v.scale_b));
    out[threadIdx.x] = d;
}

// e4m3 by e2m1 without scales: activations of 8 bits, weights of 4.
extern "C" __global__ void e4m3_e2m1(const Operands* in, float4* out) {
    const Operands v = in[threadIdx.x];
    float4 d = out[threadIdx.x];
    asm("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(v.a[0]), "r"(v.a[1]), "r"(v.a[2]), "r"(v.a[3]), "r"(v.b[0]), "r"(v.b[1]));
    out[threadIdx.x] = d;
}
