/* Tests of training steps of a tree: when each unit is gathered, kept, reduced and released. */
#include "engine.h"
#include "comm/flight.h"
#include "tree/tree_impl.h"

enum { UNITS = 5, ROOT = 0 };

static const int kinds[UNITS] = {0, 1, 2, 5, 4};
static const int depths[UNITS] = {0, 1, 1, 1, 1};
static const char *const names[UNITS] = {"root", "a", "b", "c", "frozen"};

static struct setup {
    fsdpc_tree_options options;
    bool wire;
    bool own_order;
    bool detach; /* the first tree is detached instead of freed */
} setup;

typedef struct model {
    int rank, world, version;
    int round; /* how often this backward has already reduced the unit whose gradients come next */
    fsdpc_comm *comm, *replicate;
    fsdpc_unit *units[UNITS];
    fsdpc_tree *tree;
} model;

/* --- a model --------------------------------------------------------------------------------- */

static void
set_version(model *m, int version)
{
    m->version = version;
    for (int u = 0; u < UNITS; u++) {
        engine_set_masters(m->units[u], u, version);
        m->units[u]->grads.add = false;
        memset(m->units[u]->grads.used, 0, (size_t)m->units[u]->layout->param_count);
    }
}

static void
make_units(model *m)
{
    for (int u = 0; u < UNITS; u++) {
        m->units[u] = engine_unit(m->comm, kinds[u], names[u], u != ROOT);
    }
    set_version(m, 0);
}

static void
open_model(model *m, int rank, ranks_run *run)
{
    *m = (model){.rank = rank, .world = run->world};
    m->comm = engine_join(rank, run, setup.wire);
    make_units(m);
    REQUIRE_OK(fsdpc_tree_new(m->units, depths, UNITS, &setup.options, &m->tree));
}

static void
close_model(model *m)
{
    /* A rank that closes frees memory that other ranks may still read, so all ranks meet here first. */
    REQUIRE_OK(fsdpc_comm_barrier(m->comm, "close"));
    fsdpc_tree_free(m->tree);
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_free(m->units[u]);
    }
    fsdpc_comm_free(m->replicate);
    fsdpc_comm_free(m->comm);
}

static void
check_values(model *m, int u)
{
    int64_t wrong = engine_count_wrong(m->units[u], u, m->version);
    if (wrong) {
        TEST_FAIL("rank %d of %d, version %d: %lld wrong elements of unit %s", m->rank, m->world,
                  m->version, (long long)wrong, names[u]);
    }
}

static int
child(const model *m, int position)
{
    int shift = setup.own_order ? m->rank : 0;
    return 1 + (position + shift) % (UNITS - 1);
}

static int
forward(model *m, bool grad)
{
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree, true));
    FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, ROOT));
    for (int i = 0; i < UNITS - 1; i++) {
        int u = child(m, i);
        FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, u));
        check_values(m, u);
        FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, u, grad));
        CHECK(!fsdpc_tree_is_held(m->tree, u));
    }
    check_values(m, ROOT);
    FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, ROOT, grad));
    CHECK(fsdpc_tree_is_held(m->tree, ROOT) == grad);
    return grad ? FSDPC_OK : fsdpc_tree_end_forward(m->tree);
}

static int
send_due(model *m, int step, bool at_end)
{
    for (;;) {
        int u = fsdpc_tree_next_due(m->tree, at_end);
        if (u < 0) {
            return FSDPC_OK;
        }
        engine_grads grads;
        engine_make_grads(m->units[u], u, step, m->round, &grads);
        int status = fsdpc_tree_reduce(m->tree, u, grads.tensors);
        free(grads.memory);
        FSDPC_TRY(status);
    }
}

static int
finish(model *m, int u, int step, bool sync)
{
    FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, sync));
    CHECK(!fsdpc_tree_is_held(m->tree, u));
    if (sync) {
        return send_due(m, step, false);
    }
    engine_grads grads;
    engine_make_grads(m->units[u], u, step, 0, &grads);
    int status = fsdpc_tree_keep_local(m->tree, u, grads.tensors);
    free(grads.memory);
    return status;
}

