// Products of a weight [rows, width] with a few columns (tokens), bound by the speed at which weights arrive.
//
// Weights are the left matrix of m16n8k16, so up to 8 tokens cost what one does. A lane reads 16 bytes of row g and of row
// g+8 straight from memory into the registers that the instruction wants: this permutes the summed dimension, which is
// harmless because the columns are read with the same permutation. A ring of registers keeps DEPTH chunks of 64 weights of 16 rows
// in flight in every warp; it runs on over the borders of tiles, and its first loads are issued before the predecessor has
// ended.
#pragma once
#include "device.cuh"

namespace atlas {

constexpr int GEMV_WARPS = 8;
constexpr int GEMV_THREADS = GEMV_WARPS * WARP;
constexpr int GEMV_CHUNK = 64;
constexpr int GEMV_DEPTH = 4;
constexpr int TILE_ROWS = 16;

// Bytes of shared memory for the sums of the warps, two tiles deep.
template <int COLUMN_TILES>
__host__ __device__ constexpr int gemv_shared() { return 2 * GEMV_WARPS * TILE_ROWS * 8 * COLUMN_TILES * static_cast<int>(sizeof(float)); }

// Rows:    (tile, i) → address of the i-th of the 16 weight rows of a tile; must be readable for every i.
// Columns: (column, k) → 8 bf16 of a column from k on, zeros when there is no such column; called behind begin() only.
// Begin:   () → void, waits for the predecessor and prepares the columns; runs once, after the first loads.
// Store:   (tile, i, column, a, b) → void, with the finished sums of rows i and i+8, i < 8.
template <int COLUMN_TILES, class Rows, class Begin, class Columns, class Store>
__device__ inline void gemv(int tiles, int width, float* sums, Rows rows, Begin begin, Columns columns, Store store) {
    constexpr int COLUMNS = 8 * COLUMN_TILES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, place = 8 * (lane % 4);
    // A warp without a chunk of its own takes one of zeros, so that all warps meet at the end of every tile.
    const int chunks = (width + GEMV_CHUNK - 1) / GEMV_CHUNK;
    const int rounds = max(1, (chunks - warp + GEMV_WARPS - 1) / GEMV_WARPS);

    uint4 ring[GEMV_DEPTH][4];
    int fetch_tile = blockIdx.x, fetch_k = warp * GEMV_CHUNK + place, fetch_left = rounds;
    const uint16_t *upper = nullptr, *lower = nullptr;
    if (fetch_tile < tiles) upper = rows(fetch_tile, group), lower = rows(fetch_tile, group + 8);
    auto fetch = [&](uint4(&slot)[4]) {
        if (fetch_tile >= tiles) return;
        const bool first = fetch_k < width, second = fetch_k + 32 < width;
        slot[0] = first ? load_weights(upper + fetch_k) : zero16();
        slot[1] = second ? load_weights(upper + fetch_k + 32) : zero16();
        slot[2] = first ? load_weights(lower + fetch_k) : zero16();
        slot[3] = second ? load_weights(lower + fetch_k + 32) : zero16();
        fetch_k += GEMV_WARPS * GEMV_CHUNK;
        if (--fetch_left == 0) {
            fetch_tile += gridDim.x;
            fetch_k = warp * GEMV_CHUNK + place;
            fetch_left = rounds;
            if (fetch_tile < tiles) upper = rows(fetch_tile, group), lower = rows(fetch_tile, group + 8);
        }
    };
#pragma unroll
    for (int d = 0; d < GEMV_DEPTH; ++d) fetch(ring[d]);
    begin();

    float acc[COLUMN_TILES][4] = {};
    int tile = blockIdx.x, k = warp * GEMV_CHUNK + place, left = rounds, buffer = 0;
    while (tile < tiles) {
#pragma unroll
        for (int d = 0; d < GEMV_DEPTH; ++d) {
            if (tile < tiles) {
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c) {
                    const uint4 x0 = k < width ? columns(8 * c + group, k) : zero16();
                    const uint4 x1 = k + 32 < width ? columns(8 * c + group, k + 32) : zero16();
                    mma(acc[c], ring[d][0].x, ring[d][2].x, ring[d][0].y, ring[d][2].y, x0.x, x0.y);
                    mma(acc[c], ring[d][0].z, ring[d][2].z, ring[d][0].w, ring[d][2].w, x0.z, x0.w);
                    mma(acc[c], ring[d][1].x, ring[d][3].x, ring[d][1].y, ring[d][3].y, x1.x, x1.y);
                    mma(acc[c], ring[d][1].z, ring[d][3].z, ring[d][1].w, ring[d][3].w, x1.z, x1.w);
                }
                fetch(ring[d]);
                k += GEMV_WARPS * GEMV_CHUNK;
                if (--left == 0) {
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
                    for (int e = threadIdx.x; e < 8 * COLUMNS; e += GEMV_THREADS) {
                        const int row = e % 8, column = e / 8;
                        float a = 0.0f, b = 0.0f;
#pragma unroll
                        for (int w = 0; w < GEMV_WARPS; ++w) {
                            a += all[(w * COLUMNS + column) * TILE_ROWS + row];
                            b += all[(w * COLUMNS + column) * TILE_ROWS + row + 8];
                        }
                        store(tile, row, column, a, b);
                    }
                    buffer ^= 1;
                    tile += gridDim.x;
                    k = warp * GEMV_CHUNK + place;
                    left = rounds;
                }
            }
        }
    }
}

