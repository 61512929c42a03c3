/* Slots for shard gradients, see grad_slots.h.
 *
 * A unit takes the slot that it had last, if that slot is free. Otherwise it takes another free slot, and its
 * gradient moves. If units always run in one order, no unit moves after the first backward. If all slots are
 * held, because units step only at the end of backward or the program keeps gradients, one more slot is added
 * for good.
 *
 * The sum into a slot runs after the pack of the gradients, which is queued on the new holder's stream. If
 * the last holder left the slot on that stream, its step was queued there before the pack. If the last holder
 * left the slot on another stream, the new holder's stream must wait for the slot's event `left`.
 */
#include "unit/grad_slots.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

struct slot {
    void *memory;
    size_t bytes;
    const fsdpc_unit *holder; /* NULL: free */
    fsdpc_event *left;        /* recorded after the work of the last holder */
    fsdpc_stream *stream;     /* on which `left` was recorded */
    uint64_t capture;         /* the capture in which `left` was recorded; 0: in none */
    bool used;                /* true if `left` was ever recorded */
};

struct fsdpc_grad_slots {
    fsdpc_device *device;
    int refs, count;
    struct slot *list;
    size_t bytes;
};

/* Points `grad` at slot `at`. If the unit has a `grad_out`, points that at the memory after `grad`. */
static void
point_at(fsdpc_unit *unit, int at)
{
    const fsdpc_footprint *print = &unit->footprint;
    char *memory = unit->slots->list[at].memory;
    unit->slot = at;
    unit->grad = memory;
    unit->grad_out = print->grad_out_bytes
                         ? memory + fsdpc_round_up(print->grad_bytes, unit->layout->align_bytes)
                         : NULL;
}

static int
add_slot(fsdpc_grad_slots *slots, size_t bytes)
{
    struct slot added = {.bytes = bytes};
    const size_t count = (size_t)slots->count;
    struct slot *list = fsdpc_mem_calloc(count + 1, sizeof *list);
    if (!list) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a slot of gradients");
    }
    int status = fsdpc_device_event_new(slots->device, &added.left);
    if (status == FSDPC_OK) {
        status = fsdpc_device_alloc(slots->device, bytes, &added.memory);
    }
    if (status != FSDPC_OK) {
        fsdpc_device_event_free(slots->device, added.left);
        fsdpc_mem_free(list);
        return status;
    }
    if (count > 0) {
        memcpy(list, slots->list, count * sizeof *list);
    }
    list[count] = added;
    fsdpc_mem_free(slots->list);
    slots->list = list;
    slots->count++;
    slots->bytes += bytes;
    return FSDPC_OK;
}

void
fsdpc_grad_slots_drop(fsdpc_grad_slots *slots)
{
    if (!slots || --slots->refs > 0) {
        return;
    }
    for (int i = 0; i < slots->count; i++) {
        fsdpc_device_free(slots->device, slots->list[i].memory, slots->list[i].bytes);
        fsdpc_device_event_free(slots->device, slots->list[i].left);
    }
    fsdpc_mem_free(slots->list);
    fsdpc_mem_free(slots);
}

void
fsdpc_grad_slots_forget(fsdpc_grad_slots *slots, const fsdpc_unit *unit)
{
    for (int i = 0; slots && i < slots->count; i++) {
        if (slots->list[i].holder == unit) {
            slots->list[i].holder = NULL;
        }
    }
}

size_t
fsdpc_grad_slots_bytes(const fsdpc_grad_slots *slots)
{
    return slots ? slots->bytes : 0;
}

void
fsdpc_unit_free_grads(fsdpc_unit *unit)
{
    if (!unit->slots) {
        fsdpc_unit_shard_free(unit, unit->grad, unit->layout->grad_bytes);
        fsdpc_unit_shard_free(unit, unit->grad_out, unit->layout->shard_bytes);
    } else if (fsdpc_unit_leave_slot(unit) != FSDPC_OK) {
        unit->slots->list[unit->slot].holder = NULL;
    }
    fsdpc_grad_slots_drop(unit->slots);
    unit->slots = NULL;
    unit->grad = unit->grad_out = NULL;
}

