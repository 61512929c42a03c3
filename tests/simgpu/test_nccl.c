/* Tests of the simulated NCCL between processes and between threads: values, order, mismatches, misuse. */
#include <dlfcn.h>

#include "gpu.h"
#include "comm/nccl_api.h"
#include "items.h"
#include "ranks.h"
#include "nccl/simnccl.h"

static const fsdpc_nccl *nccl;
static fsdpc_nccl_id unique_ids[2]; /* ids for two communicators, made before the ranks start */

#define CHECK_NCCL(call, expected)                                      \
    do {                                                                \
        fsdpc_nccl_result got_ = (call), wanted_ = (expected);          \
        atomic_fetch_add(&test_checks, 1);                              \
        if (got_ != wanted_) {                                          \
            TEST_FAIL("%s gave %d, expected %d", #call, got_, wanted_); \
        }                                                               \
    } while (0)

/* Ranks that are threads share one device. A rank that is a process has a device of its own. */
static void
rank_begin(int rank, const ranks_run *run)
{
    char name[16];
    snprintf(name, sizeof name, "rank %d", rank);
    if (run->threads) {
        CUcontext context;
        REQUIRE_CU(cuDevicePrimaryCtxRetain(&context, 0));
        REQUIRE_CU(cuCtxSetCurrent(context));
        simgpu_thread_is_rank(name);
    } else {
        gpu_start();
        simnccl_reset();
        simgpu_policy_random((uint64_t)(run->option * 10 + rank));
    }
}

static fsdpc_nccl_comm
blocking_comm(int rank, int world, fsdpc_nccl_id id)
{
    fsdpc_nccl_comm comm;
    fsdpc_nccl_config config = fsdpc_nccl_config_new();
    config.blocking = 1;
    CHECK_NCCL(nccl->init_rank(&comm, world, id, rank, &config), FSDPC_NCCL_SUCCESS);
    return comm;
}

static fsdpc_cu_stream
cu(CUstream stream)
{
    fsdpc_cu_stream same;
    memcpy(&same, &stream, sizeof same);
    return same;
}

static void
run_ranks_as(const char *what, int world, bool threads, int option, rank_function function)
{
    gpu_start();
    if (threads) {
        simgpu_policy_random((uint64_t)option);
    }
    CHECK_NCCL(nccl->get_unique_id(&unique_ids[0]), FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->get_unique_id(&unique_ids[1]), FSDPC_NCCL_SUCCESS);
    ranks_do_as(what, function, (ranks_run){.world = world, .threads = threads, .option = option});
    CHECK_INT(simnccl_count().communicators, 0);
}

#define run_ranks_of(world, threads, option, function) \
    run_ranks_as(#function, world, threads, option, function)

/* --- values -------------------------------------------------------------------------------------------- */

static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_F64, FSDPC_F16, FSDPC_BF16};

/* Returns the value that rank r has at index i. */
static double
input(int r, int64_t i)
{
    return (double)((i * 7 + r * 13) % 101 - 50) / 8 + r;
}

/* Returns the expected result: the values of the ranks are added in the ring's order, and the sum is rounded
 * to the type after each step. */
static double
ring(fsdpc_dtype type, int world, int destination, int64_t i, fsdpc_nccl_op op)
{
    char sum[8];
    for (int step = 1; step <= world; step++) {
        char own[8];
        int r = (destination + step) % world;
        item_put(own, type, 0, input(r, i));
        double a = item_get(sum, type, 0), b = item_get(own, type, 0);
        double next = op == FSDPC_NCCL_SUM   ? a + b
                      : op == FSDPC_NCCL_MAX ? (a > b ? a : b)
                                             : (a < b ? a : b);
        item_put(sum, type, 0, step == 1 ? b : next);
    }
    return item_get(sum, type, 0);
}

typedef struct values_case {
    fsdpc_nccl_comm comm;
    CUstream stream;
    fsdpc_dtype type;
    int rank, world;
    int64_t count;
    char *buffer;
} values_case;

static void
fill(const values_case *c, int64_t from, int64_t count)
{
    for (int64_t i = from; i < from + count; i++) {
        item_put(c->buffer, c->type, i, input(c->rank, i));
    }
}

static void
await_stream(CUstream stream)
{
    while (cuStreamQuery(stream) == CUDA_ERROR_NOT_READY) {
        rank_sleep_ms(0);
    }
}

static void
check_all_gather(const values_case *c)
{
    size_t piece = (size_t)c->count * fsdpc_dtype_bytes(c->type);
    fill(c, c->rank * c->count, c->count);
    CHECK_NCCL(nccl->all_gather(c->buffer + (size_t)c->rank * piece, c->buffer, (size_t)c->count,
                                fsdpc_nccl_type_of(c->type), c->comm, cu(c->stream)),
               FSDPC_NCCL_SUCCESS);
    await_stream(c->stream);
    int64_t wrong = 0;
    for (int64_t i = 0; i < c->count * c->world; i++) {
        char expected[8];
        item_put(expected, c->type, 0, input((int)(i / c->count), i));
        wrong += item_get(c->buffer, c->type, i) != item_get(expected, c->type, 0);
    }
    CHECK_INT(wrong, 0);
}

static void
check_reduce_scatter(const values_case *c)
{
    size_t piece = (size_t)c->count * fsdpc_dtype_bytes(c->type);
    fill(c, 0, c->count * c->world);
    CHECK_NCCL(nccl->reduce_scatter(c->buffer, c->buffer + (size_t)c->rank * piece,
                                    (size_t)c->count, fsdpc_nccl_type_of(c->type), FSDPC_NCCL_SUM,
                                    c->comm, cu(c->stream)),
               FSDPC_NCCL_SUCCESS);
    await_stream(c->stream);
    int64_t wrong = 0;
    for (int64_t i = c->rank * c->count; i < (c->rank + 1) * c->count; i++) {
        wrong +=
            item_get(c->buffer, c->type, i) != ring(c->type, c->world, c->rank, i, FSDPC_NCCL_SUM);
    }
    CHECK_INT(wrong, 0);
}

static void
check_all_reduce(const values_case *c, fsdpc_nccl_op op)
{
    fill(c, 0, c->count);
    CHECK_NCCL(nccl->all_reduce(c->buffer, c->buffer, (size_t)c->count, fsdpc_nccl_type_of(c->type),
                                op, c->comm, cu(c->stream)),
               FSDPC_NCCL_SUCCESS);
    await_stream(c->stream);
    int64_t wrong = 0;
    for (int64_t i = 0; i < c->count; i++) {
        wrong += item_get(c->buffer, c->type, i) != ring(c->type, c->world, 0, i, op);
    }
    CHECK_INT(wrong, 0);
}

static void
check_broadcast(const values_case *c)
{
    fill(c, 0, c->count);
    CHECK_NCCL(nccl->broadcast(c->buffer, c->buffer, (size_t)c->count, fsdpc_nccl_type_of(c->type),
                               c->world - 1, c->comm, cu(c->stream)),
               FSDPC_NCCL_SUCCESS);
    await_stream(c->stream);
    char expected[8];
    item_put(expected, c->type, 0, input(c->world - 1, c->count - 1));
    CHECK(item_get(c->buffer, c->type, c->count - 1) == item_get(expected, c->type, 0));
}

static void
every_collective(int rank, ranks_run *run)
{
    static const int64_t counts[] = {1, 37, 70000};
    rank_begin(rank, run);
    values_case c = {.rank = rank, .world = run->world};
    c.comm = blocking_comm(rank, run->world, unique_ids[0]);
    c.stream = gpu_stream("collectives");
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            CUdeviceptr block;
            c.type = types[t];
            c.count = counts[n];
            REQUIRE_CU(cuMemAlloc(&block, (size_t)c.count * (size_t)c.world * 8));
            c.buffer = (char *)(uintptr_t)block;
            check_all_gather(&c);
            check_reduce_scatter(&c);
            check_all_reduce(&c, FSDPC_NCCL_SUM);
            check_all_reduce(&c, FSDPC_NCCL_MAX);
            check_all_reduce(&c, FSDPC_NCCL_MIN);
            check_broadcast(&c);
            if (!run->threads) { /* with threads, freeing would wait for other ranks' streams */
                REQUIRE_CU(cuMemFree(block));
            }
        }
    }
    CHECK_INT(simgpu_count().races, 0);
    CHECK_NCCL(nccl->destroy(c.comm), FSDPC_NCCL_SUCCESS);
}

