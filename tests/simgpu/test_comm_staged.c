/* Tests of collectives on GPU memory that are staged through host memory: what is copied, in which order,
 * which failures are final, and what is freed. The host's communicator is rank 0 of two. Callbacks stand for
 * rank 1, which contributes 100 to sums and bytes of 101 to gathers and broadcasts. */
#include "comm/comm.h"
#include "gpu.h"
#include "base/status.h"

enum { N = 1500 };

typedef struct other {
    int fails, gone, calls;
} other;

static fsdpc_device *gpu;

static int
answer(other *o)
{
    o->calls++;
    return o->fails ? fsdpc_error(FSDPC_E_PEER, "rank 1 is gone") : FSDPC_OK;
}

static int
all_gather(void *context, void *buffer, size_t piece_bytes, const char *what)
{
    (void)what;
    memset((char *)buffer + piece_bytes, 101, piece_bytes);
    return answer(context);
}

static int
reduce_scatter(void *context, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    (void)dtype, (void)what;
    for (int64_t i = 0; i < piece_numel; i++) {
        ((float *)buffer)[i] += 100;
        ((float *)buffer)[piece_numel + i] = -1; /* unspecified, so it must not be copied back */
    }
    return answer(context);
}

static int
all_reduce(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    (void)dtype, (void)op, (void)what;
    for (int64_t i = 0; i < numel; i++) {
        ((float *)buffer)[i] += 100;
    }
    return answer(context);
}

static int
broadcast(void *context, void *buffer, size_t bytes, int root, const char *what)
{
    (void)what;
    if (root == 1) {
        memset(buffer, 101, bytes);
    }
    return answer(context);
}

static int
barrier(void *context, const char *what)
{
    (void)what;
    return answer(context);
}

static void
gone(void *context)
{
    ((other *)context)->gone++;
}

static fsdpc_comm *
staged(other *o, fsdpc_comm **inner)
{
    const fsdpc_comm_callbacks calls = {.context = o,
                                        .all_gather = all_gather,
                                        .reduce_scatter = reduce_scatter,
                                        .all_reduce = all_reduce,
                                        .broadcast = broadcast,
                                        .barrier = barrier};
    fsdpc_device *cpu;
    fsdpc_comm *comm;
    REQUIRE_OK(fsdpc_device_cpu(&cpu));
    REQUIRE_OK(fsdpc_comm_c10d(cpu, 0, 2, &calls, inner));
    REQUIRE_OK(fsdpc_comm_staged(gpu, *inner, gone, o, &comm));
    return comm;
}

static void
end(other *o, fsdpc_comm *inner, fsdpc_comm *comm)
{
    fsdpc_comm_free(comm);
    CHECK_INT(o->gone, 1);
    fsdpc_comm_free(inner);
    expect_no_reports();
}

/* Returns the number that all values are equal to, or -12345 if the values differ. */
static float
value_of(const float *values, int count)
{
    float *host, found;
    void *block;
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, N * sizeof(float), &block));
    host = block;
    REQUIRE_OK(fsdpc_device_copy_out(gpu, host, values, (size_t)count * sizeof(float)));
    gpu_finish(gpu);
    found = host[0];
    for (int i = 0; i < count; i++) {
        found = host[i] == host[0] ? found : -12345;
    }
    fsdpc_device_host_free(gpu, host, N * sizeof(float));
    return found;
}

/* A collective on a stream runs after the kernel that writes its values and before the kernel that reads
 * them. */
