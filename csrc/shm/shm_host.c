/* Rank 0's side of the rendezvous. See shm_rendezvous.c for the messages.
 *
 * A connection that has not sent a hello is called a stranger. If its first message is not a hello, the
 * stranger is rejected, and the ranks keep waiting. A silent stranger is closed when its place is needed. If
 * a hello does not fit this group (for example, the number of ranks differs), the rendezvous fails on all
 * ranks, because no later message could make the sender fit.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm/shm_message.h"
#include "base/status.h"

enum { STRANGERS = 64 }; /* how many connections without a hello are kept */
/* A rank sends its hello as soon as it is connected, so a stranger may be closed after this silence. */
static const int64_t silence_ns = 500000000;

typedef struct stranger {
    int socket;
    int64_t since_ns;
} stranger;

/* Returns the status that the other ranks return when one rank fails with `status`. */
static int
status_elsewhere(int status)
{
    return status == FSDPC_E_TIMEOUT || status == FSDPC_E_MISMATCH ? status : FSDPC_E_PEER;
}

typedef struct host {
    fsdpc_shm *shm;
    int64_t deadline_ns;
    int listener;
    stranger strangers[STRANGERS]; /* in no order */
    int stranger_count;
    int here; /* number of ranks whose hello has arrived, rank 0 included */
    bool all_pidfds;
    fsdpc_shm_message arrived; /* the message whose bitmap shows the ranks that have arrived */
} host;

static int
open_listener(const fsdpc_shm *shm, int *out)
{
    struct sockaddr_un address;
    unsigned bytes;
    FSDPC_TRY(fsdpc_shm_address(shm->name, &address, &bytes));
    int listener = fsdpc_shm_socket();
    if (listener < 0) {
        return fsdpc_error_errno(errno, "socket");
    }
    if (bind(listener, (struct sockaddr *)&address, bytes) != 0 ||
        listen(listener, FSDPC_SHM_MAX_RANKS) != 0) {
        int errnum = errno;
        close(listener);
        if (errnum == EADDRINUSE) {
            return fsdpc_error(FSDPC_E_MISMATCH,
                               "another process already is rank 0 of a group named \"%s\"",
                               shm->name);
        }
        return fsdpc_error_errno(errnum, "listening as \"%s\"", shm->name);
    }
    *out = listener;
    return FSDPC_OK;
}

static void
send_arrivals(host *self)
{
    for (int i = 1; i < self->shm->world; i++) {
        if (self->shm->peers[i].socket >= 0) {
            /* Best effort: without the message, the peer's time-out text may call arrived ranks missing. */
            fsdpc_shm_message_try(self->shm->peers[i].socket, &self->arrived, NULL, 0);
        }
    }
}

static int
check_hello(const host *self, const fsdpc_shm_message *hello)
{
    const fsdpc_shm *shm = self->shm;
    if (hello->version != FSDPC_SHM_VERSION || hello->control_bytes != sizeof *shm->control) {
        return fsdpc_error(FSDPC_E_MISMATCH,
                           "rank %d (pid %d) runs another build of fsdpc (segment version %u of "
                           "%u bytes) than rank 0 (version %d of %zu bytes)",
                           hello->rank, hello->pid, hello->version, hello->control_bytes,
                           FSDPC_SHM_VERSION, sizeof *shm->control);
    }
    if (hello->world != shm->world || hello->rank < 1 || hello->rank >= shm->world) {
        return fsdpc_error(FSDPC_E_MISMATCH,
                           "pid %d joined as rank %d of %d, but rank 0's group has %d ranks",
                           hello->pid, hello->rank, hello->world, shm->world);
    }
    if (shm->peers[hello->rank].socket >= 0) {
        return fsdpc_error(FSDPC_E_MISMATCH, "two processes joined as rank %d (pids %d and %d)",
                           hello->rank, (int)atomic_load(&shm->control->slots[hello->rank].pid),
                           hello->pid);
    }
    return FSDPC_OK;
}

/* Admits the rank that sent `hello`, or refuses it. Takes over `socket` in both cases. */
static int
admit(host *self, int socket, const fsdpc_shm_message *hello, fsdpc_shm_descriptors *passed)
{
    int status = check_hello(self, hello);
    if (status != FSDPC_OK) {
        fsdpc_shm_message_fail(socket, status, fsdpc_error_text());
        fsdpc_shm_descriptors_close(passed);
        close(socket);
        return status;
    }
    fsdpc_shm_peer *peer = &self->shm->peers[hello->rank];
    peer->socket = socket;
    if (passed->count == 1) {
        peer->pidfd = passed->fds[0];
    } else {
        fsdpc_shm_descriptors_close(passed);
        self->all_pidfds = false;
    }
    atomic_store(&self->shm->control->slots[hello->rank].pid, hello->pid);
    self->arrived.arrived[hello->rank / 64] |= (uint64_t)1 << (hello->rank % 64);
    self->here++;
    send_arrivals(self);
    return FSDPC_OK;
}

