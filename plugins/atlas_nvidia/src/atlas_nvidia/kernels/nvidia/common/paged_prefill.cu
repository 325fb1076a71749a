// Causal attention of any number of queries a sequence over pages (FlashAttention-2; Dao, 2023), on mma.sync.
//
// A block owns 64 queries of one head of one sequence, a warp 16 of them; keys and values pass through shared memory
// some at a time, the next ones arriving while the present ones are used. Which sequence a block serves is found on the
// device, so the grid covers any mixture of lengths: ceil(tokens / 64) + sequences tiles.
#include "device.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef PREFILL_KEYS
#define PREFILL_KEYS 64
#endif

using namespace atlas;

namespace {

constexpr int QUERIES = 64, KEYS = PREFILL_KEYS, THREADS = 128, PIECES = HEAD_DIM / 8;
constexpr int TILE_BYTES = KEYS * HEAD_DIM * 2;
// Pieces that change places; short rows share the 128 bytes of all banks.
constexpr int SWIZZLE = PIECES < 8 ? PIECES : 8;

__device__ uint32_t piece(uint32_t tile, int row, int index) {
    return tile + row * HEAD_DIM * 2 + ((index ^ (row / (8 / SWIZZLE) % SWIZZLE)) * 16);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
paged_prefill(const int32_t* counts, const uint16_t* q, const int32_t* cu_q, const int32_t* row_slot,
              const int32_t* slots, const uint16_t* cache, uint16_t* y, int32_t q_heads, int32_t kv_heads,
              int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t window, float scale) {
    extern __shared__ __align__(128) unsigned char shared[];
    admit_successor();
    wait_for_predecessor();
    const int sequences = counts[ATLAS_SEQUENCES];
    int row = 0, tile = blockIdx.x;
    for (; row < sequences; ++row) {
        const int tiles = (cu_q[row + 1] - cu_q[row] + QUERIES - 1) / QUERIES;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (row == sequences) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int head = blockIdx.y, kv_head = head / (q_heads / kv_heads);
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[row]) * slot_stride;
    const int start = slot[ATLAS_POSITION], queries = cu_q[row + 1] - cu_q[row], first_query = tile * QUERIES;
    const int length = start + min(first_query + QUERIES, queries);
    // Pages that no query looks at any more may have been given away.
    const int oldest_key = window > 0 ? max(0, start + first_query - window + 1) : 0;
    const int first_key = oldest_key / KEYS * KEYS;
    const uint32_t base = shared_address(shared);

    auto fetch = [&](int key, int stage) {
        if (key < length) {
            for (int e = threadIdx.x; e < KEYS * PIECES; e += THREADS) {
                const int at = e / PIECES, index = e % PIECES, position = key + at;
                const bool valid = position >= oldest_key && position < length;
                const int page = valid ? slot[table_offset + position / page_tokens] : 0;
                const int inside = position % page_tokens;
                const uint16_t* k = cache + page_element(page, 0, kv_head, inside, kv_heads, page_tokens, HEAD_DIM);
                const uint16_t* v = cache + page_element(page, 1, kv_head, inside, kv_heads, page_tokens, HEAD_DIM);
                const uint32_t k_tile = base + 2 * stage * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
                copy_async(piece(k_tile, at, index), valid ? k + index * 8 : cache, valid);
                copy_async(piece(v_tile, at, index), valid ? v + index * 8 : cache, valid);
            }
        }
        commit_copies();
    };
    fetch(first_key, 0);

    const int mine[2] = {first_query + warp * 16 + lane / 4, first_query + warp * 16 + lane / 4 + 8};
    uint32_t query[HEAD_DIM / 16][4];
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = mine[i % 2];
            const int64_t vector = static_cast<int64_t>(cu_q[row] + index) * q_heads + head;
            const uint16_t* from = q + vector * HEAD_DIM + k * 16 + i / 2 * 8 + lane % 4 * 2;
            query[k][i] = index < queries ? *reinterpret_cast<const uint32_t*>(from) : 0;
        }
    }
    float out[HEAD_DIM / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    int stage = 0;
    for (int key = first_key; key < length; key += KEYS, stage ^= 1) {
        fetch(key + KEYS, stage ^ 1);
        wait_copies<1>();
        __syncthreads();
        const uint32_t k_tile = base + 2 * stage * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
        float score[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
            for (int j = 0; j < KEYS / 16; ++j) {
                uint32_t b[4];
                load_matrix(b, piece(k_tile, j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                mma(score[2 * j], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
                mma(score[2 * j + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int last = start + mine[half], oldest = window > 0 ? last - window + 1 : 0;
            float best = top[half];
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int at = key + j * 8 + lane % 4 * 2 + e;
                    float& s = score[j][2 * half + e];
                    s = at <= last && at >= oldest ? s * (scale * LOG2E) : -INFINITY;
                    best = fmaxf(best, s);
                }
            }
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float against = best == -INFINITY ? 0.0f : best;
            const float rescale = exp2f(top[half] - against);
            top[half] = best;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = score[j][2 * half + e];
                    s = exp2f(s - against);
                    sum += s;
                }
            }
            total[half] = total[half] * rescale + sum;
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 8; ++d) {
                out[d][2 * half] *= rescale;
                out[d][2 * half + 1] *= rescale;
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
            const uint32_t a0 = pack(score[2 * j][0], score[2 * j][1]), a1 = pack(score[2 * j][2], score[2 * j][3]);
            const uint32_t a2 = pack(score[2 * j + 1][0], score[2 * j + 1][1]);
            const uint32_t a3 = pack(score[2 * j + 1][2], score[2 * j + 1][3]);
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; ++d) {
                uint32_t b[4];
                load_matrix_transposed(b, piece(v_tile, j * 16 + lane / 8 % 2 * 8 + lane % 8, 2 * d + lane / 16));
                mma(out[2 * d], a0, a1, a2, a3, b[0], b[1]);
                mma(out[2 * d + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    wait_copies<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        if (mine[half] >= queries) continue;
        uint16_t* to = y + (static_cast<int64_t>(cu_q[row] + mine[half]) * q_heads + head) * HEAD_DIM;
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 8; ++d) {
            *reinterpret_cast<uint32_t*>(to + d * 8 + lane % 4 * 2) =
                pack(out[d][2 * half] / total[half], out[d][2 * half + 1] / total[half]);
        }
    }
}
