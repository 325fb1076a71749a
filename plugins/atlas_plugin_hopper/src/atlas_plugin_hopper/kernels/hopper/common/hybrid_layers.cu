// All that lies between two layers of full attention, for one token in one launch: a block a processor, all of them
// resident at once. A layer of linear attention and a mixture of experts is six phases, each of which hands its results
// on as words with flags (resident_words.cuh):
//
//   hidden vector -> norm, rows of four products -> linear attention -> rows of the output projection, residual
//   -> norm, rows of the router -> choice, rows of gate and up, SwiGLU -> rows of down, residual: the next vector.
//
// The first layer may be one of full attention, of which the third phase is the first here; behind the last may come
// norm and products of such a layer.
//
// No cooperative launch is needed for blocks to wait for one another: a block fills its processor, there are as many,
// those of the predecessor end by themselves, and those of the successor begin when all of these have begun.
//
// Two warps copy weights into two rings: one what is known ahead, over the borders of phases and layers, so that memory
// is busy while words travel; the other the chosen experts'.
#include "chosen_experts.cuh"
#include "resident_delta.cuh"

using namespace atlas;

namespace {

constexpr int HIDDEN = 2048, EXPERT_SIZE = 512, TOP_K = 8, MOST_EXPERTS = 256;
constexpr int STAGES = 12, EXPERT_STAGES = 4, KNOWN_STAGES = STAGES - EXPERT_STAGES;
constexpr int THREADS = CONSUMERS + 2 * WARP, COPIES = 4, EARLY = 2;
constexpr int UNITS = TOP_K + 1, ATTENDED = VALUES;  // experts with the shared one, which comes last

// hybrid.py makes the table and knows how many words there are.
struct Layer {
    const void* input_norm;
    const uint16_t *qkv, *gates, *b, *a;
    DeltaLayer delta;
    const uint16_t* output;
    const void* inner_norm;
    const uint16_t* router;
    ExpertMatrices experts, shared;
    const uint16_t* opening;
};

// Words: the flag of the last layer; products; then copies of what all blocks read, so that not all of them ask the
// same part of the L2 cache.
constexpr int AT_PRODUCTS = 16, AT_COPIES = AT_PRODUCTS + PRODUCT_ROWS;
constexpr int AT_HIDDEN = 0, AT_MIDDLE = AT_HIDDEN + HIDDEN / 2, AT_LOGITS = AT_MIDDLE + HIDDEN / 2;
constexpr int AT_ATTENDED = AT_LOGITS + MOST_EXPERTS, AT_SQUARES = AT_ATTENDED + ATTENDED / 2;
constexpr int AT_INNER = AT_SQUARES + VALUE_HEADS * QUARTERS, COPY_WORDS = AT_INNER + UNITS * EXPERT_SIZE / 2;

constexpr int BLOCKS = 130;  // at least
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int share(int things) { return (things + BLOCKS - 1) / BLOCKS; }
constexpr int ROUTED = 4 * share(TOP_K * EXPERT_SIZE / 2), BESIDE = 4 * share(EXPERT_SIZE / 2);
constexpr int SUM_ROWS = (most(share(PRODUCT_ROWS), ROUTED + BESIDE) + 7) / 8 * 8;
constexpr int WIDEST = most(ATTENDED, UNITS * EXPERT_SIZE) / WARPS / 2;  // pairs

// Products of full attention behind the last layer: where they go, and how many rows there are up to each matrix's end.
struct Behind {
    uint16_t* y[4];
    int end[4];
};

struct Given {
    const int32_t* counts;
    const Layer* all;
    const float* x;
    const uint16_t *attended, *attended_gate;  // of full attention before the first layer's third phase, or null
    float* y;
    uint64_t* words;
    const int32_t *cu_q, *row_slot, *slots;
    int layers, experts, slot_stride, norm_type;
    DeltaTypes types;
    float input_eps, l2_eps, head_eps, inner_eps, scale, route_scale;
    bool normalise;
    Behind behind;
};

// The block's rows: of the products one behind the other, of matrices [HIDDEN, .], of the router; pairs of inner
// features, of all chosen experts and of the shared one; of the products behind the last layer.
struct Owned {
    Span products, wide, router, routed, shared, behind;
};
__device__ inline Owned owned(const Given& given) {
    const Span wide = share_of(HIDDEN / 2);
    return {share_of(PRODUCT_ROWS),   {2 * wide.first, 2 * wide.count},   share_of(given.experts),
            share_of(TOP_K * EXPERT_SIZE / 2), share_of(EXPERT_SIZE / 2), share_of(given.behind.end[3])};
}

struct Shared {
    float4 state[DIM * COLUMNS];
    union {
        uint32_t vector[WARPS][WIDEST];  // a warp's chunk of what is multiplied, as fragments
        DeltaRoom delta;
    };
    Sums<SUM_ROWS> sums[2];
    float opening;  // of the shared expert
    Choice<TOP_K> choice;
    Owned own;
    uint64_t full[STAGES], empty[STAGES];
};
static_assert(STAGES * STAGE_BYTES + sizeof(Shared) <= 227 * 1024, "a block has no more shared memory");

// The warp that copies what is known ahead. Its order is that in which the others multiply.
__device__ void copy_known(Ring& ring, const Given& given, const Owned& own, int lane) {
    auto copy_products = [&](const Layer& layer, const Span& rows, int first, int second, int third) {
        const uint16_t *qkv = layer.qkv, *gates = layer.gates, *b = layer.b, *a = layer.a;
        ring.fill<HIDDEN>(rows.count, lane, [&](int j) {
            const int row = rows.first + j;
            const uint16_t* from = row < first ? qkv : row < second ? gates : row < third ? b : a;
            const int begin = row < first ? 0 : row < second ? first : row < third ? second : third;
            return from + static_cast<int64_t>(row - begin) * HIDDEN;
        });
    };
#pragma unroll 1
    for (int i = 0; i < given.layers; ++i) {
        const Layer& layer = given.all[i];
        if (i > 0 || !given.attended) copy_products(layer, own.products, AT_GATES, AT_B, AT_A);
        const uint16_t* const output = layer.output + static_cast<int64_t>(own.wide.first) * ATTENDED;
        ring.fill<ATTENDED>(own.wide.count, lane, [&](int j) { return output + static_cast<int64_t>(j) * ATTENDED; });
        const uint16_t *const router = layer.router, *const opening = layer.opening;
        ring.fill<HIDDEN>(own.router.count + 1, lane, [&](int j) {
            return j == own.router.count ? opening : router + static_cast<int64_t>(own.router.first + j) * HIDDEN;
        });
        const uint16_t *const gate = layer.shared.gate, *const up = layer.shared.up;
        ring.fill<HIDDEN>(4 * own.shared.count, lane, [&](int j) {
            return row_of_pair<HIDDEN>(gate, up, own.shared.first + j / 4, j % 4);
        });
        const uint16_t* const down = layer.shared.down + static_cast<int64_t>(own.wide.first) * EXPERT_SIZE;
        ring.fill<EXPERT_SIZE>(own.wide.count, lane,
                               [&](int j) { return down + static_cast<int64_t>(j) * EXPERT_SIZE; });
    }
    const Behind& behind = given.behind;
    if (own.behind.count > 0) {
        copy_products(given.all[given.layers], own.behind, behind.end[0], behind.end[1], behind.end[2]);
    }
}

// By every lane that has a row: the row's new sum of the residual stream, told to all blocks by pairs.
__device__ inline void send_row(float value, int row, uint64_t* to, uint32_t flag) {
    const uint64_t word = two_numbers(value, __shfl_down_sync(__activemask(), value, 1), flag);
#pragma unroll
    for (int c = 0; c < COPIES; ++c) {
        if (row % 2 == 0) store_word(to + c * COPY_WORDS + row / 2, word);
    }
}

// This warp's chunk of what linear attention has made: 4 heads, each of which has its factor.
__device__ inline void receive_attended(const uint64_t* words, uint32_t flag, float eps, uint32_t* vector, int warp,
                                        int lane) {
    constexpr int HEADS = VALUE_HEADS / WARPS, PAIRS = DIM / 2;
    static_assert(PAIRS == 2 * WARP && HEADS * QUARTERS <= WARP, "a lane has two pairs of each head");
    uint64_t word[HEADS][2], square;
    bool all;
    int turns = 0;
    do {
        square = look(words + AT_SQUARES + warp * HEADS * QUARTERS + lane % (HEADS * QUARTERS));
        all = fresh(square, flag);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            look2(words + AT_ATTENDED + (warp * HEADS + h) * PAIRS + 2 * lane, word[h][0], word[h][1]);
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) all = all && fresh(word[h][0], flag) && fresh(word[h][1], flag);
        lose_patience(turns);
    } while (!all);
    __syncwarp();
    float sum = number(square);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float factor = rsqrtf(sum / DIM + eps);
    uint32_t* const to = vector + place_of(2 * lane);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const float by = __shfl_sync(~0u, factor, h * QUARTERS);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint32_t bits = static_cast<uint32_t>(word[h][j]);
            to[h * PAIRS + j * NEXT_PLACE] =
                pack(by * widen(static_cast<uint16_t>(bits)), by * widen(static_cast<uint16_t>(bits >> 16)));
        }
    }
    __syncwarp();
}

