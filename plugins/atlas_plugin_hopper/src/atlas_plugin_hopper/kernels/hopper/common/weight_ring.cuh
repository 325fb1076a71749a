// Rows of weights that stream through shared memory: one warp copies them into a ring of stages as far ahead as there is
// room, across the borders of phases and layers; the others share out the summed dimension of every row and arrive at the
// stage's barrier when they have their chunks. Who copies and who reads go through the same rows in the same order.
#pragma once
#include "bulk_copy.cuh"
#include "resident_words.cuh"

namespace atlas {

// STAGES of BYTES each, read by READERS warps. A group of rows [K] begins at a stage of its own. BYTES and PAD are chosen
// so that ldmatrix finds eight rows behind one another in different banks: their addresses differ by 16 bytes or more,
// modulo 128, also where a stage ends between them.
template <int STAGES, int BYTES, int READERS, int PAD = 16>
struct WeightRing {
    static constexpr int SIZE = STAGES * BYTES;
    template <int K>
    static constexpr int PITCH = 2 * K + PAD;
    template <int K>
    static constexpr int ROWS = BYTES / PITCH<K>;  // of a stage

    uint32_t stages, full, empty;  // `full` and `empty`: a barrier a stage
    int slot = 0, parity = 0;

    // By one thread, before the others go on.
    __device__ void begin() const {
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, READERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ void advance(int by) {
        slot += by;
        if (slot >= STAGES) {
            slot -= STAGES;
            parity ^= 1;
        }
    }
    // Where row j lies of those that begin at this slot, once it is there; at most STAGES stages ahead.
    template <int K>
    __device__ uint32_t row(int j) const {
        int at = slot + j / ROWS<K>, phase = parity;
        if (at >= STAGES) {
            at -= STAGES;
            phase ^= 1;
        }
        barrier_wait(full + 8 * at, phase);
        return stages + at * BYTES + j % ROWS<K> * PITCH<K>;
    }
    // By all lanes of a reading warp, which has waited for each of these stages.
    __device__ void release(int count, int lane) {
        __syncwarp();
        if (lane < count) barrier_arrive(empty + 8 * (slot + lane >= STAGES ? slot + lane - STAGES : slot + lane));
        advance(count);
    }
    // By the warp that copies: so many rows, the addresses of which address(j) gives.
    // With fewer than STAGES under way the memory has time for others.
    template <int K, bool ONCE = false, int UNDER_WAY = STAGES, class Address>
    __device__ void fill(int rows, int lane, Address address) {
        static_assert(ROWS<K> >= 1 && ROWS<K> <= WARP, "a lane copies a row");
#pragma unroll 1
        for (int first = 0; first < rows; first += ROWS<K>) {
            const int count = min(ROWS<K>, rows - first);
            barrier_wait(empty + 8 * slot, parity ^ 1);
            if (UNDER_WAY < STAGES) {
                const int before = slot - UNDER_WAY;
                barrier_wait(full + 8 * (before < 0 ? before + STAGES : before), before < 0 ? parity ^ 1 : parity);
            }
            if (lane == 0) barrier_expect(full + 8 * slot, count * 2 * K);
            __syncwarp();
            if (lane < count) {
                const uint32_t to = stages + slot * BYTES + lane * PITCH<K>;
                if (ONCE) copy_bulk_once(to, address(first + lane), 2 * K, full + 8 * slot);
                else copy_bulk(to, address(first + lane), 2 * K, full + 8 * slot);
            }
            advance(1);
        }
    }
};

// Of eight rows the chunk of 16 STEPS elements that a warp multiplies: fragments of the right operand of mma, the left one
// being the vector, all of whose rows are alike. The sum of row 2 lane + i is then number i of lanes 0 to 3.
template <int STEPS>
struct Tile {
    uint32_t b[STEPS][2];

    // `row`: where the chunk of row lane % 8 begins in shared memory.
    __device__ void load(uint32_t row, int lane) {
        const uint32_t at = row + lane / 8 * 16;
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {
            if (s + 1 < STEPS) {
                uint32_t four[4];
                load_matrix(four, at + 32 * s);
                b[s][0] = four[0], b[s][1] = four[1], b[s + 1][0] = four[2], b[s + 1][1] = four[3];
            } else {
                load_half_matrix(b[s], at + 32 * s);
            }
        }
    }

private:
    __device__ static void load_half_matrix(uint32_t (&r)[2], uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
    }
};

// Where a pair of elements of a vector lies as a fragment, so that a lane's two of a step are neighbours.
__device__ inline int fragment_place(int pair) { return pair / 8 * 8 + pair % 4 * 2 + pair / 4 % 2; }

}  // namespace atlas
