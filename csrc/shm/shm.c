/* Creation and destruction of a rank's handle of the shared segment. See shm.h and shm_impl.h.
 *
 * Creation has two phases, so that it succeeds or fails on all ranks: the rendezvous gives each rank the
 * memfd and the pidfds; then each rank sets itself up, and all ranks confirm. A rank may wait in the segment
 * only after the confirmation.
 */
#include "shm/shm.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/forks.h"
#include "base/mem.h"
#include "shm/shm_impl.h"
#include "base/status.h"

enum { SPINS = 2000, NAME_BYTES = 90 };

/* The length of the file, far more than any machine's memory. The file is sparse, so its length costs
 * nothing; with a fixed length, the ranks need not agree on growing the file. */
#define FILE_BYTES ((uint64_t)1 << 44)
/* The first allocation starts at this offset, a multiple of the size of huge pages. */
#define FIRST_OFFSET ((uint64_t)1 << 21)

_Static_assert(sizeof(fsdpc_shm_control) <= FIRST_OFFSET, "the control area must fit before data");

static _Atomic uint64_t serials;

/* --- creation ------------------------------------------------------------------------------- */

static int
check_arguments(int rank, int world, const char *name, double timeout_s)
{
    if (world < 1 || world > FSDPC_SHM_MAX_RANKS) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "a shared-memory group has 1 to %d ranks on one host, not %d",
                           FSDPC_SHM_MAX_RANKS, world);
    }
    if (rank < 0 || rank >= world) {
        return fsdpc_error(FSDPC_E_INVAL, "rank %d is not one of a group of %d", rank, world);
    }
    if (!name || !name[0] || strlen(name) > NAME_BYTES) {
        return fsdpc_error(FSDPC_E_INVAL, "the name of a group has 1 to %d bytes, not %zu",
                           NAME_BYTES, name ? strlen(name) : 0);
    }
    if (!(timeout_s > 0) || timeout_s > 1e8) {
        return fsdpc_error(FSDPC_E_INVAL, "timeout must be above 0 and at most 1e8 s, not %g",
                           timeout_s);
    }
    return FSDPC_OK;
}

static int
new_handle(int rank, int world, const char *name, double timeout_s, fsdpc_shm **out)
{
    fsdpc_shm *shm = fsdpc_mem_calloc(1, sizeof *shm + strlen(name) + 1);
    fsdpc_shm_peer *peers = fsdpc_mem_calloc((size_t)world, sizeof *peers);
    if (!shm || !peers) {
        fsdpc_mem_free(peers);
        fsdpc_mem_free(shm);
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a group of %d ranks", world);
    }
    for (int i = 0; i < world; i++) {
        peers[i].pidfd = peers[i].socket = -1;
    }
    shm->rank = rank;
    shm->world = world;
    shm->timeout_s = timeout_s;
    shm->owner = getpid();
    shm->forks = fsdpc_forks();
    shm->process = fsdpc_shm_process();
    shm->entry = -1;
    shm->serial = atomic_fetch_add(&serials, 1);
    shm->fd = shm->stop_fd = -1;
    shm->peers = peers;
    shm->next_offset = FIRST_OFFSET;
    strcpy(shm->name, name);
    *out = shm;
    return FSDPC_OK;
}

/* Returns the file's length, at most RLIMIT_FSIZE: growing a file beyond that limit raises SIGXFSZ. */
static uint64_t
file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < FILE_BYTES) {
        return limit.rlim_cur / FIRST_OFFSET * FIRST_OFFSET;
    }
    return FILE_BYTES;
}

static int
make_file(fsdpc_shm *shm)
{
    shm->file_bytes = file_limit();
    if (shm->file_bytes < FIRST_OFFSET) {
        return fsdpc_error(FSDPC_E_NOMEM,
                           "the limit on file sizes (ulimit -f) is below the %llu bytes that a "
                           "shared segment needs",
                           (unsigned long long)FIRST_OFFSET);
    }
    shm->fd = memfd_create("fsdpc", MFD_CLOEXEC);
    if (shm->fd < 0) {
        return fsdpc_error_errno(errno, "memfd_create");
    }
    if (ftruncate(shm->fd, (off_t)shm->file_bytes) != 0) {
        return fsdpc_error_errno(errno, "making the shared segment %llu bytes long",
                                 (unsigned long long)shm->file_bytes);
    }
    return FSDPC_OK;
}

