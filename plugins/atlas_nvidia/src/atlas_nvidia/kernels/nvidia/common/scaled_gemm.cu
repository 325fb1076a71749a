// y = x · weightᵀ (+ residual) for many tokens, with FP8 or NVFP4 weights: tiles of 64 tokens and 128 weight rows on the
// tensor cores, which get weights as their left operand out of registers. Where tiles are few, the blocks of a cluster
// share out the summed dimension of one tile, and each stores some of its tokens.
#include "cluster_tile.cuh"
#include "scaled_weights.cuh"

using namespace atlas;

namespace {

constexpr int TILE_M = 64, GEMM_STAGES = 3, THREADS = 128;
constexpr int TILE_UNITS = TILE_N / UNIT_ROWS;
constexpr int X_BYTES = TILE_M * SCALED_CHUNK * 2, CODES_BYTES = TILE_UNITS * PIECE_BYTES;
constexpr int STAGE_BYTES = X_BYTES + CODES_BYTES + TILE_UNITS * 4;
static_assert(TILE_M * SUM_STRIDE * 4 <= GEMM_STAGES * STAGE_BYTES, "finished sums lie where the stages were");

// Where 8 elements of a token lie in a tile of rows of 256 bytes.
__device__ uint32_t piece(uint32_t tile, int row, int index) { return tile + row * 256 + ((index ^ (row & 7)) * 16); }

struct Stages {
    const uint16_t* x;  // the tile's first token
    ScaledMatrix matrix;
    int first_unit, tokens, width;
    uint32_t base;

    __device__ void weights(int chunk, int stage) const {
        const uint32_t to = base + stage * STAGE_BYTES + X_BYTES;
#pragma unroll
        for (int e = threadIdx.x; e < CODES_BYTES / 16; e += THREADS) {
            const int unit = e / (PIECE_BYTES / 16), at = e % (PIECE_BYTES / 16) * 16;
            const bool there = first_unit + unit < matrix.units;
            const Unit from = matrix.unit(there ? first_unit + unit : 0);
            copy_weights(to + e * 16, from.pieces + static_cast<int64_t>(chunk) * PIECE_BYTES + at, there);
        }
        if (CHUNKS_SCALED && threadIdx.x < TILE_UNITS) {
            const Unit from = matrix.unit(min(first_unit + static_cast<int>(threadIdx.x), matrix.units - 1));
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                         ::"r"(to + CODES_BYTES + threadIdx.x * 4), "l"(from.of_chunks + chunk) : "memory");
        }
    }
    __device__ void activations(int chunk, int stage) const {
        const uint32_t to = base + stage * STAGE_BYTES;
        const int index = threadIdx.x % 16, k = chunk * SCALED_CHUNK + index * 8;
#pragma unroll
        for (int row = threadIdx.x / 16; row < TILE_M; row += THREADS / 16) {
            const bool there = row < tokens && k < width;
            copy_async(piece(to, row, index), x + (there ? static_cast<int64_t>(row) * width + k : 0), there);
        }
    }
};

// 32 weight rows of 64 tokens, a warp's.
struct WarpSums {
    float acc[2][8][4] = {};

    static __device__ int first_row() { return threadIdx.x / WARP * 32; }

    __device__ void add(uint32_t x_tile, const unsigned char* pieces) {
        const int lane = threadIdx.x % WARP;
        const unsigned char* mine = pieces + first_row() / UNIT_ROWS * PIECE_BYTES;
        float part[2][8][4] = {};
        float(&into)[2][8][4] = CHUNKS_SCALED ? part : acc;
#pragma unroll
        for (int i = 0; i < SCALED_STEPS / 2; ++i) {
            uint32_t a[2][2][4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                Numbers numbers;  // of which two steps are loaded: registers are few
                numbers.load(mine + u * PIECE_BYTES, lane);
#pragma unroll
                for (int s = 0; s < 2; ++s) numbers.step(2 * i + s, a[u / 2][s][u % 2], a[u / 2][s][u % 2 + 2]);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                uint32_t b[4];
                load_matrix(b, piece(x_tile, j * 8 + lane % 8, 4 * i + lane / 8));
#pragma unroll
                for (int u = 0; u < 2; ++u) {
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        mma(into[u][j], a[u][s][0], a[u][s][1], a[u][s][2], a[u][s][3], b[2 * s], b[2 * s + 1]);
                    }
                }
            }
        }
        if (!CHUNKS_SCALED) return;
        const float4 by = *reinterpret_cast<const float4*>(pieces + CODES_BYTES + first_row() / UNIT_ROWS * 4);
        const float scales[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
        for (int u = 0; u < 2; ++u) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[u][j][i] += part[u][j][i] * scales[2 * u + i / 2];
            }
        }
    }

    // [TILE_M][SUM_STRIDE], `of_rows` having the rows' scales.
    __device__ void put(float* sums, const ScaledMatrix& matrix, int first_unit) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int unit = min(first_unit + first_row() / UNIT_ROWS + u, matrix.units - 1);
            const float by = matrix.unit(unit).of_rows[lane / 4];
            float* to = sums + lane % 4 * 2 * SUM_STRIDE + first_row() + u * UNIT_ROWS + lane / 4;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                to[j * 8 * SUM_STRIDE] = acc[u / 2][j][u % 2 * 2] * by;
                to[(j * 8 + 1) * SUM_STRIDE] = acc[u / 2][j][u % 2 * 2 + 1] * by;
            }
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
scaled_gemm(const int32_t* counts, int32_t live_word, const uint16_t* x, const uint8_t* weight, const float* residual,
            void* y, int32_t rows, int32_t width, int32_t y_f32) {
    extern __shared__ __align__(1024) unsigned char shared[];
    admit_successor();
    const int live = counts[live_word], m0 = blockIdx.x * TILE_M, n0 = blockIdx.y * TILE_N;
    if (m0 >= live) {
        wait_for_predecessor();
        return;
    }
    const int splits = gridDim.z, split = blockIdx.z;
    const ScaledMatrix matrix(weight, rows, width);
    const int each = (matrix.chunks + splits - 1) / splits, first = split * each;
    const int steps = max(0, min(each, matrix.chunks - first)), tokens = min(TILE_M, live - m0);
    const Stages stages{x + static_cast<int64_t>(m0) * width, matrix, n0 / UNIT_ROWS, tokens, width,
                        shared_address(shared)};
    // Groups complete in order, and the first one holds all the weights so far: the loop below needs no other start.
    for (int s = 0; s < min(GEMM_STAGES - 1, steps); ++s) stages.weights(first + s, s);
    wait_for_predecessor();
    for (int s = 0; s < GEMM_STAGES - 1; ++s) {
        if (s < steps) stages.activations(first + s, s);
        commit_copies();
    }
    WarpSums sum;
    for (int step = 0; step < steps; ++step) {
        wait_copies<GEMM_STAGES - 2>();
        __syncthreads();
        const int ahead = step + GEMM_STAGES - 1, stage = step % GEMM_STAGES * STAGE_BYTES;
        if (ahead < steps) {
            stages.weights(first + ahead, ahead % GEMM_STAGES);
            stages.activations(first + ahead, ahead % GEMM_STAGES);
        }
        commit_copies();
        sum.add(stages.base + stage, shared + stage + X_BYTES);
    }
    wait_copies<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    sum.put(sums, matrix, n0 / UNIT_ROWS);
    store_tile<TILE_M, THREADS>(sums, {residual, y, rows, y_f32}, m0, n0, tokens);
}
