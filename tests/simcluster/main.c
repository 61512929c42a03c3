/* Turns seeds into cases, runs the cases and judges them. Usage: `simcluster --help`. Checks: see README.md.
 *
 * Each rank has its own copy of the core (the library is loaded once per rank), so that each rank has its own
 * global variables, as a process has. Before each run all variables are as they were after loading.
 */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { PARTS = 4, SLACK_MS = 15, LEFT_SLACK_MS = 110, NO_MEMORY = -3, SHRINK_SEEDS = 300 };

typedef struct copy {
    void *handle;
    sim_program *program;
    void (*boot)(void);
    /* The memory that the copy may write, and what was in it after loading. */
    struct {
        char *at, *before;
        size_t bytes;
    } parts[PARTS];
    int count;
} copy;

static struct options {
    const char *library;
    uint64_t first, count;
    int ranks, units, steps, fault;
    bool trace, quiet, silent, until_found, shrink, wire, replicas, thaws, twins, joins;
    const char *mended; /* the name of a file of seeds that run first; NULL: none */
} options = {.first = 1, .count = 1000, .fault = -1};

static copy copies[SIM_RANKS];
static int loaded;
static char violation[1024];
static uint64_t seed_now;

/* --- copies of the core ---------------------------------------------------------------------- */

static void
fail(const char *what)
{
    fprintf(stderr, "simcluster: %s: %s\n", what, strerror(errno));
    exit(2);
}

/* Finds the memory that the copy may write: its writable segments without the read-only pages of RELRO. */
static int
find_parts(struct dl_phdr_info *info, size_t bytes, void *argument)
{
    copy *self = argument;
    const char *program = (const char *)(uintptr_t)self->program;
    uintptr_t fixed_begin = 0, fixed_end = 0;
    bool mine = false;
    (void)bytes;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const char *at = (const char *)(info->dlpi_addr + part->p_vaddr);
        mine = mine || (part->p_type == PT_LOAD && program >= at && program < at + part->p_memsz);
        if (part->p_type == PT_GNU_RELRO) {
            fixed_begin = (uintptr_t)at;
            fixed_end = (uintptr_t)(at + part->p_memsz + 4095) & ~(uintptr_t)4095;
        }
    }
    for (int i = 0; mine && i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t at = info->dlpi_addr + part->p_vaddr, end = at + part->p_memsz;
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_W)) {
            continue;
        }
        at = at >= fixed_begin && at < fixed_end ? fixed_end : at;
        if (at < end && self->count < PARTS) {
            self->parts[self->count].at = (char *)at;
            self->parts[self->count++].bytes = end - at;
        }
    }
    return mine;
}

static void
load(copy *self)
{
    char path[64];
    struct stat found;
    int from = open(options.library, O_RDONLY | O_CLOEXEC);
    int to = memfd_create("simcluster-core", MFD_CLOEXEC);
    if (from < 0 || to < 0 || fstat(from, &found) != 0) {
        fail(options.library);
    }
    for (off_t at = 0; at < found.st_size;) {
        if (sendfile(to, from, &at, (size_t)(found.st_size - at)) <= 0) {
            fail("copying the core");
        }
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", to);
    self->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!self->handle) {
        fprintf(stderr, "simcluster: %s\n", dlerror());
        exit(2);
    }
    *(void **)&self->program = dlsym(self->handle, "sim_rank_main");
    *(void **)&self->boot = dlsym(self->handle, "sim_boot");
    if (!self->program || !self->boot) {
        fail("the library has no program");
    }
    self->boot();
    dl_iterate_phdr(find_parts, self);
    for (int i = 0; i < self->count; i++) {
        self->parts[i].before = malloc(self->parts[i].bytes);
        memcpy(self->parts[i].before, self->parts[i].at, self->parts[i].bytes);
    }
    close(from);
}

static void
renew_copies(int world)
{
    for (; loaded < world; loaded++) {
        load(&copies[loaded]);
    }
    for (int r = 0; r < world; r++) {
        for (int i = 0; i < copies[r].count; i++) {
            memcpy(copies[r].parts[i].at, copies[r].parts[i].before, copies[r].parts[i].bytes);
        }
    }
}

/* --- cases ----------------------------------------------------------------------------------- */

static int
draw_world(uint64_t *state)
{
    uint64_t kind = sim_random(state) % 8, any = sim_random(state);
    return (int)(kind < 6 ? 2 + any % 3 : kind < 7 ? 5 + any % 4 : 9 + any % 8);
}

