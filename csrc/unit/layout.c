/* The placement of a unit's parameters. See layout.h.
 *
 * Three passes: sort the parameters into segments and place them there, cut the segments, lay the
 * segments into the buffers. All item sizes are powers of two, so an offset that is aligned for
 * the narrowest type is aligned for all of them.
 *
 * Nothing can wrap: a unit holds at most 2^52 elements of at most 8 bytes, padding by rows included; alignments
 * are at most 2^21 bytes; and there are fewer than 2^9 kinds of flat segments and 2^31 ranks and parameters.
 */
#include "unit/layout.h"

#include <assert.h>

#include "base/mem.h"
#include "base/status.h"

static const int64_t MAX_UNIT_NUMEL = INT64_C(1) << 52;
static const size_t MIN_ALIGN = 16, MAX_ALIGN = 1 << 21;

/* Returns how many elements fill align_bytes in the narrowest dtype that the segment may have. A multiple of
 * this step is aligned in every dtype. The step does not depend on the compute and reduce dtypes: a unit has
 * the same cuts in every precision, so that saved flat parameters can be loaded in every precision. */
static int64_t
align_items(const fsdpc_segment *segment, size_t align_bytes)
{
    fsdpc_dtype narrowest = segment->storage == FSDPC_BYTES ? FSDPC_BYTES : FSDPC_BF16;
    return (int64_t)(align_bytes / fsdpc_dtype_bytes(narrowest));
}

static int64_t
round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static int
check_rows(const fsdpc_param_spec *spec)
{
    if (spec->row_numel < 0 || (spec->row_numel > 0 && spec->numel % spec->row_numel != 0)) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "parameter '%s': %lld elements do not divide into rows of %lld",
                           spec->name, (long long)spec->numel, (long long)spec->row_numel);
    }
    const fsdpc_codec codec = spec->codec != FSDPC_UNCODED ? spec->codec : spec->reduce_codec;
    if (codec != FSDPC_UNCODED && (spec->row_numel == 0 || spec->storage == FSDPC_BYTES ||
                                   spec->compute == FSDPC_BYTES || spec->reduce == FSDPC_BYTES)) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter '%s': codec %s needs floating-point rows",
                           spec->name, fsdpc_codec_name(codec));
    }
    if (spec->feedback && spec->reduce_codec == FSDPC_UNCODED) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter '%s': error feedback needs a reduce_codec",
                           spec->name);
    }
    return FSDPC_OK;
}

static int
check_spec(const fsdpc_param_spec *spec, int position)
{
    if (!spec->name) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter %d has no name", position);
    }
    if (spec->numel < 0 || spec->numel > MAX_UNIT_NUMEL) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter '%s': %lld elements are out of range",
                           spec->name, (long long)spec->numel);
    }
    if (fsdpc_dtype_bytes(spec->storage) == 0 || fsdpc_dtype_bytes(spec->compute) == 0 ||
        fsdpc_dtype_bytes(spec->reduce) == 0) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter '%s': unknown dtype", spec->name);
    }
    if ((spec->storage == FSDPC_BYTES) != (spec->compute == FSDPC_BYTES)) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter '%s': %s cannot be cast to %s", spec->name,
                           fsdpc_dtype_name(spec->storage), fsdpc_dtype_name(spec->compute));
    }
    if (spec->trainable && (spec->storage == FSDPC_BYTES || spec->reduce == FSDPC_BYTES)) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "parameter '%s' is trainable, so its storage and reduce dtypes must be "
                           "floating point; freeze it (requires_grad=False) to carry it as bytes",
                           spec->name);
    }
    return check_rows(spec);
}

static int
check_arguments(int param_count, int world, size_t align_bytes)
{
    if (param_count < 0) {
        return fsdpc_error(FSDPC_E_INVAL, "layout: the number of parameters is negative (%d)",
                           param_count);
    }
    if (world < 1) {
        return fsdpc_error(FSDPC_E_INVAL, "layout: world must be at least 1, but is %d", world);
    }
    if (align_bytes < MIN_ALIGN || align_bytes > MAX_ALIGN ||
        (align_bytes & (align_bytes - 1)) != 0) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "align_bytes must be a power of two from %zu to %zu, not %zu", MIN_ALIGN,
                           MAX_ALIGN, align_bytes);
    }
    return FSDPC_OK;
}

