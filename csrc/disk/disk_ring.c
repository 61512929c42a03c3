/* Transfers by io_uring, through the kernel's own calls.
 *
 * The kernel writes completions while this process reads them: both sides order their accesses to
 * the rings' heads and tails by acquire and release.
 */
#include <errno.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/status.h"
#include "disk/disk_impl.h"

enum { MOST_TRIES = 10000, TRY_AGAIN_US = 1000 };

typedef struct ring {
    int fd;
    struct io_uring_params params;
    char *queues; /* one mapping that holds both rings, of submissions and of completions */
    size_t queue_bytes;
    struct io_uring_sqe *entries;
    size_t entry_bytes;
    unsigned unflushed;
} ring;

static _Atomic unsigned *
word(const ring *self, unsigned offset)
{
    return (_Atomic unsigned *)(void *)(self->queues + offset);
}

static int
enter(const ring *self, unsigned count, unsigned least, unsigned flags, void *argument,
      size_t bytes)
{
    return (int)syscall(SYS_io_uring_enter, self->fd, count, least, flags, argument, bytes);
}

static int
ring_submit(void *object, fsdpc_disk_transfer *transfer)
{
    ring *self = object;
    const unsigned tail =
        atomic_load_explicit(word(self, self->params.sq_off.tail), memory_order_relaxed);
    const unsigned mask = self->params.sq_entries - 1, index = tail & mask;
    struct io_uring_sqe *entry = &self->entries[index];
    memset(entry, 0, sizeof *entry);
    entry->opcode = transfer->write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = transfer->fd;
    entry->addr = (uint64_t)(uintptr_t)transfer->memory;
    entry->len = (uint32_t)transfer->bytes;
    entry->off = (uint64_t)transfer->offset;
    entry->user_data = (uint64_t)(uintptr_t)transfer;
    atomic_store_explicit(&word(self, self->params.sq_off.array)[index], index,
                          memory_order_relaxed);
    atomic_store_explicit(word(self, self->params.sq_off.tail), tail + 1, memory_order_release);
    self->unflushed++;
    return FSDPC_OK;
}

static int
ring_flush(void *object)
{
    ring *self = object;
    for (int tries = 0; self->unflushed > 0; tries++) {
        const int taken = enter(self, self->unflushed, 0, 0, NULL, 0);
        const bool again = errno == EINTR || errno == EAGAIN || errno == EBUSY;
        if (taken < 0 && (!again || tries > MOST_TRIES)) {
            return fsdpc_error_errno(errno, "io_uring_enter");
        }
        if (taken < 0) {
            usleep(TRY_AGAIN_US);
        }
        self->unflushed -= taken > 0 ? (unsigned)taken : 0;
    }
    return FSDPC_OK;
}

static bool
take_completion(ring *self, fsdpc_disk_transfer **out)
{
    _Atomic unsigned *head_word = word(self, self->params.cq_off.head);
    const unsigned head = atomic_load_explicit(head_word, memory_order_relaxed);
    const unsigned tail =
        atomic_load_explicit(word(self, self->params.cq_off.tail), memory_order_acquire);
    if (head == tail) {
        return false;
    }
    const struct io_uring_cqe *all =
        (const struct io_uring_cqe *)(void *)(self->queues + self->params.cq_off.cqes);
    const struct io_uring_cqe *entry = &all[head & (self->params.cq_entries - 1)];
    *out = (fsdpc_disk_transfer *)(uintptr_t)entry->user_data;
    (*out)->result = entry->res;
    atomic_store_explicit(head_word, head + 1, memory_order_release);
    return true;
}

static int
ring_reap(void *object, const struct timespec *until, fsdpc_disk_transfer **out)
{
    ring *self = object;
    while (!take_completion(self, out)) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        const int64_t left =
            (int64_t)(until->tv_sec - now.tv_sec) * 1000000000 + (until->tv_nsec - now.tv_nsec);
        if (left <= 0) {
            return FSDPC_E_TIMEOUT;
        }
        struct __kernel_timespec wait = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        struct io_uring_getevents_arg argument = {.ts = (uint64_t)(uintptr_t)&wait};
        const unsigned flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
        if (enter(self, 0, 1, flags, &argument, sizeof argument) < 0 && errno != EINTR &&
            errno != ETIME && errno != EAGAIN && errno != EBUSY) {
            return fsdpc_error_errno(errno, "io_uring_enter");
        }
    }
    return FSDPC_OK;
}

static void
ring_free(void *object)
{
    ring *self = object;
    if (self->entries != NULL) {
        munmap(self->entries, self->entry_bytes);
    }
    if (self->queues != NULL) {
        munmap(self->queues, self->queue_bytes);
    }
    if (self->fd >= 0) {
        close(self->fd);
    }
    fsdpc_mem_free(self);
}

static int
map_queues(ring *self)
{
    const struct io_uring_params *p = &self->params;
    const size_t sq = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    const size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    const int access = PROT_READ | PROT_WRITE, shared = MAP_SHARED | MAP_POPULATE;
    self->queue_bytes = sq > cq ? sq : cq;
    void *queues = mmap(NULL, self->queue_bytes, access, shared, self->fd, IORING_OFF_SQ_RING);
    if (queues == MAP_FAILED) {
        return fsdpc_error_errno(errno, "mapping io_uring's queues");
    }
    self->queues = queues;
    self->entry_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    void *entries = mmap(NULL, self->entry_bytes, access, shared, self->fd, IORING_OFF_SQES);
    if (entries == MAP_FAILED) {
        return fsdpc_error_errno(errno, "mapping io_uring's queues");
    }
    self->entries = entries;
    return FSDPC_OK;
}

int
fsdpc_disk_ring_new(int capacity, const fsdpc_disk_way **way, void **out)
{
    static const fsdpc_disk_way table = {"io_uring", ring_submit, ring_flush, ring_reap, ring_free};
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
    int status = FSDPC_OK;
    ring *self = fsdpc_mem_calloc(1, sizeof *self);
    if (self == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the io_uring of a file of states");
    }
    self->fd = (int)syscall(SYS_io_uring_setup, (unsigned)capacity, &self->params);
    if (self->fd < 0) {
        const int errnum = errno;
        fsdpc_error_errno(errnum, "io_uring_setup (io='threads' needs no io_uring)");
        FSDPC_GOTO(FSDPC_E_UNAVAILABLE, failed);
    }
    if ((self->params.features & needed) != needed) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_UNAVAILABLE,
                               "io_uring needs Linux 5.11 or newer: use io='threads'"),
                   failed);
    }
    FSDPC_GOTO(map_queues(self), failed);
    *way = &table;
    *out = self;
    return FSDPC_OK;
failed:
    ring_free(self);
    return status;
}
