/* The test's side of the simulated GPU: schedules, faults, declared accesses, counters, reports.
 *
 * The driver's side is cuda_abi.h; the code under test only sees that. A test program is linked
 * with the simulated libcuda.so.1, or finds these functions in it with dlsym.
 *
 * What runs where. A *stream* is a queue of work; the *processor* is the program itself. The
 * legacy NULL stream stands for torch's current stream and its operators: the program runs them
 * itself, at once, so work put on it runs before the call returns, and forces what it waits for.
 * Work on other streams is held back and let go as the policy says.
 *
 * What orders what. Work is ordered behind everything that its stream holds, what the stream was
 * told to wait for, and what the processor had *observed* as done when it put the work there (a
 * query that succeeded, a synchronisation). The processor putting work on the NULL stream before
 * work on another stream orders nothing. Each access of each physical byte is checked against the
 * last accesses by every stream; two that nothing orders, one of them a write, are a race.
 */
#ifndef SIMGPU_H
#define SIMGPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

/* --- schedules ------------------------------------------------------------------------------- */

/* The order of streams, by their number of creation (0 = the first). SIMGPU_HOST parts them: streams before
 * it run all they can at every call; streams behind it are held back until something demands their work, and
 * then run in this order. Streams that are not named are held back, too. */
enum { SIMGPU_HOST = -1 };
void simgpu_policy_eager(void); /* runs work at once, where that is legal */
void simgpu_policy_lazy(void);  /* runs only what is demanded; the default */
void simgpu_policy_random(uint64_t seed);
void simgpu_policy_order(const int *streams, int count);
/* "eager", "lazy", "random:SEED", "order:1,host,0"; also in $SIMGPU_POLICY. False: not understood. */
bool simgpu_policy(const char *text);
/* Runs everything that was put on any stream, in the policy's order. Counts as no synchronisation, and the
 * processor observes nothing. False: something cannot run. */
bool simgpu_drain(void);
/* Back to the state of a fresh process: everything is drained and freed, all reports forgotten. */
void simgpu_reset(void);
/* The calling thread is a rank of its own: own NULL stream, own view of what has been observed. */
void simgpu_thread_is_rank(const char *name);

/* --- what the program itself touches ---------------------------------------------------------- */

/* torch's operators on the compute stream. `what` names the operator. */
void simgpu_host_read(const void *ptr, size_t bytes, const char *what);
void simgpu_host_write(void *ptr, size_t bytes, const char *what);
/* An operator's access on any stream; it runs when the call is made. */
void simgpu_stream_access(CUstream stream, const void *ptr, size_t bytes, bool write,
                          const char *what);
/* An operator's access to memory that may be the device's (as host_read, host_write), pinned (as cpu_read,
 * cpu_write), or neither (nothing is declared). True: it was declared. */
bool simgpu_host_operator(const void *ptr, size_t bytes, bool write, const char *what);
/* Accesses of the processor itself, to pinned memory. */
void simgpu_cpu_read(const void *ptr, size_t bytes, const char *what);
void simgpu_cpu_write(void *ptr, size_t bytes, const char *what);
/* Names for reports; a later label of the same bytes wins. */
void simgpu_label(const void *ptr, size_t bytes, const char *text);
void simgpu_label_stream(CUstream stream, const char *text);

/* --- planted faults ----------------------------------------------------------------------------- */

/* The k-th call from now (1 = the next) of this entry point returns success and does nothing. */
bool simgpu_skip(const char *entry, int k);
bool simgpu_skip_wait(int k); /* simgpu_skip of cuStreamWaitEvent */
/* The k-th call from now fails with this code. Skips and failures also in $SIMGPU_SKIP and $SIMGPU_FAIL:
 * "cuStreamWaitEvent:3", "cuMemCreate:1:2". */
bool simgpu_fail(const char *entry, int k, CUresult code);
/* How often an entry point was called so far; -1 for an unknown one. */
int64_t simgpu_calls(const char *entry);

