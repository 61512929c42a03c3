/* The rendezvous of the ranks over an abstract UNIX socket, which leaves nothing in the file
 * system.
 *
 *     rank 0                                  rank r
 *     listen "\0fsdpc." name                  connect, again and again until the deadline
 *                            <- hello ------- rank, world, version, own pidfd
 *     --- arrived (bitmap) ->                 so that all can name the missing ranks
 *     --- welcome (memfd) -->                 when all ranks are connected
 *     --- pidfds ----------->
 *                            <- ready ------- set up, or the error
 *     --- go --------------->                 when all ranks are ready
 *
 * Either side may send `fail` with a status and a text at any time; a closed connection means that the
 * process has died. Each process makes and sends a pidfd of itself, so that a reused pid cannot be mistaken
 * for the rank. If one rank cannot make a pidfd, no rank uses pidfds: the connections stay open, and the
 * watcher takes the end of a connection as the death of a rank.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm/shm_message.h"
#include "base/status.h"

enum { RETRY_MS = 10 };

/* --- the other ranks ------------------------------------------------------------------------ */

typedef struct guest {
    fsdpc_shm *shm;
    int64_t deadline_ns;
    uint64_t arrived[FSDPC_SHM_MAX_RANKS / 64];
} guest;

static int
connect_host(guest *self)
{
    fsdpc_shm *shm = self->shm;
    struct sockaddr_un address;
    unsigned bytes;
    FSDPC_TRY(fsdpc_shm_address(shm->name, &address, &bytes));
    int caller = fsdpc_shm_socket();
    if (caller < 0) {
        return fsdpc_error_errno(errno, "socket");
    }
    shm->peers[0].socket = caller;
    while (connect(caller, (struct sockaddr *)&address, bytes) != 0) {
        if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
            return fsdpc_error_errno(errno, "connecting to rank 0 as \"%s\"", shm->name);
        }
        if (fsdpc_shm_now_ns() >= self->deadline_ns) {
            const int host = 0;
            return fsdpc_shm_late_rendezvous(shm, &host, 1);
        }
        FSDPC_TRY(fsdpc_shm_interrupted(&fsdpc_shm_rendezvous_wait));
        poll(NULL, 0, RETRY_MS);
    }
    if (!fsdpc_shm_same_user(caller)) {
        return fsdpc_error(FSDPC_E_MISMATCH, "rank 0 of group \"%s\" belongs to another user",
                           shm->name);
    }
    return FSDPC_OK;
}

static int
send_hello(guest *self)
{
    fsdpc_shm *shm = self->shm;
    fsdpc_shm_message hello = fsdpc_shm_message_new(FSDPC_SHM_HELLO);
    hello.rank = shm->rank;
    hello.world = shm->world;
    hello.pid = (int32_t)getpid();
    int pidfd = fsdpc_shm_own_pidfd();
    int status = fsdpc_shm_message_send(shm->peers[0].socket, "rank 0", &hello, &pidfd,
                                        pidfd >= 0 ? 1 : 0, self->deadline_ns);
    fsdpc_shm_close(&pidfd);
    return status;
}

/* Receives the next message that is not ARRIVED; a message ARRIVED only updates the bitmap. */
static int
receive_from_host(guest *self, fsdpc_shm_message *got, fsdpc_shm_descriptors *passed)
{
    int socket = self->shm->peers[0].socket;
    for (;;) {
        int rc = fsdpc_shm_message_receive(socket, got, passed);
        if (rc == 0 && got->kind == FSDPC_SHM_ARRIVED) {
            memcpy(self->arrived, got->arrived, sizeof self->arrived);
            fsdpc_shm_descriptors_close(passed);
            continue;
        }
        if (rc == 0 && got->kind == FSDPC_SHM_FAIL) {
            fsdpc_shm_descriptors_close(passed);
            return fsdpc_error(got->status < 0 ? got->status : FSDPC_E_PEER, "%s", got->text);
        }
        if (rc != EAGAIN) {
            return rc == 0 ? FSDPC_OK : fsdpc_shm_connection_error(rc, "rank 0");
        }
        if (fsdpc_shm_now_ns() >= self->deadline_ns) {
            return fsdpc_shm_missing_error(self->shm, self->arrived);
        }
        struct pollfd wait = {.fd = socket, .events = POLLIN};
        poll(&wait, 1, fsdpc_shm_slice_ms(self->deadline_ns));
        FSDPC_TRY(fsdpc_shm_interrupted(&fsdpc_shm_rendezvous_wait));
    }
}

static int
unexpected(fsdpc_shm_descriptors *passed)
{
    fsdpc_shm_descriptors_close(passed);
    if (passed->lost) {
        return fsdpc_error_errno(EMFILE, "the rendezvous: taking over descriptors from rank 0");
    }
    return fsdpc_error(FSDPC_E_INTERNAL, "the rendezvous: rank 0 sent an unexpected message");
}

