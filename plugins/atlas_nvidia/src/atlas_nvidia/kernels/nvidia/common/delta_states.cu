// The gated delta rule in chunks of 64 tokens, second part (delta_prepare.cu is the first): walks along the chunks of a
// row with the state S. With c, T and P as there: V = T (v - exp(c) K S), Y = scale exp(c) Q S + P V, and
// S ← exp(c_63) S + Kᵀ (exp(c_63 - c) V). Nothing mixes values, so four blocks share out those of a head.
//
// The state lies transposed in registers, values by keys: sums of one product are the left matrix of the next, and pass
// between warps as they lie in registers. The first half of the warps make the new state: each has 16 values, and half
// the keys of the state or half the tokens of a product. The others fetch what later chunks need, and make the results.
#include "delta_chunks.cuh"

using namespace atlas;

namespace {

constexpr int SLICES = 4, VALUES = CHUNK_DIM / SLICES, PARTS = VALUES / 16, VALUE_BYTES = CHUNK * VALUES * 2;
constexpr int HALF_THREADS = PARTS * 2 * WARP, THREADS = 2 * HALF_THREADS;
// Chunks under way; more than one where a block may have 227 KB (implementations/delta.py knows these sizes too).
#if __CUDA_ARCH__ >= 1000
constexpr int STAGES = 1;
#else
constexpr int STAGES = 2;
#endif
constexpr int DECAY_BYTES = 2 * CHUNK * 4;
constexpr int STAGE_BYTES = 2 * KEY_BYTES + 2 * TILE_BYTES + VALUE_BYTES + DECAY_BYTES;
constexpr int GIVEN = 8 + 3 * 4;  // left matrices of 16 that warps with the same values give one another

// Barriers between the warps that have the same 16 values; 0 is that of the block.
enum Barrier { BETWEEN_STATES = 1, STATE_GIVEN = 1 + PARTS, VALUES_GIVEN = 1 + 2 * PARTS };
__device__ void wait_at(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ void tell(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ void store_matrix_transposed(uint32_t address, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// Half of the four blocks of 16 tokens: 0 and 3, or 1 and 2, so that triangles are shared out evenly.
__device__ int block_of(int half, int index) { return index == 0 ? half : 3 - half; }

// sums[16 x 8], twice, += a[16 x 16] of 16 rows b.
__device__ void times(float (&sums)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    mma(sums[0], a[0], a[1], a[2], a[3], b[0], b[1]);
    mma(sums[1], a[0], a[1], a[2], a[3], b[2], b[3]);
}

// Sums as the left matrix of the next product.
__device__ void as_left(uint32_t (&a)[4], const float (&sums)[2][4]) {
    a[0] = pack(sums[0][0], sums[0][1]);
    a[1] = pack(sums[0][2], sums[0][3]);
    a[2] = pack(sums[1][0], sums[1][1]);
    a[3] = pack(sums[1][2], sums[1][3]);
}

__device__ void give(uint4* to, const uint32_t (&a)[4]) { *to = make_uint4(a[0], a[1], a[2], a[3]); }
__device__ void take(uint32_t (&a)[4], const uint4* from) {
    const uint4 v = *from;
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
}

// Columns of sums, which are tokens, times what stands for them in `by`, which begins with the block's first.
__device__ void scale_columns(float (&sums)[2][4], const float* by, float sign) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float2 v = *reinterpret_cast<const float2*>(by + n * 8 + threadIdx.x % 4 * 2);
        sums[n][0] *= sign * v.x;
        sums[n][1] *= sign * v.y;
        sums[n][2] *= sign * v.x;
        sums[n][3] *= sign * v.y;
    }
}

// sums[block] = state[16 x 128] · the 64 rows' block of keys or queries, for two blocks.
__device__ void times_rows(float (&sums)[2][2][4], const uint32_t (&state)[8][4], uint32_t rows, int half) {
    const int lane = threadIdx.x % WARP, row = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t b[4];
            load_matrix(b, piece_of_key(rows, block_of(half, i) * 16 + row, 2 * k + lane / 8 % 2));
            times(sums[i], state[k], b);
        }
    }
}

