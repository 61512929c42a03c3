/* Ranges and slots in the memory of a device that the CPU does not see. See arena.h.
 *
 * A range consists of reserved addresses. A slot is a piece of memory. It is mapped at addresses of ranges,
 * and also at addresses of its own, which never change, so collectives register them once. The piece
 * stays in memory while a range shows it, even after the arena is freed. A piece is mapped as a whole:
 * a range needs as many addresses as its slot has bytes. Binding gives the range these addresses. The range
 * moves only if the slot is larger than every piece that the range has shown so far.
 */
#include "unit/arena_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"

int
fsdpc_arena_device_range_init(fsdpc_device *device, fsdpc_range *range, size_t bytes)
{
    memset(range, 0, sizeof *range);
    range->slot = -1;
    range->bytes = fsdpc_round_up(bytes ? bytes : 1, fsdpc_device_grain(device));
    range->device = device;
    return FSDPC_OK;
}

/* If the piece cannot be unmapped, because work on it still runs, the addresses stay reserved. */
void
fsdpc_arena_device_range_fini(fsdpc_range *range)
{
    int status = FSDPC_OK;
    if (range->shown) {
        status = fsdpc_device_hide(range->device, range->address, range->shown);
    }
    if (status == FSDPC_OK) {
        fsdpc_device_unreserve(range->device, range->address, range->reserved);
    }
    memset(range, 0, sizeof *range);
    range->slot = -1;
}

int
fsdpc_arena_device_slot(fsdpc_arena *arena, fsdpc_arena_slot *slot)
{
    int status = FSDPC_OK;
    FSDPC_TRY(fsdpc_device_reserve(arena->device, slot->bytes, &slot->address));
    FSDPC_GOTO(fsdpc_device_piece_new(arena->device, slot->bytes, &slot->piece), fail);
    FSDPC_GOTO(fsdpc_device_show(arena->device, &slot->address, slot->piece), fail);
    return FSDPC_OK;
fail:
    fsdpc_device_piece_free(arena->device, slot->piece);
    fsdpc_device_unreserve(arena->device, slot->address, slot->bytes);
    return status;
}

void
fsdpc_arena_device_drop(fsdpc_arena *arena)
{
    for (int i = 0; i < arena->slot_count; i++) {
        const fsdpc_arena_slot *slot = &arena->slots[i];
        if (fsdpc_device_hide(arena->device, slot->address, slot->piece) == FSDPC_OK) {
            fsdpc_device_unreserve(arena->device, slot->address, slot->bytes);
        }
        fsdpc_device_piece_free(arena->device, slot->piece);
    }
}

static int
replace(fsdpc_range *range, fsdpc_piece *piece, size_t bytes)
{
    void *address = NULL;
    if (bytes > range->reserved) {
        FSDPC_TRY(fsdpc_device_reserve(range->device, bytes, &address));
    }
    if (range->shown) {
        const int status = fsdpc_device_hide(range->device, range->address, range->shown);
        if (status != FSDPC_OK) {
            fsdpc_device_unreserve(range->device, address, bytes);
            return status;
        }
        range->shown = NULL;
    }
    if (bytes > range->reserved) {
        fsdpc_device_unreserve(range->device, range->address, range->reserved);
        range->address = address;
        range->reserved = bytes;
    }
    FSDPC_TRY(fsdpc_device_show(range->device, &range->address, piece));
    range->shown = piece;
    return FSDPC_OK;
}

int
fsdpc_arena_device_bind(const fsdpc_arena_slot *slot, fsdpc_range *range)
{
    return range->shown == slot->piece ? FSDPC_OK : replace(range, slot->piece, slot->bytes);
}

int
fsdpc_arena_device_spare(fsdpc_range *range)
{
    fsdpc_piece *piece;
    if (!fsdpc_device_get_caps(range->device)->virtual_memory) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "two units need one gather slot at the same time, and this GPU has no "
                           "virtual memory management to map a spare one");
    }
    FSDPC_TRY(fsdpc_device_piece_new(range->device, range->bytes, &piece));
    int status = replace(range, piece, range->bytes);
    fsdpc_device_piece_free(range->device, piece); /* the mapping keeps the piece's memory alive */
    if (status == FSDPC_OK) {
        status = fsdpc_device_zero(range->device, range->address, range->bytes);
    }
    return status;
}