static void
draw_fault(sim_case *c, uint64_t *state)
{
    static const uint64_t most[SIM_FAULTS] = {
        [SIM_DIES] = 12,     [SIM_STOPS] = 12, [SIM_PAUSES] = 12,
        [SIM_RAISES] = 3,    [SIM_LEAVES] = 3, [SIM_CHANGES] = 3,
        [SIM_NO_MEMORY] = 7, [SIM_STRAYS] = 3, [SIM_REFUSED] = 5};
    /* In how many of 32 cases each fault occurs; the other cases have no fault. */
    static const int often[SIM_FAULTS] = {[SIM_DIES] = 3,      [SIM_STOPS] = 5,  [SIM_PAUSES] = 2,
                                          [SIM_RAISES] = 2,    [SIM_LEAVES] = 3, [SIM_CHANGES] = 4,
                                          [SIM_NO_MEMORY] = 2, [SIM_STRAYS] = 4, [SIM_REFUSED] = 2};
    int draw = (int)(sim_random(state) % 32);
    for (int kind = SIM_FAULTS - 1; kind > SIM_NO_FAULT; kind--) {
        c->fault = draw >= 0 && draw < often[kind] ? (enum sim_fault)kind : c->fault;
        draw -= often[kind];
    }
    c->fault = options.fault >= 0 ? (enum sim_fault)options.fault : c->fault;
    c->victim = (int)(sim_random(state) % (uint64_t)c->world);
    c->at = 1 + sim_random(state) % (UINT64_C(1) << (2 + sim_random(state) % (most[c->fault] + 1)));
    /* To simulate a long wait takes many short sleeps, so a deadline that may pass is short in most cases. */
    const bool passes = c->fault == SIM_STOPS || c->fault == SIM_PAUSES || c->fault == SIM_STRAYS;
    c->timeout_s = c->fault == SIM_REFUSED       ? 20
                   : !passes                     ? 600
                   : sim_random(state) % 64 == 0 ? 20
                                                 : 2;
    const int load = options.twins ? 2 * c->world : c->world; /* all ranks share one processor */
    c->timeout_s *= load > 16 ? load / 4.0 : 1;
    c->place = sim_random(state) % 4 ? 1 + (int)(sim_random(state) % SIM_PLACES) : 0;
    c->at = c->fault == SIM_NO_FAULT ? 0 : c->at;
    /* Each rank must have a shard of the weights that change; else it may not notice the change. */
    c->wide = c->wide || c->fault == SIM_CHANGES || c->fault == SIM_STRAYS;
    const uint64_t more = sim_random(state);
    c->evaluates = c->evaluates || options.joins || c->fault == SIM_CHANGES ||
                   (c->fault == SIM_STRAYS && more % 4);
    c->meets = c->meets || (c->fault == SIM_STRAYS && more & 4);
    c->meets = c->meets || options.joins;
    c->uneven = (c->uneven || options.joins) && c->fault != SIM_CHANGES;
}

/* Draws two or three shard groups of two or three ranks each; with --ranks, about that many ranks in all. */
static void
draw_replicas(sim_case *c)
{
    const uint64_t draw = sim_mix(c->seed * 17 + 3);
    c->replicas = 2 + (int)(draw % 2);
    const int shards = options.ranks ? options.ranks / c->replicas : 2 + (int)(draw / 2 % 2);
    c->world = c->replicas * (shards > 2 ? shards : 2);
    c->victim %= c->world;
    c->near = draw / 4 % 4 == 0;
    for (int r = 0; r < c->world; r++) {
        c->host_of[r] = r / (c->world / c->replicas);
    }
}

/* Draws each rank's host. With c->hosts, some ranks (mostly neighbours) share a host; else no ranks do. */
static void
draw_hosts(sim_case *c)
{
    const bool mixed = sim_drawn(c, 300, 0, 0, 0) % 4 == 0;
    for (int r = 1; r < c->world; r++) {
        const int before = c->host_of[r - 1];
        const bool begins = sim_drawn(c, 301, r, 0, 0) % 2 || (r == c->world - 1 && before == 0);
        c->host_of[r] = !c->hosts ? r : mixed ? r % 2 : before + begins;
    }
}

/* Puts a wire between the ranks. On a wire all ranks must gather and reduce in the same order. */
static void
draw_wire(sim_case *c)
{
    c->wire = true;
    c->hosts = sim_mix(c->seed * 13 + 1) % 4 != 0 && c->world > 2;
    draw_hosts(c);
    c->own_order = c->skips = c->uneven = c->idle = c->in_step = false;
    c->trusts =
        c->fault != SIM_STRAYS && c->fault != SIM_CHANGES && sim_mix(c->seed * 29 + 11) % 8 == 0;
    c->gather_slots =
        sim_mix(c->seed * 41 + 3) % 3 == 0 ? 3 : c->gather_slots; /* 3 is the default with a wire */
    /* exchange_wire.c does not count a pass in which a rank gathers nothing. */
    c->rootless = c->rootless && c->fault != SIM_STRAYS;
    if (c->fault == SIM_REFUSED) {
        c->fault = SIM_NO_FAULT;
        c->at = 0;
    }
}

