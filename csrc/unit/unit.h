/* One unit: parameters that are gathered and reduced together, and this rank's shard of these parameters.
 *
 * A unit owns its master shard (in the shared segment if ranks share a host, so that a peer may read the
 * shard), its shard gradient (private, accumulate dtype) and the address range of its gathered values. The
 * exchange and the tree decide when the unit is gathered and reduced.
 */
#ifndef FSDPC_UNIT_H
#define FSDPC_UNIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"
#include "unit/arena.h"
#include "unit/footprint.h"
#include "unit/layout.h"

typedef struct fsdpc_unit fsdpc_unit;

typedef struct fsdpc_unit_options {
    const char *name;      /* copied; used in every error text */
    fsdpc_comm *shard;     /* borrowed, must outlive the unit */
    fsdpc_comm *replicate; /* borrowed, NULL without replicas */
    double divide;         /* gradients are divided by this, once: [Note: divided once] in grad.c */
    bool reshard;          /* released after forward, gathered again for backward */
    bool
        offload; /* master shard and shard gradient lie in host memory; a no-op on the CPU device */
    bool foreign; /* the caller makes the gathered values; exchanges only count references */
} fsdpc_unit_options;

/* A gradient or another dense tensor to read. The pointers are borrowed. With data NULL it is absent. */
typedef struct fsdpc_tensor {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides; /* elements */
    bool contiguous;
} fsdpc_tensor;

enum fsdpc_which { FSDPC_MASTER = 0, FSDPC_GRAD = 1 };

/* Makes a unit, with a zeroed master shard. Collective over options->shard. The caller has compared the
 * ranks' descriptions, so the layout is the same on all ranks. */
int fsdpc_unit_new(const fsdpc_unit_options *options, const fsdpc_param_spec *specs, int count,
                   fsdpc_unit **out);
/* Frees the unit. Local. No tensor over the unit's memory may exist any more. NULL is allowed. */
void fsdpc_unit_free(fsdpc_unit *unit);

const char *fsdpc_unit_name(const fsdpc_unit *unit);
/* Returns what fsdpc_comm_agreements returned for the unit's ranks when the unit was made. The number is
 * equal on all ranks, and differs between units on which the ranks agreed at different times. */
int fsdpc_unit_born(const fsdpc_unit *unit);
/* Sets the unit's name: a unit is made before its name in the tree is known. */
int fsdpc_unit_rename(fsdpc_unit *unit, const char *name);
const fsdpc_layout *fsdpc_unit_layout(const fsdpc_unit *unit);
/* Returns the sizes that the unit allocates. */
const fsdpc_footprint *fsdpc_unit_footprint(const fsdpc_unit *unit);
fsdpc_comm *fsdpc_unit_comm(const fsdpc_unit *unit);
int fsdpc_unit_rank(const fsdpc_unit *unit);
/* Return the master shard (never moves), the shard gradient (may move), the gathered range (arena.h). */
void *fsdpc_unit_master(const fsdpc_unit *unit);
void *fsdpc_unit_grad(const fsdpc_unit *unit);
void *fsdpc_unit_full(const fsdpc_unit *unit);
/* Return the address of this rank's part of a parameter's master values, or of the parameter's gradient that
 * the optimizer sees. *length is set to the number of elements of the part. */
void *fsdpc_unit_master_part(const fsdpc_unit *unit, int param, int64_t *length);
void *fsdpc_unit_grad_part(const fsdpc_unit *unit, int param, int64_t *length);
/* Notes a digest of each trainable parameter's values in the master shard, over all elements (`whole`) or
 * over three elements. A no-op if the CPU cannot read the values, or if the unit is direct
 * (fsdpc_unit_is_direct). */
int fsdpc_unit_note_values(fsdpc_unit *unit, bool whole);
void fsdpc_unit_forget_values(fsdpc_unit *unit);
/* Returns the first parameter, from number `from` on, whose values differ from the noted ones, or -1. */
int fsdpc_unit_next_changed(const fsdpc_unit *unit, int from, bool whole);
/* Returns the address of this rank's piece of a segment in the gradient that the optimizer sees. */
char *fsdpc_unit_grad_out(const fsdpc_unit *unit, int segment, fsdpc_dtype *dtype);
/* True when master shard and shard gradient lie in pinned host memory: the CPU may access them after
 * fsdpc_unit_settle. */