/* Admits the stranger if its message is a hello, and rejects it otherwise. */
static int
receive_stranger(host *self, int index)
{
    fsdpc_shm_message hello;
    fsdpc_shm_descriptors passed;
    int socket = self->strangers[index].socket;
    int rc = fsdpc_shm_message_receive(socket, &hello, &passed);
    if (rc == EAGAIN) {
        return FSDPC_OK;
    }
    self->strangers[index] = self->strangers[--self->stranger_count];
    if (rc == 0 && hello.kind == FSDPC_SHM_HELLO) {
        return admit(self, socket, &hello, &passed);
    }
    fsdpc_shm_descriptors_close(&passed);
    fsdpc_shm_message_fail(
        socket, FSDPC_E_MISMATCH,
        "rejected: the first message is not the hello of a rank of an fsdpc group");
    close(socket);
    return FSDPC_OK;
}

/* Returns the index of the stranger that has been connected for longest, or -1. */
static int
most_silent(const host *self)
{
    int found = -1;
    for (int i = 0; i < self->stranger_count; i++) {
        if (found < 0 || self->strangers[i].since_ns < self->strangers[found].since_ns) {
            found = i;
        }
    }
    return found;
}

/* True if one more connection can be accepted. If not, connections wait in the listener's queue. */
static bool
has_room(const host *self)
{
    return self->stranger_count < STRANGERS ||
           fsdpc_shm_now_ns() - self->strangers[most_silent(self)].since_ns > silence_ns;
}

static void
accept_stranger(host *self)
{
    if (!has_room(self)) {
        return;
    }
    if (self->stranger_count == STRANGERS) {
        int silent = most_silent(self);
        fsdpc_shm_message_fail(self->strangers[silent].socket, FSDPC_E_MISMATCH,
                               "rejected: too many connections, and this one has sent no hello");
        close(self->strangers[silent].socket);
        self->strangers[silent] = self->strangers[--self->stranger_count];
    }
    int socket = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {
        return;
    }
    if (!fsdpc_shm_same_user(socket)) {
        fsdpc_shm_message_fail(socket, FSDPC_E_MISMATCH,
                               "rejected: this process belongs to another user than rank 0");
        close(socket);
        return;
    }
    self->strangers[self->stranger_count++] = (stranger){socket, fsdpc_shm_now_ns()};
}

/* Receives a message of an admitted rank: READY is counted, any other message fails the rendezvous. */
static int
receive_peer(host *self, int rank, int *ready)
{
    fsdpc_shm_message got;
    fsdpc_shm_descriptors passed;
    int rc = fsdpc_shm_message_receive(self->shm->peers[rank].socket, &got, &passed);
    if (rc == EAGAIN) {
        return FSDPC_OK;
    }
    fsdpc_shm_descriptors_close(&passed);
    if (rc == 0 && got.kind == FSDPC_SHM_READY) {
        ++*ready;
        return FSDPC_OK;
    }
    if (rc == 0 && got.kind == FSDPC_SHM_FAIL) {
        return fsdpc_error(status_elsewhere(got.status), "rank %d gave up: %s", rank, got.text);
    }
    int pid = (int)atomic_load(&self->shm->control->slots[rank].pid);
    if (rc == EPIPE) {
        return fsdpc_error(FSDPC_E_PEER, "rank %d (pid %d) died during the rendezvous", rank, pid);
    }
    char peer[48];
    snprintf(peer, sizeof peer, "rank %d (pid %d)", rank, pid);
    return fsdpc_shm_connection_error(rc ? rc : EPROTO, peer);
}

static int
wait_for_messages(host *self, struct pollfd *polls)
{
    const fsdpc_shm *shm = self->shm;
    polls[0] = (struct pollfd){.fd = has_room(self) ? self->listener : -1, .events = POLLIN};
    for (int i = 1; i < shm->world; i++) {
        polls[i] = (struct pollfd){.fd = shm->peers[i].socket, .events = POLLIN};
    }
    for (int i = 0; i < self->stranger_count; i++) {
        polls[shm->world + i] = (struct pollfd){.fd = self->strangers[i].socket, .events = POLLIN};
    }
    if (fsdpc_shm_now_ns() >= self->deadline_ns) {
        return fsdpc_shm_missing_error(shm, self->arrived.arrived);
    }
    nfds_t count = (nfds_t)(shm->world + self->stranger_count);
    if (poll(polls, count, fsdpc_shm_slice_ms(self->deadline_ns)) < 0) {
        memset(polls, 0, count * sizeof *polls);
    }
    return fsdpc_shm_interrupted(&fsdpc_shm_rendezvous_wait);
}

