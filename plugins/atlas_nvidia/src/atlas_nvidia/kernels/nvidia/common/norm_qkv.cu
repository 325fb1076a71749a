// Norm, query, key and value projections, rotation and the write into pages in one launch, for up to 8 tokens.
#include "gemv.cuh"
#include "heads_of_cluster.cuh"

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

struct Weights {
    const uint16_t *q, *k, *v;
};

struct Heads {
    int q, kv, dim;
};

struct Pages {
    const int32_t *positions, *token_row, *row_slot, *slots;
    uint16_t* cache;
    int page_tokens, slot_stride, table_offset;
};

// What happens to a pair of sums before it turns; finish(tile, first, second) takes it on. Tiles: locate(tile) and how
// many this block has; all eight threads of all eight columns call pass for each.
struct Everywhere {
    int tiles_per_head;

    __device__ void begin() const {}
    __device__ void ready() const {}
    __device__ int end(const Heads& heads) const { return tiles_per_head * (heads.q + 2 * heads.kv); }
    __device__ Tile at(int tile, const Heads& heads) const { return locate(tile, tiles_per_head, heads.q, heads.kv); }
};

// Nothing.
struct AsTheyAre : Everywhere {
    template <class Finish>
    __device__ void pass(int tile, int, const Heads& heads, float a, float b, Finish finish) const {
        finish(at(tile, heads), a, b);
    }
};

// Biases of the projections.
struct Biased : Everywhere {
    const void *q, *k, *v;
    int q_type, k_type, v_type;

    template <class Finish>
    __device__ void pass(int tile, int i, const Heads& heads, float a, float b, Finish finish) const {
        const Tile t = at(tile, heads);
        const void* bias = t.kind == 0 ? q : t.kind == 1 ? k : v;
        const int type = t.kind == 0 ? q_type : t.kind == 1 ? k_type : v_type;
        const int64_t first = static_cast<int64_t>(t.head) * heads.dim + t.pair + i;
        finish(t, a + load_element(bias, first, type), b + load_element(bias, first + heads.dim / 2, type));
    }
};

// Norms of query and key heads. A head is the work of one cluster, whose blocks have `each` of its tiles, one after
// another: their pairs are kept until the last of them has been summed.
struct Normed {
    static constexpr int MOST = 4;
    const void *q, *k;
    int q_type, k_type, each;
    float eps;
    HeadSums* sums;
    int turn = 0;
    float first[MOST] = {}, second[MOST] = {};

    __device__ void begin() const { sums->begin(); }
    __device__ void ready() const { cluster_wait(); }
    __device__ int end(const Heads& heads) const {
        const int clusters = gridDim.x / cluster_blocks(), mine = blockIdx.x / cluster_blocks();
        const int rounds = (heads.q + 2 * heads.kv - mine + clusters - 1) / clusters * each;
        return blockIdx.x + (rounds - 1) * gridDim.x + 1;
    }
    // The n-th tile of this block is blockIdx.x + n * gridDim.x.
    __device__ Tile at(int tile, const Heads& heads) const {
        const int n = tile / gridDim.x, blocks = cluster_blocks();
        const int head = n / each * (gridDim.x / blocks) + blockIdx.x / blocks;
        const int place = n % each * blocks + cluster_rank();
        return locate(head * each * blocks + place, each * blocks, heads.q, heads.kv);
    }
    template <class Finish>
    __device__ void pass(int tile, int i, const Heads& heads, float a, float b, Finish finish) {
        const Tile last = at(tile, heads);
        if (last.kind == 2) {
            finish(last, a, b);
            return;
        }
        const int n = tile / gridDim.x % each;
#pragma unroll
        for (int j = 0; j < MOST; ++j) {
            if (j == n) {
                first[j] = a;
                second[j] = b;
            }
        }
        if (n != each - 1) return;
        const void* weight = last.kind == 0 ? q : k;
        const int type = last.kind == 0 ? q_type : k_type, apart = 8 * cluster_blocks();
        float by_first[MOST], by_second[MOST], square = 0.0f;
#pragma unroll
        for (int j = 0; j < MOST; ++j) {
            if (j >= each) break;
            const int dim = last.pair + i - (each - 1 - j) * apart;
            by_first[j] = load_element(weight, dim, type);
            by_second[j] = load_element(weight, dim + heads.dim / 2, type);
            square += first[j] * first[j] + second[j] * second[j];
        }
        const float factor = rsqrtf(sums->of_head(square, turn++) / static_cast<float>(heads.dim) + eps);
#pragma unroll
        for (int j = 0; j < MOST; ++j) {
            if (j >= each) break;
            Tile t = last;
            t.pair -= (each - 1 - j) * apart;
            finish(t, first[j] * factor * by_first[j], second[j] * factor * by_second[j]);
        }
    }
};

