/* Tests of the core's NCCL communicator on the simulated GPU: values, agreement, and every way to fail.
 *
 * No test asserts a duration. To show that a call does not wait, a test checks what has not happened yet when
 * the call returns.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "comm/comm_nccl_impl.h"
#include "gpu.h"
#include "comm/nccl_api.h"
#include "ranks.h"
#include "nccl/simnccl.h"

static char id[FSDPC_COMM_NCCL_ID_BYTES];

typedef struct setup {
    fsdpc_comm *comm;
    CUstream stream;
    float *x;     /* 64 floats */
    int64_t live; /* number of heap blocks before the communicator is opened */
    int leaks;    /* number of objects that the device itself keeps */
    fsdpc_device *device;
    int rank, world;
} setup;

static void
use_stream(fsdpc_device *device, CUstream stream)
{
    fsdpc_stream *current;
    memcpy(&current, &stream, sizeof current);
    (void)fsdpc_device_use(device, current);
}

static void
rank_begin(setup *s, int rank, const ranks_run *run)
{
    fsdpc_event *event;
    gpu_start();
    simnccl_reset();
    simgpu_policy_random((uint64_t)(run->option * 10 + rank));
    *s = (setup){.rank = rank, .world = run->world};
    REQUIRE_OK(fsdpc_device_cuda(0, &s->device));
    REQUIRE_OK(fsdpc_device_event_new(s->device, &event));
    fsdpc_device_event_free(s->device, event);
    s->leaks = simgpu_leaks(NULL, 0);
    s->live = fsdpc_mem_live();
    s->stream = gpu_stream("gather");
    use_stream(s->device, s->stream);
    s->x = gpu_floats(64, "unit 3");
    for (int i = 0; i < 64; i++) {
        s->x[i] = (float)(rank + 1);
    }
}

static int
open_comm(setup *s, double timeout_s, const fsdpc_comm_nccl_options *more)
{
    fsdpc_comm_nccl_options options = more ? *more : (fsdpc_comm_nccl_options){0};
    options.name = "gather";
    options.timeout_s = timeout_s;
    options.poll_ms = 5;
    return fsdpc_comm_nccl(s->device, s->rank, s->world, id, &options, &s->comm);
}

static void
run_ranks_as(const char *what, int world, int option, rank_function function)
{
    REQUIRE_OK(fsdpc_comm_nccl_id(id));
    ranks_do_as(what, function, (ranks_run){.world = world, .option = option});
}

#define run_ranks_of(world, option, function) run_ranks_as(#function, world, option, function)

/* Frees the communicator, the stream and the memory, and checks that nothing is left behind. */
static void
close_comm(setup *s)
{
    fsdpc_comm_free(s->comm);
    CHECK_CU(cuStreamDestroy(s->stream), CUDA_SUCCESS);
    CHECK_CU(cuMemFree((CUdeviceptr)(uintptr_t)s->x), CUDA_SUCCESS);
    CHECK_INT(simgpu_leaks(NULL, 0), s->leaks);
    CHECK_INT(simnccl_count().communicators, 0);
    CHECK_INT(simnccl_count().registered, 0);
    CHECK_INT(simnccl_count().misuses, 0);
    CHECK_INT(fsdpc_mem_live(), s->live);
}

/* If a call has several parts, it makes one group of NCCL calls. The watching thread watches the group as one
 * collective. */
