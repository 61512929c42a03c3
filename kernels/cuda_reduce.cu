/* Sums of gradients, norms, and the factor that clips gradients, without a synchronization with the host.
 *
 * Squares are added in double: over the elements of a thread, then over the threads of a block, then over
 * the blocks. The order of these additions depends only on the buffer's length and its address modulo 16.
 */
#include "cuda_span.cuh"

/* --- norms ---------------------------------------------------------------------------------------- */

/* One thread's sum of squares and largest magnitude, for float64. */
template <typename VALUE> struct squares {
    double sum, max;
    bool nonfinite;

    __device__ __forceinline__ squares() : sum(0), max(0), nonfinite(false)
    {
    }

    __device__ __forceinline__ void add(double value)
    {
        const double magnitude = fabs(value);
        sum = ::sum(sum, product(value, value));
        nonfinite |= !(magnitude <= 0x1.fffffffffffffp1023);
        if (!(magnitude <= max)) {
            max = max != max ? max : magnitude;
        }
    }

    __device__ __forceinline__ fsdpc_cuda_norm_value norm() const
    {
        return {sum, max, nonfinite};
    }
};

/* The sum and the magnitude for narrower types. Operations in double are slow on many GPUs, so few are used.
 * A square is exact in double, so a fused multiply-add gives the same sum. Magnitudes are compared by their
 * bits as integers, in which infinity is larger than all numbers, and NaN is larger than infinity. */
template <> struct squares<float> {
    double sum;
    uint32_t top;

    __device__ __forceinline__ squares() : sum(0), top(0)
    {
    }

    __device__ __forceinline__ void add(float value)
    {
        const uint32_t magnitude = __float_as_uint(value) & 0x7FFFFFFFu;
        const double wide = (double)value;
        sum = __fma_rn(wide, wide, sum);
        top = top < magnitude ? magnitude : top;
    }

    __device__ __forceinline__ fsdpc_cuda_norm_value norm() const
    {
        return {sum, (double)__uint_as_float(top), top >= 0x7F800000u};
    }
};

static __device__ __forceinline__ void
add_norm(fsdpc_cuda_norm_value *norm, const fsdpc_cuda_norm_value *other)
{
    norm->sum = sum(norm->sum, other->sum);
    norm->nonfinite |= other->nonfinite;
    if (!(other->max <= norm->max)) {
        norm->max = norm->max != norm->max ? norm->max : other->max;
    }
}

/* Adds up *own of all threads of a block. All threads must call this; the first thread writes *out. */
static __device__ void
add_block(const fsdpc_cuda_norm_value *own, fsdpc_cuda_norm_value *out)
{
    enum { BRANCH = 16 };
    __shared__ fsdpc_cuda_norm_value leaf[FSDPC_CUDA_THREADS];
    const int thread = (int)threadIdx.x;
    leaf[thread] = *own;
    __syncthreads();
    if (thread % BRANCH == 0) {
        for (int i = 1; i < BRANCH; i++) {
            add_norm(&leaf[thread], &leaf[thread + i]);
        }
    }
    __syncthreads();
    if (thread == 0) {
        for (int i = BRANCH; i < FSDPC_CUDA_THREADS; i += BRANCH) {
            add_norm(&leaf[0], &leaf[i]);
        }
        *out = leaf[0];
    }
}

template <int T>
static __device__ fsdpc_cuda_norm_value
sum_of_squares(const void *src_, int64_t n, int64_t lane, int64_t lanes)
{
    typedef typename item<T>::raw raw;
    enum { COUNT = 16 / sizeof(raw), IN_FLIGHT = 4 };
    const raw *src = (const raw *)src_;
    const int64_t head = head_items(src, sizeof *src, n);
    const int64_t groups = on_boundary(src + head) ? (n - head) / COUNT : 0;
    squares<typename item<T>::value> sum;
#pragma unroll 1
    for (int64_t i = lane; i < head; i += lanes) {
        sum.add(item<T>::get(src[i]));
    }
#pragma unroll 1
    for (int64_t first = lane; first < groups; first += IN_FLIGHT * lanes) {
        group<raw, COUNT> in[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                in[k].template load<true>(src + head + (first + k * lanes) * COUNT);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    sum.add(item<T>::get(in[k].item[i]));
                }
            }
        }
    }
#pragma unroll 1
    for (int64_t i = head + groups * COUNT + lane; i < n; i += lanes) {
        sum.add(item<T>::get(src[i]));
    }
    return sum.norm();
}

