/* The file, and the transfers of each buffer. A large transfer is cut into several requests. */
#include "disk/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/deadline.h"
#include "base/mem.h"
#include "base/status.h"
#include "disk/disk_impl.h"

enum { REQUEST_BYTES = 1 << 20, MOST_REQUESTS = 64, SPARE_REQUESTS = 16, ZEROS = 1 << 16 };

typedef struct buffer_state {
    int on_way;
    int errnum; /* errno of the first transfer that failed since the last wait; or 0 */
    int64_t offset, bytes;
    bool write, ended; /* of that transfer: true for a write; true if it met the file's end */
} buffer_state;

struct fsdpc_disk {
    fsdpc_disk_options options;
    void *buffers[FSDPC_DISK_MAX_BUFFERS];
    char *folder;
    pid_t owner;
    int cached_fd, direct_fd; /* direct_fd: with O_DIRECT; -1: the file system refuses that */
    bool in_memory, direct;
    int64_t bytes, read_bytes, written_bytes, request_bytes;
    const fsdpc_disk_way *way;
    void *way_self;
    fsdpc_disk_transfer *transfers; /* array of all transfers; `unused` lists the free ones */
    fsdpc_disk_transfer *unused;
    buffer_state states[FSDPC_DISK_MAX_BUFFERS];
};

/* --- the file ---------------------------------------------------------------------------------- */

static int
file_error(const fsdpc_disk *self, int errnum, const char *doing)
{
    fsdpc_error_errno(errnum, "rank %d: %s in %s", self->options.rank, doing, self->folder);
    return FSDPC_E_IO;
}

static int
open_nameless(fsdpc_disk *self)
{
    char path[4096];
    self->cached_fd = open(self->folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (self->cached_fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
        if (snprintf(path, sizeof path, "%s/.fsdpc-states-XXXXXX", self->folder) >=
            (int)sizeof path) {
            return file_error(self, ENAMETOOLONG, "making a file of states");
        }
        self->cached_fd = mkostemp(path, O_CLOEXEC);
        if (self->cached_fd >= 0) {
            unlink(path);
        }
    }
    if (self->cached_fd < 0) {
        return file_error(self, errno, "making a file of states");
    }
    return FSDPC_OK;
}

static int
open_file(fsdpc_disk *self)
{
    char link[64];
    struct statfs system;
    FSDPC_TRY(open_nameless(self));
    if (fstatfs(self->cached_fd, &system) == 0) {
        self->in_memory = system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
    }
    if (self->options.direct) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", self->cached_fd);
        self->direct_fd = open(link, O_RDWR | O_DIRECT | O_CLOEXEC);
        self->direct = self->direct_fd >= 0;
    }
    return FSDPC_OK;
}

/* Writes zeros, for file systems that have no call to reserve space: writing allocates the space. */
static int
write_zeros(fsdpc_disk *self, int64_t bytes)
{
    static const char zeros[ZEROS];
    for (int64_t at = self->bytes; at < bytes;) {
        const int64_t part = bytes - at < ZEROS ? bytes - at : ZEROS;
        const ssize_t put = pwrite(self->cached_fd, zeros, (size_t)part, at);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return put == 0 ? EIO : errno;
        }
        at += put;
    }
    return 0;
}

static int
reserve_error(fsdpc_disk *self, int errnum, int64_t more, int64_t free_bytes)
{
    const int ignored = ftruncate(self->cached_fd, self->bytes);
    (void)ignored;
    fsdpc_error_errno(errnum,
                      "rank %d: reserving %lld bytes for a file of states in %s, where %lld bytes "
                      "are free",
                      self->options.rank, (long long)more, self->folder, (long long)free_bytes);
    return FSDPC_E_IO;
}

