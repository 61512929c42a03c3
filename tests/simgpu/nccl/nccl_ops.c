/* The calls that put collectives on streams, and groups of them. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_sim.h"

static __thread int group_depth;
static __thread nccl_call *group_first, **group_end;

static void
count_call(const nccl_call *call)
{
    int64_t *const counters[] = {&nccl_counters.all_gathers, &nccl_counters.reduce_scatters,
                                 &nccl_counters.all_reduces, &nccl_counters.broadcasts,
                                 &nccl_counters.all_to_alls};
    size_t item = nccl_item(call->request.type), world = (size_t)call->comm->world;
    size_t pieces = call->request.kind == REDUCE_SCATTER ? world
                    : call->request.kind == ALL_TO_ALL   ? world - 1
                                                         : 1;
    ++*counters[call->request.kind];
    nccl_counters.bytes_sent += (int64_t)(call->request.count * item * pieces);
}

/* Looks up the registration of the receive buffer, or of the send buffer of a reduce-scatter. */
static void
look_up(nccl_call *call)
{
    if (call->request.kind == ALL_TO_ALL) {
        return;
    }
    size_t piece = call->request.count * nccl_item(call->request.type);
    bool gathers = call->request.kind == ALL_GATHER;
    bool pieces = gathers || call->request.kind == REDUCE_SCATTER;
    const char *at = call->request.kind == REDUCE_SCATTER ? call->send : call->recv;
    const nccl_registration *found =
        nccl_registered(call->comm, at, piece * (pieces ? (size_t)call->comm->world : 1));
    call->windowed = found && found->window;
    if (call->windowed) {
        call->request.place = found->number << 40 | ((uintptr_t)at - found->base);
    }
    nccl_counters.direct += found != NULL;
    nccl_counters.windowed += call->windowed;
}

static void
arm(nccl_call *call)
{
    int rank = call->comm->rank, value;
    if (nccl_planted(SIMNCCL_STOP, rank) >= 0) {
        call->comm->stalled = true;
    }
    call->stuck = call->comm->stalled;
    if ((value = nccl_planted(SIMNCCL_ASYNC_ERROR, rank)) >= 0) {
        call->stuck = true;
        call->stuck_error = value;
    }
    if ((value = nccl_planted(SIMNCCL_SLOW, rank)) >= 0) {
        call->not_before_ms = nccl_now_ms() + value;
    }
}

static bool
is_captured(CUstream stream)
{
    unsigned state = 0;
    uint64_t graph = 0;
    return cuStreamGetCaptureInfo(stream, &state, &graph, NULL, NULL, NULL) == CUDA_SUCCESS &&
           state != 0;
}

/* Puts the collective on its stream and takes ownership of the call. Lock held. */
fsdpc_nccl_result
nccl_put(nccl_call *call)
{
    struct ncclComm *comm = call->comm;
    simgpu_work work = {.name = "collective",
                        .context = call,
                        .run = nccl_run,
                        .wanted = nccl_wanted,
                        .drop = nccl_drop};
    work.name = nccl_kind_names[call->request.kind];
    call->number = ++comm->issued;
    count_call(call);
    look_up(call);
    arm(call);
    atomic_fetch_add(&comm->users, 1);
    CUstream stream;
    memcpy(&stream, &call->stream, sizeof stream);
    comm->captured += nccl_options.graphs_live && is_captured(stream);
    CUresult result = simgpu_enqueue(stream, &work, &comm->last);
    return result ? FSDPC_NCCL_UNHANDLED_CUDA_ERROR : FSDPC_NCCL_SUCCESS;
}

/* False if a group of sends and receives lacks a send or a receive for some other rank. Such a group is not
 * simulated. */
static bool
is_whole(const nccl_call *call)
{
    bool whole = true;
    for (int r = 0; r < call->comm->world && call->request.kind == ALL_TO_ALL; r++) {
        whole = whole && (r == call->comm->rank || (call->sends[r] && call->recvs[r]));
    }
    return whole;
}

