/* The components of a training step on GPUs work together: the real CUDA device, the real NCCL communicator
 * and the real kernels, on two ranks of the simulated GPU.
 *
 * The schedule is that of model.c and must be right in every order. Then the driver leaves out each wait of
 * the last step, one at a time. Either a race is reported, or the wait is redundant: other waits order the
 * same work, and no schedule gives other values. */
#include "comm/comm_nccl.h"
#include "gpu.h"
#include "ranks.h"
#include "nccl/simnccl.h"

enum { UNITS = 4, SLOTS = 2, NUMEL = 64, STEPS = 2, WORLD = 2, PIECE = NUMEL / WORLD };

static char ids[2][FSDPC_COMM_NCCL_ID_BYTES];

typedef struct engine {
    int rank;
    fsdpc_device *device;
    fsdpc_comm *gathers, *reduces;
    fsdpc_stream *gather, *reduce;
    float *slots[SLOTS], *sums[SLOTS], *shards, *grads, *local;
    char *parts;
    fsdpc_pack_plan *plan;
    fsdpc_event *gathered[UNITS], *released[SLOTS], *packed[SLOTS], *reduced[SLOTS], *stepped;
    int64_t first_wait, last_wait; /* numbers of wait calls before and after the last step */
    simgpu_counters before, after; /* counters before and after the last step */
} engine;

static void
event(engine *e, fsdpc_event **out)
{
    REQUIRE_OK(fsdpc_device_event_new(e->device, out));
}

static float *
floats(engine *e, size_t count, const char *name)
{
    void *block;
    REQUIRE_OK(fsdpc_device_alloc(e->device, count * sizeof(float), &block));
    simgpu_label(block, count * sizeof(float), name);
    return block;
}

static void
comm(engine *e, int which, const char *name, fsdpc_comm **out)
{
    fsdpc_comm_nccl_options options = {.name = name, .timeout_s = 30, .poll_ms = 20};
    REQUIRE_OK(fsdpc_comm_nccl(e->device, e->rank, WORLD, ids[which], &options, out));
}

static void
start(engine *e, int rank)
{
    char name[32];
    fsdpc_pack_target target = {.n = NUMEL, .dtype = FSDPC_F32};
    e->rank = rank;
    REQUIRE_OK(fsdpc_device_cuda(0, &e->device));
    comm(e, 0, "gather", &e->gathers);
    comm(e, 1, "reduce", &e->reduces);
    REQUIRE_OK(fsdpc_device_stream_new(e->device, true, &e->gather));
    REQUIRE_OK(fsdpc_device_stream_new(e->device, true, &e->reduce));
    simgpu_label_stream((CUstream)(void *)e->gather, "gather");
    simgpu_label_stream((CUstream)(void *)e->reduce, "reduce");
    for (int i = 0; i < SLOTS; i++) {
        snprintf(name, sizeof name, "slot %d", i);
        e->slots[i] = floats(e, NUMEL, name);
        snprintf(name, sizeof name, "reduce slot %d", i);
        e->sums[i] = floats(e, NUMEL, name);
        event(e, &e->released[i]);
        event(e, &e->packed[i]);
        event(e, &e->reduced[i]);
    }
    for (int i = 0; i < UNITS; i++) {
        event(e, &e->gathered[i]);
    }
    event(e, &e->stepped);
    e->shards = floats(e, UNITS * PIECE, "shards");
    e->grads = floats(e, UNITS * PIECE, "shard gradients");
    e->local = floats(e, NUMEL, "gradients");
    e->parts = (char *)floats(e, 64, "norm parts");
    REQUIRE_OK(fsdpc_device_pack_plan(e->device, &target, NULL, 1, NUMEL * sizeof(float), false,
                                      &e->plan));
}

static void
finish(engine *e)
{
    fsdpc_device *device = e->device;
    fsdpc_comm_free(e->gathers);
    fsdpc_comm_free(e->reduces);
    for (int i = 0; i < SLOTS; i++) {
        fsdpc_device_free(device, e->slots[i], NUMEL * sizeof(float));
        fsdpc_device_free(device, e->sums[i], NUMEL * sizeof(float));
        fsdpc_device_event_free(device, e->released[i]);
        fsdpc_device_event_free(device, e->packed[i]);
        fsdpc_device_event_free(device, e->reduced[i]);
    }
    for (int i = 0; i < UNITS; i++) {
        fsdpc_device_event_free(device, e->gathered[i]);
    }
    fsdpc_device_event_free(device, e->stepped);
    fsdpc_device_free(device, e->shards, UNITS * PIECE * sizeof(float));
    fsdpc_device_free(device, e->grads, UNITS * PIECE * sizeof(float));
    fsdpc_device_free(device, e->local, NUMEL * sizeof(float));
    fsdpc_device_free(device, e->parts, 64 * sizeof(float));
    fsdpc_device_pack_plan_free(device, e->plan);
    fsdpc_device_stream_free(device, e->gather);
    fsdpc_device_stream_free(device, e->reduce);
}