int
fsdpc_disk_grow(fsdpc_disk *self, int64_t bytes)
{
    struct statvfs system;
    struct stat stat;
    const int64_t more = bytes - self->bytes;
    if (more <= 0) {
        return FSDPC_OK;
    }
    if (fstatvfs(self->cached_fd, &system) < 0) {
        return file_error(self, errno, "asking for free space");
    }
    const int64_t free_bytes = (int64_t)(system.f_bavail * system.f_frsize);
    if (free_bytes < more) {
        return reserve_error(self, ENOSPC, more, free_bytes);
    }
    int errnum = 0;
    do {
        errnum = fallocate(self->cached_fd, 0, self->bytes, more) < 0 ? errno : 0;
    } while (errnum == EINTR);
    if (errnum == EOPNOTSUPP || errnum == ENOSYS) {
        errnum = write_zeros(self, bytes);
    }
    if (errnum != 0) {
        return reserve_error(self, errnum, more, free_bytes);
    }
    if (fstat(self->cached_fd, &stat) < 0) {
        return file_error(self, errno, "reading the size of a file of states");
    }
    if (stat.st_size < bytes || (int64_t)stat.st_blocks * 512 < bytes) {
        const int ignored = ftruncate(self->cached_fd, self->bytes);
        (void)ignored;
        return fsdpc_error(FSDPC_E_IO,
                           "rank %d: the file of states in %s is sparse: the file system holds "
                           "%lld bytes of %lld. Use a folder on a disk without compression",
                           self->options.rank, self->folder, (long long)stat.st_blocks * 512,
                           (long long)bytes);
    }
    self->bytes = bytes;
    return FSDPC_OK;
}

/* --- transfers --------------------------------------------------------------------------------- */

static int
submit(fsdpc_disk *self, fsdpc_disk_transfer *transfer)
{
    const bool whole =
        transfer->offset % FSDPC_DISK_PAGE == 0 && transfer->bytes % FSDPC_DISK_PAGE == 0;
    transfer->fd = self->direct && whole ? self->direct_fd : self->cached_fd;
    return self->way->submit(self->way_self, transfer);
}

static void
note_failure(buffer_state *state, const fsdpc_disk_transfer *transfer, int errnum)
{
    if (state->errnum == 0) {
        state->errnum = errnum;
        state->offset = transfer->offset;
        state->bytes = transfer->bytes;
        state->write = transfer->write;
        state->ended = transfer->result == 0;
    }
}

/* Takes the result of a transfer; if the transfer ended early, submits it again for the remaining bytes. */
static int
complete(fsdpc_disk *self, fsdpc_disk_transfer *transfer)
{
    buffer_state *state = &self->states[transfer->buffer];
    const int64_t result = transfer->result;
    if (result == -EINTR || result == -EAGAIN) {
        return submit(self, transfer);
    }
    /* A file system may let files be opened with O_DIRECT and then refuse the transfers. */
    if (result == -EINVAL && transfer->fd == self->direct_fd) {
        self->direct = false; /* direct_fd stays open: transfers in flight still use it */
        return submit(self, transfer);
    }
    if (result > 0) {
        *(transfer->write ? &self->written_bytes : &self->read_bytes) += result;
    }
    if (result > 0 && result < transfer->bytes) {
        transfer->memory += result;
        transfer->offset += result;
        transfer->bytes -= result;
        return submit(self, transfer);
    }
    if (result <= 0) {
        note_failure(state, transfer, result < 0 ? (int)-result : EIO);
    }
    state->on_way--;
    transfer->next = self->unused;
    self->unused = transfer;
    return FSDPC_OK;
}

static void
deadline_from_now(struct timespec *until)
{
    const double seconds = fsdpc_timeout();
    clock_gettime(CLOCK_MONOTONIC, until);
    const double nanoseconds = (double)until->tv_nsec + (seconds - (double)(int64_t)seconds) * 1e9;
    until->tv_sec += (time_t)seconds + (nanoseconds >= 1e9);
    until->tv_nsec = (long)(nanoseconds - (nanoseconds >= 1e9 ? 1e9 : 0));
}