/* For norms of an order other than 2. Loads one element at a time, because pow() costs more than the load. */
static __device__ __noinline__ double
sum_of_powers(const void *src, int type, int64_t n, double p, int64_t lane, int64_t lanes)
{
    double total = 0;
#pragma unroll 1
    for (int64_t i = lane; i < n; i += lanes) {
        total = sum(total, pow(fabs(load_item(src, type, i)), p));
    }
    return total;
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_norm(const __grid_constant__ fsdpc_cuda_norm_params p)
{
    const own_span own(p.span, (int)p.count);
    const void *src = own.span->data;
    const int64_t n = own.span->n;
    const int type = own.span->type;
    fsdpc_cuda_norm_value norm = {0, 0, 0};
    if (p.p != 2) {
        norm.sum = sum_of_powers(src, type, n, p.p, own.lane, own.lanes);
    } else {
        switch (type) {
        case FSDPC_F32:
            norm = sum_of_squares<FSDPC_F32>(src, n, own.lane, own.lanes);
            break;
        case FSDPC_BF16:
            norm = sum_of_squares<FSDPC_BF16>(src, n, own.lane, own.lanes);
            break;
        case FSDPC_F16:
            norm = sum_of_squares<FSDPC_F16>(src, n, own.lane, own.lanes);
            break;
        default:
            norm = sum_of_squares<FSDPC_F64>(src, n, own.lane, own.lanes);
            break;
        }
    }
    add_block(&norm, &p.partials[blockIdx.x]);
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_norm_sum(const __grid_constant__ fsdpc_cuda_norm_sum_params p)
{
    enum { IN_FLIGHT = 6 };
    fsdpc_cuda_norm_value norm = {0, 0, 0}, total;
    int64_t i = threadIdx.x;
    /* Memory latency limits the speed of a single block, so each thread starts several loads at once. */
#pragma unroll 1
    for (; i + (IN_FLIGHT - 1) * (int64_t)blockDim.x < p.count;
         i += IN_FLIGHT * (int64_t)blockDim.x) {
        fsdpc_cuda_norm_value part[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            part[k] = p.partials[i + k * (int64_t)blockDim.x];
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            add_norm(&norm, &part[k]);
        }
    }
#pragma unroll 1
    for (; i < p.count; i += blockDim.x) {
        add_norm(&norm, &p.partials[i]);
    }
    add_block(&norm, &total);
    if (threadIdx.x == 0) {
        if (p.add) {
            const fsdpc_cuda_norm_value block = total;
            total = *p.out;
            add_norm(&total, &block);
        }
        *p.out = total;
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_clip(const __grid_constant__ fsdpc_cuda_clip_params p)
{
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    double norm = p.total->max;
    if (p.p == 2) {
        norm = sqrt(p.total->sum);
    } else if (p.p <= 0x1.fffffffffffffp1023) {
        norm = pow(p.total->sum, 1 / p.p);
    }
    const double factor = p.max_norm / (norm + p.epsilon);
    *p.norm = norm;
    *p.factor = factor >= 1 ? 1 : factor;
}

/* --- reduce --------------------------------------------------------------------------------------- */

template <int S, int A> struct reduction {
    typedef typename item<S>::raw source;
    typedef typename item<A>::raw target;
    enum {
        SMALLER = sizeof(source) < sizeof(target) ? sizeof(source) : sizeof(target),
        COUNT = 16 / SMALLER,
        /* If both types have the same size, a group is one load of each. Two groups then hide the latency. */
        IN_FLIGHT = sizeof(source) == sizeof(target) ? 2 : 1,
    };
};

template <int S, int A>
static __device__ __forceinline__ void
add_group(group<typename item<A>::raw, reduction<S, A>::COUNT> &added,
          const group<typename item<S>::raw, reduction<S, A>::COUNT> &in, bool first)
{
    typedef typename item<A>::raw target;
#pragma unroll
    for (int i = 0; i < reduction<S, A>::COUNT; i++) {
        const target term = (target)item<S>::get(in.item[i]);
        added.item[i] = first ? term : sum(added.item[i], term);
    }
}

template <int S, int A>
static __device__ __forceinline__ typename item<A>::raw
finish(const fsdpc_cuda_reduce_params &p, typename item<A>::raw before, typename item<A>::raw added)
{
    typedef typename item<A>::raw target;
    const target scale = (target)p.scale;
    const target term = scale == 1 ? added : product(added, scale);
    return p.add ? sum(before, term) : term;
}

template <int S, int A>
static __device__ void
reduce_items(const fsdpc_cuda_reduce_params &p, int64_t begin, int64_t end, int64_t lane,
             int64_t lanes)
{
    typedef typename item<A>::raw target;
    target *acc = (target *)p.acc;
#pragma unroll 1
    for (int64_t i = begin + lane; i < end; i += lanes) {
        target added = 0;
        bool first = true;
#pragma unroll 1
        for (int s = 0; s < p.src_count; s++) {
            const typename item<S>::raw *src = (const typename item<S>::raw *)p.src[s];
            if (src) {
                const target term = (target)item<S>::get(src[i]);
                added = first ? term : sum(added, term);
                first = false;
            }
        }
        acc[i] = finish<S, A>(p, p.add ? acc[i] : 0, added);
    }
}

template <int S, int A>
static __device__ void
reduce_groups(const fsdpc_cuda_reduce_params &p, int64_t begin, int64_t groups, int64_t lane,
              int64_t lanes)
{
    typedef typename item<S>::raw source;
    typedef typename item<A>::raw target;
    enum { COUNT = reduction<S, A>::COUNT, IN_FLIGHT = reduction<S, A>::IN_FLIGHT, AT_ONCE = 2 };
#pragma unroll 1
    for (int64_t g = lane; g < groups; g += IN_FLIGHT * lanes) {
        group<target, COUNT> before[IN_FLIGHT], added[IN_FLIGHT];
        bool first = true;
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                added[k].item[i] = 0;
                before[k].item[i] = 0;
            }
            if (p.add && g + k * lanes < groups) {
                before[k].template load<true>((const target *)p.acc + begin +
                                              (g + k * lanes) * COUNT);
            }
        }
#pragma unroll 1
        for (int s = 0; s < p.src_count; s += AT_ONCE) {
            const source *src[AT_ONCE];
            group<source, COUNT> in[AT_ONCE][IN_FLIGHT];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                src[j] = s + j < p.src_count ? (const source *)p.src[s + j] : NULL;
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++) {
                    if (src[j] && g + k * lanes < groups) {
                        in[j][k].template load<true>(src[j] + begin + (g + k * lanes) * COUNT);
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++) {
                    if (src[j] && g + k * lanes < groups) {
                        add_group<S, A>(added[k], in[j][k], first);
                    }
                }
                first = first && !src[j];
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (g + k * lanes < groups) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    added[k].item[i] = finish<S, A>(p, before[k].item[i], added[k].item[i]);
                }
                added[k].store((target *)p.acc + begin + (g + k * lanes) * COUNT);
            }
        }
    }
}

