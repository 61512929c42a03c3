/* Declarations of the CUDA driver's functions that we call, without CUDA's headers. The functions are
 * found at run time.
 *
 * Nothing of CUDA is needed to build, link or import. The library is opened and initialised by the
 * first fsdpc_cuda_driver_get(), never earlier, so that a process can fork as long as it has not touched a
 * GPU. Types, values and prototypes are the driver's stable binary interface;
 * tests/c/test_cuda_abi.c compares them with cuda.h where the toolkit is installed.
 *
 * Every entry is requested by its name without suffix, at the version in FSDPC_CUDA_ENTRIES, with the legacy
 * default stream (torch's). FSDPC_LIBCUDA names another file for the library.
 */
#ifndef FSDPC_CUDA_DRIVER_H
#define FSDPC_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned fsdpc_cu_result;
typedef int fsdpc_cu_device;
typedef unsigned long long fsdpc_cu_ptr; /* an address on the device */
typedef unsigned long long fsdpc_cu_handle;
typedef struct CUctx_st *fsdpc_cu_context;
typedef struct CUstream_st *fsdpc_cu_stream; /* NULL: the legacy default stream */
typedef struct CUevent_st *fsdpc_cu_event;
typedef struct CUlib_st *fsdpc_cu_library;
typedef struct CUkern_st *fsdpc_cu_kernel;
typedef struct CUfunc_st *fsdpc_cu_function;

enum {
    FSDPC_CU_SUCCESS = 0,
    FSDPC_CU_OUT_OF_MEMORY = 2,
    FSDPC_CU_NOT_INITIALIZED = 3,
    FSDPC_CU_DEINITIALIZED = 4,
    FSDPC_CU_STUB_LIBRARY = 34,
    FSDPC_CU_NO_DEVICE = 100,
    FSDPC_CU_INVALID_DEVICE = 101,
    FSDPC_CU_NO_BINARY_FOR_GPU = 209,
    FSDPC_CU_UNSUPPORTED_PTX_VERSION = 222,
    FSDPC_CU_NOT_READY = 600,
    FSDPC_CU_NOT_SUPPORTED = 801,
};
enum {
    FSDPC_CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    FSDPC_CU_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    FSDPC_CU_ATTRIBUTE_CAPABILITY_MINOR = 76,
    FSDPC_CU_ATTRIBUTE_VIRTUAL_MEMORY = 102,
    FSDPC_CU_ATTRIBUTE_POSIX_HANDLES = 103,
    FSDPC_CU_ATTRIBUTE_RDMA_VIRTUAL_MEMORY = 110,
};
enum {
    FSDPC_CU_STREAM_NON_BLOCKING = 1,
    FSDPC_CU_EVENT_DISABLE_TIMING = 2,
    FSDPC_CU_HOST_PORTABLE = 1, /* a flag of cuMemHostAlloc */
    FSDPC_CU_MEMORY_PINNED = 1,
    FSDPC_CU_HANDLE_POSIX = 1,
    FSDPC_CU_LOCATION_DEVICE = 1,
    FSDPC_CU_POINTER_MEMORY_TYPE = 2, /* an attribute; its value may be FSDPC_CU_DEVICE_MEMORY */
    FSDPC_CU_DEVICE_MEMORY = 2,
    FSDPC_CU_ACCESS_READWRITE = 3,
    FSDPC_CU_GRANULARITY_RECOMMENDED = 1,
    FSDPC_CU_LEGACY_STREAM = 1,   /* a flag of cuGetProcAddress */
    FSDPC_CU_CAPTURE_RELAXED = 2, /* a mode: during captures this thread may make any call */
};

typedef struct fsdpc_cu_location {
    int type;
    int id;
} fsdpc_cu_location;

typedef struct fsdpc_cu_memory {
    int type;
    int handle_types;
    fsdpc_cu_location location;
    void *windows_only;
    unsigned char compression;
    unsigned char rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
} fsdpc_cu_memory;

typedef struct fsdpc_cu_access {
    fsdpc_cu_location location;
    int flags;
} fsdpc_cu_access;

