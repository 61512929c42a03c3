/* Reads and writes a unit's values: whole parameters, and parameters that are cut into one block per rank in
 * another way than the unit cuts them. See unit.h.
 *
 * On one host every master shard is mapped, and a rank copies the elements that it needs directly
 * from or to the shards of all ranks, between two barriers. A group of one rank copies its own shard. Over a
 * wire the same elements pass through a window: a buffer of limited size in device memory. One stream fills,
 * gathers and empties the window, so the host need not wait before it queues the next filling.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

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

/* --- copies of the device -------------------------------------------------------------------- */

static enum fsdpc_memory_kind
shard_place(const fsdpc_unit *unit)
{
    return unit->offload ? FSDPC_ON_HOST : FSDPC_ON_DEVICE;
}

/* Copies bytes, asynchronously except within host memory. */
static int
copy(const fsdpc_unit *unit, void *dst, enum fsdpc_memory_kind to, const void *src,
     enum fsdpc_memory_kind from, size_t bytes)
{
    if (to == FSDPC_ON_DEVICE) {
        return from == FSDPC_ON_HOST ? fsdpc_device_copy_in(unit->device, dst, src, bytes)
                                     : fsdpc_device_copy(unit->device, dst, src, bytes);
    }
    if (from == FSDPC_ON_DEVICE) {
        return fsdpc_device_copy_out(unit->device, dst, src, bytes);
    }
    memcpy(dst, src, bytes);
    return FSDPC_OK;
}

int
fsdpc_unit_write(fsdpc_unit *unit, enum fsdpc_which which, int param, const void *full,
                 enum fsdpc_memory_kind place)
{
    if (!has_values(unit, which, param)) {
        return fsdpc_error(FSDPC_E_INVAL, "unit %s: parameter %s has no gradient", unit->name,
                           unit->layout->params[param].name);
    }
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    size_t item;
    char *piece = fsdpc_unit_shard_piece(unit, which, unit->layout->params[param].segment, &item);
    FSDPC_TRY(fsdpc_unit_settle(unit));
    if (span.length > 0) {
        FSDPC_TRY(copy(unit, piece + (size_t)span.piece_begin * item, shard_place(unit),
                       (const char *)full + (size_t)span.param_begin * item, place,
                       (size_t)span.length * item));
    }
    bool queued = span.length > 0 && place == FSDPC_ON_DEVICE && !unit->offload;
    return queued ? FSDPC_OK : fsdpc_comm_drain(unit->shard, unit->name);
}

/* --- reading --------------------------------------------------------------------------------- */

/* The arguments of a read: which parts of parameters are read, and to where. */
typedef struct reading {
    enum fsdpc_which which;
    enum fsdpc_memory_kind place;
    const part *parts; /* per parameter */
    const char *what;
} reading;

/* Elements [first, first + count) of a rank's piece of a segment. */
typedef struct stretch {
    int segment, rank;
    const char *data;
    enum fsdpc_memory_kind place;
    int64_t first, count;
    size_t item;
} stretch;

/* Copies the elements of a stretch that belong to the parts in `to`. */
static int
copy_out(const fsdpc_unit *unit, const stretch *from, const reading *to)
{
    const fsdpc_segment *seg = &unit->layout->segments[from->segment];
    for (int k = 0; k < seg->count; k++) {
        const int i = unit->layout->order[seg->first + k];
        const part *wanted = &to->parts[i];
        fsdpc_span span = fsdpc_layout_span(unit->layout, i, from->rank);
        if (!wanted->data || span.length == 0) {
            continue;
        }
        int64_t shift = span.param_begin - span.piece_begin; /* piece to parameter */
        int64_t begin = larger(larger(span.param_begin, wanted->begin), from->first + shift);
        int64_t end =
            smaller(smaller(span.param_begin + span.length, from->first + from->count + shift),
                    wanted->begin + wanted->length);
        if (begin < end) {
            FSDPC_TRY(copy(unit, wanted->data + (size_t)(begin - wanted->begin) * from->item,
                           to->place,
                           from->data + (size_t)(begin - shift - from->first) * from->item,
                           from->place, (size_t)(end - begin) * from->item));
        }
    }
    return FSDPC_OK;
}

