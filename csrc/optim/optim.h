/* Optimizer steps on flat memory: one pass over parameter, gradient and states of many tensors.
 *
 * A tensor here is a range of elements of one whole parameter: all its elements, or those that a rank
 * holds. `first` is the index of the range's first element in the whole parameter, so that whatever
 * depends on an element's place (blocks of 256, random bits) does not depend on how many ranks share
 * the parameter.
 *
 * Arithmetic is float32 (float64 for float64 parameters), each operation rounded as written below;
 * fma(a, b, c) is rounded once. Every element goes through the same formula, on any instruction set,
 * at any place, on any number of threads, so the bits of the result do not depend on these. f() rounds
 * to the arithmetic's type; t is the number of the step.
 *
 *   gradient   g = g / grad_scale (written back unless keeps_grads); g = g * clip; g = -g if maximize;
 *              g = fma(f(weight_decay), p, g) if weight_decay is coupled
 *   Adam       p = p * f(1 - lr * weight_decay) if it is decoupled; w = f(1 - beta1)
 *              m = |w| < 0.5 ? fma(w, g - m, m) : fma(w - 1, g - m, g)
 *              v = fma(f(1 - beta2) * g, g, v * f(beta2)); with amsgrad x = max(x, v), else x = v
 *              p = p + (f(-lr / (1 - beta1^t)) * m) / (sqrt(x) / f(sqrt(1 - beta2^t)) + f(eps))
 *   Adam with stochastic rounding, and Adam with 8-bit states: the same m and v, and
 *              p = fma(p, f(1 - lr * weight_decay), (f(lr / (1 - beta1^t)) * m) * r),
 *              d = fma(sqrt(v), f(1 / sqrt(1 - beta2^t)), f(eps)), r = -1 / d within a unit in the last
 *              place: r = pattern 0xfef311c7 - pattern of d, then twice e = fma(d, r, 1),
 *              r = fma(fma(e, e, e), r, r)
 *   SGD        b = g in the first step, then b = fma(f(1 - dampening), g, b * f(momentum))
 *              g = nesterov ? fma(b, f(momentum), g) : b; p = fma(g, f(-lr), p)
 *   Lion       p = p * f(1 - lr * weight_decay); u = sign(fma(f(1 - beta1), g, m * f(beta1)))
 *              p = fma(u, f(-lr), p); m = fma(f(1 - beta2), g, m * f(beta2))
 *   Adam-mini  as Adam, with a denominator that a block of elements shares
 *   average    of p as it is in memory after the step; w = f(average_weight)
 *              a = |w| < 0.5 ? fma(w, p - a, a) : fma(w - 1, p - a, p)
 *
 * Adam and SGD use the formulas of the vector loops of torch's fused CPU kernels (ATen FusedAdamKernel,
 * FusedSGDKernel); torch's loops for the last elements of a tensor round differently in places. The
 * average uses the formula of torch's lerp.
 */
#ifndef FSDPC_OPTIM_H
#define FSDPC_OPTIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "device/device.h"

enum { FSDPC_OPTIM_STATES = 3, FSDPC_OPTIM_BLOCK = 256, FSDPC_OPTIM_EDGE = 3 };

/* A step measures the sum of the squares and the largest magnitude of each of these. Gradients are measured
 * before the step, weights after it; updates are the changes of weights in memory. Sums are added in the
 * order of parts, so they do not depend on the number of threads. NaN stays NaN. */
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
    double grad_scale; /* gradients are divided by it; 1: they are not scaled */
    double clip;       /* all gradients are multiplied by it */
    bool decoupled;    /* true: weight decay is applied to p (decoupled), not added to g */
    bool maximize, nesterov;
    bool stochastic;  /* Adam: bfloat16 states and parameters are rounded stochastically */
    bool keeps_grads; /* true: the gradients in memory are not divided by grad_scale */
    uint64_t seed;    /* seed of the stochastic rounding */
    /* true: the step also moves each tensor's average towards its new values; only in host memory */
    bool averages;
    double average_weight;
} fsdpc_optim_rule;

