/* Reducing through memory that all ranks of a host share.
 *
 * Each rank packs a unit's gradients into one of its own reduce slots and posts the slot. When all ranks
 * have posted a unit, every rank sums its own slice of all posts, and then acknowledges the posts. Sums are
 * made in rank order and in the accumulate dtype, so that two runs agree to the bit. A slot whose post all
 * ranks have acknowledged is free again. A rank waits within a backward only when all its slots are in
 * flight. At the end of backward each rank sets "ended". The rank's gradients of units that it has not
 * posted by then count as absent.
 *
 *   rank 0  pack A | pack B        | pack C | ended
 *   rank 1     pack A    | pack B  |          ended      C: the sum has only rank 0's gradients
 *
 * A unit whose gradients become complete several times in one backward is posted twice at most: later
 * gradients are accumulated on this rank and posted at the end, after this rank has set "first" (all its
 * first posts are made). So a rank never waits within a backward for another rank to reduce the same
 * unit, which the other rank may do later, or never.
 *
 * If a rank needs a slot while all other ranks wait as well (ranks run units in different order), the
 * rank uses the unit's overflow slot: sparse memory, whose pages are freed afterwards.
 */
#include <string.h>

#include "exchange/exchange_shared_impl.h"
#include "base/mem.h"
#include "base/status.h"

static struct fsdpc_post_ctl *
post_of(fsdpc_exchange *x, int unit, int rank)
{
    struct fsdpc_shared *s = x->shared;
    return (struct fsdpc_post_ctl *)(s->posts + s->post_offset[unit] +
                                     s->post_stride[unit] * (size_t)rank);
}

static uint8_t *
post_used(struct fsdpc_post_ctl *post)
{
    return (uint8_t *)(post + 1);
}

static _Atomic uint32_t *
ack(fsdpc_exchange *x, int rank, int slot)
{
    return &x->shared->acks[rank * x->shared->reduce_total + slot];
}

static char *
slot_memory(fsdpc_exchange *x, int rank, int slot)
{
    struct fsdpc_shared *s = x->shared;
    if (slot < x->reduce_slots) {
        return s->base_map + s->base_stride * (size_t)rank + x->max_reduce_bytes * (size_t)slot;
    }
    return s->over_map + s->over_stride * (size_t)rank + s->over_at[slot - x->reduce_slots];
}

static uint64_t
round_tag(const fsdpc_exchange *x, uint64_t n)
{
    return (x->backwards + 1) << 8 | n;
}

/* --- summing --------------------------------------------------------------------------------- */

static bool
round_is_complete(fsdpc_exchange *x, const fsdpc_unit *unit, uint64_t round)
{
    for (int r = 0; r < x->world; r++) {
        const struct fsdpc_rank_ctl *ctl = &x->shared->ranks[r];
        if (atomic_load(&post_of(x, fsdpc_unit_use(unit)->id, r)->round) < round &&
            atomic_load(round == round_tag(x, 1) ? &ctl->first : &ctl->ended) <= x->backwards) {
            return false;
        }
    }
    return true;
}

static void
acknowledge(fsdpc_exchange *x, int rank, int slot)
{
    if (atomic_fetch_add(ack(x, rank, slot), 1) + 1 == (uint32_t)x->world) {
        fsdpc_shared_notify(x);
    }
}

/* Returns FSDPC_E_MISMATCH: another rank has posted a unit whose gradients this rank does not sum now. */
static int
differs_in_sync(fsdpc_exchange *x, const fsdpc_unit *unit, uint64_t round)
{
    int r = 0;
    while (atomic_load(&post_of(x, fsdpc_unit_use(unit)->id, r)->round) != round) {
        r++;
    }
    return fsdpc_error(FSDPC_E_MISMATCH,
                       "rank %d sums the gradients of unit %s in this backward, and rank %d keeps "
                       "its own: set_requires_gradient_sync and set_requires_all_reduce must be "
                       "called with equal values on all ranks",
                       r, fsdpc_unit_name(unit), x->rank);
}

