// How blocks hand on what they compute within one launch, all of them being resident, without a barrier between them:
// every word of 64 bits carries a flag, as in NCCL's LL protocol, and who needs it reads it until the flag is the one
// awaited. An aligned access of 64 bits is single (PTX ISA, memory consistency model), so a fresh word is whole, and no
// fence is needed.
//
// A flag is the number of a layer, counted on over all launches: nothing is cleared between replays. A word has one
// place, which the next layer writes again. Nobody does so too early. Three vectors of a layer (hidden, middle, inner)
// have a share of every block. Let block R read a word in layer l that block W writes again in layer l + 1: in between
// W has read the whole of such a vector, and R sent its share of that only after it had read the word, since a block
// does one phase after another and each thread waits for what it reads. So W's write comes behind R's read. Between
// launches lies the end of the first. Where a flag has 16 bits the word is written in every layer: what was there
// before is one layer old, never 65,536.
//
// Nobody waits for ever: all blocks are resident (a cooperative launch is refused otherwise), and none waits for
// anything but words of others that are as far.
#pragma once
#include "device.cuh"

namespace atlas {

constexpr int PATIENCE = 1 << 23;  // looks at a word, some seconds of running: who waits longer has lost its partner

__device__ inline void store_word(uint64_t* to, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ inline uint64_t look(const uint64_t* at) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}
__device__ inline void look2(const uint64_t* at, uint64_t& first, uint64_t& second) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(at) : "memory");
}
// Ends the launch with an error instead of hanging for ever.
__device__ inline void lose_patience(int& turns) {
    if (++turns == PATIENCE) __trap();
}

// 32 bits and the flag.
__device__ inline void send(uint64_t* to, uint32_t bits, uint32_t flag) {
    store_word(to, static_cast<uint64_t>(flag) << 32 | bits);
}
__device__ inline bool fresh(uint64_t word, uint32_t flag) { return static_cast<uint32_t>(word >> 32) == flag; }
__device__ inline float number(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word)); }

// Two numbers of 24 bits, the range of float32 with 15 bits of fraction, and the low half of the flag.
__device__ inline uint64_t two_numbers(float first, float second, uint32_t flag) {
    const uint64_t low = (__float_as_uint(first) + 0x80) >> 8, high = (__float_as_uint(second) + 0x80) >> 8;
    return high << 40 | low << 16 | (flag & 0xffff);
}
__device__ inline bool fresh_pair(uint64_t word, uint32_t flag) {
    return ((static_cast<uint32_t>(word) ^ flag) & 0xffff) == 0;
}
__device__ inline float first_number(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word >> 16) << 8); }
__device__ inline float second_number(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word >> 40) << 8); }

// A block's share of so many things.
struct Span {
    int first, count;
};
__device__ inline Span span(int all) {
    const int first = static_cast<int>(static_cast<int64_t>(all) * blockIdx.x / gridDim.x);
    return {first, static_cast<int>(static_cast<int64_t>(all) * (blockIdx.x + 1) / gridDim.x) - first};
}

}  // namespace atlas
