// What qkv_tma.cu does, for thousands of tokens: a tile's sums go, narrowed, through shared memory to three warps that norm, turn and
// store them while the others multiply for the next tile; with the last tile, all do it.
#define STAGES 3
#include "prompt_product.cuh"
#include "turns.cuh"

using namespace atlas;

namespace {

constexpr int HEAD_DIM = 128, HEADS = PROMPT_ROWS / HEAD_DIM, PIECES = HEAD_DIM / 8;
constexpr int LANES = 8, AT_ONCE = WARP / LANES;         // of a token's head, 8 pairs each; tokens of a warp
constexpr int SUM_BYTES = PROMPT_TOKENS * HEAD_DIM * 2;  // of a head
constexpr int ENDING_WARPS = 3, ALL_WARPS = ENDING_WARPS + CONSUMERS * WARPGROUP / WARP;
static_assert(PROMPT_ROWS % HEAD_DIM == 0, "whole heads");
enum Barrier { FULL = 1, EMPTY, ENDED };  // of the sums; the last is among the ending warps

// Of a token: its position, its page, and what completes its norm.
struct Place {
    int position, page;
    float factor;
};

// 1 / sqrt(mean(x²) + eps) of a token by its sums of squares (norm_factors); 1 where there are none.
__device__ inline float norm_factor(const float* squares, int parts, int token, int width, float eps) {
    if (squares == nullptr) return 1.0f;
    const float* of = squares + static_cast<int64_t>(token) * parts;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) sum += __ldcg(of + part);
    return rsqrtf(__fdividef(sum, static_cast<float>(width)) + eps);
}

// In shared memory beside the ring: what turns pairs (turns.cuh), weights of the norms of query and key heads, and the places of a
// tile's tokens. Lane `l` of a row has pairs 8 l to 8 l + 7, in pieces that no two lanes find in one bank.
struct Constants {
    float4 turns[4][LANES];
    float4 norms[2][4][LANES];
    Place places[PROMPT_TOKENS];
};

__device__ inline void store_matrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ inline uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// A warp's sums of 16 tokens, narrowed. A row's pieces are swizzled as those of panels.
__device__ void stage(const Sums& acc, uint32_t sums) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane % 16;
    const uint32_t mine = sums + row * HEAD_DIM * 2 + ((lane / 16) ^ (lane & 7)) * 16;
#pragma unroll
    for (int j = 0; j < PROMPT_ROWS / 8; j += 2) {
        const uint32_t to = (mine ^ (j % PIECES * 16)) + j / PIECES * SUM_BYTES;
        store_matrix(to, pack(acc[j][0], acc[j][1]), pack(acc[j][2], acc[j][3]), pack(acc[j + 1][0], acc[j + 1][1]),
                     pack(acc[j + 1][2], acc[j + 1][3]));
    }
}

// 8 sums a lane times `factor`.
__device__ inline void scale(uint4& sums, float factor) {
    float a[8];
    unpack(sums, a);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] *= factor;
    sums = pack8(a);
}

// One token's sums of a head, times `by`: 8 low ones and 8 high ones a lane.
template <bool NORMED>
__device__ void turn(uint4& low, uint4& high, const float (&sine)[8], const float (&cosine)[8], const float4 (&norm)[4], float by,
                     float eps) {
    float a[8], b[8];
    unpack(low, a);
    unpack(high, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        a[i] *= by;
        b[i] *= by;
    }
    if constexpr (NORMED) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) square += a[i] * a[i] + b[i] * b[i];
#pragma unroll
        for (int apart = 1; apart < LANES; apart *= 2) square += __shfl_xor_sync(~0u, square, apart);
        const float factor = rsqrtf(square / HEAD_DIM + eps);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 low_by = norm[i / 4], high_by = norm[2 + i / 4];
            a[i] *= factor * low_by.x;
            a[i + 1] *= factor * low_by.y;
            a[i + 2] *= factor * low_by.z;
            a[i + 3] *= factor * low_by.w;
            b[i] *= factor * high_by.x;
            b[i + 1] *= factor * high_by.y;
            b[i + 2] *= factor * high_by.z;
            b[i + 3] *= factor * high_by.w;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float turned = a[i] * cosine[i] - b[i] * sine[i];
        b[i] = b[i] * cosine[i] + a[i] * sine[i];
        a[i] = turned;
    }
    low = pack8(a);
    high = pack8(b);
}

}  // namespace

