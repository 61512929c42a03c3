/* Communicators: meeting by an id, splitting, errors, abort. */
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
simnccl_options nccl_options = {
    .version = VERSION, .in_progress = 1, .stall_ms = 30000, .symmetric = true};
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

NCCL_EXPORT bool
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

NCCL_EXPORT simnccl_options *
simnccl_get_options(void)
{
    return &nccl_options;
}

NCCL_EXPORT simnccl_counters
simnccl_count(void)
{
    api_lock();
    simnccl_counters copy = nccl_counters;
    api_unlock();
    return copy;
}

NCCL_EXPORT void
simnccl_reset(void)
{
    api_lock();
    plant_count = 0;
    nccl_options = (simnccl_options){
        .version = VERSION, .in_progress = 1, .stall_ms = 30000, .symmetric = true};
    nccl_counters = (simnccl_counters){.registered = nccl_counters.registered,
                                       .communicators = nccl_counters.communicators};
    api_unlock();
}

NCCL_EXPORT void
simnccl_drop_graphs(void)
{
    api_lock();
    for (struct ncclComm *comm = live; comm; comm = comm->next) {
        comm->captured = 0;
    }
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
    comm->born = true;
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
    comm->held_bytes = nccl_options.comm_bytes;
    simgpu_get_options()->foreign_bytes += comm->held_bytes;
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
    simgpu_get_options()->foreign_bytes -= comm->held_bytes;
}

/* Opens the file that (process, fd) names; that process keeps it open until all ranks have met. */
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

NCCL_EXPORT fsdpc_nccl_result
ncclGetVersion(int *version)
{
    *version = nccl_options.version;
    return FSDPC_NCCL_SUCCESS;
}

/* The descriptor stays open as long as this process lives, as an id may be used at any time. */
NCCL_EXPORT fsdpc_nccl_result
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

NCCL_EXPORT fsdpc_nccl_result
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
    comm->out = out;
    comm->born = false;
    *out = comm;
    api_unlock();
    return blocking ? nccl_await(comm) : FSDPC_NCCL_IN_PROGRESS;
}

/* --- splitting ---------------------------------------------------------------------------------------- */

/* Lists the ranks of a color in the order of (key, rank); returns how many there are. */
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

NCCL_EXPORT fsdpc_nccl_result
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
    close(mine->fd); /* all ranks have opened it */
    if (!met) {
        return FSDPC_NCCL_SYSTEM_ERROR;
    }
    *out = comm;
    return FSDPC_NCCL_SUCCESS;
}

/* --- states -------------------------------------------------------------------------------------------- */

fsdpc_nccl_result
nccl_enter(struct ncclComm *comm, const char *call)
{
    const fsdpc_nccl_result error = atomic_load(&comm->error);
    if (error != FSDPC_NCCL_SUCCESS) {
        return error;
    }
    if (comm->polls > 0 || comm->window || !comm->born || comm->finalizing) {
        return nccl_misuse(comm, "%s while the call before it is in progress", call);
    }
    return FSDPC_NCCL_SUCCESS;
}

/* When the start of a communicator is over, even if the start was given up, a thread of the real library
 * writes the communicator to the caller's variable again. */
static void
be_born(struct ncclComm *comm)
{
    if (!comm->born) {
        comm->born = true;
        *comm->out = comm;
    }
}

static fsdpc_nccl_result
put_late(struct ncclComm *comm)
{
    nccl_call *call = comm->late;
    comm->late = NULL;
    return call ? nccl_put_all(call) : FSDPC_NCCL_SUCCESS;
}

/* Looks once at a call in progress, and returns the communicator's state. Lock held. */
static fsdpc_nccl_result
state_of(struct ncclComm *comm)
{
    fsdpc_nccl_result error = atomic_load(&comm->error);
    if (error != FSDPC_NCCL_SUCCESS) {
        return error;
    }
    if (!comm->born && (comm->stalled || atomic_load(&comm->segment->joined) < comm->world)) {
        return FSDPC_NCCL_IN_PROGRESS;
    }
    if (comm->polls > 0 && --comm->polls > 0) {
        return FSDPC_NCCL_IN_PROGRESS;
    }
    be_born(comm);
    if (nccl_window_look(comm) == NCCL_WINDOW_WAITS || (comm->finalizing && comm->captured > 0)) {
        return FSDPC_NCCL_IN_PROGRESS;
    }
    comm->finalizing = false;
    error = put_late(comm);
    return error ? error : atomic_load(&comm->error);
}