static int
receive_messages(host *self, int *ready)
{
    struct pollfd polls[FSDPC_SHM_MAX_RANKS + STRANGERS];
    int strangers = self->stranger_count;
    FSDPC_TRY(wait_for_messages(self, polls));
    for (int i = 1; i < self->shm->world; i++) {
        if (polls[i].revents) {
            FSDPC_TRY(receive_peer(self, i, ready));
        }
    }
    /* Counts down, because receive_stranger may move the last stranger to this stranger's place. */
    for (int i = strangers - 1; i >= 0; i--) {
        if (polls[self->shm->world + i].revents) {
            FSDPC_TRY(receive_stranger(self, i));
        }
    }
    if (polls[0].revents) {
        accept_stranger(self);
    }
    return FSDPC_OK;
}

/* Sends a message. If the rank has closed the connection, reads its last messages, which may say why. */
static int
send_to_peer(host *self, int rank, const fsdpc_shm_message *text, const int *fds, int count)
{
    const int socket = self->shm->peers[rank].socket;
    int ready = 0, status = FSDPC_OK;
    char name[32];
    snprintf(name, sizeof name, "rank %d", rank);
    const int sent = fsdpc_shm_message_send(socket, name, text, fds, count, self->deadline_ns);
    for (int k = 0; sent == FSDPC_E_PEER && status == FSDPC_OK && k < 2; k++) {
        status = receive_peer(self, rank, &ready);
    }
    return status == FSDPC_OK ? sent : status;
}

static int
send_pidfds(host *self, int rank)
{
    const fsdpc_shm *shm = self->shm;
    for (int first = 0; first < shm->world; first += FSDPC_SHM_BATCH) {
        int fds[FSDPC_SHM_BATCH];
        int count = 0;
        for (; count < FSDPC_SHM_BATCH && first + count < shm->world; count++) {
            fds[count] = shm->peers[first + count].pidfd;
        }
        fsdpc_shm_message text = fsdpc_shm_message_new(FSDPC_SHM_PIDFDS);
        text.first = (uint32_t)first;
        FSDPC_TRY(send_to_peer(self, rank, &text, fds, count));
    }
    return FSDPC_OK;
}

static int
send_welcomes(host *self)
{
    fsdpc_shm *shm = self->shm;
    shm->watch_sockets = !self->all_pidfds;
    fsdpc_shm_message welcome = fsdpc_shm_message_new(FSDPC_SHM_WELCOME);
    welcome.watch_sockets = shm->watch_sockets;
    for (int i = 1; i < shm->world; i++) {
        FSDPC_TRY(send_to_peer(self, i, &welcome, &shm->fd, 1));
        if (!shm->watch_sockets) {
            FSDPC_TRY(send_pidfds(self, i));
        }
    }
    return FSDPC_OK;
}

static void
send_failure(const fsdpc_shm *shm, int status)
{
    char text[FSDPC_SHM_MESSAGE_TEXT];
    const bool own = status != status_elsewhere(status); /* true: the text names no rank yet */
    snprintf(text, sizeof text, "%s%s", own ? "rank 0 gave up: " : "", fsdpc_error_text());
    for (int i = 1; i < shm->world; i++) {
        if (shm->peers[i].socket >= 0) {
            fsdpc_shm_message_fail(shm->peers[i].socket, status_elsewhere(status), text);
        }
    }
}

int
fsdpc_shm_host_rendezvous(fsdpc_shm *shm, int64_t deadline_ns)
{
    host self = {.shm = shm, .deadline_ns = deadline_ns, .listener = -1, .here = 1};
    int ready = 0;
    int status = FSDPC_OK;
    shm->peers[0].pidfd = fsdpc_shm_own_pidfd();
    self.all_pidfds = shm->peers[0].pidfd >= 0;
    self.arrived = fsdpc_shm_message_new(FSDPC_SHM_ARRIVED);
    self.arrived.arrived[0] = 1;
    FSDPC_GOTO(open_listener(shm, &self.listener), end);
    while (self.here < shm->world) {
        FSDPC_GOTO(receive_messages(&self, &ready), end);
    }
    FSDPC_GOTO(send_welcomes(&self), end);
end:
    if (status != FSDPC_OK) {
        send_failure(shm, status);
    }
    for (int i = 0; i < self.stranger_count; i++) {
        close(self.strangers[i].socket);
    }
    fsdpc_shm_close(&self.listener);
    return status;
}

int
fsdpc_shm_host_confirm(fsdpc_shm *shm, int own_status, int64_t deadline_ns)
{
    host self = {.shm = shm, .deadline_ns = deadline_ns, .listener = -1};
    fsdpc_shm_message go = fsdpc_shm_message_new(FSDPC_SHM_GO);
    int ready = 0;
    int status = own_status;
    memset(self.arrived.arrived, 0xff, sizeof self.arrived.arrived);
    while (status == FSDPC_OK && ready < shm->world - 1) {
        status = receive_messages(&self, &ready);
    }
    for (int i = 1; i < shm->world && status == FSDPC_OK; i++) {
        status = send_to_peer(&self, i, &go, NULL, 0);
    }
    if (status != FSDPC_OK) {
        send_failure(shm, status);
    }
    return status;
}
