/* Transfers by threads that call pread and pwrite, for kernels that refuse io_uring. */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/status.h"
#include "disk/disk_impl.h"

enum { THREADS = 4, STACK_BYTES = 256 << 10 };

typedef struct list {
    fsdpc_disk_transfer *first, *last;
} list;

typedef struct threads {
    pthread_t ids[THREADS];
    int started;
    pthread_mutex_t lock;
    pthread_cond_t work, done_cond;
    list waiting, done;
    bool ending;
} threads;

static void
append(list *to, fsdpc_disk_transfer *transfer)
{
    transfer->next = NULL;
    if (to->last != NULL) {
        to->last->next = transfer;
    } else {
        to->first = transfer;
    }
    to->last = transfer;
}

static fsdpc_disk_transfer *
take(list *from)
{
    fsdpc_disk_transfer *transfer = from->first;
    if (transfer != NULL) {
        from->first = transfer->next;
        from->last = from->first == NULL ? NULL : from->last;
    }
    return transfer;
}

static int64_t
move_bytes(const fsdpc_disk_transfer *transfer)
{
    const size_t bytes = (size_t)transfer->bytes;
    const ssize_t moved = transfer->write
                              ? pwrite(transfer->fd, transfer->memory, bytes, transfer->offset)
                              : pread(transfer->fd, transfer->memory, bytes, transfer->offset);
    return moved < 0 ? -errno : moved;
}

static void *
work(void *object)
{
    threads *self = object;
    pthread_mutex_lock(&self->lock);
    for (;;) {
        fsdpc_disk_transfer *transfer = take(&self->waiting);
        if (transfer == NULL && self->ending) {
            break;
        }
        if (transfer == NULL) {
            pthread_cond_wait(&self->work, &self->lock);
            continue;
        }
        pthread_mutex_unlock(&self->lock);
        transfer->result = move_bytes(transfer);
        pthread_mutex_lock(&self->lock);
        append(&self->done, transfer);
        pthread_cond_signal(&self->done_cond);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

static int
threads_submit(void *object, fsdpc_disk_transfer *transfer)
{
    threads *self = object;
    pthread_mutex_lock(&self->lock);
    append(&self->waiting, transfer);
    pthread_cond_signal(&self->work);
    pthread_mutex_unlock(&self->lock);
    return FSDPC_OK;
}

static int
threads_flush(void *object)
{
    (void)object;
    return FSDPC_OK;
}

static int
threads_reap(void *object, const struct timespec *until, fsdpc_disk_transfer **out)
{
    threads *self = object;
    int late = 0;
    pthread_mutex_lock(&self->lock);
    while ((*out = take(&self->done)) == NULL && late == 0) {
        late = pthread_cond_timedwait(&self->done_cond, &self->lock, until);
    }
    pthread_mutex_unlock(&self->lock);
    return *out != NULL ? FSDPC_OK : FSDPC_E_TIMEOUT;
}

static void
threads_free(void *object)
{
    threads *self = object;
    pthread_mutex_lock(&self->lock);
    self->ending = true;
    pthread_cond_broadcast(&self->work);
    pthread_mutex_unlock(&self->lock);
    for (int i = 0; i < self->started; i++) {
        pthread_join(self->ids[i], NULL);
    }
    pthread_cond_destroy(&self->done_cond);
    pthread_cond_destroy(&self->work);
    pthread_mutex_destroy(&self->lock);
    fsdpc_mem_free(self);
}

int
fsdpc_disk_threads_new(const fsdpc_disk_way **way, void **out)
{
    static const fsdpc_disk_way table = {"threads", threads_submit, threads_flush, threads_reap,
                                         threads_free};
    pthread_condattr_t clock;
    pthread_attr_t attributes;
    threads *self = fsdpc_mem_calloc(1, sizeof *self);
    if (self == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the threads of a file of states");
    }
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->work, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&self->done_cond, &clock);
    pthread_condattr_destroy(&clock);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int failed = 0;
    while (self->started < THREADS && failed == 0) {
        failed = pthread_create(&self->ids[self->started], &attributes, work, self);
        self->started += failed == 0;
    }
    pthread_attr_destroy(&attributes);
    if (self->started == 0) {
        threads_free(self);
        return fsdpc_error_errno(failed, "a thread for transfers to a disk");
    }
    *way = &table;
    *out = self;
    return FSDPC_OK;
}
