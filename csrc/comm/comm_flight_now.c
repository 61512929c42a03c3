/* Blocking collectives: flights that land at once. A sum receives all pieces and adds them in rank order. */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/comm_impl.h"
#include "comm/flight.h"

static fsdpc_mark
mark_of(enum fsdpc_now kind, uint64_t size)
{
    return (fsdpc_mark){.words = {(int32_t)kind, (int32_t)(uint32_t)(size ^ size >> 32)}};
}

int
fsdpc_flight_all_gather_now(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    const fsdpc_comm_part part = {buffer, (int64_t)piece_bytes, FSDPC_BYTES};
    const fsdpc_mark mark = mark_of(FSDPC_NOW_GATHER, piece_bytes);
    return fsdpc_flight_now(comm, &part, NULL, &mark, what);
}

/* dst = the sum of the sources' n elements, in F32 (for F64: in F64), rounded once. dst may be a source. */
static int
sum(const fsdpc_comm *comm, void *dst, const void *const *sources, int64_t n, fsdpc_dtype dtype,
    const char *what)
{
    int status = FSDPC_OK;
    const fsdpc_dtype wide = dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
    void *total = fsdpc_mem_calloc((size_t)n, fsdpc_dtype_bytes(wide));
    if (!total) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for a sum", what);
    }
    FSDPC_GOTO(
        fsdpc_device_reduce(comm->device, total, wide, sources, comm->world, dtype, n, 1.0, false),
        done);
    FSDPC_GOTO(fsdpc_device_cast(comm->device, dst, dtype, total, wide, n, 1.0), done);
done:
    fsdpc_mem_free(total);
    return status;
}

static int
scatter(fsdpc_comm *comm, char *buffer, int64_t piece_numel, fsdpc_dtype dtype, enum fsdpc_now kind,
        const char *what)
{
    int status = FSDPC_OK;
    const size_t bytes = (size_t)piece_numel * fsdpc_dtype_bytes(dtype), offset = 0;
    const size_t others = (size_t)(comm->world - 1);
    const fsdpc_comm_part part = {buffer, piece_numel, dtype};
    const fsdpc_mark mark = mark_of(kind, bytes);
    const void **sources = fsdpc_mem_calloc(others + 1, sizeof *sources);
    char *room = fsdpc_mem_calloc(others, bytes), *own = buffer + bytes * (size_t)comm->rank;
    const fsdpc_landing landing = {room, bytes, &offset};
    if (!sources || !room) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the pieces of %d ranks", what,
                               comm->world),
                   done);
    }
    FSDPC_GOTO(fsdpc_flight_now(comm, &part, &landing, &mark, what), done);
    for (int r = 0, at = 0; r < comm->world; r++) {
        sources[r] = r == comm->rank ? own : room + bytes * (size_t)at++;
    }
    FSDPC_GOTO(sum(comm, own, sources, piece_numel, dtype, what), done);
done:
    fsdpc_mem_free(sources);
    (fsdpc_comm_has_lost(comm) ? fsdpc_mem_leave : fsdpc_mem_free)(room);
    return status;
}

int
fsdpc_flight_reduce_scatter_now(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                                fsdpc_dtype dtype, const char *what)
{
    return scatter(comm, buffer, piece_numel, dtype, FSDPC_NOW_SCATTER, what);
}

/* Sums a few elements: every rank receives all elements of all other ranks. */
static int
sum_whole(fsdpc_comm *comm, char *buffer, int64_t numel, fsdpc_dtype dtype, const char *what)
{
    int status = FSDPC_OK;
    const size_t bytes = (size_t)numel * fsdpc_dtype_bytes(dtype), world = (size_t)comm->world;
    const fsdpc_mark mark = mark_of(FSDPC_NOW_SUM, bytes);
    const void **sources = fsdpc_mem_calloc(world, sizeof *sources);
    char *all = fsdpc_mem_calloc(world, bytes);
    const fsdpc_comm_part part = {all, numel, dtype};
    if (!sources || !all) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for a sum", what), done);
    }
    memcpy(all + bytes * (size_t)comm->rank, buffer, bytes);
    FSDPC_GOTO(fsdpc_flight_now(comm, &part, NULL, &mark, what), done);
    for (size_t r = 0; r < world; r++) {
        sources[r] = all + bytes * r;
    }
    FSDPC_GOTO(sum(comm, buffer, sources, numel, dtype, what), done);
done:
    fsdpc_mem_free(sources);
    (fsdpc_comm_has_lost(comm) ? fsdpc_mem_leave : fsdpc_mem_free)(all);
    return status;
}

int
fsdpc_flight_sum_now(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                     const char *what)
{
    enum { FEW_BYTES = 64 << 10 };
    const size_t item = fsdpc_dtype_bytes(dtype);
    const int64_t piece = (size_t)numel * item > FEW_BYTES ? numel / comm->world : 0;
    const int64_t even = piece * comm->world;
    if (piece > 0) {
        FSDPC_TRY(scatter(comm, buffer, piece, dtype, FSDPC_NOW_SUM, what));
        FSDPC_TRY(fsdpc_flight_all_gather_now(comm, buffer, (size_t)piece * item, what));
    }
    return even < numel
               ? sum_whole(comm, (char *)buffer + (size_t)even * item, numel - even, dtype, what)
               : FSDPC_OK;
}
