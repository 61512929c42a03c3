/* Gathering and reducing on a device with streams (a GPU): the host queues work and stream waits.
 *
 *   gather stream   waits for the slot's last reader and for the optimizer, casts this rank's
 *                   pieces into their place in the slot, all-gathers in place       -> filled
 *   caller's stream waits for `filled`, computes                                    -> free
 *                   waits for the reduce slot, packs all gradients in one launch    -> packed
 *   reduce stream   waits for `packed`, reduce-scatters in place, adds this rank's
 *                   piece to the shard gradient (units with codes:
 *                   exchange_stream_coded.c)                                        -> summed
 *   caller's stream waits for `summed` at the end of backward; then the optimizer may read. An optimizer
 *                   that steps in backward may read a unit's sum when this stream has waited for the
 *                   unit's reduce slot, as it does before another unit takes that slot
 *
 * A gather reads shards, which the optimizer writes. The caller's stream waits for each gather whose
 * values are used, and at the end of a pass for prefetched gathers whose values were not used.
 *
 * Gathers and reductions use different communicators, so that a gather never queues behind a
 * reduction. All ranks must gather and reduce in one order, as in the "wire" exchange. A step has no
 * allocation and no host sync, with two exceptions that are counted: a unit that needs private memory because
 * its slot is in use, and a rank with unused parameters, which must find out whether other ranks used them.
 */
#include <string.h>

#include "exchange/exchange_stream_impl.h"
#include "exchange/exchange_used.h"
#include "base/mem.h"
#include "base/status.h"

/* --- set-up ---------------------------------------------------------------------------------- */

static int
open_units(fsdpc_exchange *x, struct fsdpc_streams *s)
{
    int most = 0;
    s->fillings = fsdpc_mem_calloc((size_t)x->unit_count, sizeof *s->fillings);
    if (!s->fillings) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_layout *layout = fsdpc_unit_layout(x->units[u]);
        most = layout->param_count > most ? layout->param_count : most;
        s->bit_count += layout->param_count;
        FSDPC_TRY(fsdpc_device_event_new(s->device, &s->fillings[u].done));
        FSDPC_TRY(fsdpc_grad_open(x->units[u]));
    }
    s->mask = fsdpc_mem_calloc((size_t)most + 1, 1);
    s->used = fsdpc_mem_calloc(fsdpc_used_count(x) + 1, 1);
    return s->mask && s->used ? fsdpc_stream_gather_open(x)
                              : fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
}

static int
open_slots(fsdpc_exchange *x, struct fsdpc_streams *s)
{
    s->slot_count = fsdpc_arena_slot_count(x->arena);
    s->readers = fsdpc_mem_calloc((size_t)s->slot_count, sizeof *s->readers);
    s->slots = fsdpc_mem_calloc((size_t)x->reduce_slots, sizeof *s->slots);
    if (!s->readers || !s->slots) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    for (int i = 0; i < s->slot_count; i++) {
        FSDPC_TRY(fsdpc_device_event_new(s->device, &s->readers[i].done));
    }
    for (int i = 0; i < x->reduce_slots && x->max_reduce_bytes > 0; i++) {
        FSDPC_TRY(fsdpc_device_event_new(s->device, &s->slots[i].packed));
        FSDPC_TRY(fsdpc_device_event_new(s->device, &s->slots[i].summed));
    }
    return fsdpc_stream_slots_open(x);
}

/* Fills `all` with the used bits of a rank that has used all its trainable parameters. */
static int
fill_all(fsdpc_exchange *x, struct fsdpc_streams *s, size_t bytes)
{
    float *bits = s->bits;
    for (int u = 0; u < x->unit_count; u++) {
        for (int i = 0; i < fsdpc_unit_layout(x->units[u])->param_count; i++) {
            *bits++ = fsdpc_unit_layout(x->units[u])->params[i].trainable_index >= 0;
        }
    }
    FSDPC_TRY(fsdpc_device_copy_in(s->device, s->all, s->bits, bytes));
    FSDPC_TRY(fsdpc_device_record(s->device, s->sync_event));
    return fsdpc_device_finish(s->device, s->sync_event, fsdpc_comm_timeout(x->comm),
                               "the set-up of an exchange");
}

