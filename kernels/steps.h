/* The data of an optimizer's step on a device: the rule, the numbers in device memory, and one entry per
 * tensor. All of it is plain data, valid as C11 and as CUDA C++. csrc/optim/optim.h has the formulas.
 */
#ifndef FSDPC_STEPS_H
#define FSDPC_STEPS_H

#include <stdint.h>

#include "base/dtype.h"

enum {
    FSDPC_STEP_BLOCK = 256, /* 8-bit states: number of consecutive elements with one scale */
    FSDPC_STEP_CELLS = 8,   /* the length of each table in fsdpc_step_codes */
};

/* The kinds of steps, in three lists. Enums, tables of names and kernels' cases are made from these lists.
 * X(NAME, "name", least, most) declares a kind that is called FSDPC_STEP_NAME and FSDPC_OPTIM_NAME in C and
 * "name" in Python. A tensor has at least `least` and at most `most` states. FSDPC_STEP_STOCHASTIC is in no
 * list. */
/* Kinds that step each element on its own. _C.optim_table makes tables of tensors for these kinds only. */
#define FSDPC_STEP_ELEMENT_KINDS(X) X(ADAM, "adam", 2, 3) X(SGD, "sgd", 0, 1) X(LION, "lion", 1, 1)
/* Kinds in which all elements of a block share a denominator, which is the second state. */
#define FSDPC_STEP_BLOCK_KINDS(X) X(MINI, "mini", 2, 2)
/* Adam with 8-bit states. The four states are the codes of m, the codes of v, the scales of m and the scales
 * of v. For these kinds FSDPC_OPTIM_NAME is a constant of the enum fsdpc_optim_states. EDGES8 only writes
 * `edges`: the extremes that the first and the last block will have after the step. */
#define FSDPC_STEP_8BIT_KINDS(X) X(ADAM8, "adam8", 4, 4) X(EDGES8, "edges8", 4, 4)

#define FSDPC_STEP_KIND(NAME, ...) FSDPC_STEP_##NAME,
typedef enum fsdpc_step_kind {
    FSDPC_STEP_ELEMENT_KINDS(FSDPC_STEP_KIND) FSDPC_STEP_BLOCK_KINDS(FSDPC_STEP_KIND)
        FSDPC_STEP_STOCHASTIC, /* Adam with bfloat16 states that are rounded stochastically */
    FSDPC_STEP_8BIT_KINDS(FSDPC_STEP_KIND)
} fsdpc_step_kind;

typedef struct fsdpc_step_rule {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale, clip; /* used if the same field of fsdpc_step_control is NULL */
    uint64_t seed;
    int32_t kind;
    int8_t decoupled, maximize, nesterov;
    int8_t keeps_grads; /* true: the step does not write divided gradients back to memory */
} fsdpc_step_rule;

/* Addresses of values in device memory, or NULL. Only the kernels read the values, so that the host need not
 * wait for them. */
typedef struct fsdpc_step_control {
    const float *grad_scale; /* the loss scale, which gradients are divided by */
    const float *found_inf;  /* if the value is not 0, the step changes nothing */
    const double *clip;      /* all gradients are multiplied by this factor */
} fsdpc_step_control;

/* A range of a whole parameter's elements, in device memory. fsdpc_optim_tensor (csrc/optim/optim.h) explains
 * the members. */
typedef struct fsdpc_step_tensor {
    void *param, *grad;
    void *states[3];
    float *scales[2];
    float *edges;
    float *step; /* address of the number of steps done; ranges of one parameter may share it */
    int64_t n, first, block;
    uint64_t key;
    int64_t first_tile; /* set by fsdpc_device_step */
    int16_t param_type, grad_type, state_type, pad;
} fsdpc_step_tensor;

/* Tables that convert values to 8-bit codes and back. optim_codes.inc explains cells and decades. `base` and
 * `slope` are indexed by the exponent, modulo 8, of a cell's number as a float; the other tables, by the
 * decade of a value. */
typedef struct fsdpc_step_codes {
    float two[FSDPC_STEP_CELLS], next[FSDPC_STEP_CELLS], by[FSDPC_STEP_CELLS];
    float offset[FSDPC_STEP_CELLS], low[FSDPC_STEP_CELLS], high[FSDPC_STEP_CELLS];
    float base[FSDPC_STEP_CELLS], slope[FSDPC_STEP_CELLS];
    float zero, one, middle, pad;
} fsdpc_step_codes;

/* A tensor's entry in device memory while a step runs. fsdpc_device_step's scratch is an array of entries. */
typedef struct fsdpc_step_entry {
    fsdpc_step_tensor tensor;
    double decay; /* the step multiplies p by this */
    /* In the formulas, beta1 and beta2 multiply the old states; weight1 and weight2 multiply the gradient.
     * Of these, SGD uses only beta1, which is the momentum, and weight1, which is 1 - dampening. */
    double beta1, beta2;
    double weight1, weight2;
    /* Adam: v's square root is divided by `root`, then `eps` is added. The kinds that use adam_numbers::quick
     * multiply by `root` instead, which is then the reciprocal. */
    double root, eps;
    /* The factor of the update: positive for the kinds that use adam_numbers::quick, else negative. */
    double size;
    /* The gradient is divided by `grad_scale` and multiplied by `factor`; then coupled * p is added. */
    double grad_scale, factor, coupled;
    double step; /* the number of this step, counted from 1 */
    uint64_t random;
    int32_t first; /* SGD: true in the first step, in which the momentum buffer has no value yet */
    int32_t idle;  /* true: the step changes nothing, because found_inf is not 0 */
    int32_t keeps_grads, pad;
} fsdpc_step_entry;

#endif
