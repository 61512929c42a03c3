/* Runs a function as several ranks, each a forked process or a thread, with a deadline.
 *
 * A rank function gets the run, a struct with the group's name and one result per rank. The run is in memory
 * that all ranks share. Ranks that are processes have their own descriptors, and can die as in real use.
 * Ranks that are threads let the thread sanitizer see all memory accesses. Such threads share one mapping of
 * the segment, because the sanitizer tells memory apart by its address. Fork processes before the first
 * thread is made.
 */
#ifndef FSDPC_RANKS_H
#define FSDPC_RANKS_H

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "shm/shm.h"
#include "shm/shm_impl.h"
#include "test.h"

enum { RANKS_MAX = 8, RANKS_DEADLINE_S = 100 };

typedef struct rank_result {
    int status;
    char text[1024];
} rank_result;

typedef struct ranks_run {
    const char *what; /* what is tested; NULL: the function's name is used */
    int world;
    bool threads;
    bool kills; /* the rank `killed` is expected to die of SIGKILL */
    int killed;
    int option;       /* for the function's own use */
    double timeout_s; /* 0: twice RANKS_DEADLINE_S */
    char name[64];    /* the group's name */
    _Atomic uint32_t flags[RANKS_MAX];
    _Atomic uint64_t counter;
    rank_result results[RANKS_MAX];
} ranks_run;

typedef void (*rank_function)(int rank, ranks_run *run);

/* Stores a rank's status and its error text in the run. */
__attribute__((unused)) static int
rank_keep(ranks_run *run, int rank, int status)
{
    run->results[rank].status = status;
    snprintf(run->results[rank].text, sizeof run->results[rank].text, "%s",
             status == FSDPC_OK ? "" : fsdpc_error_text());
    return status;
}

/* Checks the status that rank_keep stored, and that the stored error text contains `part`. */
__attribute__((unused)) static void
check_result(const ranks_run *run, int rank, int status, const char *part)
{
    CHECK_INT(run->results[rank].status, status);
    if (strstr(run->results[rank].text, part) == NULL) {
        TEST_FAIL("rank %d: error text '%s' lacks '%s'", rank, run->results[rank].text, part);
    }
}

__attribute__((unused)) static void
rank_sleep_ms(int ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&time, NULL);
}

/* Waits for a flag that another rank or the parent sets. Returns false if the deadline passes first. */
__attribute__((unused)) static bool
rank_await(_Atomic uint32_t *flag, uint32_t value)
{
    for (int i = 0; i < RANKS_DEADLINE_S * 500; i++) {
        if (atomic_load(flag) == value) {
            return true;
        }
        rank_sleep_ms(2);
    }
    return false;
}

/* --- processes ------------------------------------------------------------------------------ */

static void
ranks_reap(ranks_run *run, const pid_t *pids)
{
    int left = run->world;
    bool done[RANKS_MAX] = {false};
    for (int waited_ms = 0; left > 0; waited_ms += 2) {
        for (int i = 0; i < run->world; i++) {
            int status = 0;
            if (done[i] || waitpid(pids[i], &status, WNOHANG) != pids[i]) {
                continue;
            }
            done[i] = true;
            left--;
            bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            bool passed = WIFEXITED(status) && WEXITSTATUS(status) == 0;
            if (run->kills && i == run->killed ? !killed : !passed) {
                TEST_FAIL("rank %d of %d ended with wait status 0x%x", i, run->world, status);
            }
        }
        if (waited_ms == RANKS_DEADLINE_S * 1000) {
            TEST_FAIL("%d of %d ranks did not end", left, run->world);
            for (int i = 0; i < run->world; i++) {
                kill(pids[i], SIGKILL);
            }
        }
        rank_sleep_ms(2);
    }
}

static void
ranks_fork(ranks_run *run, rank_function function)
{
    pid_t pids[RANKS_MAX];
    fflush(NULL);
    for (int i = 0; i < run->world; i++) {
        pids[i] = fork();
        REQUIRE(pids[i] >= 0);
        if (pids[i] == 0) {
            int before = test_failures;
            function(i, run);
            exit(test_failures == before ? 0 : 1);
        }
    }
    ranks_reap(run, pids);
}

/* --- threads -------------------------------------------------------------------------------- */

typedef struct shared_mapping {
    ino_t file;
    off_t offset;
    size_t bytes;
    void *address;
    int users;
} shared_mapping;

enum { MAPPINGS = 256 };
static shared_mapping ranks_mappings[MAPPINGS];
/* If true, a mapping for which the caller chose an address stays at this address, and threads do not share
 * the mapping. Gather slots need this. */
static bool ranks_keep_addresses;
static pthread_mutex_t ranks_lock = PTHREAD_MUTEX_INITIALIZER;

