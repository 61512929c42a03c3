/* Functions with which tests use the simulated GPU: schedules, faults, declared accesses, counters, reports.
 *
 * cuda_abi.h is the driver's own interface, and all that the code under test sees. A test program is linked
 * with the simulated libcuda.so.1, or finds these functions in that library with dlsym.
 *
 * Where work runs. A *stream* is a queue of work; the *processor* is the program itself. The legacy NULL
 * stream stands for torch's current stream and its operators. The program runs the work of the NULL stream
 * itself: that work runs before the call returns, and forces all work that it waits for. Work on other
 * streams is held back until the policy lets it run.
 *
 * What orders work. A piece of work is ordered behind all earlier work of its stream, behind what its stream
 * was told to wait for, and behind what the processor had *observed* as done (by a query that succeeded, or
 * by a synchronisation) when it enqueued the piece. Work on the NULL stream is not ordered before work that
 * the processor enqueues later on another stream. Each access of each physical byte is checked against the
 * last accesses by every stream; two accesses that nothing orders, one of them a write, are a race.
 */
#ifndef SIMGPU_H
#define SIMGPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

/* --- schedules ------------------------------------------------------------------------------- */

/* Policies. simgpu_policy_order() takes a list of streams, by creation number (0 = the first). Streams that
 * the list names before SIMGPU_HOST run all they can at every call. Streams that the list names after
 * SIMGPU_HOST are held back until something demands their work, and then run in the order of the list.
 * Streams that are not in the list are held back, too. */
enum { SIMGPU_HOST = -1 };
void simgpu_policy_eager(void); /* runs work as soon as what it waits for is done */
void simgpu_policy_lazy(void);  /* runs only demanded work; the default */
void simgpu_policy_random(uint64_t seed);
void simgpu_policy_order(const int *streams, int count);
/* Sets a policy: "eager", "lazy", "random:SEED" or "order:1,host,0"; also set by $SIMGPU_POLICY. Returns
 * false if the text is none of these. */
bool simgpu_policy(const char *text);
/* Runs all enqueued work, in the policy's order. This is no synchronisation: the processor observes nothing.
 * Returns false if some work cannot run. */
bool simgpu_drain(void);
/* Returns to the state of a fresh process: drains and frees everything, and forgets all reports. */
void simgpu_reset(void);
/* Makes the calling thread a rank of its own, with its own NULL stream and its own observations. */
void simgpu_thread_is_rank(const char *name);

/* --- what the program itself touches ---------------------------------------------------------- */

/* Declare an access by a torch operator on the compute stream. `what` names the operator. */
void simgpu_host_read(const void *ptr, size_t bytes, const char *what);
void simgpu_host_write(void *ptr, size_t bytes, const char *what);
/* Declares an access by an operator on any stream. The access runs before the call returns. */
void simgpu_stream_access(CUstream stream, const void *ptr, size_t bytes, bool write,
                          const char *what);
/* Declares an operator's access. For device memory, the call is like simgpu_host_read() or
 * simgpu_host_write(); for pinned memory, like simgpu_cpu_read() or simgpu_cpu_write(). For other memory, the
 * call declares nothing and returns false. */
bool simgpu_host_operator(const void *ptr, size_t bytes, bool write, const char *what);
/* Declare accesses by the processor itself, to pinned memory. */
void simgpu_cpu_read(const void *ptr, size_t bytes, const char *what);
void simgpu_cpu_write(void *ptr, size_t bytes, const char *what);
/* Set names for reports; a later label of the same bytes wins. */
void simgpu_label(const void *ptr, size_t bytes, const char *text);
void simgpu_label_stream(CUstream stream, const char *text);

/* --- planted faults ----------------------------------------------------------------------------- */

/* Makes the k-th call from now (1 = the next) of this entry point return success and do nothing. */
bool simgpu_skip(const char *entry, int k);
bool simgpu_skip_wait(int k); /* simgpu_skip of cuStreamWaitEvent */
/* Makes the k-th call from now fail with this code. $SIMGPU_SKIP and $SIMGPU_FAIL also plant skips and
 * failures: "cuStreamWaitEvent:3", "cuMemCreate:1:2". */
bool simgpu_fail(const char *entry, int k, CUresult code);
/* How often an entry point was called so far; -1 for an unknown entry point. */
int64_t simgpu_calls(const char *entry);