// The same of what full attention has left in memory, and of the gate behind it.
__device__ inline void read_attended(const uint16_t* from, const uint16_t* gate, uint32_t* vector, int warp, int lane) {
    constexpr int CHUNK = ATTENDED / WARPS;
    uint32_t* const to = vector + place_of(4 * lane);
#pragma unroll 1
    for (int i = 0; i < CHUNK; i += 8 * WARP) {
        float v[8], g[8];
        unpack(load16(from + warp * CHUNK + i + 8 * lane), v);
        unpack(load16(gate + warp * CHUNK + i + 8 * lane), g);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            to[i / 2 + j * NEXT_PLACE] =
                pack(v[2 * j] * quick_sigmoid(g[2 * j]), v[2 * j + 1] * quick_sigmoid(g[2 * j + 1]));
        }
    }
    __syncwarp();
}

// A row of a product behind the last layer.
__device__ inline void store_row(const Behind& behind, int row, float value) {
    uint16_t* to = behind.y[0];
    int begin = 0;
#pragma unroll
    for (int m = 1; m < 4; ++m) {
        if (row < behind.end[m - 1]) break;
        to = behind.y[m];
        begin = behind.end[m - 1];
    }
    to[row - begin] = narrow(value);
}

// The warp that chooses experts and copies them.
__device__ void copy_chosen(Ring& ring, Shared& shared, const Given& given, const Owned& own, int lane) {
    wait_for_predecessor();
    const uint64_t* logit_words =
        given.words + AT_COPIES + static_cast<int64_t>(blockIdx.x % COPIES) * COPY_WORDS + AT_LOGITS;
    uint32_t flag = *reinterpret_cast<const volatile uint32_t*>(given.words);
    const int at_once = min(EXPERT_STAGES, own.routed.count - 1), experts = given.experts;
#pragma unroll 1
    for (int i = 0; i < given.layers; ++i) {
        ++flag;
        Logits<MOST_EXPERTS> logits;
        logits.receive(logit_words, flag, experts, lane);
        logits.choose(experts, shared.choice, lane);
        const ExpertMatrices of = given.all[i].experts;
        copy_pairs<HIDDEN, EXPERT_SIZE>(ring, of, shared.choice, own.routed.first, at_once, lane);
        // Weights are wanted at the end of the phase only; the last of these stages says that they are there.
        logits.weigh(logit_words, experts, given.normalise, given.route_scale, shared.choice, lane);
        copy_pairs<HIDDEN, EXPERT_SIZE>(ring, of, shared.choice, own.routed.first + at_once, own.routed.count - at_once,
                                        lane);
        copy_down<HIDDEN, EXPERT_SIZE>(ring, of, shared.choice, own.wide.first, own.wide.count, lane);
    }
}