template <int S, int A>
static __device__ void
reduce_span(const fsdpc_cuda_reduce_params &p, int64_t lane, int64_t lanes)
{
    typedef reduction<S, A> pair;
    if constexpr (S == FSDPC_F64 || A == FSDPC_F64) {
        reduce_items<S, A>(p, 0, p.n, lane, lanes);
        return;
    }
    const int64_t head = head_items(p.acc, sizeof(typename pair::target), p.n);
    bool aligned = on_boundary((const typename pair::target *)p.acc + head);
#pragma unroll 1
    for (int s = 0; s < p.src_count; s++) {
        const typename pair::source *src = (const typename pair::source *)p.src[s];
        aligned = aligned && (!src || on_boundary(src + head));
    }
    const int64_t groups = aligned ? (p.n - head) / pair::COUNT : 0;
    reduce_items<S, A>(p, 0, head, lane, lanes);
    reduce_groups<S, A>(p, head, groups, lane, lanes);
    reduce_items<S, A>(p, head + groups * pair::COUNT, p.n, lane, lanes);
}

template <int A>
static __device__ void
reduce_any(const fsdpc_cuda_reduce_params &p, int64_t lane, int64_t lanes)
{
    switch (p.src_type) {
    case FSDPC_F32:
        reduce_span<FSDPC_F32, A>(p, lane, lanes);
        break;
    case FSDPC_BF16:
        reduce_span<FSDPC_BF16, A>(p, lane, lanes);
        break;
    case FSDPC_F16:
        reduce_span<FSDPC_F16, A>(p, lane, lanes);
        break;
    default:
        reduce_span<FSDPC_F64, A>(p, lane, lanes);
        break;
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_reduce(const __grid_constant__ fsdpc_cuda_reduce_params p)
{
    const int64_t lane = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t lanes = (int64_t)gridDim.x * blockDim.x;
    if (p.acc_type == FSDPC_F64) {
        reduce_any<FSDPC_F64>(p, lane, lanes);
    } else {
        reduce_any<FSDPC_F32>(p, lane, lanes);
    }
}
