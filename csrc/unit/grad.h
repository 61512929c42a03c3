/* Gradients of a unit: into buffers, summed, into the shard gradient. For exchanges and the tree. */
#ifndef FSDPC_GRAD_H
#define FSDPC_GRAD_H

#include "unit/unit.h"

/* Sums this rank's pieces: sources[r] is rank r's reduce buffer or NULL if it has nothing. */
int fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count);

/* Makes the plans of a step; every call below does where they are missing. */
int fsdpc_grad_open(fsdpc_unit *unit);
/* Adds gradients into `local` (made on first use) instead of sending them. NULL: there are none. */
int fsdpc_grad_keep_local(fsdpc_unit *unit, const fsdpc_tensor *grads);
/* Forgets gradients that wait in `local` for one parameter (the user cleared them). */
void fsdpc_grad_drop_local(fsdpc_unit *unit, int param);
/* Writes gradients (plus what waits in `local`, which is emptied) into a reduce buffer in reduce
 * dtype; absent ones become zeros. bits[i] = 1 for parameters with a gradient. grads may be NULL
 * (only `local`). */
int fsdpc_grad_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* One rank: the same, into a buffer that is laid out like the shard gradient. */
int fsdpc_grad_widen(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits);
/* One rank, no wire: gradients go straight into the sum over the shard group; bits are only added. */
int fsdpc_grad_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits);
/* The shard gradient takes this rank's pieces of a reduce buffer (`wide`: of a buffer laid out like the
 * shard gradient) after the last sum: divided, added if unit->add. */
int fsdpc_grad_take_pieces(fsdpc_unit *unit, const void *buffer, bool wide);
/* The same with what `partial` holds, which is empty then. */
int fsdpc_grad_take_partial(fsdpc_unit *unit);
/* `partial` becomes this rank's pieces of a reduce buffer. */
int fsdpc_grad_widen_pieces(fsdpc_unit *unit, const void *buffer);

#endif
