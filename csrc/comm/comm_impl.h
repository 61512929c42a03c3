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

/* The functions of a kind. Arguments are valid and counts are above 0; buffers are as in comm.h. */
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
    /* Optional: if one of these entries is NULL, comm.c makes one call per part. */
    int (*all_gather_parts)(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                            const char *what);
    int (*reduce_scatter_parts)(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                const char *what);
    int (*all_reduce_parts)(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                            const char *what);
    int (*all_to_all)(fsdpc_comm *comm, void *pieces, void *landing, size_t bytes,
                      const char *what); /* (optional) */
    /* Optional, all or none: transfers in the background, see flight.h. Transfers match by tag; transfers of
     * one tag match in the order of posting. `land` waits for transfers with ranks that `skip` does not mark
     * (NULL: with all ranks); transfers with marked ranks have no match. `land` ends all transfers even if it
     * fails. `drop` abandons transfers without freeing their memory: other ranks may still match them. */
    bool (*flies)(const fsdpc_comm *comm);
    int (*post)(fsdpc_comm *comm, const fsdpc_comm_move *moves, int count, uint32_t tag,
                const char *what, void **transfers);
    int (*land)(fsdpc_comm *comm, void *transfers, const bool *skip, const char *what);
    void (*drop)(fsdpc_comm *comm, void *transfers);
    void (*abort)(fsdpc_comm *comm, const char *text);            /* NULL: no-op */
    void (*fail)(fsdpc_comm *comm, int status, const char *text); /* NULL: no-op */
    void (*close)(fsdpc_comm *comm);                              /* NULL: no-op */
    fsdpc_shm *(*segment)(const fsdpc_comm *comm);                /* NULL: no segment */
    /* Optional: an all-gather of host memory, for kinds whose other collectives take
     * device memory. If this entry is NULL, the other collectives take host memory. */
    int (*exchange)(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
    int (*register_memory)(fsdpc_comm *comm, void *buffer, size_t bytes); /* (optional) */
    void (*unregister_memory)(fsdpc_comm *comm, void *buffer);            /* (optional) */
    bool (*registers)(const fsdpc_comm *comm);                            /* NULL: false */
    bool (*is_symmetric)(const fsdpc_comm *comm);                         /* NULL: false */
    void (*free)(fsdpc_comm *comm); /* also frees the struct itself */
} fsdpc_comm_ops;

enum { FSDPC_COMM_SOUND, FSDPC_COMM_BREAKING, FSDPC_COMM_BROKEN };

struct fsdpc_comm {
    const fsdpc_comm_ops *ops;
    fsdpc_device *device; /* borrowed: devices live as long as the process */
    fsdpc_comm *twin;     /* owned, or NULL */
    fsdpc_comm *local;    /* among the ranks of this host (fsdpc_comm_set_hosts); owned, or NULL */
    struct fsdpc_hosts *hosts;
    struct fsdpc_lander *landers; /* the exchanges that begin flights (flight.h) */
    char *_Atomic numbers;        /* the text of fsdpc_comm_set_numbers; owned, or NULL */
    int rank, world;
    int forks;         /* the value of fsdpc_forks() when this was made */
    int agreements;    /* how many calls of fsdpc_comm_agree have ended: equal on all ranks */
    uint32_t keys;     /* the latest key of fsdpc_comm_next_keys: equal on all ranks */
    uint64_t flights;  /* how many flights began without a key: equal on all ranks */
    double timeout_s;  /* deadline of waits in seconds; 0: fsdpc_timeout() */
    bool lost;         /* the result of fsdpc_comm_has_lost (flight.h) */
    _Atomic bool busy; /* a collective is in progress */
    _Atomic int state; /* FSDPC_COMM_SOUND ...; if it is BROKEN, the two fields below may be read */
    int failed_status;
    char failed_text[FSDPC_COMM_TEXT_BYTES];
};

void fsdpc_hosts_free(struct fsdpc_hosts *hosts);

/* Keeps the first failure and reports it to the other ranks of this host. Later calls change nothing. */
void fsdpc_comm_break(fsdpc_comm *comm, int status, const char *text);

/* A communicator runs one collective at a time. Call `enter` before each collective (FSDPC_E_STATE: another
 * one is in progress) and `leave` after it. `leave` breaks the communicator if `status` is an error, and
 * returns `status`. */
int fsdpc_comm_enter(fsdpc_comm *comm, const char *what);
int fsdpc_comm_leave(fsdpc_comm *comm, int status);
/* Fails if the communicator is broken, or if a part has an invalid size or no buffer. Sends nothing. */
int fsdpc_comm_check_parts(const fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                           const char *what);

/* dst[i] = max or min over the sources; a NaN wins, as in a sum. dst may be one of the sources. */
void fsdpc_comm_extreme(void *dst, const void *const *src, int count, fsdpc_dtype dtype, int64_t n,
                        bool largest);

/* --- comm_flight_now.c ----------------------------------------------------------------------------
 *
 * The all_gather, reduce_scatter and sum of a kind whose flights go on in the background: flights that land
 * immediately. They fail with FSDPC_E_MISMATCH if another rank calls another collective, or passes another
 * size. */

/* Begins and lands a flight that gathers one part or, with `landing`, reduces it. The caller has called
 * fsdpc_comm_enter, and calls fsdpc_comm_leave afterwards. */
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

/* Runs all_gather_parts or, with `scatter`, reduce_scatter_parts for a kind that works on host memory. Small
 * parts share one collective. *bundle is NULL or memory of an earlier call; the caller frees *bundle. */
int fsdpc_comm_bundle(fsdpc_comm *comm, char **bundle, const fsdpc_comm_part *parts, int count,
                      bool scatter, const char *what);

#endif
