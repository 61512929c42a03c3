/* What the files of csrc/optim share: the loops of one instruction set, and threads. */
#ifndef FSDPC_OPTIM_IMPL_H
#define FSDPC_OPTIM_IMPL_H

#include "base/pool.h"
#include "optim/optim.h"

/* The rule's numbers for one tensor, before they are rounded to the arithmetic's type. */
typedef struct fsdpc_optim_numbers {
    double decay;            /* factor of p */
    double beta1, beta2;     /* factors of the states */
    double weight1, weight2; /* factors of the gradient */
    double root, eps;        /* Adam: divisor of the square root, term added to it */
    double size;             /* factor of the update, negative */
    double inverse, factor;  /* factors of the gradient, one after the other */
    bool first, nesterov;    /* SGD: b has no value yet; Nesterov momentum */
    bool prefetches;         /* loops in float32 and float64 prefetch memory */
} fsdpc_optim_numbers;

/* Bytes of a cache line, and how far ahead of what a loop reads its memory is asked for. */
enum { FSDPC_OPTIM_LINE = 64, FSDPC_OPTIM_AHEAD = 2048 };

/* Loops over elements in one type; the pointers are to that type and do not overlap. */
typedef struct fsdpc_optim_rules {
    void (*divide)(void *out, const void *in, double by, int64_t n); /* out may be in */
    void (*multiply)(void *out, const void *in, double factor, int64_t n);
    void (*add_scaled)(void *g, const void *p, double factor, int64_t n);
    void (*adam)(const fsdpc_optim_numbers *k, int64_t n, void *p, const void *g, void *m, void *v,
                 void *largest); /* NULL: no amsgrad */
    void (*sgd)(const fsdpc_optim_numbers *k, int64_t n, void *p, const void *g,
                void *b); /* NULL: no momentum */
    void (*lion)(const fsdpc_optim_numbers *k, int64_t n, void *p, const void *g, void *m);
    void (*mini)(const fsdpc_optim_numbers *k, double denominator, int64_t n, void *p,
                 const void *g, void *m);
    void (*average)(void *a, const void *p, double weight, int64_t n);
} fsdpc_optim_rules;

/* The map of the codes of 8 bits, by decade; see optim_codes.inc. Lanes 8 to 15 repeat 0 to 7. */
typedef struct fsdpc_optim_codes {
    bool has_sign;
    float zero, one;         /* up to `zero`: the code of zero; above `one`: the code of 1 */
    float middle;            /* values above it are in decade 4 or higher */
    float two[16], next[16]; /* by decade d: values above are in decade d + 2 or d + 1, or higher */
    float by[16], offset[16], low[16], high[16]; /* from a value to its cell */
    float base[16], slope[16]; /* from a cell to its value; by the exponent of the cell's number */
} fsdpc_optim_codes;

typedef struct fsdpc_optim_loops {
    fsdpc_optim_rules f32, f64;
    void (*from_bf16)(float *out, const uint16_t *in, int64_t n);
    void (*to_bf16)(uint16_t *out, const float *in, int64_t n);
    /* Adam without amsgrad and with beta1 > 0.5 over bfloat16 memory, rounded to nearest. */
    void (*adam_nearest)(const fsdpc_optim_numbers *k, int64_t n, void *p, const void *g, void *m,
                         void *v);
    /* Adam with bfloat16 states that are rounded stochastically, by a hash of `key` and index + i. Parameters
     * and gradients are bfloat16 if low_p and low_g, else float32. `k` holds quick numbers (make_quick). */
    void (*adam_stochastic)(const fsdpc_optim_numbers *k, int64_t n, void *p, bool low_p,
                            const void *g, bool low_g, void *m, void *v, uint64_t key,
                            uint32_t index);
    /* Adam in float32, with quick numbers. */
    void (*adam_quick)(const fsdpc_optim_numbers *k, int64_t n, float *p, const float *g, float *m,
                       float *v);
    /* The largest value and the largest negated value, both at least 0; infinity for what is not
     * finite. */
    void (*extremes)(const float *in, int64_t n, float *high, float *low);
    /* Codes of values whose block has this scale, neither 0 nor NaN, and back. */
    void (*quantise)(const fsdpc_optim_codes *map, uint8_t *codes, const float *in, int64_t n,
                     float scale);
    void (*dequantise)(const fsdpc_optim_codes *map, float *out, const uint8_t *codes, int64_t n,
                       float scale);
} fsdpc_optim_loops;

