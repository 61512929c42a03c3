/* Tests of the simulated driver: which calls it allows and refuses, which work it delays, and what it counts
 * and reports. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/cuda_driver.h"
#include "gpu.h"

/* --- entry points --------------------------------------------------------------------------------- */

static int
found(const char *name, int version)
{
    void *address = NULL;
    int status = -1;
    (void)cuGetProcAddress_v2(name, &address, version, 1, &status);
    return address ? status : -status;
}

static void
entry_points_are_found_by_version(void)
{
    gpu_start();
#define CHECK_FOUND(name, since) CHECK_INT(found(#name, 12040), CU_GET_PROC_ADDRESS_SUCCESS);
    SIM_ENTRIES(CHECK_FOUND)
#undef CHECK_FOUND
    CHECK_INT(found("cuNoSuchThing", 12040), -CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    CHECK_INT(found("cuLibraryLoadData", 11000), -CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    simgpu_get_options()->driver_version = 11080;
    CHECK_INT(found("cuLibraryLoadData", 12040), -CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    int version = 0;
    CHECK_CU(cuDriverGetVersion(&version), CUDA_SUCCESS);
    CHECK_INT(version, 11080);
}

_Static_assert(sizeof(fsdpc_cu_memory) == sizeof(CUmemAllocationProp), "one layout");
_Static_assert(sizeof(fsdpc_cu_access) == sizeof(CUmemAccessDesc), "one layout");
_Static_assert(FSDPC_CU_NOT_READY == (int)CUDA_ERROR_NOT_READY, "one value");
_Static_assert(FSDPC_CU_OUT_OF_MEMORY == (int)CUDA_ERROR_OUT_OF_MEMORY, "one value");
_Static_assert(FSDPC_CU_NOT_SUPPORTED == (int)CUDA_ERROR_NOT_SUPPORTED, "one value");

/* The simulated driver has all entry points that the core looks up, and the core starts on it. */
static void
the_core_finds_its_driver(void)
{
    const fsdpc_cuda_driver *driver;
    gpu_start();
    simgpu_get_options()->driver_version = 11080;
    CHECK_ERROR(fsdpc_cuda_driver_get(&driver), FSDPC_E_UNAVAILABLE, "12.0 or newer");
    simgpu_get_options()->driver_version = 13000;
    simgpu_get_options()->devices = 0;
    CHECK_ERROR(fsdpc_cuda_driver_get(&driver), FSDPC_E_UNAVAILABLE, "no GPU");
    simgpu_get_options()->devices = 1;
    CHECK(simgpu_fail("cuInit", 1, CUDA_ERROR_STUB_LIBRARY));
    CHECK_ERROR(fsdpc_cuda_driver_get(&driver), FSDPC_E_UNAVAILABLE, "stub");
    REQUIRE_OK(fsdpc_cuda_driver_get(&driver));
    CHECK_INT(driver->version, 13000);
    CHECK_INT(driver->device_count, 1);
#define CHECK_ENTRY(field, name, version, required, params) \
    CHECK(driver->field || (!required && found(name, version) < 0));
    FSDPC_CUDA_ENTRIES(CHECK_ENTRY)
#undef CHECK_ENTRY
    CHECK(driver->mem_create && driver->mem_map && driver->mem_set_access && driver->func_load);
    CHECK_ERROR(fsdpc_cuda_check(driver, CUDA_ERROR_OUT_OF_MEMORY, "slot %d", 3), FSDPC_E_DEVMEM,
                "slot 3: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory");
}

static void
calls_out_of_order_are_refused(void)
{
    CUdevice device;
    CUstream stream;
    CUevent event;
    CUdeviceptr block;
    simgpu_reset();
    CHECK_CU(cuDeviceGet(&device, 0), CUDA_ERROR_NOT_INITIALIZED);
    CHECK_CU(cuInit(0), CUDA_SUCCESS);
    CHECK_CU(cuDeviceGet(&device, 1), CUDA_ERROR_INVALID_DEVICE);
    CHECK_CU(cuCtxSetCurrent(NULL), CUDA_SUCCESS);
    CHECK_CU(cuStreamCreateWithPriority(&stream, 1, 0), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_CU(cuMemAlloc(&block, 64), CUDA_ERROR_INVALID_CONTEXT);
    gpu_start();
    stream = gpu_stream("side");
    event = gpu_event();
    CHECK_CU(cuStreamDestroy(stream), CUDA_SUCCESS);
    CHECK_CU(cuStreamDestroy(stream), CUDA_ERROR_INVALID_HANDLE);
    CHECK_CU(cuStreamQuery(stream), CUDA_ERROR_INVALID_HANDLE);
    CHECK_CU(cuEventRecord(event, stream), CUDA_ERROR_INVALID_HANDLE);
    CHECK_CU(cuEventDestroy(event), CUDA_SUCCESS);
    CHECK_CU(cuEventDestroy(event), CUDA_ERROR_INVALID_HANDLE);
    CHECK_CU(cuEventQuery(event), CUDA_ERROR_INVALID_HANDLE);
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0), CUDA_ERROR_INVALID_HANDLE);
    float *floats = gpu_floats(4, "floats");
    CHECK_CU(cuMemFree((CUdeviceptr)(uintptr_t)floats), CUDA_SUCCESS);
    CHECK_CU(cuMemFree((CUdeviceptr)(uintptr_t)floats), CUDA_ERROR_INVALID_VALUE);
    CHECK(gpu_reported("freed but not allocated"));
    simgpu_get_options()->devices = 0;
    CHECK_CU(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

static void
errors_have_names(void)
{
    const char *text;
    CHECK_CU(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text), CUDA_SUCCESS);
    CHECK_STR(text, "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK_CU(cuGetErrorString(CUDA_ERROR_NOT_READY, &text), CUDA_SUCCESS);
    CHECK_STR(text, "device not ready");
    CHECK_CU(cuGetErrorName(12345, &text), CUDA_ERROR_INVALID_VALUE);
    CHECK(text == NULL);
}

/* --- order ------------------------------------------------------------------------------------------ */

static void
side_streams_are_held_back(void)
{
    gpu_start();
    CUstream side = gpu_stream("side");
    float *x = gpu_floats(8, "x");
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    CHECK_INT(bits, 0xffffffffu); /* fresh memory is NaN */
    CHECK_CU(gpu_axpb(side, x, NULL, 8, 0, 1), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(side, x, x, 8, 2, 1), CUDA_SUCCESS);
    CHECK(x[0] != x[0]);
    CHECK_CU(cuStreamQuery(side), CUDA_ERROR_NOT_READY); /* each query lets one operation run */
    CHECK(x[0] == 1);
    CHECK_CU(cuStreamQuery(side), CUDA_ERROR_NOT_READY);
    CHECK(x[0] == 3);
    CHECK_CU(cuStreamQuery(side), CUDA_SUCCESS);
    CHECK_INT(simgpu_count().not_ready, 2);
    CHECK_INT(simgpu_count().host_syncs, 0);
    CHECK_CU(gpu_axpb(side, x, x, 8, 2, 1), CUDA_SUCCESS);
    CHECK_CU(cuStreamSynchronize(side), CUDA_SUCCESS);
    CHECK(x[0] == 7);
    CHECK_INT(simgpu_count().host_syncs, 1);
    CHECK_INT(simgpu_count().races, 0);
}

static void
the_null_stream_runs_at_once_and_forces_what_it_waits_for(void)
{
    gpu_start();
    CUstream a = gpu_stream("a"), b = gpu_stream("b");
    CUevent event = gpu_event();
    float *x = gpu_floats(8, "x"), *y = gpu_floats(8, "y"), *z = gpu_floats(8, "z");
    CHECK_CU(gpu_axpb(NULL, z, NULL, 8, 0, 5), CUDA_SUCCESS);
    CHECK(z[7] == 5);
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0),
             CUDA_SUCCESS); /* the event was never recorded, so the wait has no effect */
    CHECK_CU(gpu_axpb(a, x, NULL, 8, 0, 1), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(b, y, NULL, 8, 0, 2), CUDA_SUCCESS);
    CHECK_CU(cuEventRecord(event, a), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(a, x, x, 8, 1, 1), CUDA_SUCCESS); /* behind the event */
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0), CUDA_SUCCESS);
    CHECK(x[0] == 1 && y[0] != y[0]); /* only the work that the wait needs has run */
    CHECK(simgpu_drain());
    CHECK(x[0] == 2 && y[0] == 2);
}