static void
share(fsdpc_unit *unit, fsdpc_grad_slots *slots, int at)
{
    fsdpc_unit_free_grads(unit);
    unit->slots = slots;
    slots->refs++;
    point_at(unit, at);
}

int
fsdpc_grad_slots_share(fsdpc_unit *const *units, int count, int reduce_slots,
                       fsdpc_grad_slots **out)
{
    int status = FSDPC_OK;
    size_t largest = 0, all = 0;
    *out = NULL;
    for (int i = 0; i < count; i++) {
        const size_t bytes = units[i]->footprint.grads_bytes;
        largest = bytes > largest ? bytes : largest;
        all += bytes;
    }
    const int wanted = fsdpc_footprint_grad_slots(largest, all, reduce_slots);
    if (wanted == 0) {
        return FSDPC_OK;
    }
    fsdpc_grad_slots *slots = fsdpc_mem_calloc(1, sizeof *slots);
    if (!slots) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for slots of gradients");
    }
    slots->refs = 1;
    slots->device = units[0]->device;
    for (int i = 0; i < wanted; i++) {
        FSDPC_GOTO(add_slot(slots, largest), fail);
    }
    for (int i = 0; i < count; i++) {
        share(units[i], slots, i % wanted);
    }
    *out = slots;
    return FSDPC_OK;
fail:
    fsdpc_grad_slots_drop(slots);
    return fsdpc_error_prepend(status, "slots for the gradients of units that step in backward");
}

/* --- taking turns ---------------------------------------------------------------------------- */

static bool
is_free_for(const struct slot *slot, const fsdpc_unit *unit)
{
    return !slot->holder && slot->bytes >= unit->footprint.grads_bytes;
}

/* Sets *at to a slot that the unit may take; adds a slot if none is free. */
static int
find(fsdpc_grad_slots *slots, const fsdpc_unit *unit, int *at)
{
    *at = unit->slot;
    if (is_free_for(&slots->list[*at], unit)) {
        return FSDPC_OK;
    }
    for (*at = 0; *at < slots->count; (*at)++) {
        if (is_free_for(&slots->list[*at], unit)) {
            return FSDPC_OK;
        }
    }
    return add_slot(slots, unit->footprint.grads_bytes);
}

/* Makes the current stream wait for the work of the slot's last holder. */
static int
follow(const fsdpc_grad_slots *slots, const struct slot *slot)
{
    uint64_t capture;
    if (!slot->used || slot->stream == fsdpc_device_current(slots->device)) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_device_capture(slots->device, &capture));
    return capture == slot->capture ? fsdpc_device_wait(slots->device, slot->left) : FSDPC_OK;
}

int
fsdpc_unit_take_slot(fsdpc_unit *unit, bool *moved)
{
    int at;
    fsdpc_grad_slots *slots = unit->slots;
    *moved = false;
    if (!slots || slots->list[unit->slot].holder == unit) {
        return FSDPC_OK;
    }
    const int status = find(slots, unit, &at);
    if (status != FSDPC_OK) {
        return fsdpc_error_prepend(status, "gradients of unit %s", unit->name);
    }
    FSDPC_TRY(follow(slots, &slots->list[at]));
    slots->list[at].holder = unit;
    *moved = at != unit->slot;
    point_at(unit, at);
    return FSDPC_OK;
}

bool
fsdpc_unit_holds_slot(const fsdpc_unit *unit)
{
    return unit->slots && unit->slots->list[unit->slot].holder == unit;
}

int
fsdpc_unit_leave_slot(fsdpc_unit *unit)
{
    if (!fsdpc_unit_holds_slot(unit)) {
        return FSDPC_OK;
    }
    const fsdpc_grad_slots *slots = unit->slots;
    struct slot *slot = &slots->list[unit->slot];
    FSDPC_TRY(fsdpc_device_capture(slots->device, &slot->capture));
    FSDPC_TRY(fsdpc_device_record(slots->device, slot->left));
    slot->stream = fsdpc_device_current(slots->device);
    slot->used = true;
    slot->holder = NULL;
    return FSDPC_OK;
}
