/* Tests of the norm of all gradients and of clipping by this norm, through the real tree, device and
 * communicator. The expected norms are sums in double precision over the gradients of all ranks, which follow
 * from a formula. */
#include <math.h>

#include "waits.h"

enum { UNITS = 6, LAST = 5 };

/* The group of the last unit consists of one rank only. The unit before the last one is frozen. */
static const int kinds[UNITS] = {0, 1, 2, 5, 4, 0};
static const int depths[UNITS] = {0, 1, 1, 1, 1, 1};

typedef struct model {
    int rank, world;
    fsdpc_device *device;
    fsdpc_comm *comm, *alone;
    fsdpc_unit *units[UNITS];
    fsdpc_tree *tree;
    uint8_t masks[UNITS][ENGINE_PARAMS];
    const uint8_t *mask[UNITS];
    double *out, *host;
    char *extra;
} model;

/* --- a model ----------------------------------------------------------------------------------------- */

static void *
device_memory(const model *m, size_t bytes)
{
    void *block;
    REQUIRE_OK(fsdpc_device_alloc(m->device, bytes, &block));
    return block;
}

static void
open_model(model *m, int rank, const ranks_run *run)
{
    static const fsdpc_tree_options options = {0};
    void *block;
    *m = (model){.rank = rank, .world = run->world};
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    /* The communicator's watching thread must not poll during the test. If this thread saw that work is done,
     * the simulator would record that the processor saw this, too. */
    m->comm = open_twins(m->device, rank, run->world, 0,
                         (fsdpc_comm_nccl_options){.timeout_s = 60, .poll_ms = 30000});
    REQUIRE_OK(fsdpc_comm_self(m->device, &m->alone));
    for (int u = 0; u < UNITS; u++) {
        m->units[u] = engine_unit(u == LAST ? m->alone : m->comm, kinds[u], "unit", true);
        memset(m->masks[u], 1, ENGINE_PARAMS);
        m->mask[u] = m->masks[u];
    }
    REQUIRE_OK(fsdpc_tree_new(m->units, depths, UNITS, &options, &m->tree));
    m->out = device_memory(m, 16);
    m->extra = device_memory(m, 4 * FSDPC_NORM_PART_BYTES);
    REQUIRE_OK(fsdpc_device_host_alloc(m->device, 16, &block));
    m->host = block;
}

static void
close_model(model *m)
{
    fsdpc_tree_free(m->tree);
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit_free(m->units[u]);
    }
    fsdpc_device_free(m->device, m->out, 16);
    fsdpc_device_free(m->device, m->extra, 4 * FSDPC_NORM_PART_BYTES);
    fsdpc_device_host_free(m->device, m->host, 16);
    fsdpc_comm_free(m->comm);
    fsdpc_comm_free(m->alone);
}

/* --- gradients that every rank knows --------------------------------------------------------------------- */

/* Returns element k of a parameter's gradient: a fraction that every dtype represents exactly. Every rank
 * holds the whole last unit. */
static double
value(int u, int param, int64_t k, int seed)
{
    return (double)((k * 37 + u * 101 + param * 13 + seed * 7) % 127 - 63) / 64;
}

static void
set_grads(model *m, int seed)
{
    for (int u = 0; u < UNITS; u++) {
        fsdpc_unit *unit = m->units[u];
        simgpu_host_write(unit->grad, unit->layout->grad_bytes, "backward");
        for (int i = 0; i < unit->layout->param_count; i++) {
            const fsdpc_param_place *place = &unit->layout->params[i];
            const fsdpc_segment *seg = &unit->layout->segments[place->segment];
            fsdpc_span span = fsdpc_layout_span(unit->layout, i, unit->rank);
            for (int64_t k = 0; seg->trainable && k < span.length; k++) {
                item_put((char *)unit->grad + seg->grad_offset, seg->accumulate,
                         span.piece_begin + k, value(u, i, span.param_begin + k, seed));
            }
        }
        REQUIRE_OK(fsdpc_unit_finish_grad(unit));
    }
}

static void
add_value(double *total, double p, double each)
{
    if (isinf(p)) {
        *total = fabs(each) > *total ? fabs(each) : *total;
    } else {
        *total += pow(fabs(each), p);
    }
}

