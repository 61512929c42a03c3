/* The caller's thread fills chunks (it copies or casts values and digests them), and helper threads write the
 * chunks to the file. With three chunks, the two kinds of threads rarely wait for each other. There are two
 * helpers, so that the disk has work while one helper waits for the file's lock to write a part of a page.
 *
 * A chunk is a run of bytes of the file. The buffer is aligned so that the pages of the file are pages of the
 * buffer. Whole pages are written past the page cache; such writers do not wait for each other's file locks.
 * The partial pages at both ends of a run go through the cache. Such a write waits for the file's lock until
 * all ranks' direct writes in progress end. So partial pages are set aside and written at the end.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "ckpt/crc32c.h"
#include "ckpt/range_io.h"
#include "kernels.h"

enum { CHUNKS = 3, HELPERS = 2, SCRATCH_BYTES = 1 << 16, SHORTEST_DIRECT = 1 << 16 };
enum { MOST_EDGES = 1024, EDGE_BYTES = 1 << 20 };
enum { MEMORY_BYTES = CHUNKS * (FSDPC_IO_CHUNK + FSDPC_IO_PAGE) + SCRATCH_BYTES + EDGE_BYTES };

typedef struct io_chunk {
    unsigned char *buffer;     /* FSDPC_IO_CHUNK + FSDPC_IO_PAGE bytes, aligned to a page */
    const unsigned char *data; /* the chunk's first byte in `buffer`; set when the chunk is full */
    int64_t offset;            /* of the chunk's first byte in the file */
    int64_t bytes;
    bool full, taken; /* full: handed over to the helpers; taken: a helper writes the chunk */
    fsdpc_write_result written;
    int64_t errplace; /* the offset in the file at which a write failed */
} io_chunk;

typedef struct writer {
    const char *path;
    int cached_fd, direct_fd; /* direct_fd -1: the file system has no direct writes */
    fsdpc_write_options options;
    const fsdpc_kernels *kernels;
    fsdpc_write_result result;
    unsigned char *memory; /* holds all chunks, scratch and edge_bytes */
    unsigned char *scratch;
    io_chunk chunks[CHUNKS];
    int filling, writing; /* the next chunk to fill, and the next chunk to write */
    struct {
        int64_t offset, bytes;
    } edges[MOST_EDGES]; /* partial pages that are set aside; edge_bytes has their bytes in order */
    unsigned char *edge_bytes;
    int64_t edges_used; /* how many of the EDGE_BYTES bytes of edge_bytes are in use */
    int edge_count;

    pthread_t helpers[HELPERS];
    int running;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ended; /* the helpers must end, because no chunk will follow */
    int errnum; /* the errno of the first failed write; errplace: its offset in the file */
    int64_t errplace;
} writer;

/* --- the helpers ----------------------------------------------------------------------------- */

/* The functions of the helpers return an errno, or 0 if there was no error. */
static int
write_cached(const writer *self, io_chunk *chunk, const unsigned char *from, int64_t bytes,
             int64_t offset)
{
    chunk->written.cached_bytes += bytes;
    while (bytes > 0) {
        const ssize_t put = pwrite(self->cached_fd, from, (size_t)bytes, offset);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            chunk->errplace = offset;
            return put == 0 ? EIO : errno;
        }
        from += put;
        bytes -= put;
        offset += put;
    }
    return 0;
}

/* Writes whole pages past the cache. Bytes that a direct write did not write go through the cache: after
 * a short write they may not begin at a page, and some file systems refuse all direct writes. */
static int
write_pages(const writer *self, io_chunk *chunk, const unsigned char *from, int64_t bytes,
            int64_t offset)
{
    while (bytes > 0 && self->direct_fd >= 0) {
        const ssize_t put = pwrite(self->direct_fd, from, (size_t)bytes, offset);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put < 0 && errno != EINVAL) {
            chunk->errplace = offset;
            return errno;
        }
        if (put <= 0 || put % FSDPC_IO_PAGE != 0) {
            break;
        }
        chunk->written.direct_bytes += put;
        from += put;
        bytes -= put;
        offset += put;
    }
    return write_cached(self, chunk, from, bytes, offset);
}

