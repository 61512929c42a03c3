/* The functions of comm.h: they check arguments, keep the first failure and handle a table's NULL entries. */
#include "comm/comm.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/deadline.h"
#include "base/forks.h"
#include "comm/comm_impl.h"
#include "comm/flight.h"
#include "base/mem.h"
#include "base/status.h"

/* --- what ranks are called ------------------------------------------------------------------- */

int
fsdpc_comm_set_numbers(fsdpc_comm *comm, const char *text)
{
    char *copy = fsdpc_mem_calloc(1, strlen(text) + 1);
    char *none = NULL;
    if (!copy) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a communicator");
    }
    strcpy(copy, text);
    if (!atomic_compare_exchange_strong(&comm->numbers, &none, copy)) {
        fsdpc_mem_free(copy);
        return fsdpc_error(FSDPC_E_STATE,
                           "set_numbers: the communicator's ranks have numbers already: %s", none);
    }
    return comm->twin ? fsdpc_comm_set_numbers(comm->twin, text) : FSDPC_OK;
}

const char *
fsdpc_comm_numbers(const fsdpc_comm *comm)
{
    const char *numbers = atomic_load(&comm->numbers);
    return numbers ? numbers : "";
}

/* Returns fsdpc_comm_numbers if `text` names a rank and does not contain the numbers yet, else NULL. */
static const char *
numbers_for(const fsdpc_comm *comm, const char *text)
{
    const char *numbers = atomic_load(&comm->numbers);
    return numbers && strstr(text, "rank") && !strstr(text, numbers) ? numbers : NULL;
}

int
fsdpc_comm_say_numbers(const fsdpc_comm *comm, int status)
{
    const char *numbers = status != FSDPC_OK ? numbers_for(comm, fsdpc_error_text()) : NULL;
    return numbers ? fsdpc_error_prepend(status, "%s", numbers) : status;
}

/* --- the sticky failure --------------------------------------------------------------------- */

void
fsdpc_comm_break(fsdpc_comm *comm, int status, const char *text)
{
    const char *numbers = numbers_for(comm, text);
    int sound = FSDPC_COMM_SOUND;
    if (!atomic_compare_exchange_strong(&comm->state, &sound, FSDPC_COMM_BREAKING)) {
        return;
    }
    if (comm->local) {
        fsdpc_comm_abort(comm->local, text);
    }
    comm->failed_status = status;
    snprintf(comm->failed_text, sizeof comm->failed_text, "%s%s%s", numbers ? numbers : "",
             numbers ? ": " : "", text);
    atomic_store_explicit(&comm->state, FSDPC_COMM_BROKEN, memory_order_release);
}

/* The state is BREAKING while another thread writes the error text. That takes a moment, unless the thread
 * is preempted. A forked child does not have that thread and would wait forever, so the wait is bounded. */
static int
state_of(const fsdpc_comm *comm)
{
    const struct timespec moment = {.tv_nsec = 50000};
    int state = atomic_load_explicit(&comm->state, memory_order_acquire);
    for (int i = 0; state == FSDPC_COMM_BREAKING && i < 20000; i++) {
        (void)nanosleep(&moment, NULL);
        state = atomic_load_explicit(&comm->state, memory_order_acquire);
    }
    return state;
}

int
fsdpc_comm_check(const fsdpc_comm *comm)
{
    const int state = state_of(comm);
    if (comm->forks != fsdpc_forks() && comm->world > 1) {
        return fsdpc_error(
            FSDPC_E_STATE,
            "process %d is a forked child of rank %d: the child has a copy of the rank's shards, "
            "but the rank's "
            "groups and what they gather and sum belong to the parent. Gather whole values before "
            "the fork "
            "(summon_full_params, a full state dict), or make a new group in the child",
            (int)getpid(), comm->rank);
    }
    if (state == FSDPC_COMM_SOUND) {
        return FSDPC_OK;
    }
    if (state == FSDPC_COMM_BREAKING) {
        return fsdpc_error(FSDPC_E_COMM, "the communicator is being aborted");
    }
    return fsdpc_error(comm->failed_status, "%s", comm->failed_text);
}

