/* Training steps of a tree through the real exchange, arena, device and communicators on the simulated GPU.
 *
 * A model is UNITS units of several kinds (engine.h) on `shards` x replicas ranks. Gradients follow from the
 * rank, the unit, the step and the replica, so that the right result can be computed.
 */
#ifndef SIMGPU_STEPS_H
#define SIMGPU_STEPS_H

#include <math.h>

#include "waits.h"

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
    bool quiet;    /* true: wrong elements are counted in `wrong` and do not fail the test */
    bool all_used; /* true: every parameter gets a gradient */
    bool strided;  /* true: a gradient's elements are two elements apart in memory */
    bool trust_order, no_prefetch, poison, offload;
    int unwanted;      /* index of a unit whose values no backward uses; 0: no such unit */
    int micro_batches; /* number of passes without communication before each pass that communicates */
    bool twice;        /* true: unit 1 gets a second gradient in each backward */
    int replicas, replica;
    fsdpc_comm *replicate;
    const int *kinds;
    ranks_run *run;
    int rank_of_run; /* this rank's number in the run; `rank` is its number in the shard group */
} model;

/* --- a model on one rank ------------------------------------------------------------------------- */

/* Opens a communicator and its twin with ids[first_id] and ids[first_id + 1] (waits.h). With `alone`, opens a
 * communicator of one rank instead. The shard groups take the first ids, and the groups of replicas take the
 * ids after them. */
__attribute__((unused)) static fsdpc_comm *
open_comm(const model *m, int rank, int world, int first_id, bool alone)
{
    fsdpc_comm *comm;
    if (alone) {
        REQUIRE_OK(fsdpc_comm_self(m->device, &comm));
        return comm;
    }
    return open_twins(m->device, rank, world, first_id,
                      (fsdpc_comm_nccl_options){.timeout_s = 30, .poll_ms = 20, .registers = true});
}

static fsdpc_unit *
open_unit(const model *m, int u)
{
    fsdpc_unit *unit;
    int kind = m->kinds[u];
    const fsdpc_unit_options options = {.name = names[u],
                                        .shard = m->comm,
                                        .replicate = m->replicate,
                                        .divide = m->world * m->replicas,
                                        .reshard = u != ROOT,
                                        .offload = m->offload};
    REQUIRE_OK(fsdpc_unit_new(&options, engine_specs[kind], engine_spec_counts[kind], &unit));
    return unit;
}

/* If `on` is true, units that are opened later have segments that are quantized in gathers and reductions.
 * If `on` is false, they have none. */
__attribute__((unused)) static void
set_codecs(bool on)
{
    static const struct {
        int kind, row;
        fsdpc_codec codec, reduce_codec;
    } coded[] = {{0, 250, FSDPC_INT8, FSDPC_INT4}, {1, 601, FSDPC_INT4_STOCHASTIC, FSDPC_INT8}};
    for (int i = 0; i < 2; i++) {
        fsdpc_param_spec *spec = &engine_specs[coded[i].kind][0];
        static int64_t rows[2];
        rows[i] = on ? spec->row_numel : rows[i];
        spec->row_numel = on ? coded[i].row : rows[i];
        spec->codec = on ? coded[i].codec : FSDPC_UNCODED;
        spec->reduce_codec = on ? coded[i].reduce_codec : FSDPC_UNCODED;
        spec->feedback = on && i == 1;
    }
}

__attribute__((unused)) static void
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

/* Opens the units and makes the tree. Does not change the other fields of the model. */
__attribute__((unused)) static void
open_tree(model *m)
{
    const fsdpc_tree_options options = {.backward_prefetch = FSDPC_PREFETCH_PRE,
                                        .forward_prefetch = !m->no_prefetch,
                                        .trust_order = m->trust_order,
                                        .poison = m->poison};
    simgpu_get_options()->foreign = true; /* gradients are allocated with malloc here */
    for (int u = 0; u < UNITS; u++) {
        m->units[u] = open_unit(m, u);
    }
    REQUIRE_OK(fsdpc_tree_new(m->units, depths, UNITS, &options, &m->tree));
    for (int u = 0; u < UNITS; u++) {
        label(m, u);
    }
}

__attribute__((unused)) static void
open_model(model *m, int rank, const ranks_run *run)
{
    *m = (model){.rank = rank, .world = run->world, .replicas = 1, .kinds = kinds};
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    m->comm = open_comm(m, rank, run->world, 0, false);
    open_tree(m);
}

