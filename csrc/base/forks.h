/* Memory that this process shares with other ranks, and its forked children.
 *
 * A child is not the rank: what it writes must reach no rank, and what it reads must not change under it.
 * So in a child each listed range becomes private memory at the same address: with the values of the moment of the
 * fork (FSDPC_FORK_VALUES), or blank, where only the engine reads, which refuses to work in a child.
 * fork() copies values once, before the child is there; children that are forked while the values stay the
 * same have one copy together.
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
/* What a child gets of the memory that `owner` describes; called in fork(), must not allocate. */
typedef enum fsdpc_fork_kind fsdpc_fork_choice(const void *owner);

/* Forks between the first process that asked and this one: a handle made at another count belongs to a
 * parent. */
int fsdpc_forks(void);
/* Lists whole pages, until fsdpc_forks_remove. `choice` NULL: blank. FSDPC_E_NOMEM. */
int fsdpc_forks_add(void *address, size_t bytes, fsdpc_fork_choice *choice, const void *owner);
/* The choice for memory that always has values. */
enum fsdpc_fork_kind fsdpc_forks_values(const void *owner);
/* Before the memory is unmapped. A no-op for an address that is not listed, as in a child. */
void fsdpc_forks_remove(const void *address);
/* Gives up what the last fork has copied; children keep theirs. Called where a step begins. */
void fsdpc_forks_forget(void);

#endif
