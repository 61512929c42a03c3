/* All kernels in one translation unit, so that the image has one copy of the code that they share. */
#include "cuda_cast.cu"
#include "cuda_add.cu"
#include "cuda_reduce.cu"
#include "cuda_refresh.cu"
#include "cuda_step.cu"
#include "cuda_step8.cu"
#include "cuda_activation.cu"
#include "cuda_codec.cu"
