// Logits of a model with a narrow residual stream, for up to 8 tokens: the rows whose logits are wanted, their norm and
// the product in one launch. A warp has a tile of 16 whole rows of weights to itself, which one bulk copy brings, so
// that warps never wait for each other; where rows are wide, gemv.cuh shares them out to the warps of a block.
#include "tma.cuh"

using namespace atlas;

namespace {

constexpr int WARPS = 6, THREADS = WARPS * WARP, TILE_ROWS = 16, CHUNK = 64, MAX_TOKENS = 8, MAX_STAGES = 4;
constexpr int MAX_WIDTH = 1024, PAIRS = MAX_WIDTH / 2 / WARP;  // narrow_head.py knows the width

// A row of normalised tokens in shared memory: 64 bytes more, so that neighbours lie in different banks.
__device__ inline int pitch_of(int width) { return 2 * width + 64; }

// Half of the weights stay in the L2 cache from one step to the next, as far as others let them: all of them are more
// than it holds.
__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, 0.5;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ inline uint4 pick(bool second, const uint4& a, const uint4& b) { return second ? b : a; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
narrow_head(const int32_t* counts, int32_t live_word, const float* x, const int32_t* logits_rows,
            const void* norm_weight, const uint16_t* weight, float* y, int32_t rows, int32_t width, int32_t stages,
            float eps, int32_t norm_type) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint64_t barriers[WARPS][MAX_STAGES];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tile_bytes = TILE_ROWS * 2 * width, tiles = rows / TILE_ROWS;
    unsigned char* const ring = shared + warp * stages * tile_bytes;
    unsigned char* const tokens = shared + WARPS * stages * tile_bytes;
    const uint32_t full = shared_address(barriers[warp]);
    const int first = blockIdx.x * WARPS + warp, step = gridDim.x * WARPS;
    auto fetch = [&](int tile, int stage) {
        if (tile >= tiles) return;
        barrier_expect(full + 8 * stage, tile_bytes);
        copy_bulk(shared_address(ring) + stage * tile_bytes, weight + static_cast<int64_t>(tile) * TILE_ROWS * width,
                  tile_bytes, full + 8 * stage);
    };
    if (lane == 0) {
        for (int i = 0; i < stages; ++i) barrier_init(full + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < stages; ++i) fetch(first + i * step, i);
    }
    float2 norm[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int k = 2 * (i * WARP + lane);
        norm[i] = k < width ? make_float2(load_element(norm_weight, k, norm_type),
                                          load_element(norm_weight, k + 1, norm_type))
                            : make_float2(0.0f, 0.0f);
    }
    admit_successor();
    wait_for_predecessor();

    const int live = min(counts[live_word], MAX_TOKENS);
    for (int token = warp; token < live; token += WARPS) {
        const float2* from = reinterpret_cast<const float2*>(x + static_cast<int64_t>(logits_rows[token]) * width);
        float2 v[PAIRS];
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            v[i] = 2 * (i * WARP + lane) < width ? __ldcg(from + i * WARP + lane) : make_float2(0.0f, 0.0f);
            square += v[i].x * v[i].x + v[i].y * v[i].y;
        }
        const float by = rsqrtf(warp_sum(square) / static_cast<float>(width) + eps);
        uint32_t* to = reinterpret_cast<uint32_t*>(tokens + token * pitch_of(width));
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = i * WARP + lane;
            if (2 * pair < width) to[pair] = pack(v[i].x * by * norm[i].x, v[i].y * by * norm[i].y);
        }
    }
    __syncthreads();

    // Rows g and g + 8 of a tile, and token g; a lane reads 16 bytes of them, which permutes the summed dimension alike
    // on both sides. Odd rows begin with the other half of a chunk, for the sake of the banks.
    const int g = lane / 4, t = lane % 4;
    const bool odd = g % 2;
    const unsigned char* const token = tokens + g * pitch_of(width) + 16 * t;
    int stage = 0, parity = 0;
    for (int tile = first; tile < tiles; tile += step) {
        barrier_wait(full + 8 * stage, parity);
        const unsigned char* const upper = ring + stage * tile_bytes + g * 2 * width + 16 * t;
        const unsigned char* const lower = upper + 16 * width;
        float acc[4][4] = {};
#pragma unroll 3
        for (int at = 0; at < 2 * width; at += 2 * CHUNK) {
            const int near = at + (odd ? CHUNK : 0), far = at + (odd ? 0 : CHUNK);
            const uint4 a = *reinterpret_cast<const uint4*>(upper + near);
            const uint4 b = *reinterpret_cast<const uint4*>(upper + far);
            const uint4 c = *reinterpret_cast<const uint4*>(lower + near);
            const uint4 d = *reinterpret_cast<const uint4*>(lower + far);
            const uint4 u0 = pick(odd, a, b), u1 = pick(odd, b, a), l0 = pick(odd, c, d), l1 = pick(odd, d, c);
            uint4 x0 = zero16(), x1 = zero16();
            if (g < live) {
                x0 = *reinterpret_cast<const uint4*>(token + at);
                x1 = *reinterpret_cast<const uint4*>(token + at + CHUNK);
            }
            mma(acc[0], u0.x, l0.x, u0.y, l0.y, x0.x, x0.y);
            mma(acc[1], u0.z, l0.z, u0.w, l0.w, x0.z, x0.w);
            mma(acc[2], u1.x, l1.x, u1.y, l1.y, x1.x, x1.y);
            mma(acc[3], u1.z, l1.z, u1.w, l1.w, x1.z, x1.w);
        }
        __syncwarp();
        if (lane == 0) fetch(tile + stages * step, stage);
        if (++stage == stages) stage = 0, parity ^= 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 2 * t + i % 2;
            if (column < live) {
                y[static_cast<int64_t>(column) * rows + tile * TILE_ROWS + g + i / 2 * 8] =
                    (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
            }
        }
    }
}
