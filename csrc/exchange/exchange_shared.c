/* The "shared" exchange of the ranks of one host, which map the same slots: set-up, and the beginning and the
 * end of a forward. Gathering is in exchange_shared_gather.c, reducing is in exchange_shared_reduce.c.
 */
#include "exchange/exchange_shared_impl.h"
#include "base/mem.h"
#include "base/status.h"

/* --- a pass ---------------------------------------------------------------------------------- */

static int
begin(fsdpc_exchange *x, uint64_t tag)
{
    fsdpc_wait what = {.op = "begin of a forward", .unit = ""};
    FSDPC_TRY(fsdpc_shm_check(x->shm, &what));
    atomic_store(&x->shared->ranks[x->rank].thaws, 0);
    atomic_store(&x->shared->ranks[x->rank].ready, tag);
    fsdpc_shared_notify(x);
    return FSDPC_OK;
}

static bool
all_left(const fsdpc_exchange *x)
{
    for (int r = 0; r < x->world; r++) {
        const struct fsdpc_rank_ctl *other = &x->shared->ranks[r];
        if (atomic_load(&other->left) < x->tag && atomic_load(&other->ready) <= x->tag &&
            !fsdpc_shm_left(x->shm, r)) {
            return false;
        }
    }
    return true;
}

/* Waits until all ranks have ended this forward, because a late rank may still read this rank's master shard
 * for this forward, and the caller may change the shard next. If a backward follows, the end of the backward
 * waits for all ranks instead. */
static int
leave(fsdpc_exchange *x)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    FSDPC_TRY(fsdpc_shared_check_end(x));
    atomic_store(&x->shared->ranks[x->rank].left, x->tag);
    fsdpc_shared_notify(x);
    fsdpc_shared_wait_begin(x, &wait, "end of forward", NULL);
    for (;;) {
        fsdpc_shared_wait_read(x, &wait);
        if (all_left(x)) {
            break;
        }
        if (fsdpc_shared_must_act(x, &wait, FSDPC_WAY_LEAVE)) {
            atomic_store(&x->shared->ranks[x->rank].early, x->tag);
            break;
        }
        FSDPC_GOTO(fsdpc_shared_wait_step(x, &wait, FSDPC_WAY_LEAVE), done);
    }
done:
    fsdpc_shared_wait_end(x, &wait, NULL);
    return status;
}

/* --- set-up ---------------------------------------------------------------------------------- */

static size_t
plan_ctl(fsdpc_exchange *x, int slot_count, size_t *slots_at, size_t *posts_at, size_t *acks_at,
         size_t *samples_at)
{
    struct fsdpc_shared *s = x->shared;
    size_t at = 64 + sizeof(struct fsdpc_rank_ctl) * (size_t)x->world;
    *slots_at = at;
    s->slot_count = slot_count;
    s->slot_stride = fsdpc_shared_slot_stride(x->world);
    at += s->slot_stride * (size_t)slot_count;
    *posts_at = at;
    for (int u = 0; u < x->unit_count; u++) {
        s->post_offset[u] = at - *posts_at;
        s->post_stride[u] = fsdpc_round_up(sizeof(struct fsdpc_post_ctl) +
                                               (size_t)fsdpc_unit_layout(x->units[u])->param_count,
                                           64);
        at += s->post_stride[u] * (size_t)x->world;
    }
    *acks_at = at;
    s->reduce_total = x->reduce_slots + x->unit_count;
    at += sizeof(uint32_t) * (size_t)x->world * (size_t)s->reduce_total;
    *samples_at = fsdpc_round_up(at, 64);
    return *samples_at + fsdpc_shared_samples_bytes(x);
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
    s->seen = fsdpc_mem_calloc(1, fsdpc_shared_samples_bytes(x));
    s->seen_at = fsdpc_mem_calloc((size_t)x->world, sizeof *s->seen_at);
    if (!s->post_offset || !s->post_stride || !s->seen || !s->seen_at) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    size_t slots_at, posts_at, acks_at, samples_at;
    size_t bytes = plan_ctl(x, plan->slot_count, &slots_at, &posts_at, &acks_at, &samples_at);
    s->ctl_bytes = fsdpc_round_up(bytes, fsdpc_shm_page_bytes());
    void *map;
    FSDPC_TRY(fsdpc_shm_alloc(x->shm, s->ctl_bytes, true, &s->ctl_offset));
    FSDPC_TRY(fsdpc_shm_map(x->shm, s->ctl_offset, s->ctl_bytes, NULL, &map));
    s->ctl = map;
    s->closed = (_Atomic uint32_t *)s->ctl;
    s->ranks = (struct fsdpc_rank_ctl *)(s->ctl + 64);
    s->slots = s->ctl + slots_at;
    s->posts = s->ctl + posts_at;
    s->acks = (_Atomic uint32_t *)(s->ctl + acks_at);
    s->samples = (_Atomic uint64_t *)(s->ctl + samples_at);
    fsdpc_shared_wait_open(x);
    FSDPC_TRY(fsdpc_shared_reduce_open(x));
    if (x->rank == 0) {
        for (int i = 0; i < plan->slot_count; i++) {
            fsdpc_shared_slot_clear(x, i);
        }
    }
    for (int u = 0; x->poison && u < x->unit_count; u++) {
        if (!fsdpc_unit_is_direct(x->units[u])) {
            FSDPC_TRY(fsdpc_exchange_veil(x, x->units[u]));
        }
    }
    return fsdpc_comm_barrier(x->comm, "set-up of the gather slots");
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
    fsdpc_mem_free(s->seen);
    fsdpc_mem_free(s->seen_at);
    fsdpc_mem_free(s);
    x->shared = NULL;
}

const struct fsdpc_exchange_i fsdpc_exchange_shared = {
    .kind = "shared",
    .any_order = true,
    .open = open_shared,
    .close = close_shared,
    .compare = fsdpc_shared_compare,
    .begin = begin,
    .leave = leave,
    .gather = fsdpc_shared_gather,
    .release = fsdpc_shared_release,
    .reduce = fsdpc_shared_reduce,
    .summed = fsdpc_shared_summed,
    .end = fsdpc_shared_end,
    .announce = fsdpc_shared_announce,
};
