// From logits to a token: bias, mask and penalties; temperature, top-k, top-p, min-p and Gumbel noise; log-probabilities.
//
// The meaning is that of atlas_core.ops.sampling. Nothing sorts the whole vocabulary: a histogram of scaled logits tells which
// tokens can pass top-k and top-p, and only those are sorted.

#include "atlas_step.h"
#include "simd.h"

namespace {

constexpr int32_t kPromptBit = 1 << 30;
constexpr int kBuckets = 256;
constexpr float kBucketsPerUnit = 8.0f;
constexpr float kLargestNoise = 16.64f;  // -log(-log(1 - 2^-24)), rounded up
constexpr int kMaxLogprobs = 20;

struct Candidate {
    float value;  // (logit - largest logit) / temperature
    int32_t id;
};

ATLAS_INLINE int smaller(int a, int b) { return a < b ? a : b; }

ATLAS_INLINE float as_float(int32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

ATLAS_INLINE bool before(Candidate a, Candidate b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

void sink(Candidate* heap, int n, int i) {
    const Candidate moved = heap[i];
    for (int child = 2 * i + 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && before(heap[child], heap[child + 1])) ++child;
        if (!before(moved, heap[child])) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moved;
}

// Heapsort, best first: no memory and no bad case.
void sort(Candidate* items, int n) {
    for (int i = n / 2 - 1; i >= 0; --i) sink(items, n, i);
    for (int end = n - 1; end > 0; --end) {
        const Candidate last = items[0];
        items[0] = items[end];
        items[end] = last;
        sink(items, end, 0);
    }
}

// SplitMix64's output function (Steele et al., 2014).
ATLAS_INLINE uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

struct Noise {
    uint64_t key;
    Noise(uint64_t seed, int32_t position) : key(mix(seed + kGolden * (static_cast<uint64_t>(static_cast<int64_t>(position)) + 1))) {}

    float operator()(int32_t id) const {
        const uint64_t z = mix(key + kGolden * (static_cast<uint64_t>(static_cast<int64_t>(id)) + 1));
        float u = (static_cast<float>(z >> 40) + 0.5f) * 0x1p-24f;
        if (u > 0x1.fffffep-1f) u = 0x1.fffffep-1f;  // the largest draw rounds to 1, whose noise would be infinite
        return -logf(-logf(u));
    }
};

// The largest key seen, lowest id on ties.
struct Best {
    float key = -INFINITY;
    int32_t id = -1;

    ATLAS_INLINE void offer(float candidate, int32_t with) {
        if (id < 0 || candidate > key || (candidate == key && with < id)) key = candidate, id = with;
    }
};

float maximum(const float* logits, int n) {
    f32x16 best = splat(-INFINITY);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) best = larger(best, load(logits + i));
    float result = largest(best);
    for (; i < n; ++i) result = logits[i] > result ? logits[i] : result;
    return result;
}

int32_t first_equal(const float* logits, int n, float value) {
    for (int i = 0; i < n; ++i)
        if (logits[i] == value) return i;
    return 0;
}

struct Choice {
    const float* logits;
    int vocabulary;
    float largest, temperature;
    int top_k;
    float top_p, min_p;

    ATLAS_INLINE float scaled(int id) const { return (logits[id] - largest) / temperature; }
    ATLAS_INLINE bool passes_min_p(float value) const { return min_p <= 0 || exp(static_cast<double>(value)) >= static_cast<double>(min_p); }
};

ATLAS_INLINE int bucket(float value) {
    const float b = -value * kBucketsPerUnit;
    return b < kBuckets - 1 ? static_cast<int>(b) : kBuckets - 1;
}

// No top-k and no top-p: noise is drawn only where it could still win.
int32_t choose_by_noise(const Choice& c, const Noise& noise) {
    Best best;
    const int32_t likely = first_equal(c.logits, c.vocabulary, c.largest);
    best.offer(noise(likely), likely);
    for (int32_t id = 0; id < c.vocabulary; ++id) {
        const float value = c.scaled(id);
        if (value + kLargestNoise < best.key || !c.passes_min_p(value)) continue;
        best.offer(value + noise(id), id);
    }
    return best.id;
}

// The candidates that pass top-k and top-p, best first; returns how many, at least one. ``list`` has room for the vocabulary.
int filtered(const Choice& c, Candidate* list) {
    const bool by_count = c.top_k > 0 && c.top_k < c.vocabulary;
    int counts[kBuckets] = {};
    double mass[kBuckets] = {}, total = 0;
    for (int id = 0; id < c.vocabulary; ++id) {
        const float value = c.scaled(id);
        const int b = bucket(value);
        counts[b] += 1;
        if (!by_count) mass[b] += exp(static_cast<double>(value));
    }
    for (int b = 0; b < kBuckets; ++b) total += mass[b];
    int last = 0;
    double reached = mass[0];
    // A hair more than top_p, so that the order of summation cannot exclude a token here; the exact test follows.
    const double wanted = static_cast<double>(c.top_p) * total * (1 + 1e-9);
    for (int count = counts[0]; last < kBuckets - 1 && (by_count ? count < c.top_k : reached < wanted);) {
        ++last;
        count += counts[last];
        reached += mass[last];
    }
    int n = 0;
    for (int id = 0; id < c.vocabulary; ++id) {
        const float value = c.scaled(id);
        if (bucket(value) <= last) list[n++] = {value, id};
    }
    sort(list, n);
    if (by_count) {
        n = smaller(n, c.top_k);
        for (int i = 0; i < n; ++i) total += exp(static_cast<double>(list[i].value));
    }
    if (c.top_p < 1) {
        double sum = 0;
        int kept = 0;
        for (; kept < n && sum < static_cast<double>(c.top_p) * total; ++kept) sum += exp(static_cast<double>(list[kept].value));
        n = kept;
    }
    return n > 1 ? n : 1;
}

int32_t choose(const Choice& c, const Noise& noise, Candidate* list) {
    if (c.temperature == 0) return first_equal(c.logits, c.vocabulary, c.largest);
    const bool by_count = c.top_k > 0 && c.top_k < c.vocabulary;
    if (!by_count && c.top_p >= 1) return choose_by_noise(c, noise);
    const int n = filtered(c, list);
    Best best;
    for (int i = 0; i < n; ++i)
        if (i == 0 || c.passes_min_p(list[i].value)) best.offer(list[i].value + noise(list[i].id), list[i].id);
    return best.id;
}

}  // namespace

void process_logits(const int32_t* counts, const float* logits, const int32_t* sample_row, const int32_t* row_slot,
                    const int32_t* state, const int32_t* penalty, const uint32_t* mask, float* y, int32_t vocabulary,
                    int32_t mask_words, int32_t slot_stride, int32_t bias_start, int task, int ntasks) {
    const Share mine = share(vocabulary, task, ntasks);
    const size_t bytes = static_cast<size_t>(mine.last - mine.first) * sizeof(float);
    for (int i = 0; i < counts[ATLAS_ROWS]; ++i) {
        float* out = y + static_cast<size_t>(i) * vocabulary;
        memcpy(out + mine.first, logits + static_cast<size_t>(i) * vocabulary + mine.first, bytes);
        if (sample_row[i] < 0) continue;
        const int32_t index = row_slot[sample_row[i]];
        const int32_t* slot = state + static_cast<size_t>(index) * slot_stride;
        const int32_t* bias = state + bias_start + 2 * static_cast<size_t>(slot[ATLAS_BIAS_START]);
        for (int pair = 0; pair < slot[ATLAS_BIAS_COUNT]; ++pair) {
            const int32_t id = bias[2 * pair];
            if (id >= mine.first && id < mine.last) out[id] += as_float(bias[2 * pair + 1]);
        }
        if (slot[ATLAS_MASK] != 0) {
            const uint32_t* allowed = mask + static_cast<size_t>(index) * mask_words;
            for (int id = mine.first; id < mine.last; ++id)
                if ((allowed[id / 32] >> (id % 32) & 1) == 0) out[id] = -INFINITY;
        }
        if (slot[ATLAS_PENALTY_ROW] >= 0) {
            const int32_t* seen = penalty + static_cast<size_t>(slot[ATLAS_PENALTY_ROW]) * vocabulary;
            const float repetition = as_float(slot[ATLAS_REPETITION]), frequency = as_float(slot[ATLAS_FREQUENCY]);
            const float presence = as_float(slot[ATLAS_PRESENCE]);
            for (int id = mine.first; id < mine.last; ++id) {
                if (seen[id] == 0) continue;
                const int32_t generated = seen[id] & (kPromptBit - 1);
                float value = out[id] > 0 ? out[id] / repetition : out[id] * repetition;
                value -= frequency * static_cast<float>(generated);
                out[id] = value - (generated > 0 ? presence : 0.0f);
            }
        }
    }
}

// ``scratch`` has room for a candidate of every token, for each task.
void sample(const int32_t* counts, const float* logits, const int32_t* sample_row, const int32_t* row_slot, const int32_t* cu_q,
            const int32_t* state, int32_t* sampled, void* scratch, int32_t vocabulary, int32_t slot_stride, int task, int ntasks) {
    Candidate* list = static_cast<Candidate*>(scratch) + static_cast<size_t>(task) * vocabulary;
    for (int i = task; i < counts[ATLAS_ROWS]; i += ntasks) {
        const int32_t row = sample_row[i];
        if (row < 0) {
            sampled[i] = -1;
            continue;
        }
        const int32_t* slot = state + static_cast<size_t>(row_slot[row]) * slot_stride;
        const uint64_t seed = static_cast<uint32_t>(slot[ATLAS_SEED_LOW]) | static_cast<uint64_t>(static_cast<uint32_t>(slot[ATLAS_SEED_HIGH])) << 32;
        const Noise noise(seed, slot[ATLAS_POSITION] + cu_q[row + 1] - cu_q[row]);
        const float* values = logits + static_cast<size_t>(i) * vocabulary;
        const Choice choice = {values, vocabulary, maximum(values, vocabulary), as_float(slot[ATLAS_TEMPERATURE]), slot[ATLAS_TOP_K],
                               as_float(slot[ATLAS_TOP_P]), as_float(slot[ATLAS_MIN_P])};
        sampled[i] = choose(choice, noise, list);
    }
}

void logprobs(const int32_t* counts, const float* logits, const int32_t* sampled, const int32_t* sample_row,
              const int32_t* row_slot, const int32_t* state, float* values, int32_t* ids, int32_t vocabulary,
              int32_t slot_stride, int task, int ntasks) {
    constexpr int kWide = 1 + kMaxLogprobs;
    for (int i = task; i < counts[ATLAS_ROWS]; i += ntasks) {
        float* value = values + static_cast<size_t>(i) * kWide;
        int32_t* id = ids + static_cast<size_t>(i) * kWide;
        for (int place = 0; place < kWide; ++place) value[place] = 0, id[place] = -1;
        const int32_t row = sample_row[i];
        const int wanted = row < 0 ? -1 : smaller(state[static_cast<size_t>(row_slot[row]) * slot_stride + ATLAS_LOGPROBS], kMaxLogprobs);
        if (wanted < 0) continue;
        const float* in = logits + static_cast<size_t>(i) * vocabulary;
        const float best = maximum(in, vocabulary);
        double total = 0;
        Candidate list[kMaxLogprobs];
        int n = 0;
        for (int k = 0; k < vocabulary; k += kLanes) {
            const int lanes = smaller(kLanes, vocabulary - k);
            const f32x16 part = exponential((lanes == kLanes ? load(in + k) : load_first(in + k, lanes)) - best);
            for (int lane = 0; lane < lanes; ++lane) {
                total += static_cast<double>(part[lane]);
                const Candidate candidate = {in[k + lane], k + lane};
                if (n == wanted && (n == 0 || !before(candidate, list[n - 1]))) continue;
                int place = n < wanted ? n++ : n - 1;
                for (; place > 0 && before(candidate, list[place - 1]); --place) list[place] = list[place - 1];
                list[place] = candidate;
            }
        }
        const double normal = static_cast<double>(best) + log(total);
        id[0] = sampled[i];
        value[0] = static_cast<float>(static_cast<double>(in[sampled[i]]) - normal);
        for (int place = 0; place < n; ++place) {
            id[1 + place] = list[place].id;
            value[1 + place] = static_cast<float>(static_cast<double>(list[place].value) - normal);
        }
    }
}
