/* Tests of the CUDA device on the simulated GPU: creation and refusals, memory, streams, and every operation.
 * Each operation must give the CPU device's results in several legal orders of the work that the simulator
 * delays. */
#include "gpu.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/deadline.h"
#include "device/device.h"
#include "kernels.h"
#include "unit/unit.h"

enum { N = 20011 };

static fsdpc_device *cpu, *gpu;
static uint64_t random_state = 0x2545F4914F6CDD1Du;

static uint64_t
random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void
fill(void *block, fsdpc_dtype type, int64_t n)
{
    const fsdpc_kernels *plain = fsdpc_kernels_plain();
    for (int64_t i = 0; i < n; i++) {
        const double value = ((double)(random_bits() >> 11) * 0x1p-53 - 0.5) * 8;
        plain->cast((char *)block + (size_t)i * fsdpc_dtype_bytes(type), type, &value, FSDPC_F64, 1,
                    1.0);
    }
}

/* --- made and refused ----------------------------------------------------------------------------- */

static void
refusals_name_the_reason(void)
{
    fsdpc_device *device = (fsdpc_device *)&device;
    char image[512];
    snprintf(image, sizeof image, "%s", getenv("FSDPC_CUDA_IMAGE"));
    CHECK_ERROR(fsdpc_device_cuda(4, &device), FSDPC_E_UNAVAILABLE, "no CUDA device 4");
    CHECK(device == NULL);
    CHECK_ERROR(fsdpc_device_cuda(-1, &device), FSDPC_E_UNAVAILABLE, "no CUDA device -1");
    unsetenv("FSDPC_CUDA_IMAGE");
    CHECK_ERROR(fsdpc_device_cuda(0, &device), FSDPC_E_UNAVAILABLE, "nvcc");
    setenv("FSDPC_CUDA_IMAGE", "/nowhere", 1);
    CHECK_ERROR(fsdpc_device_cuda(0, &device), FSDPC_E_IO, "/nowhere");
    setenv("FSDPC_CUDA_IMAGE", image, 1);
    static const char *const loads[] = {"cuLibraryLoadData", "cuKernelGetFunction", "cuFuncLoad"};
    for (int i = 0; i < 3; i++) { /* a driver may read the image in any of these calls */
        REQUIRE(simgpu_fail(loads[i], 1, 209));
        CHECK_ERROR(fsdpc_device_cuda(0, &device), FSDPC_E_INTERNAL,
                    "do not load on sm_90, simulated GPU with driver 13.0");
    }
    CHECK_INT(simgpu_leaks(NULL, 0), 0);
}

static int
open_and_leave(void *ordinal)
{
    fsdpc_device *device;
    return fsdpc_device_cuda(*(int *)ordinal, &device);
}

static void
a_failed_start_leaves_nothing(void)
{
    static const char *const entries[] = {"cuDeviceGet",
                                          "cuDeviceGetName",
                                          "cuDevicePrimaryCtxRetain",
                                          "cuCtxSetCurrent",
                                          "cuLibraryLoadData",
                                          "cuLibraryGetKernel",
                                          "cuKernelGetFunction",
                                          "cuFuncLoad",
                                          "cuMemAlloc",
                                          "cuMemsetD8Async",
                                          "cuEventCreate",
                                          "cuEventRecord",
                                          "cuMemHostAlloc",
                                          "cuCtxGetStreamPriorityRange"};
    fsdpc_device *device;
    const int64_t live = fsdpc_mem_live();
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        char text[512] = "";
        REQUIRE(simgpu_fail(entries[i], 1, CUDA_ERROR_OUT_OF_MEMORY));
        CHECK(fsdpc_device_cuda(0, &device) < 0 && device == NULL);
        CHECK_INT(simgpu_leaks(text, sizeof text), 0);
        CHECK_STR(text, "");
        CHECK_INT(fsdpc_mem_live(), live);
        if (simgpu_leaks(NULL, 0)) {
            fprintf(stderr, "after a failed %s\n", entries[i]);
        }
    }
}