template <class Before>
__device__ inline void norm_qkv(unsigned char* shared, NormColumns norm, const float* x, const void* norm_weight,
                                int norm_type, const Weights& weights, const float* inv_freq, const Pages& pages,
                                uint16_t* q, const Heads& heads, int capacity, float eps, float rope_scale,
                                int64_t* place, Before before) {
    const int half = heads.dim / 2;
    float2* turn = reinterpret_cast<float2*>(place + capacity);  // sine and cosine, [capacity][half]
    before.begin();
    gemv<1>(
        before.end(heads), norm.width, shared,
        [&](int tile, int i) {
            const Tile t = before.at(tile, heads);
            const uint16_t* weight = t.kind == 0 ? weights.q : t.kind == 1 ? weights.k : weights.v;
            const int row = t.head * heads.dim + t.pair + (i < 8 ? i : half + i - 8);
            return weight + static_cast<int64_t>(row) * norm.width;
        },
        [&] {
            norm.fetch(norm_weight, norm_type);
            // What the last stores need, long before they need it: where each token goes and how it is rotated.
            if (threadIdx.x < norm.live) {
                const int token = threadIdx.x, position = pages.positions[token];
                const int64_t slot = static_cast<int64_t>(pages.row_slot[pages.token_row[token]]) * pages.slot_stride;
                const int64_t page = pages.slots[slot + pages.table_offset + position / pages.page_tokens];
                place[token] = page_element(page, 0, 0, position % pages.page_tokens, heads.kv, pages.page_tokens,
                                            heads.dim);
            }
            for (int e = threadIdx.x; e < norm.live * half; e += GEMV_THREADS) {
                rotation(pages.positions[e / half], inv_freq[e % half], rope_scale, turn[e].x, turn[e].y);
            }
            before.ready();
            admit_successor();
            wait_for_predecessor();
            norm.normalise(x, eps);
        },
        norm, [](int, int, int) { return 0; },
        [&](int tile, int i, int token, float a, float b, int) {
            before.pass(tile, i, heads, a * norm.scale, b * norm.scale, [&](const Tile& t, float first, float second) {
                if (token >= norm.live) return;
                const int dim = t.pair + i;
                if (t.kind != 2) {
                    const float2 by = turn[token * half + dim];
                    const float rotated = first * by.y - second * by.x;
                    second = second * by.y + first * by.x;
                    first = rotated;
                }
                uint16_t* to;
                if (t.kind == 0) {
                    to = q + (static_cast<int64_t>(token) * heads.q + t.head) * heads.dim;
                } else {
                    const int64_t head =
                        static_cast<int64_t>((t.kind - 1) * heads.kv + t.head) * pages.page_tokens * heads.dim;
                    to = pages.cache + place[token] + head;
                }
                to[dim] = narrow(first);
                to[dim + half] = narrow(second);
            });
        });
}

// The columns, with as many live ones as there are tokens, and the int64 [capacity] behind them.
__device__ NormColumns columns_of(const int32_t* counts, unsigned char* shared, int width, int capacity,
                                  int64_t*& place) {
    NormColumns norm = norm_columns(shared, width, capacity);
    norm.live = min(counts[ATLAS_TOKENS], capacity);
    place = reinterpret_cast<int64_t*>(norm.partial + GEMV_WARPS * MAX_NORM_COLUMNS);
    return norm;
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
    int64_t* place;
    const NormColumns norm = columns_of(counts, shared, width, capacity, place);
    const Pages pages{positions, token_row, row_slot, slots, cache, page_tokens, slot_stride, table_offset};
    norm_qkv(shared, norm, x, norm_weight, norm_type, {q_weight, k_weight, v_weight}, inv_freq, pages, q,
             {q_heads, kv_heads, head_dim}, capacity, eps, rope_scale, place, AsTheyAre{{head_dim / 16}});
}

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
norm_qkv_bias_rope_append(const int32_t* counts, const float* x, const void* norm_weight, const uint16_t* q_weight,
                          const uint16_t* k_weight, const uint16_t* v_weight, const void* q_bias, const void* k_bias,
                          const void* v_bias, const float* inv_freq, const int32_t* positions,
                          const int32_t* token_row, const int32_t* row_slot, const int32_t* slots, uint16_t* cache,
                          uint16_t* q, int32_t width, int32_t q_heads, int32_t kv_heads, int32_t head_dim,
                          int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t capacity, float eps,
                          float rope_scale, int32_t norm_type, int32_t q_type, int32_t k_type, int32_t v_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    int64_t* place;
    const NormColumns norm = columns_of(counts, shared, width, capacity, place);
    const Pages pages{positions, token_row, row_slot, slots, cache, page_tokens, slot_stride, table_offset};
    norm_qkv(shared, norm, x, norm_weight, norm_type, {q_weight, k_weight, v_weight}, inv_freq, pages, q,
             {q_heads, kv_heads, head_dim}, capacity, eps, rope_scale, place,
             Biased{{head_dim / 16}, q_bias, k_bias, v_bias, q_type, k_type, v_type});
}

// Clusters of as many blocks as divide head_dim / 16, up to eight.
extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2)
norm_qkv_heads_rope_append(const int32_t* counts, const float* x, const void* norm_weight, const uint16_t* q_weight,
                           const uint16_t* k_weight, const uint16_t* v_weight, const void* q_norm, const void* k_norm,
                           const float* inv_freq, const int32_t* positions, const int32_t* token_row,
                           const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q, int32_t width,
                           int32_t q_heads, int32_t kv_heads, int32_t head_dim, int32_t page_tokens,
                           int32_t slot_stride, int32_t table_offset, int32_t capacity, float eps, float head_eps,
                           float rope_scale, int32_t norm_type, int32_t q_type, int32_t k_type) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ HeadSums sums;
    int64_t* place;
    const NormColumns norm = columns_of(counts, shared, width, capacity, place);
    const Pages pages{positions, token_row, row_slot, slots, cache, page_tokens, slot_stride, table_offset};
    norm_qkv(shared, norm, x, norm_weight, norm_type, {q_weight, k_weight, v_weight}, inv_freq, pages, q,
             {q_heads, kv_heads, head_dim}, capacity, eps, rope_scale, place,
             Normed{q_norm, k_norm, q_type, k_type, head_dim / 16 / static_cast<int>(cluster_blocks()), head_eps, &sums});
}
