/* Types, codes and limits of the CUDA driver's ABI, which the simulated driver shares with its callers.
 *
 * They are declared here because most machines lack the CUDA toolkit. The driver's binary interface fixes
 * their values. test_driver.c compares them with the core's own declarations.
 */
#ifndef SIMGPU_CUDA_ABI_H
#define SIMGPU_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_STUB_LIBRARY = 34,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_UNKNOWN = 999
};

enum {
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
};

enum { CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
enum { CU_MEM_LOCATION_TYPE_DEVICE = 1, CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum { CU_MEM_ACCESS_FLAGS_PROT_READ = 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum {
    CU_GET_PROC_ADDRESS_SUCCESS = 0,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
    CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2
};

typedef struct CUmemLocation {
    int type, id;
} CUmemLocation;

typedef struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

/* All entry points of the simulated driver, as X(name, first driver version that has the entry point). */
#define SIM_ENTRIES(X)                          \
    X(cuInit, 2000)                             \
    X(cuDriverGetVersion, 2020)                 \
    X(cuDeviceGet, 2000)                        \
    X(cuDeviceGetCount, 2000)                   \
    X(cuDeviceGetName, 2000)                    \
    X(cuDeviceGetAttribute, 2000)               \
    X(cuDevicePrimaryCtxRetain, 7000)           \
    X(cuDevicePrimaryCtxRelease, 11000)         \
    X(cuCtxGetCurrent, 4000)                    \
    X(cuCtxSetCurrent, 4000)                    \
    X(cuCtxGetDevice, 2000)                     \
    X(cuCtxSynchronize, 2000)                   \
    X(cuCtxGetStreamPriorityRange, 5050)        \
    X(cuStreamCreateWithPriority, 5050)         \
    X(cuStreamDestroy, 4000)                    \
    X(cuStreamWaitEvent, 3020)                  \
    X(cuStreamQuery, 2000)                      \
    X(cuStreamSynchronize, 2000)                \
    X(cuStreamBeginCapture, 10000)              \
    X(cuStreamEndCapture, 10000)                \
    X(cuStreamGetCaptureInfo, 11030)            \
    X(cuThreadExchangeStreamCaptureMode, 10010) \
    X(cuEventCreate, 2000)                      \
    X(cuEventDestroy, 4000)                     \
    X(cuEventRecord, 2000)                      \
    X(cuEventQuery, 2000)                       \
    X(cuMemAddressReserve, 10020)               \
    X(cuMemAddressFree, 10020)                  \
    X(cuMemCreate, 10020)                       \
    X(cuMemRelease, 10020)                      \
    X(cuMemMap, 10020)                          \
    X(cuMemUnmap, 10020)                        \
    X(cuMemSetAccess, 10020)                    \
    X(cuMemGetAllocationGranularity, 10020)     \
    X(cuMemAlloc, 3020)                         \
    X(cuMemFree, 3020)                          \
    X(cuMemHostAlloc, 2020)                     \
    X(cuMemFreeHost, 2000)                      \
    X(cuMemcpyHtoDAsync, 3020)                  \
    X(cuMemcpyDtoHAsync, 3020)                  \
    X(cuMemcpyDtoDAsync, 3020)                  \
    X(cuMemsetD8Async, 3020)                    \
    X(cuMemsetD32Async, 3020)                   \
    X(cuMemGetInfo, 3020)                       \
    X(cuPointerGetAttribute, 4000)              \
    X(cuLibraryLoadData, 12000)                 \
    X(cuLibraryGetKernel, 12000)                \
    X(cuLibraryUnload, 12000)                   \
    X(cuKernelGetFunction, 12000)               \
    X(cuFuncLoad, 12040)                        \
    X(cuLaunchKernel, 4000)                     \
    X(cuGetErrorName, 6000)                     \
    X(cuGetErrorString, 6000)

#define SIM_ENTRY_ID(name, version) SIM_##name,
enum sim_entry { SIM_ENTRIES(SIM_ENTRY_ID) SIM_ENTRY_COUNT };
#undef SIM_ENTRY_ID

/* As in the toolkit's header, these entry points have a suffix in their current version. */
#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuEventDestroy cuEventDestroy_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
#define cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemcpyHtoDAsync cuMemcpyHtoDAsync_v2
#define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2
#define cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2
#define cuMemGetInfo cuMemGetInfo_v2

CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int *version);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxSynchronize(void);
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
CUresult cuStreamDestroy(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamBeginCapture(CUstream stream, unsigned mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuStreamGetCaptureInfo(CUstream stream, unsigned *status, uint64_t *id, void *graph,
                                void *nodes, void *count);
CUresult cuThreadExchangeStreamCaptureMode(unsigned *mode);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventDestroy(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventQuery(CUevent event);
CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr ptr, size_t bytes);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemMap(CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr ptr, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *desc, size_t count);
CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       int option);
CUresult cuMemAlloc(CUdeviceptr *ptr, size_t bytes);
CUresult cuMemFree(CUdeviceptr ptr);
CUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned flags);
CUresult cuMemFreeHost(void *ptr);
CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream);
CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t count, CUstream stream);
CUresult cuMemGetInfo(size_t *free_bytes, size_t *total);
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address);
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *options, void **values,
                           unsigned count, int *library_options, void **library_values,
                           unsigned library_count);
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name);
CUresult cuLibraryUnload(CUlibrary library);
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel);
CUresult cuFuncLoad(CUfunction function);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared_bytes, CUstream stream,
                        void **params, void **extra);
CUresult cuGetErrorName(CUresult error, const char **text);
CUresult cuGetErrorString(CUresult error, const char **text);
CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                             int *status);

#endif
