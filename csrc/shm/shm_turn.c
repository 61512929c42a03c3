/* Turns: waits that a rank may also end by itself, once nobody else can.
 *
 * A rank that waits for others can often go on otherwise: with private memory in place of a busy
 * slot, with a peer's values of an earlier pass. It should do so when all ranks wait for each
 * other, and only then. The ranks may wait in different places: for slots of different trees, of
 * different groups. So what follows belongs to the process, not to a tree or a group.
 *
 * [Note: turns] Each segment counts the changes of its members (`turn`), and holds one word for
 * each member that says how this process waits now: not at all (0), or since which turn, with which
 * way out. The rules, of which the first three are this file's and the last two its callers':
 *
 *   1. A process that has changed anything that a wait may be for moves on the turn of every segment
 *      it is in, after the change and before it waits or looks again.
 *   2. A waiter reads the turns (fsdpc_shm_look), then examines what it waits for, and only when it
 *      has found nothing to do writes its word, with the turn read, into each of its segments.
 *   3. In a segment S the word counts (CLOSED) if only members of S can end the wait, which is so
 *      if the wait is for a segment whose members are all in S.
 *   4. What a waiter finds to do depends on the shared state alone, and not on time, unless it takes
 *      the way out PRIVATE, which is right at any time.
 *   5. One thread of a process uses its segments at a time (the waits of hooks hold the GIL); two
 *      that wait at the same time leave a word that counts for nothing.
 *
 * Conclusion: if a waiter of S reads, one after the other, every other member's word as CLOSED and of
 * turn t, and then the segment's turn as t, the turn of its own look, then no change is under way
 * except by members that have come to this same conclusion at turn t, and by those who go on because
 * of what one of these has changed.
 *   Proof. Suppose there are others, and let y make the earliest. Its turn has not been moved on when
 * the turn was read at the end, so by rule 1 the change came after y had written its word for t: in
 * between y has examined its wait again and found something to do. By rules 2 and 4 something had
 * changed since it wrote its word: by a member of S (rule 3), before y and with its turn not moved on
 * either. So y's was not the earliest. All these loads and stores are sequentially consistent, hence
 * one order of all of them exists, and no scheduler can add to it.
 *
 * So a waiter that is `stuck` may rely on every other member standing still until it acts itself,
 * but for those that are stuck, too, and act at the same time. Ways out have ranks for that: a
 * waiter takes its own only if no other member has a better one, so all who act at turn t act
 * alike.
 *
 *   PRIVATE  private memory in place of a slot. Changes nothing that others see.
 *   OLDER    values of a peer that has not begun this pass. The peer stands still, and stands
 *            before it: if the ranks run the same passes in the same order, then the rank that is
 *            furthest behind waits for memory alone, hence has PRIVATE, and nobody comes to this.
 *   LEAVE    not to wait for those who are late in a forward. This rank's values may change after it,
 *            so nobody may be about to read them: whoever is has OLDER.
 *   NONE     waits on.
 *
 * A rank in a barrier that this rank has yet to enter stands still, too, whatever the turn: until
 * this rank enters, nothing ends that wait.
 *
 * When the last of all begins to wait, the others sleep: it rings their bell, a word that moves on
 * with each change, too, and that sleeps are on. tests/unit/test_turns.py runs the rules through
 * all orders of the steps of two and three ranks.
 */
#include <time.h>
#include <unistd.h>

#include "shm/shm_impl.h"
#include "base/status.h"

enum { WAITS = 1, CLOSED = 2, WAY_SHIFT = 2, TURN_SHIFT = 4 };

/* This process's segments, so that each wait and each change is seen in all of them. Segments that
 * find no place know of their own waits only. */
static struct {
    pthread_mutex_t lock;
    fsdpc_shm *of[FSDPC_SHM_GROUPS];
} joined = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int
own_pid(void)
{
    return (int)getpid();
}

int (*fsdpc_shm_who)(void) = own_pid;

static pthread_once_t forks_once = PTHREAD_ONCE_INIT;

/* Another thread may have held the lock at the fork. */
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
member(const fsdpc_shm *shm, int who)
{
    for (int r = 0; r < shm->world; r++) {
        if (atomic_load(&shm->control->slots[r].who) == who) {
            return r;
        }
    }
    return -1;
}

static bool
covers(const fsdpc_shm *outer, const fsdpc_shm *inner)
{
    for (int r = 0; r < inner->world; r++) {
        if (member(outer, atomic_load(&inner->control->slots[r].who)) < 0) {
            return false;
        }
    }
    return true;
}

