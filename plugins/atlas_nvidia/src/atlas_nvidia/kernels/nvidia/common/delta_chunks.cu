// The gated delta rule in chunks of 64 tokens (the WY form of Yang et al., 2024, "Gated Delta Networks"), for heads of
// 128, on mma.sync. Chunks end at absolute multiples of 64, so that pieces of a prompt meet the same ones.
//
// With D_ij = exp(c_i - c_j), c the running sum of a chunk's log decays, and A_ij = β_i (k_i·k_j) D_ij for j < i:
// delta_prepare makes T = (I + A)⁻¹ diag(β) and P_ij = scale (q_i·k_j) D_ij (j ≤ i) of every chunk and value head.
// delta_states walks along the chunks of a row with the state S: V = T (v - exp(c) K S), Y = scale exp(c) Q S + P V,
// S ← exp(c_63) S + Kᵀ (exp(c_63 - c) V). Nothing there mixes values, so blocks share out those of a head.
#include "recurrent.cuh"

using namespace atlas;

namespace {

constexpr int CHUNK = 64, DIM = 128, THREADS = 128, SLICES = 4, VALUES = DIM / SLICES;
constexpr int KEY_BYTES = CHUNK * DIM * 2, TILE = CHUNK * CHUNK, TILE_BYTES = TILE * 2, VALUE_BYTES = CHUNK * VALUES * 2;
constexpr int SYSTEM_STRIDE = CHUNK + 4;  // floats: rows of A stay aligned to 16 bytes and apart in the banks
// Room for two stages is where a block may have 227 KB (implementations/recurrent.py knows these sizes too).
#if __CUDA_ARCH__ >= 1000
constexpr int STAGES = 1;
#else
constexpr int STAGES = 2;
#endif
constexpr int STAGE_BYTES = 2 * KEY_BYTES + 2 * TILE_BYTES + VALUE_BYTES + CHUNK * 4;

// Where 8 elements lie in tiles of rows of 256, 128 and 64 bytes: neither rows nor columns of pieces share banks.
__device__ uint32_t piece_of_key(uint32_t tile, int row, int index) {
    return tile + row * 256 + ((index ^ (row & 7)) * 16);
}
__device__ uint32_t piece_of_tile(uint32_t tile, int row, int index) {
    return tile + row * 128 + ((index ^ (row & 7)) * 16);
}
__device__ uint32_t piece_of_value(uint32_t tile, int row, int index) {
    return tile + row * 64 + ((index ^ (row >> 1 & 3)) * 16);
}

__device__ int chunks_of(const StateRow& row) {
    return row.tokens == 0 ? 0 : (row.position + row.tokens - 1) / CHUNK - row.position / CHUNK + 1;
}

// Chunk `part` of a row: its first token of the step, and how many.
struct Span {
    int first, tokens;
};
__device__ Span span_of(const StateRow& row, int part) {
    const int block = (row.position / CHUNK + part) * CHUNK - row.position;
    const int start = max(block, 0);
    return {row.first + start, min(block + CHUNK, row.tokens) - start};
}

// Column `lane` of the inverse of the unit lower triangle whose rows begin at a[FIRST][FIRST], by forward substitution.
template <int SIZE>
__device__ void invert(const float* a, int lane, float (&t)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        float sum[4] = {i == lane ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int l = 0; l < i; l += 4) {
            const float4 row = *reinterpret_cast<const float4*>(a + i * SYSTEM_STRIDE + l);
            sum[0] -= row.x * t[l];
            if (l + 1 < i) sum[1] -= row.y * t[l + 1];
            if (l + 2 < i) sum[2] -= row.z * t[l + 2];
            if (l + 3 < i) sum[3] -= row.w * t[l + 3];
        }
        t[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
}

template <int SIZE>
__device__ void put_inverse(const float* a, const float* beta, uint16_t* to) {
    const int lane = threadIdx.x % WARP;
    float t[SIZE];
    invert<SIZE>(a, lane, t);
#pragma unroll
    for (int i = 0; i < SIZE; ++i) to[i * CHUNK + lane] = narrow(t[i] * beta[lane]);
}

__device__ void barrier_sync(int id) { asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory"); }
__device__ void barrier_arrive(int id) { asm volatile("bar.arrive %0, 64;" ::"r"(id) : "memory"); }

__device__ void store_matrix_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// sums[16 x 64] += a[16 x 128] rowsᵀ, with 64 rows of 128.
__device__ void times_rows(float (&sums)[8][4], const uint32_t (&a)[8][4], uint32_t rows) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t b[4];
            load_matrix(b, piece_of_key(rows, j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma(sums[2 * j], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
            mma(sums[2 * j + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }
    }
}

// sums[16 x 64] += a[16 x 64] tileᵀ, with a lower triangle of 64 x 64.
__device__ void times_triangle(float (&sums)[8][4], const uint32_t (&a)[4][4], uint32_t tile) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int k = 0; k <= i; ++k) {
            uint32_t b[4];
            load_matrix(b, piece_of_tile(tile, i * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma(sums[2 * i], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
            mma(sums[2 * i + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
        }
    }
}

// Sums as the left matrix of the next product.
template <int COUNT>
__device__ void as_left(uint32_t (&a)[COUNT][4], const float (&sums)[2 * COUNT][4]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        a[k][0] = pack(sums[2 * k][0], sums[2 * k][1]);
        a[k][1] = pack(sums[2 * k][2], sums[2 * k][3]);
        a[k][2] = pack(sums[2 * k + 1][0], sums[2 * k + 1][1]);
        a[k][3] = pack(sums[2 * k + 1][2], sums[2 * k + 1][3]);
    }
}

// Left matrices pass from one warp to another as they lie in registers.
template <int COUNT>
__device__ void give(uint4* to, const uint32_t (&a)[COUNT][4]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) to[k * WARP] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
}
template <int COUNT>
__device__ void take(const uint4* from, uint32_t (&a)[COUNT][4]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const uint4 v = from[k * WARP];
        a[k][0] = v.x;
        a[k][1] = v.y;
        a[k][2] = v.z;
        a[k][3] = v.w;
    }
}

// Columns of sums, those of tokens 8 n + 2 (lane % 4) and the next, times factor(log decay of the token).
template <class Factor>
__device__ void scale_columns(float (&sums)[8][4], const float* decay, Factor factor) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 c = *reinterpret_cast<const float2*>(decay + n * 8 + threadIdx.x % 4 * 2);
        const float first = factor(c.x), second = factor(c.y);
        sums[n][0] *= first;
        sums[n][1] *= second;
        sums[n][2] *= first;
        sums[n][3] *= second;
    }
}

}  // namespace

// One block for each chunk and value head. tiles: [chunks][value_heads][2][64][64], T and P; decays [chunks][value_heads][64]:
// running sums, in base 2. What lies right of the diagonal's blocks of 16 is not written.
extern "C" __global__ void __launch_bounds__(THREADS)
delta_prepare(const int32_t* counts, const uint16_t* qkv, const uint16_t* a, const uint16_t* b, const void* a_log,
              const void* dt_bias, const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots, uint16_t* tiles,
              float* decays, int32_t key_heads, int32_t value_heads, int32_t slot_stride, float scale,
              int32_t a_log_type, int32_t dt_bias_type) {
    extern __shared__ __align__(128) unsigned char shared[];
    admit_successor();
    wait_for_predecessor();
    const RowPart at = locate(blockIdx.x, counts[ATLAS_SEQUENCES], [&](int row) {
        return chunks_of(state_row(cu_q, row_slot, slots, slot_stride, row));
    });
    if (!at.found) return;
    const Span span = span_of(state_row(cu_q, row_slot, slots, slot_stride, at.row), at.part);
    const int head = blockIdx.y, key_head = head / (value_heads / key_heads);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t keys = shared_address(shared), queries = keys + KEY_BYTES;
    float* system = reinterpret_cast<float*>(shared + 2 * KEY_BYTES);  // A
    float* decay = system + CHUNK * SYSTEM_STRIDE;                     // [64]
    float* beta = decay + CHUNK;                                       // [64]
    const int width = (2 * key_heads + value_heads) * DIM;
    for (int e = threadIdx.x; e < CHUNK * 16; e += THREADS) {
        const int row = e / 16, index = e % 16;
        const bool valid = row < span.tokens;
        const uint16_t* from = qkv + static_cast<int64_t>(span.first + (valid ? row : 0)) * width + key_head * DIM + index * 8;
        copy_async(piece_of_key(queries, row, index), from, valid);
        copy_async(piece_of_key(keys, row, index), from + key_heads * DIM, valid);
    }
    commit_copies();
    const int64_t place = static_cast<int64_t>(blockIdx.x) * value_heads + head;
    float log_decay = 0.0f, gate = 0.0f;
    if (threadIdx.x < span.tokens) {
        const int64_t from = static_cast<int64_t>(span.first + threadIdx.x) * value_heads + head;
        log_decay = decay_log2(widen(a[from]), load_element(a_log, head, a_log_type),
                               load_element(dt_bias, head, dt_bias_type));
        gate = sigmoid(widen(b[from]));
    }
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const float before = __shfl_up_sync(~0u, log_decay, distance);
        if (lane >= distance) log_decay += before;
    }
    if (threadIdx.x < CHUNK) {
        decay[threadIdx.x] = log_decay;
        beta[threadIdx.x] = gate;
    }
    __syncthreads();
    if (warp == 1) decay[threadIdx.x] = log_decay + decay[WARP - 1];
    wait_copies<0>();
    __syncthreads();
    if (threadIdx.x < CHUNK) decays[place * CHUNK + threadIdx.x] = decay[threadIdx.x];

