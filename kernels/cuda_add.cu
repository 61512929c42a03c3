/* Packs a unit's gradients and adds them to a base, with one launch for any number of tensors.
 *
 * target = base + source * scale is computed in the base's type (float32 or float64) with the operations of
 * fsdpc_cuda_reduce, and rounded once to the target's type. This is a separate kernel, because the base takes
 * registers that the plain pack needs.
 */
#include "cuda_span.cuh"

static __device__ __forceinline__ void
store_value(void *dst, int type, int64_t i, double value)
{
    switch (type) {
    case FSDPC_F32: ((float *)dst)[i] = (float)value; break;
    case FSDPC_BF16: ((uint16_t *)dst)[i] = f32_to_bf16((float)value); break;
    case FSDPC_F16: ((uint16_t *)dst)[i] = f32_to_f16((float)value); break;
    default: ((double *)dst)[i] = value; break;
    }
}

template <typename A>
static __device__ __forceinline__ A
added(A base, A source, A scale)
{
    return sum(base, scale == 1 ? source : product(source, scale));
}

/* Adds elements of any types one by one: if a type is float64 (rare), and outside of whole aligned groups. */
template <typename A>
static __device__ __noinline__ void
add_items(void *dst, int dst_type, const A *base, const void *src, int src_type, int begin, int end,
          A scale, int lane, int lanes)
{
#pragma unroll 1
    for (int i = begin + lane; i < end; i += lanes) {
        store_value(dst, dst_type, i,
                    (double)added<A>(base[i], (A)load_item(src, src_type, i), scale));
    }
}

template <int S, int D, bool GLOBAL>
static __device__ void
add_groups(void *dst_, const float *base, const void *src_, int groups, float scale, int lane,
           int lanes)
{
    /* If each operand of a group is only one word, two groups are loaded at a time, to hide the latency. */
    enum { COUNT = conversion<S, D>::COUNT, IN_FLIGHT = COUNT == 4 ? 2 : 1 };
    typename item<D>::raw *dst = (typename item<D>::raw *)dst_;
    const typename item<S>::raw *src = (const typename item<S>::raw *)src_;
#pragma unroll 1
    for (int first = lane; first < groups; first += IN_FLIGHT * lanes) {
        group<float, COUNT> before[IN_FLIGHT];
        group<typename item<S>::raw, COUNT> in[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                before[k].template load<true>(base + (first + k * lanes) * COUNT);
                in[k].template load<GLOBAL>(src + (first + k * lanes) * COUNT);
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + k * lanes < groups) {
                group<typename item<D>::raw, COUNT> out;
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    out.item[i] = item<D>::put(
                        added<float>(before[k].item[i], item<S>::get(in[k].item[i]), scale));
                }
                out.store(dst + (first + k * lanes) * COUNT);
            }
        }
    }
}

template <int S, int D, bool GLOBAL>
static __device__ void
add_span(void *dst, const float *base, const void *src, int n, float scale, int lane, int lanes)
{
    typedef typename item<S>::raw source;
    typedef typename item<D>::raw target;
    const int head = head_items(dst, sizeof(target), n);
    const bool aligned = on_boundary((target *)dst + head) && on_boundary(base + head) &&
                         on_boundary((const source *)src + head);
    const int groups = aligned ? (n - head) / (int)conversion<S, D>::COUNT : 0;
    const int done = head + groups * (int)conversion<S, D>::COUNT;
    add_items<float>(dst, D, base, src, S, 0, head, scale, lane, lanes);
    add_groups<S, D, GLOBAL>((target *)dst + head, base + head, (const source *)src + head, groups,
                             scale, lane, lanes);
    add_items<float>(dst, D, base, src, S, done, n, scale, lane, lanes);
}

template <int S, bool GLOBAL>
static __device__ __forceinline__ void
add_from(void *dst, int dst_type, const float *base, const void *src, int n, float scale, int lane,
         int lanes)
{
    switch (dst_type) {
    case FSDPC_F32: add_span<S, FSDPC_F32, GLOBAL>(dst, base, src, n, scale, lane, lanes); break;
    case FSDPC_BF16: add_span<S, FSDPC_BF16, GLOBAL>(dst, base, src, n, scale, lane, lanes); break;
    default: add_span<S, FSDPC_F16, GLOBAL>(dst, base, src, n, scale, lane, lanes); break;
    }
}

