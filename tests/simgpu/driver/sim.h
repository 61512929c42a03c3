/* What the files of the simulated driver share. Everything here is called with sim_lock() held,
 * except sim_enter, which takes it, and sim_leave, which gives it back. */
#ifndef SIMGPU_SIM_H
#define SIMGPU_SIM_H

#include <pthread.h>

#include "simgpu.h"

enum { SIM_ACTORS = 64, SIM_SKIPPED = -1 };
#define SIM_EXPORT __attribute__((visibility("default")))

/* --- core: sim_core.c --------------------------------------------------------------------------- */

extern simgpu_options sim_options;
extern simgpu_counters sim_counters;
extern CUresult sim_sticky; /* after an illegal access every call fails, as on a real device */

void sim_lock(void);
void sim_unlock(void);
/* Waits for sim_wake_locked() or `ms`, with the lock given back meanwhile. */
void sim_pause(int ms);
void sim_wake_locked(void);
/* Counts the call and plays the planted faults. Where it is not SUCCESS, sim_leave(it) at once. */
CUresult sim_enter(enum sim_entry entry, bool needs_context);
CUresult sim_leave(CUresult result);
/* Entry points leave at once with what is not SUCCESS; from SIM_ENTER until they leave they hold the lock. */
#define SIM_TRY(call)                 \
    do {                              \
        CUresult tried_ = (call);     \
        if (tried_) {                 \
            return sim_leave(tried_); \
        }                             \
    } while (0)
#define SIM_ENTER(entry, needs_context) SIM_TRY(sim_enter(SIM_##entry, needs_context))
#define SIM_REFUSE(condition, code) SIM_TRY((condition) ? (code) : CUDA_SUCCESS)
void sim_forget_faults(void);
bool sim_has_context(void);
const char *sim_intern(const char *text);
/* Reports one line: it is kept, printed and, if so set, fatal. */
void sim_say(bool race, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A number for each moment of the program. */
uint64_t sim_now(void);
void *sim_alloc(size_t count, size_t bytes);
void *sim_grow(void *block, int count, int *capacity, size_t bytes);

/* --- clocks: sim_clock.c ------------------------------------------------------------------------ */

typedef struct sim_mark {
    int actor;
    uint64_t time;
    const char *what, *label;
} sim_mark;

typedef struct sim_segment {
    uint64_t lo, hi;
    bool written;
    sim_mark write;
    sim_mark *reads; /* at most one per actor */
    int read_count, read_capacity;
} sim_segment;

/* The history of a piece of physical memory. */
typedef struct sim_space {
    sim_segment *segments; /* sorted, without overlap */
    int count, capacity;
} sim_space;

struct simgpu_task {
    int actor;
    uint64_t time;
    const uint64_t *clock;
    const char *what;
    uint64_t stamp; /* the moment at which it was put on its stream */
    bool counted;   /* its bytes go into the counters */
    bool broken;
};

void sim_space_access(sim_space *space, uint64_t lo, uint64_t hi, const simgpu_task *task,
                      bool write, const char *label);
void sim_space_free(sim_space *space);
void sim_clock_join(uint64_t *into, const uint64_t *other);

/* --- memory: sim_memory.c ----------------------------------------------------------------------- */

/* Checks rights and history of an access by a task. */
bool sim_access(simgpu_task *task, uintptr_t address, size_t bytes, bool write);
bool sim_is_pinned(uintptr_t address, size_t bytes);
/* Memory that was given back counts as what it was reserved for: the device's. */
enum sim_place { SIM_ELSEWHERE, SIM_ON_DEVICE, SIM_ON_HOST };
enum sim_place sim_place_of(uintptr_t address);
/* Between begin and run, accesses are noted; between run and end, pages without a noted access are
 * unreadable. End reports bytes that changed without having been declared. */
void sim_verify_begin(void);
void sim_verify_run(void);
void sim_verify_end(const char *kernel);
void sim_memory_reset(void);
int sim_memory_leaks(char *text, size_t bytes);

/* --- streams: sim_stream.c ---------------------------------------------------------------------- */

typedef struct sim_op sim_op;
typedef struct sim_actor {
    bool used, live, at_once, blocking, processor;
    int order; /* number of creation, among streams made by cuStreamCreate */
    char name[40];
    sim_op *head, *tail;
    uint64_t enqueued, done;
    uint64_t clock[SIM_ACTORS];
} sim_actor;

struct CUstream_st {
    bool live;
    int actor;
    struct CUstream_st *next;
};

typedef struct sim_dep {
    int actor;
    uint64_t time; /* 0: no dependency */
} sim_dep;

extern sim_actor sim_actors[SIM_ACTORS];

int sim_processor(void);               /* the calling thread's processor */
int sim_stream_actor(CUstream stream); /* -1: the stream is not live */
const char *sim_actor_name(int actor);
CUresult sim_push(int actor, const simgpu_work *work, sim_dep dep, const uint64_t *clock,
                  bool counted);
/* Runs until (actor, time) is done. LAUNCH_TIMEOUT: it never was. */
CUresult sim_demand(int actor, uint64_t time);
/* Runs one piece of work towards (actor, time). */
void sim_nudge(int actor, uint64_t time);
CUresult sim_demand_all(void);
/* The processor asks whether `at` is done (NOT_READY), or waits for it; then it has seen the clock. */
CUresult sim_look(sim_dep at, const uint64_t *clock, bool wait);
/* The processor has seen as done what has this clock. */
void sim_observe(const uint64_t *clock);
void sim_streams_reset(void);
void sim_streams_lose_helper(void); /* in a forked process */
int sim_stream_leaks(char *text, size_t bytes);
/* For entry points: they look the stream up and keep the legacy stream's order. */
CUresult sim_enqueue_counted(CUstream stream, const simgpu_work *work);
CUresult sim_enqueue_plain(CUstream stream, const simgpu_work *work, sim_dep dep,
                           const uint64_t *clock);
void sim_touch(int actor, uintptr_t address, size_t bytes, bool write, const char *what);

/* --- captures: sim_capture.c -------------------------------------------------------------------- */

typedef struct sim_captured {
    uint64_t id; /* 0: recorded outside of a capture */
    uint64_t behind[SIM_ACTORS];
} sim_captured;

bool sim_captures(int actor);
/* Notes work that is captured and not run. */
void sim_capture_work(int actor);
void sim_capture_record(int actor, sim_captured *event);
/* Makes the stream part of the capture. */
CUresult sim_capture_wait(int actor, const sim_captured *event);
CUresult sim_capture_query(const sim_captured *event);
/* For a call that may not be made while another stream captures, except in relaxed mode. */
CUresult sim_capture_unsafe(const char *call);
CUresult sim_capture_copy(int actor, bool pinned);
void sim_capture_reset(void);

/* --- events: sim_event.c ------------------------------------------------------------------------ */

void sim_events_reset(void);
int sim_event_leaks(char *text, size_t bytes);

/* --- kernels: sim_kernel.c ---------------------------------------------------------------------- */

void sim_kernels_reset(void);
int sim_kernel_leaks(char *text, size_t bytes);
/* Kernels of this project: their accesses follow from their parameter structs (sim_declare.c). */
const struct sim_declared *sim_find_declared(const char *name);
typedef struct sim_declared {
    const char *name;
    size_t params_bytes;
    simgpu_declare declare;
} sim_declared;

int sim_list(char *text, size_t bytes, int already, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
