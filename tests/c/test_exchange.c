/* Tests of gathers and reductions among ranks: values are exact in every schedule that a rank may run.
 *
 * Each rank draws its schedule from a seed. All ranks have the same seed, or each rank has a seed of its own.
 * How often a rank reduces a unit follows from (seed, rank, unit, step), so that every rank can compute the
 * sums that it must get. Shards change after every backward, so that a stale value is noticed.
 */
#include "engine.h"
#include "exchange/exchange_shared_impl.h"

enum { UNITS = 6, MAX_EVENTS = 64, TIMEOUT_S = 20 };

static const int kinds[UNITS] = {0, 1, 2, 5, 4, 0};
static const char *const names[UNITS] = {"u0", "u1", "u2", "u3", "u4", "u5"};

/* What the ranks of the next group do. */
static struct setup {
    uint64_t seed;
    int steps, slots, reduce_slots;
    bool poison, wire;
    bool own_order;  /* each rank draws its own schedule */
    bool own_choice; /* each rank chooses which units and forwards it skips */
    bool prefetch;
    bool nest;       /* a unit may be gathered while another unit is gathered */
    int most_rounds; /* the most reductions of a unit in one backward */
    bool large;      /* the group has a single unit, of several chunks */
    int slow;        /* the rank, counted from 1, that sleeps now and then; 0: none */
} setup;

typedef struct group {
    int rank, world, step, forwards;
    int unit_count;
    uint64_t state, naps; /* states of two random generators: for the schedule, and for sleeps */
    fsdpc_comm *comm;
    fsdpc_unit *units[UNITS];
    fsdpc_trace *trace;
    fsdpc_exchange *x;
    uint64_t digest;
} group;

/* --- a group --------------------------------------------------------------------------------- */

static void
change_masters(group *g)
{
    for (int u = 0; u < g->unit_count; u++) {
        engine_set_masters(g->units[u], u, g->step);
        g->units[u]->grads.add = false;
        memset(g->units[u]->grads.used, 0, (size_t)g->units[u]->layout->param_count);
    }
}

static void
open_group(group *g, int rank, ranks_run *run)
{
    static const int ids[UNITS] = {0, 1, 2, 3, 4, 5};
    int slot_of[UNITS];
    size_t slot_bytes[UNITS] = {0};
    *g = (group){.rank = rank, .world = run->world, .unit_count = setup.large ? 1 : UNITS};
    g->state = setup.seed + (setup.own_order ? (uint64_t)rank * 7919 : 0);
    g->comm = engine_join(rank, run, setup.wire);
    for (int u = 0; u < g->unit_count; u++) {
        g->units[u] = engine_unit(g->comm, setup.large ? 3 : kinds[u], names[u], true);
        bool direct = fsdpc_unit_is_direct(g->units[u]);
        slot_of[u] = direct ? -1 : u % setup.slots;
        size_t bytes = direct ? 0 : g->units[u]->range.bytes;
        size_t *slot = &slot_bytes[u % setup.slots];
        *slot = bytes > *slot ? bytes : *slot;
    }
    REQUIRE_OK(fsdpc_trace_new(1 << 12, &g->trace));
    fsdpc_exchange_plan plan = {
        .comm = g->comm,
        .units = g->units,
        .unit_ids = ids,
        .unit_count = g->unit_count,
        .slot_of = slot_of,
        .slot_bytes = slot_bytes,
        .slot_count = setup.slots,
        .reduce_slots = setup.reduce_slots,
        .poison = setup.poison,
        .trace = g->trace,
    };
    REQUIRE_OK(fsdpc_exchange_new(&plan, &g->x));
    change_masters(g);
}

static void
close_group(group *g)
{
    fsdpc_exchange_free(g->x);
    for (int u = 0; u < g->unit_count; u++) {
        fsdpc_unit_free(g->units[u]);
    }
    fsdpc_trace_free(g->trace);
    fsdpc_comm_free(g->comm);
}