/* Puts all collectives of a group on their streams. Lock held. */
fsdpc_nccl_result
nccl_put_all(nccl_call *call)
{
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    for (const nccl_call *each = call; each; each = each->next) {
        if (!is_whole(each)) {
            return nccl_misuse(call->comm, "a group without a send and a receive for each rank");
        }
    }
    for (int i = 0; call; i++) {
        nccl_call *next = call->next;
        nccl_counters.joined += i > 0;
        fsdpc_nccl_result one = nccl_put(call);
        result = result ? result : one;
        call = next;
    }
    return result;
}

/* True if the buffers overlap in a way that is undefined. In place is allowed: the smaller buffer is this
 * rank's part of the larger one, or both are the same. */
static bool
overlaps(const nccl_call *call)
{
    size_t piece = call->request.count * nccl_item(call->request.type);
    size_t world = (size_t)call->comm->world, rank = (size_t)call->comm->rank;
    size_t sent = call->request.kind == REDUCE_SCATTER ? world * piece : piece;
    size_t got = call->request.kind == ALL_GATHER ? world * piece : piece;
    const char *in_place = call->request.kind == ALL_GATHER       ? call->recv + rank * piece
                           : call->request.kind == REDUCE_SCATTER ? call->recv - rank * piece
                                                                  : call->recv;
    return call->send != in_place && call->send < call->recv + got &&
           call->recv < call->send + sent;
}

static fsdpc_nccl_result
begin(fsdpc_nccl_comm handle, const void *send, void *recv, fsdpc_cu_stream stream,
      nccl_request request)
{
    const nccl_call made = {
        .comm = handle, .request = request, .send = send, .recv = recv, .stream = stream};
    api_lock();
    struct ncclComm *comm = nccl_check(made.comm, "a collective");
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    if (!comm) {
        result = FSDPC_NCCL_INVALID_ARGUMENT;
    } else if ((result = nccl_enter(comm, "a collective")) != FSDPC_NCCL_SUCCESS) {
    } else if ((result = nccl_planted(SIMNCCL_REFUSE, comm->rank)) >= 0) {
        strcpy(comm->text, "a planted refusal");
    } else if (made.request.count && overlaps(&made)) {
        result = nccl_misuse(comm, "buffers overlap but are not in place");
    } else {
        result = FSDPC_NCCL_SUCCESS;
    }
    if (result || made.request.count == 0) {
        api_unlock();
        return result;
    }
    nccl_call *call = malloc(sizeof *call);
    if (!call) {
        abort();
    }
    *call = made;
    if (group_depth) {
        *group_end = call;
        group_end = &call->next;
    } else if (!comm->blocking && nccl_options.in_progress > 0) {
        comm->late = call;
        comm->polls = nccl_options.in_progress;
        result = FSDPC_NCCL_IN_PROGRESS;
    } else {
        result = nccl_put(call);
    }
    api_unlock();
    return result;
}

NCCL_EXPORT fsdpc_nccl_result
ncclGroupStart(void)
{
    if (group_depth++ == 0) {
        group_first = NULL;
        group_end = &group_first;
    }
    return FSDPC_NCCL_SUCCESS;
}

NCCL_EXPORT fsdpc_nccl_result
ncclGroupEnd(void)
{
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    if (group_depth == 0) {
        return FSDPC_NCCL_INVALID_USAGE;
    }
    if (--group_depth > 0) {
        return result;
    }
    api_lock();
    struct ncclComm *comm = group_first ? group_first->comm : NULL;
    if (comm && !comm->blocking && nccl_options.in_progress > 0) {
        comm->late = group_first;
        comm->polls = nccl_options.in_progress;
        result = FSDPC_NCCL_IN_PROGRESS;
    } else {
        result = nccl_put_all(group_first);
    }
    group_first = NULL;
    api_unlock();
    return result;
}

