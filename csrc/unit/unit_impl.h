/* Internal types and functions that the files of a unit share. */
#ifndef FSDPC_UNIT_IMPL_H
#define FSDPC_UNIT_IMPL_H

#include "unit/footprint.h"
#include "unit/grad.h"

/* What the gradient buffers of a unit hold at the moment. */
struct fsdpc_grads {
    bool hooked;   /* a communication hook sums the gradients (fsdpc_unit_take_sums) */
    bool withheld; /* the gradients stay in `local` at the end of a backward */
    /* True if the next sum is added to the gradient, false if it replaces the gradient. The caller sets this
     * before each backward; the first sum of a backward sets it to true. */
    bool add;
    bool partial_any, local_any; /* whether `partial` and whether `local` hold gradients */
    uint32_t sums;               /* how many sums were written to the target (grad.c) so far */
    /* One byte per parameter: some rank contributed a gradient since the last backward ended. */
    uint8_t *used;
    /* One byte per parameter: `local` holds a gradient of it. */
    uint8_t *local_used;
};

/* The state of a swap, which sends the sum over the shard group to the other replicas (unit_replicas.c). */
struct fsdpc_swap {
    struct fsdpc_flight *flight; /* the transfer in progress (comm/flight.h), or NULL */
    bool gathers;                /* true for the second flight, which gathers the summed shares */
    uint32_t key;        /* the same number on all replicas; 0: no number was agreed on yet */
    uint32_t sums;       /* the value of grads.sums when the flight began */
    bool lost;           /* other replicas may still send into `partial` */
    uint64_t sent_bytes; /* fsdpc_unit_take_swapped_bytes */
};

/* A unit's memory is set by fsdpc_unit_new and does not change, with two exceptions: the first gradients make
 * `local` and `plans`; fsdpc_unit_thaw and grad_slots.h replace the gradient buffers. A step changes `grads`,
 * `swap`, `range` (which the arena writes), `in_flight`, and the exchange's data about the unit (`use`). */
struct fsdpc_unit {
    char *name;
    fsdpc_layout *layout;
    fsdpc_footprint footprint;
    fsdpc_device *device;
    fsdpc_comm *shard, *replicate; /* borrowed */
    int rank, world;
    int born;      /* fsdpc_comm_agreements(shard) when made */
    double divide; /* [Note: divided once] in grad.c */
    bool reshard, keeps;

    /* The device that works on master, grad and grad_out outside of the step's streams: the CPU for an
     * offloaded unit, otherwise `device`. */
    fsdpc_device *shard_device;
    bool offload;
    fsdpc_event *touched[2]; /* [fsdpc_which]: recorded after the device's last use of the memory */
    bool in_flight[2];       /* the host has not waited for the event in `touched` yet */

    /* Master shards. With a shared segment all ranks' shards are mapped and peers[r] is rank r's;
     * otherwise only peers[rank] is set. */
    void *master;
    void **peers;
    void *master_map;
    uint64_t master_offset; /* in the segment */
    size_t master_map_bytes, master_stride;

    void *grad; /* this rank's shard gradient, accumulate dtype */
    /* The gradient that the optimizer sees, storage dtype, laid out like the master; NULL if the
     * optimizer sees `grad`, because no parameter's storage dtype is narrower than its accumulate dtype. */
    void *grad_out;
    /* With `slots`, `grad` and `grad_out` lie in slot `slot`. The unit may use them only while it holds the
     * slot. */
    struct fsdpc_grad_slots *slots;
    int slot;
    /* The sum over the shard group that must still be summed over replicas; NULL without replicas. If sums
     * travel in the background, the replicas' shares lie after this sum (fsdpc_footprint_shares). */
    void *partial;
    struct fsdpc_swap swap;
    /* Whole gradients accumulated without communication (no_sync), accumulate dtype, or NULL. */
    void *local;
    size_t local_bytes;
    size_t *local_offset; /* per segment */

    /* Old buffers of `grad` and `grad_out` (unit_thaw.c). */
    struct fsdpc_retired *retired;
    size_t retired_bytes;

    struct fsdpc_grad_plans *plans; /* grad_pack.c; NULL until the first gradients */

    fsdpc_range range;
    bool direct; /* see fsdpc_unit_is_direct */
    bool foreign;
    uint64_t gathers; /* see fsdpc_unit_gathers */

    uint32_t *digests; /* per parameter, NULL until the first pass (unit_digest.c) */
    bool noted;        /* the digests are those of the latest pass */

    struct fsdpc_grads grads;
    struct fsdpc_unit_use *use; /* borrowed from the exchange; NULL without one */
};

/* Returns this rank's piece of a segment, and sets *item to the size of the piece's elements. */
char *fsdpc_unit_shard_piece(const fsdpc_unit *unit, enum fsdpc_which which, int segment,
                             size_t *item);

/* --- unit_memory.c, unit_thaw.c --------------------------------------------------------------- */

/* Computes the unit's footprint from its layout. */
void fsdpc_unit_plan(fsdpc_unit *unit);
/* Allocates grad, grad_out and partial with the sizes of the layout. If the call fails, the caller frees what
 * was allocated. */
int fsdpc_unit_make_grads(fsdpc_unit *unit);
void fsdpc_unit_free_retired(fsdpc_unit *unit);

/* --- unit_offload.c -------------------------------------------------------------------------- */

int fsdpc_unit_open_shard_device(fsdpc_unit *unit);
void fsdpc_unit_close_shard_device(fsdpc_unit *unit);
/* Allocates zeroed memory for a master shard or gradients. */
int fsdpc_unit_shard_alloc(fsdpc_unit *unit, size_t bytes, void **out);
void fsdpc_unit_shard_free(fsdpc_unit *unit, void *block, size_t bytes);

/* --- unit_replicas.c ------------------------------------------------------------------------- */

void fsdpc_unit_free_partial(fsdpc_unit *unit);

/* --- grad.c ---------------------------------------------------------------------------------- */

/* The destination of the sum over the shard group: the shard gradient, or with replicas `partial`. */
struct fsdpc_grad_target {
    void *sum;
    bool *add;    /* *add: the next sum is added to what `sum` holds; true after a first sum */
    double scale; /* [Note: divided once] */
};
struct fsdpc_grad_target fsdpc_grad_target(fsdpc_unit *unit);
/* Notes that a sum was made into the target. */
void fsdpc_grad_note_sum(fsdpc_unit *unit);
/* The factor by which gradients are multiplied at their last sum: 1 / divide. */
double fsdpc_grad_last_scale(const fsdpc_unit *unit);

/* --- grad_pack.c ----------------------------------------------------------------------------- */

void fsdpc_grad_close(fsdpc_unit *unit);
int fsdpc_grad_make_local(fsdpc_unit *unit);

#endif
