/* Memory that this process shares with other ranks, and its forked children.
 *
 * A child is not the rank: what it writes must reach no rank, and what it reads must not change under it.
 * So in a child each listed range becomes private memory at the same address. The memory has the values at
 * the moment of the fork (FSDPC_FORK_VALUES); or it is blank, where only the engine reads it, which refuses
 * to work in a child. fork() copies values once, before the child exists; children that are forked while the
 * values stay the same share one copy.
 */
#ifndef FSDPC_FORKS_H
#define FSDPC_FORKS_H

#include <stdbool.h>
#include <stddef.h>

enum fsdpc_fork_kind {
    FSDPC_FORK_BLANK,  /* zeros in a child */
    FSDPC_FORK_VALUES, /* a copy in a child */
    FSDPC_FORK_ALONE   /* private already: fork() does what is needed */
};
/* Chooses what a child gets of the memory that `owner` describes. Called in fork(): it must not allocate. */
typedef enum fsdpc_fork_kind fsdpc_fork_choice(const void *owner);

/* The number of forks between the first process that asked and this
 * process. A handle that was made at another count belongs to a parent. */
int fsdpc_forks(void);
/* Lists whole pages until fsdpc_forks_remove. `choice` NULL: blank. FSDPC_E_NOMEM: the list cannot grow. */
int fsdpc_forks_add(void *address, size_t bytes, fsdpc_fork_choice *choice, const void *owner);
/* The choice for a range whose values a child always gets. */
enum fsdpc_fork_kind fsdpc_forks_values(const void *owner);
/* Call this before the range is unmapped. A no-op for unlisted addresses, such as a parent's in a child. */
void fsdpc_forks_remove(const void *address);
/* Frees this process's copies of the last fork; children keep theirs. Called where a step begins. */
void fsdpc_forks_forget(void);

#endif