bool fsdpc_unit_is_offloaded(const fsdpc_unit *unit);
/* Waits until the device's work on an offloaded unit's master shard and shard gradient is done (a host sync);
 * a no-op for other units. A synchronised backward (see fsdpc_exchange_settle_apart) and a forward without a
 * backward end with this wait. Functions below in which the CPU accesses the two buffers begin with it. */
int fsdpc_unit_settle(fsdpc_unit *unit);
/* True if the gathered values are the master shard (one rank, no cast) or foreign: no slot is needed. */
bool fsdpc_unit_is_direct(const fsdpc_unit *unit);
/* Returns how often a direct unit's references went from none to one, which counts as a gather. */
uint64_t fsdpc_unit_gathers(const fsdpc_unit *unit);

/* Makes further segments trainable (one byte per segment): allocates their gradients. Values and
 * gradients are kept; old pointers to gradients stay valid memory, but are no longer the unit's gradient.
 * Local, but all ranks of the shard group and all replicas must call it. Errors: FSDPC_E_STATE while the unit
 * is in an exchange or after a failed sum over replicas; FSDPC_E_INVAL for a segment of bytes; FSDPC_E_NOMEM.
 * After an error the unit is unchanged. */
int fsdpc_unit_thaw(fsdpc_unit *unit, const uint8_t *segments);

/* Returns the dtype of the gradients that the optimizer sees: storage, or accumulate if it sees the sums. */
fsdpc_dtype fsdpc_unit_grad_dtype(const fsdpc_unit *unit, int param);
/* Call this after a backward: casts sums to the gradients that the optimizer sees, if these are narrower. */
int fsdpc_unit_finish_grad(fsdpc_unit *unit);
/* Call this when later work on the current stream does not need the shard gradient's values: the memory goes
 * back to the kernel until the next sum, or the slot (grad_slots.h) becomes free for other units. */
int fsdpc_unit_discard_grads(fsdpc_unit *unit);
/* Call this before a gradient is written: a unit without its own gradient memory gets a slot until
 * discard_grads. *moved is set to whether the gradient has a new address. Errors: FSDPC_E_NOMEM and
 * FSDPC_E_DEVMEM if no slot is free and none can be added. */
int fsdpc_unit_take_slot(fsdpc_unit *unit, bool *moved);

/* `place`: whether the caller's buffers are in device or host memory. On a device that queues, copies
 * within device memory are asynchronous, in the order of the current stream; all other copies end with a
 * host sync, so that a host buffer may be freed on return. Not for use in a step.
 *
 * Local: copies this rank's part of a full, contiguous parameter into the shard (dtypes as for read). */
int fsdpc_unit_write(fsdpc_unit *unit, enum fsdpc_which which, int param, const void *full,
                     enum fsdpc_memory_kind place);
/* Collective over the shard group: fills full[i] (contiguous, storage dtype or that of
 * fsdpc_unit_grad_dtype) with whole parameters; NULL entries are skipped, and may differ between ranks.
 * Scratch memory per rank is at most FSDPC_UNIT_SCRATCH_BYTES. */
int fsdpc_unit_read(fsdpc_unit *unit, enum fsdpc_which which, void *const *full,
                    enum fsdpc_memory_kind place);
enum { FSDPC_UNIT_SCRATCH_BYTES = 16 << 20 };

/* A parameter in equal blocks: rank r reads or writes elements [r * block[i], (r + 1) * block[i]) of
 * parameter i, clipped to the parameter's end. data[i] is a contiguous buffer of these elements in the
 * storage dtype, or NULL if the rank's block is empty. block[i] is equal on all ranks; with 0 the parameter
 * is skipped. Collective over the shard group, master values only, scratch memory as for read. */
int64_t fsdpc_unit_block_length(const fsdpc_unit *unit, int param, int64_t block);
int fsdpc_unit_read_blocks(fsdpc_unit *unit, const int64_t *block, void *const *data,
                           enum fsdpc_memory_kind place);
