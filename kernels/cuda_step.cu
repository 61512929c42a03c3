/* Optimizer steps: one pass over parameter, gradient and states of many tensors.
 *
 * A step is two launches. The first computes the factors of the formulas for each tensor and writes them
 * to an entry in device memory, so that the clipping factor, the loss scale and the number of the step never
 * pass through the host. In the second launch each block steps one tile of a tensor. An element's new value
 * depends on no other element, so results do not depend on which thread steps an element.
 */
#include "cuda_step.cuh"

/* --- the numbers of a step ------------------------------------------------------------------------ */

/* Computes the factors of a tensor's formulas, as fsdpc_optim_numbers_of does on the host. */
static __device__ void
fill_rates(fsdpc_step_entry *e, const fsdpc_step_rule &rule)
{
    e->decay = rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1;
    e->beta1 = rule.beta1;
    e->beta2 = rule.beta2;
    e->weight1 = 1 - (rule.kind == FSDPC_STEP_SGD ? rule.beta2 : rule.beta1);
    e->weight2 = 1 - rule.beta2;
    e->eps = rule.eps;
    e->root = 1;
    e->size = -rule.lr;
    e->first = rule.kind == FSDPC_STEP_SGD && e->step == 1;
    if (rule.kind != FSDPC_STEP_SGD && rule.kind != FSDPC_STEP_LION) {
        e->root = sqrt(1 - pow(rule.beta2, e->step));
        e->size = -(rule.lr / (1 - pow(rule.beta1, e->step)));
    }
    if (rule.kind >= FSDPC_STEP_STOCHASTIC) {
        e->root = 1 / e->root;
        e->size = -e->size;
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_step_begin(const __grid_constant__ fsdpc_cuda_step_begin_params p)
{
    const int i = (int)threadIdx.x;
    if (blockIdx.x != 0 || i >= p.count) {
        return;
    }
    const fsdpc_step_rule &rule = p.rule;
    fsdpc_step_entry *e = &p.entries[i];
    e->tensor = p.tensor[i];
    e->step = (double)*e->tensor.step + 1;
    e->grad_scale = p.control.grad_scale ? (double)*p.control.grad_scale : rule.grad_scale;
    const double clip = p.control.clip ? *p.control.clip : rule.clip;
    e->factor = rule.maximize ? -clip : clip;
    e->coupled = rule.decoupled ? 0 : rule.weight_decay;
    e->idle = p.control.found_inf && *p.control.found_inf != 0;
    e->keeps_grads = rule.keeps_grads;
    e->random = fsdpc_random_of_step(rule.seed, e->tensor.key, e->step);
    fill_rates(e, rule);
}

/* --- one tile -------------------------------------------------------------------------------------- */

template <typename REAL> struct tile {
    const fsdpc_step_entry &e;
    const fsdpc_step_tensor &t;
    gradient_numbers<REAL> gradient;
    int state_type;

    __device__ __forceinline__ explicit tile(const fsdpc_step_entry &entry)
        : e(entry), t(entry.tensor), gradient(entry), state_type(entry.tensor.state_type)
    {
    }

    /* Gradients are written back after the division by the loss scale, unless e.keeps_grads is true. */
    __device__ __forceinline__ void load_gradient(REAL *g, const REAL *p, const place &where) const
    {
        load_quad(g, t.grad, t.grad_type, where);
        if (gradient.scale != 1) {
#pragma unroll
            for (int i = 0; i < QUAD; i++) {
                g[i] = quotient(g[i], gradient.scale);
            }
            if (!e.keeps_grads) {
                store_quad(t.grad, t.grad_type, where, g);
            }
        }
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            g[i] = gradient(g[i], p[i]);
        }
    }
};

template <typename REAL>
static __device__ __forceinline__ void
adam_quad(const tile<REAL> &own, const adam_numbers<REAL> &k, const place &where)
{
    REAL p[QUAD], g[QUAD], m[QUAD], v[QUAD];
    const fsdpc_step_tensor &t = own.t;
    load_quad(p, t.param, t.param_type, where);
    load_quad(m, t.states[0], own.state_type, where);
    load_quad(v, t.states[1], own.state_type, where);
    own.load_gradient(g, p, where);
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        m[i] = k.next_m(g[i], m[i]);
        v[i] = k.next_v(g[i], v[i]);
    }
    store_quad(t.states[0], own.state_type, where, m);
    store_quad(t.states[1], own.state_type, where, v);
    if (t.states[2]) {
        REAL x[QUAD];
        load_quad(x, t.states[2], own.state_type, where);
#pragma unroll
        for (int i = 0; i < QUAD; i++) { /* if x or v is NaN, the maximum is NaN */
            v[i] = x[i] < v[i] || v[i] != v[i] ? v[i] : x[i];
        }
        store_quad(t.states[2], own.state_type, where, v);
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        p[i] = k.exact(p[i], m[i], v[i]);
    }
    store_quad(t.param, t.param_type, where, p);
}

