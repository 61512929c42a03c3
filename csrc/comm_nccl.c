/* The communicator over NCCL: starting it, and its collectives. See comm_nccl.h.
 *
 * NCCL is told not to block, so each of its calls may answer "in progress"; nothing may follow on
 * the communicator or on its stream until it is done, which fsdpc_nccl_settle() awaits with the deadline.
 */
#include "comm_nccl.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "agree.h"
#include "comm_nccl_impl.h"
#include "mem.h"
#include "status.h"

#define SPIN_S 300e-6
#define LOOK_S 0.1 /* between looks for Ctrl-C */

static nccl_comm *
of(fsdpc_comm *comm)
{
    return (nccl_comm *)comm;
}

/* --- one call of NCCL ------------------------------------------------------------------------------- */

static int
refused(nccl_comm *comm, fsdpc_nccl_result result, const char *what)
{
    return fsdpc_error(FSDPC_E_COMM, "rank %d: %s: NCCL answers \"%s\" (%d): %s", comm->base.rank,
                       what, comm->nccl->error_string(result), result,
                       comm->nccl->last_error(comm->handle));
}

/* `calls` is held. Nothing may be asked of NCCL once this is not FSDPC_OK. */
static int
still_there(const nccl_comm *comm, const char *what)
{
    if (comm->handle) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_comm_check(&comm->base));
    return fsdpc_error(FSDPC_E_STATE, "%s: the communicator has ended", what);
}

/* Without `calls`: the interpreter may run a handler of the user's, which may come back here. */
static int
look_for_signals(nccl_comm *comm, const char *what)
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

/* NCCL puts a collective on its stream within some 50 us, from a thread of its own: a sleep would be
 * longer, and a step has many. What takes longer than that waits for other ranks. */
static void
await_progress(double waited_s)
{
    if (waited_s < SPIN_S) {
        (void)sched_yield();
    } else {
        fsdpc_nccl_nap(100);
    }
}

