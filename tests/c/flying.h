/* Sends and receives for the callbacks of carrier.h. Each message from one rank to another is a file in
 * /dev/shm. The nth receive with a tag gets the nth message that was sent with this tag.
 */
#ifndef FSDPC_TEST_FLYING_H
#define FSDPC_TEST_FLYING_H

#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"
#include "test.h"

enum { FLYING_COUNTS = 4096, FLYING_NAPS = 50000 };

/* The number of messages with one tag that this rank has sent to, or received from, one other rank. */
typedef struct flying_count {
    int peer;
    bool send;
    uint32_t tag, count;
} flying_count;

typedef struct flying {
    char name[64]; /* the group's name */
    int rank;
    flying_count counts[FLYING_COUNTS];
    int used;
    /* posted: calls of flying_post. dropped: calls of flying_drop, except those that flying_land makes. */
    int posted, dropped;
} flying;

static int flying_moved; /* number of sends and receives that this process has posted */

typedef struct flying_transfers {
    int count;
    fsdpc_comm_move *moves;
    char (*files)[160];
} flying_transfers;

static uint32_t
flying_number(flying *self, int peer, bool send, uint32_t tag)
{
    for (int i = self->used - 1; i >= 0; i--) {
        flying_count *c = &self->counts[i];
        if (c->peer == peer && c->send == send && c->tag == tag) {
            return c->count++;
        }
    }
    REQUIRE(self->used < FLYING_COUNTS);
    self->counts[self->used++] = (flying_count){peer, send, tag, 1};
    return 0;
}

/* Writes a file under a temporary name, and renames the file when it is complete. */
static void
flying_write(const char *file, const void *memory, size_t bytes)
{
    char before[200];
    snprintf(before, sizeof before, "%s~", file);
    int fd = open(before, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    REQUIRE(fd >= 0);
    REQUIRE(write(fd, memory, bytes) == (ssize_t)bytes);
    close(fd);
    REQUIRE(rename(before, file) == 0);
}

static int
flying_read(const char *file, void *memory, size_t bytes)
{
    const struct timespec nap = {.tv_nsec = 200000};
    int fd = open(file, O_RDONLY);
    for (int i = 0; fd < 0 && i < FLYING_NAPS; i++) {
        nanosleep(&nap, NULL);
        fd = open(file, O_RDONLY);
    }
    if (fd < 0) {
        return fsdpc_error(FSDPC_E_TIMEOUT, "no message %s", file);
    }
    REQUIRE(read(fd, memory, bytes) == (ssize_t)bytes);
    char more;
    CHECK_INT(read(fd, &more, 1), 0);
    close(fd);
    unlink(file);
    return FSDPC_OK;
}

static void
flying_drop(void *context, void *transfers)
{
    flying_transfers *t = transfers;
    ((flying *)context)->dropped++;
    free(t->files);
    free(t->moves);
    free(t);
}

/* Begins sends and receives. Sends write their files at once. Receives fill their memory in flying_land. */
static int
flying_post(void *context, const fsdpc_comm_move *moves, int count, uint32_t tag, const char *what,
            void **transfers)
{
    flying *self = context;
    flying_transfers *t = calloc(1, sizeof *t);
    (void)what;
    self->posted++;
    flying_moved += count;
    t->count = count;
    t->moves = calloc((size_t)count, sizeof *t->moves);
    t->files = calloc((size_t)count, sizeof *t->files);
    for (int i = 0; i < count; i++) {
        const fsdpc_comm_move *m = &moves[i];
        const int from = m->send ? self->rank : m->peer, to = m->send ? m->peer : self->rank;
        t->moves[i] = *m;
        snprintf(t->files[i], sizeof t->files[i], "/dev/shm/%s-%d-%d-%x-%u", self->name, from, to,
                 tag, flying_number(self, m->peer, m->send, tag));
        if (m->send) {
            flying_write(t->files[i], m->memory, m->bytes);
        }
    }
    *transfers = t;
    return FSDPC_OK;
}

static int
flying_land(void *context, void *transfers, const bool *skip, const char *what)
{
    const flying_transfers *t = transfers;
    int status = FSDPC_OK;
    (void)what;
    for (int i = 0; i < t->count && status == FSDPC_OK; i++) {
        if (!t->moves[i].send && !(skip && skip[t->moves[i].peer])) {
            status = flying_read(t->files[i], t->moves[i].memory, t->moves[i].bytes);
        }
    }
    flying_drop(context, transfers);
    ((flying *)context)->dropped--;
    return status;
}

/* Deletes the files of messages that this rank has not received, and frees `self`. */
static void
flying_end(flying *self)
{
    glob_t found;
    char pattern[160];
    snprintf(pattern, sizeof pattern, "/dev/shm/%s-*-%d-*", self->name, self->rank);
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            unlink(found.gl_pathv[i]);
        }
        globfree(&found);
    }
    free(self);
}

#endif
