/* Deadlock detection: when every rank waits, some of them may use a fallback.
 *
 * A rank that waits for others often has a fallback: private memory in place of a busy slot, or a
 * peer's values of an earlier pass. The rank should use its fallback if, and only if, all ranks wait for each
 * other. Ranks may wait in different places, for slots of different trees or of different groups.
 * So the state below belongs to the process, not to a tree or a group.
 *
 * [Note: stuck] Each segment counts the changes that its members make (`changes`), and has one
 * word per member. The word is 0 while the member does not wait; else it holds the count at
 * which the wait began and the member's fallback. The first three rules are kept by this file,
 * the others by its callers:
 *
 *   1. A process that has changed anything that a wait may depend on increments the count of
 *      every segment it is in: after the change, and before it waits or examines a wait again.
 *   2. A waiter reads the counts (fsdpc_shm_read_changes) and then examines what it waits for.
 *      If the waiter can do nothing, it writes its word into each of its segments. The word holds
 *      the count that the waiter has read in that segment.
 *   3. The word in a segment S is marked CLOSED if only members of S can end the wait, that is, if
 *      S has all members of the segment in which the rank waits.
 *   4. Whether a waiter can do something depends on the shared state alone, not on time. The
 *      fallback PRIVATE is the exception: it is correct at any time.
 *   5. One thread of a process uses its segments at a time (the waits of hooks hold the GIL). If
 *      two threads wait at the same time, their words do not count.
 *
 * Claim: suppose that a waiter of S first reads the segment's count as t, then reads the words of all other
 * members one after the other and finds each word CLOSED with count t, and then reads the segment's count
 * as t again. Then no member is changing anything, except members that have made the same finding at
 * count t, and members that go on because of a change by one of those members.
 *   Proof. Suppose that other members change something, and let y be the first of them. The segment's
 * count was still t at the last read, so by rule 1 y made its change after y wrote its word for t. Between
 * the two, y examined its wait again and could do something. By rules 2 and 4 the state had changed since y
 * wrote its word. By rule 3 a member of S made that change, before y's change, and the count had not been
 * incremented for that change either. So y was not the first. All these loads and stores are sequentially
 * consistent, so there is one order of all of them.
 *
 * So a waiter that is `stuck` may rely on all other members standing still until it acts, except
 * members that are stuck as well and act at the same time. For that case fallbacks are ordered:
 * a waiter uses its fallback only if no other member has a better one, so all members that act
 * at count t use the same fallback.
 *
 *   PRIVATE  private memory in place of a slot. Other ranks see no change.
 *   OLDER    the present values of a peer that stands still and has not begun the waiter's pass. If all
 *            ranks run the same passes in the same order, the rank that is furthest behind waits for
 *            memory only, so that rank has PRIVATE, and no rank uses OLDER.
 *   LEAVE    do not wait for ranks that are late in a forward. This rank may change its values afterwards.
 *            That is safe: a rank that is about to read these values has OLDER, which is used first.
 *   NONE     no fallback: the wait goes on.
 *
 * If another rank is in a barrier that this rank has not entered, that rank stands still, whatever its word
 * is. A rank that goes to sleep in a barrier wakes the ranks that wait elsewhere, as the last waiter does.
 *
 * When the last rank begins to wait, the others sleep on `bell`, a futex word of the segment. The last rank
 * increments `bell` to wake the ranks that have a fallback. Every change increments `bell` as well.
 * tests/simcluster schedules ranks at random. For each rule of this file, a planted fault leaves
 * the rule out, and a run with the fault must fail.
 */
#include <time.h>
#include <unistd.h>

#include "shm/shm_impl.h"
#include "base/status.h"

enum { WAITS = 1, CLOSED = 2, WAY_SHIFT = 2, COUNT_SHIFT = 4 };

/* This process's segments: each wait and each change is published in all of them. If the table is full, a
 * further segment gets no entry: waits and changes in other segments are not published in it. */
static struct {
    pthread_mutex_t lock;
    fsdpc_shm *of[FSDPC_SHM_GROUPS];
} joined = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int
own_pid(void)
{
    return (int)getpid();
}

int (*fsdpc_shm_process)(void) = own_pid;

static pthread_once_t forks_once = PTHREAD_ONCE_INIT;

/* The child of a fork needs a new lock, because another thread may have held the old one at the fork. */
static void
renew_lock(void)
{
    pthread_mutex_init(&joined.lock, NULL);
}

static void
watch_forks(void)
{
    pthread_atfork(NULL, NULL, renew_lock);
}

/* --- which segments a process is in ----------------------------------------------------------- */

