/* Waits for the other ranks of this host in a "wire" exchange over several hosts.
 *
 * [Note: no deadlock] All ranks fill slots and pack in one order. A rank that waits here has begun all
 * earlier flights, and lands its pieces of all gathers in flight before it sleeps. So ranks of a host never
 * wait for each other in a circle. Ranks that run different units: see [Note: landed in order] in flight.h.
 */
#include "base/board.h"
#include "base/status.h"
#include "exchange/exchange_wire_impl.h"

/* The count that this rank waits for. */
struct wanted {
    enum fsdpc_wire_word word;
    int index;
    uint64_t value;
};

static int
list_missing(const fsdpc_exchange *x, const struct wanted *wanted, int missing[FSDPC_SHM_MAX_RANKS])
{
    int count = 0;
    for (int rank = 0; rank < x->wire->host->hosts->local_world; rank++) {
        if (!fsdpc_wire_has_said(x, rank, wanted->word, wanted->index, wanted->value)) {
            missing[count++] = rank;
        }
    }
    return count;
}

/* Sleeps briefly, at most until a rank of this host publishes a count. FSDPC_OK: the caller checks again. */
static int
sleep_once(const fsdpc_exchange *x, const struct wanted *wanted, uint32_t changes,
           int64_t deadline_ns, const fsdpc_wait *what)
{
    int missing[FSDPC_SHM_MAX_RANKS];
    fsdpc_shm *shm = x->wire->host->hosts->shm;
    const int status = fsdpc_shm_wait_word(shm, fsdpc_wire_changes(x), changes, deadline_ns, what);
    const int count = list_missing(x, wanted, missing);
    if (status == FSDPC_E_TIMEOUT && count > 0) {
        return fsdpc_shm_timeout_error(shm, what, missing, count);
    }
    for (int i = 0; i < count && status == FSDPC_OK; i++) {
        if (fsdpc_shm_left(shm, missing[i]) &&
            !fsdpc_wire_has_said(x, missing[i], wanted->word, wanted->index, wanted->value)) {
            return fsdpc_shm_left_error(shm, missing[i], what);
        }
    }
    return count > 0 ? status : FSDPC_OK;
}

/* True if a rank of this host is about to begin another flight: the two ranks would wait for each other. */
static bool
disagree(const fsdpc_exchange *x, int32_t next)
{
    fsdpc_mark mark;
    return next != FSDPC_WIRE_ANY && fsdpc_hosts_disagree(x->comm, fsdpc_wire_mark(x, next, &mark));
}

static void
say_next(const fsdpc_exchange *x, int32_t next)
{
    fsdpc_mark mark;
    if (next != FSDPC_WIRE_ANY) {
        fsdpc_comm_say_turn(x->comm, fsdpc_wire_mark(x, next, &mark));
        fsdpc_wire_say_change(x);
    }
}

/* A rank of this host may be waiting for another host. The error of that wait names the cause and should come
 * first, so the deadline of this wait is a little later. */
static int64_t
deadline_after_others(const fsdpc_exchange *x)
{
    const int64_t deadline_ns = fsdpc_shm_deadline(x->wire->host->hosts->shm);
    const int64_t quarter_ns = (deadline_ns - fsdpc_shm_now_ns()) / 4, most_ns = 2000000000;
    return deadline_ns + (quarter_ns < most_ns ? quarter_ns : most_ns);
}

static int
wait_for(fsdpc_exchange *x, const struct wanted *wanted, int32_t next, const fsdpc_wait *what)
{
    int missing[FSDPC_SHM_MAX_RANKS];
    const int64_t deadline_ns = deadline_after_others(x);
    say_next(x, next);
    for (;;) {
        const uint32_t changes = atomic_load(fsdpc_wire_changes(x));
        if (list_missing(x, wanted, missing) == 0) {
            return FSDPC_OK;
        }
        if (disagree(x, next)) {
            return fsdpc_wire_tell(x, next, what->op);
        }
        FSDPC_TRY(sleep_once(x, wanted, changes, deadline_ns, what));
    }
}

/* Ends the group. Ranks of other hosts notice by their connections, ranks of this host by the segment. */
static void
break_group(fsdpc_exchange *x, int status)
{
    fsdpc_kept_error kept;
    fsdpc_error_keep(&kept);
    if (status == FSDPC_E_INTERRUPT) { /* the program may catch the interrupt and go on */
        fsdpc_comm_abort(x->comm, kept.text);
    } else {
        fsdpc_comm_fail(x->comm, status, kept.text);
    }
    fsdpc_error_restore(&kept);
}

int
fsdpc_wire_host_wait(fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value,
                     int32_t next, const char *op, const fsdpc_unit *unit)
{
    int status = FSDPC_OK, missing[FSDPC_SHM_MAX_RANKS];
    const struct wanted wanted = {word, index, value};
    const fsdpc_wait what = {.op = op, .unit = fsdpc_unit_name(unit)};
    if (list_missing(x, &wanted, missing) == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_comm_land_before(x->comm, UINT64_MAX)); /* [Note: no deadlock] */
    const int64_t start_ns = fsdpc_shm_now_ns();
    fsdpc_board_begin(what.op, what.unit, fsdpc_phase_name(x->phase));
    status = wait_for(x, &wanted, next, &what);
    fsdpc_board_end();
    fsdpc_exchange_note(x, FSDPC_TRACE_WAIT, unit, (uint64_t)(fsdpc_shm_now_ns() - start_ns));
    if (status != FSDPC_OK) {
        break_group(x, status);
    }
    return status;
}
