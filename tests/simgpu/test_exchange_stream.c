/* The real exchange, arena, CUDA device and NCCL communicator under the simulator: training steps of
 * a tree on one to three ranks, in many legal orders of the held-back work. Nothing may race, every
 * value must be right, and in a step nothing is allocated and the host never waits. Then faults are
 * planted in the real code, by skipping one of its calls of the driver: each must be found.
 */
#include <math.h>

#include "comm_nccl.h"
#include "engine.h"
#include "gpu.h"
#include "simnccl.h"

enum { UNITS = 5, ROOT = 0, STEPS = 3 };

static const int kinds[UNITS] = {0, 1, 0, 5, 0};
static const int depths[UNITS] = {0, 1, 1, 1, 1};
static const char *const names[UNITS] = {"root", "a", "b", "c", "d"};

typedef struct model {
    int rank, world;
    fsdpc_device *device;
    fsdpc_comm *comm;
    fsdpc_unit *units[UNITS];
    fsdpc_tree *tree;
    engine_grads grads[UNITS];
    int64_t wrong;
    bool quiet;    /* differences are counted, not failed: a fault is planted */
    bool all_used; /* every parameter gets a gradient */
} model;

static char ids[2][FSDPC_COMM_NCCL_ID_BYTES];

/* --- a model on one rank ------------------------------------------------------------------------- */

static fsdpc_comm *
open_comm(const model *m, const char *name, const char *id)
{
    fsdpc_comm *comm;
    fsdpc_comm_nccl_options options = {.name = name, .timeout_s = 30, .poll_ms = 20};
    REQUIRE_OK(fsdpc_comm_nccl(m->device, m->rank, m->world, id, &options, &comm));
    return comm;
}

static void
new_ids(void)
{
    REQUIRE_OK(fsdpc_comm_nccl_id(ids[0]));
    REQUIRE_OK(fsdpc_comm_nccl_id(ids[1]));
}

static void
label(model *m, int u)
{
    fsdpc_unit *unit = m->units[u];
    char text[64];
    snprintf(text, sizeof text, "shard of %s", names[u]);
    simgpu_label(unit->master, unit->layout->shard_bytes, text);
    snprintf(text, sizeof text, "gradient of %s", names[u]);
    simgpu_label(unit->grad, unit->layout->grad_bytes, text);
    snprintf(text, sizeof text, "slot of %s", names[u]);
    simgpu_label(unit->range.address, unit->range.bytes, text);
}

static void
open_model(model *m, int rank, const ranks_run *run)
{
    static const fsdpc_tree_options options = {.backward_prefetch = FSDPC_PREFETCH_PRE,
                                               .forward_prefetch = true};
    *m = (model){.rank = rank, .world = run->world};
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    m->comm = open_comm(m, "gather", ids[0]);
    fsdpc_comm_set_twin(m->comm, open_comm(m, "reduce", ids[1]));
    for (int u = 0; u < UNITS; u++) {
        m->units[u] = engine_unit(m->comm, kinds[u], names[u], u != ROOT);
    }
    REQUIRE_OK(fsdpc_tree_new(m->units, depths, UNITS, &options, &m->tree));
    for (int u = 0; u < UNITS; u++) {
        label(m, u);
    }
}

static void
close_model(model *m)
{
    fsdpc_tree_free(m->tree);
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_free(m->units[u]);
        free(m->grads[u].memory);
    }
    fsdpc_comm_free(m->comm);
}

static void
note_wrong(model *m, int64_t wrong, const char *what, int u, int step)
{
    m->wrong += wrong;
    if (wrong && !m->quiet) {
        TEST_FAIL("rank %d of %d, step %d: %lld wrong elements in %s of unit %s", m->rank, m->world,
                  step, (long long)wrong, what, names[u]);
    }
}

/* The optimizer, an operator of torch on the compute stream. */
static void
set_masters(model *m, int step)
{
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit *unit = m->units[u];
        simgpu_host_write(unit->master, unit->layout->shard_bytes, "optimizer");
        engine_set_masters(unit, u, step);
        unit->add = false;
        memset(unit->used, 0, (size_t)unit->layout->param_count);
    }
}

