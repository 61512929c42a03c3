/* Simulated calls to libc and the kernel, for the fiber that runs: memory, files, threads, clocks, futexes.
 *
 * The linker turns each call to NAME in the core into a call to __wrap_NAME (world.list). Descriptors and
 * process ids are numbers of the simulation. Shared files are real files, emptied after each run. If a rank
 * leaves the address of a file to the kernel, all ranks get the same address. The address identifies a futex.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum {
    LINGER_NS = 2000,
    FILES = SIM_RANKS,
    MAPPINGS = 256,
    FIRST_CLOCK = 1 << 20,
    SPURIOUS_IN = 24,
    CLOBBERED = 4096
};
#define SEEN_BYTES ((size_t)1 << 30)

/* A header in front of each block, so that the blocks of a dead rank can be found. */
typedef struct block {
    struct block *next, **link;
    size_t bytes;
    int rank;
} block;
enum { HEADER = 48 };
_Static_assert(sizeof(block) <= HEADER && HEADER % 16 == 0, "blocks stay aligned");

typedef struct mapping {
    char *address;
    size_t bytes;
    bool seen; /* part of a file's `base`, which all ranks share: munmap leaves it mapped */
} mapping;

static struct {
    block *blocks[SIM_RANKS + 1]; /* the last list: blocks that were made outside of a run */
    mapping mappings[SIM_RANKS + 1][MAPPINGS];
    int mapped[SIM_RANKS + 1];
    struct sim_file files[FILES];
    uint64_t asked; /* the number of the victim's calls so far that could be refused */
    int refused;
    bool need, closing[SIM_RANKS];
} w;

static const sim_case *
here(void)
{
    return sim_case_now();
}

/* --- refused calls --------------------------------------------------------------------------- */

bool
sim_refuse(int errnum, bool needed)
{
    const sim_case *c = here();
    if (c->fault != SIM_REFUSED || sim_rank() != c->victim || ++w.asked != c->at) {
        return false;
    }
    sim_note_fault();
    sim_say("is refused: %s", strerror(errnum));
    w.refused = errno = errnum;
    w.need = needed && !w.closing[c->victim];
    return true;
}

int
sim_refused(void)
{
    return w.refused;
}

bool
sim_refused_need(void)
{
    return w.need;
}

void
sim_note_close(void)
{
    w.closing[sim_rank()] = true;
}

/* --- heap ------------------------------------------------------------------------------------ */

static void *
keep(block *made, size_t bytes)
{
    const int rank = sim_rank();
    if (!made) {
        return NULL;
    }
    *made = (block){.next = w.blocks[rank], .link = &w.blocks[rank], .bytes = bytes, .rank = rank};
    if (made->next) {
        made->next->link = &made->next;
    }
    w.blocks[rank] = made;
    return (char *)made + HEADER;
}

static void
forget(block *gone)
{
    *gone->link = gone->next;
    if (gone->next) {
        gone->next->link = gone->link;
    }
}

void *
__wrap_malloc(size_t bytes)
{
    return keep(malloc(bytes + HEADER), bytes);
}

void *
__wrap_calloc(size_t count, size_t bytes)
{
    return keep(calloc(1, count * bytes + HEADER), count * bytes);
}

void
__wrap_free(void *memory)
{
    if (memory) {
        block *gone = (block *)((char *)memory - HEADER);
        forget(gone);
        memset(memory, 0xdd, gone->bytes < CLOBBERED ? gone->bytes : CLOBBERED);
        free(gone);
    }
}

void *
__wrap_realloc(void *memory, size_t bytes)
{
    void *made = __wrap_malloc(bytes);
    if (made && memory) {
        size_t held = ((block *)((char *)memory - HEADER))->bytes;
        memcpy(made, memory, held < bytes ? held : bytes);
        __wrap_free(memory);
    }
    return made;
}

/* --- files and mappings ---------------------------------------------------------------------- */

int
__wrap_memfd_create(const char *name, unsigned flags)
{
    sim_point("memfd_create");
    if (sim_refuse(EMFILE, true)) {
        return -1;
    }
    for (int i = 0; i < FILES; i++) {
        struct sim_file *file = &w.files[i];
        if (file->used) {
            continue;
        }
        if (!file->base) {
            file->real_fd = memfd_create(name, flags);
            file->base = mmap(NULL, SEEN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                              file->real_fd, 0);
            if (file->real_fd < 0 || file->base == MAP_FAILED) {
                abort();
            }
        }
        file->used = true;
        return sim_file_fd(file);
    }
    errno = EMFILE;
    return -1;
}

int
__wrap_ftruncate(int fd, off_t bytes)
{
    struct sim_file *file = sim_file_of(fd);
    if (sim_refuse(ENOMEM, true)) {
        return -1;
    }
    file->bytes = (uint64_t)bytes;
    return ftruncate(file->real_fd, SEEN_BYTES);
}

off_t
__wrap_lseek(int fd, off_t offset, int whence)
{
    (void)offset, (void)whence;
    return (off_t)sim_file_of(fd)->bytes;
}

