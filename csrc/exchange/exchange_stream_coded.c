/* Sends gradients between GPUs as codes, on the reduce stream. A reduce-scatter would sum the codes. So
 * ranks send pieces to each other, and decode received pieces into the sum, which has the same bits as in
 * "wire".
 *
 * After its packed gradients, a slot holds one block per receiver, with this rank's coded pieces of all
 * segments, then one block per sender. One launch codes, one call exchanges the blocks, one launch sums. The
 * event `summed` is recorded after all this work, so a wait for `summed` is enough to reuse the slot. */
#include "base/mem.h"
#include "base/status.h"
#include "exchange/exchange_stream_impl.h"

bool
fsdpc_stream_sends_codes(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    return x->world > 1 && fsdpc_footprint_codes(fsdpc_unit_layout(unit), NULL) > 0;
}

int
fsdpc_stream_coded_open(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    size_t most = 1;
    for (int u = 0; u < x->unit_count; u++) {
        const size_t count = (size_t)fsdpc_unit_layout(x->units[u])->segment_count;
        most = count > most ? count : most;
    }
    s->codings = fsdpc_mem_calloc(2 * most, sizeof *s->codings);
    s->landed = fsdpc_mem_calloc(most, sizeof *s->landed);
    s->offsets = fsdpc_mem_calloc(2 * most, sizeof *s->offsets);
    return s->codings && s->landed && s->offsets
               ? fsdpc_exchange_open_lost(x, s->device, x->world - 1)
               : fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
}

void
fsdpc_stream_coded_close(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    fsdpc_exchange_close_lost(x, s->device);
    fsdpc_mem_free(s->codings);
    fsdpc_mem_free(s->landed);
    fsdpc_mem_free(s->offsets);
}

/* Lists one coding for the pieces of the ranks below this rank and one for those above. Returns the count. */
static int
list_segment(const fsdpc_exchange *x, const fsdpc_segment *seg, char *packed, char *pieces,
             size_t stride, float *lost, fsdpc_coding *list)
{
    int count = 0;
    const size_t bytes = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->reduce);
    for (int behind = 0; behind < 2; behind++) {
        const int first = behind ? x->rank + 1 : 0, end = behind ? x->world : x->rank;
        const size_t before = (size_t)(behind ? x->rank : 0);
        if (first < end) {
            list[count] = fsdpc_grad_coding(seg, end - first,
                                            packed + seg->reduce_offset + bytes * (size_t)first,
                                            pieces + stride * before, stride);
            list[count++].lost = lost ? lost + before * (size_t)seg->piece_numel : NULL;
        }
    }
    return count;
}

static int
encode(fsdpc_exchange *x, const fsdpc_unit *unit, char *packed, char *pieces, size_t stride)
{
    int count = 0;
    struct fsdpc_streams *s = x->streams;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    size_t *lost = s->offsets + layout->segment_count;
    char *kept = x->lost[fsdpc_unit_use(unit)->id].memory;
    fsdpc_footprint_lost(layout, lost);
    for (int i = 0; i < layout->segment_count; i++) {
        const fsdpc_segment *seg = &layout->segments[i];
        if (seg->trainable && seg->piece_numel > 0) {
            char *own = kept && seg->feedback ? kept + lost[i] * (size_t)(x->world - 1) : NULL;
            count += list_segment(x, seg, packed, pieces + s->offsets[i], stride,
                                  (float *)(void *)own, s->codings + count);
        }
    }
    return fsdpc_device_encode(s->device, s->codings, count);
}

int
fsdpc_stream_sum_coded(fsdpc_exchange *x, fsdpc_unit *unit, char *buffer, const char *what)
{
    struct fsdpc_streams *s = x->streams;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    const size_t stride = fsdpc_footprint_landing(layout, s->offsets);
    char *pieces = buffer + fsdpc_footprint_packed(layout);
    char *landing = pieces + stride * (size_t)(x->world - 1);
    FSDPC_TRY(encode(x, unit, buffer, pieces, stride));
    const fsdpc_comm_part sent = {pieces, (int64_t)stride, FSDPC_BYTES};
    FSDPC_TRY(fsdpc_comm_all_to_all(s->reduce_comm, pieces, landing, stride, what));
    fsdpc_stream_count(x, unit, s->reduce_comm, &sent, 1, false);
    FSDPC_TRY(fsdpc_grad_sum_apart(unit, buffer, landing, s->landed, s->offsets, stride));
    return fsdpc_unit_replicate(unit) ? fsdpc_stream_sum_partial(x, unit, what) : FSDPC_OK;
}

int
fsdpc_stream_forget(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    fsdpc_stream *caller = fsdpc_device_use(s->device, s->reduce);
    const int status = fsdpc_exchange_zero_lost(x, s->device);
    fsdpc_device_use(s->device, caller);
    return status;
}