static int
draw(group *g, int below)
{
    return (int)(engine_random(&g->state) % (uint64_t)below);
}

static void
dawdle(group *g)
{
    if (g->rank + 1 == setup.slow && engine_random(&g->naps) % 4 == 0) {
        rank_sleep_ms(3);
    }
}

static void
check_values(group *g, int u)
{
    int64_t wrong = engine_count_wrong(g->units[u], u, g->step);
    if (wrong) {
        TEST_FAIL("rank %d of %d, step %d, unit %d: %lld wrong elements (seed %llu)", g->rank,
                  g->world, g->step, u, (long long)wrong, (unsigned long long)setup.seed);
    }
}

/* --- steps: errors are returned, for ranks whose peers die ------------------------------------ */

static int
begin_pass(group *g)
{
    FSDPC_TRY(fsdpc_exchange_drop(g->x));
    g->forwards++;
    return fsdpc_exchange_begin(g->x, (uint64_t)g->step << FSDPC_TAG_BITS | (uint64_t)g->forwards);
}

static int
prefetch_any(group *g)
{
    return setup.prefetch && draw(g, 2) ? fsdpc_exchange_prefetch(g->x, g->units[draw(g, UNITS)])
                                        : FSDPC_OK;
}

static int
use(group *g, int u, bool nest)
{
    FSDPC_TRY(fsdpc_exchange_gather(g->x, g->units[u]));
    check_values(g, u);
    FSDPC_TRY(prefetch_any(g));
    dawdle(g);
    if (nest) {
        FSDPC_TRY(use(g, draw(g, UNITS), false));
        check_values(g, u);
    }
    return fsdpc_exchange_release(g->x, g->units[u]);
}

static int
random_forward(group *g)
{
    FSDPC_TRY(begin_pass(g));
    int uses = 2 + draw(g, 8);
    for (int i = 0; i < uses; i++) {
        int u = draw(g, UNITS);
        FSDPC_TRY(use(g, u, setup.nest && draw(g, 3) == 0));
    }
    return FSDPC_OK;
}

static int
rounds_of(int rank, int unit, int step)
{
    if (kinds[unit] == 4) {
        return 0;
    }
    if (!setup.own_choice) {
        return setup.most_rounds;
    }
    return (int)(engine_mix(setup.seed * 31 + (uint64_t)(rank * 400 + unit * 20 + step)) %
                 (uint64_t)(setup.most_rounds + 1));
}

static void
shuffle(group *g, int *events, int count)
{
    for (int i = count - 1; i > 0; i--) {
        int k = draw(g, i + 1), other = events[k];
        events[k] = events[i];
        events[i] = other;
    }
}

static int
reduce_one(group *g, int u, int round)
{
    engine_grads grads;
    engine_make_grads(g->units[u], u, g->step, round, &grads);
    int status = fsdpc_exchange_reduce(g->x, g->units[u], grads.tensors);
    free(grads.memory);
    return status;
}

static int
random_backward(group *g)
{
    int events[MAX_EVENTS], done[UNITS] = {0}, count = 0;
    for (int u = 0; u < UNITS; u++) {
        for (int round = 0; round < rounds_of(g->rank, u, g->step); round++) {
            events[count++] = u;
        }
    }
    shuffle(g, events, count);
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(use(g, events[i], setup.nest && draw(g, 3) == 0));
        FSDPC_TRY(reduce_one(g, events[i], done[events[i]]++));
        dawdle(g);
    }
    FSDPC_TRY(fsdpc_exchange_drop(g->x));
    return fsdpc_exchange_end(g->x);
}

