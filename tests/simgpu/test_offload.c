/* Units whose own values lie in pinned host memory, through the real exchange, device and communicator.
 *
 * Two models train side by side: one with its values on the GPU, one with them offloaded. The optimizer
 * of the first is an operator of torch, that of the second is the processor. After every step their
 * gradients, masters and gathered values are equal bit for bit. Then waits are left out.
 */
#include "waits.h"

enum { UNITS = 5, ROOT = 0, FROZEN = 4, STEPS = 3, SIDES = 2, OFFLOADED = 1 };

static const int kinds[UNITS] = {0, 1, 2, 5, 4};
static const int depths[UNITS] = {0, 1, 1, 1, 1};
static const char *const names[UNITS] = {"root", "a", "b", "c", "frozen"};

typedef struct side {
    fsdpc_comm *comm;
    fsdpc_unit *units[UNITS];
    fsdpc_tree *tree;
} side;

typedef struct model {
    int rank, world;
    fsdpc_device *device;
    side sides[SIDES];
    engine_grads grads[UNITS];
    int64_t wrong;
    bool quiet;    /* a fault is planted: differences are counted, not failed */
    bool all_used; /* every parameter gets a gradient: no rank looks at the used bits */
    bool alone;    /* only the offloaded side trains */
} model;

/* --- set-up -------------------------------------------------------------------------------------- */

static fsdpc_comm *
open_comm(const model *m, int which)
{
    fsdpc_comm *comm;
    if (m->world == 1) {
        REQUIRE_OK(fsdpc_comm_self(m->device, &comm));
        return comm;
    }
    /* The watching thread must not look: what it has seen as done, the processor has. */
    return open_twins(m->device, m->rank, m->world, 2 * which,
                      (fsdpc_comm_nccl_options){.timeout_s = 60, .poll_ms = 30000});
}

static fsdpc_unit *
open_unit(const model *m, int which, int u)
{
    fsdpc_unit *unit;
    const fsdpc_unit_options options = {.name = names[u],
                                        .shard = m->sides[which].comm,
                                        .divide = m->world,
                                        .reshard = u != ROOT,
                                        .offload = which == OFFLOADED};
    REQUIRE_OK(
        fsdpc_unit_new(&options, engine_specs[kinds[u]], engine_spec_counts[kinds[u]], &unit));
    simgpu_label(unit->master, unit->layout->shard_bytes, which ? "pinned shard" : "shard");
    simgpu_label(unit->grad, unit->layout->grad_bytes, which ? "pinned gradient" : "gradient");
    return unit;
}

static void
open_model(model *m, int rank, const ranks_run *run, bool alone)
{
    static const fsdpc_tree_options options = {.backward_prefetch = FSDPC_PREFETCH_PRE,
                                               .forward_prefetch = true};
    *m = (model){.rank = rank, .world = run->world, .alone = alone};
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    simgpu_get_options()->foreign = true; /* gradients are malloc's here */
    for (int w = alone; w < SIDES; w++) {
        m->sides[w].comm = open_comm(m, w);
        for (int u = 0; u < UNITS; u++) {
            m->sides[w].units[u] = open_unit(m, w, u);
        }
        REQUIRE_OK(fsdpc_tree_new(m->sides[w].units, depths, UNITS, &options, &m->sides[w].tree));
    }
}

static void
close_model(model *m)
{
    for (int w = m->alone; w < SIDES; w++) {
        fsdpc_tree_free(m->sides[w].tree);
        for (int u = 0; u < UNITS; u++) {
            fsdpc_unit_free(m->sides[w].units[u]);
        }
        fsdpc_comm_free(m->sides[w].comm);
    }
    for (int u = 0; u < UNITS; u++) {
        free(m->grads[u].memory);
    }
}

static void
note_wrong(model *m, bool wrong, const char *what, int u)
{
    m->wrong += wrong;
    if (wrong && !m->quiet) {
        TEST_FAIL("rank %d of %d: other %s of unit %s when offloaded", m->rank, m->world, what,
                  names[u]);
    }
}

/* --- what the program does to own values ----------------------------------------------------------- */

static void
writes(int which, void *memory, size_t bytes, const char *what)
{
    (which == OFFLOADED ? simgpu_cpu_write : simgpu_host_write)(memory, bytes, what);
}

static void
reads(int which, const void *memory, size_t bytes, const char *what)
{
    (which == OFFLOADED ? simgpu_cpu_read : simgpu_host_read)(memory, bytes, what);
}

static void
set_masters(model *m, int version)
{
    for (int w = m->alone; w < SIDES; w++) {
        for (int u = 0; u < UNITS; u++) {
            fsdpc_unit *unit = m->sides[w].units[u];
            writes(w, unit->master, unit->layout->shard_bytes, "loading");
            engine_set_masters(unit, u, version);
        }
    }
}

