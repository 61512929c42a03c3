/* If ranks gather or reduce different units at the same turn on the simulated GPU, each of these ranks gets
 * an error, so that wrong values are never used unnoticed. If a step repeats the order of the previous step,
 * nothing is compared. */
#include "steps.h"
#include "exchange/exchange_stream_impl.h"
#include "tree/tree_impl.h"

/* Kinds of units (engine.h). All units are of kind 0, so all gathers have one size, and so have all
 * reductions. Only the order of the collectives differs between ranks. */
static const int alike[UNITS];
static const int plain[UNITS] = {0, 1, 2, 3, 4}, swapped[UNITS] = {0, 1, 4, 3, 2};

/* If `late` is true, backward gathers the next unit before it reduces a unit. Otherwise, backward
 * reduces first. */
static int
step_late(model *m, const int *order, int step, bool late)
{
    set_masters(m, step);
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree, true));
    for (int i = 0; i < UNITS; i++) {
        FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, order[i]));
        use(m, order[i], step);
        FSDPC_TRY(i ? fsdpc_tree_forward_leave(m->tree, order[i], true) : FSDPC_OK);
    }
    FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, ROOT, true));
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    for (int i = UNITS - 1; i >= 0; i--) {
        FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, order[i]));
        FSDPC_TRY(late ? send_due(m, step, false) : FSDPC_OK);
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, order[i], true));
        FSDPC_TRY(!late || i == 0 ? send_due(m, step, i == 0) : FSDPC_OK);
    }
    return fsdpc_tree_end_backward(m->tree, true);
}

static int
step_in_order(model *m, const int *order, int step)
{
    return step_late(m, order, step, false);
}

/* The option of a run in which the order of units is trusted. */
enum { TRUSTED = 10 };

static void
open_alike(model *m, int rank, const ranks_run *run)
{
    *m = (model){.rank = rank, .world = run->world, .replicas = 1, .kinds = alike};
    m->trust_order = run->option == TRUSTED;
    m->quiet = m->all_used = m->no_prefetch = true; /* prefetches repeat the last step's order */
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    m->comm = open_comm(m, rank, run->world, 0, false);
    open_tree(m);
}

/* In the first step the last rank gathers the units in another order. All ranks get an error before any value
 * is mixed up. */
static void
a_new_turn_is_compared_first(model *m)
{
    int status = step_in_order(m, m->rank == m->world - 1 ? swapped : plain, 0);
    CHECK_INT(status, FSDPC_E_MISMATCH);
    CHECK(strstr(fsdpc_error_text(), "gather of unit b"));
    CHECK(strstr(fsdpc_error_text(), "gather of unit d"));
    CHECK_INT(simnccl_count().mismatches, 0);
    CHECK_INT(m->wrong, 0);
}

/* The last rank still uses unit 1 in the slot that unit 3 needs. This rank would gather unit 3 into spare
 * memory, which is not registered. The other ranks would gather into registered memory, for which NCCL runs
 * other kernels. */
static void
spare_memory_on_one_rank(model *m)
{
    const bool holds = m->rank == m->world - 1;
    set_masters(m, 0);
    REQUIRE_OK(fsdpc_tree_begin_forward(m->tree, true));
    CHECK_INT(fsdpc_tree_forward_enter(m->tree, 1), FSDPC_OK);
    CHECK(holds || fsdpc_tree_forward_leave(m->tree, 1, true) == FSDPC_OK);
    CHECK_INT(fsdpc_tree_forward_enter(m->tree, 3), FSDPC_E_MISMATCH);
    CHECK(strstr(fsdpc_error_text(), "gather of unit c into spare memory while rank") ||
          strstr(fsdpc_error_text(), "is at the gather of unit c into spare memory:"));
    CHECK_INT(simnccl_count().mismatches, 0);
}

/* All ranks alternate between two orders; then rank 0 takes one order and the other ranks take the other
 * order. */
static void
known_turns_are_compared_later(model *m)
{
    for (int step = 0; step < 6; step++) {
        CHECK_INT(step_in_order(m, step % 2 ? swapped : plain, step), FSDPC_OK);
        CHECK(simgpu_drain());
    }
    CHECK_INT(m->wrong, 0);
    CHECK_INT(step_in_order(m, m->rank ? swapped : plain, 6), FSDPC_OK);
    CHECK(m->wrong > 0);
    CHECK(simgpu_drain());
    CHECK_INT(fsdpc_tree_begin_forward(m->tree, true), FSDPC_E_MISMATCH);
    CHECK(strstr(fsdpc_error_text(), "different order"));
    CHECK(fsdpc_tree_begin_forward(m->tree, true) != FSDPC_OK);
}