// What is the same in all layers would be computed once, and kept in registers that the layers need.
#define FORGET asm volatile("" : "+r"(lane), "+r"(warp), "+r"(thread), "+l"(own_words), "+l"(copies));

__device__ inline void run(const Given& given) {
    extern __shared__ __align__(128) unsigned char raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw + STAGES * STAGE_BYTES);
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    Ring ring{shared_address(raw), shared_address(shared.full), shared_address(shared.empty), KNOWN_STAGES};
    Ring chosen{shared_address(raw) + KNOWN_STAGES * STAGE_BYTES, shared_address(shared.full + KNOWN_STAGES),
                shared_address(shared.empty + KNOWN_STAGES), EXPERT_STAGES};
    if (thread == 0) {
        shared.own = owned(given);
        ring.begin();
        chosen.begin();
    }
    __syncthreads();
    admit_successor();
    const Owned& own = shared.own;
    const Layer* const all = given.all;
    const int layers = given.layers;
    if (warp >= WARPS) {
        if (warp == WARPS) copy_known(ring, given, own, lane);
        else copy_chosen(chosen, shared, given, own, lane);
        return;
    }
    uint64_t* const product_words = given.words + AT_PRODUCTS;
    uint64_t* copies = given.words + AT_COPIES;
    const uint64_t* own_words = copies + static_cast<int64_t>(blockIdx.x % COPIES) * COPY_WORDS;
    DeltaPlace place = {};
    // Slots are older than the predecessor (device.cuh).
    if (given.cu_q) place.row = live_row(given.counts, given.cu_q, given.row_slot, given.slots, given.slot_stride, 0);
    place.live = place.row.tokens > 0;
    place.thread = thread;
    place.head = blockIdx.x / QUARTERS;
    place.part = blockIdx.x % QUARTERS;
    NormedChunk<HIDDEN> norm{given.norm_type};
    norm.ask(given.attended ? all[0].inner_norm : all[0].input_norm, warp, lane);
    wait_for_predecessor();
    uint32_t flag = *reinterpret_cast<const volatile uint32_t*>(given.words);
    float residual = 0.0f;
    if (thread < own.wide.count) residual = given.x[own.wide.first + thread];
    int turn = 0;
    uint32_t* const vector = shared.vector[warp];

