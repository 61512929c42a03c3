/* Memory for gradients of segments that were frozen when the unit was made.
 *
 * Master shards, cuts and the gathered range are unchanged. The gradient buffers are reallocated, because
 * their segments move, and their contents are copied. The user may still have tensors over the old buffers
 * (a view of a gradient), so the old buffers live as long as the unit. They are small, because a frozen unit
 * usually has no gradients at all.
 */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/grad_slots.h"
#include "unit/unit_impl.h"

struct fsdpc_retired {
    void *block; /* an old buffer; NULL: the entry keeps a slot, which the unit holds for ever */
    size_t bytes;
    struct fsdpc_grad_slots *slots; /* if block is NULL: a reference to the slots */
    struct fsdpc_retired *next;
};

/* The buffers whose layout depends on which segments are trainable. */
struct buffers {
    void *grad, *grad_out, *partial, *local;
    struct fsdpc_grad_slots *slots;
    bool held; /* the unit holds one of `slots` */
    size_t grad_bytes, partial_bytes, local_bytes;
    fsdpc_segment *segments; /* of the old layout */
    size_t *local_offset;
};

static struct buffers
buffers_of(const fsdpc_unit *unit)
{
    return (struct buffers){.grad = unit->grad,
                            .grad_out = unit->grad_out,
                            .partial = unit->partial,
                            .local = unit->local,
                            .slots = unit->slots,
                            .held = fsdpc_unit_holds_slot(unit),
                            .grad_bytes = unit->layout->grad_bytes,
                            .partial_bytes = unit->footprint.partial_bytes,
                            .local_bytes = unit->local_bytes};
}

static void
put_buffers(fsdpc_unit *unit, const struct buffers *b)
{
    unit->grad = b->grad;
    unit->grad_out = b->grad_out;
    unit->partial = b->partial;
    unit->local = b->local;
    unit->slots = b->slots;
    unit->local_bytes = b->local_bytes;
}

/* Allocates the unit's buffers with the sizes of the new layout. */
static int
make_new(fsdpc_unit *unit, const struct buffers *old)
{
    put_buffers(unit, &(struct buffers){0});
    FSDPC_TRY(fsdpc_unit_make_grads(unit));
    return old->local ? fsdpc_grad_make_local(unit) : FSDPC_OK;
}

static void
free_new(fsdpc_unit *unit)
{
    fsdpc_unit_free_grads(unit);
    fsdpc_device_free(unit->device, unit->partial, unit->footprint.partial_bytes);
    fsdpc_device_free(unit->device, unit->local, unit->local_bytes);
}

/* Copies a segment's sums, its local gradients, and its separate gradient for the optimizer, if any. */
static int
copy_segment(fsdpc_unit *unit, const struct buffers *old, int s)
{
    const fsdpc_segment *was = &old->segments[s], *seg = &unit->layout->segments[s];
    const char *sum = (const char *)old->grad + was->grad_offset;
    FSDPC_TRY(fsdpc_device_cast(unit->shard_device, (char *)unit->grad + seg->grad_offset,
                                seg->accumulate, sum, seg->accumulate, seg->piece_numel, 1.0));
    if (unit->grad_out) {
        const char *out = old->grad_out ? (const char *)old->grad_out + was->shard_offset : sum;
        FSDPC_TRY(fsdpc_device_cast(
            unit->shard_device, (char *)unit->grad_out + seg->shard_offset, seg->storage, out,
            old->grad_out ? seg->storage : seg->accumulate, seg->piece_numel, 1.0));
    }
    if (old->local) {
        FSDPC_TRY(fsdpc_device_cast(unit->device, (char *)unit->local + unit->local_offset[s],
                                    seg->accumulate,
                                    (const char *)old->local + old->local_offset[s],
                                    seg->accumulate, seg->piece_numel * unit->world, 1.0));
    }
    return FSDPC_OK;
}

static int
copy_old(fsdpc_unit *unit, const struct buffers *old)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        if (old->segments[s].trainable && (!old->slots || old->held)) {
            FSDPC_TRY(copy_segment(unit, old, s));
        }
    }
    return FSDPC_OK;
}

/* Keeps an old block for the unit's life. The function cannot fail: it takes the list entry from `room`. */
static void
retire(fsdpc_unit *unit, struct fsdpc_retired **room, void *block, size_t bytes)
{
    if (!block) {
        return;
    }
    struct fsdpc_retired *one = *room;
    *room = one->next;
    *one = (struct fsdpc_retired){block, bytes, NULL, unit->retired};
    unit->retired = one;
    unit->retired_bytes += bytes;
}