static void
check_sums(group *g)
{
    for (int u = 0; u < g->unit_count; u++) {
        fsdpc_unit *unit = g->units[u];
        int rounds[RANKS_MAX] = {0}, most = 0;
        for (int r = 0; r < g->world; r++) {
            rounds[r] = rounds_of(r, u, g->step);
            most = rounds[r] > most ? rounds[r] : most;
        }
        int64_t wrong = most ? engine_count_wrong_grads(unit, rounds, u, g->step,
                                                        engine_rounds(setup.wire, g->world))
                             : 0;
        if (wrong) {
            TEST_FAIL("rank %d of %d, step %d, unit %d: %lld wrong sums or used bits (seed %llu)",
                      g->rank, g->world, g->step, u, (long long)wrong,
                      (unsigned long long)setup.seed);
        }
        const uint8_t *bytes = unit->grad;
        for (size_t i = 0; i < unit->layout->grad_bytes; i++) {
            g->digest = (g->digest ^ bytes[i]) * UINT64_C(0x100000001b3);
        }
    }
}

static void
next_step(group *g)
{
    check_sums(g);
    g->step++;
    g->forwards = 0;
    change_masters(g);
}

static int
random_step(group *g)
{
    int forwards = 1 + (setup.own_choice ? (g->step + g->rank) % 3 : draw(g, 2));
    for (int f = 0; f < forwards; f++) {
        FSDPC_TRY(random_forward(g));
    }
    FSDPC_TRY(random_backward(g));
    next_step(g);
    return FSDPC_OK;
}

/* --- random schedules ------------------------------------------------------------------------ */

static void
run_random_steps(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    for (int i = 0; i < setup.steps; i++) {
        REQUIRE_OK(random_step(&g));
    }
    CHECK_INT(fsdpc_exchange_spare_bytes(g.x), 0);
    atomic_fetch_add(&run->counter, engine_mix(g.digest + (uint64_t)rank));
    close_group(&g);
}

static uint64_t
digest_of_run(const char *what, int world, bool threads)
{
    return ranks_do(run_random_steps, .what = what, .world = world, .threads = threads,
                    .timeout_s = TIMEOUT_S)
        .counter;
}

/* First all ranks run one schedule, then each rank runs its own, then ranks also skip units and forwards. */
static void
values_and_sums_are_exact(int world, uint64_t seeds, bool threads)
{
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        setup = (struct setup){.seed = seed + (uint64_t)world * 100,
                               .steps = 6,
                               .slots = 1 + (int)seed % 3,
                               .reduce_slots = 1 + (int)seed % 2,
                               .poison = seed % 4 == 0,
                               .prefetch = seed % 2 == 0,
                               .nest = true,
                               .most_rounds = 1,
                               .slow = (int)seed % (world + 1)};
        digest_of_run("one schedule on all ranks", world, threads);
        setup.own_order = true;
        digest_of_run("each rank its own schedule", world, threads);
        setup.own_choice = true;
        setup.most_rounds = 1 + (int)seed % 3;
        uint64_t first = digest_of_run("skipped units and forwards", world, threads);
        setup.slow = 0;
        CHECK(digest_of_run("the same, no rank slow", world, threads) == first);
    }
}

/* --- the plain schedule ---------------------------------------------------------------------- */

static int
count_trace(group *g, int u, enum fsdpc_trace_op op)
{
    fsdpc_trace_entry entries[1 << 12];
    size_t total = fsdpc_trace_copy(g->trace, entries, 1 << 12);
    int count = 0;
    for (size_t i = 0; i < total; i++) {
        count += entries[i].unit == u && entries[i].op == op;
    }
    return count;
}

static int
plain_step(group *g)
{
    FSDPC_TRY(begin_pass(g));
    for (int u = 0; u < UNITS; u++) {
        FSDPC_TRY(fsdpc_exchange_gather(g->x, g->units[u]));
        if (u + 1 < UNITS) {
            FSDPC_TRY(fsdpc_exchange_prefetch(g->x, g->units[u + 1]));
        }
        check_values(g, u);
        dawdle(g);
        FSDPC_TRY(fsdpc_exchange_release(g->x, g->units[u]));
    }
    for (int u = UNITS - 1; u >= 0; u--) {
        FSDPC_TRY(fsdpc_exchange_gather(g->x, g->units[u]));
        check_values(g, u);
        FSDPC_TRY(fsdpc_exchange_release(g->x, g->units[u]));
        FSDPC_TRY(reduce_one(g, u, 0));
        dawdle(g);
    }
    FSDPC_TRY(fsdpc_exchange_end(g->x));
    next_step(g);
    return FSDPC_OK;
}

