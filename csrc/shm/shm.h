/* One memory segment shared by the ranks of a host, with waits that always end.
 *
 * The segment is a memfd (nothing is left in the file system after a crash) that every rank maps.
 * It begins with a control area; fsdpc_shm_alloc allocates the rest, by the same calls on all
 * ranks, so that offsets agree without messages. The file is sparse: pages take memory when
 * touched. Rank 0 creates the file and passes it to the others over an abstract UNIX socket, with
 * the pidfds of all ranks. One watcher thread of each rank polls the peers' pidfds, so that a death
 * is detected within milliseconds: the watcher writes the first dead rank into the segment by
 * compare-and-swap and wakes all waiters.
 *
 * Every wait spins a little (not at all when there are more ranks than cores), then sleeps on a
 * futex in slices, and ends with FSDPC_OK, FSDPC_E_PEER ("rank 2 (pid 81) died ..."),
 * FSDPC_E_TIMEOUT (deadline.h), FSDPC_E_INTERRUPT, or FSDPC_E_COMM if this rank has aborted the group.
 */
#ifndef FSDPC_SHM_H
#define FSDPC_SHM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdpc_shm fsdpc_shm;

enum { FSDPC_SHM_MAX_RANKS = 256 };

/* Called between slices of a sleep, without locks held. A non-zero result, with the reason as this thread's
 * error text, ends the wait with FSDPC_E_INTERRUPT and aborts the group. The Python layer sets this to its
 * signal check. May be NULL. Process wide. */
extern int (*fsdpc_shm_interrupt_check)(void);

/* Functions by which the layer above, which can see the ranks' programs, reports on ranks that do not arrive.
 * Process wide. Both are called without locks held, by a thread that waits or has just given up. */
typedef struct fsdpc_shm_reports {
    double after_s; /* a wait that lasts longer calls `linger` about once a second */
    void (*linger)(const char *group);
    /* Reads the verdict on why ranks gave up; a group makes only one verdict. `causes` has room for
     * FSDPC_SHM_MAX_RANKS ranks: before the call, the *count ranks that this rank waits for; after it, the
     * *count ranks that are the cause. `text` gets a table of all ranks. `gives_up`: this rank has reached
     * its deadline; then it makes the verdict if the group has none. Returns false if there is still none. */
    bool (*verdict)(const char *group, bool gives_up, int *causes, int *count, char *text,
                    size_t bytes);
} fsdpc_shm_reports;
/* The reports of this process; NULL if nothing makes reports. */
extern const fsdpc_shm_reports *fsdpc_shm_reporter;

/* Creates a segment. Collective over the ranks of the host. `name` is the same on all ranks and unique to
 * this group (the name of the abstract socket). `timeout_s` > 0 is the deadline of this call and of every
 * later wait. world == 1 needs no peer. Errors: FSDPC_E_INVAL, FSDPC_E_NOMEM, FSDPC_E_IO, FSDPC_E_MISMATCH,
 * FSDPC_E_TIMEOUT, FSDPC_E_PEER, FSDPC_E_INTERRUPT, FSDPC_E_INTERNAL. */
int fsdpc_shm_create(int rank, int world, const char *name, double timeout_s, fsdpc_shm **out);
/* Frees the handle. Local; never waits for a peer. Marks this rank as left, so that peers that need it get an
 * error instead of waiting. NULL is allowed. Mappings made by fsdpc_shm_map stay valid. */
void fsdpc_shm_free(fsdpc_shm *shm);
/* From now on, messages show rank r as numbers[r], its number in a larger group. Borrows `numbers`. Local. */
void fsdpc_shm_set_numbers(fsdpc_shm *shm, const int *numbers);
/* Marks this rank as left and does nothing else. For the orderly end of a program that still uses the
 * segment. Local; memory stays valid. */
void fsdpc_shm_leave(fsdpc_shm *shm);

/* Allocates `bytes` (rounded up to pages) of the file. All ranks make the same calls in the same order.
 * *offset is the position in the file. With `reserve` the pages are allocated now, so that a lack of memory
 * ends this call with FSDPC_E_NOMEM instead of raising a signal later. Without `reserve` the call is local
 * arithmetic, and pages take memory when touched. */
int fsdpc_shm_alloc(fsdpc_shm *shm, size_t bytes, bool reserve, uint64_t *offset);
/* Gives pages back to the kernel, which makes their contents zero; the address range stays usable. */
int fsdpc_shm_discard(fsdpc_shm *shm, uint64_t offset, size_t bytes);
/* Maps part of the file read-write. If `address` is NULL, the kernel chooses the address. Otherwise the
 * mapping replaces what was mapped at `address`; the caller owns that range and lists it for forks
 * (base/forks.h). Offsets and bytes are page multiples. */
int fsdpc_shm_map(fsdpc_shm *shm, uint64_t offset, size_t bytes, void *address, void **out);
/* Maps part of the file at `address`, as private memory that can only be read. */
int fsdpc_shm_show(fsdpc_shm *shm, uint64_t offset, size_t bytes, void *address);
/* Undoes fsdpc_shm_map. */
void fsdpc_shm_unmap(void *address, size_t bytes);
size_t fsdpc_shm_page_bytes(void);

/* --- waiting -------------------------------------------------------------------------------- */

/* The reason of a wait. The reason goes into error texts and, during the wait, into the segment, where
 * peers and reports read it. */
typedef struct fsdpc_wait {
    const char *op;   /* "gather", "reduce", "barrier" */
    const char *unit; /* name of the unit or "" */
} fsdpc_wait;

/* Spins, then sleeps, until *word != old. A death, the deadline or an interrupt ends the wait with an error.
 * `deadline_ns` is on CLOCK_MONOTONIC (fsdpc_shm_deadline). Spurious returns are allowed: callers loop. */
