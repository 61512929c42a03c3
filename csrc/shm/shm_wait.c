/* Sleeping in the shared segment until a word changes, and the errors of a wait.
 *
 * A sleeper waits on its own word and on the control area's broadcast word at once (futex_waitv),
 * so that a death or an abort, which increment the broadcast word, end every sleep. Without
 * futex_waitv a sleeper waits on its word alone, in short slices. A sleep ends after one slice in
 * both cases: callers loop, and check signals and departures in between.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/board.h"
#include "base/deadline.h"
#include "base/pause.h"
#include "shm/shm_impl.h"
#include "base/status.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

enum { SLICE_NS = 100 * 1000 * 1000, SHORT_SLICE_NS = 10 * 1000 * 1000 };

/* The kernel's struct futex_waitv, which older headers lack. WAITV_U32 marks a 32-bit shared futex. */
typedef struct waitv_entry {
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
} waitv_entry;
enum { WAITV_U32 = 2 };

bool fsdpc_shm_without_waitv;
static _Atomic int waitv_missing;

void
fsdpc_shm_note(fsdpc_shm *shm, const fsdpc_wait *what)
{
    union {
        uint64_t words[FSDPC_SHM_NOTE_WORDS];
        char text[FSDPC_SHM_NOTE_WORDS * 8];
    } note;
    fsdpc_shm_describe(what, note.text, sizeof note.text);
    size_t words = strlen(note.text) / 8 + 1;
    fsdpc_shm_slot *slot = &shm->control->slots[shm->rank];
    for (size_t i = 0; i < words; i++) {
        atomic_store_explicit(&slot->note[i], note.words[i], memory_order_relaxed);
    }
    atomic_store_explicit(&slot->note_ns, fsdpc_shm_now_ns(), memory_order_release);
}

/* Reads a peer's note. The text may be torn while the peer writes, but is always terminated. */
static void
read_note(const fsdpc_shm_slot *slot, char *text, size_t bytes)
{
    union {
        uint64_t words[FSDPC_SHM_NOTE_WORDS];
        char text[FSDPC_SHM_NOTE_WORDS * 8];
    } note;
    for (int i = 0; i < FSDPC_SHM_NOTE_WORDS; i++) {
        note.words[i] = atomic_load_explicit(&slot->note[i], memory_order_relaxed);
    }
    note.text[sizeof note.text - 1] = '\0';
    snprintf(text, bytes, "%s", note.text);
}

int
fsdpc_shm_end_interrupted(fsdpc_shm *shm, const fsdpc_wait *what)
{
    const int status = fsdpc_shm_interrupted(what);
    if (status != FSDPC_OK) {
        fsdpc_shm_abort(shm, fsdpc_error_text());
    }
    return status;
}

static void
futex_wait(_Atomic uint32_t *word, uint32_t old, int64_t until_ns)
{
    int64_t left_ns = until_ns - fsdpc_shm_now_ns();
    if (left_ns > SHORT_SLICE_NS) {
        left_ns = SHORT_SLICE_NS;
    }
    if (left_ns > 0) {
        struct timespec slice = {.tv_sec = 0, .tv_nsec = (long)left_ns};
        syscall(SYS_futex, word, FUTEX_WAIT, old, &slice, NULL, 0);
    }
}

/* Returns after a change, a signal or a spurious wake, or at until_ns; the caller finds out the reason. */
static void
sleep_until(fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old, uint32_t broadcast,
            int64_t until_ns)
{
    if (fsdpc_shm_without_waitv || atomic_load_explicit(&waitv_missing, memory_order_relaxed)) {
        futex_wait(word, old, until_ns);
        return;
    }
    waitv_entry entries[2] = {
        {.value = old, .address = (uintptr_t)word, .flags = WAITV_U32},
        {.value = broadcast, .address = (uintptr_t)&shm->control->broadcast, .flags = WAITV_U32},
    };
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    long rc = syscall(SYS_futex_waitv, entries, 2, 0, &until, CLOCK_MONOTONIC);
    if (rc < 0 && errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
        atomic_store_explicit(&waitv_missing, 1, memory_order_relaxed);
    }
}