/* Freezes units until some step. A rank with the fault SIM_STRAYS forgets to unfreeze them. */
static void
draw_thaws(sim_case *c)
{
    c->thaws = true;
    c->steps += c->steps == 1;
    c->rootless = c->rootless && c->fault != SIM_STRAYS;
    c->uneven = c->uneven && c->fault != SIM_STRAYS;
    /* If all units are frozen, no mark on a wire shows that ranks run different numbers of batches. */
    c->meets = c->meets && c->fault != SIM_STRAYS && !(c->wire && c->fault == SIM_CHANGES);
}

static sim_case
draw_case(uint64_t seed)
{
    static const int means[] = {1, 2, 4, 16, 64, 512};
    uint64_t state = seed * UINT64_C(0x2545f4914f6cdd1d);
    sim_case c = {.seed = seed};
    c.world = draw_world(&state);
    c.units = 2 + (int)(sim_random(&state) % (SIM_UNITS - 1));
    c.steps = 1 + (int)(sim_random(&state) % 3);
    c.world = options.ranks ? options.ranks : c.world;
    c.units = options.units ? options.units : c.units;
    c.steps = options.steps ? options.steps : c.steps;
    c.rounds = sim_random(&state) % 2 ? 1 : 1 + (int)(sim_random(&state) % 3);
    c.own_order = sim_random(&state) % 2;
    c.skips = sim_random(&state) % 2;
    c.nested = sim_random(&state) % 4 == 0;
    c.rootless = sim_random(&state) % 4 == 0;
    c.late = sim_random(&state) % 4 == 0;
    c.evaluates = sim_random(&state) % 2;
    c.uneven = c.evaluates && sim_random(&state) % 3 == 0;
    c.wide = sim_random(&state) % 8 == 0;
    c.poison = sim_random(&state) % 8 == 0;
    c.backward_prefetch = (int)(sim_random(&state) % 3);
    c.forward_prefetch = sim_random(&state) % 2;
    c.gather_slots = 1 + (int)(sim_random(&state) % 2);
    c.reduce_slots = 1 + (int)(sim_random(&state) % 2);
    c.cores = sim_random(&state) % 8 == 0 ? c.world : 1;
    c.without_waitv = sim_random(&state) % 8 == 0;
    c.without_pidfd = sim_random(&state) % 8 == 0;
    c.priorities = sim_random(&state) % 2;
    c.changes = (int)(sim_random(&state) % 8);
    c.mean = means[sim_random(&state) % (sizeof means / sizeof *means)];
    c.naps = sim_random(&state) % 4 == 0;
    c.spurious = sim_random(&state) % 4 == 0;
    c.lingers = sim_random(&state) % 4 == 0;
    c.computes = sim_random(&state) % 8 == 0;
    c.meets = sim_random(&state) % 2;
    c.holds = sim_random(&state) % 2;
    c.hold_bits = 2 + 2 * (int)(sim_random(&state) % 4);
    c.hold = sim_random(&state) & ((UINT64_C(1) << c.hold_bits) - 1);
    c.weak = sim_random(&state) % 4 == 0;
    draw_fault(&c, &state);
    if (sim_random(&state) % 8 == 0 && (options.fault < 0 || c.fault == SIM_NO_FAULT)) {
        c.in_step = true;
        c.fault = SIM_NO_FAULT;
        c.at = 0;
        c.own_order = c.skips = c.nested = c.uneven = c.naps = c.computes = false;
    } else if (c.fault == SIM_NO_FAULT) {
        c.computes = c.computes || sim_random(&state) % 4 == 0;
    }
    c.parts = sim_random(&state) % 4 == 0;
    const bool strays = c.fault == SIM_STRAYS;
    const unsigned often = strays || c.fault == SIM_CHANGES ? 2 : 1; /* so many of 4 cases idle */
    c.idle = c.evaluates && !c.in_step && sim_random(&state) % 4 < often;
    c.meets = c.meets && !(c.idle && strays && sim_random(&state) % 2);
    c.swaps = c.evaluates && sim_random(&state) % 4 < often;
    /* Of 8 cases with thaws or twins, 2 use a wire and 1 uses replicas, unless an option decides. */
    const uint64_t way = options.thaws || options.twins ? sim_mix(seed * 37 + 5) % 8 : 8;
    if (options.wire || (way < 2 && !options.replicas)) {
        draw_wire(&c);
    } else if (options.replicas || way == 2) {
        draw_replicas(&c);
    }
    c.twins = options.twins;
    if (options.thaws) {
        draw_thaws(&c);
    }
    c.joins = options.joins && c.meets;
    c.vanishes = c.fault == SIM_STOPS && (c.hosts || c.replicas) && sim_mix(seed * 23 + 7) % 2;
    return c;
}

