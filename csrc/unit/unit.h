/* One unit: the parameters that are gathered and reduced together, and this rank's shard of them.
 *
 * A unit owns its master shard (in the shared segment where ranks share a host, so that a peer may
 * read it), its shard gradient (private, accumulate dtype) and the address range of its gathered
 * values. When it is gathered and reduced is up to the exchange and the tree.
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
    bool foreign; /* the caller makes the gathered values, exchanges count references to them */
} fsdpc_unit_options;

/* A gradient or any other dense tensor that is read: borrowed pointers. data NULL: absent. */
typedef struct fsdpc_tensor {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides; /* elements */
    bool contiguous;
} fsdpc_tensor;

enum fsdpc_which { FSDPC_MASTER = 0, FSDPC_GRAD = 1 };

/* Collective over options->shard: the layout is the same on all ranks (the caller has compared the
 * descriptions). The master shard is zeroed. */
int fsdpc_unit_new(const fsdpc_unit_options *options, const fsdpc_param_spec *specs, int count,
                   fsdpc_unit **out);
/* Local. Tensors over the unit's memory must be gone. NULL is allowed. */
void fsdpc_unit_free(fsdpc_unit *unit);

const char *fsdpc_unit_name(const fsdpc_unit *unit);
/* fsdpc_comm_agreements of the unit's ranks when the unit was made: equal on all
 * ranks, and different for units on which the ranks agreed at different times. */
int fsdpc_unit_born(const fsdpc_unit *unit);
/* Sets the unit's name: a unit is made before its name in the tree is known. */
int fsdpc_unit_rename(fsdpc_unit *unit, const char *name);
const fsdpc_layout *fsdpc_unit_layout(const fsdpc_unit *unit);
/* The sizes that the unit allocates. */
const fsdpc_footprint *fsdpc_unit_footprint(const fsdpc_unit *unit);
fsdpc_comm *fsdpc_unit_comm(const fsdpc_unit *unit);
int fsdpc_unit_rank(const fsdpc_unit *unit);
/* Master shard (fixed for life), shard gradient (accumulate dtype; may move), gathered range (arena.h). */
void *fsdpc_unit_master(const fsdpc_unit *unit);
void *fsdpc_unit_grad(const fsdpc_unit *unit);
void *fsdpc_unit_full(const fsdpc_unit *unit);
/* First byte of this rank's part of a parameter or of the gradient that the optimizer sees. */
void *fsdpc_unit_master_part(const fsdpc_unit *unit, int param, int64_t *length);
void *fsdpc_unit_grad_part(const fsdpc_unit *unit, int param, int64_t *length);
/* Notes a digest of each trainable parameter's values in the master shard: of all elements (`whole`) or of
 * three. A no-op where only a device can read the values or where the gathered values are the shard. */
int fsdpc_unit_note_values(fsdpc_unit *unit, bool whole);
void fsdpc_unit_forget_values(fsdpc_unit *unit);
/* The first parameter from `from` on whose values are not those that were noted; -1: none. */
int fsdpc_unit_next_changed(const fsdpc_unit *unit, int from, bool whole);
/* First byte of this rank's piece of a segment in the gradient that the optimizer sees. */
char *fsdpc_unit_grad_out(const fsdpc_unit *unit, int segment, fsdpc_dtype *dtype);
/* True when master shard and shard gradient lie in pinned host memory: the CPU may access them after
 * fsdpc_unit_settle. */
bool fsdpc_unit_is_offloaded(const fsdpc_unit *unit);
/* Host sync for an offloaded unit, else a no-op: waits until the device's work on master shard and shard
 * gradient is done. A synchronised backward (see fsdpc_exchange_settle_apart) and a forward without a
 * backward end with such a wait; every call below in which the CPU accesses the two begins with it. */
int fsdpc_unit_settle(fsdpc_unit *unit);
/* True when the gathered values are the master itself (one rank, no cast) or foreign: no slot is needed. */
bool fsdpc_unit_is_direct(const fsdpc_unit *unit);
/* How often a direct unit's references went from none to one, which counts as a gather. */
uint64_t fsdpc_unit_gathers(const fsdpc_unit *unit);

/* Makes further segments trainable (one byte per segment): allocates their gradients. Values and
 * gradients are kept; old pointers to gradients stay valid memory, but are no longer the unit's gradient.
 * Local, but all ranks of the shard group and all replicas must call it. FSDPC_E_STATE while the unit is
 * in an exchange, or after a failed sum over replicas; FSDPC_E_INVAL for a segment of bytes; FSDPC_E_NOMEM.
 * On an error the unit is unchanged. */