/* Waits at most one second for the event. Returns FSDPC_E_TIMEOUT if the event is not reached by then. */
static int
poll_once(fsdpc_comm *comm, fsdpc_event *reached, const char *what)
{
    int status = fsdpc_device_finish(comm->device, reached, 1.0, what);
    if (status == FSDPC_E_TIMEOUT && fsdpc_shm_interrupt_check && fsdpc_shm_interrupt_check()) {
        fsdpc_comm_abort(comm, "interrupted");
        return fsdpc_error(FSDPC_E_INTERRUPT, "%s: interrupted", what);
    }
    return status;
}

int
fsdpc_comm_await(fsdpc_comm *comm, fsdpc_event *reached, int (*check)(const void *),
                 const void *argument, const char *what)
{
    enum { DAY_S = 24 * 3600 };
    int status = FSDPC_E_TIMEOUT;
    for (int i = 0; status == FSDPC_E_TIMEOUT && i < DAY_S; i++) {
        status = poll_once(comm, reached, what);
        FSDPC_TRY(status == FSDPC_E_INTERRUPT ? status : check(argument));
    }
    return status == FSDPC_E_TIMEOUT
               ? fsdpc_error(status, "%s: the GPU has not finished in a day", what)
               : status;
}

static int
is_sound(const void *comm)
{
    return fsdpc_comm_check(comm);
}

int
fsdpc_comm_drain(fsdpc_comm *comm, const char *what)
{
    int status = FSDPC_OK;
    fsdpc_event *reached;
    FSDPC_TRY(fsdpc_device_event_new(comm->device, &reached));
    FSDPC_GOTO(fsdpc_device_record(comm->device, reached), done);
    FSDPC_GOTO(fsdpc_comm_await(comm, reached, is_sound, comm, what), done);
done:
    fsdpc_device_event_free(comm->device, reached);
    return status;
}

/* Fails while another collective runs, because two collectives at a time would mix their bytes. */
int
fsdpc_comm_enter(fsdpc_comm *comm, const char *what)
{
    if (atomic_exchange_explicit(&comm->busy, true, memory_order_acquire)) {
        return fsdpc_error(FSDPC_E_STATE,
                           "%s: another collective of this communicator is in progress, in another "
                           "thread or around this call; make one after the other",
                           what);
    }
    return FSDPC_OK;
}

void
fsdpc_comm_add_lander(fsdpc_comm *comm, fsdpc_lander *lander)
{
    lander->first = UINT64_MAX;
    lander->next = comm->landers;
    comm->landers = lander;
}

void
fsdpc_comm_remove_lander(fsdpc_comm *comm, const fsdpc_lander *lander)
{
    for (fsdpc_lander **at = &comm->landers; *at; at = &(*at)->next) {
        if (*at == lander) {
            *at = lander->next;
            return;
        }
    }
}

int
fsdpc_comm_land_before(fsdpc_comm *comm, uint64_t number)
{
    for (;;) {
        fsdpc_lander *first = comm->landers;
        for (fsdpc_lander *other = first; other; other = other->next) {
            first = other->first < first->first ? other : first;
        }
        if (!first || first->first >= number) {
            return FSDPC_OK;
        }
        FSDPC_TRY(first->land_first(first->context));
    }
}

/* See [Note: landed in order] in flight.h. */
static int
begin_collective(fsdpc_comm *comm, const char *what)
{
    FSDPC_TRY(fsdpc_comm_land_before(comm, UINT64_MAX));
    return fsdpc_comm_enter(comm, what);
}

int
fsdpc_comm_leave(fsdpc_comm *comm, int status)
{
    atomic_store_explicit(&comm->busy, false, memory_order_release);
    if (status == FSDPC_E_INTERRUPT) {
        fsdpc_kept_error kept;
        fsdpc_error_keep(&kept);
        fsdpc_comm_abort(comm, kept.text); /* the program may catch the interrupt and go on */
        fsdpc_error_restore(&kept);
    } else if (fsdpc_comm_say_numbers(comm, status) != FSDPC_OK) {
        fsdpc_comm_break(comm, status, fsdpc_error_text());
    }
    return status;
}

