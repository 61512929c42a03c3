/* Gathering through slots that all ranks of a host share.
 *
 * Each slot has a small record in the segment: which unit it holds, for which tag, who holds it,
 * and how many chunks of each piece have been claimed and finished. A gather
 *   1. takes hold of the slot: joins if it shows this unit at this tag, claims it if nobody holds
 *      it, else waits (or, if everybody it waits for is itself waiting, uses private memory),
 *   2. casts its own piece chunk by chunk, then the chunks of other pieces that nobody has claimed
 *      and whose owner's masters are final for this tag,
 *   3. waits for chunks that others are casting.
 * So a rank depends on another one only for work in progress and for the owner having begun the
 * same pass; the order in which ranks ask for units does not matter. A release drops the hold; the
 * values stay and can be joined until someone needs the slot.
 *
 * [Note: tags] A rank publishes its tag when it begins a root forward: its optimizer is done then.
 * If the owner of a piece is itself stuck waiting (ranks run different numbers of forwards), its
 * masters cannot change before this rank has come along, so an older tag of the same count of
 * backwards is as good.
 */
#include <sched.h>
#include <string.h>

#include "exchange_impl.h"
#include "mem.h"
#include "status.h"

enum { CHUNK_BYTES = 1 << 20, LOCK_SPINS = 200 };

static const int64_t slice_ns = 20000000;

static void
relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* --- waiting --------------------------------------------------------------------------------- */

void
fsdpc_shared_notify(fsdpc_exchange *x)
{
    struct fsdpc_shared *s = x->shared;
    atomic_fetch_add(s->turn, 1);
    if (atomic_load(s->sleepers) > 0) {
        fsdpc_shm_wake(s->turn);
    }
}

void
fsdpc_shared_wait_begin(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const char *op,
                        const fsdpc_unit *unit)
{
    (void)x;
    wait->what = (fsdpc_wait){.op = op, .unit = unit ? unit->name : ""};
    wait->waiting = false;
    wait->start_ns = wait->deadline_ns = 0;
}

static void
start_waiting(fsdpc_exchange *x, struct fsdpc_shared_wait *wait)
{
    wait->waiting = true;
    wait->start_ns = fsdpc_shm_now_ns();
    wait->deadline_ns = fsdpc_shm_deadline(x->shm);
}

/* The deadline has passed: the ranks that are not waiting themselves are the late ones. */
static int
name_late_ranks(fsdpc_exchange *x, const fsdpc_wait *what)
{
    int late[FSDPC_SHM_MAX_RANKS], count = 0;
    for (int pass = 0; pass < 2 && count == 0; pass++) {
        for (int r = 0; r < x->world; r++) {
            if (r != x->rank && (pass == 1 || !atomic_load(&x->shared->ranks[r].waiting))) {
                late[count++] = r;
            }
        }
    }
    return fsdpc_shm_timeout_error(x->shm, what, late, count);
}

int
fsdpc_shared_wait_step(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, uint32_t seen)
{
    if (!wait->waiting) {
        start_waiting(x, wait);
    }
    struct fsdpc_rank_ctl *own = &x->shared->ranks[x->rank];
    atomic_store(&own->seen, seen);
    atomic_store(&own->waiting, 1);
    int64_t now = fsdpc_shm_now_ns();
    int64_t slice = now + slice_ns < wait->deadline_ns ? now + slice_ns : wait->deadline_ns;
    atomic_fetch_add(x->shared->sleepers, 1);
    int status = fsdpc_shm_wait_word(x->shm, x->shared->turn, seen, slice, &wait->what);
    atomic_fetch_sub(x->shared->sleepers, 1);
    if (status != FSDPC_E_TIMEOUT) {
        return status;
    }
    return fsdpc_shm_now_ns() < wait->deadline_ns ? FSDPC_OK : name_late_ranks(x, &wait->what);
}

void
fsdpc_shared_wait_end(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const fsdpc_unit *unit)
{
    if (wait->waiting) {
        wait->waiting = false;
        atomic_store(&x->shared->ranks[x->rank].waiting, 0);
        fsdpc_exchange_note(x, FSDPC_TRACE_WAIT, unit,
                            (uint64_t)(fsdpc_shm_now_ns() - wait->start_ns));
    }
}