#pragma unroll 1
    for (int i = 0;; ++i) {
        const bool linear = i > 0 || !given.attended, last = i == layers;
        if (last && own.behind.count == 0) break;
        ++flag;
        FORGET
        DeltaPart delta(place);
        if (linear) {
            auto& sums = shared.sums[turn];
            if (i == 0) norm.read(given.x, vector, sums.squares, warp, lane);
            else norm.receive(own_words + AT_HIDDEN, flag - 1, vector, sums.squares, warp, lane);
            // What comes from memory is asked for behind a wait: one behind it would wait for that as well.
            if (!last) {
                if (delta.works()) delta.ask(all[i].delta, given.types, shared.state);
                norm.ask(all[i].inner_norm, warp, lane);
            }
            const int rows = last ? own.behind.count : own.products.count;
            multiply_rows<HIDDEN>(ring, rows, vector, sums.rows, warp, lane);
            sync_consumers();
            if (thread < rows) {
                const float value = sum_of(sums.rows[thread]) * sums.factor(HIDDEN, given.input_eps);
                if (last) store_row(given.behind, own.behind.first + thread, value);
                else send(product_words + own.products.first + thread, __float_as_uint(widen(narrow(value))), flag);
            }
            if (last) break;
            turn ^= 1;
            FORGET
            if (delta.works()) {
                delta.attend(
                    product_words, flag, all[i].delta, given.types, shared.delta, shared.state, given.scale,
                    given.l2_eps,
                    [&](int copy, int pair, uint32_t bits) {
                        send(copies + copy * COPY_WORDS + AT_ATTENDED + pair, bits, flag);
                    },
                    [&](int copy, float square) {
                        send(copies + copy * COPY_WORDS + AT_SQUARES + blockIdx.x, __float_as_uint(square), flag);
                    });
            }
        }
        FORGET
        {
            auto& sums = shared.sums[turn];
            if (linear) receive_attended(own_words, flag, given.head_eps, vector, warp, lane);
            else read_attended(given.attended, given.attended_gate, vector, warp, lane);
            multiply_rows<ATTENDED>(ring, own.wide.count, vector, sums.rows, warp, lane);
            sync_consumers();
            if (thread < own.wide.count) {
                residual += sum_of(sums.rows[thread]);
                send_row(residual, thread, copies + AT_MIDDLE + own.wide.first / 2, flag);
            }
            turn ^= 1;
        }
        FORGET
        norm.receive(own_words + AT_MIDDLE, flag, vector, shared.sums[turn].squares, warp, lane);
        if (i + 1 < layers || own.behind.count > 0) norm.ask(all[i + 1].input_norm, warp, lane);
        {
            // Tiles of the router, of the shared expert and of the chosen ones, by the same instructions.
            float by = 0.0f;
            Ring now = ring;
            float(*to)[WARPS] = shared.sums[turn].rows;
            int rows = own.router.count + 1, left = 4 * own.routed.count;
#pragma unroll 1
            for (int t = 0;; ++t) {
                multiply_tile<HIDDEN>(now, rows, vector, to, warp, lane);
                if (t == 0) {
                    sync_consumers();
                    const auto& sums = shared.sums[turn];
                    by = sums.factor(HIDDEN, given.inner_eps);
                    if (thread <= own.router.count) {
                        const float value = sum_of(sums.rows[thread]) * by;
                        if (thread == own.router.count) shared.opening = quick_sigmoid(value);
#pragma unroll
                        for (int c = 0; c < COPIES; ++c) {
                            if (thread == own.router.count) break;
                            uint64_t* const to_copy = copies + c * COPY_WORDS + AT_LOGITS + own.router.first;
                            send(to_copy + thread, __float_as_uint(value), flag);
                        }
                    }
                    turn ^= 1;
                    to = shared.sums[turn].rows + ROUTED;
                    rows = 4 * own.shared.count;
                    continue;
                }
                if (t == 1) {
                    if (linear && delta.works()) delta.keep_inputs(all[i].delta);
                    ring = now;
                    now = chosen;
                    to = shared.sums[turn].rows;
                } else {
                    to += 8;
                    left -= 8;
                    if (left <= 0) break;
                }
                rows = min(8, left);
            }
            chosen = now;
            auto& sums = shared.sums[turn];
            sync_consumers();
            const int routed = 2 * own.routed.count;
            if (thread < routed + 2 * own.shared.count) {
                const bool beside = thread >= routed;
                const int own_at = beside ? thread - routed : thread, pair = own_at / 2;
                const float(*rows)[WARPS] = sums.rows + (beside ? ROUTED : 0) + 4 * pair + own_at % 2;
                const float gate = sum_of(rows[0]) * by, up = sum_of(rows[2]) * by;
                const int at = beside ? TOP_K * EXPERT_SIZE / 2 + own.shared.first + pair : own.routed.first + pair;
                const float weight = beside ? shared.opening : shared.choice.weight[at / (EXPERT_SIZE / 2)];
                const float value = __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
                const uint32_t bits = pack(value, __shfl_down_sync(__activemask(), value, 1));
#pragma unroll
                for (int c = 0; c < COPIES; ++c) {
                    if (own_at % 2 == 0) send(copies + c * COPY_WORDS + AT_INNER + at, bits, flag);
                }
            }
            turn ^= 1;
        }
        FORGET
        {
            auto& sums = shared.sums[turn];
            using Down = DownSums<EXPERT_SIZE>;
            constexpr int WORDS = Down::WORDS;
            Down down;
            Down::Rows early[EARLY];  // taken before there is anything to multiply, so that others come meanwhile
#pragma unroll
            for (int e = 0; e < EARLY; ++e) Down::load(chosen, own.wide.count, early[e], warp, lane);
            receive_middle<EXPERT_SIZE, UNITS>(own_words + AT_INNER, flag, vector, warp, lane);
#pragma unroll
            for (int e = 0; e < EARLY; ++e) down.add(early[e], vector + e * WORDS, lane);
#pragma unroll 1
            for (int e = EARLY; e < UNITS; ++e) {
                Down::Rows rows;
                if (e < TOP_K) Down::load(chosen, own.wide.count, rows, warp, lane);
                else Down::load(ring, own.wide.count, rows, warp, lane);
                down.add(rows, vector + e * WORDS, lane);
            }
            down.leave(sums.rows, warp, lane);
            sync_consumers();
            if (thread < own.wide.count) {
                residual += sum_of(sums.rows[thread]);
                if (i + 1 == layers) given.y[own.wide.first + thread] = residual;
                if (i + 1 < layers || own.behind.count > 0) {
                    send_row(residual, thread, copies + AT_HIDDEN + own.wide.first / 2, flag);
                }
            }
            turn ^= 1;
        }
    }
    if (blockIdx.x == 0 && thread == 0) *reinterpret_cast<volatile uint32_t*>(given.words) = flag;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hybrid_layers(const int32_t* counts, const void* table, const float* x, const uint16_t* attended,
              const uint16_t* attended_gate, float* y, const int32_t* cu_q, const int32_t* row_slot,
              const int32_t* slots, uint64_t* words, int32_t layers, int32_t experts, int32_t slot_stride,
              int32_t norm_type, int32_t filters_type, int32_t a_log_type, int32_t dt_bias_type, int32_t head_norm_type,
              float input_eps, float l2_eps, float head_eps, float inner_eps, float scale, float route_scale,
              int32_t normalise, uint16_t* y_0, uint16_t* y_1, uint16_t* y_2, uint16_t* y_3, int32_t end_0,
              int32_t end_1, int32_t end_2, int32_t end_3) {
    run({counts, static_cast<const Layer*>(table), x, attended, attended_gate, y, words, cu_q, row_slot, slots, layers,
         experts, slot_stride, norm_type, {filters_type, a_log_type, dt_bias_type, head_norm_type}, input_eps, l2_eps,
         head_eps, inner_eps, scale, route_scale, normalise != 0,
         {{y_0, y_1, y_2, y_3}, {end_0, end_1, end_2, end_3}}});
}