/* Sets and returns FSDPC_E_TIMEOUT. `missing` numbers the ranks as messages do (fsdpc_shm_set_numbers). */
static int
late_error(fsdpc_shm *shm, const fsdpc_wait *what, const int *missing, int count, const char *more)
{
    char op[FSDPC_SHM_WAIT_TEXT];
    fsdpc_shm_describe(what, op, sizeof op);
    const fsdpc_late late = {
        fsdpc_shm_number(shm, shm->rank), shm->timeout_s, op, missing, count, more};
    return fsdpc_late_error(&late);
}

/* Several threads of one rank may wait at once: only the first to begin and the last to end increment
 * blocked_seq. */
static void
begin_blocked(fsdpc_shm *shm, const fsdpc_wait *what)
{
    if (atomic_fetch_add(&shm->waiters, 1) == 0) {
        fsdpc_shm_note(shm, what);
        atomic_fetch_add(&shm->control->slots[shm->rank].blocked_seq, 1);
    }
}

static void
end_blocked(fsdpc_shm *shm)
{
    if (atomic_fetch_sub(&shm->waiters, 1) == 1) {
        atomic_fetch_add(&shm->control->slots[shm->rank].blocked_seq, 1);
    }
}

/* Calls the reporter's `linger` if this thread's wait is long. Makes no system call for a short wait. */
static void
report_long_wait(fsdpc_shm *shm, int64_t now_ns)
{
    static const int64_t second_ns = 1000000000;
    const fsdpc_shm_reports *reporter = fsdpc_shm_reporter;
    int64_t since_ns = fsdpc_board_since_ns();
    if (!reporter || since_ns == 0 || (double)(now_ns - since_ns) < reporter->after_s * 1e9) {
        return;
    }
    int64_t last_ns = atomic_load(&shm->reported_ns);
    int64_t pause_ns = reporter->after_s < 1 ? (int64_t)(reporter->after_s * 1e9) : second_ns;
    if (now_ns - last_ns >= pause_ns &&
        atomic_compare_exchange_strong(&shm->reported_ns, &last_ns, now_ns)) {
        reporter->linger(shm->name);
    }
}

static int
sleep_slice(fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old, int64_t deadline_ns,
            const fsdpc_wait *what)
{
    /* Read before the check: a failure after the check changes this word, so that no sleep begins. */
    uint32_t broadcast = atomic_load(&shm->control->broadcast);
    FSDPC_TRY(fsdpc_shm_check(shm, what));
    int64_t now_ns = fsdpc_shm_now_ns();
    if (now_ns >= deadline_ns) {
        return late_error(shm, what, NULL, 0, "");
    }
    report_long_wait(shm, now_ns);
    int64_t until_ns = now_ns + SLICE_NS < deadline_ns ? now_ns + SLICE_NS : deadline_ns;
    sleep_until(shm, word, old, broadcast, until_ns);
    if (atomic_load_explicit(word, memory_order_acquire) != old) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_shm_end_interrupted(shm, what));
    return fsdpc_shm_check(shm, what);
}

bool
fsdpc_shm_spin(const fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old)
{
    for (int i = 0; i <= shm->spins; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) {
            return true;
        }
        fsdpc_pause();
    }
    return false;
}

int
fsdpc_shm_sleep_word(fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old, int64_t deadline_ns,
                     const fsdpc_wait *what)
{
    FSDPC_TRY(fsdpc_shm_usable(shm));
    begin_blocked(shm, what);
    int status = sleep_slice(shm, word, old, deadline_ns, what);
    end_blocked(shm);
    return status;
}

int
fsdpc_shm_wait_word(fsdpc_shm *shm, _Atomic uint32_t *word, uint32_t old, int64_t deadline_ns,
                    const fsdpc_wait *what)
{
    return fsdpc_shm_spin(shm, word, old) ? FSDPC_OK
                                          : fsdpc_shm_sleep_word(shm, word, old, deadline_ns, what);
}

