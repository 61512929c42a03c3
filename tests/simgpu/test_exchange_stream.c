/* Training steps of a tree on one to three ranks, with the real exchange, arena, CUDA device and NCCL
 * communicator under the simulator, in many legal orders of the work that the simulator delays. No race may
 * be found, every value must be right, and a step must neither allocate memory nor make the host wait. Then
 * faults are planted in the real code by skipping one of its driver calls: each fault must be found. */
#include "steps.h"

/* --- the right schedule ---------------------------------------------------------------------------- */

static void
steps_are_right(model *m)
{
    CHECK_STR(fsdpc_tree_kind(m->tree), "stream");
    CHECK_INT(train(m, STEPS), FSDPC_OK);
    expect_no_mismatches(m);
}

/* Two units that share a slot are in use at the same time. The second unit uses spare memory until its
 * forward ends. */
static void
two_users_of_a_slot(model *m)
{
    CHECK_INT(train(m, 1), FSDPC_OK);
    for (int step = 1; step < 3; step++) {
        set_masters(m, step);
        CHECK_INT(fsdpc_tree_begin_forward(m->tree, true), FSDPC_OK);
        CHECK_INT(fsdpc_tree_forward_enter(m->tree, 1), FSDPC_OK);
        CHECK_INT(fsdpc_tree_forward_enter(m->tree, 3), FSDPC_OK);
        use(m, 1, step);
        use(m, 3, step);
        CHECK_INT(fsdpc_tree_forward_leave(m->tree, 3, false), FSDPC_OK);
        use(m, 1, step);
        CHECK_INT(fsdpc_tree_forward_leave(m->tree, 1, false), FSDPC_OK);
        CHECK_INT(fsdpc_tree_end_forward(m->tree), FSDPC_OK);
    }
    fsdpc_tree_memory memory;
    fsdpc_tree_get_memory(m->tree, &memory);
    CHECK_INT(memory.spare_count, 2);
    CHECK_INT(memory.spare_bytes, 0);
    expect_no_mismatches(m);
}

static int
ctrl_c(void)
{
    return 1;
}

/* Rank 1 does not reach the end of backward. Rank 0 did not use all parameters, so rank 0 waits there for the
 * used bits of rank 1, until the communicator's deadline passes or the user interrupts the wait. */
static void
a_wait_for_used_bits_is_interrupted(model *m)
{
    CHECK_INT(train(m, 1), FSDPC_OK); /* from now on the order of units is known */
    set_masters(m, 1);
    CHECK_INT(forward(m, 1), FSDPC_OK);
    CHECK_INT(backward_without_end(m, 1), FSDPC_OK);
    if (m->rank == 0) {
        fsdpc_shm_interrupt_check = ctrl_c;
        CHECK_ERROR(fsdpc_tree_end_backward(m->tree, true), FSDPC_E_INTERRUPT,
                    "used bits at the end of backward: interrupted");
        fsdpc_shm_interrupt_check = NULL;
        CHECK_ERROR(fsdpc_comm_check(m->comm), FSDPC_E_COMM, "gave up: interrupted");
        m->run->flags[0] = 1;
    }
    while (!m->run->flags[0]) {
        rank_sleep_ms(5);
    }
}

/* The model is used on a stream of the caller. The model is closed while another stream is current. */
static void
slots_outlive_readers_of_other_streams(int rank, ranks_run *run)
{
    model m;
    start_rank(rank, run);
    open_model(&m, rank, run);
    CHECK_INT(train(&m, 1), FSDPC_OK);
    CUstream side = gpu_stream("side");
    fsdpc_device_use(m.device, (fsdpc_stream *)side);
    CHECK_INT(fsdpc_tree_begin_forward(m.tree, true), FSDPC_OK);
    for (int u = 0; u < UNITS; u++) {
        CHECK_INT(fsdpc_tree_forward_enter(m.tree, u), FSDPC_OK);
        simgpu_stream_access(side, fsdpc_unit_full(m.units[u]), m.units[u]->layout->full_bytes,
                             false, "matmul");
        CHECK_INT(fsdpc_tree_forward_leave(m.tree, u, false), FSDPC_OK);
    }
    CHECK_INT(fsdpc_tree_end_forward(m.tree), FSDPC_OK);
    fsdpc_device_use(m.device, NULL);
    close_model(&m);
    CHECK_INT(simgpu_reports(), 0);
    expect_no_reports();
}

/* --- what a step costs ------------------------------------------------------------------------------ */

/* Returns the number of segments that have elements: only these are gathered. Sets *reduced to the number of
 * segments that are also reduced. */
