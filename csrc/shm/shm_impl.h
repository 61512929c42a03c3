/* Private to this folder: the control area and the handle of a segment.
 *
 *   offset 0                     sizeof(fsdpc_shm_control)             file_bytes (sparse)
 *   | control: failure, barrier, |  allocated by fsdpc_shm_alloc, in the same order on all ranks  |
 *   | one hot line and one text  |
 *   | block per rank             |
 *
 * Every word of the control area that two ranks may touch at once is a C11 atomic. The text blocks
 * are plain bytes, published by an atomic (the failure word, or a barrier).
 *
 * Files: shm_state.c: clock, failure word, forks; shm.c: creation and destruction; shm_map.c: mapping;
 * shm_rendezvous.c and shm_host.c: the rendezvous of the ranks; shm_watch.c: detection of peers' deaths;
 * shm_wait.c: sleeping; shm_sync.c: barrier and agreement; shm_stuck.c: waits that a rank may end by
 * itself.
 */
#ifndef FSDPC_SHM_IMPL_H
#define FSDPC_SHM_IMPL_H

#include <pthread.h>
#include <stdalign.h>
#include <sys/types.h>

#include "base/agree.h"
#include "shm/shm.h"

enum {
    FSDPC_SHM_VERSION = 3,
    FSDPC_SHM_NOTE_WORDS = 16,
    FSDPC_SHM_ABORT_BYTES = 1024,
    FSDPC_SHM_CORE_WORDS = 16,
    FSDPC_SHM_WAIT_TEXT = 256,
};

/* Kinds of group failure, in the upper half of the failure word; the rank is in the lower half. */
enum { FSDPC_SHM_DEAD = 1, FSDPC_SHM_ABORTED = 2 };

typedef struct fsdpc_shm_slot {
    alignas(128) _Atomic uint32_t barrier_seq; /* barriers entered */
    /* Incremented when a sleep in fsdpc_shm_sleep_word begins and when it ends: odd during a sleep. */
    _Atomic uint32_t blocked_seq;
    _Atomic uint32_t left;
    _Atomic int32_t pid;
    _Atomic int32_t process; /* fsdpc_shm_process() */
    _Atomic uint64_t wait;   /* the member's word of [Note: stuck] in shm_stuck.c */
    _Atomic int64_t note_ns; /* when `note` was written */
    _Atomic uint64_t note[FSDPC_SHM_NOTE_WORDS]; /* what the rank last waited for, as text */
} fsdpc_shm_slot;

typedef struct fsdpc_shm_block {
    char abort_text[FSDPC_SHM_ABORT_BYTES];
    fsdpc_agree_record agree;
} fsdpc_shm_block;

typedef struct fsdpc_shm_control {
    /* Incremented at every failure and departure; all sleepers also wait on this word. */
    alignas(128) _Atomic uint32_t broadcast;
    _Atomic uint32_t failure; /* 0, or kind << 16 | rank of the first failure */
    /* Both counters lie in one cache line: the last rank to arrive owns the line when it writes `done`. */
    alignas(128) _Atomic uint32_t barrier_arrived;
    _Atomic uint32_t barrier_done;
    alignas(128) _Atomic uint32_t barrier_sleepers;
    alignas(128) _Atomic uint64_t changes; /* number of changes by members: [Note: stuck] */
    /* The futex word on which waiting ranks sleep; each change increments it, like `changes`. */
    _Atomic uint32_t bell;
    _Atomic uint32_t asleep; /* 1: a rank may be asleep on `bell`; the next change must wake it */
    alignas(128) _Atomic uint32_t reserving; /* the rank that allocates pages, plus 1; or 0 */
    _Atomic uint64_t reserved_end;           /* pages below this offset are allocated */
    alignas(128) _Atomic uint64_t cores[FSDPC_SHM_CORE_WORDS]; /* bitmap: cores of any rank */
    fsdpc_shm_slot slots[FSDPC_SHM_MAX_RANKS];
    fsdpc_shm_block blocks[FSDPC_SHM_MAX_RANKS];
} fsdpc_shm_control;

typedef struct fsdpc_shm_peer {
    int pidfd;  /* -1: none */
    int socket; /* -1: none; rank 0 has one to each peer, the others have only peers[0].socket */
} fsdpc_shm_peer;