static const char *const fault_names[SIM_FAULTS] = {"none",   "dies",   "stops",     "pauses",
                                                    "raises", "leaves", "no memory", "changes",
                                                    "strays", "refused"};

static void
print_case(const sim_case *c)
{
    printf(
        "  %d ranks, %d units, %d steps of %d backwards%s%s%s%s%s%s%s%s%s%s%s%s%s%s%s%s; %d gather "
        "slots, "
        "%d reduce slots; %s%s%s%s%s%s%s%s%s%s; fault: %s",
        c->world, c->units, c->steps, c->rounds,
        c->hosts      ? ", hosts"
        : c->wire     ? ", a wire"
        : c->near     ? ", replicas in one memory"
        : c->replicas ? ", replicas"
                      : "",
        c->thaws ? ", unfreezing" : "", c->twins ? ", two models" : "",
        c->trusts ? ", trusted order" : "", c->own_order ? ", own order" : "",
        c->skips ? ", units skipped" : "", c->nested ? ", nested" : "",
        c->rootless ? ", no root" : "", c->late ? ", late gradients" : "",
        c->evaluates ? c->uneven ? ", uneven evaluation" : ", evaluation" : "",
        c->idle ? ", idle batches" : "", c->swaps ? ", weights put back" : "",
        c->meets ? ", meetings" : "", c->parts ? ", no last meeting" : "",
        c->poison ? ", poison" : "", c->wide ? ", wide" : "", c->gather_slots, c->reduce_slots,
        c->priorities ? "priorities" : "random", c->naps ? ", naps" : "",
        c->spurious ? ", spurious wakes" : "", c->lingers ? ", late sleepers" : "",
        c->computes ? ", slow modules" : "", c->holds ? ", held up" : "",
        c->without_waitv ? ", no futex_waitv" : "", c->without_pidfd ? ", no pidfd" : "",
        c->weak ? ", late stores" : "", c->in_step ? ", in step" : "", fault_names[c->fault]);
    if (c->fault) {
        printf(" (rank %d%s at %llu%s, deadline %g s)", c->victim,
               c->vanishes ? " and its host" : "", (unsigned long long)c->at,
               c->place ? " of a place" : "", c->timeout_s);
    }
    printf("\n");
}

/* --- the trace and violations ---------------------------------------------------------------- */

void
sim_say(const char *format, ...)
{
    if (sim_tracing) {
        va_list args;
        va_start(args, format);
        printf("%14.6f ms  rank %2d  ", (double)(sim_now_ns() - 1000000000) * 1e-6, sim_rank());
        vprintf(format, args);
        printf("\n");
        va_end(args);
    }
}

void
sim_violation(const char *format, ...)
{
    char text[sizeof violation];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sim_say("VIOLATION: %s", text);
    if (!violation[0]) {
        memcpy(violation, text, sizeof violation);
    }
}

bool
sim_violated(void)
{
    return violation[0];
}

/* --- judgement ------------------------------------------------------------------------------- */

/* True if the text names the rank: "rank 3", or in a list: "ranks 1, 3 and 5". */
static bool
names(const char *text, int rank)
{
    for (const char *at = text; (at = strstr(at, "rank")) != NULL;) {
        at += strlen("rank");
        at += *at == 's';
        while (*at == ' ' || *at == ',' || strncmp(at, " and ", 5) == 0) {
            at += strncmp(at, " and ", 5) == 0 ? 5 : 1;
            char *end;
            long number = strtol(at, &end, 10);
            if (end == at) {
                break;
            }
            if (number == rank) {
                return true;
            }
            at = end;
        }
    }
    return false;
}

/* True if the text rightly blames "the other ranks": a whole host stopped, or a rank stopped in a barrier. */
static bool
may_be_any(const sim_run *run, const char *text)
{
    return strstr(text, "for the other ranks") &&
           (run->c->vanishes || strstr(run->struck_at, "shm_sync.c"));
}

static bool
says_that_one_died(const char *text)
{
    return strstr(text, ") died while") || strstr(text, ") died during");
}

/* True if the text says that a rank has left, although that rank ended with an error, which is the cause. */
static bool
says_that_one_left(const sim_case *c, const sim_run *run, const char *text)
{
    bool says = false;
    for (int r = 0; r < c->world; r++) {
        char part[48];
        snprintf(part, sizeof part, "rank %d (pid %d) has left", r, SIM_FIRST_PID + r);
        says = says || (run->out[r].status != 0 && strstr(text, part));
    }
    return says;
}

