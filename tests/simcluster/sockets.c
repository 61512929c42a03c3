/* Simulates descriptors, poll, and sockets in the abstract name space whose messages carry descriptors.
 *
 * As in the kernel, several descriptors (even of several ranks) may refer to one object. Messages arrive at
 * once, whole, in order. A socket whose other end is closed gives the remaining messages, then EOF.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "sim.h"

enum {
    FIRST = 1 << 16, /* the first simulated descriptor: above all real ones */
    DESCRIPTORS = 16384,
    OBJECTS = 2048,
    PENDING = 128,
    MESSAGES = 24,
    PASSED = 64,
    SPURIOUS_IN = 24,
};

enum kind { NONE, MEMORY, PROCESS, EVENT, LISTENER, SOCKET };

typedef struct message {
    size_t bytes;
    int passed[PASSED]; /* the objects whose descriptors the message carries */
    int count;
    struct message *next;
    char data[];
} message;

typedef struct object {
    enum kind kind;
    int users;
    struct sim_file *file;
    int rank;
    uint64_t events;
    char name[sizeof(struct sockaddr_un)];
    int name_bytes;
    int pending[PENDING], waiting;
    int peer; /* the object at the other end; -1: that end is closed */
    message *first, **last;
    int queued;
} object;

static struct {
    object objects[OBJECTS];
    struct {
        int object, owner;
    } of[DESCRIPTORS];
    int used, objects_used;
} d;

static object *
object_of(int fd)
{
    static object nothing;
    int i = fd - FIRST;
    return i >= 0 && i < d.used && d.of[i].object >= 0 ? &d.objects[d.of[i].object] : &nothing;
}

static int
new_object(enum kind kind)
{
    int i = 0;
    while (i < OBJECTS && d.objects[i].kind != NONE) {
        i++;
    }
    if (i == OBJECTS) {
        abort();
    }
    d.objects_used = i >= d.objects_used ? i + 1 : d.objects_used;
    d.objects[i] = (object){.kind = kind, .peer = -1};
    d.objects[i].last = &d.objects[i].first;
    return i;
}

static int
new_descriptor(int index, int owner)
{
    int i = 0;
    while (i < d.used && d.of[i].object >= 0) {
        i++;
    }
    if (i == DESCRIPTORS) {
        abort();
    }
    d.used = i == d.used ? i + 1 : d.used;
    d.of[i].object = index;
    d.of[i].owner = owner;
    d.objects[index].users++;
    return FIRST + i;
}

static void drop(int index);

static void
drop_message(message *gone)
{
    for (int i = 0; i < gone->count; i++) {
        drop(gone->passed[i]);
    }
    free(gone);
}

static void
drop(int index)
{
    object *gone = &d.objects[index];
    if (--gone->users > 0) {
        return;
    }
    while (gone->first) {
        message *next = gone->first->next;
        drop_message(gone->first);
        gone->first = next;
    }
    for (int i = 0; i < gone->waiting; i++) {
        drop(gone->pending[i]);
    }
    if (gone->peer >= 0) {
        d.objects[gone->peer].peer = -1;
    }
    gone->kind = NONE;
    sim_wake_polls();
}

void
sim_descriptors_begin(void)
{
    for (int i = 0; i < d.objects_used; i++) {
        d.objects[i].kind = NONE;
    }
    d.used = d.objects_used = 0;
}

int
sim_descriptors_of(int rank)
{
    int count = 0;
    for (int i = 0; i < d.used; i++) {
        count += d.of[i].object >= 0 && d.of[i].owner == rank;
    }
    return count;
}

void
sim_descriptors_close(int rank)
{
    for (int i = 0; i < d.used; i++) {
        if (d.of[i].object >= 0 && d.of[i].owner == rank) {
            int index = d.of[i].object;
            d.of[i].object = -1;
            drop(index);
        }
    }
}

int
__wrap_close(int fd)
{
    int i = fd - FIRST;
    sim_point("close");
    if (object_of(fd)->kind == NONE) {
        sim_violation("rank %d closes descriptor %d, which is not open", sim_rank(), fd);
        return 0;
    }
    int index = d.of[i].object;
    d.of[i].object = -1;
    drop(index);
    return 0;
}