template <typename REAL>
static __device__ __forceinline__ void
sgd_quad(const tile<REAL> &own, bool nesterov, const place &where)
{
    REAL p[QUAD], g[QUAD];
    const fsdpc_step_tensor &t = own.t;
    const REAL size = (REAL)own.e.size, momentum = (REAL)own.e.beta1;
    const REAL weight = (REAL)own.e.weight1;
    load_quad(p, t.param, t.param_type, where);
    own.load_gradient(g, p, where);
    if (t.states[0]) {
        REAL b[QUAD];
        load_quad(b, t.states[0], own.state_type, where);
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            b[i] = own.e.first ? g[i] : fused(weight, g[i], product(b[i], momentum));
            g[i] = nesterov ? fused(b[i], momentum, g[i]) : b[i];
        }
        store_quad(t.states[0], own.state_type, where, b);
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        p[i] = fused(g[i], size, p[i]);
    }
    store_quad(t.param, t.param_type, where, p);
}

template <typename REAL>
static __device__ __forceinline__ void
lion_quad(const tile<REAL> &own, const place &where)
{
    REAL p[QUAD], g[QUAD], m[QUAD];
    const fsdpc_step_tensor &t = own.t;
    const REAL decay = (REAL)own.e.decay, size = (REAL)own.e.size;
    const REAL beta1 = (REAL)own.e.beta1, weight1 = (REAL)own.e.weight1;
    const REAL beta2 = (REAL)own.e.beta2, weight2 = (REAL)own.e.weight2;
    load_quad(p, t.param, t.param_type, where);
    load_quad(m, t.states[0], own.state_type, where);
    own.load_gradient(g, p, where);
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        const REAL towards = fused(weight1, g[i], product(m[i], beta1));
        /* NaN stays NaN, so that a gradient of NaN shows in the parameter. */
        const REAL sign = towards > 0 ? (REAL)1 : towards < 0 ? (REAL)-1 : towards;
        p[i] = fused(sign, size, product(p[i], decay));
        m[i] = fused(weight2, g[i], product(m[i], beta2));
    }
    store_quad(t.states[0], own.state_type, where, m);
    store_quad(t.param, t.param_type, where, p);
}

/* Adam-mini: updates are divided by the denominators of the elements' blocks. */
template <typename REAL>
static __device__ __forceinline__ void
mini_quad(const tile<REAL> &own, const adam_numbers<REAL> &k, const place &where)
{
    REAL p[QUAD], g[QUAD], m[QUAD];
    const fsdpc_step_tensor &t = own.t;
    const float *denominators = (const float *)t.states[1];
    load_quad(p, t.param, t.param_type, where);
    load_quad(m, t.states[0], own.state_type, where);
    own.load_gradient(g, p, where);
    const int64_t first = t.first / t.block;
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        if (i >= where.low && i < where.high) {
            const REAL divisor = (REAL)denominators[(t.first + where.at + i) / t.block - first];
            m[i] = k.next_m(g[i], m[i]);
            p[i] = sum(product(p[i], k.decay), quotient(product(k.size, m[i]), divisor));
        }
    }
    store_quad(t.states[0], own.state_type, where, m);
    store_quad(t.param, t.param_type, where, p);
}

/* Returns a word whose upper half is x as a bfloat16, rounded up with a probability equal to the fraction
 * that is cut off. A NaN here is quiet, so its upper half is a NaN as well. */
static __device__ __forceinline__ uint32_t
rounded_bf16(float x, uint32_t random)
{
    const uint32_t bits = __float_as_uint(x);
    return x == x ? bits + random : bits;
}