static void
use(model *m, int u, int step)
{
    fsdpc_unit *unit = m->units[u];
    simgpu_host_read(fsdpc_unit_full(unit), unit->layout->full_bytes, "matmul");
    note_wrong(m, engine_count_wrong(unit, u, step), "values", u, step);
}

static void
fill_grads(const fsdpc_unit *unit, engine_grads *grads)
{
    static const int64_t one = 1;
    float *next = grads->memory;
    for (int i = 0; i < unit->layout->param_count; i++) {
        int64_t numel = unit->layout->params[i].numel;
        if (unit->layout->params[i].trainable_index >= 0) {
            grads->tensors[i] = (fsdpc_tensor){next, FSDPC_F32, 1, &grads->shape[i], &one, true};
            for (int64_t k = 0; k < numel; k++) {
                next[k] = 1.0f;
            }
        }
        next += numel;
    }
}

/* torch frees gradients when the pack is queued and writes other tensors there. */
static void
make_grads(model *m, int u, int step)
{
    free(m->grads[u].memory);
    engine_make_grads(m->units[u], u, step, 0, &m->grads[u]);
    if (m->all_used) {
        fill_grads(m->units[u], &m->grads[u]);
    }
    for (int i = 0; i < m->units[u]->layout->param_count; i++) {
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
        int u = fsdpc_tree_next_due(m->tree, at_end);
        if (u < 0) {
            return FSDPC_OK;
        }
        make_grads(m, u, step);
        FSDPC_TRY(fsdpc_tree_reduce(m->tree, u, m->grads[u].tensors));
    }
}

static int
forward(model *m, int step)
{
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree));
    FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, ROOT));
    use(m, ROOT, step);
    for (int u = 1; u < UNITS; u++) {
        FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, u));
        use(m, u, step);
        FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, u, true));
    }
    use(m, ROOT, step);
    return fsdpc_tree_forward_leave(m->tree, ROOT, true);
}

static int
backward(model *m, int step)
{
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, ROOT));
    for (int u = UNITS - 1; u > 0; u--) {
        FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, u));
        use(m, u, step);
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, true));
        FSDPC_TRY(send_due(m, step, false));
    }
    FSDPC_TRY(fsdpc_tree_backward_done(m->tree, ROOT, true));
    FSDPC_TRY(send_due(m, step, true));
    return fsdpc_tree_end_backward(m->tree, true);
}

/* NCCL adds in the order of a ring: with three ranks the last bits are another order's. */
static int64_t
count_far_grads(const fsdpc_unit *unit, const int *rounds, int u, int step)
{
    int64_t far = 0;
    for (int i = 0; i < unit->layout->param_count; i++) {
        const fsdpc_param_place *place = &unit->layout->params[i];
        const fsdpc_segment *seg = &unit->layout->segments[place->segment];
        const char *sums = (char *)unit->grad + seg->grad_offset;
        for (int64_t k = 0; seg->trainable && k < place->numel; k++) {
            int64_t at = place->offset + k - seg->piece_numel * unit->rank;
            if (at >= 0 && at < seg->piece_numel) {
                double wanted = engine_expected(unit, rounds, u, i, k, step, true);
                double off = engine_get(sums, seg->accumulate, at) - wanted;
                double unit_in_last = seg->reduce == FSDPC_BF16 ? 0.008 : 1e-6;
                far += !(fabs(off) <= unit_in_last * (fabs(wanted) + 5));
            }
        }
        far += unit->used[i] != (seg->trainable && engine_used(unit, rounds, u, i, step));
    }
    return far;
}

static void
read_grads(model *m, int step)
{
    static const int rounds[RANKS_MAX] = {1, 1, 1, 1, 1, 1, 1, 1};
    /* Nothing but the clocks knows the values that fill_grads makes. */
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit *unit = m->units[u];
        simgpu_host_read(unit->grad, unit->layout->grad_bytes, "optimizer");
        int64_t wrong = m->world < 3 ? engine_count_wrong_grads(unit, rounds, u, step, m->world > 1)
                                     : count_far_grads(unit, rounds, u, step);
        note_wrong(m, m->all_used ? 0 : wrong, "gradient", u, step);
    }
}

