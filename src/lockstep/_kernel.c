/* All-reduce through memory that the ranks of a node share.
 *
 * Plain C11, no header of Python or torch: the library is loaded by ctypes. Everything that the
 * ranks share lies in one mapping: a slot for each rank (struct slot), and their data.
 *
 * Ranks meet by epochs. A rank arrives at an epoch by storing its number in its own slot, and
 * waits until every slot holds that number or a later one. Numbers only grow (modulo 2^32, compared
 * by their difference), so there is no ABA, and a rank that runs ahead is no trouble.
 *
 * A wait spins for a while, or gives its core away for a while if ranks outnumber cores, since to
 * be woken costs more; then it sleeps on a futex at the gate, a slot behind those of the ranks.
 * Arrivals are counted there; the rank that completes an epoch opens the gate for it, so that each
 * sleeper is woken once, and not by one late rank after the other. No wake-up is lost: the sleeper
 * counts itself in before it looks at the gate for the last time, the opener moves the gate before
 * it looks at the count of sleepers, and both are sequentially consistent. If the opener dies in
 * between, the sleepers find all ranks arrived when their time is over.
 *
 * Every function that waits returns after a limit, with its progress in *state, and is called
 * again with it: so the caller can look after signals and dead ranks.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif

enum { DONE = -1, DIFFERENT = -2 };
enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum { CHUNK = 1024 }; /* elements of one pass: they stay in the first-level cache */

struct slot {
    _Alignas(128) _Atomic uint32_t epoch;
    _Atomic uint32_t sleepers;
    int64_t signature[2]; /* of the call that an even and an odd epoch begins */
    _Atomic uint64_t arrivals; /* at the gate: of all ranks, at all epochs */
};

