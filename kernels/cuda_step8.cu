/* Adam with states of 8 bits: optim_quant.c in csrc/optim explains the codes, optim_codes.inc the formulas.
 *
 * A warp steps a block of FSDPC_STEP_BLOCK elements at a time: each thread keeps the new moments of 8
 * elements in registers, the warp finds the extremes of the block, and each thread quantises its 8 elements.
 */
#include "cuda_step.cuh"

enum { WARP = 32, SHARE = FSDPC_STEP_BLOCK / WARP, EVERYONE = -1 };

static __device__ __forceinline__ uint8_t
code_of(const fsdpc_step_codes &map, bool has_sign, float in, float lift, float inverse)
{
    const float value = product(product(in, lift), inverse), x = fabsf(value);
    int d = x > map.middle ? 4 : 0;
    d += x > map.two[d] ? 2 : 0;
    d += x > map.next[d] ? 1 : 0;
    float q = fused(x, map.by[d], map.offset[d]);
    q = q > map.low[d] ? q : map.low[d];
    q = q < map.high[d] ? q : map.high[d];
    int32_t cell = (int32_t)q;
    if (!has_sign) {
        cell = value > map.one ? 256 : cell;
        return (uint8_t)(in > 0 ? cell - 1 : 0);
    }
    cell = value > map.one ? 128 : cell;
    cell = x > map.zero ? cell : 0;
    return (uint8_t)(127 + (value < 0 ? -cell : cell));
}

static __device__ __forceinline__ float
value_of(const fsdpc_step_codes &map, bool has_sign, uint8_t code, float scale)
{
    const int32_t place = has_sign ? code - 127 : code;
    const float q = (float)(has_sign ? (place < 0 ? -place : place) : place + 1);
    const uint32_t bits = __float_as_uint(q);
    const int e = (int)(bits >> 23 & 7);
    const float part = sum(q, -__uint_as_float(bits & 0xff800000u));
    const float value = place == 0 ? 0 : fused(part, map.slope[e], map.base[e]);
    return product(place < 0 ? -value : value, scale);
}

/* The largest m, -m and v of a block. Each is at least 0, and infinity if a value is not finite. Values are
 * compared by their bits as integers: positive floats keep their order, and negative floats stay negative. */
struct extremes {
    int32_t high, low, square;

    __device__ __forceinline__ extremes() : high(0), low(0), square(0)
    {
    }

    __device__ __forceinline__ void add(float m, float v)
    {
        const int32_t plus = (int32_t)__float_as_uint(m);
        const int32_t minus = (int32_t)(__float_as_uint(m) ^ 0x80000000u);
        const int32_t up = (int32_t)__float_as_uint(v);
        high = plus > high ? plus : high;
        low = minus > low ? minus : low;
        square = up > square ? up : square;
    }

    __device__ __forceinline__ static float whole(int32_t bits)
    {
        const int32_t most = __reduce_max_sync((unsigned)EVERYONE, bits);
        return __uint_as_float(most >= 0x7F800000 ? 0x7F800000u : (uint32_t)most);
    }
};

static __device__ __forceinline__ bool
is_infinite(float x)
{
    return __float_as_uint(x) == 0x7F800000u;
}

static __device__ __forceinline__ float
not_a_number(void)
{
    return __uint_as_float(0x7FC00000u);
}

/* One thread's moments of a block: of the tensor's elements `at + i * WARP`, or 0 outside of the tensor. */
struct share {
    int64_t at;
    float m[SHARE], v[SHARE];
    float edge[3];
};

static __device__ __forceinline__ void
quantise(const fsdpc_step_codes &map, bool has_sign, const float *values, const share &own,
         int64_t n, float scale, uint8_t *codes)
{
    const float lift = fabsf(scale) < 0x1p-100f ? 0x1p64f : 1;
    const float inverse = quotient(1.0f, product(scale, lift));
    const bool empty = scale == 0 || scale != scale;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int64_t at = own.at + i * WARP;
        if (at >= 0 && at < n) {
            codes[at] = empty ? (has_sign ? 127 : 0)
                              : code_of(map, has_sign, values[i], lift, inverse);
        }
    }
}