bool
fsdpc_shared_stuck(const fsdpc_exchange *x, uint32_t seen)
{
    for (int r = 0; r < x->world; r++) {
        const struct fsdpc_rank_ctl *other = &x->shared->ranks[r];
        bool waits = atomic_load(&other->waiting) && atomic_load(&other->seen) == seen;
        if (r != x->rank && !waits && !fsdpc_shm_awaits_this(x->shm, r)) {
            return false;
        }
    }
    return atomic_load(x->shared->turn) == seen;
}

/* --- the slot's record ----------------------------------------------------------------------- */

static struct fsdpc_slot_ctl *
slot_ctl(const fsdpc_exchange *x, int slot)
{
    return (struct fsdpc_slot_ctl *)(x->shared->slots + x->shared->slot_stride * (size_t)slot);
}

static _Atomic uint32_t *
slot_next(struct fsdpc_slot_ctl *slot)
{
    return (_Atomic uint32_t *)(slot + 1);
}

static uint8_t *
slot_held(const fsdpc_exchange *x, struct fsdpc_slot_ctl *slot)
{
    return (uint8_t *)(slot_next(slot) + x->world);
}

static size_t
slot_stride(int world)
{
    return fsdpc_round_up(sizeof(struct fsdpc_slot_ctl) + (size_t)world * 5, 64);
}

/* Critical sections are a few stores long; a rank that dies or stops inside one is found by the
 * checks here. */
static int
lock_slot(fsdpc_exchange *x, struct fsdpc_slot_ctl *slot, const fsdpc_wait *what)
{
    int64_t deadline = 0;
    for (uint32_t tries = 1;; tries++) {
        uint32_t free_value = 0;
        if (atomic_compare_exchange_weak(&slot->lock, &free_value, 1)) {
            return FSDPC_OK;
        }
        if (tries % LOCK_SPINS != 0) {
            relax();
            continue;
        }
        sched_yield();
        FSDPC_TRY(fsdpc_shm_check(x->shm, what));
        deadline = deadline ? deadline : fsdpc_shm_deadline(x->shm);
        if (fsdpc_shm_now_ns() > deadline) {
            return name_late_ranks(x, what);
        }
    }
}

static void
unlock_slot(struct fsdpc_slot_ctl *slot)
{
    atomic_store(&slot->lock, 0);
}

/* --- chunks ---------------------------------------------------------------------------------- */

static int64_t
chunk_numel(const fsdpc_segment *seg)
{
    return CHUNK_BYTES / (int64_t)fsdpc_dtype_bytes(seg->compute);
}

static uint32_t
chunks_of_segment(const fsdpc_segment *seg)
{
    int64_t each = chunk_numel(seg);
    return (uint32_t)((seg->piece_numel + each - 1) / each);
}

/* Per piece. */
static uint32_t
chunks_of_unit(const fsdpc_unit *unit)
{
    uint32_t total = 0;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        total += chunks_of_segment(&unit->layout->segments[s]);
    }
    return total;
}

static int
fill_chunk(fsdpc_exchange *x, fsdpc_unit *unit, int r, uint32_t chunk)
{
    int s = 0;
    while (chunk >= chunks_of_segment(&unit->layout->segments[s])) {
        chunk -= chunks_of_segment(&unit->layout->segments[s++]);
    }
    const fsdpc_segment *seg = &unit->layout->segments[s];
    int64_t begin = (int64_t)chunk * chunk_numel(seg);
    int64_t left = seg->piece_numel - begin;
    return fsdpc_exchange_fill(x, unit, s, r, begin,
                               left < chunk_numel(seg) ? left : chunk_numel(seg));
}

/* Casts what nobody has claimed of rank r's piece. */
static int
fill_piece(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, int r, uint32_t chunks)
{
    _Atomic uint32_t *next = &slot_next(slot)[r];
    while (atomic_load(next) < chunks) {
        uint32_t chunk = atomic_fetch_add(next, 1);
        if (chunk >= chunks) {
            break;
        }
        FSDPC_TRY(fill_chunk(x, unit, r, chunk));
        if (atomic_fetch_add(&slot->done, 1) + 1 == slot->total) {
            fsdpc_shared_notify(x);
        }
    }
    return FSDPC_OK;
}