static int
open_bits(fsdpc_exchange *x, struct fsdpc_streams *s)
{
    size_t bytes = (size_t)s->bit_count * sizeof(float);
    void *block;
    if (bytes == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_device_host_alloc(s->device, bytes, &block));
    s->bits = block;
    FSDPC_TRY(fsdpc_device_alloc(s->device, bytes, &block));
    s->device_bits = block;
    FSDPC_TRY(fsdpc_device_alloc(s->device, bytes, &block));
    s->all = block;
    return fill_all(x, s, bytes);
}

static int
open_streams(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
    (void)plan;
    struct fsdpc_streams *s = x->streams = fsdpc_mem_calloc(1, sizeof *s);
    if (!s) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    s->device = fsdpc_comm_device(x->comm);
    s->reduce_comm = fsdpc_comm_for_reductions(x->comm);
    s->replicas = x->in_turn = fsdpc_stream_has_replicas(x);
    FSDPC_TRY(fsdpc_device_stream_new(s->device, true, &s->gather));
    FSDPC_TRY(fsdpc_device_stream_new(s->device, true, &s->reduce));
    FSDPC_TRY(fsdpc_device_event_new(s->device, &s->masters));
    FSDPC_TRY(fsdpc_device_event_new(s->device, &s->sync_event));
    FSDPC_TRY(fsdpc_device_event_new(s->device, &s->ready));
    FSDPC_TRY(fsdpc_device_event_new(s->device, &s->shared));
    FSDPC_TRY(fsdpc_stream_coded_open(x));
    FSDPC_TRY(open_units(x, s));
    FSDPC_TRY(open_slots(x, s));
    FSDPC_TRY(fsdpc_stream_offload_open(x));
    s->bit_count += FSDPC_STREAM_TURN_FLOATS;
    FSDPC_TRY(fsdpc_stream_turns_open(x));
    return open_bits(x, s);
}

/* Waits for the event until `end_ns` at most. All events that a close waits for share this deadline. */
static void
await_event(const struct fsdpc_streams *s, fsdpc_event *event, int64_t end_ns)
{
    const double left = (double)(end_ns - fsdpc_shm_now_ns()) * 1e-9;
    (void)fsdpc_device_finish(s->device, event, left > 0 ? left : 0, "the end of an exchange");
}

/* Waits for each slot's last reader, which may be on another stream: any thread may close an exchange. */
static void
await_readers(struct fsdpc_streams *s, int64_t end_ns)
{
    for (int i = 0; s->readers && i < s->slot_count; i++) {
        const struct fsdpc_reader *reader = &s->readers[i];
        if (reader->pending && reader->capture == 0) {
            await_event(s, reader->done, end_ns);
        }
    }
}

/* Waits until no stream uses the exchange's memory. If a communicator is broken, its abort ends its work. */
static void
drain(const fsdpc_exchange *x, struct fsdpc_streams *s)
{
    const int64_t end_ns = fsdpc_shm_now_ns() + (int64_t)(fsdpc_comm_timeout(x->comm) * 1e9);
    fsdpc_stream *caller = fsdpc_device_current(s->device);
    fsdpc_stream *all[] = {s->gather, s->reduce, caller};
    await_readers(s, end_ns);
    for (int i = 0; s->sync_event && i < 3; i++) {
        fsdpc_device_use(s->device, all[i]);
        if (fsdpc_device_record(s->device, s->sync_event) == FSDPC_OK) {
            await_event(s, s->sync_event, end_ns);
        }
    }
    fsdpc_device_use(s->device, caller);
}

static void
close_streams(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    if (!s) {
        return;
    }
    drain(x, s);
    for (int u = 0; u < x->unit_count; u++) {
        fsdpc_device_event_free(s->device, s->fillings ? s->fillings[u].done : NULL);
    }
    fsdpc_stream_gather_close(x);
    fsdpc_stream_coded_close(x);
    fsdpc_stream_turns_close(x);
    fsdpc_stream_slots_close(x);
    for (int i = 0; s->readers && i < s->slot_count; i++) {
        fsdpc_device_event_free(s->device, s->readers[i].done);
    }
    for (int i = 0; s->slots && i < x->reduce_slots; i++) {
        fsdpc_device_event_free(s->device, s->slots[i].packed);
        fsdpc_device_event_free(s->device, s->slots[i].summed);
    }
    size_t bytes = (size_t)s->bit_count * sizeof(float);
    fsdpc_device_host_free(s->device, s->bits, bytes);
    fsdpc_device_free(s->device, s->device_bits, bytes);
    fsdpc_device_free(s->device, s->all, bytes);
    fsdpc_device_event_free(s->device, s->sync_event);
    fsdpc_device_event_free(s->device, s->ready);
    fsdpc_device_event_free(s->device, s->shared);
    fsdpc_device_event_free(s->device, s->masters);
    fsdpc_device_event_free(s->device, s->copied);
    fsdpc_device_stream_free(s->device, s->gather);
    fsdpc_device_stream_free(s->device, s->reduce);
    fsdpc_mem_free(s->fillings);
    fsdpc_mem_free(s->mask);
    fsdpc_mem_free(s->used);
    fsdpc_mem_free(s->readers);
    fsdpc_mem_free(s->slots);
    fsdpc_mem_free(s);
    x->streams = NULL;
}