/* The caller owns the memory. No two tensors of a call overlap. */
typedef struct fsdpc_optim_tensor {
    void *param, *grad;
    uint16_t
        *copy; /* the memory for a float32 parameter's new values, rounded to copy_type; or NULL */
    void *states[FSDPC_OPTIM_STATES]; /* Adam: m, v, with amsgrad x; SGD with momentum: b; Lion: m;
                                         8-bit: codes of m and v; Mini: m, denominators; else NULL */
    /* 8-bit states: scales of m and of v, one per block of 256 that holds an element of this tensor */
    float *scales[2];
    fsdpc_dtype param_type, grad_type, state_type;
    fsdpc_dtype copy_type; /* bfloat16 or float16 */
    int64_t numel, first;
    int64_t block; /* Mini: elements of the whole parameter that share a denominator */
    uint64_t key;  /* the parameter's number, for the stochastic rounding */
    double step;   /* t, counted from 1 */
    /* 8-bit states: extremes of this tensor's first and last block, see fsdpc_optim_step8; or NULL */
    float *edges;
    /* average of p, in float64 for a float64 parameter, else in float32; NULL: none */
    void *average;
    double *measures; /* FSDPC_OPTIM_MEASURES values that a step in host memory adds to, or NULL */
} fsdpc_optim_tensor;

/* Makes one step of every tensor. float64 cannot be mixed with other types in a tensor; all other float types
 * can. FSDPC_E_TYPE and FSDPC_E_INVAL name the position of a bad tensor; nothing is changed then. Local. */
int fsdpc_optim_step(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
                     int threads);

/* Makes one step of every tensor by Adam with 8-bit states (optim_quant.c). A tensor's `edges` hold
 * FSDPC_OPTIM_EDGE values for its first block and as many for its last block: the largest m, the largest -m
 * and the largest v of all ranks' elements of the block, or -1 if the tensor holds the whole block. */
int fsdpc_optim_step8(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count,
                      int threads);
/* Fills each tensor's `edges` with the extremes that the tensor's own m and v will have in its first and last
 * block after the next step. Changes nothing else. */
int fsdpc_optim_edges8(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensors, int count);

/* Makes a step of tensors in a device's memory, on the device's current stream (optim_device.c). `how` says
 * which function above it replaces. Its results differ from that function's only in the payload of NaNs.
 * `steps`: for each tensor, the address in the device's memory of the number of steps done. Tensors may share
 * an address, and the step is then counted once. tensor->step is not read. Values for which `control` has no
 * address are taken from the rule. `scratch` is count * FSDPC_STEP_SCRATCH bytes of the device, in use until
 * the step is done. */
typedef enum fsdpc_optim_states {
    FSDPC_OPTIM_WHOLE,
    FSDPC_OPTIM_ADAM8, /* as fsdpc_optim_step8 */
    FSDPC_OPTIM_EDGES8 /* as fsdpc_optim_edges8; no step is counted */
} fsdpc_optim_states;
int fsdpc_optim_step_on(fsdpc_device *device, const fsdpc_optim_rule *rule, fsdpc_optim_states how,
                        const fsdpc_step_control *control, const fsdpc_optim_tensor *tensors,
                        float *const *steps, int count, void *scratch);

/* Convert `n` float32 values to codes and scales, and back. `first`: the index of the first value in the
 * whole parameter. which: 0 for m, 1 for v. `edges`: as in fsdpc_optim_step8, or NULL. Of the values for a
 * block, m uses the first two, and v the third. */
void fsdpc_optim_quantise(int which, const float *values, int64_t first, int64_t n,
                          const float *edges, uint8_t *codes, float *scales);
void fsdpc_optim_dequantise(int which, const uint8_t *codes, const float *scales, int64_t first,
                            int64_t n, float *values);
/* Computes the `edges` of values to be quantised: FSDPC_OPTIM_EDGE values for the first block, then as many
 * for the last block. */
void fsdpc_optim_edges_of(int which, const float *values, int64_t first, int64_t n, float *edges);

/* Computes the sum of the squares of all tensors' elements, in float64. The squares are added in the order of
 * the tensors, so the sum does not depend on the number of threads. */
int fsdpc_optim_sum_squares(void *const *data, const fsdpc_dtype *types, const int64_t *numels,
                            int count, int threads, double *out);
/* Computes the sum of the squares of each block's elements. The elements are the range [first, first + n) of
 * a whole parameter that is cut into blocks of `block` elements; `out` gets a sum per block of the range. */
int fsdpc_optim_block_squares(void *data, fsdpc_dtype type, int64_t first, int64_t n, int64_t block,
                              int threads, double *out);

#endif
