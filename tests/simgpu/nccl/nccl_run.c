/* The run of a collective: a rank lays out its data, waits for the others and takes the result.
 *
 * Sums follow a ring, as in the real library's ordinary kernels. The sum for rank d begins with rank d + 1,
 * adds the following ranks one by one and ends with rank d. (In an all-reduce, d is 0 for all elements.) The
 * sum is rounded to the element type after each addition. With the option rank_order, sums go from rank 0 up,
 * so that a reference can have the same bits; the real library does not specify its order. On windows, sums
 * of low precision are made in F32 and rounded once, as in the library's symmetric kernels.
 */
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "nccl_sim.h"

size_t
nccl_item(int type)
{
    switch (type) {
    case FSDPC_NCCL_FLOAT32:
        return 4;
    case FSDPC_NCCL_FLOAT64:
        return 8;
    case FSDPC_NCCL_FLOAT16:
    case FSDPC_NCCL_BFLOAT16:
        return 2;
    default:
        return 1;
    }
}

/* --- arithmetic ------------------------------------------------------------------------------------ */

static double
combine(double a, double b, int op)
{
    if (op == FSDPC_NCCL_SUM) {
        return a + b;
    }
    if (a != a || b != b) {
        return a + b;
    }
    return (op == FSDPC_NCCL_MAX) == (a > b) ? a : b;
}

static void
accumulate(char *acc, const char *src, size_t count, int type, int op)
{
    for (int64_t i = 0; i < (int64_t)count; i++) {
        switch (type) {
        case FSDPC_NCCL_FLOAT32:
            store_F32(acc, i,
                      op == FSDPC_NCCL_SUM
                          ? load_F32(acc, i) + load_F32(src, i)
                          : (float)combine(load_F32(acc, i), load_F32(src, i), op));
            break;
        case FSDPC_NCCL_FLOAT64:
            store_F64(acc, i, combine(load_F64(acc, i), load_F64(src, i), op));
            break;
        case FSDPC_NCCL_FLOAT16:
            store_F16(acc, i, (float)combine(load_F16(acc, i), load_F16(src, i), op));
            break;
        default:
            store_BF16(acc, i, (float)combine(load_BF16(acc, i), load_BF16(src, i), op));
            break;
        }
    }
}

/* --- rounds ------------------------------------------------------------------------------------------ */

static char *
place(const struct ncclComm *comm, int rank, uint64_t round)
{
    size_t header = (sizeof(nccl_segment) + 4095) / 4096 * 4096;
    return (char *)comm->segment + header + ((size_t)rank * 2 + round % 2) * ROUND_BYTES;
}

/* Returns how many items of each piece this round transfers. */
static size_t
round_items(const nccl_call *call)
{
    const int kind = call->request.kind;
    size_t pieces = kind == REDUCE_SCATTER || kind == ALL_TO_ALL ? (size_t)call->comm->world : 1;
    size_t most = ROUND_BYTES / nccl_item(call->request.type) / pieces;
    size_t left = call->request.count - call->done_items;
    return left < most ? left : most;
}

static void
lay_out(nccl_call *call)
{
    struct ncclComm *comm = call->comm;
    nccl_rank *mine = &comm->segment->ranks[comm->rank];
    size_t item = nccl_item(call->request.type), items = round_items(call);
    size_t from = call->done_items * item, piece = call->request.count * item;
    char *to = place(comm, comm->rank, comm->round);
    if (call->request.kind == REDUCE_SCATTER) {
        for (int r = 0; r < comm->world; r++) {
            memcpy(to + (size_t)r * items * item, call->send + (size_t)r * piece + from,
                   items * item);
        }
    } else if (call->request.kind == ALL_TO_ALL) {
        for (int r = 0; r < comm->world; r++) {
            if (r != comm->rank) {
                memcpy(to + (size_t)r * items * item, call->sends[r] + from, items * item);
            }
        }
    } else if (call->request.kind != BROADCAST || call->request.root == comm->rank) {
        memcpy(to, call->send + from, items * item);
    }
    mine->asked[comm->round % 2] = call->request;
    atomic_store(&mine->arrived, comm->round + 1);
    call->laid = true;
}