bool
fsdpc_shm_slept_since(const fsdpc_shm *shm, int rank, int64_t since_ns)
{
    return atomic_load_explicit(&shm->control->slots[rank].note_ns, memory_order_acquire) >=
           since_ns;
}

/* --- texts ---------------------------------------------------------------------------------- */

/* Appends to `text`, for example, "; rank 2 (pid 81) waits in gather of unit 3 since 12.0 s". */
static void
append_state(const fsdpc_shm *shm, int rank, char *text, size_t bytes)
{
    size_t used = strlen(text);
    const fsdpc_shm_slot *slot = &shm->control->slots[rank];
    char note[FSDPC_SHM_NOTE_WORDS * 8];
    int64_t noted_ns = atomic_load_explicit(&slot->note_ns, memory_order_acquire);
    read_note(slot, note, sizeof note);
    double ago_s = (double)(fsdpc_shm_now_ns() - noted_ns) * 1e-9;
    const int pid = (int)atomic_load(&slot->pid), number = fsdpc_shm_number(shm, rank);
    if (atomic_load(&slot->left)) {
        snprintf(text + used, bytes - used, "; rank %d (pid %d) has left", number, pid);
    } else if (noted_ns == 0) {
        snprintf(text + used, bytes - used, "; rank %d (pid %d) has not waited yet", number, pid);
    } else if (atomic_load(&slot->blocked_seq) & 1) {
        snprintf(text + used, bytes - used, "; rank %d (pid %d) waits in %s since %.1f s", number,
                 pid, note, ago_s);
    } else {
        snprintf(text + used, bytes - used, "; rank %d (pid %d) was last seen in %s, %.1f s ago",
                 number, pid, note, ago_s);
    }
}

static bool
contains(const int *numbers, int count, int number)
{
    bool found = false;
    for (int i = 0; i < count; i++) {
        found = found || numbers[i] == number;
    }
    return found;
}

int
fsdpc_shm_timeout_error(fsdpc_shm *shm, const fsdpc_wait *what, const int *missing,
                        int missing_count)
{
    enum { STATES = 8 };
    char more[FSDPC_ERROR_BYTES] = "", states[1024] = "";
    int causes[FSDPC_SHM_MAX_RANKS], numbers[FSDPC_SHM_MAX_RANKS];
    int count = missing ? missing_count : 0;
    for (int i = 0; i < count; i++) {
        causes[i] = numbers[i] = fsdpc_shm_number(shm, missing[i]);
    }
    for (int i = 0; i < count && i < STATES; i++) {
        append_state(shm, missing[i], states, sizeof states);
    }
    /* If another rank has just given up, its error names the cause, so return that error and no timeout.
     * `states` may say that the other rank has left, but it gave up before it left. */
    FSDPC_TRY(fsdpc_shm_check(shm, what));
    if (fsdpc_shm_verdict(shm, true, causes, &count, more, sizeof more)) {
        /* If this rank is the cause, `more` says so; the list then names only the missing ranks. */
        return contains(causes, count, fsdpc_shm_number(shm, shm->rank))
                   ? late_error(shm, what, numbers, missing ? missing_count : 0, more)
                   : late_error(shm, what, causes, count, more);
    }
    return late_error(shm, what, missing ? numbers : NULL, missing_count, states);
}

/* A rank also leaves if its group has failed. The error is then the group's failure, which came first. */
int
fsdpc_shm_left_error(fsdpc_shm *shm, int rank, const fsdpc_wait *what)
{
    char op[FSDPC_SHM_WAIT_TEXT];
    FSDPC_TRY(fsdpc_shm_check(shm, what));
    fsdpc_shm_describe(what, op, sizeof op);
    return fsdpc_error(FSDPC_E_PEER,
                       "rank %d has left (its program ended or closed the group) while rank %d "
                       "waits in %s",
                       fsdpc_shm_number(shm, rank), fsdpc_shm_number(shm, shm->rank), op);
}