static int
train(model *m, int steps)
{
    for (int step = 0; step < steps; step++) {
        set_masters(m, step);
        FSDPC_TRY(forward(m, step));
        FSDPC_TRY(backward(m, step));
        read_grads(m, step);
    }
    return FSDPC_OK;
}

/* --- the right schedule ---------------------------------------------------------------------------- */

static void
start_rank(int rank, const ranks_run *run)
{
    static const char *const policies[] = {"eager", "lazy", "order:1,host,0", "order:0,host,1",
                                           "order:host,1,0"};
    char policy[32];
    gpu_start();
    simnccl_reset();
    simgpu_get_options()->foreign = true; /* gradients are malloc's here */
    snprintf(policy, sizeof policy, "random:%d", run->option * 100 + rank);
    REQUIRE(simgpu_policy(run->option < 5 ? policies[run->option] : policy));
}

static void
report(void)
{
    for (int i = 0; i < simgpu_reports() && i < 5; i++) {
        fprintf(stderr, "  %s\n", simgpu_report(i));
    }
}

static void
steps_are_right(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    CHECK_STR(fsdpc_tree_kind(m.tree), "stream");
    CHECK_INT(train(&m, STEPS), FSDPC_OK);
    CHECK_INT(m.wrong, 0);
    CHECK_INT(simgpu_count().races, 0);
    CHECK_INT(simgpu_count().faults, 0);
    CHECK_INT(simnccl_count().mismatches, 0);
    report();
    close_model(&m);
}

/* Two live units of one slot: the second gets spare memory, for as long as it is used. */
static void
two_users_of_a_slot(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    CHECK_INT(train(&m, 1), FSDPC_OK);
    for (int step = 1; step < 3; step++) {
        set_masters(&m, step);
        CHECK_INT(fsdpc_tree_begin_forward(m.tree), FSDPC_OK);
        CHECK_INT(fsdpc_tree_forward_enter(m.tree, 1), FSDPC_OK);
        CHECK_INT(fsdpc_tree_forward_enter(m.tree, 3), FSDPC_OK);
        use(&m, 1, step);
        use(&m, 3, step);
        CHECK_INT(fsdpc_tree_forward_leave(m.tree, 3, false), FSDPC_OK);
        use(&m, 1, step);
        CHECK_INT(fsdpc_tree_forward_leave(m.tree, 1, false), FSDPC_OK);
        CHECK_INT(fsdpc_tree_end_forward(m.tree), FSDPC_OK);
    }
    fsdpc_tree_memory memory;
    fsdpc_tree_get_memory(m.tree, &memory);
    CHECK_INT(memory.spare_count, 2);
    CHECK_INT(memory.spare_bytes, 0);
    CHECK_INT(m.wrong, 0);
    CHECK_INT(simgpu_count().races, 0);
    CHECK_INT(simgpu_count().faults, 0);
    report();
    close_model(&m);
}

/* --- what a step costs ------------------------------------------------------------------------------ */

/* Five units, one of them with two dtypes and bytes beside: it has three segments to gather. */
static void
a_step_costs_no_more_than_this(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    m.all_used = true;
    CHECK_INT(train(&m, 1), FSDPC_OK);
    const simgpu_counters before = simgpu_count();
    int64_t gathers = simnccl_count().all_gathers, reduces = simnccl_count().reduce_scatters;
    set_masters(&m, 1);
    CHECK_INT(forward(&m, 1), FSDPC_OK);
    CHECK_INT(backward(&m, 1), FSDPC_OK);
    const simgpu_counters after = simgpu_count();
    CHECK_INT(after.host_syncs - before.host_syncs, 0);
    CHECK_INT(after.allocations - before.allocations, 0);
    CHECK_INT(after.host_allocations - before.host_allocations, 0);
    CHECK_INT(after.maps - before.maps, 0);
    CHECK_INT(after.events_created - before.events_created, 0);
    CHECK_INT(after.streams_created - before.streams_created, 0);
    CHECK(simgpu_drain());
    int64_t launches = simgpu_count().launches - before.launches;
    gathers = simnccl_count().all_gathers - gathers;
    reduces = simnccl_count().reduce_scatters - reduces;
    if (rank == 0) {
        printf(
            "%d ranks, a step of %d units: %d launches, %d gathers of segments, %d reductions, no "
            "allocation, no wait of the host\n",
            run->world, UNITS, (int)launches, (int)gathers, (int)reduces);
    }
    /* Units: 5, of 7 segments. root and the last unit stay in their slots for backward. */
    CHECK(gathers <= 2 * 7 && launches <= 4 * 7 + 1);
    CHECK_INT(reduces, run->world > 1 ? UNITS : 0);
    close_model(&m);
}

