/* Streams, the processor, and the order in which held-back work runs.
 *
 * An actor is anything whose work has an order: a stream, or a processor (a rank's program). Pieces of work
 * are numbered per actor. A piece has the clock of the moment at which it was put on its stream, and names at
 * most one piece of another stream that must be done first. That piece is always from an earlier call, so a
 * walk along these links ends.
 *
 * A real device goes on with its work while its program does something else. So a helper thread retries work
 * that waits for other ranks, and runs work for which another rank waits.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

struct sim_op {
    sim_op *next;
    int actor;
    uint64_t time;
    uint64_t clock[SIM_ACTORS];
    uint64_t stamp;
    sim_dep dep;
    bool counted, tried;
    simgpu_work work;
    const char *name;
};

typedef struct host {
    int processor, compute;
} host;

sim_actor sim_actors[SIM_ACTORS];
static host main_host, rank_hosts[SIM_ACTORS / 2];
static int rank_host_count;
static __thread host *own_host;
static __thread uint64_t own_epoch;
static uint64_t epoch; /* how many resets there were; a reset makes every `own_host` invalid */
static struct CUstream_st *handles;
static int streams_made, waiting_works;
static bool helper_started;

static struct policy {
    enum { LAZY, EAGER, RANDOM, ORDER } kind;
    uint64_t state;
    int order[SIM_ACTORS], count;
} policy;

/* --- actors ------------------------------------------------------------------------------------- */

static int
new_actor(const char *name)
{
    for (int i = 1; i < SIM_ACTORS; i++) {
        sim_actor *actor = &sim_actors[i];
        if (actor->used && (actor->live || actor->head)) {
            continue;
        }
        /* Work numbers go on where the entry's former actor stopped, so that no number is used twice. */
        actor->used = actor->live = true;
        actor->at_once = actor->blocking = actor->processor = false;
        actor->order = -1;
        snprintf(actor->name, sizeof actor->name, "%s", name);
        return i;
    }
    fprintf(stderr, "simgpu: more than %d streams\n", SIM_ACTORS - 1);
    abort();
}

static void
make_host(host *made, const char *name)
{
    char text[40];
    snprintf(text, sizeof text, "%s%sprocessor", name, *name ? " " : "");
    made->processor = new_actor(text);
    sim_actors[made->processor].processor = true;
    snprintf(text, sizeof text, "%s%scompute", name, *name ? " " : "");
    made->compute = new_actor(text);
    sim_actors[made->compute].at_once = true;
    sim_actors[made->compute].blocking = true;
}

static host *
this_host(void)
{
    host *mine = own_host && own_epoch == epoch ? own_host : &main_host;
    if (mine->processor == 0) {
        make_host(mine, "");
    }
    return mine;
}

SIM_EXPORT void
simgpu_thread_is_rank(const char *name)
{
    sim_lock();
    own_host = &rank_hosts[rank_host_count++ % (SIM_ACTORS / 2)];
    own_epoch = epoch;
    make_host(own_host, name);
    sim_unlock();
}

int
sim_processor(void)
{
    return this_host()->processor;
}

int
sim_stream_actor(CUstream stream)
{
    if ((uintptr_t)stream <= 1) {
        return this_host()->compute; /* NULL and CU_STREAM_LEGACY */
    }
    for (struct CUstream_st *handle = handles; handle; handle = handle->next) {
        if (handle == stream) {
            return handle->live ? handle->actor : -1;
        }
    }
    return -1;
}

const char *
sim_actor_name(int actor)
{
    return sim_actors[actor].name;
}

SIM_EXPORT void
simgpu_label_stream(CUstream stream, const char *text)
{
    sim_lock();
    int actor = sim_stream_actor(stream);
    if (actor >= 0) {
        snprintf(sim_actors[actor].name, sizeof sim_actors[actor].name, "%s", text);
    }
    sim_unlock();
}

/* Adds the clock of work that was seen as done to the processor's clock. A thread that is neither
 * the program's main thread nor a rank adds nothing: what such threads see would sometimes hide accesses that
 * nothing orders. */
