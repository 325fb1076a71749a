// Products of a weight [rows, width] with a few columns (tokens), bound by the speed at which weights arrive.
//
// Weights are the left matrix of m16n8k16, so up to 8 tokens cost what one does. A lane copies 16 bytes of row g and
// of row g+8 and later reads just these from shared memory into the registers that the instruction wants: this
// permutes the summed dimension, which is harmless because the columns are read with the same permutation. Every warp
// keeps GEMV_DEPTH chunks of 64 weights of 16 rows in flight, over the borders of tiles; the first are asked for
// before the predecessor has ended.
//
// A ring of registers does not work: loads share six scoreboards, so that waiting for one waits for later ones too.
// Neither does room for two blocks a processor: admitted early, blocks pile up where there is room first.
#pragma once
#include "device.cuh"

#ifndef GEMV_DEPTH
#define GEMV_DEPTH 8
#endif

namespace atlas {

constexpr int GEMV_WARPS = 8;
constexpr int GEMV_THREADS = GEMV_WARPS * WARP;
constexpr int GEMV_CHUNK = 64;
constexpr int WIDE = 4096;  // rows from which on a warp's share is 1 KB and more (docs/measured-facts.md)
constexpr int TILE_ROWS = 16;
constexpr int SLOT_BYTES = TILE_ROWS * GEMV_CHUNK * 2;
constexpr int RING_BYTES = GEMV_WARPS * GEMV_DEPTH * SLOT_BYTES;

// Bytes of shared memory of gemv itself: the ring, then the sums of the warps, two tiles deep. Columns come behind.
__host__ __device__ constexpr int gemv_shared(int column_tiles) {
    return RING_BYTES + 2 * GEMV_WARPS * TILE_ROWS * 8 * column_tiles * static_cast<int>(sizeof(float));
}

// Where a row is narrow, a warp's share of it is a few hundred bytes, and twice the neighbourhood arrives faster.
__device__ inline void copy_narrow_weights(uint32_t target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 ::"r"(target), "l"(source), "r"(valid ? 16 : 0) : "memory");
}

// Where a lane is in the chunks of its warp, tile after tile. The warps of a block share out a row in 8 runs; a warp
// without a chunk of its own takes one of zeros, so that all warps meet at the end of every tile.
struct Cursor {
    int tile, k, first_k, left, rounds;

    __device__ Cursor(int width) : tile(blockIdx.x) {
        const int chunks = (width + GEMV_CHUNK - 1) / GEMV_CHUNK;
        rounds = (chunks + GEMV_WARPS - 1) / GEMV_WARPS;
        first_k = threadIdx.x / WARP * rounds * GEMV_CHUNK + threadIdx.x % 4 * 8;
        k = first_k;
        left = rounds;
    }

    // One chunk on; true when that ended a tile.
    __device__ bool advance() {
        k += GEMV_CHUNK;
        if (--left != 0) return false;
        tile += gridDim.x;
        k = first_k;
        left = rounds;
        return true;
    }
};

// Columns that come from memory with the weights that they meet: 128 bytes a column and chunk. Which half of them
// comes first alternates, so that neighbouring columns are read from different banks.
struct StreamedColumns {
    const uint16_t* x;
    unsigned char* buffer;  // [GEMV_WARPS][GEMV_DEPTH][capacity][128]
    int width, capacity;
    int live = 0;
    static constexpr bool STREAMED = true;

    __device__ unsigned char* place(int slot, int column) const {
        return buffer + ((threadIdx.x / WARP * GEMV_DEPTH + slot) * capacity + column) * 128 + threadIdx.x % 4 * 16;
    }

    __device__ void fetch(int slot, int column, int k) const {
        if (column >= live) return;
        const uint16_t* from = x + static_cast<int64_t>(column) * width;
        const uint32_t to = shared_address(place(slot, column)), flip = column % 2 * 64;
        copy_async(to + flip, from + (k < width ? k : 0), k < width);
        copy_async(to + (flip ^ 64), from + (k + 32 < width ? k + 32 : 0), k + 32 < width);
    }

    __device__ void read(int slot, int column, int k, uint4& first, uint4& second) const {
        first = second = zero16();
        if (column >= live) return;
        const unsigned char* from = place(slot, column);
        first = *reinterpret_cast<const uint4*>(from + column % 2 * 64);
        second = *reinterpret_cast<const uint4*>(from + (column % 2 * 64 ^ 64));
    }
};

