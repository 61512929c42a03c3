/* A unit's values in and out: whole parameters, and parameters cut into one block per rank in
 * another way than the unit cuts them. See unit.h.
 *
 * Where ranks share a host, every master is mapped, and a rank copies exactly what it wants out of
 * (or into) all masters between two barriers: nobody needs room for more than that. Over a wire the
 * same elements travel through a window of limited size.
 */
#include <stdio.h>
#include <string.h>

#include "mem.h"
#include "status.h"
#include "unit_impl.h"

enum { SMALL_BYTES = 1 << 20 };

/* Elements [begin, begin + length) of a parameter, the first of them at `data`. */
typedef struct part {
    char *data;
    int64_t begin, length;
} part;

static int64_t
larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static bool
has_values(const fsdpc_unit *unit, enum fsdpc_which which, int param)
{
    return which == FSDPC_MASTER || unit->layout->params[param].trainable_index >= 0;
}

static const fsdpc_segment *
segment_of(const fsdpc_unit *unit, int param)
{
    return &unit->layout->segments[unit->layout->params[param].segment];
}

int
fsdpc_unit_write(fsdpc_unit *unit, enum fsdpc_which which, int param, const void *full)
{
    if (!has_values(unit, which, param)) {
        return fsdpc_error(FSDPC_E_INVAL, "unit %s: parameter %s has no gradient", unit->name,
                           unit->layout->params[param].name);
    }
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    size_t item;
    char *piece = fsdpc_unit_own_piece(unit, which, unit->layout->params[param].segment, &item);
    FSDPC_TRY(fsdpc_unit_settle(unit));
    if (span.length > 0) {
        memcpy(piece + (size_t)span.piece_begin * item,
               (const char *)full + (size_t)span.param_begin * item, (size_t)span.length * item);
    }
    return FSDPC_OK;
}

/* --- reading --------------------------------------------------------------------------------- */

/* `window` holds elements [first, first + count) of rank `r`'s piece of a segment: copies what the
 * parts want of them. */
static void
copy_out(const fsdpc_unit *unit, int segment, int r, const char *window, int64_t first,
         int64_t count, size_t item, const part *parts)
{
    for (int i = 0; i < unit->layout->param_count; i++) {
        fsdpc_span span = fsdpc_layout_span(unit->layout, i, r);
        if (unit->layout->params[i].segment != segment || !parts[i].data || span.length == 0) {
            continue;
        }
        int64_t shift = span.param_begin - span.piece_begin; /* piece to parameter */
        int64_t begin = larger(larger(span.param_begin, parts[i].begin), first + shift);
        int64_t end = smaller(smaller(span.param_begin + span.length, first + count + shift),
                              parts[i].begin + parts[i].length);
        if (begin < end) {
            memcpy(parts[i].data + (size_t)(begin - parts[i].begin) * item,
                   window + (size_t)(begin - shift - first) * item, (size_t)(end - begin) * item);
        }
    }
}

static int
read_mapped(fsdpc_unit *unit, const part *parts, const char *what)
{
    FSDPC_TRY(fsdpc_comm_barrier(unit->shard, what));
    for (int r = 0; r < unit->world; r++) {
        for (int s = 0; s < unit->layout->segment_count; s++) {
            const fsdpc_segment *seg = &unit->layout->segments[s];
            copy_out(unit, s, r, (char *)unit->peers[r] + seg->shard_offset, 0, seg->piece_numel,
                     fsdpc_dtype_bytes(seg->storage), parts);
        }
    }
    return fsdpc_comm_barrier(unit->shard, what);
}

/* How many elements of each rank the window takes at once. What is worth it goes in two halves at
 * least, because what carries the bytes may hold a second copy of the window meanwhile. */
static int64_t
window_length(const fsdpc_unit *unit, int64_t count, size_t item)
{
    int64_t all_ranks = (int64_t)(item * (size_t)unit->world);
    int64_t fits = larger(FSDPC_UNIT_SCRATCH_BYTES / all_ranks, 1);
    int64_t small = larger(SMALL_BYTES / all_ranks, 1);
    return smaller(smaller(count, fits), larger(count / 2 + count % 2, small));
}

static int
read_segment(fsdpc_unit *unit, enum fsdpc_which which, int segment, const part *parts,
             const char *what)
{
    int status = FSDPC_OK;
    const fsdpc_segment *seg = &unit->layout->segments[segment];
    size_t item;
    const char *own = fsdpc_unit_own_piece(unit, which, segment, &item);
    int64_t step = window_length(unit, seg->piece_numel, item);
    size_t bytes = (size_t)step * item * (size_t)unit->world;
    void *window = NULL;
    if (step == 0 || (which == FSDPC_GRAD && !seg->trainable)) {
        return FSDPC_OK;
    }
    FSDPC_GOTO(fsdpc_device_alloc(unit->device, bytes, &window), done);
    for (int64_t first = 0; first < seg->piece_numel; first += step) {
        int64_t count = smaller(step, seg->piece_numel - first);
        size_t piece = (size_t)count * item;
        memcpy((char *)window + piece * (size_t)unit->rank, own + (size_t)first * item, piece);
        FSDPC_GOTO(fsdpc_comm_all_gather(unit->shard, window, piece, what), done);
        for (int r = 0; r < unit->world; r++) {
            copy_out(unit, segment, r, (char *)window + piece * (size_t)r, first, count, item,
                     parts);
        }
    }
done:
    fsdpc_device_free(unit->device, window, bytes);
    return status;
}

