/* The common parts of the simulated driver: its only lock, planted faults, options, counters and reports. */
#include "sim.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PLANTS = 64, NAMES = 4096, REPORT_BYTES = 512 };

/* The lock is recursive: work runs with the lock held, and takes the lock again to report a fault. A thread
 * that waits for `changed` has taken the lock exactly once. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

#define DEFAULTS                      \
    {.vmm = true,                     \
     .driver_version = 13000,         \
     .devices = 1,                    \
     .memory_bytes = (size_t)1 << 30, \
     .granule = 2 << 20,              \
     .stall_s = 30}
simgpu_options sim_options = DEFAULTS;
simgpu_counters sim_counters;
CUresult sim_sticky;

void
sim_lock(void)
{
    pthread_mutex_lock(&lock);
}

void
sim_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

void
sim_pause(int ms)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&changed, &lock, &until);
}

void
sim_wake_locked(void)
{
    pthread_cond_broadcast(&changed);
}

SIM_EXPORT void
simgpu_wake(void)
{
    sim_lock();
    sim_wake_locked();
    sim_unlock();
}

uint64_t
sim_now(void)
{
    static uint64_t moments;
    return ++moments;
}

/* Ends the program if there is no memory, because the test cannot go on. */
void *
sim_alloc(size_t count, size_t bytes)
{
    void *block = calloc(count, bytes);
    if (!block) {
        fprintf(stderr, "simgpu: out of memory\n");
        abort();
    }
    return block;
}

void *
sim_grow(void *block, int count, int *capacity, size_t bytes)
{
    if (count < *capacity) {
        return block;
    }
    *capacity = *capacity ? 2 * *capacity : 8;
    block = realloc(block, (size_t)*capacity * bytes);
    if (!block) {
        fprintf(stderr, "simgpu: out of memory\n");
        abort();
    }
    return block;
}

/* Returns a copy of the text. The copy is never freed, because histories of accesses point to it. */
const char *
sim_intern(const char *text)
{
    static char *names[NAMES];
    uint64_t hash = 1469598103934665603u;
    for (const char *c = text; *c; c++) {
        hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    }
    for (int i = 0; i < NAMES; i++) {
        char **place = &names[(hash + (uint64_t)i) % NAMES];
        if (!*place) {
            *place = strdup(text);
            return *place ? *place : "";
        }
        if (strcmp(*place, text) == 0) {
            return *place;
        }
    }
    return "(too many names)";
}

/* --- planted faults --------------------------------------------------------------------------- */

typedef struct plant {
    int entry;
    int64_t call; /* which call of the entry point is skipped or fails */
    CUresult result;
} plant;

static plant plants[PLANTS];
static int plant_count;
static int64_t calls[SIM_ENTRY_COUNT];

#define ENTRY_NAME(name, version) #name,
static const char *const entry_names[] = {SIM_ENTRIES(ENTRY_NAME)};
#undef ENTRY_NAME