// Columns of a normalised hidden state in shared memory: x / sqrt(mean(x²) + eps) * weight, rounded to bf16.
// A row is padded by 64 bytes, so that the 16-byte reads of two neighbouring columns fall into different banks.
constexpr int MAX_NORM_COLUMNS = 8;

__host__ __device__ constexpr int norm_stride(int width) { return (width + 63) / 64 * 64 + 32; }

struct NormColumns {
    uint16_t* values;  // [columns][norm_stride(width)]
    float* weight;     // [width]
    float* partial;    // [GEMV_WARPS][MAX_NORM_COLUMNS]
    int width;

    // Before the predecessor has ended: every thread fetches the norm weights that it will use itself.
    __device__ void fetch(const void* source, bool wide) const {
        for (int k = threadIdx.x * 8; k < width; k += GEMV_THREADS * 8) {
            float w[8];
            if (wide) {
#pragma unroll
                for (int i = 0; i < 8; ++i) w[i] = static_cast<const float*>(source)[k + i];
            } else {
                unpack(load_weights(static_cast<const uint16_t*>(source) + k), w);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) weight[k + i] = w[i];
        }
    }

    __device__ void normalise(const uint16_t* x, int live, float eps) const {
        float square[MAX_NORM_COLUMNS] = {};
        for (int k = threadIdx.x * 8; k < width; k += GEMV_THREADS * 8) {
#pragma unroll
            for (int c = 0; c < MAX_NORM_COLUMNS; ++c) {
                if (c < live) {
                    const uint4 raw = load16(x + static_cast<int64_t>(c) * width + k);
                    *reinterpret_cast<uint4*>(values + c * norm_stride(width) + k) = raw;
                    float v[8];
                    unpack(raw, v);
#pragma unroll
                    for (int i = 0; i < 8; ++i) square[c] += v[i] * v[i];
                }
            }
        }
#pragma unroll
        for (int c = 0; c < MAX_NORM_COLUMNS; ++c) {
            if (c < live) {
                const float sum = warp_sum(square[c]);
                if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP * MAX_NORM_COLUMNS + c] = sum;
            }
        }
        __syncthreads();
        for (int c = 0; c < live; ++c) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < GEMV_WARPS; ++w) sum += partial[w * MAX_NORM_COLUMNS + c];
            const float factor = rsqrtf(sum / static_cast<float>(width) + eps);
            for (int k = threadIdx.x * 8; k < width; k += GEMV_THREADS * 8) {
                uint4* place = reinterpret_cast<uint4*>(values + c * norm_stride(width) + k);
                float v[8];
                unpack(*place, v);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] *= factor * weight[k + i];
                *place = pack8(v);
            }
        }
        __syncthreads();
    }

    __device__ uint4 read(int column, int k) const {
        return *reinterpret_cast<const uint4*>(values + column * norm_stride(width) + k);
    }
};

// Lays out dynamic shared memory: the sums of the warps first, then the columns.
template <int COLUMN_TILES>
__device__ inline NormColumns norm_columns(unsigned char* shared, int width, int capacity) {
    NormColumns n;
    n.width = width;
    n.values = reinterpret_cast<uint16_t*>(shared + gemv_shared<COLUMN_TILES>());
    n.weight = reinterpret_cast<float*>(n.values + capacity * norm_stride(width));
    n.partial = n.weight + width;
    return n;
}

}  // namespace atlas