static bool
all_arrived(const struct ncclComm *comm)
{
    for (int r = 0; r < comm->world; r++) {
        if (atomic_load(&comm->segment->ranks[r].arrived) <= comm->round) {
            return false;
        }
    }
    return true;
}

const char *const nccl_kind_names[NCCL_KINDS] = {"all-gather", "reduce-scatter", "all-reduce",
                                                 "broadcast", "group of sends and receives"};

static const char *
kind_name(int kind)
{
    return kind >= 0 && kind < NCCL_KINDS ? nccl_kind_names[kind] : "(unknown)";
}

/* True if all ranks ask for the same collective; if they do not, a real library hangs or mixes up the
 * bytes. */
static bool
agreed(nccl_call *call)
{
    const nccl_request *mine = &call->request;
    for (int r = 0; r < call->comm->world; r++) {
        const nccl_request *other = &call->comm->segment->ranks[r].asked[call->comm->round % 2];
        if (memcmp(mine, other, sizeof *mine) != 0) {
            nccl_counters.mismatches++;
            if (mine->place != other->place) {
                simgpu_fault("collective %llu of rank %d: not all ranks use the same place of the "
                             "same window",
                             (unsigned long long)call->number, call->comm->rank);
            }
            simgpu_fault("collective %llu: rank %d asks for %s of %llu items (type %d, op %d, root "
                         "%d), rank %d for %s of %llu items (type %d, op %d, root %d)",
                         (unsigned long long)call->number, call->comm->rank, kind_name(mine->kind),
                         (unsigned long long)mine->count, mine->type, mine->op, mine->root, r,
                         kind_name(other->kind), (unsigned long long)other->count, other->type,
                         other->op, other->root);
            return false;
        }
    }
    return true;
}

/* Returns the rank that is added in step `step` (from 1 on) to the sum for the rank `destination`. */
static int
source_of(const struct ncclComm *comm, int destination, int step)
{
    return nccl_options.rank_order ? step - 1 : (destination + step) % comm->world;
}

/* Sums as the symmetric kernels do. Returns false if those kernels do not apply, for example to types
 * other than low precision. */
static bool
take_wide_sum(const nccl_call *call, char *to, size_t items, int destination, size_t offset)
{
    const struct ncclComm *comm = call->comm;
    bool half = call->request.type == FSDPC_NCCL_FLOAT16;
    if (!call->windowed || call->request.op != FSDPC_NCCL_SUM ||
        (!half && call->request.type != FSDPC_NCCL_BFLOAT16)) {
        return false;
    }
    for (int64_t i = 0; i < (int64_t)items; i++) {
        float sum = 0;
        for (int step = 1; step <= comm->world; step++) {
            int r = source_of(comm, destination, step);
            const char *from = place(comm, r, comm->round) + offset * nccl_item(call->request.type);
            sum += half ? load_F16(from, i) : load_BF16(from, i);
        }
        if (half) {
            store_F16(to, i, sum);
        } else {
            store_BF16(to, i, sum);
        }
    }
    return true;
}

static void
take_sum(nccl_call *call, char *to, size_t items, int destination, size_t offset)
{
    const struct ncclComm *comm = call->comm;
    size_t item = nccl_item(call->request.type);
    if (take_wide_sum(call, to, items, destination, offset)) {
        return;
    }
    for (int step = 1; step <= comm->world; step++) {
        int r = source_of(comm, destination, step);
        const char *from = place(comm, r, comm->round) + offset * item;
        if (step == 1) {
            memcpy(to, from, items * item);
        } else {
            accumulate(to, from, items, call->request.type, call->request.op);
        }
    }
}