/* `result` of the call just made; `calls` is held. */
int
fsdpc_nccl_settle(nccl_comm *comm, fsdpc_nccl_result result, const char *what)
{
    const double begin = result == FSDPC_NCCL_IN_PROGRESS ? fsdpc_nccl_now_s() : 0;
    double look = begin + LOOK_S;
    while (result == FSDPC_NCCL_IN_PROGRESS) {
        const double now = fsdpc_nccl_now_s();
        if (atomic_load(&comm->abort_wanted)) {
            return fsdpc_comm_check(&comm->base);
        }
        if (now - begin > comm->options.timeout_s) {
            return fsdpc_error(FSDPC_E_TIMEOUT,
                               "rank %d: %s: NCCL has been busy for %g s (communicator %s): not "
                               "all ranks have come",
                               comm->base.rank, what, comm->options.timeout_s, comm->name);
        }
        if (now > look) {
            look = now + LOOK_S;
            FSDPC_TRY(look_for_signals(comm, what));
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
    fsdpc_cu_stream stream = comm->stream;
    if (!stream && fsdpc_device_get_caps(comm->base.device)->asynchronous) {
        fsdpc_stream *current = fsdpc_device_current(comm->base.device);
        memcpy(&stream, &current, sizeof stream);
    }
    return stream;
}

/* What a collective does, with `calls` held. */
typedef struct order {
    enum { GATHER, SCATTER, REDUCE, SEND } kind;
    char *buffer;
    size_t count; /* of a piece */
    fsdpc_dtype dtype;
    fsdpc_nccl_op op;
    int root;
    fsdpc_cu_stream stream;
} order;

static fsdpc_nccl_result
issue(const nccl_comm *comm, const order *o)
{
    const fsdpc_nccl *nccl = comm->nccl;
    fsdpc_nccl_type type = fsdpc_nccl_type_of(o->dtype);
    char *own = o->buffer + (size_t)comm->base.rank * o->count * fsdpc_dtype_bytes(o->dtype);
    switch (o->kind) {
    case GATHER:
        return nccl->all_gather(own, o->buffer, o->count, type, comm->handle, o->stream);
    case SCATTER:
        return nccl->reduce_scatter(o->buffer, own, o->count, type, o->op, comm->handle, o->stream);
    case REDUCE:
        return nccl->all_reduce(o->buffer, o->buffer, o->count, type, o->op, comm->handle,
                                o->stream);
    default:
        return nccl->broadcast(o->buffer, o->buffer, o->count, type, o->root, comm->handle,
                               o->stream);
    }
}

static size_t
bytes_of(const nccl_comm *comm, const order *o)
{
    size_t bytes = o->count * fsdpc_dtype_bytes(o->dtype);
    return o->kind == GATHER || o->kind == SCATTER ? bytes * (size_t)comm->base.world : bytes;
}

/* A part of several, as an order. */
static order
order_of(int kind, const fsdpc_comm_part *part, fsdpc_cu_stream stream)
{
    order o = {.buffer = part->buffer,
               .count = (size_t)part->piece_numel,
               .dtype = part->dtype,
               .op = FSDPC_NCCL_SUM,
               .stream = stream};
    o.kind = kind == GATHER ? GATHER : SCATTER;
    return o;
}

/* NCCL makes one kernel of a group. What fails inside it is told when the group is closed: it must be. */
static fsdpc_nccl_result
issue_parts(const nccl_comm *comm, int kind, const fsdpc_comm_part *parts, int count,
            fsdpc_cu_stream stream, size_t *bytes)
{
    fsdpc_nccl_result result = comm->nccl->group_start();
    for (int i = 0; i < count && result == FSDPC_NCCL_SUCCESS; i++) {
        order o = order_of(kind, &parts[i], stream);
        *bytes += bytes_of(comm, &o);
        result = o.count ? issue(comm, &o) : FSDPC_NCCL_SUCCESS;
        result = result == FSDPC_NCCL_IN_PROGRESS ? FSDPC_NCCL_SUCCESS : result;
    }
    const fsdpc_nccl_result end = comm->nccl->group_end();
    return result == FSDPC_NCCL_SUCCESS ? end : result;
}

/* An interrupt is raised once: what is asked later fails because this rank gave up. */
static void
break_by(nccl_comm *comm, int status)
{
    fsdpc_nccl_fail(comm, status == FSDPC_E_INTERRUPT ? FSDPC_E_COMM : status, "%s",
                    fsdpc_error_text());
}

/* One order, or (o NULL) several parts of one kind. */
static int
put(nccl_comm *comm, order *o, int kind, const fsdpc_comm_part *parts, int count, const char *what)
{
    int status = FSDPC_OK;
    size_t bytes = o ? bytes_of(comm, o) : 0;
    const fsdpc_cu_stream stream = o && o->stream ? o->stream : stream_of(comm);
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    pthread_mutex_lock(&comm->calls);
    FSDPC_GOTO(still_there(comm, what), end);
    if (o) {
        o->stream = stream;
        FSDPC_GOTO(fsdpc_nccl_settle(comm, issue(comm, o), what), end);
    } else {
        FSDPC_GOTO(
            fsdpc_nccl_settle(comm, issue_parts(comm, kind, parts, count, stream, &bytes), what),
            end);
    }
    FSDPC_GOTO(fsdpc_nccl_watch_add(comm, stream, what, bytes), end);
end:
    pthread_mutex_unlock(&comm->calls);
    if (status != FSDPC_OK) {
        break_by(comm, status);
    }
    return status;
}

static int
run(nccl_comm *comm, order *o, const char *what)
{
    return put(comm, o, 0, NULL, 0, what);
}

/* --- the table ---------------------------------------------------------------------------------------- */

static int
all_gather_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return put(of(comm), NULL, GATHER, parts, count, what);
}

static int
reduce_scatter_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return put(of(comm), NULL, SCATTER, parts, count, what);
}