/* True if the rank reports that the victim has left, although the rank has done less than the victim. */
static bool
misses_what_was_done(const sim_case *c, const sim_run *run, int rank)
{
    char says[48];
    snprintf(says, sizeof says, "rank %d has left (", c->victim);
    return c->fault == SIM_LEAVES && !c->uneven &&
           strncmp(run->out[rank].text, says, strlen(says)) == 0 &&
           run->out[rank].done < run->out[c->victim].done;
}

/* The longest sum of a rank's waits for slots that end with private memory. See exchange_shared_wait.c. */
static const double PATIENCE_S = 2.7;

/* True if naps (random sleeps) plus a pause of half the deadline may have made a rank miss its deadline. */
static bool
may_be_late(const sim_case *c, const sim_run *run)
{
    return (double)run->napped_ns > 0.4e9 * c->timeout_s;
}

/* True if the text says that ranks differ. With c->meets, a timeout counts too: barriers compare no units. */
static bool
says_that_ranks_differ(const sim_case *c, const char *text)
{
    if (c->thaws && (strstr(text, "requires_grad or the order of modules differs") ||
                     (!c->wire && strstr(text, "has changed its parameters")))) {
        return true;
    }
    return !(c->thaws && c->fault == SIM_STRAYS) &&
           (strstr(text, "run different units") || strstr(text, "run equally many batches") ||
            strstr(text, "runs another model") || (c->meets && strstr(text, " waited ")));
}

static void
judge_error(const sim_case *c, const sim_run *run, int rank, const sim_outcome *out)
{
    const bool joined = out->joined && run->out[c->victim].joined;
    /* After the ranks have met, they notice a death at once. They notice a stop only when the deadline of a
     * wait passes, and that wait may begin after earlier waits for private memory. */
    const bool apart = c->fault == SIM_STRAYS || (c->fault == SIM_CHANGES && c->wire);
    const bool waits = c->fault == SIM_STOPS || (apart && (!c->wire || c->meets));
    const double before_s = 0.5 * c->timeout_s > PATIENCE_S ? 0.5 * c->timeout_s : PATIENCE_S;
    const double most_s = joined && !waits ? 0 : c->timeout_s + before_s;
    /* A departure disturbs only ranks that need the rank that left, so only time in which all ranks sleep is
     * counted. A rank that is about to sleep notices a departure only after a slice of its sleep. */
    const bool leaves = c->fault == SIM_LEAVES;
    /* If a rank fails before all ranks of its host (or of one of its groups) have met, the others notice only
     * at the deadline, as after a stop. An error text may name this rank by its number in the group. */
    const bool alone = (c->hosts || c->replicas) && !run->out[c->victim].joined;
    const bool told = (c->fault == SIM_NO_MEMORY || c->fault == SIM_REFUSED) && !alone;
    /* An error passes from one group to another when a rank ends. A rank that waits for a rank of its host
     * checks every 0.1 s whether ranks run different units, and may work for some time before that wait. */
    const bool looks = apart && c->hosts;
    /* On a wire, a left-out unit may show only in a later pass of the model (seed 40670110: probably because
     * the gather had begun ahead), and passes of the other model may come before that pass. */
    const bool slow = leaves || c->replicas || looks || (apart && c->twins);
    const int64_t late_ns = leaves || looks ? out->idle_ns : out->end_ns - run->fault_ns;
    const int slack_ms = slow ? LEFT_SLACK_MS : SLACK_MS;
    const int64_t slack_ns = (int64_t)(most_s * 1e9) + slack_ms * INT64_C(1000000);
    if (may_be_late(c, run)) {
        return;
    }
    if (!run->struck || c->fault == SIM_PAUSES) {
        sim_violation("rank %d raises without a cause: %s", rank, out->text);
    } else if (rank == c->victim && c->fault == SIM_NO_MEMORY) {
        if (out->status != NO_MEMORY) {
            sim_violation("rank %d, without memory, raises %d: %s", rank, out->status, out->text);
        }
    } else if (rank == c->victim && c->fault == SIM_REFUSED) {
        if (!strstr(out->text, strerror(sim_refused()))) {
            sim_violation("rank %d, refused by the system, does not say so: %s", rank, out->text);
        }
    } else if (c->fault == SIM_CHANGES && !c->wire) {
        if (!strstr(out->text, "has changed its parameters")) {
            sim_violation("rank %d raises without a cause: %s", rank, out->text);
        }
    } else if ((c->wire || c->thaws) && apart && !says_that_ranks_differ(c, out->text)) {
        sim_violation("rank %d does not say that the ranks differ: %s", rank, out->text);
    } else if (says_that_one_left(c, run, out->text)) {
        sim_violation("rank %d says that a rank left which gave up: %s", rank, out->text);
    } else if (misses_what_was_done(c, run, rank)) {
        sim_violation("rank %d misses what rank %d has done: %s", rank, c->victim, out->text);
    } else if (c->fault != SIM_DIES && says_that_one_died(out->text)) {
        sim_violation("rank %d says that a rank died: %s", rank, out->text);
    } else if ((joined || told) && !waits && !names(out->text, c->victim)) {
        sim_violation("rank %d does not name rank %d: %s", rank, c->victim, out->text);
    } else if (late_ns > slack_ns + run->napped_ns) {
        sim_violation("rank %d raises %.1f s after the cause: %s", rank, (double)late_ns * 1e-9,
                      out->text);
    }
}