NCCL_EXPORT fsdpc_nccl_result
ncclAllGather(const void *send, void *recv, size_t count, fsdpc_nccl_type type,
              fsdpc_nccl_comm comm, fsdpc_cu_stream stream)
{
    return begin(comm, send, recv, stream,
                 (nccl_request){.kind = ALL_GATHER, .type = type, .count = count});
}

NCCL_EXPORT fsdpc_nccl_result
ncclReduceScatter(const void *send, void *recv, size_t count, fsdpc_nccl_type type,
                  fsdpc_nccl_op op, fsdpc_nccl_comm comm, fsdpc_cu_stream stream)
{
    return begin(comm, send, recv, stream,
                 (nccl_request){.kind = REDUCE_SCATTER, .type = type, .op = op, .count = count});
}

NCCL_EXPORT fsdpc_nccl_result
ncclAllReduce(const void *send, void *recv, size_t count, fsdpc_nccl_type type, fsdpc_nccl_op op,
              fsdpc_nccl_comm comm, fsdpc_cu_stream stream)
{
    return begin(comm, send, recv, stream,
                 (nccl_request){.kind = ALL_REDUCE, .type = type, .op = op, .count = count});
}

NCCL_EXPORT fsdpc_nccl_result
ncclBroadcast(const void *send, void *recv, size_t count, fsdpc_nccl_type type, int root,
              fsdpc_nccl_comm comm, fsdpc_cu_stream stream)
{
    return begin(comm, send, recv, stream,
                 (nccl_request){.kind = BROADCAST, .type = type, .root = root, .count = count});
}

/* All sends and receives of a group on one communicator and stream are one collective. The first of these
 * calls makes the collective. */
static fsdpc_nccl_result
transfer(fsdpc_nccl_comm handle, const char *send, char *recv, size_t bytes, int peer,
         fsdpc_cu_stream stream)
{
    static char nothing[1];
    nccl_call *call = group_first;
    while (group_depth > 0 && call &&
           (call->request.kind != ALL_TO_ALL || call->comm != handle || call->stream != stream)) {
        call = call->next;
    }
    if (group_depth == 0 || peer < 0 || peer >= NCCL_RANKS) {
        return FSDPC_NCCL_INVALID_USAGE;
    }
    if (!call) {
        fsdpc_nccl_result result =
            begin(handle, nothing, nothing, stream,
                  (nccl_request){.kind = ALL_TO_ALL, .type = FSDPC_NCCL_UINT8, .count = bytes});
        if (result || bytes == 0) {
            return result;
        }
        call = (nccl_call *)(void *)((char *)group_end - offsetof(nccl_call, next));
    }
    const bool again = send ? call->sends[peer] != NULL : call->recvs[peer] != NULL;
    if (peer == call->comm->rank || peer >= call->comm->world || again ||
        call->request.count != bytes) {
        api_lock();
        fsdpc_nccl_result result =
            nccl_misuse(handle, "sends and receives of a group that are not simulated");
        api_unlock();
        return result;
    }
    call->sends[peer] = send ? send : call->sends[peer];
    call->recvs[peer] = recv ? recv : call->recvs[peer];
    return FSDPC_NCCL_SUCCESS;
}

NCCL_EXPORT fsdpc_nccl_result
ncclSend(const void *buffer, size_t count, fsdpc_nccl_type type, int peer, fsdpc_nccl_comm comm,
         fsdpc_cu_stream stream)
{
    return transfer(comm, buffer, NULL, count * nccl_item(type), peer, stream);
}

NCCL_EXPORT fsdpc_nccl_result
ncclRecv(void *buffer, size_t count, fsdpc_nccl_type type, int peer, fsdpc_nccl_comm comm,
         fsdpc_cu_stream stream)
{
    return transfer(comm, NULL, buffer, count * nccl_item(type), peer, stream);
}
