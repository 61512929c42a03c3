/* Streams and events of the CUDA device. All its host syncs are in this file. */
#include "device/device_cuda_impl.h"

#include <errno.h>
#include <time.h>

#include "base/deadline.h"
#include "base/mem.h"

enum {
    SPINS = 200, /* queries before the first sleep, so that short waits do not sleep */
    SHORTEST_SLEEP_NS = 20000,
    LONGEST_SLEEP_NS = 1000000,
};

struct fsdpc_cuda_stream {
    fsdpc_cu_stream handle;
    struct fsdpc_cuda_stream *next;
};

/* The current stream. Each of torch's threads (forward, autograd) has its own current stream. */
static _Thread_local struct {
    const struct fsdpc_cuda *cuda;
    fsdpc_cu_stream stream;
} here;

fsdpc_cu_stream
fsdpc_cuda_current(const struct fsdpc_cuda *cuda)
{
    return here.cuda == cuda ? here.stream : NULL;
}

fsdpc_stream *
fsdpc_cuda_current_stream(void *context)
{
    return (fsdpc_stream *)fsdpc_cuda_current(context);
}

fsdpc_stream *
fsdpc_cuda_use(void *context, fsdpc_stream *stream)
{
    fsdpc_stream *before = fsdpc_cuda_current_stream(context);
    here.cuda = context;
    here.stream = (fsdpc_cu_stream)stream;
    return before;
}

static int
capture_of(const struct fsdpc_cuda *cuda, fsdpc_cu_stream stream, uint64_t *id)
{
    unsigned state = 0;
    if (!cuda->driver->capture_info) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, capture_info(stream, &state, id, NULL, NULL, NULL),
             "asking a stream for its capture");
    *id = state ? *id : 0;
    return FSDPC_OK;
}

int
fsdpc_cuda_capture(void *context, uint64_t *id)
{
    const struct fsdpc_cuda *cuda = context;
    return capture_of(cuda, fsdpc_cuda_current(cuda), id);
}

/* Fails during a capture, because a query of a captured event would invalidate the capture. */
static int
refuse_capture(const struct fsdpc_cuda *cuda, fsdpc_cu_stream stream, const char *what)
{
    uint64_t capture = 0;
    FSDPC_TRY(capture_of(cuda, stream, &capture));
    return capture == 0 ? FSDPC_OK
                        : fsdpc_error(FSDPC_E_STATE,
                                      "%s: the host cannot wait for a stream that is captured "
                                      "into a CUDA graph",
                                      what);
}

unsigned
fsdpc_cuda_exchange_mode(const struct fsdpc_cuda *cuda, unsigned mode)
{
    if (cuda->driver->capture_mode) {
        (void)cuda->driver->capture_mode(&mode);
    }
    return mode;
}

int
fsdpc_cuda_stream_new(void *context, bool urgent, fsdpc_stream **out)
{
    struct fsdpc_cuda *cuda = context;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    struct fsdpc_cuda_stream *made = fsdpc_mem_calloc(1, sizeof *made);
    if (!made) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a stream");
    }
    const fsdpc_cu_result result = cuda->driver->stream_create(
        &made->handle, FSDPC_CU_STREAM_NON_BLOCKING, urgent ? cuda->urgent : 0);
    if (result != FSDPC_CU_SUCCESS) {
        fsdpc_mem_free(made);
        return fsdpc_cuda_check(cuda->driver, result, "a new stream");
    }
    pthread_mutex_lock(&cuda->lock);
    made->next = cuda->streams;
    cuda->streams = made;
    pthread_mutex_unlock(&cuda->lock);
    *out = (fsdpc_stream *)made->handle;
    return FSDPC_OK;
}

void
fsdpc_cuda_stream_free(void *context, fsdpc_stream *stream)
{
    struct fsdpc_cuda *cuda = context;
    struct fsdpc_cuda_stream *found = NULL;
    pthread_mutex_lock(&cuda->lock);
    for (struct fsdpc_cuda_stream **at = &cuda->streams; *at && !found; at = &(*at)->next) {
        if ((*at)->handle == (fsdpc_cu_stream)stream) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&cuda->lock);
    if (found && fsdpc_cuda_enter(cuda) == FSDPC_OK) {
        (void)cuda->driver->stream_destroy(found->handle);
    }
    fsdpc_mem_free(found);
}

void
fsdpc_cuda_drop_streams(struct fsdpc_cuda *cuda)
{
    while (cuda->streams) {
        fsdpc_cuda_stream_free(cuda, (fsdpc_stream *)cuda->streams->handle);
    }
    while (cuda->events) {
        fsdpc_event *event = cuda->events;
        cuda->events = event->next;
        (void)cuda->driver->event_destroy(event->handle);
        fsdpc_mem_free(event);
    }
}

/* --- events ------------------------------------------------------------------------------------- */

int
fsdpc_cuda_event_new(void *context, fsdpc_event **out)
{
    struct fsdpc_cuda *cuda = context;
    pthread_mutex_lock(&cuda->lock);
    fsdpc_event *event = cuda->events;
    if (event) {
        cuda->events = event->next;
    }
    pthread_mutex_unlock(&cuda->lock);
    if (!event) {
        FSDPC_TRY(fsdpc_cuda_enter(cuda));
        event = fsdpc_mem_calloc(1, sizeof *event);
        if (!event) {
            return fsdpc_error(FSDPC_E_NOMEM, "no memory for an event");
        }
        const fsdpc_cu_result result =
            cuda->driver->event_create(&event->handle, FSDPC_CU_EVENT_DISABLE_TIMING);
        if (result != FSDPC_CU_SUCCESS) {
            fsdpc_mem_free(event);
            return fsdpc_cuda_check(cuda->driver, result, "a new event");
        }
    }
    event->recorded = false;
    *out = event;
    return FSDPC_OK;
}

