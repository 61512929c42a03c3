/* Optimizer steps on flat memory: one pass over parameter, gradient and states of many tensors.
 *
 * A tensor here is a range of elements of one whole parameter: all of it, or the part that a rank
 * holds. `first` is the index of the range's first element in the whole parameter, so that whatever
 * depends on an element's place (blocks of 256, random bits) does not depend on how many ranks share
 * the parameter.
 *
 * Arithmetic is float32 (float64 for float64 parameters), each operation rounded as written below;
 * fma(a, b, c) is rounded once. Every element goes through the same formula, on any instruction set,
 * at any place, on any number of threads, so all of them give the same bits. f() rounds to the
 * arithmetic's type; t is the number of the step.
 *
 *   gradient   g = g / grad_scale (written back unless keeps_grads); g = g * clip; g = -g if maximize;
 *              g = fma(f(weight_decay), p, g) if weight_decay is coupled
 *   Adam       p = p * f(1 - lr * weight_decay) if it is decoupled; w = f(1 - beta1)
 *              m = |w| < 0.5 ? fma(w, g - m, m) : fma(w - 1, g - m, g)
 *              v = fma(f(1 - beta2) * g, g, v * f(beta2)); with amsgrad x = max(x, v), else x = v
 *              p = p + (f(-lr / (1 - beta1^t)) * m) / (sqrt(x) / f(sqrt(1 - beta2^t)) + f(eps))
 *   Adam with stochastic rounding, and with states of 8 bits: the same m and v, and
 *              p = fma(p, f(1 - lr * weight_decay), (f(lr / (1 - beta1^t)) * m) * r),
 *              d = fma(sqrt(v), f(1 / sqrt(1 - beta2^t)), f(eps)), r = -1 / d within a unit in the last
 *              place: r = pattern 0xfef311c7 - pattern of d, then twice e = fma(d, r, 1),
 *              r = fma(fma(e, e, e), r, r)
 *   SGD        b = g in the first step, then b = fma(f(1 - dampening), g, b * f(momentum))
 *              g = nesterov ? fma(b, f(momentum), g) : b; p = fma(g, f(-lr), p)
 *   Lion       p = p * f(1 - lr * weight_decay); u = sign(fma(f(1 - beta1), g, m * f(beta1)))
 *              p = fma(u, f(-lr), p); m = fma(f(1 - beta2), g, m * f(beta2))
 *   Adam-mini  as Adam, with a denominator that a block of elements shares
 *   average    of p as memory has it behind the step; w = f(average_weight)
 *              a = |w| < 0.5 ? fma(w, p - a, a) : fma(w - 1, p - a, p)
 *
 * Adam and SGD are the formulas of torch's fused CPU kernels' vector loops (ATen FusedAdamKernel,
 * FusedSGDKernel); torch's loops for the last elements of a tensor round differently in places. The
 * average's is that of torch's lerp.
 */
#ifndef FSDPC_OPTIM_H
#define FSDPC_OPTIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "device/device.h"

enum { FSDPC_OPTIM_STATES = 3, FSDPC_OPTIM_BLOCK = 256, FSDPC_OPTIM_EDGE = 3 };

/* What a step measures: the sum of the squares and the largest magnitude of each of these. Gradients are
 * those in memory before the step, weights those behind it, updates the changes of weights in memory. Sums
 * are added in the order of parts, the same on any number of threads; NaN stays NaN. */
typedef enum fsdpc_optim_measured {
    FSDPC_OPTIM_GRADS,
    FSDPC_OPTIM_WEIGHTS,
    FSDPC_OPTIM_UPDATES,
    FSDPC_OPTIM_MEASURED
} fsdpc_optim_measured;
enum { FSDPC_OPTIM_MEASURES = 2 * FSDPC_OPTIM_MEASURED };

#define FSDPC_OPTIM_KIND(NAME, ...) FSDPC_OPTIM_##NAME = FSDPC_STEP_##NAME,
typedef enum fsdpc_optim_kind {
    FSDPC_STEP_ELEMENT_KINDS(FSDPC_OPTIM_KIND) FSDPC_STEP_BLOCK_KINDS(FSDPC_OPTIM_KIND)
} fsdpc_optim_kind;

typedef struct fsdpc_optim_rule {
    fsdpc_optim_kind kind;
    double lr, beta1, beta2, eps,
        weight_decay;  /* SGD: beta1 is the momentum, beta2 the dampening */
    double grad_scale; /* 1: gradients are not scaled */
    double clip;       /* factor of all gradients */
    bool decoupled;    /* weight decay is decoupled */
    bool maximize, nesterov;
    bool stochastic;  /* Adam: bfloat16 states and parameters are rounded stochastically */
    bool keeps_grads; /* scaled gradients stay in memory as they are */
    uint64_t seed;    /* of the stochastic rounding */
    bool averages;    /* in host memory: tensors' averages move towards their new values */
    double average_weight;
} fsdpc_optim_rule;

