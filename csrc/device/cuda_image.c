/* The kernels' machine code, which the assembler puts into this object. See cuda_image.h and setup.py. */
#include "device/cuda_image.h"

#ifdef FSDPC_CUDA_IMAGE

__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        "fsdpc_cuda_image_begin:\n"
        ".incbin \"" FSDPC_CUDA_IMAGE "\"\n"
        "fsdpc_cuda_image_end:\n"
        ".byte 0\n"
        ".popsection\n");
extern const char fsdpc_cuda_image_begin[] __attribute__((visibility("hidden")));
extern const char fsdpc_cuda_image_end[] __attribute__((visibility("hidden")));

const void *
fsdpc_cuda_image(size_t *bytes)
{
    *bytes = (size_t)(fsdpc_cuda_image_end - fsdpc_cuda_image_begin);
    return fsdpc_cuda_image_begin;
}

#else

const void *
fsdpc_cuda_image(size_t *bytes)
{
    *bytes = 0;
    return NULL;
}

#endif
