/* The state of a segment that all files of the folder use: the clock, the failure word, the ranks
 * that have left, and forks of this process.
 */
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/forks.h"
#include "base/status.h"
#include "shm/shm_impl.h"

/* --- time and waking ------------------------------------------------------------------------ */

int64_t
fsdpc_shm_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t
fsdpc_shm_deadline(const fsdpc_shm *shm)
{
    return fsdpc_shm_now_ns() + (int64_t)(shm->timeout_s * 1e9);
}

void
fsdpc_shm_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void
fsdpc_shm_describe(const fsdpc_wait *what, char *text, size_t bytes)
{
    const char *op = what && what->op && what->op[0] ? what->op : "a wait";
    if (what && what->unit && what->unit[0]) {
        snprintf(text, bytes, "%s of unit %s", op, what->unit);
    } else {
        snprintf(text, bytes, "%s", op);
    }
}

/* --- forks ---------------------------------------------------------------------------------- */

/* Every barrier calls this function: comparing counts of forks costs one load, getpid() a system call. */
bool
fsdpc_shm_is_owner(const fsdpc_shm *shm)
{
    return shm->forks == fsdpc_forks();
}

const fsdpc_shm_reports *fsdpc_shm_reporter;

/* --- failure -------------------------------------------------------------------------------- */

int
fsdpc_shm_usable(const fsdpc_shm *shm)
{
    if (!fsdpc_shm_is_owner(shm)) {
        return fsdpc_error(FSDPC_E_STATE,
                           "the group of rank %d (pid %d) is used in a forked child (pid %d); "
                           "create a new group there",
                           shm->rank, (int)shm->owner, (int)getpid());
    }
    return FSDPC_OK;
}

void
fsdpc_shm_wake_all(fsdpc_shm *shm)
{
    fsdpc_shm_control *control = shm->control;
    atomic_fetch_add(&control->broadcast, 1);
    fsdpc_shm_wake(&control->broadcast);
    /* Without futex_waitv a rank in a barrier sleeps on barrier_done only, not on the broadcast word. */
    fsdpc_shm_wake(&control->barrier_done);
}

void
fsdpc_shm_fail(fsdpc_shm *shm, unsigned kind, int rank)
{
    uint32_t none = 0;
    uint32_t failure = kind << 16 | (uint32_t)rank;
    atomic_compare_exchange_strong(&shm->control->failure, &none, failure);
    fsdpc_shm_wake_all(shm);
}

bool
fsdpc_shm_verdict(const fsdpc_shm *shm, bool gives_up, int *causes, int *count, char *text,
                  size_t bytes)
{
    const fsdpc_shm_reports *reporter = fsdpc_shm_reporter;
    return reporter && fsdpc_shm_is_owner(shm) &&
           reporter->verdict(shm->name, gives_up, causes, count, text, bytes);
}

int (*fsdpc_shm_interrupt_check)(void);

int
fsdpc_shm_interrupted(const fsdpc_wait *what)
{
    if (!fsdpc_shm_interrupt_check || fsdpc_shm_interrupt_check() == 0) {
        return FSDPC_OK;
    }
    char text[FSDPC_SHM_WAIT_TEXT];
    fsdpc_shm_describe(what, text, sizeof text);
    return fsdpc_error_prepend(FSDPC_E_INTERRUPT, "interrupted while waiting in %s", text);
}

int
fsdpc_shm_number(const fsdpc_shm *shm, int rank)
{
    return shm->numbers ? shm->numbers[rank] : rank;
}

void
fsdpc_shm_set_numbers(fsdpc_shm *shm, const int *numbers)
{
    shm->numbers = numbers;
}

int
fsdpc_shm_check(fsdpc_shm *shm, const fsdpc_wait *what)
{
    FSDPC_TRY(fsdpc_shm_usable(shm));
    uint32_t failure = atomic_load_explicit(&shm->control->failure, memory_order_acquire);
    if (failure == 0) {
        return FSDPC_OK;
    }
    /* Interrupts are checked first, because reading the verdict runs Python, which would consume a Ctrl-C. */
    FSDPC_TRY(fsdpc_shm_interrupted(what));
    int rank = (int)(failure & 0xffff);
    int pid = (int)atomic_load(&shm->control->slots[rank].pid);
    char op[FSDPC_SHM_WAIT_TEXT];
    fsdpc_shm_describe(what, op, sizeof op);
    if (failure >> 16 == FSDPC_SHM_ABORTED && rank == shm->rank) {
        return fsdpc_error(FSDPC_E_COMM,
                           "%s: this rank (%d) has given up its group before, so nothing can be "
                           "exchanged any more; start the program again; the reason: %s",
                           op, fsdpc_shm_number(shm, rank), shm->control->blocks[rank].abort_text);
    }
    if (failure >> 16 == FSDPC_SHM_ABORTED) {
        char table[FSDPC_ERROR_BYTES] = "";
        int causes[FSDPC_SHM_MAX_RANKS], count = 0;
        fsdpc_shm_verdict(shm, false, causes, &count, table, sizeof table);
        return fsdpc_error(
            FSDPC_E_PEER,
            "rank %d (pid %d) gave up while this rank (%d) was in %s; its error: %s%s",
            fsdpc_shm_number(shm, rank), pid, fsdpc_shm_number(shm, shm->rank), op,
            shm->control->blocks[rank].abort_text, table);
    }
    return fsdpc_error(FSDPC_E_PEER, "rank %d (pid %d) died while this rank (%d) waited in %s",
                       fsdpc_shm_number(shm, rank), pid, fsdpc_shm_number(shm, shm->rank), op);
}

void
fsdpc_shm_abort(fsdpc_shm *shm, const char *text)
{
    /* A rank aborts only once, because the text must not change once other ranks can read it. */
    if (!fsdpc_shm_is_owner(shm) || atomic_exchange(&shm->aborting, 1)) {
        return;
    }
    char *kept = shm->control->blocks[shm->rank].abort_text;
    snprintf(kept, FSDPC_SHM_ABORT_BYTES, "%s", text && text[0] ? text : "(no reason given)");
    fsdpc_shm_fail(shm, FSDPC_SHM_ABORTED, shm->rank);
}

bool
fsdpc_shm_left(const fsdpc_shm *shm, int rank)
{
    return atomic_load_explicit(&shm->control->slots[rank].left, memory_order_acquire) != 0;
}

/* Barrier numbers wrap at 2^32, so the sign of their difference tells which number is later. */
bool
fsdpc_shm_waits_for_this_rank(const fsdpc_shm *shm, int rank)
{
    uint32_t own = atomic_load(&shm->control->slots[shm->rank].barrier_seq);
    return (int32_t)(own - atomic_load(&shm->control->slots[rank].barrier_seq)) < 0;
}

bool
fsdpc_shm_came(const fsdpc_shm *shm, int rank)
{
    const fsdpc_shm_slot *slots = shm->control->slots;
    return atomic_load(&slots[rank].barrier_seq) == atomic_load(&slots[shm->rank].barrier_seq);
}
