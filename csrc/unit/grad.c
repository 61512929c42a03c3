/* Sums of a unit's gradients, and the operations on them after a backward: norm, scale, set.
 *
 * [Note: divided once] Gradients are divided by `divide` after their last sum, so that no partial sum is
 * rounded after a division. The last sum is over replicas if there are any, otherwise over the shard group.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

static const fsdpc_segment *
segment_of(const fsdpc_unit *unit, int param)
{
    return &unit->layout->segments[unit->layout->params[param].segment];
}

double
fsdpc_grad_last_scale(const fsdpc_unit *unit)
{
    return 1.0 / unit->divide;
}

struct fsdpc_grad_target
fsdpc_grad_target(fsdpc_unit *unit)
{
    return unit->replicate
               ? (struct fsdpc_grad_target){unit->partial, &unit->grads.partial_any, 1.0}
               : (struct fsdpc_grad_target){unit->grad, &unit->grads.add,
                                            fsdpc_grad_last_scale(unit)};
}

void
fsdpc_grad_note_sum(fsdpc_unit *unit)
{
    *fsdpc_grad_target(unit).add = true;
    unit->grads.sums++;
}

static size_t
piece_of(const fsdpc_segment *seg, int owner)
{
    return seg->reduce_offset +
           (size_t)seg->piece_numel * (size_t)owner * fsdpc_dtype_bytes(seg->reduce);
}

static size_t
own_piece(const fsdpc_unit *unit, const fsdpc_segment *seg)
{
    return piece_of(seg, unit->rank);
}

/* Sums n elements of this rank's piece of a segment, from element `begin` on. */
static int
sum_elements(fsdpc_unit *unit, const fsdpc_segment *seg, int64_t begin, int64_t n,
             const void *const *sources, int count, fsdpc_dtype type)
{
    const struct fsdpc_grad_target to = fsdpc_grad_target(unit);
    char *sum = (char *)to.sum + seg->grad_offset;
    return fsdpc_device_reduce(unit->device,
                               sum + (size_t)begin * fsdpc_dtype_bytes(seg->accumulate),
                               seg->accumulate, sources, count, type, n, to.scale, *to.add);
}

static int
sum_segment(fsdpc_unit *unit, const fsdpc_segment *seg, const void *const *pieces, int count)
{
    return sum_elements(unit, seg, 0, seg->piece_numel, pieces, count, seg->reduce);
}

int
fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count)
{
    const fsdpc_layout *layout = unit->layout;
    const void *pieces[FSDPC_SHM_MAX_RANKS];
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (!seg->trainable) {
            continue;
        }
        for (int r = 0; r < count; r++) {
            pieces[r] = sources[r] ? (const char *)sources[r] + own_piece(unit, seg) : NULL;
        }
        FSDPC_TRY(sum_segment(unit, seg, pieces, count));
    }
    fsdpc_grad_note_sum(unit);
    return FSDPC_OK;
}

/* --- pieces that have landed --------------------------------------------------------------------- */

enum { CHUNK = 1 << 14 }; /* elements; a multiple of each codec's block */

/* Returns how many elements are summed at once from `begin` on: whole rows, or a part of one row. */
static int64_t
next_chunk(const fsdpc_segment *seg, int64_t begin)
{
    const int64_t row = seg->row_numel, left = row - begin % row;
    const int64_t most = row <= CHUNK ? CHUNK / row * row : left < CHUNK ? left : CHUNK;
    return most < seg->piece_numel - begin ? most : seg->piece_numel - begin;
}

static fsdpc_dtype
sum_dtype(const fsdpc_segment *seg)
{
    return seg->reduce == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
}

size_t
fsdpc_grad_room_bytes(const fsdpc_layout *layout, int count)
{
    size_t item = 0;
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (seg->trainable && seg->reduce_coded_bytes > 0) {
            const size_t wide = fsdpc_dtype_bytes(sum_dtype(seg));
            item = wide > item ? wide : item;
        }
    }
    return (size_t)count * CHUNK * item;
}

/* Sums all senders' pieces, which are coded except for that of sender `own`. `room` holds decoded chunks. */
static int
sum_coded(fsdpc_unit *unit, const fsdpc_segment *seg, const void *const *pieces, int own, int count,
          void *room, const void **sources)
{
    const fsdpc_dtype wide = sum_dtype(seg);
    const size_t item = fsdpc_dtype_bytes(seg->reduce);
    for (int64_t begin = 0, n; begin < seg->piece_numel; begin += n) {
        n = next_chunk(seg, begin);
        for (int i = 0; i < count; i++) {
            void *to = (char *)room + (size_t)i * CHUNK * fsdpc_dtype_bytes(wide);
            sources[i] = to;
            FSDPC_TRY(i == own ? fsdpc_device_cast(unit->device, to, wide,
                                                   (const char *)pieces[i] + (size_t)begin * item,
                                                   seg->reduce, n, 1.0)
                               : fsdpc_codec_decode(seg->reduce_codec, pieces[i],
                                                    seg->piece_numel / seg->row_numel,
                                                    seg->row_numel, begin, n, to, wide));
        }
        FSDPC_TRY(sum_elements(unit, seg, begin, n, sources, count, wide));
    }
    return FSDPC_OK;
}