static bool
names_lost(const sim_case *c, const char *text)
{
    bool any = names(text, c->victim);
    for (int r = 0; r < c->world; r++) {
        any = any || (sim_is_lost(c, r) && names(text, r));
    }
    return any;
}

static bool
lost_joined(const sim_case *c, const sim_run *run)
{
    bool all = run->out[c->victim].joined;
    for (int r = 0; r < c->world; r++) {
        all = all && (!sim_is_lost(c, r) || run->out[r].joined);
    }
    return all;
}

/* Checks that some rank names the victim. A rank that stops in a wait looks like a rank that only waits, so
 * when deadlines pass at the same time, a rank may name another waiting rank. In two cases, no rank need name
 * the victim: ranks that ran fewer batches wait in a barrier, or a rank waits to post late gradients. Such a
 * wait looks like the cause. Then some text must at least say where a rank waits or was last seen. */
static void
judge_stop(const sim_case *c, const sim_run *run)
{
    int raised = 0, knows = 0;
    const bool in_wait =
        run->struck &&
        (strstr(run->struck_at, "shm_stuck.c") || strstr(run->struck_at, "_wait.c") ||
         (c->late && strstr(run->struck_at, "exchange_shared_reduce.c")) ||
         strstr(run->struck_at, "shm_state.c") || strstr(run->struck_at, "exchange_shared.c"));
    const bool locks =
        c->fault == SIM_STOPS && run->struck && strstr(run->struck_at, "exchange_shared_gather.c");
    const bool apart =
        c->fault == SIM_STOPS && (((in_wait || locks) && c->late) || (c->uneven && c->meets));
    if (may_be_late(c, run)) {
        return;
    }
    for (int r = 0; r < c->world; r++) {
        const sim_outcome *out = &run->out[r];
        if (out->finished && out->status != 0 && out->joined && lost_joined(c, run)) {
            raised++;
            knows += names_lost(c, out->text) || may_be_any(run, out->text) ||
                     (apart && (strstr(out->text, ") waits in ") ||
                                strstr(out->text, ") was last seen in "))) ||
                     (c->fault == SIM_STRAYS && (strstr(out->text, "different collectives") ||
                                                 strstr(out->text, "has changed its parameters")));
        }
    }
    if (raised > 0 && knows == 0) {
        sim_violation("no rank names rank %d, which %s", c->victim, fault_names[c->fault]);
    }
}

static void
judge(const sim_case *c, const sim_run *run)
{
    if (c->fault == SIM_STOPS || (c->fault == SIM_STRAYS && !c->wire)) {
        judge_stop(c, run);
    }
    for (int r = 0; r < c->world; r++) {
        const sim_outcome *out = &run->out[r];
        const bool victim = sim_is_lost(c, r) && c->fault != SIM_PAUSES;
        const bool keeps = sim_wire_has_dropped(r);
        const char *left = sim_world_leftovers(r, out->died || !out->finished || keeps);
        if (!out->finished) {
            if (!victim || !run->struck) {
                sim_violation("rank %d has not ended%s", r, run->stuck);
            }
            continue;
        }
        if (out->status != 0) {
            judge_error(c, run, r, out);
        } else if (r == c->victim && sim_refused_need()) {
            sim_violation("rank %d goes on without what it was refused", r);
        }
        if (left[0] || (out->live && !keeps) || run->threads_left[r]) {
            sim_violation("rank %d leaves %s, %lld counted blocks, %d threads", r, left,
                          (long long)out->live, run->threads_left[r]);
        }
    }
}

/* --- runs ------------------------------------------------------------------------------------ */

static void
main_of(int rank, const sim_case *c, sim_outcome *out)
{
    copies[rank].program(rank, c, out);
}

static struct {
    uint64_t points, switches, struck;
} total;