int fsdpc_unit_thaw(fsdpc_unit *unit, const uint8_t *segments);

/* dtype of gradients in grad_part, read, write: storage, or accumulate where the optimizer sees the sum. */
fsdpc_dtype fsdpc_unit_grad_dtype(const fsdpc_unit *unit, int param);
/* After a backward: casts the sums to the gradients that the optimizer sees, where those are narrower. */
int fsdpc_unit_finish_grad(fsdpc_unit *unit);
/* Work that is queued on the current stream from now on does not need the shard gradient's values: the memory
 * goes back to the kernel until the next sum, or the slot (grad_slots.h) goes to other units. */
int fsdpc_unit_discard_grads(fsdpc_unit *unit);
/* Before a gradient is written: a unit without memory of its own gets a slot until discard_grads. `moved`: the
 * gradient has a new address. FSDPC_E_NOMEM, FSDPC_E_DEVMEM: all slots are held, and one more does not fit. */
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
 * parameter i, clipped to its end; data[i] is their contiguous buffer in storage dtype (NULL where the
 * rank has none). block[i] is equal on all ranks; 0: the parameter is skipped.
 * Collective over the shard group, master values only, scratch memory as for read. */
int64_t fsdpc_unit_block_length(const fsdpc_unit *unit, int param, int64_t block);
int fsdpc_unit_read_blocks(fsdpc_unit *unit, const int64_t *block, void *const *data,
                           enum fsdpc_memory_kind place);
/* On failure some of the values may have been replaced. */
int fsdpc_unit_write_blocks(fsdpc_unit *unit, const int64_t *block, const void *const *data,
                            enum fsdpc_memory_kind place);

/* Sum of |x|^p and maximum of |x| over this rank's part of the gradients of the parameters with
 * mask[i] != 0; each element counts once in the shard group. p > 0. */
int fsdpc_unit_grad_norm(fsdpc_unit *unit, const uint8_t *mask, double p, fsdpc_norm *out);
/* fsdpc_unit_grad_norm on a device with streams, without a host sync: writes *count
 * parts of a norm (device.h) to `parts`, which has room for fsdpc_unit_norm_room of
 * them. scale_by multiplies gradients by *factor, a number on the device. */
int64_t fsdpc_unit_norm_room(const fsdpc_unit *unit);
int fsdpc_unit_norm_parts(fsdpc_unit *unit, const uint8_t *mask, double p, void *parts,
                          int64_t *count);
int fsdpc_unit_scale_by(fsdpc_unit *unit, const uint8_t *mask, const double *factor);
int fsdpc_unit_scale_grads(fsdpc_unit *unit, const uint8_t *mask, double factor);
int fsdpc_unit_zero_grad(fsdpc_unit *unit, int param);
/* Multiplies the sum and the visible gradient of one parameter. */
int fsdpc_unit_scale_grad(fsdpc_unit *unit, int param, double factor);
/* Replaces the accumulated gradient of this rank's part of a parameter; `values` has its length. */
int fsdpc_unit_take_grad(fsdpc_unit *unit, int param, const void *values, fsdpc_dtype dtype);
/* Gradients that a communication hook has summed over the ranks are added to the shard gradient
 * undivided, or replace it: sums[s] is this rank's piece of segment s, contiguous, of
 * any floating dtype; entries of frozen segments are not read. */
int fsdpc_unit_take_sums(fsdpc_unit *unit, const fsdpc_tensor *sums);
/* Collective over the units' replicas: sums the sums of the shard groups into the shard gradients. The used bits are
 * exchanged first; a unit that no rank ran sends nothing else. Units without replicas are passed over. So are units
 * on a device that queues: their exchange sums over replicas behind each reduction. */
int fsdpc_unit_reduce_replicas(fsdpc_unit **units, int count);
/* True if the sum over the shard group, once it is there, can go to the other replicas before the end of the
 * backward: begin_swap then sends it in the background. A later sum of the same backward is sent again. */
bool fsdpc_unit_may_swap(const fsdpc_unit *unit);
int fsdpc_unit_begin_swap(fsdpc_unit *unit);
/* Takes a swap that has begun a step further if that needs no wait for another replica. */
int fsdpc_unit_advance_swap(fsdpc_unit *unit);
/* Bytes of swaps that have begun since the last call. */
uint64_t fsdpc_unit_take_swapped_bytes(fsdpc_unit *unit);
/* Before a backward that adds to the sum: the sum takes the values that the user has changed in the
 * visible gradient. */