static void *
help(void *argument)
{
    writer *self = argument;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        io_chunk *chunk = &self->chunks[self->writing];
        if (!chunk->full || chunk->taken) {
            if (self->ended) {
                break;
            }
            pthread_cond_wait(&self->changed, &self->lock);
            continue;
        }
        chunk->taken = true;
        self->writing = (self->writing + 1) % CHUNKS;
        const bool failed = self->errnum != 0;
        pthread_mutex_unlock(&self->lock);
        const int errnum =
            failed ? 0 : write_pages(self, chunk, chunk->data, chunk->bytes, chunk->offset);
        pthread_mutex_lock(&self->lock);
        if (errnum != 0 && self->errnum == 0) {
            self->errnum = errnum;
            self->errplace = chunk->errplace;
        }
        chunk->full = chunk->taken = false;
        pthread_cond_broadcast(&self->changed);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

/* --- the caller's thread --------------------------------------------------------------------- */

static void
keep_error(writer *self, int errnum, int64_t place)
{
    pthread_mutex_lock(&self->lock);
    if (errnum != 0 && self->errnum == 0) {
        self->errnum = errnum;
        self->errplace = place;
    }
    pthread_mutex_unlock(&self->lock);
}

static void
write_edges(writer *self)
{
    io_chunk all = {0};
    const unsigned char *from = self->edge_bytes;
    int errnum = 0;
    for (int i = 0; i < self->edge_count && errnum == 0; i++) {
        errnum = write_cached(self, &all, from, self->edges[i].bytes, self->edges[i].offset);
        from += self->edges[i].bytes;
    }
    self->result.cached_bytes += all.written.cached_bytes;
    self->edges_used = 0;
    self->edge_count = 0;
    keep_error(self, errnum, all.errplace);
}

static void
set_aside(writer *self, const unsigned char *from, int64_t bytes, int64_t offset)
{
    if (bytes == 0) {
        return;
    }
    if (self->edge_count == MOST_EDGES || self->edges_used + bytes > EDGE_BYTES) {
        write_edges(self);
    }
    memcpy(self->edge_bytes + self->edges_used, from, (size_t)bytes);
    self->edges[self->edge_count].offset = offset;
    self->edges[self->edge_count].bytes = bytes;
    self->edges_used += bytes;
    self->edge_count++;
}

/* If not all of the chunk goes through the cache, leaves only the whole pages (nothing if these are few). */
static void
cut_edges(writer *self, io_chunk *chunk)
{
    const int64_t page = FSDPC_IO_PAGE, begin = chunk->offset, end = begin + chunk->bytes;
    const unsigned char *data = chunk->buffer + begin % page;
    int64_t first = (begin + page - 1) / page * page, last = end / page * page;
    chunk->data = data;
    if (self->direct_fd < 0 && !self->options.skip_edges) {
        return;
    }
    if (first >= last || (last - first < SHORTEST_DIRECT && !self->options.skip_edges)) {
        first = last = end;
    }
    if (!self->options.skip_edges) {
        set_aside(self, data, first - begin, begin);
        set_aside(self, data + (last - begin), end - last, last);
    }
    chunk->data = data + (first - begin);
    chunk->offset = first;
    chunk->bytes = last - first;
}

/* Hands the chunk to the helpers and waits until the next chunk is free. Returns false after an error. */
static bool
submit(writer *self)
{
    io_chunk *done = &self->chunks[self->filling];
    if (done->bytes > 0) {
        cut_edges(self, done);
    }
    pthread_mutex_lock(&self->lock);
    if (done->bytes > 0) {
        done->full = true;
        pthread_cond_broadcast(&self->changed);
        self->filling = (self->filling + 1) % CHUNKS;
        while (self->chunks[self->filling].full) {
            pthread_cond_wait(&self->changed, &self->lock);
        }
        self->chunks[self->filling].bytes = 0;
    }
    const bool good = self->errnum == 0;
    pthread_mutex_unlock(&self->lock);
    return good;
}

/* Sets *to to the address for the bytes at `offset`, and *room to how many fit. Chunks end at page ends. */
static bool
reserve(writer *self, int64_t offset, unsigned char **to, int64_t *room)
{
    const io_chunk *now = &self->chunks[self->filling];
    if (now->bytes > 0 && (now->offset + now->bytes != offset ||
                           now->offset % FSDPC_IO_PAGE + now->bytes == FSDPC_IO_CHUNK)) {
        if (!submit(self)) {
            return false;
        }
    }
    io_chunk *chunk = &self->chunks[self->filling];
    if (chunk->bytes == 0) {
        chunk->offset = offset;
    }
    const int64_t used = chunk->offset % FSDPC_IO_PAGE + chunk->bytes;
    *to = chunk->buffer + used;
    *room = FSDPC_IO_CHUNK - used;
    return true;
}

static bool
put_bytes(writer *self, const unsigned char *from, int64_t bytes, int64_t offset, uint32_t *crc)
{
    while (bytes > 0) {
        unsigned char *to;
        int64_t room;
        if (!reserve(self, offset, &to, &room)) {
            return false;
        }
        const int64_t step = 1 << 16; /* copied bytes are still cached when they are digested */
        int64_t part = bytes < room ? bytes : room;
        part = part < step ? part : step;
        memcpy(to, from, (size_t)part);
        *crc = fsdpc_crc32c(*crc, to, (size_t)part);
        self->chunks[self->filling].bytes += part;
        from += part;
        offset += part;
        bytes -= part;
    }
    return true;
}

/* Writes a part of a range that lies in one block, and sets *crc to the digest of the part. */
static bool
put_part(writer *self, const fsdpc_file_range *range, int64_t at, int64_t bytes, uint32_t *crc)
{
    const unsigned char *memory = range->memory;
    const int64_t item = (int64_t)fsdpc_dtype_bytes(range->file_type);
    *crc = 0;
    if (range->memory_type == range->file_type) {
        return put_bytes(self, memory + at, bytes, range->file_offset + at, crc);
    }
    const int64_t from_item = (int64_t)fsdpc_dtype_bytes(range->memory_type);
    while (bytes > 0) { /* a block may end inside an element */
        const int64_t first = at / item, skip = at % item;
        const int64_t most = SCRATCH_BYTES - skip, part = bytes < most ? bytes : most;
        self->kernels->cast(self->scratch, range->file_type, memory + first * from_item,
                            range->memory_type, (skip + part + item - 1) / item, 1.0);
        if (!put_bytes(self, self->scratch + skip, part, range->file_offset + at, crc)) {
            return false;
        }
        at += part;
        bytes -= part;
    }
    return true;
}

static bool
put_range(writer *self, const fsdpc_file_range *range, uint32_t **digest)
{
    const int64_t block = self->options.block_bytes;
    for (int64_t at = 0; at < range->bytes;) {
        const int64_t left = block - (range->tensor_offset + at) % block;
        const int64_t part = range->bytes - at < left ? range->bytes - at : left;
        if (!put_part(self, range, at, part, (*digest)++)) {
            return false;
        }
        at += part;
    }
    return true;
}

/* --- begin and end --------------------------------------------------------------------------- */

static int
begin(writer *self, const char *path, const fsdpc_write_options *options)
{
    const size_t each = FSDPC_IO_CHUNK + FSDPC_IO_PAGE;
    self->path = path;
    self->options = *options;
    FSDPC_TRY(fsdpc_kernels_select(&self->kernels));
    FSDPC_TRY(fsdpc_file_open(path, O_WRONLY, &self->cached_fd));
    if (options->direct) {
        self->direct_fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_DIRECT);
        if (self->direct_fd < 0 && errno != EINVAL) {
            return fsdpc_file_error(errno, "opening", path, -1);
        }
    }
    void *memory =
        mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return fsdpc_error_errno(errno, "memory to write %s", path);
    }
    (void)madvise(memory, MEMORY_BYTES, MADV_HUGEPAGE); /* saves thousands of page faults */
    self->memory = memory;
    for (size_t i = 0; i < CHUNKS; i++) {
        self->chunks[i].buffer = self->memory + i * each;
    }
    self->scratch = self->memory + CHUNKS * each;
    self->edge_bytes = self->scratch + SCRATCH_BYTES;
    while (self->running < HELPERS) {
        const int failed = pthread_create(&self->helpers[self->running], NULL, help, self);
        if (failed) {
            return fsdpc_error_errno(failed, "a thread to write %s", path);
        }
        self->running++;
    }
    return FSDPC_OK;
}

