/* Fibers and their scheduler. See sim.h.
 *
 * Each rank is a fiber, and so is each thread that a rank starts. A fiber runs until a point at which the
 * scheduler lets another fiber run, or until it sleeps. Time is virtual: a little time passes at each point,
 * and when all fibers sleep, time jumps to the moment at which the first of them wakes.
 *
 * The random policy switches to any fiber that can run, after a number of points whose mean the seed draws.
 * The policy with priorities runs the fiber of highest priority. This priority falls at some random points
 * (Burckhardt and others, "A randomized scheduler with probabilistic guarantees of finding bugs", 2010).
 * This policy often finds faults that need few switches at certain points. Both policies can hold ranks up
 * at some places of the source, for many points of other ranks or until no other rank can run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim.h"

enum {
    FIBERS = SIM_RANKS * 3,
    UNSEEN_NS = 1000000000,
    STACK_BYTES = 512 << 10,
    POINT_NS = 40,
    WORDS = 2,
    CHANGES = 8,
    NUMBERS = 1 << 20,
    COMPUTE_NS = 60000000,
    BUSY_POINTS = 4000000,
    BUSY_IN = 1024,    /* so many points of a fiber lie between two checks that it is not stuck */
    CALL_NS = 5000000, /* limit in sim_wait_ended() for another rank's write to the wait's word */
    NAP_IN = 48,       /* with naps: one of so many switches is a nap, a sleep of random length */
    KNOWN = 4096,      /* how many hashes of places are cached */
    HELD_IN = 2,       /* at places that hold ranks up, one of so many visits does so */
    NAPS_THERE = 4,    /* with naps: one of so many visits to such a place is a nap */
    MOST_NAPS = 32,    /* how many naps at such places a run may have */
    LATE = 16,         /* the largest number of a fiber's stores that other ranks do not see yet */
    SEEN_IN = 32,      /* at one of so many points, other ranks see the oldest of these stores */
};

enum state { FREE, READY, ASLEEP };

typedef struct late_store {
    void *to;
    uint64_t value;
    size_t bytes;
} late_store;

typedef struct fiber {
    /* These fields lie together because the choice of the next fiber reads them. */
    enum state state;
    int rank;
    int64_t wake_ns;
    uint64_t held_until; /* while run->points is below it, the fiber runs only if no other can */
    uint64_t priority;
    void *sp;
    uint64_t busy; /* calls of sim_point() since the fiber last slept */
    const char *place;
    int late_count;
    int word_count;
    const void *words[WORDS];
    const uint32_t *unchanged; /* word of the last sleep if that timed out; `then`: its old value */
    uint32_t then;
    bool polls, woken, main;
    int number; /* how many fibers have used this entry of `fibers`, including this one */
    char *stack;
    void *(*function)(void *);
    void *argument;
    late_store late[LATE]; /* in the order of the stores */
} fiber;

static struct {
    fiber fibers[FIBERS];
    int used; /* entries of `fibers` from this index on were never used in this run */
    fiber *now;
    void *sp; /* the scheduler's own stack */
    sim_run *run;
    int64_t now_ns;
    uint64_t random, until, changes_at[CHANGES];
    int change;
    uint64_t lowest; /* a priority below all others */
    uint64_t
        points; /* calls of sim_point() by the victim; with case.place, only those at its places */
    int64_t stopped_until[SIM_RANKS], used_ns[SIM_RANKS];
    bool over[SIM_RANKS];
    int alive, naps; /* naps: how many naps there were at places where ranks may be held up */
    /* The word of a wait that has ended although no other rank has written the word yet; else NULL. */
    const uint32_t *quiet;
    int quiet_rank;
    int64_t quiet_until_ns;
} s;

bool sim_tracing;
int sim_late_stores; /* how many stores of all fibers other ranks do not see yet */

/* --- switching ------------------------------------------------------------------------------- */

#if defined(__x86_64__)
void sim_switch(void **save, void *load);
__asm__(".text\n.globl sim_switch\n.type sim_switch,@function\nsim_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nretq\n"
        ".size sim_switch,.-sim_switch\n");