/* --- order --------------------------------------------------------------------------------------------- */

/* Two communicators work on two streams. Rank 0 waits for no stream until the other ranks have finished, so
 * the device of rank 0 must make progress although nothing polls it. */
static void
two_communicators(int rank, ranks_run *run)
{
    rank_begin(rank, run);
    simgpu_policy_lazy();
    fsdpc_nccl_comm gather = blocking_comm(rank, run->world, unique_ids[0]);
    fsdpc_nccl_comm reduce = blocking_comm(rank, run->world, unique_ids[1]);
    CUstream a = gpu_stream("gather"), b = gpu_stream("reduce");
    float *x = gpu_floats((size_t)run->world, "x"), *y = gpu_floats(1, "y");
    for (int i = 0; i < 5; i++) {
        CHECK_CU(gpu_axpb(a, x + rank, NULL, 1, 0, (float)(10 * i + rank)), CUDA_SUCCESS);
        CHECK_NCCL(nccl->all_gather(x + rank, x, 1, FSDPC_NCCL_FLOAT32, gather, cu(a)),
                   FSDPC_NCCL_SUCCESS);
        CHECK_CU(gpu_axpb(b, y, NULL, 1, 0, (float)(rank + 1)), CUDA_SUCCESS);
        CHECK_NCCL(nccl->all_reduce(y, y, 1, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, reduce, cu(b)),
                   FSDPC_NCCL_SUCCESS);
    }
    if (rank == 0) { /* the other ranks finish although this rank waits for no stream */
        for (int r = 1; r < run->world; r++) {
            REQUIRE(rank_await(&run->flags[r], 1));
        }
    }
    await_stream(rank % 2 ? a : b);
    await_stream(rank % 2 ? b : a);
    for (int r = 0; r < run->world; r++) {
        CHECK(x[r] == (float)(40 + r));
    }
    CHECK(y[0] == (float)(run->world * (run->world + 1) / 2));
    atomic_store(&run->flags[rank], 1);
    CHECK_INT(simgpu_count().races, 0);
    CHECK_NCCL(nccl->destroy(gather), FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->destroy(reduce), FSDPC_NCCL_SUCCESS);
}

