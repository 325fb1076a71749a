// From logits to a token: bias, mask and penalties; temperature, top-k, top-p, min-p and Gumbel noise;
// log-probabilities.
//
// The meaning is that of atlas_core.ops.sampling. Nothing sorts the whole vocabulary: a histogram of scaled logits
// tells which tokens can pass top-k and top-p, and only those are sorted.

#include "atlas_step.h"
#include "simd.h"

namespace {

constexpr int32_t kPromptBit = 1 << 30;
constexpr int kBuckets = 256;
constexpr float kBucketsPerUnit = 8.0f;
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

// Gumbel noise of every token at one position. ``draw`` is uniform in (0, 1), ``noise`` what it stands for.
struct Noise {
    uint64_t key;
    Noise(uint64_t seed, int32_t position)
        : key(mix(seed + kGolden * (static_cast<uint64_t>(static_cast<int64_t>(position)) + 1))) {}

    ATLAS_INLINE float draw(int32_t id) const {
        const uint64_t z = mix(key + kGolden * (static_cast<uint64_t>(static_cast<int64_t>(id)) + 1));
        const float u = (static_cast<float>(z >> 40) + 0.5f) * 0x1p-24f;
        return u > 0x1.fffffep-1f ? 0x1.fffffep-1f : u;  // the largest draw rounds to 1, whose noise would be infinite
    }
    static ATLAS_INLINE float noise(float u) { return -logf(-logf(u)); }
    ATLAS_INLINE float operator()(int32_t id) const { return noise(draw(id)); }
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
    // The best token, whose value is 0, always passes.
    ATLAS_INLINE bool passes_min_p(float value) const {
        return min_p <= 0 || value == 0 || exp(static_cast<double>(value)) >= static_cast<double>(min_p);
    }
};

ATLAS_INLINE int bucket(float value) {
    const float b = -value * kBucketsPerUnit;
    return b < kBuckets - 1 ? static_cast<int>(b) : kBuckets - 1;
}

// No top-k and no top-p. A token that needs more than i of noise to win has a draw of at least least[i], which tells
// nearly all losers apart without a logarithm, and without a branch that is hard to predict.
int32_t choose_by_noise(const Choice& c, const Noise& noise) {
    constexpr int kSteps = 17;  // noise is never above 16.64
    float least[kSteps];
    for (int i = 0; i < kSteps; ++i)
        least[i] = i == 0 ? 0.0f : static_cast<float>(exp(-exp(-static_cast<double>(i)))) - 1e-6f;
    Best best;
    const int32_t likely = first_equal(c.logits, c.vocabulary, c.largest);
    best.offer(noise(likely), likely);
    for (int32_t id = 0; id < c.vocabulary; ++id) {
        const float value = c.scaled(id), needed = best.key - value, u = noise.draw(id);
        const float capped = needed < kSteps - 1 ? needed : kSteps - 1;
        const float step = capped > 0 ? capped : 0.0f;
        if (u < least[static_cast<int>(step)] || !c.passes_min_p(value)) continue;
        best.offer(value + Noise::noise(u), id);
    }
    return best.id;
}

// The tokens that pass top-k and top-p, in no order; returns how many, at least one. ``list`` has room for the
// vocabulary.
//
// Scaled logits are counted in buckets; all buckets before the one in which a limit falls pass whole, and only that one
// is sorted.
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
    const double wanted = static_cast<double>(c.top_p) * total;
    int last = 0, before_last = 0;
    double reached = 0;
    while (last < kBuckets - 1 && (by_count ? before_last + counts[last] < c.top_k : reached + mass[last] < wanted)) {
        before_last += counts[last];
        reached += mass[last];
        ++last;
    }
    int sure = 0, n = before_last;
    for (int id = 0; id < c.vocabulary; ++id) {
        const float value = c.scaled(id);
        const int b = bucket(value);
        if (b < last) list[sure++] = {value, id};
        else if (b == last) list[n++] = {value, id};
    }
    sort(list + sure, n - sure);
    if (by_count) {
        n = c.top_k;
        if (c.top_p >= 1) return n;
        sort(list, n);
        for (int i = 0; i < n; ++i) total += exp(static_cast<double>(list[i].value));
        sure = 0;
    }
    int kept = sure;
    for (; kept < n && reached < static_cast<double>(c.top_p) * total; ++kept)
        reached += exp(static_cast<double>(list[kept].value));
    return kept > 1 ? kept : 1;
}

