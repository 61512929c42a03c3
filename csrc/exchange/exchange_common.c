/* Functions that every kind of exchange uses: the trace, casts, poison, slots, coding errors, error texts. */
#include "exchange/exchange_impl.h"
#include "base/board.h"
#include "base/mem.h"
#include "base/status.h"
#include "comm/flight.h"

void
fsdpc_exchange_note(fsdpc_exchange *x, enum fsdpc_trace_op op, const fsdpc_unit *unit,
                    uint64_t bytes)
{
    if (unit && fsdpc_unit_layout(unit)->param_count == 0) {
        return; /* operations of a unit without parameters are not traced */
    }
    const int64_t now_ns = fsdpc_trace_add(
        x->trace, op, x->phase, x->step, unit ? x->trace_ids[fsdpc_unit_use(unit)->id] : -1, bytes);
    if (op != FSDPC_TRACE_WAIT) {
        fsdpc_board_operation(fsdpc_trace_op_name(op), unit ? fsdpc_unit_name(unit) : "",
                              fsdpc_phase_name(x->phase), now_ns);
    }
}

void
fsdpc_exchange_sent(fsdpc_exchange *x, const fsdpc_unit *unit, uint64_t bytes)
{
    if (bytes > 0) {
        x->sent_bytes += bytes;
        fsdpc_exchange_note(x, FSDPC_TRACE_SEND, unit, bytes);
    }
}

char *
fsdpc_exchange_values(const fsdpc_exchange *x, fsdpc_unit *unit)
{
    return fsdpc_unit_is_direct(unit) ? fsdpc_unit_full(unit)
                                      : fsdpc_arena_writable(x->arena, fsdpc_unit_range(unit));
}

int
fsdpc_exchange_poison(const fsdpc_exchange *x, fsdpc_unit *unit)
{
    for (int s = 0; s < fsdpc_unit_layout(unit)->segment_count; s++) {
        const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[s];
        FSDPC_TRY(fsdpc_device_poison(fsdpc_unit_device(unit),
                                      fsdpc_exchange_values(x, unit) + seg->full_offset,
                                      seg->compute, seg->piece_numel * x->world));
    }
    return FSDPC_OK;
}

/* Peers may still read the slot, so NaN is written to private memory, which this rank maps at the
 * unit's addresses in place of the slot. A late read on this rank gets NaN whatever the peers do. */
int
fsdpc_exchange_veil(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_arena_veil(fsdpc_unit_range(unit)));
    return fsdpc_exchange_poison(x, unit);
}

/* Casts gathered values, piece by piece. A GPU unit with several dtypes is cast by one launch
 * instead (exchange_stream_gather.c); a direct unit is never cast (needs_no_cast in footprint.c). */
int
fsdpc_exchange_cast_piece(fsdpc_exchange *x, fsdpc_unit *unit, int segment, int r, int64_t begin,
                          int64_t n)
{
    const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[segment];
    size_t storage = fsdpc_dtype_bytes(seg->storage), compute = fsdpc_dtype_bytes(seg->compute);
    const char *src =
        (char *)fsdpc_unit_peer_master(unit, r) + seg->shard_offset + (size_t)begin * storage;
    char *dst = fsdpc_exchange_values(x, unit) + seg->full_offset +
                (size_t)((int64_t)r * seg->piece_numel + begin) * compute;
    x->copied_bytes += (uint64_t)n * compute;
    if (seg->codec != FSDPC_UNCODED) {
        return fsdpc_codec_round(seg->codec, src, seg->storage, seg->row_numel,
                                 begin % seg->row_numel, n, dst, seg->compute);
    }
    if (fsdpc_unit_is_offloaded(unit) && seg->compute == seg->storage) {
        return fsdpc_device_copy_in(fsdpc_unit_device(unit), dst, src, (size_t)n * compute);
    }
    return fsdpc_device_cast(fsdpc_unit_device(unit), dst, seg->compute, src, seg->storage, n, 1.0);
}

bool
fsdpc_exchange_slot_is_in_use(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    int other = x->slot_unit[fsdpc_unit_use(unit)->slot];
    return other >= 0 && other != fsdpc_unit_use(unit)->id && x->uses[other].begun;
}

bool
fsdpc_exchange_packs(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    bool any = x->world > 1 || (unit && fsdpc_unit_is_offloaded(unit));
    for (int i = 0; !unit && i < x->unit_count; i++) {
        any = any || fsdpc_unit_is_offloaded(x->units[i]);
    }
    return any;
}

int
fsdpc_exchange_thaw_error(const fsdpc_exchange *x, int unit, int param, int who, int other)
{
    const bool known = unit >= 0 && unit < x->unit_count && param >= 0 &&
                       param < fsdpc_unit_layout(x->units[unit])->param_count;
    return fsdpc_error(
        FSDPC_E_MISMATCH,
        "requires_grad or the order of modules differs across ranks: rank %d has "
        "unfrozen parameter %s of unit %s and rank %d has not: set requires_grad to "
        "the same value on every rank, also where a forward takes another way. Ranks of "
        "several hosts must also run equally many batches before they unfreeze",
        who, known ? fsdpc_unit_layout(x->units[unit])->params[param].name : "(unknown)",
        known ? fsdpc_unit_name(x->units[unit]) : "(unknown)", other);
}

/* --- error feedback ------------------------------------------------------------------------------- */

int
fsdpc_exchange_open_lost(fsdpc_exchange *x, fsdpc_device *device, int receivers)
{
    x->lost = fsdpc_mem_calloc((size_t)x->unit_count, sizeof *x->lost);
    if (!x->lost) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    for (int u = 0; u < x->unit_count; u++) {
        struct fsdpc_exchange_room *lost = &x->lost[u];
        lost->bytes = fsdpc_unit_footprint(x->units[u])->lost_bytes * (size_t)receivers;
        if (lost->bytes > 0) {
            FSDPC_TRY(fsdpc_device_alloc(device, lost->bytes, (void **)&lost->memory));
            x->lost_bytes += lost->bytes;
        }
    }
    return FSDPC_OK;
}

int
fsdpc_exchange_zero_lost(fsdpc_exchange *x, fsdpc_device *device)
{
    for (int u = 0; u < x->unit_count; u++) {
        if (x->lost[u].memory) {
            FSDPC_TRY(fsdpc_device_zero(device, x->lost[u].memory, x->lost[u].bytes));
        }
    }
    return FSDPC_OK;
}

void
fsdpc_exchange_close_lost(fsdpc_exchange *x, fsdpc_device *device)
{
    for (int u = 0; x->lost && u < x->unit_count; u++) {
        fsdpc_device_free(device, x->lost[u].memory, x->lost[u].bytes);
    }
    fsdpc_mem_free(x->lost);
    x->lost = NULL;
}

bool
fsdpc_exchange_prefetches(const fsdpc_comm *comm)
{
    return fsdpc_comm_flies(comm) && !fsdpc_device_get_caps(fsdpc_comm_device(comm))->asynchronous;
}
