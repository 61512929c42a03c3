/* Single calls of NCCL, and the collectives that are made of such calls.
 *
 * NCCL runs in non-blocking mode, so each call may return ncclInProgress. No
 * other call on the communicator or its stream may follow until the call in
 * progress has ended: fsdpc_nccl_complete() polls for this until the deadline.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "base/deadline.h"
#include "comm/comm_nccl_impl.h"
#include "base/status.h"

#define SPIN_S 300e-6

static int
refused(nccl_comm *comm, fsdpc_nccl_result result, const char *what)
{
    return fsdpc_error(FSDPC_E_COMM, "rank %d: %s: NCCL returned \"%s\" (%d): %s", comm->base.rank,
                       what, comm->nccl->error_string(result), result,
                       comm->nccl->last_error(comm->handle));
}

/* Returns FSDPC_OK while NCCL's communicator exists, else an error. The caller holds `calls`. */
static int
still_there(const nccl_comm *comm, const char *what)
{
    if (comm->handle) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_comm_check(&comm->base));
    return fsdpc_error(FSDPC_E_STATE, "%s: the communicator is closed", what);
}

/* Checks for Ctrl-C. Releases `calls` during the check, because the
 * interpreter may run a signal handler that calls this communicator. */
static int
check_signals(nccl_comm *comm, const char *what)
{
    if (!fsdpc_shm_interrupt_check) {
        return FSDPC_OK;
    }
    pthread_mutex_unlock(&comm->calls);
    const int interrupted = fsdpc_shm_interrupt_check();
    pthread_mutex_lock(&comm->calls);
    return interrupted
               ? fsdpc_error(FSDPC_E_INTERRUPT, "rank %d: %s: interrupted", comm->base.rank, what)
               : still_there(comm, what);
}

/* NCCL enqueues a collective within about 50 us, from a thread of its own. A sleep would take longer,
 * and a step has many collectives, so the first waits only yield. A longer call waits for other ranks. */
static void
await_progress(double waited_s)
{
    if (waited_s < SPIN_S) {
        (void)sched_yield();
    } else {
        fsdpc_nccl_nap(100);
    }
}

static int
late_call(const nccl_comm *comm, const char *what)
{
    char call[FSDPC_NCCL_OLDEST_BYTES];
    snprintf(call, sizeof call, "%s (communicator %s)", what, comm->name);
    const fsdpc_late late = {
        .rank = comm->base.rank, .seconds = comm->options.timeout_s, .what = call};
    return fsdpc_late_error(&late);
}

/* `result` is the return value of the latest NCCL call. The caller holds `calls`. */
int
fsdpc_nccl_complete(nccl_comm *comm, fsdpc_nccl_result result, const char *what)
{
    const double begin = result == FSDPC_NCCL_IN_PROGRESS ? fsdpc_nccl_now_s() : 0;
    double next_check = begin + FSDPC_NCCL_SIGNALS_S;
    while (result == FSDPC_NCCL_IN_PROGRESS) {
        const double now = fsdpc_nccl_now_s();
        FSDPC_TRY(fsdpc_comm_check(&comm->base));
        if (now - begin > comm->options.timeout_s) {
            return late_call(comm, what);
        }
        if (now > next_check) {
            next_check = now + FSDPC_NCCL_SIGNALS_S;
            FSDPC_TRY(check_signals(comm, what));
        }
        await_progress(now - begin);
        fsdpc_nccl_result state = FSDPC_NCCL_SUCCESS;
        result = comm->nccl->async_error(comm->handle, &state);
        result = result == FSDPC_NCCL_SUCCESS ? state : result;
    }
    return result == FSDPC_NCCL_SUCCESS ? FSDPC_OK : refused(comm, result, what);
}

static fsdpc_cu_stream
stream_of(const nccl_comm *comm)
{
    fsdpc_cu_stream stream = NULL;
    if (fsdpc_device_get_caps(comm->base.device)->asynchronous) {
        fsdpc_stream *current = fsdpc_device_current(comm->base.device);
        memcpy(&stream, &current, sizeof stream);
    }
    return stream;
}

/* Ends a group of calls, even after a failure. NCCL makes one kernel of a group, so all parts progress. */
static fsdpc_nccl_result
end_group(const fsdpc_nccl *nccl, fsdpc_nccl_result result)
{
    const fsdpc_nccl_result end = nccl->group_end();
    return result == FSDPC_NCCL_SUCCESS ? end : result;
}

static fsdpc_nccl_result
issue_all_to_all(const nccl_comm *comm, const fsdpc_nccl_order *o)
{
    const fsdpc_nccl *nccl = comm->nccl;
    fsdpc_nccl_result result = nccl->group_start();
    size_t at = 0;
    for (int r = 0; r < comm->base.world; r++) {
        if (r == comm->base.rank) {
            continue;
        }
        for (int sends = 1; sends >= 0 && result == FSDPC_NCCL_SUCCESS; sends--) {
            result = sends ? nccl->send(o->buffer + at, o->count, FSDPC_NCCL_UINT8, r, comm->handle,
                                        o->stream)
                           : nccl->receive(o->landing + at, o->count, FSDPC_NCCL_UINT8, r,
                                           comm->handle, o->stream);
            result = result == FSDPC_NCCL_IN_PROGRESS ? FSDPC_NCCL_SUCCESS : result;
        }
        at += o->count;
    }
    return end_group(nccl, result);
}