static void
run_plain_steps(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    size_t bytes = fsdpc_exchange_gather_bytes(g.x);
    for (int i = 0; i < 8; i++) {
        REQUIRE_OK(plain_step(&g));
    }
    CHECK_INT(fsdpc_exchange_spare_count(g.x), 0);
    CHECK_INT(fsdpc_exchange_gather_bytes(g.x), bytes);
    CHECK_STR(fsdpc_exchange_kind(g.x), setup.wire || run->world == 1 ? "wire" : "shared");
    for (int u = 0; u < UNITS; u++) {
        CHECK_INT(count_trace(&g, u, FSDPC_TRACE_GATHER), 16);
        CHECK_INT(count_trace(&g, u, FSDPC_TRACE_REDUCE), kinds[u] == 4 ? 0 : 8);
        CHECK_INT(count_trace(&g, u, FSDPC_TRACE_JOIN), 0);
        CHECK_INT(count_trace(&g, u, FSDPC_TRACE_ABSENT), 0);
    }
    close_group(&g);
}

/* A prefetched unit gives up its slot if another unit is gathered instead. */
static void
run_wrong_guess(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    REQUIRE_OK(begin_pass(&g));
    REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[1]));
    REQUIRE_OK(fsdpc_exchange_prefetch(g.x, g.units[0]));
    REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[2])); /* takes the slot of unit 0 */
    check_values(&g, 2);
    check_values(&g, 1);
    REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[0]));
    check_values(&g, 0);
    /* Units 0 and 2 share a slot, so one of them got spare memory. */
    CHECK_INT(fsdpc_exchange_spare_count(g.x), 1);
    REQUIRE_OK(fsdpc_exchange_drop(g.x));
    REQUIRE_OK(fsdpc_exchange_end(g.x));
    close_group(&g);
}

/* --- chosen schedules ------------------------------------------------------------------------ */

static void
run_two_live(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    for (int i = 0; i < 3; i++) {
        REQUIRE_OK(begin_pass(&g));
        REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[0]));
        REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[1]));
        REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[1]));
        CHECK_INT(fsdpc_exchange_spare_bytes(g.x), g.units[1]->range.bytes);
        CHECK_INT(fsdpc_unit_refs(g.units[1]), 2);
        check_values(&g, 0);
        check_values(&g, 1);
        REQUIRE_OK(fsdpc_exchange_release(g.x, g.units[1]));
        check_values(&g, 1);
        REQUIRE_OK(fsdpc_exchange_release(g.x, g.units[1]));
        CHECK_INT(fsdpc_exchange_spare_bytes(g.x), 0);
        check_values(&g, 0);
        REQUIRE_OK(fsdpc_exchange_release(g.x, g.units[0]));
        CHECK_ERROR(fsdpc_exchange_release(g.x, g.units[0]), FSDPC_E_STATE, "unit u0");
        REQUIRE_OK(fsdpc_exchange_end(g.x));
        g.step++;
        change_masters(&g);
    }
    CHECK_INT(fsdpc_exchange_spare_count(g.x), 3);
    CHECK_INT(count_trace(&g, 1, FSDPC_TRACE_SPARE), 3);
    CHECK_INT(count_trace(&g, 1, FSDPC_TRACE_JOIN), 3);
    close_group(&g);
}