static void *
first_frame(char *stack, void (*entry)(void))
{
    void **top = (void **)(stack + STACK_BYTES) - 1; /* aligned as after a call */
    *top = NULL;
    *--top = (void *)entry;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    return top;
}
#else
#error "the switch between fibers is written for x86-64"
#endif

static void
to_scheduler(void)
{
    sim_switch(&s.now->sp, s.sp);
}

static void
begin_fiber(void)
{
    fiber *self = s.now;
    self->function(self->argument);
    sim_flush();
    self->state = FREE;
    (void)sim_wake(self, FIBERS);
    for (;;) {
        to_scheduler();
    }
}

static fiber *
new_fiber(int rank, void *(*function)(void *), void *argument)
{
    fiber *made = NULL;
    for (int i = 0; i < FIBERS && !made; i++) {
        /* The fiber that ended last (s.now) may still run on its stack. */
        made = s.fibers[i].state == FREE && &s.fibers[i] != s.now ? &s.fibers[i] : NULL;
    }
    if (!made) {
        return NULL;
    }
    if (!made->stack) {
        made->stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (made->stack == MAP_FAILED) {
            abort();
        }
    }
    char *stack = made->stack;
    const int number = (made->number + 1) % NUMBERS;
    *made = (fiber){.state = READY,
                    .number = number,
                    .rank = rank,
                    .stack = stack,
                    .wake_ns = SIM_NEVER,
                    .priority = sim_draw() >> 1 | UINT64_C(1) << 62,
                    .function = function,
                    .argument = argument,
                    .place = "its begin"};
    made->sp = first_frame(stack, begin_fiber);
    s.used = (int)(made - s.fibers) >= s.used ? (int)(made - s.fibers) + 1 : s.used;
    return made;
}

/* --- late stores ----------------------------------------------------------------------------- */

static void
show_first(fiber *self)
{
    const late_store *first = &self->late[0];
    memcpy(first->to, &first->value, first->bytes);
    memmove(self->late, self->late + 1, sizeof *self->late * (size_t)--self->late_count);
    sim_late_stores--;
}

static void
show_all(fiber *self)
{
    while (self->late_count > 0) {
        show_first(self);
    }
}

void
sim_flush(void)
{
    if (sim_late_stores && s.now) {
        show_all(s.now);
    }
}

void
sim_store_late(void *to, const void *value, size_t bytes)
{
    fiber *self = s.now;
    if (!self || !s.run->c->weak) {
        memcpy(to, value, bytes);
        return;
    }
    if (self->late_count == LATE) {
        show_first(self);
    }
    late_store *made = &self->late[self->late_count++];
    *made = (late_store){.to = to, .bytes = bytes};
    memcpy(&made->value, value, bytes);
    sim_late_stores++;
}

bool
sim_load_late(const void *from, void *out, size_t bytes)
{
    for (int i = s.now ? s.now->late_count : 0; i-- > 0;) {
        if (s.now->late[i].to == from) {
            memcpy(out, &s.now->late[i].value, bytes);
            return true;
        }
    }
    return false;
}

/* --- the fiber that runs --------------------------------------------------------------------- */

int
sim_rank(void)
{
    return s.now ? s.now->rank : SIM_RANKS;
}

int64_t
sim_now_ns(void)
{
    return s.now_ns;
}

int64_t
sim_used_ns(int rank)
{
    return s.used_ns[rank];
}

uint64_t
sim_draw(void)
{
    return sim_random(&s.random);
}

const sim_case *
sim_case_now(void)
{
    return s.run->c;
}

static void
draw_until(void)
{
    const sim_case *c = s.run->c;
    if (!c->priorities) {
        s.until = s.run->points + 1 + sim_draw() % (2 * (uint64_t)c->mean);
        return;
    }
    s.until = s.change < c->changes ? s.changes_at[s.change] : UINT64_MAX;
}

static void
nap(void)
{
    const int64_t ns = (int64_t)(1000 + sim_draw() % (UINT64_C(1000) << (sim_draw() % 18)));
    s.run->napped_ns += ns;
    (void)sim_sleep(s.now_ns + ns, s.now->place);
}

