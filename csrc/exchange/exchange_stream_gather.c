/* Gathers of a unit's values on the gather stream. One launch casts this rank's pieces into their place in
 * the slot, whatever the number of dtypes, and one call of the communicator gathers all segments.
 *
 * Segments that travel coded take one launch before that call, which codes this rank's pieces into
 * memory outside of the slots, and one launch after that call, which decodes all ranks' pieces into the
 * slot. The stream is in order, so one such memory serves all units without additional waits.
 */
#include <stdio.h>

#include "exchange/exchange_stream_impl.h"
#include "base/mem.h"
#include "base/status.h"

static int
plan_unit(fsdpc_exchange *x, const fsdpc_unit *unit, fsdpc_pack_plan **out)
{
    int status = FSDPC_OK;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    int count = 0;
    fsdpc_pack_target *targets = fsdpc_mem_calloc((size_t)layout->segment_count, sizeof *targets);
    if (!targets) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of unit %s",
                           fsdpc_unit_name(unit));
    }
    for (int i = 0; i < layout->segment_count; i++) {
        const fsdpc_segment *seg = &layout->segments[i];
        const size_t piece = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute);
        if (seg->coded_bytes > 0) {
            continue;
        }
        targets[count++] = (fsdpc_pack_target){
            .n = seg->piece_numel,
            .offset = seg->full_offset + (size_t)x->rank * piece,
            .dtype = seg->compute,
        };
    }
    /* The gaps between the targets are not written: other ranks' pieces and decoded segments lie there. */
    FSDPC_GOTO(count > 0 ? fsdpc_device_pack_plan(x->streams->device, targets, NULL, count,
                                                  layout->full_bytes, true, out)
                         : FSDPC_OK,
               done);
done:
    fsdpc_mem_free(targets);
    return status;
}

static int
open_codes(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    for (int u = 0; u < x->unit_count; u++) {
        const size_t bytes = fsdpc_unit_footprint(x->units[u])->coded_bytes;
        s->coded_bytes = bytes > s->coded_bytes ? bytes : s->coded_bytes;
    }
    if (s->coded_bytes == 0) {
        return FSDPC_OK;
    }
    x->coded_bytes = s->coded_bytes;
    return fsdpc_device_alloc(s->device, s->coded_bytes, (void **)&s->coded);
}

int
fsdpc_stream_gather_open(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    size_t most = 1;
    s->gathers = fsdpc_mem_calloc((size_t)x->unit_count, sizeof(fsdpc_pack_plan *));
    if (!s->gathers) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_unit *unit = x->units[u];
        const size_t count = (size_t)fsdpc_unit_layout(unit)->segment_count;
        most = count > most ? count : most;
        if (!fsdpc_unit_is_direct(unit) && count > 1) {
            FSDPC_TRY(plan_unit(x, unit, &s->gathers[u]));
        }
    }
    s->pieces = fsdpc_mem_calloc(most, sizeof *s->pieces);
    s->parts = fsdpc_mem_calloc(most, sizeof *s->parts);
    return s->pieces && s->parts ? open_codes(x)
                                 : fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
}

void
fsdpc_stream_gather_close(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    for (int u = 0; s->gathers && u < x->unit_count; u++) {
        fsdpc_device_pack_plan_free(s->device, s->gathers[u]);
    }
    fsdpc_mem_free(s->gathers);
    fsdpc_device_free(s->device, s->coded, s->coded_bytes);
    fsdpc_mem_free(s->pieces);
    fsdpc_mem_free(s->parts);
}

static int
cast_pieces(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    int count = 0;
    if (!s->gathers[fsdpc_unit_use(unit)->id]) {
        return layout->segment_count == 1 && layout->coded_bytes == 0
                   ? fsdpc_exchange_cast_piece(x, unit, 0, x->rank, 0,
                                               layout->segments[0].piece_numel)
                   : FSDPC_OK;
    }
    for (int i = 0; i < layout->segment_count; i++) {
        const fsdpc_segment *seg = &layout->segments[i];
        if (seg->coded_bytes > 0) {
            continue;
        }
        s->pieces[count++] = (fsdpc_pack_source){
            .data = (char *)fsdpc_unit_master(unit) + seg->shard_offset, .dtype = seg->storage};
        x->copied_bytes += (uint64_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute);
    }
    return fsdpc_device_pack_onto(s->device, s->gathers[fsdpc_unit_use(unit)->id],
                                  fsdpc_unit_full(unit), NULL, s->pieces, 1.0);
}

/* Codes this rank's pieces if `encode` is set, else decodes the pieces of all ranks. */
static int
code(fsdpc_exchange *x, fsdpc_unit *unit, bool encode)
{
    struct fsdpc_streams *s = x->streams;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    char *coded = s->coded;
    int count = 0;
    for (int i = 0; i < layout->segment_count; i++) {
        const fsdpc_segment *seg = &layout->segments[i];
        if (seg->coded_bytes == 0) {
            continue;
        }
        s->codings[count++] = (fsdpc_coding){
            .codec = seg->codec,
            .pieces = encode ? 1 : x->world,
            .rows = seg->piece_numel / seg->row_numel,
            .row = seg->row_numel,
            .values = encode ? (char *)fsdpc_unit_master(unit) + seg->shard_offset
                             : (char *)fsdpc_unit_full(unit) + seg->full_offset,
            .type = encode ? seg->storage : seg->compute,
            .coded = coded + (encode ? seg->coded_bytes * (size_t)x->rank : 0),
            .stride = seg->coded_bytes,
        };
        coded += seg->coded_bytes * (size_t)x->world;
        x->copied_bytes +=
            encode ? (uint64_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute) : 0;
    }
    return count == 0
               ? FSDPC_OK
               : (encode ? fsdpc_device_encode : fsdpc_device_decode)(s->device, s->codings, count);
}

int
fsdpc_stream_fill(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    char what[FSDPC_STREAM_WHAT_BYTES];
    snprintf(what, sizeof what, "gather of unit %s", fsdpc_unit_name(unit));
    FSDPC_TRY(cast_pieces(x, unit));
    FSDPC_TRY(code(x, unit, true));
    char *values = fsdpc_stream_address(x, unit), *coded = x->streams->coded;
    for (int i = 0; i < fsdpc_unit_layout(unit)->segment_count; i++) {
        const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[i];
        s->parts[i] = (fsdpc_comm_part){values + seg->full_offset, seg->piece_numel, seg->compute};
        if (seg->coded_bytes > 0) {
            s->parts[i] = (fsdpc_comm_part){coded, (int64_t)seg->coded_bytes, FSDPC_BYTES};
            coded += seg->coded_bytes * (size_t)x->world;
        }
    }
    const int count = fsdpc_unit_layout(unit)->segment_count;
    FSDPC_TRY(fsdpc_comm_all_gather_parts(x->comm, s->parts, count, what));
    fsdpc_stream_count(x, unit, x->comm, s->parts, count, false);
    return code(x, unit, false);
}
