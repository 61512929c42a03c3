/* Packs saved activations into 8 bits and unpacks them, as csrc/activation/activation.c does. A warp packs a
 * block of FSDPC_STEP_BLOCK values at a time; each thread has 8 consecutive values. */
#include "cuda_span.cuh"

enum {
    ACTIVATION_WARP = 32,
    ACTIVATION_SHARE = FSDPC_STEP_BLOCK / ACTIVATION_WARP,
    ACTIVATION_BLOCKS = FSDPC_CUDA_ACTIVATION_ITEMS / FSDPC_STEP_BLOCK,
};

/* If 1.5 * 2^23 is added to a small float32, the low bits of the sum are the nearest integer. */
#define ACTIVATION_ROUNDS 12582912.0f
/* The value of FSDPC_ACTIVATION_STEPS in csrc/activation/activation.h. */
#define ACTIVATION_STEPS 126.0f

union activation_codes {
    uint2 word;
    int8_t item[ACTIVATION_SHARE];
};

template <int T>
static __device__ __forceinline__ void
load_activations(const void *values, int64_t at, int64_t n, float *out)
{
    typedef typename item<T>::raw raw;
    const raw *from = (const raw *)values + at;
    if (at + ACTIVATION_SHARE <= n && on_boundary(from)) {
        group<raw, ACTIVATION_SHARE> in;
        in.template load<true>(from);
#pragma unroll
        for (int i = 0; i < ACTIVATION_SHARE; i++) {
            out[i] = (float)item<T>::get(in.item[i]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < ACTIVATION_SHARE; i++) {
        out[i] = at + i < n ? (float)item<T>::get(from[i]) : 0;
    }
}

template <int T>
static __device__ __forceinline__ void
pack_activations(const fsdpc_cuda_activation_params &p, int64_t begin)
{
    float values[ACTIVATION_SHARE];
    activation_codes codes;
    int32_t most = 0;
    const int64_t at = begin + (int64_t)(threadIdx.x % ACTIVATION_WARP) * ACTIVATION_SHARE;
    load_activations<T>(p.values, at, p.n, values);
#pragma unroll
    for (int i = 0; i < ACTIVATION_SHARE; i++) {
        const int32_t bits = (int32_t)(__float_as_uint(values[i]) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    most = __reduce_max_sync(0xffffffffu, most);
    const bool finite = most < 0x7F800000;
    const float scale = __uint_as_float(finite ? (uint32_t)most : 0x7FC00000u);
    const float lift = scale < 0x1p-90f ? 0x1p64f : 1;
    const float inverse = scale > 0 ? __fdiv_rn(ACTIVATION_STEPS, product(scale, lift)) : 0;
#pragma unroll
    for (int i = 0; i < ACTIVATION_SHARE; i++) {
        const float rounded = sum(product(product(values[i], lift), inverse), ACTIVATION_ROUNDS);
        const int32_t steps =
            (int32_t)__float_as_uint(rounded) - (int32_t)__float_as_uint(ACTIVATION_ROUNDS);
        codes.item[i] = finite ? (int8_t)(steps + (values[i] > 0) - (values[i] < 0)) : 0;
    }
    if (threadIdx.x % ACTIVATION_WARP == 0 && begin < p.n) {
        p.scales[begin / FSDPC_STEP_BLOCK] = scale;
    }
    if (at + ACTIVATION_SHARE <= p.n && (uintptr_t)(p.codes + at) % ACTIVATION_SHARE == 0) {
        *(uint2 *)(p.codes + at) = codes.word;
        return;
    }
#pragma unroll
    for (int i = 0; i < ACTIVATION_SHARE; i++) {
        if (at + i < p.n) {
            p.codes[at + i] = codes.item[i];
        }
    }
}

/* Returns `value` clamped to -most..most. */
static __device__ __forceinline__ int32_t
within(int32_t value, int32_t most)
{
    const int32_t low = value < most ? value : most;
    return low > -most ? low : -most;
}

/* Decodes 0 to 0, +-1 to +-1/4 step, other codes to |code| - 1 steps with their sign. Step: scale / 126. */
static __device__ __forceinline__ float
unpacked(int32_t code, float scale)
{
    const int32_t quarters = 4 * code - 2 * within(code, 1) - within(code, 2);
    return product(product((float)quarters, 0.25f / ACTIVATION_STEPS), scale);
}

template <int T>
static __device__ __forceinline__ void
unpack_activations(const fsdpc_cuda_activation_params &p, int64_t begin)
{
    typedef typename item<T>::raw raw;
    group<raw, ACTIVATION_SHARE> out;
    activation_codes codes;
    const int64_t at = begin + (int64_t)(threadIdx.x % ACTIVATION_WARP) * ACTIVATION_SHARE;
    if (at >= p.n) {
        return;
    }
    const bool whole = at + ACTIVATION_SHARE <= p.n;
    const float scale = p.scales[begin / FSDPC_STEP_BLOCK];
    if (whole && (uintptr_t)(p.codes + at) % ACTIVATION_SHARE == 0) {
        codes.word = __ldcs((const uint2 *)(p.codes + at));
    } else {
#pragma unroll
        for (int i = 0; i < ACTIVATION_SHARE; i++) {
            codes.item[i] = at + i < p.n ? p.codes[at + i] : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < ACTIVATION_SHARE; i++) {
        out.item[i] = item<T>::put(unpacked(codes.item[i], scale));
    }
    raw *to = (raw *)p.values + at;
    if (whole && on_boundary(to)) {
        out.store(to);
        return;
    }
#pragma unroll
    for (int i = 0; i < ACTIVATION_SHARE; i++) {
        if (at + i < p.n) {
            to[i] = out.item[i];
        }
    }
}

/* Calls `what` for each block of values of the calling warp. All warps make the same number of calls. */
#define FOR_ACTIVATION_BLOCKS(what, T)                                                            \
    for (int b = (int)threadIdx.x / ACTIVATION_WARP; b < ACTIVATION_BLOCKS;                       \
         b += FSDPC_CUDA_THREADS / ACTIVATION_WARP) {                                             \
        what<T>(p, (int64_t)blockIdx.x * FSDPC_CUDA_ACTIVATION_ITEMS + b * FSDPC_STEP_BLOCK);     \
    }

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_pack8(const __grid_constant__ fsdpc_cuda_activation_params p)
{
    switch (p.type) {
    case FSDPC_F32: FOR_ACTIVATION_BLOCKS(pack_activations, FSDPC_F32); break;
    case FSDPC_BF16: FOR_ACTIVATION_BLOCKS(pack_activations, FSDPC_BF16); break;
    default: FOR_ACTIVATION_BLOCKS(pack_activations, FSDPC_F16); break;
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_unpack8(const __grid_constant__ fsdpc_cuda_activation_params p)
{
    switch (p.type) {
    case FSDPC_F32: FOR_ACTIVATION_BLOCKS(unpack_activations, FSDPC_F32); break;
    case FSDPC_BF16: FOR_ACTIVATION_BLOCKS(unpack_activations, FSDPC_BF16); break;
    default: FOR_ACTIVATION_BLOCKS(unpack_activations, FSDPC_F16); break;
    }
}