static void
groups_and_splits(int rank, ranks_run *run)
{
    rank_begin(rank, run);
    fsdpc_nccl_comm world = blocking_comm(rank, run->world, unique_ids[0]), half;
    CUstream stream = gpu_stream("collectives");
    float *x = gpu_floats(2, "x");
    CHECK_NCCL(nccl->split(world, rank % 2, -rank, &half, NULL), FSDPC_NCCL_SUCCESS);
    CHECK_CU(gpu_axpb(stream, x, NULL, 2, 0, (float)(1 << rank)), CUDA_SUCCESS);
    CHECK_NCCL(nccl->group_start(), FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->all_reduce(x, x, 1, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, half, cu(stream)),
               FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->broadcast(x + 1, x + 1, 1, FSDPC_NCCL_FLOAT32, 0, half, cu(stream)),
               FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->group_end(), FSDPC_NCCL_SUCCESS);
    await_stream(stream);
    float sum = 0, first = 0;
    for (int r = rank % 2; r < run->world; r += 2) {
        sum += (float)(1 << r);
        first = (float)(1 << r); /* the greatest rank has the least key, so it is the root */
    }
    CHECK(x[0] == sum && x[1] == first);
    CHECK_NCCL(nccl->destroy(half), FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->split(world, rank ? FSDPC_NCCL_NO_COLOR : 0, 0, &half, NULL),
               FSDPC_NCCL_SUCCESS);
    CHECK((half == NULL) == (rank != 0));
    if (half) {
        CHECK_NCCL(nccl->destroy(half), FSDPC_NCCL_SUCCESS);
    }
    CHECK_NCCL(nccl->destroy(world), FSDPC_NCCL_SUCCESS);
}

/* --- faults ---------------------------------------------------------------------------------------------- */

static fsdpc_nccl_result
error_of(fsdpc_nccl_comm comm)
{
    fsdpc_nccl_result error = -1;
    CHECK_NCCL(nccl->async_error(comm, &error), FSDPC_NCCL_SUCCESS);
    return error;
}