struct team {
    struct slot *slots; /* of the ranks, then the gate */
    int32_t size, rank;
    int32_t spins, yields; /* looks of one wait that keep the core, and that give it away */
    int64_t nanoseconds; /* limit of one wait */
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int reached(const struct slot *s, uint32_t epoch)
{
    return (int32_t)(atomic_load_explicit(&s->epoch, memory_order_acquire) - epoch) >= 0;
}

static void arrive(const struct team *t, uint32_t epoch)
{
    struct slot *gate = &t->slots[t->size];
    atomic_store(&t->slots[t->rank].epoch, epoch);
    if ((atomic_fetch_add(&gate->arrivals, 1) + 1) % (uint64_t)t->size)
        return;
    /* A rank that was interrupted here must not move the gate back. */
    uint32_t open = atomic_load(&gate->epoch);
    while ((int32_t)(open - epoch) < 0 && !atomic_compare_exchange_weak(&gate->epoch, &open, epoch))
        ;
    if (atomic_load(&gate->sleepers))
        syscall(SYS_futex, &gate->epoch, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleep until the gate is open for the epoch or the deadline is over. */
static void sleep_at(struct slot *gate, uint32_t epoch, int64_t deadline)
{
    int64_t left = deadline - now();
    if (left <= 0)
        return;
    struct timespec limit = {left / 1000000000, left % 1000000000};
    atomic_fetch_add(&gate->sleepers, 1);
    uint32_t seen = atomic_load(&gate->epoch);
    if ((int32_t)(seen - epoch) < 0)
        syscall(SYS_futex, &gate->epoch, FUTEX_WAIT, seen, &limit, NULL, 0);
    atomic_fetch_sub(&gate->sleepers, 1);
}

/* Wait until all have reached the epoch. Returns DONE, or the first rank that has not. */
static int await(const struct team *t, uint32_t epoch)
{
    int64_t deadline = 0;
    for (int r = 0; r < t->size; r++) {
        const struct slot *s = &t->slots[r];
        for (int spin = 0; spin < t->spins && !reached(s, epoch); spin++)
            relax();
        for (int look = 0; look < t->yields && !reached(s, epoch); look++)
            sched_yield();
        while (!reached(s, epoch)) {
            if (!deadline)
                deadline = now() + t->nanoseconds;
            else if (now() >= deadline)
                return r;
            sleep_at(&t->slots[t->size], epoch, deadline);
        }
    }
    return DONE;
}

static int agreed(const struct team *t, uint32_t epoch)
{
    for (int r = 0; r < t->size; r++)
        if (t->slots[r].signature[epoch & 1] != t->slots[t->rank].signature[epoch & 1])
            return 0;
    return 1;
}

/* The half types as float: bfloat16 is its upper half, float16 is converted. */
static inline float from_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

/* Sum a chunk over all inputs, in the order of the ranks, into acc. */
#define SUM_CHUNK(NAME, TYPE, WIDE, LOAD)                                                        \
    CLONES static void NAME(WIDE *restrict acc, void *const *in, int n, size_t at, size_t count) \
    {                                                                                            \
        const TYPE *first = (const TYPE *)in[0] + at;                                            \
        for (size_t i = 0; i < count; i++)                                                       \
            acc[i] = LOAD(first[i]);                                                             \
        for (int r = 1; r < n; r++) {                                                            \
            const TYPE *next = (const TYPE *)in[r] + at;                                         \
            for (size_t i = 0; i < count; i++)                                                   \
                acc[i] += LOAD(next[i]);                                                         \
        }                                                                                        \
    }
#define ITSELF(x) (x)

SUM_CHUNK(sum_f32, float, float, ITSELF)
SUM_CHUNK(sum_f64, double, double, ITSELF)
SUM_CHUNK(sum_bf16, uint16_t, float, from_bf16)

CLONES static void round_bf16(uint16_t *restrict out, const float *restrict acc, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = to_bf16(acc[i]);
}

#if defined(__FLT16_MANT_DIG__)
#define HAVE_FLOAT16 1
#define WIDEN(x) ((float)(x))
SUM_CHUNK(sum_f16, _Float16, float, WIDEN)

CLONES static void round_f16(_Float16 *restrict out, const float *restrict acc, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = (_Float16)acc[i];
}
#else
#define HAVE_FLOAT16 0
#endif

static size_t width(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

/* Sum elements begin to end over n inputs and write them to m outputs. An output may be an input:
 * a chunk is read from all before it is written to any. */
static void sum(int dtype, void *const *in, int n, void *const *out, int m, size_t begin, size_t end)
{
    union {
        float f32[CHUNK];
        double f64[CHUNK];
    } acc;
    uint16_t half[CHUNK];
    for (size_t at = begin; at < end; at += CHUNK) {
        size_t count = end - at < CHUNK ? end - at : CHUNK;
        const void *result = half;
        switch (dtype) {
        case FLOAT32: sum_f32(acc.f32, in, n, at, count); result = acc.f32; break;
        case FLOAT64: sum_f64(acc.f64, in, n, at, count); result = acc.f64; break;
        case BFLOAT16: sum_bf16(acc.f32, in, n, at, count); round_bf16(half, acc.f32, count); break;
#if HAVE_FLOAT16
        case FLOAT16:
            sum_f16(acc.f32, in, n, at, count);
            round_f16((_Float16 *)half, acc.f32, count);
            break;
#endif
        }
        for (int r = 0; r < m; r++)
            memcpy((char *)out[r] + at * width(dtype), result, count * width(dtype));
    }
}

/* The slice of a rank: as equal as cache lines allow. */
static void slice(const struct team *t, size_t count, int dtype, size_t *begin, size_t *end)
{
    size_t line = 64 / width(dtype), lines = (count + line - 1) / line;
    *begin = lines * t->rank / t->size * line;
    *end = lines * (t->rank + 1) / t->size * line;
    *begin = *begin < count ? *begin : count;
    *end = *end < count ? *end : count;
}

/* Counted up when a function changes, so that an old library is not taken for this one. */
int lockstep_version(void) { return 4; }
size_t lockstep_slot_bytes(void) { return sizeof(struct slot); }
size_t lockstep_team_bytes(void) { return sizeof(struct team); }
int lockstep_has_float16(void) { return HAVE_FLOAT16; }

/* Sum begin to end over windows and write it into all of them; for tests and for one rank. */
void lockstep_sum(int dtype, void *const *windows, int n, size_t begin, size_t end)
{
    sum(dtype, windows, n, windows, n, begin, end);
}

/* Read with what signature each rank came to an epoch that all have reached. */
void lockstep_signatures(const struct team *t, uint32_t epoch, int64_t *out)
{
    for (int r = 0; r < t->size; r++)
        out[r] = t->slots[r].signature[epoch & 1];
}

/* Meet at an epoch. state[0] is 0 at the first call. Returns DONE, DIFFERENT or a late rank. */
int lockstep_meet(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state)
{
    if (state[0] == 0) {
        t->slots[t->rank].signature[epoch & 1] = signature;
        arrive(t, epoch);
        state[0] = 1;
    }
    int late = await(t, epoch);
    return late != DONE ? late : agreed(t, epoch) ? DONE : DIFFERENT;
}

/* Meet for block k of a call, which takes epoch + k: only the first one compares signatures. */
static int next(const struct team *t, uint32_t epoch, size_t k, int64_t signature, int64_t *state)
{
    if (k == 0)
        return lockstep_meet(t, epoch, signature, state);
    if (state[0] == 0)
        arrive(t, epoch + (uint32_t)k);
    state[0] = 1;
    return await(t, epoch + (uint32_t)k);
}

/* Where the block of an epoch lies: a place has two sides. A rank writes to a side again two epochs
 * later, when all have arrived at the epoch between and so have left that of the side. */
static size_t side(uint32_t epoch, size_t k, size_t bytes) { return ((epoch + k) & 1) * bytes; }

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* All-reduce of windows that all ranks see: one fused pass. The sum goes into the first `targets`
 * windows. Takes epochs e and e + 1. */
int lockstep_windows(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                     void *const *windows, size_t count, int dtype, int targets)
{
    size_t begin, end;
    if (state[0] < 2) {
        int met = lockstep_meet(t, epoch, signature, state);
        if (met != DONE)
            return met;
        slice(t, count, dtype, &begin, &end);
        sum(dtype, windows, t->size, windows, targets, begin, end);
        arrive(t, epoch + 1);
        state[0] = 2;
    }
    return await(t, epoch + 1);
}

/* Copy the first window into all others; each rank copies its slice. Takes epochs e and e + 1. */
int lockstep_spread(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                    void *const *windows, size_t count, int dtype)
{
    size_t begin, end, w = width(dtype);
    if (state[0] < 2) {
        int met = lockstep_meet(t, epoch, signature, state);
        if (met != DONE)
            return met;
        slice(t, count, dtype, &begin, &end);
        for (size_t at = begin; at < end; at += CHUNK)
            for (int r = 1; r < t->size; r++)
                memcpy((char *)windows[r] + at * w, (char *)windows[0] + at * w,
                       least(CHUNK, end - at) * w);
        arrive(t, epoch + 1);
        state[0] = 2;
    }
    return await(t, epoch + 1);
}

/* All-reduce of a few bytes: each rank puts them into its place, all add up all of them. Takes
 * epoch e. places[r] are two sides of `bytes` each. */
int lockstep_small(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                   void *const *places, size_t bytes, void *data, size_t count, int dtype)
{
    void *in[64], *out[1] = {data};
    size_t at = side(epoch, 0, bytes);
    if (state[0] == 0)
        memcpy((char *)places[t->rank] + at, data, count * width(dtype));
    int met = lockstep_meet(t, epoch, signature, state);
    if (met != DONE)
        return met;
    for (int r = 0; r < t->size; r++)
        in[r] = (char *)places[r] + at;
    sum(dtype, in, t->size, out, 1, 0, count);
    return DONE;
}

/* All-reduce of data that lies elsewhere, block by block through the places, so that the copies
 * stay in the cache. Takes an epoch for each block and one more. While block k is summed, block
 * k - 1 is copied out and block k + 1 will be copied in to the other side of the place. */
int lockstep_staged(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                    void *const *places, size_t bytes, void *data, size_t count, int dtype)
{
    size_t w = width(dtype), each = bytes / w, blocks = (count + each - 1) / each;
    char *mine = places[t->rank], *target = data;
    void *in[64];
    /* state[0]: 0 before, 1 after this rank has arrived; state[1]: the block */
    for (size_t k = (size_t)state[1]; k <= blocks; k++) {
        size_t n = k < blocks ? least(each, count - k * each) : 0;
        if (state[0] == 0 && n)
            memcpy(mine + side(epoch, k, bytes), target + k * each * w, n * w);
        int met = next(t, epoch, k, signature, state);
        if (met != DONE)
            return met;
        if (k)
            memcpy(target + (k - 1) * each * w, mine + side(epoch, k - 1, bytes),
                   least(each, count - (k - 1) * each) * w);
        if (n) {
            size_t begin, end;
            for (int r = 0; r < t->size; r++)
                in[r] = (char *)places[r] + side(epoch, k, bytes);
            slice(t, n, dtype, &begin, &end);
            sum(dtype, in, t->size, in, t->size, begin, end);
        }
        state[0] = 0;
        state[1] = (int64_t)k + 1;
    }
    return DONE;
}

/* Copy the root's bytes to all ranks, block by block. Takes an epoch for each block, at least one. */
int lockstep_broadcast(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                       void *const *places, size_t bytes, void *data, size_t count, int root)
{
    char *target = data;
    size_t k = (size_t)state[1];
    do {
        size_t at = k * bytes, n = least(bytes, count - at);
        char *place = (char *)places[root] + side(epoch, k, bytes);
        if (state[0] == 0 && t->rank == root)
            memcpy(place, target + at, n);
        int met = next(t, epoch, k, signature, state);
        if (met != DONE)
            return met;
        if (t->rank != root)
            memcpy(target + at, place, n);
        state[0] = 0;
        state[1] = (int64_t)++k;
    } while (k * bytes < count);
    return DONE;
}

/* Copy the bytes of rank r into outputs[r] on all ranks. Takes an epoch for each block, at least
 * one. Where a rank's own output is its data, it stays as it is. */
int lockstep_gather(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                    void *const *places, size_t bytes, const void *data, size_t count,
                    void *const *outputs)
{
    size_t k = (size_t)state[1];
    do {
        size_t at = k * bytes, n = least(bytes, count - at);
        if (state[0] == 0)
            memcpy((char *)places[t->rank] + side(epoch, k, bytes), (const char *)data + at, n);
        int met = next(t, epoch, k, signature, state);
        if (met != DONE)
            return met;
        for (int i = 0; i < t->size; i++) {
            int r = (t->rank + i) % t->size; /* not all at the same place at once */
            if (r != t->rank || outputs[r] != data)
                memcpy((char *)outputs[r] + at, (char *)places[r] + side(epoch, k, bytes), n);
        }
        state[0] = 0;
        state[1] = (int64_t)++k;
    } while (k * bytes < count);
    return DONE;
}

/* Sum the r-th of `size` parts of the data over all ranks, on rank r, into out. A part has `count`
 * elements, and each rank's places hold a block of every part. Takes an epoch for each block, at
 * least one. out may be the rank's own part of its data. */
int lockstep_scatter(const struct team *t, uint32_t epoch, int64_t signature, int64_t *state,
                     void *const *places, size_t bytes, const void *data, void *out, size_t count,
                     int dtype)
{
    size_t w = width(dtype), each = bytes / (size_t)t->size / 64 * 64 / w, k = (size_t)state[1];
    void *in[64], *target[1];
    do {
        size_t at = k * each, n = least(each, count - at);
        if (state[0] == 0)
            for (int r = 0; r < t->size; r++)
                memcpy((char *)places[t->rank] + side(epoch, k, bytes) + (size_t)r * each * w,
                       (const char *)data + ((size_t)r * count + at) * w, n * w);
        int met = next(t, epoch, k, signature, state);
        if (met != DONE)
            return met;
        for (int r = 0; r < t->size; r++)
            in[r] = (char *)places[r] + side(epoch, k, bytes) + (size_t)t->rank * each * w;
        target[0] = (char *)out + at * w;
        sum(dtype, in, t->size, target, 1, 0, n);
        state[0] = 0;
        state[1] = (int64_t)++k;
    } while (k * each < count);
    return DONE;
}
