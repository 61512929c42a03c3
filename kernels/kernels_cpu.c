/* Every kernel in plain C: the reference for the others and the fallback on any processor.
 *
 * Each pair of types has a loop, which a macro makes from the scalar rules of convert.h. A pair with
 * F64 on either side computes in double, the others in float. A product is rounded before it is added
 * to a sum, here and in the vector kernels, so the results of all tables agree bit for bit
 * (build with -ffp-contract=off, which -std=c11 implies in GCC; tests/c/test_kernels.c checks it).
 */
#include <math.h>

#include "convert.h"
#include "kernels.h"

/* X(source, destination, type to compute in) */
#define CAST_PAIRS(X)    \
    X(F32, F32, float)   \
    X(F32, BF16, float)  \
    X(F32, F16, float)   \
    X(F32, F64, double)  \
    X(BF16, F32, float)  \
    X(BF16, BF16, float) \
    X(BF16, F16, float)  \
    X(BF16, F64, double) \
    X(F16, F32, float)   \
    X(F16, BF16, float)  \
    X(F16, F16, float)   \
    X(F16, F64, double)  \
    X(F64, F32, double)  \
    X(F64, BF16, double) \
    X(F64, F16, double)  \
    X(F64, F64, double)

/* X(source) */
#define FLOAT_TYPES(X) \
    X(F32)             \
    X(BF16)            \
    X(F16)             \
    X(F64)

/* The types of the values that store_* takes. */
typedef float item_F32, item_BF16, item_F16;
typedef double item_F64;

typedef void cast_loop(void *dst, const void *src, int64_t n, double scale);
typedef void accumulate_loop(void *acc, const void *src, int64_t n, double scale);
typedef void add_loop(void *sum, const void *src, int64_t n, bool first);
typedef fsdpc_norm norm_loop(const void *src, int64_t n);

/* With a factor of exactly 1 there is no arithmetic at all, so the bits do not depend on flush-to-zero. */
#define DEFINE_CAST(S, D, compute)                                                  \
    static void cast_##S##_##D(void *dst, const void *src, int64_t n, double scale) \
    {                                                                               \
        const compute factor = (compute)scale;                                      \
        if (factor == 1) {                                                          \
            for (int64_t i = 0; i < n; i++) {                                       \
                store_##D(dst, i, (item_##D)load_##S(src, i));                      \
            }                                                                       \
            return;                                                                 \
        }                                                                           \
        for (int64_t i = 0; i < n; i++) {                                           \
            store_##D(dst, i, (item_##D)(load_##S(src, i) * factor));               \
        }                                                                           \
    }
CAST_PAIRS(DEFINE_CAST)

static cast_loop *const cast_loops[FSDPC_BYTES][FSDPC_BYTES] = {
#define CAST_ROW(S, D, compute) [FSDPC_##S][FSDPC_##D] = cast_##S##_##D,
    CAST_PAIRS(CAST_ROW)};

static void
cast(void *dst, fsdpc_dtype dst_type, const void *src, fsdpc_dtype src_type, int64_t n,
     double scale)
{
    bool unscaled = (src_type == FSDPC_F64 ? scale : (float)scale) == 1.0;
    if (src_type == FSDPC_BYTES || (src_type == dst_type && unscaled)) {
        if (n > 0 && dst != src) {
            memcpy(dst, src, (size_t)n * fsdpc_dtype_bytes(src_type));
        }
        return;
    }
    cast_loops[src_type][dst_type](dst, src, n, scale);
}

#define DEFINE_ACCUMULATE(S, A, type)                                                     \
    static void accumulate_##S##_##A(void *acc, const void *src, int64_t n, double scale) \
    {                                                                                     \
        const type factor = (type)scale;                                                  \
        for (int64_t i = 0; i < n; i++) {                                                 \
            type term = (type)load_##S(src, i) * factor;                                  \
            store_##A(acc, i, load_##A(acc, i) + term);                                   \
        }                                                                                 \
    }
#define DEFINE_ACCUMULATES(S)        \
    DEFINE_ACCUMULATE(S, F32, float) \
    DEFINE_ACCUMULATE(S, F64, double)
FLOAT_TYPES(DEFINE_ACCUMULATES)

static accumulate_loop *const accumulate_loops[FSDPC_BYTES][2] = {
#define ACCUMULATE_ROW(S) [FSDPC_##S] = {accumulate_##S##_F32, accumulate_##S##_F64},
    FLOAT_TYPES(ACCUMULATE_ROW)};

static void
accumulate(void *acc, fsdpc_dtype acc_type, const void *src, fsdpc_dtype src_type, int64_t n,
           double scale)
{
    accumulate_loops[src_type][acc_type == FSDPC_F64](acc, src, n, scale);
}

#define DEFINE_ADD(S, A, type)                                                   \
    static void add_##S##_##A(void *sum, const void *src, int64_t n, bool first) \
    {                                                                            \
        for (int64_t i = 0; i < n; i++) {                                        \
            type term = (type)load_##S(src, i);                                  \
            store_##A(sum, i, first ? term : load_##A(sum, i) + term);           \
        }                                                                        \
    }
#define DEFINE_ADDS(S)        \
    DEFINE_ADD(S, F32, float) \
    DEFINE_ADD(S, F64, double)
FLOAT_TYPES(DEFINE_ADDS)

static add_loop *const add_loops[FSDPC_BYTES][2] = {
#define ADD_ROW(S) [FSDPC_##S] = {add_##S##_F32, add_##S##_F64},
    FLOAT_TYPES(ADD_ROW)};

