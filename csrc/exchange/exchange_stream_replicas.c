/* Sums over replicas on the reduce stream, after each unit's sum over its shard group. The order of units is
 * the same on all ranks, because every trainable unit is reduced in every backward.
 *
 * One call of the communicator sums all segments of a unit. If the reduce dtype is the accumulate dtype, the
 * rank's pieces are all-reduced over replicas in their reduce slot, and one launch divides them and adds them
 * to the shard gradient. Otherwise the pieces are first cast to the accumulate dtype in `partial`, so that no
 * replica's sum is rounded to the reduce dtype.
 */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

/* All-reduces the first `count` parts over the unit's replicas. */
static int
all_reduce(fsdpc_exchange *x, const fsdpc_unit *unit, int count, const char *what)
{
    const fsdpc_comm_part *parts = x->streams->parts;
    fsdpc_comm *comm = fsdpc_comm_for_reductions(fsdpc_unit_replicate(unit));
    fsdpc_stream_count(x, unit, comm, parts, count, true);
    return fsdpc_comm_all_reduce_parts(comm, parts, count, what);
}

/* Sums a buffer over replicas. The buffer is laid out like the shard gradient, and its gaps are zero. */
static int
sum_wide(fsdpc_exchange *x, const fsdpc_unit *unit, char *buffer, const char *what)
{
    int count = 0;
    fsdpc_grad_run run;
    fsdpc_comm_part *parts = x->streams->parts;
    for (int s = 0; fsdpc_layout_next_run(fsdpc_unit_layout(unit), &s, &run);) {
        parts[count++] = (fsdpc_comm_part){buffer + run.offset, run.numel, run.dtype};
    }
    return all_reduce(x, unit, count, what);
}

/* Sums this rank's pieces of a reduced slot over replicas. */
static int
sum_pieces(fsdpc_exchange *x, const fsdpc_unit *unit, char *buffer, const char *what)
{
    int count = 0;
    fsdpc_comm_part *parts = x->streams->parts;
    for (int i = 0; i < fsdpc_unit_layout(unit)->segment_count; i++) {
        const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[i];
        const size_t skip = (size_t)seg->piece_numel * (size_t)fsdpc_unit_rank(unit) *
                            fsdpc_dtype_bytes(seg->reduce);
        if (seg->trainable) {
            parts[count++] = (fsdpc_comm_part){buffer + seg->reduce_offset + skip, seg->piece_numel,
                                               seg->reduce};
        }
    }
    return all_reduce(x, unit, count, what);
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
fsdpc_stream_sum(fsdpc_exchange *x, fsdpc_unit *unit, char *buffer, const char *what)
{
    const bool wide = fsdpc_comm_world(fsdpc_unit_comm(unit)) == 1;
    if (fsdpc_unit_replicate(unit) && !wide && !travels_wide(fsdpc_unit_layout(unit))) {
        FSDPC_TRY(fsdpc_grad_widen_pieces(unit, buffer));
        return fsdpc_stream_sum_partial(x, unit, what);
    }
    if (fsdpc_unit_replicate(unit)) {
        FSDPC_TRY((wide ? sum_wide : sum_pieces)(x, unit, buffer, what));
    }
    return fsdpc_grad_take_pieces(unit, buffer, wide);
}

int
fsdpc_stream_sum_partial(fsdpc_exchange *x, fsdpc_unit *unit, const char *what)
{
    FSDPC_TRY(sum_wide(x, unit, fsdpc_unit_partial(unit), what));
    return fsdpc_grad_take_partial(unit);
}

/* --- used bits --------------------------------------------------------------------------------- */

/* Consecutive units with the same replicas share one all-reduce. */
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