/* --- a step ------------------------------------------------------------------------------------------ */

static void
on(engine *e, fsdpc_stream *stream)
{
    (void)fsdpc_device_use(e->device, stream);
}

static void
gather(engine *e, int unit)
{
    float *slot = e->slots[unit % SLOTS];
    on(e, e->gather);
    CHECK_INT(fsdpc_device_wait(e->device, e->released[unit % SLOTS]), FSDPC_OK);
    CHECK_INT(fsdpc_device_wait(e->device, e->stepped), FSDPC_OK);
    CHECK_INT(fsdpc_device_cast(e->device, slot + e->rank * PIECE, FSDPC_F32,
                                e->shards + unit * PIECE, FSDPC_F32, PIECE, 1),
              FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_gather(e->gathers, slot, PIECE * sizeof(float), "gather"), FSDPC_OK);
    CHECK_INT(fsdpc_device_record(e->device, e->gathered[unit]), FSDPC_OK);
    on(e, NULL);
    CHECK_INT(fsdpc_device_wait(e->device, e->gathered[unit]), FSDPC_OK);
}

/* The host program reads the slot in place of a kernel. simgpu_host_read declares this read as work on the
 * compute stream. */
static void
use(engine *e, int unit, float *act)
{
    const float *slot = e->slots[unit % SLOTS];
    simgpu_host_read(slot, NUMEL * sizeof(float), "forward");
    for (int i = 0; i < NUMEL; i++) {
        act[i] = 0.5f * act[i] + slot[i];
    }
}

static void
release(engine *e, int unit)
{
    CHECK_INT(fsdpc_device_record(e->device, e->released[unit % SLOTS]), FSDPC_OK);
}

static void
reduce(engine *e, int unit, const float *act)
{
    int s = unit % SLOTS;
    fsdpc_pack_source source = {.data = e->local, .dtype = FSDPC_F32};
    simgpu_host_write(e->local, NUMEL * sizeof(float), "backward");
    for (int i = 0; i < NUMEL; i++) {
        e->local[i] = 0.01f * act[i] * (float)(unit + 1);
    }
    CHECK_INT(fsdpc_device_wait(e->device, e->reduced[s]), FSDPC_OK);
    CHECK_INT(fsdpc_device_pack_onto(e->device, e->plan, e->sums[s], NULL, &source, 0.5), FSDPC_OK);
    CHECK_INT(fsdpc_device_record(e->device, e->packed[s]), FSDPC_OK);
    on(e, e->reduce);
    CHECK_INT(fsdpc_device_wait(e->device, e->packed[s]), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter(e->reduces, e->sums[s], PIECE, FSDPC_F32, "reduce"),
              FSDPC_OK);
    const void *own = e->sums[s] + e->rank * PIECE;
    CHECK_INT(fsdpc_device_reduce(e->device, e->grads + unit * PIECE, FSDPC_F32, &own, 1, FSDPC_F32,
                                  PIECE, 1, true),
              FSDPC_OK);
    const fsdpc_stretch sums = {e->grads + unit * PIECE, PIECE, FSDPC_F32};
    CHECK_INT(
        fsdpc_device_norm_into(e->device, &sums, 1, 2, e->parts + unit * FSDPC_NORM_PART_BYTES),
        FSDPC_OK);
    CHECK_INT(fsdpc_device_record(e->device, e->reduced[s]), FSDPC_OK);
    on(e, NULL);
}

static void
step(engine *e)
{
    float act[NUMEL];
    for (int i = 0; i < NUMEL; i++) {
        act[i] = (float)(e->rank + 1);
    }
    for (int unit = 0; unit < UNITS; unit++) {
        gather(e, unit);
        use(e, unit, act);
        release(e, unit);
    }
    for (int unit = UNITS - 1; unit >= 0; unit--) {
        gather(e, unit);
        use(e, unit, act);
        release(e, unit);
        reduce(e, unit, act);
    }
    for (int s = 0; s < SLOTS; s++) {
        CHECK_INT(fsdpc_device_wait(e->device, e->reduced[s]), FSDPC_OK);
    }
    simgpu_host_read(e->grads, UNITS * PIECE * sizeof(float), "optimizer");
    simgpu_host_write(e->grads, UNITS * PIECE * sizeof(float), "optimizer");
    simgpu_host_write(e->shards, UNITS * PIECE * sizeof(float), "optimizer");
    for (int i = 0; i < UNITS * PIECE; i++) {
        e->shards[i] -= 0.1f * e->grads[i];
        e->grads[i] = 0;
    }
    CHECK_INT(fsdpc_device_record(e->device, e->stepped), FSDPC_OK);
}

/* Trains for STEPS steps. The shards begin with the same values in every call. In the last step, wait number
 * `skipped` is left out; 0: no wait is left out. */
