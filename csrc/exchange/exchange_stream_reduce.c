/* The reducing half of the "stream" exchange (exchange_stream.c lists the waits).
 *
 * [Note: used bits] The bits that say which parameters got a gradient are all-reduced on the device after
 * the last reduction. A rank that left parameters unused copies the result to the host and waits for it. A
 * rank that used all its parameters knows that the result is all ones, and needs no host sync.
 */
#include <stdio.h>
#include <string.h>

#include "exchange/exchange_stream_impl.h"
#include "exchange/exchange_used.h"
#include "base/status.h"

/* Reduce-scatters `buffer` in place, on the reduce stream. */
static int
scatter(fsdpc_exchange *x, const fsdpc_unit *unit, char *buffer, const char *what)
{
    int count = 0;
    struct fsdpc_streams *s = x->streams;
    for (int i = 0; i < fsdpc_unit_layout(unit)->segment_count; i++) {
        const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[i];
        if (seg->trainable) {
            s->parts[count++] =
                (fsdpc_comm_part){buffer + seg->reduce_offset, seg->piece_numel, seg->reduce};
        }
    }
    fsdpc_stream_count(x, unit, s->reduce_comm, s->parts, count, false);
    return fsdpc_comm_reduce_scatter_parts(s->reduce_comm, s->parts, count, what);
}

static int
sum_on_stream(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_reduce_slot *slot)
{
    struct fsdpc_streams *s = x->streams;
    char what[FSDPC_STREAM_WHAT_BYTES];
    snprintf(what, sizeof what, "reduce of unit %s", fsdpc_unit_name(unit));
    FSDPC_TRY(fsdpc_device_wait(s->device, slot->packed));
    FSDPC_TRY(fsdpc_stream_turn(x, unit, true));
    if (fsdpc_stream_sends_codes(x, unit)) {
        FSDPC_TRY(fsdpc_stream_sum_coded(x, unit, slot->buffer, what));
    } else if (fsdpc_exchange_packs(x, unit)) {
        FSDPC_TRY(x->world > 1 ? scatter(x, unit, slot->buffer, what) : FSDPC_OK);
        FSDPC_TRY(fsdpc_stream_sum(x, unit, slot->buffer, what));
    } else {
        FSDPC_TRY(fsdpc_stream_sum_partial(x, unit, what));
    }
    FSDPC_TRY(fsdpc_unit_touch(unit, FSDPC_GRAD));
    return fsdpc_device_record(s->device, slot->summed);
}

static int
await_slot(const struct fsdpc_streams *s, struct fsdpc_reduce_slot *slot)
{
    if (slot->busy) {
        FSDPC_TRY(fsdpc_device_wait(s->device, slot->summed));
        slot->busy = false;
    }
    return FSDPC_OK;
}

/* Makes the caller's stream wait until the memory that it packs into is free. That memory is the next slot
 * or, with one rank, `partial`, which an earlier sum of the unit in this backward may still read. */
static int
await_room(fsdpc_exchange *x, const fsdpc_unit *unit, struct fsdpc_reduce_slot *slot)
{
    struct fsdpc_streams *s = x->streams;
    int last = (s->next_slot + x->reduce_slots - 1) % x->reduce_slots;
    if (fsdpc_exchange_packs(x, unit)) {
        return await_slot(s, slot);
    }
    return fsdpc_unit_use(unit)->posted > 1 ? fsdpc_device_wait(s->device, s->slots[last].summed)
                                            : FSDPC_OK;
}

static int
pack(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer)
{
    struct fsdpc_streams *s = x->streams;
    if (!fsdpc_exchange_packs(x, unit)) {
        return fsdpc_grad_direct(unit, grads, fsdpc_unit_used(unit));
    }
    memset(s->mask, 0, (size_t)fsdpc_unit_layout(unit)->param_count);
    FSDPC_TRY((x->world > 1 ? fsdpc_grad_pack : fsdpc_grad_widen)(unit, grads, buffer, s->mask));
    fsdpc_unit_add_used(unit, s->mask);
    return FSDPC_OK;
}

