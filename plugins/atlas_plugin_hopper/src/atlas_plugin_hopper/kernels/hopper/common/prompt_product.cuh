// x · weightᵀ for prompts: tiles of 64 TOKEN_GROUPS tokens and PROMPT_ROWS weight rows, copied by the tensor memory accelerator
// and multiplied by CONSUMERS warpgroups of one or two groups of 64 tokens each (after CUTLASS's "cooperative" schedule).
//
// Two blocks of a cluster take the same weight rows and neighbouring tokens; each fetches half of the weights for both, which
// halves what the L2 cache has to give. With SHARE_TOKENS they take the same tokens and neighbouring tiles of rows, which saves more
// where a tile has fewer rows than tokens. Clusters are as many as the machine holds and walk over the tiles, so that the
// copies of the next tile run while the sums of the last are stored. Where tiles are too few for the machine, each is summed in
// PARTS of the summed dimension by as many clusters.
#pragma once
#include "tma.cuh"

#ifndef PROMPT_ROWS
#define PROMPT_ROWS 256
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef TOKEN_GROUPS
#define TOKEN_GROUPS CONSUMERS
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef SHARE_TOKENS
#define SHARE_TOKENS 0
#endif

namespace atlas {

constexpr int GROUP_TOKENS = 64, PROMPT_TOKENS = TOKEN_GROUPS * GROUP_TOKENS, PROMPT_DEPTH = PANEL;
constexpr int TILE_COLUMNS = SHARE_TOKENS ? 2 : 1;  // tiles of rows that a cluster has at once
constexpr int PROMPT_PEERS = 2, SHARE = PROMPT_ROWS / PROMPT_PEERS, PROMPT_THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int X_BYTES = PROMPT_TOKENS * PROMPT_DEPTH * 2, STAGE_BYTES = X_BYTES + PROMPT_ROWS * PROMPT_DEPTH * 2;
static_assert(PROMPT_ROWS == 96 || PROMPT_ROWS == 112 || PROMPT_ROWS == 128 || PROMPT_ROWS == 224 || PROMPT_ROWS == 256, "an instruction for this width is not written");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "registers are shared out among two or three");
constexpr int EACH = (TOKEN_GROUPS + CONSUMERS - 1) / CONSUMERS;  // groups of a warpgroup; the last may have one less
constexpr int COPY_REGISTERS = CONSUMERS == 2 ? 40 : EACH == 1 ? 56 : 32, SUM_REGISTERS = CONSUMERS == 2 ? 232 : EACH == 1 ? 152 : 160;
static_assert(TOKEN_GROUPS == CONSUMERS * EACH || TOKEN_GROUPS == CONSUMERS * EACH - 1, "only the last has less");

// A thread's sums: of two tokens 8 apart (`half`), two neighbours of each group of 8 weight rows.
using Sums = float[PROMPT_ROWS / 8][4];

// What a thread sums up: its first token, the tile of weight rows, and which part of the summed dimension; and whether the
// clusters are as many as the parts of all tiles, so that those of one tile may wait for one another; and whether no other follows.
// `which` of the thread's groups of tokens it is.
struct Tile {
    int token, column, part, which;
    bool together, last;
};

// Without work for the warps that neither copy nor multiply.
struct NoEnding {};
template <class Ending>
constexpr bool ENDS = true;
template <>
constexpr bool ENDS<NoEnding> = false;

// A number that all threads of a warp have, so that ptxas knows it: what depends on it goes to uniform registers, from which products
// have their operands' places without a detour, and branches on it leave everything else as it was.
__device__ inline int of_warp(int number) { return __shfl_sync(~0u, number, 0); }

__device__ inline uint32_t block_in_cluster() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline void meet_peer() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}

__device__ inline void arrive_at(uint32_t barrier, int block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                 " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(block)
                 : "memory");
}

// copy_tile into the shared memory of both blocks, announced at the barriers of both.
__device__ inline void copy_tile_to_all(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3)) : "memory");
}

