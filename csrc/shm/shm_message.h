/* Messages of the rendezvous, and the functions that send and receive them. Private to this folder.
 */
#ifndef FSDPC_SHM_MESSAGE_H
#define FSDPC_SHM_MESSAGE_H

#include "shm/shm_impl.h"

enum {
    FSDPC_SHM_BATCH = 64, /* descriptors per message */
    FSDPC_SHM_MESSAGE_TEXT = 1024,
};

enum fsdpc_shm_kind {
    FSDPC_SHM_HELLO = 1,
    FSDPC_SHM_ARRIVED,
    FSDPC_SHM_WELCOME,
    FSDPC_SHM_PIDFDS,
    FSDPC_SHM_READY,
    FSDPC_SHM_GO,
    FSDPC_SHM_FAIL,
};

typedef struct fsdpc_shm_message {
    uint64_t magic;
    uint32_t version, control_bytes;
    uint32_t kind;
    int32_t status;                             /* in FAIL */
    int32_t rank, world;                        /* in HELLO */
    int32_t pid;                                /* in HELLO */
    uint32_t first;                             /* in PIDFDS: rank of the first pidfd */
    uint32_t watch_sockets;                     /* in WELCOME: 1 if no pidfds will follow */
    uint64_t arrived[FSDPC_SHM_MAX_RANKS / 64]; /* in ARRIVED: a bitmap of ranks */
    char text[FSDPC_SHM_MESSAGE_TEXT];          /* in FAIL */
} fsdpc_shm_message;

typedef struct fsdpc_shm_descriptors {
    int count;
    int fds[FSDPC_SHM_BATCH];
    bool lost; /* true if more descriptors were sent than this process may open */
} fsdpc_shm_descriptors;

/* Returns a new socket of the kind that both sides use (close-on-exec, non-blocking); -1 with errno set. */
int fsdpc_shm_socket(void);
fsdpc_shm_message fsdpc_shm_message_new(enum fsdpc_shm_kind kind);
/* Sends `text` and `count` descriptors without waiting. Returns 0 or an errno. */
int fsdpc_shm_message_try(int socket, const fsdpc_shm_message *text, const int *fds, int count);
/* Sends like fsdpc_shm_message_try, but waits for room in the socket until the deadline. Returns a status. */
int fsdpc_shm_message_send(int socket, const char *peer, const fsdpc_shm_message *text,
                           const int *fds, int count, int64_t deadline_ns);
/* Sends a failure, without waiting. A peer that does not get the message sees the connection end. */
void fsdpc_shm_message_fail(int socket, int status, const char *text);
/* Returns 0; EAGAIN if there is no message yet; EPIPE if the connection has ended; EPROTO if the bytes are
 * not a message of fsdpc; or another errno. The caller closes the descriptors. */
int fsdpc_shm_message_receive(int socket, fsdpc_shm_message *text, fsdpc_shm_descriptors *passed);
void fsdpc_shm_descriptors_close(fsdpc_shm_descriptors *passed);

/* Sets *address to the abstract socket address of the group `name`, and *bytes to the address's length. */
struct sockaddr_un;
int fsdpc_shm_address(const char *name, struct sockaddr_un *address, unsigned *bytes);
/* True if the process at the other end runs as this process's user. */
bool fsdpc_shm_same_user(int socket);
/* Returns a pidfd of this process, or -1. */
int fsdpc_shm_own_pidfd(void);
/* Closes *fd if it is open, and sets *fd to -1. */
void fsdpc_shm_close(int *fd);
/* Returns for how many milliseconds to poll: the time until the deadline, but at most one slice. */
int fsdpc_shm_slice_ms(int64_t deadline_ns);
/* Sets an error text that names the missing ranks, and returns FSDPC_E_TIMEOUT. */
int fsdpc_shm_late_rendezvous(const fsdpc_shm *shm, const int *missing, int count);
/* Sets and returns the error of a connection to `peer` (for example "rank 0"): FSDPC_E_PEER if the connection
 * has ended, FSDPC_E_MISMATCH after bytes of another protocol, else the error of `errnum`. */
int fsdpc_shm_connection_error(int errnum, const char *peer);
/* Calls fsdpc_shm_late_rendezvous for the ranks whose bit in `arrived` is 0. */
int fsdpc_shm_missing_error(const fsdpc_shm *shm, const uint64_t *arrived);

/* Rank 0's side of fsdpc_shm_rendezvous and fsdpc_shm_confirm (shm_host.c). */
int fsdpc_shm_host_rendezvous(fsdpc_shm *shm, int64_t deadline_ns);
int fsdpc_shm_host_confirm(fsdpc_shm *shm, int status, int64_t deadline_ns);

extern const fsdpc_wait fsdpc_shm_rendezvous_wait;

#endif
