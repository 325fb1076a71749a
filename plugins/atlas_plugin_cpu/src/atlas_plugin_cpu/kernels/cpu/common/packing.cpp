// Stored rows into the packing that weights.h reads: 16 rows side by side. interleave.py says the same in numpy.
//
// A chunk is what one row stores at a stretch: a block, or a column of plain scalars. Words are little-endian.

#include <stdint.h>
#include <string.h>

namespace {

constexpr int kLanes = 16;
constexpr int kMostStored = 210;
constexpr int kAhead = 4096;  // bytes of the target that are asked for before they are written

typedef const uint8_t* const* Lanes;

inline uint32_t word(const uint8_t* at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

// One word of each of four lanes.
typedef uint32_t Four __attribute__((vector_size(16)));

// Four words from ``offset`` on of each of four lanes, turned: [word][lane].
inline void turned(Lanes lanes, int64_t offset, Four out[4]) {
    Four row[4];
    for (int i = 0; i < 4; ++i) memcpy(&row[i], lanes[i] + offset, sizeof row[i]);
    const Four a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
    const Four b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
    const Four c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
    const Four d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
    out[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    out[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    out[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    out[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// Scalars of the type T: [column, lane]; four words of a row at a time, and what is left of it by itself.
template <class T>
struct Plain {
    static constexpr int kStored = sizeof(T), kPacked = kLanes * sizeof(T), kColumns = 4 / sizeof(T);
    static int chunks(Lanes lanes, uint8_t* out, int64_t left) {
        if (left < 4 * kColumns) {
            for (int lane = 0; lane < kLanes; ++lane) memcpy(out + lane * sizeof(T), lanes[lane], sizeof(T));
            return 1;
        }
        for (int lane = 0; lane < kLanes; lane += 4) {
            Four words[4];
            turned(lanes + lane, 0, words);
            for (int column = 0; column < 4 * kColumns; ++column) {
                typedef T Scalars __attribute__((vector_size(4 * sizeof(T))));
                const Scalars four =
                    __builtin_convertvector(words[column / kColumns] >> (column % kColumns * 16), Scalars);
                memcpy(out + column * kPacked + lane * sizeof(T), &four, sizeof four);
            }
        }
        return 4 * kColumns;
    }
};

// Two quads of codes below 16, four in each word, share a vector: the second quad in the high halves. Low and high halves
// of ``words`` stored words from ``offset`` on are quads of their own, ``high_at`` bytes apart.
inline void nibbles(Lanes lanes, int64_t offset, uint8_t* out, int words, int high_at) {
    for (int lane = 0; lane < kLanes; lane += 4) {
        for (int i = 0; i < words; i += 4) {
            Four word[4];
            turned(lanes + lane, offset + 4 * i, word);
            for (int pair = 0; pair < 4; pair += 2) {
                const Four a = word[pair], b = word[pair + 1];
                const Four low = (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4;
                const Four high = (a & 0xF0F0F0F0u) >> 4 | (b & 0xF0F0F0F0u);
                uint8_t* to = out + 32 * (i + pair) + 4 * lane;
                memcpy(to, &low, sizeof low);
                memcpy(to + high_at, &high, sizeof high);
            }
        }
    }
}

// The fifth bits of a quad, one for each code and lane: 64 bits.
struct Fifth {
    uint64_t bits[8] = {};
    void add(int lane, int quad, uint32_t four) { bits[quad] |= static_cast<uint64_t>(four) << (4 * lane); }
    void store(uint8_t* out) const { memcpy(out, bits, sizeof bits); }
};

// The 16-bit fields at a chunk's beginning, each for all lanes.
template <int kFields>
inline void fields(Lanes lanes, uint8_t* out) {
    for (int i = 0; i < kFields; ++i) {
        for (int lane = 0; lane < kLanes; lane += 4) {
            uint64_t four = 0;  // little-endian, as everywhere here
            for (int l = 3; l >= 0; --l) {
                uint16_t one;
                memcpy(&one, lanes[lane + l] + 2 * i, sizeof one);
                four = four << 16 | one;
            }
            memcpy(out + 32 * i + 2 * lane, &four, sizeof four);
        }
    }
}

struct Q8_0 {
    static constexpr int kStored = 34, kPacked = kLanes * kStored;
    static void chunk(Lanes lanes, uint8_t* out) {
        fields<1>(lanes, out);
        for (int lane = 0; lane < kLanes; lane += 4) {
            for (int i = 0; i < 8; i += 4) {
                Four word[4];
                turned(lanes + lane, 2 + 4 * i, word);
                for (int w = 0; w < 4; ++w) {
                    const Four codes = word[w] ^ 0x80808080u;
                    memcpy(out + 32 + 64 * (i + w) + 4 * lane, &codes, sizeof codes);
                }
            }
        }
    }
};

// q4_0 with one float16 field, q4_1 with two.
template <int kFields>
struct FourBits {
    static constexpr int kStored = 2 * kFields + 16, kPacked = kLanes * kStored;
    static void chunk(Lanes lanes, uint8_t* out) {
        fields<kFields>(lanes, out);
        nibbles(lanes, 2 * kFields, out + 32 * kFields, 4, 128);
    }
};

// q5_0 and q5_1: a word of fifth bits before the nibbles.
template <int kFields>
struct FiveBits {
    static constexpr int kStored = 2 * kFields + 20, kPacked = kLanes * kStored;
    static void chunk(Lanes lanes, uint8_t* out) {
        Fifth fifth;
        fields<kFields>(lanes, out);
        nibbles(lanes, 2 * kFields + 4, out + 32 * kFields, 4, 128);
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane] + 2 * kFields;
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
        fields<2>(lanes, out);
        for (int lane = 0; lane < kLanes; ++lane) k_factors(lanes[lane] + 4, out + 64, lane);
        for (int run = 0; run < 4; ++run) nibbles(lanes, 16 + 32 * run, out + 320 + 512 * run, 8, 256);
    }
};

struct Q5K {
    static constexpr int kStored = 176, kPacked = kLanes * (kStored + 4);
    static constexpr int kBlock = 256 + 64;  // nibbles, then fifth bits
    static void chunk(Lanes lanes, uint8_t* out) {
        Fifth fifth[8];
        fields<2>(lanes, out);
        for (int run = 0; run < 4; ++run) nibbles(lanes, 48 + 32 * run, out + 320 + 2 * run * kBlock, 8, kBlock);
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane];
            k_factors(stored + 4, out + 64, lane);
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
        }
        for (int lane = 0; lane < kLanes; lane += 4) {
            for (int half = 0; half < 2; ++half) {
                uint8_t* blocks = out + 288 + 4 * half * kBlock + 4 * lane;
                for (int i = 0; i < 16; i += 4) {
                    Four word[4];
                    turned(lanes + lane, 64 * half + 4 * i, word);
                    for (int nibble = 0; nibble < 2; ++nibble) {
                        for (int pair = 0; pair < 4; pair += 2) {
                            const Four first = word[pair] >> (4 * nibble) & 0x0F0F0F0Fu;
                            const Four codes = first | (word[pair + 1] >> (4 * nibble) & 0x0F0F0F0Fu) << 4;
                            memcpy(blocks + (2 * nibble + i / 8) * kBlock + 32 * (i % 8 + pair), &codes, sizeof codes);
                        }
                    }
                }
                for (int four = 0; four < 2; ++four) {
                    Four word[4];
                    turned(lanes + lane, 128 + 32 * half + 16 * four, word);
                    for (int block = 0; block < 4; ++block) {
                        Four upper = {};
                        for (int q = 0; q < 4; ++q) upper |= (word[q] >> (2 * block) & 0x03030303u) << (2 * q);
                        memcpy(blocks + block * kBlock + 256 + 64 * four, &upper, sizeof upper);
                    }
                }
            }
        }
    }
};

struct Iq4Xs {
    static constexpr int kStored = 136, kPacked = kLanes * (kStored + 2);
    static void chunk(Lanes lanes, uint8_t* out) {
        fields<1>(lanes, out);
        for (int block = 0; block < 8; ++block) nibbles(lanes, 8 + 16 * block, out + 160 + 256 * block, 4, 128);
        for (int lane = 0; lane < kLanes; ++lane) {
            const uint8_t* stored = lanes[lane];
            for (int i = 0; i < 8; ++i) {
                const int low = stored[4 + i / 2] >> (4 * (i % 2)) & 15, high = stored[2 + i / 4] >> (2 * (i % 4)) & 3;
                out[32 + 16 * i + lane] = static_cast<uint8_t>((low | high << 4) - 32);
            }
        }
    }
};

// A format of blocks, one chunk at a time.
template <class Format>
struct Blocks : Format {
    static int chunks(Lanes lanes, uint8_t* out, int64_t) {
        Format::chunk(lanes, out);
        return 1;
    }
};

template <class Format>
void pack(const uint8_t* source, const int32_t* order, uint8_t* target, int64_t row_bytes, int rows, int task,
          int ntasks) {
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
        for (int64_t c = 0; c < chunks;) {
            for (int line = 0; line < Format::kPacked; line += 64) __builtin_prefetch(out + kAhead + line, 1);
            const int taken = Format::chunks(lanes, out, chunks - c);
            for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += taken * step[lane];
            out += taken * Format::kPacked;
            c += taken;
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
        pack<Plain<uint32_t>>, pack<Plain<uint16_t>>, pack<Plain<uint16_t>>, pack<Blocks<Q8_0>>,
        pack<Blocks<FourBits<1>>>, pack<Blocks<FourBits<2>>>, pack<Blocks<FiveBits<1>>>, pack<Blocks<FiveBits<2>>>,
        pack<Blocks<Q4K>>, pack<Blocks<Q5K>>, pack<Blocks<Q6K>>, pack<Blocks<Iq4Xs>>,
    };
    packs[layout](source, order, target, row_bytes, rows, task, ntasks);
}
