/* Barrier and agreement over the control area.
 *
 * Barrier k: each rank writes k into its own slot (so that missing ranks can be named) and
 * increments `arrived`; the rank that brings `arrived` to k * world writes k into `done`, on which
 * all ranks wait. The counters wrap at 2^32 together. A failed barrier leaves the counters uneven, so
 * later barriers are refused.
 */
#include <string.h>

#include "base/board.h"
#include "base/pause.h"
#include "shm/shm_impl.h"
#include "base/status.h"

/* True when a is before b, modulo 2^32. */
static bool
before(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

static int
list_missing(const fsdpc_shm *shm, uint32_t round, int *missing)
{
    int count = 0;
    for (int i = 0; i < shm->world; i++) {
        if (before(atomic_load(&shm->control->slots[i].barrier_seq), round)) {
            missing[count++] = i;
        }
    }
    return count;
}

/* A rank may arrive and then leave, so `left` is read before `barrier_seq`. */
static int
check_missing_left(fsdpc_shm *shm, uint32_t round, const fsdpc_wait *what)
{
    for (int i = 0; i < shm->world; i++) {
        if (fsdpc_shm_left(shm, i) &&
            before(atomic_load(&shm->control->slots[i].barrier_seq), round)) {
            return fsdpc_shm_left_error(shm, i, what);
        }
    }
    return FSDPC_OK;
}

static int
wait_round(fsdpc_shm *shm, uint32_t round, const fsdpc_wait *what)
{
    _Atomic uint32_t *done = &shm->control->barrier_done;
    int64_t deadline_ns = fsdpc_shm_deadline(shm);
    int status = FSDPC_OK;
    atomic_fetch_add(&shm->control->barrier_sleepers, 1);
    fsdpc_board_begin(what ? what->op : NULL, what ? what->unit : NULL, NULL);
    /* This rank stands still now, so ranks that wait elsewhere may need their fallbacks (shm_stuck.c). */
    fsdpc_shm_ring(shm);
    for (;;) {
        uint32_t old = atomic_load(done);
        if (!before(old, round)) {
            break;
        }
        FSDPC_GOTO(check_missing_left(shm, round, what), end);
        FSDPC_GOTO(fsdpc_shm_sleep_word(shm, done, old, deadline_ns, what), end);
    }
end:
    atomic_fetch_sub(&shm->control->barrier_sleepers, 1);
    if (status == FSDPC_E_TIMEOUT) {
        int missing[FSDPC_SHM_MAX_RANKS];
        int count = list_missing(shm, round, missing);
        status = fsdpc_shm_timeout_error(shm, what, missing, count);
    }
    fsdpc_board_end();
    return status;
}

/* Spins shm->spins times; true if the round is over. */
static bool
spin_round(const fsdpc_shm *shm, uint32_t round)
{
    for (int i = 0; i <= shm->spins; i++) {
        uint32_t done = atomic_load_explicit(&shm->control->barrier_done, memory_order_acquire);
        if (!before(done, round)) {
            return true;
        }
        fsdpc_pause();
    }
    return false;
}

static int
enter(fsdpc_shm *shm, const fsdpc_wait *what)
{
    FSDPC_TRY(fsdpc_shm_usable(shm));
    FSDPC_TRY(fsdpc_shm_check(shm, what));
    if (shm->barrier_broken) {
        return fsdpc_error(
            FSDPC_E_STATE,
            "an earlier collective of rank %d in this group failed: the group cannot "
            "be used any more",
            shm->rank);
    }
    return FSDPC_OK;
}

int
fsdpc_shm_barrier(fsdpc_shm *shm, const fsdpc_wait *what)
{
    FSDPC_TRY(enter(shm, what));
    fsdpc_shm_control *control = shm->control;
    uint32_t round = ++shm->barrier_seq;
    atomic_store_explicit(&control->slots[shm->rank].barrier_seq, round, memory_order_release);
    uint32_t arrived = atomic_fetch_add(&control->barrier_arrived, 1) + 1;
    if (arrived == round * (uint32_t)shm->world) {
        atomic_store(&control->barrier_done, round);
        if (atomic_load(&control->barrier_sleepers) > 0) {
            fsdpc_shm_wake(&control->barrier_done);
        }
        return FSDPC_OK;
    }
    if (spin_round(shm, round)) {
        return FSDPC_OK;
    }
    int status = wait_round(shm, round, what);
    shm->barrier_broken = status != FSDPC_OK;
    return status;
}

static const fsdpc_agree_record *
record_of(const void *context, int rank)
{
    const fsdpc_shm *shm = context;
    return &shm->control->blocks[rank].agree;
}

int
fsdpc_shm_agree(fsdpc_shm *shm, const char *text, const fsdpc_wait *what)
{
    char op[FSDPC_SHM_WAIT_TEXT];
    FSDPC_TRY(enter(shm, what));
    fsdpc_agree_fill(&shm->control->blocks[shm->rank].agree, text);
    FSDPC_TRY(fsdpc_shm_barrier(shm, what));
    fsdpc_shm_describe(what, op, sizeof op);
    int status = fsdpc_agree_compare(record_of, shm, shm->world, op);
    /* No rank may write its next text while another rank still reads the present one. */
    FSDPC_TRY(fsdpc_shm_barrier(shm, what));
    return status;
}