static void
retire_old(fsdpc_unit *unit, struct fsdpc_retired **room, const struct buffers *old)
{
    if (!old->slots) {
        retire(unit, room, old->grad, old->grad_bytes);
        retire(unit, room, old->grad_out, unit->layout->shard_bytes);
    } else if (!old->held) {
        fsdpc_grad_slots_drop(old->slots);
    } else {
        retire(unit, room, old->grad, 0);
        unit->retired->block = NULL;
        unit->retired->slots = old->slots;
    }
}

static void
free_room(struct fsdpc_retired *room)
{
    while (room) {
        struct fsdpc_retired *next = room->next;
        fsdpc_mem_free(room);
        room = next;
    }
}

static int
make_room(struct fsdpc_retired **room)
{
    for (int i = 0; i < 2; i++) {
        struct fsdpc_retired *one = fsdpc_mem_calloc(1, sizeof *one);
        if (!one) {
            return fsdpc_error(FSDPC_E_NOMEM, "no memory for new gradients");
        }
        one->next = *room;
        *room = one;
    }
    return FSDPC_OK;
}

static void
set_trainable(fsdpc_unit *unit, const fsdpc_segment *was, const uint8_t *more, uint8_t *flags)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        flags[s] = was[s].trainable || (more && more[s]);
    }
    fsdpc_layout_set_trainable(unit->layout, flags);
}

static int
check_thaw(const fsdpc_unit *unit, const uint8_t *segments)
{
    if (unit->use) {
        return fsdpc_error(FSDPC_E_STATE,
                           "unit %s belongs to a tree, so its gradient buffers cannot be "
                           "reallocated: detach the tree first",
                           unit->name);
    }
    if (unit->swap.flight || unit->swap.lost) {
        return fsdpc_error(
            FSDPC_E_STATE,
            "unit %s: a sum over replicas has failed, and the other replica may "
            "still send into the gradients' memory, so no parameter can be unfrozen: "
            "start the ranks anew",
            unit->name);
    }
    for (int s = 0; s < unit->layout->segment_count; s++) {
        if (segments[s] && unit->layout->segments[s].storage == FSDPC_BYTES) {
            return fsdpc_error(FSDPC_E_INVAL,
                               "unit %s: a segment that is stored as bytes cannot be trained",
                               unit->name);
        }
    }
    return FSDPC_OK;
}

int
fsdpc_unit_thaw(fsdpc_unit *unit, const uint8_t *segments)
{
    int status = FSDPC_OK;
    FSDPC_TRY(check_thaw(unit, segments));
    FSDPC_TRY(fsdpc_unit_settle(unit));
    size_t count = (size_t)unit->layout->segment_count;
    struct buffers old = buffers_of(unit);
    struct fsdpc_retired *room = NULL;
    uint8_t *flags = fsdpc_mem_calloc(count, 1);
    old.segments = fsdpc_mem_calloc(count, sizeof *old.segments);
    old.local_offset = fsdpc_mem_calloc(count, sizeof *old.local_offset);
    if (!flags || !old.segments || !old.local_offset) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for unit %s", unit->name), done);
    }
    memcpy(old.segments, unit->layout->segments, count * sizeof *old.segments);
    memcpy(old.local_offset, unit->local_offset, count * sizeof *old.local_offset);
    FSDPC_GOTO(make_room(&room), done);
    fsdpc_grad_close(unit);
    set_trainable(unit, old.segments, segments, flags);
    FSDPC_GOTO(make_new(unit, &old), undo);
    FSDPC_GOTO(copy_old(unit, &old), undo);
    retire_old(unit, &room, &old);
    fsdpc_device_free(unit->device, old.partial, old.partial_bytes);
    fsdpc_device_free(unit->device, old.local, old.local_bytes);
    goto done;
undo:
    free_new(unit);
    set_trainable(unit, old.segments, NULL, flags);
    fsdpc_unit_plan(unit);
    put_buffers(unit, &old);
    memcpy(unit->local_offset, old.local_offset, count * sizeof *old.local_offset);
done:
    free_room(room);
    fsdpc_mem_free(flags);
    fsdpc_mem_free(old.segments);
    fsdpc_mem_free(old.local_offset);
    return status;
}

void
fsdpc_unit_free_retired(fsdpc_unit *unit)
{
    while (unit->retired) {
        struct fsdpc_retired *one = unit->retired;
        unit->retired = one->next;
        fsdpc_unit_shard_free(unit, one->block, one->bytes);
        fsdpc_grad_slots_forget(one->slots, unit);
        fsdpc_grad_slots_drop(one->slots);
        fsdpc_mem_free(one);
    }
}
