/* Counted host allocations with fault injection, and size arithmetic that cannot wrap.
 *
 * The core allocates all heap memory by these functions, so that a test can make the n-th allocation
 * fail and then check that nothing leaked. Big buffers (slots, shards) are mapped instead.
 */
#ifndef FSDPC_MEM_H
#define FSDPC_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Returns zeroed memory for `count` items, or NULL when out of memory or when the product wraps. */
void *fsdpc_mem_calloc(size_t count, size_t item_bytes);
/* Grows or shrinks a block; new bytes are not zeroed. If the result is NULL, the old block is unchanged. */
void *fsdpc_mem_realloc(void *block, size_t count, size_t item_bytes);
char *fsdpc_mem_strdup(const char *text);
/* Frees a block of the functions above. NULL is allowed. */
void fsdpc_mem_free(void *block);
/* Call this instead of fsdpc_mem_free if another thread may still use the block. The block stays allocated
 * and reachable until the process ends, so that no leak is reported. NULL is allowed. */
void fsdpc_mem_leave(void *block);

/* Returns the number of live allocations, for leak checks in tests. */
int64_t fsdpc_mem_live(void);
/* The n-th allocation from now (1 = the next) fails once; 0 switches injection off. */
void fsdpc_mem_fail_after(int64_t n);
/* True if the injected failure has happened since fsdpc_mem_fail_after(). */
bool fsdpc_mem_failed(void);

/* Set *out to a * b, or to a + b. Return false if the result does not fit. */
bool fsdpc_size_mul(size_t a, size_t b, size_t *out);
bool fsdpc_size_add(size_t a, size_t b, size_t *out);
/* Rounds up to a multiple of `unit` (> 0); the caller ensures that the result fits. */
static inline size_t
fsdpc_round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

#endif
