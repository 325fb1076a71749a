// The tile unit (AMX) on pairs of bfloat16: 16 rows of 32 terms by 16 columns, added to sums in float32.
//
// For every sum, products of the first of each pair are added one after the other by fused multiply-adds from zero, and so
// are those of the second; then both are added, and what comes of it to what was there.
#pragma once

#include <stdint.h>

#include "tiles.h"

#if defined(ATLAS_TILES) && defined(__AMX_BF16__)
#define ATLAS_BF16_TILES

// Eight tiles of 16 rows of 64 bytes.
inline void tile_configure_whole() {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = kTileRows, config.row_bytes[tile] = 64;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

// Rows ``stride`` bytes apart.
template <int kTile>
ATLAS_TILE_INLINE void tile_load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
ATLAS_TILE_INLINE void tile_store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
ATLAS_TILE_INLINE void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kSums, int kLeft, int kRight>
ATLAS_TILE_INLINE void tile_multiply_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

#endif
