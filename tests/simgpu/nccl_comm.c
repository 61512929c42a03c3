/* Communicators: meeting by an id, splitting, errors, abort, registration. */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "nccl_sim.h"

enum { PLANTS = 64 };
enum { DEFAULT_VERSION = 22803, OLD_VERSION = 21805 };

typedef struct plant {
    enum simnccl_fault fault;
    int rank, k, value;
} plant;

typedef struct unique {
    char magic[8];
    int process, fd;
} unique;

#ifdef SIMNCCL_OLD
#define VERSION OLD_VERSION
#else
#define VERSION DEFAULT_VERSION
#endif
simnccl_options nccl_options = {.version = VERSION, .stall_ms = 30000, .symmetric = true};
simnccl_counters nccl_counters;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static plant plants[PLANTS];
static int plant_count;
static struct ncclComm *live;

void
api_lock(void)
{
    pthread_mutex_lock(&lock);
}

void
api_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

int64_t
nccl_now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static void
sleep_ms(int ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&time, NULL);
}

/* --- the test's side ------------------------------------------------------------------------------- */

NCCL_EXPORT bool simnccl_plant(enum simnccl_fault fault, int rank, int k, int value);
NCCL_EXPORT simnccl_options *simnccl_get_options(void);
NCCL_EXPORT simnccl_counters simnccl_count(void);
NCCL_EXPORT void simnccl_reset(void);

bool
simnccl_plant(enum simnccl_fault fault, int rank, int k, int value)
{
    api_lock();
    bool put = plant_count < PLANTS && k > 0;
    if (put) {
        plants[plant_count++] = (plant){.fault = fault, .rank = rank, .k = k, .value = value};
    }
    api_unlock();
    return put;
}

__attribute__((constructor)) static void
read_environment(void)
{
    const char *order = getenv("SIMNCCL_RANK_ORDER");
    nccl_options.rank_order = order && strcmp(order, "1") == 0;
    const char *window = getenv("SIMNCCL_WINDOW_ERROR");
    nccl_options.window_error = window ? atoi(window) : 0;
}

simnccl_options *
simnccl_get_options(void)
{
    return &nccl_options;
}

simnccl_counters
simnccl_count(void)
{
    api_lock();
    simnccl_counters copy = nccl_counters;
    api_unlock();
    return copy;
}

void
simnccl_reset(void)
{
    api_lock();
    plant_count = 0;
    nccl_options = (simnccl_options){.version = VERSION, .stall_ms = 30000, .symmetric = true};
    nccl_counters = (simnccl_counters){.registered = nccl_counters.registered,
                                       .communicators = nccl_counters.communicators};
    api_unlock();
}

int
nccl_planted(enum simnccl_fault fault, int rank)
{
    int value = -1;
    for (int i = 0; i < plant_count; i++) {
        plant *p = &plants[i];
        if (p->fault == fault && (p->rank < 0 || p->rank == rank) && p->k > 0 && --p->k == 0) {
            value = p->value;
        }
    }
    return value;
}

fsdpc_nccl_result
nccl_misuse(struct ncclComm *comm, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    nccl_counters.misuses++;
    simgpu_fault("%s", text);
    if (comm) {
        snprintf(comm->text, sizeof comm->text, "%s", text);
    }
    return FSDPC_NCCL_INVALID_USAGE;
}

struct ncclComm *
nccl_check(struct ncclComm *comm, const char *call)
{
    for (struct ncclComm *c = live; c; c = c->next) {
        if (c == comm) {
            return c;
        }
    }
    nccl_misuse(NULL, "%s on a communicator that is not alive", call);
    return NULL;
}

/* --- meeting ----------------------------------------------------------------------------------------- */

void
nccl_unuse(struct ncclComm *comm)
{
    if (atomic_fetch_sub(&comm->users, 1) == 1) {
        if (comm->segment) {
            munmap(comm->segment, comm->segment_bytes);
        }
        if (comm->fd >= 0) {
            close(comm->fd);
        }
        free(comm);
    }
}

static struct ncclComm *
new_comm(int rank, int world, bool blocking)
{
    struct ncclComm *comm = calloc(1, sizeof *comm);
    if (!comm) {
        abort();
    }
    comm->rank = rank;
    comm->world = world;
    comm->blocking = blocking;
    comm->fd = -1;
    comm->users = 1;
    strcpy(comm->text, "");
    return comm;
}

