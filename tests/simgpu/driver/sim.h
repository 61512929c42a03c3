/* Declarations that the files of the simulated driver share. All functions here are called with sim_lock()
 * held, except sim_enter(), which takes the lock; sim_leave() gives the lock back. */
#ifndef SIMGPU_SIM_H
#define SIMGPU_SIM_H

#include <pthread.h>

#include "simgpu.h"

enum { SIM_ACTORS = 64, SIM_SKIPPED = -1 };
#define SIM_EXPORT __attribute__((visibility("default")))

/* --- core: sim_core.c --------------------------------------------------------------------------- */

extern simgpu_options sim_options;
extern simgpu_counters sim_counters;
/* The error of an illegal access. Every later call returns this error, as on a real device. */
extern CUresult sim_sticky;

void sim_lock(void);
void sim_unlock(void);
/* Waits for sim_wake_locked() or for `ms` milliseconds, with the lock released meanwhile. */
void sim_pause(int ms);
void sim_wake_locked(void);
/* Takes the lock, counts the call and applies planted faults. If the result is not CUDA_SUCCESS, the entry
 * point must return sim_leave(result) at once. */
CUresult sim_enter(enum sim_entry entry, bool needs_context);
CUresult sim_leave(CUresult result);
/* Returns from the entry point at once if the call does not return CUDA_SUCCESS. An entry point holds the
 * lock from SIM_ENTER until it returns. */
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
/* Reports one line. The line is kept, printed unless `quiet` is set, and fatal if `abort_on_report` is
 * set. */
void sim_say(bool race, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns a number that grows with each call, as a time stamp. */
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
    sim_mark *reads; /* the last read by each actor since the write */
    int read_count, read_capacity;
} sim_segment;

/* The history of accesses to a block of physical memory. */
typedef struct sim_space {
    sim_segment *segments; /* sorted, without overlap */
    int count, capacity;
} sim_space;

struct simgpu_task {
    int actor;
    uint64_t time;
    const uint64_t *clock;
    const char *what;
    uint64_t stamp; /* sim_now() when the task was put on its stream */
    bool counted;   /* the task's bytes go into the counters */
    bool broken;
};

void sim_space_access(sim_space *space, uint64_t lo, uint64_t hi, const simgpu_task *task,
                      bool write, const char *label);
void sim_space_free(sim_space *space);
void sim_clock_join(uint64_t *into, const uint64_t *other);

/* --- memory: sim_memory.c ----------------------------------------------------------------------- */

/* Checks that a task may access the memory, and that no other access races with this one. Returns false if
 * the task may not access the memory. */
bool sim_access(simgpu_task *task, uintptr_t address, size_t bytes, bool write);
bool sim_is_pinned(uintptr_t address, size_t bytes);
/* Freed memory counts as device memory, even if it was pinned memory of the host. */
enum sim_place { SIM_ELSEWHERE, SIM_ON_DEVICE, SIM_ON_HOST };
enum sim_place sim_place_of(uintptr_t address);
/* sim_verify_begin() starts to note declared accesses. sim_verify_run() makes pages without a noted access
 * unreadable. sim_verify_end() makes them readable again and reports bytes that changed without a declared
 * write. */
void sim_verify_begin(void);
void sim_verify_run(void);
void sim_verify_end(const char *kernel);
void sim_memory_reset(void);
int sim_memory_leaks(char *text, size_t bytes);

/* --- streams: sim_stream.c ---------------------------------------------------------------------- */

typedef struct sim_op sim_op;
typedef struct sim_actor {
    bool used, live, at_once, blocking, processor;
    int order; /* creation number of a stream that cuStreamCreate made; else -1 */
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

int sim_processor(void);               /* the actor of the calling thread's processor */
int sim_stream_actor(CUstream stream); /* the stream's actor; -1 if the stream is not live */
const char *sim_actor_name(int actor);
CUresult sim_push(int actor, const simgpu_work *work, sim_dep dep, const uint64_t *clock,
                  bool counted);
/* Runs work until piece number `time` of the actor is done; CUDA_ERROR_LAUNCH_TIMEOUT if the piece is
 * not done in time. */
CUresult sim_demand(int actor, uint64_t time);
/* Runs one piece of work for a caller that polls for piece number `time` of the actor. The policy may choose
 * work that does not lead to that piece. */
void sim_nudge(int actor, uint64_t time);
CUresult sim_demand_all(void);
/* With `wait`, waits until `at` is done. Without `wait`, returns CUDA_ERROR_NOT_READY if `at` is not done.
 * When `at` is done, the processor observes `clock`. */
CUresult sim_look(sim_dep at, const uint64_t *clock, bool wait);
/* Lets the processor observe as done all work that this clock includes. */
void sim_observe(const uint64_t *clock);
void sim_streams_reset(void);
void sim_streams_lose_helper(void); /* called in a forked process */
int sim_stream_leaks(char *text, size_t bytes);
/* The entry points enqueue work with these functions, which look up the stream and keep the order of the
 * legacy stream. */
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
/* Counts work that is captured instead of run. */
void sim_capture_work(int actor);
void sim_capture_record(int actor, sim_captured *event);
/* Makes the stream part of the capture in which the event was recorded. */
CUresult sim_capture_wait(int actor, const sim_captured *event);
CUresult sim_capture_query(const sim_captured *event);
/* Refuses a call while a capture is in progress, unless the capture or the calling thread is in relaxed mode.
 * A refusal makes the capture invalid. */
CUresult sim_capture_unsafe(const char *call);
CUresult sim_capture_copy(int actor, bool pinned);
void sim_capture_reset(void);

/* --- events: sim_event.c ------------------------------------------------------------------------ */

void sim_events_reset(void);
int sim_event_leaks(char *text, size_t bytes);

/* --- kernels: sim_kernel.c ---------------------------------------------------------------------- */

void sim_kernels_reset(void);
int sim_kernel_leaks(char *text, size_t bytes);
/* Returns the declaration of a kernel of this project (sim_declare.c); NULL for other kernels. A declaration
 * computes the kernel's accesses from the kernel's parameter struct. */
const struct sim_declared *sim_find_declared(const char *name);
typedef struct sim_declared {
    const char *name;
    size_t params_bytes;
    simgpu_declare declare;
} sim_declared;

int sim_list(char *text, size_t bytes, int already, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