int
fsdpc_grad_sum_landed(fsdpc_unit *unit, const void *buffer, const char *landing, int own, int count,
                      void *room)
{
    int status = FSDPC_OK;
    const fsdpc_layout *layout = unit->layout;
    const size_t segments = (size_t)layout->segment_count;
    if (!landing) {
        return fsdpc_grad_sum(unit, &buffer, 1);
    }
    const void **pieces = fsdpc_mem_calloc(2 * (size_t)count, sizeof *pieces);
    size_t *offsets = fsdpc_mem_calloc(segments, sizeof *offsets);
    if (!pieces || !offsets) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for the sums of unit %s", unit->name),
                   done);
    }
    const size_t stride = fsdpc_footprint_landing(layout, offsets);
    for (size_t s = 0; s < segments; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (!seg->trainable) {
            continue;
        }
        for (int i = 0, at = 0; i < count; i++) {
            pieces[i] = i == own ? (const char *)buffer + own_piece(unit, seg)
                                 : landing + offsets[s] + stride * (size_t)at++;
        }
        FSDPC_GOTO(seg->reduce_coded_bytes > 0
                       ? sum_coded(unit, seg, pieces, own, count, room, pieces + count)
                       : sum_segment(unit, seg, pieces, count),
                   done);
    }
    fsdpc_grad_note_sum(unit);
done:
    fsdpc_mem_free(pieces);
    fsdpc_mem_free(offsets);
    return status;
}

fsdpc_coding
fsdpc_grad_coding(const fsdpc_segment *seg, int pieces, char *values, char *coded, size_t stride)
{
    const int64_t row = seg->row_numel > 0 ? seg->row_numel : seg->piece_numel;
    return (fsdpc_coding){.codec = seg->reduce_codec,
                          .pieces = pieces,
                          .rows = seg->piece_numel / row,
                          .row = row,
                          .values = values,
                          .type = seg->reduce,
                          .coded = coded,
                          .stride = stride};
}

int
fsdpc_grad_sum_apart(fsdpc_unit *unit, char *buffer, char *landing, fsdpc_landed *list,
                     const size_t *offsets, size_t stride)
{
    int count = 0;
    const fsdpc_layout *layout = unit->layout;
    const struct fsdpc_grad_target to = fsdpc_grad_target(unit);
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (!seg->trainable || seg->piece_numel == 0) {
            continue;
        }
        list[count++] = (fsdpc_landed){
            .from = fsdpc_grad_coding(seg, 1, buffer + own_piece(unit, seg), landing + offsets[s],
                                      stride),
            .sum = (char *)to.sum + seg->grad_offset,
            .sum_type = seg->accumulate,
        };
    }
    FSDPC_TRY(fsdpc_device_sum_landed(unit->device, list, count, unit->world, unit->rank, to.scale,
                                      *to.add));
    fsdpc_grad_note_sum(unit);
    return FSDPC_OK;
}

/* Sums one segment's piece over all `buffers`, `most` elements at a time. `total` is room for these sums. */
static int
sum_piece(const fsdpc_unit *unit, const fsdpc_segment *seg, size_t at, const char *const *buffers,
          int count, char *into, void *total, int64_t most)
{
    const fsdpc_dtype wide = sum_dtype(seg);
    const size_t item = fsdpc_dtype_bytes(seg->reduce);
    const void *sources[FSDPC_SHM_MAX_RANKS];
    for (int64_t begin = 0; begin < seg->piece_numel; begin += most) {
        const int64_t left = seg->piece_numel - begin, n = left < most ? left : most;
        const size_t offset = at + (size_t)begin * item;
        for (int i = 0; i < count; i++) {
            sources[i] = buffers[i] + offset;
        }
        FSDPC_TRY(fsdpc_device_reduce(unit->device, total, wide, sources, count, seg->reduce, n,
                                      1.0, false));
        FSDPC_TRY(fsdpc_device_cast(unit->device, into + offset, seg->reduce, total, wide, n, 1.0));
    }
    return FSDPC_OK;
}