static void
enlist(struct ncclComm *comm)
{
    comm->next = live;
    live = comm;
    nccl_counters.communicators++;
}

static void
delist(struct ncclComm *comm)
{
    struct ncclComm **link = &live;
    while (*link != comm) {
        link = &(*link)->next;
    }
    *link = comm->next;
    nccl_counters.communicators--;
}

/* Opens what (process, fd) names, which stays open there until all have met. */
static bool
open_segment(struct ncclComm *comm, int process, int fd)
{
    char path[64];
    size_t header = (sizeof(nccl_segment) + 4095) / 4096 * 4096;
    comm->segment_bytes = header + (size_t)comm->world * 2 * ROUND_BYTES;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, fd);
    comm->fd = open(path, O_RDWR | O_CLOEXEC);
    if (comm->fd < 0 || ftruncate(comm->fd, (off_t)comm->segment_bytes) != 0) {
        return false;
    }
    void *mapped = mmap(NULL, comm->segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, comm->fd, 0);
    comm->segment = mapped == MAP_FAILED ? NULL : mapped;
    return comm->segment != NULL;
}

static bool
join(struct ncclComm *comm)
{
    int first = 0;
    nccl_segment *segment = comm->segment;
    if (!atomic_compare_exchange_strong(&segment->world, &first, comm->world) &&
        first != comm->world) {
        return false;
    }
    if (atomic_exchange(&segment->ranks[comm->rank].joined, 1)) {
        return false;
    }
    atomic_fetch_add(&segment->joined, 1);
    return true;
}

static fsdpc_nccl_result
wait_joined(struct ncclComm *comm)
{
    int64_t end = nccl_now_ms() + nccl_options.stall_ms;
    while (comm->stalled || atomic_load(&comm->segment->joined) < comm->world) {
        if (nccl_now_ms() > end) {
            return FSDPC_NCCL_SYSTEM_ERROR;
        }
        sleep_ms(1);
    }
    return FSDPC_NCCL_SUCCESS;
}

NCCL_EXPORT fsdpc_nccl_result ncclGetVersion(int *version);
NCCL_EXPORT fsdpc_nccl_result ncclGetUniqueId(fsdpc_nccl_id *id);
NCCL_EXPORT fsdpc_nccl_result ncclCommInitRankConfig(fsdpc_nccl_comm *out, int world,
                                                     fsdpc_nccl_id id, int rank,
                                                     fsdpc_nccl_config *config);
NCCL_EXPORT fsdpc_nccl_result ncclCommInitRank(fsdpc_nccl_comm *out, int world, fsdpc_nccl_id id,
                                               int rank);
NCCL_EXPORT fsdpc_nccl_result ncclCommSplit(fsdpc_nccl_comm parent, int color, int key,
                                            fsdpc_nccl_comm *out, fsdpc_nccl_config *config);
NCCL_EXPORT fsdpc_nccl_result ncclCommFinalize(fsdpc_nccl_comm comm);
NCCL_EXPORT fsdpc_nccl_result ncclCommDestroy(fsdpc_nccl_comm comm);
NCCL_EXPORT fsdpc_nccl_result ncclCommAbort(fsdpc_nccl_comm comm);
NCCL_EXPORT fsdpc_nccl_result ncclCommGetAsyncError(fsdpc_nccl_comm comm, fsdpc_nccl_result *error);
NCCL_EXPORT const char *ncclGetErrorString(fsdpc_nccl_result result);
NCCL_EXPORT const char *ncclGetLastError(fsdpc_nccl_comm comm);

fsdpc_nccl_result
ncclGetVersion(int *version)
{
    *version = nccl_options.version;
    return FSDPC_NCCL_SUCCESS;
}