/* --- a step in a graph ------------------------------------------------------------------------------ */

static int64_t
work_done(void)
{
    const simgpu_counters now = simgpu_count();
    return now.launches + now.copies + now.memsets + now.collectives;
}

static CUstream
begin_capture(model *m)
{
    CUstream stream = gpu_stream("captured");
    REQUIRE_CU(cuCtxSynchronize());
    fsdpc_device_use(m->device, (fsdpc_stream *)stream);
    REQUIRE_CU(cuStreamBeginCapture(stream, 0));
    return stream;
}

static CUresult
end_capture(const model *m, CUstream stream)
{
    CUgraph graph;
    fsdpc_device_use(m->device, NULL);
    return cuStreamEndCapture(stream, &graph);
}

static int
pass(model *m, int step)
{
    FSDPC_TRY(forward(m, step));
    return backward(m, step);
}

/* On a GPU the graph would run; here nothing is run, and what was captured is counted. */
static void
a_step_is_captured(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    m.all_used = true;
    CHECK_INT(train(&m, 1), FSDPC_OK);
    int64_t before = work_done();
    CHECK_INT(train(&m, 1), FSDPC_OK);
    CHECK(simgpu_drain());
    int64_t work = work_done() - before;
    CHECK_INT(m.wrong, 0);
    m.quiet = true; /* nothing is gathered while it is captured */
    for (int round = 0; round < 2; round++) {
        CUstream stream = begin_capture(&m);
        CHECK_INT(pass(&m, 0), FSDPC_OK);
        CHECK_CU(end_capture(&m, stream), CUDA_SUCCESS);
        CHECK_INT(simgpu_captured(), work);
    }
    m.all_used = m.quiet = false;
    m.wrong = 0;
    CHECK_INT(train(&m, 2), FSDPC_OK); /* and what follows is as if there had been none */
    CHECK_INT(m.wrong, 0);
    CHECK_INT(simgpu_reports(), 0);
    report();
    close_model(&m);
}

/* What needs the host is refused by name, and the capture can be left. */
static void
the_host_is_refused_in_a_capture(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    m.quiet = true; /* nothing is gathered while it is captured */
    CHECK_INT(train(&m, 1), FSDPC_OK);
    CHECK_INT(m.wrong, 0);
    set_masters(&m, 1);
    CUstream stream = begin_capture(&m);
    int status = pass(&m, 1); /* some parameters get no gradient */
    CHECK_INT(status, run->world > 1 ? FSDPC_E_STATE : FSDPC_OK);
    CHECK(status == FSDPC_OK || strstr(fsdpc_error_text(), "cannot be captured"));
    CHECK_CU(end_capture(&m, stream), CUDA_SUCCESS);
    stream = begin_capture(&m);
    CHECK_INT(fsdpc_tree_begin_forward(m.tree), FSDPC_OK);
    CHECK_INT(fsdpc_tree_forward_enter(m.tree, 1), FSDPC_OK);
    if (run->world > 1) { /* alone it shows its own values, without a slot */
        CHECK_INT(fsdpc_tree_forward_enter(m.tree, 3), FSDPC_E_STATE);
        CHECK(strstr(fsdpc_error_text(), "spare") != NULL);
    }
    CHECK_INT(fsdpc_tree_forward_leave(m.tree, 1, false), FSDPC_OK);
    CHECK_INT(fsdpc_tree_end_forward(m.tree), FSDPC_OK);
    CHECK_CU(end_capture(&m, stream), CUDA_SUCCESS);
    CHECK_INT(simgpu_reports(), 0);
    report();
    close_model(&m);
}