static bool
run_seed(uint64_t seed)
{
    static sim_outcome out[SIM_RANKS];
    const sim_case c = draw_case(seed);
    sim_run run = {.c = &c, .main_of = main_of, .out = out};
    violation[0] = '\0';
    seed_now = seed;
    memset(out, 0, sizeof *out * (size_t)c.world);
    renew_copies(c.world);
    sim_world_begin(&c);
    sim_wire_begin(&c);
    if (options.trace) {
        print_case(&c);
    }
    (void)sim_schedule(&run);
    judge(&c, &run);
    sim_wire_end();
    sim_world_end();
    total.points += run.points;
    total.switches += run.switches;
    total.struck += run.struck;
    if (violation[0] && options.quiet && !options.silent) {
        printf("VIOLATION in seed %llu: %s\n", (unsigned long long)seed, violation);
    } else if (violation[0] && !options.silent) {
        printf("VIOLATION %s\n", violation);
        print_case(&c);
        printf("  again: simcluster %s%s%s%s%s --first %llu --count 1 --trace", options.library,
               options.thaws ? " --thaws" : "", options.twins ? " --twins" : "",
               options.joins ? " --joins" : "",
               options.wire       ? " --wire"
               : options.replicas ? " --replicas"
                                  : "",
               (unsigned long long)seed);
        if (options.ranks || options.units || options.steps || options.fault >= 0) {
            printf(" (with the same limits)");
        }
        printf("\n");
    }
    return !violation[0];
}

/* --- smaller cases --------------------------------------------------------------------------- */

/* True if the texts of two violations are equal up to their first digit. */
static bool
same_kind(const char *a, const char *b)
{
    const size_t same = strcspn(a, "0123456789");
    return same == strcspn(b, "0123456789") && strncmp(a, b, same) == 0;
}

/* Finds a seed that shows this kind of violation under the limits in `options`. (Limits change each case.) */
static bool
find_within(const char *kind, uint64_t *seed)
{
    for (uint64_t k = 1; k <= SHRINK_SEEDS; k++) {
        if (!run_seed(k) && same_kind(kind, violation)) {
            *seed = k;
            return true;
        }
    }
    return false;
}

/* Looks for a smaller case of the violation: without a fault, then with the fewest ranks, units and steps. */
static void
shrink(uint64_t seed)
{
    char kind[sizeof violation];
    const sim_case c = draw_case(seed);
    int *limits[] = {&options.ranks, &options.units, &options.steps};
    const int least[] = {2, 2, 1}, most[] = {c.world, c.units, c.steps};
    bool found = false;
    memcpy(kind, violation, sizeof kind);
    options.silent = true;
    for (int i = 0; i < 3; i++) {
        *limits[i] = most[i];
    }
    options.fault = SIM_NO_FAULT;
    found = c.fault != SIM_NO_FAULT && find_within(kind, &seed);
    options.fault = found ? SIM_NO_FAULT : (int)c.fault;
    for (int i = 0; i < 3; i++) {
        for (*limits[i] = least[i]; *limits[i] < most[i]; ++*limits[i]) {
            if (find_within(kind, &seed)) {
                found = true;
                break;
            }
        }
    }
    if (found) {
        printf("  smaller: simcluster %s --ranks %d --units %d --steps %d --fault %d --first %llu "
               "--count 1 "
               "--trace\n",
               options.library, options.ranks, options.units, options.steps, options.fault,
               (unsigned long long)seed);
    } else {
        printf("  no smaller case in %d seeds of each size\n", SHRINK_SEEDS);
    }
}

