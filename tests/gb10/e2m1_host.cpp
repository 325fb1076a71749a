// The twins of sm12x.cuh on a CPU, for every input. Prints, all in hexadecimal: "encode BITS CODE" wherever the code changes
// when inputs are taken in the order of their bits; "disagree N", how often a value got another code in the upper half of a byte
// than in the lower; "decode BYTE F16_PAIR" for each byte of codes.
#include <stdint.h>
#include <stdio.h>

#include "sm12x.cuh"

int main() {
    constexpr uint32_t AT_ONCE = 1u << 14;
    static uint8_t codes[AT_ONCE];
    uint32_t current = 16;  // no code
    uint64_t disagree = 0;
    for (uint64_t base = 0; base < 1ull << 32; base += AT_ONCE) {
        uint32_t changes = 0, apart = 0;
        for (uint32_t i = 0; i < AT_ONCE; ++i) {
            const uint32_t bits = static_cast<uint32_t>(base) + i;
            const uint32_t lower = atlas::e2m1_encode_twin(bits, ~bits) & 15, upper = atlas::e2m1_encode_twin(~bits, bits) >> 4;
            codes[i] = static_cast<uint8_t>(lower);
            changes |= lower ^ current;
            apart += lower != upper;
        }
        disagree += apart;
        if (changes == 0) continue;
        for (uint32_t i = 0; i < AT_ONCE; ++i) {
            if (codes[i] == current) continue;
            current = codes[i];
            printf("encode %x %x\n", static_cast<uint32_t>(base) + i, current);
        }
    }
    printf("disagree %llx\n", static_cast<unsigned long long>(disagree));
    for (uint32_t byte = 0; byte < 256; ++byte) printf("decode %x %x\n", byte, atlas::e2m1_decode_twin(byte));
    return 0;
}
