/* The process's deadline, and the error texts of deadlines that have passed. See deadline.h. */
#include "base/deadline.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/status.h"

static _Atomic double process_timeout = FSDPC_DEFAULT_TIMEOUT_S;

double
fsdpc_timeout(void)
{
    return atomic_load_explicit(&process_timeout, memory_order_relaxed);
}

void
fsdpc_set_timeout(double seconds)
{
    assert(seconds > 0 && isfinite(seconds));
    atomic_store_explicit(&process_timeout, seconds, memory_order_relaxed);
}

/* Writes a text such as "rank 2" or "ranks 2, 5 and 7". */
static void
name_ranks(const int *ranks, int count, char *text, size_t bytes)
{
    enum { SHOWN = 16 };
    size_t used = (size_t)snprintf(text, bytes, count == 1 ? "rank" : "ranks");
    for (int i = 0; i < count && i < SHOWN && used < bytes; i++) {
        const char *glue = i == 0 ? " " : i == count - 1 ? " and " : ", ";
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", glue, ranks[i]);
    }
    if (count > SHOWN && used < bytes) {
        snprintf(text + used, bytes - used, " and %d more", count - SHOWN);
    }
}

void
fsdpc_late_text(const fsdpc_late *late, char *text, size_t bytes)
{
    char ranks[128] = "the other ranks";
    if (late->missing && late->missing_count > 0) {
        name_ranks(late->missing, late->missing_count, ranks, sizeof ranks);
    }
    snprintf(text, bytes, "rank %d waited %g s in %s for %s (FSDPC_TIMEOUT sets this limit)%s",
             late->rank, late->seconds, late->what, ranks, late->more ? late->more : "");
}

int
fsdpc_late_gpu(const char *what, double seconds)
{
    return fsdpc_error(FSDPC_E_TIMEOUT,
                       "%s: the GPU has not finished in %g s (FSDPC_TIMEOUT sets this limit)", what,
                       seconds);
}

int
fsdpc_late_error(const fsdpc_late *late)
{
    char text[FSDPC_ERROR_BYTES];
    fsdpc_late_text(late, text, sizeof text);
    return fsdpc_error(FSDPC_E_TIMEOUT, "%s", text);
}
