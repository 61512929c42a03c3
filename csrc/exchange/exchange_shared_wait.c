/* Waits of this rank for changes that other ranks of its host make. Each wait has a deadline. If no rank can
 * make the change, this rank uses a fallback ([Note: stuck] in shm_stuck.c).
 */
#include "exchange/exchange_shared_impl.h"
#include "base/board.h"
#include "base/status.h"

/* The longest sleep before a wait examines its condition again. */
static const int64_t slice_ns = 20000000;

/* [Note: patience] While this rank waits for a slot, the rank that has the slot may wait for this rank
 * outside of fsdpc: in a torch collective inside a forward, or in another group. Private memory is always
 * correct, so this rank uses private memory when it has waited for the time `patience` while the other ranks
 * were idle, and after ten times that time in any case. The deadlock repeats in each step, so a wait that
 * ends with private memory shortens `patience`. A wait that the other ranks ended lengthens `patience`. */
int64_t fsdpc_shared_patience_ns = 200000000;
static const int64_t patience_least_ns = 1000000;
enum { SOONER = 4, IN_ANY_CASE = 10 };

void
fsdpc_shared_notify(fsdpc_exchange *x)
{
    fsdpc_shm_notify(x->shm);
}

/* Returns the sum of the processor time of all other ranks. */
static int64_t
used_by_others(const fsdpc_exchange *x)
{
    int64_t sum = 0;
    for (int r = 0; r < x->world; r++) {
        int64_t used = r == x->rank ? 0 : fsdpc_shm_cpu_ns(x->shm, r);
        sum += used > 0 ? used : 0;
    }
    return sum;
}

void
fsdpc_shared_wait_begin(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const char *op,
                        const fsdpc_unit *unit)
{
    (void)x;
    *wait =
        (struct fsdpc_shared_wait){.what = {.op = op, .unit = unit ? fsdpc_unit_name(unit) : ""}};
}

static void
start_waiting(fsdpc_exchange *x, struct fsdpc_shared_wait *wait)
{
    wait->waiting = true;
    wait->start_ns = wait->quiet_ns = fsdpc_shm_now_ns();
    wait->deadline_ns = fsdpc_shm_deadline(x->shm);
    wait->used_ns = used_by_others(x);
    fsdpc_board_begin(wait->what.op, wait->what.unit, fsdpc_phase_name(x->phase));
    fsdpc_shm_stand_begin(x->shm);
}

/* True if the rank has the lock of a gather slot. A rank keeps this lock for a few stores only. */
static bool
has_lock(const fsdpc_exchange *x, int rank)
{
    bool any = false;
    for (int i = 0; i < x->shared->slot_count; i++) {
        any = any || atomic_load(&fsdpc_shared_slot(x, i)->lock) == (uint32_t)rank + 1;
    }
    return any;
}

/* True if the rank slept lately, but not in a barrier that waits for this rank. Also true if the rank is in a
 * wait and has no slot's lock. A rank in a wait that has a slot's lock has stopped, so it counts as late. */
static bool
seems_to_wait(const fsdpc_exchange *x, int rank)
{
    const int64_t lately_ns = fsdpc_shm_now_ns() - 2 * slice_ns;
    const bool elsewhere = fsdpc_shm_waits_for_this_rank(x->shm, rank);
    return (!elsewhere && fsdpc_shm_slept_since(x->shm, rank, lately_ns)) ||
           (fsdpc_shm_stands(x->shm, rank) && !has_lock(x, rank));
}

int
fsdpc_shared_name_late(fsdpc_exchange *x, const fsdpc_wait *what)
{
    int late[FSDPC_SHM_MAX_RANKS], count = 0;
    for (int pass = 0; pass < 2 && count == 0; pass++) {
        for (int r = 0; r < x->world; r++) {
            if (r != x->rank && (pass == 1 || !seems_to_wait(x, r))) {
                late[count++] = r;
            }
        }
    }
    return fsdpc_shm_timeout_error(x->shm, what, late, count);
}

void
fsdpc_shared_wait_read(fsdpc_exchange *x, struct fsdpc_shared_wait *wait)
{
    fsdpc_shm_read_changes(x->shm, &wait->view);
}