static void
run_poison(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    REQUIRE_OK(begin_pass(&g));
    for (int u = 0; u < 2; u++) {
        REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[u]));
        check_values(&g, u);
        /* Rank 0 releases the unit while the other ranks still read the slot. */
        if (g.rank != 0) {
            REQUIRE_OK(fsdpc_comm_barrier(g.comm, "poison"));
            check_values(&g, u);
        }
        REQUIRE_OK(fsdpc_exchange_release(g.x, g.units[u]));
        for (int s = 0; s < g.units[u]->layout->segment_count; s++) {
            const fsdpc_segment *seg = &g.units[u]->layout->segments[s];
            const char *full = (char *)fsdpc_unit_full(g.units[u]) + seg->full_offset;
            for (int64_t i = 0; i < seg->piece_numel * g.world; i++) {
                double value = item_get(full, seg->compute, i);
                CHECK(seg->compute == FSDPC_BYTES ? value == 127 : value != value);
            }
        }
        if (g.rank == 0) {
            REQUIRE_OK(fsdpc_comm_barrier(g.comm, "poison"));
        }
        REQUIRE_OK(fsdpc_comm_barrier(g.comm, "poison"));
    }
    /* A gather of the unit in the same pass must give its values and not the poison. */
    REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[1]));
    check_values(&g, 1);
    REQUIRE_OK(fsdpc_exchange_release(g.x, g.units[1]));
    REQUIRE_OK(fsdpc_comm_barrier(g.comm, "poison"));
    close_group(&g);
}

/* Rank 0 reduces a unit many times in one backward, the other ranks once or not at all. */
static void
run_lone_rounds(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    int rounds = rank == 0 ? run->option : rank == 1 ? 0 : 1;
    for (int step = 0; step < 2; step++) {
        REQUIRE_OK(begin_pass(&g));
        for (int round = 0; round < rounds; round++) {
            REQUIRE_OK(reduce_one(&g, 3, round));
        }
        REQUIRE_OK(fsdpc_exchange_end(g.x));
        int all[RANKS_MAX] = {run->option, 0, 1, 1};
        CHECK_INT(engine_count_wrong_grads(g.units[3], all, 3, g.step, false), 0);
        CHECK(fsdpc_exchange_reduce_bytes(g.x) > 0);
        g.step++;
        change_masters(&g);
    }
    close_group(&g);
}

/* One rank begins late, after the other ranks have posted their reductions. Rank 0 reduces the units in
 * order, and the other ranks in reverse order. */
static void
run_far_ahead(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    for (int step = 0; step < 3; step++) {
        REQUIRE_OK(begin_pass(&g));
        if (rank == step % 2) {
            rank_sleep_ms(60);
        }
        for (int i = 0; i < UNITS; i++) {
            int u = rank == 0 ? i : UNITS - 1 - i;
            REQUIRE_OK(reduce_one(&g, u, 0));
        }
        REQUIRE_OK(fsdpc_exchange_end(g.x));
        next_step(&g);
    }
    close_group(&g);
}

/* Ranks run different numbers of forwards. After its forwards, a rank waits for the other ranks at a barrier
 * of the communicator, outside of the exchange. */
static void
run_uneven_forwards(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    for (int i = 0; i < 2; i++) {
        for (int f = 0; f < 1 + 2 * rank; f++) {
            REQUIRE_OK(random_forward(&g));
        }
        REQUIRE_OK(fsdpc_comm_barrier(g.comm, "those who evaluate longer"));
        REQUIRE_OK(random_backward(&g));
        next_step(&g);
    }
    close_group(&g);
}

/* A shard has several chunks. The first rank that needs a chunk fills it, whichever rank that is. */
static void
run_large(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    for (int step = 0; step < 3; step++) {
        REQUIRE_OK(begin_pass(&g));
        if (rank == step) {
            rank_sleep_ms(20);
        }
        REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[0]));
        check_values(&g, 0);
        REQUIRE_OK(fsdpc_exchange_release(g.x, g.units[0]));
        REQUIRE_OK(reduce_one(&g, 0, 0));
        REQUIRE_OK(fsdpc_exchange_end(g.x));
        next_step(&g);
    }
    close_group(&g);
}

/* --- the wire -------------------------------------------------------------------------------- */