// What this block fetches of a tile of weights, from `row` of a matrix on: half for both, or its own.
__device__ inline void bring_rows(uint32_t to, const CUtensorMap* map, int depth, int row, int peer, uint32_t barrier) {
    if constexpr (SHARE_TOKENS) copy_tile(to, map, depth, row, barrier);
    else copy_tile_to_all(to + peer * SHARE * PROMPT_DEPTH * 2, map, depth, row + peer * SHARE, barrier);
}

// The same of a tile of tokens.
__device__ inline void bring_tokens(uint32_t to, const CUtensorMap* map, int depth, int token, int peer, uint32_t barrier) {
    constexpr int HALF = PROMPT_TOKENS / PROMPT_PEERS;
    if constexpr (SHARE_TOKENS) copy_tile_to_all(to + peer * HALF * PROMPT_DEPTH * 2, map, depth, token + peer * HALF, barrier);
    else copy_tile(to, map, depth, token, barrier);
}

// Which tile comes at which turn: the tokens of a cluster vary fastest, so that clusters that run together share
// weights; past GROUP tiles of tokens the rows advance, so that they share tokens as well.
struct Walk {
    int pairs, columns;
    static constexpr int GROUP = 2;
    __device__ int count() const { return pairs * columns; }
    __device__ void at(int turn, int& pair, int& column) const {
        const int band = turn / (GROUP * columns), inside = turn % (GROUP * columns);
        const int height = min(GROUP, pairs - band * GROUP);
        pair = band * GROUP + inside % height;
        column = inside / height;
    }
};

template <int number>
struct Number {
    static constexpr int value = number;
};

template <int ROWS>
__device__ inline void tile_product(float (&acc)[ROWS / 8][4], uint64_t x, uint64_t weights, int add) {
    if constexpr (ROWS == 256) {
        wide_product(acc, x, weights, add);
    } else if constexpr (ROWS == 224) {
        // The assembler refuses one product of 224 in a kernel that begins with 128 registers a thread.
        constexpr int HALF_ROWS = ROWS / 2;
        auto& halves = reinterpret_cast<float(&)[2][HALF_ROWS / 8][4]>(acc);
        product<HALF_ROWS>(halves[0], x, weights, add);
        product<HALF_ROWS>(halves[1], x, weights + (HALF_ROWS * PROMPT_DEPTH * 2 >> 4), add);
    } else {
        product<ROWS>(acc, x, weights, add);
    }
}

// Narrowed sums of one token from group FIRST on, COUNT groups, to `to`, which has room for `rows` of them; nothing where not `live`.
// Neighbouring lanes exchange, so that each has four neighbours of every second group: whole sectors. All lanes of a warp
// come here, with the same `rows`: shuffles among some of them would have to find out who is there, each time.
template <int FIRST, int COUNT>
__device__ inline void store_elements(const Sums& acc, int half, int rows, bool live, uint16_t* to) {
    const int lane = threadIdx.x % 4, odd = lane & 1;
    const bool whole = rows >= COUNT * 8;
    if constexpr (COUNT % 2) {
        const int at = (COUNT - 1) * 8 + lane * 2;
        if (live && (whole || at < rows)) {
            *reinterpret_cast<uint32_t*>(to + at) = pack(acc[FIRST + COUNT - 1][2 * half], acc[FIRST + COUNT - 1][2 * half + 1]);
        }
    }
    to += odd * 8 + (lane - odd) * 2;
    rows -= odd * 8 + (lane - odd) * 2;
#pragma unroll
    for (int j = 0; j + 1 < COUNT; j += 2) {
        const uint32_t even_group = pack(acc[FIRST + j][2 * half], acc[FIRST + j][2 * half + 1]);
        const uint32_t odd_group = pack(acc[FIRST + j + 1][2 * half], acc[FIRST + j + 1][2 * half + 1]);
        const uint32_t kept = odd ? odd_group : even_group;
        const uint32_t given = __shfl_xor_sync(~0u, odd ? even_group : odd_group, 1);
        const uint2 four = odd ? make_uint2(given, kept) : make_uint2(kept, given);
        if (live && (whole || j * 8 + 4 <= rows)) {
            *reinterpret_cast<uint2*>(to + j * 8) = four;
        } else if (live && j * 8 < rows) {
            *reinterpret_cast<uint32_t*>(to + j * 8) = four.x;
        }
    }
}