typedef struct simgpu_options {
    bool vmm;     /* false, or $SIMGPU_NO_VMM: no virtual memory management; true by default */
    bool foreign; /* memory that the driver did not give may be accessed; false by default */
    bool abort_on_report; /* abort() at the first race or fault; $SIMGPU_ABORT */
    bool quiet;           /* reports are kept but not printed */
    bool verify;          /* kernels may touch only what they declare; slow; $SIMGPU_VERIFY */
    int driver_version;   /* 13000 by default */
    int devices;          /* 1 by default */
    size_t memory_bytes;  /* of the device; 1 GiB by default */
    size_t foreign_bytes; /* of memory_bytes, held by contexts and libraries; 0 by default */
    size_t granule;       /* of virtual memory; 2 MiB, or $SIMGPU_GRANULE; smaller is faster */
    bool forks;           /* a forked child may go on; false by default, as on a GPU */
    double stall_s;       /* a wait for other ranks ends after this, as an error; 30 by default */
} simgpu_options;
simgpu_options *simgpu_get_options(void); /* to be changed in place, before the calls concerned */

/* --- what was seen ------------------------------------------------------------------------------ */

typedef struct simgpu_counters {
    int64_t races, faults; /* faults: access to what is not mapped, freed or allowed */
    int64_t launches, copies, memsets, collectives;
    int64_t bytes_read, bytes_written; /* of launches, copies and memsets, not of collectives */
    int64_t allocations, host_allocations, frees;
    int64_t maps, unmaps;
    int64_t events_created, streams_created;
    int64_t records, waits;
    int64_t host_syncs; /* the processor had to stand still */
    int64_t not_ready;  /* queries that found work left */
    int64_t late_loads; /* launches of functions that were not loaded beforehand */
    int64_t pageable;   /* copies from or to memory that is not pinned */
    int64_t device_bytes, peak_device_bytes, host_bytes;
} simgpu_counters;
simgpu_counters simgpu_count(void);

/* Reports in order, races and faults; NULL beyond the last. Valid until simgpu_reset. */
const char *simgpu_report(int index);
int simgpu_reports(void);
/* What was made and not given back, one line each; returns the number. `text` may be NULL. */
int simgpu_leaks(char *text, size_t bytes);
/* True if every byte can be read (written) now by work on the device. */
bool simgpu_accessible(const void *ptr, size_t bytes, bool write);
/* True if all of it is mapped from pieces of virtual memory management. */
bool simgpu_is_virtual(const void *ptr, size_t bytes);

/* Launches, copies, fills and collectives in the last capture. */
int64_t simgpu_captured(void);

/* --- kernels and other work ---------------------------------------------------------------------- */

typedef struct simgpu_task simgpu_task;

/* These say what a piece of work touches, before it does. False: it may not, the work must not run. */
bool simgpu_task_read(simgpu_task *task, const void *ptr, size_t bytes);
bool simgpu_task_write(simgpu_task *task, void *ptr, size_t bytes);

typedef struct simgpu_launch {
    unsigned grid[3], block[3], shared_bytes;
} simgpu_launch;
/* A kernel takes one struct by value. `declare` names its accesses and returns false to refuse. */
typedef bool (*simgpu_declare)(simgpu_task *task, const void *params, const simgpu_launch *launch);
typedef void (*simgpu_launcher)(const void *params, unsigned gx, unsigned gy, unsigned gz,
                                unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes);
void simgpu_kernel(const char *name, size_t params_bytes, simgpu_launcher launcher,
                   simgpu_declare declare);

/* Work of a library above the driver (collectives). `run` is called until it says DONE; BLOCKED means that
 * other ranks must come first; `wanted` (optional): whether another rank waits for this one. */
enum simgpu_progress { SIMGPU_DONE, SIMGPU_BLOCKED };
typedef struct simgpu_work {
    const char *name;
    void *context;
    enum simgpu_progress (*run)(void *context, simgpu_task *task);
    bool (*wanted)(void *context);
    void (*drop)(void *context); /* (optional) after the last run */
} simgpu_work;
/* A place in a stream's queue; zero-initialised: no place. */
typedef struct simgpu_point {
    int actor;
    uint64_t time;
    uint64_t clock[64];
} simgpu_point;
/* `after` (may be NULL): the work is also ordered behind this point, which becomes the point of the work. */
CUresult simgpu_enqueue(CUstream stream, const simgpu_work *work, simgpu_point *after);
bool simgpu_point_done(const simgpu_point *point);
/* Runs what leads to the point, as another piece of work that waits for it would. False: it never came. */
bool simgpu_point_demand(const simgpu_point *point);
/* For such libraries: reports a fault of the library's own; wakes all that wait for a state change. */
void simgpu_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
void simgpu_wake(void);

#endif