/* Opens the communicators of run->world ranks as `replicas` groups of shards. */
__attribute__((unused)) static void
open_replicas(model *m, int rank, const ranks_run *run, int replicas)
{
    int shards = run->world / replicas;
    *m = (model){.rank = rank % shards, .world = shards, .kinds = kinds};
    m->replicas = replicas;
    m->replica = rank / shards;
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    m->comm = open_comm(m, m->rank, shards, 2 * m->replica, shards == 1);
    if (replicas > 1) {
        m->replicate =
            open_comm(m, m->replica, replicas, 2 * ((shards > 1 ? replicas : 0) + m->rank), false);
    }
}

__attribute__((unused)) static void
close_model(model *m)
{
    fsdpc_tree_free(m->tree);
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_free(m->units[u]);
        free(m->grads[u].memory);
    }
    fsdpc_comm_free(m->comm);
    fsdpc_comm_free(m->replicate);
}

__attribute__((unused)) static void
note_wrong(model *m, int64_t wrong, const char *what, int u, int step)
{
    m->wrong += wrong;
    if (wrong && !m->quiet) {
        TEST_FAIL("rank %d of %d, step %d: %lld wrong elements in %s of unit %s", m->rank, m->world,
                  step, (long long)wrong, what, names[u]);
    }
}

/* Stands for the optimizer's step: writes the masters, which counts as work on the compute stream. */
__attribute__((unused)) static void
set_masters(model *m, int step)
{
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit *unit = m->units[u];
        simgpu_host_write(unit->master, unit->layout->shard_bytes, "optimizer");
        engine_set_masters(unit, u, step);
        unit->grads.add = false;
        memset(unit->grads.used, 0, (size_t)unit->layout->param_count);
    }
}

__attribute__((unused)) static void
use(model *m, int u, int step)
{
    fsdpc_unit *unit = m->units[u];
    simgpu_host_read(fsdpc_unit_full(unit), unit->layout->full_bytes, "matmul");
    note_wrong(m, engine_count_wrong(unit, u, step), "values", u, step);
}

/* Moves the gradients to memory in which the elements of a gradient are two elements apart. */
__attribute__((unused)) static void
spread_grads(const fsdpc_unit *unit, engine_grads *grads)
{
    static const int64_t two = 2;
    size_t total = 0;
    for (int i = 0; i < unit->layout->param_count; i++) {
        total += (size_t)unit->layout->params[i].numel;
    }
    float *wide = calloc(2 * total + 1, sizeof *wide), *next = wide;
    REQUIRE(wide != NULL);
    for (int i = 0; i < unit->layout->param_count; i++) {
        fsdpc_tensor *grad = &grads->tensors[i];
        int64_t numel = unit->layout->params[i].numel;
        if (grad->data) {
            for (int64_t k = 0; k < numel; k++) {
                next[2 * k] = ((const float *)grad->data)[k];
            }
            *grad = (fsdpc_tensor){next, FSDPC_F32, 1, &grads->shape[i], &two, false};
            next += 2 * numel;
        }
    }
    free(grads->memory);
    grads->memory = wide;
}

/* Frees the unit's old gradients and makes new ones, often in the same memory. torch, too, frees gradients as
 * soon as the pack is queued, and writes other tensors to their memory. */
__attribute__((unused)) static void
make_grads(model *m, int u, int step)
{
    free(m->grads[u].memory);
    engine_make_grads(m->units[u], u, step, 0, &m->grads[u]);
    if (m->all_used) {
        engine_fill_grads(m->units[u], &m->grads[u]);
    }
    if (m->strided) {
        spread_grads(m->units[u], &m->grads[u]);
    }
    for (int i = 0; i < m->units[u]->layout->param_count; i++) {
        const fsdpc_tensor *grad = &m->grads[u].tensors[i];
        if (grad->data) {
            simgpu_host_write((void *)(uintptr_t)grad->data,
                              (size_t)m->grads[u].shape[i] * (m->strided ? 8 : 4), "backward");
        }
    }
}

__attribute__((unused)) static int
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

__attribute__((unused)) static int
forward(model *m, int step)
{
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree, true));
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