void
sim_compute(void)
{
    sim_point("module");
    if (s.run->c->computes && sim_draw() % 4 == 0) {
        const int64_t ns = (int64_t)(sim_draw() % COMPUTE_NS);
        s.run->napped_ns += ns;
        (void)sim_sleep(s.now_ns + ns, "module");
    }
}

static void
preempt(void)
{
    const sim_case *c = s.run->c;
    if (c->priorities) {
        s.now->priority = s.lowest--;
        s.change++;
    }
    draw_until();
    if (c->naps && sim_draw() % NAP_IN == 0) {
        nap();
    } else {
        to_scheduler();
    }
}

void
sim_kill(int rank)
{
    s.over[rank] = true;
    s.alive--;
    s.run->out[rank].died = true;
    for (int i = 0; i < s.used; i++) {
        if (s.fibers[i].state != FREE && s.fibers[i].rank == rank) {
            show_all(&s.fibers[i]);
            s.fibers[i].state = FREE;
        }
    }
    sim_descriptors_close(rank);
    sim_wire_close(rank);
    sim_wake_polls();
}

void
sim_note_fault(void)
{
    s.run->struck = true;
    s.run->struck_at = s.now->place;
    s.run->fault_ns = s.now_ns;
}

static void
strike(void)
{
    const sim_case *c = s.run->c;
    if (c->fault == SIM_DIES) {
        sim_note_fault();
        sim_say("dies at %s", s.now->place);
        sim_kill(c->victim);
        for (;;) {
            to_scheduler();
        }
    }
    if (c->fault == SIM_STOPS || c->fault == SIM_PAUSES) {
        sim_note_fault();
        sim_say("stops at %s", s.now->place);
        const int64_t half_ns = (int64_t)(c->timeout_s * 0.5e9);
        for (int r = 0; r < c->world; r++) {
            const int64_t until_ns = c->fault == SIM_STOPS ? SIM_NEVER : s.now_ns + half_ns;
            s.stopped_until[r] = sim_is_lost(c, r) ? until_ns : 0;
        }
        to_scheduler();
    }
}

/* Hashes the text of a place, as each copy of the core has its own strings. Caches hashes by the address. */
static uint64_t
hash_of(const char *place)
{
    static struct {
        const char *place;
        uint64_t hash;
    } known[KNOWN];
    const size_t at = (uintptr_t)place * UINT64_C(0x9e3779b97f4a7c15) >> 52; /* below KNOWN */
    if (known[at].place != place) {
        const char *name = strrchr(place, '/');
        uint64_t hash = 0;
        for (name = name ? name : place; *name; name++) {
            hash = sim_mix(hash + (unsigned char)*name);
        }
        known[at].place = place;
        known[at].hash = hash;
    }
    return known[at].hash;
}

static bool
is_due(int rank, const char *place)
{
    const sim_case *c = s.run->c;
    if (rank != c->victim) {
        return false;
    }
    if (!c->place) {
        return ++s.points == c->at;
    }
    return hash_of(place) % SIM_PLACES == (uint64_t)c->place - 1 && ++s.points == 1 + c->at % 4;
}

static void
hold_up(fiber *self)
{
    const sim_case *c = s.run->c;
    const uint64_t place = hash_of(self->place) >> 8 & ((UINT64_C(1) << c->hold_bits) - 1);
    if (place != c->hold) {
        return;
    }
    if (c->naps && s.naps < MOST_NAPS && sim_draw() % NAPS_THERE == 0) {
        s.naps++;
        nap();
    } else if (sim_draw() % HELD_IN == 0) {
        const uint64_t most = s.run->points + (UINT64_C(1) << (4 + sim_draw() % 12));
        self->held_until = sim_draw() % 2 ? UINT64_MAX : most;
        to_scheduler();
    }
}

static void
check_quiet(void)
{
    sim_violation("sleeps: rank %d goes on by chance, called by nobody", s.quiet_rank);
    s.quiet = NULL;
}

void
sim_wait_ended(bool called)
{
    const fiber *self = s.now;
    if (called && self->unchanged &&
        __atomic_load_n(self->unchanged, __ATOMIC_SEQ_CST) == self->then) {
        s.quiet = self->unchanged;
        s.quiet_rank = self->rank;
        s.quiet_until_ns = s.now_ns + CALL_NS;
    }
    s.now->unchanged = NULL;
}