static int
count_segments(const model *m, int *reduced)
{
    int gathered = *reduced = 0;
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_layout *layout = m->units[u]->layout;
        for (int s = 0; s < layout->segment_count; s++) {
            gathered += layout->segments[s].piece_numel > 0;
            *reduced += layout->segments[s].piece_numel > 0 && layout->segments[s].trainable;
        }
    }
    return gathered;
}

/* A unit with segments of several dtypes takes more gathers than other units, but not more launches. */
static void
a_step_costs_no_more_than_this(model *m)
{
    m->all_used = true;
    CHECK_INT(train(m, 1), FSDPC_OK);
    const simgpu_counters before = simgpu_count();
    int64_t gathers = simnccl_count().all_gathers, reduces = simnccl_count().reduce_scatters;
    int64_t windowed = simnccl_count().windowed;
    set_masters(m, 1);
    CHECK_INT(forward(m, 1), FSDPC_OK);
    CHECK_INT(backward(m, 1), FSDPC_OK);
    expect_nothing_made(&before);
    CHECK(simgpu_drain());
    int64_t launches = simgpu_count().launches - before.launches;
    gathers = simnccl_count().all_gathers - gathers;
    reduces = simnccl_count().reduce_scatters - reduces;
    CHECK_INT(simnccl_count().windowed - windowed, gathers + reduces);
    if (m->rank == 0) {
        printf(
            "%d ranks, a step of %d units: %d launches, %d gathers of segments, %d reductions, no "
            "allocation, no wait of the host\n",
            m->world, UNITS, (int)launches, (int)gathers, (int)reduces);
    }
    int reduced, gathered = count_segments(m, &reduced);
    /* The root unit and the last unit stay in their slots, so backward does not gather them again. */
    CHECK(gathers < 2 * gathered && launches <= 4 * UNITS);
    CHECK_INT(reduces, m->world > 1 ? reduced : 0);
}

/* --- a step in a graph ------------------------------------------------------------------------------ */

static int64_t
work_done(void)
{
    const simgpu_counters now = simgpu_count();
    return now.launches + now.copies + now.memsets + now.collectives;
}

/* The simulator cannot run a captured graph, so the test counts the captured work. */
static void
a_step_is_captured(model *m)
{
    m->all_used = true;
    CHECK_INT(train(m, 1), FSDPC_OK);
    int64_t before = work_done();
    CHECK_INT(train(m, 1), FSDPC_OK);
    CHECK(simgpu_drain());
    int64_t work = work_done() - before;
    CHECK_INT(m->wrong, 0);
    m->quiet = true; /* captured gathers do not run, so values are wrong */
    for (int round = 0; round < 2; round++) {
        CUstream stream = begin_capture(m);
        CHECK_INT(pass(m, 0), FSDPC_OK);
        CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
        /* All work is captured except the comparison of the order of units, which needs the host. */
        CHECK_INT(simgpu_captured(), work - (m->world > 1));
    }
    m->all_used = m->quiet = false;
    m->wrong = 0;
    CHECK_INT(train(m, 2), FSDPC_OK); /* later steps work as if nothing had been captured */
    CHECK_INT(m->wrong, 0);
    CHECK_INT(simgpu_reports(), 0);
    expect_no_reports();
}

/* An operation that needs the host is refused with an error that names the operation, and the capture can
 * still be ended. */
static void
the_host_is_refused_in_a_capture(model *m)
{
    m->quiet = true; /* captured gathers do not run, so values are wrong */
    CHECK_INT(train(m, 1), FSDPC_OK);
    CHECK_INT(m->wrong, 0);
    set_masters(m, 1);
    CUstream stream = begin_capture(m);
    int status = pass(m, 1); /* some parameters get no gradient */
    CHECK_INT(status, m->world > 1 ? FSDPC_E_STATE : FSDPC_OK);
    CHECK(status == FSDPC_OK || strstr(fsdpc_error_text(), "cannot be captured"));
    CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
    stream = begin_capture(m);
    CHECK_INT(fsdpc_tree_begin_forward(m->tree, true), FSDPC_OK);
    CHECK_INT(fsdpc_tree_forward_enter(m->tree, 1), FSDPC_OK);
    if (m->world > 1) { /* with one rank, unit 3 is used in its shard, without a slot */
        CHECK_INT(fsdpc_tree_forward_enter(m->tree, 3), FSDPC_E_STATE);
        CHECK(strstr(fsdpc_error_text(), "spare") != NULL);
    }
    CHECK_INT(fsdpc_tree_forward_leave(m->tree, 1, false), FSDPC_OK);
    CHECK_INT(fsdpc_tree_end_forward(m->tree), FSDPC_OK);
    CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
    static const fsdpc_tree_options options = {0};
    fsdpc_tree *second;
    stream = begin_capture(m);
    CHECK_INT(fsdpc_tree_new(m->units, depths, UNITS, &options, &second), FSDPC_E_STATE);
    CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
    CHECK_INT(simgpu_reports(), 0);
    expect_no_reports();
}

