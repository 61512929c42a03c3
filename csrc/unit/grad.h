/* Packs a unit's gradients and sums packed gradients into the shard gradient. Used by exchanges and trees. */
#ifndef FSDPC_GRAD_H
#define FSDPC_GRAD_H

#include "unit/unit.h"

/* Sums all ranks' gradients for this rank's pieces. sources[r] is rank r's reduce buffer, or NULL if rank r
 * has sent no buffer. */
int fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count);
/* Sums the pieces of `count` senders. The piece of sender `own` is in this rank's reduce buffer `buffer`. The
 * pieces of the other senders follow each other in `landing`, in the order of the senders, each with
 * fsdpc_footprint_landing bytes. Coded pieces are decoded into `room`. If `landing` is NULL, `buffer` already
 * holds the sum. */
int fsdpc_grad_sum_landed(fsdpc_unit *unit, const void *buffer, const char *landing, int own,
                          int count, void *room);
/* Like fsdpc_grad_sum_landed, on a device that queues: one launch, and nothing passes through the host.
 * `list` has room for one entry per segment; `offsets` and `stride` are those of fsdpc_footprint_landing. */
int fsdpc_grad_sum_apart(fsdpc_unit *unit, char *buffer, char *landing, fsdpc_landed *list,
                         const size_t *offsets, size_t stride);
/* Describes a segment's pieces for a codec. `values` has the pieces in the reduce dtype, and `coded` has (or
 * will have) their codes, which are sent. The pieces must not be empty. */
fsdpc_coding fsdpc_grad_coding(const fsdpc_segment *seg, int pieces, char *values, char *coded,
                               size_t stride);
/* Returns the bytes that the argument `room` of fsdpc_grad_sum_landed needs for `count` senders; 0 if no
 * segment is coded. */
size_t fsdpc_grad_room_bytes(const fsdpc_layout *layout, int count);

/* Sums the pieces of `owner` in several ranks' reduce buffers, in the order of `buffers`. F64 is summed in
 * F64, other dtypes in F32, and each sum is rounded once. The sums are written to the owner's pieces in
 * `into`, which may be one of `buffers`. */
int fsdpc_grad_sum_pieces(const fsdpc_unit *unit, int owner, const char *const *buffers, int count,
                          char *into);

/* Makes the pack plans of a step. Optional: every function below makes the plans if they are missing. */
int fsdpc_grad_open(fsdpc_unit *unit);
/* Accumulates gradients in `local` (allocated on first use) instead of sending them. grads NULL: a no-op. */
int fsdpc_grad_keep_local(fsdpc_unit *unit, const fsdpc_tensor *grads);
/* Drops the gradient of one parameter in `local`, because the user has cleared the gradient. */
void fsdpc_grad_drop_local(fsdpc_unit *unit, int param);
/* Writes the sums of `grads` and `local` to a reduce buffer in the reduce dtype, and empties `local`; absent
 * gradients become zeros. Sets bits[i] to 1 if parameter i has a gradient, else 0. `grads` may be NULL. */
int fsdpc_grad_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* Like fsdpc_grad_pack, for a group of one rank. `buffer` is laid out like the shard gradient, in the
 * accumulate dtype. */
int fsdpc_grad_widen(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* For a group of one rank: sums gradients into the shard gradient (with replicas: `partial`). Sets bits[i] to
 * 1 if parameter i has a gradient. */
int fsdpc_grad_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits);
/* Call this after the last sum. Divides this rank's pieces in `buffer`, and adds them to the shard gradient
 * or replaces the gradient with them (fsdpc_unit_set_add). `buffer` is a reduce buffer. With `wide` it is
 * laid out like the shard gradient. */
int fsdpc_grad_take_pieces(fsdpc_unit *unit, const void *buffer, bool wide);
/* Calls fsdpc_grad_take_pieces on `partial`, and marks `partial` as empty. */
int fsdpc_grad_take_partial(fsdpc_unit *unit);
/* Sets `partial` to this rank's pieces of a reduce buffer, cast to the accumulate dtype. */
int fsdpc_grad_widen_pieces(fsdpc_unit *unit, const void *buffer);

#endif