int
__wrap_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    sim_point("fallocate");
    sim_flush();
    if (!(mode & FALLOC_FL_PUNCH_HOLE)) {
        return sim_refuse(ENOSPC, true) ? -1 : 0;
    }
    return fallocate(sim_file_of(fd)->real_fd, mode, offset, bytes);
}

int
__wrap_posix_fallocate(int fd, off_t offset, off_t bytes)
{
    struct sim_file *file = sim_file_of(fd);
    sim_point("posix_fallocate");
    if (sim_refuse(ENOSPC, true)) {
        return ENOSPC;
    }
    file->bytes = (uint64_t)(offset + bytes);
    return ftruncate(file->real_fd, SEEN_BYTES) == 0 ? 0 : errno;
}

static void
add_mapping(char *address, size_t bytes, bool seen)
{
    const int rank = sim_rank();
    if (w.mapped[rank] == MAPPINGS) {
        abort();
    }
    w.mappings[rank][w.mapped[rank]++] = (mapping){address, bytes, seen};
}

void *
__wrap_mmap(void *address, size_t bytes, int access, int flags, int fd, off_t offset)
{
    struct sim_file *file = fd >= 0 ? sim_file_of(fd) : NULL;
    sim_point("mmap");
    if (sim_refuse(ENOMEM, access != PROT_NONE)) { /* PROT_NONE: only for alignment, not needed */
        return MAP_FAILED;
    }
    if (file && (size_t)offset + bytes > SEEN_BYTES) {
        abort();
    }
    if (file && flags & MAP_SHARED && !(flags & MAP_FIXED)) {
        add_mapping(file->base + offset, bytes, true);
        return file->base + offset;
    }
    char *mapped = mmap(address, bytes, access, flags, file ? file->real_fd : fd, offset);
    if (mapped != MAP_FAILED && !(flags & MAP_FIXED)) {
        add_mapping(mapped, bytes, false);
    }
    return mapped;
}

/* Unmaps [address, address + bytes), which must be a whole mapping or one end of a mapping. */
int
__wrap_munmap(void *address, size_t bytes)
{
    const int rank = sim_rank();
    char *from = address;
    sim_point("munmap");
    sim_flush();
    for (int i = w.mapped[rank] - 1; i >= 0; i--) {
        mapping *each = &w.mappings[rank][i];
        if (from < each->address || from + bytes > each->address + each->bytes ||
            (each->seen && (from != each->address || bytes != each->bytes))) {
            continue;
        }
        bool seen = each->seen;
        size_t before = (size_t)(from - each->address), after = each->bytes - before - bytes;
        if (before && after) {
            abort();
        }
        if (!before && !after) {
            *each = w.mappings[rank][--w.mapped[rank]];
        } else {
            each->address += before ? 0 : bytes;
            each->bytes -= bytes;
        }
        return seen ? 0 : munmap(address, bytes);
    }
    sim_violation("rank %d unmaps %zu bytes that are not mapped", rank, bytes);
    return 0;
}

int
__wrap_madvise(void *address, size_t bytes, int advice)
{
    sim_flush();
    return advice == MADV_DONTNEED ? madvise(address, bytes, advice) : 0;
}

uint64_t
__wrap_fsdpc_room_free(void)
{
    return UINT64_MAX;
}

int
__wrap_fsdpc_room_check(size_t bytes, const char *who)
{
    (void)bytes, (void)who;
    return 0;
}

/* --- time ------------------------------------------------------------------------------------ */

int
__wrap_clock_gettime(clockid_t clock, struct timespec *out)
{
    const int64_t ns = clock >= FIRST_CLOCK ? sim_used_ns(clock - FIRST_CLOCK) : sim_now_ns();
    *out = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    return 0;
}

int
__wrap_clock_getcpuclockid(pid_t pid, clockid_t *clock)
{
    *clock = FIRST_CLOCK + (pid - SIM_FIRST_PID);
    return sim_is_over(pid - SIM_FIRST_PID) ? ESRCH : 0;
}

int
__wrap_nanosleep(const struct timespec *time, struct timespec *left)
{
    (void)left;
    (void)sim_sleep(sim_now_ns() + (int64_t)time->tv_sec * 1000000000 + time->tv_nsec, "nanosleep");
    return 0;
}

int
__wrap_sched_yield(void)
{
    sim_yield();
    return 0;
}

/* --- processes and threads ------------------------------------------------------------------- */

pid_t
__wrap_getpid(void)
{
    return SIM_FIRST_PID + sim_rank();
}

int
__wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *out)
{
    (void)pid;
    memset(out, 0, bytes);
    for (int i = 0; i < here()->cores; i++) {
        CPU_SET((size_t)i, out);
    }
    return 0;
}

int
__wrap_getrlimit(int which, struct rlimit *out)
{
    (void)which;
    *out = (struct rlimit){RLIM_INFINITY, RLIM_INFINITY};
    return 0;
}

