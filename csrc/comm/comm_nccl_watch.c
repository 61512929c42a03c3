/* The thread that watches an NCCL communicator.
 *
 * Every poll_ms the thread queries the oldest collective's event and NCCL's async error. Only
 * this thread aborts or destroys NCCL's communicator, because both may take long; other threads
 * wait for the thread at most END_MS, or PEACE_MS if nothing has failed. The thread takes `calls`
 * before it calls NCCL. A holder of `calls` releases it soon, because NCCL does not block and
 * polling loops check the communicator's failure. The states are drawn in comm_nccl_impl.h.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/board.h"
#include "base/deadline.h"
#include "comm/comm_nccl_impl.h"
#include "base/mem.h"
#include "base/status.h"

#define GRAPHS_S 0.3
/* Seconds after which the board shows a wait to other processes. */
#define BOARD_S 0.2

enum {
    STACK_BYTES = 4 * 1024 * 1024, /* the thread's stack: NCCL and the driver clean up in it */
    END_MS = 1000,
    PEACE_MS = 10000,
    QUIET_S = 2,
    PARTING_S = 5,
};

/* --- checks for failures ---------------------------------------------------------------------- */

/* Shows on the board what this rank's GPU waits for, once the wait has lasted BOARD_S. */
static void
show_on_board(nccl_comm *comm, double waited)
{
    if (waited < BOARD_S) {
        if (comm->on_board) {
            comm->on_board = false;
            fsdpc_board_device(NULL, 0);
        }
        return;
    }
    char oldest[FSDPC_NCCL_OLDEST_BYTES];
    fsdpc_nccl_oldest(comm, oldest);
    fsdpc_board_device(oldest, fsdpc_shm_now_ns() - (int64_t)(waited * 1e9));
    comm->on_board = true;
}

static void
check_deadline(nccl_comm *comm)
{
    char oldest[FSDPC_NCCL_OLDEST_BYTES], others[FSDPC_NCCL_OTHERS_BYTES + 2] = ". ";
    char text[FSDPC_COMM_TEXT_BYTES];
    double waited;
    const fsdpc_cu_result result = fsdpc_nccl_sweep(comm, &waited);
    show_on_board(comm, waited);
    const bool failed = result != FSDPC_CU_SUCCESS && result != FSDPC_CU_NOT_READY;
    if (!failed && waited <= comm->options.timeout_s) {
        return;
    }
    pthread_mutex_lock(&comm->lock);
    memcpy(others + 2, comm->others, sizeof comm->others);
    pthread_mutex_unlock(&comm->lock);
    fsdpc_nccl_oldest(comm, oldest);
    if (failed) {
        (void)fsdpc_cuda_check(comm->driver, result, "rank %d: %s", comm->base.rank, oldest);
        fsdpc_nccl_fail(comm, FSDPC_E_COMM, "%s", fsdpc_error_text());
    } else {
        const fsdpc_late late = {.rank = comm->base.rank,
                                 .seconds = comm->options.timeout_s,
                                 .what = oldest,
                                 .more = others[2] ? others : NULL};
        fsdpc_late_text(&late, text, sizeof text);
        fsdpc_nccl_fail(comm, FSDPC_E_TIMEOUT, "%s", text);
    }
}

static void
check_nccl(nccl_comm *comm)
{
    char oldest[FSDPC_NCCL_OLDEST_BYTES], reported[256] = "";
    fsdpc_nccl_result error = FSDPC_NCCL_SUCCESS;
    if (atomic_load(&comm->trying) || pthread_mutex_trylock(&comm->calls) != 0) {
        return; /* the holder of `calls` gets the error itself */
    }
    if (comm->handle && comm->nccl->async_error(comm->handle, &error) == FSDPC_NCCL_SUCCESS &&
        error != FSDPC_NCCL_SUCCESS && error != FSDPC_NCCL_IN_PROGRESS) {
        snprintf(reported, sizeof reported, "%s; %s", comm->nccl->error_string(error),
                 comm->nccl->last_error(comm->handle));
    }
    pthread_mutex_unlock(&comm->calls);
    if (reported[0]) {
        fsdpc_nccl_oldest(comm, oldest);
        fsdpc_nccl_fail(comm, FSDPC_E_COMM, "rank %d: NCCL failed in %s: %s", comm->base.rank,
                        oldest, reported);
    }
}

/* --- ending NCCL's side ----------------------------------------------------------------------- */

/* Ends a communicator that has not failed. It is not aborted, because peers may still be in its last
 * collective. ncclCommFinalize does not end while a graph with collectives of the communicator exists. */