struct fsdpc_shm {
    int rank, world;
    const int *numbers; /* fsdpc_shm_set_numbers */
    double timeout_s;
    pid_t owner;
    int forks; /* fsdpc_forks() at creation; a forked child gets another number from it */
    int fd;    /* the memfd */
    int spins; /* how often a wait spins before it sleeps; 0 if ranks outnumber cores */
    fsdpc_shm_control *control;
    uint64_t file_bytes, next_offset;
    fsdpc_shm_peer *peers;
    bool watch_sockets; /* there are no pidfds: the hang-up of a peer's socket means its death */
    bool watching;
    int stop_fd; /* eventfd that ends the watcher */
    pthread_t watcher;
    uint32_t barrier_seq;
    bool barrier_broken;
    _Atomic uint32_t waiters; /* number of threads of this rank that wait now */
    _Atomic uint32_t aborting;
    _Atomic int64_t reported_ns; /* when a long wait was reported last */
    /* Fields of shm_stuck.c, whose lock protects all of them except `process` and `serial`. */
    int process, entry; /* fsdpc_shm_process(); this segment's index in `joined`, or -1 */
    uint64_t serial;    /* the segment's number in this process, never used again */
    /* Bit sets of indices in `joined`. kin: the segments of this process. covered_by: the segments of this
     * process that have all members of this segment. */
    uint32_t kin, covered_by;
    int stands;    /* number of threads between stand_begin and stand_end */
    uint64_t rung; /* `changes` when this rank last rang the bells, plus 1; 0: it never did */
    char name[];
};

/* Tests set these to take the paths of older kernels. */
extern bool fsdpc_shm_without_pidfd;
extern bool fsdpc_shm_without_waitv;
/* Tests replace these so that ranks that are threads of one process share their mappings: the thread
 * sanitizer identifies memory by its address. */
extern void *(*fsdpc_shm_mmap)(void *, size_t, int, int, int, off_t);
extern int (*fsdpc_shm_munmap)(void *, size_t);
/* Identifies the process of a rank: getpid(), unless tests replace it for ranks that are threads. */
extern int (*fsdpc_shm_process)(void);

/* shm_state.c */
/* Returns false in a forked child of the rank. */
bool fsdpc_shm_is_owner(const fsdpc_shm *shm);
/* Wakes every sleeper of the segment: each checks its condition again. */
void fsdpc_shm_wake_all(fsdpc_shm *shm);
/* Returns FSDPC_OK, or FSDPC_E_STATE in a forked child. */
int fsdpc_shm_usable(const fsdpc_shm *shm);
/* Calls fsdpc_shm_reports.verdict. Returns false without a reporter, or in a forked child. */
bool fsdpc_shm_verdict(const fsdpc_shm *shm, bool gives_up, int *causes, int *count, char *text,
                       size_t bytes);
/* Records a failure if it is the group's first one, and wakes all ranks. */
void fsdpc_shm_fail(fsdpc_shm *shm, unsigned kind, int rank);
/* Returns the number by which messages call the rank: see fsdpc_shm_set_numbers. */
int fsdpc_shm_number(const fsdpc_shm *shm, int rank);
/* Writes a description of the wait, such as "gather of unit layers.3", into `text`. */
void fsdpc_shm_describe(const fsdpc_wait *what, char *text, size_t bytes);
/* Calls fsdpc_shm_interrupt_check. Returns FSDPC_OK, or FSDPC_E_INTERRUPT with an error text. */
int fsdpc_shm_interrupted(const fsdpc_wait *what);

/* Defined in shm_rendezvous.c. rendezvous: rank 0, which has shm->fd, accepts the other ranks and sends them
 * the memfd and the pidfds. confirm: all ranks send rank 0 the status of their set-up (`status`, with this
 * thread's error text), and all ranks succeed or all fail. */
int fsdpc_shm_rendezvous(fsdpc_shm *shm, int64_t deadline_ns);
int fsdpc_shm_confirm(fsdpc_shm *shm, int status, int64_t deadline_ns);
void fsdpc_shm_peers_close(fsdpc_shm *shm);

/* Defined in shm_watch.c. start starts the watcher, unless the group has one rank. stop ends and joins it. */
int fsdpc_shm_watch_start(fsdpc_shm *shm);
void fsdpc_shm_watch_stop(fsdpc_shm *shm);

/* Defined in shm_stuck.c. Call join after all members have written `process`. Call leave before the
 * control area is unmapped. */
void fsdpc_shm_stuck_join(fsdpc_shm *shm);
void fsdpc_shm_stuck_leave(fsdpc_shm *shm);
/* Wakes all ranks that wait for a change, although nothing has changed. */
void fsdpc_shm_ring(fsdpc_shm *shm);

/* Defined in shm_wait.c. Writes a description of this rank's wait into the rank's slot. */
void fsdpc_shm_note(fsdpc_shm *shm, const fsdpc_wait *what);
/* For waits after the rendezvous. Calls fsdpc_shm_interrupted. An interrupt also aborts the group: this
 * rank's program may catch the interrupt and go on. Then the other ranks would wait for calls that are
 * skipped. */
int fsdpc_shm_end_interrupted(fsdpc_shm *shm, const fsdpc_wait *what);

#endif