/* On failure some of the values may have been replaced. */
int fsdpc_unit_write_blocks(fsdpc_unit *unit, const int64_t *block, const void *const *data,
                            enum fsdpc_memory_kind place);

/* Computes the sum of |x|^p and the maximum of |x| over this rank's part of the gradients of the parameters
 * with mask[i] != 0. Each element counts once in the shard group. p > 0. */
int fsdpc_unit_grad_norm(fsdpc_unit *unit, const uint8_t *mask, double p, fsdpc_norm *out);
/* fsdpc_unit_norm_parts is the form of fsdpc_unit_grad_norm for a device with streams, without a host sync.
 * It writes *count parts of a norm (device.h) to `parts`, which has room for fsdpc_unit_norm_room parts.
 * fsdpc_unit_scale_by multiplies gradients by *factor, a number in device memory. */
int64_t fsdpc_unit_norm_room(const fsdpc_unit *unit);
int fsdpc_unit_norm_parts(fsdpc_unit *unit, const uint8_t *mask, double p, void *parts,
                          int64_t *count);
int fsdpc_unit_scale_by(fsdpc_unit *unit, const uint8_t *mask, const double *factor);
int fsdpc_unit_scale_grads(fsdpc_unit *unit, const uint8_t *mask, double factor);
int fsdpc_unit_zero_grad(fsdpc_unit *unit, int param);
/* Multiplies one parameter's gradient by `factor`: the sum, and the gradient that the optimizer sees. */
int fsdpc_unit_scale_grad(fsdpc_unit *unit, int param, double factor);
/* Replaces the accumulated gradient of this rank's part of a parameter. `values` has the part's length. */
int fsdpc_unit_take_grad(fsdpc_unit *unit, int param, const void *values, fsdpc_dtype dtype);
/* Takes gradients that a communication hook has summed over the ranks, without dividing them. They are added
 * to the shard gradient or replace it (fsdpc_unit_set_add). sums[s] is this rank's piece of segment s,
 * contiguous, of any floating dtype; entries of frozen segments are not read. */
int fsdpc_unit_take_sums(fsdpc_unit *unit, const fsdpc_tensor *sums);
/* Collective over the units' replicas: adds up all replicas' sums over their shard groups, and takes the
 * result into the shard gradients. First the replicas exchange the used bits (fsdpc_unit_used). For a unit
 * that no rank ran, nothing else is sent.
 * Skips units without replicas, and units on a device that queues: their exchange sums over replicas. */
int fsdpc_unit_reduce_replicas(fsdpc_unit **units, int count);
/* may_swap returns true if the sum over the shard group, once complete, can be sent to other replicas before
 * the backward ends. begin_swap sends this sum in the background. A sum that changes later is sent again. */
bool fsdpc_unit_may_swap(const fsdpc_unit *unit);
int fsdpc_unit_begin_swap(fsdpc_unit *unit);
/* Takes the next step of a swap that has begun, unless the step would wait for another replica. */
int fsdpc_unit_advance_swap(fsdpc_unit *unit);
/* Returns the bytes of this rank's swaps that have begun since the last call of this function. */
uint64_t fsdpc_unit_take_swapped_bytes(fsdpc_unit *unit);
/* Call this before a backward that adds to the sum: copies into the sum what the user has
 * written to the gradient that the optimizer sees. */
int fsdpc_unit_reload_grad(fsdpc_unit *unit, int param);

/* --- for exchanges and the tree ---------------------------------------------------------------- */

/* What an exchange knows about the unit; the exchange defines this struct. NULL: the unit is in no
 * exchange. */
struct fsdpc_unit_use;
struct fsdpc_unit_use *fsdpc_unit_use(const fsdpc_unit *unit);
void fsdpc_unit_set_use(fsdpc_unit *unit, struct fsdpc_unit_use *use);
void fsdpc_unit_count_gather(fsdpc_unit *unit);

