// Norm, query, key and value projections, rotation and the write into pages in one launch, for up to 8 tokens, with FP8 or
// NVFP4 weights. A tile is 8 pairs of one head: a unit of rows i, and one of rows i + half.
#include "scaled_gemv.cuh"

using namespace atlas;

namespace {

// Tiles of all query heads, then of key heads, then of value heads.
struct Tile {
    int head, pair, kind;  // kind 0 query, 1 key, 2 value

    __device__ Tile(int tile, int tiles_per_head, int q_heads, int kv_heads)
        : head(tile / tiles_per_head), pair(tile % tiles_per_head * UNIT_ROWS), kind(0) {
        if (head < q_heads) return;
        head -= q_heads;
        kind = head < kv_heads ? 1 : 2;
        if (kind == 2) head -= kv_heads;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
scaled_qkv(const int32_t* counts, const float* x, const void* norm_weight, const uint8_t* q_weight,
           const uint8_t* k_weight, const uint8_t* v_weight, const float* inv_freq, const int32_t* positions,
           const int32_t* token_row, const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q,
           int32_t width, int32_t q_heads, int32_t kv_heads, int32_t head_dim, int32_t page_tokens,
           int32_t slot_stride, int32_t table_offset, int32_t capacity, float eps, float rope_scale,
           int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int half = head_dim / 2, tiles_per_head = half / UNIT_ROWS;
    NormChunks norm = norm_chunks(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    int64_t* place = reinterpret_cast<int64_t*>(norm.partial + GEMV_WARPS * MAX_NORM_COLUMNS);  // of tokens in pages
    float2* turn = reinterpret_cast<float2*>(place + capacity);  // sine and cosine, [capacity][half]
    const ScaledMatrix matrices[3] = {ScaledMatrix(q_weight, q_heads * head_dim, width),
                                      ScaledMatrix(k_weight, kv_heads * head_dim, width),
                                      ScaledMatrix(v_weight, kv_heads * head_dim, width)};
    scaled_gemv(
        tiles_per_head * (q_heads + 2 * kv_heads), width / SCALED_CHUNK, shared,
        [&](int tile, int second) {
            const Tile t(tile, tiles_per_head, q_heads, kv_heads);
            const int unit = (t.head * head_dim + t.pair + (second ? half : 0)) / UNIT_ROWS;
            return t.kind == 0 ? matrices[0].unit(unit) : t.kind == 1 ? matrices[1].unit(unit) : matrices[2].unit(unit);
        },
        [&] {
            norm.fetch(norm_weight, norm_type);
            // What the last stores need, long before they need it: where each token goes and how it is rotated.
            if (threadIdx.x < norm.live) {
                const int token = threadIdx.x, position = positions[token];
                const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
                const int64_t page = slots[slot + table_offset + position / page_tokens];
                place[token] = page_element(page, 0, 0, position % page_tokens, kv_heads, page_tokens, head_dim);
            }
            for (int e = threadIdx.x; e < norm.live * half; e += GEMV_THREADS) {
                rotation(positions[e / half], inv_freq[e % half], rope_scale, turn[e].x, turn[e].y);
            }
            admit_successor();
            wait_for_predecessor();
            norm.normalise(x, eps);
        },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float first, float second, int) {
            if (token >= norm.live) return;
            const Tile t(tile, tiles_per_head, q_heads, kv_heads);
            const int dim = t.pair + i;
            first *= norm.scale;
            second *= norm.scale;
            if (t.kind != 2) {
                const float2 by = turn[token * half + dim];
                const float rotated = first * by.y - second * by.x;
                second = second * by.y + first * by.x;
                first = rotated;
            }
            uint16_t* to;
            if (t.kind == 0) {
                to = q + (static_cast<int64_t>(token) * q_heads + t.head) * head_dim;
            } else {
                to = cache + place[token] +
                     static_cast<int64_t>((t.kind - 1) * kv_heads + t.head) * page_tokens * head_dim;
            }
            to[dim] = narrow(first);
            to[dim + half] = narrow(second);
        });
}