static bool
ended_in_peace(nccl_comm *comm)
{
    fsdpc_nccl_result state = comm->nccl->finalize(comm->handle);
    double end = fsdpc_nccl_now_s() + (comm->has_graphs ? GRAPHS_S : QUIET_S);
    while (state == FSDPC_NCCL_IN_PROGRESS && fsdpc_nccl_now_s() < end) {
        fsdpc_nccl_nap(500);
        if (comm->nccl->async_error(comm->handle, &state) != FSDPC_NCCL_SUCCESS) {
            break;
        }
    }
    return state == FSDPC_NCCL_SUCCESS && comm->nccl->destroy(comm->handle) == FSDPC_NCCL_SUCCESS;
}

static bool
is_idle(nccl_comm *comm)
{
    return fsdpc_nccl_sweep(comm, NULL) == FSDPC_CU_SUCCESS;
}

/* Ends or aborts NCCL's communicator. Returns true if it stays instead, because a graph may still use it. */
static bool
end_nccl(nccl_comm *comm)
{
    bool stays = false, idle = is_idle(comm);
    pthread_mutex_lock(&comm->calls);
    fsdpc_nccl_comm handle = comm->handle;
    bool sound = fsdpc_comm_check(&comm->base) == FSDPC_OK;
    if (handle && sound && idle) {
        if (!comm->has_graphs) {
            fsdpc_nccl_delist_all(comm); /* graphs would still use the registered memory */
        }
        const bool ended = ended_in_peace(comm);
        stays = !ended && comm->has_graphs; /* an abort would wait for the graphs as well */
        handle = ended || stays ? NULL : handle;
    }
    /* `handle` is cleared before the abort, which may take long, so that no other thread uses it. */
    comm->handle = NULL;
    pthread_mutex_unlock(&comm->calls);
    if (handle) {
        (void)comm->nccl->abort(handle);
    }
    return stays;
}

/* Keeps `comm`, because NCCL still uses comm->name. The list keeps leak checkers from reporting `comm`. */
static void
leave_behind(nccl_comm *comm)
{
    static _Atomic(nccl_comm *) left;
    comm->next_left = atomic_exchange(&left, comm);
}

/* Frees `comm` and what it holds. If NCCL's communicator stays (LEFT), only `comm` itself is kept. */
static void
dispose(nccl_comm *comm)
{
    const bool left = comm->life == FSDPC_NCCL_LEFT;
    (void)fsdpc_nccl_use_context(comm);
    fsdpc_nccl_delist_all(comm);
    for (int i = 0; i < FSDPC_NCCL_RING; i++) {
        if (comm->ring[i].event) {
            (void)comm->driver->event_destroy(comm->ring[i].event);
        }
    }
    if (comm->staging) {
        (void)comm->driver->stream_destroy(comm->staging);
    }
    if (comm->scratch) {
        (void)comm->driver->mem_free((fsdpc_cu_ptr)(uintptr_t)comm->scratch);
        (void)comm->driver->host_free(comm->pinned);
    }
    pthread_cond_destroy(&comm->changed);
    pthread_mutex_destroy(&comm->lock);
    pthread_mutex_destroy(&comm->calls);
    if (left) {
        leave_behind(comm);
    } else {
        fsdpc_mem_free(comm);
    }
}

/* --- the thread ------------------------------------------------------------------------------- */

/* Sleeps until the next poll, or until there is something to do. Returns the state after the sleep. */
static enum fsdpc_nccl_life
sleep_until_poll(nccl_comm *comm)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)comm->options.poll_ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&comm->lock);
    const bool nothing = comm->life == FSDPC_NCCL_WATCHING
                             ? fsdpc_comm_check(&comm->base) == FSDPC_OK
                             : comm->life == FSDPC_NCCL_ABORTED;
    if (nothing) {
        pthread_cond_timedwait(&comm->changed, &comm->lock, &until);
    }
    const enum fsdpc_nccl_life life = comm->life;
    pthread_mutex_unlock(&comm->lock);
    return life;
}

static void
poll_failures(nccl_comm *comm)
{
    if (fsdpc_comm_check(&comm->base) == FSDPC_OK) {
        check_nccl(comm);
        check_deadline(comm);
    }
    if (fsdpc_comm_check(&comm->base) == FSDPC_OK) {
        return;
    }
    (void)end_nccl(comm);
    pthread_mutex_lock(&comm->lock);
    if (comm->life == FSDPC_NCCL_WATCHING) { /* else the owner called close or free meanwhile */
        comm->life = FSDPC_NCCL_ABORTED;
    }
    pthread_mutex_unlock(&comm->lock);
}

