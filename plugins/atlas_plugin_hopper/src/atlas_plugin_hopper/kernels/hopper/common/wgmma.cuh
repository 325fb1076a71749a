// What Hopper's warpgroup products need: descriptors of operands in shared memory, the instructions, and their order
// against copies (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").
//
// Tiles are panels of rows of 128 bytes (64 elements), aligned to 1024 and swizzled by 16-byte pieces; a wider tile is
// several panels, one behind the other.
#pragma once
#include "device.cuh"

namespace atlas {

constexpr int WARPGROUP = 128, PANEL = 64;  // threads; elements of a panel's row

// Where 8 elements of a row lie in a panel.
__device__ inline uint32_t swizzled(uint32_t panel, int row, int piece) {
    return panel + row * 128 + ((piece ^ (row & 7)) * 16);
}

constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32;

// A panel whose rows hold the summed dimension: groups of 8 rows are 1024 bytes apart.
__device__ inline uint64_t summed_inside(uint32_t panel) {
    return SWIZZLE_128 | EIGHT_ROWS | 1ull << 16 | (panel & 0x3ffff) >> 4;
}

// Panels whose rows are the summed dimension, `apart` bytes from one to the next: the operand is read transposed.
__device__ inline uint64_t summed_across(uint32_t panel, uint32_t apart) {
    return SWIZZLE_128 | EIGHT_ROWS | static_cast<uint64_t>(apart >> 4) << 16 | (panel & 0x3ffff) >> 4;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Between writes to shared memory, of this thread or known to it by a barrier, and the tensor cores' reads.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define ATLAS_F4(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define ATLAS_F16_(i) ATLAS_F4(i), ATLAS_F4(i + 1), ATLAS_F4(i + 2), ATLAS_F4(i + 3)
#define ATLAS_R32                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define ATLAS_R48                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}"
#define ATLAS_R56                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55}"
#define ATLAS_R64                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63}"

// acc[64 x N] (+)= a[64 x 16] b[N x 16]ᵀ, started; N / 8 groups of sums, a thread's as those of mma.sync, warp w having
// rows 16 w. `add` 0 begins the sum anew.
template <int N>
__device__ inline void product(float (&acc)[N / 8][4], uint64_t a, uint64_t b, int add) {
    static_assert(N == 64 || N == 96 || N == 112 || N == 128, "an instruction for this width is not written");
    if constexpr (N == 112) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %58, 0; wgmma.mma_async.sync.aligned.m64n112k16.f32." ELEMENT
                     "." ELEMENT " " ATLAS_R56 ", %56, %57, p, 1, 1, 0, 0; }"
                     : ATLAS_F16_(0), ATLAS_F16_(4), ATLAS_F16_(8), ATLAS_F4(12), ATLAS_F4(13) : "l"(a), "l"(b), "r"(add));
    } else if constexpr (N == 96) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %50, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32." ELEMENT
                     "." ELEMENT " " ATLAS_R48 ", %48, %49, p, 1, 1, 0, 0; }"
                     : ATLAS_F16_(0), ATLAS_F16_(4), ATLAS_F16_(8) : "l"(a), "l"(b), "r"(add));
    } else if constexpr (N == 64) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT
                     "." ELEMENT " " ATLAS_R32 ", %32, %33, p, 1, 1, 0, 0; }"
                     : ATLAS_F16_(0), ATLAS_F16_(4) : "l"(a), "l"(b), "r"(add));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT
                     "." ELEMENT " " ATLAS_R64 ", %64, %65, p, 1, 1, 0, 0; }"
                     : ATLAS_F16_(0), ATLAS_F16_(4), ATLAS_F16_(8), ATLAS_F16_(12) : "l"(a), "l"(b), "r"(add));
    }
}

// The same with a in registers and b's rows being the summed dimension.
template <int N>
__device__ inline void product_across(float (&acc)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {
    static_assert(N == 64 || N == 128, "an instruction for this width is not written");
    if constexpr (N == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " " ATLAS_R32
                     ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                     : ATLAS_F16_(0), ATLAS_F16_(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " " ATLAS_R64
                     ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                     : ATLAS_F16_(0), ATLAS_F16_(4), ATLAS_F16_(8), ATLAS_F16_(12)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

#undef ATLAS_F4
#undef ATLAS_F16_
#undef ATLAS_R32
#undef ATLAS_R48
#undef ATLAS_R56
#undef ATLAS_R64

// Barriers in shared memory that count arrivals; a phase has parity 0, 1, 0 ...
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(barrier) : "memory");
}
// This thread's arrival, once all copies that it has asked for are there.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, int parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 ::"r"(barrier), "r"(parity) : "memory");
}

// Barriers of the processor, by number: `threads` arrive or wait.
__device__ inline void named_wait(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

template <int REGISTERS>
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

}  // namespace atlas
