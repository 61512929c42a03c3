/* What the files of csrc/disk share: a transfer, and a table for each way to run several transfers. */
#ifndef FSDPC_DISK_IMPL_H
#define FSDPC_DISK_IMPL_H

#include <time.h>

#include "disk/disk.h"

typedef struct fsdpc_disk_transfer {
    char *memory;
    int64_t bytes, offset;
    int fd, buffer;
    bool write;
    int64_t result; /* number of bytes moved, which may be less than `bytes`; or a negative errno */
    struct fsdpc_disk_transfer *next;
} fsdpc_disk_transfer;

typedef struct fsdpc_disk_way {
    const char *name;
    /* Starts a transfer. The way owns the transfer until `reap` returns the same transfer. */
    int (*submit)(void *self, fsdpc_disk_transfer *transfer);
    /* Passes the submitted transfers on to the kernel. */
    int (*flush)(void *self);
    /* Waits for a transfer to end. FSDPC_E_TIMEOUT: no transfer ends before `until` (CLOCK_MONOTONIC). */
    int (*reap)(void *self, const struct timespec *until, fsdpc_disk_transfer **out);
    void (*free)(void *self); /* call it only when no transfer is in flight */
} fsdpc_disk_way;

/* Make a way that runs at most `capacity` transfers at a time by io_uring, and a way that uses threads.
 * FSDPC_E_UNAVAILABLE: this system has no io_uring, or the kernel refuses it. */
int fsdpc_disk_ring_new(int capacity, const fsdpc_disk_way **way, void **self);
int fsdpc_disk_threads_new(const fsdpc_disk_way **way, void **self);

#endif
