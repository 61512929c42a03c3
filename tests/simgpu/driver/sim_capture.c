/* Capturing streams into graphs: the rules, and a count of what was captured. Graphs do not run.
 *
 * A stream is part of a capture if the capture began on it, or if it waited for an event that was recorded in
 * the capture. For streams a and b, members[a].behind[b] says how much of the work of b comes before what a
 * does next. A capture may end when the stream on which it began is behind all work of all other streams. A
 * call that a real driver refuses makes the capture invalid here, too, and is reported.
 */
#include <stdio.h>
#include <string.h>

#include "sim.h"

typedef struct member {
    bool in;
    uint64_t work;               /* pieces of work put on the stream during the capture */
    uint64_t behind[SIM_ACTORS]; /* how much work of each stream this stream's next work follows */
} member;

static struct {
    uint64_t id; /* 0: no capture is in progress */
    int origin;
    unsigned mode;
    bool broken;
    int64_t nodes;
    member members[SIM_ACTORS];
} capture;
static uint64_t captures;
static __thread unsigned thread_mode;

enum { GLOBAL, THREAD_LOCAL, RELAXED };

static CUresult
break_capture(CUresult result, const char *why)
{
    capture.broken = capture.broken || capture.id;
    sim_say(false, "capture: %s", why);
    return result;
}

bool
sim_captures(int actor)
{
    return capture.id && capture.members[actor].in;
}

void
sim_capture_work(int actor)
{
    capture.members[actor].work++;
    capture.members[actor].behind[actor] = capture.members[actor].work;
    capture.nodes++;
}

CUresult
sim_capture_unsafe(const char *call)
{
    char why[128];
    if (!capture.id || thread_mode == RELAXED || capture.mode == RELAXED) {
        return CUDA_SUCCESS;
    }
    snprintf(why, sizeof why, "%s is not allowed meanwhile", call);
    return break_capture(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, why);
}

/* Refuses a copy of memory that is not pinned: a graph copies when it runs, and that memory may then be
 * gone. */
CUresult
sim_capture_copy(int actor, bool pinned)
{
    return sim_captures(actor) && !pinned
               ? break_capture(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                               "a copy from or to memory that is not pinned")
               : CUDA_SUCCESS;
}

void
sim_capture_record(int actor, sim_captured *event)
{
    event->id = sim_captures(actor) ? capture.id : 0;
    if (event->id) {
        memcpy(event->behind, capture.members[actor].behind, sizeof event->behind);
    }
}

CUresult
sim_capture_wait(int actor, const sim_captured *event)
{
    if (event->id == 0) {
        return sim_captures(actor) ? break_capture(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                                                   "a captured stream waits for an event outside")
                                   : CUDA_SUCCESS;
    }
    if (event->id != capture.id) {
        return break_capture(CUDA_ERROR_CAPTURED_EVENT,
                             "a stream waits for an event of another capture");
    }
    capture.members[actor].in = true;
    sim_clock_join(capture.members[actor].behind, event->behind);
    return CUDA_SUCCESS;
}

CUresult
sim_capture_query(const sim_captured *event)
{
    return event->id ? break_capture(CUDA_ERROR_CAPTURED_EVENT, "a captured event is asked for")
                     : sim_capture_unsafe("asking for an event");
}

SIM_EXPORT CUresult
cuStreamBeginCapture(CUstream stream, unsigned mode)
{
    SIM_ENTER(cuStreamBeginCapture, true);
    int actor = sim_stream_actor(stream);
    SIM_REFUSE(capture.id || actor < 0 || mode > RELAXED, CUDA_ERROR_INVALID_VALUE);
    SIM_REFUSE((uintptr_t)stream <= 1, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    memset(&capture, 0, sizeof capture);
    capture.id = ++captures;
    capture.origin = actor;
    capture.mode = mode;
    capture.members[actor].in = true;
    return sim_leave(CUDA_SUCCESS);
}

static bool
all_joined(void)
{
    const uint64_t *behind = capture.members[capture.origin].behind;
    for (int i = 0; i < SIM_ACTORS; i++) {
        if (capture.members[i].work > behind[i]) {
            sim_say(false, "capture: work on %s is not joined at the end", sim_actor_name(i));
            return false;
        }
    }
    return true;
}

SIM_EXPORT CUresult
cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    SIM_ENTER(cuStreamEndCapture, true);
    *graph = NULL;
    SIM_REFUSE(!capture.id || sim_stream_actor(stream) != capture.origin, CUDA_ERROR_INVALID_VALUE);
    CUresult result = capture.broken  ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                      : !all_joined() ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                      : CUDA_SUCCESS;
    capture.id = 0;
    return sim_leave(result);
}

/* Returns the capture's id but no graph, because captured nodes cannot be examined here. */
SIM_EXPORT CUresult
cuStreamGetCaptureInfo(CUstream stream, unsigned *status, uint64_t *id, void *graph, void *nodes,
                       void *count)
{
    SIM_ENTER(cuStreamGetCaptureInfo, true);
    int actor = sim_stream_actor(stream);
    SIM_REFUSE(actor < 0 || !status || graph || nodes || count, CUDA_ERROR_INVALID_VALUE);
    SIM_REFUSE((uintptr_t)stream <= 1 && capture.id && capture.mode != RELAXED &&
                   sim_actors[capture.origin].blocking,
               CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = !sim_captures(actor) ? 0 : capture.broken ? 2 : 1;
    if (id && *status) {
        *id = capture.id;
    }
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuThreadExchangeStreamCaptureMode(unsigned *mode)
{
    SIM_ENTER(cuThreadExchangeStreamCaptureMode, false);
    SIM_REFUSE(*mode > RELAXED, CUDA_ERROR_INVALID_VALUE);
    unsigned before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT int64_t
simgpu_captured(void)
{
    sim_lock();
    int64_t nodes = capture.nodes;
    sim_unlock();
    return nodes;
}

void
sim_capture_reset(void)
{
    memset(&capture, 0, sizeof capture);
}