// sums[block] += left[16 x 64] · the block's rows of a lower triangle, for two blocks.
__device__ void times_triangle(float (&sums)[2][2][4], const uint32_t (&left)[4][4], uint32_t tile, int half) {
    const int lane = threadIdx.x % WARP, row = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = block_of(half, i);
            if (k > block) continue;
            uint32_t b[4];
            load_matrix(b, piece_of_tile(tile, block * 16 + row, 2 * k + lane / 8 % 2));
            times(sums[i], left[k], b);
        }
    }
}

}  // namespace

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
    const int chunks = chunks_of(row), lane = threadIdx.x % WARP;
    if (chunks == 0) return;
    const int part = threadIdx.x / WARP % PARTS, half = threadIdx.x / WARP / PARTS % 2;
    const bool results = threadIdx.x >= HALF_THREADS;
    int first_chunk = 0;
    for (int other = lane; other < static_cast<int>(blockIdx.z); other += WARP) {
        first_chunk += chunks_of(state_row(cu_q, row_slot, slots, slot_stride, other));
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        first_chunk += __shfl_xor_sync(~0u, first_chunk, distance);
    }
    const uint32_t base = shared_address(shared);
    uint4* given_state = reinterpret_cast<uint4*>(shared + STAGES * STAGE_BYTES) + part * GIVEN * WARP + lane;
    uint4 *given_errors = given_state + 8 * WARP, *given_values = given_errors + 4 * WARP;
    uint4* given_decayed = given_values + 4 * WARP;
    const int width = (2 * key_heads + value_heads) * CHUNK_DIM;

    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            const Span span = span_of(row, chunk);
            const uint32_t keys = base + chunk % STAGES * STAGE_BYTES, queries = keys + KEY_BYTES;
            const uint32_t inverse = queries + KEY_BYTES, products = inverse + TILE_BYTES;
            const uint32_t values = products + TILE_BYTES, decay = values + VALUE_BYTES;
            const int thread = threadIdx.x - HALF_THREADS;
            const uint16_t* from = qkv + static_cast<int64_t>(span.first) * width;
            const uint16_t* query = from + key_head * CHUNK_DIM + thread % 16 * 8;
#pragma unroll
            for (int i = 0; i < CHUNK * 16 / HALF_THREADS; ++i) {
                const int r = thread / 16 + i * (HALF_THREADS / 16);
                const bool valid = r < span.tokens;
                const uint16_t* source = query + static_cast<int64_t>(valid ? r : 0) * width;
                copy_async(piece_of_key(queries, r, thread % 16), source, valid);
                copy_async(piece_of_key(keys, r, thread % 16), source + key_heads * CHUNK_DIM, valid);
            }
            const int64_t place = static_cast<int64_t>(first_chunk + chunk) * value_heads + head;
            const uint16_t* tile = tiles + place * 2 * TILE + thread * 8;
#pragma unroll
            for (int i = 0; i < CHUNK * 8 / HALF_THREADS; ++i) {
                const int r = thread / 8 + i * (HALF_THREADS / 8);
                // What lies right of the diagonal's blocks was not written and is not read.
                if (thread % 8 / 2 > r / 16) continue;
                copy_async(piece_of_tile(inverse, r, thread % 8), tile + i * HALF_THREADS * 8, true);
                copy_async(piece_of_tile(products, r, thread % 8), tile + TILE + i * HALF_THREADS * 8, true);
            }
            const uint16_t* value = from + 2 * key_heads * CHUNK_DIM + head * CHUNK_DIM + slice * VALUES;
            constexpr int PIECES = VALUES / 8;