static int
backward(model *m, int step, bool sync)
{
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    CHECK(fsdpc_tree_in_backward(m->tree));
    FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, ROOT));
    for (int i = UNITS - 2; i >= 0; i--) {
        int u = child(m, i);
        FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, u));
        check_values(m, u);
        if (kinds[u] == 4) {
            FSDPC_TRY(fsdpc_tree_drop_hold(m->tree, u));
        } else {
            FSDPC_TRY(finish(m, u, step, sync));
        }
    }
    check_values(m, ROOT);
    FSDPC_TRY(finish(m, ROOT, step, sync));
    FSDPC_TRY(sync ? send_due(m, step, true) : FSDPC_OK);
    FSDPC_TRY(fsdpc_tree_end_backward(m->tree, sync));
    CHECK(!fsdpc_tree_in_backward(m->tree));
    return FSDPC_OK;
}

static void
check_sums(model *m, int step)
{
    const int rounds[RANKS_MAX] = {1, 1, 1, 1};
    for (int u = 0; u < UNITS; u++) {
        bool rounds_first = engine_rounds(setup.wire, m->world);
        CHECK_INT(engine_count_wrong_grads(m->units[u], rounds, u, step, rounds_first), 0);
    }
}

static int
count_trace(const model *m, int u, enum fsdpc_trace_op op)
{
    fsdpc_trace_entry entries[1024];
    size_t total = fsdpc_trace_copy(fsdpc_tree_trace(m->tree), entries, 1024);
    int count = 0;
    for (size_t i = 0; i < total; i++) {
        count += entries[i].unit == u && entries[i].op == op;
    }
    return count;
}

/* --- the usual step -------------------------------------------------------------------------- */

static void
run_steps(int rank, ranks_run *run)
{
    model m;
    open_model(&m, rank, run);
    fsdpc_tree_memory before, after;
    fsdpc_tree_get_memory(m.tree, &before);
    for (int step = 0; step < 5; step++) {
        fsdpc_trace_clear(fsdpc_tree_trace(m.tree));
        REQUIRE_OK(forward(&m, true));
        REQUIRE_OK(backward(&m, step, true));
        check_sums(&m, step);
        for (int u = 0; u < UNITS; u++) {
            CHECK_INT(count_trace(&m, u, FSDPC_TRACE_GATHER), u == ROOT ? 1 : 2);
            CHECK_INT(count_trace(&m, u, FSDPC_TRACE_REDUCE), kinds[u] == 4 ? 0 : 1);
            CHECK_INT(count_trace(&m, u, FSDPC_TRACE_ABSENT), 0);
        }
        set_version(&m, step + 1);
    }
    CHECK_INT(m.tree->backwards, 5);
    fsdpc_tree_get_memory(m.tree, &after);
    CHECK(memcmp(&before, &after, sizeof before) == 0 || setup.own_order);
    CHECK(setup.own_order || after.spare_count == 0);
    CHECK_INT(after.spare_bytes, 0);
    CHECK_STR(fsdpc_tree_kind(m.tree), setup.wire || run->world == 1 ? "wire" : "shared");
    close_model(&m);
}

static void
steps_are_exact_whatever_is_prefetched(int world, bool wire)
{
    for (int kind = FSDPC_PREFETCH_NONE; kind <= FSDPC_PREFETCH_POST; kind++) {
        setup = (struct setup){.options = {.backward_prefetch = (enum fsdpc_prefetch)kind,
                                           .forward_prefetch = kind != FSDPC_PREFETCH_NONE,
                                           .gather_slots = kind,
                                           .poison = kind == FSDPC_PREFETCH_PRE},
                               .wire = wire};
        ranks_do(run_steps, .world = world, .timeout_s = 20);
        if (!wire && world > 1) {
            setup.own_order = true;
            ranks_do(run_steps, .world = world, .timeout_s = 20);
        }
    }
}

/* --- other steps ----------------------------------------------------------------------------- */

static void
check_doubled(model *m, int step)
{
    /* Two backwards made equal gradients: the first kept them, the second sent the gradients of both. So each
     * sum is exactly doubled. */
    const int rounds[RANKS_MAX] = {1, 1, 1, 1};
    for (int u = 0; u < 2; u++) {
        fsdpc_unit *unit = m->units[u];
        for (int s = 0; s < unit->layout->segment_count; s++) {
            const fsdpc_segment *seg = &unit->layout->segments[s];
            char *sums = (char *)unit->grad + seg->grad_offset;
            for (int64_t k = 0; seg->trainable && k < seg->piece_numel; k++) {
                item_put(sums, seg->accumulate, k, item_get(sums, seg->accumulate, k) / 2);
            }
        }
        CHECK_INT(engine_count_wrong_grads(unit, rounds, u, step, false), 0);
    }
}

