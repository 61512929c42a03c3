/* See board.h. Texts are written as atomic words: a reader in another process may see parts of two
 * texts while a text changes, but every text ends within its buffer.
 */
#include "base/board.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"

enum { WORDS = FSDPC_BOARD_TEXT_BYTES / 8, FIRST_SIGNAL = 11 };

typedef struct line {
    _Atomic int64_t at_ns; /* CLOCK_MONOTONIC time of the text's event; 0: the line is empty */
    _Atomic uint64_t words[WORDS];
} line;

/* fsdpc/_comm/board.py reads this layout. */
typedef struct page {
    uint64_t magic;
    int32_t signal_number, unused;
    line wait, last, device;
} page;

_Static_assert(sizeof(page) <= FSDPC_BOARD_PAGE_BYTES, "the board is one page");

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t forks_once = PTHREAD_ONCE_INIT;
static page *_Atomic own;
static int own_fd = -1;
static _Atomic int waits;

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* --- opening ---------------------------------------------------------------------------------- */

/* Runs in a forked child, which must not write into the page, because the page belongs to the parent. */
static void
forget_parents(void)
{
    pthread_mutex_init(&opening, NULL);
    atomic_store(&own, NULL);
    atomic_store(&waits, 0);
    if (own_fd >= 0) {
        close(own_fd);
        own_fd = -1;
    }
}

static void
watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_parents);
}

/* Returns a real-time signal that had no handler and is ignored from now on, or 0 if there is none. */
static int
choose_signal(void)
{
    for (int number = SIGRTMIN + FIRST_SIGNAL; number <= SIGRTMAX; number++) {
        struct sigaction found, ignored = {.sa_handler = SIG_IGN};
        if (sigaction(number, NULL, &found) == 0 && !(found.sa_flags & SA_SIGINFO) &&
            found.sa_handler == SIG_DFL) {
            return sigaction(number, &ignored, NULL) == 0 ? number : 0;
        }
    }
    return 0;
}

static int
make_page(page **out)
{
    own_fd = memfd_create("fsdpc-board", MFD_CLOEXEC);
    if (own_fd < 0 || ftruncate(own_fd, FSDPC_BOARD_PAGE_BYTES) != 0) {
        return fsdpc_error_errno(errno, "making the board that other ranks read in a stall");
    }
    void *mapped =
        mmap(NULL, FSDPC_BOARD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, own_fd, 0);
    if (mapped == MAP_FAILED) {
        return fsdpc_error_errno(errno, "mapping the board that other ranks read in a stall");
    }
    *out = mapped;
    return FSDPC_OK;
}

int
fsdpc_board_open(int *fd, int *signal_number)
{
    int status = FSDPC_OK;
    page *made = NULL;
    pthread_once(&forks_once, watch_forks);
    pthread_mutex_lock(&opening);
    if (!atomic_load(&own)) {
        FSDPC_GOTO(make_page(&made), done);
        made->magic = FSDPC_BOARD_MAGIC;
        made->signal_number = choose_signal();
        atomic_store(&own, made);
    }
    *fd = own_fd;
    *signal_number = atomic_load(&own)->signal_number;
done:
    if (status != FSDPC_OK && own_fd >= 0) {
        close(own_fd);
        own_fd = -1;
    }
    pthread_mutex_unlock(&opening);
    return status;
}

/* --- writing ---------------------------------------------------------------------------------- */

typedef union text {
    uint64_t words[WORDS];
    char bytes[FSDPC_BOARD_TEXT_BYTES];
} text;

static size_t
append(text *to, size_t used, const char *more)
{
    size_t bytes = strlen(more), room = sizeof to->bytes - 1 - used;
    bytes = bytes < room ? bytes : room;
    memcpy(to->bytes + used, more, bytes);
    to->bytes[used + bytes] = '\0';
    return used + bytes;
}

static void
publish(line *at, const text *entry, size_t used, int64_t when_ns)
{
    for (size_t i = 0; i <= used / 8; i++) {
        atomic_store_explicit(&at->words[i], entry->words[i], memory_order_relaxed);
    }
    atomic_store_explicit(&at->at_ns, when_ns, memory_order_release);
}

/* Writes a text such as "gather of unit layers.3, forward". */
static void
write_line(line *at, const char *op, const char *unit, const char *phase, int64_t when_ns)
{
    text entry;
    entry.words[0] = 0;
    size_t used = append(&entry, 0, op && op[0] ? op : "a wait");
    if (unit && unit[0]) {
        used = append(&entry, append(&entry, used, " of unit "), unit);
    }
    if (phase && phase[0]) {
        used = append(&entry, append(&entry, used, ", "), phase);
    }
    publish(at, &entry, used, when_ns);
}

void
fsdpc_board_begin(const char *op, const char *unit, const char *phase)
{
    page *board = atomic_load_explicit(&own, memory_order_acquire);
    if (board && atomic_fetch_add(&waits, 1) == 0) {
        write_line(&board->wait, op, unit, phase, now_ns());
    }
}

void
fsdpc_board_end(void)
{
    page *board = atomic_load_explicit(&own, memory_order_acquire);
    if (!board) {
        return;
    }
    int before = atomic_load(&waits);
    /* A wait that began before the board was opened was not counted, so its end may find the count 0. */
    while (before > 0 && !atomic_compare_exchange_weak(&waits, &before, before - 1)) {}
    if (before == 1) {
        atomic_store_explicit(&board->wait.at_ns, 0, memory_order_release);
    }
}

void
fsdpc_board_operation(const char *op, const char *unit, const char *phase, int64_t at_ns)
{
    page *board = atomic_load_explicit(&own, memory_order_acquire);
    if (board) {
        write_line(&board->last, op, unit, phase, at_ns);
    }
}

void
fsdpc_board_device(const char *what, int64_t since_ns)
{
    page *board = atomic_load_explicit(&own, memory_order_acquire);
    if (board) {
        text entry;
        size_t used = append(&entry, 0, what ? what : "");
        publish(&board->device, &entry, used, what ? since_ns : 0);
    }
}

int64_t
fsdpc_board_since_ns(void)
{
    page *board = atomic_load_explicit(&own, memory_order_acquire);
    return board ? atomic_load_explicit(&board->wait.at_ns, memory_order_acquire) : 0;
}