static void
mismatch(int rank, ranks_run *run)
{
    rank_begin(rank, run);
    fsdpc_nccl_comm comm = blocking_comm(rank, run->world, unique_ids[0]);
    CUstream stream = gpu_stream("collectives");
    float *x = gpu_floats(8, "x");
    if (rank == 1) {
        CHECK_NCCL(nccl->all_reduce(x, x, 2, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, comm, cu(stream)),
                   FSDPC_NCCL_SUCCESS);
    } else {
        CHECK_NCCL(nccl->all_gather(x + rank, x, 1, FSDPC_NCCL_FLOAT32, comm, cu(stream)),
                   FSDPC_NCCL_SUCCESS);
    }
    while (error_of(comm) == FSDPC_NCCL_SUCCESS) {
        CHECK_CU(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
        rank_sleep_ms(1);
    }
    CHECK_NCCL(error_of(comm), FSDPC_NCCL_INTERNAL_ERROR);
    if (run->threads) {
        CHECK(gpu_reported("rank 1 asks for all-reduce of 2 items") ||
              gpu_reported("rank 1 for all-reduce of 2 items"));
    } else {
        CHECK(gpu_reported("rank 0") && gpu_reported("rank 1") && gpu_reported("all-gather of 1"));
    }
    CHECK_CU(cuStreamQuery(stream), CUDA_ERROR_NOT_READY); /* as with NCCL, the collective hangs */
    CHECK_NCCL(nccl->abort(comm), FSDPC_NCCL_SUCCESS);
    await_stream(stream);
    CHECK_NCCL(nccl->abort(comm), FSDPC_NCCL_INVALID_ARGUMENT);
}

static void
not_blocking(int rank, ranks_run *run)
{
    rank_begin(rank, run);
    simnccl_get_options()->in_progress = 3;
    fsdpc_nccl_comm comm;
    fsdpc_nccl_config config = fsdpc_nccl_config_new();
    CUstream stream = gpu_stream("collectives");
    float *x = gpu_floats(2, "x");
    CHECK_NCCL(nccl->init_rank(&comm, run->world, unique_ids[0], rank, &config),
               FSDPC_NCCL_IN_PROGRESS);
    CHECK_NCCL(nccl->all_reduce(x, x, 1, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, comm, cu(stream)),
               FSDPC_NCCL_INVALID_USAGE);
    while (error_of(comm) == FSDPC_NCCL_IN_PROGRESS) {
        rank_sleep_ms(1);
    }
    simgpu_stream_access(stream, x, 8, true, "fill");
    x[0] = x[1] = 1;
    CHECK_NCCL(nccl->all_reduce(x, x, 1, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, comm, cu(stream)),
               FSDPC_NCCL_IN_PROGRESS);
    CHECK_NCCL(nccl->all_reduce(x, x, 1, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, comm, cu(stream)),
               FSDPC_NCCL_INVALID_USAGE); /* the previous call is still in progress */
    CHECK_INT(error_of(comm), FSDPC_NCCL_IN_PROGRESS);
    CHECK_INT(error_of(comm), FSDPC_NCCL_IN_PROGRESS);
    CHECK_INT(simnccl_count().all_reduces, 0); /* the call is not on the stream yet */
    CHECK_INT(error_of(comm), FSDPC_NCCL_SUCCESS);
    CHECK_INT(simnccl_count().all_reduces, 1);
    await_stream(stream);
    CHECK(x[0] == (float)run->world);
    CHECK_NCCL(nccl->all_reduce(x, x + 1, 0, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, comm, cu(stream)),
               FSDPC_NCCL_SUCCESS); /* nothing to do */
    CHECK_NCCL(
        nccl->all_reduce(x, (char *)x + 2, 1, FSDPC_NCCL_FLOAT32, FSDPC_NCCL_SUM, comm, cu(stream)),
        FSDPC_NCCL_INVALID_USAGE); /* the two buffers overlap */
    CHECK_NCCL(nccl->destroy(comm), FSDPC_NCCL_SUCCESS);
}

/* A collective is work on a stream like any other: a reader of its result must wait for it. */
static void
results_need_a_wait(int rank, ranks_run *run)
{
    rank_begin(rank, run);
    fsdpc_nccl_comm comm = blocking_comm(rank, run->world, unique_ids[0]);
    CUstream stream = gpu_stream("gather");
    CUevent event = gpu_event();
    float *x = gpu_floats((size_t)run->world, "unit 1");
    CHECK_NCCL(nccl->all_gather(x + rank, x, 1, FSDPC_NCCL_FLOAT32, comm, cu(stream)),
               FSDPC_NCCL_SUCCESS);
    CHECK_CU(cuEventRecord(event, stream), CUDA_SUCCESS);
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0), CUDA_SUCCESS);
    simgpu_host_read(x, sizeof(float) * (size_t)run->world, "matmul");
    CHECK_INT(simgpu_count().races, 0);
    CHECK_NCCL(nccl->all_gather(x + rank, x, 1, FSDPC_NCCL_FLOAT32, comm, cu(stream)),
               FSDPC_NCCL_SUCCESS); /* the compute stream may still read x */
    await_stream(stream);
    CHECK(gpu_reported("unit 1") && gpu_reported("read by compute (matmul), written by gather "
                                                 "(all-gather), nothing orders them"));
    CHECK_NCCL(nccl->destroy(comm), FSDPC_NCCL_SUCCESS);
}