static void
run_unusual_steps(int rank, ranks_run *run)
{
    model m;
    open_model(&m, rank, run);
    /* Each evaluation is followed by a change of the shards without a backward. */
    for (int i = 1; i < 4; i++) {
        REQUIRE_OK(forward(&m, false));
        set_version(&m, i);
    }
    /* A forward fails inside of a unit that was entered twice. The next pass clears this state. */
    REQUIRE_OK(fsdpc_tree_begin_forward(m.tree, true));
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, ROOT));
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, 1));
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, 1));
    check_values(&m, 1);
    REQUIRE_OK(fsdpc_tree_forward_failed(m.tree, 1));
    CHECK_INT(fsdpc_unit_refs(m.units[1]), 1);
    /* The first backward keeps its gradients on this rank; the second sends the gradients of both. */
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(backward(&m, 9, false));
    CHECK_INT(m.tree->backwards, 0);
    fsdpc_tree_memory memory;
    fsdpc_tree_get_memory(m.tree, &memory);
    CHECK(memory.local_bytes > 0);
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(backward(&m, 9, true));
    check_doubled(&m, 9);
    set_version(&m, 4);
    /* A second backward runs without a forward in between, and recomputes a unit. */
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(backward(&m, 10, true));
    check_sums(&m, 10);
    set_version(&m, 4);
    REQUIRE_OK(fsdpc_tree_begin_backward(m.tree));
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, 2));
    check_values(&m, 2);
    REQUIRE_OK(fsdpc_tree_forward_leave(m.tree, 2, true));
    CHECK(fsdpc_tree_is_held(m.tree, 2));
    REQUIRE_OK(backward(&m, 11, true));
    check_sums(&m, 11);
    set_version(&m, 5);
    /* After a backward that ends in the middle, no unit is held, and the next step is correct. */
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(fsdpc_tree_begin_backward(m.tree));
    REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, 1));
    REQUIRE_OK(fsdpc_tree_end_backward(m.tree, true));
    CHECK(!fsdpc_tree_is_held(m.tree, 1) && !fsdpc_tree_is_held(m.tree, ROOT));
    CHECK_INT(fsdpc_unit_refs(m.units[1]), 0);
    set_version(&m, 6);
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(backward(&m, 12, true));
    check_sums(&m, 12);
    close_model(&m);
}

static void
unusual_steps_work(int world)
{
    setup = (struct setup){.options = {.backward_prefetch = FSDPC_PREFETCH_PRE}};
    ranks_do(run_unusual_steps, .world = world, .timeout_s = 20);
}

/* Over a wire, where all ranks reduce units in one order, a unit counts as passed when the backward reaches a
 * unit whose forward ran earlier. */
static void
run_passed(int rank, ranks_run *run)
{
    model m;
    open_model(&m, rank, run);
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(fsdpc_tree_begin_backward(m.tree));
    REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, ROOT));
    REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, 4));
    CHECK_INT(fsdpc_tree_next_passed(m.tree, 4), -1);
    CHECK_INT(fsdpc_tree_next_passed(m.tree, ROOT), -1);
    CHECK_INT(fsdpc_tree_next_passed(m.tree, 3), setup.wire ? 4 : -1);
    REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, 3));
    CHECK_INT(fsdpc_tree_next_passed(m.tree, 2), setup.wire ? 4 : -1);
    REQUIRE_OK(fsdpc_tree_drop_hold(m.tree, 4));
    CHECK_INT(fsdpc_tree_next_passed(m.tree, 2), setup.wire ? 3 : -1);
    REQUIRE_OK(fsdpc_tree_backward_done(m.tree, 3, false));
    CHECK_INT(fsdpc_tree_next_passed(m.tree, 2), -1);
    CHECK(fsdpc_tree_is_held(m.tree, ROOT));
    REQUIRE_OK(fsdpc_tree_end_backward(m.tree, false));
    /* As long as the tree remembers the forwards of an earlier pass, this backward may run through these
     * forwards, too, and no unit counts as passed. After fsdpc_tree_forget_calls, unit 4 counts as passed
     * over a wire. */
    for (int known = 1; known >= 0; known--) {
        REQUIRE_OK(forward(&m, true));
        REQUIRE_OK(fsdpc_tree_begin_backward(m.tree));
        REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, 4));
        CHECK_INT(fsdpc_tree_next_passed(m.tree, 3), setup.wire && !known ? 4 : -1);
        REQUIRE_OK(fsdpc_tree_end_backward(m.tree, false));
        fsdpc_tree_forget_calls(m.tree);
    }
    close_model(&m);
}