// Rows:    (tile, i) → address of the i-th of the 16 weight rows of a tile; must be readable for every i.
// Begin:   () → void, waits for the predecessor and prepares the columns; runs once, behind the first copies.
// Columns: StreamedColumns, or with STREAMED false anything that reads them from shared memory.
// Ahead:   (tile, i, column) → any value that Store will want for that place; asked for long before.
// Store:   (tile, i, column, a, b, ahead) → void, with the finished sums of rows i and i+8, i < 8.
template <int COLUMN_TILES, class Rows, class Begin, class Columns, class Ahead, class Store>
__device__ inline void gemv(int tiles, int width, unsigned char* shared, Rows rows, Begin begin, Columns& columns,
                            Ahead ahead, Store store) {
    constexpr int COLUMNS = 8 * COLUMN_TILES;
    static_assert(8 * COLUMNS <= GEMV_THREADS, "a thread finishes one pair of sums at most");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4;
    unsigned char* ring = shared + warp * GEMV_DEPTH * SLOT_BYTES + lane * 16;
    const uint32_t ring_address = shared_address(ring);
    float* sums = reinterpret_cast<float*>(shared + RING_BYTES);

    Cursor weights(width), inputs(width), now(width);
    const uint16_t *upper = rows(weights.tile, group), *lower = rows(weights.tile, group + 8);
    auto fetch_weights = [&](int slot) {
        if (weights.tile >= tiles) return;
        const uint32_t to = ring_address + slot * SLOT_BYTES;
        const int k = weights.k;
        const bool first = k < width, second = k + 32 < width;
        const uint16_t *near = upper + (first ? k : 0), *far = upper + (second ? k + 32 : 0);
        const uint16_t *low_near = lower + (first ? k : 0), *low_far = lower + (second ? k + 32 : 0);
        if (width < WIDE) {
            copy_narrow_weights(to, near, first);
            copy_narrow_weights(to + 512, far, second);
            copy_narrow_weights(to + 1024, low_near, first);
            copy_narrow_weights(to + 1536, low_far, second);
        } else {
            copy_weights(to, near, first);
            copy_weights(to + 512, far, second);
            copy_weights(to + 1024, low_near, first);
            copy_weights(to + 1536, low_far, second);
        }
        if (weights.advance() && weights.tile < tiles) {
            upper = rows(weights.tile, group);
            lower = rows(weights.tile, group + 8);
        }
    };
    auto fetch_columns = [&](int slot) {
        if constexpr (Columns::STREAMED) {
            if (inputs.tile >= tiles) return;
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) columns.fetch(slot, 8 * c + group, inputs.k);
            inputs.advance();
        }
    };
    for (int d = 0; d < GEMV_DEPTH; ++d) fetch_weights(d);
    begin();
    // Groups complete in order, and the first one holds all the weights so far: the loop below needs no other start.
    for (int d = 0; d < GEMV_DEPTH; ++d) {
        fetch_columns(d);
        commit_copies();
    }

    const int store_row = threadIdx.x % 8, store_column = threadIdx.x / 8;
    auto found = ahead(now.tile, store_row, store_column);
    float acc[COLUMN_TILES][4] = {};
    int buffer = 0, slot = 0;
    while (now.tile < tiles) {
        wait_copies<GEMV_DEPTH - 1>();
        // The lanes of a column's row read what others of them copied.
        if constexpr (Columns::STREAMED) __syncwarp();
        const uint4* w = reinterpret_cast<const uint4*>(ring + slot * SLOT_BYTES);
        const uint4 u0 = w[0], u1 = w[WARP], l0 = w[2 * WARP], l1 = w[3 * WARP];
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            uint4 x0, x1;
            columns.read(slot, 8 * c + group, now.k, x0, x1);
            mma(acc[c], u0.x, l0.x, u0.y, l0.y, x0.x, x0.y);
            mma(acc[c], u0.z, l0.z, u0.w, l0.w, x0.z, x0.w);
            mma(acc[c], u1.x, l1.x, u1.y, l1.y, x1.x, x1.y);
            mma(acc[c], u1.z, l1.z, u1.w, l1.w, x1.z, x1.w);
        }
        fetch_weights(slot);
        fetch_columns(slot);
        commit_copies();
        slot = slot + 1 == GEMV_DEPTH ? 0 : slot + 1;
        const int tile = now.tile;
        if (!now.advance()) continue;
        float* mine = sums + (buffer * GEMV_WARPS + warp) * TILE_ROWS * COLUMNS;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Column by column: the lanes that store an output row by row then read without conflicts.
                mine[(8 * c + 2 * (lane % 4) + (i & 1)) * TILE_ROWS + group + 8 * (i >> 1)] = acc[c][i];
                acc[c][i] = 0.0f;
            }
        }
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

// Columns of a normalised residual stream in shared memory: x / sqrt(mean(x²) + eps) * weight, in the element type.
// Where its range allows, the factor of a column is left to the sums (scale), and one pass over x does.
// A row is padded by 64 bytes, so that the 16-byte reads of two neighbouring columns fall into different banks.
constexpr int MAX_NORM_COLUMNS = 8;

__host__ __device__ constexpr int norm_stride(int width) { return (width + 63) / 64 * 64 + 32; }