void
sim_observe(const uint64_t *clock)
{
    if (gettid() != getpid() && !(own_host && own_epoch == epoch)) {
        return;
    }
    sim_clock_join(sim_actors[sim_processor()].clock, clock);
}

/* --- one piece of work ---------------------------------------------------------------------------- */

static bool
dep_done(sim_dep dep)
{
    return dep.time == 0 || sim_actors[dep.actor].done >= dep.time;
}

static bool
runnable(int actor)
{
    const sim_op *head = sim_actors[actor].head;
    return head && dep_done(head->dep);
}

/* Runs the first piece of work of an actor. Returns false if other ranks must come first. */
static bool
run_head(int index)
{
    sim_actor *actor = &sim_actors[index];
    sim_op *op = actor->head;
    simgpu_task task = {.actor = index,
                        .time = op->time,
                        .clock = op->clock,
                        .what = op->name,
                        .stamp = op->stamp,
                        .counted = op->counted};
    if (op->work.run && op->work.run(op->work.context, &task) == SIMGPU_BLOCKED) {
        op->tried = true;
        return false;
    }
    if (op->work.drop) {
        op->work.drop(op->work.context);
    }
    actor->done = op->time;
    actor->head = op->next;
    if (!actor->head) {
        actor->tail = NULL;
    }
    waiting_works -= op->work.wanted != NULL;
    free(op);
    sim_wake_locked();
    return true;
}

/* Returns the actor whose first piece of work must run next, on the way to piece number `time` of `actor`.
 * Returns -1 if that piece is done. */
static int
next_towards(int actor, uint64_t time)
{
    if (sim_actors[actor].done >= time || !sim_actors[actor].head) {
        return -1;
    }
    sim_dep dep = sim_actors[actor].head->dep;
    return dep_done(dep) ? actor : next_towards(dep.actor, dep.time);
}

static bool
step_towards(int actor, uint64_t time)
{
    int next = next_towards(actor, time);
    return next >= 0 && run_head(next);
}

/* --- policies --------------------------------------------------------------------------------------- */

static uint64_t
draw(void)
{
    policy.state ^= policy.state << 13;
    policy.state ^= policy.state >> 7;
    policy.state ^= policy.state << 17;
    return policy.state;
}

static bool
run_any(void)
{
    for (int i = 0; i < SIM_ACTORS; i++) {
        if (runnable(i) && run_head(i)) {
            return true;
        }
    }
    return false;
}

static bool
run_drawn(void)
{
    int found[SIM_ACTORS], count = 0;
    for (int i = 0; i < SIM_ACTORS; i++) {
        if (runnable(i)) {
            found[count++] = i;
        }
    }
    while (count > 0) {
        int at = (int)(draw() % (uint64_t)count);
        if (run_head(found[at])) {
            return true;
        }
        found[at] = found[--count];
    }
    return false;
}

static bool
run_in_order(bool only_before_host)
{
    for (int k = 0; k < policy.count; k++) {
        if (policy.order[k] == SIMGPU_HOST) {
            if (only_before_host) {
                return false;
            }
            continue;
        }
        for (int i = 0; i < SIM_ACTORS; i++) {
            if (sim_actors[i].order == policy.order[k] && runnable(i) && run_head(i)) {
                return true;
            }
        }
    }
    return false;
}

static bool
host_in_order(void)
{
    for (int k = 0; k < policy.count; k++) {
        if (policy.order[k] == SIMGPU_HOST) {
            return true;
        }
    }
    return false;
}

/* Runs the work that the policy allows. Called after each call that enqueued work. */
static void
let_go(void)
{
    switch (policy.kind) {
    case EAGER:
        while (run_any()) {}
        break;
    case RANDOM:
        for (uint64_t n = draw() % 4; n > 0 && run_drawn(); n--) {}
        break;
    case ORDER:
        while (host_in_order() && run_in_order(true)) {}
        break;
    case LAZY:
        break;
    }
}

/* Runs one piece of work because a caller waits for piece `time` of the actor. The policy may choose work
 * that does not lead to that piece. */
