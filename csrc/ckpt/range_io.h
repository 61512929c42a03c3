/* Ranges of files to and from memory, with digests on the way.
 *
 * A range is a run of bytes of one tensor that lies at one place of a file and at one place in
 * memory. Digests are CRC-32C of the bytes in the file, one per part of a range that lies in one
 * block of its tensor: blocks are cut at multiples of `block_bytes` from the tensor's begin, so that
 * parts of several ranks combine to the digests of blocks and tensors.
 */
#ifndef FSDPC_RANGE_IO_H
#define FSDPC_RANGE_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

typedef struct fsdpc_file_range {
    void *memory; /* not written when the file is; reading: NULL only computes digests */
    int64_t file_offset;
    int64_t bytes;         /* in the file */
    int64_t tensor_offset; /* bytes of the tensor before this range */
    /* Equal types: bytes are copied. Else both are floats, and the range holds whole elements. */
    fsdpc_dtype memory_type, file_type;
} fsdpc_file_range;

typedef struct fsdpc_write_options {
    int64_t block_bytes;
    bool direct; /* past the page cache, where the file system can */
    bool
        skip_edges; /* do not write the partial pages at the two ends of each run of adjoining ranges */
    bool no_sync; /* return before the bytes are durable */
} fsdpc_write_options;

typedef struct fsdpc_write_result {
    int64_t direct_bytes, cached_bytes;
} fsdpc_write_result;

enum { FSDPC_IO_PAGE = 4096, FSDPC_IO_CHUNK = 4 << 20 };

/* Number of digests of these ranges; -1 if they are not valid: a negative number, an unknown type,
 * a range with a cast that does not hold whole elements. */
int64_t fsdpc_range_digests(const fsdpc_file_range *ranges, size_t count, int64_t block_bytes);

/* Writes ranges, which are sorted by file_offset and do not overlap, into an existing regular file and
 * waits until all of the file is durable (fdatasync). `digests` has room for fsdpc_range_digests
 * values. Takes, while it runs, three chunks of FSDPC_IO_CHUNK bytes, one MiB more and two helper
 * threads. Errors name the file: FSDPC_E_IO, FSDPC_E_NOMEM, FSDPC_E_INVAL. After an error the ranges of
 * the file are undefined. */
int fsdpc_range_write(const char *path, const fsdpc_file_range *ranges, size_t count,
                      const fsdpc_write_options *options, uint32_t *digests,
                      fsdpc_write_result *result);

/* Reads ranges, in any order, of the open file `fd`, which errors call `path`. FSDPC_E_IO also where
 * the file ends early. */
int fsdpc_range_read(int fd, const char *path, const fsdpc_file_range *ranges, size_t count,
                     int64_t block_bytes, uint32_t *digests);

/* Renames in one step, onto a name that is free; with `exchange` the two swap their names.
 * FSDPC_E_IO (EEXIST: the name is taken); FSDPC_E_UNAVAILABLE: this file system cannot swap. */
int fsdpc_file_rename(const char *from, const char *to, bool exchange);

/* Opens a regular file; a symbolic link at the end of `path` is not followed. The caller closes *fd. */
int fsdpc_file_open(const char *path, int flags, int *fd);
/* FSDPC_E_IO with errno, also for a full disk: "reading FILE at byte 4096: reason". With offset -1 the text
 * names no byte. */
int fsdpc_file_error(int errnum, const char *doing, const char *path, int64_t offset);

#endif