static void
the_device_says_what_it_is(void)
{
    fsdpc_device *again;
    const simgpu_counters before = simgpu_count();
    REQUIRE_OK(fsdpc_device_cuda(0, &again));
    CHECK(again == gpu);
    CHECK_INT(simgpu_count().allocations, before.allocations);
    CHECK_STR(fsdpc_device_name(gpu), "cuda");
    CHECK(strstr(fsdpc_device_kernels_name(gpu), "sm_") != NULL);
    const fsdpc_device_caps *caps = fsdpc_device_get_caps(gpu);
    CHECK(caps->asynchronous && !caps->host_memory && caps->virtual_memory && !caps->note);
    CHECK_INT(caps->align_bytes, 128);
    CHECK_INT(fsdpc_device_threads(gpu), 1);
    CHECK_INT(simgpu_count().late_loads, 0);
}

/* --- memory --------------------------------------------------------------------------------------- */

static bool
all_zero(const unsigned char *block, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (block[i]) {
            return false;
        }
    }
    return true;
}

static void
memory_is_zeroed_and_given_back(fsdpc_device *device, bool mapped)
{
    static const size_t sizes[] = {1, 4096, GRANULE / 2, GRANULE + 1};
    char text[256] = "";
    const int leaks = simgpu_leaks(NULL, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const int64_t maps = simgpu_count().maps;
        void *block;
        unsigned char *seen = malloc(sizes[i]);
        REQUIRE_OK(fsdpc_device_alloc(device, sizes[i], &block));
        REQUIRE(seen != NULL);
        memset(seen, 1, sizes[i]);
        CHECK_INT(simgpu_count().maps - maps, mapped && sizes[i] >= GRANULE / 2);
        REQUIRE_OK(fsdpc_device_copy_out(device, seen, block, sizes[i]));
        CHECK(simgpu_drain());
        CHECK(all_zero(seen, sizes[i]));
        fsdpc_device_free(device, block, sizes[i]);
        CHECK(!simgpu_accessible(block, sizes[i], false));
        free(seen);
    }
    CHECK_INT(simgpu_leaks(text, sizeof text), leaks);
}

static void
exhausted_memory_is_an_error_and_leaves_nothing(void)
{
    static const char *const entries[] = {"cuMemAddressReserve", "cuMemCreate", "cuMemMap",
                                          "cuMemSetAccess", "cuMemsetD8Async"};
    void *block = &block;
    const int leaks = simgpu_leaks(NULL, 0);
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        REQUIRE(simgpu_fail(entries[i], 1, CUDA_ERROR_OUT_OF_MEMORY));
        CHECK_ERROR(fsdpc_device_alloc(gpu, GRANULE, &block), FSDPC_E_DEVMEM, "OUT_OF_MEMORY");
        CHECK(block == NULL);
        CHECK_INT(simgpu_leaks(NULL, 0), leaks);
    }
    CHECK_ERROR(fsdpc_device_alloc(gpu, (size_t)1 << 40, &block), FSDPC_E_DEVMEM, "device memory");
    CHECK_INT(simgpu_leaks(NULL, 0), leaks);
}

static void
without_virtual_memory_there_are_plain_blocks(void)
{
    fsdpc_device *other;
    simgpu_get_options()->vmm = false;
    REQUIRE_OK(fsdpc_device_cuda(1, &other));
    const fsdpc_device_caps *caps = fsdpc_device_get_caps(other);
    CHECK(!caps->virtual_memory && caps->note && strstr(caps->note, "plain allocation"));
    memory_is_zeroed_and_given_back(other, false);
    simgpu_get_options()->vmm = true;
}