static int
member(const fsdpc_shm *shm, int process)
{
    for (int r = 0; r < shm->world; r++) {
        if (atomic_load(&shm->control->slots[r].process) == process) {
            return r;
        }
    }
    return -1;
}

static bool
covers(const fsdpc_shm *outer, const fsdpc_shm *inner)
{
    for (int r = 0; r < inner->world; r++) {
        if (member(outer, atomic_load(&inner->control->slots[r].process)) < 0) {
            return false;
        }
    }
    return true;
}

static bool
same_process(const fsdpc_shm *a, const fsdpc_shm *b)
{
    return a && b && a->process == b->process && a->forks == b->forks;
}

static void
set_relations(int index)
{
    fsdpc_shm *shm = joined.of[index];
    for (int i = 0; i < FSDPC_SHM_GROUPS; i++) {
        fsdpc_shm *other = joined.of[i];
        if (same_process(shm, other)) {
            uint32_t here = UINT32_C(1) << index, there = UINT32_C(1) << i;
            shm->kin |= there;
            other->kin |= here;
            shm->covered_by |= covers(other, shm) ? there : 0;
            other->covered_by |= covers(shm, other) ? here : 0;
        }
    }
}

void
fsdpc_shm_stuck_join(fsdpc_shm *shm)
{
    pthread_once(&forks_once, watch_forks);
    pthread_mutex_lock(&joined.lock);
    for (int i = 0; i < FSDPC_SHM_GROUPS && shm->entry < 0; i++) {
        if (!joined.of[i]) {
            shm->entry = i;
            joined.of[i] = shm;
            set_relations(i);
        }
    }
    pthread_mutex_unlock(&joined.lock);
}

void
fsdpc_shm_stuck_leave(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    if (shm->entry >= 0 && joined.of[shm->entry] == shm) {
        uint32_t here = UINT32_C(1) << shm->entry;
        joined.of[shm->entry] = NULL;
        for (int i = 0; i < FSDPC_SHM_GROUPS; i++) {
            if (joined.of[i]) {
                joined.of[i]->kin &= ~here;
                joined.of[i]->covered_by &= ~here;
            }
        }
    }
    shm->entry = -1;
    pthread_mutex_unlock(&joined.lock);
}

/* Returns the segments of `set`, one per call, and then NULL. If `shm` has no entry in the table, returns
 * `shm` and then NULL. The caller holds the lock. */
static fsdpc_shm *
next_of(fsdpc_shm *shm, uint32_t set, int *at)
{
    if (shm->entry < 0) {
        return (*at)++ == 0 ? shm : NULL;
    }
    while (*at < FSDPC_SHM_GROUPS) {
        int i = (*at)++;
        if (set >> i & 1) {
            return joined.of[i];
        }
    }
    return NULL;
}

/* --- changes ---------------------------------------------------------------------------------- */

static void
ring(fsdpc_shm *shm)
{
    fsdpc_shm_control *control = shm->control;
    atomic_fetch_add(&control->bell, 1);
    if (atomic_load(&control->asleep) && atomic_exchange(&control->asleep, 0)) {
        /* A rank that has set the flag but does not sleep yet must not fall asleep after the wake. */
        atomic_fetch_add(&control->bell, 1);
        fsdpc_shm_wake(&control->bell);
    }
}

void
fsdpc_shm_notify(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        atomic_fetch_add(&each->control->changes, 1);
        ring(each);
    }
    pthread_mutex_unlock(&joined.lock);
}

/* --- waits ------------------------------------------------------------------------------------ */

void
fsdpc_shm_read_changes(fsdpc_shm *shm, fsdpc_shm_view *view)
{
    pthread_mutex_lock(&joined.lock);
    fsdpc_shm *each;
    view->bell = atomic_load(&shm->control->bell);
    view->count = 0;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        view->of[view->count].serial = each->serial;
        view->of[view->count++].changes = atomic_load(&each->control->changes);
    }
    pthread_mutex_unlock(&joined.lock);
}

/* Sets *count to the count of `shm` in `view`. Returns false if `shm` joined after `view` was read. */
static bool
changes_of(const fsdpc_shm *shm, const fsdpc_shm_view *view, uint64_t *count)
{
    for (int i = 0; i < view->count; i++) {
        if (view->of[i].serial == shm->serial) {
            *count = view->of[i].changes;
            return true;
        }
    }
    return false;
}

/* True if `process` waits in a barrier of some segment until this process enters the barrier. */
static bool
waits_for_this_rank(fsdpc_shm *shm, int process)
{
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        int rank = member(each, process);
        if (rank >= 0 && fsdpc_shm_waits_for_this_rank(each, rank)) {
            return true;
        }
    }
    return false;
}