int
fsdpc_grad_sum_pieces(const fsdpc_unit *unit, int owner, const char *const *buffers, int count,
                      char *into)
{
    enum { MOST = 1 << 16 };
    int status = FSDPC_OK;
    int64_t most = 1;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const int64_t numel = unit->layout->segments[s].piece_numel;
        most = numel > most ? numel : most;
    }
    most = most < MOST ? most : MOST;
    double *total = fsdpc_mem_calloc((size_t)most, sizeof *total);
    if (!total) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the sums of unit %s", unit->name);
    }
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        if (seg->trainable) {
            FSDPC_GOTO(
                sum_piece(unit, seg, piece_of(seg, owner), buffers, count, into, total, most),
                done);
        }
    }
done:
    fsdpc_mem_free(total);
    return status;
}

int
fsdpc_unit_take_sums(fsdpc_unit *unit, const fsdpc_tensor *sums)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        if (seg->trainable) {
            FSDPC_TRY(fsdpc_device_reduce(unit->device, (char *)unit->grad + seg->grad_offset,
                                          seg->accumulate, &sums[s].data, 1, sums[s].dtype,
                                          seg->piece_numel, 1.0, unit->grads.add));
        }
    }
    unit->grads.add = true;
    return fsdpc_unit_touch(unit, FSDPC_GRAD);
}

int
fsdpc_unit_grad_norm(fsdpc_unit *unit, const uint8_t *mask, double p, fsdpc_norm *out)
{
    *out = (fsdpc_norm){0};
    FSDPC_TRY(fsdpc_unit_settle(unit));
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (!mask[i] || unit->layout->params[i].trainable_index < 0) {
            continue;
        }
        int64_t length;
        const void *own = fsdpc_unit_grad_part(unit, i, &length);
        fsdpc_dtype dtype = fsdpc_unit_grad_dtype(unit, i);
        fsdpc_norm one;
        FSDPC_TRY(fsdpc_device_norm2(unit->shard_device, own, dtype, length, &one));
        if (p != 2.0) {
            FSDPC_TRY(fsdpc_device_norm_p(unit->shard_device, own, dtype, length, p, &one.sum));
        }
        out->sum += one.sum;
        out->nonfinite |= one.nonfinite;
        /* This expression keeps a NaN in either of the two values. */
        out->max = one.max > out->max || one.max != one.max ? one.max : out->max;
    }
    return FSDPC_OK;
}

int
fsdpc_unit_scale_grads(fsdpc_unit *unit, const uint8_t *mask, double factor)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (!mask[i] || unit->layout->params[i].trainable_index < 0) {
            continue;
        }
        int64_t length;
        void *own = fsdpc_unit_grad_part(unit, i, &length);
        FSDPC_TRY(fsdpc_device_scale(unit->shard_device, own, fsdpc_unit_grad_dtype(unit, i),
                                     length, factor));
    }
    return FSDPC_OK;
}

static char *
shard_sum(const fsdpc_unit *unit, int param, int64_t *length)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    *length = span.length;
    return (char *)unit->grad + seg->grad_offset +
           (size_t)span.piece_begin * fsdpc_dtype_bytes(seg->accumulate);
}

int
fsdpc_unit_zero_grad(fsdpc_unit *unit, int param)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t length;
    char *acc = shard_sum(unit, param, &length);
    FSDPC_TRY(fsdpc_device_zero(unit->shard_device, acc,
                                (size_t)length * fsdpc_dtype_bytes(seg->accumulate)));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    void *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_zero(unit->shard_device, out,
                             (size_t)length * fsdpc_dtype_bytes(seg->storage));
}

int
fsdpc_unit_scale_grad(fsdpc_unit *unit, int param, double factor)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t length;
    char *acc = shard_sum(unit, param, &length);
    FSDPC_TRY(fsdpc_device_scale(unit->shard_device, acc, seg->accumulate, length, factor));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    void *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_scale(unit->shard_device, out, seg->storage, length, factor);
}

int
fsdpc_unit_take_grad(fsdpc_unit *unit, int param, const void *values, fsdpc_dtype dtype)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t length;
    char *acc = shard_sum(unit, param, &length);
    FSDPC_TRY(
        fsdpc_device_cast(unit->shard_device, acc, seg->accumulate, values, dtype, length, 1.0));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    void *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_cast(unit->shard_device, out, seg->storage, values, dtype, length, 1.0);
}

int
fsdpc_unit_reload_grad(fsdpc_unit *unit, int param)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t length;
    FSDPC_TRY(fsdpc_unit_settle(unit));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    char *acc = shard_sum(unit, param, &length);
    const char *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_refresh(unit->shard_device, acc, seg->accumulate, out, seg->storage,
                                length);
}