/* Returns the norm over whole parameters, which is the norm over the shards of all ranks. */
static double
expected_norm(const model *m, double p, int seed)
{
    double total = 0;
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_layout *layout = m->units[u]->layout;
        for (int i = 0; m->mask[u] && i < layout->param_count; i++) {
            for (int64_t k = 0; k < layout->params[i].numel; k++) {
                if (m->mask[u][i] && layout->params[i].trainable_index >= 0) {
                    add_value(&total, p, value(u, i, k, seed));
                }
            }
        }
    }
    return isinf(p) ? total : pow(total, 1 / p);
}

/* Returns the number of elements that are wrong. The right elements are the formula's values, scaled by
 * `factor` with the plain kernels. */
static int64_t
count_wrong(const model *m, double factor, int seed)
{
    int64_t wrong = 0;
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_unit *unit = m->units[u];
        for (int i = 0; i < unit->layout->param_count; i++) {
            int64_t length;
            const void *own = fsdpc_unit_grad_part(unit, i, &length);
            fsdpc_dtype dtype = fsdpc_unit_grad_dtype(unit, i);
            fsdpc_span span = fsdpc_layout_span(unit->layout, i, unit->rank);
            bool scaled = m->mask[u] && m->mask[u][i];
            for (int64_t k = 0; k < length && unit->layout->params[i].trainable_index >= 0; k++) {
                double each[1];
                item_put(each, dtype, 0, value(u, i, span.param_begin + k, seed));
                if (scaled) {
                    REQUIRE_OK(fsdpc_device_scale(engine_device, each, dtype, 1, factor));
                }
                wrong += item_get(own, dtype, k) != item_get(each, dtype, 0);
            }
        }
    }
    return wrong;
}

static int
clip(model *m, double p, double max_norm, bool scale, int64_t extra)
{
    const fsdpc_tree_clip_plan plan = {.masks = m->mask,
                                       .p = p,
                                       .max_norm = max_norm,
                                       .scale = scale,
                                       .extra = m->extra,
                                       .extra_count = extra,
                                       .out = m->out};
    return fsdpc_tree_clip(m->tree, &plan);
}

static void
fetch(model *m)
{
    REQUIRE_OK(fsdpc_device_copy_out(m->device, m->host, m->out, 16));
    gpu_finish(m->device);
    simgpu_cpu_read(m->host, 16, "norm.item()");
}

/* --- right values ------------------------------------------------------------------------------------------ */

static void
check_one(model *m, double p, double max_norm, int seed)
{
    set_grads(m, seed);
    CHECK_INT(clip(m, p, max_norm, true, 0), FSDPC_OK);
    fetch(m);
    const double norm = expected_norm(m, p, seed), factor = max_norm / (m->host[0] + 1e-6);
    CHECK(fabs(m->host[0] - norm) <= 1e-12 * norm);
    CHECK(m->host[1] == (factor >= 1 ? 1 : factor));
    CHECK_INT(count_wrong(m, m->host[1], seed), 0);
}

static void
set_masks(model *m, int how)
{
    for (int u = 0; u < UNITS; u++) {
        for (int i = 0; i < ENGINE_PARAMS; i++) {
            m->masks[u][i] = how == 0 || (how == 1 ? i > 0 : i == 0);
        }
        m->mask[u] = how == 2 && u % 2 == 1 ? NULL : m->masks[u];
    }
}

static void
norms_are_those_of_all_ranks(int rank, ranks_run *run)
{
    static const double orders[] = {2, INFINITY, 1, 1.5, 3};
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    for (int how = 0; how < 3; how++) {
        set_masks(&m, how);
        for (int o = 0; o < 5; o++) {
            check_one(&m, orders[o], 0.5, o);
            check_one(&m, orders[o], 1e6, o); /* nothing is clipped */
        }
    }
    expect_no_reports();
    close_model(&m);
}

/* Only the last rank has a NaN or an infinity in a gradient. Norms of every order show it on all ranks. */
static void
what_is_not_finite_reaches_all(int rank, ranks_run *run)
{
    static const double orders[] = {2, INFINITY, 1.5}, bad[] = {NAN, INFINITY};
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    for (int o = 0; o < 3; o++) {
        for (int b = 0; b < 2; b++) {
            fsdpc_unit *unit = m.units[0];
            set_grads(&m, o);
            if (rank == m.world - 1) {
                int64_t length;
                float *own = fsdpc_unit_grad_part(unit, 1, &length);
                REQUIRE(length > 0);
                own[length / 2] = (float)bad[b];
            }
            CHECK_INT(clip(&m, orders[o], 1, true, 0), FSDPC_OK);
            fetch(&m);
            CHECK(isnan(bad[b]) ? isnan(m.host[0]) : isinf(m.host[0]));
            CHECK(isnan(bad[b]) ? isnan(m.host[1]) : m.host[1] == 0);
            int64_t length;
            const float *own = fsdpc_unit_grad_part(unit, 0, &length);
            for (int64_t k = 0; k < length; k++) {
                CHECK(isnan(bad[b]) ? isnan(own[k]) : own[k] == 0);
            }
        }
    }
    expect_no_reports();
    close_model(&m);
}