struct sim_file *
sim_file_of(int fd)
{
    object *found = object_of(fd);
    if (found->kind != MEMORY) {
        abort();
    }
    return found->file;
}

int
sim_file_fd(struct sim_file *file)
{
    int made = new_object(MEMORY);
    d.objects[made].file = file;
    return new_descriptor(made, sim_rank());
}

int
sim_open_pidfd(int rank)
{
    int made = new_object(PROCESS);
    d.objects[made].rank = rank;
    return new_descriptor(made, sim_rank());
}

int
__wrap_eventfd(unsigned count, int flags)
{
    (void)flags;
    if (sim_refuse(EMFILE, true)) {
        return -1;
    }
    int made = new_object(EVENT);
    d.objects[made].events = count;
    return new_descriptor(made, sim_rank());
}

int
__wrap_eventfd_write(int fd, eventfd_t more)
{
    sim_point("eventfd_write");
    sim_flush();
    object_of(fd)->events += more;
    sim_wake_polls();
    return 0;
}

/* --- sockets --------------------------------------------------------------------------------- */

static int
failed(int errnum)
{
    errno = errnum;
    return -1;
}

int
__wrap_socket(int family, int type, int protocol)
{
    (void)family, (void)type, (void)protocol;
    sim_point("socket");
    if (sim_refuse(EMFILE, true)) {
        return -1;
    }
    return new_descriptor(new_object(SOCKET), sim_rank());
}

static object *
listener_at(const struct sockaddr *address, socklen_t bytes)
{
    for (int i = 0; i < d.objects_used; i++) {
        object *each = &d.objects[i];
        if (each->kind == LISTENER && each->name_bytes == (int)bytes &&
            memcmp(each->name, address, bytes) == 0) {
            return each;
        }
    }
    return NULL;
}

int
__wrap_bind(int fd, const struct sockaddr *address, socklen_t bytes)
{
    sim_point("bind");
    if (listener_at(address, bytes)) {
        return failed(EADDRINUSE);
    }
    object *found = object_of(fd);
    memcpy(found->name, address, bytes);
    found->name_bytes = (int)bytes;
    return 0;
}

int
__wrap_listen(int fd, int most)
{
    (void)most;
    sim_point("listen");
    if (sim_refuse(ENOMEM, true)) {
        return -1;
    }
    object_of(fd)->kind = LISTENER;
    return 0;
}

int
__wrap_connect(int fd, const struct sockaddr *address, socklen_t bytes)
{
    sim_point("connect");
    object *listener = listener_at(address, bytes);
    if (!listener) {
        return failed(ECONNREFUSED);
    }
    if (listener->waiting == PENDING) {
        return failed(EAGAIN);
    }
    int far = new_object(SOCKET);
    d.objects[far].users = 1;
    d.objects[far].peer = (int)(object_of(fd) - d.objects);
    object_of(fd)->peer = far;
    listener->pending[listener->waiting++] = far;
    sim_wake_polls();
    return 0;
}

int
__wrap_accept4(int fd, struct sockaddr *address, socklen_t *bytes, int flags)
{
    (void)address, (void)bytes, (void)flags;
    sim_point("accept4");
    object *listener = object_of(fd);
    if (sim_refuse(EMFILE, false)) {
        return -1;
    }
    if (listener->waiting == 0) {
        return failed(EAGAIN);
    }
    int made = listener->pending[0];
    memmove(listener->pending, listener->pending + 1, sizeof(int) * (size_t)--listener->waiting);
    int accepted = new_descriptor(made, sim_rank());
    d.objects[made].users--; /* the listener's */
    return accepted;
}

int
__wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *bytes)
{
    (void)fd, (void)level, (void)name, (void)bytes;
    *(struct ucred *)value = (struct ucred){.uid = geteuid()};
    return 0;
}

