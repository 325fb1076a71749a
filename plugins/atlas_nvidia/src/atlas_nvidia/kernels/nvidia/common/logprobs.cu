// log softmax of the unmodified logits at the sampled or given token and at the most likely ones.
#include "row_cluster.cuh"

using namespace atlas;

namespace {
constexpr int PLACES = 21;  // the sampled token and up to 20 alternatives (vocab.sampling.MAX_TOP_LOGPROBS)
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
logprobs(const int32_t* counts, const float* logits, const int32_t* sampled, const int32_t* scored,
         const int32_t* sample_row, const int32_t* row_slot, const int32_t* slots, float* values, int32_t* ids,
         int32_t vocabulary, int32_t slot_stride) {
    __shared__ RowShared shared;
    admit_successor();
    wait_for_predecessor();
    const int index = blockIdx.x / ROW_BLOCKS;
    if (index >= counts[ATLAS_ROWS]) return;
    const int step_row = sample_row[index];
    const int64_t slot = step_row < 0 ? 0 : static_cast<int64_t>(row_slot[step_row]) * slot_stride;
    const bool given = scored[2 * index] >= 0;
    const int wanted = given ? scored[2 * index + 1] : step_row < 0 ? -1 : slots[slot + ATLAS_LOGPROBS];
    const int place = threadIdx.x;
    if (blockIdx.x % ROW_BLOCKS == 0 && place >= (wanted < 0 ? 0 : 1 + wanted) && place < PLACES) {
        values[index * PLACES + place] = 0.0f;
        ids[index * PLACES + place] = -1;
    }
    if (wanted < 0) return;
    RowCluster row(shared, vocabulary);
    const float* mine = logits + static_cast<int64_t>(index) * vocabulary;
    uint64_t best = row.best(mine, vocabulary);
    const float largest = candidate_value(best);
    // In units of 2^-40 of the largest mass, so that the sum is exact and independent of order.
    const uint64_t total = row.over<Sum>([&](int id) {
        return static_cast<uint64_t>(expf(mine[id] - largest) * 0x1p40f);
    });
    const float log_total = static_cast<float>(log(static_cast<double>(total) * 0x1p-40));
    if (row.leader()) {
        const int token = given ? scored[2 * index] : sampled[index];
        ids[index * PLACES] = token;
        values[index * PLACES] = mine[token] - largest - log_total;
    }
    for (int rank = 1; rank <= min(wanted, PLACES - 1); ++rank) {
        if (row.leader()) {
            ids[index * PLACES + rank] = candidate_id(best);
            values[index * PLACES + rank] = candidate_value(best) - largest - log_total;
        }
        if (rank < wanted) {
            best = row.over<Max>([&](int id) -> uint64_t {
                const uint64_t c = candidate(mine[id], id);
                return c < best ? c : 0;
            });
        }
    }
}
