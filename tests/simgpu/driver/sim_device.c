/* The device, its primary context, and how entry points are found. */
#include <stdio.h>
#include <string.h>

#include "sim.h"

struct CUctx_st {
    int device;
};

/* The core looks up this symbol. If the symbol exists, the driver's memory is host memory, and torch's
 * tensors in that memory are CPU tensors. */
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
    SIM_ENTER(cuInit, false);
    SIM_REFUSE(flags, CUDA_ERROR_INVALID_VALUE);
    SIM_REFUSE(sim_options.devices == 0, CUDA_ERROR_NO_DEVICE);
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuDriverGetVersion(int *version)
{
    SIM_ENTER(cuDriverGetVersion, false);
    *version = sim_options.driver_version;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuDeviceGetCount(int *count)
{
    SIM_ENTER(cuDeviceGetCount, false);
    *count = sim_options.devices;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuDeviceGet(CUdevice *device, int ordinal)
{
    SIM_ENTER(cuDeviceGet, false);
    SIM_REFUSE(!is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    SIM_ENTER(cuDeviceGetName, false);
    SIM_REFUSE(!is_device(device) || bytes < 1, CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)bytes, "simulated GPU");
    return sim_leave(CUDA_SUCCESS);
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
    SIM_ENTER(cuDeviceGetAttribute, false);
    SIM_REFUSE(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
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
    SIM_ENTER(cuDevicePrimaryCtxRetain, false);
    SIM_REFUSE(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    contexts[device].device = device;
    retained[device]++;
    *context = &contexts[device];
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuDevicePrimaryCtxRelease(CUdevice device)
{
    SIM_ENTER(cuDevicePrimaryCtxRelease, false);
    SIM_REFUSE(!is_device(device) || retained[device] == 0, CUDA_ERROR_INVALID_CONTEXT);
    retained[device]--;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuCtxGetCurrent(CUcontext *context)
{
    SIM_ENTER(cuCtxGetCurrent, false);
    *context = current;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuCtxSetCurrent(CUcontext context)
{
    SIM_ENTER(cuCtxSetCurrent, false);
    SIM_REFUSE(context && (context < contexts || context >= contexts + DEVICES),
               CUDA_ERROR_INVALID_CONTEXT);
    current = context;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuCtxGetDevice(CUdevice *device)
{
    SIM_ENTER(cuCtxGetDevice, true);
    *device = current->device;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    SIM_ENTER(cuCtxGetStreamPriorityRange, true);
    *least = 0;
    *greatest = -5;
    return sim_leave(CUDA_SUCCESS);
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

/* Only the addresses matter here; the functions' prototypes are elsewhere. */
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