static int
map_control(fsdpc_shm *shm)
{
    off_t end = lseek(shm->fd, 0, SEEK_END);
    if (end < (off_t)FIRST_OFFSET) {
        return fsdpc_error(FSDPC_E_INTERNAL,
                           "the shared segment has %lld bytes, fewer than its control area",
                           (long long)end);
    }
    shm->file_bytes = (uint64_t)end;
    void *address = NULL;
    size_t bytes = fsdpc_round_up(sizeof(fsdpc_shm_control), fsdpc_shm_page_bytes());
    FSDPC_TRY(fsdpc_shm_map(shm, 0, bytes, NULL, &address));
    shm->control = address;
    return FSDPC_OK;
}

static void
publish_self(fsdpc_shm *shm)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
        for (size_t i = 0; i < FSDPC_SHM_CORE_WORDS * 64; i++) {
            if (CPU_ISSET(i, &cores)) {
                atomic_fetch_or(&shm->control->cores[i / 64], (uint64_t)1 << (i % 64));
            }
        }
    }
    atomic_store(&shm->control->slots[shm->rank].pid, (int32_t)shm->owner);
    atomic_store(&shm->control->slots[shm->rank].process, (int32_t)shm->process);
}

/* Returns 0 for a single rank, or if the ranks may run on fewer cores than there are ranks; else SPINS. */
static int
count_spins(const fsdpc_shm *shm)
{
    int cores = 0;
    for (int i = 0; i < FSDPC_SHM_CORE_WORDS; i++) {
        cores += __builtin_popcountll(atomic_load(&shm->control->cores[i]));
    }
    return shm->world > 1 && shm->world <= cores ? SPINS : 0;
}

static int
set_up(fsdpc_shm *shm)
{
    if (!shm->control) {
        FSDPC_TRY(map_control(shm));
    }
    publish_self(shm);
    return fsdpc_shm_watch_start(shm);
}

static int
build(fsdpc_shm *shm)
{
    int64_t deadline_ns = fsdpc_shm_deadline(shm);
    if (shm->rank == 0) {
        FSDPC_TRY(make_file(shm));
        FSDPC_TRY(map_control(shm));
    }
    if (shm->world == 1) {
        return set_up(shm);
    }
    FSDPC_TRY(fsdpc_shm_rendezvous(shm, deadline_ns));
    FSDPC_TRY(fsdpc_shm_confirm(shm, set_up(shm), deadline_ns));
    shm->spins = count_spins(shm);
    fsdpc_shm_stuck_join(shm);
    return FSDPC_OK;
}

int
fsdpc_shm_create(int rank, int world, const char *name, double timeout_s, fsdpc_shm **out)
{
    *out = NULL;
    fsdpc_shm *shm = NULL;
    FSDPC_TRY(check_arguments(rank, world, name, timeout_s));
    FSDPC_TRY(new_handle(rank, world, name, timeout_s, &shm));
    int status = build(shm);
    if (status != FSDPC_OK) {
        fsdpc_shm_free(shm);
        return fsdpc_error_prepend(status, "shared-memory group of %d ranks, rank %d", world, rank);
    }
    *out = shm;
    return FSDPC_OK;
}

void
fsdpc_shm_leave(fsdpc_shm *shm)
{
    /* A forked child has copies of the descriptors and mappings, but it is not the rank. */
    if (fsdpc_shm_is_owner(shm) && shm->control) {
        atomic_store(&shm->control->slots[shm->rank].left, 1);
        fsdpc_shm_wake_all(shm);
    }
}

void
fsdpc_shm_free(fsdpc_shm *shm)
{
    if (!shm) {
        return;
    }
    fsdpc_shm_leave(shm);
    fsdpc_shm_stuck_leave(shm);
    if (fsdpc_shm_is_owner(shm)) {
        fsdpc_shm_watch_stop(shm);
    }
    fsdpc_shm_peers_close(shm);
    if (shm->control) {
        fsdpc_shm_unmap(shm->control, fsdpc_round_up(sizeof *shm->control, fsdpc_shm_page_bytes()));
    }
    if (shm->stop_fd >= 0) {
        close(shm->stop_fd);
    }
    if (shm->fd >= 0) {
        close(shm->fd);
    }
    fsdpc_mem_free(shm->peers);
    fsdpc_mem_free(shm);
}