static int
take_pidfds(guest *self)
{
    fsdpc_shm *shm = self->shm;
    fsdpc_shm_message got;
    fsdpc_shm_descriptors passed;
    for (int first = 0; first < shm->world; first += FSDPC_SHM_BATCH) {
        FSDPC_TRY(receive_from_host(self, &got, &passed));
        int expected = shm->world - first < FSDPC_SHM_BATCH ? shm->world - first : FSDPC_SHM_BATCH;
        if (got.kind != FSDPC_SHM_PIDFDS || got.first != (uint32_t)first ||
            passed.count != expected) {
            return unexpected(&passed);
        }
        for (int i = 0; i < passed.count; i++) {
            shm->peers[first + i].pidfd = passed.fds[i];
        }
    }
    return FSDPC_OK;
}

static int
take_welcome(guest *self)
{
    fsdpc_shm *shm = self->shm;
    fsdpc_shm_message got;
    fsdpc_shm_descriptors passed;
    FSDPC_TRY(receive_from_host(self, &got, &passed));
    if (got.kind != FSDPC_SHM_WELCOME || passed.count != 1) {
        return unexpected(&passed);
    }
    shm->fd = passed.fds[0];
    shm->watch_sockets = got.watch_sockets != 0;
    return shm->watch_sockets ? FSDPC_OK : take_pidfds(self);
}

static int
guest_failed(const fsdpc_shm *shm, int status)
{
    if (shm->peers[0].socket >= 0) {
        fsdpc_shm_message_fail(shm->peers[0].socket, status, fsdpc_error_text());
    }
    return status;
}

static int
guest_rendezvous(fsdpc_shm *shm, int64_t deadline_ns)
{
    guest self = {.shm = shm, .deadline_ns = deadline_ns};
    int status = FSDPC_OK;
    self.arrived[0] = 1;
    self.arrived[shm->rank / 64] |= (uint64_t)1 << (shm->rank % 64);
    FSDPC_GOTO(connect_host(&self), end);
    FSDPC_GOTO(send_hello(&self), end);
    FSDPC_GOTO(take_welcome(&self), end);
end:
    return status == FSDPC_OK ? FSDPC_OK : guest_failed(shm, status);
}

static int
send_ready(guest *self)
{
    const int socket = self->shm->peers[0].socket;
    fsdpc_shm_message ready = fsdpc_shm_message_new(FSDPC_SHM_READY), got;
    fsdpc_shm_descriptors passed;
    int status = fsdpc_shm_message_send(socket, "rank 0", &ready, NULL, 0, self->deadline_ns);
    if (status != FSDPC_E_PEER) {
        return status;
    }
    /* Rank 0 may have sent the reason before it closed the connection. */
    status = receive_from_host(self, &got, &passed);
    return status == FSDPC_OK ? unexpected(&passed) : status;
}

static int
guest_confirm(fsdpc_shm *shm, int own_status, int64_t deadline_ns)
{
    guest self = {.shm = shm, .deadline_ns = deadline_ns};
    fsdpc_shm_message got;
    fsdpc_shm_descriptors passed;
    memset(self.arrived, 0xff, sizeof self.arrived);
    int status = own_status;
    FSDPC_GOTO(own_status, end);
    FSDPC_GOTO(send_ready(&self), end);
    FSDPC_GOTO(receive_from_host(&self, &got, &passed), end);
    if (got.kind != FSDPC_SHM_GO) {
        status = unexpected(&passed);
    }
end:
    return status == FSDPC_OK ? FSDPC_OK : guest_failed(shm, status);
}

/* --- both ----------------------------------------------------------------------------------- */

int
fsdpc_shm_rendezvous(fsdpc_shm *shm, int64_t deadline_ns)
{
    return shm->rank == 0 ? fsdpc_shm_host_rendezvous(shm, deadline_ns)
                          : guest_rendezvous(shm, deadline_ns);
}

static void
close_sockets(fsdpc_shm *shm)
{
    for (int i = 0; i < shm->world; i++) {
        fsdpc_shm_close(&shm->peers[i].socket);
    }
}

int
fsdpc_shm_confirm(fsdpc_shm *shm, int status, int64_t deadline_ns)
{
    status = shm->rank == 0 ? fsdpc_shm_host_confirm(shm, status, deadline_ns)
                            : guest_confirm(shm, status, deadline_ns);
    if (status == FSDPC_OK && !shm->watch_sockets) {
        close_sockets(shm);
    }
    return status;
}

void
fsdpc_shm_peers_close(fsdpc_shm *shm)
{
    close_sockets(shm);
    for (int i = 0; i < shm->world; i++) {
        fsdpc_shm_close(&shm->peers[i].pidfd);
    }
}