static struct fsdpc_paths *
known_turns(model *m)
{
    return m->tree->exchanges[0]->streams->turns.known;
}

/* Both sets of known turns become full again and again. All ranks compare a turn again after it was cleared
 * from its set. */
static void
cleared_turns_are_compared_again(model *m)
{
    static const int orders[][UNITS] = {
        {0, 1, 2, 3, 4}, {0, 2, 3, 4, 1}, {0, 3, 4, 1, 2}, {0, 4, 1, 2, 3}};
    enum { ORDERS = sizeof orders / sizeof *orders, MOST = 17 };
    known_turns(m)[0].most = known_turns(m)[1].most = MOST;
    for (int step = 0; step < 3 * ORDERS; step++) {
        CHECK_INT(step_in_order(m, orders[step % ORDERS], step), FSDPC_OK);
        CHECK(simgpu_drain());
    }
    CHECK(known_turns(m)[0].cleared > 2 && known_turns(m)[1].cleared > 2);
    CHECK_INT(m->wrong, 0);
    CHECK_INT(simnccl_count().mismatches, 0);
}

/* Rank 0 makes a known gather before the reduction whose turn fills the set of known reductions. The other
 * ranks make this gather after that reduction. The gather must stay known to all ranks. Otherwise one rank
 * would compare its turn while the others do not. */
static void
cleared_reductions_leave_gathers_known(model *m)
{
    known_turns(m)[1].most = 4;
    for (int step = 0; step < 4; step++) {
        CHECK_INT(step_late(m, plain, step, step > 0 && m->rank == 0), FSDPC_OK);
        CHECK(simgpu_drain());
    }
    CHECK_INT(known_turns(m)[0].cleared, 0);
    CHECK(known_turns(m)[1].cleared > 2);
    CHECK_INT(m->wrong, 0);
    CHECK_INT(simnccl_count().mismatches, 0);
}

/* Rank 0 takes a turn that no rank has taken before. The other ranks take a turn that they know. */
static void
a_turn_that_one_rank_knows_fails(model *m)
{
    CHECK_INT(step_in_order(m, plain, 0), FSDPC_OK);
    CHECK_INT(step_in_order(m, plain, 1), FSDPC_OK);
    CHECK(step_in_order(m, m->rank ? plain : swapped, 2) != FSDPC_OK);
}

/* A turn that is known is not compared, and no turn is compared if the order is trusted. */
static void
what_is_known_is_not_compared(model *m)
{
    int64_t gathers[4];
    for (int step = 0; step < 4; step++) {
        gathers[step] = simnccl_count().all_gathers;
        CHECK_INT(step_in_order(m, plain, step), FSDPC_OK);
        CHECK(simgpu_drain());
        gathers[step] = simnccl_count().all_gathers - gathers[step];
    }
    CHECK_INT(gathers[2], gathers[1]);
    CHECK_INT(gathers[3], gathers[1]);
    CHECK(m->trust_order ? gathers[0] == gathers[1] : gathers[0] > gathers[1]);
    if (m->trust_order) {
        CHECK_INT(step_in_order(m, m->rank ? swapped : plain, 4), FSDPC_OK);
        CHECK(m->wrong > 0);
    }
    expect_no_reports();
}

int
main(void)
{
    for (int world = 2; world <= 3; world++) {
        for (int policy = 0; policy < 2; policy++) {
            with_models(world, policy, open_alike, a_new_turn_is_compared_first);
            with_models(world, policy, open_alike, spare_memory_on_one_rank);
            with_models(world, policy, open_alike, known_turns_are_compared_later);
            with_models(world, policy, open_alike, cleared_turns_are_compared_again);
            with_models(world, policy, open_alike, cleared_reductions_leave_gathers_known);
            with_models(world, policy, open_alike, a_turn_that_one_rank_knows_fails);
            with_models(world, policy, open_alike, what_is_known_is_not_compared);
        }
        with_models(world, TRUSTED, open_alike, what_is_known_is_not_compared);
    }
    return test_result();
}
