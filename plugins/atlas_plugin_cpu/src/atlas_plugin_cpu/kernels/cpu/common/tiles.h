// The tile unit (AMX): products of 16 rows of activations with 16 rows of a weight, a block of columns at a time.
#pragma once

#include <stdint.h>

constexpr int kTileRows = 16;
constexpr int kRowsForTiles = 10;  // below, vectors are faster than a tile that is not full

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

constexpr int kTilesInFlight = 4;

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

inline void tile_release() { _tile_release(); }

// sums[16][16] = the 16 integers at ``start`` for every row, plus rows of activations, 32 bytes apart, times weights, a
// vector for each 4 columns. kSlot, from 0 to 3, chooses among sets of tiles, so that products can be in flight at once.
template <int kSlot>
inline __attribute__((always_inline)) void tile_product(const int8_t* x, const uint8_t* codes, const int32_t* start,
                                                        int32_t (*sums)[16]) {
#define ATLAS_TILE_PRODUCT(c, a, b)                                                                                    \
    __asm__ volatile("tileloadd (%3,%6), %%tmm" c "\n\ttileloadd (%0,%4), %%tmm" a "\n\ttileloadd (%1,%5), %%tmm" b  \
                     "\n\ttdpbssd %%tmm" b ", %%tmm" a ", %%tmm" c "\n\ttilestored %%tmm" c ", (%2,%5)"               \
                     :                                                                                                 \
                     : "r"(x), "r"(codes), "r"(sums), "r"(start), "r"(static_cast<int64_t>(32)),                       \
                       "r"(static_cast<int64_t>(64)), "r"(static_cast<int64_t>(0))                                     \
                     : "memory")
    if constexpr (kSlot == 0) ATLAS_TILE_PRODUCT("0", "4", "6");
    else if constexpr (kSlot == 1) ATLAS_TILE_PRODUCT("1", "5", "7");
    else if constexpr (kSlot == 2) ATLAS_TILE_PRODUCT("2", "4", "6");
    else ATLAS_TILE_PRODUCT("3", "5", "7");
#undef ATLAS_TILE_PRODUCT
}

#endif