/* --- gather ---------------------------------------------------------------------------------- */

static int
begin(fsdpc_exchange *x, uint64_t tag)
{
    struct fsdpc_streams *s = x->streams;
    uint64_t before = s->capture;
    fsdpc_stream *caller = fsdpc_device_current(s->device);
    FSDPC_TRY(fsdpc_stream_check(x));
    FSDPC_TRY(fsdpc_device_capture(s->device, &s->capture));
    if (s->begun && s->tag == tag && s->capture == before) {
        return FSDPC_OK; /* a backward follows its forward: the masters are the same */
    }
    FSDPC_TRY(fsdpc_stream_turns_begin(x));
    s->begun = true;
    s->tag = tag;
    for (int i = 0; i < s->slot_count; i++) {
        s->readers[i].pending = s->readers[i].pending && s->readers[i].stream != caller;
    }
    s->masters_awaited = false;
    return fsdpc_device_record(s->device, s->masters);
}

/* Makes the gather stream wait until the masters are final and the slot's last reader has finished. */
static int
await_slot(struct fsdpc_streams *s, const fsdpc_unit *unit)
{
    if (!s->masters_awaited) {
        FSDPC_TRY(fsdpc_device_wait(s->device, s->masters));
        s->masters_awaited = true;
    }
    struct fsdpc_reader *reader = &s->readers[fsdpc_unit_use(unit)->slot];
    if (fsdpc_unit_is_spare(unit) || !reader->pending) {
        return FSDPC_OK;
    }
    reader->pending = false;
    if (reader->capture != s->capture) {
        return FSDPC_OK;
    }
    return fsdpc_device_wait(s->device, reader->done);
}

static int
fill_on_stream(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_filling *filling = &s->fillings[fsdpc_unit_use(unit)->id];
    FSDPC_TRY(fsdpc_stream_turn(x, unit, false));
    FSDPC_TRY(await_slot(s, unit));
    FSDPC_TRY(fsdpc_stream_fill(x, unit));
    filling->number = ++s->filled;
    filling->capture = s->capture;
    FSDPC_TRY(fsdpc_unit_touch(unit, FSDPC_MASTER));
    return fsdpc_device_record(s->device, filling->done);
}

static int
fill(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    fsdpc_stream *caller = fsdpc_device_use(s->device, s->gather);
    int status = fill_on_stream(x, unit);
    fsdpc_device_use(s->device, caller);
    return status;
}

static bool
slot_shows(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    return x->slot_unit[fsdpc_unit_use(unit)->slot] == fsdpc_unit_use(unit)->id &&
           x->slot_tag[fsdpc_unit_use(unit)->slot] == x->tag;
}

/* Waits on the host for all queued work on the old memory, before an address is mapped to other memory. */
static int
sync_before_remap(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    return fsdpc_stream_sync(x, fsdpc_unit_name(unit));
}

/* Makes the gather stream current, so that spare memory is zeroed there before the gather writes to it. */
static int
map_spare(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    fsdpc_stream *caller = fsdpc_device_use(s->device, s->gather);
    int status = fsdpc_arena_spare(x->arena, fsdpc_unit_range(unit));
    fsdpc_device_use(s->device, caller);
    return status;
}

