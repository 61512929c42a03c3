/* Helpers of tests on the simulated GPU: a started device, simple kernels, and checks of driver calls. */
#ifndef SIMGPU_GPU_H
#define SIMGPU_GPU_H

#include "device/device.h"
#include "driver/simgpu.h"
#include "test.h"

/* If another rank is quick, a rank may see work as done by chance. What a rank sees as done comes before the
 * rank's own later work, as after a wait. So a run can hide a planted fault, and each planted fault is looked
 * for in many runs. */
enum { FAULT_RUNS = 20 };

#define CHECK_CU(call, expected)                                        \
    do {                                                                \
        CUresult got_ = (call), wanted_ = (expected);                   \
        atomic_fetch_add(&test_checks, 1);                              \
        if (got_ != wanted_) {                                          \
            TEST_FAIL("%s gave %d, expected %d", #call, got_, wanted_); \
        }                                                               \
    } while (0)
#define REQUIRE_CU(call)                          \
    do {                                          \
        CUresult got_ = (call);                   \
        atomic_fetch_add(&test_checks, 1);        \
        if (got_ != CUDA_SUCCESS) {               \
            TEST_FAIL("%s gave %d", #call, got_); \
            exit(1);                              \
        }                                         \
    } while (0)

/* The simulator's default granule. */
enum { GRANULE = 2 << 20 };

/* dst[i] = scale * src[i] + add, for floats; src may be dst, or NULL for `add` alone. */
typedef struct axpb_params {
    float *dst;
    const float *src;
    size_t count;
    float scale, add;
} axpb_params;

static bool
axpb_declare(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const axpb_params *p = params;
    (void)launch;
    return (!p->src || simgpu_task_read(task, p->src, p->count * sizeof *p->src)) &&
           simgpu_task_write(task, p->dst, p->count * sizeof *p->dst);
}

static void
axpb_launch(const void *params, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
            unsigned bz, unsigned shared_bytes)
{
    const axpb_params *p = params;
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared_bytes;
    for (size_t i = 0; i < p->count; i++) {
        p->dst[i] = (p->src ? p->scale * p->src[i] : 0.0f) + p->add;
    }
}

__attribute__((unused)) static CUfunction
gpu_function(const char *name)
{
    static const char image[] = "image";
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    REQUIRE_CU(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
    REQUIRE_CU(cuLibraryGetKernel(&kernel, library, name));
    REQUIRE_CU(cuKernelGetFunction(&function, kernel));
    REQUIRE_CU(cuFuncLoad(function));
    REQUIRE_CU(cuLibraryUnload(library));
    return function;
}

/* Starts a fresh simulator with a current context. */
__attribute__((unused)) static void
gpu_start(void)
{
    CUcontext context;
    simgpu_reset();
    simgpu_get_options()->quiet = true;
    REQUIRE_CU(cuInit(0));
    REQUIRE_CU(cuDevicePrimaryCtxRetain(&context, 0));
    REQUIRE_CU(cuCtxSetCurrent(context));
    simgpu_kernel("axpb", sizeof(axpb_params), axpb_launch, axpb_declare);
}

__attribute__((unused)) static CUresult
gpu_axpb(CUstream stream, float *dst, const float *src, size_t count, float scale, float add)
{
    axpb_params params = {.dst = dst, .src = src, .count = count, .scale = scale, .add = add};
    void *list[] = {&params};
    return cuLaunchKernel(gpu_function("axpb"), 1, 1, 1, 32, 1, 1, 0, stream, list, NULL);
}

__attribute__((unused)) static CUstream
gpu_stream(const char *name)
{
    CUstream stream;
    REQUIRE_CU(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
    simgpu_label_stream(stream, name);
    return stream;
}

__attribute__((unused)) static CUevent
gpu_event(void)
{
    CUevent event;
    REQUIRE_CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

__attribute__((unused)) static float *
gpu_floats(size_t count, const char *name)
{
    CUdeviceptr block;
    REQUIRE_CU(cuMemAlloc(&block, count * sizeof(float)));
    simgpu_label((void *)(uintptr_t)block, count * sizeof(float), name);
    return (float *)(uintptr_t)block;
}

/* Waits for all that is queued on the current stream. */
__attribute__((unused)) static void
gpu_finish(fsdpc_device *device)
{
    fsdpc_event *event;
    REQUIRE_OK(fsdpc_device_event_new(device, &event));
    REQUIRE_OK(fsdpc_device_record(device, event));
    REQUIRE_OK(fsdpc_device_finish(device, event, 60, "the test"));
    fsdpc_device_event_free(device, event);
}

static const CUmemAllocationProp gpu_prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                             .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static const CUmemAccessDesc gpu_access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                           .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

__attribute__((unused)) static CUdeviceptr
gpu_range(const char *name)
{
    CUdeviceptr range;
    REQUIRE_CU(cuMemAddressReserve(&range, simgpu_get_options()->granule, 0, 0, 0));
    simgpu_label((void *)(uintptr_t)range, simgpu_get_options()->granule, name);
    return range;
}

__attribute__((unused)) static CUmemGenericAllocationHandle
gpu_memory(void)
{
    CUmemGenericAllocationHandle handle;
    REQUIRE_CU(cuMemCreate(&handle, simgpu_get_options()->granule, &gpu_prop, 0));
    return handle;
}

__attribute__((unused)) static void
gpu_map(CUdeviceptr range, CUmemGenericAllocationHandle handle)
{
    REQUIRE_CU(cuMemMap(range, simgpu_get_options()->granule, 0, handle, 0));
    REQUIRE_CU(cuMemSetAccess(range, simgpu_get_options()->granule, &gpu_access, 1));
}

__attribute__((unused)) static void
expect_no_reports(void)
{
    CHECK_INT(simgpu_count().races, 0);
    CHECK_INT(simgpu_count().faults, 0);
    for (int i = 0; i < simgpu_reports() && i < 5; i++) {
        fprintf(stderr, "  %s\n", simgpu_report(i));
    }
}

/* Checks that since `before` nothing was allocated or created, and that the host did not wait. */
__attribute__((unused)) static void
expect_nothing_made(const simgpu_counters *before)
{
    const simgpu_counters now = simgpu_count();
    CHECK_INT(now.host_syncs - before->host_syncs, 0);
    CHECK_INT(now.allocations - before->allocations, 0);
    CHECK_INT(now.host_allocations - before->host_allocations, 0);
    CHECK_INT(now.maps - before->maps, 0);
    CHECK_INT(now.events_created - before->events_created, 0);
    CHECK_INT(now.streams_created - before->streams_created, 0);
}

__attribute__((unused)) static bool
gpu_reported(const char *part)
{
    for (int i = 0; i < simgpu_reports(); i++) {
        if (strstr(simgpu_report(i), part)) {
            return true;
        }
    }
    return false;
}

#endif