int fsdpc_unit_reload_grad(fsdpc_unit *unit, int param);

/* --- for exchanges and the tree ---------------------------------------------------------------- */

/* What an exchange keeps of the unit: owned, defined and written by the exchange. NULL: in no exchange. */
struct fsdpc_unit_use;
struct fsdpc_unit_use *fsdpc_unit_use(const fsdpc_unit *unit);
void fsdpc_unit_set_use(fsdpc_unit *unit, struct fsdpc_unit_use *use);
void fsdpc_unit_count_gather(fsdpc_unit *unit);

fsdpc_device *fsdpc_unit_device(const fsdpc_unit *unit);
fsdpc_comm *fsdpc_unit_replicate(const fsdpc_unit *unit); /* NULL without replicas */
bool fsdpc_unit_reshards(const fsdpc_unit *unit);
/* Call it only while no tree has the unit. */
void fsdpc_unit_set_reshards(fsdpc_unit *unit, bool reshard);
/* True if the unit has a gather slot of its own, which holds the values until backward although the unit is
 * released after forward (one copy where ranks share slots). Set on all ranks, while no tree has the unit. */
bool fsdpc_unit_keeps(const fsdpc_unit *unit);
void fsdpc_unit_set_keeps(fsdpc_unit *unit, bool keeps);
/* `divide` of the options. Set it between backwards, to the same value on all ranks. */
double fsdpc_unit_divide(const fsdpc_unit *unit);
void fsdpc_unit_set_divide(fsdpc_unit *unit, double divide);
/* The address range of the gathered values; zeros for a direct unit. */
fsdpc_range *fsdpc_unit_range(fsdpc_unit *unit);
bool fsdpc_unit_is_spare(const fsdpc_unit *unit); /* its range shows spare memory, not its slot */
/* First byte of rank r's master shard; NULL where it is not mapped into this process. */
const char *fsdpc_unit_peer_master(const fsdpc_unit *unit, int r);

/* True if a communication hook sums the unit's gradients over the ranks (fsdpc_unit_take_sums). */
bool fsdpc_unit_is_hooked(const fsdpc_unit *unit);
void fsdpc_unit_set_hooked(fsdpc_unit *unit, bool hooked);
/* True if a backward keeps the unit's gradients on this rank if others are summed (no_sync). All ranks
 * must set the same value before a backward. */
bool fsdpc_unit_withholds(const fsdpc_unit *unit);
void fsdpc_unit_set_withholds(fsdpc_unit *unit, bool withholds);
/* True if gradients of this rank are kept locally until they are sent (no_sync, or later gradients of a unit
 * that was sent in this backward). */
bool fsdpc_unit_has_local(const fsdpc_unit *unit);
/* True if there are local gradients that an exchange sends at the end of a backward. */
bool fsdpc_unit_sends_local(const fsdpc_unit *unit);
/* One byte per parameter: true if its gradient is kept locally (fsdpc_unit_has_local). */
const uint8_t *fsdpc_unit_local_used(const fsdpc_unit *unit);
/* Sets whether the next sum is added to the shard gradient or replaces it. Call it before each backward;
 * after the first sum of a backward the next ones are added. */
void fsdpc_unit_set_add(fsdpc_unit *unit, bool add);
/* One byte per parameter: true if some rank contributed a gradient since the last backward ended. */
uint8_t *fsdpc_unit_used(const fsdpc_unit *unit);
void fsdpc_unit_add_used(fsdpc_unit *unit, const uint8_t *bits);
void fsdpc_unit_clear_used(fsdpc_unit *unit);
/* Sums over the shard group that are still to be summed over replicas; NULL without replicas. */
void *fsdpc_unit_partial(const fsdpc_unit *unit);

/* Work on master shard or shard gradient has been queued on the current stream: an offloaded unit records
 * its event. */
int fsdpc_unit_touch(fsdpc_unit *unit, enum fsdpc_which which);
/* The event behind such work of the device; NULL when none is in flight. */
fsdpc_event *fsdpc_unit_in_flight(const fsdpc_unit *unit, enum fsdpc_which which);
/* Notes that the host has waited for that event. */
void fsdpc_unit_settled(fsdpc_unit *unit, enum fsdpc_which which);

/* Bytes of a unit on this rank, beside its gathered range and slots. */
typedef struct fsdpc_unit_memory {
    size_t master, grad, local;
} fsdpc_unit_memory;
fsdpc_unit_memory fsdpc_unit_get_memory(const fsdpc_unit *unit);

#endif
