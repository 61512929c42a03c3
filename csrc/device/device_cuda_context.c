/* The context that calls of the driver work in. */
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
