// Runs frozen command lists on a pool of threads; the caller is one of them.
//
// A command is a kernel split into tasks. Threads take tasks by a counter, and go on to the next command when all tasks
// of this one are done: nobody waits for a thread that holds no task, so a thread that lost its processor delays
// nobody. Waiting spins briefly, then yields, then sleeps.

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef void (*Kernel)(const uint64_t* slots, int task, int ntasks);

constexpr int kSpins = 200;       // pauses before yielding, about ten microseconds
constexpr int kYields = 100;      // yields before sleeping
constexpr long kNap = 20000;      // nanoseconds of one sleep
constexpr int kIdleSpins = 1000;  // pauses of an idle thread before it waits to be woken

struct alignas(64) Command {
    uint64_t claim;  // generation of the run << 32 | next task
    uint32_t done;
    uint32_t tasks;
    Kernel kernel;
    const uint64_t* slots;
};

struct Graph {
    uint32_t generation;
    int count;
    bool parallel;
    Command* commands;
    uint64_t* words;
};

struct Pool {
    int threads;
    bool spin;
    pthread_t* workers;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    Graph* current;
    uint64_t epoch;
    int sleepers;
    int active;
    bool stop;
};

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void rest(int round, bool spin) {
    if (spin && round < kSpins) {
        pause_briefly();
    } else if (round < kSpins + kYields) {
        sched_yield();
    } else {
        const timespec nap = {0, kNap};
        nanosleep(&nap, nullptr);
    }
}

bool superseded(const Command& command, uint32_t generation) {
    return __atomic_load_n(&command.claim, __ATOMIC_ACQUIRE) >> 32 != generation;
}

// Takes part in one run until it is finished. A thread that comes late finds another generation and leaves: a task is
// only claimed together with the generation, and a run is over only when no task is held.
void work(Pool* pool, Graph* graph, uint32_t generation) {
    for (int c = 0; c < graph->count; ++c) {
        Command& command = graph->commands[c];
        uint64_t claim = __atomic_load_n(&command.claim, __ATOMIC_ACQUIRE);
        for (;;) {
            if (claim >> 32 != generation) return;
            const uint32_t task = static_cast<uint32_t>(claim);
            if (task >= command.tasks) break;
            if (!__atomic_compare_exchange_n(&command.claim, &claim, claim + 1, true, __ATOMIC_ACQ_REL,
                                             __ATOMIC_ACQUIRE))
                continue;
            command.kernel(command.slots, static_cast<int>(task), static_cast<int>(command.tasks));
            __atomic_fetch_add(&command.done, 1, __ATOMIC_ACQ_REL);
            claim = __atomic_load_n(&command.claim, __ATOMIC_ACQUIRE);
        }
        for (int round = 0; __atomic_load_n(&command.done, __ATOMIC_ACQUIRE) != command.tasks; ++round) {
            if (superseded(command, generation)) return;
            rest(round, pool->spin);
        }
    }
}

void* serve(void* argument) {
    Pool* pool = static_cast<Pool*>(argument);
    uint64_t seen = 0;
    for (;;) {
        for (int i = 0; pool->spin && i < kIdleSpins && __atomic_load_n(&pool->epoch, __ATOMIC_ACQUIRE) == seen; ++i)
            pause_briefly();
        if (__atomic_load_n(&pool->epoch, __ATOMIC_SEQ_CST) == seen) {
            pthread_mutex_lock(&pool->mutex);
            __atomic_fetch_add(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
            while (__atomic_load_n(&pool->epoch, __ATOMIC_SEQ_CST) == seen)
                pthread_cond_wait(&pool->wake, &pool->mutex);
            __atomic_fetch_sub(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&pool->mutex);
        }
        seen = __atomic_load_n(&pool->epoch, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool->stop, __ATOMIC_SEQ_CST)) return nullptr;
        // ``active`` rises before ``current`` is read: who frees a graph first clears ``current``, then waits for zero.
        __atomic_fetch_add(&pool->active, 1, __ATOMIC_SEQ_CST);
        Graph* graph = __atomic_load_n(&pool->current, __ATOMIC_SEQ_CST);
        if (graph != nullptr) work(pool, graph, __atomic_load_n(&graph->generation, __ATOMIC_SEQ_CST));
        __atomic_fetch_sub(&pool->active, 1, __ATOMIC_SEQ_CST);
    }
}