static void
collectives_are_in_the_streams_order(void)
{
    other o = {0};
    fsdpc_comm *inner, *comm = staged(&o, &inner);
    float *values = gpu_floats(N, "values"), *used = gpu_floats(N, "used");
    CUstream stream = gpu_stream("own");
    const int half = N / 2;
    float bytes101;
    memset(&bytes101, 101, sizeof bytes101);
    CHECK(strcmp(fsdpc_comm_kind(comm), "c10d") == 0 && fsdpc_comm_device(comm) == gpu);
    fsdpc_device_use(gpu, (fsdpc_stream *)stream);
    for (int round = 1; round <= 3; round++) {
        REQUIRE_CU(gpu_axpb(stream, values, NULL, N, 0, (float)round));
        REQUIRE_OK(fsdpc_comm_all_gather(comm, values, (size_t)half * sizeof(float), "gather"));
        REQUIRE_CU(gpu_axpb(stream, used, values, N, 2, 0));
        CHECK(value_of(used, half) == 2 * (float)round);
        CHECK(value_of(used + half, half) == 2 * bytes101);
        REQUIRE_CU(gpu_axpb(stream, values, NULL, N, 0, (float)round));
        REQUIRE_OK(fsdpc_comm_reduce_scatter(comm, values, half, FSDPC_F32, "reduce"));
        REQUIRE_OK(fsdpc_comm_all_reduce(comm, values + half, half, FSDPC_F32, FSDPC_SUM, "sum"));
        REQUIRE_CU(gpu_axpb(stream, used, values, N, 1, 1));
        CHECK(value_of(used, N) == (float)round + 101);
        REQUIRE_OK(fsdpc_comm_broadcast(comm, values, sizeof(float) * N, 0, "from 0"));
        CHECK(value_of(values, N) == (float)round + 100);
        REQUIRE_OK(fsdpc_comm_broadcast(comm, values, sizeof(float) * N, 1, "from 1"));
        CHECK(value_of(values, N) == bytes101);
    }
    float host[4] = {1, 1, 0, 0};
    REQUIRE_OK(fsdpc_comm_host_all_gather(comm, host, 2 * sizeof(float), "words"));
    CHECK(host[0] == 1 && host[2] == bytes101);
    REQUIRE_OK(fsdpc_comm_barrier(comm, "barrier"));
    fsdpc_device_use(gpu, NULL);
    end(&o, inner, comm);
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)values));
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)used));
    REQUIRE_CU(cuStreamDestroy(stream));
}

static void
failures_stay(void)
{
    other o = {0};
    fsdpc_comm *inner, *comm = staged(&o, &inner), *none;
    float *values = gpu_floats(N, "values");
    REQUIRE(simgpu_fail("cuMemHostAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY));
    CHECK_ERROR(fsdpc_comm_all_reduce(comm, values, N, FSDPC_F32, FSDPC_SUM, "sum"), FSDPC_E_NOMEM,
                "pinned host memory");
    CHECK_ERROR(fsdpc_comm_check(comm), FSDPC_E_NOMEM, "pinned host memory");
    CHECK_INT(o.calls, 0);
    CHECK_ERROR(fsdpc_comm_staged(gpu, comm, NULL, NULL, &none), FSDPC_E_INVAL, "must be a GPU");
    end(&o, inner, comm);
    o = (other){.fails = 1};
    comm = staged(&o, &inner);
    REQUIRE_CU(gpu_axpb(NULL, values, NULL, N, 0, 1));
    CHECK_ERROR(fsdpc_comm_all_reduce(comm, values, N, FSDPC_F32, FSDPC_SUM, "sum"), FSDPC_E_PEER,
                "rank 1 is gone");
    CHECK_ERROR(fsdpc_comm_barrier(comm, "barrier"), FSDPC_E_PEER, "rank 1 is gone");
    CHECK_ERROR(fsdpc_comm_check(inner), FSDPC_E_PEER, "rank 1 is gone");
    end(&o, inner, comm);
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)values));
}

/* A collective in a capture is refused before it makes a driver call that would invalidate the capture. */
static void
captures_are_refused(void)
{
    other o = {0};
    fsdpc_comm *inner, *comm = staged(&o, &inner);
    float *values = gpu_floats(N, "values");
    CUstream stream = gpu_stream("captured");
    CUgraph graph;
    fsdpc_device_use(gpu, (fsdpc_stream *)stream);
    REQUIRE_CU(cuStreamBeginCapture(stream, 0));
    CHECK_ERROR(fsdpc_comm_all_gather(comm, values, 16, "gather"), FSDPC_E_STATE,
                "(\"c10d\") cannot be captured");
    CHECK_CU(cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    fsdpc_device_use(gpu, NULL);
    CHECK_INT(o.calls, 0);
    end(&o, inner, comm);
    REQUIRE_CU(cuStreamDestroy(stream));
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)values));
}

int
main(void)
{
    static const char *const policies[] = {"eager", "lazy", "random:1", "random:2"};
    gpu_start();
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    for (int i = 0; i < 4; i++) {
        REQUIRE(simgpu_policy(policies[i]));
        collectives_are_in_the_streams_order();
        failures_stay();
        captures_are_refused();
    }
    return test_result();
}