static int
send(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_reduce_slot *slot = &s->slots[s->next_slot];
    FSDPC_TRY(await_room(x, unit, slot));
    s->next_slot = (s->next_slot + 1) % x->reduce_slots;
    for (int i = 0; i < x->reduce_slots; i++) {
        s->slots[i].unit = s->slots[i].unit == unit ? NULL : s->slots[i].unit;
    }
    slot->busy = true;
    slot->unit = unit;
    FSDPC_TRY(pack(x, unit, grads, slot->buffer));
    FSDPC_TRY(fsdpc_device_record(s->device, slot->packed));
    fsdpc_exchange_note(x, FSDPC_TRACE_PACK, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    fsdpc_stream *caller = fsdpc_device_use(s->device, s->reduce);
    int status = sum_on_stream(x, unit, slot);
    fsdpc_device_use(s->device, caller);
    s->sent++;
    fsdpc_exchange_note(x, FSDPC_TRACE_REDUCE, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    return status;
}

/* True if one launch on the caller's stream does all work: one rank, no replicas, and no offloading. */
static bool
stays_here(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    return !fsdpc_unit_replicate(unit) && !fsdpc_exchange_packs(x, unit);
}

static int
keep(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    FSDPC_TRY(fsdpc_grad_direct(unit, grads, fsdpc_unit_used(unit)));
    fsdpc_exchange_note(x, FSDPC_TRACE_REDUCE, unit, fsdpc_unit_layout(unit)->grad_bytes);
    return FSDPC_OK;
}

int
fsdpc_stream_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    fsdpc_unit_use(unit)->consumed = 0;
    if (stays_here(x, unit)) {
        return keep(x, unit, grads);
    }
    return fsdpc_unit_use(unit)->posted++ > 0 ? fsdpc_grad_keep_local(unit, grads)
                                              : send(x, unit, grads);
}

/* --- sums before the end of backward ------------------------------------------------------------- */

int
fsdpc_stream_make_room(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    struct fsdpc_streams *s = x->streams;
    const bool packs = fsdpc_exchange_packs(x, unit) && !fsdpc_unit_is_hooked(unit) &&
                       fsdpc_unit_layout(unit)->trainable_count > 0;
    return packs ? await_slot(s, &s->slots[s->next_slot]) : FSDPC_OK;
}

static bool
caller_is_behind(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    for (int i = 0; i < x->reduce_slots; i++) {
        if (x->streams->slots[i].unit == unit) {
            return !x->streams->slots[i].busy;
        }
    }
    return false;
}

/* It is known only at the end which parameters other ranks used, so a unit with parameters that this rank has
 * not used counts as summed only at the end. An offloaded unit never counts as summed here: the CPU reads its
 * sum after fsdpc_exchange_settle. */
bool
fsdpc_stream_summed(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    bool summed = stays_here(x, unit);
    if (!summed && !fsdpc_unit_is_offloaded(unit)) {
        summed = use->posted == 1 && fsdpc_used_all(unit) && caller_is_behind(x, unit);
    }
    use->consumed = summed;
    return summed;
}

/* --- the end of backward ----------------------------------------------------------------------- */

/* True if this rank needs no other rank's used bits of the unit, for example if it used all parameters. */
static bool
needs_no_bits(const fsdpc_unit *unit)
{
    return fsdpc_unit_use(unit)->consumed || fsdpc_unit_withholds(unit) || fsdpc_used_all(unit);
}

static bool
used_all(const fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        if (!needs_no_bits(x->units[u])) {
            return false;
        }
    }
    return true;
}

static void
write_bits(const fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    fsdpc_used_write(x, s->used);
    for (size_t i = 0; i < fsdpc_used_count(x); i++) {
        s->bits[i] = s->used[i];
    }
}

static void
read_bits(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    for (size_t i = 0; i < fsdpc_used_count(x); i++) {
        s->used[i] = s->bits[i] > 0;
    }
    fsdpc_used_read(x, s->used);
}

static int
join_bits(fsdpc_exchange *x)
{
    static const char what[] = "used bits at the end of backward";
    if (x->world > 1) {
        FSDPC_TRY(fsdpc_comm_all_reduce(x->streams->reduce_comm, x->streams->device_bits,
                                        x->streams->bit_count, FSDPC_F32, FSDPC_MAX, what));
    }
    FSDPC_TRY(fsdpc_stream_join_replicas(x, what));
    return fsdpc_stream_turns_take(x, x->streams->device_bits + x->streams->bit_count -
                                          FSDPC_STREAM_TURN_FLOATS);
}