void announce(Pool* pool) {
    __atomic_fetch_add(&pool->epoch, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

void wait_idle(Pool* pool) {
    for (int round = 0; __atomic_load_n(&pool->active, __ATOMIC_SEQ_CST) != 0; ++round) rest(round, pool->spin);
}

// What becomes of a load.
constexpr uint8_t kWaiting = 0, kDone = 1, kLeft = 2;

constexpr int kMostSlots = 16;  // of a launch that uses what was read

constexpr int64_t kPage = 4096;

// Whether all of it was in the page cache, and now is at ``into``.
bool read_cached(int file, int64_t start, uint64_t nbytes, void* into) {
#if defined(RWF_NOWAIT)
    const iovec all = {into, nbytes};
    return preadv2(file, &all, 1, start, RWF_NOWAIT) == static_cast<ssize_t>(nbytes);
#else
    return false;
#endif
}

}  // namespace

// A pool of ``threads`` threads, the caller included; ``spin`` 0 when they have fewer processors than that. *pool stays
// 0 when memory or threads are refused.
void pool_create(uint64_t* pool, int32_t threads, int32_t spin, int task, int ntasks) {
    *pool = 0;
    Pool* made = static_cast<Pool*>(calloc(1, sizeof(Pool)));
    if (made == nullptr) return;
    made->workers = static_cast<pthread_t*>(calloc(static_cast<size_t>(threads), sizeof(pthread_t)));
    made->threads = 1;
    made->spin = spin != 0;
    pthread_mutex_init(&made->mutex, nullptr);
    pthread_cond_init(&made->wake, nullptr);
    bool complete = made->workers != nullptr;
    while (complete && made->threads < threads) {
        complete = pthread_create(&made->workers[made->threads - 1], nullptr, serve, made) == 0;
        if (complete) made->threads += 1;
    }
    if (complete) *pool = reinterpret_cast<uintptr_t>(made);
    else pool_destroy(made, 0, 1);
}

void pool_destroy(void* pool, int task, int ntasks) {
    Pool* old = static_cast<Pool*>(pool);
    __atomic_store_n(&old->stop, true, __ATOMIC_SEQ_CST);
    announce(old);
    for (int i = 0; i + 1 < old->threads; ++i) pthread_join(old->workers[i], nullptr);
    pthread_cond_destroy(&old->wake);
    pthread_mutex_destroy(&old->mutex);
    free(old->workers);
    free(old);
}

// ``words`` holds for each of ``count`` commands: address of its kernel, tasks (0: one for each thread), number of
// slots, slots. *graph stays 0 when memory is refused.
void graph_create(void* pool, uint64_t* graph, const uint64_t* words, int64_t length, int32_t count, int task,
                  int ntasks) {
    *graph = 0;
    Graph* made = static_cast<Graph*>(calloc(1, sizeof(Graph)));
    if (made == nullptr) return;
    made->count = count;
    made->words = static_cast<uint64_t*>(malloc(static_cast<size_t>(length + 1) * sizeof(uint64_t)));
    void* commands = nullptr;
    if (made->words == nullptr ||
        posix_memalign(&commands, alignof(Command), static_cast<size_t>(count + 1) * sizeof(Command)) != 0) {
        free(made->words);
        free(made);
        return;
    }
    memcpy(made->words, words, static_cast<size_t>(length) * sizeof(uint64_t));
    made->commands = static_cast<Command*>(commands);
    const uint64_t* word = made->words;
    for (int c = 0; c < count; ++c) {
        const uint32_t tasks =
            word[1] != 0 ? static_cast<uint32_t>(word[1]) : static_cast<uint32_t>(static_cast<Pool*>(pool)->threads);
        made->commands[c] = {0, 0, tasks, reinterpret_cast<Kernel>(static_cast<uintptr_t>(word[0])), word + 3};
        made->parallel = made->parallel || tasks > 1;
        word += 3 + word[2];
    }
    *graph = reinterpret_cast<uintptr_t>(made);
}

// Returns when every command is done.
void graph_run(void* pool, void* graph, int task, int ntasks) {
    Pool* on = static_cast<Pool*>(pool);
    Graph* list = static_cast<Graph*>(graph);
    if (!list->parallel || on->threads == 1) {
        for (int c = 0; c < list->count; ++c) {
            const Command& command = list->commands[c];
            for (uint32_t i = 0; i < command.tasks; ++i)
                command.kernel(command.slots, static_cast<int>(i), static_cast<int>(command.tasks));
        }
        return;
    }
    const uint32_t generation = list->generation + 1;
    __atomic_store_n(&list->generation, generation, __ATOMIC_SEQ_CST);
    for (int c = 0; c < list->count; ++c) {
        __atomic_store_n(&list->commands[c].done, 0u, __ATOMIC_RELAXED);
        __atomic_store_n(&list->commands[c].claim, static_cast<uint64_t>(generation) << 32, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&on->current, list, __ATOMIC_SEQ_CST);
    announce(on);
    work(on, list, generation);
    __atomic_store_n(&on->current, static_cast<Graph*>(nullptr), __ATOMIC_SEQ_CST);
}

void graph_destroy(void* pool, void* graph, int task, int ntasks) {
    wait_idle(static_cast<Pool*>(pool));
    Graph* old = static_cast<Graph*>(graph);
    free(old->commands);
    free(old->words);
    free(old);
}

// Brings up to ``most`` loads that nobody has taken yet, in order; any number of threads at once, each with a room of its
// own, ``nbytes`` long: room 0 is at ``address``, the others behind it. ``offsets[i]`` is where load i begins in ``words``:
// a file's descriptor, where in it, bytes, the address in room 0 they are read to, the number of launches that use them
// there, and those as graph_create has them; slots that point into room 0 point into the thread's own instead.
// ``states`` become kDone, or kLeft where a read would have had to wait for a disk, or failed: nothing was launched then.
void loads_run(const uint64_t* words, const int64_t* offsets, uint8_t* states, int64_t* next, int64_t count, void* address,
               int64_t nbytes, int64_t room, int64_t most, int task, int ntasks) {
    const uint64_t first = reinterpret_cast<uintptr_t>(address), size = static_cast<uint64_t>(nbytes);
    const auto own = [&](uint64_t slot) { return slot - first < size ? slot + static_cast<uint64_t>(room) * size : slot; };
    for (; most > 0; --most) {
        const int64_t load = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (load >= count) return;
        const uint64_t* word = words + offsets[load];
        const bool there = read_cached(static_cast<int>(word[0]), static_cast<int64_t>(word[1]), word[2],
                                       reinterpret_cast<void*>(static_cast<uintptr_t>(own(word[3]))));
        uint64_t launches = there ? word[4] : 0;
        for (word += 5; launches != 0; --launches, word += 3 + word[2]) {
            const Kernel kernel = reinterpret_cast<Kernel>(static_cast<uintptr_t>(word[0]));
            const int tasks = word[1] != 0 ? static_cast<int>(word[1]) : 1;
            uint64_t slots[kMostSlots];
            for (uint64_t i = 0; i < word[2]; ++i) slots[i] = own(word[3 + i]);
            for (int i = 0; i < tasks; ++i) kernel(slots, i, tasks);
        }
        __atomic_store_n(&states[load], there ? kDone : kLeft, __ATOMIC_RELEASE);
    }
}

// Has the system find memory for fresh pages from ``address`` on, which whoever first writes there would wait for; what is
// there stays as it is, whoever writes it meanwhile. Not by madvise, which keeps all other threads from mapping anything, as
// allocators do, until it is done. ``state`` is {ends it when not 0, bytes done}.
void memory_populate(void* address, int64_t nbytes, int64_t* state, int task, int ntasks) {
    for (int64_t done = 0; done < nbytes && __atomic_load_n(&state[0], __ATOMIC_RELAXED) == 0; done += kPage) {
        char nothing = 0;
        __asm__("" : "+r"(nothing));  // or a compiler that sees that nothing is changed would only read
        __atomic_fetch_or(static_cast<char*>(address) + done, nothing, __ATOMIC_RELAXED);
        __atomic_store_n(&state[1], done + kPage < nbytes ? done + kPage : nbytes, __ATOMIC_RELAXED);
    }
}

void memory_copy(void* target, const void* source, int64_t nbytes, int task, int ntasks) {
    memcpy(target, source, static_cast<size_t>(nbytes));
}

void memory_set(void* target, int32_t value, int64_t nbytes, int task, int ntasks) {
    memset(target, value, static_cast<size_t>(nbytes));
}
