// An FP8 or NVFP4 matrix as rows of the element type, rounded once: for products of so many tokens that they cost more than
// this. A warp has a chunk of a unit.
#include "scaled_weights.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = 256, WORDS = SCALED_CHUNK / 2, PITCH = WORDS + 4;

__device__ uint32_t scaled(uint32_t pair, float by) {
    return pack(widen(static_cast<uint16_t>(pair)) * by, widen(static_cast<uint16_t>(pair >> 16)) * by);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
scaled_decode(const uint8_t* weight, uint16_t* to, int32_t rows, int32_t width) {
    __shared__ __align__(16) uint32_t staged[THREADS / WARP][UNIT_ROWS][PITCH];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = lane / 4, t = lane % 4;
    const ScaledMatrix matrix(weight, rows, width);
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (THREADS / WARP) + warp;
    const int unit = static_cast<int>(index / matrix.chunks), chunk = static_cast<int>(index % matrix.chunks);
    const bool mine = unit * UNIT_ROWS < rows;
    Numbers numbers = {};
    float by = 0.0f;
    if (mine) {
        const Unit from = matrix.unit(unit);
        numbers.load(from.pieces + static_cast<int64_t>(chunk) * PIECE_BYTES, lane);
        by = from.of_rows[row] * (CHUNKS_SCALED ? from.of_chunks[chunk] : 1.0f);
    }
    // Others may still read what lies there.
    wait_for_predecessor();
    if (!mine) return;
#pragma unroll
    for (int s = 0; s < SCALED_STEPS; ++s) {
        uint32_t near, far;
        numbers.step(s, near, far);
        staged[warp][row][8 * s + t] = scaled(near, by);
        staged[warp][row][8 * s + 4 + t] = scaled(far, by);
    }
    __syncwarp();
#pragma unroll
    for (int e = lane; e < UNIT_ROWS * WORDS / 4; e += WARP) {
        const int r = e / (WORDS / 4), piece = e % (WORDS / 4), column = chunk * SCALED_CHUNK + 8 * piece;
        if (unit * UNIT_ROWS + r >= rows || column >= width) continue;
        *reinterpret_cast<uint4*>(to + (static_cast<int64_t>(unit) * UNIT_ROWS + r) * width + column) =
            *reinterpret_cast<const uint4*>(&staged[warp][r][4 * piece]);
    }
}