struct NormColumns {
    uint16_t* values;  // [columns][norm_stride(width)]
    float* weight;     // [width]
    float* partial;    // [GEMV_WARPS][MAX_NORM_COLUMNS]; whatever a kernel wants for itself lies behind
    int width;
    int live = 0;
    float scale = 1.0f;  // of the sums that this thread stores, those of column threadIdx.x / 8
    static constexpr bool STREAMED = false;

    // Before the predecessor has ended: every thread fetches the norm weights that it will use itself.
    __device__ void fetch(const void* source, int type) const {
        for (int k = threadIdx.x * 8; k < width; k += GEMV_THREADS * 8) {
            float w[8];
            load_vector(source, k, type, w);
            store_floats(weight + k, w);
        }
    }

    __device__ void begin(const void* source, int type, const float* x, float eps) {
        fetch(source, type);
        admit_successor();
        wait_for_predecessor();
        normalise(x, eps);
    }

    __device__ void normalise(const float* x, float eps) {
        float square[MAX_NORM_COLUMNS] = {};
        every(x, [&](int column, int k, const float (&v)[8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i) square[column] += v[i] * v[i];
            if constexpr (WIDE_RANGE) put(column, k, v, 1.0f);
        });
#pragma unroll
        for (int c = 0; c < MAX_NORM_COLUMNS; ++c) {
            if (c < live) {
                const float sum = warp_sum(square[c]);
                if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP * MAX_NORM_COLUMNS + c] = sum;
            }
        }
        __syncthreads();
        if constexpr (WIDE_RANGE) {
            scale = factor(threadIdx.x / 8 % MAX_NORM_COLUMNS, eps);
        } else {
            every(x, [&](int column, int k, const float (&v)[8]) { put(column, k, v, factor(column, eps)); });
            __syncthreads();
        }
    }

    // Of a column whose squares have been summed. That of a column without a token means nothing.
    __device__ float factor(int column, float eps) const {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < GEMV_WARPS; ++w) sum += partial[w * MAX_NORM_COLUMNS + column];
        return rsqrtf(sum / static_cast<float>(width) + eps);
    }

    __device__ void read(int, int column, int k, uint4& first, uint4& second) const {
        const uint16_t* from = values + column * norm_stride(width) + k;
        first = column < live && k < width ? *reinterpret_cast<const uint4*>(from) : zero16();
        second = column < live && k + 32 < width ? *reinterpret_cast<const uint4*>(from + 32) : zero16();
    }

  private:
    // use(column, k, x[column][k .. k + 8)) for this thread's part of the live columns.
    template <class Use>
    __device__ void every(const float* x, Use use) const {
        if (live == 1) {
            sweep<0, 1, 2>(x, use);
        } else {
            sweep<0, 4, 1>(x, use);
            sweep<4, 4, 1>(x, use);
        }
    }

    // Columns [FIRST, FIRST + COLUMNS), PIECES vectors of each at once: all loads leave before the first is used.
    template <int FIRST, int COLUMNS, int PIECES, class Use>
    __device__ void sweep(const float* x, Use use) const {
        if (FIRST >= live) return;
        constexpr int STEP = GEMV_THREADS * 8;
        for (int start = threadIdx.x * 8; start < width; start += PIECES * STEP) {
            uint4 raw[COLUMNS][PIECES][2];
#pragma unroll
            for (int e = 0; e < COLUMNS * PIECES; ++e) {
                const int c = e / PIECES, piece = e % PIECES, k = start + piece * STEP;
                if (FIRST + c >= live || k >= width) continue;
                const float* from = x + static_cast<int64_t>(FIRST + c) * width + k;
                raw[c][piece][0] = load16(from);
                raw[c][piece][1] = load16(from + 4);
            }
#pragma unroll
            for (int e = 0; e < COLUMNS * PIECES; ++e) {
                const int c = e / PIECES, piece = e % PIECES, k = start + piece * STEP;
                if (FIRST + c >= live || k >= width) continue;
                float v[8];
                as_floats(raw[c][piece][0], v, 0);
                as_floats(raw[c][piece][1], v, 4);
                use(FIRST + c, k, v);
            }
        }
    }

    __device__ void put(int column, int k, const float (&v)[8], float by) const {
        float scaled[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] = v[i] * by * weight[k + i];
        *reinterpret_cast<uint4*>(values + column * norm_stride(width) + k) = pack8(scaled);
    }
};

// Where the columns lie in dynamic shared memory, behind what gemv<1> needs.
__device__ inline NormColumns norm_columns(unsigned char* shared, int width, int capacity) {
    NormColumns n;
    n.width = width;
    n.values = reinterpret_cast<uint16_t*>(shared + gemv_shared(1));
    n.weight = reinterpret_cast<float*>(n.values + capacity * norm_stride(width));
    n.partial = n.weight + width;
    return n;
}

}  // namespace atlas
