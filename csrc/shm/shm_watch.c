/* The watcher: one thread per segment that detects a peer's death within milliseconds.
 *
 * The thread polls the peers' pidfds. Without pidfds the thread polls the sockets of the rendezvous: rank 0
 * has a socket to each peer and detects every death; the other ranks detect only the death of rank 0. A peer
 * that has marked itself as left is ignored. The thread blocks all signals and holds no locks. Sockets have a
 * limit: a rank's forked children hold copies of its sockets, so a death is detected only when the children
 * have ended as well.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/mem.h"
#include "shm/shm_impl.h"
#include "base/status.h"

enum { STACK_BYTES = 256 * 1024 };

static int
watched_fd(const fsdpc_shm *shm, int rank)
{
    return shm->watch_sockets ? shm->peers[rank].socket : shm->peers[rank].pidfd;
}

static void *
watch(void *argument)
{
    fsdpc_shm *shm = argument;
    struct pollfd polls[FSDPC_SHM_MAX_RANKS + 1];
    /* Only the end of a socket is watched, because the rendezvous may still read messages from the socket. */
    short events = shm->watch_sockets ? POLLRDHUP : POLLIN;
    for (int i = 0; i < shm->world; i++) {
        polls[i] =
            (struct pollfd){.fd = i == shm->rank ? -1 : watched_fd(shm, i), .events = events};
    }
    polls[shm->world] = (struct pollfd){.fd = shm->stop_fd, .events = POLLIN};
    while (!polls[shm->world].revents) {
        if (poll(polls, (nfds_t)shm->world + 1, -1) < 0) {
            memset(&polls[shm->world].revents, 0, sizeof polls[shm->world].revents);
            continue;
        }
        for (int i = 0; i < shm->world; i++) {
            if (polls[i].fd >= 0 && polls[i].revents) {
                polls[i].fd = -1;
                if (!fsdpc_shm_left(shm, i)) {
                    fsdpc_shm_fail(shm, FSDPC_SHM_DEAD, i);
                }
            }
        }
    }
    return NULL;
}

static int
start_thread(fsdpc_shm *shm)
{
    pthread_attr_t attr;
    sigset_t all, before;
    int rc = pthread_attr_init(&attr);
    if (rc != 0) {
        return rc;
    }
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&shm->watcher, &attr, watch, shm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return rc;
}

int
fsdpc_shm_watch_start(fsdpc_shm *shm)
{
    if (shm->world == 1) {
        return FSDPC_OK;
    }
    shm->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (shm->stop_fd < 0) {
        return fsdpc_error_errno(errno, "eventfd");
    }
    int rc = start_thread(shm);
    if (rc != 0) {
        return fsdpc_error_errno(rc, "starting the thread that watches the other ranks");
    }
    shm->watching = true;
    return FSDPC_OK;
}

void
fsdpc_shm_watch_stop(fsdpc_shm *shm)
{
    if (!shm->watching) {
        return;
    }
    /* Wakes the thread's poll. Cannot fail, because the eventfd's counter is 0. */
    eventfd_write(shm->stop_fd, 1);
    pthread_join(shm->watcher, NULL);
    shm->watching = false;
}
