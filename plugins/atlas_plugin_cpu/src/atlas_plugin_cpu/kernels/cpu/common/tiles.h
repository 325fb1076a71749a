// The tile unit (AMX): products of 16 rows of activations with 16 rows of a weight, a block of columns at a time.
#pragma once

#include <stdint.h>

constexpr int kTileRows = 16;
constexpr int kRowsForTiles = 29;  // below, vectors are faster, tiles that are not full among them

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#define ATLAS_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Asks the kernel for the tile registers, once for the process; false where it refuses them.
inline bool tiles_permitted() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

const bool kHaveTiles = tiles_permitted();

// Tiles for blocks of ``width`` columns. 0 to 3: sums; 4 and 5: activations; 6 and 7: weights.
inline void tile_configure(int width) {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = tile < 6 ? kTileRows : static_cast<uint8_t>(width / 4);
        config.row_bytes[tile] = tile == 4 || tile == 5 ? static_cast<uint16_t>(width) : 64;
    }
    // Written as assembly since GCC takes the intrinsic to read the first bytes only, and drops the other stores.
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

#define ATLAS_TILE_INLINE inline __attribute__((always_inline))

inline void tile_release() { _tile_release(); }

// The integers of one product: [row of activations][row of the weight].
struct alignas(64) TileSums {
    int32_t of[kTileRows][16];
};

constexpr int kTilesInFlight = 4;

// The parts of a product of 16 rows of activations, 32 bytes apart, with weights, a vector for each 4 columns. kSlot, from
// 0 to 3, chooses among sets of tiles. Every statement names what it writes, and nothing else: told that any memory may
// change, compilers load scales again and again.
#define ATLAS_TILE_LOAD(tile, from, stride)                                                                            \
    __asm__ volatile("tileloadd (%0,%1), %%tmm" tile : : "r"(from), "r"(static_cast<int64_t>(stride)))

template <int kSlot>
ATLAS_TILE_INLINE void tile_load_rows(const int8_t* x) {
    if constexpr (kSlot % 2 == 0) ATLAS_TILE_LOAD("4", x, 32);
    else ATLAS_TILE_LOAD("5", x, 32);
}

template <int kSlot>
ATLAS_TILE_INLINE void tile_load_weights(const uint8_t* codes) {
    if constexpr (kSlot % 2 == 0) ATLAS_TILE_LOAD("6", codes, 64);
    else ATLAS_TILE_LOAD("7", codes, 64);
}
#undef ATLAS_TILE_LOAD

// Multiplies what was loaded last for this slot.
template <int kSlot>
ATLAS_TILE_INLINE void tile_multiply() {
#define ATLAS_TILE_MULTIPLY(c, a, b)                                                                                   \
    __asm__ volatile("tilezero %%tmm" c "\n\ttdpbssd %%tmm" b ", %%tmm" a ", %%tmm" c ::)
    if constexpr (kSlot == 0) ATLAS_TILE_MULTIPLY("0", "4", "6");
    else if constexpr (kSlot == 1) ATLAS_TILE_MULTIPLY("1", "5", "7");
    else if constexpr (kSlot == 2) ATLAS_TILE_MULTIPLY("2", "4", "6");
    else ATLAS_TILE_MULTIPLY("3", "5", "7");
#undef ATLAS_TILE_MULTIPLY
}

template <int kSlot>
ATLAS_TILE_INLINE void tile_store(TileSums* to) {
#define ATLAS_TILE_STORE(tile)                                                                                         \
    __asm__ volatile("tilestored %%tmm" tile ", (%1,%2)" : "=m"(*to) : "r"(to), "r"(static_cast<int64_t>(64)))
    if constexpr (kSlot == 0) ATLAS_TILE_STORE("0");
    else if constexpr (kSlot == 1) ATLAS_TILE_STORE("1");
    else if constexpr (kSlot == 2) ATLAS_TILE_STORE("2");
    else ATLAS_TILE_STORE("3");
#undef ATLAS_TILE_STORE
}

#endif
