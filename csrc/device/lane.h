/* A lane: a stream of its own that copies between the device's memory and pinned host memory.
 *
 * The host queues work and does not wait. Four steps order a copy: `begin` makes the lane wait for the
 * caller's current stream; `out` and `in` queue copies; `mark` gives a number to all copies queued so
 * far; `join` makes the caller's current stream wait for a mark, and `finish` makes the host wait.
 * Copies of one lane run one after the other, so a pinned buffer needs no wait between two copies.
 *
 * On a device that does not queue, all work is done when a call returns. Calls on one
 * lane must not overlap, except finish, which may run at the same time as other calls.
 */
#ifndef FSDPC_LANE_H
#define FSDPC_LANE_H

#include "device/device.h"

typedef struct fsdpc_lane fsdpc_lane;

typedef struct fsdpc_lane_counts {
    int64_t copies_out, copies_in, bytes_out, bytes_in;
    int64_t begins; /* how often the lane was made to wait for the caller's stream */
    int64_t marks;
    int64_t joins;    /* how often the caller's stream was made to wait for the lane */
    int64_t finishes; /* how often the host has waited for the lane */
} fsdpc_lane_counts;

/* FSDPC_E_NOMEM. */
int fsdpc_lane_new(fsdpc_device *device, fsdpc_lane **out);
/* The caller must first have joined or finished all copies that it queued. `lane` may be NULL. */
void fsdpc_lane_free(fsdpc_lane *lane);
fsdpc_device *fsdpc_lane_device(const fsdpc_lane *lane);

/* Makes later copies wait for all work that has been queued on the caller's current stream so far.
 * Fails with FSDPC_E_STATE if that stream is being captured into a graph. */
int fsdpc_lane_begin(fsdpc_lane *lane);
/* Queue a copy to `host` (out) or from `host` (in), which is pinned memory. The caller must not change source
 * or destination until the copy is done. */
int fsdpc_lane_out(fsdpc_lane *lane, void *host, const void *src, size_t bytes);
int fsdpc_lane_in(fsdpc_lane *lane, void *dst, const void *host, size_t bytes);
/* Sets *mark to a number that stands for all copies queued so far. Marks rise from 1 on. */
int fsdpc_lane_mark(fsdpc_lane *lane, int64_t *mark);
/* Makes the caller's current stream wait for the mark, without a call of the driver if that stream or
 * the host has already waited for this mark or a later one. FSDPC_E_INVAL: the mark does not exist. */
int fsdpc_lane_join(fsdpc_lane *lane, int64_t mark);
/* Makes the host wait for the mark. FSDPC_E_TIMEOUT, naming `what`, after the process's deadline. */
int fsdpc_lane_finish(fsdpc_lane *lane, int64_t mark, const char *what);
void fsdpc_lane_count(const fsdpc_lane *lane, fsdpc_lane_counts *out);

#endif