/* Waits for one transfer to end. If the transfer was short, it is submitted again for the rest. */
static int
reap_one(fsdpc_disk *self, const struct timespec *until)
{
    fsdpc_disk_transfer *transfer = NULL;
    const int status = self->way->reap(self->way_self, until, &transfer);
    if (status == FSDPC_E_TIMEOUT) {
        return fsdpc_error(FSDPC_E_TIMEOUT,
                           "rank %d waited %g s for a file of states in %s (FSDPC_TIMEOUT sets "
                           "this limit)",
                           self->options.rank, fsdpc_timeout(), self->folder);
    }
    FSDPC_TRY(status);
    FSDPC_TRY(complete(self, transfer));
    return self->way->flush(self->way_self);
}

static int
check_buffer(const fsdpc_disk *self, int buffer)
{
    return buffer >= 0 && buffer < self->options.buffer_count
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "buffer %d does not exist: the file of states has %d",
                             buffer, self->options.buffer_count);
}

static int
check_parts(const fsdpc_disk *self, int buffer, const fsdpc_disk_part *parts, int count)
{
    if (self->owner != getpid()) {
        return fsdpc_error(FSDPC_E_STATE,
                           "a file of states belongs to the process that opened it (pid %d), not "
                           "to its fork (pid %d)",
                           (int)self->owner, (int)getpid());
    }
    FSDPC_TRY(check_buffer(self, buffer));
    bool good = self->states[buffer].on_way == 0;
    for (int i = 0; good && i < count; i++) {
        const fsdpc_disk_part *p = &parts[i];
        good = p->offset >= 0 && p->bytes > 0 && p->place >= 0 &&
               (p->offset | p->bytes | p->place) % FSDPC_DISK_PAGE == 0 &&
               p->bytes <= self->bytes - p->offset &&
               p->bytes <= self->options.buffer_bytes - p->place;
    }
    return good
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL,
                             "rank %d: file of states: buffer %d is in use, or a part lies outside "
                             "of the file or of the buffer, or is not in whole pages",
                             self->options.rank, buffer);
}

int
fsdpc_disk_start(fsdpc_disk *self, bool write, int buffer, const fsdpc_disk_part *parts, int count)
{
    struct timespec until;
    FSDPC_TRY(check_parts(self, buffer, parts, count));
    deadline_from_now(&until);
    for (int i = 0; i < count; i++) {
        for (int64_t at = 0; at < parts[i].bytes; at += self->request_bytes) {
            while (self->unused == NULL) {
                FSDPC_TRY(self->way->flush(self->way_self));
                FSDPC_TRY(reap_one(self, &until));
            }
            fsdpc_disk_transfer *transfer = self->unused;
            const int64_t left = parts[i].bytes - at;
            self->unused = transfer->next;
            transfer->memory = (char *)self->buffers[buffer] + parts[i].place + at;
            transfer->bytes = left < self->request_bytes ? left : self->request_bytes;
            transfer->offset = parts[i].offset + at;
            transfer->write = write;
            transfer->buffer = buffer;
            self->states[buffer].on_way++;
            FSDPC_TRY(submit(self, transfer));
        }
    }
    return self->way->flush(self->way_self);
}

int
fsdpc_disk_wait(fsdpc_disk *self, int buffer)
{
    struct timespec until;
    FSDPC_TRY(check_buffer(self, buffer));
    deadline_from_now(&until);
    buffer_state *state = &self->states[buffer];
    while (state->on_way > 0) {
        FSDPC_TRY(reap_one(self, &until));
    }
    if (state->errnum == 0) {
        return FSDPC_OK;
    }
    fsdpc_error_errno(
        state->errnum, "rank %d: %s %lld bytes at byte %lld of the file of states in %s%s",
        self->options.rank, state->write ? "writing" : "reading", (long long)state->bytes,
        (long long)state->offset, self->folder, state->ended ? ", which ends there" : "");
    state->errnum = 0;
    return FSDPC_E_IO;
}

/* --- begin and end ----------------------------------------------------------------------------- */

