// Prints the bits of products in every block format, of made-up rows and weights, and of attention: the same program on every
// processor.

#include <stdlib.h>
#include <unistd.h>

#include "attention_fast.cpp"
#include "products.h"

namespace {

uint32_t state = 1;

// Numerical Recipes' linear congruential generator.
uint32_t next() { return state = state * 1664525u + 1013904223u; }

char* put(char* to, const char* text) {
    while (*text) *to++ = *text++;
    return to;
}

char* put(char* to, uint32_t value, uint32_t base, int digits) {
    for (int i = digits; i-- > 0; value /= base) to[i] = "0123456789abcdef"[value % base];
    return to + digits;
}

// One line: a name, how many rows or tokens, the index of a value, its bits.
void show_value(const char* name, int rows, int index, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    char line[64], *end = put(line, name);
    end = put(put(end, " "), static_cast<uint32_t>(rows), 10, 2);
    end = put(put(end, " "), static_cast<uint32_t>(index), 10, 5);
    end = put(put(put(end, " "), bits, 16, 8), "\n");
    if (write(1, line, static_cast<size_t>(end - line)) != end - line) __builtin_trap();
}

template <class Format>
void show(const char* name, int rows, int width) {
    constexpr int kColumns = 512, kHeads = Format::kMinimum ? 2 : 1;
    uint8_t* group = static_cast<uint8_t*>(aligned_alloc(64, group_bytes<Format>(kColumns)));
    for (size_t i = 0; i < group_bytes<Format>(kColumns); ++i) group[i] = static_cast<uint8_t>(next() >> 24);
    for (int chunk = 0; chunk < kColumns / Format::kColumns; ++chunk)
        for (int i = 0; i < kHeads * kLanes; ++i) {
            // A float16 between 2^-8 and 2^-7.
            const uint16_t half = static_cast<uint16_t>(0x1C00 | (next() >> 22));
            memcpy(group + chunk * Format::kBytes + 2 * i, &half, sizeof half);
        }
    const size_t sets = static_cast<size_t>((rows + width - 1) / width);
    uint8_t* base = static_cast<uint8_t*>(aligned_alloc(64, sets * Prepared::bytes(kColumns, width)));
    memset(base, 0, sets * Prepared::bytes(kColumns, width));
    float* y = static_cast<float*>(aligned_alloc(64, sizeof(float) * kLanes * static_cast<size_t>(rows + 16)));
    for (int row = 0; row < rows; ++row) {
        float x[kColumns];
        for (float& value : x) value = static_cast<float>(static_cast<int32_t>(next())) * 1e-9f;
        const Prepared to = {base + static_cast<size_t>(row / width) * Prepared::bytes(kColumns, width), kColumns, width};
        quantise(to, row % width, [&](int k) ATLAS_FLAT { return load(x + k); });
    }
    const Target target = {Target::kStore, y, nullptr, kLanes, 0, kLanes};
    uint8_t* panel = static_cast<uint8_t*>(aligned_alloc(64, panel_bytes(kColumns)));
    multiply_group<Format>(Prepared{base, kColumns, width}, rows, group, panel, target);
    for (int i = 0; i < rows * kLanes; ++i) show_value(name, rows, i, y[i]);
    free(group), free(base), free(y), free(panel);
}

template <class Format>
void all(const char* name) {
    show<Format>(name, 1, 1), show<Format>(name, 3, 3), show<Format>(name, 37, 16);
}

// A prompt of 23 tokens, or of one, after 50: three heads of 40 dimensions that share keys.
void attend_over_pages(int tokens) {
    constexpr int kPage = 16, kPages = 5, kHeads = 3, kDim = 40, kContext = 50, kTable = ATLAS_TABLE_START, kStride = kTable + kPages;
    static float cache[kPages * 2 * kPage * kDim], q[23 * kHeads * kDim], y[23 * kHeads * kDim];
    for (float& value : cache) value = static_cast<float>(static_cast<int32_t>(next())) * 1e-9f;
    for (float& value : q) value = static_cast<float>(static_cast<int32_t>(next())) * 1e-9f;
    int32_t counts[8] = {}, state[kStride] = {};
    counts[ATLAS_TOKENS] = tokens, counts[ATLAS_SEQUENCES] = 1;
    state[ATLAS_POSITION] = kContext;
    for (int page = 0; page < kPages; ++page) state[kTable + page] = kPages - 1 - page;
    const int32_t cu_q[2] = {0, tokens}, row_slot[1] = {0};
    fast_paged_attention(counts, q, cu_q, row_slot, state, cache, y, kHeads, 1, kDim, kPage, kStride, kTable, 16,
                         1, 0, 0.158f, 0, 1);
    for (int i = 0; i < tokens * kHeads * kDim; ++i) show_value("attention", tokens, i, y[i]);
}

}  // namespace

int main() {
    all<Q4_0>("q4_0"), all<Q4_1>("q4_1"), all<Q5_0>("q5_0"), all<Q5_1>("q5_1"), all<Q8_0>("q8_0");
    all<Q4_K>("q4_k"), all<Q5_K>("q5_k"), all<Q6_K>("q6_k"), all<Iq4_Xs>("iq4_xs");
    attend_over_pages(1), attend_over_pages(23);
    return 0;
}