/* X(field, name in the driver, version requested, required, parameters) */
#define FSDPC_CUDA_ENTRIES(X)                                                                   \
    X(init, "cuInit", 12000, true, (unsigned))                                                  \
    X(driver_get_version, "cuDriverGetVersion", 12000, true, (int *))                           \
    X(device_get, "cuDeviceGet", 12000, true, (fsdpc_cu_device *, int))                         \
    X(device_get_count, "cuDeviceGetCount", 12000, true, (int *))                               \
    X(device_get_name, "cuDeviceGetName", 12000, true, (char *, int, fsdpc_cu_device))          \
    X(device_get_attribute, "cuDeviceGetAttribute", 12000, true,                                \
      (int *, unsigned, fsdpc_cu_device))                                                       \
    X(primary_retain, "cuDevicePrimaryCtxRetain", 12000, true,                                  \
      (fsdpc_cu_context *, fsdpc_cu_device))                                                    \
    X(primary_release, "cuDevicePrimaryCtxRelease", 12000, true, (fsdpc_cu_device))             \
    X(ctx_get_current, "cuCtxGetCurrent", 12000, true, (fsdpc_cu_context *))                    \
    X(ctx_set_current, "cuCtxSetCurrent", 12000, true, (fsdpc_cu_context))                      \
    X(ctx_get_device, "cuCtxGetDevice", 12000, true, (fsdpc_cu_device *))                       \
    X(ctx_stream_priorities, "cuCtxGetStreamPriorityRange", 12000, true, (int *, int *))        \
    X(stream_create, "cuStreamCreateWithPriority", 12000, true,                                 \
      (fsdpc_cu_stream *, unsigned, int))                                                       \
    X(stream_destroy, "cuStreamDestroy", 12000, true, (fsdpc_cu_stream))                        \
    X(stream_wait_event, "cuStreamWaitEvent", 12000, true,                                      \
      (fsdpc_cu_stream, fsdpc_cu_event, unsigned))                                              \
    X(stream_query, "cuStreamQuery", 12000, true, (fsdpc_cu_stream))                            \
    X(capture_info, "cuStreamGetCaptureInfo", 12000, false,                                     \
      (fsdpc_cu_stream, unsigned *, uint64_t *, void *, void *, void *))                        \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", 12000, false, (unsigned *))            \
    X(event_create, "cuEventCreate", 12000, true, (fsdpc_cu_event *, unsigned))                 \
    X(event_destroy, "cuEventDestroy", 12000, true, (fsdpc_cu_event))                           \
    X(event_record, "cuEventRecord", 12000, true, (fsdpc_cu_event, fsdpc_cu_stream))            \
    X(event_query, "cuEventQuery", 12000, true, (fsdpc_cu_event))                               \
    X(address_reserve, "cuMemAddressReserve", 12000, false,                                     \
      (fsdpc_cu_ptr *, size_t, size_t, fsdpc_cu_ptr, unsigned long long))                       \
    X(address_free, "cuMemAddressFree", 12000, false, (fsdpc_cu_ptr, size_t))                   \
    X(mem_create, "cuMemCreate", 12000, false,                                                  \
      (fsdpc_cu_handle *, size_t, const fsdpc_cu_memory *, unsigned long long))                 \
    X(mem_release, "cuMemRelease", 12000, false, (fsdpc_cu_handle))                             \
    X(mem_map, "cuMemMap", 12000, false,                                                        \
      (fsdpc_cu_ptr, size_t, size_t, fsdpc_cu_handle, unsigned long long))                      \
    X(mem_unmap, "cuMemUnmap", 12000, false, (fsdpc_cu_ptr, size_t))                            \
    X(mem_set_access, "cuMemSetAccess", 12000, false,                                           \
      (fsdpc_cu_ptr, size_t, const fsdpc_cu_access *, size_t))                                  \
    X(mem_granularity, "cuMemGetAllocationGranularity", 12000, false,                           \
      (size_t *, const fsdpc_cu_memory *, unsigned))                                            \
    X(mem_alloc, "cuMemAlloc", 12000, true, (fsdpc_cu_ptr *, size_t))                           \
    X(mem_free, "cuMemFree", 12000, true, (fsdpc_cu_ptr))                                       \
    X(host_alloc, "cuMemHostAlloc", 12000, true, (void **, size_t, unsigned))                   \
    X(host_free, "cuMemFreeHost", 12000, true, (void *))                                        \
    X(copy_to_device, "cuMemcpyHtoDAsync", 12000, true,                                         \
      (fsdpc_cu_ptr, const void *, size_t, fsdpc_cu_stream))                                    \
    X(copy_to_host, "cuMemcpyDtoHAsync", 12000, true,                                           \
      (void *, fsdpc_cu_ptr, size_t, fsdpc_cu_stream))                                          \
    X(copy, "cuMemcpyDtoDAsync", 12000, true,                                                   \
      (fsdpc_cu_ptr, fsdpc_cu_ptr, size_t, fsdpc_cu_stream))                                    \
    X(set_bytes, "cuMemsetD8Async", 12000, true,                                                \
      (fsdpc_cu_ptr, unsigned char, size_t, fsdpc_cu_stream))                                   \
    X(set_words, "cuMemsetD32Async", 12000, true,                                               \
      (fsdpc_cu_ptr, unsigned, size_t, fsdpc_cu_stream))                                        \
    X(mem_info, "cuMemGetInfo", 12000, true, (size_t *, size_t *))                              \
    X(pointer_attribute, "cuPointerGetAttribute", 12000, false, (void *, int, fsdpc_cu_ptr))    \
    X(library_load, "cuLibraryLoadData", 12000, true,                                           \
      (fsdpc_cu_library *, const void *, unsigned *, void **, unsigned, unsigned *, void **,    \
       unsigned))                                                                               \
    X(library_get_kernel, "cuLibraryGetKernel", 12000, true,                                    \
      (fsdpc_cu_kernel *, fsdpc_cu_library, const char *))                                      \
    X(library_unload, "cuLibraryUnload", 12000, true, (fsdpc_cu_library))                       \
    X(kernel_get_function, "cuKernelGetFunction", 12000, true,                                  \
      (fsdpc_cu_function *, fsdpc_cu_kernel))                                                   \
    X(func_load, "cuFuncLoad", 12040, false, (fsdpc_cu_function))                               \
    X(launch, "cuLaunchKernel", 12000, true,                                                    \
      (fsdpc_cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
       fsdpc_cu_stream, void **, void **))                                                      \
    X(error_name, "cuGetErrorName", 12000, true, (fsdpc_cu_result, const char **))              \
    X(error_string, "cuGetErrorString", 12000, true, (fsdpc_cu_result, const char **))