static void
move_piece(const fsdpc_unit *unit, int s)
{
    const fsdpc_segment *seg = &unit->layout->segments[s];
    char *master = (char *)unit->master + seg->shard_offset;
    fsdpc_dtype dtype;
    const char *grad = fsdpc_unit_grad_out(unit, s, &dtype);
    for (int64_t i = 0; seg->trainable && i < seg->piece_numel; i++) {
        item_put(master, seg->storage, i,
                 item_get(master, seg->storage, i) - 0.125 * item_get(grad, dtype, i));
    }
}

/* The optimizer; with `clear` it sets the gradients to None. */
static void
move(model *m, bool clear)
{
    for (int w = m->alone; w < SIDES; w++) {
        for (int u = 0; u < UNITS; u++) {
            fsdpc_unit *unit = m->sides[w].units[u];
            reads(w, unit->grad, unit->layout->grad_bytes, "optimizer");
            writes(w, unit->master, unit->layout->shard_bytes, "optimizer");
            for (int s = 0; s < unit->layout->segment_count; s++) {
                move_piece(unit, s);
            }
            if (clear) {
                unit->grads.add = false;
                memset(unit->grads.used, 0, (size_t)unit->layout->param_count);
            }
        }
    }
}

static bool
differ(const void *a, const void *b, size_t bytes)
{
    return bytes > 0 && memcmp(a, b, bytes) != 0;
}

static void
compare(model *m)
{
    for (int u = 0; u < UNITS && !m->alone; u++) {
        const fsdpc_unit *a = m->sides[0].units[u], *b = m->sides[1].units[u];
        const fsdpc_layout *layout = a->layout;
        note_wrong(m, differ(a->grad, b->grad, layout->grad_bytes), "gradients", u);
        note_wrong(m, differ(a->master, b->master, layout->shard_bytes), "shards", u);
        note_wrong(m, differ(a->grads.used, b->grads.used, (size_t)layout->param_count),
                   "used bits", u);
        if (a->grad_out) {
            note_wrong(m, differ(a->grad_out, b->grad_out, layout->shard_bytes), "seen gradients",
                       u);
        }
    }
}

/* --- a pass ------------------------------------------------------------------------------------------ */

static void
use(model *m, int u)
{
    const void *full[SIDES];
    for (int w = m->alone; w < SIDES; w++) {
        const fsdpc_unit *unit = m->sides[w].units[u];
        full[w] = fsdpc_unit_full(unit);
        simgpu_host_read(full[w], unit->layout->full_bytes, "matmul");
        for (int s = 0; s < unit->layout->segment_count && !m->alone && w == 1; s++) {
            const fsdpc_segment *seg = &unit->layout->segments[s];
            size_t bytes = (size_t)(seg->piece_numel * m->world) * fsdpc_dtype_bytes(seg->compute);
            note_wrong(m,
                       memcmp((const char *)full[0] + seg->full_offset,
                              (const char *)full[1] + seg->full_offset, bytes) != 0,
                       "values", u);
        }
    }
}

/* The same call of both sides. */
#define BOTH(call)                               \
    do {                                         \
        for (int w = m->alone; w < SIDES; w++) { \
            fsdpc_tree *tree = m->sides[w].tree; \
            FSDPC_TRY(call);                     \
        }                                        \
    } while (0)

static int
forward(model *m, bool grad)
{
    BOTH(fsdpc_tree_begin_forward(tree, true));
    BOTH(fsdpc_tree_forward_enter(tree, ROOT));
    use(m, ROOT);
    for (int u = 1; u < UNITS; u++) {
        BOTH(fsdpc_tree_forward_enter(tree, u));
        use(m, u);
        BOTH(fsdpc_tree_forward_leave(tree, u, grad));
    }
    BOTH(fsdpc_tree_forward_leave(tree, ROOT, grad));
    if (!grad) {
        BOTH(fsdpc_tree_end_forward(tree));
    }
    return FSDPC_OK;
}

static void
make_grads(model *m, int u, int step)
{
    const fsdpc_unit *unit = m->sides[OFFLOADED].units[u];
    free(m->grads[u].memory);
    engine_make_grads(unit, u, step, 0, &m->grads[u]);
    if (m->all_used) {
        engine_fill_grads(unit, &m->grads[u]);
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        const fsdpc_tensor *grad = &m->grads[u].tensors[i];
        if (grad->data) {
            simgpu_host_write((void *)(uintptr_t)grad->data, (size_t)m->grads[u].shape[i] * 4,
                              "backward");
        }
    }
}

