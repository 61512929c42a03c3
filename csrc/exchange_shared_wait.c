/* Waiting for other ranks of the host: for a change of anything in the segment, with a deadline, and
 * with a look at whether anybody can bring it about.
 */
#include "exchange_shared_impl.h"
#include "status.h"

static const int64_t slice_ns = 20000000;

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

int
fsdpc_shared_name_late(fsdpc_exchange *x, const fsdpc_wait *what)
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
    return fsdpc_shm_now_ns() < wait->deadline_ns ? FSDPC_OK
                                                  : fsdpc_shared_name_late(x, &wait->what);
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
