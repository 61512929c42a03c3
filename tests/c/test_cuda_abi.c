/* Compares our declarations of the CUDA driver with those of the CUDA toolkit, if it is installed. */
#include "test.h"

#include "device/cuda_driver.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

/* The assignment inside of sizeof is compiled but never run, because no driver is linked. A prototype that
 * differs is an error. Three entries take pointers to structs, whose layouts are compared below. The entry
 * capture_info is left out, because it has another form in each generation of the toolkit. */
#pragma GCC diagnostic error "-Wincompatible-pointer-types"
#define SAME_TYPE(field, entry) CHECK(sizeof(((fsdpc_cuda_driver *)0)->field = entry) > 0)

static void
prototypes_are_the_drivers(void)
{
    SAME_TYPE(init, cuInit);
    SAME_TYPE(driver_get_version, cuDriverGetVersion);
    SAME_TYPE(device_get, cuDeviceGet);
    SAME_TYPE(device_get_count, cuDeviceGetCount);
    SAME_TYPE(device_get_name, cuDeviceGetName);
    SAME_TYPE(device_get_attribute, cuDeviceGetAttribute);
    SAME_TYPE(primary_retain, cuDevicePrimaryCtxRetain);
    SAME_TYPE(primary_release, cuDevicePrimaryCtxRelease);
    SAME_TYPE(ctx_get_current, cuCtxGetCurrent);
    SAME_TYPE(ctx_set_current, cuCtxSetCurrent);
    SAME_TYPE(ctx_get_device, cuCtxGetDevice);
    SAME_TYPE(ctx_stream_priorities, cuCtxGetStreamPriorityRange);
    SAME_TYPE(stream_create, cuStreamCreateWithPriority);
    SAME_TYPE(stream_destroy, cuStreamDestroy);
    SAME_TYPE(stream_wait_event, cuStreamWaitEvent);
    SAME_TYPE(stream_query, cuStreamQuery);
    SAME_TYPE(capture_mode, cuThreadExchangeStreamCaptureMode);
    SAME_TYPE(event_create, cuEventCreate);
    SAME_TYPE(event_destroy, cuEventDestroy);
    SAME_TYPE(event_record, cuEventRecord);
    SAME_TYPE(event_query, cuEventQuery);
    SAME_TYPE(address_reserve, cuMemAddressReserve);
    SAME_TYPE(address_free, cuMemAddressFree);
    SAME_TYPE(mem_release, cuMemRelease);
    SAME_TYPE(mem_map, cuMemMap);
    SAME_TYPE(mem_unmap, cuMemUnmap);
    SAME_TYPE(mem_alloc, cuMemAlloc);
    SAME_TYPE(mem_free, cuMemFree);
    SAME_TYPE(host_alloc, cuMemHostAlloc);
    SAME_TYPE(host_free, cuMemFreeHost);
    SAME_TYPE(copy_to_device, cuMemcpyHtoDAsync);
    SAME_TYPE(copy_to_host, cuMemcpyDtoHAsync);
    SAME_TYPE(copy, cuMemcpyDtoDAsync);
    SAME_TYPE(set_bytes, cuMemsetD8Async);
    SAME_TYPE(set_words, cuMemsetD32Async);
    SAME_TYPE(mem_info, cuMemGetInfo);
    SAME_TYPE(library_load, cuLibraryLoadData);
    SAME_TYPE(library_get_kernel, cuLibraryGetKernel);
    SAME_TYPE(library_unload, cuLibraryUnload);
    SAME_TYPE(kernel_get_function, cuKernelGetFunction);
    SAME_TYPE(func_load, cuFuncLoad);
    SAME_TYPE(launch, cuLaunchKernel);
    SAME_TYPE(error_name, cuGetErrorName);
    SAME_TYPE(error_string, cuGetErrorString);
}

#define SAME_PLACE(ours, field, theirs, path)                 \
    CHECK_INT(offsetof(ours, field), offsetof(theirs, path)); \
    CHECK_INT(sizeof((ours){0}.field), sizeof((theirs){0}.path))

static void
structs_have_the_drivers_layout(void)
{
    CHECK_INT(sizeof(fsdpc_cu_location), sizeof(CUmemLocation));
    SAME_PLACE(fsdpc_cu_location, type, CUmemLocation, type);
    SAME_PLACE(fsdpc_cu_location, id, CUmemLocation, id);
    CHECK_INT(sizeof(fsdpc_cu_access), sizeof(CUmemAccessDesc));
    SAME_PLACE(fsdpc_cu_access, location, CUmemAccessDesc, location);
    SAME_PLACE(fsdpc_cu_access, flags, CUmemAccessDesc, flags);
    CHECK_INT(sizeof(fsdpc_cu_memory), sizeof(CUmemAllocationProp));
    SAME_PLACE(fsdpc_cu_memory, type, CUmemAllocationProp, type);
    SAME_PLACE(fsdpc_cu_memory, handle_types, CUmemAllocationProp, requestedHandleTypes);
    SAME_PLACE(fsdpc_cu_memory, location, CUmemAllocationProp, location);
    SAME_PLACE(fsdpc_cu_memory, compression, CUmemAllocationProp, allocFlags.compressionType);
    SAME_PLACE(fsdpc_cu_memory, rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
    SAME_PLACE(fsdpc_cu_memory, usage, CUmemAllocationProp, allocFlags.usage);
}

static void
values_are_the_drivers(void)
{
    CHECK_INT(FSDPC_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_INT(FSDPC_CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
    CHECK_INT(FSDPC_CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
    CHECK_INT(FSDPC_CU_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
    CHECK_INT(FSDPC_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
    CHECK_INT(FSDPC_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
    CHECK_INT(FSDPC_CU_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU);
    CHECK_INT(FSDPC_CU_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    CHECK_INT(FSDPC_CU_NOT_READY, CUDA_ERROR_NOT_READY);
    CHECK_INT(FSDPC_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
    CHECK_INT(FSDPC_CU_ATTRIBUTE_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    CHECK_INT(FSDPC_CU_ATTRIBUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    CHECK_INT(FSDPC_CU_ATTRIBUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    CHECK_INT(FSDPC_CU_ATTRIBUTE_VIRTUAL_MEMORY,
              CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    CHECK_INT(FSDPC_CU_ATTRIBUTE_POSIX_HANDLES,
              CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    CHECK_INT(FSDPC_CU_ATTRIBUTE_RDMA_VIRTUAL_MEMORY,
              CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    CHECK_INT(FSDPC_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
    CHECK_INT(FSDPC_CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK_INT(FSDPC_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
    CHECK_INT(FSDPC_CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
    CHECK_INT(FSDPC_CU_MEMORY_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
    CHECK_INT(FSDPC_CU_HANDLE_POSIX, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CHECK_INT(FSDPC_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
    CHECK_INT(FSDPC_CU_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK_INT(FSDPC_CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    CHECK_INT(FSDPC_CU_LEGACY_STREAM, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
}

int
main(void)
{
    prototypes_are_the_drivers();
    structs_have_the_drivers_layout();
    values_are_the_drivers();
    return test_result();
}

#else

int
main(void)
{
    test_skip("the CUDA toolkit's header is not installed");
}

#endif