static int
read_mapped(fsdpc_unit *unit, const reading *to)
{
    FSDPC_TRY(fsdpc_comm_barrier(unit->shard, to->what));
    for (int r = 0; r < unit->world; r++) {
        for (int s = 0; s < unit->layout->segment_count; s++) {
            const fsdpc_segment *seg = &unit->layout->segments[s];
            stretch all = {s,
                           r,
                           (char *)unit->peers[r] + seg->shard_offset,
                           FSDPC_ON_DEVICE,
                           0,
                           seg->piece_numel,
                           fsdpc_dtype_bytes(seg->storage)};
            FSDPC_TRY(copy_out(unit, &all, to));
        }
    }
    return fsdpc_comm_barrier(unit->shard, to->what);
}

/* Returns how many elements of each rank's piece the window holds. That is at most half of a large
 * piece, because the communicator may hold a second copy of the window at the same time. */
static int64_t
window_length(const fsdpc_unit *unit, int64_t count, size_t item)
{
    int64_t all_ranks = (int64_t)(item * (size_t)unit->world);
    int64_t fits = larger(FSDPC_UNIT_SCRATCH_BYTES / all_ranks, 1);
    int64_t small = larger(SMALL_BYTES / all_ranks, 1);
    return smaller(smaller(count, fits), larger(count / 2 + count % 2, small));
}

/* Reads a segment through a window, a part of each rank's piece at a time. `own`: this rank's whole piece. */
static int
read_segment(fsdpc_unit *unit, const stretch *own, const reading *to)
{
    int status = FSDPC_OK;
    int64_t step = window_length(unit, own->count, own->item);
    size_t bytes = (size_t)step * own->item * (size_t)unit->world;
    void *window = NULL;
    FSDPC_GOTO(fsdpc_device_alloc(unit->device, bytes, &window), done);
    for (int64_t first = 0; first < own->count; first += step) {
        int64_t count = smaller(step, own->count - first);
        size_t piece = (size_t)count * own->item;
        FSDPC_GOTO(copy(unit, (char *)window + piece * (size_t)unit->rank, FSDPC_ON_DEVICE,
                        own->data + (size_t)first * own->item, own->place, piece),
                   done);
        FSDPC_GOTO(fsdpc_comm_all_gather(unit->shard, window, piece, to->what), done);
        for (int r = 0; r < unit->world; r++) {
            stretch shown = {own->segment,    r,     (char *)window + piece * (size_t)r,
                             FSDPC_ON_DEVICE, first, count,
                             own->item};
            FSDPC_GOTO(copy_out(unit, &shown, to), done);
        }
    }
    FSDPC_GOTO(fsdpc_comm_drain(unit->shard, to->what), done);
done:
    fsdpc_device_free(unit->device, window, bytes);
    return status;
}

static int
read_parts(fsdpc_unit *unit, const reading *to)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    if (to->which == FSDPC_MASTER && unit->master_map) {
        return read_mapped(unit, to);
    }
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        stretch own = {.segment = s, .place = shard_place(unit), .count = seg->piece_numel};
        own.data = fsdpc_unit_shard_piece(unit, to->which, s, &own.item);
        if (seg->piece_numel > 0 && (to->which == FSDPC_MASTER || seg->trainable)) {
            FSDPC_TRY(unit->world > 1 ? read_segment(unit, &own, to) : copy_out(unit, &own, to));
        }
    }
    return unit->world > 1 ? FSDPC_OK : fsdpc_comm_drain(unit->shard, to->what);
}

static part *
new_parts(const fsdpc_unit *unit)
{
    part *parts = fsdpc_mem_calloc((size_t)unit->layout->param_count + 1, sizeof *parts);
    if (!parts) {
        (void)fsdpc_error(FSDPC_E_NOMEM, "no memory for the addresses of the values of unit %s",
                          unit->name);
    }
    return parts;
}

