/* The memory of the "stream" exchange: slots that have addresses of their own and are registered once.
 *
 * Collectives use a slot's own address, which never changes. The slot is also mapped at units' addresses.
 * (Two addresses of the same physical memory are coherent for the device from one kernel to the
 * next.) Spare memory is mapped only at a unit's addresses, and is not registered.
 */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

static int
register_all(fsdpc_comm *comm, const fsdpc_arena *arena)
{
    for (int i = 0; i < fsdpc_arena_slot_count(arena); i++) {
        FSDPC_TRY(fsdpc_comm_register(comm, fsdpc_arena_slot_address(arena, i),
                                      fsdpc_arena_slot_bytes(arena, i)));
    }
    return FSDPC_OK;
}

static void
forget_all(fsdpc_comm *comm, const fsdpc_arena *arena)
{
    for (int i = 0; i < fsdpc_arena_slot_count(arena); i++) {
        fsdpc_comm_unregister(comm, fsdpc_arena_slot_address(arena, i));
    }
}

int
fsdpc_stream_slots_open(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    FSDPC_TRY(fsdpc_arena_new_on(s->device, &s->reduce_arena));
    for (int i = 0; i < x->reduce_slots && x->max_reduce_bytes > 0; i++) {
        if (fsdpc_exchange_packs(x, NULL)) {
            int slot;
            FSDPC_TRY(fsdpc_arena_add_slot(s->reduce_arena, x->max_reduce_bytes, &slot));
            s->slots[i].buffer = fsdpc_arena_slot_address(s->reduce_arena, slot);
        }
    }
    FSDPC_TRY(register_all(x->comm, x->arena));
    return register_all(s->reduce_comm, s->reduce_arena);
}

void
fsdpc_stream_slots_close(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    forget_all(x->comm, x->arena);
    if (s->reduce_arena) {
        forget_all(s->reduce_comm, s->reduce_arena);
        fsdpc_arena_free(s->reduce_arena);
    }
}

char *
fsdpc_stream_address(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    void *own = fsdpc_unit_is_spare(unit)
                    ? NULL
                    : fsdpc_arena_slot_address(x->arena, fsdpc_unit_use(unit)->slot);
    return own ? own : fsdpc_unit_full(unit);
}
