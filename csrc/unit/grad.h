/* Gradients of a unit: packed into buffers, summed into the shard gradient. For exchanges and the tree. */
#ifndef FSDPC_GRAD_H
#define FSDPC_GRAD_H

#include "unit/unit.h"

/* Sums this rank's pieces: sources[r] is rank r's reduce buffer, NULL if the rank sent none. */
int fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count);
/* Sums `count` senders' pieces. Sender `own`'s piece is in this rank's reduce buffer `buffer`. The other senders' pieces
 * follow each other in `landing`, in their order, fsdpc_footprint_landing bytes each; segments with a reduce codec are
 * coded there, and pass through `room` on their way to the sum. `landing` NULL: `buffer` holds the sum. */
int fsdpc_grad_sum_landed(fsdpc_unit *unit, const void *buffer, const char *landing, int own,
                          int count, void *room);
/* fsdpc_grad_sum_landed on a device that queues, in one launch; nothing passes through the host.
 * `list`: room for one entry per segment. `offsets`, `stride`: what fsdpc_footprint_landing says. */
int fsdpc_grad_sum_apart(fsdpc_unit *unit, char *buffer, char *landing, fsdpc_landed *list,
                         const size_t *offsets, size_t stride);
/* The coding of a segment's pieces, not empty, between `values` (as packed) and `coded` (as they travel). */
fsdpc_coding fsdpc_grad_coding(const fsdpc_segment *seg, int pieces, char *values, char *coded,
                               size_t stride);
/* Bytes of `room` for a unit of this layout and so many senders; 0: nothing is coded. */
size_t fsdpc_grad_room_bytes(const fsdpc_layout *layout, int count);

/* The pieces of `owner` in the reduce buffers of several ranks, summed in F32 (F64 for F64) in the order of `buffers`
 * and rounded once, become the owner's piece in `into`, which may be one of `buffers`. */
int fsdpc_grad_sum_pieces(const fsdpc_unit *unit, int owner, const char *const *buffers, int count,
                          char *into);

/* Makes the pack plans of a step. Optional: every call below makes them when they are missing. */
int fsdpc_grad_open(fsdpc_unit *unit);
/* Accumulates gradients in `local` (allocated on first use) instead of sending them. grads NULL: a no-op. */
int fsdpc_grad_keep_local(fsdpc_unit *unit, const fsdpc_tensor *grads);
/* Drops the gradient of one parameter in `local` (the user cleared it). */
void fsdpc_grad_drop_local(fsdpc_unit *unit, int param);
/* Writes gradients plus those in `local`, which is then empty, to a reduce buffer in reduce dtype; absent
 * gradients become zeros. bits[i] = 1 for parameters with a gradient. grads NULL: only `local`. */
int fsdpc_grad_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* One rank: fsdpc_grad_pack into a buffer that is laid out like the shard gradient (accumulate dtype). */
int fsdpc_grad_widen(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* One rank: sums gradients into the shard gradient (`partial` with replicas); sets bits of those present. */
int fsdpc_grad_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits);
/* The shard gradient takes this rank's pieces of a reduce buffer (`wide`: of a buffer laid out like the
 * shard gradient) after the last sum: divided; added or replaced (fsdpc_unit_set_add). */
int fsdpc_grad_take_pieces(fsdpc_unit *unit, const void *buffer, bool wide);
/* fsdpc_grad_take_pieces from `partial`, which is then empty. */
int fsdpc_grad_take_partial(fsdpc_unit *unit);
/* `partial` becomes this rank's pieces of a reduce buffer, cast to the accumulate dtype. */
int fsdpc_grad_widen_pieces(fsdpc_unit *unit, const void *buffer);

#endif
