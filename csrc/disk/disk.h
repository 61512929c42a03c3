/* A file on a disk that holds optimizer states. Parts of the file are moved to and from a few buffers in
 * memory.
 *
 * The file has no name: the kernel frees its space when the last descriptor is closed, however the
 * process ends. Transfers bypass the page cache where the file system allows that (O_DIRECT). Several
 * transfers are in flight at a time, by io_uring, or by threads where the kernel refuses io_uring.
 *
 * One thread at a time may call these functions, in the process that opened the file. The caller must
 * not use the part of a buffer that has a transfer in flight until fsdpc_disk_wait has returned.
 */
#ifndef FSDPC_DISK_H
#define FSDPC_DISK_H

#include <stdbool.h>
#include <stdint.h>

enum { FSDPC_DISK_PAGE = 4096, FSDPC_DISK_MAX_BUFFERS = 8 };

typedef enum fsdpc_disk_io { FSDPC_DISK_AUTO, FSDPC_DISK_RING, FSDPC_DISK_THREADS } fsdpc_disk_io;

typedef struct fsdpc_disk_options {
    const char *folder; /* the folder in which the file is created */
    int rank;           /* for error texts */
    void *const *buffers;
    int buffer_count;
    /* Size of each buffer. The sizes and the addresses of buffers are multiples of FSDPC_DISK_PAGE. */
    int64_t buffer_bytes;
    fsdpc_disk_io io;
    bool direct; /* true: transfers bypass the page cache if the file system allows that */
} fsdpc_disk_options;

/* A part of the file in whole pages: `bytes` bytes at `offset`, and their offset `place` in a buffer. */
typedef struct fsdpc_disk_part {
    int64_t offset, bytes, place;
} fsdpc_disk_part;

typedef struct fsdpc_disk_info {
    int fd; /* descriptor of the file, which fsdpc_disk_close closes */
    const char *io;
    bool direct;
    bool in_memory; /* true: the file system of the folder keeps its files in memory */
    int64_t bytes, read_bytes, written_bytes;
} fsdpc_disk_info;

typedef struct fsdpc_disk fsdpc_disk;

/* Makes an empty file; fsdpc_disk_close closes it, and the caller keeps the buffers until then. Fails with
 * FSDPC_E_IO or FSDPC_E_NOMEM, or with FSDPC_E_UNAVAILABLE if io_uring was requested and is refused. */
int fsdpc_disk_open(const fsdpc_disk_options *options, fsdpc_disk **out);
/* Makes the file `bytes` long and reserves space for all of it; new bytes are zero. If the space cannot be
 * reserved, fails with FSDPC_E_IO and a text with the bytes needed and free; the file keeps its length. */
int fsdpc_disk_grow(fsdpc_disk *disk, int64_t bytes);
/* Starts transfers between parts of the file and a buffer that has no
 * transfer in flight. fsdpc_disk_wait returns the errors of the transfers. */
int fsdpc_disk_start(fsdpc_disk *disk, bool write, int buffer, const fsdpc_disk_part *parts,
                     int count);
/* Waits until a buffer has no transfer in flight, and returns the first error of its transfers.
 * Fails with FSDPC_E_TIMEOUT after the process's deadline; the buffer then stays busy. */
int fsdpc_disk_wait(fsdpc_disk *disk, int buffer);
void fsdpc_disk_describe(const fsdpc_disk *disk, fsdpc_disk_info *out);
/* Waits for transfers in flight and closes the file. Returns false if a transfer does not end
 * before the deadline: the buffers must then stay for the life of the process. NULL is allowed. */
bool fsdpc_disk_close(fsdpc_disk *disk);

#endif
