/* Declarations that the files of csrc/optim share: the loops of one instruction set, and threads. */
#ifndef FSDPC_OPTIM_IMPL_H
#define FSDPC_OPTIM_IMPL_H

#include "base/pool.h"
#include "optim/optim.h"

/* The rule's factors for one tensor, before they are rounded to the type of the arithmetic. */
typedef struct fsdpc_optim_numbers {
    double decay;            /* factor of p */
    double beta1, beta2;     /* factors of the states */
    double weight1, weight2; /* factors of the gradient */
    double root, eps;        /* Adam: divisor of the square root, and term added to the quotient */
    double size;             /* factor of the update; negative */
    double inverse, factor;  /* two factors of the gradient, applied one after the other */
    bool first, nesterov;    /* true for SGD if b has no value yet; true for Nesterov momentum */
    bool prefetches;         /* true: loops in float32 and float64 prefetch memory */
} fsdpc_optim_numbers;

/* Bytes of a cache line, and the distance in bytes at which loops prefetch memory ahead of their reads. */
enum { FSDPC_OPTIM_LINE = 64, FSDPC_OPTIM_AHEAD = 2048 };

/* Loops over elements of one type. The pointers are to that type and do not overlap. */
typedef struct fsdpc_optim_rules {
    void (*divide)(void *out, const void *in, double by, int64_t n); /* `out` may equal `in` */
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

/* The map of the 8-bit codes, by decade; see optim_codes.inc. Entries 8 to 15 repeat entries 0 to 7. */
typedef struct fsdpc_optim_codes {
    bool has_sign;
    float zero, one; /* magnitudes <= zero get the code of 0.0, values > one that of 1.0 */
    float middle;    /* values above it are in decade 4 or higher */
    /* Per decade d: values above two[d] are in decade d + 2 or higher; values above next[d] are in decade
     * d + 1 or higher. */
    float two[16], next[16];
    float by[16], offset[16], low[16], high[16]; /* to convert a value to the number of its cell */
    float base[16], slope[16]; /* to convert a cell's number to a value, by its exponent modulo 8 */
} fsdpc_optim_codes;

typedef struct fsdpc_optim_loops {
    fsdpc_optim_rules f32, f64;
    void (*from_bf16)(float *out, const uint16_t *in, int64_t n);
    void (*to_bf16)(uint16_t *out, const float *in, int64_t n);
    /* Adam without amsgrad and with beta1 > 0.5, over bfloat16 memory. Results are rounded to nearest. */
    void (*adam_nearest)(const fsdpc_optim_numbers *k, int64_t n, void *p, const void *g, void *m,
                         void *v);
    /* Adam with bfloat16 states, rounded stochastically by a hash of `key` and index + i. Parameters are
     * bfloat16 if low_p, else float32. Gradients are bfloat16 if low_g, else float32. `k` holds numbers of
     * fsdpc_optim_make_quick. */
    void (*adam_stochastic)(const fsdpc_optim_numbers *k, int64_t n, void *p, bool low_p,
                            const void *g, bool low_g, void *m, void *v, uint64_t key,
                            uint32_t index);
    /* Adam in float32, with numbers of fsdpc_optim_make_quick. */
    void (*adam_quick)(const fsdpc_optim_numbers *k, int64_t n, float *p, const float *g, float *m,
                       float *v);
    /* Finds the largest value and the largest negated value, both at least 0. A value that is not finite
     * makes one of them infinity. */
    void (*extremes)(const float *in, int64_t n, float *high, float *low);
    /* Convert values of a block with this scale to codes, and back. The scale is neither 0 nor NaN. */
    void (*quantise)(const fsdpc_optim_codes *map, uint8_t *codes, const float *in, int64_t n,
                     float scale);
    void (*dequantise)(const fsdpc_optim_codes *map, float *out, const uint8_t *codes, int64_t n,
                       float scale);
} fsdpc_optim_loops;

const fsdpc_optim_loops *fsdpc_optim_loops_plain(void);
/* Returns NULL if this build or this processor lacks the instructions. */
const fsdpc_optim_loops *fsdpc_optim_loops_avx2(void);
const fsdpc_optim_loops *fsdpc_optim_loops_avx512(void);
/* Sets *out to the loops for the kernels in use (FSDPC_SIMD, or the widest that the processor can run). */
int fsdpc_optim_select(const fsdpc_optim_loops **out);

/* Returns the rule's factors for a tensor at its step. */
fsdpc_optim_numbers fsdpc_optim_numbers_of(const fsdpc_optim_rule *rule,
                                           const fsdpc_optim_tensor *tensor);
/* Prepares the numbers for adam_stochastic and adam_quick: inverts `root` and negates `size`. */
void fsdpc_optim_make_quick(fsdpc_optim_numbers *numbers);

/* Tensors are cut into parts that begin at multiples of FSDPC_OPTIM_PART of the whole parameter. */
enum { FSDPC_OPTIM_PART = 32768, FSDPC_OPTIM_TILE = 1024 };
typedef void fsdpc_optim_part(void *context, int tensor, int64_t begin, int64_t end);
/* Calls `part` for every part of every tensor, on up to `threads` threads. begin and end are relative to the
 * tensor's first element. Fails with FSDPC_E_NOMEM. */
int fsdpc_optim_for_parts(const fsdpc_optim_tensor *tensors, int count, int threads,
                          fsdpc_optim_part *part, void *context);

/* Returns the number of parts of a tensor. */
int64_t fsdpc_optim_parts_of(const fsdpc_optim_tensor *tensor);

/* The measures of a step, one set of values per part (optim_measure.c). */
typedef struct fsdpc_optim_meter {
    const struct fsdpc_kernels *kernels;
    int64_t *starts; /* for each tensor, the index of its first part */
    double *values;  /* FSDPC_OPTIM_MEASURES values per part; NULL: no tensor is measured */
} fsdpc_optim_meter;
int fsdpc_optim_meter_open(fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensors, int count);
/* Adds the values of the parts to the tensors' measures, and frees the meter's memory. */
void fsdpc_optim_meter_close(fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensors,
                             int count);
/* Call these before and after the step of elements [begin, begin + n) of a tensor. n is at most
 * FSDPC_OPTIM_MEASURED_TILE; `old` has room for FSDPC_OPTIM_MEASURED_TILE values of 8 bytes. */
enum { FSDPC_OPTIM_MEASURED_TILE = 2048 };
void fsdpc_optim_before_tile(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor,
                             int index, int64_t begin, int64_t n, void *old);
void fsdpc_optim_behind_tile(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor,
                             int index, int64_t begin, int64_t n, void *old);

/* Returns the gradients of elements [begin, begin + n), unscaled and with coupled decay; n is at most a tile.
 * The loops multiply the result by `inverse` and `factor`. The result is `buffer`, or the gradient's own
 * memory if nothing is computed. Unscaled gradients are written back if `write`, unless keeps_grads. */
const void *fsdpc_optim_gradient(const fsdpc_optim_loops *loops, const fsdpc_optim_rule *rule,
                                 const fsdpc_optim_tensor *tensor, int64_t begin, int64_t n,
                                 const void *param, bool write, void *buffer);
/* Returns elements [begin, begin + n) as float32: for F32 a pointer into `memory`, else `buffer` with the
 * converted values. F64 elements are returned as they are, as a pointer into `memory`. */
float *fsdpc_optim_load(const fsdpc_optim_loops *loops, void *memory, fsdpc_dtype type,
                        int64_t begin, int64_t n, float *buffer);
/* Writes back the values that fsdpc_optim_load returned, rounded to nearest. A no-op for F32 and F64. */
void fsdpc_optim_store(const fsdpc_optim_loops *loops, void *memory, fsdpc_dtype type,
                       int64_t begin, int64_t n, const float *values);

/* Call it after the step of elements [begin, begin + n): updates their average, if there is one. */
void fsdpc_optim_average_tile(const fsdpc_optim_loops *loops, const fsdpc_optim_rule *rule,
                              const fsdpc_optim_tensor *tensor, int64_t begin, int64_t n);

/* Checks that a tensor's types fit. `position` is used in the error's text. check8 is for 8-bit states. */
int fsdpc_optim_check(const fsdpc_optim_rule *rule, const fsdpc_optim_tensor *tensor, int position);
int fsdpc_optim_check8(const fsdpc_optim_tensor *tensor, int position);
/* Copies the map of m (0) or v (1) for use on a device. */
void fsdpc_optim_map_of(int which, fsdpc_step_codes *out);

#endif