static bool
run_one_for(int actor, uint64_t time)
{
    bool ran = false;
    const sim_actor *demanded = &sim_actors[actor];
    if ((demanded->at_once || demanded->processor) && runnable(actor)) {
        return run_head(actor); /* the program runs this work itself, at once */
    }
    if (policy.kind == RANDOM) {
        ran = run_drawn();
    } else if (policy.kind == ORDER) {
        ran = run_in_order(false);
    }
    return ran || step_towards(actor, time);
}

static double
now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

CUresult
sim_demand(int actor, uint64_t time)
{
    double end = 0;
    while (sim_actors[actor].done < time) {
        if (run_one_for(actor, time)) {
            end = 0;
            continue;
        }
        if (end == 0) {
            end = now_s() + sim_options.stall_s;
        } else if (now_s() > end) {
            int stuck = next_towards(actor, time);
            sim_say(false, "%s never went on: its %s did not end within %g s",
                    sim_actor_name(actor), stuck >= 0 ? sim_actors[stuck].head->name : "work",
                    sim_options.stall_s);
            return sim_sticky = CUDA_ERROR_LAUNCH_TIMEOUT;
        }
        sim_pause(1);
    }
    return CUDA_SUCCESS;
}

void
sim_nudge(int actor, uint64_t time)
{
    (void)run_one_for(actor, time);
}

CUresult
sim_demand_all(void)
{
    for (int i = 0; i < SIM_ACTORS; i++) {
        CUresult result = sim_demand(i, sim_actors[i].tail ? sim_actors[i].tail->time : 0);
        if (result) {
            return result;
        }
    }
    return CUDA_SUCCESS;
}

SIM_EXPORT bool
simgpu_drain(void)
{
    sim_lock();
    bool ran = sim_demand_all() == CUDA_SUCCESS;
    sim_unlock();
    return ran;
}

static void
set_policy(struct policy made)
{
    sim_lock();
    policy = made;
    sim_unlock();
}

SIM_EXPORT void
simgpu_policy_eager(void)
{
    set_policy((struct policy){.kind = EAGER});
}

SIM_EXPORT void
simgpu_policy_lazy(void)
{
    set_policy((struct policy){.kind = LAZY});
}

SIM_EXPORT void
simgpu_policy_random(uint64_t seed)
{
    struct policy made = {.kind = RANDOM, .state = (seed + 1) * 0x9E3779B97F4A7C15u};
    made.state += made.state == 0;
    set_policy(made);
}

SIM_EXPORT void
simgpu_policy_order(const int *streams, int count)
{
    struct policy made = {.kind = ORDER};
    for (int i = 0; i < count && i < SIM_ACTORS; i++) {
        made.order[made.count++] = streams[i];
    }
    set_policy(made);
}

SIM_EXPORT bool
simgpu_policy(const char *text)
{
    int order[SIM_ACTORS], count = 0, used = 0;
    unsigned long long seed;
    if (strcmp(text, "eager") == 0) {
        simgpu_policy_eager();
        return true;
    }
    if (strcmp(text, "lazy") == 0) {
        simgpu_policy_lazy();
        return true;
    }
    if (sscanf(text, "random:%llu", &seed) == 1) {
        simgpu_policy_random(seed);
        return true;
    }
    if (strncmp(text, "order:", 6) != 0) {
        return false;
    }
    for (text += 6; *text && count < SIM_ACTORS; text += *text == ',') {
        if (strncmp(text, "host", 4) == 0) {
            order[count++] = SIMGPU_HOST;
            text += 4;
        } else if (sscanf(text, "%d%n", &order[count], &used) == 1) {
            count++;
            text += used;
        } else {
            return false;
        }
    }
    simgpu_policy_order(order, count);
    return true;
}

/* --- work for other ranks ----------------------------------------------------------------------------- */