/* The last two waits join the communication streams to the captured stream. Without one of these waits the
 * capture cannot end. */
static void
streams_must_lead_back(model *m)
{
    m->all_used = m->quiet = true;
    CHECK_INT(train(m, 1), FSDPC_OK);
    CUstream stream = begin_capture(m);
    int64_t before = simgpu_calls("cuStreamWaitEvent");
    CHECK_INT(pass(m, 1), FSDPC_OK);
    int waits = (int)(simgpu_calls("cuStreamWaitEvent") - before);
    CHECK_CU(end_capture(m, stream), CUDA_SUCCESS);
    stream = begin_capture(m);
    REQUIRE(simgpu_skip_wait(waits));
    CHECK_INT(pass(m, 1), FSDPC_OK);
    CHECK_CU(end_capture(m, stream),
             m->world > 1 ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED : CUDA_SUCCESS);
}

/* --- units that travel coded ---------------------------------------------------------------------- */

static void
open_coded(model *m, int rank, const ranks_run *run)
{
    set_codecs(true);
    open_model(m, rank, run);
    set_codecs(false);
    CHECK(m->units[0]->layout->coded_bytes > 0);
}

/* A coded reduction takes two launches, one to encode and one to sum, instead of one launch to sum. It also
 * sends one message to each rank. */
static void
a_step_with_codes_costs_this(model *m)
{
    m->all_used = true;
    CHECK_INT(train(m, 1), FSDPC_OK);
    const simgpu_counters before = simgpu_count();
    const int64_t sent = simnccl_count().all_to_alls;
    set_masters(m, 1);
    CHECK_INT(pass(m, 1), FSDPC_OK);
    expect_nothing_made(&before);
    CHECK(simgpu_drain());
    CHECK_INT(simnccl_count().all_to_alls - sent, 4); /* one unit is too small to be coded */
    CHECK(simgpu_count().launches - before.launches <= 7 * UNITS);
}

/* --- planted faults --------------------------------------------------------------------------------- */

/* With two ranks, one rank leaves out a wait of its second step. */
static void
with_a_fault(model *m)
{
    /* All parameters are used, so no rank waits for used bits. That wait would order work and hide faults. */
    m->quiet = m->all_used = true;
    CHECK_INT(train(m, 1), FSDPC_OK);
    CHECK_INT(m->wrong, 0);
    set_masters(m, 1);
    leave_out(m->rank_of_run);
    int status = pass(m, 1);
    read_grads(m, 1);
    judge(m->rank_of_run, m->run, status, m->wrong > 0);
}

static void
missing_waits_are_found(model_opener open, const char *what)
{
    wait_counts w = leave_waits_out(2, open, with_a_fault, what);
    CHECK(w.calls > 12);
    printf("%d waits in %s of 2 ranks, each left out once: %d found by clocks, %d of them by "
           "values too\n",
           w.calls, what, w.found, w.wrong);
}

int
main(void)
{
    static const model_case captures[] = {a_step_is_captured, the_host_is_refused_in_a_capture,
                                          streams_must_lead_back};
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < 8; option++) {
            with_models(world, option, open_model, steps_are_right);
        }
        with_models(world, LAZY, open_coded, steps_are_right);
        with_models(world, 6, open_coded, steps_are_right);
        with_models(world, 8, open_model, a_step_costs_no_more_than_this);
    }
    for (int option = 0; option < 8; option++) {
        with_models(2, option, open_model, two_users_of_a_slot);
    }
    for (int i = 0; i < 6; i++) {
        with_models(1 + i / 3, 0, open_model, captures[i % 3]);
    }
    with_models(2, 0, open_coded, two_users_of_a_slot);
    with_models(2, 0, open_coded, a_step_is_captured);
    with_models(3, 8, open_coded, a_step_with_codes_costs_this);
    with_models(2, 0, open_model, a_wait_for_used_bits_is_interrupted);
    with_ranks(2, 1, slots_outlive_readers_of_other_streams);
    missing_waits_are_found(open_model, "a step");
    missing_waits_are_found(open_coded, "a step with codes");
    return test_result();
}
