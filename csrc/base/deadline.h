/* Deadlines of waits for other ranks: the default, and the text of one that has passed. */
#ifndef FSDPC_DEADLINE_H
#define FSDPC_DEADLINE_H

#include <stddef.h>

/* Seconds; FSDPC_TIMEOUT overrides it. */
#define FSDPC_DEFAULT_TIMEOUT_S 600.0

typedef struct fsdpc_late {
    int rank; /* the one that waited */
    double seconds;
    const char *what;   /* "gather of unit layers.3" */
    const int *missing; /* the ranks that it waited for, where they are known; else NULL */
    int missing_count;
    const char *more; /* NULL, or the rest of the text: "; rank 2 (pid 81) waits in ..." */
} fsdpc_late;

/* "rank 0 waited 600 s in gather of unit layers.3 for rank 2 (FSDPC_TIMEOUT sets this limit)" */
void fsdpc_late_text(const fsdpc_late *late, char *text, size_t bytes);
/* FSDPC_E_TIMEOUT with this text. */
int fsdpc_late_error(const fsdpc_late *late);
/* "rank 2", "ranks 2, 5 and 7" */
void fsdpc_name_ranks(const int *ranks, int count, char *text, size_t bytes);

#endif