/* Ends the helpers, waits for them, and adds up the bytes that they have written. */
static void
join(writer *self)
{
    pthread_mutex_lock(&self->lock);
    self->ended = true;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
    while (self->running > 0) {
        pthread_join(self->helpers[--self->running], NULL);
    }
    for (int i = 0; i < CHUNKS; i++) {
        self->result.direct_bytes += self->chunks[i].written.direct_bytes;
        self->result.cached_bytes += self->chunks[i].written.cached_bytes;
    }
}

static int
close_file(writer *self, int fd, int status)
{
    if (fd >= 0 && close(fd) < 0 && status == FSDPC_OK) {
        return fsdpc_file_error(errno, "closing", self->path, -1);
    }
    return status;
}

int
fsdpc_range_write(const char *path, const fsdpc_file_range *ranges, size_t count,
                  const fsdpc_write_options *options, uint32_t *digests, fsdpc_write_result *result)
{
    int status = FSDPC_OK;
    writer self = {.cached_fd = -1,
                   .direct_fd = -1,
                   .lock = PTHREAD_MUTEX_INITIALIZER,
                   .changed = PTHREAD_COND_INITIALIZER};
    if (fsdpc_range_digests(ranges, count, options->block_bytes) < 0) {
        return fsdpc_error(FSDPC_E_INVAL, "ranges of %s are not valid", path);
    }
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].memory == NULL && ranges[i].bytes > 0) {
            return fsdpc_error(FSDPC_E_INVAL, "range %zu of %s has no memory", i, path);
        }
        if (i > 0 && ranges[i - 1].file_offset + ranges[i - 1].bytes > ranges[i].file_offset) {
            return fsdpc_error(FSDPC_E_INVAL, "ranges of %s overlap or are not sorted", path);
        }
    }
    FSDPC_GOTO(begin(&self, path, options), done);
    bool good = true;
    for (size_t i = 0; i < count && good; i++) {
        good = put_range(&self, &ranges[i], &digests);
    }
    if (good) {
        submit(&self);
    }
done:
    join(&self);
    if (status == FSDPC_OK && self.errnum == 0) {
        write_edges(&self);
    }
    if (self.errnum != 0) {
        FSDPC_KEEP(fsdpc_file_error(self.errnum, "writing", path, self.errplace));
    }
    if (status == FSDPC_OK && !options->no_sync && fdatasync(self.cached_fd) < 0) {
        status = fsdpc_file_error(errno, "syncing", path, -1);
    }
    status = close_file(&self, self.direct_fd, status);
    status = close_file(&self, self.cached_fd, status);
    if (self.memory != NULL) {
        munmap(self.memory, MEMORY_BYTES);
    }
    *result = self.result;
    return status;
}