static int
start(fsdpc_exchange *x, fsdpc_unit *unit)
{
    if (fsdpc_exchange_slot_is_in_use(x, unit)) {
        FSDPC_TRY(fsdpc_stream_refuse_capture(x->streams, "a unit that needs a spare slot"));
        FSDPC_TRY(sync_before_remap(x, unit));
        FSDPC_TRY(map_spare(x, unit));
        fsdpc_exchange_note(x, FSDPC_TRACE_SPARE, unit, fsdpc_unit_range(unit)->bytes);
        FSDPC_TRY(fill(x, unit));
    } else if (!slot_shows(x, unit)) {
        x->slot_unit[fsdpc_unit_use(unit)->slot] = -1;
        FSDPC_TRY(fill(x, unit));
        x->slot_unit[fsdpc_unit_use(unit)->slot] = fsdpc_unit_use(unit)->id;
        x->slot_tag[fsdpc_unit_use(unit)->slot] = x->tag;
    }
    fsdpc_unit_use(unit)->begun = true;
    return FSDPC_OK;
}

static int
await_values(struct fsdpc_streams *s, const struct fsdpc_filling *filling, uint64_t capture)
{
    struct fsdpc_behind *behind = &s->behind;
    const fsdpc_stream *caller = fsdpc_device_current(s->device);
    bool known = behind->stream == caller && behind->capture == capture;
    if (filling->capture != capture || (known && filling->number <= behind->number)) {
        return FSDPC_OK;
    }
    *behind = (struct fsdpc_behind){caller, capture, filling->number};
    return fsdpc_device_wait(s->device, filling->done);
}

static int
gather(fsdpc_exchange *x, fsdpc_unit *unit, bool wait)
{
    struct fsdpc_streams *s = x->streams;
    if (!fsdpc_unit_use(unit)->begun) {
        if (!wait && fsdpc_exchange_slot_is_in_use(x, unit)) {
            return FSDPC_OK;
        }
        FSDPC_TRY(start(x, unit));
    }
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (wait && !use->ready) {
        FSDPC_TRY(await_values(s, &s->fillings[use->id], s->capture));
        use->ready = true;
    }
    return FSDPC_OK;
}

/* The caller may next write shards of units that were prefetched and not used, so its stream waits for the
 * last of these gathers. Leaves out a gather if a capture has begun or ended since it was queued. */
static int
rest(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    const struct fsdpc_filling *last = NULL;
    uint64_t capture = 0;
    for (int u = 0; u < x->unit_count; u++) {
        const struct fsdpc_filling *filling = &s->fillings[u];
        const struct fsdpc_unit_use *use = &x->uses[u];
        if (!use->begun || use->ready) {
            continue;
        }
        FSDPC_TRY(fsdpc_device_capture(s->device, &capture));
        if (filling->capture == capture && (!last || filling->number > last->number)) {
            last = filling;
        }
    }
    return last ? await_values(s, last, capture) : FSDPC_OK;
}

static int
poison(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_exchange_poison(x, unit));
    x->slot_unit[fsdpc_unit_use(unit)->slot] = -1;
    return FSDPC_OK;
}

static int
release(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    bool unread = use->begun && !use->ready;
    int status = unread ? rest(x) : FSDPC_OK;
    use->begun = use->ready = false;
    FSDPC_TRY(status);
    if (fsdpc_unit_is_spare(unit)) {
        FSDPC_TRY(sync_before_remap(x, unit));
        return fsdpc_arena_restore(x->arena, fsdpc_unit_range(unit));
    }
    if (x->poison) {
        FSDPC_TRY(poison(x, unit));
    } else if (unread) {
        return FSDPC_OK; /* only the gather used the slot, and all gathers are on one stream */
    }
    struct fsdpc_reader *reader = &s->readers[use->slot];
    reader->pending = true;
    reader->stream = fsdpc_device_current(s->device);
    reader->capture = s->capture;
    return fsdpc_device_record(s->device, reader->done);
}

static int
leave(fsdpc_exchange *x)
{
    FSDPC_TRY(fsdpc_stream_join_capture(x->streams));
    return fsdpc_stream_offload_leave(x);
}

const struct fsdpc_exchange_i fsdpc_exchange_stream = {
    .kind = "stream",
    .any_order = false,
    .open = open_streams,
    .close = close_streams,
    .begin = begin,
    .rest = rest,
    .leave = leave,
    .gather = gather,
    .release = release,
    .reduce = fsdpc_stream_reduce,
    .summed = fsdpc_stream_summed,
    .make_room = fsdpc_stream_make_room,
    .end = fsdpc_stream_end,
    .settle = fsdpc_stream_offload_settle,
    .forget = fsdpc_stream_forget,
    .share = fsdpc_stream_share,
};