int fsdpc_shm_wait_word(fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old, int64_t deadline_ns,
                        const fsdpc_wait *what);
/* The two halves of fsdpc_shm_wait_word. Between them a caller can publish that it will sleep. Then other
 * ranks make a system call only to wake a rank that sleeps, and none for a rank that still spins.
 * fsdpc_shm_spin returns true if *word has changed. */
bool fsdpc_shm_spin(const fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old);
int fsdpc_shm_sleep_word(fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old, int64_t deadline_ns,
                         const fsdpc_wait *what);
/* Wakes every waiter of a word in the segment. */
void fsdpc_shm_wake(_Atomic uint32_t *word);
/* Returns the current time plus the segment's timeout. */
int64_t fsdpc_shm_deadline(const fsdpc_shm *shm);
int64_t fsdpc_shm_now_ns(void);

/* Returns FSDPC_OK if the group can be used. Returns FSDPC_E_PEER, with text, if another rank died or aborted
 * the group, and FSDPC_E_COMM if this rank aborted it. A rank that left in good order (fsdpc_shm_leave) does
 * not count: only a wait for that rank fails. */
int fsdpc_shm_check(fsdpc_shm *shm, const fsdpc_wait *what);
/* Returns true if `rank` has called fsdpc_shm_leave or fsdpc_shm_free, even if it has exited since. */
bool fsdpc_shm_left(const fsdpc_shm *shm, int rank);
/* Marks the group broken on all ranks with this rank's error text: every wait of another rank ends with
 * FSDPC_E_PEER and quotes the text. The first abort wins. */
void fsdpc_shm_abort(fsdpc_shm *shm, const char *text);

/* Returns fsdpc_late_error() for this rank, with the `missing` ranks (NULL or a list) and the last wait of
 * each. If the group had failed before, returns the group's failure instead. */
int fsdpc_shm_timeout_error(fsdpc_shm *shm, const fsdpc_wait *what, const int *missing,
                            int missing_count);

/* Returns FSDPC_E_PEER with a text that says that `rank` left while this rank waits for it. If the group
 * failed before, returns that failure instead. */
int fsdpc_shm_left_error(fsdpc_shm *shm, int rank, const fsdpc_wait *what);

/* --- waits that a rank may also end by itself: [Note: stuck] in shm_stuck.c -------------------- */

enum { FSDPC_SHM_GROUPS = 32 }; /* a process publishes its waits in at most so many segments */

/* A waiter's fallback when no other rank can end the wait: [Note: stuck] describes each. If several waiters
 * have fallbacks, only those whose fallback comes last in this list use it. */
enum fsdpc_shm_way { FSDPC_WAY_NONE, FSDPC_WAY_LEAVE, FSDPC_WAY_OLDER, FSDPC_WAY_PRIVATE };

/* How many changes each of this process's segments had counted when the view was read. `serial` identifies
 * the segment. */
typedef struct fsdpc_shm_view {
    uint32_t bell;
    int count;
    struct {
        uint64_t serial, changes;
    } of[FSDPC_SHM_GROUPS];
} fsdpc_shm_view;

/* Call this after a change that other ranks may wait for: it counts the change and wakes those ranks. */
void fsdpc_shm_notify(fsdpc_shm *shm);
/* Fills *view. Call this before you examine the state that the wait is for. */
void fsdpc_shm_read_changes(fsdpc_shm *shm, fsdpc_shm_view *view);
/* Returns true in a deadlock: all ranks that could end this rank's wait have been waiting since `view`, and
 * none of them has a better fallback than `way`, which this rank must use now. False for WAY_NONE. */
bool fsdpc_shm_stuck(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way);
/* Call these around a wait: begin; then read_changes, examine the state, stand, repeatedly; then end. */
void fsdpc_shm_stand_begin(fsdpc_shm *shm);
void fsdpc_shm_stand_end(fsdpc_shm *shm);
/* Sleeps until a change is counted after `view` was read, but at most until `until_ns`. `way` is this rank's
 * fallback. Returns at once if fsdpc_shm_stuck would return true. Errors are those of fsdpc_shm_wait_word,
 * with FSDPC_E_TIMEOUT at `until_ns`. */
int fsdpc_shm_stand(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way,
                    int64_t until_ns, const fsdpc_wait *what);
/* Returns true while the process of `rank` waits in fsdpc_shm_stand, for this or another group. */
bool fsdpc_shm_stands(const fsdpc_shm *shm, int rank);
/* Returns true if `rank` has begun a sleep in this group since `since_ns`. */
bool fsdpc_shm_slept_since(const fsdpc_shm *shm, int rank, int64_t since_ns);
/* Returns the processor time that the process of `rank` has used, or -1. */
int64_t fsdpc_shm_cpu_ns(const fsdpc_shm *shm, int rank);

/* --- collectives over the control area ------------------------------------------------------- */

int fsdpc_shm_barrier(fsdpc_shm *shm, const fsdpc_wait *what);
/* Returns true while `rank` is in a barrier that this rank has not entered: `rank` waits for this rank. */
bool fsdpc_shm_waits_for_this_rank(const fsdpc_shm *shm, int rank);
/* Returns true if `rank` has entered the barrier that has just failed on this rank. */
bool fsdpc_shm_came(const fsdpc_shm *shm, int rank);
/* Compares the ranks' texts by a digest (of the length and the first 64 KiB). If the texts differ, returns
 * FSDPC_E_MISMATCH on every rank: the error quotes the first differing line (in the first 4 KiB) of rank 0
 * and of the lowest rank with another text. Collective. */
int fsdpc_shm_agree(fsdpc_shm *shm, const char *text, const fsdpc_wait *what);

#endif