/* Sums the posts of one complete round of a unit, and acknowledges them. */
static int
consume(fsdpc_exchange *x, fsdpc_unit *unit, uint64_t round)
{
    const void *sources[FSDPC_SHM_MAX_RANKS];
    bool own = false;
    if (fsdpc_unit_withholds(unit)) {
        return differs_in_sync(x, unit, round);
    }
    for (int r = 0; r < x->world; r++) {
        struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, r);
        bool present = atomic_load(&post->round) == round;
        sources[r] = present ? slot_memory(x, r, (int)post->slot) : NULL;
        own = own || (present && r == x->rank);
        if (present) {
            fsdpc_unit_add_used(unit, post_used(post));
        }
    }
    FSDPC_TRY(fsdpc_grad_sum(unit, sources, x->world));
    for (int r = 0; r < x->world; r++) {
        struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, r);
        if (atomic_load(&post->round) == round) { /* sources[r] is NULL for slots of 0 bytes too */
            acknowledge(x, r, (int)post->slot);
        }
    }
    fsdpc_unit_use(unit)->consumed++;
    fsdpc_exchange_note(x, own ? FSDPC_TRACE_REDUCE : FSDPC_TRACE_ABSENT, unit,
                        fsdpc_unit_layout(unit)->reduce_bytes);
    return FSDPC_OK;
}

static bool
anyone_posted(fsdpc_exchange *x, const fsdpc_unit *unit, uint64_t round)
{
    for (int r = 0; r < x->world; r++) {
        if (atomic_load(&post_of(x, fsdpc_unit_use(unit)->id, r)->round) == round) {
            return true;
        }
    }
    return false;
}

/* Sums all complete rounds. Units that this rank did not run are checked only after this rank has set
 * "first": their rounds cannot be complete earlier. */
static int
progress(fsdpc_exchange *x)
{
    bool absent_too = atomic_load(&x->shared->ranks[x->rank].first) > x->backwards;
    for (int u = 0; u < x->unit_count; u++) {
        fsdpc_unit *unit = x->units[u];
        const struct fsdpc_unit_use *use = &x->uses[u]; /* saves calls of fsdpc_unit_use */
        while (use->consumed < use->posted || absent_too) {
            uint64_t round = round_tag(x, use->consumed + 1);
            if (!anyone_posted(x, unit, round) || !round_is_complete(x, unit, round)) {
                break;
            }
            FSDPC_TRY(consume(x, unit, round));
        }
    }
    return FSDPC_OK;
}

/* --- posting --------------------------------------------------------------------------------- */

static bool
slot_is_free(fsdpc_exchange *x, int slot)
{
    return x->shared->slot_user[slot] < 0 ||
           atomic_load(ack(x, x->rank, slot)) == (uint32_t)x->world;
}

static bool
previous_post_is_done(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, x->rank);
    return atomic_load(&post->round) == 0 ||
           x->shared->slot_user[post->slot] != fsdpc_unit_use(unit)->id ||
           slot_is_free(x, (int)post->slot);
}

/* Returns the index of a free base slot, or -1. */
static int
free_base_slot(fsdpc_exchange *x)
{
    for (int k = 0; k < x->reduce_slots; k++) {
        int slot = (x->shared->next_base + k) % x->reduce_slots;
        if (slot_is_free(x, slot)) {
            x->shared->next_base = (slot + 1) % x->reduce_slots;
            return slot;
        }
    }
    return -1;
}

/* Fails if a rank has left in good order without ending this backward: the rank will never end it. */
static int
check_missing_left(fsdpc_exchange *x, const fsdpc_wait *what)
{
    for (int r = 0; r < x->world; r++) {
        if (fsdpc_shm_left(x->shm, r) && atomic_load(&x->shared->ranks[r].ended) <= x->backwards) {
            return fsdpc_shm_left_error(x->shm, r, what);
        }
    }
    return FSDPC_OK;
}