/* Decides under the lock, so that exactly one of owner and thread frees `comm`. */
static void
leave_thread(nccl_comm *comm, bool stays)
{
    pthread_mutex_lock(&comm->lock);
    const bool frees = comm->life == FSDPC_NCCL_ORPHANED;
    comm->life = stays ? FSDPC_NCCL_LEFT : FSDPC_NCCL_ENDED;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    if (frees) {
        dispose(comm);
    }
}

static void *
watch(void *argument)
{
    nccl_comm *comm = argument;
    unsigned mode =
        FSDPC_CU_CAPTURE_RELAXED; /* the thread's queries must not invalidate a capture */
    (void)fsdpc_nccl_use_context(comm);
    if (comm->driver->capture_mode) {
        (void)comm->driver->capture_mode(&mode);
    }
    for (;;) {
        const enum fsdpc_nccl_life life = sleep_until_poll(comm);
        if (life == FSDPC_NCCL_STOPPING || life == FSDPC_NCCL_ORPHANED) {
            break;
        }
        if (life == FSDPC_NCCL_WATCHING) {
            poll_failures(comm);
        }
    }
    leave_thread(comm, end_nccl(comm));
    return NULL;
}

/* Makes all events at the start, so that no step makes one. */
static int
make_events(nccl_comm *comm)
{
    for (int i = 0; i < FSDPC_NCCL_RING; i++) {
        FSDPC_TRY(fsdpc_cuda_check(
            comm->driver,
            comm->driver->event_create(&comm->ring[i].event, FSDPC_CU_EVENT_DISABLE_TIMING),
            "an event of communicator %s", comm->name));
    }
    return FSDPC_OK;
}

int
fsdpc_nccl_watch_start(nccl_comm *comm)
{
    pthread_attr_t attr;
    sigset_t all, before;
    FSDPC_TRY(make_events(comm));
    comm->life = FSDPC_NCCL_WATCHING; /* set before the thread reads `life` */
    int rc = pthread_attr_init(&attr);
    if (rc == 0) {
        pthread_attr_setstacksize(&attr, STACK_BYTES);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        rc = pthread_create(&comm->thread, &attr, watch, comm);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
    }
    if (rc == 0) {
        return FSDPC_OK;
    }
    comm->life = FSDPC_NCCL_UNWATCHED;
    return fsdpc_error_errno(rc, "starting the thread that watches NCCL");
}

/* Waits until the thread has ended or the time limit has passed, and returns the state at that time. The
 * limit is short after a failure, else long: a thread still inside NCCL at exit may crash the process. */
static enum fsdpc_nccl_life
stop_thread(nccl_comm *comm)
{
    const int wait_ms = fsdpc_comm_check(&comm->base) == FSDPC_OK ? PEACE_MS : END_MS;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += wait_ms / 1000;
    pthread_mutex_lock(&comm->lock);
    if (comm->life == FSDPC_NCCL_WATCHING || comm->life == FSDPC_NCCL_ABORTED) {
        comm->life = FSDPC_NCCL_STOPPING;
        pthread_cond_broadcast(&comm->changed);
    }
    while (comm->life == FSDPC_NCCL_STOPPING &&
           pthread_cond_timedwait(&comm->changed, &comm->lock, &until) == 0) {}
    const enum fsdpc_nccl_life life = comm->life;
    pthread_mutex_unlock(&comm->lock);
    return life;
}

void
fsdpc_nccl_close(nccl_comm *comm)
{
    double end = fsdpc_nccl_now_s() + PARTING_S;
    if (fsdpc_nccl_is_forked(comm)) {
        return;
    }
    (void)fsdpc_nccl_use_context(comm);
    while (!is_idle(comm) && fsdpc_comm_check(&comm->base) == FSDPC_OK &&
           fsdpc_nccl_now_s() < end) {
        fsdpc_nccl_nap(1000);
    }
    (void)stop_thread(comm);
}

/* If the thread is still waiting for NCCL, leaves the freeing of `comm` to the thread, and returns true. */
static bool
orphan(nccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    const bool frees = comm->life == FSDPC_NCCL_STOPPING;
    if (frees) {
        comm->life = FSDPC_NCCL_ORPHANED;
        pthread_detach(comm->thread);
    }
    pthread_mutex_unlock(&comm->lock);
    return frees;
}

void
fsdpc_nccl_end(nccl_comm *comm)
{
    if (fsdpc_nccl_is_forked(comm)) {
        return;
    }
    if (stop_thread(comm) == FSDPC_NCCL_UNWATCHED) {
        (void)end_nccl(comm);
    } else if (orphan(comm)) {
        return;
    } else {
        pthread_join(comm->thread, NULL);
    }
    dispose(comm);
}
