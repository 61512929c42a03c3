/* What an optimizer's step on a device is made of: the rule, the numbers that the device holds, and one
 * entry per tensor. Plain data, valid as C11 and as CUDA C++; csrc/optim/optim.h has the formulas.
 */
#ifndef FSDPC_STEPS_H
#define FSDPC_STEPS_H

#include <stdint.h>

#include "base/dtype.h"

enum {
    FSDPC_STEP_BLOCK = 256, /* elements of the whole parameter that share a scale of 8-bit states */
    FSDPC_STEP_CELLS = 8,   /* entries of each table of the map to 8 bits */
};

/* The one list of the kinds of steps, in three groups; enums, tables of names and the kernels' cases are made
 * of these rows. X(NAME, "name", least, most): FSDPC_STEP_NAME and FSDPC_OPTIM_NAME in C, "name" in Python,
 * and the least and the most states that a tensor has. */
/* An element's step needs no other element: tables of tensors (_C.optim_table) know these kinds, too. */
#define FSDPC_STEP_ELEMENT_KINDS(X) X(ADAM, "adam", 2, 3) X(SGD, "sgd", 0, 1) X(LION, "lion", 1, 1)
/* The elements of a block share a denominator, the second state. */
#define FSDPC_STEP_BLOCK_KINDS(X) X(MINI, "mini", 2, 2)
/* Adam with states of 8 bits: codes of m and v, scales of m and v. Here FSDPC_OPTIM_NAME is a way to hold
 * states. EDGES8 only writes `edges`: the extremes that the end blocks of the next states will have. */
#define FSDPC_STEP_8BIT_KINDS(X) X(ADAM8, "adam8", 4, 4) X(EDGES8, "edges8", 4, 4)

#define FSDPC_STEP_KIND(NAME, ...) FSDPC_STEP_##NAME,
typedef enum fsdpc_step_kind {
    FSDPC_STEP_ELEMENT_KINDS(FSDPC_STEP_KIND) FSDPC_STEP_BLOCK_KINDS(FSDPC_STEP_KIND)
        FSDPC_STEP_STOCHASTIC, /* Adam with bfloat16 states, rounded stochastically: a flag of the rule */
    FSDPC_STEP_8BIT_KINDS(FSDPC_STEP_KIND)
} fsdpc_step_kind;

typedef struct fsdpc_step_rule {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale, clip; /* where the control has no address for them */
    uint64_t seed;
    int32_t kind;
    int8_t decoupled, maximize, nesterov;
    int8_t keeps_grads; /* scaled gradients stay as they are */
} fsdpc_step_rule;

/* Addresses in device memory, or NULL. The step reads the values when it runs, so the host need not do so. */
typedef struct fsdpc_step_control {
    const float *grad_scale; /* gradients are divided by it */
    const float *found_inf;  /* not 0: nothing changes in this step */
    const double *clip;      /* factor of all gradients */
} fsdpc_step_control;

/* A range of a whole parameter in device memory, as fsdpc_optim_tensor. */
typedef struct fsdpc_step_tensor {
    void *param, *grad;
    void *states[3];
    float *scales[2];
    float *edges;
    float *step; /* the number of steps done; several ranges of a parameter may share it */
    int64_t n, first, block;
    uint64_t key;
    int64_t first_tile; /* filled by the device */
    int16_t param_type, grad_type, state_type, pad;
} fsdpc_step_tensor;

/* The map of 8-bit codes in tables, by decade or by the exponent of a cell's number (optim_codes.inc). */
typedef struct fsdpc_step_codes {
    float two[FSDPC_STEP_CELLS], next[FSDPC_STEP_CELLS], by[FSDPC_STEP_CELLS];
    float offset[FSDPC_STEP_CELLS], low[FSDPC_STEP_CELLS], high[FSDPC_STEP_CELLS];
    float base[FSDPC_STEP_CELLS], slope[FSDPC_STEP_CELLS];
    float zero, one, middle, pad;
} fsdpc_step_codes;

/* A tensor's entry while a step runs, in device memory: what fsdpc_device_step's scratch holds. */
typedef struct fsdpc_step_entry {
    fsdpc_step_tensor tensor;
    double decay;            /* factor of p */
    double beta1, beta2;     /* factors of the states */
    double weight1, weight2; /* factors of the gradient */
    double root, eps; /* Adam: divisor of the square root (or its factor), term added to it */
    double size;      /* factor of the update, negative */
    double grad_scale, factor, coupled; /* applied to the gradient */
    double step;                        /* the number of this step */
    uint64_t random;
    int32_t first; /* SGD: the buffer has no value yet */
    int32_t idle;  /* nothing changes */
    int32_t keeps_grads, pad;
} fsdpc_step_entry;

#endif
