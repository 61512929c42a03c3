/* Replicas, one rank alone, and gradients that wait, through the real exchange on the simulated GPU: 1 to 4
 * ranks as 1 to 3 replicas of 1 or 2 shards, micro-batches without communication, units with two
 * gradients in a backward, strided and missing gradients. No race, right sums; nothing is allocated
 * after the first micro-batch; each wait left out is found.
 */
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
send_all(model *m, int step, int batch, bool at_end)
{
    for (;;) {
        int u = fsdpc_tree_next_due(m->tree, at_end);
        if (u < 0) {
            return FSDPC_OK;
        }
        make_grads(m, u, grad_step(m, step, batch));
        FSDPC_TRY(fsdpc_tree_reduce(m->tree, u, m->grads[u].tensors));
    }
}

static int
go_back(model *m, int step, int batch, bool sync)
{
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    for (int u = UNITS - 1; u >= 0; u--) {
        FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, u));
        use(m, u, step);
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, sync));
        if (sync) {
            FSDPC_TRY(send_all(m, step, batch, u == ROOT));
        } else {
            make_grads(m, u, grad_step(m, step, batch));
            FSDPC_TRY(fsdpc_tree_keep_local(m->tree, u, m->grads[u].tensors));
        }
    }
    if (sync && m->twice) {
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, 1, true));
        FSDPC_TRY(send_all(m, step, batch + 1, false));
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
            const simgpu_counters after = simgpu_count();
            CHECK_INT(after.allocations - before.allocations, 0);
            CHECK_INT(after.host_allocations - before.host_allocations, 0);
            CHECK_INT(after.host_syncs - before.host_syncs, 0);
            CHECK_INT(after.events_created - before.events_created, 0);
        }
    }
    check_grads(m, step);
    return FSDPC_OK;
}

static void
set_scenario(model *m, int scenario)
{
    m->micro_batches = scenario == LOCAL || scenario == STRIDED ? 2 : 0;
    m->twice = scenario == TWICE;
    m->strided = scenario == STRIDED;
}

/* run->option: replicas * 100 + scenario * 10 + policy, 5 and up: all parameters used. */
static void
sums_are_right(int rank, ranks_run *run)
{
    model m;
    ranks_run own = *run;
    own.option = run->option % 10;
    start_rank(rank, &own);
    open_replicas(&m, rank, run, run->option / 100);
    set_scenario(&m, run->option / 10 % 10);
    m.all_used = run->option % 10 >= 5;
    m.kinds = run->option % 2 ? several : kinds;
    open_tree(&m);
    for (int step = 0; step < STEPS; step++) {
        CHECK_INT(one_step(&m, step), FSDPC_OK);
    }
    expect_no_mismatches(&m);
    close_model(&m);
}

/* --- what a micro-batch costs ------------------------------------------------------------------------ */

static void
a_micro_batch_costs_one_launch_a_unit(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_replicas(&m, rank, run, 1);
    m.kinds = several;
    m.all_used = true;
    m.strided = run->option;
    open_tree(&m);
    for (int batch = 0; batch < 3; batch++) {
        for (int u = 0; u < UNITS; u++) {
            make_grads(&m, u, batch);
            int64_t launches = simgpu_count().launches, allocations = simgpu_count().allocations;
            CHECK_INT(fsdpc_tree_keep_local(m.tree, u, m.grads[u].tensors), FSDPC_OK);
            CHECK(simgpu_count().launches - launches <= 1);
            CHECK(batch == 0 || simgpu_count().allocations == allocations);
        }
    }
    close_model(&m);
}

/* --- planted faults ------------------------------------------------------------------------------- */

/* In the second step; run->option is replicas * 10 + twice. */
static void
with_a_fault(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    REQUIRE(simgpu_policy("lazy"));
    open_replicas(&m, rank, run, run->option / 10);
    m.quiet = m.all_used = true;
    m.twice = run->option % 10;
    open_tree(&m);
    CHECK_INT(one_step(&m, 0), FSDPC_OK);
    set_masters(&m, 1);
    leave_out(rank);
    int status = forward(&m, 1);
    status = status == FSDPC_OK ? go_back(&m, 1, 0, true) : status;
    check_grads(&m, 1);
    judge(rank, run, status, false);
    close_model(&m);
}

static void
missing_waits_are_found(int world, int replicas, bool twice)
{
    char what[64];
    snprintf(what, sizeof what, "%d replicas of %d shards%s", replicas, world / replicas,
             twice ? ", a unit used twice" : "");
    wait_counts w = leave_each_wait_out(world, replicas * 10 + twice, with_a_fault, what);
    printf("%s: %d waits in a step, each left out once: %d found\n", what, w.calls, w.found);
}

int
main(void)
{
    static const int grids[][2] = {{1, 1}, {2, 1}, {2, 2}, {3, 3}, {4, 2}};
    for (int g = 0; g < 5; g++) {
        for (int scenario = 0; scenario < SCENARIOS; scenario++) {
            for (int policy = scenario % 2; policy < 8; policy += g == 4 ? 4 : 3) {
                with_ranks(grids[g][0], grids[g][1] * 100 + scenario * 10 + policy, sums_are_right,
                           NULL);
            }
        }
    }
    with_ranks(2, 0, a_micro_batch_costs_one_launch_a_unit, NULL);
    with_ranks(2, 1, a_micro_batch_costs_one_launch_a_unit, NULL);
    missing_waits_are_found(2, 2, true);
    missing_waits_are_found(4, 2, false);
    return test_result();
}
