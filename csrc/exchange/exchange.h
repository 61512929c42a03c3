/* Exchanges, which gather units' values and reduce their gradients over the ranks of one communicator.
 *
 * An exchange serves the units of one tree that share one communicator. There are three kinds:
 *
 * shared  The ranks of a host see one set of slots (exchange_shared*.c). A gather
 *         casts every rank's piece into the slot. A rank that is early also casts the pieces of late
 *         ranks, straight out of their master shards, so that no rank waits for another one to reach
 *         the same unit: ranks may gather different units in different order. Gradients are packed
 *         into this rank's reduce slot, and every rank sums its own slice of all of them.
 * wire    Each rank (with several hosts: each host) has its own slots. Flights (comm/flight.h) carry values,
 *         in the background if possible (exchange_wire.c). All ranks gather and reduce in one order.
 * stream  Like wire, on a device with streams (exchange_stream.c): a call returns when its work is queued,
 *         and the caller's stream waits for the events that its own work depends on.
 *
 * A tag names a pass: (finished synchronised backwards) << FSDPC_TAG_BITS | (a number that grows with
 * the root forwards since the last of these backwards, see next_pass in tree.c). A
 * rank's master shard does not change while the rank is in the pass of one tag.
 */
#ifndef FSDPC_EXCHANGE_H
#define FSDPC_EXCHANGE_H

#include "unit/arena.h"
#include "base/trace.h"
#include "unit/unit.h"

typedef struct fsdpc_exchange fsdpc_exchange;

/* The last FSDPC_PASS_BITS bits of a tag count the passes since all ranks last met, for example in a training
 * forward (see next_pass in tree.c). */
enum { FSDPC_TAG_BITS = 36, FSDPC_PASS_BITS = 20 };

typedef struct fsdpc_exchange_plan {
    fsdpc_comm *comm;    /* borrowed */
    fsdpc_unit **units;  /* borrowed; the array is copied; a unit's id is its index in the array */
    const int *unit_ids; /* the units' numbers in the trace */
    int unit_count;
    const int *slot_of;       /* gather slot of each unit, -1 for a direct unit */
    const size_t *slot_bytes; /* per slot */
    int slot_count;
    int reduce_slots; /* how many buffers for packed gradients each rank has, >= 1 */
    bool poison;      /* true: reading the values of a released unit gives NaN */
    bool trust_order; /* "wire", "stream": true: ranks do not check that all are at the same unit */
    fsdpc_trace *trace;
} fsdpc_exchange_plan;

/* Collective. Fails with FSDPC_E_STATE if a unit is in another exchange or a CUDA graph is being captured. */
int fsdpc_exchange_new(const fsdpc_exchange_plan *plan, fsdpc_exchange **out);
/* Frees the exchange. Call this before the units are freed. NULL is allowed. Local. */
void fsdpc_exchange_free(fsdpc_exchange *exchange);

/* Sets the phase and step of later entries of the trace. */
void fsdpc_exchange_set_clock(fsdpc_exchange *exchange, enum fsdpc_phase phase, uint32_t step);
/* Call this before fsdpc_exchange_begin of a root forward. Kinds "shared" and "wire" then find out
 * whether this rank's masters have changed since the previous pass. `touched`: the caller knows of
 * a write to the masters. A forward without gradients then fails with FSDPC_E_MISMATCH if it would
 * read some ranks' masters from before a change and other ranks' masters from after it. */
void fsdpc_exchange_compare(fsdpc_exchange *exchange, uint64_t tag, bool grad, bool touched);
/* Call it when a root forward or a backward begins: from then on, this rank's masters are final for `tag`. */
int fsdpc_exchange_begin(fsdpc_exchange *exchange, uint64_t tag);
/* Call it when the outermost forward has ended or failed, whatever follows. Prefetched values that were
 * not used are kept, and their gather is ordered before the caller's next write to its masters. Local. */
int fsdpc_exchange_rest(fsdpc_exchange *exchange);
/* Ends a forward without a backward on this rank. Then this rank may change its master shard. Kind "shared"
 * waits for each other rank until that rank has ended the same forward or is itself waiting for this rank. */
int fsdpc_exchange_leave(fsdpc_exchange *exchange);

/* Gathers the unit's values, and takes a reference to them. The values are readable on return (kind "stream":
 * by later work of the caller's stream). */
int fsdpc_exchange_gather(fsdpc_exchange *exchange, fsdpc_unit *unit);
/* Starts a gather if the gather needs no wait, else does nothing. Takes no reference. */
int fsdpc_exchange_prefetch(fsdpc_exchange *exchange, fsdpc_unit *unit);
/* True if gathers over `comm` go on in the background, and the caller's thread (not a stream) waits for the
 * values. Units are then prefetched even if the user asks for no forward prefetch. */
bool fsdpc_exchange_prefetches(const fsdpc_comm *comm);
/* Drops one reference to the unit's values; when none is left, the slot may be refilled. */
int fsdpc_exchange_release(fsdpc_exchange *exchange, fsdpc_unit *unit);
/* How many references to the unit's values there are; 0 for a unit that is in no exchange. */
int fsdpc_unit_refs(const fsdpc_unit *unit);
/* Sets how many references fsdpc_exchange_drop leaves. A no-op for a unit that is in no exchange. */
void fsdpc_unit_set_floor(fsdpc_unit *unit, int refs);

