/* How many bytes a unit needs, from its layout alone: pure arithmetic, no memory is touched.
 *
 * The engine allocates by these figures, and planners print them, so that a plan equals a run to the byte.
 */
#ifndef FSDPC_FOOTPRINT_H
#define FSDPC_FOOTPRINT_H

#include "unit/layout.h"

typedef struct fsdpc_footprint_options {
    int replicas; /* 0: none; 1: sums are made in place; more: the shares of so many replicas land
                     behind the shard group's sum */
    bool
        offload; /* master shard and shard gradient lie in another memory than the gathered values */
    bool foreign; /* the gathered values are made elsewhere */
    int senders;  /* ranks whose gradients land apart, because this rank cannot read their memory */
    /* A GPU: `senders` counts only if gradients travel coded; then there is one stretch per receiver too. */
    bool to_all;
    size_t range_grain; /* size of a page of host memory, or the device's grain */
    size_t page_bytes;  /* of host memory */
} fsdpc_footprint_options;

typedef struct fsdpc_footprint {
    bool direct; /* no range: the master shard is read (one rank, no cast), or foreign */
    size_t master_bytes;
    size_t grad_bytes;     /* shard gradient, accumulate dtype */
    size_t grad_out_bytes; /* the gradient in the storage dtype, where that is narrower; else 0 */
    size_t grads_bytes;    /* grad and grad_out, one behind the other */
    size_t partial_bytes;  /* sums over shard groups before replicas; 0 without replicas */
    size_t local_bytes;    /* whole gradients of no_sync; allocated when first needed */
    size_t range_bytes;    /* gathered values, whole grains; 0 if direct */
    size_t reduce_bytes; /* one rank's packed gradients (and codes, and what lands), whole pages */
    size_t coded_bytes;  /* all ranks' pieces of coded segments as they travel; 0: none is coded */
    /* What a gather brings: all ranks' pieces, of coded segments their codes. */
    size_t gathered_bytes;
    size_t reduced_bytes; /* what a reduction sends: all ranks' pieces, coded or not */
    size_t lost_bytes; /* the error that coding leaves in the gradients that go to one other rank */
} fsdpc_footprint;

/* Bytes of whole gradients in the accumulate dtype, each segment at a multiple of align_bytes. offsets[s]
 * (NULL: not wanted) gets where segment s begins. */
size_t fsdpc_footprint_local(const fsdpc_layout *layout, size_t *offsets);

/* Bytes of one rank's pieces of the gradients of another rank, in the reduce dtype or coded, aligned as above. */
size_t fsdpc_footprint_landing(const fsdpc_layout *layout, size_t *offsets);
/* Bytes of packed gradients, rounded up to align_bytes: codes begin behind them. */
size_t fsdpc_footprint_packed(const fsdpc_layout *layout);
/* Bytes of all ranks' coded pieces of gradients, aligned as above; 0: no segment's gradients are coded. */
size_t fsdpc_footprint_codes(const fsdpc_layout *layout, size_t *offsets);
/* Bytes of what coding lost of one rank's pieces, in float32, of segments with error feedback, aligned as above. */
size_t fsdpc_footprint_lost(const fsdpc_layout *layout, size_t *offsets);

/* A replica's share of a run of gradients: `numel` elements that it sums. The last replicas' shares may end
 * behind the run: what is there is sent, summed and dropped. All zero before the first call of next_share. */
typedef struct fsdpc_share {
    fsdpc_grad_run run;
    int64_t numel;
    size_t offset, end; /* in the memory of one replica's shares */
} fsdpc_share;
/* The shares of the next run; false: there is none. *segment is that of fsdpc_layout_next_run. */
bool fsdpc_footprint_next_share(const fsdpc_layout *layout, int replicas, int *segment,
                                fsdpc_share *share);
/* Bytes of one replica's shares; *begin: the offset of the first replica's
 * shares, behind the shard group's sum. The other replicas' shares follow. */
size_t fsdpc_footprint_shares(const fsdpc_layout *layout, int replicas, size_t *begin);

fsdpc_footprint fsdpc_footprint_of(const fsdpc_layout *layout,
                                   const fsdpc_footprint_options *options);

/* How many slots the gradients of units that step in backward take in turn (grad_slots.h), each as large as the
 * largest unit's grads_bytes: one per reduce slot, because that many units can be summed and not stepped (with no
 * reduce slots a unit is stepped at once). 0 if that is not less than `all`, the units' sum: then each unit has
 * its own. */
int fsdpc_footprint_grad_slots(size_t largest, size_t all, int reduce_slots);

/* How many buffers for packed gradients a group of units has: `wanted`, none where nothing is packed.
 * `largest`: the most reduce_bytes of a unit. `any_offload`: some unit is offloaded. */
int fsdpc_footprint_reduce_slots(int world, bool any_offload, size_t largest, int wanted);

#endif