static int
read_parts(fsdpc_unit *unit, enum fsdpc_which which, const part *parts, const char *what)
{
    if (which == FSDPC_MASTER && unit->master_map) {
        return read_mapped(unit, parts, what);
    }
    for (int s = 0; s < unit->layout->segment_count; s++) {
        FSDPC_TRY(read_segment(unit, which, s, parts, what));
    }
    return FSDPC_OK;
}

static part *
new_parts(const fsdpc_unit *unit)
{
    part *parts = fsdpc_mem_calloc((size_t)unit->layout->param_count + 1, sizeof *parts);
    if (!parts) {
        (void)fsdpc_error(FSDPC_E_NOMEM, "unit %s: no memory for the places of its values",
                          unit->name);
    }
    return parts;
}

int
fsdpc_unit_read(fsdpc_unit *unit, enum fsdpc_which which, void *const *full)
{
    char what[256];
    part *parts = new_parts(unit);
    if (!parts) {
        return FSDPC_E_NOMEM;
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        parts[i] = (part){full[i], 0, unit->layout->params[i].numel};
    }
    snprintf(what, sizeof what, "full %s of unit %s",
             which == FSDPC_MASTER ? "parameters" : "gradients", unit->name);
    int status = read_parts(unit, which, parts, what);
    fsdpc_mem_free(parts);
    return status;
}

/* --- blocks ---------------------------------------------------------------------------------- */

static int64_t
block_begin(const fsdpc_unit *unit, int param, int64_t block, int rank)
{
    int64_t numel = unit->layout->params[param].numel, begin;
    bool wraps = __builtin_mul_overflow(block, (int64_t)rank, &begin);
    return wraps ? numel : smaller(begin, numel);
}

int64_t
fsdpc_unit_block_length(const fsdpc_unit *unit, int param, int64_t block)
{
    return block_begin(unit, param, block, unit->rank + 1) -
           block_begin(unit, param, block, unit->rank);
}

static part
own_block(const fsdpc_unit *unit, int param, int64_t block, const void *data)
{
    return (part){(char *)data, block_begin(unit, param, block, unit->rank),
                  fsdpc_unit_block_length(unit, param, block)};
}

int
fsdpc_unit_read_blocks(fsdpc_unit *unit, const int64_t *block, void *const *data)
{
    char what[256];
    part *parts = new_parts(unit);
    if (!parts) {
        return FSDPC_E_NOMEM;
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        parts[i] = own_block(unit, i, block[i], data[i]);
    }
    snprintf(what, sizeof what, "sharded parameters of unit %s", unit->name);
    int status = read_parts(unit, FSDPC_MASTER, parts, what);
    fsdpc_mem_free(parts);
    return status;
}

/* Copies what rank `r` owns of a part of parameter `param` into that rank's master. */
static void
copy_in(const fsdpc_unit *unit, int param, int r, part from)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, r);
    size_t item = fsdpc_dtype_bytes(seg->storage);
    int64_t begin = larger(span.param_begin, from.begin);
    int64_t end = smaller(span.param_begin + span.length, from.begin + from.length);
    if (begin < end) {
        char *piece = (char *)unit->peers[r] + seg->shard_offset;
        memcpy(piece + (size_t)(span.piece_begin + begin - span.param_begin) * item,
               from.data + (size_t)(begin - from.begin) * item, (size_t)(end - begin) * item);
    }
}

static int
write_mapped(fsdpc_unit *unit, const int64_t *block, const void *const *data, const char *what)
{
    FSDPC_TRY(fsdpc_comm_barrier(unit->shard, what));
    for (int i = 0; i < unit->layout->param_count; i++) {
        part own = own_block(unit, i, block[i], data[i]);
        for (int r = 0; r < unit->world && own.data; r++) {
            copy_in(unit, i, r, own);
        }
    }
    return fsdpc_comm_barrier(unit->shard, what);
}

static int
write_over_wire(fsdpc_unit *unit, int param, int64_t block, const void *data, const char *what)
{
    int status = FSDPC_OK;
    size_t item = fsdpc_dtype_bytes(segment_of(unit, param)->storage);
    block = smaller(block, unit->layout->params[param].numel);
    int64_t step = window_length(unit, block, item);
    size_t bytes = (size_t)step * item * (size_t)unit->world;
    part own = own_block(unit, param, block, data);
    void *window = NULL;
    if (step == 0) {
        return FSDPC_OK;
    }
    FSDPC_GOTO(fsdpc_device_alloc(unit->device, bytes, &window), done);
    for (int64_t first = 0; first < block; first += step) {
        int64_t count = smaller(step, block - first), have = smaller(count, own.length - first);
        size_t piece = (size_t)count * item;
        if (have > 0) {
            memcpy((char *)window + piece * (size_t)unit->rank, own.data + (size_t)first * item,
                   (size_t)have * item);
        }
        FSDPC_GOTO(fsdpc_comm_all_gather(unit->shard, window, piece, what), done);
        for (int r = 0; r < unit->world; r++) {
            int64_t begin = block_begin(unit, param, block, r) + first;
            int64_t end = smaller(begin + count, block_begin(unit, param, block, r + 1));
            copy_in(unit, param, unit->rank,
                    (part){(char *)window + piece * (size_t)r, begin, larger(end - begin, 0)});
        }
    }
done:
    fsdpc_device_free(unit->device, window, bytes);
    return status;
}

int
fsdpc_unit_write_blocks(fsdpc_unit *unit, const int64_t *block, const void *const *data)
{
    char what[256];
    snprintf(what, sizeof what, "loading of sharded parameters into unit %s", unit->name);
    if (unit->master_map) {
        return write_mapped(unit, block, data, what);
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        FSDPC_TRY(write_over_wire(unit, i, block[i], data[i], what));
    }
    return FSDPC_OK;
}