typedef struct fsdpc_cuda_driver {
#define FSDPC_CUDA_FIELD(field, name, version, required, params) fsdpc_cu_result(*field) params;
    FSDPC_CUDA_ENTRIES(FSDPC_CUDA_FIELD)
#undef FSDPC_CUDA_FIELD
    int version;      /* of the driver: 12040 is 12.4 */
    int device_count; /* > 0 */
    bool stand_in;    /* true: a simulated driver, whose device memory is host memory */
} fsdpc_cuda_driver;

/* Returns the initialised driver. Entries that are not required may be NULL
 * for an old driver. Fails with FSDPC_E_UNAVAILABLE and a text of one sentence
 * if there is no library, only the toolkit's stub, no GPU, or a driver older
 * than 12.0. The next call after a failure tries again. Thread safe. */
int fsdpc_cuda_driver_get(const fsdpc_cuda_driver **out);

/* Converts a driver's result to a status. The error text is the given words, then the driver's name
 * and text for the result. Success is FSDPC_OK, out of memory is FSDPC_E_DEVMEM; not initialised,
 * no device and not supported are FSDPC_E_UNAVAILABLE; all other results are FSDPC_E_INTERNAL. */
int fsdpc_cuda_check(const fsdpc_cuda_driver *driver, fsdpc_cu_result result, const char *format,
                     ...) __attribute__((format(printf, 3, 4)));

#endif
