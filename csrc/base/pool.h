/* Helper threads for big kernels: one parallel loop at a time.
 *
 * Threads start when first needed, spin briefly for the next loop and then sleep. A loop never
 * waits for a thread that has not begun: the caller works too, and closes the loop when nothing is
 * left. A second caller at the same moment runs its loop alone. After fork() the child has no
 * helper threads and starts its own when needed.
 */
#ifndef FSDPC_POOL_H
#define FSDPC_POOL_H

#include <stdint.h>

enum { FSDPC_POOL_MAX_THREADS = 256 };

typedef struct fsdpc_pool fsdpc_pool;

/* Does the part [begin, end) of a loop. Called from several threads at once. */
typedef void fsdpc_pool_task(void *context, int64_t begin, int64_t end);

/* Starts no thread yet. The caller frees with fsdpc_pool_free. FSDPC_E_NOMEM. */
int fsdpc_pool_new(fsdpc_pool **out);
/* Ends and joins the threads; no loop may be running. NULL is allowed. */
void fsdpc_pool_free(fsdpc_pool *pool);
/* Runs task over [0, n) in parts of `grain` (> 0; the last may be shorter), on up to `threads`
 * threads, the caller included. Returns when all is done. Where threads cannot be started, fewer
 * do the work. */
void fsdpc_pool_run(fsdpc_pool *pool, int threads, int64_t n, int64_t grain, fsdpc_pool_task *task,
                    void *context);

#endif