// Of a thread's two tokens from `first` on, what their norm divides by is left to who multiplies them: 1 / sqrt(mean(x²) + eps), from
// `parts` sums of squares for each token, by the four lanes that have it; 1 where there are none.
__device__ inline void norm_factors(const float* squares, int parts, int first, int live, int width, float eps, float (&factor)[2]) {
    factor[0] = factor[1] = 1.0f;
    if (squares == nullptr) return;
    const float* of[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) of[half] = squares + static_cast<int64_t>(min(first + half * 8, live - 1)) * parts;
    constexpr int AT_ONCE = 8;
    float sum[2] = {};
    for (int start = 0; start < parts; start += 4 * AT_ONCE) {
        const int mine = start + threadIdx.x % 4;
        float found[2][AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) found[half][i] = mine + 4 * i < parts ? __ldcg(of[half] + mine + 4 * i) : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) sum[half] += found[half][i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
        sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        factor[half] = rsqrtf(__fdividef(sum[half], static_cast<float>(width)) + eps);
    }
}

// `columns` tiles of weight rows for each of `live` tokens of x, whose rows have `width` elements.
// bring(to, column, depth, peer, barrier) asks for this block's part of a tile of weights, as bring_rows does;
// store(sums, tile, prepared) has what a thread summed up of `tile.token` and of the token 8 behind it, either of which may be
// behind the last, and what prepare(tile) gave before the sums. A later part of a tile comes after the earlier ones.
// Where there is an `ending`, three warps that have nothing else to do call ending(tile) for each tile, and for the last one all but the
// copying warp do; `tile.token` is the block's first. Registers are then shared out evenly.
template <class Bring, class Prepare, class Store, class Ending = NoEnding>
__device__ inline void prompt_product(const CUtensorMap* x, int live, int columns, int width, unsigned char* shared, Bring bring,
                                      Prepare prepare, Store store, Ending ending = {}) {
    __shared__ __align__(8) uint64_t barrier_words[2 * STAGES];
    const uint32_t base = shared_address(shared), barriers = shared_address(barrier_words);
    auto full = [&](int stage) { return barriers + stage * 8; };
    auto empty = [&](int stage) { return barriers + (STAGES + stage) * 8; };
    const int peer = static_cast<int>(block_in_cluster());
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), CONSUMERS * PROMPT_PEERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_peer();
    const int all = (width + PROMPT_DEPTH - 1) / PROMPT_DEPTH, each = (all + PARTS - 1) / PARTS;
    constexpr int SPAN = SHARE_TOKENS ? PROMPT_TOKENS : PROMPT_PEERS * PROMPT_TOKENS;  // tokens of a cluster
    const int across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const Walk walk{(live + SPAN - 1) / SPAN, PARTS * across};
    const int clusters = gridDim.x / PROMPT_PEERS, first = blockIdx.x / PROMPT_PEERS;
    // The first token is the block's.
    auto locate = [&](int turn) {
        Tile tile{};
        walk.at(turn, tile.token, tile.column);
        tile.token *= SPAN;
        if constexpr (PARTS > 1) {
            tile.part = tile.column / across;
            tile.column -= tile.part * across;
            tile.together = walk.count() <= clusters;
        }
        if constexpr (SHARE_TOKENS) tile.column = tile.column * TILE_COLUMNS + peer;
        else tile.token += peer * PROMPT_TOKENS;
        tile.last = turn + clusters >= walk.count();
        return tile;
    };
    auto steps_of = [&](const Tile& tile) { return min(each, all - tile.part * each); };
    if (threadIdx.x >= CONSUMERS * WARPGROUP) {
        if constexpr (!ENDS<Ending>) give_registers<COPY_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARPGROUP) {
            auto weights_of = [&](const Tile& tile, int depth, int stage) {
                barrier_expect(full(stage), STAGE_BYTES);
                bring(base + stage * STAGE_BYTES + X_BYTES, tile.column, depth, peer, full(stage));
            };
            // Nobody writes weights: a whole ring of them comes while the predecessor ends.
            int ahead = 0;
            if (first < walk.count()) {
                const Tile tile = locate(first);
                const int some = min(STAGES, steps_of(tile));
                for (; ahead < some; ++ahead) weights_of(tile, (tile.part * each + ahead) * PROMPT_DEPTH, ahead);
            }
            wait_for_predecessor();
            int stage = 0, parity = 1;
            for (int turn = first; turn < walk.count(); turn += clusters) {
                const Tile tile = locate(turn);
                const int steps = steps_of(tile);
                for (int step = 0; step < steps; ++step) {
                    const int depth = (tile.part * each + step) * PROMPT_DEPTH;
                    if (ahead) {
                        --ahead;
                    } else {
                        barrier_wait(empty(stage), parity);
                        weights_of(tile, depth, stage);
                    }
                    bring_tokens(base + stage * STAGE_BYTES, x, depth, tile.token, peer, full(stage));
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        } else {
            wait_for_predecessor();
            if constexpr (ENDS<Ending>) {
                if (threadIdx.x >= CONSUMERS * WARPGROUP + WARP) {
                    for (int turn = first; turn < walk.count(); turn += clusters) ending(locate(turn));
                }
            }
        }
    } else {
        if constexpr (!ENDS<Ending>) take_registers<SUM_REGISTERS>();
        wait_for_predecessor();
        const int group = of_warp(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
        auto multiply = [&](auto groups) {
            constexpr int MANY = decltype(groups)::value;
            const uint32_t mine = group * EACH * GROUP_TOKENS * PROMPT_DEPTH * 2;
            int stage = 0, parity = 0;
            for (int turn = first; turn < walk.count(); turn += clusters) {
                Tile tile = locate(turn);
                const int steps = of_warp(steps_of(tile)), block_token = tile.token;
                stage = of_warp(stage);
                parity = of_warp(parity);
                tile.part = of_warp(tile.part);
                tile.together = of_warp(tile.together);
                auto choose = [&](int which) {
                    tile.which = which;
                    tile.token = block_token + (group * EACH + which) * GROUP_TOKENS + thread / WARP * 16 + lane / 4;
                };
                decltype(prepare(tile)) prepared[MANY];
#pragma unroll
                for (int i = 0; i < MANY; ++i) {
                    choose(i);
                    prepared[i] = prepare(tile);
                }
                Sums acc[MANY];
                int last = 0;
                for (int step = 0; step < steps; ++step) {
                    barrier_wait(full(stage), parity);
                    const uint32_t from = base + stage * STAGE_BYTES;
                    begin_products();
#pragma unroll
                    for (int k = 0; k < PROMPT_DEPTH / 16; ++k)
#pragma unroll
                        for (int i = 0; i < MANY; ++i) {
                            const uint32_t x_from = from + mine + i * GROUP_TOKENS * PROMPT_DEPTH * 2 + k * 32;
                            tile_product<PROMPT_ROWS>(acc[i], summed_inside(x_from), summed_inside(from + X_BYTES + k * 32), step + k);
                        }
                    commit_products();
                    if (step) {
                        wait_products<1>();
                        if (thread < PROMPT_PEERS) arrive_at(empty(last), thread);
                    }
                    last = stage;
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
                wait_products<0>();
                if (thread < PROMPT_PEERS) arrive_at(empty(last), thread);
                if (TILE_COLUMNS > 1 && tile.column >= columns) continue;  // the second of a cluster may have none
#pragma unroll
                for (int i = 0; i < MANY; ++i) {
                    choose(i);
                    store(acc[i], tile, prepared[i]);
                }
            }
        };
        if constexpr (TOKEN_GROUPS == CONSUMERS * EACH) {
            multiply(Number<EACH>());
        } else if (group < CONSUMERS - 1) {
            multiply(Number<EACH>());
        } else {
            multiply(Number<EACH - 1>());
        }
        // Behind the loop: inside, ptxas would keep the sums' registers through it.
        if constexpr (ENDS<Ending>) {
            if (first < walk.count()) ending(locate(first + (walk.count() - 1 - first) / clusters * clusters));
        }
    }
    meet_peer();  // nobody leaves while its peer still writes into its shared memory
}

}  // namespace atlas
