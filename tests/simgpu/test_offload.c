/* Tests of units whose shards lie in pinned host memory, through the real exchange, device and communicator.
 *
 * Two models train side by side: one with its shards on the GPU, one with offloaded shards. The first model's
 * optimizer works on the GPU like an operator of torch, the second model's optimizer on the processor. After
 * every step, gradients, masters and gathered values of the two models must be equal bit for bit. Then waits
 * are left out one by one. */
#include "steps.h"

enum { FROZEN = 4, SIDES = 2, OFFLOADED = 1 };

static const int several[UNITS] = {0, 1, 2, 5, 4};

typedef struct pair {
    model sides[SIDES];
    int first; /* the first side that trains; OFFLOADED: only the offloaded side trains */
    ranks_run *run;
} pair;

typedef void (*pair_case)(pair *p);

/* Makes the same call for each side that trains. */
#define BOTH(call)                               \
    do {                                         \
        for (int w = p->first; w < SIDES; w++) { \
            model *m = &p->sides[w];             \
            FSDPC_TRY(call);                     \
        }                                        \
    } while (0)

/* --- ranks with a pair --------------------------------------------------------------------------- */

static struct {
    bool alone;
    pair_case with;
} pair_setup;

/* The communicator's watching thread must not poll during the test. If this thread saw that work is done, the
 * simulator would record that the processor saw this, too. */
static void
open_side(model *m, int which, int rank, int world)
{
    *m = (model){.rank = rank, .world = world, .replicas = 1, .kinds = several};
    m->offload = which == OFFLOADED;
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    if (world == 1) {
        REQUIRE_OK(fsdpc_comm_self(m->device, &m->comm));
    } else {
        m->comm = open_twins(m->device, rank, world, 2 * which,
                             (fsdpc_comm_nccl_options){.timeout_s = 60, .poll_ms = 30000});
    }
    open_tree(m);
}

static void
run_pair(int rank, ranks_run *run)
{
    pair p = {.first = pair_setup.alone ? OFFLOADED : 0, .run = run};
    start_rank(rank, run);
    for (int w = p.first; w < SIDES; w++) {
        open_side(&p.sides[w], w, rank, run->world);
    }
    pair_setup.with(&p);
    for (int w = p.first; w < SIDES; w++) {
        close_model(&p.sides[w]);
    }
}

static void
with_pairs_as(const char *what, int world, int option, bool alone, pair_case with)
{
    pair_setup.alone = alone;
    pair_setup.with = with;
    with_ranks_as(what, world, option, run_pair);
}

