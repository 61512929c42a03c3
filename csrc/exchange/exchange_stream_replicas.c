/* Sums over replicas on the reduce stream, behind each unit's own reduce-scatter: every rank comes to
 * them in the same order, because every unit that trains is reduced in every backward.
 *
 * Where gradients travel in the type in which they are summed, the rank's piece of the reduce slot is
 * summed over replicas where it lies, and one launch scales it and adds it to the shard gradient.
 * Otherwise the piece is widened into `partial` first: no replica's sum is rounded to the narrow type.
 */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

/* What an all-reduce over replicas sums, per segment. */
static int
sum_over_replicas(const fsdpc_unit *unit, char *buffer, bool wide, const char *what)
{
    fsdpc_comm *comm = fsdpc_comm_for_reductions(unit->replicate);
    for (int i = 0; i < unit->layout->segment_count; i++) {
        const fsdpc_segment *seg = &unit->layout->segments[i];
        const size_t skip =
            (size_t)seg->piece_numel * (size_t)unit->rank * fsdpc_dtype_bytes(seg->reduce);
        char *piece = buffer + (wide ? seg->grad_offset : seg->reduce_offset + skip);
        if (seg->trainable) {
            FSDPC_TRY(fsdpc_comm_all_reduce(comm, piece, seg->piece_numel,
                                            wide ? seg->accumulate : seg->reduce, FSDPC_SUM, what));
        }
    }
    return FSDPC_OK;
}

static bool
travels_wide(const fsdpc_layout *layout)
{
    for (int i = 0; i < layout->segment_count; i++) {
        const fsdpc_segment *seg = &layout->segments[i];
        if (seg->trainable && seg->reduce != seg->accumulate) {
            return false;
        }
    }
    return true;
}

int
fsdpc_stream_sum(fsdpc_unit *unit, char *buffer, const char *what)
{
    const bool wide = unit->world == 1;
    if (unit->replicate && !wide && !travels_wide(unit->layout)) {
        FSDPC_TRY(fsdpc_grad_widen_pieces(unit, buffer));
        return fsdpc_stream_sum_partial(unit, what);
    }
    if (unit->replicate) {
        FSDPC_TRY(sum_over_replicas(unit, buffer, wide, what));
    }
    return fsdpc_grad_take_pieces(unit, buffer, wide);
}

int
fsdpc_stream_sum_partial(fsdpc_unit *unit, const char *what)
{
    FSDPC_TRY(sum_over_replicas(unit, unit->partial, true, what));
    unit->partial_any = false;
    return fsdpc_grad_take_pieces(unit, unit->partial, true);
}

/* --- used bits --------------------------------------------------------------------------------- */

/* One sum for each run of units with the same replicas. */
int
fsdpc_stream_join_replicas(fsdpc_exchange *x, const char *what)
{
    struct fsdpc_streams *s = x->streams;
    float *bits = s->device_bits;
    for (int u = 0; u < x->unit_count;) {
        fsdpc_comm *replicate = x->units[u]->replicate;
        int64_t count = 0;
        for (; u < x->unit_count && x->units[u]->replicate == replicate; u++) {
            count += x->units[u]->layout->param_count;
        }
        if (replicate) {
            FSDPC_TRY(fsdpc_comm_all_reduce(fsdpc_comm_for_reductions(replicate), bits, count,
                                            FSDPC_F32, FSDPC_MAX, what));
        }
        bits += count;
    }
    return FSDPC_OK;
}

bool
fsdpc_stream_has_replicas(const fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        if (x->units[u]->replicate) {
            return true;
        }
    }
    return false;
}