/* Returns a number of points that no rank reaches between two sleeps, even if it spins while another naps. */
static uint64_t
most_busy(const sim_case *c)
{
    return BUSY_POINTS + 100 * (uint64_t)c->world * (uint64_t)c->world +
           (uint64_t)(s.run->napped_ns / POINT_NS);
}

void
sim_point(const char *place)
{
    fiber *self = s.now;
    if (!self) {
        return;
    }
    s.now_ns += POINT_NS;
    s.used_ns[self->rank] += POINT_NS;
    if (self->late_count > 0 && sim_draw() % SEEN_IN == 0) {
        show_first(self);
    }
    if (s.now_ns >= sim_wire_due_ns) {
        sim_wire_advance();
    }
    self->place = place;
    if (is_due(self->rank, place)) {
        strike();
    }
    if (s.quiet && s.now_ns >= s.quiet_until_ns) {
        check_quiet();
    }
    if (++self->busy % BUSY_IN == 0 && self->busy >= most_busy(s.run->c)) {
        sim_violation("rank %d is busy without an end, at %s", self->rank, place);
        to_scheduler();
    }
    if (++s.run->points >= s.until) {
        preempt();
    }
    if (s.run->c->holds) {
        hold_up(self);
    }
}

void
sim_wrote(const char *place, const void *at)
{
    if (s.quiet == at && s.now && s.now->rank != s.quiet_rank) {
        s.quiet = NULL;
    }
    sim_point(place);
}

void
sim_yield(void)
{
    /* While the victim is stopped, each yield takes a thousandth of the deadline, so that spins end soon. */
    const bool stopped = s.stopped_until[s.run->c->victim] > s.now_ns;
    s.now_ns += stopped ? (int64_t)(s.run->c->timeout_s * 1e6) : 0;
    sim_point("sched_yield");
    for (int i = 0; i < s.used; i++) {
        s.fibers[i].held_until = 0; /* this rank may spin until one of these fibers acts */
    }
    s.now->priority = s.lowest--;
    to_scheduler();
}

/* --- sleeping -------------------------------------------------------------------------------- */

static bool
sleep_until(int64_t until_ns)
{
    fiber *self = s.now;
    show_all(self);
    self->state = ASLEEP;
    self->woken = false;
    self->wake_ns = until_ns;
    to_scheduler();
    self->word_count = 0;
    self->polls = false;
    self->busy = 0;
    return self->woken;
}

bool
sim_sleep(int64_t until_ns, const char *place)
{
    s.now->place = place;
    return sleep_until(until_ns);
}

static bool
all_joined(const sim_run *run)
{
    bool joined = true;
    for (int r = 0; r < run->c->world; r++) {
        joined = joined && run->out[r].joined;
    }
    return joined;
}

/* If no rank is late, a futex sleep that times out shows a lost wake-up. With replicas, sleeps are judged
 * after all ranks have joined, as a rank may sleep in one group while others still connect in another. */
bool
sim_sleep_on(void *const *words, int count, int64_t until_ns)
{
    fiber *self = s.now;
    const sim_case *c = s.run->c;
    const bool met = !c->replicas || all_joined(s.run);
    const int64_t from_ns = s.now_ns, from_busy_ns = (int64_t)s.run->points * POINT_NS;
    self->word_count = count;
    memcpy(self->words, words, sizeof *words * (size_t)count);
    const bool on_word = until_ns != SIM_NEVER;
    self->then = on_word ? __atomic_load_n((uint32_t *)words[0], __ATOMIC_SEQ_CST) : 0;
    const bool woken = sleep_until(until_ns);
    /* If ranks were busy for half of the sleep, it may have timed out although no wake-up was lost. */
    const bool idle = (int64_t)s.run->points * POINT_NS - from_busy_ns < (s.now_ns - from_ns) / 2;
    const bool judged = met && !woken && idle && c->fault == SIM_NO_FAULT && !c->naps;
    self->unchanged = judged && on_word ? words[0] : NULL;
    if (judged && !c->computes) {
        sim_violation("sleeps: rank %d sleeps %.3f ms in vain", self->rank,
                      (double)(s.now_ns - from_ns) * 1e-6);
    }
    return woken;
}

