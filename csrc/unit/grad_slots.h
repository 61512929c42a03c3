/* A few slots of memory for the shard gradients of units that are stepped in backward. The units use the
 * slots in turn, so that not every unit needs its own memory.
 *
 * A unit takes a slot (fsdpc_unit_take_slot) before its gradient is written. It leaves the slot
 * (fsdpc_unit_leave_slot) after the work that reads the gradient was queued. What the next holder queues on
 * its current stream runs after that work.
 */
#ifndef FSDPC_GRAD_SLOTS_H
#define FSDPC_GRAD_SLOTS_H

#include "unit/unit.h"

typedef struct fsdpc_grad_slots fsdpc_grad_slots;

/* Local. Moves these units' gradients into common slots if the slots take less memory than the gradients do
 * (fsdpc_footprint_grad_slots); the values are lost. The units keep the slots alive; *out is the caller's own
 * reference, or NULL if nothing has changed. Units with replicas, offloaded units and units without gradients
 * must not be listed. After FSDPC_E_NOMEM or FSDPC_E_DEVMEM nothing has changed. */
int fsdpc_grad_slots_share(fsdpc_unit *const *units, int count, int reduce_slots,
                           fsdpc_grad_slots **out);
/* Drops a reference. Dropping the last reference frees the slots. NULL is allowed. */
void fsdpc_grad_slots_drop(fsdpc_grad_slots *slots);
size_t fsdpc_grad_slots_bytes(const fsdpc_grad_slots *slots);

/* --- for the files of a unit ------------------------------------------------------------------- */

bool fsdpc_unit_holds_slot(const fsdpc_unit *unit);
/* Marks as free the slots that the unit holds, because the unit is being freed. `slots` may be NULL. */
void fsdpc_grad_slots_forget(fsdpc_grad_slots *slots, const fsdpc_unit *unit);
/* Gives the unit's slot back. A no-op if the unit holds no slot. */
int fsdpc_unit_leave_slot(fsdpc_unit *unit);
/* Frees the shard gradient, or the unit's reference to the slots. The unit has no gradient afterwards. */
void fsdpc_unit_free_grads(fsdpc_unit *unit);

#endif