static void
a_wait_means_the_record_before_it(void)
{
    gpu_start();
    CUstream a = gpu_stream("a"), b = gpu_stream("b");
    CUevent event = gpu_event();
    float *x = gpu_floats(1, "x"), *y = gpu_floats(1, "y");
    CHECK_CU(gpu_axpb(a, x, NULL, 1, 0, 1), CUDA_SUCCESS);
    CHECK_CU(cuEventRecord(event, a), CUDA_SUCCESS);
    CHECK_CU(cuStreamWaitEvent(b, event, 0), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(a, x, x, 1, 1, 1), CUDA_SUCCESS);
    CHECK_CU(cuEventRecord(event, a), CUDA_SUCCESS); /* b's wait does not cover this record */
    CHECK_CU(gpu_axpb(b, y, x, 1, 1, 0), CUDA_SUCCESS);
    CHECK_CU(cuStreamSynchronize(b), CUDA_SUCCESS);
    CHECK(y[0] == 1);
    CHECK_INT(simgpu_count().races, 0);
    CHECK(simgpu_drain());
    CHECK_INT(simgpu_count().races, 1);
    CHECK(gpu_reported("x, bytes [0, 4): read by b (axpb), written by a (axpb), nothing orders"));
}

static void
policies_choose_the_order(void)
{
    static const char *const texts[] = {"order:0,1", "order:1,0", "order:1,host,0", "eager",
                                        "random:3"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        gpu_start();
        CHECK(simgpu_policy(texts[i]));
        CUstream a = gpu_stream("a"), b = gpu_stream("b");
        float *x = gpu_floats(1, "x");
        CHECK_CU(gpu_axpb(a, x, NULL, 1, 0, 1), CUDA_SUCCESS);
        CHECK_CU(gpu_axpb(b, x, NULL, 1, 0, 2), CUDA_SUCCESS);
        if (i == 2) {
            CHECK(x[0] == 2); /* b comes before `host` in the order, so its work runs at once */
        }
        CHECK(simgpu_drain());
        CHECK(i == 0 || i == 3 ? x[0] == 2 : i == 4 || x[0] == 1);
        CHECK_INT(simgpu_count().races, 1); /* the race is found in every order */
    }
    CHECK(!simgpu_policy("sideways") && !simgpu_policy("order:a"));
}

