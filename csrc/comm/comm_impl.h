/* The table that each kind of communicator fills in. Callers include comm.h.
 *
 * The wrappers in comm.c check arguments, refuse a broken communicator and make the first failure
 * sticky; a kind only moves bytes. Each kind's struct begins with an fsdpc_comm.
 */
#ifndef FSDPC_COMM_IMPL_H
#define FSDPC_COMM_IMPL_H

#include <stdatomic.h>

#include "comm/comm.h"

enum { FSDPC_COMM_TEXT_BYTES = 4096 };

/* Arguments are valid and counts are above 0 when these are called; shapes as in comm.h. */
typedef struct fsdpc_comm_ops {
    const char *kind;
    fsdpc_comm_caps caps;
    int (*all_gather)(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
    int (*reduce_scatter)(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
                          const char *what);
    int (*all_reduce)(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                      enum fsdpc_op op, const char *what);
    int (*broadcast)(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what);
    int (*barrier)(fsdpc_comm *comm, const char *what);
    int (*agree)(fsdpc_comm *comm, const char *text, const char *what);
    /* (optional) NULL: comm.c makes one call per part */
    int (*all_gather_parts)(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                            const char *what);
    int (*reduce_scatter_parts)(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                const char *what);
    int (*all_reduce_parts)(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                            const char *what);
    int (*all_to_all)(fsdpc_comm *comm, void *pieces, void *landing, size_t bytes,
                      const char *what); /* (optional) */
    /* (optional, all or none) Transfers in the background, see flight.h. They match by tag, and in the order
     * of posting among equal tags. land waits for the transfers with ranks that `skip` does not mark (NULL:
     * with all ranks); those with marked ranks find no match. Whatever land returns, it ends the transfers.
     * drop leaves transfers to themselves: their memory stays, because other ranks may still match them. */
    bool (*flies)(const fsdpc_comm *comm);
    int (*post)(fsdpc_comm *comm, const fsdpc_comm_move *moves, int count, uint32_t tag,
                const char *what, void **transfers);
    int (*land)(fsdpc_comm *comm, void *transfers, const bool *skip, const char *what);
    void (*drop)(fsdpc_comm *comm, void *transfers);
    void (*abort)(fsdpc_comm *comm, const char *text);            /* NULL: no-op */
    void (*fail)(fsdpc_comm *comm, int status, const char *text); /* NULL: no-op */
    void (*close)(fsdpc_comm *comm);                              /* NULL: no-op */
    fsdpc_shm *(*segment)(const fsdpc_comm *comm);                /* NULL: no segment */
    /* (optional) An all-gather of host memory, for kinds whose other collectives work on device
     * memory; without it the other collectives take host memory. */
    int (*exchange)(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
    int (*register_memory)(fsdpc_comm *comm, void *buffer, size_t bytes); /* (optional) */
    void (*unregister_memory)(fsdpc_comm *comm, void *buffer);            /* (optional) */
    bool (*registers)(const fsdpc_comm *comm);                            /* NULL: false */
    bool (*is_symmetric)(const fsdpc_comm *comm);                         /* NULL: false */
    void (*free)(fsdpc_comm *comm); /* includes the struct itself */
} fsdpc_comm_ops;

enum { FSDPC_COMM_SOUND, FSDPC_COMM_BREAKING, FSDPC_COMM_BROKEN };

struct fsdpc_comm {
    const fsdpc_comm_ops *ops;
    fsdpc_device *device; /* borrowed: devices live as long as the process */
    fsdpc_comm *twin;     /* owned, or NULL */
    fsdpc_comm *local;    /* fsdpc_comm_set_hosts: the ranks of this host; owned, or NULL */
    struct fsdpc_hosts *hosts;
    struct fsdpc_lander *landers; /* flight.h */
    char *_Atomic numbers;        /* fsdpc_comm_set_numbers; owned, or NULL */
    int rank, world;
    int forks;         /* fsdpc_forks() when made */
    int agreements;    /* calls of fsdpc_comm_agree that have ended: equal on all ranks */
    uint32_t keys;     /* the latest of fsdpc_comm_next_keys: equal on all ranks */
    uint64_t flights;  /* begun without a key: equal on all ranks */
    double timeout_s;  /* 0: the default */
    bool lost;         /* fsdpc_comm_has_lost */
    _Atomic bool busy; /* a collective is in progress */
    _Atomic int state; /* the two fields below are readable once this is BROKEN */
    int failed_status;
    char failed_text[FSDPC_COMM_TEXT_BYTES];
};

void fsdpc_hosts_free(struct fsdpc_hosts *hosts);

/* Keeps the first failure, and tells the other ranks of this host; later calls change nothing. */
void fsdpc_comm_break(fsdpc_comm *comm, int status, const char *text);

/* A communicator runs one collective at a time. Call enter before it (FSDPC_E_STATE if another is in
 * progress) and leave after it, with its status: leave returns that, and an error breaks the communicator. */
int fsdpc_comm_enter(fsdpc_comm *comm, const char *what);
int fsdpc_comm_leave(fsdpc_comm *comm, int status);
/* Checks the sizes of all parts before any part is sent, and that the communicator is not broken. */
int fsdpc_comm_check_parts(const fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                           const char *what);

/* dst[i] = max or min over the sources; a NaN wins, as in a sum. dst may be one of the sources. */
void fsdpc_comm_extreme(void *dst, const void *const *src, int count, fsdpc_dtype dtype, int64_t n,
                        bool largest);

/* --- comm_flight_now.c ----------------------------------------------------------------------------
 *
 * A flying kind's own all_gather, reduce_scatter and sum: flights that land at once. FSDPC_E_MISMATCH if
 * another rank makes another collective, or one of another size. */

/* Begins and lands a gather or (with `landing`) a reduction of one part, in a collective (comm_flight.c). */
struct fsdpc_landing;
struct fsdpc_mark;
int fsdpc_flight_now(fsdpc_comm *comm, const fsdpc_comm_part *part,
                     const struct fsdpc_landing *landing, const struct fsdpc_mark *mark,
                     const char *what);
int fsdpc_flight_all_gather_now(fsdpc_comm *comm, void *buffer, size_t piece_bytes,
                                const char *what);
int fsdpc_flight_reduce_scatter_now(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                                    fsdpc_dtype dtype, const char *what);
int fsdpc_flight_sum_now(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                         const char *what);

/* --- comm_bundle.c --------------------------------------------------------------------------- */

/* all_gather_parts, or (`scatter`) reduce_scatter_parts, for a kind that works on host memory: small
 * parts share one collective. *bundle: NULL, or memory of an earlier call; the caller frees *bundle. */
int fsdpc_comm_bundle(fsdpc_comm *comm, char **bundle, const fsdpc_comm_part *parts, int count,
                      bool scatter, const char *what);

#endif
