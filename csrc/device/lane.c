/* Marks share a ring of events. When an event is recorded again for a later mark, it stands for later work.
 * So a wait for an old mark may wait for more work than that mark stands for, but never for less.
 */
#include "device/lane.h"

#include <stdatomic.h>

#include "base/deadline.h"
#include "base/mem.h"
#include "base/status.h"

enum { EVENTS = 64 };

struct fsdpc_lane {
    fsdpc_device *device;
    fsdpc_stream *stream;
    fsdpc_event *begun;
    fsdpc_event *events[EVENTS]; /* mark m uses events[m % EVENTS] */
    bool dirty;                  /* true: copies have been queued since the last mark */
    int64_t marked, joined;
    fsdpc_stream *joined_by; /* the stream that has waited for the mark `joined` */
    _Atomic int64_t finished, finishes;
    fsdpc_lane_counts counts;
};

static int
open_lane(fsdpc_lane *lane)
{
    FSDPC_TRY(fsdpc_device_stream_new(lane->device, false, &lane->stream));
    FSDPC_TRY(fsdpc_device_event_new(lane->device, &lane->begun));
    for (int i = 0; i < EVENTS; i++) {
        FSDPC_TRY(fsdpc_device_event_new(lane->device, &lane->events[i]));
    }
    return FSDPC_OK;
}

int
fsdpc_lane_new(fsdpc_device *device, fsdpc_lane **out)
{
    *out = NULL;
    fsdpc_lane *lane = fsdpc_mem_calloc(1, sizeof *lane);
    if (!lane) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a stream of copies");
    }
    lane->device = device;
    const int status = open_lane(lane);
    if (status != FSDPC_OK) {
        fsdpc_lane_free(lane);
        return status;
    }
    *out = lane;
    return FSDPC_OK;
}

void
fsdpc_lane_free(fsdpc_lane *lane)
{
    if (!lane) {
        return;
    }
    for (int i = 0; i < EVENTS; i++) {
        fsdpc_device_event_free(lane->device, lane->events[i]);
    }
    fsdpc_device_event_free(lane->device, lane->begun);
    fsdpc_device_stream_free(lane->device, lane->stream);
    fsdpc_mem_free(lane);
}

fsdpc_device *
fsdpc_lane_device(const fsdpc_lane *lane)
{
    return lane->device;
}

/* Fails during a capture, because a captured copy would not wait for events from before the capture. */
static int
refuse_capture(const fsdpc_lane *lane)
{
    uint64_t capture = 0;
    FSDPC_TRY(fsdpc_device_capture(lane->device, &capture));
    return capture == 0 ? FSDPC_OK
                        : fsdpc_error(FSDPC_E_STATE,
                                      "copies between GPU and host memory cannot be captured into "
                                      "a CUDA graph");
}

int
fsdpc_lane_begin(fsdpc_lane *lane)
{
    FSDPC_TRY(refuse_capture(lane));
    FSDPC_TRY(fsdpc_device_record(lane->device, lane->begun));
    fsdpc_stream *caller = fsdpc_device_use(lane->device, lane->stream);
    const int status = fsdpc_device_wait(lane->device, lane->begun);
    fsdpc_device_use(lane->device, caller);
    lane->counts.begins++;
    return status;
}

static int
copy(fsdpc_lane *lane, int (*queue)(fsdpc_device *, void *, const void *, size_t), void *to,
     const void *from, size_t bytes)
{
    fsdpc_stream *caller = fsdpc_device_use(lane->device, lane->stream);
    const int status = queue(lane->device, to, from, bytes);
    fsdpc_device_use(lane->device, caller);
    lane->dirty = true;
    return status;
}

int
fsdpc_lane_out(fsdpc_lane *lane, void *host, const void *src, size_t bytes)
{
    lane->counts.copies_out++;
    lane->counts.bytes_out += (int64_t)bytes;
    return copy(lane, fsdpc_device_copy_out, host, src, bytes);
}

int
fsdpc_lane_in(fsdpc_lane *lane, void *dst, const void *host, size_t bytes)
{
    lane->counts.copies_in++;
    lane->counts.bytes_in += (int64_t)bytes;
    return copy(lane, fsdpc_device_copy_in, dst, host, bytes);
}

int
fsdpc_lane_mark(fsdpc_lane *lane, int64_t *mark)
{
    if (lane->dirty || lane->marked == 0) {
        const int64_t next = lane->marked + 1;
        fsdpc_stream *caller = fsdpc_device_use(lane->device, lane->stream);
        const int status = fsdpc_device_record(lane->device, lane->events[next % EVENTS]);
        fsdpc_device_use(lane->device, caller);
        FSDPC_TRY(status);
        lane->marked = next;
        lane->dirty = false;
        lane->counts.marks++;
    }
    *mark = lane->marked;
    return FSDPC_OK;
}

static int
check_mark(const fsdpc_lane *lane, int64_t mark)
{
    return mark >= 1 && mark <= lane->marked
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL,
                             "mark %lld does not exist: the lane has marks 1 to %lld",
                             (long long)mark, (long long)lane->marked);
}

/* True if the host has already waited for this mark or for a later mark. */
static bool
is_finished(const fsdpc_lane *lane, int64_t mark)
{
    return mark <= atomic_load(&lane->finished);
}

int
fsdpc_lane_join(fsdpc_lane *lane, int64_t mark)
{
    FSDPC_TRY(check_mark(lane, mark));
    fsdpc_stream *caller = fsdpc_device_current(lane->device);
    if (is_finished(lane, mark) || (lane->joined >= mark && lane->joined_by == caller)) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_device_wait(lane->device, lane->events[mark % EVENTS]));
    lane->joined = mark;
    lane->joined_by = caller;
    lane->counts.joins++;
    return FSDPC_OK;
}

int
fsdpc_lane_finish(fsdpc_lane *lane, int64_t mark, const char *what)
{
    FSDPC_TRY(check_mark(lane, mark));
    if (is_finished(lane, mark)) {
        return FSDPC_OK;
    }
    FSDPC_TRY(
        fsdpc_device_finish(lane->device, lane->events[mark % EVENTS], fsdpc_timeout(), what));
    int64_t known = atomic_load(&lane->finished);
    while (known < mark && !atomic_compare_exchange_weak(&lane->finished, &known, mark)) {}
    atomic_fetch_add(&lane->finishes, 1);
    return FSDPC_OK;
}

void
fsdpc_lane_count(const fsdpc_lane *lane, fsdpc_lane_counts *out)
{
    *out = lane->counts;
    out->finishes = atomic_load(&lane->finishes);
}
