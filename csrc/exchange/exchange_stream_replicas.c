/* Sums over replicas on the reduce stream, behind each unit's reduce-scatter: in the same order on all
 * ranks, because every trainable unit is reduced in every backward.
 *
 * If the reduce dtype is the accumulate dtype, the rank's piece is all-reduced over replicas in its reduce
 * slot, and one launch divides it and adds it to the shard gradient. Otherwise the piece is cast to
 * `partial` first, so that no replica's sum is rounded to the reduce dtype.
 */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

/* One all-reduce per segment. */
static int
sum_over_replicas(const fsdpc_unit *unit, char *buffer, bool wide, const char *what)
{
    fsdpc_comm *comm = fsdpc_comm_for_reductions(fsdpc_unit_replicate(unit));
    for (int i = 0; i < fsdpc_unit_layout(unit)->segment_count; i++) {
        const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[i];
        const size_t skip = (size_t)seg->piece_numel * (size_t)fsdpc_unit_rank(unit) *
                            fsdpc_dtype_bytes(seg->reduce);
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
    const bool wide = fsdpc_comm_world(fsdpc_unit_comm(unit)) == 1;
    if (fsdpc_unit_replicate(unit) && !wide && !travels_wide(fsdpc_unit_layout(unit))) {
        FSDPC_TRY(fsdpc_grad_widen_pieces(unit, buffer));
        return fsdpc_stream_sum_partial(unit, what);
    }
    if (fsdpc_unit_replicate(unit)) {
        FSDPC_TRY(sum_over_replicas(unit, buffer, wide, what));
    }
    return fsdpc_grad_take_pieces(unit, buffer, wide);
}

int
fsdpc_stream_sum_partial(fsdpc_unit *unit, const char *what)
{
    FSDPC_TRY(sum_over_replicas(unit, fsdpc_unit_partial(unit), true, what));
    return fsdpc_grad_take_partial(unit);
}

/* --- used bits --------------------------------------------------------------------------------- */

/* One all-reduce for consecutive units with the same replicas. */
int
fsdpc_stream_join_replicas(fsdpc_exchange *x, const char *what)
{
    struct fsdpc_streams *s = x->streams;
    float *bits = s->device_bits;
    for (int u = 0; u < x->unit_count;) {
        fsdpc_comm *replicate = fsdpc_unit_replicate(x->units[u]);
        int64_t count = 0;
        for (; u < x->unit_count && fsdpc_unit_replicate(x->units[u]) == replicate; u++) {
            count += fsdpc_unit_layout(x->units[u])->param_count;
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
        if (fsdpc_unit_replicate(x->units[u])) {
            return true;
        }
    }
    return false;
}