static void
parts(setup *s, int rank, int world, float sum)
{
    const fsdpc_comm_part gathers[] = {
        {s->x + 16, 1, FSDPC_F32}, {s->x + 20, 0, FSDPC_F32}, {s->x + 20, 4, FSDPC_BYTES}};
    const fsdpc_comm_part scatters[] = {{s->x + 24, 1, FSDPC_F32}, {s->x + 28, 1, FSDPC_F32}};
    const fsdpc_comm_part bytes[] = {{s->x + 24, 1, FSDPC_F32}, {s->x + 28, 1, FSDPC_BYTES}};
    int64_t joined = simnccl_count().joined;
    CHECK_INT(fsdpc_comm_all_gather_parts(s->comm, gathers, 3, "gather of unit 4"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter_parts(s->comm, scatters, 2, "reduce of unit 4"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_gather_parts(s->comm, gathers, 0, "nothing"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter_parts(s->comm, bytes, 2, "bytes"), FSDPC_E_INVAL);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s->comm), FSDPC_OK);
    CHECK_INT(simnccl_count().joined - joined, 2);
    for (int r = 0; r < world; r++) {
        CHECK(s->x[16 + r] == (float)(r + 1) && s->x[20 + r] == (float)(r + 1));
    }
    CHECK(s->x[24 + rank] == sum && s->x[28 + rank] == sum);
}

/* Each rank gets a message from each other rank. The messages are too long for one round of the simulated
 * NCCL. */
static void
messages(setup *s, int rank, int world)
{
    enum { N = 70001 };
    const int others = world - 1;
    float *sent = gpu_floats(2 * (size_t)N * (size_t)world, "messages"),
          *landed = sent + N * others;
    for (int i = 0; i < N * others; i++) {
        sent[i] = (float)(rank * 10 + i / N) + (float)(i % N) / N;
    }
    const size_t bytes = N * sizeof *sent;
    CHECK_INT(fsdpc_comm_all_to_all(s->comm, sent, landed, bytes, "reduce of unit 5"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_to_all(s->comm, sent, landed, 0, "nothing"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s->comm), FSDPC_OK);
    CHECK_INT(simnccl_count().all_to_alls, world > 1);
    for (int i = 0; i < N * others; i += 69) {
        const int from = i / N < rank ? i / N : i / N + 1, mine = rank < from ? rank : rank - 1;
        CHECK(landed[i] == (float)(from * 10 + mine) + (float)(i % N) / N);
    }
    CHECK_CU(cuMemFree((CUdeviceptr)(uintptr_t)sent), CUDA_SUCCESS);
}

/* --- what works -------------------------------------------------------------------------------------- */

static void
collectives(int rank, ranks_run *run)
{
    setup s;
    float sum = (float)(run->world * (run->world + 1) / 2);
    rank_begin(&s, rank, run);
    simnccl_get_options()->in_progress = run->option % 4;
    REQUIRE_OK(open_comm(&s, 30, NULL));
    CHECK_STR(fsdpc_comm_kind(s.comm), "nccl");
    int64_t syncs = simgpu_count().host_syncs;
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 3"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    for (int r = 0; r < run->world; r++) {
        CHECK(s.x[4 * r] == (float)(r + 1) || r == rank);
    }
    CHECK_INT(fsdpc_comm_all_reduce(s.comm, s.x + 32, 8, FSDPC_F32, FSDPC_SUM, "sum"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_reduce(s.comm, s.x + 40, 8, FSDPC_F32, FSDPC_MAX, "max"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_broadcast(s.comm, s.x + 48, 16, run->world - 1, "broadcast"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter(s.comm, s.x + 52, 3, FSDPC_F32, "reduce of unit 3"),
              FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    CHECK(s.x[32] == sum && s.x[39] == sum && s.x[31] != sum + 1);
    CHECK(s.x[40] == (float)run->world && s.x[47] == (float)run->world);
    CHECK(s.x[48] == (float)run->world && s.x[51] == (float)run->world);
    CHECK(s.x[52 + 3 * rank] == sum && s.x[54 + 3 * rank] == sum);
    parts(&s, rank, run->world, sum);
    CHECK_INT(simgpu_count().host_syncs, syncs);
    messages(&s, rank, run->world);
    CHECK_INT(fsdpc_comm_barrier(s.comm, "barrier"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_agree(s.comm, "unit 3: 64 floats", "units"), FSDPC_OK);
    CHECK_ERROR(fsdpc_comm_agree(s.comm, rank == 0 ? "a\nb" : "a\nc", "units"),
                run->world > 1 ? FSDPC_E_MISMATCH : FSDPC_OK, "");
    CHECK_INT(fsdpc_comm_check(s.comm), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather after a mismatch"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    CHECK_INT(simgpu_count().races, 0);
    CHECK_INT(simgpu_count().faults, 0);
    close_comm(&s);
}

/* If there are more collectives than the ring of watched collectives holds, the communicator uses the events
 * of earlier collectives again. */
static void
many(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    const int64_t events = simgpu_count().events_created;
    REQUIRE_OK(open_comm(&s, 30, NULL));
    s.x[0] = 1;
    for (int i = 0; i < 1200; i++) {
        CHECK_INT(fsdpc_comm_all_reduce(s.comm, s.x, 1, FSDPC_F32, FSDPC_MAX, "max"), FSDPC_OK);
    }
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    CHECK(simgpu_count().events_created <= events + 512);
    CHECK(s.x[0] == 1);
    close_comm(&s);
}

/* Agreements and barriers go over a channel of the host. This fake channel answers for rank 1. */
static int released, exchanged;

static int
exchange(void *context, void *buffer, size_t piece_bytes, const char *what)
{
    (void)context, (void)what;
    exchanged++;
    char *own = buffer;
    memcpy(own + piece_bytes, own, piece_bytes); /* rank 1 says what rank 0 says */
    return FSDPC_OK;
}

static void
release(void *context)
{
    released += *(int *)context;
}

static void
channel(int rank, ranks_run *run)
{
    setup s;
    int seven = 7;
    fsdpc_comm_nccl_options options = {.exchange = exchange, .context = &seven, .release = release};
    rank_begin(&s, rank, run);
    REQUIRE_OK(open_comm(&s, 30, &options));
    int64_t before = simnccl_count().all_gathers;
    if (rank == 0) {
        CHECK_INT(fsdpc_comm_agree(s.comm, "text", "units"), FSDPC_OK);
        CHECK_INT(fsdpc_comm_barrier(s.comm, "barrier"), FSDPC_OK);
        CHECK_INT(exchanged, 2);
    }
    CHECK_INT(simnccl_count().all_gathers, before);
    close_comm(&s);
    CHECK_INT(released, 7);
}

/* Returns the bfloat16 sum 256 + 1 + 1 + 1 on the last rank: 260 if it is summed in F32, 256 if each step is
 * rounded. */
static float
sum_for_last_rank(setup *s, uint16_t *at)
{
    for (int i = 0; i < 4; i++) {
        at[i] = fsdpc_f32_to_bf16(s->rank == 0 ? 256.0f : 1.0f);
    }
    CHECK_INT(fsdpc_comm_reduce_scatter(s->comm, at, 1, FSDPC_BF16, "reduce"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s->comm), FSDPC_OK);
    return fsdpc_bf16_to_f32(at[s->rank]);
}

/* Checks that bad registrations are refused. The registration of a window is collective: if it fails, the
 * communicator keeps the error. */
static void
bad_registrations(setup *s, void *slot, bool windows, bool registers)
{
    /* The first buffer is from cuMemAlloc; the second is not a whole number of granules. */
    const char *const text = "registering a buffer: NCCL returned \"invalid argument\"";
    CHECK_ERROR(fsdpc_comm_register(s->comm, s->x, 256), registers ? FSDPC_E_COMM : FSDPC_OK,
                registers ? text : "");
    CHECK_ERROR(fsdpc_comm_register(s->comm, (char *)slot + 8, 64),
                registers ? FSDPC_E_COMM : FSDPC_OK, registers ? text : "");
    if (!windows || !registers) {
        CHECK_INT(fsdpc_comm_check(s->comm), FSDPC_OK);
    }
}

/* Bits of the option. 1: windows are possible. 2: the communicator registers buffers. Higher bits: NCCL's
 * version (0: 2.28, 1: 2.30, 2: 2.27). If ranks share no memory, NCCL up to 2.28 still gives a window, but
 * that window only registers the buffer for this rank. */
static void
registration(int rank, ranks_run *run)
{
    setup s;
    static const int versions[] = {22809, 23007, 22705};
    bool shared = run->option & 1, registers = run->option & 2;
    int version = versions[run->option >> 2];
    bool windows = registers && (shared || version < 22900);
    rank_begin(&s, rank, run);
    simnccl_get_options()->symmetric = shared;
    simnccl_get_options()->version = version;
    simnccl_get_options()->in_progress = rank;
    fsdpc_comm_nccl_options options = {.name = "gather", .timeout_s = 30, .registers = registers};
    REQUIRE_OK(fsdpc_comm_nccl(s.device, rank, run->world, id, &options, &s.comm));
    CHECK_INT(fsdpc_comm_is_symmetric(s.comm), shared && registers && version >= 22800);
    /* The buffer that the communicator registered to try registration is not registered any more. */
    CHECK_INT(simnccl_count().registered, 0);

    CUdeviceptr range = gpu_range("slot");
    CUmemGenericAllocationHandle memory = gpu_memory();
    gpu_map(range, memory);
    void *slot = (void *)(uintptr_t)range;
    CHECK_INT(fsdpc_comm_register(s.comm, slot, GRANULE), FSDPC_OK);
    CHECK_INT(simnccl_count().registered, registers ? 1 : 0);
    float sum = sum_for_last_rank(&s, slot);
    if (rank == run->world - 1) {
        CHECK_INT((int)sum, shared && registers ? 260 : 256);
    }
    CHECK_INT(simnccl_count().direct, registers ? 1 : 0);
    CHECK_INT(simnccl_count().windowed, shared && registers ? 1 : 0);
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 4, "elsewhere"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    CHECK_INT(simnccl_count().direct, registers ? 1 : 0);

    fsdpc_comm_unregister(s.comm, slot);
    CHECK_INT(simnccl_count().registered, 0);
    CHECK_INT(fsdpc_comm_register(s.comm, slot, GRANULE), FSDPC_OK);
    bad_registrations(&s, slot, windows, registers);
    fsdpc_comm_free(s.comm);
    CHECK_INT(simnccl_count().registered, 0);
    CHECK_INT(simnccl_count().misuses, 0);
}

/* A channel of the host, by which two ranks exchange four bytes each over memory that they share. */
static int channel_rank;

static int
spread(void *context, void *buffer, size_t piece_bytes, const char *what)
{
    ranks_run *run = context;
    uint32_t *words = buffer;
    (void)what;
    REQUIRE(piece_bytes == sizeof *words);
    const int own = channel_rank;
    run->flags[own] = words[own];
    run->flags[2 + own] = 1;
    while (!run->flags[3 - own]) {
        rank_sleep_ms(1);
    }
    words[1 - own] = run->flags[1 - own];
    return FSDPC_OK;
}

/* Registers more slots than a small table of fixed size could list. A model whose units stay gathered has
 * many slots. */
static void
many_registrations(int rank, ranks_run *run)
{
    enum { MANY = 100 };
    setup s;
    void *slots[MANY];
    rank_begin(&s, rank, run);
    fsdpc_comm_nccl_options options = {.timeout_s = 30, .registers = true};
    REQUIRE_OK(fsdpc_comm_nccl(s.device, rank, run->world, id, &options, &s.comm));
    for (int i = 0; i < MANY; i++) {
        CUdeviceptr range = gpu_range("slot");
        gpu_map(range, gpu_memory());
        slots[i] = (void *)(uintptr_t)range;
        CHECK_INT(fsdpc_comm_register(s.comm, slots[i], GRANULE), FSDPC_OK);
    }
    CHECK_INT(simnccl_count().registered, MANY);
    for (int i = 0; i < MANY; i += 2) {
        fsdpc_comm_unregister(s.comm, slots[i]);
    }
    CHECK_INT(simnccl_count().registered, MANY / 2);
    fsdpc_comm_free(s.comm);
    CHECK_INT(simnccl_count().registered, 0);
    CHECK_INT(simnccl_count().misuses, 0);
}

/* If a window fails on rank 1, NCCL cannot be used any more. All ranks learn this, and can start again
 * without registration. */
static void
a_trial_spoils_nccl(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    fsdpc_comm_nccl_options options = {.timeout_s = 30, .registers = true, .poll_ms = 1};
    channel_rank = rank;
    options.exchange = spread;
    options.context = run;
    simnccl_get_options()->window_error = rank == 1 ? FSDPC_NCCL_UNHANDLED_CUDA_ERROR : 0;
    CHECK_ERROR(fsdpc_comm_nccl(s.device, rank, run->world, id, &options, &s.comm),
                FSDPC_E_UNAVAILABLE, "NCCL failed when memory was registered");
    CHECK(s.comm == NULL);
    CHECK_INT(simnccl_count().communicators, 0);
    CHECK_INT(simnccl_count().misuses, 0);
}

/* NCCL neither ends nor aborts a communicator while a CUDA graph that contains its collectives exists. With
 * option 2, the graph is freed before the communicator. */
static void
a_graph_is_left(int rank, ranks_run *run)
{
    setup s;
    CUgraph graph;
    rank_begin(&s, rank, run);
    simnccl_get_options()->graphs_live = true;
    REQUIRE_OK(open_comm(&s, 30, NULL));
    REQUIRE_CU(cuStreamBeginCapture(s.stream, 0));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 0"), FSDPC_OK);
    REQUIRE_CU(cuStreamEndCapture(s.stream, &graph));
    if (run->option == 2) {
        simnccl_drop_graphs();
    }
    fsdpc_comm_free(s.comm);
    CHECK_INT(simnccl_count().aborts, 0);
    CHECK_INT(simnccl_count().communicators, run->option == 2 ? 0 : 1);
    CHECK_INT(simnccl_count().misuses, 0);
}

/* A forked child has neither the watching thread nor NCCL's threads: it must not wait for them or for a
 * lock. */
static void
a_child_frees_its_parents(int rank, ranks_run *run)
{
    setup s;
    int status;
    rank_begin(&s, rank, run);
    REQUIRE_OK(open_comm(&s, 30, NULL));
    const pid_t child = fork();
    if (child == 0) {
        /* The alarm kills the child if a call waits: no thread of the child would end the wait. */
        alarm(5);
        fsdpc_comm_unregister(s.comm, s.x);
        fsdpc_comm_close(s.comm);
        fsdpc_comm_free(s.comm);
        _exit(0);
    }
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 0"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    close_comm(&s);
}

static void
description(int rank, ranks_run *run)
{
    char text[256];
    (void)rank, (void)run;
    CHECK_INT(fsdpc_comm_nccl_describe(text, sizeof text), FSDPC_OK);
    CHECK(strncmp(text, "NCCL 2.28.3 (/", 14) == 0 && strstr(text, "libnccl.so.2)"));
}

/* --- what fails -------------------------------------------------------------------------------------- */

static void
await_failure(const setup *s)
{
    while (fsdpc_comm_check(s->comm) == FSDPC_OK) {
        rank_sleep_ms(1);
    }
}

/* Checks that each call after an abort reports the reason, and that the stream's work ends, so that the
 * process can end. */
static void
check_over(setup *s, int status, const char *part)
{
    CHECK_ERROR(fsdpc_comm_check(s->comm), status, part);
    CHECK_ERROR(fsdpc_comm_all_gather(s->comm, s->x, 16, "a later gather"), status, part);
    CHECK_ERROR(fsdpc_nccl_await((nccl_comm *)s->comm), status, part);
    while (cuStreamQuery(s->stream) == CUDA_ERROR_NOT_READY) {
        rank_sleep_ms(1);
    }
}

static void
a_rank_stops(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    if (rank == 1) {
        REQUIRE(simnccl_plant(SIMNCCL_STOP, -1, 3, 0));
    }
    REQUIRE_OK(open_comm(&s, 0.3, NULL));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 0"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 1"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter(s.comm, s.x, 4, FSDPC_F32, "reduce of unit layers.3"),
              FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 4"), FSDPC_OK);
    await_failure(&s);
    char expected[160];
    snprintf(
        expected, sizeof expected,
        "rank %d waited 0.3 s in reduce of unit layers.3 (collective 2 of communicator gather, "
        "%d bytes) for the other ranks",
        rank, 16 * run->world);
    check_over(&s, FSDPC_E_TIMEOUT, expected);
    close_comm(&s);
}

static void
nccl_reports_an_error(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    if (rank == 0) {
        REQUIRE(simnccl_plant(SIMNCCL_ASYNC_ERROR, -1, 2, FSDPC_NCCL_REMOTE_ERROR));
    }
    REQUIRE_OK(open_comm(&s, rank == 0 ? 30 : 1, NULL));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 0"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    /* One of these calls or the watching thread reports the error, whichever looks first. */
    (void)fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 1");
    (void)fsdpc_nccl_await((nccl_comm *)s.comm);
    if (rank == 0) {
        check_over(&s, FSDPC_E_COMM, "gather of unit 1");
        CHECK_ERROR(fsdpc_comm_check(s.comm), FSDPC_E_COMM, "remote process exited");
    } else {
        check_over(&s, FSDPC_E_TIMEOUT, "gather of unit 1");
    }
    close_comm(&s);
}

static void
ranks_call_different_things(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    REQUIRE_OK(open_comm(&s, 30, NULL));
    if (rank == 0) {
        (void)fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 5");
    } else {
        (void)fsdpc_comm_all_reduce(s.comm, s.x, 16, FSDPC_F32, FSDPC_SUM, "norm");
    }
    await_failure(&s);
    check_over(&s, FSDPC_E_COMM, rank == 0 ? "gather of unit 5" : "norm");
    close_comm(&s);
}

static void
a_call_is_refused(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    REQUIRE(simnccl_plant(SIMNCCL_REFUSE, -1, 2, FSDPC_NCCL_SYSTEM_ERROR));
    REQUIRE_OK(open_comm(&s, 30, NULL));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 0"), FSDPC_OK);
    CHECK_ERROR(
        fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 1"), FSDPC_E_COMM,
        "gather of unit 1: NCCL returned \"unhandled system error\" (2): a planted refusal");
    check_over(&s, FSDPC_E_COMM, "gather of unit 1");
    close_comm(&s);
}

static void
not_all_ranks_start(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    if (rank == 1) {
        REQUIRE(simnccl_plant(SIMNCCL_INIT_STALL, -1, 1, 0));
    }
    CHECK_ERROR(open_comm(&s, 0.2, NULL), FSDPC_E_TIMEOUT,
                "waited 0.2 s in starting communicator gather (communicator gather) for the other "
                "ranks (FSDPC_TIMEOUT sets this limit)");
    CHECK(s.comm == NULL);
    close_comm(&s);
}

static void
late_ranks_are_awaited(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    if (rank == 1) {
        REQUIRE(simnccl_plant(SIMNCCL_SLOW, -1, 1, 300));
    }
    REQUIRE_OK(open_comm(&s, 30, NULL));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather"), FSDPC_OK);
    CHECK_INT(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_OK);
    CHECK(s.x[4 * (1 - rank)] == (float)(2 - rank));
    close_comm(&s);
}

static int
ctrl_c(void)
{
    return 1;
}

/* Ctrl-C ends the start of a communicator, and a wait for a collective in flight. */
static void
the_user_interrupts(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    fsdpc_shm_interrupt_check = ctrl_c;
    REQUIRE(simnccl_plant(SIMNCCL_INIT_STALL, -1, 1, 0));
    CHECK_ERROR(open_comm(&s, 30, NULL), FSDPC_E_INTERRUPT,
                "starting communicator gather: interrupted");
    fsdpc_shm_interrupt_check = NULL;
    REQUIRE(simnccl_plant(SIMNCCL_STOP, -1, 1, 0));
    REQUIRE_OK(open_comm(&s, 30, NULL));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather"), FSDPC_OK);
    fsdpc_shm_interrupt_check = ctrl_c;
    CHECK_ERROR(fsdpc_nccl_await((nccl_comm *)s.comm), FSDPC_E_INTERRUPT,
                "interrupted while waiting");
    check_over(&s, FSDPC_E_COMM, "gave up: interrupted");
    close_comm(&s);
    fsdpc_shm_interrupt_check = NULL;
}

/* Ctrl-C ends a call that NCCL does not finish; later calls report that this call was interrupted. */
static void
a_call_is_interrupted(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    REQUIRE_OK(open_comm(&s, 30, NULL));
    simnccl_get_options()->in_progress = 1 << 30;
    fsdpc_shm_interrupt_check = ctrl_c;
    CHECK_ERROR(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather of unit 1"), FSDPC_E_INTERRUPT,
                "gather of unit 1: interrupted");
    CHECK_ERROR(fsdpc_comm_all_gather(s.comm, s.x, 16, "later"), FSDPC_E_COMM,
                "gather of unit 1: interrupted");
    fsdpc_shm_interrupt_check = NULL;
    fsdpc_comm_free(s.comm);
}

/* Neither an abort nor freeing the communicator waits for an NCCL call that blocks. */
static void
aborts_that_block(int rank, ranks_run *run)
{
    setup s;
    rank_begin(&s, rank, run);
    REQUIRE(simnccl_plant(SIMNCCL_STOP, -1, 1, 0));
    REQUIRE(simnccl_plant(SIMNCCL_ABORT_BLOCKS, -1, 1, 4000));
    REQUIRE_OK(open_comm(&s, 30, NULL));
    CHECK_INT(fsdpc_comm_all_gather(s.comm, s.x, 16, "gather"), FSDPC_OK);
    fsdpc_comm_abort(s.comm, "the loss is NaN");
    check_over(&s, FSDPC_E_COMM, "gave up: the loss is NaN");
    CHECK_INT(simnccl_count().aborts_ended, 0);
    fsdpc_comm_free(s.comm);
    CHECK_INT(simnccl_count().aborts_ended, 0);
    simnccl_get_options()->aborts_end = true;
    while (simnccl_count().aborts_ended == 0 || fsdpc_mem_live() > s.live) {
        rank_sleep_ms(10); /* the watching thread frees what fsdpc_comm_free left to it */
    }
    s.comm = NULL;
    close_comm(&s);
}

/* --- alone ------------------------------------------------------------------------------------------------ */

static int
start_and_gather(void *argument)
{
    setup *s = argument;
    REQUIRE_OK(fsdpc_comm_nccl_id(id));
    FSDPC_TRY(open_comm(s, 30, NULL));
    int status = fsdpc_comm_all_gather(s->comm, s->x, 16, "gather");
    FSDPC_KEEP(fsdpc_comm_agree(s->comm, "text", "units"));
    fsdpc_comm_free(s->comm);
    return status;
}

static void
failures_of_the_driver(void)
{
    static const char *const entries[] = {"cuCtxGetCurrent",  "cuEventCreate",  "cuEventRecord",
                                          "cuMemAlloc",       "cuMemHostAlloc", "cuMemcpyHtoDAsync",
                                          "cuMemcpyDtoHAsync"};
    ranks_run one = {.world = 1};
    setup s;
    rank_begin(&s, 0, &one);
    test_alloc_sweep(start_and_gather, &s);
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        REQUIRE(simgpu_fail(entries[i], 1, CUDA_ERROR_OUT_OF_MEMORY));
        CHECK_ERROR(start_and_gather(&s), FSDPC_E_DEVMEM, "CUDA_ERROR_OUT_OF_MEMORY");
        CHECK_INT(fsdpc_mem_live(), s.live);
        CHECK_INT(simnccl_count().communicators, 0);
    }
    CHECK_INT(start_and_gather(&s), FSDPC_OK);
    s.comm = NULL;
    close_comm(&s);
}

static void
arguments(void)
{
    ranks_run one = {.world = 1};
    setup s;
    rank_begin(&s, 0, &one);
    REQUIRE_OK(fsdpc_comm_nccl_id(id));
    CHECK_ERROR(open_comm(&s, 0, NULL), FSDPC_E_INVAL, "timeout_s is 0");
    s.world = 0;
    CHECK_ERROR(open_comm(&s, 1, NULL), FSDPC_E_INVAL, "rank 0 is not one of a group of 0");
    s.world = 1;
    REQUIRE_CU(cuCtxSetCurrent(NULL));
    REQUIRE_OK(fsdpc_device_cpu(&s.device)); /* a CUDA device would make its context current */
    CHECK_ERROR(open_comm(&s, 1, NULL), FSDPC_E_STATE, "no CUDA context");
    REQUIRE_OK(fsdpc_comm_self(s.device, &s.comm));
    CHECK_ERROR(fsdpc_comm_all_to_all(s.comm, s.x, s.x, 4, "messages"), FSDPC_E_UNAVAILABLE,
                "messages: communicator self has no all-to-all");
    fsdpc_comm_free(s.comm);
}

int
main(void)
{
    if (!getenv("FSDPC_LIBNCCL")) {
        test_skip("FSDPC_LIBNCCL does not name the simulated library: run make simgpu");
    }
    simgpu_get_options()->quiet = true;
    for (int world = 1; world <= 4; world++) {
        run_ranks_of(world, world - 1, collectives);
    }
    run_ranks_of(2, 1, many);
    run_ranks_of(2, 1, channel);
    run_ranks_of(1, 1, description);
    for (int bits = 0; bits < 12; bits++) {
        run_ranks_of(4, bits, registration);
    }
    run_ranks_of(2, 1, many_registrations);
    run_ranks_of(2, 1, a_trial_spoils_nccl);
    run_ranks_of(2, 1, a_graph_is_left);
    run_ranks_of(2, 2, a_graph_is_left);
    run_ranks_of(2, 1, a_child_frees_its_parents);
    run_ranks_of(2, 1, a_rank_stops);
    run_ranks_of(3, 2, a_rank_stops);
    run_ranks_of(2, 1, nccl_reports_an_error);
    run_ranks_of(2, 1, ranks_call_different_things);
    run_ranks_of(2, 1, a_call_is_refused);
    run_ranks_of(2, 1, not_all_ranks_start);
    run_ranks_of(2, 1, late_ranks_are_awaited);
    run_ranks_of(1, 1, the_user_interrupts);
    run_ranks_of(1, 1, a_call_is_interrupted);
    run_ranks_of(1, 1, aborts_that_block);
    failures_of_the_driver();
    arguments();
    return test_result();
}
