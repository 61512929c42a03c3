/* The communicator over NCCL: its start, its table of functions and its end. See comm_nccl.h.
 */
#include "comm/comm_nccl.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "comm/comm_nccl_impl.h"
#include "base/forks.h"
#include "base/mem.h"
#include "base/status.h"

static nccl_comm *
of(fsdpc_comm *comm)
{
    return (nccl_comm *)comm;
}

/* --- the table -------------------------------------------------------------------------------- */

static int
all_gather_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return fsdpc_nccl_run_parts(of(comm), FSDPC_NCCL_GATHER, parts, count, what);
}

static int
reduce_scatter_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return fsdpc_nccl_run_parts(of(comm), FSDPC_NCCL_SCATTER, parts, count, what);
}

static int
all_reduce_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return fsdpc_nccl_run_parts(of(comm), FSDPC_NCCL_REDUCE, parts, count, what);
}

static int
all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    fsdpc_nccl_order o = {
        .kind = FSDPC_NCCL_GATHER, .buffer = buffer, .count = piece_bytes, .dtype = FSDPC_BYTES};
    return fsdpc_nccl_run(of(comm), &o, what);
}

static int
reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    fsdpc_nccl_order o = {.kind = FSDPC_NCCL_SCATTER,
                          .buffer = buffer,
                          .count = (size_t)piece_numel,
                          .dtype = dtype,
                          .op = FSDPC_NCCL_SUM};
    return fsdpc_nccl_run(of(comm), &o, what);
}

static int
all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    fsdpc_nccl_order o = {.kind = FSDPC_NCCL_REDUCE,
                          .buffer = buffer,
                          .count = (size_t)numel,
                          .dtype = dtype,
                          .op = op == FSDPC_SUM   ? FSDPC_NCCL_SUM
                                : op == FSDPC_MAX ? FSDPC_NCCL_MAX
                                                  : FSDPC_NCCL_MIN};
    return fsdpc_nccl_run(of(comm), &o, what);
}

static int
broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    fsdpc_nccl_order o = {.kind = FSDPC_NCCL_BROADCAST,
                          .buffer = buffer,
                          .count = bytes,
                          .dtype = FSDPC_BYTES,
                          .root = root};
    return fsdpc_nccl_run(of(comm), &o, what);
}

static int
all_to_all(fsdpc_comm *comm, void *pieces, void *landing, size_t bytes, const char *what)
{
    fsdpc_nccl_order o = {.kind = FSDPC_NCCL_ALL_TO_ALL,
                          .buffer = pieces,
                          .landing = landing,
                          .count = bytes,
                          .dtype = FSDPC_BYTES};
    return fsdpc_nccl_run(of(comm), &o, what);
}

/* Breaks the communicator and wakes the watching thread to call ncclCommAbort, which may take long. */
static void
abort_comm(fsdpc_comm *comm, const char *text)
{
    fsdpc_nccl_fail(of(comm), FSDPC_E_COMM, "rank %d gave up: %s", comm->rank, text);
}

/* --- properties ------------------------------------------------------------------------------- */

static bool
registers(const fsdpc_comm *comm)
{
    return ((const nccl_comm *)comm)->way != FSDPC_NCCL_NEITHER;
}

static bool
is_symmetric(const fsdpc_comm *comm)
{
    return ((const nccl_comm *)comm)->shares;
}

/* --- the end ---------------------------------------------------------------------------------- */

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
    fsdpc_nccl_close(of(comm));
}

static void
release(fsdpc_comm *base)
{
    nccl_comm *comm = of(base);
    void (*release_context)(void *) = comm->options.release;
    void *context = comm->options.context;
    fsdpc_nccl_end(comm);
    if (release_context) {
        release_context(context);
    }
}

static const fsdpc_comm_ops nccl_ops = {
    .kind = "nccl",
    .caps = {.names_absentees = true, .rounds_sums = true},
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .barrier = fsdpc_nccl_barrier,
    .agree = fsdpc_nccl_agree,
    .all_gather_parts = all_gather_parts,
    .reduce_scatter_parts = reduce_scatter_parts,
    .all_reduce_parts = all_reduce_parts,
    .all_to_all = all_to_all,
    .abort = abort_comm,
    .fail = fail,
    .close = close_comm,
    .exchange = fsdpc_nccl_exchange,
    .register_memory = fsdpc_nccl_register,
    .unregister_memory = fsdpc_nccl_unregister,
    .registers = registers,
    .is_symmetric = is_symmetric,
    .free = release,
};

bool
fsdpc_comm_is_nccl(const fsdpc_comm *comm)
{
    return comm->ops == &nccl_ops;
}

/* --- the start -------------------------------------------------------------------------------- */

int
fsdpc_comm_nccl_id(char id[FSDPC_COMM_NCCL_ID_BYTES])
{
    const fsdpc_nccl *nccl;
    fsdpc_nccl_id made;
    FSDPC_TRY(fsdpc_nccl_get(&nccl));
    fsdpc_nccl_result result = nccl->get_unique_id(&made);
    if (result != FSDPC_NCCL_SUCCESS) {
        return fsdpc_error(FSDPC_E_COMM, "NCCL returned no unique id: %s",
                           nccl->error_string(result));
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

/* Makes the device's CUDA context current on this thread, as every device call does. */
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
        return fsdpc_error(FSDPC_E_INVAL, "timeout_s is %g, but must be above 0",
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
    comm->base.forks = fsdpc_forks();
    comm->base.device = device;
    comm->base.rank = rank;
    comm->base.world = world;
    comm->base.timeout_s = options->timeout_s;
    comm->nccl = nccl;
    comm->driver = driver;
    comm->context = context;
    comm->owner = getpid();
    comm->options = *options;
    comm->options.poll_ms = options->poll_ms > 0 ? options->poll_ms : 50;
    snprintf(comm->name, sizeof comm->name, "%s", options->name ? options->name : "nccl");
    pthread_mutex_init(&comm->calls, NULL);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->changed, NULL);
    *out = comm;
    return FSDPC_OK;
}

/* The caller holds the mutex `calls`, because the watching thread is already running. */
static int
rendezvous(nccl_comm *comm, const char *id)
{
    char what[FSDPC_NCCL_NAME_BYTES + 32];
    fsdpc_nccl_id unique;
    fsdpc_nccl_config config = fsdpc_nccl_config_new();
    memcpy(unique.bytes, id, sizeof unique.bytes);
    config.comm_name = comm->name;
    snprintf(what, sizeof what, "starting communicator %s", comm->name);
    const fsdpc_nccl_result result =
        comm->nccl->init_rank(&comm->made, comm->base.world, unique, comm->base.rank, &config);
    comm->handle = comm->made;
    return fsdpc_nccl_complete(comm, result, what);
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
    status = rendezvous(comm, id);
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