static shared_mapping *
ranks_find_mapping(ino_t file, off_t offset, size_t bytes)
{
    for (int i = 0; i < MAPPINGS; i++) {
        shared_mapping *mapping = &ranks_mappings[i];
        if (mapping->users && mapping->file == file && mapping->offset == offset &&
            mapping->bytes == bytes) {
            mapping->users++;
            return mapping;
        }
    }
    return NULL;
}

static void *
ranks_mmap(void *address, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    struct stat file;
    if (address && ranks_keep_addresses) {
        return mmap(address, bytes, prot, flags, fd, offset);
    }
    REQUIRE(fstat(fd, &file) == 0);
    pthread_mutex_lock(&ranks_lock);
    shared_mapping *mapping = ranks_find_mapping(file.st_ino, offset, bytes);
    if (!mapping) {
        for (int i = 0; i < MAPPINGS && !mapping; i++) {
            mapping = ranks_mappings[i].users ? NULL : &ranks_mappings[i];
        }
        REQUIRE(mapping != NULL);
        *mapping =
            (shared_mapping){.file = file.st_ino, .offset = offset, .bytes = bytes, .users = 1};
        mapping->address = mmap(address, bytes, prot, flags, fd, offset);
        REQUIRE(mapping->address != MAP_FAILED);
    } else if (address) {
        munmap(address, bytes);
    }
    address = mapping->address;
    pthread_mutex_unlock(&ranks_lock);
    return address;
}

static int
ranks_munmap(void *address, size_t bytes)
{
    bool gone = true;
    pthread_mutex_lock(&ranks_lock);
    for (int i = 0; i < MAPPINGS; i++) {
        shared_mapping *mapping = &ranks_mappings[i];
        if (mapping->users && mapping->address == address) {
            gone = --mapping->users == 0;
        }
    }
    int status = gone ? munmap(address, bytes) : 0;
    pthread_mutex_unlock(&ranks_lock);
    return status;
}

typedef struct ranks_thread {
    int rank;
    ranks_run *run;
    rank_function function;
    pthread_t thread;
} ranks_thread;

static _Thread_local int ranks_own;

static int
ranks_process(void)
{
    return ranks_own;
}

static void *
ranks_thread_main(void *argument)
{
    ranks_thread *self = argument;
    ranks_own = self->rank + 1;
    self->function(self->rank, self->run);
    return NULL;
}

static void
ranks_start_threads(ranks_run *run, rank_function function)
{
    ranks_thread threads[RANKS_MAX];
    fsdpc_shm_mmap = ranks_mmap;
    fsdpc_shm_munmap = ranks_munmap;
    fsdpc_shm_process = ranks_process;
    /* A thread that hangs cannot be ended alone, so the alarm ends the whole program. */
    alarm(RANKS_DEADLINE_S * 2);
    for (int i = 0; i < run->world; i++) {
        threads[i] = (ranks_thread){.rank = i, .run = run, .function = function};
        REQUIRE(pthread_create(&threads[i].thread, NULL, ranks_thread_main, &threads[i]) == 0);
    }
    for (int i = 0; i < run->world; i++) {
        pthread_join(threads[i].thread, NULL);
    }
    alarm(0);
}

__attribute__((unused)) static ranks_run
ranks_do_as(const char *what, rank_function function, ranks_run plan)
{
    static int made;
    int before = test_failures;
    ranks_run *run =
        mmap(NULL, sizeof *run, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(run != MAP_FAILED);
    plan.what = plan.what ? plan.what : what;
    plan.timeout_s = plan.timeout_s > 0 ? plan.timeout_s : RANKS_DEADLINE_S * 2;
    snprintf(plan.name, sizeof plan.name, "test-%d-%d", (int)getpid(), made++);
    *run = plan;
    (run->threads ? ranks_start_threads : ranks_fork)(run, function);
    if (test_failures > before) {
        fprintf(stderr, "  in %s, %d ranks%s, option %d\n", run->what, run->world,
                run->threads ? " as threads" : "", run->option);
    }
    plan = *run;
    munmap(run, sizeof *run);
    return plan;
}

/* Runs a function as several ranks and returns the run after all have ended: ranks_do(meet, .world = 3). */
#define ranks_do(function, ...) ranks_do_as(#function, function, (ranks_run){__VA_ARGS__})

/* --- what is left behind --------------------------------------------------------------------- */

/* Returns the number of entries of a directory: descriptors in /proc/self/fd (including the one that reads
 * the directory), threads in /proc/self/task, names in /dev/shm. */
__attribute__((unused)) static int
count_entries(const char *directory)
{
    int count = 0;
    DIR *entries = opendir(directory);
    REQUIRE(entries != NULL);
    while (readdir(entries)) {
        count++;
    }
    closedir(entries);
    return count;
}

#endif
