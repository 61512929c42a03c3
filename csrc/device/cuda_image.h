/* The machine code of kernels/cuda_*.cu for GPUs, carried inside the extension. */
#ifndef FSDPC_CUDA_IMAGE_H
#define FSDPC_CUDA_IMAGE_H

#include <stddef.h>

/* Returns a fatbin with code for sm_80, sm_90 and sm_100, and with PTX for newer GPUs. Returns
 * NULL, and 0 bytes, in an extension that was built without nvcc. The image has static storage. */
const void *fsdpc_cuda_image(size_t *bytes);

#endif
