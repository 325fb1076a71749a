// Stored rows into the packing that weights.h reads: 16 rows side by side. interleave.py says the same in numpy.
//
// A chunk is what one row stores at a stretch: a block, or a column of plain scalars. Words are little-endian.

#include <stdint.h>
#include <string.h>

namespace {

constexpr int kLanes = 16;
constexpr int kMostStored = 210;

typedef const uint8_t* const* Lanes;

inline uint32_t word(const uint8_t* at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline void put(uint8_t* target, uint32_t value) { memcpy(target, &value, sizeof value); }

// Scalars of the type T: [column, lane].
template <class T>
struct Plain {
    static constexpr int kStored = sizeof(T), kPacked = kLanes * sizeof(T);
    static void chunk(Lanes lanes, uint8_t* out) {
        for (int lane = 0; lane < kLanes; ++lane) memcpy(out + lane * sizeof(T), lanes[lane], sizeof(T));
    }
};

// Two quads of codes below 16, four in each word, share a vector: the second quad in the high halves. ``low`` and ``high``
// of stored words are quads of their own.
inline void nibbles(const uint8_t* stored, uint8_t* out, int words) {
    for (int i = 0; i < words; i += 2) {
        const uint32_t a = word(stored + 4 * i), b = word(stored + 4 * i + 4);
        put(out + 32 * i, (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4);
        put(out + 32 * (words + i), (a & 0xF0F0F0F0u) >> 4 | (b & 0xF0F0F0F0u));
    }
}

// The fifth bits of a quad, one for each code and lane: 64 bits.
struct Fifth {
    uint64_t bits[8] = {};
    void add(int lane, int quad, uint32_t four) { bits[quad] |= static_cast<uint64_t>(four) << (4 * lane); }
    void store(uint8_t* out) const { memcpy(out, bits, sizeof bits); }
};

inline void fields(const uint8_t* stored, uint8_t* out, int lane, int count) {
    for (int i = 0; i < count; ++i) memcpy(out + 32 * i + 2 * lane, stored + 2 * i, 2);
}

struct Q8_0 {
    static constexpr int kStored = 34, kPacked = kLanes * kStored;
    static void chunk(Lanes lanes, uint8_t* out) {
        for (int lane = 0; lane < kLanes; ++lane) {
            fields(lanes[lane], out, lane, 1);
            for (int i = 0; i < 8; ++i)
                put(out + 32 + 64 * i + 4 * lane, word(lanes[lane] + 2 + 4 * i) ^ 0x80808080u);
        }
    }
};

// q4_0 with one float16 field, q4_1 with two.
template <int kFields>
struct FourBits {
    static constexpr int kStored = 2 * kFields + 16, kPacked = kLanes * kStored;
    static void chunk(Lanes lanes, uint8_t* out) {
        for (int lane = 0; lane < kLanes; ++lane) {
            fields(lanes[lane], out, lane, kFields);
            nibbles(lanes[lane] + 2 * kFields, out + 32 * kFields + 4 * lane, 4);
        }
    }
};

// q5_0 and q5_1: a word of fifth bits before the nibbles.
template <int kFields>
struct FiveBits {
    static constexpr int kStored = 2 * kFields + 20, kPacked = kLanes * kStored;
    static void chunk(Lanes lanes, uint8_t* out) {
        Fifth fifth;
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane] + 2 * kFields;
            fields(lanes[lane], out, lane, kFields);
            nibbles(stored + 4, out + 32 * kFields + 4 * lane, 4);
            for (int quad = 0; quad < 8; ++quad) fifth.add(lane, quad, word(stored) >> (4 * quad) & 15);
        }
        fifth.store(out + 32 * kFields + 256);
    }
};

// Eight factors of scales and of minima, six bits each in 12 bytes, to a byte each: [factor, scale or minimum, lane].
inline void k_factors(const uint8_t* packed, uint8_t* out, int lane) {
    for (int j = 0; j < 4; ++j) {
        const uint8_t a = packed[j], b = packed[4 + j], c = packed[8 + j];
        out[32 * j + lane] = a & 63;
        out[32 * j + 16 + lane] = b & 63;
        out[32 * (j + 4) + lane] = static_cast<uint8_t>((c & 15) | (a >> 6) << 4);
        out[32 * (j + 4) + 16 + lane] = static_cast<uint8_t>((c >> 4) | (b >> 6) << 4);
    }
}

struct Q4K {
    static constexpr int kStored = 144, kPacked = kLanes * (kStored + 4);
    static void chunk(Lanes lanes, uint8_t* out) {
        for (int lane = 0; lane < kLanes; ++lane) {
            fields(lanes[lane], out, lane, 2);
            k_factors(lanes[lane] + 4, out + 64, lane);
            for (int run = 0; run < 4; ++run) nibbles(lanes[lane] + 16 + 32 * run, out + 320 + 512 * run + 4 * lane, 8);
        }
    }
};

struct Q5K {
    static constexpr int kStored = 176, kPacked = kLanes * (kStored + 4);
    static constexpr int kBlock = 256 + 64;  // nibbles, then fifth bits
    static void chunk(Lanes lanes, uint8_t* out) {
        Fifth fifth[8];
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane];
            fields(stored, out, lane, 2);
            k_factors(stored + 4, out + 64, lane);
            for (int run = 0; run < 4; ++run) {
                uint8_t* first = out + 320 + 2 * run * kBlock + 4 * lane;
                for (int i = 0; i < 8; i += 2) {
                    const uint32_t a = word(stored + 48 + 32 * run + 4 * i), b = word(stored + 52 + 32 * run + 4 * i);
                    put(first + 32 * i, (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4);
                    put(first + kBlock + 32 * i, (a & 0xF0F0F0F0u) >> 4 | (b & 0xF0F0F0F0u));
                }
            }
            for (int quad = 0; quad < 8; ++quad) {
                const uint32_t bits = word(stored + 16 + 4 * quad);
                // The product brings bits 0, 8, 16 and 24 side by side to the top; no two of its terms meet.
                for (int block = 0; block < 8; ++block)
                    fifth[block].add(lane, quad, (bits >> block & 0x01010101u) * 0x01020408u >> 24 & 15);
            }
        }
        for (int block = 0; block < 8; ++block) fifth[block].store(out + 320 + block * kBlock + 256);
    }
};