static bool
belongs(const fsdpc_segment *segment, const fsdpc_param_spec *spec)
{
    return segment->row_numel == 0 && segment->storage == spec->storage &&
           segment->compute == spec->compute && segment->reduce == spec->reduce &&
           segment->trainable == spec->trainable;
}

/* The gradient of a double parameter is accumulated in double, whatever the reduce dtype. */
static fsdpc_dtype
accumulate_dtype(const fsdpc_param_spec *spec)
{
    return fsdpc_dtype_accumulate(spec->storage == FSDPC_F64 ? FSDPC_F64 : spec->reduce);
}

static int
segment_for(fsdpc_layout *layout, const fsdpc_param_spec *spec)
{
    for (int i = 0; i < layout->segment_count && spec->row_numel == 0; i++) {
        if (belongs(&layout->segments[i], spec)) {
            return i;
        }
    }
    layout->segments[layout->segment_count] = (fsdpc_segment){
        .storage = spec->storage,
        .compute = spec->compute,
        .reduce = spec->reduce,
        .accumulate = accumulate_dtype(spec),
        .trainable = spec->trainable,
        .row_numel = spec->row_numel,
        .codec = spec->codec,
        .reduce_codec = spec->reduce_codec,
        .feedback = spec->feedback,
    };
    return layout->segment_count++;
}

/* Sets *out to the number of elements that a parameter takes in the full buffer, with its padding by rows. */
static int
padded_numel(const fsdpc_param_spec *spec, int world, int64_t *out)
{
    *out = spec->numel;
    if (spec->row_numel == 0) {
        return FSDPC_OK;
    }
    int64_t rows = spec->numel / spec->row_numel;
    int64_t piece = (rows / world + (rows % world != 0)) * spec->row_numel;
    if (__builtin_mul_overflow(piece, (int64_t)world, out) || *out > MAX_UNIT_NUMEL) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "parameter '%s': %lld rows of %lld elements, padded to a multiple of %d "
                           "rows, pass %lld elements",
                           spec->name, (long long)rows, (long long)spec->row_numel, world,
                           (long long)MAX_UNIT_NUMEL);
    }
    return FSDPC_OK;
}

static int
place_param(fsdpc_layout *layout, int index, const fsdpc_param_spec *spec, int64_t *unit_numel)
{
    int64_t padded;
    FSDPC_TRY(check_spec(spec, index));
    FSDPC_TRY(padded_numel(spec, layout->world, &padded));
    *unit_numel += padded;
    if (*unit_numel > MAX_UNIT_NUMEL) {
        return fsdpc_error(FSDPC_E_INVAL, "parameter '%s': the unit passes %lld elements",
                           spec->name, (long long)MAX_UNIT_NUMEL);
    }
    fsdpc_param_place *place = &layout->params[index];
    place->segment = segment_for(layout, spec);
    fsdpc_segment *segment = &layout->segments[place->segment];
    place->offset = round_up(segment->numel, align_items(segment, layout->align_bytes));
    place->numel = spec->numel;
    segment->numel = place->offset + place->numel;
    place->name = fsdpc_mem_strdup(spec->name);
    if (!place->name) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the layout of parameter '%s'", spec->name);
    }
    return FSDPC_OK;
}

/* Sorts the parameters into `order`, and sets `first` and `count` of each segment. */
static void
sort_params(fsdpc_layout *layout)
{
    int at = 0;
    for (int i = 0; i < layout->param_count; i++) {
        layout->segments[layout->params[i].segment].count++;
    }
    for (int s = 0; s < layout->segment_count; s++) {
        layout->segments[s].first = at;
        at += layout->segments[s].count;
        layout->segments[s].count = 0;
    }
    for (int i = 0; i < layout->param_count; i++) {
        fsdpc_segment *segment = &layout->segments[layout->params[i].segment];
        layout->order[segment->first + segment->count++] = i;
    }
}

/* Returns the bytes of `numel` elements, rounded up so that the next segment begins at an aligned offset. */
static size_t
bytes_of(const fsdpc_layout *layout, size_t numel, fsdpc_dtype dtype)
{
    return fsdpc_round_up(numel * fsdpc_dtype_bytes(dtype), layout->align_bytes);
}