static int
acquire_slot(fsdpc_exchange *x, fsdpc_unit *unit, int *slot)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    fsdpc_shared_wait_begin(x, &wait, "reduce", unit);
    for (;;) {
        enum fsdpc_shm_way way = FSDPC_WAY_NONE;
        fsdpc_shared_wait_read(x, &wait);
        FSDPC_GOTO(progress(x), done);
        if (previous_post_is_done(x, unit)) {
            way = FSDPC_WAY_PRIVATE;
            *slot = free_base_slot(x);
            if (*slot >= 0) {
                fsdpc_shared_wait_was_worth(x, &wait);
                goto done;
            }
        }
        FSDPC_GOTO(fsdpc_shared_drop_prefetched(x), done);
        /* With WAY_NONE there is no fallback: all ranks must first acknowledge the unit's previous post. */
        FSDPC_GOTO(way == FSDPC_WAY_NONE ? check_missing_left(x, &wait.what) : FSDPC_OK, done);
        if (fsdpc_shared_must_act(x, &wait, way)) {
            *slot = x->reduce_slots + fsdpc_unit_use(unit)->id;
            x->shared->over_used[fsdpc_unit_use(unit)->id] = true;
            goto done;
        }
        FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, way), done);
    }
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

static int
post(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    int slot;
    FSDPC_TRY(acquire_slot(x, unit, &slot));
    struct fsdpc_post_ctl *post = post_of(x, fsdpc_unit_use(unit)->id, x->rank);
    FSDPC_TRY(fsdpc_grad_pack(unit, grads, slot_memory(x, x->rank, slot), post_used(post)));
    fsdpc_exchange_note(x, FSDPC_TRACE_PACK, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    x->shared->slot_user[slot] = fsdpc_unit_use(unit)->id;
    atomic_store(ack(x, x->rank, slot), 0);
    post->slot = (uint32_t)slot;
    fsdpc_unit_use(unit)->posted++;
    atomic_store(&post->round, round_tag(x, fsdpc_unit_use(unit)->posted));
    fsdpc_shared_notify(x);
    return progress(x);
}

int
fsdpc_shared_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    return fsdpc_unit_use(unit)->posted == 0 ? post(x, unit, grads)
                                             : fsdpc_grad_keep_local(unit, grads);
}

/* True if all ranks have posted the unit and its sum is made: no rank needs its values in this backward. */
bool
fsdpc_shared_summed(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    for (int r = 0; r < x->world; r++) {
        if (atomic_load(&post_of(x, use->id, r)->round) != round_tag(x, 1)) {
            return false;
        }
    }
    return use->posted == 1 && use->consumed == 1;
}

/* --- the end of a backward ------------------------------------------------------------------- */

static bool
all_ended(fsdpc_exchange *x)
{
    for (int r = 0; r < x->world; r++) {
        if (atomic_load(&x->shared->ranks[r].ended) <= x->backwards) {
            return false;
        }
    }
    return true;
}

static void
forget_rounds(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        x->uses[u].posted = x->uses[u].consumed = 0;
    }
}

/* Gives the memory of an overflow slot back to the kernel, if all ranks have acknowledged the slot's post. */
static int
discard_overflow(fsdpc_exchange *x)
{
    struct fsdpc_shared *s = x->shared;
    for (int u = 0; u < x->unit_count; u++) {
        int slot = x->reduce_slots + u;
        if (!s->over_used[u] || !slot_is_free(x, slot)) {
            continue;
        }
        s->over_used[u] = false;
        uint64_t at = s->over_offset + s->over_stride * (uint64_t)x->rank + s->over_at[u];
        size_t bytes =
            fsdpc_round_up(fsdpc_unit_layout(x->units[u])->reduce_bytes, fsdpc_shm_page_bytes());
        if (bytes > 0) { /* 0 if the unit's parameters have no elements */
            FSDPC_TRY(fsdpc_shm_discard(x->shm, at, bytes));
        }
    }
    return FSDPC_OK;
}

/* Posts the local gradients of all units that this rank has posted `times` times in this backward. */
static int
post_what_waits(fsdpc_exchange *x, uint64_t times)
{
    for (int u = 0; u < x->unit_count; u++) {
        fsdpc_unit *unit = x->units[u];
        if (fsdpc_unit_sends_local(unit) && fsdpc_unit_use(unit)->posted == times) {
            FSDPC_TRY(post(x, unit, NULL));
        }
    }
    return FSDPC_OK;
}

