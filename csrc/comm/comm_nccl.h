/* The communicator over NCCL: collectives of GPUs, enqueued on a stream.
 *
 * Kind "nccl". Collectives return when they are on the device's current stream; only agree and
 * barrier are host syncs. Sums are NCCL's, in the elements' type; a maximum or minimum may drop a
 * NaN. A watching thread polls the collectives in flight: when the oldest has not ended by the
 * deadline, or NCCL reports an error, the thread breaks the communicator with a text that names
 * collective, number and rank, and aborts NCCL's communicator, so that the stream goes on (with
 * undefined bytes: call fsdpc_comm_check() before results are used). No call waits for NCCL without
 * a deadline. Several threads may use one communicator, one at a time.
 */
#ifndef FSDPC_COMM_NCCL_H
#define FSDPC_COMM_NCCL_H

#include "comm/comm.h"

enum { FSDPC_COMM_NCCL_ID_BYTES = 128 };

typedef struct fsdpc_comm_nccl_options {
    const char *name; /* for texts: "gather"; NULL: "nccl" */
    double timeout_s; /* deadline of the start and of each collective; > 0 */
    int poll_ms;      /* between two polls of the watching thread; 0: 50 */
    bool registers;   /* try to register memory: [Note: registration]; equal on all ranks */
    /* (optional) The host's channel, for agree, barrier and small collectives on host memory: an
     * all-gather of host memory with a deadline of its own, which returns a status with its text.
     * Without this channel such collectives are staged through the GPU. */
    int (*exchange)(void *context, void *buffer, size_t piece_bytes, const char *what);
    void *context;
    void (*release)(void *context); /* (optional) called once, when the communicator is freed */
} fsdpc_comm_nccl_options;

/* The id of a new communicator: one rank makes it, for all ranks. FSDPC_E_UNAVAILABLE: no NCCL. */
int fsdpc_comm_nccl_id(char id[FSDPC_COMM_NCCL_ID_BYTES]);
/* Collective. `device` owns the memory that will be passed; if it is not asynchronous, a CUDA
 * context must be current. FSDPC_E_TIMEOUT when a rank is missing. Copies the options and the name.
 * `release` is called even on failure. */
int fsdpc_comm_nccl(fsdpc_device *device, int rank, int world,
                    const char id[FSDPC_COMM_NCCL_ID_BYTES], const fsdpc_comm_nccl_options *options,
                    fsdpc_comm **out);
/* True if the functions below accept `comm`. */
bool fsdpc_comm_is_nccl(const fsdpc_comm *comm);
/* Seconds since the oldest collective in flight of `comm` or its twin was
 * enqueued or became the oldest; 0 if none is in flight. `text` names what is in
 * flight, or the last completed collective. Local, any thread, does not wait. */
double fsdpc_comm_nccl_stall(fsdpc_comm *comm, char *text, size_t bytes);
/* Sets what is known of the other ranks, for the text of a passed deadline, on `comm` and its twin; ""
 * clears the text. Local, any thread. */
void fsdpc_comm_nccl_note_others(fsdpc_comm *comm, const char *text);
/* Writes "NCCL 2.28.3 (/path/libnccl.so.2)" into `text`. */
int fsdpc_comm_nccl_describe(char *text, size_t bytes);

#endif