void
fsdpc_comm_abort(fsdpc_comm *comm, const char *text)
{
    char reported[FSDPC_COMM_TEXT_BYTES];
    const char *reason = text && text[0] ? text : "(no reason given)";
    if (comm->twin) {
        fsdpc_comm_abort(comm->twin, text);
    }
    if (comm->local) {
        fsdpc_comm_abort(comm->local, text);
    }
    if (comm->ops->abort) {
        comm->ops->abort(comm, reason);
    }
    snprintf(reported, sizeof reported, "rank %d gave up: %.*s", comm->rank,
             FSDPC_COMM_TEXT_BYTES - 64, reason);
    fsdpc_comm_break(comm, FSDPC_E_COMM, reported);
}

void
fsdpc_comm_fail(fsdpc_comm *comm, int status, const char *text)
{
    if (comm->twin) {
        fsdpc_comm_fail(comm->twin, status, text);
    }
    if (comm->ops->fail) {
        comm->ops->fail(comm, status, text);
    }
    fsdpc_comm_break(comm, status, text);
}

void
fsdpc_comm_close(fsdpc_comm *comm)
{
    if (comm->twin) {
        fsdpc_comm_close(comm->twin);
    }
    if (comm->local) {
        fsdpc_comm_close(comm->local);
    }
    if (comm->ops->close) {
        comm->ops->close(comm);
    }
}

void
fsdpc_comm_free(fsdpc_comm *comm)
{
    if (comm) {
        fsdpc_comm_free(comm->twin);
        fsdpc_hosts_free(comm->hosts);
        fsdpc_comm_free(comm->local);
        fsdpc_mem_free(atomic_exchange(&comm->numbers, NULL));
        comm->ops->free(comm);
    }
}

void
fsdpc_comm_set_twin(fsdpc_comm *comm, fsdpc_comm *twin)
{
    fsdpc_comm_free(comm->twin);
    comm->twin = twin;
}

fsdpc_comm *
fsdpc_comm_for_reductions(fsdpc_comm *comm)
{
    return comm->twin ? comm->twin : comm;
}

/* --- properties ----------------------------------------------------------------------------- */

const fsdpc_comm_caps *
fsdpc_comm_get_caps(const fsdpc_comm *comm)
{
    return &comm->ops->caps;
}

double
fsdpc_comm_timeout(const fsdpc_comm *comm)
{
    return comm->timeout_s > 0 ? comm->timeout_s : fsdpc_timeout();
}

int
fsdpc_comm_rank(const fsdpc_comm *comm)
{
    return comm->rank;
}

int
fsdpc_comm_world(const fsdpc_comm *comm)
{
    return comm->world;
}

const char *
fsdpc_comm_kind(const fsdpc_comm *comm)
{
    return comm->ops->kind;
}

fsdpc_device *
fsdpc_comm_device(const fsdpc_comm *comm)
{
    return comm->device;
}

fsdpc_shm *
fsdpc_comm_segment(const fsdpc_comm *comm)
{
    return comm->ops->segment ? comm->ops->segment(comm) : NULL;
}

/* --- collectives ---------------------------------------------------------------------------- */

static const char *
name_of(const char *what, const char *op)
{
    return what && what[0] ? what : op;
}

static int
check_buffer(const void *buffer, size_t bytes, const char *what)
{
    if (!buffer && bytes > 0) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: the buffer is NULL", what);
    }
    return FSDPC_OK;
}

/* Sizes that overflow are the caller's mistake (FSDPC_E_INVAL), not a lack of memory. */
static int
check_elements(const fsdpc_comm *comm, const void *buffer, int64_t numel, int64_t copies,
               fsdpc_dtype dtype, const char *what)
{
    size_t bytes;
    if (!fsdpc_dtype_is_float(dtype)) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: elements of type %s cannot be reduced", what,
                           fsdpc_dtype_bytes(dtype) ? fsdpc_dtype_name(dtype) : "(unknown)");
    }
    if (numel < 0 || !fsdpc_size_mul((size_t)numel, fsdpc_dtype_bytes(dtype), &bytes) ||
        !fsdpc_size_mul(bytes, (size_t)copies, &bytes)) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: %lld elements on each of %d ranks overflow", what,
                           (long long)numel, comm->world);
    }
    return check_buffer(buffer, bytes, what);
}

