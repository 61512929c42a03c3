/* What a forked child gets of the memory that this process shares with other ranks.
 *
 * A child is not a rank: no rank may see what the child writes, and what the child reads must not change.
 * So in a child each listed range becomes private memory at the same address. The memory has the values at
 * the moment of the fork (FSDPC_FORK_VALUES). If only the engine reads a range, the memory is blank
 * (FSDPC_FORK_BLANK), because the engine refuses to work in a child. Values are copied once, before the child
 * exists; children that are forked while the values stay the same share one copy.
 */
#ifndef FSDPC_FORKS_H
#define FSDPC_FORKS_H

#include <stdbool.h>
#include <stddef.h>

enum fsdpc_fork_kind {
    FSDPC_FORK_BLANK,  /* zeros in a child */
    FSDPC_FORK_VALUES, /* a copy in a child */
    FSDPC_FORK_ALONE   /* the range is already private, so that fork() itself copies it */
};
/* Chooses what a child gets of the memory that `owner` describes. Called in fork(): it must not allocate. */
typedef enum fsdpc_fork_kind fsdpc_fork_choice(const void *owner);

/* Returns the number of forks between the first process that called this function and this process. A handle
 * that was made at another count belongs to a parent process. */
int fsdpc_forks(void);
/* Adds a range of whole pages to the list; `choice` NULL means blank. Fails with FSDPC_E_NOMEM if the list
 * cannot grow. */
int fsdpc_forks_add(void *address, size_t bytes, fsdpc_fork_choice *choice, const void *owner);
/* A choice that returns FSDPC_FORK_VALUES for every range. */
enum fsdpc_fork_kind fsdpc_forks_values(const void *owner);
/* Call this before the range is unmapped. A no-op for an unlisted range. A child's list begins empty. */
void fsdpc_forks_remove(const void *address);
/* Frees this process's copies for the last fork; children keep their copies. Called when a step begins. */
void fsdpc_forks_forget(void);

#endif