template <bool GLOBAL>
static __device__ __forceinline__ void
add_any(void *dst, int dst_type, const void *base, int base_type, const void *src, int src_type,
        int n, double scale, int lane, int lanes)
{
    if (base_type == FSDPC_F64) {
        add_items<double>(dst, dst_type, (const double *)base, src, src_type, 0, n, scale, lane,
                          lanes);
        return;
    }
    const float *wide = (const float *)base;
    const float factor = (float)scale;
    if (src_type == FSDPC_F64 || dst_type == FSDPC_F64) {
        add_items<float>(dst, dst_type, wide, src, src_type, 0, n, factor, lane, lanes);
        return;
    }
    switch (src_type) {
    case FSDPC_F32: add_from<FSDPC_F32, GLOBAL>(dst, dst_type, wide, src, n, factor, lane, lanes); break;
    case FSDPC_BF16: add_from<FSDPC_BF16, GLOBAL>(dst, dst_type, wide, src, n, factor, lane, lanes); break;
    default: add_from<FSDPC_F16, GLOBAL>(dst, dst_type, wide, src, n, factor, lane, lanes); break;
    }
}

/* As in pack_view, the elements of the view are gathered in shared memory first. */
static __device__ __noinline__ void
add_view(char *dst, int dst_type, const char *base, int base_type, const fsdpc_cuda_view *view,
         int src_type, int64_t begin, int count, double scale)
{
    enum { HELD_BYTES = 8192 };
    __shared__ uint4 held[HELD_BYTES / 16];
    const int dst_bytes = item_bytes(dst_type), src_bytes = item_bytes(src_type);
    const int base_bytes = item_bytes(base_type), most = HELD_BYTES / src_bytes;
#pragma unroll 1
    for (int done = 0; done < count; done += most) {
        const int n = count - done < most ? count - done : most;
        switch (src_bytes) {
        case 2: gather_items<uint16_t>(held, view, begin + done, n); break;
        case 4: gather_items<uint32_t>(held, view, begin + done, n); break;
        default: gather_items<uint64_t>(held, view, begin + done, n); break;
        }
        __syncthreads();
        add_any<false>(dst + done * dst_bytes, dst_type, base + done * base_bytes, base_type, held,
                       src_type, n, scale, (int)threadIdx.x, (int)blockDim.x);
        __syncthreads();
    }
}

/* A tensor that is not added to the base is packed as by fsdpc_cuda_pack. */
extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
fsdpc_cuda_pack_add(const __grid_constant__ fsdpc_cuda_pack_params p)
{
    const int64_t tile = blockIdx.x;
    const fsdpc_cuda_pack_entry entry = p.entries[p.tile_entry[tile]];
    const int dst_bytes = item_bytes(entry.dst_type), base_bytes = item_bytes(entry.base_type);
    const int most = FSDPC_CUDA_TILE_BYTES / dst_bytes;
    const int64_t begin = (tile - entry.first_tile) * most;
    const int n = entry.n - begin < most ? (int)(entry.n - begin) : most;
    const int lane = (int)threadIdx.x, lanes = (int)blockDim.x;
    fsdpc_cuda_source source = 0;
    if (entry.source >= 0) {
        source = p.table ? p.table[entry.source] : p.source[entry.source];
    }
    const char *src = (const char *)(uintptr_t)(source & FSDPC_CUDA_SOURCE_ADDRESS);
    const int type = (int)(source >> FSDPC_CUDA_SOURCE_TYPE_SHIFT & 15);
    const bool add = source & FSDPC_CUDA_SOURCE_ADD, strided = source & FSDPC_CUDA_SOURCE_STRIDED;
    const char *base = (const char *)p.base + entry.base_offset + begin * base_bytes;
    char *dst = (char *)p.dst + entry.dst_offset + begin * dst_bytes;
    if (add && !src) {
        convert_any<true>(dst, entry.dst_type, base, entry.base_type, n, 1.0, lane, lanes);
    } else if (!src) {
        zero_span(dst, n * dst_bytes, lane, lanes);
    } else if (add && strided) {
        add_view(dst, entry.dst_type, base, entry.base_type, (const fsdpc_cuda_view *)src, type,
                 begin, n, p.scale);
    } else if (strided) {
        pack_view(dst, entry.dst_type, (const fsdpc_cuda_view *)src, type, begin, n, p.scale);
    } else if (add) {
        add_any<true>(dst, entry.dst_type, base, entry.base_type, src + begin * item_bytes(type), type,
                      n, p.scale, lane, lanes);
    } else {
        convert_any<true>(dst, entry.dst_type, src + begin * item_bytes(type), type, n, p.scale, lane,
                          lanes);
    }
}