struct Q6K {
    static constexpr int kStored = 210, kPacked = kLanes * kStored;
    static constexpr int kBlock = 256 + 128;  // low halves, then two bits of each code
    static void chunk(Lanes lanes, uint8_t* out) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane];
            memcpy(out + 2 * lane, stored + 208, 2);
            for (int i = 0; i < 16; ++i) out[32 + 16 * i + lane] = stored[192 + i];
            for (int half = 0; half < 2; ++half) {
                const uint8_t *low = stored + 64 * half, *high = stored + 128 + 32 * half;
                for (int block = 0; block < 4; ++block) {
                    uint8_t* to = out + 288 + (4 * half + block) * kBlock + 4 * lane;
                    const int shift = block / 2 * 4;
                    for (int i = 0; i < 8; i += 2) {
                        const uint8_t* at = low + block % 2 * 32 + 4 * i;
                        put(to + 32 * i, (word(at) >> shift & 0x0F0F0F0Fu) | (word(at + 4) >> shift & 0x0F0F0F0Fu) << 4);
                    }
                    for (int four = 0; four < 2; ++four) {
                        uint32_t upper = 0;
                        for (int q = 0; q < 4; ++q)
                            upper |= (word(high + 16 * four + 4 * q) >> (2 * block) & 0x03030303u) << (2 * q);
                        put(to + 256 + 64 * four, upper);
                    }
                }
            }
        }
    }
};

struct Iq4Xs {
    static constexpr int kStored = 136, kPacked = kLanes * (kStored + 2);
    static void chunk(Lanes lanes, uint8_t* out) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane];
            fields(stored, out, lane, 1);
            for (int i = 0; i < 8; ++i) {
                const int low = stored[4 + i / 2] >> (4 * (i % 2)) & 15, high = stored[2 + i / 4] >> (2 * (i % 4)) & 3;
                out[32 + 16 * i + lane] = static_cast<uint8_t>((low | high << 4) - 32);
            }
            for (int block = 0; block < 8; ++block) nibbles(stored + 8 + 16 * block, out + 160 + 256 * block + 4 * lane, 4);
        }
    }
};

template <class Format>
void pack(const uint8_t* source, const int32_t* order, uint8_t* target, int64_t row_bytes, int rows, int task, int ntasks) {
    static const uint8_t zeros[kMostStored] = {};  // rows that fill the last group
    const int64_t chunks = row_bytes / Format::kStored;
    const int groups = (rows + kLanes - 1) / kLanes;
    for (int group = task; group < groups; group += ntasks) {
        const uint8_t* lanes[kLanes];
        size_t step[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            const int row = group * kLanes + lane;
            const bool there = row < rows;
            lanes[lane] = there ? source + (order == nullptr ? row : order[row]) * row_bytes : zeros;
            step[lane] = there ? Format::kStored : 0;
        }
        uint8_t* out = target + group * chunks * Format::kPacked;
        for (int64_t c = 0; c < chunks; ++c, out += Format::kPacked) {
            Format::chunk(lanes, out);
            for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += step[lane];
        }
    }
}

}  // namespace

// Rows of ``row_bytes`` stored as ``layout`` (its number in interleave.py), row ``order[i]`` in the place i, or one after
// another without ``order``. Places beyond ``rows`` up to a multiple of 16 are filled with zeros.
void pack_rows(const uint8_t* source, const int32_t* order, uint8_t* target, int64_t row_bytes, int32_t rows,
               int32_t layout, int task, int ntasks) {
    typedef void (*Pack)(const uint8_t*, const int32_t*, uint8_t*, int64_t, int, int, int);
    static const Pack packs[] = {
        pack<Plain<uint32_t>>, pack<Plain<uint16_t>>, pack<Plain<uint16_t>>, pack<Q8_0>, pack<FourBits<1>>, pack<FourBits<2>>,
        pack<FiveBits<1>>, pack<FiveBits<2>>, pack<Q4K>, pack<Q5K>, pack<Q6K>, pack<Iq4Xs>,
    };
    packs[layout](source, order, target, row_bytes, rows, task, ntasks);
}
