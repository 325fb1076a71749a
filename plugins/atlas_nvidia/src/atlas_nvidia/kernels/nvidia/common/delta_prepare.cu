// The gated delta rule in chunks of 64 tokens (the WY form of Yang et al., 2024, "Gated Delta Networks"), for heads of
// 128, on mma.sync: what chunks are by themselves, one block for each chunk and key head, whose value heads it takes in
// turn. Chunks end at absolute multiples of 64, so that pieces of a prompt meet the same ones.
//
// With D_ij = exp(c_i - c_j), c the running sum of a chunk's log decays, and A_ij = β_i (k_i·k_j) D_ij for j < i, it
// makes T = (I + A)⁻¹ diag(β) and P_ij = scale (q_i·k_j) D_ij for j ≤ i. delta_states.cu goes on from there.
#include "delta_chunks.cuh"

using namespace atlas;

namespace {

constexpr int THREADS = 128, BLOCK = 16, SYSTEM_STRIDE = CHUNK + 4;  // floats: rows of A stay aligned to 16 bytes

// to[ROWS x lanes] = -left[ROWS x SIZE] right[SIZE x lanes] in float32, or without the sign; rows of `left` are read by
// whole warps at once, a column of `right` by each lane.
template <int ROWS, int SIZE>
__device__ void product(float* to, const float* left, int left_stride, const float* right, float sign) {
    float sums[ROWS] = {};
#pragma unroll
    for (int l = 0; l < SIZE; l += 4) {
        float column[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) column[e] = right[(l + e) * CHUNK];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 row = *reinterpret_cast<const float4*>(left + r * left_stride + l);
            sums[r] += row.x * column[0] + row.y * column[1] + row.z * column[2] + row.w * column[3];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) to[r * CHUNK] = sign * sums[r];
}

// inverse [64][64] = (I + A)⁻¹ from A below the diagonal of system: blocks of 16 on the diagonal by substitution, then
// [X 0; Y Z]⁻¹ = [X⁻¹ 0; -Z⁻¹ Y X⁻¹ Z⁻¹] for blocks of 16 and of 32. What lies right of the blocks of 16 means nothing.
__device__ void invert(const float* system, float* inverse, float* between) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x < CHUNK) {
        const int column = threadIdx.x % BLOCK, first = threadIdx.x - column;
        const float* a = system + first * (SYSTEM_STRIDE + 1);
        float t[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            t[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < i; l += 4) {
                const float4 row = *reinterpret_cast<const float4*>(a + i * SYSTEM_STRIDE + l);
                t[i] -= row.x * t[l];
                if (l + 1 < i) t[i] -= row.y * t[l + 1];
                if (l + 2 < i) t[i] -= row.z * t[l + 2];
                if (l + 3 < i) t[i] -= row.w * t[l + 3];
            }
            inverse[(first + i) * CHUNK + threadIdx.x] = t[i];
        }
    }
    __syncthreads();
    {
        // Lanes 0 to 15 have the columns of the upper pair of blocks, the others those of the lower pair.
        const int first = lane / BLOCK * 2 * BLOCK, column = first + lane % BLOCK, row = first + BLOCK + warp * 4;
        product<4, BLOCK>(between + row * CHUNK + column, system + row * SYSTEM_STRIDE + first, SYSTEM_STRIDE,
                          inverse + first * CHUNK + column, 1.0f);
        __syncthreads();
        product<4, BLOCK>(inverse + row * CHUNK + column, inverse + row * CHUNK + first + BLOCK, CHUNK,
                          between + (first + BLOCK) * CHUNK + column, -1.0f);
    }
    __syncthreads();
    const int row = CHUNK / 2 + warp * 8;
    // Above its diagonal the left half of the inverse is not zero but unset: those products are not made.
    float* to = between + row * CHUNK + lane;
    const float* left = system + row * SYSTEM_STRIDE;
    float sums[8] = {};
    for (int l = 0; l < CHUNK / 2; l += 4) {
        float column[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) column[e] = lane / BLOCK <= l / BLOCK ? inverse[(l + e) * CHUNK + lane] : 0.0f;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const float4 a = *reinterpret_cast<const float4*>(left + r * SYSTEM_STRIDE + l);
            sums[r] += a.x * column[0] + a.y * column[1] + a.z * column[2] + a.w * column[3];
        }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) to[r * CHUNK] = sums[r];
    __syncthreads();
    // The same holds for the lower half, of which warps 0 and 1 have the upper rows.
    const float *lower = inverse + row * CHUNK + CHUNK / 2, *right = between + CHUNK / 2 * CHUNK + lane;
    if (warp < 2) product<8, BLOCK>(inverse + row * CHUNK + lane, lower, CHUNK, right, -1.0f);
    else product<8, 2 * BLOCK>(inverse + row * CHUNK + lane, lower, CHUNK, right, -1.0f);
    __syncthreads();
}

}  // namespace