#pragma unroll
            for (int i = 0; i < CHUNK * PIECES / HALF_THREADS; ++i) {
                const int r = thread / PIECES + i * (HALF_THREADS / PIECES);
                const bool valid = r < span.tokens;
                const uint16_t* source = value + static_cast<int64_t>(valid ? r : 0) * width + thread % PIECES * 8;
                copy_async(piece_of_value(values, r, thread % PIECES), source, valid);
            }
            if (thread < DECAY_BYTES / 16) copy_async(decay + thread * 16, decays + place * 2 * CHUNK + thread * 4, true);
        }
        commit_copies();
    };

    // The state: value lane / 4 (and 8 more) of 16, keys 64 half + 8 n + 2 (lane % 4) and the next.
    float s[4][2][4];
    const int64_t size = static_cast<int64_t>(value_heads) * CHUNK_DIM * CHUNK_DIM;
    const int64_t own = static_cast<int64_t>(head) * CHUNK_DIM * CHUNK_DIM + slice * VALUES + part * 16 + lane / 4 +
                        (half * 64 + lane % 4 * 2) * CHUNK_DIM;
    if (!results) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int64_t from = row.in * size + own + (8 * n + e % 2) * CHUNK_DIM + e / 2 * 8;
                s[n / 2][n % 2][e] = row.fresh() ? 0.0f : state[from];
            }
        }
    } else {
        for (int chunk = 0; chunk < STAGES - 1; ++chunk) fetch(chunk);
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (STAGES == 1) {
            __syncthreads();
            if (results) fetch(chunk);
        }
        if (results) wait_copies<STAGES == 1 ? 0 : STAGES - 2>();
        __syncthreads();
        const uint32_t keys = base + chunk % STAGES * STAGE_BYTES, queries = keys + KEY_BYTES;
        const uint32_t inverse = queries + KEY_BYTES, products = inverse + TILE_BYTES, values = products + TILE_BYTES;
        const float* decay = reinterpret_cast<const float*>(shared + (values - base) + VALUE_BYTES);
        // Values [token][value] of a block of tokens as sums lie: the same address for reading and for writing.
        auto value_matrix = [&](int block) {
            return piece_of_value(values, block * 16 + lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
        };
        float sums[2][2][4] = {};
        uint32_t left[4][4];
        if (results) {
            if (STAGES > 1) fetch(chunk + STAGES - 1);
            {
                uint32_t old[8][4];
                wait_at(STATE_GIVEN + part, 128);
#pragma unroll
                for (int k = 0; k < 8; ++k) take(old[k], given_state + k * WARP);
                times_rows(sums, old, queries, half);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) scale_columns(sums[i], decay + block_of(half, i) * 16, scale);
            wait_at(VALUES_GIVEN + part, 128);
#pragma unroll
            for (int k = 0; k < 4; ++k) take(left[k], given_values + k * WARP);
            times_triangle(sums, left, products, half);
            const Span span = span_of(row, chunk);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int block = block_of(half, i), token = block * 16 + lane / 2, index = 2 * part + lane % 2;
                as_left(left[0], sums[i]);
                __syncwarp();
                store_matrix_transposed(value_matrix(block), left[0]);
                __syncwarp();
                if (token >= span.tokens) continue;
                const int64_t vector = static_cast<int64_t>(span.first + token) * value_heads + head;
                *reinterpret_cast<uint4*>(y + vector * CHUNK_DIM + slice * VALUES + index * 8) =
                    load_shared(piece_of_value(values, token, index));
            }
            continue;
        }
        {
            uint32_t old[8][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                as_left(left[k], s[k]);
                give(given_state + (4 * half + k) * WARP, left[k]);
            }
            tell(STATE_GIVEN + part, 128);
            wait_at(BETWEEN_STATES + part, 64);
#pragma unroll
            for (int k = 0; k < 8; ++k) take(old[k], given_state + k * WARP);
            times_rows(sums, old, keys, half);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = block_of(half, i);
            scale_columns(sums[i], decay + block * 16, -1.0f);
            uint32_t v[4];
            load_matrix_transposed(v, value_matrix(block));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sums[i][e / 2][e % 2 * 2] += widen(static_cast<uint16_t>(v[e]));
                sums[i][e / 2][e % 2 * 2 + 1] += widen(static_cast<uint16_t>(v[e] >> 16));
            }
            as_left(v, sums[i]);
            give(given_errors + block * WARP, v);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][n][e] = 0.0f;
            }
        }
        wait_at(BETWEEN_STATES + part, 64);
#pragma unroll
        for (int k = 0; k < 4; ++k) take(left[k], given_errors + k * WARP);
        times_triangle(sums, left, inverse, half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = block_of(half, i);
            uint32_t v[4];
            as_left(v, sums[i]);
            give(given_values + block * WARP, v);
            scale_columns(sums[i], decay + CHUNK + block * 16, 1.0f);
            as_left(v, sums[i]);
            give(given_decayed + block * WARP, v);
        }
        tell(VALUES_GIVEN + part, 128);
        const float kept = decay[CHUNK - 1];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n / 2][n % 2][e] *= kept;
        }
        wait_at(BETWEEN_STATES + part, 64);
#pragma unroll
        for (int k = 0; k < 4; ++k) take(left[k], given_decayed + k * WARP);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                uint32_t key[4];
                const int token = k * 16 + lane / 8 % 2 * 8 + lane % 8;
                load_matrix_transposed(key, piece_of_key(keys, token, 8 * half + 2 * d + lane / 16));
                times(s[d], left[k], key);
            }
        }
    }
    if (results) return;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            state[row.out * size + own + (8 * n + e % 2) * CHUNK_DIM + e / 2 * 8] = s[n / 2][n % 2][e];
        }
    }
}
