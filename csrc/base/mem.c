/* Counted host allocations. See mem.h. */
#include "base/mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static _Atomic int64_t live_blocks;
static _Atomic int64_t fail_countdown;
static _Atomic int fail_happened;

static bool
injected_failure(void)
{
    if (atomic_load(&fail_countdown) == 0) {
        return false;
    }
    if (atomic_fetch_sub(&fail_countdown, 1) != 1) {
        return false;
    }
    atomic_store(&fail_happened, 1);
    return true;
}

void *
fsdpc_mem_calloc(size_t count, size_t item_bytes)
{
    size_t bytes;
    if (!fsdpc_size_mul(count, item_bytes, &bytes) || injected_failure()) {
        return NULL;
    }
    void *block = calloc(1, bytes ? bytes : 1);
    if (block) {
        atomic_fetch_add(&live_blocks, 1);
    }
    return block;
}

void *
fsdpc_mem_realloc(void *block, size_t count, size_t item_bytes)
{
    size_t bytes;
    if (!fsdpc_size_mul(count, item_bytes, &bytes) || injected_failure()) {
        return NULL;
    }
    void *grown = realloc(block, bytes ? bytes : 1);
    if (grown && !block) {
        atomic_fetch_add(&live_blocks, 1);
    }
    return grown;
}

char *
fsdpc_mem_strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = fsdpc_mem_calloc(bytes, 1);
    if (copy) {
        memcpy(copy, text, bytes);
    }
    return copy;
}

void
fsdpc_mem_free(void *block)
{
    if (block) {
        atomic_fetch_sub(&live_blocks, 1);
        free(block);
    }
}

int64_t
fsdpc_mem_live(void)
{
    return atomic_load(&live_blocks);
}

void
fsdpc_mem_fail_after(int64_t n)
{
    atomic_store(&fail_happened, 0);
    atomic_store(&fail_countdown, n);
}

bool
fsdpc_mem_failed(void)
{
    return atomic_load(&fail_happened) != 0;
}

bool
fsdpc_size_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

bool
fsdpc_size_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

struct left {
    void *block;
    struct left *next;
};

static struct left *_Atomic all_left;

void
fsdpc_mem_leave(void *block)
{
    struct left *left = block ? malloc(sizeof *left) : NULL;
    if (!left) {
        return;
    }
    *left = (struct left){block, atomic_load(&all_left)};
    while (!atomic_compare_exchange_weak(&all_left, &left->next, left)) {}
}