/* A sandbox may refuse memory with shareable handles and yet allow virtual memory without such handles. */
static void
virtual_memory_does_without_handles(void)
{
    fsdpc_device *other;
    REQUIRE(simgpu_fail("cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED));
    REQUIRE_OK(fsdpc_device_cuda(2, &other));
    CHECK(fsdpc_device_get_caps(other)->virtual_memory && !fsdpc_device_get_caps(other)->note);
    memory_is_zeroed_and_given_back(other, true);
}

/* If the driver cannot map memory at two addresses at once, slots cannot use its virtual memory. */
static void
virtual_memory_must_show_a_piece_twice(void)
{
    fsdpc_device *other;
    const int leaks = simgpu_leaks(NULL, 0);
    /* The second mapping is call 2 for memory with shareable handles, and call 4 for memory without them. */
    for (int k = 2; k <= 4; k += 2) {
        REQUIRE(simgpu_fail("cuMemMap", k, CUDA_ERROR_NOT_SUPPORTED));
    }
    REQUIRE_OK(fsdpc_device_cuda(3, &other));
    CHECK(!fsdpc_device_get_caps(other)->virtual_memory && fsdpc_device_get_caps(other)->note);
    const int kept = simgpu_leaks(NULL, 0) - leaks; /* the device's kernels and its norm buffer */
    CHECK(kept > 0 && kept <= 4);
    memory_is_zeroed_and_given_back(other, false);
}

/* --- streams and events ---------------------------------------------------------------------------- */

static enum simgpu_progress
until_released(void *released, simgpu_task *task)
{
    (void)task;
    return *(bool *)released ? SIMGPU_DONE : SIMGPU_BLOCKED;
}

static void
a_host_wait_has_a_deadline(void)
{
    fsdpc_stream *stream;
    fsdpc_event *event;
    bool released = false, done = true;
    const simgpu_work work = {.name = "a peer", .context = &released, .run = until_released};
    REQUIRE_OK(fsdpc_device_stream_new(gpu, true, &stream));
    REQUIRE_OK(fsdpc_device_event_new(gpu, &event));
    REQUIRE_OK(fsdpc_device_finish(gpu, event, 0, "no mark"));
    fsdpc_stream *before = fsdpc_device_use(gpu, stream);
    CHECK(fsdpc_device_current(gpu) == stream);
    REQUIRE_CU(simgpu_enqueue((CUstream)stream, &work, NULL));
    REQUIRE_OK(fsdpc_device_record(gpu, event));
    REQUIRE_OK(fsdpc_device_poll(gpu, event, &done));
    CHECK(!done);
    CHECK_ERROR(fsdpc_device_finish(gpu, event, 0.05, "gather of unit 3"), FSDPC_E_TIMEOUT,
                "gather of unit 3: the GPU has not finished in 0.05 s");
    released = true;
    REQUIRE_OK(fsdpc_device_finish(gpu, event, 30, "gather of unit 3"));
    REQUIRE_OK(fsdpc_device_poll(gpu, event, &done));
    CHECK(done);
    CHECK(fsdpc_device_use(gpu, before) == stream);
    fsdpc_device_event_free(gpu, event);
    fsdpc_device_stream_free(gpu, stream);
}

/* take_norm, allocate and settle_offloaded each end with a host sync of the current stream. */
static int
take_norm(void *block)
{
    fsdpc_norm norm;
    return fsdpc_device_norm2(gpu, block, FSDPC_F32, 16, &norm);
}

static int
allocate(void *block)
{
    (void)block;
    void *more;
    return fsdpc_device_alloc(gpu, GRANULE, &more);
}

static int
settle_offloaded(void *unit)
{
    REQUIRE_OK(fsdpc_unit_touch(unit, FSDPC_GRAD));
    return fsdpc_unit_settle(unit);
}

/* A host sync whose caller gives no timeout uses the timeout of the process, FSDPC_TIMEOUT. */
static void
host_syncs_have_the_deadline_of_the_process(void)
{
    fsdpc_stream *stream;
    fsdpc_comm *comm;
    fsdpc_unit *unit;
    void *block;
    const fsdpc_param_spec spec = {"w", 16, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0, 0, false};
    REQUIRE_OK(fsdpc_device_alloc(gpu, GRANULE, &block));
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
    REQUIRE_OK(fsdpc_comm_self(gpu, &comm));
    const fsdpc_unit_options options = {.name = "u", .shard = comm, .divide = 1, .offload = true};
    REQUIRE_OK(fsdpc_unit_new(&options, &spec, 1, &unit));
    const struct {
        const char *what;
        int (*run)(void *);
        void *argument;
    } syncs[] = {{"a norm", take_norm, block},
                 {"zeroing new memory", allocate, NULL},
                 {"the end of the device's work on offloaded values", settle_offloaded, unit}};
    fsdpc_stream *before = fsdpc_device_use(gpu, stream);
    const double was = fsdpc_timeout();
    for (size_t i = 0; i < sizeof syncs / sizeof *syncs; i++) {
        bool released = false;
        char text[128];
        const simgpu_work work = {.name = "a peer", .context = &released, .run = until_released};
        snprintf(text, sizeof text, "%s: the GPU has not finished in 0.05 s (FSDPC_TIMEOUT",
                 syncs[i].what);
        REQUIRE_CU(simgpu_enqueue((CUstream)stream, &work, NULL));
        fsdpc_set_timeout(0.05);
        CHECK_ERROR(syncs[i].run(syncs[i].argument), FSDPC_E_TIMEOUT, text);
        fsdpc_set_timeout(was);
        released = true;
        CHECK(simgpu_drain());
    }
    REQUIRE_OK(fsdpc_unit_settle(unit));
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
    fsdpc_device_use(gpu, before);
    fsdpc_device_stream_free(gpu, stream);
    fsdpc_device_free(gpu, block, GRANULE);
}

static void *
free_elsewhere(void *block)
{
    fsdpc_device_free(gpu, block, GRANULE);
    return NULL;
}

/* Garbage may be collected at any time and in any thread, so freeing memory must not invalidate a capture.
 * Memory that the captured stream may still use stays allocated until the capture has ended. */
static void
a_capture_outlives_what_is_freed_meanwhile(void)
{
    fsdpc_stream *stream;
    fsdpc_event *event;
    CUgraph graph;
    pthread_t thread;
    void *blocks[2], *pinned;
    const int64_t faults = simgpu_count().faults;
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
    REQUIRE_OK(fsdpc_device_event_new(gpu, &event));
    REQUIRE_OK(fsdpc_device_record(gpu, event));
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, 64, &pinned));
    for (int i = 0; i < 2; i++) {
        REQUIRE_OK(fsdpc_device_alloc(gpu, GRANULE, &blocks[i]));
    }
    for (int own = 0; own < 2; own++) {
        CUstream captured = own ? (CUstream)stream : gpu_stream("captured");
        CHECK_CU(cuStreamBeginCapture(captured, 0), CUDA_SUCCESS);
        REQUIRE(pthread_create(&thread, NULL, free_elsewhere, blocks[own]) == 0);
        REQUIRE(pthread_join(thread, NULL) == 0);
        CHECK(simgpu_accessible(blocks[own], GRANULE, false) == own);
        fsdpc_device_use(gpu, (fsdpc_stream *)captured);
        CHECK_ERROR(fsdpc_device_finish(gpu, event, 30, "a norm"), FSDPC_E_STATE,
                    "a norm: the host");
        fsdpc_device_free(gpu, blocks[1], GRANULE);
        fsdpc_device_host_free(gpu, pinned, 64);
        CHECK(simgpu_accessible(blocks[1], GRANULE, false));
        CHECK_CU(cuStreamEndCapture(captured, &graph), CUDA_SUCCESS);
        fsdpc_device_use(gpu, NULL);
    }
    CHECK_INT(simgpu_count().faults, faults);
    fsdpc_device_free(gpu, blocks[1], GRANULE);
    CHECK(!simgpu_accessible(blocks[1], GRANULE, false));
    fsdpc_device_host_free(gpu, pinned, 64);
    fsdpc_device_event_free(gpu, event);
    fsdpc_device_stream_free(gpu, stream);
}

