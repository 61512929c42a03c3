/* Tests of units that are prefetched and then not used: backward passes them by, or a forward ends or breaks
 * off before them. The gathers of such units read shards. Therefore the optimizer's step, which is the next
 * work on the caller's stream, must wait for these gathers. Each test makes this step, under several policies
 * of the simulator. Other tests leave out the waits one at a time. */
#include "steps.h"
#include "exchange/exchange_impl.h"

/* Kinds of units (engine.h). Units that are prefetched and not used are of kind 1, whose values are cast.
 * Therefore they are gathered even if there is only one rank. */
static const int gathered[UNITS] = {0, 1, 1, 5, 1};

enum { FIRST = 1, SECOND, THIRD, POISONED = 8 };

/* The ways in which a forward can end after it has prefetched a unit that it does not use. */
enum { NO_BACKWARD, PASSED_BY, BROKE_OFF, EVALUATED, ENDS };

static void
open_unwanted(model *m, int rank, const ranks_run *run)
{
    *m = (model){.rank = rank, .world = run->world, .replicas = 1, .kinds = gathered};
    m->poison = run->option >= POISONED;
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    m->comm = open_comm(m, rank, run->world, 0, false);
    open_tree(m);
}

static void
expect_clean(const model *m)
{
    CHECK_INT(simgpu_reports(), 0);
    expect_no_mismatches(m);
}

/* --- no wait is missing ---------------------------------------------------------------------------- */

/* Unit 1 is prefetched when unit 2 begins its backward, but backward does not use unit 1. */
static void
a_backward_passes_a_unit_by(model *m)
{
    m->unwanted = FIRST;
    CHECK_INT(train(m, STEPS), FSDPC_OK);
    set_masters(m, STEPS);
    expect_clean(m);
}

/* Unit 2 is prefetched when unit 1 begins its forward, but unit 2 is not used. */
static int
short_forward(model *m, int step, int end)
{
    bool grad = end != EVALUATED;
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree, true));
    FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, ROOT));
    use(m, ROOT, step);
    FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, FIRST));
    use(m, FIRST, step);
    CHECK(fsdpc_unit_use(m->units[SECOND])->begun && !fsdpc_unit_use(m->units[SECOND])->ready);
    if (end == BROKE_OFF) {
        FSDPC_TRY(fsdpc_tree_forward_failed(m->tree, FIRST));
        return fsdpc_tree_forward_failed(m->tree, ROOT);
    }
    FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, FIRST, grad));
    if (end == PASSED_BY) { /* the wait for unit 3 implies the wait for unit 2 */
        FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, THIRD));
        use(m, THIRD, step);
        FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, THIRD, grad));
    }
    FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, ROOT, grad));
    return grad ? FSDPC_OK : fsdpc_tree_end_forward(m->tree);
}

static void
a_forward_ends_before_a_unit(model *m)
{
    CHECK_INT(train(m, 1), FSDPC_OK);
    for (int end = 0; end < ENDS; end++) {
        set_masters(m, 1 + end);
        CHECK_INT(short_forward(m, 1 + end, end), FSDPC_OK);
    }
    CHECK_INT(train(m, 1), FSDPC_OK);
    expect_clean(m);
}

/* A forward that uses the unit later finds the values that were prefetched. */
static void
a_late_user_finds_its_values(model *m)
{
    CHECK_INT(train(m, 1), FSDPC_OK);
    set_masters(m, 1);
    CHECK_INT(short_forward(m, 1, NO_BACKWARD), FSDPC_OK);
    CHECK_INT(fsdpc_tree_forward_enter(m->tree, SECOND), FSDPC_OK);
    use(m, SECOND, 1);
    CHECK_INT(fsdpc_tree_forward_leave(m->tree, SECOND, false), FSDPC_OK);
    CHECK_INT(fsdpc_tree_end_forward(m->tree), FSDPC_OK);
    set_masters(m, 2);
    expect_clean(m);
}

/* --- poison ---------------------------------------------------------------------------------------- */

static int64_t
count_readable(const model *m, int u)
{
    int64_t readable = 0;
    const fsdpc_unit *unit = m->units[u];
    const fsdpc_segment *seg = &unit->layout->segments[0];
    for (int64_t i = 0; i < seg->piece_numel * unit->world; i++) {
        readable +=
            !isnan(item_get((const char *)unit->range.address + seg->full_offset, seg->compute, i));
    }
    return readable;
}

static void
what_nobody_wanted_is_poisoned_too(model *m)
{
    m->unwanted = FIRST;
    for (int i = 0; i < 2; i++) {
        CHECK_INT(train(m, 1), FSDPC_OK);
        CHECK_CU(cuCtxSynchronize(), CUDA_SUCCESS);
        CHECK_INT(count_readable(m, FIRST), 0);
    }
    expect_clean(m);
}

/* --- captures -------------------------------------------------------------------------------------- */

/* A capture drops the values that were prefetched before it. Values that a capture has prefetched are dropped
 * after the capture. */
static void
captures_leave_it_behind(model *m)
{
    m->all_used = true;
    m->unwanted = FIRST;
    CHECK_INT(train(m, 1), FSDPC_OK);
    set_masters(m, 1);
    CHECK_INT(short_forward(m, 1, NO_BACKWARD), FSDPC_OK);
    m->quiet = true; /* captured gathers do not run, so values are wrong */
    CUstream stream = begin_capture(m);
    CHECK_INT(pass(m, 1), FSDPC_OK);
    CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
    set_masters(m, 2);
    stream = begin_capture(m);
    CHECK_INT(short_forward(m, 2, NO_BACKWARD), FSDPC_OK);
    CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
    m->quiet = false;
    m->wrong = 0;
    CHECK_INT(train(m, 2), FSDPC_OK);
    expect_clean(m);
}

/* --- planted faults -------------------------------------------------------------------------------- */

/* How the forward ends. -1: the forward is complete, but backward passes unit FIRST by. */
static int planted_end = -1;

static void
with_a_fault(model *m)
{
    m->quiet = m->all_used = true;
    m->unwanted = planted_end < 0 ? FIRST : 0;
    CHECK_INT(train(m, 1), FSDPC_OK);
    set_masters(m, 1);
    leave_out(m->rank_of_run);
    int status = planted_end < 0 ? pass(m, 1) : short_forward(m, 1, planted_end);
    read_grads(m, 1);
    set_masters(m, 2);
    judge(m->rank_of_run, m->run, status, false);
}

static void
missing_waits_are_found(int end, const char *what, int least)
{
    planted_end = end;
    wait_counts w = leave_waits_out(2, open_unwanted, with_a_fault, what);
    CHECK(w.calls >= least);
    printf("%s: %d waits, each left out once: %d found\n", what, w.calls, w.found);
}

int
main(void)
{
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < POISONED + 5; option = next_option(world, option)) {
            with_models(world, option, open_unwanted, a_backward_passes_a_unit_by);
            with_models(world, option, open_unwanted, a_forward_ends_before_a_unit);
            with_models(world, option, open_unwanted, a_late_user_finds_its_values);
        }
        with_models(world, POISONED, open_unwanted, what_nobody_wanted_is_poisoned_too);
        with_models(world, 1, open_unwanted, captures_leave_it_behind);
    }
    missing_waits_are_found(-1, "a backward passes a unit by", 12);
    missing_waits_are_found(NO_BACKWARD, "a forward without its backward", 3);
    missing_waits_are_found(PASSED_BY, "a forward that passes a unit by", 3);
    missing_waits_are_found(BROKE_OFF, "a forward that broke off", 3);
    missing_waits_are_found(EVALUATED, "an evaluation", 3);
    return test_result();
}