static int
send_due(model *m, int step, bool at_end)
{
    for (;;) {
        int u = fsdpc_tree_next_due(m->sides[OFFLOADED].tree, at_end);
        if (u < 0) {
            return FSDPC_OK;
        }
        make_grads(m, u, step);
        BOTH(fsdpc_tree_next_due(tree, at_end) == u ? FSDPC_OK : FSDPC_E_STATE);
        BOTH(fsdpc_tree_reduce(tree, u, m->grads[u].tensors));
    }
}

static int
backward(model *m, int step, bool sync)
{
    BOTH(fsdpc_tree_begin_backward(tree));
    for (int u = FROZEN - 1; u >= 0; u--) {
        BOTH(fsdpc_tree_backward_enter(tree, u));
        use(m, u);
        BOTH(fsdpc_tree_backward_done(tree, u, sync));
        if (sync) {
            FSDPC_TRY(send_due(m, step, u == ROOT));
        } else {
            make_grads(m, u, step);
            BOTH(fsdpc_tree_keep_local(tree, u, m->grads[u].tensors));
        }
    }
    /* Behind the last gradient that is sent. */
    BOTH(fsdpc_tree_backward_enter(tree, FROZEN));
    use(m, FROZEN);
    BOTH(fsdpc_tree_drop_hold(tree, FROZEN));
    BOTH(fsdpc_tree_end_backward(tree, sync));
    return FSDPC_OK;
}

/* --- training ------------------------------------------------------------------------------------------- */

enum { PLAIN, ACCUMULATE, NO_SYNC };

static int
train(model *m, int step, int how)
{
    if (how != PLAIN) {
        FSDPC_TRY(forward(m, true));
        FSDPC_TRY(backward(m, 10 + step, how == ACCUMULATE));
        if (how == ACCUMULATE) {
            compare(m);
        }
    }
    FSDPC_TRY(forward(m, true));
    FSDPC_TRY(backward(m, step, true));
    compare(m);
    move(m, step % 2 == 0);
    return FSDPC_OK;
}

static void
trains_alike(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run, false);
    CHECK(fsdpc_unit_is_offloaded(m.sides[1].units[0]));
    CHECK(!fsdpc_unit_is_offloaded(m.sides[0].units[0]));
    set_masters(&m, 0);
    for (int step = 0; step < STEPS; step++) {
        for (int how = PLAIN; how <= NO_SYNC; how++) {
            CHECK_INT(train(&m, step, how), FSDPC_OK);
        }
        /* Evaluation: the next loading follows at once. */
        CHECK_INT(forward(&m, false), FSDPC_OK);
        set_masters(&m, step + 1);
    }
    CHECK_INT(m.wrong, 0);
    expect_no_reports();
    close_model(&m);
}

/* --- what a step costs ---------------------------------------------------------------------------------- */

/* With one rank nobody else looks at events. */
static void
the_host_waits_once(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run, true);
    set_masters(&m, 0);
    CHECK_INT(train(&m, 0, NO_SYNC), FSDPC_OK);
    CHECK_INT(train(&m, 1, NO_SYNC), FSDPC_OK);
    const simgpu_counters before = simgpu_count();
    fsdpc_tree *tree = m.sides[OFFLOADED].tree;
    int64_t queries = simgpu_calls("cuEventQuery");
    CHECK_INT(forward(&m, true), FSDPC_OK);
    CHECK_INT(fsdpc_tree_begin_backward(tree), FSDPC_OK);
    for (int u = FROZEN - 1; u >= 0; u--) {
        CHECK_INT(fsdpc_tree_backward_enter(tree, u), FSDPC_OK);
        use(&m, u);
        CHECK_INT(fsdpc_tree_backward_done(tree, u, true), FSDPC_OK);
        CHECK_INT(send_due(&m, 2, u == ROOT), FSDPC_OK);
    }
    CHECK_INT(simgpu_calls("cuEventQuery"), queries);
    CHECK_INT(fsdpc_tree_end_backward(tree, true), FSDPC_OK);
    CHECK(simgpu_calls("cuEventQuery") > queries);
    queries = simgpu_calls("cuEventQuery");
    move(&m, true);
    for (int u = 0; u < UNITS; u++) { /* the wait at the end was for all of it */
        CHECK_INT(fsdpc_unit_settle(m.sides[OFFLOADED].units[u]), FSDPC_OK);
    }
    const simgpu_counters after = simgpu_count();
    CHECK_INT(simgpu_calls("cuEventQuery"), queries);
    CHECK_INT(after.host_syncs - before.host_syncs, 0);
    CHECK_INT(after.allocations - before.allocations, 0);
    CHECK_INT(after.host_allocations - before.host_allocations, 0);
    CHECK_INT(after.events_created - before.events_created, 0);
    expect_no_reports();
    close_model(&m);
}