/* Waits for the call of a blocking communicator, and returns its result. */
fsdpc_nccl_result
nccl_await(struct ncclComm *comm)
{
    int64_t end = nccl_now_ms() + nccl_options.stall_ms;
    for (;;) {
        api_lock();
        fsdpc_nccl_result state = state_of(comm);
        api_unlock();
        if (state != FSDPC_NCCL_IN_PROGRESS) {
            return state;
        }
        if (nccl_now_ms() > end) {
            return FSDPC_NCCL_SYSTEM_ERROR;
        }
        sleep_ms(1);
    }
}

NCCL_EXPORT fsdpc_nccl_result
ncclCommGetAsyncError(fsdpc_nccl_comm comm, fsdpc_nccl_result *error)
{
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    api_lock();
    if (!nccl_check(comm, "a look at the error")) {
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    *error = state_of(comm);
    api_unlock();
    return result;
}

/* Waits for the collectives in flight, and so for the other ranks. */
static fsdpc_nccl_result
demand_all(struct ncclComm *comm, const char *call)
{
    api_lock();
    bool alive = nccl_check(comm, call) != NULL;
    simgpu_point last = alive ? comm->last : (simgpu_point){0};
    fsdpc_nccl_result result = alive ? nccl_enter(comm, call) : FSDPC_NCCL_INVALID_ARGUMENT;
    api_unlock();
    if (result == FSDPC_NCCL_SUCCESS && !simgpu_point_demand(&last)) {
        result = FSDPC_NCCL_SYSTEM_ERROR;
    }
    return result;
}

/* As in the real library, the call is in progress until all graphs with the communicator's collectives are
 * gone. */
NCCL_EXPORT fsdpc_nccl_result
ncclCommFinalize(fsdpc_nccl_comm comm)
{
    fsdpc_nccl_result result = demand_all(comm, "the end");
    if (result != FSDPC_NCCL_SUCCESS) {
        return result;
    }
    comm->finalizing = true;
    return comm->blocking ? nccl_await(comm) : FSDPC_NCCL_IN_PROGRESS;
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
    free(comm->window);
    while (comm->late) {
        nccl_call *call = comm->late;
        comm->late = call->next;
        free(call);
    }
    nccl_unuse(comm);
}

NCCL_EXPORT fsdpc_nccl_result
ncclCommDestroy(fsdpc_nccl_comm comm)
{
    fsdpc_nccl_result result = demand_all(comm, "the destruction");
    if (result == FSDPC_NCCL_SUCCESS) {
        api_lock();
        leave(comm);
        api_unlock();
    }
    return result;
}

/* Before an abort frees anything, it waits until all graphs are gone, but not longer than stall_ms. */
static void
await_graphs(const struct ncclComm *comm)
{
    int64_t end = nccl_now_ms() + nccl_options.stall_ms;
    bool captured = true;
    while (captured && nccl_now_ms() < end) {
        api_lock();
        captured = comm->captured > 0;
        api_unlock();
        if (captured) {
            sleep_ms(1);
        }
    }
}

NCCL_EXPORT fsdpc_nccl_result
ncclCommAbort(fsdpc_nccl_comm comm)
{
    api_lock();
    if (!nccl_check(comm, "an abort")) {
        api_unlock();
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    int ms = nccl_planted(SIMNCCL_ABORT_BLOCKS, comm->rank);
    nccl_counters.aborts++;
    atomic_store(&comm->aborted, true);
    api_unlock();
    simgpu_wake();
    await_graphs(comm);
    api_lock();
    be_born(comm);
    leave(comm);
    api_unlock();
    for (; ms > 0 && !nccl_options.aborts_end; ms--) {
        sleep_ms(1);
    }
    api_lock();
    nccl_counters.aborts_ended++;
    api_unlock();
    return FSDPC_NCCL_SUCCESS;
}

NCCL_EXPORT const char *
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

NCCL_EXPORT const char *
ncclGetLastError(fsdpc_nccl_comm comm)
{
    return comm ? comm->text : "";
}