/* Gradients that belong to no unit enter the norm as extra parts. If `scale` is
 * false, clip() changes no gradient. */
static void
other_gradients_count(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    double *extra = (double *)m.extra;
    for (int o = 0; o < 2; o++) {
        const double p = o ? INFINITY : 2;
        set_grads(&m, 3);
        simgpu_host_write(m.extra, 2 * FSDPC_NORM_PART_BYTES, "other gradients");
        memset(m.extra, 0, 2 * FSDPC_NORM_PART_BYTES);
        extra[0] = 49, extra[1] = 7, extra[3] = 121, extra[4] = 11;
        CHECK_INT(clip(&m, p, 0.25, false, 2), FSDPC_OK);
        fetch(&m);
        const double own = expected_norm(&m, p, 3), norm = o ? 11 : sqrt(own * own + 49 + 121);
        CHECK(fabs(m.host[0] - norm) <= 1e-12 * norm);
        CHECK(m.host[1] == 0.25 / (m.host[0] + 1e-6));
        CHECK_INT(count_wrong(&m, 1, 3), 0);
    }
    expect_no_reports();
    close_model(&m);
}

static void
all_ranks_have_the_same_bits(int rank, ranks_run *run)
{
    model m;
    uint64_t bits;
    start_rank(rank, run);
    open_model(&m, rank, run);
    set_masks(&m, 1);
    m.mask[LAST] = NULL;
    set_grads(&m, 5);
    CHECK_INT(clip(&m, 2, 0.5, true, 0), FSDPC_OK);
    fetch(&m);
    memcpy(&bits, m.host, sizeof bits);
    run->flags[rank] = (uint32_t)(bits ^ bits >> 32);
    close_model(&m);
}

/* --- what it costs ------------------------------------------------------------------------------------------- */

static bool
has_grads(const fsdpc_unit *unit)
{
    bool any = false;
    for (int i = 0; i < unit->layout->param_count; i++) {
        int64_t length;
        (void)fsdpc_unit_grad_part(unit, i, &length);
        any = any || (unit->layout->params[i].trainable_index >= 0 && length > 0);
    }
    return any;
}

