/* Writes of the program into gathered values.
 *
 * All ranks of a host see one slot, but a rank's writes to gathered values must not reach other ranks. So
 * ranges in host memory show their slot for reading only. The first write (weight.data.mul_()) faults. From
 * then on, each written page is a private copy, until take_back at the unit's release. A range that is not
 * written costs nothing. The version counters of torch do not count these writes.
 *
 * The handler of SIGSEGV passes on all other faults. A handler that is installed later must not run before
 * ours (faulthandler ends the program), so each pass checks with one system call that ours is installed.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "unit/arena_impl.h"

static struct {
    pthread_mutex_t lock;
    fsdpc_range *first;
} shown = {.lock = PTHREAD_MUTEX_INITIALIZER};
static struct sigaction before;
static _Atomic bool passing_on;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* --- the fault -------------------------------------------------------------------------------- */

/* Called in a signal handler. The fault is in the program's code, so this thread holds none of our locks. */
static bool
open_for_writing(const void *address)
{
    bool opened = false;
    pthread_mutex_lock(&shown.lock);
    for (fsdpc_range *range = shown.first; range && !opened; range = range->next) {
        const char *begin = range->address, *at = address;
        if (at >= begin && at < begin + range->bytes && fsdpc_range_is_shown(range)) {
            opened = mprotect(range->address, range->bytes, PROT_READ | PROT_WRITE) == 0;
            range->written = range->written || opened;
        }
    }
    pthread_mutex_unlock(&shown.lock);
    return opened;
}

/* Calls the handler that was installed before ours. That handler may end by raising the signal again. */
static void
pass_on(int number, siginfo_t *info, void *context)
{
    bool again = atomic_exchange(&passing_on, true);
    if (again || (!(before.sa_flags & SA_SIGINFO) &&
                  (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))) {
        (void)signal(number, SIG_DFL); /* on return the access faults again */
        if (info->si_code <= 0) {
            (void)raise(number);
        }
        return;
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else {
        before.sa_handler(number);
    }
    atomic_store(&passing_on, false);
}

static void
on_fault(int number, siginfo_t *info, void *context)
{
    if (info->si_code != SEGV_ACCERR || !open_for_writing(info->si_addr)) {
        pass_on(number, info, context);
    }
}

/* The lock is needed because ranks may be threads of one process. */
void
fsdpc_arena_watch_writes(void)
{
    pthread_mutex_lock(&shown.lock);
    struct sigaction now;
    if (!atomic_load(&passing_on) && sigaction(SIGSEGV, NULL, &now) == 0 &&
        !(now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault)) {
        struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        before = now;
        (void)sigaction(SIGSEGV, &ours, NULL);
    }
    pthread_mutex_unlock(&shown.lock);
}

/* --- which ranges ----------------------------------------------------------------------------- */

static void
renew_lock(void)
{
    pthread_mutex_init(&shown.lock, NULL);
}

static void
watch_forks(void)
{
    pthread_atfork(NULL, NULL, renew_lock);
}

void
fsdpc_arena_list_range(fsdpc_range *range)
{
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&shown.lock);
    range->next = shown.first;
    shown.first = range;
    pthread_mutex_unlock(&shown.lock);
}

void
fsdpc_arena_unlist_range(fsdpc_range *range)
{
    pthread_mutex_lock(&shown.lock);
    for (fsdpc_range **at = &shown.first; *at; at = &(*at)->next) {
        if (*at == range) {
            *at = range->next;
            break;
        }
    }
    pthread_mutex_unlock(&shown.lock);
}
