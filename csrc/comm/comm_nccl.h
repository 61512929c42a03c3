/* The communicator over NCCL: collectives of GPUs, enqueued on a stream.
 *
 * Kind "nccl". Collectives return when they are enqueued on the device's current stream; only
 * agree and barrier are host syncs. NCCL sums in the elements' type; a maximum or minimum may drop
 * a NaN. A watching thread polls the collectives in flight. When the oldest one has not ended by
 * the deadline, or NCCL reports an error, the thread breaks the communicator with a text that
 * names the collective, its number and the rank. The thread also aborts NCCL's communicator, so
 * that the stream goes on with undefined bytes: call fsdpc_comm_check() before results are used.
 * Every wait for NCCL has a deadline. Several threads may use one communicator, one at a time.
 */
#ifndef FSDPC_COMM_NCCL_H
#define FSDPC_COMM_NCCL_H

#include "comm/comm.h"

enum { FSDPC_COMM_NCCL_ID_BYTES = 128 };

typedef struct fsdpc_comm_nccl_options {
    const char *name; /* the communicator's name in error texts, e.g. "gather"; NULL: "nccl" */
    double timeout_s; /* deadline of the start and of each collective; > 0 */
    int poll_ms;      /* milliseconds between two polls of the watching thread; 0: 50 */
    bool registers;   /* try to register memory: [Note: registration]; equal on all ranks */
    /* Optional: the host's channel, an all-gather of host memory with a deadline of its own, for
     * agree, barrier and small collectives on host memory. Returns a status; on failure the
     * error text is set. Without this channel such collectives are staged through the GPU. */
    int (*exchange)(void *context, void *buffer, size_t piece_bytes, const char *what);
    void *context;
    void (*release)(void *context); /* (optional) called once, when the communicator is freed */
} fsdpc_comm_nccl_options;

/* Makes the id of a new communicator, on one rank for all ranks. FSDPC_E_UNAVAILABLE: no usable NCCL. */
int fsdpc_comm_nccl_id(char id[FSDPC_COMM_NCCL_ID_BYTES]);
/* Makes a communicator whose collectives use buffers of `device`. Collective. If `device` is
 * not asynchronous, a CUDA context must be current. Fails with FSDPC_E_TIMEOUT if a rank
 * is missing. Copies the options and the name. `release` is called even on failure. */
int fsdpc_comm_nccl(fsdpc_device *device, int rank, int world,
                    const char id[FSDPC_COMM_NCCL_ID_BYTES], const fsdpc_comm_nccl_options *options,
                    fsdpc_comm **out);
/* True if the functions below accept `comm`. */
bool fsdpc_comm_is_nccl(const fsdpc_comm *comm);
/* Returns for how many seconds the oldest collective in flight has been the oldest, on `comm` or on
 * its twin, whichever is longer; 0 if none is in flight. `text` names the oldest collectives in
 * flight, or the last completed one. Does not wait. Local; any thread may call it. */
double fsdpc_comm_nccl_stall(fsdpc_comm *comm, char *text, size_t bytes);
/* Gives `comm` and its twin a text about the other ranks. The error of a passed deadline
 * includes the text; "" removes the text. Local; any thread may call it. */
void fsdpc_comm_nccl_note_others(fsdpc_comm *comm, const char *text);
/* Writes "NCCL 2.28.3 (/path/libnccl.so.2)" into `text`. */
int fsdpc_comm_nccl_describe(char *text, size_t bytes);

#endif