/* --- alone ---------------------------------------------------------------------------------------------- */

static void
buffers_are_registered(void)
{
    gpu_start();
    fsdpc_nccl_id id;
    void *handle;
    CHECK_NCCL(nccl->get_unique_id(&id), FSDPC_NCCL_SUCCESS);
    fsdpc_nccl_comm comm = blocking_comm(0, 1, id);
    CUdeviceptr range = gpu_range("slot");
    gpu_map(range, gpu_memory());
    char *slot = (char *)(uintptr_t)range;
    CHECK_NCCL(nccl->register_buffer(comm, slot, GRANULE, &handle), FSDPC_NCCL_SUCCESS);
    CHECK_INT(simnccl_count().registered, 1);
    CHECK_NCCL(nccl->deregister_buffer(comm, handle), FSDPC_NCCL_SUCCESS);
    CHECK_NCCL(nccl->register_buffer(comm, slot + 8, 64, &handle), FSDPC_NCCL_INVALID_ARGUMENT);
    CHECK_NCCL(nccl->register_buffer(comm, slot, 2 * GRANULE, &handle),
               FSDPC_NCCL_INVALID_ARGUMENT);
    CHECK_INT(simnccl_count().registered, 0);
    CHECK_NCCL(nccl->destroy(comm), FSDPC_NCCL_SUCCESS);
}

static void
old_libraries_lack_symbols(void)
{
    char path[512];
    snprintf(path, sizeof path, "%s", getenv("FSDPC_LIBNCCL"));
    char *name = strstr(path, "libnccl.so.2");
    REQUIRE(name != NULL);
    strcpy(name, "libnccl-old.so.2");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != NULL);
    CHECK(dlsym(library, "ncclCommRegister") == NULL);
    CHECK(dlsym(library, "ncclCommWindowRegister") == NULL);
    CHECK(dlsym(library, "ncclAllGather") != NULL);
    dlclose(library);
    CHECK(nccl->register_buffer && nccl->window_register);
    CHECK_INT(nccl->version, 22803);
    CHECK(strstr(nccl->path, "libnccl.so.2") != NULL);
}

int
main(void)
{
    if (!getenv("FSDPC_LIBNCCL")) {
        test_skip("FSDPC_LIBNCCL does not name the simulated library: run make simgpu");
    }
    REQUIRE_OK(fsdpc_nccl_get(&nccl));
    simgpu_get_options()->quiet = true;
    run_ranks_of(2, false, 1, not_blocking);
    run_ranks_of(2, false, 1, results_need_a_wait);
    for (int threads = 0; threads < 2; threads++) {
        for (int world = 1; world <= 4; world++) {
            run_ranks_of(world, threads, world, every_collective);
        }
        run_ranks_of(3, threads, 1, two_communicators);
        run_ranks_of(4, threads, 1, groups_and_splits);
        run_ranks_of(2, threads, 1, mismatch);
    }
    buffers_are_registered();
    old_libraries_lack_symbols();
    return test_result();
}
