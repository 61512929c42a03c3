/* Reads go through the page cache, which reads ahead and serves all ranks that need a page. The file is
 * never mapped, because truncating a mapped file would end the process.
 *
 * Values that need no cast are read directly to their place in memory and are digested while they are in the
 * processor's caches; all other values pass through a small buffer.
 */
#include <errno.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/status.h"
#include "ckpt/crc32c.h"
#include "ckpt/range_io.h"
#include "kernels.h"

enum { STEP_BYTES = 1 << 20 }; /* a multiple of every element's size */

typedef struct reader {
    const char *path;
    int fd;
    const fsdpc_kernels *kernels;
    int64_t block_bytes;
    uint32_t *digest;   /* the digest of the current part of a block */
    unsigned char *own; /* a buffer of STEP_BYTES bytes */
} reader;

static int
read_exactly(const reader *self, unsigned char *to, int64_t bytes, int64_t offset)
{
    while (bytes > 0) {
        const ssize_t got = pread(self->fd, to, (size_t)bytes, offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return fsdpc_file_error(errno, "reading", self->path, offset);
        }
        if (got == 0) {
            return fsdpc_error(FSDPC_E_IO, "%s ends at byte %lld, %lld bytes early", self->path,
                               (long long)offset, (long long)bytes);
        }
        to += got;
        bytes -= got;
        offset += got;
    }
    return FSDPC_OK;
}

/* Digests `bytes` bytes at `offset` of a range; each block of the tensor begins a new digest. */
static void
digest(reader *self, const fsdpc_file_range *range, const unsigned char *data, int64_t bytes,
       int64_t offset)
{
    int64_t place = range->tensor_offset + offset;
    while (bytes > 0) {
        const int64_t left = self->block_bytes - place % self->block_bytes;
        const int64_t part = bytes < left ? bytes : left;
        *self->digest = fsdpc_crc32c(*self->digest, data, (size_t)part);
        data += part;
        place += part;
        bytes -= part;
        if (part == left) {
            *++self->digest = 0;
        }
    }
}

static int
read_range(reader *self, const fsdpc_file_range *range)
{
    const int64_t file_item = (int64_t)fsdpc_dtype_bytes(range->file_type);
    const int64_t memory_item = (int64_t)fsdpc_dtype_bytes(range->memory_type);
    const bool in_place = range->memory != NULL && range->memory_type == range->file_type;
    for (int64_t at = 0; at < range->bytes; at += STEP_BYTES) {
        const int64_t left = range->bytes - at;
        const int64_t bytes = left < STEP_BYTES ? left : STEP_BYTES;
        unsigned char *to = in_place ? (unsigned char *)range->memory + at : self->own;
        FSDPC_TRY(read_exactly(self, to, bytes, range->file_offset + at));
        digest(self, range, to, bytes, at);
        if (range->memory != NULL && !in_place) {
            unsigned char *memory = (unsigned char *)range->memory + at / file_item * memory_item;
            self->kernels->cast(memory, range->memory_type, to, range->file_type, bytes / file_item,
                                1.0);
        }
    }
    if (range->bytes > 0 && (range->tensor_offset + range->bytes) % self->block_bytes != 0) {
        *++self->digest = 0;
    }
    return FSDPC_OK;
}

int
fsdpc_range_read(int fd, const char *path, const fsdpc_file_range *ranges, size_t count,
                 int64_t block_bytes, uint32_t *digests)
{
    int status = FSDPC_OK;
    reader self = {.path = path, .fd = fd, .block_bytes = block_bytes};
    const int64_t parts = fsdpc_range_digests(ranges, count, block_bytes);
    if (parts < 0) {
        return fsdpc_error(FSDPC_E_INVAL, "ranges of %s are not valid", path);
    }
    /* Room for one digest more than there are parts: the code also begins a digest after the last part. */
    uint32_t *digests_and_one = fsdpc_mem_calloc((size_t)parts + 1, sizeof *digests_and_one);
    self.own = fsdpc_mem_calloc(STEP_BYTES, 1);
    if (digests_and_one == NULL || self.own == NULL) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory to read %s", path), done);
    }
    self.digest = digests_and_one;
    FSDPC_GOTO(fsdpc_kernels_select(&self.kernels), done);
    for (size_t i = 0; i < count; i++) {
        FSDPC_GOTO(read_range(&self, &ranges[i]), done);
    }
    for (int64_t i = 0; i < parts; i++) {
        digests[i] = digests_and_one[i];
    }
done:
    fsdpc_mem_free(self.own);
    fsdpc_mem_free(digests_and_one);
    return status;
}