static int
all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    order o = {.kind = GATHER, .buffer = buffer, .count = piece_bytes, .dtype = FSDPC_BYTES};
    return run(of(comm), &o, what);
}

static int
reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    order o = {.kind = SCATTER,
               .buffer = buffer,
               .count = (size_t)piece_numel,
               .dtype = dtype,
               .op = FSDPC_NCCL_SUM};
    return run(of(comm), &o, what);
}

static int
all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    order o = {.kind = REDUCE,
               .buffer = buffer,
               .count = (size_t)numel,
               .dtype = dtype,
               .op = op == FSDPC_SUM   ? FSDPC_NCCL_SUM
                     : op == FSDPC_MAX ? FSDPC_NCCL_MAX
                                       : FSDPC_NCCL_MIN};
    return run(of(comm), &o, what);
}

static int
broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    order o = {.kind = SEND, .buffer = buffer, .count = bytes, .dtype = FSDPC_BYTES, .root = root};
    return run(of(comm), &o, what);
}

/* Only tells the thread: an abort of NCCL may take long. */
static void
abort_comm(fsdpc_comm *comm, const char *text)
{
    fsdpc_nccl_fail(of(comm), FSDPC_E_COMM, "rank %d gave up: %s", comm->rank, text);
}

/* What is on its way stays there: the group is given up. */
static int
interrupt_wait(fsdpc_comm *base)
{
    if (!fsdpc_shm_interrupt_check || !fsdpc_shm_interrupt_check()) {
        return FSDPC_OK;
    }
    abort_comm(base, "interrupted");
    return fsdpc_error(FSDPC_E_INTERRUPT, "rank %d: interrupted while waiting for NCCL",
                       base->rank);
}

static fsdpc_cu_result
query(nccl_comm *comm, uint64_t sequence)
{
    pthread_mutex_lock(&comm->lock);
    fsdpc_cu_result result =
        comm->driver->event_query(comm->ring[sequence % FSDPC_NCCL_RING].event);
    pthread_mutex_unlock(&comm->lock);
    return result;
}

int
fsdpc_comm_nccl_wait(fsdpc_comm *base)
{
    nccl_comm *comm = of(base);
    double look = fsdpc_nccl_now_s() + LOOK_S;
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    pthread_mutex_lock(&comm->lock);
    uint64_t end = comm->next;
    pthread_mutex_unlock(&comm->lock);
    /* The watching thread sets the deadline. */
    for (;;) {
        FSDPC_TRY(fsdpc_comm_check(base));
        fsdpc_cu_result result = query(comm, end - 1);
        if (result != FSDPC_CU_NOT_READY) {
            FSDPC_TRY(
                fsdpc_cuda_check(comm->driver, result, "rank %d: waiting for NCCL", base->rank));
            return fsdpc_comm_check(base);
        }
        if (fsdpc_nccl_now_s() > look) {
            look = fsdpc_nccl_now_s() + LOOK_S;
            FSDPC_TRY(interrupt_wait(base));
        }
        fsdpc_nccl_nap(50);
    }
}

/* --- host memory --------------------------------------------------------------------------------------- */

static size_t
staged_bytes(const nccl_comm *comm)
{
    return (size_t)comm->base.world * FSDPC_NCCL_STAGE_BYTES;
}

/* Made once, on the first use. */
static int
need_scratch(nccl_comm *comm, const char *what)
{
    fsdpc_cu_ptr block = 0;
    void *pinned = NULL;
    size_t bytes = staged_bytes(comm);
    if (comm->scratch) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_check(comm->driver, comm->driver->mem_alloc(&block, bytes),
                               "%s: %zu bytes of device memory", what, bytes));
    fsdpc_cu_result result = comm->driver->host_alloc(&pinned, bytes, 0);
    if (result != FSDPC_CU_SUCCESS) {
        (void)comm->driver->mem_free(block);
        return fsdpc_cuda_check(comm->driver, result, "%s: %zu bytes of pinned memory", what,
                                bytes);
    }
    comm->scratch = (char *)(uintptr_t)block;
    comm->pinned = pinned;
    return fsdpc_cuda_check(
        comm->driver, comm->driver->stream_create(&comm->staging, FSDPC_CU_STREAM_NON_BLOCKING, 0),
        "%s: a stream", what);
}