static bool
same_process(const fsdpc_shm *a, const fsdpc_shm *b)
{
    return a && b && a->who == b->who && a->forks == b->forks;
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
fsdpc_shm_turn_join(fsdpc_shm *shm)
{
    pthread_once(&forks_once, watch_forks);
    pthread_mutex_lock(&joined.lock);
    for (int i = 0; i < FSDPC_SHM_GROUPS && shm->place < 0; i++) {
        if (!joined.of[i]) {
            shm->place = i;
            joined.of[i] = shm;
            set_relations(i);
        }
    }
    pthread_mutex_unlock(&joined.lock);
}

void
fsdpc_shm_turn_leave(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    if (shm->place >= 0 && joined.of[shm->place] == shm) {
        uint32_t here = UINT32_C(1) << shm->place;
        joined.of[shm->place] = NULL;
        for (int i = 0; i < FSDPC_SHM_GROUPS; i++) {
            if (joined.of[i]) {
                joined.of[i]->kin &= ~here;
                joined.of[i]->covered_by &= ~here;
            }
        }
    }
    shm->place = -1;
    pthread_mutex_unlock(&joined.lock);
}

/* The segments in `set`, in turn; one that has found no place stands for itself. Under the lock. */
static fsdpc_shm *
next_of(fsdpc_shm *shm, uint32_t set, int *at)
{
    if (shm->place < 0) {
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
    if (atomic_load(&control->sleepers) > 0) {
        fsdpc_shm_wake(&control->bell);
    }
}

void
fsdpc_shm_notify(fsdpc_shm *shm)
{
    pthread_mutex_lock(&joined.lock);
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        atomic_fetch_add(&each->control->turn, 1);
        ring(each);
    }
    pthread_mutex_unlock(&joined.lock);
}

/* --- waits ------------------------------------------------------------------------------------ */

void
fsdpc_shm_look(fsdpc_shm *shm, fsdpc_shm_view *view)
{
    pthread_mutex_lock(&joined.lock);
    fsdpc_shm *each;
    view->bell = atomic_load(&shm->control->bell);
    view->count = 0;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        view->of[view->count].serial = each->serial;
        view->of[view->count++].turn = atomic_load(&each->control->turn);
    }
    pthread_mutex_unlock(&joined.lock);
}

/* False for a segment that was joined after the look. */
static bool
turn_of(const fsdpc_shm *shm, const fsdpc_shm_view *view, uint64_t *turn)
{
    for (int i = 0; i < view->count; i++) {
        if (view->of[i].serial == shm->serial) {
            *turn = view->of[i].turn;
            return true;
        }
    }
    return false;
}

/* Whether the process stands still in a barrier of whatever segment, until this one enters it. */
static bool
awaits_this(fsdpc_shm *shm, int who)
{
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        int rank = member(each, who);
        if (rank >= 0 && fsdpc_shm_awaits_this(each, rank)) {
            return true;
        }
    }
    return false;
}

/* All other members of `outer` stand still, none of them with a better way out than `way`. */
static bool
all_stand(fsdpc_shm *shm, const fsdpc_shm *outer, uint64_t turn, enum fsdpc_shm_way way)
{
    for (int r = 0; r < outer->world; r++) {
        const fsdpc_shm_slot *slot = &outer->control->slots[r];
        uint64_t word = atomic_load(&slot->wait);
        bool waits = word & WAITS && word & CLOSED && word >> TURN_SHIFT == turn;
        if (r == outer->rank || fsdpc_shm_left(outer, r) ||
            (waits && (word >> WAY_SHIFT & 3) <= (uint64_t)way)) {
            continue;
        }
        if (waits || !awaits_this(shm, atomic_load(&slot->who))) {
            return false;
        }
    }
    return atomic_load(&outer->control->turn) == turn;
}

static bool
stuck_locked(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way)
{
    fsdpc_shm *each;
    for (int at = 0; (each = next_of(shm, shm->covered_by, &at));) {
        uint64_t turn;
        if (turn_of(each, view, &turn) && all_stand(shm, each, turn, way)) {
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

/* Writes the word, or 0 where this wait cannot count. */
static void
publish(fsdpc_shm *shm, const fsdpc_shm_view *view, enum fsdpc_shm_way way)
{
    fsdpc_shm *each;
    int waits = 0;
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        waits += each->stands;
    }
    for (int at = 0; (each = next_of(shm, shm->kin, &at));) {
        bool closed = each == shm || (shm->covered_by >> each->place & 1);
        uint64_t turn, word = 0;
        if (waits == 1 && turn_of(each, view, &turn)) {
            word = turn << TURN_SHIFT | (uint64_t)way << WAY_SHIFT | (closed ? CLOSED : 0) | WAITS;
        }
        atomic_store(&each->control->slots[each->rank].wait, word);
    }
}

/* Every rank's words are written by now, so whoever has a way out has to be awake. True if that is
 * this one. */
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
    uint64_t turn = 0;
    /* Once a turn: two that ring for a third must not keep each other awake. */
    if (turn_of(shm, view, &turn) && shm->rung != turn + 1) {
        shm->rung = turn + 1;
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
    atomic_fetch_add(&control->sleepers, 1);
    int status = fsdpc_shm_wait_word(shm, &control->bell, view->bell, until_ns, what);
    atomic_fetch_sub(&control->sleepers, 1);
    return status;
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