int
fsdpc_comm_all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    size_t bytes;
    what = name_of(what, "all_gather");
    FSDPC_TRY(fsdpc_comm_check(comm));
    if (!fsdpc_size_mul(piece_bytes, (size_t)comm->world, &bytes)) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: %zu bytes from each of %d ranks overflow", what,
                           piece_bytes, comm->world);
    }
    FSDPC_TRY(check_buffer(buffer, bytes, what));
    if (bytes == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(begin_collective(comm, what));
    return fsdpc_comm_leave(comm, comm->ops->all_gather(comm, buffer, piece_bytes, what));
}

int
fsdpc_comm_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
                          const char *what)
{
    what = name_of(what, "reduce_scatter");
    FSDPC_TRY(fsdpc_comm_check(comm));
    FSDPC_TRY(check_elements(comm, buffer, piece_numel, comm->world, dtype, what));
    if (piece_numel == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(begin_collective(comm, what));
    return fsdpc_comm_leave(comm,
                            comm->ops->reduce_scatter(comm, buffer, piece_numel, dtype, what));
}

int
fsdpc_comm_check_parts(const fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                       const char *what)
{
    FSDPC_TRY(fsdpc_comm_check(comm));
    for (int i = 0; i < count; i++) {
        size_t bytes;
        if (parts[i].piece_numel < 0 ||
            !fsdpc_size_mul((size_t)parts[i].piece_numel, fsdpc_dtype_bytes(parts[i].dtype),
                            &bytes) ||
            !fsdpc_size_mul(bytes, (size_t)comm->world, &bytes)) {
            return fsdpc_error(FSDPC_E_INVAL, "%s: part %d of %lld elements overflows", what, i,
                               (long long)parts[i].piece_numel);
        }
        FSDPC_TRY(check_buffer(parts[i].buffer, bytes, what));
    }
    return FSDPC_OK;
}

int
fsdpc_comm_all_gather_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                            const char *what)
{
    what = name_of(what, "all_gather");
    FSDPC_TRY(fsdpc_comm_check_parts(comm, parts, count, what));
    if (comm->ops->all_gather_parts && count > 0) {
        FSDPC_TRY(begin_collective(comm, what));
        return fsdpc_comm_leave(comm, comm->ops->all_gather_parts(comm, parts, count, what));
    }
    for (int i = 0; i < count; i++) {
        size_t bytes = (size_t)parts[i].piece_numel * fsdpc_dtype_bytes(parts[i].dtype);
        FSDPC_TRY(fsdpc_comm_all_gather(comm, parts[i].buffer, bytes, what));
    }
    return FSDPC_OK;
}

int
fsdpc_comm_reduce_scatter_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                const char *what)
{
    what = name_of(what, "reduce_scatter");
    FSDPC_TRY(fsdpc_comm_check_parts(comm, parts, count, what));
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(check_elements(comm, parts[i].buffer, parts[i].piece_numel, comm->world,
                                 parts[i].dtype, what));
    }
    if (comm->ops->reduce_scatter_parts && count > 0) {
        FSDPC_TRY(begin_collective(comm, what));
        return fsdpc_comm_leave(comm, comm->ops->reduce_scatter_parts(comm, parts, count, what));
    }
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(fsdpc_comm_reduce_scatter(comm, parts[i].buffer, parts[i].piece_numel,
                                            parts[i].dtype, what));
    }
    return FSDPC_OK;
}

int
fsdpc_comm_all_reduce_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                            const char *what)
{
    what = name_of(what, "all_reduce");
    FSDPC_TRY(fsdpc_comm_check(comm));
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(
            check_elements(comm, parts[i].buffer, parts[i].piece_numel, 1, parts[i].dtype, what));
    }
    if (comm->ops->all_reduce_parts && count > 0) {
        FSDPC_TRY(begin_collective(comm, what));
        return fsdpc_comm_leave(comm, comm->ops->all_reduce_parts(comm, parts, count, what));
    }
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(fsdpc_comm_all_reduce(comm, parts[i].buffer, parts[i].piece_numel, parts[i].dtype,
                                        FSDPC_SUM, what));
    }
    return FSDPC_OK;
}

