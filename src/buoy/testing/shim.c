/* Counts, limits and fails large aligned allocations: the ones that hold tensors.
 *
 * Preloaded (LD_PRELOAD) into a training on the CPU: PyTorch's and TensorFlow's CPU allocators both end in
 * posix_memalign or aligned_alloc, so a refusal here is met exactly as a real one would be. Plain malloc is left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#define SLOTS (1u << 20)
#define GONE ((void *)1)

static atomic_long live, peak, seen, refused;
static atomic_long budget, fail_at, fail_count, smallest = 4096, counting;

static int (*real_posix_memalign)(void **, size_t, size_t);
static void *(*real_aligned_alloc)(size_t, size_t);
static void (*real_free)(void *);

/* Which pointers are ours, and how large: open addressing, no locks, no allocation. */
static _Atomic(void *) slots[SLOTS];
static long sizes[SLOTS];

static void find_real(void)
{
    if (real_free)
        return;
    real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    real_free = dlsym(RTLD_NEXT, "free");
}

static unsigned slot_of(void *pointer)
{
    return (unsigned)(((unsigned long)pointer >> 6) * 11400714819323198485ul >> 44);
}

static void remember(void *pointer, long size)
{
    unsigned first = slot_of(pointer);
    for (unsigned step = 0; step < SLOTS; step++) {
        unsigned at = (first + step) & (SLOTS - 1);
        void *there = slots[at];
        if (there && there != GONE)
            continue;
        if (atomic_compare_exchange_strong(&slots[at], &there, pointer)) {
            sizes[at] = size;
            return;
        }
    }
}

static long forget(void *pointer)
{
    unsigned first = slot_of(pointer);
    for (unsigned step = 0; step < SLOTS; step++) {
        unsigned at = (first + step) & (SLOTS - 1);
        void *there = slots[at];
        if (!there)
            return 0;
        if (there == pointer) {
            long size = sizes[at];
            slots[at] = GONE;
            return size;
        }
    }
    return 0;
}

static int refuse(size_t alignment, size_t size)
{
    /* Page-aligned: oneDNN's scratch buffers. It crashes when one is refused, and no tensor is ever in them. */
    if (!counting || size < (size_t)smallest || alignment >= 4096)
        return 0;
    long number = ++seen;
    long from = fail_at, count = fail_count;
    if ((from && number >= from && number < from + count) || (budget && live + (long)size > budget)) {
        refused++;
        return 1;
    }
    return 0;
}

static void granted(void *pointer, size_t size)
{
    if (size < 1024)
        return;
    remember(pointer, (long)size);
    long now = (live += (long)size);
    long highest = peak;
    while (now > highest && !atomic_compare_exchange_weak(&peak, &highest, now))
        ;
}

int posix_memalign(void **result, size_t alignment, size_t size)
{
    find_real();
    if (refuse(alignment, size))
        return ENOMEM;
    int failed = real_posix_memalign(result, alignment, size);
    if (!failed)
        granted(*result, size);
    return failed;
}

void *aligned_alloc(size_t alignment, size_t size)
{
    find_real();
    if (refuse(alignment, size)) {
        errno = ENOMEM;
        return NULL;
    }
    void *pointer = real_aligned_alloc(alignment, size);
    if (pointer)
        granted(pointer, size);
    return pointer;
}

void free(void *pointer)
{
    find_real();
    if (pointer && live > 0) {
        long size = forget(pointer);
        if (size)
            live -= size;
    }
    real_free(pointer);
}

/* Called from Python through ctypes; see shim.py. */
void buoy_shim_arm(long new_budget, long new_fail_at, long new_fail_count, long new_smallest)
{
    budget = new_budget;
    fail_at = new_fail_at;
    fail_count = new_fail_count;
    smallest = new_smallest;
    seen = 0;
    refused = 0;
    counting = 1;
}

void buoy_shim_disarm(void) { counting = 0; }

void buoy_shim_reset_peak(void) { peak = (long)live; }

long buoy_shim_read(int which)
{
    return which == 0 ? live : which == 1 ? peak : which == 2 ? seen : refused;
}
