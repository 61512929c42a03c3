/* Collectives on host memory, for communicators whose own collectives work on device memory.
 *
 * All of them use `exchange`, an all-gather of host memory that these communicators
 * have for small messages outside of steps. Large buffers are sent in windows of
 * WINDOW_BYTES, so that a rank needs memory for only `world` windows.
 */
#include <string.h>

#include "comm/comm_impl.h"
#include "base/mem.h"
#include "base/status.h"

enum { WINDOW_BYTES = 1024 * 1024 };

/* Buffers of a reduction: one window per rank, and one window in the type of the sums. */
typedef struct host_sum {
    fsdpc_comm *comm;
    fsdpc_device *device;
    fsdpc_dtype dtype;
    enum fsdpc_op op;
    const char *what;
    int64_t window; /* elements of one window */
    char *rows;
    void *wide;
    const void **from;
} host_sum;

static int
exchange(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    int status = comm->ops->exchange(comm, buffer, piece_bytes, what);
    if (fsdpc_comm_say_numbers(comm, status) != FSDPC_OK) {
        fsdpc_comm_break(comm, status, fsdpc_error_text());
    }
    return status;
}

static const char *
name_of(const char *what, const char *op)
{
    return what && what[0] ? what : op;
}

int
fsdpc_comm_host_all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    if (!comm->ops->exchange) {
        return fsdpc_comm_all_gather(comm, buffer, piece_bytes, what);
    }
    FSDPC_TRY(fsdpc_comm_check(comm));
    return piece_bytes ? exchange(comm, buffer, piece_bytes, name_of(what, "all_gather"))
                       : FSDPC_OK;
}

int
fsdpc_comm_host_broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    int status = FSDPC_OK;
    if (!comm->ops->exchange) {
        return fsdpc_comm_broadcast(comm, buffer, bytes, root, what);
    }
    FSDPC_TRY(fsdpc_comm_check(comm));
    what = name_of(what, "broadcast");
    if (root < 0 || root >= comm->world) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: root %d is not a rank of a group of %d", what, root,
                           comm->world);
    }
    size_t window = bytes < WINDOW_BYTES ? bytes : WINDOW_BYTES;
    char *rows = fsdpc_mem_calloc((size_t)comm->world, window ? window : 1);
    if (!rows) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %zu bytes of each rank", what, window);
    }
    for (size_t at = 0; at < bytes; at += window) {
        size_t part = bytes - at < window ? bytes - at : window;
        if (comm->rank == root) {
            memcpy(rows + (size_t)root * part, (char *)buffer + at, part);
        }
        FSDPC_GOTO(exchange(comm, rows, part, what), end);
        memcpy((char *)buffer + at, rows + (size_t)root * part, part);
    }
end:
    fsdpc_mem_free(rows);
    return status;
}

/* --- sums ------------------------------------------------------------------------------------- */

static void
end_sum(host_sum *sum)
{
    fsdpc_mem_free(sum->rows);
    fsdpc_mem_free(sum->wide);
    fsdpc_mem_free(sum->from);
}

static int
begin_sum(host_sum *sum, int64_t numel)
{
    size_t item = fsdpc_dtype_bytes(sum->dtype);
    size_t world = (size_t)sum->comm->world;
    FSDPC_TRY(fsdpc_device_cpu(&sum->device));
    sum->window = WINDOW_BYTES / (int64_t)item;
    sum->window = numel < sum->window ? numel : sum->window;
    sum->rows = fsdpc_mem_calloc(world, (size_t)sum->window * item + 1);
    sum->wide = fsdpc_mem_calloc((size_t)sum->window + 1, sizeof(float));
    sum->from = fsdpc_mem_calloc(world, sizeof *sum->from);
    if (!sum->rows || !sum->wide || !sum->from) {
        end_sum(sum);
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %lld elements of each rank", sum->what,
                           (long long)sum->window);
    }
    return FSDPC_OK;
}

static int
combine(const host_sum *sum, void *dst, int64_t n)
{
    int world = sum->comm->world;
    if (sum->op != FSDPC_SUM) {
        fsdpc_comm_extreme(dst, sum->from, world, sum->dtype, n, sum->op == FSDPC_MAX);
        return FSDPC_OK;
    }
    if (fsdpc_dtype_accumulate(sum->dtype) == sum->dtype) {
        return fsdpc_device_reduce(sum->device, dst, sum->dtype, sum->from, world, sum->dtype, n,
                                   1.0, false);
    }
    FSDPC_TRY(fsdpc_device_reduce(sum->device, sum->wide, FSDPC_F32, sum->from, world, sum->dtype,
                                  n, 1.0, false));
    return fsdpc_device_cast(sum->device, dst, sum->dtype, sum->wide, FSDPC_F32, n, 1.0);
}

/* Reduces all ranks' `values` into `dst`, in rank order. `dst` NULL: this rank does not need the result. */
static int
sum_values(const host_sum *sum, void *dst, const char *values, int64_t numel)
{
    size_t item = fsdpc_dtype_bytes(sum->dtype);
    for (int64_t at = 0; at < numel; at += sum->window) {
        int64_t n = numel - at < sum->window ? numel - at : sum->window;
        size_t bytes = (size_t)n * item;
        memcpy(sum->rows + (size_t)sum->comm->rank * bytes, values + (size_t)at * item, bytes);
        FSDPC_TRY(exchange(sum->comm, sum->rows, bytes, sum->what));
        for (int rank = 0; rank < sum->comm->world; rank++) {
            sum->from[rank] = sum->rows + (size_t)rank * bytes;
        }
        if (dst) {
            FSDPC_TRY(combine(sum, (char *)dst + (size_t)at * item, n));
        }
    }
    return FSDPC_OK;
}

static int
check_sum(const host_sum *sum)
{
    FSDPC_TRY(fsdpc_comm_check(sum->comm));
    if (!fsdpc_dtype_is_float(sum->dtype)) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: elements of this type cannot be reduced", sum->what);
    }
    return FSDPC_OK;
}

int
fsdpc_comm_host_all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                           enum fsdpc_op op, const char *what)
{
    host_sum sum = {.comm = comm, .dtype = dtype, .op = op, .what = name_of(what, "all_reduce")};
    if (!comm->ops->exchange) {
        return fsdpc_comm_all_reduce(comm, buffer, numel, dtype, op, what);
    }
    FSDPC_TRY(check_sum(&sum));
    FSDPC_TRY(begin_sum(&sum, numel));
    int status = sum_values(&sum, buffer, buffer, numel);
    end_sum(&sum);
    return status;
}

int
fsdpc_comm_host_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                               fsdpc_dtype dtype, const char *what)
{
    host_sum sum = {.comm = comm, .dtype = dtype, .what = name_of(what, "reduce_scatter")};
    if (!comm->ops->exchange) {
        return fsdpc_comm_reduce_scatter(comm, buffer, piece_numel, dtype, what);
    }
    FSDPC_TRY(check_sum(&sum));
    FSDPC_TRY(begin_sum(&sum, piece_numel));
    int status = FSDPC_OK;
    for (int rank = 0; rank < comm->world; rank++) {
        char *piece = (char *)buffer + (size_t)(rank * piece_numel) * fsdpc_dtype_bytes(dtype);
        FSDPC_GOTO(sum_values(&sum, rank == comm->rank ? piece : NULL, piece, piece_numel), end);
    }
end:
    end_sum(&sum);
    return status;
}