int
fsdpc_comm_all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                      enum fsdpc_op op, const char *what)
{
    what = name_of(what, "all_reduce");
    FSDPC_TRY(fsdpc_comm_check(comm));
    if (op != FSDPC_SUM && op != FSDPC_MAX && op != FSDPC_MIN) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: unknown reduction %d", what, (int)op);
    }
    FSDPC_TRY(check_elements(comm, buffer, numel, 1, dtype, what));
    if (numel == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(begin_collective(comm, what));
    return fsdpc_comm_leave(comm, comm->ops->all_reduce(comm, buffer, numel, dtype, op, what));
}

bool
fsdpc_comm_has_all_to_all(const fsdpc_comm *comm)
{
    return comm->ops->all_to_all != NULL;
}

int
fsdpc_comm_all_to_all(fsdpc_comm *comm, void *pieces, void *landing, size_t bytes, const char *what)
{
    size_t all;
    what = name_of(what, "all_to_all");
    FSDPC_TRY(fsdpc_comm_check(comm));
    if (!fsdpc_comm_has_all_to_all(comm)) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "%s: communicator %s has no all-to-all", what,
                           comm->ops->kind);
    }
    if (!fsdpc_size_mul(bytes, (size_t)comm->world, &all)) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: %zu bytes for each of %d ranks overflow", what,
                           bytes, comm->world);
    }
    if (comm->world == 1 || bytes == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(check_buffer(pieces, bytes, what));
    FSDPC_TRY(check_buffer(landing, bytes, what));
    FSDPC_TRY(begin_collective(comm, what));
    return fsdpc_comm_leave(comm, comm->ops->all_to_all(comm, pieces, landing, bytes, what));
}

int
fsdpc_comm_broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    what = name_of(what, "broadcast");
    FSDPC_TRY(fsdpc_comm_check(comm));
    if (root < 0 || root >= comm->world) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: root %d is not a rank of a group of %d", what, root,
                           comm->world);
    }
    FSDPC_TRY(check_buffer(buffer, bytes, what));
    if (bytes == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(begin_collective(comm, what));
    return fsdpc_comm_leave(comm, comm->ops->broadcast(comm, buffer, bytes, root, what));
}

int
fsdpc_comm_barrier(fsdpc_comm *comm, const char *what)
{
    what = name_of(what, "barrier");
    FSDPC_TRY(fsdpc_comm_check(comm));
    FSDPC_TRY(begin_collective(comm, what));
    return fsdpc_comm_leave(comm, comm->ops->barrier(comm, what));
}

int
fsdpc_comm_agree(fsdpc_comm *comm, const char *text, const char *what)
{
    FSDPC_TRY(fsdpc_comm_check(comm));
    if (!text) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: the text is NULL", name_of(what, "agree"));
    }
    FSDPC_TRY(begin_collective(comm, name_of(what, "agree")));
    int status = comm->ops->agree(comm, text, name_of(what, "agree"));
    /* All ranks get the same mismatch, so the communicator stays usable. */
    (void)fsdpc_comm_leave(comm, status == FSDPC_E_MISMATCH ? FSDPC_OK : status);
    comm->agreements++;
    return fsdpc_comm_say_numbers(comm, status);
}

int
fsdpc_comm_agreements(const fsdpc_comm *comm)
{
    return comm->agreements;
}

/* --- registered memory ---------------------------------------------------------------------- */

int
fsdpc_comm_register(fsdpc_comm *comm, void *buffer, size_t bytes)
{
    FSDPC_TRY(fsdpc_comm_check(comm));
    return comm->ops->register_memory && buffer ? comm->ops->register_memory(comm, buffer, bytes)
                                                : FSDPC_OK;
}

void
fsdpc_comm_unregister(fsdpc_comm *comm, void *buffer)
{
    if (comm->ops->unregister_memory && buffer) {
        comm->ops->unregister_memory(comm, buffer);
    }
}

bool
fsdpc_comm_registers(const fsdpc_comm *comm)
{
    return comm->ops->registers && comm->ops->registers(comm);
}

bool
fsdpc_comm_is_symmetric(const fsdpc_comm *comm)
{
    return comm->ops->is_symmetric && comm->ops->is_symmetric(comm);
}