static void
run_mismatch(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    REQUIRE_OK(begin_pass(&g));
    REQUIRE_OK(fsdpc_exchange_gather(g.x, g.units[0]));
    if (run->option == 0) {
        CHECK_ERROR(fsdpc_exchange_gather(g.x, g.units[1 + rank]), FSDPC_E_MISMATCH,
                    rank == 0 ? "rank 0 is at the gather of unit u1 while rank 1 is at the gather "
                                "of unit u2"
                              : "rank 1 is at the gather of unit u2 while rank 0 is at the gather "
                                "of unit u1");
    } else {
        int status = rank == 0 ? reduce_one(&g, 0, 0) : fsdpc_exchange_gather(g.x, g.units[2]);
        if (rank == 0 && engine_flies) { /* with sends, the pass's end returns the error */
            CHECK_INT(status, FSDPC_OK);
            status = fsdpc_exchange_end(g.x);
        }
        CHECK_INT(status, FSDPC_E_MISMATCH);
        CHECK(strstr(fsdpc_error_text(), "reduce of unit u0") &&
              strstr(fsdpc_error_text(), "gather of unit u2"));
    }
    close_group(&g);
}

static void
the_wire_is_exact_too(int world, uint64_t seeds)
{
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        setup = (struct setup){.seed = seed,
                               .steps = 5,
                               .slots = 1 + (int)seed % 3,
                               .reduce_slots = 1,
                               .poison = seed % 2 == 0,
                               .prefetch = seed % 3 == 0,
                               .nest = true,
                               .wire = true,
                               .most_rounds = 1,
                               .slow = world};
        uint64_t first = digest_of_run("random steps over a wire", world, false);
        CHECK(digest_of_run("the same again", world, false) == first);
    }
}

/* --- death ----------------------------------------------------------------------------------- */

static void
die_now(int signal)
{
    (void)signal;
    kill(getpid(), SIGKILL);
}

static void
run_until_death(int rank, ranks_run *run)
{
    group g;
    open_group(&g, rank, run);
    if (rank == run->killed) {
        signal(SIGALRM, die_now);
        ualarm((useconds_t)run->option, 0);
    }
    int status = FSDPC_OK;
    while (status == FSDPC_OK) {
        status = random_step(&g);
    }
    CHECK_INT(status, FSDPC_E_PEER);
    char who[32];
    snprintf(who, sizeof who, "rank %d", run->killed);
    CHECK(strstr(fsdpc_error_text(), who) != NULL);
    /* A drop after the error does not wait for other ranks. */
    fsdpc_exchange_drop(g.x);
    /* A rank that closes frees its part of the memory, so ranks close only after all have seen the death. */
    atomic_fetch_add(&run->flags[0], 1);
    CHECK(rank_await(&run->flags[0], (uint32_t)run->world - 1));
    close_group(&g);
}

static void
death_ends_all_others(int world, uint64_t seeds)
{
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        uint64_t state = seed * 977;
        int killed = (int)(engine_random(&state) % (uint64_t)world);
        int after_us = 500 + (int)(engine_random(&state) % 60000);
        setup = (struct setup){.seed = seed,
                               .slots = 2,
                               .reduce_slots = 1,
                               .own_order = seed % 2 == 0,
                               .own_choice = seed % 2 == 0,
                               .prefetch = true,
                               .nest = true,
                               .most_rounds = 1};
        ranks_do(run_until_death, .world = world, .kills = true, .killed = killed,
                 .option = after_us, .timeout_s = TIMEOUT_S);
    }
}

/* --- main ------------------------------------------------------------------------------------ */