/* __wrap_pthread_create in program.c calls this. */
int
sim_pthread_create(pthread_t *out, void *(*function)(void *), void *argument)
{
    sim_point("pthread_create");
    sim_flush();
    if (sim_refuse(EAGAIN, true)) {
        return EAGAIN;
    }
    int thread = sim_start_thread(function, argument);
    *out = (pthread_t)thread;
    return thread < 0 ? EAGAIN : 0;
}

int
__wrap_pthread_join(pthread_t thread, void **out)
{
    (void)out;
    sim_join_thread((int)thread);
    return 0;
}

int
__wrap_pthread_sigmask(int how, const sigset_t *set, sigset_t *before)
{
    (void)how, (void)set, (void)before;
    return 0;
}

int
__wrap_pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void))
{
    (void)before, (void)parent, (void)child;
    return 0;
}

int
__wrap_sigaction(int number, const struct sigaction *new, struct sigaction *old)
{
    (void)number, (void)new;
    if (old) {
        memset(old, 0, sizeof *old);
    }
    return 0;
}

/* --- futexes --------------------------------------------------------------------------------- */

typedef struct waitv {
    uint64_t value, address;
    uint32_t flags, reserved;
} waitv;

static long
failed(int errnum)
{
    errno = errnum;
    return -1;
}

static long
wait_on(void *const *words, const uint64_t *old, int count, int64_t until_ns)
{
    for (int i = 0; i < count; i++) {
        if (__atomic_load_n((uint32_t *)words[i], __ATOMIC_SEQ_CST) != (uint32_t)old[i]) {
            return failed(EAGAIN);
        }
    }
    if (here()->spurious && sim_draw() % SPURIOUS_IN == 0) {
        return failed(EINTR);
    }
    return sim_sleep_on(words, count, until_ns) ? 0 : failed(ETIMEDOUT);
}

static int64_t
ns_of(const struct timespec *time)
{
    return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
}

long
__wrap_syscall(long number, ...)
{
    va_list args;
    va_start(args, number);
    long a[6];
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(args, long);
    }
    va_end(args);
    sim_flush();
    if (number == SYS_futex && (int)a[1] == FUTEX_WAKE) {
        sim_point("futex wake");
        return sim_wake((void *)a[0], (int)a[2]);
    }
    sim_point(number == SYS_futex || number == SYS_futex_waitv ? "futex wait" : "syscall");
    if (here()->lingers && sim_draw() % 2) {
        (void)sim_sleep(sim_now_ns() + 1 + (int64_t)(sim_draw() % LINGER_NS), "futex wait");
    }
    if (number == SYS_futex && (int)a[1] == FUTEX_WAIT) {
        void *words[] = {(void *)a[0]};
        const uint64_t old[] = {(uint32_t)a[2]};
        return wait_on(words, old, 1, sim_now_ns() + ns_of((const struct timespec *)a[3]));
    }
    if (number == SYS_futex_waitv && !here()->without_waitv) {
        const waitv *entries = (const waitv *)a[0];
        void *words[] = {(void *)entries[0].address, (void *)entries[1].address};
        const uint64_t old[] = {entries[0].value, entries[1].value};
        return wait_on(words, old, (int)a[1], ns_of((const struct timespec *)a[3]));
    }
    extern int sim_open_pidfd(int rank);
    if (number == SYS_pidfd_open && !here()->without_pidfd) {
        if (sim_refuse(EMFILE, false)) {
            return -1;
        }
        return sim_open_pidfd((int)a[0] - SIM_FIRST_PID);
    }
    return failed(ENOSYS);
}

/* --- a run ----------------------------------------------------------------------------------- */

void
sim_world_begin(const sim_case *c)
{
    (void)c;
    w.asked = 0;
    w.refused = 0;
    w.need = false;
    memset(w.closing, 0, sizeof w.closing);
    sim_descriptors_begin();
}

const char *
sim_world_leftovers(int rank, bool expected)
{
    static char text[160];
    int blocks = 0, descriptors = sim_descriptors_of(rank), mappings = w.mapped[rank];
    while (w.blocks[rank]) {
        block *gone = w.blocks[rank];
        forget(gone);
        free(gone);
        blocks++;
    }
    for (int i = 0; i < w.mapped[rank]; i++) {
        const mapping *each = &w.mappings[rank][i];
        if (!each->seen) {
            munmap(each->address, each->bytes);
        }
    }
    w.mapped[rank] = 0;
    sim_descriptors_close(rank);
    text[0] = '\0';
    if (!expected && (blocks || descriptors || mappings)) {
        snprintf(text, sizeof text, "%d blocks, %d descriptors, %d mappings", blocks, descriptors,
                 mappings);
    }
    return text;
}

void
sim_world_end(void)
{
    for (int i = 0; i < FILES; i++) {
        if (w.files[i].used && ftruncate(w.files[i].real_fd, 0) != 0) {
            abort();
        }
        w.files[i].used = false;
    }
}
