/* Functions by which any number of threads together convert, copy or zero a stretch of elements.
 *
 * `lane` is the calling thread's number among the `lanes` threads. I is the integer type of all counts; for
 * a short stretch (a tile) it is int, which takes fewer registers. GLOBAL is true if the source is global
 * memory, and false if it is a block's shared memory. Neighbouring lanes touch neighbouring memory. The lane
 * that reads an element also writes it, so that a buffer may be changed in place.
 */
#ifndef FSDPC_CUDA_SPAN_CUH
#define FSDPC_CUDA_SPAN_CUH

#include "cuda_convert.cuh"

/* The span that a block belongs to, and the number of the calling thread among the span's threads. */
struct own_span {
    const fsdpc_cuda_span *span;
    int64_t lane, lanes;

    __device__ __forceinline__ own_span(const fsdpc_cuda_span *spans, int count)
    {
        const int block = (int)blockIdx.x;
        int low = 0, high = count - 1;
#pragma unroll 1
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (spans[middle].first_block <= block) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        const int first = spans[low].first_block;
        const int end = low + 1 < count ? spans[low + 1].first_block : (int)gridDim.x;
        span = &spans[low];
        lane = (int64_t)(block - first) * blockDim.x + threadIdx.x;
        lanes = (int64_t)(end - first) * blockDim.x;
    }
};

template <int S, int D> struct conversion {
    typedef typename item<S>::raw source;
    typedef typename item<D>::raw target;
    typedef typename item<D>::value target_value;
    typedef typename wider<typename item<S>::value, target_value>::type compute;
    enum {
        SMALLER = sizeof(source) < sizeof(target) ? sizeof(source) : sizeof(target),
        COUNT = 16 / SMALLER,
        LOADS = COUNT * (int)sizeof(source) / 16,
        IN_FLIGHT = LOADS < 4 ? 4 / LOADS : 1,
    };

    compute factor;
    bool scaled; /* true: elements are multiplied by `factor` before the conversion */

    __device__ __forceinline__ target operator()(source x) const
    {
        compute value = (compute)item<S>::get(x);
        if (scaled) {
            value = product(value, factor);
        }
        return item<D>::put((target_value)value);
    }
};

template <int S, int D, typename I>
static __device__ void
convert_items(const conversion<S, D> &convert, typename item<D>::raw *dst,
              const typename item<S>::raw *src, I n, I lane, I lanes)
{
#pragma unroll 1
    for (I i = lane; i < n; i += lanes) {
        dst[i] = convert(src[i]);
    }
}

template <int S, int D, bool GLOBAL, typename I>
static __device__ void
convert_groups(const conversion<S, D> &convert, typename item<D>::raw *dst,
               const typename item<S>::raw *src, I groups, I lane, I lanes)
{
    enum { COUNT = conversion<S, D>::COUNT, IN_FLIGHT = conversion<S, D>::IN_FLIGHT };
#pragma unroll 1
    for (I first = lane; first < groups; first += IN_FLIGHT * lanes) {
        group<typename item<S>::raw, COUNT> in[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                in[k].template load<GLOBAL>(src + (first + k * lanes) * COUNT);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                group<typename item<D>::raw, COUNT> out;
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    out.item[i] = convert(in[k].item[i]);
                }
                out.store(dst + (first + k * lanes) * COUNT);
            }
        }
    }
}

/* If a type is float64, which is rare, a thread loads one element at a time: loads of 8 bytes suffice. */
template <int S, int D, bool GLOBAL, typename I>
static __device__ void
convert_span(void *dst_, const void *src_, I n, double scale, I lane, I lanes)
{
    typedef conversion<S, D> pair;
    typename pair::target *dst = (typename pair::target *)dst_;
    const typename pair::source *src = (const typename pair::source *)src_;
    pair convert;
    convert.factor = (typename pair::compute)scale;
    convert.scaled = convert.factor != 1;
    if constexpr (sizeof(typename pair::compute) == 4) {
        const I head = head_items(dst, sizeof *dst, n);
        if (on_boundary(dst + head) && on_boundary(src + head)) {
            const I groups = (n - head) / pair::COUNT;
            const I done = head + groups * pair::COUNT;
            convert_items(convert, dst, src, head, lane, lanes);
            convert_groups<S, D, GLOBAL>(convert, dst + head, src + head, groups, lane, lanes);
            convert_items(convert, dst + done, src + done, n - done, lane, lanes);
            return;
        }
    }
    convert_items(convert, dst, src, n, lane, lanes);
}

/* --- bits ---------------------------------------------------------------------------------------- */

