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

// Tiles for blocks of ``width`` columns. 0 and 1: sums; 2 and 3: activations; 4 and 5: weights.
inline void tile_configure(int width) {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int pair = 0; pair < 2; ++pair) {
        config.rows[pair] = config.rows[2 + pair] = kTileRows;
        config.rows[4 + pair] = static_cast<uint8_t>(width / 4);
        config.row_bytes[pair] = config.row_bytes[4 + pair] = 64;
        config.row_bytes[2 + pair] = static_cast<uint16_t>(width);
    }
    // Written as assembly since GCC takes the intrinsic to read the first bytes only, and drops the other stores.
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

inline void tile_release() { _tile_release(); }

// sums[16][16] = rows of 32 activation bytes apart * 4-column vectors of weights; ``odd`` chooses between two sets of tiles.
inline __attribute__((always_inline)) void tile_product(int odd, const int8_t* x, const uint8_t* codes,
                                                        int32_t (*sums)[16]) {
    __asm__ volatile("" : : : "memory");
    if (odd) {
        _tile_zero(1);
        _tile_loadd(3, x, 32);
        _tile_loadd(5, codes, 64);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, sums, 64);
    } else {
        _tile_zero(0);
        _tile_loadd(2, x, 32);
        _tile_loadd(4, codes, 64);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, sums, 64);
    }
}

#endif