// tiles: [chunks][value_heads][2][64][64], T and P; what lies right of the diagonal's blocks of 16 is not written.
// decays: [chunks][value_heads][2][64], exp(c) and exp(c_63 - c).
extern "C" __global__ void __launch_bounds__(THREADS, 3)
delta_prepare(const int32_t* counts, const uint16_t* qkv, const uint16_t* a, const uint16_t* b, const void* a_log,
              const void* dt_bias, const int32_t* cu_q, const int32_t* row_slot, const int32_t* slots, uint16_t* tiles,
              float* decays, int32_t key_heads, int32_t value_heads, int32_t slot_stride, int32_t capacity,
              float scale, int32_t a_log_type, int32_t dt_bias_type) {
    extern __shared__ __align__(128) unsigned char shared[];
    admit_successor();
    wait_for_predecessor();
    const RowPart at = locate(blockIdx.x, counts, cu_q, row_slot, slots, slot_stride, capacity, chunks_of);
    if (!at.found) return;
    const Span span = span_of(at.row, at.part);
    const int key_head = blockIdx.y, shared_by = value_heads / key_heads;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t keys = shared_address(shared), queries = keys + KEY_BYTES;
    float* system = reinterpret_cast<float*>(shared + 2 * KEY_BYTES);  // A
    float* decay = system + CHUNK * SYSTEM_STRIDE;                     // [64], base 2
    float* beta = decay + CHUNK;                                       // [64]
    const int width = (2 * key_heads + value_heads) * CHUNK_DIM;
#pragma unroll
    for (int i = 0; i < CHUNK * 16 / THREADS; ++i) {
        const int row = threadIdx.x / 16 + i * (THREADS / 16), index = threadIdx.x % 16;
        const bool valid = row < span.tokens;
        const int64_t token = span.first + (valid ? row : 0);
        const uint16_t* from = qkv + token * width + key_head * CHUNK_DIM + index * 8;
        copy_async(piece_of_key(queries, row, index), from, valid);
        copy_async(piece_of_key(keys, row, index), from + key_heads * CHUNK_DIM, valid);
    }
    commit_copies();
    const bool gated = threadIdx.x < span.tokens;
    const int64_t gate = static_cast<int64_t>(span.first + threadIdx.x) * value_heads + key_head * shared_by;
    float next_a = gated ? widen(a[gate]) : 0.0f, next_b = gated ? widen(b[gate]) : 0.0f;
    wait_copies<0>();
    __syncthreads();

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
    for (int i = 0; i < shared_by; ++i) {
        const int head = key_head * shared_by + i;
        const int64_t place = static_cast<int64_t>(blockIdx.x) * value_heads + head;
        float log_decay = 0.0f;
        if (gated) {
            log_decay = decay_log2(next_a, load_element(a_log, head, a_log_type), load_element(dt_bias, head, dt_bias_type));
        }
        const float own_beta = gated ? sigmoid(next_b) : 0.0f;
        if (gated && i + 1 < shared_by) {
            next_a = widen(a[gate + i + 1]);
            next_b = widen(b[gate + i + 1]);
        }
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const float before = __shfl_up_sync(~0u, log_decay, distance);
            if (lane >= distance) log_decay += before;
        }
        __syncthreads();  // keys, or what the last head left, are used up
        if (threadIdx.x < CHUNK) {
            decay[threadIdx.x] = log_decay;
            beta[threadIdx.x] = own_beta;
        }
        __syncthreads();
        if (warp == 1) decay[threadIdx.x] = log_decay + decay[WARP - 1];
        __syncthreads();
        if (threadIdx.x < CHUNK) {
            float* to = decays + place * 2 * CHUNK + threadIdx.x;
            to[0] = exp2f(decay[threadIdx.x]);
            to[CHUNK] = exp2f(decay[CHUNK - 1] - decay[threadIdx.x]);
        }
        uint16_t *inverses = tiles + place * 2 * TILE, *products = inverses + TILE;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (n / 2 > warp) continue;
            const int column = n * 8 + lane % 4 * 2;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * warp + lane / 4 + 8 * half;
                float out[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float by = exp2f(fminf(decay[row] - decay[column + e], 0.0f));
                    system[row * SYSTEM_STRIDE + column + e] = beta[row] * gram[n][2 * half + e] * by;
                    out[e] = column + e <= row ? scale * cross[n][2 * half + e] * by : 0.0f;
                }
                *reinterpret_cast<uint32_t*>(products + row * CHUNK + column) = pack(out[0], out[1]);
            }
        }
        __syncthreads();
        // Keys and queries are used up: the inverse and what stands between take their places.
        float *inverse = reinterpret_cast<float*>(shared), *between = inverse + CHUNK * CHUNK;
        invert(system, inverse, between);
#pragma unroll 4
        for (int e = threadIdx.x; e < CHUNK * CHUNK / 2; e += THREADS) {
            const int row = e / (CHUNK / 2), column = e % (CHUNK / 2) * 2;
            if (column / BLOCK > row / BLOCK) continue;
            const float2 v = *reinterpret_cast<const float2*>(inverse + row * CHUNK + column);
            reinterpret_cast<uint32_t*>(inverses)[e] = pack(v.x * beta[column], v.y * beta[column + 1]);
        }
    }
}