template <typename WORD, bool GLOBAL, typename I>
static __device__ void
copy_words(char *dst, const char *src, I bytes, I lane, I lanes)
{
    enum { IN_FLIGHT = 4 };
    const I words = bytes / (I)sizeof(WORD);
#pragma unroll 1
    for (I first = lane; first < words; first += IN_FLIGHT * lanes) {
        WORD held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < words) {
                held[k] = load_word<GLOBAL>((const WORD *)src + first + k * lanes);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < words) {
                ((WORD *)dst)[first + k * lanes] = held[k];
            }
        }
    }
#pragma unroll 1
    for (I i = words * (I)sizeof(WORD) + lane; i < bytes; i += lanes) {
        dst[i] = src[i];
    }
}

/* Copies in the widest words for which source and destination can both be aligned. */
template <bool GLOBAL, typename I>
static __device__ __forceinline__ void
copy_span(void *dst_, const void *src_, I bytes, I lane, I lanes)
{
    char *dst = (char *)dst_;
    const char *src = (const char *)src_;
    const I head = head_items(dst, 1, bytes);
    const uintptr_t apart = (uintptr_t)dst ^ (uintptr_t)src;
#pragma unroll 1
    for (I i = lane; i < head; i += lanes) {
        dst[i] = src[i];
    }
    dst += head;
    src += head;
    bytes -= head;
    if ((apart & 15) == 0) {
        copy_words<uint4, GLOBAL, I>(dst, src, bytes, lane, lanes);
    } else if ((apart & 3) == 0) {
        copy_words<uint32_t, GLOBAL, I>(dst, src, bytes, lane, lanes);
    } else if ((apart & 1) == 0) {
        copy_words<uint16_t, GLOBAL, I>(dst, src, bytes, lane, lanes);
    } else {
        copy_words<uint8_t, GLOBAL, I>(dst, src, bytes, lane, lanes);
    }
}

template <typename I>
static __device__ void
zero_span(void *dst_, I bytes, I lane, I lanes)
{
    char *dst = (char *)dst_;
    const I head = head_items(dst, 1, bytes);
    const I words = (bytes - head) / 16;
    const uint4 nothing = {0, 0, 0, 0};
#pragma unroll 1
    for (I i = lane; i < head; i += lanes) {
        dst[i] = 0;
    }
#pragma unroll 1
    for (I i = lane; i < words; i += lanes) {
        ((uint4 *)(dst + head))[i] = nothing;
    }
#pragma unroll 1
    for (I i = head + words * 16 + lane; i < bytes; i += lanes) {
        dst[i] = 0;
    }
}

/* --- any types ----------------------------------------------------------------------------------- */

template <int S, bool GLOBAL, typename I>
static __device__ __forceinline__ void
convert_from(void *dst, int dst_type, const void *src, I n, double scale, I lane,
             I lanes)
{
    switch (dst_type) {
    case FSDPC_F32: convert_span<S, FSDPC_F32, GLOBAL, I>(dst, src, n, scale, lane, lanes); break;
    case FSDPC_BF16: convert_span<S, FSDPC_BF16, GLOBAL, I>(dst, src, n, scale, lane, lanes); break;
    case FSDPC_F16: convert_span<S, FSDPC_F16, GLOBAL, I>(dst, src, n, scale, lane, lanes); break;
    default: convert_span<S, FSDPC_F64, GLOBAL, I>(dst, src, n, scale, lane, lanes); break;
    }
}

/* All threads of a block take the same branch. Inlined, because a call would spill registers. */
template <bool GLOBAL, typename I>
static __device__ __forceinline__ void
convert_any(void *dst, int dst_type, const void *src, int src_type, I n, double scale,
            I lane, I lanes)
{
    const bool unscaled = (src_type == FSDPC_F64 ? scale : (double)(float)scale) == 1.0;
    if (src_type == FSDPC_BYTES || (src_type == dst_type && unscaled)) {
        if (dst != src) {
            copy_span<GLOBAL>(dst, src, n * item_bytes(src_type), lane, lanes);
        }
        return;
    }
    switch (src_type) {
    case FSDPC_F32: convert_from<FSDPC_F32, GLOBAL, I>(dst, dst_type, src, n, scale, lane, lanes); break;
    case FSDPC_BF16: convert_from<FSDPC_BF16, GLOBAL, I>(dst, dst_type, src, n, scale, lane, lanes); break;
    case FSDPC_F16: convert_from<FSDPC_F16, GLOBAL, I>(dst, dst_type, src, n, scale, lane, lanes); break;
    default: convert_from<FSDPC_F64, GLOBAL, I>(dst, dst_type, src, n, scale, lane, lanes); break;
    }
}

#endif