// Parameters are those of qkv_tma.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1)
qkv_staged(const int32_t* counts, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap q_weight,
        const __grid_constant__ CUtensorMap k_weight, const __grid_constant__ CUtensorMap v_weight, const void* q_norm,
        const void* k_norm, const float* squares, const float* inv_freq, const int32_t* positions, const int32_t* token_row,
        const int32_t* row_slot, const int32_t* slots, uint16_t* cache, uint16_t* q, int32_t width, int32_t q_heads,
        int32_t kv_heads, int32_t page_tokens, int32_t slot_stride, int32_t table_offset, int32_t q_type, int32_t k_type,
        int32_t parts, float rope_scale, float norm_eps, float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Constants known;
    admit_successor();
    // Whoever reads it has met those who write it here, for the sums: nobody need wait before the copies.
    if (const int i = threadIdx.x; i < HEAD_DIM) {
        const int pair = i % (HEAD_DIM / 2), lane = pair / 8, inside = pair % 8;
        if (i < HEAD_DIM / 2) reinterpret_cast<float2*>(&known.turns[inside / 2][lane])[inside % 2] = turns_of(inv_freq[i]);
        if (q_norm != nullptr) {
            const int piece = i / (HEAD_DIM / 2) * 2 + inside / 4;
            reinterpret_cast<float*>(&known.norms[0][piece][lane])[inside % 4] = load_element(q_norm, i, q_type);
            reinterpret_cast<float*>(&known.norms[1][piece][lane])[inside % 4] = load_element(k_norm, i, k_type);
        }
    }
    const int live = counts[ATLAS_TOKENS];
    const int q_columns = (q_heads + HEADS - 1) / HEADS, kv_columns = (kv_heads + HEADS - 1) / HEADS;
    const uint32_t sums = shared_address(shared) + STAGES * STAGE_BYTES;
    // 0 queries, 1 keys, 2 values; `column` becomes that of the kind.
    auto kind_of = [&](int& column) {
        if (column < q_columns) return 0;
        column -= q_columns;
        if (column < kv_columns) return 1;
        column -= kv_columns;
        return 2;
    };
    // A tile's rows that one of `workers` warps ends; `token` is the first of the tile.
    auto end = [&](int token, int column, int worker, int workers) {
        const int kind = kind_of(column), first = column * HEADS, heads = min(HEADS, (kind == 0 ? q_heads : kv_heads) - first);
        const int lane = threadIdx.x % LANES, inside = threadIdx.x % WARP / LANES;
        const int64_t next = kind == 0 ? HEAD_DIM : static_cast<int64_t>(page_tokens) * HEAD_DIM;
        // In registers: products leave little of shared memory's bandwidth.
        float4 turns[4], norm[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            turns[i] = known.turns[i][lane];
            norm[i] = known.norms[min(kind, 1)][i][lane];
        }
        for (int row = worker * AT_ONCE + inside; row < PROMPT_TOKENS; row += workers * AT_ONCE) {
            const Place place = known.places[row];
            const bool lives = token + row < live;
            float sine[8], cosine[8];
            if (kind < 2) {
                const float position = static_cast<float>(place.position);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    rotation_of_turns(position, make_float2(turns[i].x, turns[i].y), rope_scale, sine[2 * i], cosine[2 * i]);
                    rotation_of_turns(position, make_float2(turns[i].z, turns[i].w), rope_scale, sine[2 * i + 1], cosine[2 * i + 1]);
                }
            }
            uint16_t* to = kind == 0 ? q + (static_cast<int64_t>(token + row) * q_heads + first) * HEAD_DIM
                                     : cache + page_element(place.page, kind - 1, first, place.position % page_tokens, kv_heads,
                                                            page_tokens, HEAD_DIM);
            to += lane * 8;
            const uint32_t mine = sums + row * HEAD_DIM * 2 + (lane ^ (row & 7)) * 16;
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                if (head >= heads) break;
                uint4 low = load_shared(mine + head * SUM_BYTES), high = load_shared((mine ^ HEAD_DIM) + head * SUM_BYTES);
                if (kind < 2 && q_norm != nullptr) {
                    turn<true>(low, high, sine, cosine, norm, place.factor, eps);
                } else if (kind < 2) {
                    turn<false>(low, high, sine, cosine, norm, place.factor, eps);
                } else if (squares != nullptr) {
                    scale(low, place.factor);
                    scale(high, place.factor);
                }
                if (lives) {
                    *reinterpret_cast<uint4*>(to + head * next) = low;
                    *reinterpret_cast<uint4*>(to + head * next + HEAD_DIM / 2) = high;
                }
            }
        }
    };
    auto ending = [&, begun = false](const Tile& tile) mutable {
        const int thread = static_cast<int>(threadIdx.x) - (CONSUMERS * WARPGROUP + WARP);
        if (thread < 0) {
            named_wait(FULL, ALL_WARPS * WARP);
            return end(tile.token, tile.column, ENDING_WARPS + threadIdx.x / WARP, ALL_WARPS);
        }
        for (int row = thread; row < PROMPT_TOKENS; row += ENDING_WARPS * WARP) {
            const int token = min(tile.token + row, live - 1), position = positions[token];
            const int64_t slot = static_cast<int64_t>(row_slot[token_row[token]]) * slot_stride;
            const float factor = norm_factor(squares, parts, token, width, norm_eps);
            known.places[row] = Place{position, slots[slot + table_offset + position / page_tokens], factor};
        }
        if (!begun) named_arrive(EMPTY, ALL_WARPS * WARP);
        begun = true;
        named_wait(FULL, ALL_WARPS * WARP);
        end(tile.token, tile.column, thread / WARP, tile.last ? ALL_WARPS : ENDING_WARPS);
        if (tile.last) return;
        named_wait(ENDED, ENDING_WARPS * WARP);
        named_arrive(EMPTY, ALL_WARPS * WARP);
    };
    prompt_product(
        &x, live, q_columns + 2 * kv_columns, width, shared,
        [&](uint32_t to, int column, int depth, int peer, uint32_t barrier) {
            const int kind = kind_of(column);
            const CUtensorMap* map = kind == 0 ? &q_weight : kind == 1 ? &k_weight : &v_weight;
            bring_rows(to, map, depth, column * PROMPT_ROWS, peer, barrier);
        },
        [](const Tile&) { return 0; },
        [&](Sums& acc, const Tile& tile, int) {
            named_wait(EMPTY, ALL_WARPS * WARP);
            stage(acc, sums);
            if (!tile.last) named_arrive(FULL, ALL_WARPS * WARP);
        },
        ending);
}