int
fsdpc_unit_read(fsdpc_unit *unit, enum fsdpc_which which, void *const *full,
                enum fsdpc_memory_kind place)
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
    int status = read_parts(unit, &(reading){which, place, parts, what});
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
fsdpc_unit_read_blocks(fsdpc_unit *unit, const int64_t *block, void *const *data,
                       enum fsdpc_memory_kind place)
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
    int status = read_parts(unit, &(reading){FSDPC_MASTER, place, parts, what});
    fsdpc_mem_free(parts);
    return status;
}

/* `from` is a part of `param`. Copies its elements that rank `r` owns into the master shard of rank `r`. */
static int
copy_in(const fsdpc_unit *unit, int param, int r, part from, enum fsdpc_memory_kind place)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, r);
    size_t item = fsdpc_dtype_bytes(seg->storage);
    int64_t begin = larger(span.param_begin, from.begin);
    int64_t end = smaller(span.param_begin + span.length, from.begin + from.length);
    if (begin >= end) {
        return FSDPC_OK;
    }
    char *piece = (char *)unit->peers[r] + seg->shard_offset;
    return copy(unit, piece + (size_t)(span.piece_begin + begin - span.param_begin) * item,
                shard_place(unit), from.data + (size_t)(begin - from.begin) * item, place,
                (size_t)(end - begin) * item);
}

static int
write_mapped(fsdpc_unit *unit, const int64_t *block, const void *const *data,
             enum fsdpc_memory_kind place, const char *what)
{
    FSDPC_TRY(fsdpc_comm_barrier(unit->shard, what));
    for (int i = 0; i < unit->layout->param_count; i++) {
        part own = own_block(unit, i, block[i], data[i]);
        for (int r = 0; r < unit->world && own.data; r++) {
            FSDPC_TRY(copy_in(unit, i, r, own, place));
        }
    }
    return fsdpc_comm_barrier(unit->shard, what);
}

/* Copies this rank's elements to its shard. The window holds each rank's block from element `first` on. */
static int
take_window(const fsdpc_unit *unit, int param, int64_t block, const char *window, int64_t first,
            int64_t count)
{
    size_t piece = (size_t)count * fsdpc_dtype_bytes(segment_of(unit, param)->storage);
    for (int r = 0; r < unit->world; r++) {
        int64_t begin = block_begin(unit, param, block, r) + first;
        int64_t end = smaller(begin + count, block_begin(unit, param, block, r + 1));
        part from = {(char *)window + piece * (size_t)r, begin, larger(end - begin, 0)};
        FSDPC_TRY(copy_in(unit, param, unit->rank, from, FSDPC_ON_DEVICE));
    }
    return FSDPC_OK;
}

static int
write_over_wire(fsdpc_unit *unit, int param, int64_t block, const void *data,
                enum fsdpc_memory_kind place, const char *what)
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
            FSDPC_GOTO(copy(unit, (char *)window + piece * (size_t)unit->rank, FSDPC_ON_DEVICE,
                            own.data + (size_t)first * item, place, (size_t)have * item),
                       done);
        }
        FSDPC_GOTO(fsdpc_comm_all_gather(unit->shard, window, piece, what), done);
        FSDPC_GOTO(take_window(unit, param, block, window, first, count), done);
    }
    FSDPC_GOTO(fsdpc_comm_drain(unit->shard, what), done);
done:
    fsdpc_device_free(unit->device, window, bytes);
    return status;
}

int
fsdpc_unit_write_blocks(fsdpc_unit *unit, const int64_t *block, const void *const *data,
                        enum fsdpc_memory_kind place)
{
    char what[256];
    snprintf(what, sizeof what, "loading of sharded parameters into unit %s", unit->name);
    FSDPC_TRY(fsdpc_unit_settle(unit));
    if (unit->master_map || unit->world == 1) {
        FSDPC_TRY(write_mapped(unit, block, data, place, what));
        return fsdpc_comm_drain(unit->shard, what);
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        FSDPC_TRY(write_over_wire(unit, i, block[i], data[i], place, what));
    }
    return FSDPC_OK;
}