static void
blocking_streams_follow_the_legacy_stream(void)
{
    gpu_start();
    CUstream blocking;
    CHECK_CU(cuStreamCreateWithPriority(&blocking, 0, 0), CUDA_SUCCESS);
    float *x = gpu_floats(1, "x");
    CHECK_CU(gpu_axpb(blocking, x, NULL, 1, 0, 1), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(NULL, x, x, 1, 1, 1), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(blocking, x, x, 1, 2, 0), CUDA_SUCCESS);
    CHECK(simgpu_drain());
    CHECK(x[0] == 4);
    CHECK_INT(simgpu_count().races, 0);
}

/* --- races ------------------------------------------------------------------------------------------- */

static void
putting_work_somewhere_orders_nothing_else(void)
{
    gpu_start();
    CUstream side = gpu_stream("gather");
    CUevent event = gpu_event();
    float *x = gpu_floats(4, "unit 3 slot 1");
    simgpu_host_read(x, 16, "matmul");
    CHECK_CU(gpu_axpb(side, x, NULL, 4, 0, 1), CUDA_SUCCESS);
    CHECK(simgpu_drain());
    CHECK(gpu_reported("unit 3 slot 1, bytes [0, 16): read by compute (matmul), written by gather "
                       "(axpb), nothing orders them"));
    CHECK_INT(simgpu_count().races, 1);
    CHECK_CU(cuEventRecord(event, side), CUDA_SUCCESS);
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0), CUDA_SUCCESS);
    simgpu_host_write(x, 16, "matmul");
    CHECK_INT(simgpu_count().races, 1);
}