static int
choose_way(fsdpc_disk *self, int capacity)
{
    if (self->options.io != FSDPC_DISK_THREADS) {
        const int status = fsdpc_disk_ring_new(capacity, &self->way, &self->way_self);
        if (status == FSDPC_OK || self->options.io == FSDPC_DISK_RING) {
            return status;
        }
    }
    return fsdpc_disk_threads_new(&self->way, &self->way_self);
}

static int
make_transfers(fsdpc_disk *self)
{
    int64_t each = self->options.buffer_bytes / MOST_REQUESTS / FSDPC_DISK_PAGE * FSDPC_DISK_PAGE;
    each += FSDPC_DISK_PAGE;
    self->request_bytes = each > REQUEST_BYTES ? each : REQUEST_BYTES;
    const int capacity = self->options.buffer_count * (MOST_REQUESTS + SPARE_REQUESTS);
    self->transfers = fsdpc_mem_calloc((size_t)capacity, sizeof *self->transfers);
    if (self->transfers == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the transfers of a file of states");
    }
    for (int i = 0; i < capacity; i++) {
        self->transfers[i].next = self->unused;
        self->unused = &self->transfers[i];
    }
    return choose_way(self, capacity);
}

static void
destroy(fsdpc_disk *self)
{
    if (self->way != NULL && self->owner == getpid()) {
        self->way->free(self->way_self);
    }
    if (self->direct_fd >= 0) {
        close(self->direct_fd);
    }
    if (self->cached_fd >= 0) {
        close(self->cached_fd);
    }
    fsdpc_mem_free(self->transfers);
    fsdpc_mem_free(self->folder);
    fsdpc_mem_free(self);
}

int
fsdpc_disk_open(const fsdpc_disk_options *options, fsdpc_disk **out)
{
    int status = FSDPC_OK;
    bool good = options->buffer_count > 0 && options->buffer_count <= FSDPC_DISK_MAX_BUFFERS &&
                options->buffer_bytes > 0 && options->buffer_bytes % FSDPC_DISK_PAGE == 0;
    for (int i = 0; good && i < options->buffer_count; i++) {
        good = (uintptr_t)options->buffers[i] % FSDPC_DISK_PAGE == 0;
    }
    if (!good) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "file of states: 1 to %d buffers are needed, in whole pages of %d bytes",
                           FSDPC_DISK_MAX_BUFFERS, FSDPC_DISK_PAGE);
    }
    fsdpc_disk *self = fsdpc_mem_calloc(1, sizeof *self);
    if (self == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a file of states");
    }
    self->options = *options;
    self->owner = getpid();
    self->cached_fd = self->direct_fd = -1;
    memcpy(self->buffers, options->buffers, (size_t)options->buffer_count * sizeof(void *));
    self->folder = fsdpc_mem_strdup(options->folder);
    if (self->folder == NULL) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for a file of states"), failed);
    }
    FSDPC_GOTO(open_file(self), failed);
    FSDPC_GOTO(make_transfers(self), failed);
    *out = self;
    return FSDPC_OK;
failed:
    destroy(self);
    return status;
}

void
fsdpc_disk_describe(const fsdpc_disk *self, fsdpc_disk_info *out)
{
    *out = (fsdpc_disk_info){.fd = self->cached_fd,
                             .io = self->way->name,
                             .direct = self->direct,
                             .in_memory = self->in_memory,
                             .bytes = self->bytes,
                             .read_bytes = self->read_bytes,
                             .written_bytes = self->written_bytes};
}

bool
fsdpc_disk_close(fsdpc_disk *self)
{
    if (self == NULL) {
        return true;
    }
    struct timespec until;
    deadline_from_now(&until);
    for (int i = 0; i < self->options.buffer_count && self->owner == getpid(); i++) {
        while (self->states[i].on_way > 0) {
            if (reap_one(self, &until) != FSDPC_OK) {
                return false;
            }
        }
    }
    destroy(self);
    return true;
}