/* Each case runs on 2 and on 3 ranks. If `wired`, it also runs on 2 ranks over a wire. */
static const struct chosen {
    const char *what;
    rank_function ranks;
    bool wired;
    int option;
    struct setup setup;
} chosen[] = {
    {"one order needs no spare memory",
     run_plain_steps,
     true,
     0,
     {.seed = 5, .slots = 2, .reduce_slots = 2, .most_rounds = 1}},
    {"one order, rank 0 slow",
     run_plain_steps,
     true,
     0,
     {.seed = 5, .slots = 2, .reduce_slots = 2, .most_rounds = 1, .slow = 1}},
    {"one order, rank 1 slow",
     run_plain_steps,
     true,
     0,
     {.seed = 5, .slots = 2, .reduce_slots = 2, .most_rounds = 1, .slow = 2}},
    {"a wrong guess costs no spare memory",
     run_wrong_guess,
     false,
     0,
     {.slots = 2, .reduce_slots = 2}},
    {"two live units of one slot", run_two_live, true, 0, {.slots = 1, .reduce_slots = 1}},
    {"released values are poisoned",
     run_poison,
     true,
     0,
     {.slots = 2, .reduce_slots = 1, .poison = true}},
    {"more reductions in flight than slots",
     run_far_ahead,
     false,
     0,
     {.slots = 2, .reduce_slots = 1, .most_rounds = 1}},
    {"a unit runs a few rounds", run_lone_rounds, false, 3, {.slots = 2, .reduce_slots = 1}},
    {"a unit runs many rounds", run_lone_rounds, false, 300, {.slots = 2, .reduce_slots = 1}},
    {"large units are filled together",
     run_large,
     true,
     0,
     {.slots = 1, .reduce_slots = 1, .most_rounds = 1, .large = true}},
    {"who evaluates longer need not wait",
     run_uneven_forwards,
     false,
     0,
     {.slots = 2, .reduce_slots = 1, .nest = true, .most_rounds = 1}},
};

static void
run_chosen(const struct chosen *c, int world, bool wire, bool threads)
{
    /* A rank that waits longer than this for a slot uses spare memory. run_plain_steps expects no spare
     * memory. Its limit is therefore longer than any delay of a rank on a loaded machine. */
    fsdpc_shared_patience_ns =
        c->ranks == run_plain_steps ? TIMEOUT_S * INT64_C(1000000000) : 200000000;
    setup = c->setup;
    setup.wire = wire;
    ranks_do(c->ranks, .what = c->what, .world = world, .threads = threads, .option = c->option,
             .timeout_s = TIMEOUT_S);
}

static void
chosen_schedules_work(void)
{
    for (size_t i = 0; i < sizeof chosen / sizeof *chosen; i++) {
        run_chosen(&chosen[i], 2, false, false);
        run_chosen(&chosen[i], 3, false, false);
        if (chosen[i].wired) {
            run_chosen(&chosen[i], 2, true, false);
        }
    }
    run_chosen(&chosen[0], 1, false, false);
}

static void
ranks_at_different_units_are_told(void)
{
    setup = (struct setup){.slots = 3, .reduce_slots = 1, .wire = true};
    for (int reduces = 0; reduces < 2; reduces++) {
        ranks_do(run_mismatch, .world = 2, .option = reduces, .timeout_s = TIMEOUT_S);
    }
}

int
main(void)
{
    chosen_schedules_work();
    for (int world = 2; world <= 4; world++) {
        values_and_sums_are_exact(world, 3, false);
    }
    the_wire_is_exact_too(1, 2);
    for (int flies = 0; flies < 2; flies++) {
        engine_flies = flies;
        ranks_at_different_units_are_told();
        the_wire_is_exact_too(3, 3);
    }
    for (int hosts = ENGINE_BY_TURNS; hosts <= ENGINE_IN_PAIRS; hosts++) {
        engine_hosts = hosts;
        ranks_at_different_units_are_told();
        the_wire_is_exact_too(2, 4);
    }
    engine_hosts = ENGINE_APART;
    death_ends_all_others(2, 4);
    death_ends_all_others(4, 4);
    /* Threads come last, because a process with threads must not fork. */
    ranks_keep_addresses = true;
    for (int i = 0; i < 3; i++) {
        run_chosen(&chosen[i], 2, false, true);
    }
    values_and_sums_are_exact(3, 2, true);
    return test_result();
}