int
fsdpc_shared_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param)
{
    struct fsdpc_rank_ctl *own = &x->shared->ranks[x->rank];
    atomic_store(&own->thawed, unit < 0 ? UINT64_MAX : (uint64_t)unit << 32 | (uint32_t)param);
    atomic_store(&own->thaws, ((tag >> FSDPC_PASS_BITS) + 1) << FSDPC_PASS_BITS);
    atomic_store(&own->ready, tag);
    fsdpc_shared_notify(x);
    return FSDPC_OK;
}

/* Fails in a deadlock: another rank waits for all ranks to unfreeze parameters before a pass that this rank
 * has begun without unfreezing them. */
static int
check_thaws(fsdpc_exchange *x)
{
    for (int r = 0; r < x->world; r++) {
        const struct fsdpc_rank_ctl *other = &x->shared->ranks[r];
        uint64_t thaws = atomic_load(&other->thaws);
        if (r == x->rank || thaws == 0 || x->tag < thaws) {
            continue;
        }
        uint64_t which = atomic_load(&other->thawed);
        int unit = which == UINT64_MAX ? -1 : (int)(which >> 32);
        int status = fsdpc_exchange_thaw_error(x, unit, (int)(uint32_t)which, r, x->rank);
        fsdpc_shm_abort(x->shm, fsdpc_error_text());
        return status;
    }
    return FSDPC_OK;
}

int
fsdpc_shared_wait_step(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, enum fsdpc_shm_way way)
{
    if (!wait->waiting) {
        start_waiting(x, wait);
    }
    FSDPC_TRY(check_thaws(x));
    int64_t patience = x->shared->patience_ns;
    int64_t most = way == FSDPC_WAY_PRIVATE && patience < slice_ns ? patience : slice_ns;
    int64_t now = fsdpc_shm_now_ns();
    int64_t until = now + most < wait->deadline_ns ? now + most : wait->deadline_ns;
    int status = fsdpc_shm_stand(x->shm, &wait->view, way, until, &wait->what);
    if (status != FSDPC_E_TIMEOUT) {
        return status;
    }
    return fsdpc_shm_now_ns() < wait->deadline_ns ? FSDPC_OK
                                                  : fsdpc_shared_name_late(x, &wait->what);
}

/* See [Note: patience]. */
static bool
patience_is_over(fsdpc_exchange *x, struct fsdpc_shared_wait *wait)
{
    int64_t now = fsdpc_shm_now_ns(), patience = x->shared->patience_ns;
    if (!wait->waiting || now - wait->quiet_ns < patience) {
        return false;
    }
    int64_t used = used_by_others(x);
    bool computed = used - wait->used_ns > (now - wait->quiet_ns) / 2;
    wait->quiet_ns = now;
    wait->used_ns = used;
    if (computed && now - wait->start_ns < patience * IN_ANY_CASE) {
        return false;
    }
    patience /= SOONER;
    x->shared->patience_ns = patience > patience_least_ns ? patience : patience_least_ns;
    return true;
}

bool
fsdpc_shared_must_act(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, enum fsdpc_shm_way way)
{
    return fsdpc_shm_stuck(x->shm, &wait->view, way) ||
           (way == FSDPC_WAY_PRIVATE && patience_is_over(x, wait));
}

void
fsdpc_shared_wait_end(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const fsdpc_unit *unit)
{
    if (wait->waiting) {
        wait->waiting = false;
        fsdpc_shm_stand_end(x->shm);
        fsdpc_board_end();
        fsdpc_exchange_note(x, FSDPC_TRACE_WAIT, unit,
                            (uint64_t)(fsdpc_shm_now_ns() - wait->start_ns));
    }
}

void
fsdpc_shared_wait_was_worth(fsdpc_exchange *x, const struct fsdpc_shared_wait *wait)
{
    if (wait->waiting) {
        int64_t patience = x->shared->patience_ns + x->shared->patience_ns / SOONER;
        x->shared->patience_ns =
            patience < fsdpc_shared_patience_ns ? patience : fsdpc_shared_patience_ns;
    }
}

void
fsdpc_shared_wait_open(fsdpc_exchange *x)
{
    x->shared->patience_ns = fsdpc_shared_patience_ns;
}
