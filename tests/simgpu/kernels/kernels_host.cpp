/* The kernels of kernels/ for the host, each behind NAME__host(params, grid, block, shared bytes). */
#include "cuda_shim.h"

#include "cuda_image.cu"

#define LAUNCHER(kernel, params_type)                                                        \
    extern "C" __attribute__((visibility("default"))) void kernel##__host(                   \
        const void *params, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, \
        unsigned bz, unsigned)                                                               \
    {                                                                                        \
        shim_launch([](const void *p) { kernel(*(const params_type *)p); }, params,          \
                    shim_grid{gx, gy, gz, bx, by, bz});                                      \
    }
FSDPC_CUDA_KERNELS(LAUNCHER)