#define with_pairs(world, option, with) with_pairs_as(#with, world, option, false, with)
#define with_offloaded(world, option, with) with_pairs_as(#with, world, option, true, with)

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
load_masters(pair *p, int version)
{
    for (int w = p->first; w < SIDES; w++) {
        for (int u = 0; u < UNITS; u++) {
            fsdpc_unit *unit = p->sides[w].units[u];
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

/* Makes the optimizer's step. With `clear`, the gradients are set to None after the step. */
static void
move(pair *p, bool clear)
{
    for (int w = p->first; w < SIDES; w++) {
        for (int u = 0; u < UNITS; u++) {
            fsdpc_unit *unit = p->sides[w].units[u];
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
compare(pair *p, int step)
{
    model *m = &p->sides[OFFLOADED];
    for (int u = 0; u < UNITS && !p->first; u++) {
        const fsdpc_unit *a = p->sides[0].units[u], *b = m->units[u];
        const fsdpc_layout *layout = a->layout;
        note_wrong(m, differ(a->grad, b->grad, layout->grad_bytes), "sums", u, step);
        note_wrong(m, differ(a->master, b->master, layout->shard_bytes), "shards", u, step);
        note_wrong(m, differ(a->grads.used, b->grads.used, (size_t)layout->param_count),
                   "used bits", u, step);
        if (a->grad_out) {
            note_wrong(m, differ(a->grad_out, b->grad_out, layout->shard_bytes), "seen gradients",
                       u, step);
        }
    }
}

/* --- a pass ------------------------------------------------------------------------------------------ */

static void
use_both(pair *p, int u)
{
    const char *full[SIDES];
    model *m = &p->sides[OFFLOADED];
    for (int w = p->first; w < SIDES; w++) {
        const fsdpc_unit *unit = p->sides[w].units[u];
        full[w] = fsdpc_unit_full(unit);
        simgpu_host_read(full[w], unit->layout->full_bytes, "matmul");
    }
    for (int s = 0; s < m->units[u]->layout->segment_count && !p->first; s++) {
        const fsdpc_segment *seg = &m->units[u]->layout->segments[s];
        size_t bytes = (size_t)(seg->piece_numel * m->world) * fsdpc_dtype_bytes(seg->compute);
        note_wrong(m, differ(full[0] + seg->full_offset, full[1] + seg->full_offset, bytes),
                   "values", u, -1);
    }
}

static int
pass_forward(pair *p, bool grad)
{
    BOTH(fsdpc_tree_begin_forward(m->tree, true));
    BOTH(fsdpc_tree_forward_enter(m->tree, ROOT));
    use_both(p, ROOT);
    for (int u = 1; u < UNITS; u++) {
        BOTH(fsdpc_tree_forward_enter(m->tree, u));
        use_both(p, u);
        BOTH(fsdpc_tree_forward_leave(m->tree, u, grad));
    }
    BOTH(fsdpc_tree_forward_leave(m->tree, ROOT, grad));
    if (!grad) {
        BOTH(fsdpc_tree_end_forward(m->tree));
    }
    return FSDPC_OK;
}

static int
keep_local(model *m, int u, int step)
{
    make_grads(m, u, step);
    return fsdpc_tree_keep_local(m->tree, u, m->grads[u].tensors);
}

/* Runs backward from the last trainable unit down to `last`. Gradients are reduced if `sync` is true;
 * otherwise they are kept on the rank. */
static int
pass_units(pair *p, int step, int last, bool sync)
{
    BOTH(fsdpc_tree_begin_backward(m->tree));
    for (int u = FROZEN - 1; u >= last; u--) {
        BOTH(fsdpc_tree_backward_enter(m->tree, u));
        use_both(p, u);
        BOTH(fsdpc_tree_backward_done(m->tree, u, sync));
        BOTH(sync ? send_due(m, step, u == ROOT) : keep_local(m, u, step));
    }
    return FSDPC_OK;
}

static int
pass_backward(pair *p, int step, bool sync)
{
    FSDPC_TRY(pass_units(p, step, ROOT, sync));
    /* In backward, the frozen unit is entered after the last gradient is sent. */
    BOTH(fsdpc_tree_backward_enter(m->tree, FROZEN));
    use_both(p, FROZEN);
    BOTH(fsdpc_tree_drop_hold(m->tree, FROZEN));
    BOTH(fsdpc_tree_end_backward(m->tree, sync));
    return FSDPC_OK;
}

/* --- training ------------------------------------------------------------------------------------------- */

enum { PLAIN, ACCUMULATE, NO_SYNC };

static int
train_both(pair *p, int step, int how)
{
    if (how != PLAIN) {
        FSDPC_TRY(pass_forward(p, true));
        FSDPC_TRY(pass_backward(p, 10 + step, how == ACCUMULATE));
        if (how == ACCUMULATE) {
            compare(p, step);
        }
    }
    FSDPC_TRY(pass_forward(p, true));
    FSDPC_TRY(pass_backward(p, step, true));
    compare(p, step);
    move(p, step % 2 == 0);
    return FSDPC_OK;
}

static void
trains_alike(pair *p)
{
    CHECK(fsdpc_unit_is_offloaded(p->sides[1].units[0]));
    CHECK(!fsdpc_unit_is_offloaded(p->sides[0].units[0]));
    load_masters(p, 0);
    for (int step = 0; step < STEPS; step++) {
        for (int how = PLAIN; how <= NO_SYNC; how++) {
            CHECK_INT(train_both(p, step, how), FSDPC_OK);
        }
        /* Right after an evaluation, the test loads the next values. The test itself does not wait for
         * the evaluation's gathers. */
        CHECK_INT(pass_forward(p, false), FSDPC_OK);
        load_masters(p, step + 1);
    }
    CHECK_INT(p->sides[OFFLOADED].wrong, 0);
    expect_no_reports();
}

/* --- what a step costs ---------------------------------------------------------------------------------- */

/* With one rank no watching thread polls events, so only waits of the processor query them. */
static void
the_host_waits_once(pair *p)
{
    model *m = &p->sides[OFFLOADED];
    load_masters(p, 0);
    CHECK_INT(train_both(p, 0, NO_SYNC), FSDPC_OK);
    CHECK_INT(train_both(p, 1, NO_SYNC), FSDPC_OK);
    const simgpu_counters before = simgpu_count();
    int64_t queries = simgpu_calls("cuEventQuery");
    CHECK_INT(pass_forward(p, true), FSDPC_OK);
    CHECK_INT(pass_units(p, 2, ROOT, true), FSDPC_OK);
    CHECK_INT(simgpu_calls("cuEventQuery"), queries);
    CHECK_INT(fsdpc_tree_end_backward(m->tree, true), FSDPC_OK);
    CHECK(simgpu_calls("cuEventQuery") > queries);
    queries = simgpu_calls("cuEventQuery");
    move(p, true);
    for (int u = 0; u < UNITS; u++) { /* the end of backward waited for all units already */
        CHECK_INT(fsdpc_unit_settle(m->units[u]), FSDPC_OK);
    }
    CHECK_INT(simgpu_calls("cuEventQuery"), queries);
    expect_nothing_made(&before);
    expect_no_reports();
}

/* The shards and gradients of offloaded units lie in host memory. */
static void
memory_is_the_hosts(pair *p)
{
    int64_t held = 0;
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_unit *unit = p->sides[OFFLOADED].units[u];
        held += (int64_t)(unit->layout->shard_bytes * (unit->grad_out ? 2 : 1) +
                          unit->layout->grad_bytes);
        CHECK(!fsdpc_unit_is_direct(unit));
    }
    CHECK(simgpu_count().host_bytes >= held);
}

/* --- own values outside of a step ------------------------------------------------------------------------- */

/* The processor serves calls on a unit's shard or gradients. Each such call waits until no gather or sum in
 * flight uses this memory. */
static void
calls_on_own_values_wait(pair *p)
{
    fsdpc_tree *tree = p->sides[OFFLOADED].tree;
    fsdpc_unit *unit = p->sides[OFFLOADED].units[2];
    uint8_t mask[ENGINE_PARAMS] = {1, 1, 1, 1};
    static double full[600];
    fsdpc_norm norm;
    for (int call = 0; call < 7; call++) {
        load_masters(p, call);
        CHECK_INT(train_both(p, 0, PLAIN), FSDPC_OK);
        load_masters(p, call + 1);
        /* This backward breaks off, but its gathers and sums stay in flight. */
        CHECK_INT(pass_forward(p, true), FSDPC_OK);
        CHECK_INT(pass_units(p, 1, 2, true), FSDPC_OK);
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
        CHECK_INT(fsdpc_tree_end_backward(tree, true), FSDPC_OK);
    }
    expect_no_reports();
}

/* --- planted faults --------------------------------------------------------------------------------------- */

/* The call that is left out belongs to the second step or to the evaluation after it. */
static void
with_a_fault(pair *p)
{
    model *m = &p->sides[OFFLOADED];
    m->quiet = m->all_used = true;
    load_masters(p, 0);
    CHECK_INT(train_both(p, 0, PLAIN), FSDPC_OK);
    leave_out(m->rank);
    int status = train_both(p, 1, PLAIN);
    status = status == FSDPC_OK ? pass_forward(p, false) : status;
    load_masters(p, 2);
    judge(m->rank, p->run, status, false);
}

static void
missing_waits_are_found(int world)
{
    pair_setup.alone = true;
    pair_setup.with = with_a_fault;
    wait_counts w = leave_each_wait_out(world, LAZY, run_pair, "offloaded");
    CHECK(w.calls > 8);
    printf("%d ranks, offloaded: %d waits of streams left out, %d found", world, w.calls, w.found);
    if (world == 1) { /* with several ranks the number of queries varies */
        w = leave_each_out(world, LAZY, run_pair, "cuEventQuery", NULL);
        CHECK(w.found > 0);
        printf("; %d queries of the host left out, %d found", w.calls, w.found);
    }
    printf("\n");
}

int
main(void)
{
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < 8; option = next_option(world, option)) {
            with_pairs(world, option, trains_alike);
        }
        with_offloaded(world, 1, memory_is_the_hosts);
    }
    with_offloaded(1, 1, the_host_waits_once);
    for (int option = 0; option < 7; option++) {
        with_offloaded(1, option, calls_on_own_values_wait);
    }
    missing_waits_are_found(1);
    missing_waits_are_found(2);
    return test_result();
}