/* Shares the used bits of all ranks, on the reduce stream. See [Note: used bits]. */
static int
share_used(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    size_t bytes = (size_t)s->bit_count * sizeof(float);
    const int64_t tail = s->bit_count - FSDPC_STREAM_TURN_FLOATS;
    FSDPC_TRY(fsdpc_stream_turns_end(x));
    FSDPC_TRY(fsdpc_stream_turns_put(x, s->all + tail));
    if (used_all(x)) {
        FSDPC_TRY(fsdpc_device_cast(s->device, s->device_bits, FSDPC_F32, s->all, FSDPC_F32,
                                    s->bit_count, 1.0));
        return join_bits(x);
    }
    FSDPC_TRY(fsdpc_stream_refuse_capture(s, "a backward that leaves parameters without gradient"));
    write_bits(x);
    if (!s->turns.off) {
        memcpy(s->bits + tail, s->turns.digests->own, sizeof s->turns.digests->own);
    }
    FSDPC_TRY(fsdpc_device_copy_in(s->device, s->device_bits, s->bits, bytes));
    FSDPC_TRY(join_bits(x));
    FSDPC_TRY(fsdpc_device_copy_out(s->device, s->bits, s->device_bits, bytes));
    FSDPC_TRY(fsdpc_stream_sync(x, "used bits at the end of backward"));
    read_bits(x);
    return FSDPC_OK;
}

/* Makes the caller's stream wait for the last sum, and so for all: the reduce stream sums in order. */
static int
await_sums(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    int last = (s->next_slot + x->reduce_slots - 1) % x->reduce_slots;
    if (s->sent == 0) {
        return FSDPC_OK;
    }
    for (int i = 0; i < x->reduce_slots; i++) {
        s->slots[i].busy = false;
    }
    /* If all gradients are offloaded, the host sync in fsdpc_stream_offload_end is enough. */
    return s->all_offloaded ? FSDPC_OK : fsdpc_device_wait(s->device, s->slots[last].summed);
}

/* Sends a unit's local gradients. With several ranks, a unit that was reduced more than once is sent even if
 * this rank has no local gradients: ranks that ran the same modules must call the same collectives. */
static int
send_kept(fsdpc_exchange *x, fsdpc_unit *unit)
{
    if (fsdpc_unit_is_hooked(unit)) {
        return FSDPC_OK;
    }
    if (stays_here(x, unit)) {
        return fsdpc_unit_sends_local(unit) ? keep(x, unit, NULL) : FSDPC_OK;
    }
    return fsdpc_unit_use(unit)->posted > 1 ? send(x, unit, NULL) : FSDPC_OK;
}

int
fsdpc_stream_end(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    int status = FSDPC_OK;
    for (int u = 0; u < x->unit_count; u++) {
        fsdpc_unit *unit = x->units[u];
        FSDPC_TRY(send_kept(x, unit));
        fsdpc_unit_use(unit)->posted = 0;
    }
    if ((x->world > 1 || s->replicas) && s->bit_count > 0) {
        fsdpc_stream *caller = fsdpc_device_use(s->device, s->reduce);
        status = share_used(x);
        fsdpc_device_use(s->device, caller);
    }
    FSDPC_KEEP(await_sums(x));
    FSDPC_KEEP(fsdpc_stream_join_capture(s));
    s->sent = 0;
    for (int u = 0; u < x->unit_count; u++) {
        x->uses[u].consumed = 0;
    }
    FSDPC_TRY(status);
    FSDPC_TRY(fsdpc_stream_offload_end(x));
    return fsdpc_stream_check(x);
}

/* --- small things for all ranks ----------------------------------------------------------------- */

/* Gathers on the reduce stream, so that the communicator is used on one stream only and in one order. */
int
fsdpc_stream_share(fsdpc_exchange *x, void *buffer, size_t piece_bytes, const char *what)
{
    struct fsdpc_streams *s = x->streams;
    int status = FSDPC_OK;
    FSDPC_TRY(fsdpc_comm_check(s->reduce_comm));
    FSDPC_TRY(fsdpc_device_record(s->device, s->ready));
    fsdpc_stream *caller = fsdpc_device_use(s->device, s->reduce);
    FSDPC_GOTO(fsdpc_device_wait(s->device, s->ready), done);
    FSDPC_GOTO(fsdpc_comm_all_gather(s->reduce_comm, buffer, piece_bytes, what), done);
    FSDPC_GOTO(fsdpc_device_record(s->device, s->shared), done);
done:
    fsdpc_device_use(s->device, caller);
    FSDPC_TRY(status);
    return fsdpc_device_wait(s->device, s->shared);
}