bool
sim_sleep_in_poll(int64_t until_ns)
{
    s.now->polls = true;
    return sleep_until(until_ns);
}

static void
wake(fiber *each)
{
    each->state = READY;
    each->woken = true;
    each->wake_ns = SIM_NEVER;
}

int
sim_wake(const void *word, int count)
{
    int woken = 0;
    for (int i = 0; i < s.used && woken < count; i++) {
        fiber *each = &s.fibers[i];
        for (int k = 0; k < each->word_count && each->state == ASLEEP; k++) {
            if (each->words[k] == word) {
                wake(each);
                woken++;
            }
        }
    }
    return woken;
}

void
sim_wake_polls(void)
{
    for (int i = 0; i < s.used; i++) {
        if (s.fibers[i].state == ASLEEP && s.fibers[i].polls) {
            wake(&s.fibers[i]);
        }
    }
}

/* --- threads --------------------------------------------------------------------------------- */

int
sim_start_thread(void *(*function)(void *), void *argument)
{
    fiber *made = new_fiber(s.now->rank, function, argument);
    return made ? made->number * FIBERS + (int)(made - s.fibers) : -1;
}

void
sim_join_thread(int thread)
{
    fiber *other = &s.fibers[thread % FIBERS];
    const int number = thread / FIBERS; /* the entry may have another fiber by now */
    if (number == 0) {
        sim_violation("rank %d waits for a thread that it has not started", sim_rank());
    }
    void *words[] = {other};
    while (other->state != FREE && other->number == number) {
        (void)sim_sleep_on(words, 1, SIM_NEVER);
    }
}

bool
sim_is_over(int rank)
{
    return s.over[rank];
}

static void *
run_rank(void *argument)
{
    const int rank = s.now->rank;
    (void)argument;
    s.run->main_of(rank, s.run->c, &s.run->out[rank]);
    s.run->out[rank].finished = true;
    s.run->out[rank].end_ns = s.now_ns;
    s.run->out[rank].idle_ns = s.run->idle_ns;
    s.over[rank] = true;
    s.alive--;
    sim_wire_close(rank);
    sim_wake_polls();
    return NULL;
}

/* --- the scheduler --------------------------------------------------------------------------- */

static bool
can_run(fiber *each)
{
    if (each->state == FREE || s.stopped_until[each->rank] > s.now_ns) {
        return false;
    }
    if (each->state == ASLEEP && each->wake_ns <= s.now_ns) {
        each->state = READY;
        each->wake_ns = SIM_NEVER;
    }
    return each->state == READY;
}

/* With `held`, chooses among the held-up fibers, else among the others. Returns NULL if none can run. */
static fiber *
choose_among(bool held)
{
    fiber *able[FIBERS], *best = NULL;
    int count = 0;
    for (int i = 0; i < s.used; i++) {
        fiber *each = &s.fibers[i];
        if (can_run(each) && held == (each->held_until > s.run->points)) {
            able[count++] = each;
            best = !best || each->priority > best->priority ? each : best;
        }
    }
    if (count == 0 || s.run->c->priorities) {
        return best;
    }
    return able[sim_draw() % (uint64_t)count];
}

static fiber *
choose(void)
{
    fiber *found = choose_among(false);
    found = found ? found : choose_among(true);
    if (found) {
        found->held_until = 0;
    }
    return found;
}

/* True if all ranks sleep for too long after a fault that each of them must notice. */
static bool
is_unseen(void)
{
    const sim_run *run = s.run;
    const enum sim_fault fault = run->c->fault;
    bool joined = run->struck && fault != SIM_STOPS && fault != SIM_PAUSES && fault != SIM_STRAYS &&
                  fault != SIM_REFUSED;
    return joined && all_joined(run) && run->idle_ns > UNSEEN_NS + run->napped_ns;
}