/* Packs and sends this rank's gradients of a unit. Gradients of a second call in the same backward are
 * accumulated on this rank and sent by fsdpc_exchange_end. The shard gradient holds the sum when
 * fsdpc_exchange_end has returned, or earlier. grads[i] is the gradient of parameter i; grads NULL: only
 * gradients kept under no_sync are sent. The caller may free the gradients on return. */
int fsdpc_exchange_reduce(fsdpc_exchange *exchange, fsdpc_unit *unit, const fsdpc_tensor *grads);
/* True if units may be reduced in any order. False: all ranks must call reduce for every trainable
 * unit, and the first call for each unit must come in one order on all ranks. */
bool fsdpc_exchange_any_order(const fsdpc_exchange *exchange);
/* Call it for a unit that this rank has reduced. Returns true if the unit's shard gradient holds the sum of
 * all ranks (on a device with streams: for later work of the caller's stream), and no rank still needs this
 * rank's master to compute gradients. Returns false if that is not so yet, or is not known before the end of
 * the backward. After true, the caller may clear the unit's used bits (fsdpc_unit_used), and the end of this
 * backward leaves these bits as they are. */
bool fsdpc_exchange_is_summed(fsdpc_exchange *exchange, const fsdpc_unit *unit);
/* Call this before fsdpc_exchange_reduce where units step in backward. Waits until the reduce slot that
 * fsdpc_exchange_reduce would take is free. Then fsdpc_exchange_is_summed knows that the slot's last sum is
 * done. A no-op for kind "shared". */
int fsdpc_exchange_make_room(fsdpc_exchange *exchange, const fsdpc_unit *unit);
/* Ends a synchronised backward. Afterwards all sums are in the shard gradients, and
 * fsdpc_unit_used returns which parameters got a gradient on some rank. Collective. */
int fsdpc_exchange_end(fsdpc_exchange *exchange);
/* With `apart`, fsdpc_exchange_end does not wait for offloaded units: before the CPU reads such a unit's
 * gradient or writes its master, the caller calls fsdpc_exchange_settle, a host sync for that unit alone. */
void fsdpc_exchange_settle_apart(fsdpc_exchange *exchange, bool apart);
int fsdpc_exchange_settle(fsdpc_exchange *exchange, fsdpc_unit *unit);
/* Drops prefetches, and all references above each unit's floor (fsdpc_unit_set_floor). Local. */
int fsdpc_exchange_drop(fsdpc_exchange *exchange);
/* Drops all references, and detaches the units, which another exchange may then take. Later passes,
 * gathers and reductions fail with FSDPC_E_STATE; counts and the trace stay readable. Local. */
int fsdpc_exchange_detach(fsdpc_exchange *exchange);

/* Kind "stream": an in-place all-gather of `piece_bytes` of device memory per rank (rank r's piece is at
 * r * piece_bytes), in the order of the caller's stream, without a host sync. Collective. */
int fsdpc_exchange_share(fsdpc_exchange *exchange, void *buffer, size_t piece_bytes,
                         const char *what);

int fsdpc_exchange_slot_count(const fsdpc_exchange *exchange);
size_t fsdpc_exchange_largest_slot(const fsdpc_exchange *exchange);
int fsdpc_exchange_reduce_slots(const fsdpc_exchange *exchange);
size_t fsdpc_exchange_gather_bytes(const fsdpc_exchange *exchange);
size_t fsdpc_exchange_reduce_bytes(const fsdpc_exchange *exchange);
/* The bytes in gather_bytes and reduce_bytes that lie outside of the slots: gathered codes, and
 * the coding error that error feedback keeps. On a GPU this memory is in torch's allocator. */
size_t fsdpc_exchange_coded_bytes(const fsdpc_exchange *exchange);
size_t fsdpc_exchange_spare_bytes(const fsdpc_exchange *exchange);
uint64_t fsdpc_exchange_spare_count(const fsdpc_exchange *exchange);
/* Bytes sent so far: by kind "wire" to other hosts, by kind "stream" to other ranks over NCCL. */
uint64_t fsdpc_exchange_sent_bytes(const fsdpc_exchange *exchange);
/* Adds an entry to the trace. If `unit` is NULL, the entry belongs to no unit. */
void fsdpc_exchange_note(fsdpc_exchange *x, enum fsdpc_trace_op op, const fsdpc_unit *unit,
                         uint64_t bytes);
fsdpc_comm *fsdpc_exchange_comm(const fsdpc_exchange *exchange);
int fsdpc_exchange_unit_count(const fsdpc_exchange *exchange);
fsdpc_unit *fsdpc_exchange_unit(const fsdpc_exchange *exchange, int id);
const char *fsdpc_exchange_kind(const fsdpc_exchange *exchange);

/* Call this before the collective that allocates an unfrozen parameter's gradient. `unit` NULL: the parameter
 * is in another exchange. Ranks in passes before `tag` then do not wait for this rank. If another rank
 * begins the next pass with gradients instead, both ranks fail with FSDPC_E_MISMATCH. A no-op for kinds that
 * cannot detect this. */
int fsdpc_exchange_announce(fsdpc_exchange *x, uint64_t tag, const fsdpc_unit *unit, int param);

/* Drops the coding error that error feedback would add to the next gradients. Call this between passes. */
int fsdpc_exchange_forget(fsdpc_exchange *x);

/* Call this before the collectives of the communication hook `what`. Fails with FSDPC_E_MISMATCH if another
 * rank gathers or reduces a unit or ends its backward instead. A no-op for kinds that cannot detect this. */
int fsdpc_exchange_before_hook(fsdpc_exchange *x, const char *what);

#endif
