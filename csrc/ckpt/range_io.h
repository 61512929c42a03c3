/* Reads and writes of ranges of files, which also compute digests of the ranges.
 *
 * A range is a run of bytes of one tensor that lies at one place of a file and at one place in memory. A
 * digest is the CRC-32C of bytes in the file. A tensor is cut into blocks at multiples of `block_bytes` from
 * its beginning, and each part of a range within one block has a digest. So the digests of parts that several
 * ranks write can be combined to the digests of blocks and tensors.
 */
#ifndef FSDPC_RANGE_IO_H
#define FSDPC_RANGE_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

typedef struct fsdpc_file_range {
    /* The values. fsdpc_range_write does not change them. NULL: fsdpc_range_read only computes digests. */
    void *memory;
    int64_t file_offset;
    int64_t bytes;         /* in the file */
    int64_t tensor_offset; /* bytes of the tensor before this range */
    /* If the types are equal, bytes are copied; else both are floats and the range has whole elements. */
    fsdpc_dtype memory_type, file_type;
} fsdpc_file_range;

typedef struct fsdpc_write_options {
    int64_t block_bytes;
    bool direct; /* write past the page cache if the file system supports this */
    /* Do not write the partial pages at the two ends of each run of adjoining ranges. */
    bool skip_edges;
    bool no_sync; /* return before the bytes are durable */
} fsdpc_write_options;

typedef struct fsdpc_write_result {
    int64_t direct_bytes, cached_bytes;
} fsdpc_write_result;

enum { FSDPC_IO_PAGE = 4096, FSDPC_IO_CHUNK = 4 << 20 };

/* Returns the number of digests of these ranges, or -1 if block_bytes is not positive or a range is not
 * valid. A valid range has known types and no negative numbers. If its two types differ, both must be floats
 * and the range must have whole elements. */
int64_t fsdpc_range_digests(const fsdpc_file_range *ranges, size_t count, int64_t block_bytes);

/* Writes ranges, which are sorted by file_offset and do not overlap, into an existing regular file and
 * waits until all of the file is durable (fdatasync), unless no_sync is set. `digests` has room for
 * fsdpc_range_digests values. The call uses three chunks of FSDPC_IO_CHUNK bytes, about one MiB more, and two
 * helper threads. Fails with FSDPC_E_IO, FSDPC_E_NOMEM or FSDPC_E_INVAL and a text that names the file. After
 * an error, the content of the ranges in the file is undefined. */
int fsdpc_range_write(const char *path, const fsdpc_file_range *ranges, size_t count,
                      const fsdpc_write_options *options, uint32_t *digests,
                      fsdpc_write_result *result);

/* Reads ranges, which may be in any order, of the open file `fd`; error texts call the file `path`. Fails
 * with FSDPC_E_IO also if the file ends early. */
int fsdpc_range_read(int fd, const char *path, const fsdpc_file_range *ranges, size_t count,
                     int64_t block_bytes, uint32_t *digests);

/* Renames `from` to the free name `to` in one step, or swaps the two names if `exchange`. Fails with
 * FSDPC_E_IO (EEXIST if `to` is taken), or with FSDPC_E_UNAVAILABLE if this file system cannot swap names. */
int fsdpc_file_rename(const char *from, const char *to, bool exchange);

/* Opens a regular file; a symbolic link at the end of `path` is not followed. The caller closes *fd. */
int fsdpc_file_open(const char *path, int flags, int *fd);
/* Returns FSDPC_E_IO, also for a full disk, with a text such as "reading FILE at byte 4096: reason". With a
 * negative offset the text names no byte. */
int fsdpc_file_error(int errnum, const char *doing, const char *path, int64_t offset);

#endif