fsdpc_device *fsdpc_unit_device(const fsdpc_unit *unit);
fsdpc_comm *fsdpc_unit_replicate(const fsdpc_unit *unit); /* NULL without replicas */
bool fsdpc_unit_reshards(const fsdpc_unit *unit);
/* Call this only while no tree has the unit. */
void fsdpc_unit_set_reshards(fsdpc_unit *unit, bool reshard);
/* True if the unit has a gather slot of its own, which keeps the values until backward although the unit is
 * released after forward. Ranks that share slots keep one copy. Set it on all ranks, while no tree has the
 * unit. */
bool fsdpc_unit_keeps(const fsdpc_unit *unit);
void fsdpc_unit_set_keeps(fsdpc_unit *unit, bool keeps);
/* Get and set `divide` of the options. Set it only between backwards, to the same value on all ranks. */
double fsdpc_unit_divide(const fsdpc_unit *unit);
void fsdpc_unit_set_divide(fsdpc_unit *unit, double divide);
/* Returns the address range of the gathered values; its fields are 0 for a direct unit. */
fsdpc_range *fsdpc_unit_range(fsdpc_unit *unit);
bool fsdpc_unit_is_spare(const fsdpc_unit *unit); /* its range shows spare memory, not its slot */
/* Returns the address of rank r's master shard, or NULL if the shard is not mapped into this process. */
const char *fsdpc_unit_peer_master(const fsdpc_unit *unit, int r);

/* True if a communication hook sums the unit's gradients over the ranks (fsdpc_unit_take_sums). */
bool fsdpc_unit_is_hooked(const fsdpc_unit *unit);
void fsdpc_unit_set_hooked(fsdpc_unit *unit, bool hooked);
/* True if backwards keep this unit's gradients on this rank even if other units' gradients are summed
 * (no_sync). All ranks must set the same value before a backward. */
bool fsdpc_unit_withholds(const fsdpc_unit *unit);
void fsdpc_unit_set_withholds(fsdpc_unit *unit, bool withholds);
/* True if gradients of this rank are kept locally until they are sent: those of no_sync, and those that
 * follow after the unit's gradients were sent in this backward. */
bool fsdpc_unit_has_local(const fsdpc_unit *unit);
/* True if there are local gradients that an exchange sends at the end of a backward. */
bool fsdpc_unit_sends_local(const fsdpc_unit *unit);
/* Returns one byte per parameter: 1 if its gradient is kept locally (fsdpc_unit_has_local). */
const uint8_t *fsdpc_unit_local_used(const fsdpc_unit *unit);
/* Sets whether the next sum is added to the shard gradient or replaces it. Call it before each backward;
 * after the first sum of a backward the next ones are added. */
void fsdpc_unit_set_add(fsdpc_unit *unit, bool add);
/* Returns one byte per parameter: 1 if some rank contributed a gradient since the last backward ended. */
uint8_t *fsdpc_unit_used(const fsdpc_unit *unit);
void fsdpc_unit_add_used(fsdpc_unit *unit, const uint8_t *bits);
void fsdpc_unit_clear_used(fsdpc_unit *unit);
/* Returns the buffer of the sums over the shard group, which are later summed over replicas; NULL without
 * replicas. */
void *fsdpc_unit_partial(const fsdpc_unit *unit);

/* Call this after work on the master shard or the shard gradient was queued on the current stream: records
 * the event of an offloaded unit. */
int fsdpc_unit_touch(fsdpc_unit *unit, enum fsdpc_which which);
/* Returns the event that fsdpc_unit_touch recorded, or NULL if the host need not wait for any work. */
fsdpc_event *fsdpc_unit_in_flight(const fsdpc_unit *unit, enum fsdpc_which which);
/* Notes that the host has waited for the event that fsdpc_unit_in_flight returned. */
void fsdpc_unit_settled(fsdpc_unit *unit, enum fsdpc_which which);

/* The bytes that a unit takes on this rank, without its gathered range and slots. */
typedef struct fsdpc_unit_memory {
    size_t master, grad, local;
} fsdpc_unit_memory;
fsdpc_unit_memory fsdpc_unit_get_memory(const fsdpc_unit *unit);

#endif