static fsdpc_nccl_result
issue(const nccl_comm *comm, const fsdpc_nccl_order *o)
{
    const fsdpc_nccl *nccl = comm->nccl;
    fsdpc_nccl_type type = fsdpc_nccl_type_of(o->dtype);
    char *own = o->buffer + (size_t)comm->base.rank * o->count * fsdpc_dtype_bytes(o->dtype);
    switch (o->kind) {
    case FSDPC_NCCL_GATHER:
        return nccl->all_gather(own, o->buffer, o->count, type, comm->handle, o->stream);
    case FSDPC_NCCL_SCATTER:
        return nccl->reduce_scatter(o->buffer, own, o->count, type, o->op, comm->handle, o->stream);
    case FSDPC_NCCL_REDUCE:
        return nccl->all_reduce(o->buffer, o->buffer, o->count, type, o->op, comm->handle,
                                o->stream);
    case FSDPC_NCCL_ALL_TO_ALL:
        return issue_all_to_all(comm, o);
    default:
        return nccl->broadcast(o->buffer, o->buffer, o->count, type, o->root, comm->handle,
                               o->stream);
    }
}

static size_t
bytes_of(const nccl_comm *comm, const fsdpc_nccl_order *o)
{
    size_t bytes = o->count * fsdpc_dtype_bytes(o->dtype);
    return o->kind == FSDPC_NCCL_REDUCE || o->kind == FSDPC_NCCL_BROADCAST
               ? bytes
               : bytes * (size_t)comm->base.world;
}

/* Returns the fsdpc_nccl_order (comm_nccl_impl.h) that enqueues one of several parts. */
static fsdpc_nccl_order
order_of(enum fsdpc_nccl_kind kind, const fsdpc_comm_part *part, fsdpc_cu_stream stream)
{
    fsdpc_nccl_order o = {.kind = kind,
                          .buffer = part->buffer,
                          .count = (size_t)part->piece_numel,
                          .dtype = part->dtype,
                          .op = FSDPC_NCCL_SUM,
                          .stream = stream};
    return o;
}

static fsdpc_nccl_result
issue_parts(const nccl_comm *comm, enum fsdpc_nccl_kind kind, const fsdpc_comm_part *parts,
            int count, fsdpc_cu_stream stream, size_t *bytes)
{
    fsdpc_nccl_result result = comm->nccl->group_start();
    for (int i = 0; i < count && result == FSDPC_NCCL_SUCCESS; i++) {
        fsdpc_nccl_order o = order_of(kind, &parts[i], stream);
        *bytes += bytes_of(comm, &o);
        result = o.count ? issue(comm, &o) : FSDPC_NCCL_SUCCESS;
        result = result == FSDPC_NCCL_IN_PROGRESS ? FSDPC_NCCL_SUCCESS : result;
    }
    return end_group(comm->nccl, result);
}

void
fsdpc_nccl_break(nccl_comm *comm, int status)
{
    fsdpc_nccl_fail(comm, status == FSDPC_E_INTERRUPT ? FSDPC_E_COMM : status, "%s",
                    fsdpc_error_text());
}

/* Enqueues one order or, if `o` is NULL, several parts of one kind, and adds the collective to the ring. */
static int
put(nccl_comm *comm, fsdpc_nccl_order *o, enum fsdpc_nccl_kind kind, const fsdpc_comm_part *parts,
    int count, const char *what)
{
    int status = FSDPC_OK;
    size_t bytes = o ? bytes_of(comm, o) : 0;
    const fsdpc_cu_stream stream = o && o->stream ? o->stream : stream_of(comm);
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    pthread_mutex_lock(&comm->calls);
    FSDPC_GOTO(still_there(comm, what), end);
    if (o) {
        o->stream = stream;
        FSDPC_GOTO(fsdpc_nccl_complete(comm, issue(comm, o), what), end);
    } else {
        FSDPC_GOTO(
            fsdpc_nccl_complete(comm, issue_parts(comm, kind, parts, count, stream, &bytes), what),
            end);
    }
    FSDPC_GOTO(fsdpc_nccl_watch_add(comm, stream, what, bytes), end);
end:
    pthread_mutex_unlock(&comm->calls);
    if (status != FSDPC_OK) {
        fsdpc_nccl_break(comm, status);
    }
    return status;
}

int
fsdpc_nccl_run(nccl_comm *comm, fsdpc_nccl_order *o, const char *what)
{
    return put(comm, o, FSDPC_NCCL_GATHER, NULL, 0, what);
}

int
fsdpc_nccl_run_parts(nccl_comm *comm, enum fsdpc_nccl_kind kind, const fsdpc_comm_part *parts,
                     int count, const char *what)
{
    return put(comm, NULL, kind, parts, count, what);
}
