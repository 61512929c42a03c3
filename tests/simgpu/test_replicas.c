/* Tests of replicas, of one rank alone, and of gradients that are not communicated at once, through the real
 * exchange on the simulated GPU. There are 1 to 3 replicas, and each replica has 1 or 2 shards. The cases
 * cover micro-batches without communication, units with two gradients in one backward, and strided and
 * missing gradients. No race may be found, the sums must be right, and nothing may be allocated after the
 * first step. Each wait that is left out must be found. */
#include "steps.h"

enum { PLAIN, LOCAL, TWICE, STRIDED, SCENARIOS };

static const int several[UNITS] = {2, 1, 0, 5, 2};

static int
grad_step(const model *m, int step, int batch)
{
    return step * 10 + batch + 1000 * m->replica;
}

/* --- what must come out -------------------------------------------------------------------------- */

typedef struct total {
    double sum;
    bool used;
} total;

static total
want(const model *m, int u, int i, int64_t k, int step)
{
    total t = {0};
    for (int replica = 0; replica < m->replicas; replica++) {
        for (int batch = 0; batch < 1 + m->micro_batches + (m->twice && u == 1); batch++) {
            int s = step * 10 + batch + 1000 * replica;
            for (int r = 0; r < m->world; r++) {
                if (engine_present(r, u, i, s, 0)) {
                    t.sum += engine_grad(r, u, i, k, s, 0);
                    t.used = true;
                }
            }
        }
    }
    t.sum /= m->world * m->replicas;
    return t;
}

static int64_t
wrong_in(const model *m, int u, int i, int step)
{
    int64_t wrong = 0;
    const fsdpc_unit *unit = m->units[u];
    const fsdpc_param_place *place = &unit->layout->params[i];
    const fsdpc_segment *seg = &unit->layout->segments[place->segment];
    const char *sums = (char *)unit->grad + seg->grad_offset;
    double last = seg->reduce == FSDPC_BF16 && m->world > 1 ? 0.02 : 4e-6;
    last = m->world == 1 || seg->reduce_codec == FSDPC_UNCODED ? last
           : seg->reduce_codec == FSDPC_INT4                   ? 0.4
                                                               : 0.03;
    for (int64_t k = 0; k < place->numel; k += 1 + place->numel / 2000) {
        int64_t at = place->offset + k - seg->piece_numel * unit->rank;
        if (at >= 0 && at < seg->piece_numel) {
            total t = want(m, u, i, k, step);
            double off = item_get(sums, seg->accumulate, at) - t.sum;
            wrong += !(fabs(off) <= last * (fabs(t.sum) + 5));
        }
    }
    return wrong + (unit->grads.used[i] != want(m, u, i, 0, step).used);
}

static void
check_grads(model *m, int step)
{
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_unit *unit = m->units[u];
        int64_t wrong = 0;
        simgpu_host_read(unit->grad, unit->layout->grad_bytes, "optimizer");
        for (int i = 0; i < unit->layout->param_count && !m->all_used; i++) {
            if (unit->layout->params[i].trainable_index >= 0) {
                wrong += wrong_in(m, u, i, step);
            }
        }
        note_wrong(m, wrong, "gradient", u, step);
    }
}

/* --- steps --------------------------------------------------------------------------------------- */

static int
go_back(model *m, int step, int batch, bool sync)
{
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    for (int u = UNITS - 1; u >= 0; u--) {
        FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, u));
        use(m, u, step);
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, sync));
        if (sync) {
            FSDPC_TRY(send_due(m, grad_step(m, step, batch), u == ROOT));
        } else {
            make_grads(m, u, grad_step(m, step, batch));
            FSDPC_TRY(fsdpc_tree_keep_local(m->tree, u, m->grads[u].tensors));
        }
    }
    if (sync && m->twice) {
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, 1, true));
        FSDPC_TRY(send_due(m, grad_step(m, step, batch + 1), false));
    }
    return fsdpc_tree_end_backward(m->tree, sync);
}

