// Writes the packed bytes of made-up rows, for every layout one behind another: the same program on every processor.

#include <stdlib.h>
#include <unistd.h>

#include "packing.cpp"

namespace {

constexpr int kRows = 75;  // five groups, the last not full

uint32_t state = 1;

// Numerical Recipes' linear congruential generator.
uint32_t next() { return state = state * 1664525u + 1013904223u; }

// Chunks of a row by the number of the layout, and bytes of one, stored and packed for 16 rows.
void show(int layout, int chunks, int stored, int packed) {
    const size_t row = static_cast<size_t>(chunks) * stored, count = static_cast<size_t>((kRows + kLanes - 1) / kLanes);
    const size_t nbytes = count * chunks * packed;
    uint8_t *source = static_cast<uint8_t*>(aligned_alloc(64, (kRows * row + 63) / 64 * 64));
    uint8_t* target = static_cast<uint8_t*>(aligned_alloc(64, (nbytes + 63) / 64 * 64));
    for (size_t i = 0; i < kRows * row; ++i) source[i] = static_cast<uint8_t>(next() >> 24);
    pack_rows(source, nullptr, target, static_cast<int64_t>(row), kRows, layout, 0, 1);
    for (size_t done = 0; done < nbytes;) {
        const long written = write(1, target + done, nbytes - done);
        if (written <= 0) __builtin_trap();
        done += static_cast<size_t>(written);
    }
    free(source), free(target);
}

template <class Format>
void show(int layout, int chunks) {
    show(layout, chunks, Format::kStored, Format::kPacked);
}

}  // namespace

int main() {
    show<Plain<uint32_t>>(0, 27), show<Plain<uint16_t>>(1, 27), show<Plain<uint16_t>>(2, 27), show<Q8_0>(3, 3);
    show<FourBits<1>>(4, 3), show<FourBits<2>>(5, 3), show<FiveBits<1>>(6, 3), show<FiveBits<2>>(7, 3);
    show<Q4K>(8, 3), show<Q5K>(9, 3), show<Q6K>(10, 3), show<Iq4Xs>(11, 3);
    return 0;
}
