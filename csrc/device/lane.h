/* A lane: a stream beside the caller's that copies between the device's memory and pinned host memory.
 *
 * The host queues and does not wait. Four steps order a copy: `begin` puts the lane behind the caller's
 * current stream; `out` and `in` queue copies; `mark` numbers all that is queued so far; `join` puts the
 * caller's current stream behind a mark, `finish` the host. Copies of one lane run one after the other, so
 * a pinned buffer needs no wait between two of them.
 *
 * On a device that does not queue, all is done when a call returns. Calls on one lane must not overlap,
 * except finish, which may run beside the others.
 */
#ifndef FSDPC_LANE_H
#define FSDPC_LANE_H

#include "device/device.h"

typedef struct fsdpc_lane fsdpc_lane;

typedef struct fsdpc_lane_counts {
    int64_t copies_out, copies_in, bytes_out, bytes_in;
    int64_t begins; /* waits of the lane for the caller's stream */
    int64_t marks;
    int64_t joins;    /* waits of the caller's stream for the lane */
    int64_t finishes; /* waits of the host for the lane */
} fsdpc_lane_counts;

/* FSDPC_E_NOMEM. */
int fsdpc_lane_new(fsdpc_device *device, fsdpc_lane **out);
/* NULL is allowed. The caller has joined or finished what it queued. */
void fsdpc_lane_free(fsdpc_lane *lane);
fsdpc_device *fsdpc_lane_device(const fsdpc_lane *lane);

/* Later copies come behind all work of the caller's current stream so far. FSDPC_E_STATE: that stream is
 * captured into a graph. */
int fsdpc_lane_begin(fsdpc_lane *lane);
/* `host` is pinned memory. The caller leaves source and destination as they are until the copy is done. */
int fsdpc_lane_out(fsdpc_lane *lane, void *host, const void *src, size_t bytes);
int fsdpc_lane_in(fsdpc_lane *lane, void *dst, const void *host, size_t bytes);
/* *mark: stands for all copies so far; marks rise from 1 on. */
int fsdpc_lane_mark(fsdpc_lane *lane, int64_t *mark);
/* The caller's current stream waits for the mark; without a call of the driver if that stream or the host has
 * waited for this mark or a later one already. FSDPC_E_INVAL: no such mark. */
int fsdpc_lane_join(fsdpc_lane *lane, int64_t mark);
/* The host waits for the mark. FSDPC_E_TIMEOUT, naming `what`, after the process's deadline. */
int fsdpc_lane_finish(fsdpc_lane *lane, int64_t mark, const char *what);
void fsdpc_lane_count(const fsdpc_lane *lane, fsdpc_lane_counts *out);

#endif