/* Own bytes at their place in comm->pinned; after, all ranks'. */
static int
exchange_staged(nccl_comm *comm, size_t piece_bytes, const char *what)
{
    const fsdpc_cuda_driver *driver = comm->driver;
    size_t all = piece_bytes * (size_t)comm->base.world;
    size_t own = piece_bytes * (size_t)comm->base.rank;
    fsdpc_cu_stream stream = comm->staging;
    order o = {.kind = GATHER,
               .buffer = comm->scratch,
               .count = piece_bytes,
               .dtype = FSDPC_BYTES,
               .stream = stream};
    FSDPC_TRY(
        fsdpc_cuda_check(driver,
                         driver->copy_to_device((fsdpc_cu_ptr)(uintptr_t)(comm->scratch + own),
                                                comm->pinned + own, piece_bytes, stream),
                         "%s: copying to the device", what));
    FSDPC_TRY(run(comm, &o, what));
    FSDPC_TRY(fsdpc_cuda_check(
        driver,
        driver->copy_to_host(comm->pinned, (fsdpc_cu_ptr)(uintptr_t)comm->scratch, all, stream),
        "%s: copying to the host", what));
    FSDPC_TRY(fsdpc_nccl_watch_add(comm, stream, what, all));
    return fsdpc_comm_nccl_wait(&comm->base);
}

/* An all-gather of host memory by way of the GPU, in windows. */
static int
exchange_over_gpu(nccl_comm *comm, char *buffer, size_t piece_bytes, const char *what)
{
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    FSDPC_TRY(need_scratch(comm, what));
    for (size_t at = 0; at < piece_bytes; at += FSDPC_NCCL_STAGE_BYTES) {
        size_t left = piece_bytes - at;
        size_t part = left < FSDPC_NCCL_STAGE_BYTES ? left : FSDPC_NCCL_STAGE_BYTES;
        memcpy(comm->pinned + (size_t)comm->base.rank * part,
               buffer + (size_t)comm->base.rank * piece_bytes + at, part);
        FSDPC_TRY(exchange_staged(comm, part, what));
        for (int rank = 0; rank < comm->base.world; rank++) {
            memcpy(buffer + (size_t)rank * piece_bytes + at, comm->pinned + (size_t)rank * part,
                   part);
        }
    }
    return FSDPC_OK;
}

/* Who cannot talk to the others on the host will not meet them on the GPU either. */
static int
exchange_on_host(nccl_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    if (!comm->options.exchange) {
        return exchange_over_gpu(comm, buffer, piece_bytes, what);
    }
    int status = comm->options.exchange(comm->options.context, buffer, piece_bytes, what);
    if (status != FSDPC_OK) {
        break_by(comm, status);
    }
    return status;
}

/* The host's channel is for words; what is large goes over the GPU, which is much faster. */
static int
exchange(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    if (piece_bytes * (size_t)comm->world > FSDPC_NCCL_WORDS_BYTES) {
        return exchange_over_gpu(of(comm), buffer, piece_bytes, what);
    }
    return exchange_on_host(of(comm), buffer, piece_bytes, what);
}

static const fsdpc_agree_record *
record_of(const void *context, int rank)
{
    return (const fsdpc_agree_record *)context + rank;
}