ssize_t
__wrap_sendmsg(int fd, const struct msghdr *packet, int flags)
{
    (void)flags;
    sim_point("sendmsg");
    sim_flush();
    object *from = object_of(fd);
    if (sim_refuse(ENOMEM, false)) {
        return -1;
    }
    if (from->peer < 0) {
        return failed(EPIPE);
    }
    object *to = &d.objects[from->peer];
    if (to->queued == MESSAGES) {
        return failed(EAGAIN);
    }
    const size_t bytes = packet->msg_iov[0].iov_len;
    message *made = calloc(1, sizeof *made + bytes);
    made->bytes = bytes;
    memcpy(made->data, packet->msg_iov[0].iov_base, bytes);
    struct cmsghdr *header = packet->msg_control ? CMSG_FIRSTHDR(packet) : NULL;
    if (header) {
        made->count = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < made->count; i++) {
            int passed;
            memcpy(&passed, CMSG_DATA(header) + sizeof passed * (size_t)i, sizeof passed);
            made->passed[i] = (int)(object_of(passed) - d.objects);
            d.objects[made->passed[i]].users++;
        }
    }
    *to->last = made;
    to->last = &made->next;
    to->queued++;
    sim_wake_polls();
    return (ssize_t)bytes;
}

ssize_t
__wrap_recvmsg(int fd, struct msghdr *packet, int flags)
{
    (void)flags;
    sim_point("recvmsg");
    object *from = object_of(fd);
    message *got = from->first;
    if (!got) {
        packet->msg_controllen = 0;
        return from->peer < 0 ? 0 : failed(EAGAIN);
    }
    from->first = got->next;
    from->last = got->next ? from->last : &from->first;
    from->queued--;
    size_t bytes =
        got->bytes < packet->msg_iov[0].iov_len ? got->bytes : packet->msg_iov[0].iov_len;
    memcpy(packet->msg_iov[0].iov_base, got->data, bytes);
    struct cmsghdr *header = CMSG_FIRSTHDR(packet);
    /* If a process may open no more descriptors, the descriptors in a message are lost. */
    const bool lost = got->count > 0 && sim_refuse(EMFILE, false);
    packet->msg_flags = lost ? MSG_CTRUNC : 0;
    for (int i = 0; i < got->count && !lost; i++) {
        int fd_here = new_descriptor(got->passed[i], sim_rank());
        memcpy(CMSG_DATA(header) + sizeof fd_here * (size_t)i, &fd_here, sizeof fd_here);
    }
    if (got->count > 0 && !lost) {
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)got->count);
        packet->msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)got->count);
    } else {
        packet->msg_controllen = 0;
    }
    drop_message(got);
    return (ssize_t)bytes;
}

/* --- poll ------------------------------------------------------------------------------------ */

static short
ready(const object *each, short events)
{
    bool in = false, ended = false;
    switch (each->kind) {
    case PROCESS:
        in = sim_is_over(each->rank);
        break;
    case EVENT:
        in = each->events > 0;
        break;
    case LISTENER:
        in = each->waiting > 0;
        break;
    case SOCKET:
        ended = each->peer < 0;
        in = each->first != NULL || ended;
        break;
    default:
        return POLLNVAL;
    }
    /* As select(2) warns, a socket may be reported as ready although a read would block. */
    in = in || (each->kind == SOCKET && sim_case_now()->spurious && sim_draw() % SPURIOUS_IN == 0);
    return (short)((in ? events & POLLIN : 0) | (ended ? (events & POLLRDHUP) | POLLHUP : 0));
}

int
__wrap_poll(struct pollfd *polls, nfds_t count, int timeout_ms)
{
    const int64_t until_ns =
        timeout_ms < 0 ? SIM_NEVER : sim_now_ns() + timeout_ms * INT64_C(1000000);
    sim_point("poll");
    for (;;) {
        int found = 0;
        for (nfds_t i = 0; i < count; i++) {
            polls[i].revents = polls[i].fd < 0 ? 0 : ready(object_of(polls[i].fd), polls[i].events);
            found += polls[i].revents != 0;
        }
        if (found || sim_now_ns() >= until_ns) {
            return found;
        }
        if (count == 0) {
            (void)sim_sleep(until_ns, "poll");
        } else {
            (void)sim_sleep_in_poll(until_ns);
        }
    }
}
