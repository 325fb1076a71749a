// Norm, query, key and value projections, rotation and the write into pages in one launch, for up to 8 tokens.
#include "gemv.cuh"

using namespace atlas;

namespace {

// A tile is 8 pairs of one head: rows i and i + half. Tiles of all query heads, then of key heads, then of value heads.
struct Tile {
    int head, pair, kind;  // kind 0 query, 1 key, 2 value
};

__device__ Tile locate(int tile, int tiles_per_head, int q_heads, int kv_heads) {
    int head = tile / tiles_per_head;
    const int pair = tile % tiles_per_head * 8;
    if (head < q_heads) return {head, pair, 0};
    head -= q_heads;
    return head < kv_heads ? Tile{head, pair, 1} : Tile{head - kv_heads, pair, 2};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
norm_qkv_rope_append(const int32_t* counts, const float* x, const void* norm_weight, const uint16_t* q_weight,
                     const uint16_t* k_weight, const uint16_t* v_weight, const float* inv_freq,
                     const int32_t* positions, const int32_t* token_row, const int32_t* row_slot, const int32_t* slots,
                     uint16_t* cache, uint16_t* q, int32_t width, int32_t q_heads, int32_t kv_heads, int32_t head_dim,
                     int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t capacity, float eps,
                     float rope_scale, int32_t norm_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    NormColumns norm = norm_columns(shared, width, capacity);
    const int half = head_dim / 2, tiles_per_head = half / 8;
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    int64_t* place = reinterpret_cast<int64_t*>(norm.partial + GEMV_WARPS * MAX_NORM_COLUMNS);  // [capacity]
    // Sine and cosine, [capacity][half].
    float2* turn = reinterpret_cast<float2*>(place + capacity);
    gemv<1>(
        tiles_per_head * (q_heads + 2 * kv_heads), width, shared,
        [&](int tile, int i) {
            const Tile t = locate(tile, tiles_per_head, q_heads, kv_heads);
            const uint16_t* weight = t.kind == 0 ? q_weight : t.kind == 1 ? k_weight : v_weight;
            const int row = t.head * head_dim + t.pair + (i < 8 ? i : half + i - 8);
            return weight + static_cast<int64_t>(row) * width;
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
        [&](int tile, int i, int token, float a, float b, int) {
            if (token >= norm.live) return;
            const Tile t = locate(tile, tiles_per_head, q_heads, kv_heads);
            const int dim = t.pair + i;
            a *= norm.scale;
            b *= norm.scale;
            if (t.kind != 2) {
                const float2 by = turn[token * half + dim];
                const float rotated = a * by.y - b * by.x;
                b = b * by.y + a * by.x;
                a = rotated;
            }
            uint16_t* to;
            if (t.kind == 0) {
                to = q + (static_cast<int64_t>(token) * q_heads + t.head) * head_dim;
            } else {
                const int64_t head = static_cast<int64_t>((t.kind - 1) * kv_heads + t.head) * page_tokens * head_dim;
                to = cache + place[token] + head;
            }
            to[dim] = narrow(a);
            to[dim + half] = narrow(b);
        });
}