/* Runs work for which another rank waits, and work that has begun and can now end. */
static bool
serve_peers(void)
{
    bool ran = false;
    for (int i = 0; i < SIM_ACTORS; i++) {
        uint64_t until = 0;
        for (const sim_op *op = sim_actors[i].head; op; op = op->next) {
            if (op->work.wanted && (op->tried || op->work.wanted(op->work.context))) {
                until = op->time;
            }
        }
        while (sim_actors[i].done < until && step_towards(i, until)) {
            ran = true;
        }
    }
    return ran;
}

static void *
help(void *unused)
{
    sim_lock();
    for (;;) {
        if (waiting_works == 0) {
            sim_pause(100);
        } else if (!serve_peers()) {
            sim_pause(1);
        }
    }
    return unused;
}

static void
start_helper(void)
{
    pthread_t thread;
    if (!helper_started && pthread_create(&thread, NULL, help, NULL) == 0) {
        pthread_detach(thread);
        helper_started = true;
    }
}

/* Called in a forked process, which has no helper thread. */
void
sim_streams_lose_helper(void)
{
    helper_started = false;
}

/* --- putting work on a stream ---------------------------------------------------------------------------- */

CUresult
sim_push(int index, const simgpu_work *work, sim_dep dep, const uint64_t *clock, bool counted)
{
    sim_actor *actor = &sim_actors[index];
    sim_op *op = sim_alloc(1, sizeof *op);
    sim_clock_join(actor->clock, sim_actors[sim_processor()].clock);
    if (clock) {
        sim_clock_join(actor->clock, clock);
    }
    op->actor = index;
    op->time = ++actor->enqueued;
    actor->clock[index] = op->time;
    memcpy(op->clock, actor->clock, sizeof op->clock);
    op->dep = dep;
    op->stamp = sim_now();
    op->counted = counted;
    op->work = *work;
    op->name = sim_intern(work->name);
    if (actor->tail) {
        actor->tail->next = op;
    } else {
        actor->head = op;
    }
    actor->tail = op;
    if (work->wanted) {
        waiting_works++;
        start_helper();
        sim_wake_locked();
    }
    let_go();
    return actor->at_once ? sim_demand(index, actor->enqueued) : CUDA_SUCCESS;
}

/* The legacy stream and streams without CU_STREAM_NON_BLOCKING wait for each other. */
static void
push_legacy_order(int index)
{
    sim_actor *actor = &sim_actors[index];
    for (int i = 1; actor->blocking && i < SIM_ACTORS; i++) {
        sim_actor *other = &sim_actors[i];
        bool pair = other->used && other->blocking && other->at_once != actor->at_once;
        if (pair && i != index && other->enqueued > actor->clock[i]) {
            simgpu_work wait = {.name = "legacy order"};
            sim_push(index, &wait, (sim_dep){.actor = i, .time = other->enqueued}, other->clock,
                     false);
        }
    }
}

