/* Computes how many bytes a unit needs, from its layout and options: pure arithmetic, no memory is touched.
 *
 * The engine allocates by these figures, and planners print them, so that a plan equals a run to the byte.
 */
#ifndef FSDPC_FOOTPRINT_H
#define FSDPC_FOOTPRINT_H

#include "unit/layout.h"

typedef struct fsdpc_footprint_options {
    /* 0: the unit has no replicas. 1: the sum over replicas is made in place. n > 1: n replicas send each
     * other shares of their sums, and need room for n shares after the shard group's sum. */
    int replicas;
    bool
        offload; /* master shard and shard gradient lie in another memory than the gathered values */
    bool foreign; /* the caller makes the gathered values, in memory of its own */
    int senders;  /* number of ranks that send gradients to this rank; 0: no rank sends any */
    /* True on a GPU: `senders` is used only if gradients are coded, and what is sent to each receiver also
     * needs room. */
    bool to_all;
    size_t range_grain; /* size of a page of host memory, or the device's grain */
    size_t page_bytes;  /* of host memory */
} fsdpc_footprint_options;

typedef struct fsdpc_footprint {
    bool
        direct; /* no range is needed: the values are the master shard (one rank, no cast) or foreign */
    size_t master_bytes;
    size_t grad_bytes;     /* shard gradient, accumulate dtype */
    size_t grad_out_bytes; /* the gradient in the storage dtype, if that is narrower; else 0 */
    size_t grads_bytes;    /* grad, then grad_out */
    size_t partial_bytes;  /* sums over the shard group, with replicas; 0 without replicas */
    size_t local_bytes;    /* whole gradients kept by no_sync; allocated when first needed */
    size_t range_bytes;    /* gathered values, rounded up to range_grain; 0 if direct */
    size_t reduce_bytes;   /* one rank's packed gradients, codes and received pieces; whole pages */
    size_t coded_bytes; /* codes of all ranks' pieces of coded segments; 0: no segment is coded */
    /* What a gather receives: all ranks' pieces, in the form of codes for coded segments. */
    size_t gathered_bytes;
    size_t reduced_bytes; /* what a reduction sends: all ranks' pieces, coded or not */
    size_t lost_bytes;    /* coding errors of the gradients that are sent to one other rank */
} fsdpc_footprint;

/* Returns the bytes of whole gradients in the accumulate dtype, each segment at a multiple of align_bytes.
 * Sets offsets[s] to the byte where segment s begins, unless `offsets` is NULL. */
size_t fsdpc_footprint_local(const fsdpc_layout *layout, size_t *offsets);

/* Returns the bytes that one rank sends to one other rank: a piece of each segment's gradients, coded or in
 * the reduce dtype. Aligned as above. */
size_t fsdpc_footprint_landing(const fsdpc_layout *layout, size_t *offsets);
/* Returns the bytes of packed gradients, rounded up to align_bytes. The codes begin at this offset. */
size_t fsdpc_footprint_packed(const fsdpc_layout *layout);
/* Returns the bytes of all ranks' coded pieces of gradients, aligned as above; 0 if none are coded. */
size_t fsdpc_footprint_codes(const fsdpc_layout *layout, size_t *offsets);
/* Returns the bytes of the float32 coding errors of one rank's pieces (error feedback); aligned as above. */
size_t fsdpc_footprint_lost(const fsdpc_layout *layout, size_t *offsets);

/* A replica's share of a run of gradients: the `numel` elements that this replica sums. The last shares may
 * reach past the end of the run; nobody uses the sums there. Before the first call of
 * fsdpc_footprint_next_share, set the share to zeros. */
typedef struct fsdpc_share {
    fsdpc_grad_run run;
    int64_t numel;
    size_t offset, end; /* bytes, from the start of one replica's shares */
} fsdpc_share;
/* Sets *share for the next run, or returns false if there is none. For *segment see fsdpc_layout_next_run. */
bool fsdpc_footprint_next_share(const fsdpc_layout *layout, int replicas, int *segment,
                                fsdpc_share *share);
/* Returns the bytes of one replica's shares, and sets *begin to the offset of the first replica's shares,
 * which lie after the shard group's sum. The other replicas' shares follow. */
size_t fsdpc_footprint_shares(const fsdpc_layout *layout, int replicas, size_t *begin);

fsdpc_footprint fsdpc_footprint_of(const fsdpc_layout *layout,
                                   const fsdpc_footprint_options *options);

/* Returns how many slots the gradients of units that step in backward share (grad_slots.h): one per reduce
 * slot, because up to one unit per reduce slot can wait for its step. Without reduce slots a unit steps
 * immediately: one slot is enough. A slot has `largest` bytes, the largest grads_bytes of all units. `all` is
 * the sum of the units' grads_bytes. Returns 0 if the slots together need `all` bytes or more: then each unit
 * has its own gradient. */
int fsdpc_footprint_grad_slots(size_t largest, size_t all, int reduce_slots);

/* Returns how many buffers for packed gradients a group of units has: `wanted`, or 0 if nothing is packed.
 * `largest` is the largest reduce_bytes of all units; `any_offload` says whether some unit is offloaded. */
int fsdpc_footprint_reduce_slots(int world, bool any_offload, size_t largest, int wanted);

#endif