/* The memory is the caller's, and no two tensors of a call overlap. */
typedef struct fsdpc_optim_tensor {
    void *param, *grad;
    uint16_t
        *copy; /* of a float32 parameter: where its new values go, rounded to copy_type; or NULL */
    void *states[FSDPC_OPTIM_STATES]; /* Adam: m, v, with amsgrad x; SGD with momentum: b; Lion: m;
                                         8-bit: codes of m and v; Mini: m, denominators; else NULL */
    float *scales[2];                 /* 8-bit: one per block that the range touches, of m and v */
    fsdpc_dtype param_type, grad_type, state_type;
    fsdpc_dtype copy_type; /* bfloat16 or float16 */
    int64_t numel, first;
    int64_t block;    /* Mini: elements of the whole parameter that share a denominator */
    uint64_t key;     /* the parameter's number, for the stochastic rounding */
    double step;      /* t, counted from 1 */
    float *edges;     /* 8-bit: extremes of the first and the last block (step8), or NULL */
    void *average;    /* float64 of a float64 parameter, else float32; or NULL */
    double *measures; /* FSDPC_OPTIM_MEASURES values that a step in host memory adds to, or NULL */
} fsdpc_optim_tensor;

/* One step of every tensor. float64 goes with float64 only; else every float type goes with every
 * other. FSDPC_E_INVAL names the tensor's position; nothing is changed then. Local. */
int fsdpc_optim_step(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
                     int threads);

/* One step of every tensor by Adam with states of 8 bits (optim_quant.c). `edges` holds FSDPC_OPTIM_EDGE
 * values for the first block and as many for the last: the largest m, the largest -m and the largest v of all
 * ranks' elements of the block, or -1 for a block that lies in this range as a whole. */
int fsdpc_optim_step8(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
                      int threads);
/* Fills each tensor's `edges` with the extremes that this range's own values will have after the step to
 * come. Changes nothing else. */
int fsdpc_optim_edges8(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count);

/* The same steps for tensors in a device's memory, queued on its current stream (optim_device.c): results
 * equal those above, the payload of NaNs excepted. `steps`: for each tensor the address, in the device's
 * memory, of the number of steps done; several tensors may share an address, whose number then counts the
 * step once. tensor->step is not read. What `control` has no address for is taken from the rule. `scratch`:
 * count * FSDPC_STEP_SCRATCH bytes of the device, in use until the step is done. */
typedef enum fsdpc_optim_states {
    FSDPC_OPTIM_WHOLE,
    FSDPC_OPTIM_ADAM8, /* as fsdpc_optim_step8 */
    FSDPC_OPTIM_EDGES8 /* as fsdpc_optim_edges8; no step is counted */
} fsdpc_optim_states;
int fsdpc_optim_step_on(fsdpc_device *device, const fsdpc_optim_rule *rule, fsdpc_optim_states how,
                        const fsdpc_step_control *control, const fsdpc_optim_tensor *tensors,
                        float *const *steps, int count, void *scratch);

/* Codes and scales of `n` float32 values whose first has the index `first`, and back. which: 0 for m,
 * 1 for v. `edges`: as above, of that moment (m: two values per block, v: the third), or NULL. */
void fsdpc_optim_quantise(int which, const float *values, int64_t first, int64_t n,
                          const float *edges, uint8_t *codes, float *scales);
void fsdpc_optim_dequantise(int which, const uint8_t *codes, const float *scales, int64_t first,
                            int64_t n, float *values);
/* The edges of values that are to be quantised, FSDPC_OPTIM_EDGE for the first and the last block. */
void fsdpc_optim_edges_of(int which, const float *values, int64_t first, int64_t n, float *edges);

/* Sum of the squares of all tensors' elements, in float64, added in the tensors' order: the same on
 * any number of threads. */
int fsdpc_optim_sum_squares(void *const *data, const fsdpc_dtype *types, const int64_t *numels,
                            int count, int threads, double *out);
/* The sum of the squares of each block's elements, in the range [first, first + n) of a whole parameter that
 * is cut into blocks of `block` elements; `out` holds one sum per block that the range touches. */
int fsdpc_optim_block_squares(void *data, fsdpc_dtype type, int64_t first, int64_t n, int64_t block,
                              int threads, double *out);

#endif