static CUresult
enqueue(CUstream stream, const simgpu_work *work, sim_dep dep, const uint64_t *clock, bool counted)
{
    int index = sim_stream_actor(stream);
    if (index < 0) {
        if (work->drop) {
            work->drop(work->context);
        }
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (sim_captures(index)) {
        sim_capture_work(index);
        if (work->drop) {
            work->drop(work->context);
        }
        return CUDA_SUCCESS;
    }
    push_legacy_order(index);
    return sim_push(index, work, dep, clock, counted);
}

SIM_EXPORT CUresult
simgpu_enqueue(CUstream stream, const simgpu_work *work, simgpu_point *after)
{
    sim_lock();
    sim_dep dep = {0};
    int index = sim_stream_actor(stream);
    if (after && after->time) {
        dep = (sim_dep){.actor = after->actor, .time = after->time};
    }
    sim_counters.collectives += index >= 0 && work->wanted != NULL;
    CUresult result = enqueue(stream, work, dep, dep.time ? after->clock : NULL, false);
    if (after && index >= 0 && !sim_captures(index)) {
        after->actor = index;
        after->time = sim_actors[index].enqueued;
        memcpy(after->clock, sim_actors[index].clock, sizeof after->clock);
    }
    sim_unlock();
    return result;
}

SIM_EXPORT bool
simgpu_point_done(const simgpu_point *point)
{
    sim_lock();
    bool done = point->time == 0 || sim_actors[point->actor].done >= point->time;
    sim_unlock();
    return done;
}

SIM_EXPORT bool
simgpu_point_demand(const simgpu_point *point)
{
    sim_lock();
    bool done = point->time == 0 || sim_demand(point->actor, point->time) == CUDA_SUCCESS;
    sim_unlock();
    return done;
}

/* Enqueues work of the driver's own entry points, whose bytes go into the counters. */
CUresult
sim_enqueue_counted(CUstream stream, const simgpu_work *work)
{
    return enqueue(stream, work, (sim_dep){0}, NULL, true);
}

CUresult
sim_enqueue_plain(CUstream stream, const simgpu_work *work, sim_dep dep, const uint64_t *clock)
{
    return enqueue(stream, work, dep, clock, false);
}

/* An access that the program makes at the time of the call. */
typedef struct touch {
    uintptr_t address;
    size_t bytes;
    bool write;
} touch;

static enum simgpu_progress
run_touch(void *context, simgpu_task *task)
{
    const touch *made = context;
    (void)sim_access(task, made->address, made->bytes, made->write);
    return SIMGPU_DONE;
}

void
sim_touch(int index, uintptr_t address, size_t bytes, bool write, const char *what)
{
    touch made = {.address = address, .bytes = bytes, .write = write};
    simgpu_work work = {.name = what, .context = &made, .run = run_touch};
    sim_actor *actor = &sim_actors[index];
    if (!actor->processor) {
        push_legacy_order(index);
    }
    sim_push(index, &work, (sim_dep){0}, NULL, false);
    (void)sim_demand(index, actor->enqueued);
}

SIM_EXPORT void
simgpu_stream_access(CUstream stream, const void *ptr, size_t bytes, bool write, const char *what)
{
    sim_lock();
    int actor = sim_stream_actor(stream);
    if (actor >= 0) {
        sim_touch(actor, (uintptr_t)ptr, bytes, write, what);
    }
    sim_unlock();
}

SIM_EXPORT void
simgpu_host_read(const void *ptr, size_t bytes, const char *what)
{
    simgpu_stream_access(NULL, ptr, bytes, false, what);
}

SIM_EXPORT void
simgpu_host_write(void *ptr, size_t bytes, const char *what)
{
    simgpu_stream_access(NULL, ptr, bytes, true, what);
}

static void
cpu_access(const void *ptr, size_t bytes, bool write, const char *what)
{
    sim_lock();
    sim_touch(sim_processor(), (uintptr_t)ptr, bytes, write, what);
    sim_unlock();
}

SIM_EXPORT void
simgpu_cpu_read(const void *ptr, size_t bytes, const char *what)
{
    cpu_access(ptr, bytes, false, what);
}

SIM_EXPORT void
simgpu_cpu_write(void *ptr, size_t bytes, const char *what)
{
    cpu_access(ptr, bytes, true, what);
}

SIM_EXPORT bool
simgpu_host_operator(const void *ptr, size_t bytes, bool write, const char *what)
{
    sim_lock();
    enum sim_place place = sim_place_of((uintptr_t)ptr);
    if (place != SIM_ELSEWHERE) {
        int actor = place == SIM_ON_DEVICE ? sim_stream_actor(NULL) : sim_processor();
        sim_touch(actor, (uintptr_t)ptr, bytes, write, what);
    }
    sim_unlock();
    return place != SIM_ELSEWHERE;
}

/* --- streams as the driver gives them ---------------------------------------------------------------------- */

SIM_EXPORT CUresult
cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    SIM_ENTER(cuStreamCreateWithPriority, true);
    (void)priority;
    SIM_REFUSE(!stream || flags > CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    char name[40];
    struct CUstream_st *handle = sim_alloc(1, sizeof *handle);
    (void)sim_processor(); /* makes the processor's actor before that of the first stream */
    snprintf(name, sizeof name, "stream %d", streams_made);
    handle->actor = new_actor(name);
    handle->live = true;
    handle->next = handles;
    handles = handle;
    sim_actors[handle->actor].order = streams_made++;
    sim_actors[handle->actor].blocking = !(flags & CU_STREAM_NON_BLOCKING);
    sim_counters.streams_created++;
    *stream = handle;
    return sim_leave(CUDA_SUCCESS);
}

/* Work that is left on the stream still runs, as on a device. */
SIM_EXPORT CUresult
cuStreamDestroy(CUstream stream)
{
    SIM_ENTER(cuStreamDestroy, true);
    int actor = (uintptr_t)stream <= 1 ? -1 : sim_stream_actor(stream);
    SIM_REFUSE(actor < 0, CUDA_ERROR_INVALID_HANDLE);
    stream->live = false;
    sim_actors[actor].live = false;
    return sim_leave(CUDA_SUCCESS);
}

CUresult
sim_look(sim_dep at, const uint64_t *clock, bool wait)
{
    CUresult result = CUDA_SUCCESS;
    if (wait) {
        sim_counters.host_syncs++;
        result = sim_demand(at.actor, at.time);
    } else if (sim_actors[at.actor].done < at.time) {
        sim_nudge(at.actor, at.time);
        sim_counters.not_ready++;
        return sim_sticky ? sim_sticky : CUDA_ERROR_NOT_READY;
    }
    sim_observe(clock);
    return sim_sticky ? sim_sticky : result;
}

static CUresult
stream_state(enum sim_entry entry, CUstream stream, bool wait)
{
    SIM_TRY(sim_enter(entry, true));
    int index = sim_stream_actor(stream);
    SIM_REFUSE(index < 0, CUDA_ERROR_INVALID_HANDLE);
    SIM_TRY(sim_capture_unsafe(wait ? "waiting for a stream" : "asking for a stream"));
    push_legacy_order(index);
    const sim_dep all = {.actor = index, .time = sim_actors[index].enqueued};
    return sim_leave(sim_look(all, sim_actors[index].clock, wait));
}

SIM_EXPORT CUresult
cuStreamQuery(CUstream stream)
{
    return stream_state(SIM_cuStreamQuery, stream, false);
}

SIM_EXPORT CUresult
cuStreamSynchronize(CUstream stream)
{
    return stream_state(SIM_cuStreamSynchronize, stream, true);
}

SIM_EXPORT CUresult
cuCtxSynchronize(void)
{
    SIM_ENTER(cuCtxSynchronize, true);
    SIM_TRY(sim_capture_unsafe("waiting for the device"));
    sim_counters.host_syncs++;
    CUresult result = sim_demand_all();
    for (int i = 1; i < SIM_ACTORS; i++) {
        if (sim_actors[i].used && !sim_actors[i].processor) {
            sim_observe(sim_actors[i].clock);
        }
    }
    return sim_leave(sim_sticky ? sim_sticky : result);
}

int
sim_stream_leaks(char *text, size_t bytes)
{
    int count = 0;
    for (struct CUstream_st *handle = handles; handle; handle = handle->next) {
        if (handle->live) {
            count = sim_list(text, bytes, count, "stream: %s\n", sim_actor_name(handle->actor));
        }
    }
    return count + sim_event_leaks(text, bytes);
}

/* Called when threads that are ranks have ended. */
void
sim_streams_reset(void)
{
    for (int i = 0; i < SIM_ACTORS; i++) {
        while (sim_actors[i].head) { /* work that can never run */
            sim_op *op = sim_actors[i].head;
            sim_actors[i].head = op->next;
            waiting_works -= op->work.wanted != NULL;
            if (op->work.drop) {
                op->work.drop(op->work.context);
            }
            free(op);
        }
        memset(&sim_actors[i], 0, sizeof sim_actors[i]);
    }
    while (handles) {
        struct CUstream_st *handle = handles;
        handles = handle->next;
        free(handle);
    }
    main_host = (host){0};
    memset(rank_hosts, 0, sizeof rank_hosts);
    rank_host_count = 0;
    epoch++;
    streams_made = 0;
    sim_capture_reset();
    sim_events_reset();
}