/* Casts into a buffer on stream `side` and reads the buffer on stream `other`. Returns true if no race was
 * found. */
static bool
handed_over(bool with_wait)
{
    fsdpc_stream *side, *other;
    fsdpc_event *event;
    void *from, *to, *host;
    const int64_t races = simgpu_count().races;
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &side));
    REQUIRE_OK(fsdpc_device_stream_new(gpu, true, &other));
    REQUIRE_OK(fsdpc_device_event_new(gpu, &event));
    REQUIRE_OK(fsdpc_device_alloc(gpu, N * 4, &from));
    REQUIRE_OK(fsdpc_device_alloc(gpu, N * 2, &to));
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, N * 2, &host));
    fsdpc_device_use(gpu, side);
    REQUIRE_OK(fsdpc_device_cast(gpu, to, FSDPC_BF16, from, FSDPC_F32, N, 1));
    REQUIRE_OK(fsdpc_device_record(gpu, event));
    fsdpc_device_use(gpu, other);
    if (with_wait) {
        REQUIRE_OK(fsdpc_device_wait(gpu, event));
    }
    REQUIRE_OK(fsdpc_device_copy_out(gpu, host, to, N * 2));
    REQUIRE_OK(fsdpc_device_record(gpu, event));
    fsdpc_device_use(gpu, NULL);
    REQUIRE_OK(fsdpc_device_finish(gpu, event, 30, "a copy"));
    fsdpc_device_free(gpu, from, N * 4);
    fsdpc_device_free(gpu, to, N * 2);
    fsdpc_device_host_free(gpu, host, N * 2);
    fsdpc_device_event_free(gpu, event);
    fsdpc_device_stream_free(gpu, side);
    fsdpc_device_stream_free(gpu, other);
    return simgpu_count().races == races;
}