const fsdpc_optim_loops *fsdpc_optim_loops_plain(void);
/* NULL when this build or this processor lacks the instructions. */
const fsdpc_optim_loops *fsdpc_optim_loops_avx2(void);
const fsdpc_optim_loops *fsdpc_optim_loops_avx512(void);
/* The loops that fit the kernels in use (FSDPC_SIMD, or the widest that the processor runs). */
int fsdpc_optim_select(const fsdpc_optim_loops **out);

/* The rule's numbers for a tensor at its step. */
fsdpc_optim_numbers fsdpc_optim_numbers_of(const fsdpc_optim_rule *rule,
                                           const fsdpc_optim_tensor *tensor);
/* For adam_stochastic and adam_quick: root becomes its reciprocal, size is negated. */
void fsdpc_optim_make_quick(fsdpc_optim_numbers *numbers);

/* Tensors are cut into parts that begin at multiples of FSDPC_OPTIM_PART of the whole parameter. */
enum { FSDPC_OPTIM_PART = 32768, FSDPC_OPTIM_TILE = 1024 };
typedef void fsdpc_optim_part(void *context, int tensor, int64_t begin, int64_t end);
/* Calls `part` for every part of every tensor, on up to `threads` threads; begin and end count from
 * the tensor's first element. FSDPC_E_NOMEM. */
int fsdpc_optim_for_parts(const fsdpc_optim_tensor *tensors, int count, int threads,
                          fsdpc_optim_part *part, void *context);

/* The number of a tensor's parts. */
int64_t fsdpc_optim_parts_of(const fsdpc_optim_tensor *tensor);

/* What a step measures, part by part (optim_measure.c). */
typedef struct fsdpc_optim_meter {
    const struct fsdpc_kernels *kernels;
    int64_t *starts; /* the number of each tensor's first part */
    double *values;  /* FSDPC_OPTIM_MEASURES values per part; NULL: no tensor is measured */
} fsdpc_optim_meter;
int fsdpc_optim_meter_open(fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensors, int count);
/* Adds the parts to the tensors' measures, and frees the meter's memory. */
void fsdpc_optim_meter_close(fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensors,
                             int count);
/* Called before and behind the step of elements [begin, begin + n) of a tensor, n at most
 * FSDPC_OPTIM_MEASURED_TILE; `old` has room for FSDPC_OPTIM_MEASURED_TILE values of 8 bytes. */
enum { FSDPC_OPTIM_MEASURED_TILE = 2048 };
void fsdpc_optim_before_tile(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor,
                             int index, int64_t begin, int64_t n, void *old);
void fsdpc_optim_behind_tile(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor,
                             int index, int64_t begin, int64_t n, void *old);

/* The gradients of elements [begin, begin + n), n at most a tile, unscaled and with coupled decay; the loops
 * multiply what is returned by the numbers inverse and factor. Returns `buffer`, or the gradient itself where
 * nothing is to be done. Unscaled gradients are written back if `write`. */
const void *fsdpc_optim_gradient(const fsdpc_optim_loops *loops, const fsdpc_optim_rule *rule,
                                 const fsdpc_optim_tensor *tensor, int64_t begin, int64_t n,
                                 const void *param, bool write, void *buffer);
/* Elements [begin, begin + n) as float32: a pointer into `memory` for F32, else `buffer`, converted.
 * Not for F64. */
float *fsdpc_optim_load(const fsdpc_optim_loops *loops, void *memory, fsdpc_dtype type,
                        int64_t begin, int64_t n, float *buffer);
/* Writes back what fsdpc_optim_load returned, rounded to nearest; a no-op for F32. */
void fsdpc_optim_store(const fsdpc_optim_loops *loops, void *memory, fsdpc_dtype type,
                       int64_t begin, int64_t n, const float *values);

/* Behind the step of elements [begin, begin + n): moves their average, if there is one. */
void fsdpc_optim_average_tile(const fsdpc_optim_loops *loops, const fsdpc_optim_rule *rule,
                              const fsdpc_optim_tensor *tensor, int64_t begin, int64_t n);

/* FSDPC_OK if a tensor's types go together; `position` is for the error's text. check8: for 8-bit states. */
int fsdpc_optim_check(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensor, int position);
int fsdpc_optim_check8(const fsdpc_optim_tensor *tensor, int position);
/* The map of m (0) or v (1) for a device. */
void fsdpc_optim_map_of(int which, fsdpc_step_codes *out);

#endif