static void
units_are_passed(bool wire)
{
    setup = (struct setup){.wire = wire};
    ranks_do(run_passed, .world = 2, .timeout_s = 20);
}

/* A unit's gradients may become complete several times in one backward, not equally often on all ranks. */
static void
run_two_rounds(int rank, ranks_run *run)
{
    model m;
    int rounds[RANKS_MAX] = {2, 1, 3, 1};
    open_model(&m, rank, run);
    for (int step = 0; step < 3; step++) {
        REQUIRE_OK(forward(&m, true));
        REQUIRE_OK(fsdpc_tree_begin_backward(m.tree));
        for (m.round = 0; m.round < rounds[rank]; m.round++) {
            REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, 3));
            REQUIRE_OK(fsdpc_tree_backward_done(m.tree, 3, true));
            CHECK_INT(fsdpc_tree_next_due(m.tree, false), 3);
            REQUIRE_OK(send_due(&m, step, false));
        }
        m.round = 0;
        for (int u = 2; u >= 0; u--) {
            REQUIRE_OK(fsdpc_tree_backward_enter(m.tree, u));
            REQUIRE_OK(finish(&m, u, step, true));
        }
        REQUIRE_OK(send_due(&m, step, true));
        REQUIRE_OK(fsdpc_tree_end_backward(m.tree, true));
        CHECK_INT(engine_count_wrong_grads(m.units[3], rounds, 3, step,
                                           engine_rounds(setup.wire, m.world)),
                  0);
        CHECK_INT(count_trace(&m, 3, FSDPC_TRACE_PACK) <= 2 * (step + 1), 1);
        set_version(&m, step + 1);
    }
    close_model(&m);
}

static void
a_unit_may_be_complete_twice(int world, bool wire)
{
    setup = (struct setup){.wire = wire};
    ranks_do(run_two_rounds, .world = world, .timeout_s = 20);
}

/* Frees the old tree. If setup.detach is true, only detaches the tree, which check_detached frees later. */
static void
leave_old_tree(model *m, fsdpc_tree *old)
{
    fsdpc_tree *other;
    const uint8_t none[FSDPC_SHM_MAX_RANKS] = {0};
    if (!setup.detach) {
        fsdpc_tree_free(old);
        return;
    }
    CHECK_ERROR(fsdpc_tree_new(m->units, depths, UNITS, &setup.options, &other), FSDPC_E_STATE,
                "unit root belongs to another tree");
    CHECK_ERROR(fsdpc_unit_thaw(m->units[1], none), FSDPC_E_STATE, "detach the tree first");
    REQUIRE_OK(fsdpc_tree_detach(old));
    CHECK_INT(fsdpc_unit_refs(m->units[1]), 0);
    REQUIRE_OK(fsdpc_unit_thaw(m->units[1], none));
}

/* A detached tree cannot change its former units, which belong to another tree now. */
static void
check_detached(model *m, fsdpc_tree *old)
{
    fsdpc_tree_memory memory;
    REQUIRE_OK(fsdpc_tree_begin_forward(m->tree, true));
    REQUIRE_OK(fsdpc_tree_forward_enter(m->tree, 1));
    CHECK_ERROR(fsdpc_tree_begin_forward(old, true), FSDPC_E_STATE, "detached");
    CHECK_ERROR(fsdpc_tree_forward_enter(old, 1), FSDPC_E_STATE, "detached");
    CHECK_ERROR(fsdpc_tree_begin_backward(old), FSDPC_E_STATE, "detached");
    CHECK_ERROR(fsdpc_tree_reduce(old, 1, NULL), FSDPC_E_STATE, "detached");
    CHECK_ERROR(fsdpc_tree_end_backward(old, true), FSDPC_E_STATE, "detached");
    CHECK_ERROR(fsdpc_tree_announce(old, 1, 0), FSDPC_E_STATE, "detached");
    fsdpc_tree_get_memory(old, &memory);
    CHECK(memory.gather_slots > 0);
    REQUIRE_OK(fsdpc_tree_detach(old));
    fsdpc_tree_free(old);
    CHECK_INT(fsdpc_unit_refs(m->units[1]), 1);
    REQUIRE_OK(fsdpc_tree_forward_leave(m->tree, 1, false));
}