static void
events_order_streams(void)
{
    CHECK(handed_over(true));
    CHECK(!handed_over(false));
    CHECK(gpu_reported("nothing orders them"));
    const int64_t created = simgpu_count().events_created;
    for (int i = 0; i < 5; i++) {
        CHECK(handed_over(true));
    }
    CHECK_INT(simgpu_count().events_created, created);
}

/* A forked child inherits the table of the driver's entries, but the driver does not work in the child. */
static void
a_forked_child_is_told_how_to_start(void)
{
    void *block;
    fsdpc_device *device;
    REQUIRE_OK(fsdpc_device_alloc(gpu, GRANULE, &block));
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        const bool right = fsdpc_device_cuda(0, &device) == FSDPC_OK &&
                           fsdpc_device_zero(gpu, block, 64) == FSDPC_E_UNAVAILABLE &&
                           strstr(fsdpc_error_text(), "spawn or torchrun") != NULL;
        fsdpc_device_free(gpu, block, GRANULE);
        _exit(right ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fsdpc_device_free(gpu, block, GRANULE);
}

static void *
elsewhere(void *buffer)
{
    int status = fsdpc_device_zero(gpu, buffer, 64);
    CHECK_INT(status, FSDPC_OK);
    CHECK(fsdpc_device_current(gpu) == NULL);
    return NULL;
}

static void
a_thread_without_a_context_may_use_it(void)
{
    pthread_t thread;
    fsdpc_stream *stream;
    void *buffer;
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
    REQUIRE_OK(fsdpc_device_alloc(gpu, 64, &buffer));
    fsdpc_device_use(gpu, stream);
    REQUIRE(pthread_create(&thread, NULL, elsewhere, buffer) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(fsdpc_device_current(gpu) == stream);
    fsdpc_device_use(gpu, NULL);
    CHECK(simgpu_drain());
    fsdpc_device_free(gpu, buffer, 64);
    fsdpc_device_stream_free(gpu, stream);
}

/* --- operations ------------------------------------------------------------------------------------ */

/* Two buffers with equal contents: one on the CPU and one on the GPU. */
struct both {
    size_t bytes;
    void *cpu, *gpu;
};

static struct both
new_both(int64_t n, fsdpc_dtype type)
{
    struct both both = {.bytes = (size_t)n * fsdpc_dtype_bytes(type)};
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, both.bytes, &both.cpu));
    REQUIRE_OK(fsdpc_device_alloc(gpu, both.bytes, &both.gpu));
    fill(both.cpu, type, n);
    REQUIRE_OK(fsdpc_device_copy_in(gpu, both.gpu, both.cpu, both.bytes));
    return both;
}

static bool
equal(const struct both *both)
{
    void *seen;
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, both->bytes, &seen));
    REQUIRE_OK(fsdpc_device_copy_out(gpu, seen, both->gpu, both->bytes));
    gpu_finish(gpu);
    const bool result = memcmp(seen, both->cpu, both->bytes) == 0;
    fsdpc_device_host_free(gpu, seen, both->bytes);
    return result;
}

static void
free_both(struct both *both)
{
    fsdpc_device_free(gpu, both->gpu, both->bytes);
    fsdpc_device_host_free(gpu, both->cpu, both->bytes);
}

/* Calls fsdpc_device_*(device, ...) for the CPU and for the GPU. In the arguments, `a` and `b` are the
 * device's buffers of `first` and `second`. */
#define ON_BOTH(call, ...)                     \
    do {                                       \
        fsdpc_device *device = cpu;            \
        void *a = first.cpu, *b = second.cpu;  \
        gpu_finish(gpu);                       \
        (void)a, (void)b;                      \
        REQUIRE_OK(call(device, __VA_ARGS__)); \
        device = gpu, a = first.gpu;           \
        b = second.gpu;                        \
        REQUIRE_OK(call(device, __VA_ARGS__)); \
    } while (0)