static size_t
coded_piece(const fsdpc_segment *segment, fsdpc_codec codec)
{
    return codec == FSDPC_UNCODED
               ? 0
               : fsdpc_codec_bytes(codec, segment->piece_numel / segment->row_numel,
                                   segment->row_numel);
}

static void
cut_segment(fsdpc_layout *layout, fsdpc_segment *segment)
{
    int64_t step =
        segment->row_numel > 0 ? segment->row_numel : align_items(segment, layout->align_bytes);
    int64_t per_rank = segment->numel / layout->world + (segment->numel % layout->world != 0);
    segment->piece_numel = round_up(per_rank, step);

    size_t piece = (size_t)segment->piece_numel, all = piece * (size_t)layout->world;
    segment->full_offset = layout->full_bytes;
    segment->shard_offset = layout->shard_bytes;
    layout->full_bytes += bytes_of(layout, all, segment->compute);
    layout->shard_bytes += bytes_of(layout, piece, segment->storage);
    segment->coded_bytes = coded_piece(segment, segment->codec);
    segment->reduce_coded_bytes = coded_piece(segment, segment->reduce_codec);
    layout->coded_bytes += segment->coded_bytes * (size_t)layout->world;
}

/* Sets the part of the layout that depends on which segments are trainable: the gradient buffers, and the
 * indices of trainable parameters. */
static void
lay_gradients(fsdpc_layout *layout)
{
    layout->grad_bytes = layout->reduce_bytes = 0;
    for (int i = 0; i < layout->segment_count; i++) {
        fsdpc_segment *segment = &layout->segments[i];
        size_t piece = (size_t)segment->piece_numel, all = piece * (size_t)layout->world;
        segment->grad_offset = layout->grad_bytes;
        segment->reduce_offset = layout->reduce_bytes;
        if (segment->trainable) {
            layout->grad_bytes += bytes_of(layout, piece, segment->accumulate);
            layout->reduce_bytes += bytes_of(layout, all, segment->reduce);
        }
    }
    layout->trainable_count = 0;
    for (int i = 0; i < layout->param_count; i++) {
        fsdpc_param_place *place = &layout->params[i];
        bool trainable = layout->segments[place->segment].trainable;
        place->trainable_index = trainable ? layout->trainable_count++ : -1;
    }
}

static int64_t
count_padding(const fsdpc_layout *layout)
{
    int64_t padding = (int64_t)layout->full_bytes;
    for (int i = 0; i < layout->param_count; i++) {
        const fsdpc_param_place *place = &layout->params[i];
        fsdpc_dtype compute = layout->segments[place->segment].compute;
        padding -= place->numel * (int64_t)fsdpc_dtype_bytes(compute);
    }
    return padding;
}

/* Returns an empty layout with room for all parameters and segments, or NULL when out of memory. */
static fsdpc_layout *
allocate(int param_count, int world, size_t align_bytes)
{
    fsdpc_layout *layout = fsdpc_mem_calloc(1, sizeof *layout);
    if (!layout) {
        return NULL;
    }
    layout->world = world;
    layout->align_bytes = align_bytes;
    layout->params = fsdpc_mem_calloc((size_t)param_count, sizeof *layout->params);
    layout->segments = fsdpc_mem_calloc((size_t)param_count, sizeof *layout->segments);
    layout->order = fsdpc_mem_calloc((size_t)param_count, sizeof *layout->order);
    if (!layout->params || !layout->segments || !layout->order) {
        fsdpc_layout_free(layout);
        return NULL;
    }
    layout->param_count = param_count;
    return layout;
}

int
fsdpc_layout_build(const fsdpc_param_spec *specs, int param_count, int world, size_t align_bytes,
                   fsdpc_layout **out)
{
    int status = FSDPC_OK;
    int64_t unit_numel = 0;
    *out = NULL;
    FSDPC_TRY(check_arguments(param_count, world, align_bytes));
    fsdpc_layout *layout = allocate(param_count, world, align_bytes);
    if (!layout) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the layout of %d parameters", param_count);
    }
    for (int i = 0; i < param_count; i++) {
        FSDPC_GOTO(place_param(layout, i, &specs[i], &unit_numel), fail);
    }
    sort_params(layout);
    for (int i = 0; i < layout->segment_count; i++) {
        cut_segment(layout, &layout->segments[i]);
    }
    lay_gradients(layout);
    layout->padding_bytes = count_padding(layout);
    *out = layout;
    return FSDPC_OK;
