/* A file of states on a disk, whose parts move to and from a few buffers in memory.
 *
 * The file has no name: the kernel frees its space with the last descriptor, however the process
 * ends. Transfers pass by the page cache where the file system allows that (O_DIRECT), and several
 * are on their way at a time: by io_uring, or by threads where the kernel refuses it.
 *
 * One thread at a time may call these functions, in the process that opened the file. Parts of
 * buffers with a transfer on its way belong to the transfer until fsdpc_disk_wait has returned.
 */
#ifndef FSDPC_DISK_H
#define FSDPC_DISK_H

#include <stdbool.h>
#include <stdint.h>

enum { FSDPC_DISK_PAGE = 4096, FSDPC_DISK_MAX_BUFFERS = 8 };

typedef enum fsdpc_disk_io { FSDPC_DISK_AUTO, FSDPC_DISK_RING, FSDPC_DISK_THREADS } fsdpc_disk_io;

typedef struct fsdpc_disk_options {
    const char *folder; /* a folder of the file system that holds the file */
    int rank;           /* for error texts */
    void *const *buffers;
    int buffer_count;
    int64_t buffer_bytes; /* of each buffer; addresses and bytes are multiples of FSDPC_DISK_PAGE */
    fsdpc_disk_io io;
    bool direct; /* past the page cache, where the file system can */
} fsdpc_disk_options;

/* Whole pages: `bytes` bytes at `offset` of the file, and their place in a buffer. */
typedef struct fsdpc_disk_part {
    int64_t offset, bytes, place;
} fsdpc_disk_part;

typedef struct fsdpc_disk_info {
    int fd; /* owned by the disk */
    const char *io;
    bool direct;
    bool in_memory; /* the folder lies in a file system that keeps files in memory */
    int64_t bytes, read_bytes, written_bytes;
} fsdpc_disk_info;

typedef struct fsdpc_disk fsdpc_disk;

/* Makes an empty file; the caller closes it with fsdpc_disk_close and keeps the buffers until then. E_IO,
 * E_NOMEM; E_UNAVAILABLE: io_uring was requested and the kernel refuses it. */
int fsdpc_disk_open(const fsdpc_disk_options *options, fsdpc_disk **out);
/* Makes the file `bytes` long and reserves space for all of it; new bytes are zero. E_IO, whose text has the
 * bytes that are needed and free: the file keeps its length then. */
int fsdpc_disk_grow(fsdpc_disk *disk, int64_t bytes);
/* Starts transfers between a buffer that has none on its way and parts of the file. An error of a
 * transfer comes from fsdpc_disk_wait. */
int fsdpc_disk_start(fsdpc_disk *disk, bool write, int buffer, const fsdpc_disk_part *parts,
                     int count);
/* Waits until a buffer has no transfer on its way; returns the first error of its transfers. E_TIMEOUT after
 * the process's deadline: the buffer stays busy then. */
int fsdpc_disk_wait(fsdpc_disk *disk, int buffer);
void fsdpc_disk_describe(const fsdpc_disk *disk, fsdpc_disk_info *out);
/* Waits for transfers on their way. False if one does not end before the deadline: the buffers must
 * then stay for the life of the process. NULL is allowed. */
bool fsdpc_disk_close(fsdpc_disk *disk);

#endif