/* See [Note: tags]. */
static bool
masters_final(fsdpc_exchange *x, int r, bool stuck)
{
    uint64_t ready = atomic_load(&x->shared->ranks[r].ready);
    return ready >= x->tag || (stuck && ready >> FSDPC_TAG_BITS >= x->tag >> FSDPC_TAG_BITS);
}

static bool
all_final(fsdpc_exchange *x, bool stuck)
{
    for (int r = 0; r < x->world; r++) {
        if (r != x->rank && !masters_final(x, r, stuck)) {
            return false;
        }
    }
    return true;
}

/* --- gather ---------------------------------------------------------------------------------- */

enum hold { JOINED, CLAIMED, BUSY };

static enum hold
hold_locked(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, uint32_t chunks,
            bool may_claim)
{
    bool same = slot->unit == unit->id && slot->tag == x->tag;
    if (!same && (slot->holders > 0 || !may_claim)) {
        return BUSY;
    }
    if (!same) {
        slot->unit = unit->id;
        slot->tag = x->tag;
        slot->total = chunks * (uint32_t)x->world;
        atomic_store(&slot->done, 0);
        for (int r = 0; r < x->world; r++) {
            atomic_store(&slot_next(slot)[r], 0);
        }
    }
    slot->holders++;
    slot_held(x, slot)[x->rank] = 1;
    return same ? JOINED : CLAIMED;
}

static int release(fsdpc_exchange *x, fsdpc_unit *unit);

int
fsdpc_shared_drop_prefetched(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        if (x->units[u]->begun && x->units[u]->refs == 0) {
            FSDPC_TRY(release(x, x->units[u]));
        }
    }
    return FSDPC_OK;
}

/* *busy: the slot was not to be had (wait false), or only by private memory (wait true): waiting for
 * it cannot end by itself, as this rank holds it for another unit, or all others wait too.
 *
 * A slot is not claimed before every rank has begun this pass, unless all wait: a rank that is ahead
 * (nothing holds the ranks together inside no_sync) would hold it without being able to fill it,
 * while those behind need it for the pass before. */
static int
take_hold(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, bool may_wait,
          bool *busy)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    fsdpc_shared_wait_begin(x, &wait, "gather", unit);
    uint32_t chunks = chunks_of_unit(unit);
    *busy = false;
    if (may_wait && slot_held(x, slot)[x->rank]) {
        /* Perhaps only for a unit that was expected to come next. */
        FSDPC_TRY(fsdpc_shared_drop_prefetched(x));
    }
    for (;;) {
        uint32_t seen = atomic_load(x->shared->turn);
        bool final = all_final(x, false);
        bool stuck = !final && fsdpc_shared_stuck(x, seen);
        final = final || all_final(x, stuck);
        FSDPC_GOTO(lock_slot(x, slot, &wait.what), done);
        enum hold hold = hold_locked(x, unit, slot, chunks, final);
        unlock_slot(slot);
        if (hold != BUSY) {
            goto done;
        }
        if (!may_wait || slot_held(x, slot)[x->rank] || (final && fsdpc_shared_stuck(x, seen))) {
            *busy = true;
            goto done;
        }
        FSDPC_GOTO(fsdpc_shared_drop_prefetched(x), done);
        FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, seen), done);
    }
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

/* Fills what can be filled; with `all` other ranks' pieces too, until everything is in place. */
static int
complete(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, bool all)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    uint32_t chunks = chunks_of_unit(unit);
    fsdpc_shared_wait_begin(x, &wait, "gather", unit);
    FSDPC_GOTO(fill_piece(x, unit, slot, x->rank, chunks), done);
    while (all && atomic_load(&slot->done) < slot->total) {
        uint32_t seen = atomic_load(x->shared->turn);
        bool stuck = fsdpc_shared_stuck(x, seen);
        for (int k = 1; k < x->world; k++) {
            int r = (x->rank + k) % x->world;
            if (masters_final(x, r, stuck)) {
                FSDPC_GOTO(fill_piece(x, unit, slot, r, chunks), done);
            }
        }
        if (atomic_load(&slot->done) < slot->total) {
            FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, seen), done);
        }
    }
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