/* True if all other members of `outer` stand still, and none has a better fallback than `way`. */
static bool
all_stand(fsdpc_shm *shm, const fsdpc_shm *outer, uint64_t count, enum fsdpc_shm_way way)
{
    for (int r = 0; r < outer->world; r++) {
        const fsdpc_shm_slot *slot = &outer->control->slots[r];
        uint64_t word = atomic_load(&slot->wait);
        bool waits = word & WAITS && word & CLOSED && word >> COUNT_SHIFT == count;
        if (r == outer->rank || fsdpc_shm_left(outer, r) ||
            (waits && (word >> WAY_SHIFT & 3) <= (uint64_t)way)) {
            continue;
        }
        if (waits || !waits_for_this_rank(shm, atomic_load(&slot->process))) {
            return false;
        }
    }
    return atomic_load(&outer->control->changes) == count;
}

static bool
stuck_locked(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way)
{
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->covered_by, &at));) {
        uint64_t count;
        if (changes_of(each, view, &count) && all_stand(shm, each, count, way)) {
            return true;
        }
    }
    return false;
}

bool
fsdpc_shm_stuck(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way)
{
    if (way == FSDPC_WAY_NONE) {
        return false;
    }
    pthread_mutex_lock(&joined.lock);
    bool stuck = stuck_locked(shm, view, way);
    pthread_mutex_unlock(&joined.lock);
    return stuck;
}

void
fsdpc_shm_ring(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        ring(each);
    }
    pthread_mutex_unlock(&joined.lock);
}

/* Writes this process's word into each of its segments; the word is 0 if the wait does not count (rule 5). */
static void
publish(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way)
{
    fsdpc_shm *each;
    int waits = 0;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        waits += each->stands;
    }
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        bool closed = each == shm || (shm->covered_by >> each->entry & 1);
        uint64_t count, word = 0;
        if (waits == 1 && changes_of(each, view, &count)) {
            word =
                count << COUNT_SHIFT | (uint64_t)way << WAY_SHIFT | (closed ? CLOSED : 0) | WAITS;
        }
        atomic_store(&each->control->slots[each->rank].wait, word);
    }
}

/* If this rank is the last one to begin a wait, wakes the ranks that have a fallback. Returns true if this
 * rank must use its own fallback. */
static bool
wake_who_may_act(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way)
{
    if (!stuck_locked(shm, view, FSDPC_WAY_PRIVATE)) {
        return false;
    }
    if (stuck_locked(shm, view, way)) {
        return way != FSDPC_WAY_NONE;
    }
    fsdpc_shm *each;
    uint64_t count = 0;
    /* Ring only once per count: two ranks that wake a third one must not keep waking each other. */
    if (changes_of(shm, view, &count) && shm->rung != count + 1) {
        shm->rung = count + 1;
        for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
            ring(each);
        }
    }
    return false;
}

void
fsdpc_shm_stand_begin(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    shm->stands++;
    pthread_mutex_unlock(&joined.lock);
}

void
fsdpc_shm_stand_end(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    fsdpc_shm *each;
    shm->stands--;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        atomic_store(&each->control->slots[each->rank].wait, 0);
    }
    pthread_mutex_unlock(&joined.lock);
}

int
fsdpc_shm_stand(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way,
                int64_t until_ns, const fsdpc_wait *what)
{
    FSDPC_TRY(fsdpc_shm_usable(shm));
    fsdpc_shm_control *control = shm->control;
    pthread_mutex_lock(&joined.lock);
    publish(shm, view, way);
    bool act = wake_who_may_act(shm, view, way);
    pthread_mutex_unlock(&joined.lock);
    if (act) {
        return fsdpc_shm_check(shm, what);
    }
    /* A rank that spins is not `asleep` yet, so the rank that rings need not wake it by a system call. */
    if (fsdpc_shm_spin(shm, &control->bell, view->bell)) {
        return FSDPC_OK;
    }
    atomic_store(&control->asleep, 1);
    return fsdpc_shm_sleep_word(shm, &control->bell, view->bell, until_ns, what);
}

bool
fsdpc_shm_stands(const fsdpc_shm *shm, int rank)
{
    return atomic_load(&shm->control->slots[rank].wait) & WAITS;
}

int64_t
fsdpc_shm_cpu_ns(const fsdpc_shm *shm, int rank)
{
    clockid_t clock;
    struct timespec used;
    if (clock_getcpuclockid((pid_t)atomic_load(&shm->control->slots[rank].pid), &clock) != 0 ||
        clock_gettime(clock, &used) != 0) {
        return -1;
    }
    return (int64_t)used.tv_sec * 1000000000 + used.tv_nsec;
}
