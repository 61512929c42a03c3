/* What the files of csrc/disk share: one transfer, and the two ways to have several on their way. */
#ifndef FSDPC_DISK_IMPL_H
#define FSDPC_DISK_IMPL_H

#include <time.h>

#include "disk/disk.h"

typedef struct fsdpc_disk_transfer {
    char *memory;
    int64_t bytes, offset;
    int fd, buffer;
    bool write;
    int64_t result; /* bytes, or a negative errno; short results are allowed */
    struct fsdpc_disk_transfer *next;
} fsdpc_disk_transfer;

typedef struct fsdpc_disk_way {
    const char *name;
    /* Starts a transfer. The way owns the transfer until `reap` returns the same transfer. */
    int (*submit)(void *self, fsdpc_disk_transfer *transfer);
    /* Passes what was submitted on to the kernel. */
    int (*flush)(void *self);
    /* Waits for a transfer to end. FSDPC_E_TIMEOUT: none ends before `until` (CLOCK_MONOTONIC). */
    int (*reap)(void *self, const struct timespec *until, fsdpc_disk_transfer **out);
    void (*free)(void *self); /* no transfer may be on its way */
} fsdpc_disk_way;

/* At most `capacity` transfers at a time. E_UNAVAILABLE if the kernel has no io_uring or refuses it. */
int fsdpc_disk_ring_new(int capacity, const fsdpc_disk_way **way, void **self);
int fsdpc_disk_threads_new(const fsdpc_disk_way **way, void **self);

#endif