static int
one_step(model *m, int step)
{
    set_masters(m, step);
    for (int batch = 0; batch <= m->micro_batches; batch++) {
        const simgpu_counters before = simgpu_count();
        FSDPC_TRY(forward(m, step));
        FSDPC_TRY(go_back(m, step, batch, batch == m->micro_batches));
        if (step > 0 && m->all_used) {
            expect_nothing_made(&before);
        }
    }
    check_grads(m, step);
    return FSDPC_OK;
}

/* The properties of the models that are opened next. */
static struct setup {
    int replicas, scenario;
    const int *kinds;
    bool all_used, coded;
} setup;

static void
open_setup(model *m, int rank, const ranks_run *run)
{
    open_replicas(m, rank, run, setup.replicas);
    m->micro_batches = setup.scenario == LOCAL || setup.scenario == STRIDED ? 2 : 0;
    m->twice = setup.scenario == TWICE;
    m->strided = setup.scenario == STRIDED;
    m->kinds = setup.kinds;
    m->all_used = setup.all_used;
    set_codecs(setup.coded);
    open_tree(m);
    set_codecs(false);
}

static void
sums_are_right(model *m)
{
    for (int step = 0; step < STEPS; step++) {
        CHECK_INT(one_step(m, step), FSDPC_OK);
    }
    expect_no_mismatches(m);
}

/* --- what a micro-batch costs ------------------------------------------------------------------------ */

static void
a_micro_batch_costs_one_launch_a_unit(model *m)
{
    for (int batch = 0; batch < 3; batch++) {
        for (int u = 0; u < UNITS; u++) {
            make_grads(m, u, batch);
            int64_t launches = simgpu_count().launches, allocations = simgpu_count().allocations;
            CHECK_INT(fsdpc_tree_keep_local(m->tree, u, m->grads[u].tensors), FSDPC_OK);
            CHECK(simgpu_count().launches - launches <= 1);
            CHECK(batch == 0 || simgpu_count().allocations == allocations);
        }
    }
}

/* --- planted faults ------------------------------------------------------------------------------- */

/* Leaves out a wait in the second step. */
static void
with_a_fault(model *m)
{
    m->quiet = true;
    CHECK_INT(one_step(m, 0), FSDPC_OK);
    set_masters(m, 1);
    leave_out(m->rank_of_run);
    int status = forward(m, 1);
    status = status == FSDPC_OK ? go_back(m, 1, 0, true) : status;
    check_grads(m, 1);
    judge(m->rank_of_run, m->run, status, false);
}

static void
missing_waits_are_found(int world, int replicas, bool twice)
{
    char what[64];
    snprintf(what, sizeof what, "%d replicas of %d shards%s", replicas, world / replicas,
             twice ? ", a unit used twice" : "");
    setup = (struct setup){replicas, twice ? TWICE : PLAIN, kinds, .all_used = true, .coded = true};
    wait_counts w = leave_waits_out(world, open_setup, with_a_fault, what);
    printf("%s: %d waits in a step, each left out once: %d found\n", what, w.calls, w.found);
}

int
main(void)
{
    static const int grids[][2] = {{1, 1}, {2, 1}, {2, 2}, {3, 3}, {4, 2}};
    for (int g = 0; g < 5; g++) {
        for (int scenario = 0; scenario < SCENARIOS; scenario++) {
            for (int policy = scenario % 2; policy < 8; policy += g == 4 ? 4 : 3) {
                setup = (struct setup){grids[g][1], scenario, policy % 2 ? several : kinds,
                                       .all_used = policy >= 5, .coded = policy % 3 == 1};
                with_models(grids[g][0], policy, open_setup, sums_are_right);
            }
        }
    }
    for (int scenario = PLAIN; scenario <= STRIDED; scenario += STRIDED) {
        setup = (struct setup){1, scenario, several, .all_used = true};
        with_models(2, 0, open_setup, a_micro_batch_costs_one_launch_a_unit);
    }
    missing_waits_are_found(2, 2, true);
    missing_waits_are_found(4, 2, false);
    return test_result();
}