void
fsdpc_cuda_event_free(void *context, fsdpc_event *event)
{
    struct fsdpc_cuda *cuda = context;
    pthread_mutex_lock(&cuda->lock);
    event->next = cuda->events;
    cuda->events = event;
    pthread_mutex_unlock(&cuda->lock);
}

static int
record_on(const struct fsdpc_cuda *cuda, fsdpc_event *event, fsdpc_cu_stream stream)
{
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, event_record(event->handle, stream), "recording an event");
    event->recorded = true;
    return FSDPC_OK;
}

int
fsdpc_cuda_record(void *context, fsdpc_event *event)
{
    return record_on(context, event, fsdpc_cuda_current(context));
}

int
fsdpc_cuda_wait(void *context, fsdpc_event *event)
{
    const struct fsdpc_cuda *cuda = context;
    if (!event->recorded) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, stream_wait_event(fsdpc_cuda_current(cuda), event->handle, 0),
             "waiting for an event");
    return FSDPC_OK;
}

int
fsdpc_cuda_poll(void *context, fsdpc_event *event, bool *done)
{
    const struct fsdpc_cuda *cuda = context;
    *done = true;
    if (!event->recorded) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    const fsdpc_cu_result result = cuda->driver->event_query(event->handle);
    if (result == FSDPC_CU_NOT_READY) {
        *done = false;
        return FSDPC_OK;
    }
    return fsdpc_cuda_check(cuda->driver, result, "the GPU's work failed");
}

/* --- the host waits ----------------------------------------------------------------------------- */

static double
now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Polls and sleeps: a blocking call of the driver would never return when a peer is gone. */
static int
query_until_done(struct fsdpc_cuda *cuda, fsdpc_event *event, double timeout, const char *what)
{
    const double end = now() + timeout;
    long sleep_ns = SHORTEST_SLEEP_NS;
    for (int64_t round = 0;; round++) {
        bool done;
        FSDPC_TRY(fsdpc_cuda_poll(cuda, event, &done));
        if (done) {
            return FSDPC_OK;
        }
        if (round < SPINS) {
            continue;
        }
        if (now() > end) {
            return fsdpc_late_gpu(what, timeout);
        }
        const struct timespec time = {.tv_nsec = sleep_ns};
        (void)nanosleep(&time, NULL);
        sleep_ns = sleep_ns * 2 < LONGEST_SLEEP_NS ? sleep_ns * 2 : LONGEST_SLEEP_NS;
    }
}

/* Queries in relaxed capture mode, because a query must not invalidate a capture of another thread. */
int
fsdpc_cuda_finish(void *context, fsdpc_event *event, double timeout, const char *what)
{
    struct fsdpc_cuda *cuda = context;
    if (!event->recorded) {
        return FSDPC_OK;
    }
    FSDPC_TRY(refuse_capture(cuda, fsdpc_cuda_current(cuda), what));
    atomic_fetch_add_explicit(&cuda->waits, 1, memory_order_relaxed);
    const unsigned mode = fsdpc_cuda_exchange_mode(cuda, FSDPC_CU_CAPTURE_RELAXED);
    const int status = query_until_done(cuda, event, timeout, what);
    (void)fsdpc_cuda_exchange_mode(cuda, mode);
    return status;
}

int64_t
fsdpc_cuda_waits(void *context)
{
    struct fsdpc_cuda *cuda = context;
    return atomic_load_explicit(&cuda->waits, memory_order_relaxed);
}

/* Makes the host wait for one stream, at most until `end`. Several streams share this deadline. */
static int
sync_stream(struct fsdpc_cuda *cuda, fsdpc_cu_stream stream, double end, const char *what)
{
    int status = FSDPC_OK;
    fsdpc_event *event = NULL;
    FSDPC_TRY(refuse_capture(cuda, stream, what));
    FSDPC_TRY(fsdpc_cuda_event_new(cuda, &event));
    FSDPC_GOTO(record_on(cuda, event, stream), done);
    FSDPC_GOTO(fsdpc_cuda_finish(cuda, event, end - now(), what), done);
done:
    fsdpc_cuda_event_free(cuda, event);
    return status == FSDPC_E_TIMEOUT ? fsdpc_late_gpu(what, fsdpc_timeout()) : status;
}

int
fsdpc_cuda_sync(struct fsdpc_cuda *cuda, const char *what)
{
    return sync_stream(cuda, fsdpc_cuda_current(cuda), now() + fsdpc_timeout(), what);
}

/* Returns stream number `index` of the streams that the device made, or NULL if there are fewer. */
static fsdpc_cu_stream
own_stream(struct fsdpc_cuda *cuda, int index)
{
    pthread_mutex_lock(&cuda->lock);
    const struct fsdpc_cuda_stream *own = cuda->streams;
    while (own && index-- > 0) {
        own = own->next;
    }
    const fsdpc_cu_stream handle = own ? own->handle : NULL;
    pthread_mutex_unlock(&cuda->lock);
    return handle;
}

int
fsdpc_cuda_sync_all(struct fsdpc_cuda *cuda, const char *what)
{
    fsdpc_cu_stream stream = fsdpc_cuda_current(cuda);
    const double end = now() + fsdpc_timeout();
    if (stream) {
        FSDPC_TRY(sync_stream(cuda, stream, end, what));
    }
    FSDPC_TRY(sync_stream(cuda, NULL, end, what));
    for (int i = 0; (stream = own_stream(cuda, i)) != NULL; i++) {
        FSDPC_TRY(sync_stream(cuda, stream, end, what));
    }
    return FSDPC_OK;
}
