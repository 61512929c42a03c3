/* Segments that travel coded. In a gather a rank codes its own pieces into memory beside the slot, flights
 * bring other ranks' coded pieces there, and the rank decodes all pieces into the slot. In a reduction a rank
 * codes the packed gradients that it sends, and decodes the gradients that it receives for the sum (grad.c).
 *
 * [Note: error feedback] A rank keeps the error of its coding of gradients, and adds it to the unit's next
 * gradient. So a sum over steps is wrong only by the last kept error. Blocks that are zero or not finite do
 * not change the kept error, which is kept as long as the exchange exists. */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "exchange/exchange_wire_impl.h"

/* Returns the memory for codes of the unit's slot, or the last such memory if the unit is in spare memory. */
static struct fsdpc_exchange_room *
coded_of(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const int slot = fsdpc_unit_use(unit)->slot;
    return &x->wire->coded[fsdpc_unit_is_spare(unit) ? x->wire->coded_count - 1 : slot];
}

static void
grow(struct fsdpc_exchange_room *coded, size_t bytes)
{
    coded->bytes = bytes > coded->bytes ? bytes : coded->bytes;
}

/* Allocates `sum_room`. One such buffer serves all units, because sums are made one after the other. */
static int
open_sum_room(fsdpc_exchange *x)
{
    size_t bytes = 0;
    const int count = fsdpc_comm_senders(x->comm) + 1;
    for (int u = 0; u < x->unit_count; u++) {
        const size_t need = fsdpc_grad_room_bytes(fsdpc_unit_layout(x->units[u]), count);
        bytes = need > bytes ? need : bytes;
    }
    x->wire->sum_room = bytes > 0 ? fsdpc_mem_calloc(bytes, 1) : NULL;
    return x->wire->sum_room || bytes == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
}

int
fsdpc_wire_coded_open(fsdpc_exchange *x, int slot_count)
{
    struct fsdpc_wire *wire = x->wire;
    wire->coded = fsdpc_mem_calloc((size_t)slot_count + 1, sizeof *wire->coded);
    if (!wire->coded) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    wire->coded_count = slot_count + 1;
    for (int u = 0; u < x->unit_count && x->world > 1; u++) {
        const size_t bytes = fsdpc_unit_footprint(x->units[u])->coded_bytes;
        if (bytes > 0) {
            grow(&wire->coded[x->uses[u].slot], bytes);
            grow(&wire->coded[slot_count], bytes);
        }
    }
    for (int s = 0; s < slot_count; s++) {
        x->coded_bytes += wire->coded[s].bytes;
    }
    FSDPC_TRY(open_sum_room(x));
    return fsdpc_exchange_open_lost(x, fsdpc_comm_device(x->comm), fsdpc_comm_receivers(x->comm));
}

void
fsdpc_wire_coded_close(fsdpc_exchange *x, bool keep)
{
    struct fsdpc_wire *wire = x->wire;
    for (int i = 0; i < wire->coded_count && !keep; i++) {
        struct fsdpc_exchange_room *coded = &wire->coded[i];
        fsdpc_device_free(fsdpc_comm_device(x->comm), coded->memory, coded->bytes);
    }
    fsdpc_exchange_close_lost(x, fsdpc_comm_device(x->comm));
    fsdpc_mem_free(wire->sum_room);
    fsdpc_mem_free(wire->coded);
}

/* Returns the offset at which the coded pieces of a segment begin. */
static size_t
offset_of(const fsdpc_layout *layout, int segment)
{
    size_t offset = 0;
    for (int s = 0; s < segment; s++) {
        offset += layout->segments[s].coded_bytes * (size_t)layout->world;
    }
    return offset;
}

static int
decode_piece(fsdpc_exchange *x, fsdpc_unit *unit, int segment, int owner)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    const fsdpc_segment *seg = &layout->segments[segment];
    const char *pieces = coded_of(x, unit)->memory + offset_of(layout, segment);
    const size_t bytes = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute);
    return fsdpc_codec_decode(
        seg->codec, pieces + seg->coded_bytes * (size_t)owner, seg->piece_numel / seg->row_numel,
        seg->row_numel, 0, seg->piece_numel,
        fsdpc_exchange_values(x, unit) + seg->full_offset + bytes * (size_t)owner, seg->compute);
}

int
fsdpc_wire_encode(fsdpc_exchange *x, fsdpc_unit *unit, int segment, fsdpc_comm_part *part)
{
    struct fsdpc_exchange_room *coded = coded_of(x, unit);
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    const fsdpc_segment *seg = &layout->segments[segment];
    if (!coded->memory) {
        FSDPC_TRY(
            fsdpc_device_alloc(fsdpc_comm_device(x->comm), coded->bytes, (void **)&coded->memory));
    }
    char *pieces = coded->memory + offset_of(layout, segment);
    *part = (fsdpc_comm_part){pieces, (int64_t)seg->coded_bytes, FSDPC_BYTES};
    FSDPC_TRY(fsdpc_codec_encode(seg->codec,
                                 (const char *)fsdpc_unit_master(unit) + seg->shard_offset,
                                 seg->storage, seg->piece_numel / seg->row_numel, seg->row_numel,
                                 NULL, pieces + seg->coded_bytes * (size_t)x->rank));
    x->copied_bytes += (uint64_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute);
    return decode_piece(x, unit, segment, x->rank);
}

int
fsdpc_wire_forget(fsdpc_exchange *x)
{
    return fsdpc_exchange_zero_lost(x, fsdpc_comm_device(x->comm));
}

int
fsdpc_wire_encode_grads(const fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_segment *seg,
                        const char *packed, fsdpc_route route, char *lost, char *codes,
                        fsdpc_comm_part *part)
{
    const size_t bytes = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->reduce);
    *part = (fsdpc_comm_part){codes, (int64_t)seg->reduce_coded_bytes, FSDPC_BYTES};
    for (int r = 0; r < x->world; r++) {
        if (fsdpc_wire_brings(x, route, r)) {
            FSDPC_TRY(fsdpc_codec_encode(
                seg->reduce_codec, packed + seg->reduce_offset + bytes * (size_t)r, seg->reduce,
                seg->piece_numel / seg->row_numel, seg->row_numel, (float *)(void *)lost,
                codes + seg->reduce_coded_bytes * (size_t)r));
            lost += lost ? fsdpc_unit_footprint(unit)->lost_bytes : 0;
        }
    }
    return FSDPC_OK;
}

bool
fsdpc_wire_brings(const fsdpc_exchange *x, fsdpc_route route, int owner)
{
    return owner != x->rank &&
           (route == FSDPC_TO_ALL || fsdpc_hosts_carries(x->comm, x->rank, owner));
}

int
fsdpc_wire_decode(fsdpc_exchange *x, fsdpc_unit *unit, fsdpc_route route)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    for (int s = 0; s < layout->segment_count; s++) {
        for (int r = 0; layout->segments[s].coded_bytes > 0 && r < x->world; r++) {
            if (fsdpc_wire_brings(x, route, r)) {
                FSDPC_TRY(decode_piece(x, unit, s, r));
            }
        }
    }
    return FSDPC_OK;
}