static int
agree(fsdpc_comm *comm, const char *text, const char *what)
{
    fsdpc_agree_record *records = fsdpc_mem_calloc((size_t)comm->world, sizeof *records);
    if (!records) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the texts of %d ranks", what,
                           comm->world);
    }
    int status = FSDPC_OK;
    fsdpc_agree_fill(&records[comm->rank], text);
    FSDPC_GOTO(exchange_on_host(of(comm), records, sizeof *records, what), end);
    FSDPC_GOTO(fsdpc_agree_compare(record_of, records, comm->world, what), end);
end:
    fsdpc_mem_free(records);
    return status;
}

/* Of the hosts: what is on streams may still be on its way. */
static int
barrier(fsdpc_comm *comm, const char *what)
{
    char *bytes = fsdpc_mem_calloc((size_t)comm->world, 1);
    if (!bytes) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %d bytes", what, comm->world);
    }
    int status = exchange_on_host(of(comm), bytes, 1, what);
    fsdpc_mem_free(bytes);
    return status;
}

/* --- the end -------------------------------------------------------------------------------------------- */

static bool
is_symmetric(const fsdpc_comm *comm)
{
    return ((const nccl_comm *)comm)->way == FSDPC_NCCL_WINDOWS;
}

static void
fail(fsdpc_comm *comm, int status, const char *text)
{
    char oldest[FSDPC_NCCL_OLDEST_BYTES];
    fsdpc_nccl_oldest(of(comm), oldest);
    fsdpc_nccl_fail(of(comm), status, "%s; rank %d is at %s", text, comm->rank, oldest);
}

static void
close_comm(fsdpc_comm *comm)
{
    fsdpc_nccl_part(of(comm));
}

void
fsdpc_nccl_dispose(nccl_comm *comm)
{
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
    pthread_cond_destroy(&comm->told);
    pthread_mutex_destroy(&comm->lock);
    pthread_mutex_destroy(&comm->calls);
    fsdpc_mem_free(comm);
}

static void
release(fsdpc_comm *base)
{
    nccl_comm *comm = of(base);
    void (*release_context)(void *) = comm->options.release;
    void *context = comm->options.context;
    if (fsdpc_nccl_watch_end(comm)) {
        fsdpc_nccl_dispose(comm);
    }
    if (release_context) {
        release_context(context);
    }
}

static const fsdpc_comm_ops nccl_ops = {
    .kind = "nccl",
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .barrier = barrier,
    .agree = agree,
    .all_gather_parts = all_gather_parts,
    .reduce_scatter_parts = reduce_scatter_parts,
    .abort = abort_comm,
    .fail = fail,
    .close = close_comm,
    .exchange = exchange,
    .register_memory = fsdpc_nccl_register,
    .forget_memory = fsdpc_nccl_forget,
    .is_symmetric = is_symmetric,
    .free = release,
};

/* --- the start ------------------------------------------------------------------------------------------- */

int
fsdpc_comm_nccl_id(char id[FSDPC_COMM_NCCL_ID_BYTES])
{
    const fsdpc_nccl *nccl;
    fsdpc_nccl_id made;
    FSDPC_TRY(fsdpc_nccl_get(&nccl));
    fsdpc_nccl_result result = nccl->get_unique_id(&made);
    if (result != FSDPC_NCCL_SUCCESS) {
        return fsdpc_error(FSDPC_E_COMM, "NCCL gives no unique id: %s", nccl->error_string(result));
    }
    memcpy(id, made.bytes, FSDPC_COMM_NCCL_ID_BYTES);
    return FSDPC_OK;
}

int
fsdpc_comm_nccl_describe(char *text, size_t bytes)
{
    const fsdpc_nccl *nccl;
    FSDPC_TRY(fsdpc_nccl_get(&nccl));
    snprintf(text, bytes, "NCCL %d.%d.%d (%s)", nccl->version / 10000, nccl->version / 100 % 100,
             nccl->version % 100, nccl->path);
    return FSDPC_OK;
}

/* Its context becomes this thread's: each of its calls sees to that. */
static int
enter(fsdpc_device *device)
{
    fsdpc_event *event = NULL;
    FSDPC_TRY(fsdpc_device_event_new(device, &event));
    int status = fsdpc_device_record(device, event);
    fsdpc_device_event_free(device, event);
    return status;
}