__attribute__((unused)) static int
backward_without_end(model *m, int step)
{
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, ROOT));
    for (int u = UNITS - 1; u > 0; u--) {
        if (u != m->unwanted) {
            FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, u));
            use(m, u, step);
        }
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, true));
        FSDPC_TRY(send_due(m, step, false));
    }
    FSDPC_TRY(fsdpc_tree_backward_done(m->tree, ROOT, true));
    return send_due(m, step, true);
}

__attribute__((unused)) static int
backward(model *m, int step)
{
    FSDPC_TRY(backward_without_end(m, step));
    return fsdpc_tree_end_backward(m->tree, true);
}

/* Counts the elements of gradients whose error is too large, and the parameters that are wrongly marked as
 * used or unused. Small errors come from the order of the sum (NCCL's ring of 3) and from quantization. */
__attribute__((unused)) static int64_t
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
                double off = item_get(sums, seg->accumulate, at) - wanted;
                double unit_in_last = seg->reduce_codec == FSDPC_INT4   ? 0.15
                                      : seg->reduce_codec == FSDPC_INT8 ? 0.01
                                      : seg->reduce == FSDPC_BF16       ? 0.008
                                                                        : 1e-6;
                far += !(fabs(off) <= unit_in_last * (fabs(wanted) + 5));
            }
        }
        far += unit->grads.used[i] != (seg->trainable && engine_used(unit, rounds, u, i, step));
    }
    return far;
}

__attribute__((unused)) static void
read_grads(model *m, int step)
{
    static const int rounds[RANKS_MAX] = {1, 1, 1, 1, 1, 1, 1, 1};
    /* If all_used is set, engine_fill_grads makes the gradients. The test does not compare their values: only
     * the vector clocks check them. */
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit *unit = m->units[u];
        simgpu_host_read(unit->grad, unit->layout->grad_bytes, "optimizer");
        const bool exact = m->world < 3 && fsdpc_footprint_codes(unit->layout, NULL) == 0;
        int64_t wrong = exact ? engine_count_wrong_grads(unit, rounds, u, step, m->world > 1)
                              : count_far_grads(unit, rounds, u, step);
        note_wrong(m, m->all_used ? 0 : wrong, "gradient", u, step);
    }
}

__attribute__((unused)) static int
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

__attribute__((unused)) static int
pass(model *m, int step)
{
    FSDPC_TRY(forward(m, step));
    return backward(m, step);
}

/* --- captures ------------------------------------------------------------------------------------- */

__attribute__((unused)) static CUstream
begin_capture(model *m)
{
    CUstream stream = gpu_stream("captured");
    REQUIRE_CU(cuCtxSynchronize());
    fsdpc_device_use(m->device, (fsdpc_stream *)stream);
    REQUIRE_CU(cuStreamBeginCapture(stream, 0));
    return stream;
}

__attribute__((unused)) static CUresult
end_capture(const model *m, CUstream stream)
{
    CUgraph graph;
    fsdpc_device_use(m->device, NULL);
    return cuStreamEndCapture(stream, &graph);
}

/* --- ranks with a model --------------------------------------------------------------------------- */

typedef void (*model_opener)(model *m, int rank, const ranks_run *run);
typedef void (*model_case)(model *m);

static struct {
    model_opener open;
    model_case with;
} this_case;

__attribute__((unused)) static void
run_model(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    this_case.open(&m, rank, run);
    m.run = run;
    m.rank_of_run = rank;
    this_case.with(&m);
    close_model(&m);
}

__attribute__((unused)) static void
with_models_as(const char *what, int world, int option, model_opener open, model_case with)
{
    this_case.open = open;
    this_case.with = with;
    with_ranks_as(what, world, option, run_model);
}

#define with_models(world, option, open, with) with_models_as(#with, world, option, open, with)

/* Leaves out the waits of the second step one at a time. The simulator's policy is LAZY: queued work runs
 * only when a call needs the result of this work. */
__attribute__((unused)) static wait_counts
leave_waits_out(int world, model_opener open, model_case with, const char *what)
{
    this_case.open = open;
    this_case.with = with;
    return leave_each_wait_out(world, LAZY, run_model, what);
}

__attribute__((unused)) static void
expect_no_mismatches(const model *m)
{
    CHECK_INT(m->wrong, 0);
    CHECK_INT(simnccl_count().mismatches, 0);
    expect_no_reports();
}

#endif