static void
take(nccl_call *call)
{
    const struct ncclComm *comm = call->comm;
    size_t item = nccl_item(call->request.type), items = round_items(call);
    size_t from = call->done_items * item, piece = call->request.count * item;
    switch (call->request.kind) {
    case ALL_GATHER:
        for (int r = 0; r < comm->world; r++) {
            memcpy(call->recv + (size_t)r * piece + from, place(comm, r, comm->round),
                   items * item);
        }
        break;
    case REDUCE_SCATTER:
        take_sum(call, call->recv + from, items, comm->rank, (size_t)comm->rank * items);
        break;
    case ALL_REDUCE:
        take_sum(call, call->recv + from, items, 0, 0);
        break;
    case ALL_TO_ALL:
        for (int r = 0; r < comm->world; r++) {
            if (r != comm->rank) {
                memcpy(call->recvs[r] + from,
                       place(comm, r, comm->round) + (size_t)comm->rank * items * item,
                       items * item);
            }
        }
        break;
    default:
        memcpy(call->recv + from, place(comm, call->request.root, comm->round), items * item);
        break;
    }
    call->done_items += items;
}

/* --- as work on a stream --------------------------------------------------------------------------- */

static bool
declare(const nccl_call *call, simgpu_task *task)
{
    size_t piece = call->request.count * nccl_item(call->request.type);
    size_t world = (size_t)call->comm->world;
    if (call->request.kind == ALL_TO_ALL) {
        bool known = true;
        for (int r = 0; known && r < (int)world; r++) {
            known = r == call->comm->rank || (simgpu_task_read(task, call->sends[r], piece) &&
                                              simgpu_task_write(task, call->recvs[r], piece));
        }
        return known;
    }
    bool sends = call->request.kind != BROADCAST || call->request.root == call->comm->rank;
    size_t sent = call->request.kind == REDUCE_SCATTER ? world * piece : piece;
    size_t got = call->request.kind == ALL_GATHER ? world * piece : piece;
    return (!sends || simgpu_task_read(task, call->send, sent)) &&
           simgpu_task_write(task, call->recv, got);
}

enum simgpu_progress
nccl_run(void *context, simgpu_task *task)
{
    nccl_call *call = context;
    struct ncclComm *comm = call->comm;
    if (atomic_load(&comm->aborted)) {
        return SIMGPU_DONE; /* the kernel ends; the bytes are undefined */
    }
    if (call->stuck) {
        int none = FSDPC_NCCL_SUCCESS;
        atomic_compare_exchange_strong(&comm->error, &none, call->stuck_error);
        return SIMGPU_BLOCKED;
    }
    if (nccl_now_ms() < call->not_before_ms) {
        return SIMGPU_BLOCKED;
    }
    if (!call->begun) {
        if (!declare(call, task)) {
            return SIMGPU_DONE;
        }
        atomic_store(&comm->segment->ranks[comm->rank].at, call->number);
        call->begun = true;
    }
    while (call->done_items < call->request.count) {
        if (!call->laid) {
            lay_out(call);
        }
        if (!all_arrived(comm)) {
            return SIMGPU_BLOCKED;
        }
        if (!agreed(call)) {
            atomic_store(&comm->error, FSDPC_NCCL_INTERNAL_ERROR);
            call->stuck = true;
            return SIMGPU_BLOCKED;
        }
        take(call);
        comm->round++;
        call->laid = false;
    }
    return SIMGPU_DONE;
}

bool
nccl_wanted(void *context)
{
    const nccl_call *call = context;
    const struct ncclComm *comm = call->comm;
    if (atomic_load(&comm->aborted)) {
        return true;
    }
    for (int r = 0; r < comm->world; r++) {
        if (r != comm->rank && atomic_load(&comm->segment->ranks[r].at) >= call->number) {
            return true;
        }
    }
    return false;
}

void
nccl_drop(void *context)
{
    nccl_call *call = context;
    nccl_unuse(call->comm);
    free(call);
}
