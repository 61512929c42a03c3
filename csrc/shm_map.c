/* Handing out, mapping and giving back parts of the shared file.
 *
 * The file is far longer than any memory, so handing out is addition. Pages cost memory when
 * touched, or at once with `reserve`; because asking the kernel for more than there is can end in
 * its out-of-memory killer instead of an error, what is asked is first held against what is free.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mem.h"
#include "shm_impl.h"
#include "status.h"

#define HUGE_BYTES ((size_t)1 << 21)

size_t
fsdpc_shm_page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

/* --- how much is free ----------------------------------------------------------------------- */

static uint64_t
read_number(const char *path)
{
    unsigned long long value;
    FILE *file = fopen(path, "re");
    if (!file) {
        return UINT64_MAX;
    }
    /* "max" and anything else that is no number mean no limit. */
    int fields = fscanf(file, "%llu", &value);
    fclose(file);
    return fields == 1 ? value : UINT64_MAX;
}

static uint64_t
free_on_host(void)
{
    char line[128];
    uint64_t bytes = UINT64_MAX;
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file) {
        return bytes;
    }
    while (fgets(line, sizeof line, file)) {
        unsigned long long kib;
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) {
            bytes = (uint64_t)kib * 1024;
            break;
        }
    }
    fclose(file);
    return bytes;
}

/* The root of the control group file system is this process's own group inside a container, which
 * is where a limit below the host's memory is usual. */
static uint64_t
free_in_group(void)
{
    uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
    uint64_t used = read_number("/sys/fs/cgroup/memory.current");
    if (limit == UINT64_MAX) {
        limit = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
        used = read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes");
    }
    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return UINT64_MAX;
    }
    return used < limit ? limit - used : 0;
}

static int
check_free(fsdpc_shm *shm, uint64_t bytes)
{
    struct stat file;
    if (fstat(shm->fd, &file) != 0) {
        return fsdpc_error_errno(errno, "fstat of the shared segment");
    }
    /* Another rank may have reserved these very pages already. */
    uint64_t present = (uint64_t)file.st_blocks * 512;
    uint64_t wanted = shm->reserved_bytes + bytes;
    uint64_t missing = wanted > present ? wanted - present : 0;
    uint64_t host = free_on_host();
    uint64_t group = free_in_group();
    if (missing <= host && missing <= group) {
        return FSDPC_OK;
    }
    return fsdpc_error(FSDPC_E_NOMEM,
                       "rank %d wants %.1f MiB more of shared memory (%.1f MiB in all), but %.1f "
                       "MiB are free %s",
                       shm->rank, (double)missing / 1048576, (double)wanted / 1048576,
                       (double)(host < group ? host : group) / 1048576,
                       host < group ? "on this host" : "under this control group's limit");
}

static int
reserve_pages(fsdpc_shm *shm, uint64_t offset, size_t bytes)
{
    FSDPC_TRY(check_free(shm, bytes));
    int rc;
    do {
        rc = fallocate(shm->fd, 0, (off_t)offset, (off_t)bytes);
    } while (rc != 0 && errno == EINTR && fsdpc_shm_interrupted(NULL) == FSDPC_OK);
    if (rc != 0) {
        return fsdpc_error_errno(errno,
                                 "rank %d: reserving %.1f MiB of shared memory (%.1f MiB before; "
                                 "%.1f MiB free on this host)",
                                 shm->rank, (double)bytes / 1048576,
                                 (double)shm->reserved_bytes / 1048576,
                                 (double)free_on_host() / 1048576);
    }
    shm->reserved_bytes += bytes;
    return FSDPC_OK;
}

/* --- handing out ---------------------------------------------------------------------------- */

int
fsdpc_shm_alloc(fsdpc_shm *shm, size_t bytes, bool reserve, uint64_t *offset)
{
    *offset = 0;
    FSDPC_TRY(fsdpc_shm_usable(shm));
    size_t unit = bytes >= HUGE_BYTES ? HUGE_BYTES : fsdpc_shm_page_bytes();
    uint64_t start = fsdpc_round_up(shm->next_offset, unit);
    if (start > shm->file_bytes || bytes > shm->file_bytes - start - unit) {
        return fsdpc_error(FSDPC_E_NOMEM,
                           "rank %d wants %zu bytes of shared memory after %llu; the segment ends "
                           "at %llu",
                           shm->rank, bytes, (unsigned long long)start,
                           (unsigned long long)shm->file_bytes);
    }
    size_t rounded = fsdpc_round_up(bytes, fsdpc_shm_page_bytes());
    /* Taken even if the reservation fails, so that offsets stay the same on all ranks. */
    shm->next_offset = start + rounded;
    if (reserve && rounded > 0) {
        FSDPC_TRY(reserve_pages(shm, start, rounded));
    }
    *offset = start;
    return FSDPC_OK;
}

static int
check_range(const fsdpc_shm *shm, uint64_t offset, size_t bytes)
{
    size_t page = fsdpc_shm_page_bytes();
    if (offset % page || bytes % page || bytes == 0 || offset > shm->file_bytes ||
        bytes > shm->file_bytes - offset) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "%zu bytes at %llu are not whole pages of a segment of %llu bytes",
                           bytes, (unsigned long long)offset, (unsigned long long)shm->file_bytes);
    }
    return FSDPC_OK;
}

int
fsdpc_shm_discard(fsdpc_shm *shm, uint64_t offset, size_t bytes)
{
    FSDPC_TRY(check_range(shm, offset, bytes));
    if (fallocate(shm->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                  (off_t)bytes) != 0) {
        return fsdpc_error_errno(errno, "giving back %zu bytes of shared memory", bytes);
    }
    return FSDPC_OK;
}

/* A free address range aligned for huge pages: reserve more than needed, cut the ends off. */
static void *
aligned_range(size_t bytes)
{
    char *start = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        return NULL;
    }
    size_t before = (HUGE_BYTES - (uintptr_t)start % HUGE_BYTES) % HUGE_BYTES;
    if (before > 0) {
        munmap(start, before);
    }
    if (HUGE_BYTES > before) {
        munmap(start + before + bytes, HUGE_BYTES - before);
    }
    return start + before;
}

int
fsdpc_shm_map(fsdpc_shm *shm, uint64_t offset, size_t bytes, void *address, void **out)
{
    *out = NULL;
    FSDPC_TRY(check_range(shm, offset, bytes));
    void *target = address;
    if (!target && bytes >= HUGE_BYTES && offset % HUGE_BYTES == 0) {
        target = aligned_range(bytes);
    }
    void *mapped = mmap(target, bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | (target ? MAP_FIXED : 0), shm->fd, (off_t)offset);
    if (mapped == MAP_FAILED) {
        int errnum = errno;
        if (target && target != address) {
            munmap(target, bytes);
        }
        return fsdpc_error_errno(errnum, "mapping %zu bytes of shared memory at %llu", bytes,
                                 (unsigned long long)offset);
    }
    if (bytes >= HUGE_BYTES) {
        /* Advice only: where shared memory gets no huge pages, small ones do. */
        madvise(mapped, bytes, MADV_HUGEPAGE);
    }
    *out = mapped;
    return FSDPC_OK;
}

void
fsdpc_shm_unmap(void *address, size_t bytes)
{
    if (address && bytes > 0) {
        munmap(address, bytes);
    }
}