/* If a tree is freed or detached in the middle of a pass, another tree can use its units. */
static void
run_second_tree(int rank, ranks_run *run)
{
    model m;
    open_model(&m, rank, run);
    REQUIRE_OK(fsdpc_tree_begin_forward(m.tree, true));
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, ROOT));
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, 1));
    /* No slot is free, so unit 2 gets private memory. */
    REQUIRE_OK(fsdpc_tree_forward_enter(m.tree, 2));
    check_values(&m, 2);
    REQUIRE_OK(fsdpc_comm_barrier(m.comm, "before the tree goes"));
    fsdpc_tree *old = m.tree;
    leave_old_tree(&m, old);
    REQUIRE_OK(fsdpc_tree_new(m.units, depths, UNITS, &setup.options, &m.tree));
    for (int step = 0; step < 2; step++) {
        set_version(&m, step + 1);
        REQUIRE_OK(forward(&m, true));
        REQUIRE_OK(backward(&m, step, true));
        check_sums(&m, step);
        if (setup.detach && step == 0) {
            check_detached(&m, old);
        }
    }
    fsdpc_tree_memory memory;
    fsdpc_tree_get_memory(m.tree, &memory);
    CHECK_INT(memory.spare_count, 0);
    close_model(&m);
}

static void
units_outlive_their_tree(int world)
{
    for (int detach = 0; detach < 2; detach++) {
        setup = (struct setup){.options = {.gather_slots = 1}, .detach = detach};
        ranks_do(run_second_tree, .world = world, .timeout_s = 20);
    }
}

/* --- replicas -------------------------------------------------------------------------------- */

/* Two ranks form a shard group, and all ranks get the sums over all ranks. If the run's option is set,
 * replicas exchange their sums by sends and receives. In the last step each rank reduces twice. */
static void
run_replicas(int rank, ranks_run *run)
{
    enum { MOST = 3 };
    const int replicas = run->world / 2;
    model m = {.rank = rank % 2, .world = 2};
    char name[128];
    snprintf(name, sizeof name, "%s-shard-%d", run->name, rank / 2);
    REQUIRE_OK(fsdpc_comm_shm(engine_device, rank % 2, 2, name, run->timeout_s, &m.comm));
    snprintf(name, sizeof name, "%s-replica-%d", run->name, rank % 2);
    REQUIRE_OK(
        fsdpc_comm_shm(engine_device, rank / 2, replicas, name, run->timeout_s, &m.replicate));
    if (run->option) {
        m.replicate = carrier_over(engine_device, rank / 2, replicas, m.replicate, name);
    }
    CHECK_INT(fsdpc_comm_flies(m.replicate), run->option);
    fsdpc_unit_options options = {
        .name = "u", .shard = m.comm, .replicate = m.replicate, .divide = 4, .reshard = true};
    REQUIRE_OK(fsdpc_unit_new(&options, engine_specs[0], 2, &m.units[0]));
    int depth = 0;
    REQUIRE_OK(fsdpc_tree_new(m.units, &depth, 1, &setup.options, &m.tree));
    for (int step = 0; step < 4; step++) {
        const int times = step == 3 ? 2 : 1;
        m.units[0]->grads.add = false;
        memset(m.units[0]->grads.used, 0, 2);
        REQUIRE_OK(fsdpc_tree_begin_forward(m.tree, true));
        REQUIRE_OK(fsdpc_tree_begin_backward(m.tree));
        /* In step 1 the first replica has no gradients. */
        bool absent = step == 1 && rank < 2;
        int64_t numel[] = {1000, 37}, one = 1;
        float first[1000], second[37];
        for (int i = 0; i < 1000; i++) {
            first[i] = (float)engine_grad(rank, 0, 0, i, step, 0);
            second[i % 37] = (float)(rank + i % 37);
        }
        fsdpc_tensor grads[2] = {{absent ? NULL : first, FSDPC_F32, 1, &numel[0], &one, true},
                                 {step == 2 ? NULL
                                  : absent  ? NULL
                                            : second,
                                  FSDPC_F32, 1, &numel[1], &one, true}};
        REQUIRE_OK(fsdpc_tree_backward_done(m.tree, 0, true));
        CHECK_INT(fsdpc_tree_next_due(m.tree, false), 0);
        for (int i = 0; i < times; i++) {
            REQUIRE_OK(fsdpc_tree_reduce(m.tree, 0, grads));
        }
        REQUIRE_OK(fsdpc_tree_end_backward(m.tree, true));
        CHECK_INT(m.units[0]->grads.used[0], 1);
        CHECK_INT(m.units[0]->grads.used[1], step != 2);
        int64_t length;
        const float *own = fsdpc_unit_grad_part(m.units[0], 0, &length);
        int64_t begin = fsdpc_layout_span(m.units[0]->layout, 0, m.rank).param_begin;
        for (int64_t k = 0; k < length; k++) {
            float sums[MOST] = {0}, sum = 0;
            for (int r = 0; r < run->world; r++) {
                bool has = !(step == 1 && r < 2);
                sums[r / 2] += has ? (float)engine_grad(r, 0, 0, begin + k, step, 0) : 0;
            }
            for (int i = 0; i < replicas; i++) {
                sum += sums[i] * (float)times;
            }
            CHECK(own[k] == sum * 0.25f);
        }
    }
    REQUIRE_OK(fsdpc_comm_barrier(m.comm, "close"));
    fsdpc_tree_free(m.tree);
    fsdpc_unit_free(m.units[0]);
    fsdpc_comm_free(m.replicate);
    fsdpc_comm_free(m.comm);
}