/* Steps a thread's elements: stores new parameters in memory if `write` is true, and new moments in `own`. */
static __device__ __forceinline__ void
compute_share(const fsdpc_step_entry &e, const fsdpc_step_codes *maps, int64_t scale, bool write,
              share &own)
{
    const fsdpc_step_tensor &t = e.tensor;
    const gradient_numbers<float> gradient(e);
    const adam_numbers<float> k(e);
    const uint8_t *codes_m = (const uint8_t *)t.states[0], *codes_v = (const uint8_t *)t.states[1];
    extremes found;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int64_t at = own.at + i * WARP;
        own.m[i] = own.v[i] = 0;
        if (at >= 0 && at < t.n) {
            const float p = load_real(t.param, t.param_type, at, 0.0f);
            float g = load_real(t.grad, t.grad_type, at, 0.0f);
            const float m = value_of(maps[0], true, codes_m[at], t.scales[0][scale]);
            const float v = value_of(maps[1], false, codes_v[at], t.scales[1][scale]);
            if (gradient.scale != 1) {
                g = quotient(g, gradient.scale);
                if (write && !e.keeps_grads) {
                    store_real(t.grad, t.grad_type, at, g);
                }
            }
            g = gradient(g, p);
            own.m[i] = fused(k.weight1, sum(g, -m), m);
            own.v[i] = k.next_v(g, v);
            found.add(own.m[i], own.v[i]);
            if (write) {
                store_real(t.param, t.param_type, at, k.quick(p, own.m[i], own.v[i]));
            }
        }
    }
    own.edge[0] = extremes::whole(found.high);
    own.edge[1] = extremes::whole(found.low);
    own.edge[2] = extremes::whole(found.square);
}

/* Returns the part of t.edges for `block` if it is the tensor's first or last block, else NULL. */
static __device__ __forceinline__ float *
edges_of(const fsdpc_step_tensor &t, int64_t block)
{
    if (!t.edges || block == t.first / FSDPC_STEP_BLOCK) {
        return t.edges;
    }
    return block == (t.first + t.n - 1) / FSDPC_STEP_BLOCK ? t.edges + 3 : NULL;
}

static __device__ __forceinline__ void
finish_block(const fsdpc_step_tensor &t, const fsdpc_step_codes *maps, int64_t scale,
             const float *edges, const share &own)
{
    const bool known_m = edges && edges[0] >= 0, known_v = edges && edges[2] >= 0;
    const float high = known_m ? edges[0] : own.edge[0], low = known_m ? edges[1] : own.edge[1];
    const float square = known_v ? edges[2] : own.edge[2];
    const float m = is_infinite(high) || is_infinite(low) ? not_a_number() : high >= low ? high : -low;
    const float v = is_infinite(square) ? not_a_number() : square;
    quantise(maps[0], true, own.m, own, t.n, m, (uint8_t *)t.states[0]);
    quantise(maps[1], false, own.v, own, t.n, v, (uint8_t *)t.states[1]);
    if (threadIdx.x % WARP == 0) {
        t.scales[0][scale] = m;
        t.scales[1][scale] = v;
    }
}

/* Writes the extremes of the tensor's first and last block to t.edges, twice if one block is both. */
static __device__ __forceinline__ void
report_block(const fsdpc_step_tensor &t, int64_t block, const share &own)
{
    const int64_t first = t.first / FSDPC_STEP_BLOCK;
    const int64_t last = (t.first + t.n - 1) / FSDPC_STEP_BLOCK;
#pragma unroll
    for (int end = 0; end < 2; end++) {
        if (threadIdx.x % WARP < 3 && block == (end ? last : first)) {
            const int which = (int)(threadIdx.x % WARP);
            t.edges[end * 3 + which] =
                which == 0 ? own.edge[0] : which == 1 ? own.edge[1] : own.edge[2];
        }
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_step8(const __grid_constant__ fsdpc_cuda_step_params p)
{
    enum { WARPS = FSDPC_CUDA_THREADS / WARP, BLOCKS = FSDPC_CUDA_STEP_TILE / FSDPC_STEP_BLOCK };
    __shared__ fsdpc_step_codes maps[2];
    const own_tile own(p.entries, p.count);
    const fsdpc_step_tensor &t = own.entry->tensor;
    const bool only_edges = p.kind == FSDPC_STEP_EDGES8;
    for (int i = (int)threadIdx.x; i < (int)(sizeof maps / 4); i += FSDPC_CUDA_THREADS) {
        ((uint32_t *)maps)[i] = ((const uint32_t *)p.codes)[i];
    }
    __syncthreads();
    const bool is_end = own.begin <= 0 || own.begin + FSDPC_CUDA_STEP_TILE >= t.n;
    if (own.entry->idle || (only_edges && !is_end)) {
        return;
    }
    if (!only_edges) {
        count_step(own);
    }
    for (int b = (int)threadIdx.x / WARP; b < BLOCKS; b += WARPS) {
        share mine;
        const int64_t begin = own.begin + b * FSDPC_STEP_BLOCK;
        const bool any = t.n > 0 && begin + FSDPC_STEP_BLOCK > 0 && begin < t.n;
        const int64_t block = (t.first + begin) / FSDPC_STEP_BLOCK;
        const int64_t scale = any ? block - t.first / FSDPC_STEP_BLOCK : 0;
        float *edges = any ? edges_of(t, block) : NULL;
        mine.at = begin + threadIdx.x % WARP;
        compute_share(*own.entry, maps, scale, !only_edges, mine);
        if (only_edges && edges) {
            report_block(t, block, mine);
        } else if (any && !only_edges) {
            finish_block(t, maps, scale, edges, mine);
        }
    }
}
