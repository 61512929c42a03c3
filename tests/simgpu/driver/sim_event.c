/* Events. An event is the position in a stream at which it was last recorded. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

struct CUevent_st {
    sim_dep at; /* the position in the stream; time 0: never recorded, which counts as done */
    uint64_t clock[SIM_ACTORS];
    sim_captured captured;
    struct CUevent_st *next;
};

static struct CUevent_st *events;
static struct CUevent_st *destroyed; /* the events that cuEventDestroy took out of `events` */

/* Returns the address of the list's link that points to the event. If the event is not in the list, returns
 * the address of the last link, which is NULL. */
static struct CUevent_st **
link_to(CUevent event)
{
    struct CUevent_st **link = &events;
    while (*link && *link != event) {
        link = &(*link)->next;
    }
    return link;
}

static bool
is_live(CUevent event)
{
    return *link_to(event) != NULL;
}

SIM_EXPORT CUresult
cuEventCreate(CUevent *event, unsigned flags)
{
    SIM_ENTER(cuEventCreate, true);
    SIM_REFUSE(!event || flags > 7, CUDA_ERROR_INVALID_VALUE);
    *event = sim_alloc(1, sizeof **event);
    (*event)->next = events;
    events = *event;
    sim_counters.events_created++;
    return sim_leave(CUDA_SUCCESS);
}

/* The handle of a destroyed event is never given out again, so that a later use of it is found. */
SIM_EXPORT CUresult
cuEventDestroy(CUevent event)
{
    SIM_ENTER(cuEventDestroy, true);
    struct CUevent_st **link = link_to(event);
    SIM_REFUSE(!*link, CUDA_ERROR_INVALID_HANDLE);
    *link = event->next;
    event->next = destroyed;
    destroyed = event;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuEventRecord(CUevent event, CUstream stream)
{
    SIM_ENTER(cuEventRecord, true);
    int actor = sim_stream_actor(stream);
    SIM_REFUSE(!is_live(event) || actor < 0, CUDA_ERROR_INVALID_HANDLE);
    sim_counters.records++;
    sim_capture_record(actor, &event->captured);
    if (event->captured.id) {
        return sim_leave(CUDA_SUCCESS);
    }
    simgpu_work work = {.name = "record"};
    CUresult result = sim_enqueue_plain(stream, &work, (sim_dep){0}, NULL);
    event->at = (sim_dep){.actor = actor, .time = sim_actors[actor].enqueued};
    memcpy(event->clock, sim_actors[actor].clock, sizeof event->clock);
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    SIM_ENTER(cuStreamWaitEvent, true);
    SIM_REFUSE(!is_live(event) || sim_stream_actor(stream) < 0, CUDA_ERROR_INVALID_HANDLE);
    SIM_REFUSE(flags > 1, CUDA_ERROR_INVALID_VALUE);
    sim_counters.waits++;
    SIM_TRY(sim_capture_wait(sim_stream_actor(stream), &event->captured));
    if (!event->captured.id && event->at.time) {
        simgpu_work work = {.name = "wait"};
        SIM_TRY(sim_enqueue_plain(stream, &work, event->at, event->clock));
    }
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuEventQuery(CUevent event)
{
    SIM_ENTER(cuEventQuery, true);
    SIM_REFUSE(!is_live(event), CUDA_ERROR_INVALID_HANDLE);
    SIM_TRY(sim_capture_query(&event->captured));
    return sim_leave(event->at.time ? sim_look(event->at, event->clock, false) : CUDA_SUCCESS);
}

int
sim_event_leaks(char *text, size_t bytes)
{
    int count = 0;
    for (struct CUevent_st *e = events; e; e = e->next) {
        count++;
    }
    if (count) {
        sim_list(text, bytes, 0, "events: %d\n", count);
    }
    return count;
}

static void
free_all(struct CUevent_st **list)
{
    while (*list) {
        struct CUevent_st *event = *list;
        *list = event->next;
        free(event);
    }
}

void
sim_events_reset(void)
{
    free_all(&events);
    free_all(&destroyed);
}