static int
find_entry(const char *name)
{
    for (int i = 0; i < SIM_ENTRY_COUNT; i++) {
        if (strcmp(entry_names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

static bool
put_plant(const char *name, int k, CUresult result)
{
    int entry = find_entry(name);
    if (entry < 0 || k < 1 || plant_count == PLANTS) {
        return false;
    }
    plants[plant_count++] = (plant){.entry = entry, .call = calls[entry] + k, .result = result};
    return true;
}

SIM_EXPORT bool
simgpu_skip(const char *entry, int k)
{
    sim_lock();
    bool put = put_plant(entry, k, SIM_SKIPPED);
    sim_unlock();
    return put;
}

SIM_EXPORT bool
simgpu_skip_wait(int k)
{
    return simgpu_skip("cuStreamWaitEvent", k);
}

SIM_EXPORT bool
simgpu_fail(const char *entry, int k, CUresult code)
{
    sim_lock();
    bool put = code != CUDA_SUCCESS && put_plant(entry, k, code);
    sim_unlock();
    return put;
}

SIM_EXPORT int64_t
simgpu_calls(const char *entry)
{
    sim_lock();
    int i = find_entry(entry);
    int64_t count = i < 0 ? -1 : calls[i];
    sim_unlock();
    return count;
}

void
sim_forget_faults(void)
{
    plant_count = 0;
}

static bool initialised;
static bool forked; /* the driver cannot be used: this is a fork of a process that used it */

/* The forking thread holds the lock, so the parent's helper thread is not in the middle of its work. The
 * child has no helper thread. It takes a new mutex and a new condition variable, because the old mutex
 * belongs to the parent's thread and the old variable counts the parent's waits. The unlock is only for
 * TSan. */
static void
in_child(void)
{
    pthread_mutex_unlock(&lock);
    lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    sim_streams_lose_helper();
    forked = initialised && !sim_options.forks;
}

/* --- environment ------------------------------------------------------------------------------- */

/* Reads planted faults from an environment variable: "entry:k[:code][,...]". */
static void
read_plants(const char *variable, bool skip)
{
    const char *text = getenv(variable);
    while (text && *text) {
        char name[64] = "";
        int k = 0, code = 0, used = 0;
        if (sscanf(text, "%63[A-Za-z0-9]:%d%n", name, &k, &used) == 2) {
            text += used;
            if (!skip && sscanf(text, ":%d%n", &code, &used) == 1) {
                text += used;
            }
        }
        if (!put_plant(name, k, skip ? SIM_SKIPPED : code) || (*text != ',' && *text != '\0')) {
            fprintf(stderr, "simgpu: %s is not understood at '%s'\n", variable, text);
            abort();
        }
        text += *text == ',';
    }
}

static bool
is_set(const char *variable)
{
    const char *value = getenv(variable);
    return value && *value && strcmp(value, "0") != 0;
}

static void
read_options(void)
{
    const char *granule = getenv("SIMGPU_GRANULE");
    sim_options.abort_on_report = is_set("SIMGPU_ABORT");
    sim_options.foreign = is_set("SIMGPU_FOREIGN");
    sim_options.verify = is_set("SIMGPU_VERIFY");
    sim_options.vmm = !is_set("SIMGPU_NO_VMM");
    if (granule && atol(granule) >= 4096) {
        sim_options.granule = (size_t)atol(granule);
    }
}

__attribute__((constructor)) static void
read_environment(void)
{
    const char *policy = getenv("SIMGPU_POLICY");
    pthread_atfork(sim_lock, sim_unlock, in_child);
    read_plants("SIMGPU_SKIP", true);
    read_plants("SIMGPU_FAIL", false);
    read_options();
    if (policy && *policy && !simgpu_policy(policy)) {
        fprintf(stderr, "simgpu: SIMGPU_POLICY=%s is not understood\n", policy);
        abort();
    }
}

/* --- each call ---------------------------------------------------------------------------------- */

static bool
needs_no_init(enum sim_entry entry)
{
    return entry == SIM_cuInit || entry == SIM_cuDriverGetVersion || entry == SIM_cuGetErrorName ||
           entry == SIM_cuGetErrorString;
}

CUresult
sim_enter(enum sim_entry entry, bool needs_context)
{
    sim_lock();
    int64_t call = ++calls[entry];
    for (int i = 0; i < plant_count; i++) {
        if (plants[i].entry == (int)entry && plants[i].call == call) {
            CUresult planted = plants[i].result;
            plants[i] = plants[--plant_count];
            return planted;
        }
    }
    if (forked && (entry == SIM_cuInit || !needs_no_init(entry))) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (needs_no_init(entry)) {
        initialised = initialised || entry == SIM_cuInit;
        return CUDA_SUCCESS;
    }
    if (!initialised) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (needs_context && !sim_has_context()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    return sim_sticky;
}

CUresult
sim_leave(CUresult result)
{
    sim_unlock();
    return result == SIM_SKIPPED ? CUDA_SUCCESS : result;
}

/* --- reports ------------------------------------------------------------------------------------ */

static char **reports;
static int report_count, report_capacity;

void
sim_say(bool race, const char *format, ...)
{
    va_list args;
    char *text = sim_alloc(1, REPORT_BYTES);
    va_start(args, format);
    vsnprintf(text, REPORT_BYTES, format, args);
    va_end(args);
    reports = sim_grow(reports, report_count, &report_capacity, sizeof *reports);
    reports[report_count++] = text;
    *(race ? &sim_counters.races : &sim_counters.faults) += 1;
    if (!sim_options.quiet) {
        fprintf(stderr, "simgpu: %s: %s\n", race ? "race" : "fault", text);
    }
    if (sim_options.abort_on_report) {
        abort();
    }
}

SIM_EXPORT void
simgpu_fault(const char *format, ...)
{
    char text[REPORT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sim_lock();
    sim_say(false, "%s", text);
    sim_unlock();
}

SIM_EXPORT const char *
simgpu_report(int index)
{
    sim_lock();
    const char *report = index >= 0 && index < report_count ? reports[index] : NULL;
    sim_unlock();
    return report;
}

SIM_EXPORT int
simgpu_reports(void)
{
    sim_lock();
    int count = report_count;
    sim_unlock();
    return count;
}

SIM_EXPORT simgpu_counters
simgpu_count(void)
{
    sim_lock();
    simgpu_counters copy = sim_counters;
    sim_unlock();
    return copy;
}

SIM_EXPORT simgpu_options *
simgpu_get_options(void)
{
    return &sim_options;
}

int
sim_list(char *text, size_t bytes, int already, const char *format, ...)
{
    size_t used = text ? strlen(text) : 0;
    if (text && used + 1 < bytes) {
        va_list args;
        va_start(args, format);
        vsnprintf(text + used, bytes - used, format, args);
        va_end(args);
    }
    return already + 1;
}

SIM_EXPORT int
simgpu_leaks(char *text, size_t bytes)
{
    if (text && bytes) {
        text[0] = '\0';
    }
    sim_lock();
    int count = sim_stream_leaks(text, bytes) + sim_memory_leaks(text, bytes) +
                sim_kernel_leaks(text, bytes);
    sim_unlock();
    return count;
}

SIM_EXPORT void
simgpu_reset(void)
{
    sim_lock();
    plant_count = 0;
    (void)sim_demand_all();
    sim_streams_reset();
    sim_memory_reset();
    sim_kernels_reset();
    memset(&sim_counters, 0, sizeof sim_counters);
    memset(calls, 0, sizeof calls);
    bool quiet = sim_options.quiet;
    sim_options = (simgpu_options)DEFAULTS;
    sim_options.quiet = quiet;
    read_options();
    while (report_count) {
        free(reports[--report_count]);
    }
    sim_sticky = CUDA_SUCCESS;
    initialised = forked = false;
    sim_unlock();
    simgpu_policy_lazy();
}
