/* The CUDA language on the host, as far as the kernels of kernels/ use it. This C++ header is included before
 * them.
 *
 * The threads of a block run one after the other on the calling thread. A thread that reaches __syncthreads()
 * stays there on its own stack (a fibre) until the other threads have reached it; a block without a barrier
 * uses only one stack. Shared memory is static, because a thread runs one block at a time. At the
 * start of a block, shared memory still has the values of the block before, as on a device. Arithmetic must
 * not be fused: compile with -ffp-contract=off.
 */
#ifndef SIMGPU_CUDA_SHIM_H
#define SIMGPU_CUDA_SHIM_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)

struct shim_index {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

extern thread_local shim_index gridDim, blockDim, blockIdx, threadIdx;

/* All threads of the block must call this, or none: anything else ends the program. */
void __syncthreads(void);

/* Returns the largest of a warp's values. Here all threads of the block must call this, so that a barrier can
 * be used. */
int __reduce_max_sync(unsigned lanes, int value);
/* Returns the sum of a warp's values. All threads of the block must call this, too. */
unsigned __reduce_add_sync(unsigned lanes, unsigned value);

/* The range of addresses of this thread's copies of all __shared__ variables. */
struct shim_bytes {
    uintptr_t begin, end;
};
const shim_bytes &shim_shared(void);
[[noreturn]] void shim_stop(const char *what);

/* On a GPU this instruction reads global memory, so it would not find a shared variable at its address. */
template <typename T>
static inline T
__ldcs(const T *from)
{
    const shim_bytes &shared = shim_shared();
    if ((uintptr_t)from >= shared.begin && (uintptr_t)from < shared.end) {
        shim_stop("__ldcs reads shared memory");
    }
    return *from;
}

static inline float
__fmul_rn(float a, float b)
{
    return a * b;
}

static inline float
__fadd_rn(float a, float b)
{
    return a + b;
}

static inline double
__dmul_rn(double a, double b)
{
    return a * b;
}

static inline double
__dadd_rn(double a, double b)
{
    return a + b;
}

static inline float
__fmaf_rn(float a, float b, float c)
{
    return std::fmaf(a, b, c);
}

static inline float
__fsqrt_rn(float x)
{
    return std::sqrt(x);
}

static inline double
__dsqrt_rn(double x)
{
    return std::sqrt(x);
}

static inline float
__fdiv_rn(float a, float b)
{
    return a / b;
}

static inline double
__ddiv_rn(double a, double b)
{
    return a / b;
}

static inline double
__fma_rn(double a, double b, double c)
{
    return std::fma(a, b, c);
}

static inline uint32_t
__float_as_uint(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float
__uint_as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Runs a grid; `kernel` is called once for each of its threads. */
typedef void shim_kernel(const void *params);
struct shim_grid {
    unsigned gx, gy, gz, bx, by, bz;
};
void shim_launch(shim_kernel *kernel, const void *params, shim_grid grid);

#endif
