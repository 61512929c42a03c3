/* Allocation, mapping and discarding of ranges of the shared file.
 *
 * The file is far longer than any machine's memory, so an allocation only adds to an offset. Pages take
 * memory when touched, or at once with `reserve`. A request beyond the free memory would wake the
 * kernel's out-of-memory killer instead of returning an error, so a request is compared with the free
 * memory first.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/forks.h"
#include "base/mem.h"
#include "shm/shm_impl.h"
#include "base/room.h"
#include "base/status.h"

#define HUGE_BYTES ((size_t)1 << 21)

void *(*fsdpc_shm_mmap)(void *, size_t, int, int, int, off_t) = mmap;
int (*fsdpc_shm_munmap)(void *, size_t) = munmap;

static const fsdpc_wait RESERVING = {.op = "reserving shared memory", .unit = ""};

size_t
fsdpc_shm_page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

static int
allocate_pages(fsdpc_shm *shm, uint64_t offset, size_t bytes)
{
    char who[32];
    snprintf(who, sizeof who, "rank %d", shm->rank);
    FSDPC_TRY(fsdpc_room_check(bytes, who));
    while (fallocate(shm->fd, 0, (off_t)offset, (off_t)bytes) != 0) {
        if (errno != EINTR) {
            return fsdpc_error_errno(errno,
                                     "rank %d: reserving %.1f MiB of shared memory (%.1f MiB are "
                                     "free on this host)",
                                     shm->rank, (double)bytes / 1048576,
                                     (double)fsdpc_room_free() / 1048576);
        }
        FSDPC_TRY(fsdpc_shm_end_interrupted(shm, &RESERVING));
    }
    return FSDPC_OK;
}

/* The first rank to arrive allocates the pages for all ranks. Otherwise each rank would compare its request
 * with the free memory that remains after the first rank's allocation. */
static int
reserve_pages(fsdpc_shm *shm, uint64_t offset, size_t bytes)
{
    fsdpc_shm_control *control = shm->control;
    int64_t deadline_ns = fsdpc_shm_deadline(shm);
    uint32_t holder = 0;
    while (!atomic_compare_exchange_strong(&control->reserving, &holder, (uint32_t)shm->rank + 1)) {
        const int other = (int)holder - 1;
        int status = fsdpc_shm_wait_word(shm, &control->reserving, holder, deadline_ns, &RESERVING);
        if (status == FSDPC_E_TIMEOUT) {
            return fsdpc_shm_timeout_error(shm, &RESERVING, &other, 1);
        }
        FSDPC_TRY(status);
        holder = 0;
    }
    int status = FSDPC_OK;
    if (atomic_load(&control->reserved_end) < offset + bytes) {
        FSDPC_KEEP(allocate_pages(shm, offset, bytes));
        if (status == FSDPC_OK) {
            atomic_store(&control->reserved_end, offset + bytes);
        }
    }
    atomic_store(&control->reserving, 0);
    fsdpc_shm_wake(&control->reserving);
    return status;
}

/* --- allocation ----------------------------------------------------------------------------- */

int
fsdpc_shm_alloc(fsdpc_shm *shm, size_t bytes, bool reserve, uint64_t *offset)
{
    *offset = 0;
    FSDPC_TRY(fsdpc_shm_usable(shm));
    size_t unit = bytes >= HUGE_BYTES ? HUGE_BYTES : fsdpc_shm_page_bytes();
    uint64_t start = fsdpc_round_up(shm->next_offset, unit);
    if (start > shm->file_bytes || bytes > shm->file_bytes - start - unit) {
        return fsdpc_error(
            FSDPC_E_NOMEM,
            "rank %d: %zu bytes of shared memory at offset %llu exceed the segment's "
            "%llu bytes",
            shm->rank, bytes, (unsigned long long)start, (unsigned long long)shm->file_bytes);
    }
    size_t rounded = fsdpc_round_up(bytes, fsdpc_shm_page_bytes());
    /* The offset advances even if the reservation fails, so that offsets stay equal on all ranks. */
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
    FSDPC_TRY(fsdpc_shm_usable(shm));
    FSDPC_TRY(check_range(shm, offset, bytes));
    if (fallocate(shm->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                  (off_t)bytes) != 0) {
        return fsdpc_error_errno(errno, "giving back %zu bytes of shared memory", bytes);
    }
    return FSDPC_OK;
}

/* Returns a free address range aligned for huge pages: reserves more than needed, then unmaps the ends. */
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
    void *mapped = fsdpc_shm_mmap(target, bytes, PROT_READ | PROT_WRITE,
                                  MAP_SHARED | (target ? MAP_FIXED : 0), shm->fd, (off_t)offset);
    if (mapped == MAP_FAILED) {
        int errnum = errno;
        if (target && target != address) {
            fsdpc_shm_munmap(target, bytes);
        }
        return fsdpc_error_errno(errnum, "mapping %zu bytes of shared memory at %llu", bytes,
                                 (unsigned long long)offset);
    }
    if (bytes >= HUGE_BYTES) {
        /* Best effort: without huge pages the kernel uses small pages. */
        madvise(mapped, bytes, MADV_HUGEPAGE);
    }
    int status = address ? FSDPC_OK : fsdpc_forks_add(mapped, bytes, NULL, NULL);
    if (status != FSDPC_OK) {
        fsdpc_shm_munmap(mapped, bytes);
        return status;
    }
    *out = mapped;
    return FSDPC_OK;
}

int
fsdpc_shm_show(fsdpc_shm *shm, uint64_t offset, size_t bytes, void *address)
{
    FSDPC_TRY(check_range(shm, offset, bytes));
    void *mapped = mmap(address, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, shm->fd, (off_t)offset);
    if (mapped == MAP_FAILED) {
        return fsdpc_error_errno(errno, "showing %zu bytes of shared memory at %llu", bytes,
                                 (unsigned long long)offset);
    }
    if (bytes >= HUGE_BYTES) {
        madvise(mapped, bytes, MADV_HUGEPAGE);
    }
    return FSDPC_OK;
}

void
fsdpc_shm_unmap(void *address, size_t bytes)
{
    if (address && bytes > 0) {
        fsdpc_forks_remove(address);
        fsdpc_shm_munmap(address, bytes);
    }
}