/* On a rank that holds whole parameters, gradients without padding between them form one memory range. */
static void
a_unit_is_one_launch(int rank, ranks_run *run)
{
    static const fsdpc_param_spec specs[] = {ENGINE_SPEC("a", 1024, F32, F32, F32, true),
                                             ENGINE_SPEC("b", 512, F32, F32, F32, true),
                                             ENGINE_SPEC("c", 64, F32, F32, F32, true)};
    static const uint8_t all[] = {1, 1, 1}, some[] = {1, 0, 1};
    fsdpc_device *device;
    fsdpc_comm *comm;
    fsdpc_unit *unit;
    void *parts;
    int64_t count;
    start_rank(rank, run);
    REQUIRE_OK(fsdpc_device_cuda(0, &device));
    REQUIRE_OK(fsdpc_comm_self(device, &comm));
    const fsdpc_unit_options made = {.name = "layer", .shard = comm, .divide = 1};
    REQUIRE_OK(fsdpc_unit_new(&made, specs, 3, &unit));
    const size_t bytes = (size_t)fsdpc_unit_norm_room(unit) * FSDPC_NORM_PART_BYTES;
    REQUIRE_OK(fsdpc_device_alloc(device, bytes, &parts));
    int64_t before = simgpu_count().launches;
    REQUIRE_OK(fsdpc_unit_norm_parts(unit, all, 2, parts, &count));
    CHECK_INT(simgpu_count().launches - before, 1);
    CHECK_INT(count, 1);
    REQUIRE_OK(fsdpc_unit_norm_parts(unit, some, 2, parts, &count));
    CHECK_INT(simgpu_count().launches - before, 2);
    CHECK_INT(count, 2);
    fsdpc_device_free(device, parts, bytes);
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

static void
the_second_call_allocates_nothing(int rank, ranks_run *run)
{
    model m;
    int64_t measured = 0;
    start_rank(rank, run);
    open_model(&m, rank, run);
    for (int u = 0; u < UNITS; u++) {
        measured += has_grads(m.units[u]);
    }
    for (int call = 0; call < 2; call++) {
        set_grads(&m, call);
        CHECK(simgpu_drain());
        const simgpu_counters before = simgpu_count();
        const int64_t queries = simgpu_calls("cuEventQuery");
        const int64_t gathers = simnccl_count().all_gathers;
        CHECK_INT(clip(&m, 2, 0.5, true, 0), FSDPC_OK);
        CHECK(simgpu_drain());
        const simgpu_counters after = simgpu_count();
        CHECK_INT(after.host_syncs - before.host_syncs, 0);
        CHECK_INT(after.events_created - before.events_created, 0);
        CHECK_INT(after.host_allocations - before.host_allocations, 0);
        if (call == 1) { /* only the first call allocates and zeroes memory */
            CHECK_INT(after.allocations - before.allocations, 0);
            CHECK_INT(simgpu_calls("cuEventQuery"), queries);
        }
        /* A group of several ranks takes two sums: one of this rank's parts and one over the ranks. */
        CHECK_INT(after.launches - before.launches, 2 * measured + (m.world > 1 ? 3 : 2) + 1);
        CHECK_INT(simnccl_count().all_gathers - gathers, m.world > 1);
    }
    expect_no_reports();
    close_model(&m);
}

/* --- refusals ------------------------------------------------------------------------------------------------ */

static void
host_memory_is_refused(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    fsdpc_tree *tree;
    static const fsdpc_tree_options options = {0};
    const uint8_t *mask = (const uint8_t[]){1, 1};
    double out[2];
    const fsdpc_tree_clip_plan plan = {.masks = &mask, .p = 2, .max_norm = 1, .out = out};
    start_rank(rank, run);
    for (int offload = 0; offload < 2; offload++) {
        fsdpc_device *device = engine_device;
        fsdpc_unit *unit;
        if (offload) {
            REQUIRE_OK(fsdpc_device_cuda(0, &device));
        }
        REQUIRE_OK(fsdpc_comm_self(device, &comm));
        const fsdpc_unit_options made = {
            .name = "layer", .shard = comm, .divide = 1, .offload = offload};
        REQUIRE_OK(fsdpc_unit_new(&made, engine_specs[0], 2, &unit));
        REQUIRE_OK(fsdpc_tree_new(&unit, depths, 1, &options, &tree));
        CHECK_ERROR(fsdpc_tree_clip(tree, &plan), FSDPC_E_UNAVAILABLE, "unit layer");
        fsdpc_tree_free(tree);
        fsdpc_unit_free(unit);
        fsdpc_comm_free(comm);
    }
}

/* --- planted faults ------------------------------------------------------------------------------------------ */

static void
with_a_fault(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    REQUIRE(simgpu_policy("lazy"));
    open_model(&m, rank, run);
    set_grads(&m, 0);
    CHECK_INT(clip(&m, 2, 0.5, true, 0), FSDPC_OK);
    set_grads(&m, 1);
    leave_out(rank);
    int status = clip(&m, 2, 0.5, true, 0);
    judge(rank, run, status, false);
    close_model(&m);
}

static void
missing_waits_are_found(void)
{
    wait_counts w = leave_each_wait_out(2, 0, with_a_fault, "clipping");
    CHECK_INT(w.calls, 2);
    printf("clipping: %d waits, each left out once: %d found\n", w.calls, w.found);
}

int
main(void)
{
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < 7; option = next_option(world, option)) {
            with_ranks(world, option, norms_are_those_of_all_ranks);
        }
        with_ranks(world, 5, what_is_not_finite_reaches_all);
        with_ranks(world, 6, other_gradients_count);
        with_ranks(world, 1, the_second_call_allocates_nothing);
    }
    ranks_run same = with_ranks(3, 7, all_ranks_have_the_same_bits);
    CHECK(same.flags[0] == same.flags[1] && same.flags[1] == same.flags[2] && same.flags[0] != 0);
    missing_waits_are_found();
    with_ranks(1, 0, host_memory_is_refused);
    with_ranks(1, 0, a_unit_is_one_launch);
    return test_result();
}