/* The descriptor stays open as long as this process: an id may be used at any time. */
fsdpc_nccl_result
ncclGetUniqueId(fsdpc_nccl_id *id)
{
    unique made = {.magic = "simnccl", .process = (int)getpid()};
    made.fd = memfd_create("simnccl", MFD_CLOEXEC);
    if (made.fd < 0) {
        return FSDPC_NCCL_SYSTEM_ERROR;
    }
    memset(id, 0, sizeof *id);
    memcpy(id->bytes, &made, sizeof made);
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result
ncclCommInitRankConfig(fsdpc_nccl_comm *out, int world, fsdpc_nccl_id id, int rank,
                       fsdpc_nccl_config *config)
{
    unique made;
    memcpy(&made, id.bytes, sizeof made);
    *out = NULL;
    if (world < 1 || world > NCCL_RANKS || rank < 0 || rank >= world ||
        strcmp(made.magic, "simnccl") != 0 ||
        (config && config->magic != (unsigned)FSDPC_NCCL_CONFIG_MAGIC)) {
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    bool blocking = !config || config->blocking != 0;
    struct ncclComm *comm = new_comm(rank, world, blocking);
    api_lock();
    comm->stalled = nccl_planted(SIMNCCL_INIT_STALL, rank) >= 0;
    if (!open_segment(comm, made.process, made.fd) || (!comm->stalled && !join(comm))) {
        api_unlock();
        nccl_unuse(comm);
        return FSDPC_NCCL_INVALID_USAGE;
    }
    enlist(comm);
    comm->polls = blocking ? 0 : nccl_options.in_progress;
    api_unlock();
    *out = comm;
    return blocking ? wait_joined(comm) : FSDPC_NCCL_IN_PROGRESS;
}

fsdpc_nccl_result
ncclCommInitRank(fsdpc_nccl_comm *out, int world, fsdpc_nccl_id id, int rank)
{
    return ncclCommInitRankConfig(out, world, id, rank, NULL);
}

/* --- splitting ---------------------------------------------------------------------------------------- */

/* Ranks of a color, ordered by (key, rank); the place of this one. */
static int
group_of(const struct ncclComm *parent, int color, int *members)
{
    int count = 0;
    for (int r = 0; r < parent->world; r++) {
        const nccl_rank *other = &parent->segment->ranks[r];
        if (other->color != color) {
            continue;
        }
        int at = count++;
        while (at > 0 && parent->segment->ranks[members[at - 1]].key > other->key) {
            members[at] = members[at - 1];
            at--;
        }
        members[at] = r;
    }
    return count;
}

fsdpc_nccl_result
ncclCommSplit(fsdpc_nccl_comm parent, int color, int key, fsdpc_nccl_comm *out,
              fsdpc_nccl_config *config)
{
    int members[NCCL_RANKS], count, rank = 0;
    int64_t end = nccl_now_ms() + nccl_options.stall_ms;
    *out = NULL;
    api_lock();
    if (!nccl_check(parent, "a split")) {
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    if (!simgpu_point_done(&parent->last)) {
        nccl_misuse(parent, "a communicator is split with work on its way");
        api_unlock();
        return FSDPC_NCCL_INVALID_USAGE;
    }
    nccl_rank *mine = &parent->segment->ranks[parent->rank];
    mine->color = color;
    mine->key = key;
    mine->process = getpid();
    mine->fd = memfd_create("simnccl", MFD_CLOEXEC);
    uint64_t number = ++parent->splits;
    atomic_store(&mine->splits, number);
    api_unlock();
    for (int r = 0; r < parent->world; r++) {
        while (atomic_load(&parent->segment->ranks[r].splits) < number) {
            if (nccl_now_ms() > end) {
                close(mine->fd);
                return FSDPC_NCCL_SYSTEM_ERROR;
            }
            sleep_ms(1);
        }
    }
    if (color == FSDPC_NCCL_NO_COLOR) {
        close(mine->fd);
        return FSDPC_NCCL_SUCCESS;
    }
    count = group_of(parent, color, members);
    while (members[rank] != parent->rank) {
        rank++;
    }
    const nccl_rank *first = &parent->segment->ranks[members[0]];
    struct ncclComm *comm =
        new_comm(rank, count, config ? config->blocking != 0 : parent->blocking);
    api_lock();
    bool met = open_segment(comm, (int)first->process, first->fd) && join(comm);
    if (met) {
        enlist(comm);
    }
    api_unlock();
    met = met && wait_joined(comm) == FSDPC_NCCL_SUCCESS;
    close(mine->fd); /* nobody has to find it any more */
    if (!met) {
        return FSDPC_NCCL_SYSTEM_ERROR;
    }
    *out = comm;
    return FSDPC_NCCL_SUCCESS;
}

/* --- states -------------------------------------------------------------------------------------------- */

fsdpc_nccl_result
ncclCommGetAsyncError(fsdpc_nccl_comm comm, fsdpc_nccl_result *error)
{
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    api_lock();
    if (!nccl_check(comm, "a look at the error")) {
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    *error = atomic_load(&comm->error);
    if (*error == FSDPC_NCCL_SUCCESS &&
        (comm->stalled || atomic_load(&comm->segment->joined) < comm->world) && !comm->issued) {
        *error = FSDPC_NCCL_IN_PROGRESS;
    } else if (*error == FSDPC_NCCL_SUCCESS && comm->polls > 0) {
        *error = --comm->polls > 0 ? FSDPC_NCCL_IN_PROGRESS : FSDPC_NCCL_SUCCESS;
        if (comm->polls == 0 && comm->late) {
            nccl_call *call = comm->late;
            comm->late = NULL;
            *error = nccl_put_all(call);
        }
    }
    api_unlock();
    return result;
}

fsdpc_nccl_result
ncclCommFinalize(fsdpc_nccl_comm comm)
{
    api_lock();
    bool alive = nccl_check(comm, "the end") != NULL;
    simgpu_point last = alive ? comm->last : (simgpu_point){0};
    api_unlock();
    if (!alive) {
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    return simgpu_point_demand(&last) ? FSDPC_NCCL_SUCCESS : FSDPC_NCCL_SYSTEM_ERROR;
}

static void
leave(struct ncclComm *comm)
{
    delist(comm);
    while (comm->registrations) {
        nccl_registration *gone = comm->registrations;
        comm->registrations = gone->next;
        free(gone);
        nccl_counters.registered--;
    }
    while (comm->late) {
        nccl_call *call = comm->late;
        comm->late = call->next;
        free(call);
    }
    nccl_unuse(comm);
}

/* Waits for what is on its way, and so for the peers. */
fsdpc_nccl_result
ncclCommDestroy(fsdpc_nccl_comm comm)
{
    fsdpc_nccl_result result = ncclCommFinalize(comm);
    if (result != FSDPC_NCCL_INVALID_ARGUMENT) {
        api_lock();
        leave(comm);
        api_unlock();
    }
    return result;
}

fsdpc_nccl_result
ncclCommAbort(fsdpc_nccl_comm comm)
{
    api_lock();
    if (!nccl_check(comm, "an abort")) {
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    int ms = nccl_planted(SIMNCCL_ABORT_BLOCKS, comm->rank);
    atomic_store(&comm->aborted, true);
    leave(comm);
    api_unlock();
    simgpu_wake();
    if (ms > 0) {
        sleep_ms(ms);
    }
    api_lock();
    nccl_counters.aborts_ended++;
    api_unlock();
    return FSDPC_NCCL_SUCCESS;
}

const char *
ncclGetErrorString(fsdpc_nccl_result result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    bool known = result >= 0 && result < (int)(sizeof texts / sizeof *texts);
    return known ? texts[result] : "unknown result code";
}

const char *
ncclGetLastError(fsdpc_nccl_comm comm)
{
    return comm ? comm->text : "";
}

const nccl_registration *
nccl_registered(const struct ncclComm *comm, const void *at, size_t bytes)
{
    for (const nccl_registration *r = comm->registrations; r; r = r->next) {
        if ((uintptr_t)at >= r->base && (uintptr_t)at + bytes <= r->base + r->bytes) {
            return r;
        }
    }
    return NULL;
}

/* --- registration, memory -------------------------------------------------------------------------------- */

#ifndef SIMNCCL_OLD
NCCL_EXPORT fsdpc_nccl_result ncclCommRegister(fsdpc_nccl_comm comm, void *buffer, size_t bytes,
                                               void **handle);
NCCL_EXPORT fsdpc_nccl_result ncclCommDeregister(fsdpc_nccl_comm comm, void *handle);
NCCL_EXPORT fsdpc_nccl_result ncclCommWindowRegister(fsdpc_nccl_comm comm, void *buffer,
                                                     size_t bytes, fsdpc_nccl_window *window,
                                                     int flags);
NCCL_EXPORT fsdpc_nccl_result ncclCommWindowDeregister(fsdpc_nccl_comm comm,
                                                       fsdpc_nccl_window window);
NCCL_EXPORT fsdpc_nccl_result ncclMemAlloc(void **block, size_t bytes);
NCCL_EXPORT fsdpc_nccl_result ncclMemFree(void *block);

/* What cuMemAlloc gives is refused, as a real library does by default. */
static fsdpc_nccl_result
register_buffer(fsdpc_nccl_comm comm, void *buffer, size_t bytes, bool window, void **handle)
{
    size_t grain = window ? simgpu_get_options()->granule : 4096;
    *handle = NULL;
    api_lock();
    if (!nccl_check(comm, "a registration")) {
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    if (bytes == 0 || (uintptr_t)buffer % grain || (window && bytes % grain) ||
        !simgpu_is_virtual(buffer, bytes)) {
        strcpy(comm->text, "only whole grains of virtual memory can be registered");
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    for (const nccl_registration *r = comm->registrations; r; r = r->next) {
        if ((uintptr_t)buffer < r->base + r->bytes && r->base < (uintptr_t)buffer + bytes) {
            fsdpc_nccl_result result = nccl_misuse(comm, "memory is registered twice");
            api_unlock();
            return result;
        }
    }
    nccl_registration *made = malloc(sizeof *made);
    if (!made) {
        abort();
    }
    *made = (nccl_registration){comm->registrations, (uintptr_t)buffer, bytes, window};
    comm->registrations = made;
    nccl_counters.registered++;
    *handle = made;
    api_unlock();
    return FSDPC_NCCL_SUCCESS;
}

static fsdpc_nccl_result
deregister_buffer(fsdpc_nccl_comm comm, void *handle)
{
    fsdpc_nccl_result result = FSDPC_NCCL_INVALID_ARGUMENT;
    api_lock();
    if (nccl_check(comm, "a deregistration")) {
        nccl_registration **link = &comm->registrations;
        while (*link && *link != handle) {
            link = &(*link)->next;
        }
        nccl_registration *gone = *link;
        if (gone && !simgpu_is_virtual((void *)gone->base, gone->bytes)) {
            nccl_misuse(comm, "registered memory was taken away");
        }
        if (gone) {
            *link = gone->next;
            free(gone);
            nccl_counters.registered--;
            result = FSDPC_NCCL_SUCCESS;
        }
    }
    api_unlock();
    return result;
}

fsdpc_nccl_result
ncclCommRegister(fsdpc_nccl_comm comm, void *buffer, size_t bytes, void **handle)
{
    return register_buffer(comm, buffer, bytes, false, handle);
}

fsdpc_nccl_result
ncclCommDeregister(fsdpc_nccl_comm comm, void *handle)
{
    return deregister_buffer(comm, handle);
}

/* All ranks come to it, or it does not end. */
static fsdpc_nccl_result
meet_for_window(struct ncclComm *comm)
{
    int64_t end = nccl_now_ms() + nccl_options.stall_ms;
    uint64_t number = ++comm->windows;
    atomic_store(&comm->segment->ranks[comm->rank].windows, number);
    for (int r = 0; r < comm->world; r++) {
        while (atomic_load(&comm->segment->ranks[r].windows) < number) {
            if (nccl_now_ms() > end) {
                return FSDPC_NCCL_SYSTEM_ERROR;
            }
            sleep_ms(1);
        }
    }
    return FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result
ncclCommWindowRegister(fsdpc_nccl_comm comm, void *buffer, size_t bytes, fsdpc_nccl_window *window,
                       int flags)
{
    void *handle = NULL;
    *window = NULL;
    if (flags != FSDPC_NCCL_WINDOW_SYMMETRIC) {
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    fsdpc_nccl_result result = meet_for_window(comm);
    if (result == FSDPC_NCCL_SUCCESS && nccl_options.window_error) {
        atomic_store(&comm->error, nccl_options.window_error);
        return FSDPC_NCCL_IN_PROGRESS; /* told when it is asked for */
    }
    if (result == FSDPC_NCCL_SUCCESS && nccl_options.symmetric) {
        result = register_buffer(comm, buffer, bytes, true, &handle);
        memcpy(window, &handle, sizeof handle);
    }
    return result;
}

fsdpc_nccl_result
ncclCommWindowDeregister(fsdpc_nccl_comm comm, fsdpc_nccl_window window)
{
    void *handle;
    memcpy(&handle, &window, sizeof handle);
    return deregister_buffer(comm, handle);
}

fsdpc_nccl_result
ncclMemAlloc(void **block, size_t bytes)
{
    CUdeviceptr made = 0;
    CUresult result = cuMemAlloc(&made, bytes);
    *block = (void *)(uintptr_t)made;
    return result ? FSDPC_NCCL_UNHANDLED_CUDA_ERROR : FSDPC_NCCL_SUCCESS;
}

fsdpc_nccl_result
ncclMemFree(void *block)
{
    return cuMemFree((CUdeviceptr)(uintptr_t)block) ? FSDPC_NCCL_UNHANDLED_CUDA_ERROR
                                                    : FSDPC_NCCL_SUCCESS;
}
#endif
