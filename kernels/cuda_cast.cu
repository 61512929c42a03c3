/* Casts, and the pack of a unit's gradients (or of its master shards into a slot) in one launch. */
#include "cuda_span.cuh"

static __device__ __forceinline__ int64_t
grid_lane(void)
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ int64_t
grid_lanes(void)
{
    return (int64_t)gridDim.x * blockDim.x;
}

/* Multiplies in place; does not access the elements if the factor is 1. */
template <int T>
static __device__ __forceinline__ void
scale_span(void *x, int64_t n, double factor, int64_t lane, int64_t lanes)
{
    const bool unscaled = (T == FSDPC_F64 ? factor : (double)(float)factor) == 1.0;
    if (!unscaled) {
        convert_span<T, T, true, int64_t>(x, x, n, factor, lane, lanes);
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
fsdpc_cuda_cast(const __grid_constant__ fsdpc_cuda_cast_params p)
{
    convert_any<true>(p.dst, p.dst_type, p.src, p.src_type, p.n, p.scale, grid_lane(), grid_lanes());
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
fsdpc_cuda_scale(const __grid_constant__ fsdpc_cuda_scale_params p)
{
    const own_span own(p.span, (int)p.count);
    void *x = own.span->data;
    const int type = own.span->type;
    const double factor = *p.factor;
    switch (type) {
    case FSDPC_F32: scale_span<FSDPC_F32>(x, own.span->n, factor, own.lane, own.lanes); break;
    case FSDPC_BF16: scale_span<FSDPC_BF16>(x, own.span->n, factor, own.lane, own.lanes); break;
    case FSDPC_F16: scale_span<FSDPC_F16>(x, own.span->n, factor, own.lane, own.lanes); break;
    default: scale_span<FSDPC_F64>(x, own.span->n, factor, own.lane, own.lanes); break;
    }
}

/* --- pack ---------------------------------------------------------------------------------------- */

/* Offset of element `index` of a view, in elements. */
static __device__ int64_t
view_offset(const fsdpc_cuda_view *view, int64_t index)
{
    int64_t offset = 0;
#pragma unroll 1
    for (int d = (int)view->ndim - 1; d >= 0; d--) {
        const int64_t length = view->shape[d];
        const int64_t rest = index / length;
        offset += (index - rest * length) * view->strides[d];
        index = rest;
    }
    return offset;
}

template <typename RAW>
static __device__ void
gather_items(void *out, const fsdpc_cuda_view *view, int64_t begin, int count)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) {
        ((RAW *)out)[i] = ((const RAW *)view->data)[view_offset(view, begin + i)];
    }
}

/* Gathers the elements of a view in shared memory, and then converts them like contiguous elements. */
static __device__ __noinline__ void
pack_view(char *dst, int dst_type, const fsdpc_cuda_view *view, int src_type, int64_t begin,
          int count, double scale)
{
    enum { HELD_BYTES = 8192 };
    __shared__ uint4 held[HELD_BYTES / 16];
    const int dst_bytes = item_bytes(dst_type), src_bytes = item_bytes(src_type);
    const int most = HELD_BYTES / src_bytes;
#pragma unroll 1
    for (int done = 0; done < count; done += most) {
        const int n = count - done < most ? count - done : most;
        switch (src_bytes) {
        case 1: gather_items<uint8_t>(held, view, begin + done, n); break;
        case 2: gather_items<uint16_t>(held, view, begin + done, n); break;
        case 4: gather_items<uint32_t>(held, view, begin + done, n); break;
        default: gather_items<uint64_t>(held, view, begin + done, n); break;
        }
        __syncthreads();
        convert_any<false>(dst + done * dst_bytes, dst_type, held, src_type, n, scale, (int)threadIdx.x,
                    (int)blockDim.x);
        __syncthreads();
    }
}

/* Each block packs one tile. With a loop over tiles the compiler would compute the offsets for all pairs of
 * dtypes before the loop, and spill registers. */
extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
fsdpc_cuda_pack(const __grid_constant__ fsdpc_cuda_pack_params p)
{
    const int64_t tile = blockIdx.x;
    const fsdpc_cuda_pack_entry entry = p.entries[p.tile_entry ? p.tile_entry[tile] : 0];
    const int dst_bytes = item_bytes(entry.dst_type);
    const int most = FSDPC_CUDA_TILE_BYTES / dst_bytes;
    const int64_t begin = (tile - entry.first_tile) * most;
    const int n = entry.n - begin < most ? (int)(entry.n - begin) : most;
    const int lane = (int)threadIdx.x, lanes = (int)blockDim.x;
    char *dst = (char *)p.dst + entry.dst_offset + begin * dst_bytes;
    fsdpc_cuda_source source = 0;
    if (entry.source >= 0) {
        source = p.table ? p.table[entry.source] : p.source[entry.source];
    }
    const char *src = (const char *)(uintptr_t)(source & FSDPC_CUDA_SOURCE_ADDRESS);
    const int type = (int)(source >> FSDPC_CUDA_SOURCE_TYPE_SHIFT & 15);
    if (source == 0) {
        zero_span(dst, n * dst_bytes, lane, lanes);
    } else if (source & FSDPC_CUDA_SOURCE_STRIDED) {
        pack_view(dst, entry.dst_type, (const fsdpc_cuda_view *)src, type, begin, n, p.scale);
    } else {
        convert_any<true>(dst, entry.dst_type, src + begin * item_bytes(type), type, n, p.scale, lane,
                    lanes);
    }
}
