// The next token of each row, as atlas_core.ops.sampling.choose defines it: temperature, top-k, top-p, min-p, then
// the largest logit + Gumbel noise (Gumbel, 1954; Maddison et al., 2014). Nothing is sorted: a filter is a threshold,
// found by bisection over the bits of the ordered logits. Probability masses are integers in units of 2^-40 of the
// largest, so every sum is exact.
#include "logits.cuh"
#include "row_cluster.cuh"

using namespace atlas;

namespace {

constexpr int ID_BITS = 24;

__device__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

__device__ float gumbel(uint64_t key, int id) {
    const uint64_t z = mix(key + GOLDEN * (static_cast<uint64_t>(id) + 1));
    // The largest draw rounds to 1, whose noise would be infinite.
    const float u = fminf(__fmul_rn(__fadd_rn(static_cast<float>(z >> 40), 0.5f), 0x1p-24f), 1.0f - 0x1p-24f);
    return -logf(-logf(u));
}

// The tokens still in play: keys above the threshold, and of those equal to it the ids up to the limit.
struct Filter {
    uint32_t threshold = 0;
    int limit = 1 << ID_BITS;

    __device__ bool keeps(uint32_t key, int id) const { return key > threshold || (key == threshold && id <= limit); }
};

class Chooser {
  public:
    __device__ Chooser(RowCluster& row, const float* logits, float largest, float temperature)
        : row_(row), logits_(logits), largest_(largest), temperature_(temperature) {}

    __device__ float scaled(int id) const { return __fdiv_rn(__fsub_rn(logits_[id], largest_), temperature_); }

    __device__ void top_k(uint64_t k) {
        const uint32_t threshold = row_.largest<32>(k, [&](uint32_t t) { return count(t); });
        keep(threshold, k - (threshold == ~0u ? 0 : count(threshold + 1)));
    }

    __device__ void top_p(float p) {
        const double share = static_cast<double>(p) * static_cast<double>(mass(0));
        const uint64_t goal = max(static_cast<uint64_t>(1), static_cast<uint64_t>(ceil(share)));
        const uint32_t threshold = row_.largest<32>(goal, [&](uint32_t t) { return mass(t); });
        const uint64_t above = threshold == ~0u ? 0 : mass(threshold + 1), each = unit(from_ordered(threshold));
        // A token stays while the mass before it is below the goal.
        keep(threshold, (goal - above + each - 1) / each);
    }

    __device__ int choose(float min_p, uint64_t key) {
        return candidate_id(row_.over<Max>([&](int id) -> uint64_t {
            const float s = scaled(id);
            if (!filter_.keeps(ordered(s), id) || !(expf(s) >= min_p)) return 0;
            return candidate(__fadd_rn(s, gumbel(key, id)), id);
        }));
    }

  private:
    static __device__ uint64_t unit(float s) { return static_cast<uint64_t>(expf(s) * 0x1p40f); }

    __device__ uint64_t count(uint32_t t) {
        return row_.over<Sum>([&](int id) -> uint64_t { return ordered(scaled(id)) >= t; });
    }

    __device__ uint64_t mass(uint32_t t) {
        return row_.over<Sum>([&](int id) -> uint64_t {
            const float s = scaled(id);
            const uint32_t k = ordered(s);
            return k >= t && filter_.keeps(k, id) ? unit(s) : 0;
        });
    }

    // Keep the keys above the threshold and the `ties` lowest of the ids whose key equals it, of those kept so far.
    __device__ void keep(uint32_t threshold, uint64_t ties) {
        const Filter old = filter_;
        auto equal = [&](int id) {
            const uint32_t k = ordered(scaled(id));
            return k == threshold && old.keeps(k, id);
        };
        filter_ = {threshold, threshold == old.threshold ? old.limit : 1 << ID_BITS};
        const uint64_t all = row_.over<Sum>([&](int id) -> uint64_t { return equal(id); });
        if (ties >= all) return;
        // The last id that stays: it and those above it are as many as must go, and one more.
        filter_.limit = row_.largest<ID_BITS>(all - ties + 1, [&](uint32_t t) {
            return row_.over<Sum>([&](int id) -> uint64_t { return equal(id) && static_cast<uint32_t>(id) >= t; });
        });
    }

    RowCluster& row_;
    const float* logits_;
    float largest_, temperature_;
    Filter filter_;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
sample(const int32_t* counts, const float* logits, const float* raw, const int32_t* sample_row,
       const int32_t* row_slot, const int32_t* cu_q, const int32_t* slots, int32_t* sampled, int32_t vocabulary,
       int32_t slot_stride) {
    __shared__ RowShared shared;
    admit_successor();
    wait_for_predecessor();
    const int index = blockIdx.x / ROW_BLOCKS;
    if (index >= counts[ATLAS_ROWS]) return;
    const int step_row = sample_row[index];
    if (step_row < 0) {
        if (blockIdx.x % ROW_BLOCKS == 0 && threadIdx.x == 0) sampled[index] = -1;
        return;
    }
    RowCluster row(shared, vocabulary);
    const int32_t* slot = slots + static_cast<int64_t>(row_slot[step_row]) * slot_stride;
    // Plain rows have not been processed where there are raw ones.
    const float* mine = (raw && plain_logits(slot) ? raw : logits) + static_cast<int64_t>(index) * vocabulary;
    const uint64_t best = row.best(mine, vocabulary);
    int token = candidate_id(best);
    const float temperature = __int_as_float(slot[ATLAS_TEMPERATURE]);
    if (temperature != 0.0f) {
        Chooser chooser(row, mine, candidate_value(best), temperature);
        const int k = slot[ATLAS_TOP_K];
        if (k > 0 && k < vocabulary) chooser.top_k(k);
        const float p = __int_as_float(slot[ATLAS_TOP_P]);
        if (p < 1.0f) chooser.top_p(p);
        const uint32_t low_half = slot[ATLAS_SEED_LOW], high_half = slot[ATLAS_SEED_HIGH];
        const uint64_t seed = low_half | static_cast<uint64_t>(high_half) << 32;
        const int64_t position = slot[ATLAS_POSITION] + cu_q[step_row + 1] - cu_q[step_row];
        const uint64_t key = mix(seed + GOLDEN * static_cast<uint64_t>(position + 1));
        token = chooser.choose(__int_as_float(slot[ATLAS_MIN_P]), key);
    }
    if (row.leader()) sampled[index] = token;
}
