/* Helper threads. See pool.h.
 *
 * `gate` is the number of helpers inside the current loop, plus the flag CLOSED. A helper enters by
 * incrementing `gate` while the flag is clear. When no part is left, the caller sets the flag and
 * waits until `gate` equals CLOSED. So the loop's fields are written only while no helper is inside,
 * and the caller does not wait for a helper that wakes up late, because that helper cannot enter.
 *
 * `owner` is the pool's lock and holds a process id: after fork() the child finds an owner, or
 * helpers, of another process and resets the pool.
 */
#include "base/pause.h"
#include "base/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/status.h"

enum { CLOSED = 1 << 30, SPINS = 2000 };

struct worker {
    fsdpc_pool *pool;
    pthread_t thread;
    int index; /* the worker's number, from 1 on; number 0 is the thread that calls the loop */
};

struct fsdpc_pool {
    _Atomic pid_t owner; /* the process inside fsdpc_pool_run, 0 for none */
    pid_t workers_pid;   /* the process that the workers belong to */
    int worker_count;
    struct worker workers[FSDPC_POOL_MAX_THREADS - 1];

    _Atomic uint32_t generation; /* incremented by each loop; helpers sleep on it (a futex) */
    _Atomic int sleepers;
    _Atomic bool stop;

    _Atomic int gate;
    fsdpc_pool_task *task;
    void *context;
    int64_t n, grain;
    int threads;
    _Atomic int64_t next;
};

static void
futex_wait(void *word, uint32_t expected)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void
futex_wake(void *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void
do_parts(fsdpc_pool *pool)
{
    const int64_t n = pool->n;
    const int64_t grain = pool->grain;
    int64_t begin;
    while ((begin = atomic_fetch_add(&pool->next, grain)) < n) {
        pool->task(pool->context, begin, n - begin < grain ? n : begin + grain);
    }
}

static bool
enter(fsdpc_pool *pool)
{
    int gate = atomic_load(&pool->gate);
    while (!(gate & CLOSED)) {
        if (atomic_compare_exchange_weak(&pool->gate, &gate, gate + 1)) {
            return true;
        }
    }
    return false;
}

static void
leave(fsdpc_pool *pool)
{
    if (atomic_fetch_sub(&pool->gate, 1) - 1 == CLOSED) {
        futex_wake(&pool->gate);
    }
}

static uint32_t
await_loop(fsdpc_pool *pool, uint32_t last)
{
    uint32_t now;
    for (int spin = 0; spin < SPINS; spin++) {
        if ((now = atomic_load(&pool->generation)) != last) {
            return now;
        }
        fsdpc_pause();
    }
    atomic_fetch_add(&pool->sleepers, 1);
    while ((now = atomic_load(&pool->generation)) == last) {
        futex_wait(&pool->generation, last);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    return now;
}

static void *
work(void *argument)
{
    struct worker *self = argument;
    fsdpc_pool *pool = self->pool;
    uint32_t last = 0;
    for (;;) {
        last = await_loop(pool, last);
        if (atomic_load(&pool->stop)) {
            return NULL;
        }
        if (enter(pool)) {
            if (self->index < pool->threads) {
                do_parts(pool);
            }
            leave(pool);
        }
    }
}

/* Helpers block all signals: Python's handlers expect signals on the program's threads. */
static void
start_workers(fsdpc_pool *pool, int wanted)
{
    sigset_t all, before;
    if (pool->worker_count >= wanted) {
        return;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->worker_count < wanted) {
        struct worker *worker = &pool->workers[pool->worker_count];
        worker->pool = pool;
        worker->index = pool->worker_count + 1;
        if (pthread_create(&worker->thread, NULL, work, worker) != 0) {
            break;
        }
        pool->worker_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static bool
take(fsdpc_pool *pool)
{
    const pid_t me = getpid();
    pid_t owner = atomic_load(&pool->owner);
    if (owner == me || !atomic_compare_exchange_strong(&pool->owner, &owner, me)) {
        return false;
    }
    if (pool->workers_pid != me) {
        pool->workers_pid = me;
        pool->worker_count = 0;
        atomic_store(&pool->sleepers, 0);
        atomic_store(&pool->gate, CLOSED);
    }
    return true;
}

static void
open_gate(fsdpc_pool *pool)
{
    atomic_store(&pool->gate, 0);
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers) > 0) {
        futex_wake(&pool->generation);
    }
}

static void
close_gate(fsdpc_pool *pool)
{
    int gate = atomic_fetch_or(&pool->gate, CLOSED) | CLOSED;
    for (int spin = 0; gate != CLOSED; spin++) {
        if (spin < SPINS) {
            fsdpc_pause();
        } else {
            futex_wait(&pool->gate, (uint32_t)gate);
        }
        gate = atomic_load(&pool->gate);
    }
}

void
fsdpc_pool_run(fsdpc_pool *pool, int threads, int64_t n, int64_t grain, fsdpc_pool_task *task,
               void *context)
{
    if (threads <= 1 || n <= grain || !take(pool)) {
        if (n > 0) {
            task(context, 0, n);
        }
        return;
    }
    threads = threads < FSDPC_POOL_MAX_THREADS ? threads : FSDPC_POOL_MAX_THREADS;
    start_workers(pool, threads - 1);
    pool->task = task;
    pool->context = context;
    pool->n = n;
    pool->grain = grain;
    pool->threads = threads;
    atomic_store(&pool->next, 0);
    open_gate(pool);
    do_parts(pool);
    close_gate(pool);
    atomic_store(&pool->owner, 0);
}

int
fsdpc_pool_new(fsdpc_pool **out)
{
    *out = fsdpc_mem_calloc(1, sizeof **out);
    if (!*out) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a pool of helper threads");
    }
    atomic_store(&(*out)->gate, CLOSED);
    return FSDPC_OK;
}

void
fsdpc_pool_free(fsdpc_pool *pool)
{
    if (!pool) {
        return;
    }
    if (pool->workers_pid == getpid()) {
        atomic_store(&pool->stop, true);
        atomic_fetch_add(&pool->generation, 1);
        futex_wake(&pool->generation);
        for (int i = 0; i < pool->worker_count; i++) {
            pthread_join(pool->workers[i].thread, NULL);
        }
    }
    fsdpc_mem_free(pool);
}