/* Private memory behind the range, filled by this rank alone. */
static int
gather_spare(fsdpc_exchange *x, fsdpc_unit *unit)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    FSDPC_TRY(fsdpc_arena_spare(x->arena, &unit->range));
    fsdpc_exchange_note(x, FSDPC_TRACE_SPARE, unit, unit->range.bytes);
    fsdpc_shared_wait_begin(x, &wait, "gather", unit);
    uint32_t chunks = chunks_of_unit(unit);
    for (int k = 0; k < x->world; k++) {
        int r = (x->rank + k) % x->world;
        while (r != x->rank) {
            uint32_t seen = atomic_load(x->shared->turn);
            if (masters_final(x, r, fsdpc_shared_stuck(x, seen))) {
                break;
            }
            FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, seen), done);
        }
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            FSDPC_GOTO(fill_chunk(x, unit, r, chunk), done);
        }
    }
    unit->begun = unit->ready = true;
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

static int
gather(fsdpc_exchange *x, fsdpc_unit *unit, bool may_wait)
{
    struct fsdpc_slot_ctl *slot = slot_ctl(x, unit->slot);
    fsdpc_wait what = {.op = "gather", .unit = unit->name};
    FSDPC_TRY(fsdpc_shm_check(x->shm, &what));
    if (!unit->begun) {
        bool busy;
        FSDPC_TRY(take_hold(x, unit, slot, may_wait, &busy));
        if (busy) {
            return may_wait ? gather_spare(x, unit) : FSDPC_OK;
        }
        unit->begun = true;
    }
    if (!unit->ready && !unit->range.spare) {
        FSDPC_TRY(complete(x, unit, slot, may_wait));
        unit->ready = may_wait;
    }
    return FSDPC_OK;
}

static void
poison_slot(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        fsdpc_device_poison(unit->device, (char *)unit->range.address + seg->full_offset,
                            seg->compute, seg->piece_numel * x->world);
    }
    slot->unit = -1;
}

static int
release(fsdpc_exchange *x, fsdpc_unit *unit)
{
    unit->begun = unit->ready = false;
    if (unit->range.spare) {
        return fsdpc_arena_restore(x->arena, &unit->range);
    }
    struct fsdpc_slot_ctl *slot = slot_ctl(x, unit->slot);
    fsdpc_wait what = {.op = "release", .unit = unit->name};
    FSDPC_TRY(lock_slot(x, slot, &what));
    slot_held(x, slot)[x->rank] = 0;
    bool last = --slot->holders == 0;
    if (last && x->poison) {
        poison_slot(x, unit, slot);
    }
    unlock_slot(slot);
    if (last) {
        fsdpc_shared_notify(x);
    }
    return FSDPC_OK;
}

static int
begin(fsdpc_exchange *x, uint64_t tag)
{
    fsdpc_wait what = {.op = "begin of a forward", .unit = ""};
    FSDPC_TRY(fsdpc_shm_check(x->shm, &what));
    atomic_store(&x->shared->ranks[x->rank].ready, tag);
    fsdpc_shared_notify(x);
    return FSDPC_OK;
}

static bool
all_left(const fsdpc_exchange *x)
{
    for (int r = 0; r < x->world; r++) {
        const struct fsdpc_rank_ctl *other = &x->shared->ranks[r];
        if (atomic_load(&other->left) < x->tag && atomic_load(&other->ready) <= x->tag) {
            return false;
        }
    }
    return true;
}

/* A late rank may still read this rank's masters for the forward that has ended here; they must not
 * change before it has. In a forward that a backward follows the end of that backward sees to it. */
static int
leave(fsdpc_exchange *x)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    atomic_store(&x->shared->ranks[x->rank].left, x->tag);
    fsdpc_shared_notify(x);
    fsdpc_shared_wait_begin(x, &wait, "end of forward", NULL);
    for (;;) {
        uint32_t seen = atomic_load(x->shared->turn);
        if (all_left(x) || fsdpc_shared_stuck(x, seen)) {
            break;
        }
        FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, seen), done);
    }