/* Moves the time to the first moment at which a fiber can run. Returns false if there is none. */
static bool
jump(void)
{
    int64_t first = SIM_NEVER;
    for (int i = 0; i < s.used; i++) {
        const fiber *each = &s.fibers[i];
        if (each->state == FREE) {
            continue;
        }
        int64_t from = each->state == READY ? s.now_ns : each->wake_ns;
        int64_t stop = s.stopped_until[each->rank];
        from = stop > from ? stop : from;
        first = from < first ? from : first;
    }
    if (first == SIM_NEVER) {
        return false;
    }
    s.run->idle_ns += s.run->struck ? first - s.now_ns : 0;
    s.now_ns = first;
    if (is_unseen()) {
        sim_violation("ranks sleep %.1f s after the fault", (double)s.run->idle_ns * 1e-9);
    }
    return true;
}

/* True if all ranks have ended, except those that are stopped for good. */
static bool
all_over(void)
{
    int stopped = 0;
    for (int r = 0; r < s.run->c->world; r++) {
        stopped += s.stopped_until[r] == SIM_NEVER && !s.over[r];
    }
    return s.alive == stopped;
}

static void
describe_stuck(void)
{
    size_t used = 0;
    for (int i = 0; i < s.used && used < sizeof s.run->stuck - 1; i++) {
        const fiber *each = &s.fibers[i];
        if (each->state != FREE) {
            used +=
                (size_t)snprintf(s.run->stuck + used, sizeof s.run->stuck - used,
                                 "; %srank %d at %s%s", each->main ? "" : "a thread of ",
                                 each->rank, each->place, each->state == ASLEEP ? ", asleep" : "");
        }
    }
}

static void
begin_run(sim_run *run)
{
    const sim_case *c = run->c;
    for (int i = 0; i < FIBERS; i++) {
        s.fibers[i].state = FREE;
    }
    s.used = 0;
    s.now = NULL;
    s.run = run;
    s.now_ns = INT64_C(1000000000) + (int64_t)(c->seed % 1000);
    s.random = sim_mix(c->seed ^ UINT64_C(0x5eed));
    s.alive = c->world;
    s.points = 0;
    s.quiet = NULL;
    sim_late_stores = 0;
    memset(s.stopped_until, 0, sizeof s.stopped_until);
    memset(s.used_ns, 0, sizeof s.used_ns);
    memset(s.over, 0, sizeof s.over);
    s.change = s.naps = 0;
    s.lowest = UINT64_C(1) << 32;
    uint64_t at = 0;
    for (int i = 0; i < c->changes; i++) {
        s.changes_at[i] = at += 1 + sim_draw() % (UINT64_C(1) << (4 + sim_draw() % 12));
    }
    draw_until();
    for (int r = 0; r < c->world; r++) {
        new_fiber(r, run_rank, NULL)->main = true;
    }
}

/* Only a run that does not end reaches so many points. (16 ranks that wait for a paused rank: 28 million.) */
static uint64_t
most_points(const sim_case *c)
{
    const uint64_t world = (uint64_t)c->world;
    const uint64_t slices = c->without_waitv ? 2 : 1; /* without waitv, sleeps are half as long */
    const uint64_t models = c->twins ? 2 : 1;
    return 60000000 * slices * models + (world > 16 ? 100000 : 5000) * world * world +
           (uint64_t)(s.run->napped_ns / POINT_NS);
}

bool
sim_schedule(sim_run *run)
{
    begin_run(run);
    const int64_t most_ns = s.now_ns + (int64_t)((run->c->timeout_s * 4 + 100) * 1e9);
    bool ended = true;
    while (ended && !all_over()) {
        fiber *next = choose();
        if (!next) {
            ended = jump();
            continue;
        }
        if (sim_tracing && next != s.now) {
            s.now = next;
            sim_say("runs from %s", next->place);
        }
        s.now = next;
        run->switches++;
        sim_switch(&s.sp, next->sp);
        ended = run->points < most_points(run->c) && s.now_ns < most_ns + run->napped_ns &&
                !sim_violated();
    }
    if (!ended) {
        describe_stuck();
    }
    for (int i = 0; i < s.used; i++) {
        if (s.fibers[i].state != FREE && !s.fibers[i].main) {
            run->threads_left[s.fibers[i].rank]++;
        }
    }
    run->end_ns = s.now_ns;
    s.now = NULL;
    return ended;
}