typedef struct simgpu_options {
    bool vmm;     /* virtual memory management exists; true unless $SIMGPU_NO_VMM is set */
    bool foreign; /* work may access memory that the driver did not allocate; false by default */
    bool abort_on_report; /* abort() at the first race or fault; $SIMGPU_ABORT sets this, too */
    bool quiet;           /* reports are kept but not printed */
    bool verify;          /* check kernels with sim_verify.c; slow; $SIMGPU_VERIFY sets this, too */
    int driver_version;   /* 13000 by default */
    int devices;          /* 1 by default */
    size_t memory_bytes;  /* the device's memory; 1 GiB by default */
    size_t foreign_bytes; /* part of memory_bytes used by contexts and libraries; 0 by default */
    size_t granule;       /* granularity of virtual memory; 2 MiB, or $SIMGPU_GRANULE */
    bool forks;           /* a forked child may use the driver; false by default, as on a GPU */
    double stall_s;       /* a wait for other ranks fails after this time; 30 by default */
} simgpu_options;
simgpu_options *simgpu_get_options(void); /* change them before the calls that they concern */

/* --- what was seen ------------------------------------------------------------------------------ */

typedef struct simgpu_counters {
    int64_t races, faults; /* faults: accesses to unmapped, freed or forbidden memory */
    int64_t launches, copies, memsets, collectives;
    int64_t bytes_read, bytes_written; /* of launches, copies and memsets, not of collectives */
    int64_t allocations, host_allocations, frees;
    int64_t maps, unmaps;
    int64_t events_created, streams_created;
    int64_t records, waits;
    int64_t host_syncs; /* how often the processor had to wait */
    int64_t not_ready;  /* queries that returned CUDA_ERROR_NOT_READY */
    int64_t late_loads; /* launches of functions that were not loaded beforehand */
    int64_t pageable;   /* copies from or to memory that is not pinned */
    int64_t device_bytes, peak_device_bytes, host_bytes;
} simgpu_counters;
simgpu_counters simgpu_count(void);

/* Returns report number `index` of races and faults, in order; NULL after the last. The text is
 * valid until simgpu_reset(). */
const char *simgpu_report(int index);
int simgpu_reports(void);
/* Lists what was made and not freed, one line each, and returns the number of lines. `text` may be NULL. */
int simgpu_leaks(char *text, size_t bytes);
/* True if every byte can be read (written) now by work on the device. */
bool simgpu_accessible(const void *ptr, size_t bytes, bool write);
/* True if all these bytes are mapped with virtual memory management (cuMemMap). */
bool simgpu_is_virtual(const void *ptr, size_t bytes);

/* Returns how many launches, copies, fills and collectives the last capture has. */
int64_t simgpu_captured(void);

/* --- kernels and other work ---------------------------------------------------------------------- */

typedef struct simgpu_task simgpu_task;

/* Work calls these functions before it touches memory. If a function returns false, the access is not allowed
 * and the work must not run. */
bool simgpu_task_read(simgpu_task *task, const void *ptr, size_t bytes);
bool simgpu_task_write(simgpu_task *task, void *ptr, size_t bytes);

typedef struct simgpu_launch {
    unsigned grid[3], block[3], shared_bytes;
} simgpu_launch;
/* A kernel takes one struct by value. `declare` names the kernel's accesses, and returns false to refuse the
 * launch. */
typedef bool (*simgpu_declare)(simgpu_task *task, const void *params, const simgpu_launch *launch);
typedef void (*simgpu_launcher)(const void *params, unsigned gx, unsigned gy, unsigned gz,
                                unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes);
void simgpu_kernel(const char *name, size_t params_bytes, simgpu_launcher launcher,
                   simgpu_declare declare);

/* Work of a library above the driver, such as a collective. `run` is called until it returns SIMGPU_DONE;
 * SIMGPU_BLOCKED means that other ranks must come first. `wanted` (optional) says whether another rank waits
 * for this work. */
enum simgpu_progress { SIMGPU_DONE, SIMGPU_BLOCKED };
typedef struct simgpu_work {
    const char *name;
    void *context;
    enum simgpu_progress (*run)(void *context, simgpu_task *task);
    bool (*wanted)(void *context);
    void (*drop)(void *context); /* (optional) called when the work is done or will never run */
} simgpu_work;
/* A position in a stream's queue. A zero-initialised point is no position. */
typedef struct simgpu_point {
    int actor;
    uint64_t time;
    uint64_t clock[64];
} simgpu_point;
/* Enqueues work. If `after` is not NULL, the work is also ordered behind that point, and *after becomes the
 * point of the work. */
CUresult simgpu_enqueue(CUstream stream, const simgpu_work *work, simgpu_point *after);
bool simgpu_point_done(const simgpu_point *point);
/* Runs work until the point is reached, as a wait for the point would. Returns false if the point is not
 * reached in time. */
bool simgpu_point_demand(const simgpu_point *point);
/* For libraries above the driver: simgpu_fault() reports a fault of the library, and simgpu_wake() wakes all
 * that wait for a change of state. */
void simgpu_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
void simgpu_wake(void);

#endif
