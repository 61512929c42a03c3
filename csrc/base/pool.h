/* Helper threads for big kernels: one parallel loop at a time.
 *
 * The first loop starts the threads. A thread without work spins briefly for the next loop, then
 * sleeps. The caller also works on its loop, closes the loop when no part is left, and does not wait
 * for threads that have not entered the loop. While a loop runs, a second caller gets no helper threads.
 * After fork() the child has no helper threads; its first loop starts new ones.
 */
#ifndef FSDPC_POOL_H
#define FSDPC_POOL_H

#include <stdint.h>

enum { FSDPC_POOL_MAX_THREADS = 256 };

typedef struct fsdpc_pool fsdpc_pool;

/* Does the part [begin, end) of a loop. Several threads may call a task at once, for different parts. */
typedef void fsdpc_pool_task(void *context, int64_t begin, int64_t end);

/* Makes a pool without threads; the caller frees it with fsdpc_pool_free. Fails with FSDPC_E_NOMEM. */
int fsdpc_pool_new(fsdpc_pool **out);
/* Ends and joins the threads; no loop may be running. NULL is allowed. */
void fsdpc_pool_free(fsdpc_pool *pool);
/* Runs `task` over [0, n) in parts of `grain` elements (> 0; the last part may be shorter) on up to `threads`
 * threads, including the caller's. With one thread, or while another loop runs, the caller does everything as
 * one part. Returns when all parts are done. If threads cannot be started, fewer threads do the work. */
void fsdpc_pool_run(fsdpc_pool *pool, int threads, int64_t n, int64_t grain, fsdpc_pool_task *task,
                    void *context);

#endif