/* Adds the sources block by block in a buffer that fits into the first-level cache, so that memory
 * is read once and acc may be one of the sources. */
enum { REDUCE_BLOCK = 1024 };

static void
reduce(void *acc, fsdpc_dtype acc_type, const void *const *src, int src_count, fsdpc_dtype src_type,
       int64_t n, double scale, bool add)
{
    const size_t acc_bytes = fsdpc_dtype_bytes(acc_type);
    const size_t src_bytes = fsdpc_dtype_bytes(src_type);
    add_loop *add_to = add_loops[src_type][acc_type == FSDPC_F64];
    double sum[REDUCE_BLOCK];

    for (int64_t start = 0; start < n; start += REDUCE_BLOCK) {
        const int64_t count = n - start < REDUCE_BLOCK ? n - start : REDUCE_BLOCK;
        char *target = (char *)acc + (size_t)start * acc_bytes;
        bool first = true;
        memset(sum, 0, sizeof sum);
        for (int s = 0; s < src_count; s++) {
            if (src[s]) {
                add_to(sum, (const char *)src[s] + (size_t)start * src_bytes, count, first);
                first = false;
            }
        }
        if (add) {
            accumulate(target, acc_type, sum, acc_type, count, scale);
        } else {
            cast_loops[acc_type][acc_type](target, sum, count, scale);
        }
    }
}

#define DEFINE_NORM(S)                                                \
    static fsdpc_norm norm_##S(const void *src, int64_t n)            \
    {                                                                 \
        fsdpc_norm norm = {0};                                        \
        for (int64_t i = 0; i < n; i++) {                             \
            double value = load_##S(src, i);                          \
            double magnitude = fabs(value);                           \
            norm.sum += value * value;                                \
            norm.nonfinite |= !(magnitude <= 0x1.fffffffffffffp1023); \
            if (!(magnitude <= norm.max)) {                           \
                norm.max = isnan(norm.max) ? norm.max : magnitude;    \
            }                                                         \
        }                                                             \
        return norm;                                                  \
    }
FLOAT_TYPES(DEFINE_NORM)

static fsdpc_norm
norm2(const void *src, fsdpc_dtype type, int64_t n)
{
    static norm_loop *const loops[FSDPC_BYTES] = {
#define NORM_ROW(S) [FSDPC_##S] = norm_##S,
        FLOAT_TYPES(NORM_ROW)};
    return loops[type](src, n);
}

static void
scale(void *x, fsdpc_dtype type, int64_t n, double factor)
{
    cast(x, type, x, type, n, factor);
}

const fsdpc_kernels *
fsdpc_kernels_plain(void)
{
    static const fsdpc_kernels table = {
        .name = "plain",
        .cast = cast,
        .accumulate = accumulate,
        .reduce = reduce,
        .norm2 = norm2,
        .scale = scale,
    };
    return &table;
}

#define DEFINE_NORM_P(S)                                           \
    static double norm_p_##S(const void *src, int64_t n, double p) \
    {                                                              \
        double sum = 0;                                            \
        for (int64_t i = 0; i < n; i++) {                          \
            sum += pow(fabs((double)load_##S(src, i)), p);         \
        }                                                          \
        return sum;                                                \
    }
FLOAT_TYPES(DEFINE_NORM_P)

double
fsdpc_kernel_norm_p(const void *src, fsdpc_dtype type, int64_t n, double p)
{
    static double (*const loops[FSDPC_BYTES])(const void *, int64_t, double) = {
#define NORM_P_ROW(S) [FSDPC_##S] = norm_p_##S,
        FLOAT_TYPES(NORM_P_ROW)};
    return loops[type](src, n, p);
}

/* Compares a block at a time, because elements rarely differ. */
void
fsdpc_kernel_refresh(const fsdpc_kernels *kernels, void *acc_, fsdpc_dtype acc_type,
                     const void *grad_, fsdpc_dtype grad_type, int64_t n)
{
    enum { BLOCK = 512 };
    char shown[BLOCK * sizeof(double)], *acc = acc_;
    const char *grad = grad_;
    const size_t wide = fsdpc_dtype_bytes(acc_type), narrow = fsdpc_dtype_bytes(grad_type);
    for (; n > 0; n -= BLOCK, acc += BLOCK * wide, grad += BLOCK * narrow) {
        const size_t count = (size_t)(n < BLOCK ? n : BLOCK);
        kernels->cast(shown, grad_type, acc, acc_type, (int64_t)count, 1.0);
        if (memcmp(shown, grad, count * narrow) == 0) {
            continue;
        }
        for (size_t i = 0; i < count; i++) {
            if (memcmp(shown + i * narrow, grad + i * narrow, narrow) != 0) {
                kernels->cast(acc + i * wide, acc_type, grad + i * narrow, grad_type, 1, 1.0);
            }
        }
    }
}

void
fsdpc_kernel_poison(void *dst, fsdpc_dtype type, int64_t n)
{
    if (n > 0) {
        /* 0xFF makes a quiet NaN. FSDPC_BYTES may be integers: 0x7F makes an index that is out of range. */
        memset(dst, type == FSDPC_BYTES ? 0x7F : 0xFF, (size_t)n * fsdpc_dtype_bytes(type));
    }
}

float
fsdpc_bf16_to_f32(uint16_t bits)
{
    return bf16_to_f32(bits);
}

uint16_t
fsdpc_f32_to_bf16(float value)
{
    return f32_to_bf16(value);
}

float
fsdpc_f16_to_f32(uint16_t bits)
{
    return f16_to_f32(bits);
}

uint16_t
fsdpc_f32_to_f16(float value)
{
    return f32_to_f16(value);
}