static int
make(fsdpc_device *device, int rank, int world, const fsdpc_comm_nccl_options *options,
     nccl_comm **out)
{
    const fsdpc_nccl *nccl;
    const fsdpc_cuda_driver *driver;
    fsdpc_cu_context context = NULL;
    if (world < 1 || rank < 0 || rank >= world) {
        return fsdpc_error(FSDPC_E_INVAL, "rank %d is not one of a group of %d", rank, world);
    }
    if (!(options->timeout_s > 0)) {
        return fsdpc_error(FSDPC_E_INVAL, "timeout_s is %g: a deadline above 0 is needed",
                           options->timeout_s);
    }
    FSDPC_TRY(fsdpc_cuda_driver_get(&driver));
    FSDPC_TRY(fsdpc_nccl_get(&nccl));
    FSDPC_TRY(enter(device));
    FSDPC_TRY(fsdpc_cuda_check(driver, driver->ctx_get_current(&context), "the CUDA context"));
    if (!context) {
        return fsdpc_error(FSDPC_E_STATE, "no CUDA context is current on this thread");
    }
    nccl_comm *comm = fsdpc_mem_calloc(1, sizeof *comm);
    if (!comm) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a communicator");
    }
    comm->base.ops = &nccl_ops;
    comm->base.device = device;
    comm->base.rank = rank;
    comm->base.world = world;
    comm->nccl = nccl;
    comm->driver = driver;
    comm->context = context;
    comm->options = *options;
    comm->options.poll_ms = options->poll_ms > 0 ? options->poll_ms : 50;
    snprintf(comm->name, sizeof comm->name, "%s", options->name ? options->name : "nccl");
    fsdpc_comm_nccl_set_stream(&comm->base, options->stream);
    pthread_mutex_init(&comm->calls, NULL);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->told, NULL);
    *out = comm;
    return FSDPC_OK;
}

/* With `calls` held, though nobody else knows of the communicator but its thread. */
static int
meet(nccl_comm *comm, const char *id)
{
    char what[FSDPC_NCCL_NAME_BYTES + 32];
    fsdpc_nccl_id unique;
    fsdpc_nccl_config config = fsdpc_nccl_config_new();
    memcpy(unique.bytes, id, sizeof unique.bytes);
    config.comm_name = comm->name;
    snprintf(what, sizeof what, "starting communicator %s", comm->name);
    fsdpc_nccl_result result =
        comm->nccl->init_rank(&comm->handle, comm->base.world, unique, comm->base.rank, &config);
    return fsdpc_nccl_settle(comm, result, what);
}

int
fsdpc_comm_nccl(fsdpc_device *device, int rank, int world, const char id[FSDPC_COMM_NCCL_ID_BYTES],
                const fsdpc_comm_nccl_options *options, fsdpc_comm **out)
{
    nccl_comm *comm = NULL;
    *out = NULL;
    int status = make(device, rank, world, options, &comm);
    if (status != FSDPC_OK) {
        if (options->release) {
            options->release(options->context);
        }
        return status;
    }
    FSDPC_GOTO(fsdpc_nccl_watch_start(comm), fail);
    pthread_mutex_lock(&comm->calls);
    status = meet(comm, id);
    pthread_mutex_unlock(&comm->calls);
    if (status != FSDPC_OK) {
        goto fail;
    }
    FSDPC_GOTO(fsdpc_nccl_try_registration(comm), fail);
    *out = &comm->base;
    return FSDPC_OK;
fail:
    fsdpc_comm_break(&comm->base, status, fsdpc_error_text());
    release(&comm->base);
    return status;
}

void
fsdpc_comm_nccl_set_stream(fsdpc_comm *comm, void *stream)
{
    memcpy(&of(comm)->stream, &stream, sizeof stream);
}
