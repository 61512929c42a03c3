/* Events: a place in a stream, as it was when the event was recorded last. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

struct CUevent_st {
    bool live;
    sim_dep at; /* time 0: never recorded, which counts as done */
    uint64_t clock[SIM_ACTORS];
    sim_captured captured;
    struct CUevent_st *next;
};

static struct CUevent_st *events;

static bool
is_live(CUevent event)
{
    for (struct CUevent_st *e = events; e; e = e->next) {
        if (e == event) {
            return e->live;
        }
    }
    return false;
}

SIM_EXPORT CUresult
cuEventCreate(CUevent *event, unsigned flags)
{
    CUresult result = sim_enter(SIM_cuEventCreate, true);
    if (result) {
        return sim_leave(result);
    }
    if (!event || flags > 7) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    *event = sim_alloc(1, sizeof **event);
    (*event)->live = true;
    (*event)->next = events;
    events = *event;
    sim_counters.events_created++;
    return sim_leave(CUDA_SUCCESS);
}

/* Its handle is never given out again, so a later use is found. */
SIM_EXPORT CUresult
cuEventDestroy(CUevent event)
{
    CUresult result = sim_enter(SIM_cuEventDestroy, true);
    if (result) {
        return sim_leave(result);
    }
    if (!is_live(event)) {
        return sim_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    event->live = false;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuEventRecord(CUevent event, CUstream stream)
{
    CUresult result = sim_enter(SIM_cuEventRecord, true);
    if (result) {
        return sim_leave(result);
    }
    int actor = sim_stream_actor(stream);
    if (!is_live(event) || actor < 0) {
        return sim_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    sim_counters.records++;
    sim_capture_record(actor, &event->captured);
    if (event->captured.id) {
        return sim_leave(CUDA_SUCCESS);
    }
    simgpu_work work = {.name = "record"};
    result = sim_enqueue_plain(stream, &work, (sim_dep){0}, NULL);
    event->at = (sim_dep){.actor = actor, .time = sim_actors[actor].enqueued};
    memcpy(event->clock, sim_actors[actor].clock, sizeof event->clock);
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    CUresult result = sim_enter(SIM_cuStreamWaitEvent, true);
    if (result) {
        return sim_leave(result);
    }
    if (!is_live(event) || sim_stream_actor(stream) < 0) {
        return sim_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (flags > 1) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    sim_counters.waits++;
    result = sim_capture_wait(sim_stream_actor(stream), &event->captured);
    if (!result && !event->captured.id && event->at.time) {
        simgpu_work work = {.name = "wait"};
        result = sim_enqueue_plain(stream, &work, event->at, event->clock);
    }
    return sim_leave(result);
}

static CUresult
event_state(enum sim_entry entry, CUevent event, bool wait)
{
    CUresult result = sim_enter(entry, true);
    if (result) {
        return sim_leave(result);
    }
    if (!is_live(event)) {
        return sim_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if ((result = sim_capture_query(&event->captured))) {
        return sim_leave(result);
    }
    if (event->at.time == 0) {
        return sim_leave(CUDA_SUCCESS);
    }
    if (wait) {
        sim_counters.host_syncs++;
        result = sim_demand(event->at.actor, event->at.time);
    } else if (sim_actors[event->at.actor].done < event->at.time) {
        sim_nudge(event->at.actor, event->at.time);
        sim_counters.not_ready++;
        return sim_leave(sim_sticky ? sim_sticky : CUDA_ERROR_NOT_READY);
    }
    sim_observe(event->clock);
    return sim_leave(sim_sticky ? sim_sticky : result);
}

SIM_EXPORT CUresult
cuEventQuery(CUevent event)
{
    return event_state(SIM_cuEventQuery, event, false);
}

SIM_EXPORT CUresult
cuEventSynchronize(CUevent event)
{
    return event_state(SIM_cuEventSynchronize, event, true);
}

int
sim_event_leaks(char *text, size_t bytes)
{
    int count = 0;
    for (struct CUevent_st *e = events; e; e = e->next) {
        count += e->live;
    }
    if (count) {
        sim_list(text, bytes, 0, "events: %d\n", count);
    }
    return count;
}

void
sim_events_reset(void)
{
    while (events) {
        struct CUevent_st *event = events;
        events = event->next;
        free(event);
    }
}
