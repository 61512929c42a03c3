/* Counted host allocations with fault injection, and size arithmetic that cannot wrap.
 *
 * All heap memory of the core goes through here, so that a test can make the n-th allocation fail
 * and then check that nothing leaked. Big buffers (slots, shards) are mapped, not allocated here.
 */
#ifndef FSDPC_MEM_H
#define FSDPC_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed memory for `count` items; NULL when out of memory or when the product wraps. */
void *fsdpc_mem_calloc(size_t count, size_t item_bytes);
/* Grows or shrinks; new bytes are not zeroed. On NULL the old block is untouched. */
void *fsdpc_mem_realloc(void *block, size_t count, size_t item_bytes);
char *fsdpc_mem_strdup(const char *text);
/* NULL is allowed. */
void fsdpc_mem_free(void *block);
/* Instead of fsdpc_mem_free, if another user of the block may be left: the block stays as
 * long as the process, and stays reachable, so that no leak is reported. NULL is allowed. */
void fsdpc_mem_leave(void *block);

/* Live allocations, for leak checks in tests. */
int64_t fsdpc_mem_live(void);
/* The n-th allocation from now (1 = the next) fails once; 0 switches injection off. */
void fsdpc_mem_fail_after(int64_t n);
/* True if the injected failure has happened since fsdpc_mem_fail_after(). */
bool fsdpc_mem_failed(void);

/* *out = a * b, and *out = a + b. False when the result does not fit. */
bool fsdpc_size_mul(size_t a, size_t b, size_t *out);
bool fsdpc_size_add(size_t a, size_t b, size_t *out);
/* Rounds up to a multiple of `unit` (> 0); the caller ensures that the result fits. */
static inline size_t
fsdpc_round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

#endif
