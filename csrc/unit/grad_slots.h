/* A few slots of memory for the shard gradients of units that are stepped in backward: the units use the slots in
 * turn, so that not every unit needs memory of its own.
 *
 * A unit holds a slot from fsdpc_unit_take_slot, before its gradient is written, until
 * fsdpc_unit_leave_slot, when the work that reads the gradient is queued. What the next
 * holder queues on its current stream runs after that work.
 */
#ifndef FSDPC_GRAD_SLOTS_H
#define FSDPC_GRAD_SLOTS_H

#include "unit/unit.h"

typedef struct fsdpc_grad_slots fsdpc_grad_slots;

/* Local. The gradients of these units, whose values are not needed, move into common slots, if those take less
 * than what the units have (fsdpc_footprint_grad_slots). The units keep the slots alive; *out is the
 * caller's own reference to the slots, or NULL if nothing has changed. Units with replicas, offloaded units
 * and units without gradients must not be listed. FSDPC_E_NOMEM, FSDPC_E_DEVMEM: nothing has changed. */
int fsdpc_grad_slots_share(fsdpc_unit *const *units, int count, int reduce_slots,
                           fsdpc_grad_slots **out);
/* Drops a reference; NULL is allowed. The last one frees the slots. */
void fsdpc_grad_slots_drop(fsdpc_grad_slots *slots);
size_t fsdpc_grad_slots_bytes(const fsdpc_grad_slots *slots);

/* --- for the files of a unit ------------------------------------------------------------------- */

bool fsdpc_unit_holds_slot(const fsdpc_unit *unit);
/* For a unit that is being freed: it holds none of `slots` any more. NULL is allowed. */
void fsdpc_grad_slots_forget(fsdpc_grad_slots *slots, const fsdpc_unit *unit);
/* The unit gives its slot back. A no-op for a unit that holds none. */
int fsdpc_unit_leave_slot(fsdpc_unit *unit);
/* Frees the shard gradient, or the unit's reference to the slots. The unit has no gradient afterwards. */
void fsdpc_unit_free_grads(fsdpc_unit *unit);

#endif
