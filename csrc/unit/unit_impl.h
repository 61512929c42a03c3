/* What the files of a unit, grad.c and the exchanges see of a unit. */
#ifndef FSDPC_UNIT_IMPL_H
#define FSDPC_UNIT_IMPL_H

#include "unit/arena.h"
#include "unit/unit.h"

struct fsdpc_unit {
    char *name;
    fsdpc_layout *layout;
    fsdpc_device *device;
    fsdpc_comm *shard, *replicate; /* borrowed */
    int rank, world;
    double scale; /* 1 / divide */
    bool reshard;
    bool hooked; /* the caller sums its gradients over the ranks (fsdpc_unit_take_sums) */

    /* Where this rank's own values (master, grad, grad_out) are worked on outside of the step's streams:
     * `device`, or the CPU when they are offloaded. */
    fsdpc_device *own_device;
    bool offload;
    fsdpc_event *touched[2]; /* the device's last use of masters and of gradients, by fsdpc_which */
    bool in_flight[2];       /* the host has not waited for it */

    /* Master shards. With a shared segment all ranks' shards are mapped and peers[r] is rank r's;
     * otherwise only peers[rank] is set. */
    void *master;
    void **peers;
    void *master_map;
    uint64_t master_offset; /* in the segment */
    size_t master_map_bytes, master_stride;

    void *grad; /* this rank's shard gradient, accumulate dtype */
    /* The gradient that the optimizer sees, storage dtype, laid out like the master; NULL when no
     * parameter's storage is narrower than its accumulate dtype: then `grad` itself is seen. */
    void *grad_out;
    /* Sum over the shard group before it is summed over replicas; NULL without replicas. */
    void *partial;
    bool partial_any;
    /* Whole gradients accumulated without communication (no_sync), accumulate dtype, or NULL. */
    void *local;
    size_t local_bytes;
    size_t *local_offset; /* per segment */
    bool local_any;

    /* Buffers that `grad` and `grad_out` once were (unit_thaw.c). */
    struct fsdpc_retired *retired;
    size_t retired_bytes;

    struct fsdpc_grad_queue *queue; /* grad_queue.c; NULL on a device that does not queue */

    /* One byte per parameter: some rank contributed a gradient since the last backward ended. */
    uint8_t *used;
    /* This rank's contributions that wait in `local`. */
    uint8_t *local_used;
    /* The next sum is added to the gradient (true) or replaces it. Set by the caller per backward,
     * true after the first sum of a backward. */
    bool add;

    fsdpc_range range;
    bool direct;

    /* Exchange bookkeeping. */
    int id; /* index in its exchange */
    int slot;
    int refs;
    int floor;                 /* references that fsdpc_exchange_drop leaves */
    bool ready;                /* all values are in place */
    bool begun;                /* holds its slot, values may be incomplete (prefetch) */
    uint64_t posted, consumed; /* rounds of reduction in this backward */
};

/* The gradient that is seen from outside: first byte of this rank's piece of a segment. */
char *fsdpc_unit_seen_grad(const fsdpc_unit *unit, int segment, fsdpc_dtype *dtype);
/* This rank's piece of a segment, and the size of its elements. */
char *fsdpc_unit_own_piece(const fsdpc_unit *unit, enum fsdpc_which which, int segment,
                           size_t *item);

/* --- unit.c, unit_thaw.c --------------------------------------------------------------------- */

/* Memory of grad, grad_out and partial, by the layout. What was made before a failure stays. */
int fsdpc_unit_make_grads(fsdpc_unit *unit);
void fsdpc_unit_free_retired(fsdpc_unit *unit);

/* --- unit_offload.c -------------------------------------------------------------------------- */

int fsdpc_unit_open_own(fsdpc_unit *unit);
void fsdpc_unit_close_own(fsdpc_unit *unit);
/* Zeroed memory for own values. */
int fsdpc_unit_own_alloc(fsdpc_unit *unit, size_t bytes, void **out);
void fsdpc_unit_own_free(fsdpc_unit *unit, void *block, size_t bytes);
/* Work that uses own values has been queued on the current stream. */
int fsdpc_unit_touch(fsdpc_unit *unit, enum fsdpc_which which);
/* The host has seen the end of all that was queued. */
void fsdpc_unit_settled(fsdpc_unit *unit);

/* --- grad.c ---------------------------------------------------------------------------------- */

/* Where the packed gradient of parameter i starts in a reduce buffer / in `local`. */
char *fsdpc_grad_local_at(const fsdpc_unit *unit, int param);
/* Adds gradients into `local` (made on first use) instead of sending them. */
int fsdpc_grad_keep_local(fsdpc_unit *unit, const fsdpc_tensor *grads);
/* Writes gradients (plus what waits in `local`, which is emptied) into a reduce buffer in reduce
 * dtype; absent ones become zeros. bits[i] = 1 for parameters with a gradient. grads may be NULL
 * (only `local`). */
int fsdpc_grad_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* Sums this rank's pieces: sources[r] is rank r's reduce buffer or NULL if it has nothing. */
int fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count);
/* One rank, no wire: gradients go straight into the shard gradient; bits are only added. */
int fsdpc_grad_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits);
/* Forgets gradients that wait in `local` for one parameter (the user cleared them). */
void fsdpc_grad_drop_local(fsdpc_unit *unit, int param);
/* The layout of `local`, and the memory. */
void fsdpc_grad_lay_local(fsdpc_unit *unit);
int fsdpc_grad_make_local(fsdpc_unit *unit);

/* --- grad_queue.c: the same by one launch each, on a device that queues ----------------------- */

/* Makes the plans of a step. Idempotent. */
int fsdpc_grad_queue_open(fsdpc_unit *unit);
void fsdpc_grad_queue_close(fsdpc_unit *unit);
int fsdpc_grad_queue_keep(fsdpc_unit *unit, const fsdpc_tensor *grads);
int fsdpc_grad_queue_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
int fsdpc_grad_queue_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits);
/* One rank: into a buffer that is laid out like the shard gradient. */
int fsdpc_grad_queue_widen(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer,
                           uint8_t *bits);
/* This rank's pieces of a reduce buffer (`wide`: laid out like the shard gradient), times scale, onto
 * `target` (so, too) or, with add false, in place of what it holds. */
int fsdpc_grad_queue_sum(fsdpc_unit *unit, void *target, const void *buffer, bool wide,
                         double scale, bool add);
/* The shard gradient takes the sums over replicas that `partial` holds, times the unit's scale. */
int fsdpc_grad_queue_replicas(fsdpc_unit *unit);

#endif
