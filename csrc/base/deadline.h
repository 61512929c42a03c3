/* Deadlines: the default, this process's deadline, and the error texts of a deadline that has passed. */
#ifndef FSDPC_DEADLINE_H
#define FSDPC_DEADLINE_H

#include <stddef.h>

/* The environment variable FSDPC_TIMEOUT overrides this default. */
#define FSDPC_DEFAULT_TIMEOUT_S 600.0

/* Returns the deadline in seconds of waits that belong to no group: waits for this rank's GPU or for another
 * thread of this process. It is the default until fsdpc_set_timeout is called. Any thread. */
double fsdpc_timeout(void);
void fsdpc_set_timeout(double seconds); /* > 0 and finite (checked by assert only) */

typedef struct fsdpc_late {
    int rank; /* the rank that waited */
    double seconds;
    const char *what;   /* what the rank waited in: "gather of unit layers.3" */
    const int *missing; /* the ranks that `rank` waited for, or NULL if they are not known */
    int missing_count;
    const char *more; /* NULL, or text to append: "; rank 2 (pid 81) waits in ..." */
} fsdpc_late;

/* Writes "rank 0 waited 600 s in gather of unit layers.3 for rank 2 (FSDPC_TIMEOUT sets this limit)". */
void fsdpc_late_text(const fsdpc_late *late, char *text, size_t bytes);
/* Returns FSDPC_E_TIMEOUT, with the text of fsdpc_late_text as the error text. */
int fsdpc_late_error(const fsdpc_late *late);
/* Returns FSDPC_E_TIMEOUT with a text such as "a norm: the GPU has not finished in 600 s (...)". */
int fsdpc_late_gpu(const char *what, double seconds);

#endif