int32_t choose(const Choice& c, const Noise& noise, Candidate* list) {
    // Logits that are all masked, or overflowed, have no distribution: the first largest is as good as any.
    if (c.temperature == 0 || !(fabsf(c.largest) < INFINITY)) return first_equal(c.logits, c.vocabulary, c.largest);
    const bool by_count = c.top_k > 0 && c.top_k < c.vocabulary;
    if (!by_count && c.top_p >= 1) return choose_by_noise(c, noise);
    const int n = filtered(c, list);
    Best best;
    for (int i = 0; i < n; ++i)
        if (c.passes_min_p(list[i].value)) best.offer(list[i].value + noise(list[i].id), list[i].id);
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
void sample(const int32_t* counts, const float* logits, const int32_t* sample_row, const int32_t* row_slot,
            const int32_t* cu_q, const int32_t* state, int32_t* sampled, void* scratch, int32_t vocabulary,
            int32_t slot_stride, int task, int ntasks) {
    Candidate* list = static_cast<Candidate*>(scratch) + static_cast<size_t>(task) * vocabulary;
    for (int i = task; i < counts[ATLAS_ROWS]; i += ntasks) {
        const int32_t row = sample_row[i];
        if (row < 0) {
            sampled[i] = -1;
            continue;
        }
        const int32_t* slot = state + static_cast<size_t>(row_slot[row]) * slot_stride;
        const uint64_t seed = static_cast<uint32_t>(slot[ATLAS_SEED_LOW]) |
                              static_cast<uint64_t>(static_cast<uint32_t>(slot[ATLAS_SEED_HIGH])) << 32;
        const Noise noise(seed, slot[ATLAS_POSITION] + cu_q[row + 1] - cu_q[row]);
        const float* values = logits + static_cast<size_t>(i) * vocabulary;
        const Choice choice = {values,
                               vocabulary,
                               maximum(values, vocabulary),
                               as_float(slot[ATLAS_TEMPERATURE]),
                               slot[ATLAS_TOP_K],
                               as_float(slot[ATLAS_TOP_P]),
                               as_float(slot[ATLAS_MIN_P])};
        sampled[i] = choose(choice, noise, list);
    }
}

void logprobs(const int32_t* counts, const float* logits, const int32_t* sampled, const int32_t* scored,
              const int32_t* sample_row, const int32_t* row_slot, const int32_t* state, float* values, int32_t* ids,
              int32_t vocabulary, int32_t slot_stride, int task, int ntasks) {
    constexpr int kWide = 1 + kMaxLogprobs;
    for (int i = task; i < counts[ATLAS_ROWS]; i += ntasks) {
        float* value = values + static_cast<size_t>(i) * kWide;
        int32_t* id = ids + static_cast<size_t>(i) * kWide;
        for (int place = 0; place < kWide; ++place) value[place] = 0, id[place] = -1;
        const int32_t row = sample_row[i];
        const bool given = scored[2 * i] >= 0;
        const int32_t token = given ? scored[2 * i] : sampled[i];
        const int asked = given     ? scored[2 * i + 1]
                          : row < 0 ? -1
                                    : state[static_cast<size_t>(row_slot[row]) * slot_stride + ATLAS_LOGPROBS];
        const int wanted = smaller(asked, kMaxLogprobs);
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
        id[0] = token;
        value[0] = static_cast<float>(static_cast<double>(in[token]) - normal);
        for (int place = 0; place < n; ++place) {
            id[1 + place] = list[place].id;
            value[1 + place] = static_cast<float>(static_cast<double>(list[place].value) - normal);
        }
    }
}
