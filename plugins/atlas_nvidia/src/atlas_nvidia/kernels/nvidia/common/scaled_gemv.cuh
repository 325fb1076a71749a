// gemv.cuh for weights of scaled_weights.cuh: products with up to 8 columns (tokens), bound by the speed at which weights
// arrive. A tile is two units; the warps of a block share out its chunks in 8 runs, each keeping SCALED_DEPTH of them in
// flight over the borders of tiles. A processor has two blocks where both find room: eight warps wait for their own
// instructions half of the time.
#pragma once
#include "gemv.cuh"
#include "scaled_weights.cuh"

#ifndef SCALED_DEPTH
#define SCALED_DEPTH 3
#endif

namespace atlas {

constexpr int SCALED_SLOT = 2 * PIECE_BYTES + 16;  // both pieces of a chunk, then the scales of both
constexpr int SCALED_RING = GEMV_WARPS * SCALED_DEPTH * SCALED_SLOT;
constexpr int SCALED_COLUMNS = 8;

// Bytes of shared memory of scaled_gemv itself: the ring, then the sums of the warps, two tiles deep. Columns come behind.
__host__ __device__ constexpr int scaled_shared() {
    return SCALED_RING + 2 * GEMV_WARPS * TILE_ROWS * SCALED_COLUMNS * static_cast<int>(sizeof(float));
}

__device__ inline void copy_word(uint32_t target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

struct ChunkCursor {
    int tile, chunk, first, left, rounds;

    __device__ ChunkCursor(int chunks) : tile(blockIdx.x) {
        rounds = (chunks + GEMV_WARPS - 1) / GEMV_WARPS;
        chunk = first = threadIdx.x / WARP * rounds;
        left = rounds;
    }
    __device__ bool advance() {
        ++chunk;
        if (--left != 0) return false;
        tile += gridDim.x;
        chunk = first;
        left = rounds;
        return true;
    }
};

// Columns that come with the chunks that they meet, 256 bytes each in 16 pieces, of which neighbouring columns have the
// same one in different banks.
struct StreamedChunks {
    const uint16_t* x;
    unsigned char* buffer;  // [GEMV_WARPS][SCALED_DEPTH][capacity][256]
    int width, capacity;
    int live = 0;
    static constexpr bool STREAMED = true;

    __device__ uint32_t row(int slot, int column) const {
        return shared_address(buffer) + ((threadIdx.x / WARP * SCALED_DEPTH + slot) * capacity + column) * 256;
    }
    __device__ void fetch(int slot, int chunk) const {
        const int lane = threadIdx.x % WARP, piece = lane % 16, k = chunk * SCALED_CHUNK + 8 * piece;
        for (int column = lane / 16; column < live; column += 2) {
            const uint16_t* from = x + static_cast<int64_t>(column) * width;
            copy_async(row(slot, column) + (piece ^ (column & 7)) * 16, from + (k < width ? k : 0), k < width);
        }
    }
    // Of two steps, 2 i and 2 i + 1, what the right operand has. Columns without a token mean nothing.
    __device__ void read(int slot, int, int i, uint32_t (&b)[4]) const {
        const int lane = threadIdx.x % WARP, column = min(lane % 8, capacity - 1);
        load_matrix(b, row(slot, column) + ((4 * i + lane / 8) ^ (column & 7)) * 16);
    }
};

// Columns that all lie in shared memory; rows are apart by a bank more than whole lines, so that eight of them are read at once.
struct ResidentChunks {
    const uint16_t* x;
    unsigned char* buffer;  // [capacity][stride()]
    int width, chunks, capacity;
    int live = 0;
    static constexpr bool STREAMED = false;

    __device__ int stride() const { return chunks * 256 + 16; }
    __device__ void load() const {
        const int pieces = chunks * 16;
        for (int column = 0; column < live; ++column) {
            const uint16_t* from = x + static_cast<int64_t>(column) * width;
#pragma unroll 4
            for (int piece = threadIdx.x; piece < pieces; piece += GEMV_THREADS) {
                *reinterpret_cast<uint4*>(buffer + column * stride() + piece * 16) =
                    piece * 8 < width ? load16(from + piece * 8) : zero16();
            }
        }
        __syncthreads();
    }
    __device__ void fetch(int, int) const {}
    __device__ void read(int, int chunk, int i, uint32_t (&b)[4]) const {
        const int lane = threadIdx.x % WARP, column = min(lane % 8, capacity - 1);
        load_matrix(b, shared_address(buffer + column * stride() + chunk * 256) + (4 * i + lane / 8) * 16);
    }
};

// Those of a norm, which all lie in shared memory; their width is a multiple of a chunk.
struct NormChunks : NormColumns {
    int capacity;

    __device__ void fetch(int, int) const {}
    using NormColumns::fetch;
    __device__ void read(int, int chunk, int i, uint32_t (&b)[4]) const {
        const int lane = threadIdx.x % WARP, column = min(lane % 8, capacity - 1);
        load_matrix(b, shared_address(values + column * norm_stride(width) + chunk * SCALED_CHUNK) + (4 * i + lane / 8) * 16);
    }
};

__device__ inline NormChunks norm_chunks(unsigned char* shared, int width, int capacity) {
    NormChunks n;
    n.width = width;
    n.capacity = capacity;
    n.values = reinterpret_cast<uint16_t*>(shared + scaled_shared());
    n.weight = reinterpret_cast<float*>(n.values + capacity * norm_stride(width));
    n.partial = n.weight + width;
    return n;
}

constexpr int CHAINS = 4;

// What a lane has of a chunk of a tile.
struct Held {
    Numbers upper, lower;
    float2 by;

    __device__ void load(const unsigned char* slot, int lane) {
        upper.load(slot, lane);
        lower.load(slot + PIECE_BYTES, lane);
        if (CHUNKS_SCALED) by = *reinterpret_cast<const float2*>(slot + 2 * PIECE_BYTES);
    }
};

// Units: (tile, half) → Unit, rows 0 to 7 and 8 to 15 of a tile. The others are those of gemv.
template <class Units, class Begin, class Columns, class Ahead, class Store>
__device__ inline void scaled_gemv(int tiles, int chunks, unsigned char* shared, Units units, Begin begin,
                                   Columns& columns, Ahead ahead, Store store) {
    constexpr int COLUMNS = SCALED_COLUMNS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4;
    unsigned char* ring = shared + warp * SCALED_DEPTH * SCALED_SLOT;
    const uint32_t ring_address = shared_address(ring);
    float* sums = reinterpret_cast<float*>(shared + SCALED_RING);

    ChunkCursor weights(chunks), inputs(chunks), now(chunks);
    // Where this lane's part of the next chunk comes from: codes of both units, and what lies beside them.
    const unsigned char *upper, *lower, *beside;
    constexpr int BESIDE = CHUNKS_SCALED ? 1 : 4;  // lanes that copy what a unit has besides
    const uint32_t beside_to = CHUNKS_SCALED ? 2 * PIECE_BYTES + lane * 4
                                             : CODE_BYTES + lane / BESIDE * PIECE_BYTES + lane % BESIDE * 16;
    auto enter = [&](int tile) {
        if (tile >= tiles) return;
        const Unit first = units(tile, 0), second = units(tile, 1), mine = lane < BESIDE ? first : second;
        const int64_t before = static_cast<int64_t>(weights.first) * PIECE_BYTES;
        upper = first.pieces + before + lane * 16;
        lower = second.pieces + before + lane * 16;
        beside = CHUNKS_SCALED ? reinterpret_cast<const unsigned char*>(mine.of_chunks + weights.first)
                               : mine.pieces + before + CODE_BYTES + lane % BESIDE * 16;
    };
    enter(weights.tile);
    auto fetch_weights = [&](int slot) {
        if (weights.tile >= tiles) return;
        if (weights.chunk < chunks) {
            const uint32_t to = ring_address + slot * SCALED_SLOT;
#pragma unroll
            for (int at = 0; at < CODE_BYTES; at += 512) {
                copy_weights(to + lane * 16 + at, upper + at, true);
                copy_weights(to + lane * 16 + PIECE_BYTES + at, lower + at, true);
            }
            if (lane < 2 * BESIDE) {
                if (CHUNKS_SCALED) copy_word(to + beside_to, beside);
                else copy_weights(to + beside_to, beside, true);
            }
        }
        upper += PIECE_BYTES;
        lower += PIECE_BYTES;
        beside += CHUNKS_SCALED ? 4 : PIECE_BYTES;
        if (weights.advance()) enter(weights.tile);
    };
    auto fetch_columns = [&](int slot) {
        if constexpr (Columns::STREAMED) {
            if (inputs.tile >= tiles) return;
            columns.fetch(slot, inputs.chunk);
            inputs.advance();
        }
    };
    for (int d = 0; d < SCALED_DEPTH; ++d) fetch_weights(d);
    begin();
    for (int d = 0; d < SCALED_DEPTH; ++d) {
        fetch_columns(d);
        commit_copies();
    }

    const int store_row = threadIdx.x % 8, store_column = threadIdx.x / 8;
    float by_row[2];
    auto found = ahead(now.tile, store_row, store_column);
    auto look = [&](int tile) {
        if (tile >= tiles) return;
        by_row[0] = units(tile, 0).of_rows[group];
        by_row[1] = units(tile, 1).of_rows[group];
    };
    look(now.tile);
    // Products follow one another in CHAINS, so that one need not wait for the one before it.
    float acc[CHAINS][4] = {};
    int buffer = 0, slot = 0;
    Held next;
    wait_copies<SCALED_DEPTH - 1>();
    __syncwarp();
    next.load(ring, lane);
    while (now.tile < tiles) {
        const Held held = next;
        const int behind = slot + 1 == SCALED_DEPTH ? 0 : slot + 1;
        wait_copies<SCALED_DEPTH - 2>();
        __syncwarp();
        next.load(ring + behind * SCALED_SLOT, lane);
        if (now.chunk < chunks) {  // a warp without one meets the others at the end of the tile all the same
            uint32_t b[SCALED_STEPS / 2][4];
#pragma unroll
            for (int i = 0; i < SCALED_STEPS / 2; ++i) columns.read(slot, now.chunk, i, b[i]);
            float part[CHAINS][4] = {};
            float(&into)[CHAINS][4] = CHUNKS_SCALED ? part : acc;
#pragma unroll
            for (int s = 0; s < SCALED_STEPS; ++s) {
                uint32_t u0, u1, l0, l1;
                held.upper.step(s, u0, u1);
                held.lower.step(s, l0, l1);
                mma(into[s % CHAINS], u0, l0, u1, l1, b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
            }
            if (CHUNKS_SCALED) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[0][i] += ((part[0][i] + part[1][i]) + (part[2][i] + part[3][i])) * (i < 2 ? held.by.x : held.by.y);
                }
            }
        }
        __syncwarp();  // all have read what the next copies replace
        fetch_weights(slot);
        fetch_columns(slot);
        commit_copies();
        slot = behind;
        const int tile = now.tile;
        if (!now.advance()) continue;
        float* mine = sums + (buffer * GEMV_WARPS + warp) * TILE_ROWS * COLUMNS;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float sum = CHUNKS_SCALED ? acc[0][i] : (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
            mine[(2 * (lane % 4) + (i & 1)) * TILE_ROWS + group + 8 * (i >> 1)] = sum * by_row[i >> 1];
#pragma unroll
            for (int c = 0; c < CHAINS; ++c) acc[c][i] = 0.0f;
        }
        look(now.tile);
        __syncthreads();
        const float* all = sums + buffer * GEMV_WARPS * TILE_ROWS * COLUMNS;
        if (store_column < COLUMNS) {
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (int other = 0; other < GEMV_WARPS; ++other) {
                a += all[(other * COLUMNS + store_column) * TILE_ROWS + store_row];
                b += all[(other * COLUMNS + store_column) * TILE_ROWS + store_row + 8];
            }
            store(tile, store_row, store_column, a, b, found);
            if (now.tile < tiles) found = ahead(now.tile, store_row, store_column);
        }
        buffer ^= 1;
    }
    wait_copies<0>();
}

}  // namespace atlas