static void
results_are_the_cpu_devices(void)
{
    static const int64_t shape[] = {N / 7, 7}, turned[] = {1, N / 7};
    struct both first = new_both(N, FSDPC_F32), second = new_both(N, FSDPC_BF16);
    ON_BOTH(fsdpc_device_cast, b, FSDPC_BF16, a, FSDPC_F32, N, 0.3);
    CHECK(equal(&second));
    ON_BOTH(fsdpc_device_cast, (char *)a + 4, FSDPC_F32, (char *)b + 2, FSDPC_BF16, N - 1, 1.0);
    CHECK(equal(&first));
    ON_BOTH(fsdpc_device_accumulate, a, FSDPC_F32, b, FSDPC_BF16, N, 0.7);
    CHECK(equal(&first));
    ON_BOTH(fsdpc_device_reduce, a, FSDPC_F32, ((const void *[]){b, NULL, b}), 3, FSDPC_BF16, N,
            0.5, true);
    CHECK(equal(&first));
    ON_BOTH(fsdpc_device_refresh, a, FSDPC_F32, b, FSDPC_BF16, N);
    CHECK(equal(&first));
    ON_BOTH(fsdpc_device_scale, a, FSDPC_F32, N, 0.9);
    CHECK(equal(&first));
    ON_BOTH(fsdpc_device_pack, b, FSDPC_BF16, a, FSDPC_F32, 2, shape, turned, 2.0);
    CHECK(equal(&second));
    ON_BOTH(fsdpc_device_zero, (char *)a + 3, 1001);
    ON_BOTH(fsdpc_device_poison, b, FSDPC_BF16, 33);
    CHECK(equal(&first) && equal(&second));
    free_both(&first);
    free_both(&second);
}

static void
what_a_gpu_cannot_read_is_refused(void)
{
    struct both first = new_both(16, FSDPC_F32);
    char *odd = (char *)first.gpu + 1;
    const void *many[300] = {NULL};
    CHECK_ERROR(fsdpc_device_cast(gpu, odd, FSDPC_F32, first.gpu, FSDPC_F32, 2, 2), FSDPC_E_INVAL,
                "not aligned to float32");
    CHECK_ERROR(fsdpc_device_accumulate(gpu, first.gpu, FSDPC_F32, odd, FSDPC_BF16, 2, 1),
                FSDPC_E_INVAL, "not aligned to bfloat16");
    CHECK_ERROR(fsdpc_device_reduce(gpu, first.gpu, FSDPC_F32, many, 300, FSDPC_F32, 2, 1, false),
                FSDPC_E_UNAVAILABLE, "at most 256");
    REQUIRE_OK(fsdpc_device_cast(gpu, odd, FSDPC_BYTES, first.gpu, FSDPC_BYTES, 1, 1));
    free_both(&first);
}

static void
norms_come_to_the_host(void)
{
    struct both first = new_both(N, FSDPC_BF16);
    fsdpc_norm want, got;
    double want_p, got_p;
    REQUIRE_OK(fsdpc_device_norm2(cpu, first.cpu, FSDPC_BF16, N, &want));
    REQUIRE_OK(fsdpc_device_norm2(gpu, first.gpu, FSDPC_BF16, N, &got));
    CHECK(fabs(got.sum - want.sum) <= 1e-12 * want.sum && got.max == want.max);
    CHECK(!got.nonfinite);
    REQUIRE_OK(fsdpc_device_norm_p(cpu, first.cpu, FSDPC_BF16, N, 1.5, &want_p));
    REQUIRE_OK(fsdpc_device_norm_p(gpu, first.gpu, FSDPC_BF16, N, 1.5, &got_p));
    CHECK(fabs(got_p - want_p) <= 1e-12 * want_p);
    free_both(&first);
}