/* Reports a crash as a violation, prints the seed and ends the program. */
static void
on_crash(int number)
{
    static const char text[] = "VIOLATION a crash, in seed ";
    char digits[24];
    void *frames[32];
    int at = sizeof digits;
    digits[--at] = '\n';
    for (uint64_t left = seed_now; at > 0; left /= 10) {
        digits[--at] = (char)('0' + left % 10);
        if (left < 10) {
            break;
        }
    }
    (void)!write(1, text, sizeof text - 1);
    (void)!write(1, digits + at, sizeof digits - (size_t)at);
    backtrace_symbols_fd(frames, backtrace(frames, 32), 2);
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

static void
catch_crashes(void)
{
    static char stack[64 << 10];
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction caught = {.sa_handler = on_crash, .sa_flags = SA_ONSTACK};
    (void)sigaltstack(&other, NULL);
    (void)sigaction(SIGSEGV, &caught, NULL);
    (void)sigaction(SIGBUS, &caught, NULL);
    (void)sigaction(SIGABRT, &caught, NULL);
    (void)sigaction(SIGFPE, &caught, NULL);
}

static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int
usage(void)
{
    printf("simcluster LIBRARY [--first SEED] [--count N] [--ranks N] [--units N] [--steps N]\n"
           "  [--fault 0..%d] [--mended FILE] [--wire] [--replicas] [--thaws] [--twins] [--joins] "
           "[--trace]\n"
           "  [--quiet] [--until-found] [--shrink]\n"
           "Runs N seeds; ends with 1 if an invariant was violated. --until-found ends at the "
           "first one\n"
           "and prints \"found SEEDS\", or \"not found\".\n",
           SIM_FAULTS - 1);
    return 2;
}

static bool
read_flag(const char *word)
{
    static const struct {
        const char *word;
        bool *set;
    } flags[] = {{"--trace", &options.trace},       {"--quiet", &options.quiet},
                 {"--shrink", &options.shrink},     {"--until-found", &options.until_found},
                 {"--wire", &options.wire},         {"--thaws", &options.thaws},
                 {"--replicas", &options.replicas}, {"--twins", &options.twins},
                 {"--joins", &options.joins}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (strcmp(word, flags[i].word) == 0) {
            *flags[i].set = true;
            return true;
        }
    }
    return false;
}

/* Runs a line of the file `mended`: a seed and optional flags. Returns false if it shows a violation. */
static bool
run_line(char *line)
{
    const struct options before = options;
    char *rest;
    const uint64_t seed = strtoull(line, &rest, 10);
    for (char *word = strtok(rest, " "); word && strncmp(word, "--", 2) == 0;
         word = strtok(NULL, " ")) {
        if (!read_flag(word)) {
            errno = EINVAL;
            fail(word);
        }
    }
    const bool right = run_seed(seed);
    options = before;
    return right;
}

/* Runs the seeds of the file `mended`. Returns how many show a violation. Lines with # are comments. */
static uint64_t
run_mended(void)
{
    FILE *list = options.mended ? fopen(options.mended, "r") : NULL;
    uint64_t wrong = 0;
    char line[256];
    if (options.mended && !list) {
        fail(options.mended);
    }
    while (list && fgets(line, sizeof line, list)) {
        wrong += line[0] != '#' && !run_line(line);
    }
    if (list) {
        fclose(list);
    }
    return wrong;
}

static bool
read_options(int count, char **words)
{
    for (int i = 1; i < count; i++) {
        const char *word = words[i];
        if (word[0] != '-') {
            options.library = word;
            continue;
        }
        if (read_flag(word)) {
            continue;
        }
        if (i + 1 == count) {
            return false;
        }
        const uint64_t value = strtoull(words[++i], NULL, 10);
        if (strcmp(word, "--first") == 0) {
            options.first = value;
        } else if (strcmp(word, "--count") == 0) {
            options.count = value;
        } else if (strcmp(word, "--ranks") == 0) {
            options.ranks = (int)value;
        } else if (strcmp(word, "--units") == 0) {
            options.units = (int)value;
        } else if (strcmp(word, "--steps") == 0) {
            options.steps = (int)value;
        } else if (strcmp(word, "--mended") == 0) {
            options.mended = words[i];
        } else if (strcmp(word, "--fault") == 0) {
            options.fault = (int)value;
        } else {
            return false;
        }
    }
    return options.library && options.ranks <= SIM_RANKS && options.ranks != 1 &&
           options.units <= SIM_UNITS && options.units != 1 && options.fault < SIM_FAULTS;
}

int
main(int count, char **words)
{
    if (!read_options(count, words)) {
        return usage();
    }
    sim_tracing = options.trace;
    /* Take large blocks from the kernel, which zeroes them. Else each run clears half a MB per tree. */
    (void)mallopt(M_MMAP_THRESHOLD, 128 << 10);
    catch_crashes();
    setvbuf(stdout, NULL, _IOLBF, 0);
    const double begin = seconds();
    uint64_t wrong = run_mended(), run = 0;
    for (; run < options.count && !(options.until_found && wrong); run++) {
        wrong += !run_seed(options.first + run);
        if (wrong && options.shrink) {
            shrink(options.first + run);
            return 1;
        }
    }
    if (options.until_found) {
        wrong ? printf("found %llu\n", (unsigned long long)run) : printf("not found\n");
        return wrong ? 0 : 1;
    }
    const double took = seconds() - begin;
    printf("%llu seeds from %llu, %llu with a fault that struck: %llu violations; %.0f seeds, %.1f "
           "million points and %.1f million switches a second of the processor\n",
           (unsigned long long)run, (unsigned long long)options.first,
           (unsigned long long)total.struck, (unsigned long long)wrong, (double)run / took,
           (double)total.points / took * 1e-6, (double)total.switches / took * 1e-6);
    return wrong ? 1 : 0;
}
