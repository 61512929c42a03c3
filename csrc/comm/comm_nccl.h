/* The communicator over NCCL: collectives of GPUs, put on a stream.
 *
 * Kind "nccl". Collectives return when they are on the stream; all but agree and barrier leave the
 * host free. Sums are NCCL's, in the elements' type; a maximum or minimum may drop a NaN. A thread
 * of its own looks after what is on its way: when the oldest collective has not ended by the
 * deadline, or NCCL reports an error, it marks the communicator broken with a text that names the
 * collective, its number and the rank, and aborts NCCL's side, so that the stream goes on (with
 * undefined bytes: check fsdpc_comm_check() before results are used). No call ever waits for NCCL
 * without a deadline. One communicator may be used by several threads, one at a time.
 */
#ifndef FSDPC_COMM_NCCL_H
#define FSDPC_COMM_NCCL_H

#include "comm/comm.h"

enum { FSDPC_COMM_NCCL_ID_BYTES = 128 };

typedef struct fsdpc_comm_nccl_options {
    const char *name; /* for texts: "gather"; NULL: "nccl" */
    double timeout_s; /* of the start and of each collective; > 0 */
    int poll_ms;      /* of the watching thread; 0: 50 */
    bool
        registers; /* fsdpc_comm_register is of use: see [Note: registration]; alike on all ranks */
    void *stream;  /* of the collectives; NULL: the device's current stream at each call */
    /* (optional) The host's own channel, used by agree, barrier and small collectives on host memory:
     * an all-gather of bytes in host memory, with a deadline of its own; a status with its text.
     * Without it they go over the GPU. */
    int (*exchange)(void *context, void *buffer, size_t piece_bytes, const char *what);
    void *context;
    void (*release)(void *context); /* (optional) called once, when the communicator is freed */
} fsdpc_comm_nccl_options;

/* On one rank; its bytes are then given to the others. FSDPC_E_UNAVAILABLE without NCCL. */
int fsdpc_comm_nccl_id(char id[FSDPC_COMM_NCCL_ID_BYTES]);
/* Collective. The device is the one whose memory will be passed; on one that
 * does not queue a CUDA context must be current.
 * FSDPC_E_TIMEOUT when not all ranks come. Copies the options but for name's characters, which it
 * copies, too. `release` is called even if this fails. */
int fsdpc_comm_nccl(fsdpc_device *device, int rank, int world,
                    const char id[FSDPC_COMM_NCCL_ID_BYTES], const fsdpc_comm_nccl_options *options,
                    fsdpc_comm **out);
/* Local. Later collectives go on this CUDA stream; NULL: on the device's current one. */
void fsdpc_comm_nccl_set_stream(fsdpc_comm *comm, void *stream);
/* Local: the host waits until all that was put on streams has ended, by queries. The failure, if
 * there is one. */
int fsdpc_comm_nccl_wait(fsdpc_comm *comm);
/* For how many seconds the oldest collective of a communicator of this kind or its twin has been on its
 * way, 0 where none is; `text`: which, or after which this rank is. Local, any thread, nothing waits. */
double fsdpc_comm_nccl_stall(fsdpc_comm *comm, char *text, size_t bytes);
/* What is known of the other ranks: said when a deadline passes. Local, any thread; "" takes it back. */
void fsdpc_comm_nccl_note_others(fsdpc_comm *comm, const char *text);
/* "NCCL 2.28.3 (/path/libnccl.so.2)" into `text`. */
int fsdpc_comm_nccl_describe(char *text, size_t bytes);

#endif