/* Sums the gradients of two units, computes their norm and clips them, without a host sync in between. */
static void
clipping_needs_no_look_by_the_host(void)
{
    enum { UNITS = 2 };
    struct both sums[UNITS], sources[UNITS];
    const int64_t parts = fsdpc_device_norm_parts(gpu, N);
    char *list;
    double *clip, *host, square = 0;
    void *block;
    CHECK(parts > 1);
    CHECK_INT(fsdpc_device_norm_parts(cpu, N), 0);
    REQUIRE_OK(
        fsdpc_device_alloc(gpu, (size_t)(UNITS * parts + 2) * FSDPC_NORM_PART_BYTES, &block));
    list = block;
    clip = (double *)(list + (UNITS * parts + 1) * FSDPC_NORM_PART_BYTES);
    for (int u = 0; u < UNITS; u++) {
        sums[u] = new_both(N, FSDPC_F32);
        sources[u] = new_both(N, FSDPC_BF16);
    }
    gpu_finish(gpu);
    const simgpu_counters before = simgpu_count();
    const int64_t waits = fsdpc_device_waits(gpu);
    for (int u = 0; u < UNITS; u++) {
        REQUIRE_OK(fsdpc_device_reduce(gpu, sums[u].gpu, FSDPC_F32,
                                       (const void *[]){sources[u].gpu}, 1, FSDPC_BF16, N, 0.25,
                                       true));
        const fsdpc_stretch all = {sums[u].gpu, N, FSDPC_F32};
        REQUIRE_OK(
            fsdpc_device_norm_into(gpu, &all, 1, 2, list + u * parts * FSDPC_NORM_PART_BYTES));
    }
    char *total = list + UNITS * parts * FSDPC_NORM_PART_BYTES;
    REQUIRE_OK(fsdpc_device_norm_total(gpu, list, UNITS * parts, false, total));
    REQUIRE_OK(fsdpc_device_clip_factor(gpu, total, 2, 1.5, clip));
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_stretch all = {sums[u].gpu, N, FSDPC_F32};
        REQUIRE_OK(fsdpc_device_scale_by(gpu, &all, 1, clip + 1));
    }
    const simgpu_counters after = simgpu_count();
    CHECK_INT(after.launches - before.launches, 3 * UNITS + 2);
    CHECK_INT(after.host_syncs, before.host_syncs);
    CHECK_INT(after.not_ready, before.not_ready);
    CHECK_INT(after.allocations, before.allocations);
    CHECK_INT(fsdpc_device_waits(gpu), waits);

    REQUIRE_OK(fsdpc_device_host_alloc(gpu, 16, &block));
    host = block;
    REQUIRE_OK(fsdpc_device_copy_out(gpu, host, clip, 16));
    gpu_finish(gpu);
    CHECK_INT(fsdpc_device_waits(gpu), waits + 1);
    CHECK_INT(fsdpc_device_waits(cpu), 0);
    for (int u = 0; u < UNITS; u++) {
        fsdpc_norm norm;
        REQUIRE_OK(fsdpc_device_reduce(cpu, sums[u].cpu, FSDPC_F32,
                                       (const void *[]){sources[u].cpu}, 1, FSDPC_BF16, N, 0.25,
                                       true));
        REQUIRE_OK(fsdpc_device_norm2(cpu, sums[u].cpu, FSDPC_F32, N, &norm));
        square += norm.sum;
    }
    CHECK(fabs(host[0] - sqrt(square)) <= 1e-12 * host[0]);
    CHECK(host[1] == 1.5 / (host[0] + 1e-6));
    for (int u = 0; u < UNITS; u++) {
        REQUIRE_OK(fsdpc_device_scale(cpu, sums[u].cpu, FSDPC_F32, N, host[1]));
        CHECK(equal(&sums[u]));
        free_both(&sums[u]);
        free_both(&sources[u]);
    }
    CHECK_ERROR(fsdpc_device_norm_total(cpu, list, 1, false, total), FSDPC_E_UNAVAILABLE, "norm2");
    fsdpc_device_host_free(gpu, host, 16);
    fsdpc_device_free(gpu, list, (size_t)(UNITS * parts + 2) * FSDPC_NORM_PART_BYTES);
}

/* --- many tensors at once ---------------------------------------------------------------------------- */