done:
    fsdpc_shared_wait_end(x, &wait, NULL);
    return status;
}

/* --- set-up ---------------------------------------------------------------------------------- */

static size_t
plan_ctl(fsdpc_exchange *x, int slot_count, size_t *slots_at, size_t *posts_at, size_t *acks_at)
{
    struct fsdpc_shared *s = x->shared;
    size_t at = 64 + sizeof(struct fsdpc_rank_ctl) * (size_t)x->world;
    *slots_at = at;
    s->slot_stride = slot_stride(x->world);
    at += s->slot_stride * (size_t)slot_count;
    *posts_at = at;
    for (int u = 0; u < x->unit_count; u++) {
        s->post_offset[u] = at - *posts_at;
        s->post_stride[u] = fsdpc_round_up(
            sizeof(struct fsdpc_post_ctl) + (size_t)x->units[u]->layout->param_count, 64);
        at += s->post_stride[u] * (size_t)x->world;
    }
    *acks_at = at;
    s->reduce_total = x->reduce_slots + x->unit_count;
    return at + sizeof(uint32_t) * (size_t)x->world * (size_t)s->reduce_total;
}

static int
open_shared(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
    struct fsdpc_shared *s = x->shared = fsdpc_mem_calloc(1, sizeof *s);
    if (!s) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    s->post_offset = fsdpc_mem_calloc((size_t)x->unit_count, sizeof *s->post_offset);
    s->post_stride = fsdpc_mem_calloc((size_t)x->unit_count, sizeof *s->post_stride);
    if (!s->post_offset || !s->post_stride) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    size_t slots_at, posts_at, acks_at;
    s->ctl_bytes = fsdpc_round_up(plan_ctl(x, plan->slot_count, &slots_at, &posts_at, &acks_at),
                                  fsdpc_shm_page_bytes());
    void *map;
    FSDPC_TRY(fsdpc_shm_alloc(x->shm, s->ctl_bytes, true, &s->ctl_offset));
    FSDPC_TRY(fsdpc_shm_map(x->shm, s->ctl_offset, s->ctl_bytes, NULL, &map));
    s->ctl = map;
    s->turn = (_Atomic uint32_t *)s->ctl;
    s->sleepers = s->turn + 1;
    s->closed = s->turn + 2;
    s->ranks = (struct fsdpc_rank_ctl *)(s->ctl + 64);
    s->slots = s->ctl + slots_at;
    s->posts = s->ctl + posts_at;
    s->acks = (_Atomic uint32_t *)(s->ctl + acks_at);
    FSDPC_TRY(fsdpc_shared_reduce_open(x));
    if (x->rank == 0) {
        for (int i = 0; i < plan->slot_count; i++) {
            slot_ctl(x, i)->unit = -1;
        }
    }
    fsdpc_wait what = {.op = "set-up of the gather slots", .unit = ""};
    return fsdpc_shm_barrier(x->shm, &what);
}

static void
close_shared(fsdpc_exchange *x)
{
    struct fsdpc_shared *s = x->shared;
    if (!s) {
        return;
    }
    bool last = s->ctl && atomic_fetch_add(s->closed, 1) + 1 == (uint32_t)x->world;
    fsdpc_shared_reduce_close(x, last);
    if (last) {
        fsdpc_arena_discard(x->arena);
        (void)fsdpc_shm_discard(x->shm, s->ctl_offset, s->ctl_bytes);
    }
    if (s->ctl) {
        fsdpc_shm_unmap(s->ctl, s->ctl_bytes);
    }
    fsdpc_mem_free(s->post_offset);
    fsdpc_mem_free(s->post_stride);
    fsdpc_mem_free(s);
    x->shared = NULL;
}

const struct fsdpc_exchange_i fsdpc_exchange_shared = {
    .kind = "shared",
    .any_order = true,
    .open = open_shared,
    .close = close_shared,
    .begin = begin,
    .leave = leave,
    .gather = gather,
    .release = release,
    .reduce = fsdpc_shared_reduce,
    .end = fsdpc_shared_end,
};
