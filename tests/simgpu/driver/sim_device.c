/* The device, its primary context, and how entry points are found. */
#include <stdio.h>
#include <string.h>

#include "sim.h"

struct CUctx_st {
    int device;
};

/* The core looks for this name: memory of this driver is the host's, and torch's tensors in it are
 * CPU tensors. */
SIM_EXPORT extern int fsdpc_stand_in;
int fsdpc_stand_in = 1;

enum { DEVICES = 8 };
static struct CUctx_st contexts[DEVICES];
static int retained[DEVICES];
static __thread CUcontext current;

bool
sim_has_context(void)
{
    return current && retained[current->device] > 0;
}

static bool
is_device(CUdevice device)
{
    return device >= 0 && device < sim_options.devices && device < DEVICES;
}

SIM_EXPORT CUresult
cuInit(unsigned flags)
{
    CUresult result = sim_enter(SIM_cuInit, false);
    if (!result && flags) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    if (!result && sim_options.devices == 0) {
        result = CUDA_ERROR_NO_DEVICE;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuDriverGetVersion(int *version)
{
    CUresult result = sim_enter(SIM_cuDriverGetVersion, false);
    if (!result) {
        *version = sim_options.driver_version;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuDeviceGetCount(int *count)
{
    CUresult result = sim_enter(SIM_cuDeviceGetCount, false);
    if (!result) {
        *count = sim_options.devices;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult result = sim_enter(SIM_cuDeviceGet, false);
    if (!result && !is_device(ordinal)) {
        result = CUDA_ERROR_INVALID_DEVICE;
    }
    if (!result) {
        *device = ordinal;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    CUresult result = sim_enter(SIM_cuDeviceGetName, false);
    if (!result && (!is_device(device) || bytes < 1)) {
        result = CUDA_ERROR_INVALID_DEVICE;
    }
    if (!result) {
        snprintf(name, (size_t)bytes, "simulated GPU");
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    static const int values[][2] = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    };
    CUresult result = sim_enter(SIM_cuDeviceGetAttribute, false);
    if (result || !is_device(device)) {
        return sim_leave(result ? result : CUDA_ERROR_INVALID_DEVICE);
    }
    *value = 0;
    if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
        attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
        *value = sim_options.vmm;
    }
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        *value = values[i][0] == attribute ? values[i][1] : *value;
    }
    return sim_leave(CUDA_SUCCESS);
}

/* --- context -------------------------------------------------------------------------------------- */

SIM_EXPORT CUresult
cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = sim_enter(SIM_cuDevicePrimaryCtxRetain, false);
    if (!result && !is_device(device)) {
        result = CUDA_ERROR_INVALID_DEVICE;
    }
    if (!result) {
        contexts[device].device = device;
        retained[device]++;
        *context = &contexts[device];
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuDevicePrimaryCtxRelease(CUdevice device)
{
    CUresult result = sim_enter(SIM_cuDevicePrimaryCtxRelease, false);
    if (!result && (!is_device(device) || retained[device] == 0)) {
        result = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!result) {
        retained[device]--;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuCtxGetCurrent(CUcontext *context)
{
    CUresult result = sim_enter(SIM_cuCtxGetCurrent, false);
    if (!result) {
        *context = current;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuCtxSetCurrent(CUcontext context)
{
    CUresult result = sim_enter(SIM_cuCtxSetCurrent, false);
    if (!result && context && (context < contexts || context >= contexts + DEVICES)) {
        result = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!result) {
        current = context;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuCtxGetDevice(CUdevice *device)
{
    CUresult result = sim_enter(SIM_cuCtxGetDevice, true);
    if (!result) {
        *device = current->device;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUresult result = sim_enter(SIM_cuCtxGetStreamPriorityRange, true);
    if (!result) {
        *least = 0;
        *greatest = -5;
    }
    return sim_leave(result);
}

/* --- names ---------------------------------------------------------------------------------------- */

#define ERRORS(X)                                                             \
    X(CUDA_SUCCESS, "no error")                                               \
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                           \
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                              \
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                     \
    X(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")               \
    X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")             \
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                    \
    X(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")             \
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                   \
    X(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")                   \
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                   \
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                         \
    X(CUDA_ERROR_NOT_READY, "device not ready")                               \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered") \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")   \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "already registered")        \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "not registered")                \
    X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                 \
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                    \
    X(CUDA_ERROR_UNKNOWN, "unknown error")

static CUresult
error_text(enum sim_entry entry, CUresult error, const char **text)
{
    CUresult result = sim_enter(entry, false);
    bool name = entry == SIM_cuGetErrorName;
    *text = NULL;
#define CASE(code, words)             \
    if (error == code) {              \
        *text = name ? #code : words; \
    }
    ERRORS(CASE)
#undef CASE
    return sim_leave(result ? result : *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

SIM_EXPORT CUresult
cuGetErrorName(CUresult error, const char **text)
{
    return error_text(SIM_cuGetErrorName, error, text);
}

SIM_EXPORT CUresult
cuGetErrorString(CUresult error, const char **text)
{
    return error_text(SIM_cuGetErrorString, error, text);
}

/* --- entry points ------------------------------------------------------------------------------------ */

#define SYMBOL_TEXT(name) SYMBOL_TEXT_(name)
#define SYMBOL_TEXT_(name) #name

typedef struct entry {
    const char *name;
    int version;
    void (*function)(void);
} entry;

/* The prototypes stand where the functions are; here only their addresses matter. */
#define DECLARE(name, version) extern void entry_##name(void) __asm__(SYMBOL_TEXT(name));
SIM_ENTRIES(DECLARE)
#undef DECLARE
#define ROW(name, since) {.version = since, .function = entry_##name},
static const entry entries[] = {SIM_ENTRIES(ROW)};
#undef ROW
#define NAME(name, version) #name,
static const char *const names[] = {SIM_ENTRIES(NAME)};
#undef NAME

SIM_EXPORT CUresult
cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status)
{
    int found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    (void)flags;
    if (!name || !address) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *address = NULL;
    if (strcmp(name, "cuGetProcAddress") == 0) {
        void (*self)(void) = (void (*)(void))cuGetProcAddress_v2;
        memcpy(address, &self, sizeof *address);
        found = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(name, names[i]) != 0 || entries[i].version > sim_options.driver_version) {
            continue;
        }
        found = entries[i].version > version ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                             : CU_GET_PROC_ADDRESS_SUCCESS;
        if (found == CU_GET_PROC_ADDRESS_SUCCESS) {
            memcpy(address, &entries[i].function, sizeof *address);
        }
    }
    if (status) {
        *status = found;
    }
    return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
