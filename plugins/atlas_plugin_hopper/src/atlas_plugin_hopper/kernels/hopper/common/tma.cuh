// Copies of boxes of a matrix by the tensor memory accelerator, and products of what they bring: 64 tokens with 256 rows.
#pragma once
#include <cuda.h>

#include "wgmma.cuh"

namespace atlas {

// Waits for so many bytes besides the arrivals.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// A box of a matrix into the shared memory of this block, announced at a barrier of it.
__device__ inline void copy_tile(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

#define F4(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define F16(i) F4(i), F4(i + 1), F4(i + 2), F4(i + 3)

// acc[64 x 256] (+)= a[64 x 16] b[256 x 16]ᵀ, started.
__device__ inline void wide_product(float (&acc)[32][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"
        "%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,"
        "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,"
        "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0; }"
        : F16(0), F16(4), F16(8), F16(12), F16(16), F16(20), F16(24), F16(28)
        : "l"(a), "l"(b), "r"(add));
}

#undef F4
#undef F16

}  // namespace atlas