static void
what_the_processor_has_seen_is_over(void)
{
    gpu_start();
    CUstream a = gpu_stream("a"), b = gpu_stream("b");
    CUevent event = gpu_event();
    void *pinned;
    float *x = gpu_floats(4, "x");
    CHECK_CU(cuMemHostAlloc(&pinned, 16, 0), CUDA_SUCCESS);
    simgpu_label(pinned, 16, "pinned");
    CHECK_CU(gpu_axpb(a, x, NULL, 4, 0, 1), CUDA_SUCCESS);
    CHECK_CU(cuMemcpyDtoHAsync(pinned, (CUdeviceptr)(uintptr_t)x, 16, a), CUDA_SUCCESS);
    CHECK_CU(cuEventRecord(event, a), CUDA_SUCCESS);
    while (cuEventQuery(event) == CUDA_ERROR_NOT_READY) {}
    simgpu_cpu_read(pinned, 16, "loss.item()");
    CHECK_CU(gpu_axpb(b, x, x, 4, 1, 1), CUDA_SUCCESS); /* queued after the query */
    CHECK(simgpu_drain());
    CHECK_INT(simgpu_count().races, 0);
    CHECK_CU(cuMemcpyDtoHAsync(pinned, (CUdeviceptr)(uintptr_t)x, 16, b), CUDA_SUCCESS);
    CHECK(simgpu_drain());
    simgpu_cpu_read(pinned, 16, "loss.item()");
    CHECK(gpu_reported("pinned, bytes [0, 16): written by b (copy to the host), read by processor "
                       "(loss.item())"));
    CHECK_INT(simgpu_count().races, 1);
}

static void
aliases_are_one_memory(void)
{
    gpu_start();
    CUstream a = gpu_stream("a"), b = gpu_stream("b");
    CUdeviceptr one = gpu_range("unit 0"), two = gpu_range("unit 2");
    CUmemGenericAllocationHandle slot = gpu_memory();
    gpu_map(one, slot);
    gpu_map(two, slot);
    float *first = (float *)(uintptr_t)one, *second = (float *)(uintptr_t)two;
    CHECK_CU(gpu_axpb(a, first, NULL, 8, 0, 1), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(b, second + 4, NULL, 8, 0, 2), CUDA_SUCCESS);
    CHECK_CU(cuStreamSynchronize(a), CUDA_SUCCESS);
    CHECK_CU(cuStreamSynchronize(b), CUDA_SUCCESS);
    CHECK(first[3] == 1 && first[4] == 2 && second[11] == 2);
    CHECK(gpu_reported("unit 2, bytes [16, 32): written by a (axpb) as unit 0, written by b"));
    CHECK_INT(simgpu_count().races, 1);
    CHECK_CU(cuMemUnmap(one, GRANULE), CUDA_SUCCESS);
    CHECK_CU(cuMemUnmap(two, GRANULE), CUDA_SUCCESS);
    CHECK_CU(cuMemRelease(slot), CUDA_SUCCESS);
    CHECK_CU(cuMemAddressFree(one, GRANULE), CUDA_SUCCESS);
    CHECK_CU(cuMemAddressFree(two, GRANULE), CUDA_SUCCESS);
    CHECK_INT(simgpu_count().device_bytes, 0);
}

/* The simulator finds the same races between overlapping accesses as a table with one entry for each byte. */
static void
the_history_of_bytes_is_kept_exactly(void)
{
    enum { BYTES = 64, STEPS = 300 };
    struct {
        int writer;
        bool readers[3];
    } naive[BYTES];
    uint32_t state = 7;
    for (int round = 0; round < 20; round++) {
        gpu_start();
        simgpu_policy_eager();
        CUstream streams[3] = {gpu_stream("a"), gpu_stream("b"), gpu_stream("c")};
        char *x = (char *)gpu_floats(BYTES / 4, "x");
        for (int i = 0; i < BYTES; i++) {
            naive[i].writer = -1;
            memset(naive[i].readers, 0, sizeof naive[i].readers);
        }
        for (int step = 0; step < STEPS; step++) {
            state = state * 1664525u + 1013904223u;
            int who = (int)(state >> 30) % 3, lo = (int)(state >> 8) % BYTES;
            int hi = lo + 1 + (int)(state >> 16) % (BYTES - lo);
            bool write = (state >> 24) % 8 == 0, raced = false;
            for (int i = lo; i < hi; i++) {
                raced |= naive[i].writer >= 0 && naive[i].writer != who;
                for (int r = 0; r < 3; r++) {
                    raced |= write && naive[i].readers[r] && r != who;
                    naive[i].readers[r] &= !write;
                }
                naive[i].writer = write ? who : naive[i].writer;
                naive[i].readers[who] |= !write;
            }
            int64_t before = simgpu_count().races;
            simgpu_stream_access(streams[who], x + lo, (size_t)(hi - lo), write, "step");
            CHECK_INT(simgpu_count().races > before, raced);
        }
    }
}

