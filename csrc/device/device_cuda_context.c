/* The CUDA context in which the driver is called. */
#include "device/device_cuda_impl.h"

int
fsdpc_cuda_enter(const struct fsdpc_cuda *cuda)
{
    fsdpc_cu_context current = NULL;
    FSDPC_CU(cuda, ctx_get_current(&current), "the thread's CUDA context");
    if (current == cuda->context) {
        return FSDPC_OK;
    }
    return fsdpc_cuda_check(cuda->driver, cuda->driver->ctx_set_current(cuda->context),
                            "setting the thread's CUDA context");
}

int
fsdpc_cuda_free_bytes(void *context, size_t *free_bytes, size_t *total)
{
    struct fsdpc_cuda *cuda = context;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, mem_info(free_bytes, total), "the GPU's free memory");
    return FSDPC_OK;
}