/* What is kept on the GPU of own values, and what in host memory. */
static void
memory_is_the_hosts(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run, true);
    int64_t held = 0;
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_unit *unit = m.sides[OFFLOADED].units[u];
        held += (int64_t)(unit->layout->shard_bytes * (unit->grad_out ? 2 : 1) +
                          unit->layout->grad_bytes);
        CHECK(!fsdpc_unit_is_direct(unit));
    }
    CHECK(simgpu_count().host_bytes >= held);
    close_model(&m);
}

/* --- own values outside of a step ------------------------------------------------------------------------- */

/* Each call that the processor serves waits by itself for a gather or a sum that is on its way. */
static void
calls_on_own_values_wait(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run, true);
    fsdpc_unit *unit = m.sides[OFFLOADED].units[2];
    uint8_t mask[ENGINE_PARAMS] = {1, 1, 1, 1};
    static double full[600];
    fsdpc_norm norm;
    for (int call = 0; call < 7; call++) {
        set_masters(&m, call);
        CHECK_INT(train(&m, 0, PLAIN), FSDPC_OK);
        set_masters(&m, call + 1);
        /* A backward that broke off: its gathers and sums go on. */
        CHECK_INT(forward(&m, true), FSDPC_OK);
        CHECK_INT(fsdpc_tree_begin_backward(m.sides[OFFLOADED].tree), FSDPC_OK);
        for (int u = FROZEN - 1; u >= 2; u--) {
            CHECK_INT(fsdpc_tree_backward_enter(m.sides[OFFLOADED].tree, u), FSDPC_OK);
            use(&m, u);
            CHECK_INT(fsdpc_tree_backward_done(m.sides[OFFLOADED].tree, u, true), FSDPC_OK);
            CHECK_INT(send_due(&m, 1, false), FSDPC_OK);
        }
        CHECK(unit->in_flight[FSDPC_MASTER] && unit->in_flight[FSDPC_GRAD]);
        int status = call == 0   ? fsdpc_unit_write(unit, FSDPC_MASTER, 0, full, FSDPC_ON_HOST)
                     : call == 1 ? fsdpc_unit_zero_grad(unit, 0)
                     : call == 2 ? fsdpc_unit_scale_grad(unit, 0, 0.5)
                     : call == 3 ? fsdpc_unit_scale_grads(unit, mask, 0.5)
                     : call == 4 ? fsdpc_unit_grad_norm(unit, mask, 2, &norm)
                     : call == 5 ? fsdpc_unit_take_grad(unit, 0, full, FSDPC_F64)
                                 : fsdpc_unit_reload_grad(unit, 0);
        CHECK_INT(status, FSDPC_OK);
        CHECK(!unit->in_flight[FSDPC_MASTER] && !unit->in_flight[FSDPC_GRAD]);
        simgpu_cpu_write(unit->grad, unit->layout->grad_bytes, "processor");
        simgpu_cpu_write(unit->master, unit->layout->shard_bytes, "processor");
        CHECK_INT(fsdpc_tree_end_backward(m.sides[OFFLOADED].tree, true), FSDPC_OK);
    }
    expect_no_reports();
    close_model(&m);
}

/* --- planted faults --------------------------------------------------------------------------------------- */

/* In the second step and the evaluation that follows it. */
static void
with_a_fault(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    REQUIRE(simgpu_policy("lazy")); /* what nothing demands is late */
    open_model(&m, rank, run, true);
    m.quiet = m.all_used = true;
    set_masters(&m, 0);
    CHECK_INT(train(&m, 0, PLAIN), FSDPC_OK);
    leave_out(rank);
    int status = train(&m, 1, PLAIN);
    status = status == FSDPC_OK ? forward(&m, false) : status;
    set_masters(&m, 2);
    judge(rank, run, status, false);
    close_model(&m);
}

static void
missing_waits_are_found(int world)
{
    wait_counts w = leave_each_wait_out(world, 0, with_a_fault, "offloaded");
    CHECK(w.calls > 8);
    printf("%d ranks, offloaded: %d waits of streams left out, %d found", world, w.calls, w.found);
    if (world == 1) { /* several ranks' queries are as many as it takes */
        w = leave_each_out(world, 0, with_a_fault, "cuEventQuery", NULL);
        CHECK(w.found > 0);
        printf("; %d queries of the host left out, %d found", w.calls, w.found);
    }
    printf("\n");
}

int
main(void)
{
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < 8; option++) {
            with_ranks(world, option, trains_alike, NULL);
        }
        with_ranks(world, 1, memory_is_the_hosts, NULL);
    }
    with_ranks(1, 1, the_host_waits_once, NULL);
    for (int option = 0; option < 7; option++) {
        with_ranks(1, option, calls_on_own_values_wait, NULL);
    }
    missing_waits_are_found(1);
    missing_waits_are_found(2);
    return test_result();
}
