/* Updates a sum of gradients from its narrower copy, which the user sees and may have changed. */
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

/* If the rounded sum differs from `grad`, sets the element of the sum to `grad` and returns true. */
template <int A, int S>
static __device__ __forceinline__ bool
refresh_item(typename item<A>::raw &acc, typename item<S>::raw grad)
{
    const typename item<S>::raw shown = item<S>::put((typename item<S>::value)item<A>::get(acc));
    if (same_bits(shown, grad)) {
        return false;
    }
    acc = item<A>::put((typename item<A>::value)item<S>::get(grad));
    return true;
}

template <int A, int S>
static __device__ void
refresh_items(typename item<A>::raw *acc, const typename item<S>::raw *grad, int64_t n,
              int64_t lane, int64_t lanes)
{
#pragma unroll 1
    for (int64_t i = lane; i < n; i += lanes) {
        typename item<A>::raw value = acc[i];
        if (refresh_item<A, S>(value, grad[i])) {
            acc[i] = value;
        }
    }
}

/* Reads the sum and its copy one time. Writes a group of the sum only if an element of the group changed. */
template <int A, int S>
static __device__ void
refresh_groups(typename item<A>::raw *acc, const typename item<S>::raw *grad, int64_t groups,
               int64_t lane, int64_t lanes)
{
    enum { COUNT = conversion<S, A>::COUNT, IN_FLIGHT = 2 };
#pragma unroll 1
    for (int64_t first = lane; first < groups; first += IN_FLIGHT * lanes) {
        group<typename item<A>::raw, COUNT> sum[IN_FLIGHT];
        group<typename item<S>::raw, COUNT> shown[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                sum[k].template load<true>(acc + (first + k * lanes) * COUNT);
                shown[k].template load<true>(grad + (first + k * lanes) * COUNT);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                bool changed = false;
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    changed |= refresh_item<A, S>(sum[k].item[i], shown[k].item[i]);
                }
                if (changed) {
                    sum[k].store(acc + (first + k * lanes) * COUNT);
                }
            }
        }
    }
}

template <int A, int S>
static __device__ void
refresh_span(void *acc_, const void *grad_, int64_t n, int64_t lane, int64_t lanes)
{
    typename item<A>::raw *acc = (typename item<A>::raw *)acc_;
    const typename item<S>::raw *grad = (const typename item<S>::raw *)grad_;
    if constexpr (A != FSDPC_F64 && S != FSDPC_F64) {
        enum { COUNT = conversion<S, A>::COUNT };
        const int64_t head = head_items(acc, sizeof *acc, n);
        if (on_boundary(acc + head) && on_boundary(grad + head)) {
            const int64_t groups = (n - head) / COUNT, done = head + groups * COUNT;
            refresh_items<A, S>(acc, grad, head, lane, lanes);
            refresh_groups<A, S>(acc + head, grad + head, groups, lane, lanes);
            refresh_items<A, S>(acc + done, grad + done, n - done, lane, lanes);
            return;
        }
    }
    refresh_items<A, S>(acc, grad, n, lane, lanes);
}

template <int A>
static __device__ __forceinline__ void
refresh_from(void *acc, const void *grad, int grad_type, int64_t n, int64_t lane, int64_t lanes)
{
    switch (grad_type) {
    case FSDPC_F32:
        refresh_span<A, FSDPC_F32>(acc, grad, n, lane, lanes);
        break;
    case FSDPC_BF16:
        refresh_span<A, FSDPC_BF16>(acc, grad, n, lane, lanes);
        break;
    case FSDPC_F16:
        refresh_span<A, FSDPC_F16>(acc, grad, n, lane, lanes);
        break;
    default:
        refresh_span<A, FSDPC_F64>(acc, grad, n, lane, lanes);
        break;
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_refresh(const __grid_constant__ fsdpc_cuda_refresh_params p)
{
    const int64_t lane = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t lanes = (int64_t)gridDim.x * blockDim.x;
    if (p.acc_type == FSDPC_F32) {
        refresh_from<FSDPC_F32>(p.acc, p.grad, p.grad_type, p.n, lane, lanes);
    } else {
        refresh_from<FSDPC_F64>(p.acc, p.grad, p.grad_type, p.n, lane, lanes);
    }
}
