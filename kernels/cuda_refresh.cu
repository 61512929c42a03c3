/* A sum in step with the narrower copy that a user sees and may have changed. */
#include "cuda_span.cuh"

template <typename RAW>
static __device__ __forceinline__ bool
same_bits(RAW a, RAW b)
{
    union {
        RAW item;
        uint64_t bits;
    } x, y;
    x.bits = y.bits = 0;
    x.item = a;
    y.item = b;
    return x.bits == y.bits;
}

/* One element a lane: it reads two streams once and hardly ever writes. */
template <int A, int S>
static __device__ void
refresh_span(void *acc_, const void *seen_, int64_t n, int64_t lane, int64_t lanes)
{
    typedef typename item<A>::value wide;
    typename item<A>::raw *acc = (typename item<A>::raw *)acc_;
    const typename item<S>::raw *seen = (const typename item<S>::raw *)seen_;
#pragma unroll 1
    for (int64_t i = lane; i < n; i += lanes) {
        const typename item<S>::raw shown =
            item<S>::put((typename item<S>::value)item<A>::get(acc[i]));
        if (!same_bits(shown, seen[i])) {
            acc[i] = item<A>::put((wide)item<S>::get(seen[i]));
        }
    }
}

template <int A>
static __device__ __forceinline__ void
refresh_from(void *acc, const void *seen, int seen_type, int64_t n, int64_t lane, int64_t lanes)
{
    switch (seen_type) {
    case FSDPC_F32: refresh_span<A, FSDPC_F32>(acc, seen, n, lane, lanes); break;
    case FSDPC_BF16: refresh_span<A, FSDPC_BF16>(acc, seen, n, lane, lanes); break;
    case FSDPC_F16: refresh_span<A, FSDPC_F16>(acc, seen, n, lane, lanes); break;
    default: refresh_span<A, FSDPC_F64>(acc, seen, n, lane, lanes); break;
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
fsdpc_cuda_refresh(const __grid_constant__ fsdpc_cuda_refresh_params p)
{
    const int64_t lane = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t lanes = (int64_t)gridDim.x * blockDim.x;
    if (p.acc_type == FSDPC_F32) {
        refresh_from<FSDPC_F32>(p.acc, p.seen, p.seen_type, p.n, lane, lanes);
    } else {
        refresh_from<FSDPC_F64>(p.acc, p.seen, p.seen_type, p.n, lane, lanes);
    }
}