/* --- memory ------------------------------------------------------------------------------------------- */

static int
signal_of_read(const volatile float *address)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        float value = *address;
        _exit(value != 0.123f ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void
what_is_not_mapped_cannot_be_used(void)
{
    gpu_start();
    CUstream side = gpu_stream("side");
    CUdeviceptr range = gpu_range("unit 1");
    float *x = (float *)(uintptr_t)range;
    CUmemGenericAllocationHandle slot = gpu_memory();
    CHECK_INT(signal_of_read(x), SIGSEGV);
    CHECK_CU(cuMemMap(range, GRANULE, 0, slot, 0), CUDA_SUCCESS);
    CHECK_INT(signal_of_read(x), SIGSEGV); /* mapped but without access */
    CHECK(!simgpu_accessible(x, 4, false));
    CHECK_CU(cuMemSetAccess(range, GRANULE, &gpu_access, 1), CUDA_SUCCESS);
    CHECK_INT(signal_of_read(x), 0);
    CHECK(simgpu_accessible(x, GRANULE, true) && !simgpu_accessible(x, GRANULE + 1, true));
    CHECK_CU(cuMemMap(range, GRANULE, 0, slot, 0), CUDA_ERROR_ALREADY_MAPPED);
    CHECK_CU(cuMemAddressFree(range, GRANULE), CUDA_ERROR_INVALID_VALUE);
    CHECK_CU(gpu_axpb(side, x, NULL, 4, 0, 1), CUDA_SUCCESS);
    CHECK_CU(cuMemUnmap(range, GRANULE), CUDA_SUCCESS); /* while the kernel is still queued */
    CHECK_INT(signal_of_read(x), SIGSEGV);
    CHECK_CU(cuStreamSynchronize(side), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(gpu_reported("unit 1: written by side (axpb), but nothing is mapped there"));
    CHECK_CU(cuStreamQuery(NULL), CUDA_ERROR_ILLEGAL_ADDRESS); /* every later call fails, too */
}

static void
taking_memory_away_needs_a_look(void)
{
    gpu_start();
    simgpu_policy_eager();
    CUstream side = gpu_stream("side");
    CUdeviceptr range = gpu_range("unit 1");
    CUmemGenericAllocationHandle slot = gpu_memory();
    gpu_map(range, slot);
    CHECK_CU(gpu_axpb(side, (float *)(uintptr_t)range, NULL, 4, 0, 1), CUDA_SUCCESS);
    CHECK_CU(cuMemUnmap(range, GRANULE), CUDA_SUCCESS);
    CHECK(gpu_reported("unit 1: used by side (axpb), then unmapped, nothing orders them"));
    gpu_map(range, slot);
    CHECK_CU(gpu_axpb(side, (float *)(uintptr_t)range, NULL, 4, 0, 1), CUDA_SUCCESS);
    CHECK_CU(cuStreamQuery(side), CUDA_SUCCESS);
    CHECK_CU(cuMemUnmap(range, GRANULE), CUDA_SUCCESS);
    CHECK_INT(simgpu_count().races, 1);
}

static void
memory_can_run_out_and_vmm_can_be_missing(void)
{
    gpu_start();
    CUdeviceptr block;
    size_t free_bytes, total;
    CUmemGenericAllocationHandle handle;
    simgpu_get_options()->memory_bytes = 3 * GRANULE;
    handle = gpu_memory();
    CHECK_CU(cuMemAlloc(&block, GRANULE + 1), CUDA_SUCCESS);
    CHECK_CU(cuMemGetInfo(&free_bytes, &total), CUDA_SUCCESS);
    CHECK_INT(total, 3 * GRANULE);
    CHECK_INT(free_bytes, GRANULE - 512);
    CHECK_CU(cuMemCreate(&handle, GRANULE, &gpu_prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_CU(cuMemFree(block), CUDA_SUCCESS);
    CHECK_CU(cuMemCreate(&handle, GRANULE, &gpu_prop, 0), CUDA_SUCCESS);
    CHECK_CU(cuMemCreate(&handle, GRANULE - 1, &gpu_prop, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_INT(simgpu_count().allocations, 3);
    CHECK_INT(simgpu_count().peak_device_bytes, 2 * GRANULE + 512);
    simgpu_get_options()->vmm = false;
    CHECK_CU(cuMemCreate(&handle, GRANULE, &gpu_prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    CHECK_CU(cuMemAddressReserve(&block, GRANULE, 0, 0, 0), CUDA_ERROR_NOT_SUPPORTED);
    int supported = 1;
    CHECK_CU(cuDeviceGetAttribute(&supported, 102, 0), CUDA_SUCCESS);
    CHECK_INT(supported, 0);
}

static void
foreign_memory_needs_leave(void)
{
    gpu_start();
    static float mine[4] = {1, 2, 3, 4};
    float *x = gpu_floats(4, "x");
    CHECK_CU(gpu_axpb(NULL, x, mine, 4, 2, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    gpu_start();
    simgpu_get_options()->foreign = true;
    x = gpu_floats(4, "x");
    CHECK_CU(gpu_axpb(NULL, x, mine, 4, 2, 0), CUDA_SUCCESS);
    CHECK(x[3] == 8);
    CHECK_CU(cuMemFree((CUdeviceptr)(uintptr_t)x), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(NULL, x, mine, 4, 2, 0),
             CUDA_ERROR_ILLEGAL_ADDRESS); /* freed memory is not foreign memory */
}

static void
copies_and_fills(void)
{
    gpu_start();
    CUstream side = gpu_stream("side");
    float host[4] = {1, 2, 3, 4}, back[4] = {0};
    float *x = gpu_floats(4, "x"), *y = gpu_floats(4, "y");
    CUdeviceptr xp = (CUdeviceptr)(uintptr_t)x, yp = (CUdeviceptr)(uintptr_t)y;
    CHECK_CU(cuMemcpyHtoDAsync(xp, host, 16, side), CUDA_SUCCESS);
    host[0] = 9; /* the driver has copied `host` already */
    CHECK_CU(cuMemcpyDtoDAsync(yp, xp, 16, side), CUDA_SUCCESS);
    CHECK_CU(cuMemsetD32Async(yp + 4, 0x40a00000, 1, side), CUDA_SUCCESS);
    CHECK_CU(cuMemsetD8Async(yp + 8, 0, 4, side), CUDA_SUCCESS);
    CHECK_CU(cuMemsetD32Async(yp + 2, 0, 1, side), CUDA_ERROR_INVALID_VALUE);
    CHECK_INT(simgpu_count().host_syncs, 0);
    CHECK_CU(cuMemcpyDtoHAsync(back, yp, 16, side), CUDA_SUCCESS);
    CHECK(back[0] == 1 && back[1] == 5 && back[2] == 0 && back[3] == 4);
    simgpu_counters seen = simgpu_count();
    CHECK_INT(seen.host_syncs, 1); /* `back` is not pinned: the call waits */
    CHECK_INT(seen.pageable, 2);
    CHECK_INT(seen.copies, 3);
    CHECK_INT(seen.memsets, 2);
    CHECK_INT(seen.bytes_read, 32);
    CHECK_INT(seen.bytes_written, 16 + 16 + 8);
    void *pinned;
    CHECK_CU(cuMemHostAlloc(&pinned, 16, 0), CUDA_SUCCESS);
    CHECK_CU(cuMemcpyDtoHAsync(pinned, xp, 16, side), CUDA_SUCCESS);
    CHECK_INT(simgpu_count().pageable, 2);
    CHECK_CU(cuStreamSynchronize(side), CUDA_SUCCESS);
    CHECK_CU(cuMemFreeHost(pinned), CUDA_SUCCESS);
    CHECK_CU(cuMemFreeHost(pinned), CUDA_ERROR_INVALID_VALUE);
}

/* The host memory of a captured copy must be pinned. Other host memory may be freed before the graph runs. */
static void
captured_copies_need_pinned_memory(void)
{
    gpu_start();
    CUgraph graph;
    void *pinned;
    float host[4] = {0};
    CUstream side = gpu_stream("side");
    CUdeviceptr x = (CUdeviceptr)(uintptr_t)gpu_floats(4, "x");
    CHECK_CU(cuMemHostAlloc(&pinned, 16, 0), CUDA_SUCCESS);
    CHECK_CU(cuStreamBeginCapture(side, 0), CUDA_SUCCESS);
    CHECK_CU(cuMemcpyHtoDAsync(x, pinned, 16, side), CUDA_SUCCESS);
    CHECK_CU(cuMemcpyDtoHAsync(pinned, x, 16, side), CUDA_SUCCESS);
    CHECK_CU(cuStreamEndCapture(side, &graph), CUDA_SUCCESS);
    CHECK_CU(cuStreamBeginCapture(side, 0), CUDA_SUCCESS);
    CHECK_CU(cuMemcpyHtoDAsync(x, host, 16, side), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_CU(cuMemcpyDtoHAsync(host, x, 16, side), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_CU(cuStreamEndCapture(side, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(gpu_reported("not pinned"));
}

/* --- planted faults, leaks, launches ------------------------------------------------------------------- */

static void
calls_can_fail_or_be_skipped(void)
{
    gpu_start();
    CUdeviceptr block;
    CUevent event = gpu_event();
    float *x = gpu_floats(1, "x");
    CHECK(simgpu_fail("cuMemAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY));
    CHECK(!simgpu_fail("cuNothing", 1, 2) && !simgpu_fail("cuMemAlloc", 0, 2));
    CHECK_CU(cuMemAlloc(&block, 4), CUDA_SUCCESS);
    CHECK_CU(cuMemAlloc(&block, 4), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_CU(cuMemAlloc(&block, 4), CUDA_SUCCESS);
    CHECK_INT(simgpu_calls("cuMemAlloc"), 4);
    CUstream side = gpu_stream("side");
    CHECK(simgpu_skip_wait(1));
    CHECK_CU(gpu_axpb(side, x, NULL, 1, 0, 1), CUDA_SUCCESS);
    CHECK_CU(cuEventRecord(event, side), CUDA_SUCCESS);
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0), CUDA_SUCCESS);
    CHECK(x[0] != x[0]);
    CHECK_INT(simgpu_count().waits, 0);
    CHECK_CU(cuStreamWaitEvent(NULL, event, 0), CUDA_SUCCESS);
    CHECK(x[0] == 1);
}

static void
leaks_are_listed(void)
{
    gpu_start();
    char text[1024];
    CHECK_INT(simgpu_leaks(text, sizeof text), 0);
    (void)gpu_stream("forgotten");
    (void)gpu_event();
    (void)gpu_floats(4, "lost floats");
    (void)gpu_memory();
    (void)gpu_range("lost addresses");
    CHECK_INT(simgpu_leaks(text, sizeof text), 5);
    CHECK(strstr(text, "stream: forgotten\n") && strstr(text, "events: 1\n"));
    CHECK(strstr(text, "device memory: lost floats, 512 bytes\n"));
    CHECK(strstr(text, "memory handle") && strstr(text, "addresses: lost addresses"));
}

static void
launches_are_checked(void)
{
    gpu_start();
    float *x = gpu_floats(1, "x");
    axpb_params params = {.dst = x, .count = 1, .add = 2};
    void *list[] = {&params};
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    CHECK_CU(cuLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0), CUDA_SUCCESS);
    CHECK_CU(cuLibraryGetKernel(&kernel, library, "no_such_kernel"), CUDA_ERROR_NOT_FOUND);
    CHECK_CU(cuLibraryGetKernel(&kernel, library, "axpb"), CUDA_SUCCESS);
    CHECK_CU(cuKernelGetFunction(&function, kernel), CUDA_SUCCESS);
    CHECK_CU(cuLaunchKernel(function, 1, 1, 1, 2048, 1, 1, 0, NULL, list, NULL),
             CUDA_ERROR_INVALID_VALUE);
    CHECK_CU(cuLaunchKernel(function, 0, 1, 1, 32, 1, 1, 0, NULL, list, NULL),
             CUDA_ERROR_INVALID_VALUE);
    CHECK_CU(cuLaunchKernel(NULL, 1, 1, 1, 32, 1, 1, 0, NULL, list, NULL),
             CUDA_ERROR_INVALID_HANDLE);
    CHECK_CU(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, list, NULL), CUDA_SUCCESS);
    CHECK(x[0] == 2);
    CHECK_INT(simgpu_count().late_loads, 1);
    CHECK_INT(simgpu_count().launches, 1);
    CHECK_CU(cuLibraryUnload(library), CUDA_SUCCESS);
    CHECK_CU(cuLibraryUnload(library), CUDA_ERROR_INVALID_HANDLE);
}

/* Declares only a part of what axpb touches. If `scale` is positive, `src` is left out. Otherwise all
 * elements of `dst` except the first are left out. */
static bool
forgetful_declare(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const axpb_params *p = params;
    (void)launch;
    return p->scale > 0 ? simgpu_task_write(task, p->dst, p->count * sizeof *p->dst)
                        : simgpu_task_read(task, p->src, p->count * sizeof *p->src) &&
                              simgpu_task_write(task, p->dst, sizeof *p->dst);
}

static void
kernels_touch_what_they_declare(void)
{
    gpu_start();
    simgpu_get_options()->verify = true;
    float *x = gpu_floats(4, "x"), *y = gpu_floats(4, "y");
    CHECK_CU(gpu_axpb(NULL, x, NULL, 4, 0, 1), CUDA_SUCCESS);
    CHECK_CU(gpu_axpb(NULL, y, x, 4, 1, 1), CUDA_SUCCESS);
    CHECK(y[3] == 2);
    CHECK_INT(simgpu_count().faults, 0);
    simgpu_kernel("axpb", sizeof(axpb_params), axpb_launch, forgetful_declare);
    CHECK_CU(gpu_axpb(NULL, y, x, 4, -1, 1), CUDA_SUCCESS);
    CHECK(gpu_reported("kernel axpb writes y, byte 7, which it did not declare"));
    fflush(NULL);
    simgpu_get_options()->forks = true;
    pid_t child = fork();
    if (child == 0) { /* axpb reads x, which it did not declare */
        (void)gpu_axpb(NULL, y, x, 4, 1, 1);
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

/* As on a GPU, every driver call in a forked child fails with CUDA_ERROR_NOT_INITIALIZED. */
static void
a_forked_child_has_no_driver(void)
{
    gpu_start();
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        CUcontext context;
        CUevent event;
        bool refused = cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                       cuCtxGetCurrent(&context) == CUDA_ERROR_NOT_INITIALIZED &&
                       cuEventCreate(&event, 0) == CUDA_ERROR_NOT_INITIALIZED;
        _exit(refused ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int
main(void)
{
    entry_points_are_found_by_version();
    the_core_finds_its_driver();
    calls_out_of_order_are_refused();
    errors_have_names();
    side_streams_are_held_back();
    the_null_stream_runs_at_once_and_forces_what_it_waits_for();
    a_wait_means_the_record_before_it();
    policies_choose_the_order();
    blocking_streams_follow_the_legacy_stream();
    putting_work_somewhere_orders_nothing_else();
    what_the_processor_has_seen_is_over();
    aliases_are_one_memory();
    the_history_of_bytes_is_kept_exactly();
    what_is_not_mapped_cannot_be_used();
    taking_memory_away_needs_a_look();
    memory_can_run_out_and_vmm_can_be_missing();
    foreign_memory_needs_leave();
    copies_and_fills();
    captured_copies_need_pinned_memory();
    calls_can_fail_or_be_skipped();
    leaks_are_listed();
    launches_are_checked();
    kernels_touch_what_they_declare();
    a_forked_child_has_no_driver();
    simgpu_reset();
    return test_result();
}