static void
wrong_plans_are_refused(void)
{
    fsdpc_pack_plan *plan = (fsdpc_pack_plan *)&plan;
    const fsdpc_pack_target good[] = {{4, 0, FSDPC_F32}, {4, 16, FSDPC_BF16}};
    const fsdpc_pack_target lapping[] = {{4, 0, FSDPC_F32}, {4, 12, FSDPC_BF16}};
    const fsdpc_pack_target askew[] = {{4, 2, FSDPC_F32}};
    const int64_t shape[] = {3}, strides[] = {1};
    float x[8] = {0};
    const fsdpc_pack_source sources[] = {{.data = x, .dtype = FSDPC_F32},
                                         {x, FSDPC_F32, 1, shape, strides, false}};
    const fsdpc_pack_source bytes[] = {{.data = x, .dtype = FSDPC_BYTES}, {.data = NULL}};
    CHECK_ERROR(fsdpc_device_pack_plan(gpu, good, NULL, 2, 20, false, &plan), FSDPC_E_INVAL,
                "target 1");
    CHECK(plan == NULL);
    CHECK_ERROR(fsdpc_device_pack_plan(cpu, lapping, NULL, 2, 64, false, &plan), FSDPC_E_INVAL,
                "target 1");
    CHECK_ERROR(fsdpc_device_pack_plan(cpu, askew, NULL, 1, 64, false, &plan), FSDPC_E_INVAL,
                "byte 2");
    REQUIRE_OK(fsdpc_device_pack_plan(cpu, good, NULL, 2, 24, false, &plan));
    CHECK_ERROR(fsdpc_device_pack_onto(cpu, plan, x, NULL, sources, 1), FSDPC_E_INVAL,
                "3 elements");
    CHECK_ERROR(fsdpc_device_pack_onto(cpu, plan, x, NULL, bytes, 1), FSDPC_E_INVAL, "uint8");
    CHECK_ERROR(fsdpc_device_pack_onto(cpu, plan, NULL, NULL, sources, 1), FSDPC_E_INVAL, "NULL");
    fsdpc_device_pack_plan_free(cpu, plan);
}

static int
plan_and_free(void *device)
{
    const fsdpc_pack_target targets[] = {{4, 0, FSDPC_F32}, {4, 64, FSDPC_BF16}};
    fsdpc_pack_plan *plan;
    FSDPC_TRY(fsdpc_device_pack_plan(device, targets, NULL, 2, 128, false, &plan));
    fsdpc_device_pack_plan_free(device, plan);
    return FSDPC_OK;
}

int
main(void)
{
    int ordinal = 0;
    simgpu_get_options()->devices = 4;
    simgpu_get_options()->quiet = true;
    REQUIRE_OK(fsdpc_device_cpu(&cpu));
    refusals_name_the_reason();
    a_failed_start_leaves_nothing();
    fsdpc_mem_fail_after(1);
    CHECK_INT(open_and_leave(&ordinal), FSDPC_E_NOMEM);
    fsdpc_mem_fail_after(0);
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    the_device_says_what_it_is();
    memory_is_zeroed_and_given_back(gpu, true);
    exhausted_memory_is_an_error_and_leaves_nothing();
    a_host_wait_has_a_deadline();
    host_syncs_have_the_deadline_of_the_process();
    events_order_streams();
    a_capture_outlives_what_is_freed_meanwhile();
    a_forked_child_is_told_how_to_start();
    a_thread_without_a_context_may_use_it();
    wrong_plans_are_refused();
    test_alloc_sweep(plan_and_free, gpu);
    static const char *const policies[] = {"lazy", "eager", "random:7", "order:1,host,0"};
    int leaks = 0;
    for (int i = 0; i < 4; i++) {
        fsdpc_stream *stream;
        REQUIRE(simgpu_policy(policies[i]));
        REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
        const simgpu_counters before = simgpu_count();
        for (int side = 0; side < 2; side++) {
            fsdpc_device_use(gpu, side ? stream : NULL);
            results_are_the_cpu_devices();
            what_a_gpu_cannot_read_is_refused();
            norms_come_to_the_host();
            clipping_needs_no_look_by_the_host();
        }
        fsdpc_device_use(gpu, NULL);
        fsdpc_device_stream_free(gpu, stream);
        CHECK_INT(simgpu_count().races, before.races);
        CHECK_INT(simgpu_count().faults, before.faults);
        /* All allocations that the device keeps are made in the first round: later rounds add none. */
        leaks = i ? leaks : simgpu_leaks(NULL, 0);
        CHECK_INT(simgpu_leaks(NULL, 0), leaks);
    }
    CHECK_INT(simgpu_count().late_loads, 0);
    without_virtual_memory_there_are_plain_blocks();
    virtual_memory_does_without_handles();
    virtual_memory_must_show_a_piece_twice();
    return test_result();
}
