/* Sends small parts of a collective together, for communicators whose calls cost more than a copy.
 *
 * Consecutive small parts are copied to a buffer that is laid out rank by rank, and are sent together.
 * Larger parts are sent in place, one by one. Sizes and types alone decide this, so the ranks' calls agree.
 *
 *   parts a, b, 2 ranks: | a0 a1 |  | b0 b1 |    the bundle: | a0 b0 | a1 b1 |
 */
#include <string.h>

#include "comm/comm_impl.h"
#include "base/mem.h"
#include "base/status.h"

enum { BUNDLE_BYTES = 1 << 20, PART_BYTES = 256 << 10, STEP_BYTES = 16 };

static size_t
bytes_of(const fsdpc_comm_part *part)
{
    return (size_t)part->piece_numel * fsdpc_dtype_bytes(part->dtype);
}

/* Returns the part's bytes in the bundle, rounded up so that the next part is aligned to its type. */
static size_t
room_for(const fsdpc_comm_part *part)
{
    return fsdpc_round_up(bytes_of(part), STEP_BYTES);
}

/* Returns how many of the first parts share one collective. *piece becomes their bytes per rank. */
static int
count_together(const fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, bool one_dtype,
               size_t *piece)
{
    const size_t world = (size_t)comm->world;
    int n = 0;
    *piece = 0;
    while (n < count && (!one_dtype || parts[n].dtype == parts[0].dtype) &&
           room_for(&parts[n]) <= PART_BYTES / world &&
           *piece + room_for(&parts[n]) <= BUNDLE_BYTES / world) {
        *piece += room_for(&parts[n++]);
    }
    return n;
}

/* Copies rank r's pieces of the parts to or from the bundle. */
static void
copy_pieces(const fsdpc_comm_part *parts, int count, int r, char *bundle, size_t piece, bool in)
{
    char *at = bundle + piece * (size_t)r;
    for (int i = 0; i < count; i++) {
        const size_t bytes = bytes_of(&parts[i]);
        char *own = (char *)parts[i].buffer + bytes * (size_t)r;
        if (bytes > 0) {
            memcpy(in ? at : own, in ? own : at, bytes);
        }
        at += room_for(&parts[i]);
    }
}

static int
call(fsdpc_comm *comm, const fsdpc_comm_part *part, bool scatter, const char *what)
{
    return scatter
               ? comm->ops->reduce_scatter(comm, part->buffer, part->piece_numel, part->dtype, what)
               : comm->ops->all_gather(comm, part->buffer, bytes_of(part), what);
}

/* A gather copies only this rank's pieces to the bundle. A reduction copies only this rank's pieces back. */
static int
call_together(fsdpc_comm *comm, char *bundle, const fsdpc_comm_part *parts, int count, size_t piece,
              bool scatter, const char *what)
{
    const fsdpc_comm_part all = {bundle, (int64_t)(piece / fsdpc_dtype_bytes(parts[0].dtype)),
                                 parts[0].dtype};
    for (int r = 0; r < comm->world; r++) {
        if (scatter || r == comm->rank) {
            copy_pieces(parts, count, r, bundle, piece, true);
        }
    }
    FSDPC_TRY(call(comm, &all, scatter, what));
    for (int r = 0; r < comm->world; r++) {
        if (scatter == (r == comm->rank)) {
            copy_pieces(parts, count, r, bundle, piece, false);
        }
    }
    return FSDPC_OK;
}

int
fsdpc_comm_bundle(fsdpc_comm *comm, char **bundle, const fsdpc_comm_part *parts, int count,
                  bool scatter, const char *what)
{
    size_t piece;
    for (int i = 0, n; i < count; i += n) {
        n = count_together(comm, &parts[i], count - i, scatter, &piece);
        if (n <= 1) {
            n = 1;
            FSDPC_TRY(bytes_of(&parts[i]) > 0 ? call(comm, &parts[i], scatter, what) : FSDPC_OK);
        } else if (piece > 0) {
            *bundle = *bundle ? *bundle : fsdpc_mem_calloc(1, BUNDLE_BYTES);
            if (!*bundle) {
                return fsdpc_error(FSDPC_E_NOMEM,
                                   "%s: cannot allocate the buffer of %zu bytes for small parts",
                                   what, (size_t)BUNDLE_BYTES);
            }
            FSDPC_TRY(call_together(comm, *bundle, &parts[i], n, piece, scatter, what));
        }
    }
    return FSDPC_OK;
}