    uint16_t *inverse = tiles + place * 2 * TILE, *products = inverse + TILE;
    float gram[8][4] = {}, cross[8][4] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        uint32_t key[4], query[4];
        load_matrix(key, piece_of_key(keys, 16 * warp + lane % 16, 2 * k + lane / 16));
        load_matrix(query, piece_of_key(queries, 16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j > warp) continue;
            uint32_t other[4];
            load_matrix(other, piece_of_key(keys, j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma(gram[2 * j], key[0], key[1], key[2], key[3], other[0], other[1]);
            mma(gram[2 * j + 1], key[0], key[1], key[2], key[3], other[2], other[3]);
            mma(cross[2 * j], query[0], query[1], query[2], query[3], other[0], other[1]);
            mma(cross[2 * j + 1], query[0], query[1], query[2], query[3], other[2], other[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        if (n / 2 > warp) continue;
        const int column = n * 8 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * warp + lane / 4 + 8 * half;
            float product[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float by = exp2f(fminf(decay[row] - decay[column + e], 0.0f));
                system[row * SYSTEM_STRIDE + column + e] = beta[row] * gram[n][2 * half + e] * by;
                product[e] = column + e <= row ? scale * cross[n][2 * half + e] * by : 0.0f;
            }
            *reinterpret_cast<uint32_t*>(products + row * CHUNK + column) = pack(product[0], product[1]);
        }
    }
    __syncthreads();
    // Right of the diagonal, columns of the first half meet rows of both, those of the second half of one.
    if (warp == 0) put_inverse<CHUNK>(system, beta, inverse);
    if (warp == 1) {
        put_inverse<CHUNK / 2>(system + CHUNK / 2 * (SYSTEM_STRIDE + 1), beta + CHUNK / 2,
                               inverse + CHUNK / 2 * (CHUNK + 1));
    }
}

// A block has 32 values of one head of one row. The state lies transposed in registers, values by keys: sums of one
// product are the left matrix of the next without passing through memory. Warps 0 and 1 have 16 values each and make
// the new state; warps 2 and 3 fetch what the next chunk needs and make the results of the same values.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
delta_states(const int32_t* counts, const uint16_t* qkv, const uint16_t* tiles, const float* decays,
             const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots, float* state, uint16_t* y,
             int32_t key_heads, int32_t value_heads, int32_t slot_stride, float scale) {
    extern __shared__ __align__(128) unsigned char shared[];
    admit_successor();
    wait_for_predecessor();
    const int slice = blockIdx.x, head = blockIdx.y, key_head = head / (value_heads / key_heads);
    if (static_cast<int>(blockIdx.z) >= counts[ATLAS_SEQUENCES]) return;
    const StateRow row = state_row(cu_q, row_slot, slots, slot_stride, blockIdx.z);
    const int chunks = chunks_of(row), lane = threadIdx.x % WARP, part = threadIdx.x / WARP % 2;
    if (chunks == 0) return;
    const bool second = threadIdx.x >= THREADS / 2;
    int first_chunk = 0;
    for (int other = lane; other < static_cast<int>(blockIdx.z); other += WARP) {
        first_chunk += chunks_of(state_row(cu_q, row_slot, slots, slot_stride, other));
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        first_chunk += __shfl_xor_sync(~0u, first_chunk, distance);
    }
    const uint32_t base = shared_address(shared);
    uint4* given_state = reinterpret_cast<uint4*>(shared + STAGES * STAGE_BYTES) + part * 12 * WARP + lane;
    uint4* given_values = given_state + 8 * WARP;
    const int width = (2 * key_heads + value_heads) * DIM;

    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            const Span span = span_of(row, chunk);
            const uint32_t keys = base + chunk % STAGES * STAGE_BYTES, queries = keys + KEY_BYTES;
            const uint32_t inverse = queries + KEY_BYTES, products = inverse + TILE_BYTES;
            const uint32_t values = products + TILE_BYTES, decay = values + VALUE_BYTES;
            const int thread = threadIdx.x - THREADS / 2;
            const uint16_t* from = qkv + static_cast<int64_t>(span.first) * width;
            const uint16_t* query = from + key_head * DIM + thread % 16 * 8;
#pragma unroll 4
            for (int r = thread / 16; r < CHUNK; r += THREADS / 32) {
                const bool valid = r < span.tokens;
                const uint16_t* source = query + static_cast<int64_t>(valid ? r : 0) * width;
                copy_async(piece_of_key(queries, r, thread % 16), source, valid);
                copy_async(piece_of_key(keys, r, thread % 16), source + key_heads * DIM, valid);
            }
            const int64_t place = static_cast<int64_t>(first_chunk + chunk) * value_heads + head;
            const uint16_t* tile = tiles + place * 2 * TILE;
#pragma unroll
            for (int r = thread / 8; r < CHUNK; r += THREADS / 16) {
                // What lies right of the diagonal's blocks was not written and is not read.
                if (thread % 8 / 2 > r / 16) continue;
                copy_async(piece_of_tile(inverse, r, thread % 8), tile + r * CHUNK + thread % 8 * 8, true);
                copy_async(piece_of_tile(products, r, thread % 8), tile + TILE + r * CHUNK + thread % 8 * 8, true);
            }
            const uint16_t* value = from + 2 * key_heads * DIM + head * DIM + slice * VALUES + thread % 4 * 8;
#pragma unroll
            for (int r = thread / 4; r < CHUNK; r += THREADS / 8) {
                const bool valid = r < span.tokens;
                copy_async(piece_of_value(values, r, thread % 4), value + static_cast<int64_t>(valid ? r : 0) * width, valid);
            }
            if (thread < CHUNK / 4) copy_async(decay + thread * 16, decays + place * CHUNK + thread * 4, true);
        }
        commit_copies();
    };

    // The state: value lane / 4 (and 8 more) of this warp's 16, keys 8 n + 2 (lane % 4) and the next.
    float s[16][4];
    const int64_t size = static_cast<int64_t>(value_heads) * DIM * DIM;
    const int64_t own = static_cast<int64_t>(head) * DIM * DIM + slice * VALUES + part * 16 + lane / 4 + lane % 4 * 2 * DIM;
    if (!second) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                s[n][e] = row.fresh() ? 0.0f : state[row.in * size + own + (8 * n + e % 2) * DIM + e / 2 * 8];
            }
        }
    } else if (STAGES > 1) {
        fetch(0);
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (STAGES == 1) {
            __syncthreads();
            if (second) fetch(chunk);
        }
        if (second) wait_copies<0>();
        __syncthreads();
        const unsigned char* stage = shared + chunk % STAGES * STAGE_BYTES;
        const uint32_t keys = base + chunk % STAGES * STAGE_BYTES, queries = keys + KEY_BYTES;
        const uint32_t inverse = queries + KEY_BYTES, products = inverse + TILE_BYTES, values = products + TILE_BYTES;
        const float* decay = reinterpret_cast<const float*>(stage + 2 * KEY_BYTES + 2 * TILE_BYTES + VALUE_BYTES);
        // Values [token][value] of 16 tokens as sums lie: the same address for reading and for writing.
        auto value_matrix = [&](int j) {
            return piece_of_value(values, j * 16 + lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
        };
        if (second) {
            if (STAGES > 1) fetch(chunk + 1);
            float out[8][4] = {};
            {
                uint32_t left[8][4];
                barrier_sync(1 + part);
                take(given_state, left);
                times_rows(out, left, queries);
            }
            scale_columns(out, decay, [&](float c) { return scale * exp2f(c); });
            uint32_t left[4][4];
            barrier_sync(3 + part);
            take(given_values, left);
            times_triangle(out, left, products);
            as_left(left, out);
#pragma unroll
            for (int j = 0; j < 4; ++j) store_matrix_transposed(value_matrix(j), left[j][0], left[j][1], left[j][2], left[j][3]);
            __syncwarp();
            const Span span = span_of(row, chunk);
#pragma unroll
            for (int e = lane; e < CHUNK * 2; e += WARP) {
                const int token = e / 2, index = 2 * part + e % 2;
                if (token >= span.tokens) break;
                uint4 v;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                             : "r"(piece_of_value(values, token, index)) : "memory");
                const int64_t vector = static_cast<int64_t>(span.first + token) * value_heads + head;
                *reinterpret_cast<uint4*>(y + vector * DIM + slice * VALUES + index * 8) = v;
            }
            continue;
        }
        float change[8][4] = {};
        {
            uint32_t left[8][4];
            as_left(left, s);
            give(given_state, left);
            barrier_arrive(1 + part);
            times_rows(change, left, keys);
        }
        scale_columns(change, decay, [](float c) { return -exp2f(c); });
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t v[4];
            load_matrix_transposed(v, value_matrix(j));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float(&to)[4] = change[2 * j + e / 2];
                to[e % 2 * 2] += widen(static_cast<uint16_t>(v[e]));
                to[e % 2 * 2 + 1] += widen(static_cast<uint16_t>(v[e] >> 16));
            }
        }
        uint32_t left[4][4];
        as_left(left, change);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) change[n][e] = 0.0f;
        }
        times_triangle(change, left, inverse);
        as_left(left, change);
        give(given_values, left);
        barrier_arrive(3 + part);
        const float last = decay[CHUNK - 1];
        scale_columns(change, decay, [&](float c) { return exp2f(last - c); });
        as_left(left, change);
        const float kept = exp2f(last);
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= kept;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                uint32_t key[4];
                load_matrix_transposed(key, piece_of_key(keys, k * 16 + lane / 8 % 2 * 8 + lane % 8, 2 * d + lane / 16));
                mma(s[2 * d], left[k][0], left[k][1], left[k][2], left[k][3], key[0], key[1]);
                mma(s[2 * d + 1], left[k][0], left[k][1], left[k][2], left[k][3], key[2], key[3]);
            }
        }
    }
    if (second) return;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[row.out * size + own + (8 * n + e % 2) * DIM + e / 2 * 8] = s[n][e];
    }
}
