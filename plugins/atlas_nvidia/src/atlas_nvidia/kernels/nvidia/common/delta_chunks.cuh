// What the two kernels of the chunked gated delta rule share: sizes, chunks of rows, tiles in shared memory.
#pragma once
#include "recurrent.cuh"

namespace atlas {

constexpr int CHUNK = 64, CHUNK_DIM = 128;
constexpr int KEY_BYTES = CHUNK * CHUNK_DIM * 2, TILE = CHUNK * CHUNK, TILE_BYTES = TILE * 2;

// Where 8 elements lie in tiles of rows of 256, 128 and 64 bytes: neither rows nor columns of pieces share banks.
__device__ inline uint32_t piece_of_key(uint32_t tile, int row, int index) {
    return tile + row * 256 + ((index ^ (row & 7)) * 16);
}
__device__ inline uint32_t piece_of_tile(uint32_t tile, int row, int index) {
    return tile + row * 128 + ((index ^ (row & 7)) * 16);
}
__device__ inline uint32_t piece_of_value(uint32_t tile, int row, int index) {
    return tile + row * 64 + ((index ^ (row >> 1 & 3)) * 16);
}

__device__ inline int chunks_of(const StateRow& row) {
    return row.tokens == 0 ? 0 : (row.position + row.tokens - 1) / CHUNK - row.position / CHUNK + 1;
}

// Chunk `part` of a row: its first token of the step, and how many.
struct Span {
    int first, tokens;
};
__device__ inline Span span_of(const StateRow& row, int part) {
    const int block = (row.position / CHUNK + part) * CHUNK - row.position;
    const int start = max(block, 0);
    return {row.first + start, min(block + CHUNK, row.tokens) - start};
}

}  // namespace atlas