/* The last two waits lead the own streams back: without one of them the capture cannot end. */
static void
streams_must_lead_back(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    m.all_used = m.quiet = true;
    CHECK_INT(train(&m, 1), FSDPC_OK);
    CUstream stream = begin_capture(&m);
    int64_t before = simgpu_calls("cuStreamWaitEvent");
    CHECK_INT(pass(&m, 1), FSDPC_OK);
    int waits = (int)(simgpu_calls("cuStreamWaitEvent") - before);
    CHECK_CU(end_capture(&m, stream), CUDA_SUCCESS);
    stream = begin_capture(&m);
    REQUIRE(simgpu_skip_wait(waits));
    CHECK_INT(pass(&m, 1), FSDPC_OK);
    CHECK_CU(end_capture(&m, stream),
             run->world > 1 ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED : CUDA_SUCCESS);
    close_model(&m);
}

/* --- planted faults --------------------------------------------------------------------------------- */

enum { FOUND, WRONG, CALLS };

/* Rank 0 of two leaves out the k-th wait of its second step; k is run->option, 0 for none. */
static void
with_a_fault(int rank, ranks_run *run)
{
    model m;
    static const char entry[] = "cuStreamWaitEvent";
    int k = run->option;
    start_rank(rank, run);
    REQUIRE(simgpu_policy("lazy")); /* what nothing demands is late */
    open_model(&m, rank, run);
    m.quiet = m.all_used = true; /* a rank that looks at the used bits waits, which orders much */
    CHECK_INT(train(&m, 1), FSDPC_OK);
    CHECK_INT(m.wrong, 0);
    set_masters(&m, 1);
    int64_t before = simgpu_calls(entry);
    REQUIRE(k == 0 || rank > 0 || simgpu_skip(entry, k));
    int status = forward(&m, 1);
    status = status == FSDPC_OK ? backward(&m, 1) : status;
    int64_t calls = simgpu_calls(entry) - before;
    read_grads(&m, 1);
    (void)simgpu_drain();
    if (rank == 0) {
        run->flags[CALLS] = (uint32_t)calls;
        run->flags[FOUND] = status != FSDPC_OK || simgpu_count().races || simgpu_count().faults;
        run->flags[WRONG] = m.wrong > 0;
    }
    close_model(&m);
}

static void
break_one(int k, uint32_t *seen)
{
    ranks_run *run = ranks_new(2);
    run->option = k;
    new_ids();
    ranks_start(run, with_a_fault);
    for (int i = 0; i < 3; i++) {
        seen[i] = run->flags[i];
    }
    ranks_free(run);
}

/* Every wait of a step, left out one at a time. */
static void
missing_waits_are_found(void)
{
    uint32_t seen[3];
    break_one(0, seen);
    CHECK(!seen[FOUND] && !seen[WRONG]);
    int calls = (int)seen[CALLS], found = 0, values = 0;
    for (int k = 1; k <= calls; k++) {
        break_one(k, seen);
        found += seen[FOUND] != 0;
        values += seen[WRONG] != 0;
        if (!seen[FOUND]) {
            TEST_FAIL("nothing is found when wait %d of %d is left out", k, calls);
        }
    }
    CHECK(calls > 12);
    printf("%d waits in a step of 2 ranks, each left out once: %d found by clocks, %d of them by "
           "values too\n",
           calls, found, values);
}

int
main(void)
{
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < 9; option++) {
            ranks_run *run = ranks_new(world);
            run->option = option;
            new_ids();
            ranks_start(run, option == 8 ? a_step_costs_no_more_than_this : steps_are_right);
            ranks_free(run);
        }
    }
    for (int option = 0; option < 8; option++) {
        ranks_run *run = ranks_new(2);
        run->option = option;
        new_ids();
        ranks_start(run, two_users_of_a_slot);
        ranks_free(run);
    }
    static void (*const captures[])(int, ranks_run *) = {
        a_step_is_captured, the_host_is_refused_in_a_capture, streams_must_lead_back};
    for (int i = 0; i < 6; i++) {
        ranks_run *run = ranks_new(1 + i / 3);
        run->option = 0;
        new_ids();
        ranks_start(run, captures[i % 3]);
        ranks_free(run);
    }
    missing_waits_are_found();
    return test_result();
}