static void
replicas_are_summed(void)
{
    setup = (struct setup){0};
    ranks_do(run_replicas, .world = 4, .timeout_s = 20);
    for (int world = 4; world <= 6; world += 2) {
        ranks_do(run_replicas, .world = world, .timeout_s = 20, .option = true);
    }
}

/* --- failures -------------------------------------------------------------------------------- */

static int
make_alone(void *argument)
{
    model *m = argument;
    fsdpc_tree *tree;
    int status = fsdpc_tree_new(m->units, depths, UNITS, &setup.options, &tree);
    fsdpc_tree_free(tree);
    return status;
}

static void
memory_may_run_out(void)
{
    model m = {.world = 1};
    setup = (struct setup){0};
    REQUIRE_OK(fsdpc_comm_self(engine_device, &m.comm));
    make_units(&m);
    test_alloc_sweep(make_alone, &m);
    int files = count_entries("/proc/self/fd");
    for (int i = 0; i < 20; i++) {
        REQUIRE_OK(make_alone(&m));
    }
    CHECK_INT(count_entries("/proc/self/fd"), files);
    REQUIRE_OK(fsdpc_tree_new(m.units, depths, UNITS, &setup.options, &m.tree));
    REQUIRE_OK(forward(&m, true));
    REQUIRE_OK(backward(&m, 0, true));
    check_sums(&m, 0);
    close_model(&m);
    fsdpc_tree_free(NULL);
}

int
main(void)
{
    memory_may_run_out();
    for (int world = 1; world <= 4; world++) {
        steps_are_exact_whatever_is_prefetched(world, false);
        unusual_steps_work(world);
        units_outlive_their_tree(world);
        a_unit_may_be_complete_twice(world, false);
    }
    units_are_passed(false);
    for (int flies = 0; flies < 2; flies++) {
        engine_flies = flies;
        a_unit_may_be_complete_twice(2, true);
        a_unit_may_be_complete_twice(3, true);
        units_are_passed(true);
        steps_are_exact_whatever_is_prefetched(2, true);
        steps_are_exact_whatever_is_prefetched(3, true);
    }
    for (engine_hosts = ENGINE_BY_TURNS; engine_hosts <= ENGINE_IN_PAIRS; engine_hosts++) {
        a_unit_may_be_complete_twice(3, true);
        units_are_passed(true);
        steps_are_exact_whatever_is_prefetched(3, true);
    }
    engine_hosts = ENGINE_APART;
    replicas_are_summed();
    return test_result();
}