static __device__ __forceinline__ void
stochastic_quad(const tile<float> &own, const adam_numbers<float> &k, uint64_t key,
                const place &where)
{
    float p[QUAD], g[QUAD], m[QUAD], v[QUAD];
    uint32_t low_p[QUAD], low_m[QUAD], low_v[QUAD];
    const fsdpc_step_tensor &t = own.t;
    load_quad(p, t.param, t.param_type, where);
    load_quad(m, t.states[0], FSDPC_BF16, where);
    load_quad(v, t.states[1], FSDPC_BF16, where);
    own.load_gradient(g, p, where);
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        const uint32_t index = (uint32_t)(t.first + where.at + i);
        const uint32_t begun = fsdpc_random_begin(index / 2, (uint32_t)key);
        const uint32_t hash = fsdpc_random_end(begun, (uint32_t)(key >> 32));
        const bool odd = index % 2 == 1;
        const fsdpc_random random = odd ? fsdpc_random_odd(hash) : fsdpc_random_even(hash);
        m[i] = fused(k.weight1, g[i] - m[i], m[i]);
        v[i] = k.next_v(g[i], v[i]);
        p[i] = k.quick(p[i], m[i], v[i]);
        low_p[i] = rounded_bf16(p[i], random.p);
        low_m[i] = rounded_bf16(m[i], random.m);
        low_v[i] = rounded_bf16(v[i], random.v);
    }
    store_halves(t.states[0], low_m, where);
    store_halves(t.states[1], low_v, where);
    if (t.param_type == FSDPC_BF16) {
        store_halves(t.param, low_p, where);
    } else {
        store_quad(t.param, t.param_type, where, p);
    }
}

template <typename REAL, int KIND>
static __device__ void
step_tile(const own_tile &from, bool nesterov)
{
    const tile<REAL> own(*from.entry);
    const adam_numbers<REAL> k(*from.entry);
    const int64_t begin = from.begin > 0 ? from.begin : 0;
    const int64_t end =
        from.begin + FSDPC_CUDA_STEP_TILE < own.t.n ? from.begin + FSDPC_CUDA_STEP_TILE : own.t.n;
    /* One key serves the whole tile, because a tile never crosses a multiple of 2^32. */
    const uint64_t key = fsdpc_random_key(own.e.random, (uint64_t)(own.t.first + begin));
    /* Quads begin at aligned words of the parameter, so that a whole quad is one load. */
    const uintptr_t item = (uintptr_t)item_bytes(own.t.param_type);
    const int64_t before = (int64_t)(((uintptr_t)own.t.param / item + (uintptr_t)begin) % QUAD);
#pragma unroll 1
    for (int64_t at = begin - before + (int64_t)threadIdx.x * QUAD; at < end;
         at += FSDPC_CUDA_THREADS * QUAD) {
        const place where(at, begin, end);
        if constexpr (KIND == FSDPC_STEP_ADAM) {
            adam_quad(own, k, where);
        } else if constexpr (KIND == FSDPC_STEP_SGD) {
            sgd_quad(own, nesterov, where);
        } else if constexpr (KIND == FSDPC_STEP_LION) {
            lion_quad(own, where);
        } else if constexpr (KIND == FSDPC_STEP_MINI) {
            mini_quad(own, k, where);
        } else {
            stochastic_quad(own, k, key, where);
        }
    }
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_step(const __grid_constant__ fsdpc_cuda_step_params p)
{
    const own_tile own(p.entries, p.count);
    if (own.entry->idle || own.entry->tensor.param_type == FSDPC_F64) {
        return;
    }
    count_step(own);
    switch (p.kind) {
#define CASE(NAME, ...)                                                                        \
    case FSDPC_STEP_##NAME: step_tile<float, FSDPC_STEP_##NAME>(own, p.nesterov != 0); break;
        FSDPC_STEP_ELEMENT_KINDS(CASE)
#undef CASE
    default: step_tile<float, FSDPC_STEP_STOCHASTIC>(own, false); break;
    }
}

/* Steps that are rare and take more registers: those of float64, and of Adam-mini, which divides indices. */
extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT / 2)
    fsdpc_cuda_step_wide(const __grid_constant__ fsdpc_cuda_step_params p)
{
    const own_tile own(p.entries, p.count);
    const bool wide = own.entry->tensor.param_type == FSDPC_F64;
    if (own.entry->idle || (!wide && p.kind != FSDPC_STEP_MINI)) {
        return;
    }
    count_step(own);
    if (!wide) {
        step_tile<float, FSDPC_STEP_MINI>(own, false);
        return;
    }
    switch (p.kind) {
#define CASE(NAME, ...)                                                                        \
    case FSDPC_STEP_##NAME: step_tile<double, FSDPC_STEP_##NAME>(own, p.nesterov != 0); break;
        FSDPC_STEP_ELEMENT_KINDS(CASE)
#undef CASE
    default: step_tile<double, FSDPC_STEP_MINI>(own, false); break;
    }
}