static void
train(engine *e, int skipped, float *shards)
{
    CHECK_CU(cuCtxSynchronize(), CUDA_SUCCESS); /* no work of an earlier run is left */
    simgpu_host_write(e->shards, UNITS * PIECE * sizeof(float), "set");
    simgpu_host_write(e->grads, UNITS * PIECE * sizeof(float), "set");
    for (int i = 0; i < UNITS * PIECE; i++) {
        e->shards[i] = 0.1f * (float)(i % 17) + (float)e->rank;
        e->grads[i] = 0;
    }
    CHECK_INT(fsdpc_device_record(e->device, e->stepped), FSDPC_OK);
    for (int i = 0; i < STEPS; i++) {
        if (i == STEPS - 1) {
            e->first_wait = simgpu_calls("cuStreamWaitEvent");
            e->before = simgpu_count();
            if (skipped) {
                REQUIRE(simgpu_skip_wait(skipped));
            }
        }
        step(e);
        e->last_wait = simgpu_calls("cuStreamWaitEvent");
        e->after = simgpu_count();
    }
    CHECK(simgpu_drain());
    memcpy(shards, e->shards, UNITS * PIECE * sizeof(float));
}

/* --- on two ranks --------------------------------------------------------------------------------------- */

static const char *const policies[] = {"eager",    "lazy",           "random:1",
                                       "random:2", "order:0,1,host", "order:1,0,host"};
enum { POLICIES = sizeof policies / sizeof *policies };

static void
check_counts(const engine *e)
{
    const simgpu_counters *a = &e->before, *b = &e->after;
    /* Each unit has two casts, a pack, a sum and a norm. */
    CHECK_INT(b->launches - a->launches, 5 * UNITS);
    CHECK_INT(b->collectives - a->collectives, 3 * UNITS);
    CHECK_INT(b->allocations - a->allocations, 0);
    CHECK_INT(b->host_allocations - a->host_allocations, 0);
    CHECK_INT(b->host_syncs - a->host_syncs, 0);
    CHECK_INT(b->pageable - a->pageable, 0);
    CHECK_INT(b->late_loads, 0);
}

static void
on_a_rank(int rank, ranks_run *run)
{
    static float right[UNITS * PIECE], now[UNITS * PIECE];
    engine e = {0};
    int found = 0, redundant = 0;
    gpu_start();
    simnccl_reset();
    REQUIRE_OK(fsdpc_device_cuda(0, &e.device)); /* the device is never freed */
    int64_t live = fsdpc_mem_live(), device_bytes = simgpu_count().device_bytes;
    start(&e, rank);
    for (int p = 0; p < POLICIES; p++) {
        REQUIRE(simgpu_policy(policies[p]));
        train(&e, 0, p ? now : right);
        CHECK(p == 0 || memcmp(right, now, sizeof right) == 0);
        check_counts(&e);
        CHECK_INT(simgpu_count().races, 0);
        CHECK_INT(simgpu_count().faults, 0);
    }
    CHECK(right[5] == right[5] && right[5] != 0.5f + (float)rank);
    int waits = (int)(e.last_wait - e.first_wait);
    for (int k = 1; k <= waits; k++) {
        bool raced = false, same = true;
        for (int p = 0; p < POLICIES; p++) {
            REQUIRE(simgpu_policy(policies[p]));
            int64_t races = simgpu_count().races;
            train(&e, k, now);
            raced |= simgpu_count().races > races;
            same &= memcmp(right, now, sizeof right) == 0;
        }
        found += raced;
        redundant += !raced;
        CHECK(raced || same);
    }
    if (rank == 0) {
        printf("%d of the step's %d waits left out one by one: %d found, %d are not needed beside "
               "the others\n",
               waits, waits, found, redundant);
        fflush(stdout);
    }
    CHECK_INT(waits, UNITS * 2 * 3 + UNITS * 2 + SLOTS);
    /* These waits are implied by other waits:
     * - the wait for the optimizer in each gather except the first one (7),
     * - the wait for the slot's readers in the first gather into each slot (2),
     * - the wait for the slot's readers in the backward gather of the second-to-last unit (1),
     * - the wait for the reduce slot in the first pack into each slot (2),
     * - the optimizer's wait for the second-to-last sum (1). */
    CHECK_INT(redundant, 7 + 2 + 1 + 2 + 1);
    finish(&e);
    CHECK_INT(simgpu_count().faults, 0);
    CHECK_INT(fsdpc_mem_live(),
              live + UNITS + 3 * SLOTS + 1); /* the events are kept in the device's pool */
    CHECK_INT(simgpu_count().device_bytes, device_bytes);
    CHECK_INT(simnccl_count().communicators, 0);
    (void)run;
}

int
main(void)
{
    if (!getenv("FSDPC_LIBNCCL") || !getenv("SIMGPU_KERNELS")) {
        test_skip("the simulated GPU is not named: run make simgpu");
    }
    simgpu_get_options()->quiet = true;
    REQUIRE_OK(fsdpc_comm_nccl_id(ids[0]));
    REQUIRE_OK(fsdpc_comm_nccl_id(ids[1]));
    ranks_do(on_a_rank, .world = WORLD);
    return test_result();
}
