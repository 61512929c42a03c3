/* Messages of the rendezvous over sequenced-packet sockets. See shm_message.h. */
#include "shm/shm_message.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/deadline.h"
#include "base/status.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { SLICE_MS = 100, RETRY_MS = 10 };

static const uint64_t MAGIC = 0x6673647063736d31u;

bool fsdpc_shm_without_pidfd;

const fsdpc_wait fsdpc_shm_rendezvous_wait = {.op = "the rendezvous of the group's ranks",
                                              .unit = ""};

int
fsdpc_shm_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

void
fsdpc_shm_close(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

void
fsdpc_shm_descriptors_close(fsdpc_shm_descriptors *passed)
{
    for (int i = 0; i < passed->count; i++) {
        close(passed->fds[i]);
    }
    passed->count = 0;
}

fsdpc_shm_message
fsdpc_shm_message_new(enum fsdpc_shm_kind kind)
{
    return (fsdpc_shm_message){.magic = MAGIC,
                               .version = FSDPC_SHM_VERSION,
                               .control_bytes = sizeof(fsdpc_shm_control),
                               .kind = kind};
}

/* Returns 0 or an errno. */
int
fsdpc_shm_message_try(int socket, const fsdpc_shm_message *text, const int *fds, int count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * FSDPC_SHM_BATCH)];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)text, .iov_len = sizeof *text};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > 0) {
        packet.msg_control = control.bytes;
        packet.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
    }
    return sendmsg(socket, &packet, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? errno : 0;
}

static void
take_descriptors(struct msghdr *packet, fsdpc_shm_descriptors *passed)
{
    for (struct cmsghdr *header = CMSG_FIRSTHDR(packet); header;
         header = CMSG_NXTHDR(packet, header)) {
        if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
            size_t bytes = header->cmsg_len - CMSG_LEN(0);
            memcpy(passed->fds, CMSG_DATA(header), bytes);
            passed->count = (int)(bytes / sizeof(int));
        }
    }
}

/* Returns 0; EAGAIN if there is no message yet, or after a signal; EPIPE if the connection has ended; EPROTO
 * if the bytes are not a message of fsdpc; or another errno. */
int
fsdpc_shm_message_receive(int socket, fsdpc_shm_message *text, fsdpc_shm_descriptors *passed)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * FSDPC_SHM_BATCH)];
    } control = {0};
    struct iovec part = {.iov_base = text, .iov_len = sizeof *text};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    passed->count = 0;
    ssize_t bytes = recvmsg(socket, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0) {
        return errno == EINTR ? EAGAIN : errno == ECONNRESET ? EPIPE : errno;
    }
    if (bytes == 0) {
        return EPIPE;
    }
    take_descriptors(&packet, passed);
    passed->lost = (packet.msg_flags & MSG_CTRUNC) != 0;
    if (bytes != sizeof *text || text->magic != MAGIC) {
        fsdpc_shm_descriptors_close(passed);
        return EPROTO;
    }
    text->text[FSDPC_SHM_MESSAGE_TEXT - 1] = '\0';
    return 0;
}

int
fsdpc_shm_message_send(int socket, const char *peer, const fsdpc_shm_message *text, const int *fds,
                       int count, int64_t deadline_ns)
{
    for (;;) {
        int rc = fsdpc_shm_message_try(socket, text, fds, count);
        if (rc == 0) {
            return FSDPC_OK;
        }
        /* After ETOOMANYREFS try again: too many descriptors are in flight until the receivers take them. */
        if (rc != EAGAIN && rc != ETOOMANYREFS && rc != EINTR) {
            return fsdpc_shm_connection_error(rc, peer);
        }
        if (fsdpc_shm_now_ns() >= deadline_ns) {
            return fsdpc_error(
                FSDPC_E_TIMEOUT,
                "the rendezvous: another rank has not read its messages within the deadline "
                "(FSDPC_TIMEOUT sets this limit): that process hangs or is stopped");
        }
        FSDPC_TRY(fsdpc_shm_interrupted(&fsdpc_shm_rendezvous_wait));
        poll(NULL, 0, RETRY_MS);
    }
}

void
fsdpc_shm_message_fail(int socket, int status, const char *text)
{
    fsdpc_shm_message failure = fsdpc_shm_message_new(FSDPC_SHM_FAIL);
    failure.status = status;
    snprintf(failure.text, FSDPC_SHM_MESSAGE_TEXT, "%s", text);
    /* Best effort: a peer that does not get the message sees the connection end. */
    fsdpc_shm_message_try(socket, &failure, NULL, 0);
}

int
fsdpc_shm_address(const char *name, struct sockaddr_un *address, unsigned *bytes)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    *bytes = 0;
    int used = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "fsdpc.%s", name);
    if (used < 0 || (size_t)used >= sizeof address->sun_path - 1) {
        return fsdpc_error(FSDPC_E_INVAL, "the name of group \"%s\" is too long", name);
    }
    *bytes = (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
    return FSDPC_OK;
}

bool
fsdpc_shm_same_user(int socket)
{
    struct ucred other;
    socklen_t bytes = sizeof other;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 &&
           other.uid == geteuid();
}

int
fsdpc_shm_own_pidfd(void)
{
    /* The kernel makes every pidfd close-on-exec. */
    return fsdpc_shm_without_pidfd ? -1 : (int)syscall(SYS_pidfd_open, getpid(), 0);
}

int
fsdpc_shm_slice_ms(int64_t deadline_ns)
{
    int64_t left_ms = (deadline_ns - fsdpc_shm_now_ns() + 999999) / 1000000;
    return left_ms < 0 ? 0 : left_ms < SLICE_MS ? (int)left_ms : SLICE_MS;
}

int
fsdpc_shm_late_rendezvous(const fsdpc_shm *shm, const int *missing, int count)
{
    char what[160];
    snprintf(what, sizeof what, "the rendezvous of group \"%s\"", shm->name);
    const fsdpc_late late = {shm->rank, shm->timeout_s, what, missing, count, NULL};
    return fsdpc_late_error(&late);
}

int
fsdpc_shm_missing_error(const fsdpc_shm *shm, const uint64_t *arrived)
{
    int missing[FSDPC_SHM_MAX_RANKS];
    int count = 0;
    for (int i = 0; i < shm->world; i++) {
        if (!(arrived[i / 64] >> (i % 64) & 1)) {
            missing[count++] = i;
        }
    }
    return fsdpc_shm_late_rendezvous(shm, missing, count);
}

int
fsdpc_shm_connection_error(int errnum, const char *peer)
{
    if (errnum == EPIPE || errnum == ECONNRESET) {
        return fsdpc_error(FSDPC_E_PEER,
                           "the rendezvous: %s closed the connection: it died, or the group was "
                           "complete",
                           peer);
    }
    if (errnum == EPROTO) {
        return fsdpc_error(FSDPC_E_MISMATCH,
                           "the rendezvous: %s sent bytes that are no message of fsdpc, or of "
                           "another build",
                           peer);
    }
    return fsdpc_error_errno(errnum, "the rendezvous: the connection to %s failed", peer);
}
