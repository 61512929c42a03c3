/* The list of shared ranges, and what fork() does with them. See forks.h.
 *
 * A private mapping of the shared file would not give a child the values at the fork, because such a mapping
 * shows later writes of the parent. So the parent copies the values into private memory before the fork.
 * Parent and child share each page of the copy until one of them writes. The child moves the copy over the
 * shared range, without an allocation. The parent keeps the copy until the next step, for DataLoader workers
 * forked one by one. If there is no memory for a copy, a child's access faults: better than wrong values.
 */
#include "base/forks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"
#include "base/room.h"
#include "base/status.h"

#define COMPARED_BYTES ((size_t)1 << 20)

struct range {
    void *address;
    size_t bytes;
    fsdpc_fork_choice *choice;
    const void *owner;
    enum fsdpc_fork_kind kind; /* what the child of the fork in progress gets */
    void *copy;                /* private memory with the values at the last fork, or NULL */
};

static struct {
    pthread_mutex_t lock;
    struct range *ranges;
    size_t count;
} list = {.lock = PTHREAD_MUTEX_INITIALIZER};
static _Atomic int forks;
static _Atomic bool copied; /* true: at least one range has a copy */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void
drop(struct range *range)
{
    if (range->copy) {
        munmap(range->copy, range->bytes);
        range->copy = NULL;
    }
}

/* --- in fork() -------------------------------------------------------------------------------- */

static size_t
missing_bytes(void)
{
    size_t bytes = 0;
    for (size_t i = 0; i < list.count; i++) {
        struct range *range = &list.ranges[i];
        range->kind = range->choice ? range->choice(range->owner) : FSDPC_FORK_BLANK;
        bytes += range->kind == FSDPC_FORK_VALUES && !range->copy ? range->bytes : 0;
    }
    return bytes;
}

/* Brings the copy up to date. Does not write unchanged parts, which earlier children may still share. */
static void
renew(struct range *range)
{
    for (size_t at = 0; at < range->bytes; at += COMPARED_BYTES) {
        size_t left = range->bytes - at, part = left < COMPARED_BYTES ? left : COMPARED_BYTES;
        char *to = (char *)range->copy + at;
        const char *from = (const char *)range->address + at;
        if (memcmp(to, from, part) != 0) {
            memcpy(to, from, part);
        }
    }
}

static void
make_copy(struct range *range)
{
    void *copy =
        mmap(NULL, range->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) {
        return;
    }
    (void)madvise(copy, range->bytes, MADV_HUGEPAGE); /* best effort */
    range->copy = memcpy(copy, range->address, range->bytes);
    atomic_store(&copied, true);
}

static void
before_fork(void)
{
    pthread_mutex_lock(&list.lock);
    size_t bytes = missing_bytes();
    bool room = bytes == 0 || bytes <= fsdpc_room_free();
    for (size_t i = 0; i < list.count; i++) {
        struct range *range = &list.ranges[i];
        if (range->kind == FSDPC_FORK_VALUES && range->copy) {
            renew(range);
        } else if (range->kind == FSDPC_FORK_VALUES && room) {
            make_copy(range);
        } else {
            drop(range);
        }
    }
}

static void
in_parent(void)
{
    pthread_mutex_unlock(&list.lock);
}

static void
part(struct range *range)
{
    if (range->kind == FSDPC_FORK_VALUES && range->copy) {
        (void)mremap(range->copy, range->bytes, range->bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                     range->address);
    } else if (range->kind != FSDPC_FORK_ALONE) {
        int access = range->kind == FSDPC_FORK_BLANK ? PROT_READ | PROT_WRITE : PROT_NONE;
        (void)mmap(range->address, range->bytes, access,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    }
}

/* Handles ranges in the list's order, because a range with values may lie inside an earlier blank range. */
static void
in_child(void)
{
    for (size_t i = 0; i < list.count; i++) {
        part(&list.ranges[i]);
    }
    list.count = 0;
    atomic_store(&copied, false);
    atomic_fetch_add(&forks, 1);
    pthread_mutex_init(&list.lock, NULL);
}

static void
watch(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

/* --- outside ---------------------------------------------------------------------------------- */

int
fsdpc_forks(void)
{
    pthread_once(&once, watch);
    return atomic_load_explicit(&forks, memory_order_relaxed);
}

enum fsdpc_fork_kind
fsdpc_forks_values(const void *owner)
{
    (void)owner;
    return FSDPC_FORK_VALUES;
}

int
fsdpc_forks_add(void *address, size_t bytes, fsdpc_fork_choice *choice, const void *owner)
{
    int status = FSDPC_OK;
    (void)fsdpc_forks();
    pthread_mutex_lock(&list.lock);
    struct range *grown = fsdpc_mem_realloc(list.ranges, list.count + 1, sizeof *grown);
    if (!grown) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for the list of shared memory"), done);
    }
    list.ranges = grown;
    list.ranges[list.count++] =
        (struct range){.address = address, .bytes = bytes, .choice = choice, .owner = owner};
done:
    pthread_mutex_unlock(&list.lock);
    return status;
}

/* Removes the range at `address` that was listed last. In tests, several threads (ranks) list one mapping. */
void
fsdpc_forks_remove(const void *address)
{
    pthread_mutex_lock(&list.lock);
    for (size_t i = list.count; i-- > 0;) {
        if (list.ranges[i].address == address) {
            drop(&list.ranges[i]);
            list.count--;
            memmove(&list.ranges[i], &list.ranges[i + 1], (list.count - i) * sizeof *list.ranges);
            break;
        }
    }
    if (list.count == 0) {
        fsdpc_mem_free(list.ranges);
        list.ranges = NULL;
    }
    pthread_mutex_unlock(&list.lock);
}

void
fsdpc_forks_forget(void)
{
    if (!atomic_load_explicit(&copied, memory_order_relaxed)) {
        return;
    }
    pthread_mutex_lock(&list.lock);
    for (size_t i = 0; i < list.count; i++) {
        drop(&list.ranges[i]);
    }
    atomic_store(&copied, false);
    pthread_mutex_unlock(&list.lock);
}