/* Makes a timeout error name the ranks that have not ended their backward. */
static int
name_missing(fsdpc_exchange *x, const fsdpc_wait *what, int status)
{
    int missing[FSDPC_SHM_MAX_RANKS], count = 0;
    for (int r = 0; r < x->world; r++) {
        if (atomic_load(&x->shared->ranks[r].ended) <= x->backwards) {
            missing[count++] = r;
        }
    }
    return status == FSDPC_E_TIMEOUT ? fsdpc_shm_timeout_error(x->shm, what, missing, count)
                                     : status;
}

int
fsdpc_shared_end(fsdpc_exchange *x)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    FSDPC_TRY(post_what_waits(x, 0));
    atomic_store(&x->shared->ranks[x->rank].first, x->backwards + 1);
    fsdpc_shared_notify(x);
    FSDPC_TRY(post_what_waits(x, 1));
    atomic_store(&x->shared->ranks[x->rank].ended, x->backwards + 1);
    fsdpc_shared_notify(x);
    fsdpc_shared_wait_begin(x, &wait, "end of backward", NULL);
    for (;;) {
        fsdpc_shared_wait_read(x, &wait);
        bool all_have_ended = all_ended(x);
        FSDPC_GOTO(progress(x), done);
        if (all_have_ended) {
            break;
        }
        FSDPC_GOTO(check_missing_left(x, &wait.what), done);
        FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, FSDPC_WAY_NONE), done);
    }
    forget_rounds(x);
    FSDPC_GOTO(discard_overflow(x), done);
done:
    fsdpc_shared_wait_end(x, &wait, NULL);
    return name_missing(x, &wait.what, status);
}

/* --- set-up ---------------------------------------------------------------------------------- */

static int
map_reduce_memory(fsdpc_exchange *x)
{
    struct fsdpc_shared *s = x->shared;
    void *map;
    s->base_stride = x->max_reduce_bytes * (size_t)x->reduce_slots;
    s->base_bytes = s->base_stride * (size_t)x->world;
    s->over_stride = x->sum_reduce_bytes;
    s->over_bytes = s->over_stride * (size_t)x->world;
    if (s->base_bytes == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_shm_alloc(x->shm, s->base_bytes, true, &s->base_offset));
    FSDPC_TRY(fsdpc_shm_map(x->shm, s->base_offset, s->base_bytes, NULL, &map));
    s->base_map = map;
    FSDPC_TRY(fsdpc_shm_alloc(x->shm, s->over_bytes, false, &s->over_offset));
    FSDPC_TRY(fsdpc_shm_map(x->shm, s->over_offset, s->over_bytes, NULL, &map));
    s->over_map = map;
    return FSDPC_OK;
}

int
fsdpc_shared_reduce_open(fsdpc_exchange *x)
{
    struct fsdpc_shared *s = x->shared;
    size_t units = (size_t)x->unit_count;
    s->over_at = fsdpc_mem_calloc(units, sizeof *s->over_at);
    s->over_used = fsdpc_mem_calloc(units, sizeof *s->over_used);
    s->slot_user = fsdpc_mem_calloc((size_t)s->reduce_total, sizeof *s->slot_user);
    if (!s->over_at || !s->over_used || !s->slot_user) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    for (int i = 0; i < s->reduce_total; i++) {
        s->slot_user[i] = -1;
    }
    size_t at = 0;
    for (int u = 0; u < x->unit_count; u++) {
        s->over_at[u] = at;
        at += fsdpc_round_up(fsdpc_unit_layout(x->units[u])->reduce_bytes, fsdpc_shm_page_bytes());
    }
    return map_reduce_memory(x);
}

void
fsdpc_shared_reduce_close(fsdpc_exchange *x, bool last)
{
    struct fsdpc_shared *s = x->shared;
    if (last && s->over_map) {
        (void)fsdpc_shm_discard(x->shm, s->base_offset, s->base_bytes);
        (void)fsdpc_shm_discard(x->shm, s->over_offset, s->over_bytes);
    }
    if (s->base_map) {
        fsdpc_shm_unmap(s->base_map, s->base_bytes);
    }
    if (s->over_map) {
        fsdpc_shm_unmap(s->over_map, s->over_bytes);
    }
    fsdpc_mem_free(s->over_at);
    fsdpc_mem_free(s->over_used);
    fsdpc_mem_free(s->slot_user);
}