fail:
    fsdpc_layout_free(layout);
    return status;
}

void
fsdpc_layout_set_trainable(fsdpc_layout *layout, const uint8_t *trainable)
{
    for (int i = 0; i < layout->segment_count; i++) {
        assert(!trainable[i] || layout->segments[i].storage != FSDPC_BYTES);
        layout->segments[i].trainable = trainable[i] != 0;
    }
    lay_gradients(layout);
}

void
fsdpc_layout_free(fsdpc_layout *layout)
{
    if (!layout) {
        return;
    }
    for (int i = 0; i < layout->param_count; i++) {
        fsdpc_mem_free(layout->params[i].name);
    }
    fsdpc_mem_free(layout->params);
    fsdpc_mem_free(layout->segments);
    fsdpc_mem_free(layout->order);
    fsdpc_mem_free(layout);
}

fsdpc_span
fsdpc_layout_span(const fsdpc_layout *layout, int param, int rank)
{
    assert(param >= 0 && param < layout->param_count);
    assert(rank >= 0 && rank < layout->world);
    const fsdpc_param_place *place = &layout->params[param];
    int64_t piece = layout->segments[place->segment].piece_numel;
    int64_t piece_begin = piece * rank, piece_end = piece_begin + piece;
    int64_t param_end = place->offset + place->numel;
    int64_t begin = place->offset > piece_begin ? place->offset : piece_begin;
    int64_t end = param_end < piece_end ? param_end : piece_end;
    if (begin >= end) {
        return (fsdpc_span){0, 0, 0};
    }
    return (fsdpc_span){
        .param_begin = begin - place->offset,
        .piece_begin = begin - piece_begin,
        .length = end - begin,
    };
}

bool
fsdpc_layout_next_run(const fsdpc_layout *layout, int *segment, fsdpc_grad_run *run)
{
    const fsdpc_segment *segments = layout->segments;
    int s = *segment;
    while (s < layout->segment_count && !segments[s].trainable) {
        s++;
    }
    if (s == layout->segment_count) {
        return false;
    }
    *run = (fsdpc_grad_run){.offset = segments[s].grad_offset, .dtype = segments[s].accumulate};
    while (s < layout->segment_count &&
           (!segments[s].trainable || segments[s].accumulate == run->dtype)) {
        s++;
    }
    size_t end = s < layout->segment_count ? segments[s].grad_offset : layout->grad_bytes;
    run->numel = (int64_t)((end - run->offset) / fsdpc_dtype_bytes(run->dtype));
    *segment = s;
    return true;
}

int64_t
fsdpc_layout_shard_padding(const fsdpc_layout *layout, int rank)
{
    int64_t padding = (int64_t)layout->shard_bytes;
    for (int i = 0; i < layout->param_count; i++) {
        fsdpc_dtype storage = layout->segments[layout->params[i].segment].storage;
        padding -= fsdpc_layout_span(layout, i, rank).length * (int64_t)fsdpc_dtype_bytes(storage);
    }
    return padding;
}

size_t
fsdpc_layout_full_offset(const fsdpc_layout *layout, int param)
{
    assert(param >= 0 && param < layout->param_count);
    const fsdpc_param_place *place = &layout->params[param];
    const fsdpc_segment *segment = &layout->segments[place->segment];
    return segment->full_offset + (size_t)place->offset * fsdpc_dtype_bytes(segment->compute);
}

size_t
fsdpc_layout_reduce_offset(const fsdpc_layout *layout, int param)
{
    assert(param >= 0 && param < layout->param_count);
    const fsdpc_param_place *place = &layout->params[param];
    const fsdpc_segment *segment = &layout->segments[place->segment];
    assert(segment->trainable);
    return segment->reduce_offset + (size_t)place->offset * fsdpc_dtype_bytes(segment->reduce);
}
