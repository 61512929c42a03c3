/* The processor's arithmetic over flat buffers: casts, sums, norms and multiplication by a factor.
 *
 * kernels_cpu.c has every kernel in plain C: the reference for all others, and the fallback on every
 * processor. kernels_avx2.c and kernels_avx512.c have the same kernels for wider vectors. Their results have
 * the same bits as those of the plain kernels, except that sums of squares may be added in another order,
 * and that a sum of two NaNs may give either NaN. Nothing is fused: a product is rounded before it is
 * added to a sum.
 *
 * Contract for all kernels: pointers have any alignment, n >= 0, and buffers do not overlap unless stated.
 * Conversions round to nearest even; NaN stays NaN (quiet, with its sign); infinities and subnormals are
 * kept. F64 becomes a 16-bit type through F32, as in torch. BF16 becomes F32 at scale 1 by a shift alone, so
 * a signalling NaN stays signalling. FSDPC_BYTES is only accepted by cast with equal types (a copy).
 */
#ifndef FSDPC_KERNELS_H
#define FSDPC_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

enum { FSDPC_KERNEL_MAX_DIMS = 16 };

/* The contribution of one buffer to a norm. */
typedef struct fsdpc_norm {
    double sum;     /* sum of squares, or of |x|^p */
    double max;     /* largest |x|; NaN if any x is NaN */
    bool nonfinite; /* some x is NaN or infinite */
} fsdpc_norm;

typedef struct fsdpc_kernels {
    const char *name; /* "plain", "avx2", "avx512" */

    /* dst[i] = convert(src[i] * scale). scale is applied in fp32 (fp64 if either side is F64);
     * scale 1 with equal types is a copy of bits. dst == src is allowed for equal types. */
    void (*cast)(void *dst, fsdpc_dtype dst_type, const void *src, fsdpc_dtype src_type, int64_t n,
                 double scale);
    /* acc[i] += src[i] * scale, acc is F32 or F64. */
    void (*accumulate)(void *acc, fsdpc_dtype acc_type, const void *src, fsdpc_dtype src_type,
                       int64_t n, double scale);
    /* r[i] = ((src[0][i] + src[1][i]) + src[2][i]) ... in acc_type (F32 or F64), in list order;
     * acc[i] = add ? acc[i] + r[i] * scale : r[i] * scale. NULL sources are skipped; if no source
     * is left, r is 0. acc may be one of the sources. */
    void (*reduce)(void *acc, fsdpc_dtype acc_type, const void *const *src, int src_count,
                   fsdpc_dtype src_type, int64_t n, double scale, bool add);
    /* Returns the sum of squares in F64 (blocks of up to 4096 may be added in F32), max and nonfinite. */
    fsdpc_norm (*norm2)(const void *src, fsdpc_dtype type, int64_t n);
    /* x[i] *= factor. */
    void (*scale)(void *x, fsdpc_dtype type, int64_t n, double factor);
} fsdpc_kernels;

/* Returns the table of the kernels in plain C, which every build has. */
const fsdpc_kernels *fsdpc_kernels_plain(void);
/* Return the table of the AVX2 or AVX-512 kernels, or NULL if this build or this processor lacks them. */
const fsdpc_kernels *fsdpc_kernels_avx2(void);
const fsdpc_kernels *fsdpc_kernels_avx512(void);
/* Sets *out to this processor's best table, or to the one that FSDPC_SIMD=plain|avx2|avx512 names. Fails
 * with FSDPC_E_INVAL for an unknown name, with FSDPC_E_UNAVAILABLE if the processor cannot run the table. */
int fsdpc_kernels_select(const fsdpc_kernels **out);
/* Finds a table by its name, and fails as fsdpc_kernels_select does. */
int fsdpc_kernels_by_name(const char *name, const fsdpc_kernels **out);

/* The functions from here on are not critical for speed, and exist in plain C only. */

/* A strided tensor with as few dimensions as possible: dimensions of size 1 are dropped (a tensor of one
 * element has no dimension), and two neighbouring dimensions are joined if one stride walks through both. */
typedef struct fsdpc_kernel_view {
    int ndim;
    int64_t numel;
    int64_t shape[FSDPC_KERNEL_MAX_DIMS];
    int64_t strides[FSDPC_KERNEL_MAX_DIMS];
} fsdpc_kernel_view;
int fsdpc_kernel_view_simplify(fsdpc_kernel_view *view, int ndim, const int64_t *shape,
                               const int64_t *strides);

/* Gathers a strided tensor (strides in elements, may be 0 or negative) into dst, row-major, with
 * conversion and scale as in cast. ndim <= FSDPC_KERNEL_MAX_DIMS. */
int fsdpc_kernel_pack_strided(const fsdpc_kernels *kernels, void *dst, fsdpc_dtype dst_type,
                              const void *src, fsdpc_dtype src_type, int ndim, const int64_t *shape,
                              const int64_t *strides, double scale);
/* Casts each element of acc (F32 or F64) to grad_type and compares it with grad's element. If any bit
 * differs, grad's element replaces the element of acc. Other elements of acc keep their full precision. */
void fsdpc_kernel_refresh(const fsdpc_kernels *kernels, void *acc, fsdpc_dtype acc_type,
                          const void *grad, fsdpc_dtype grad_type, int64_t n);
/* Sum of |x|^p in F64, p > 0 (the caller uses norm2 for p = 2 and for the maximum). */
double fsdpc_kernel_norm_p(const void *src, fsdpc_dtype type, int64_t n, double p);
/* Fills dst with quiet NaNs (FSDPC_BYTES: with bytes 0x7F). Debug mode fills released memory in this way. */
void fsdpc_kernel_poison(void *dst, fsdpc_dtype type, int64_t n);

/* Scalar conversions, shared with tests. */
float fsdpc_bf16_to_f32(uint16_t bits);
uint16_t fsdpc_f32_to_bf16(float value);
float fsdpc_f16_to_f32(uint16_t bits);
uint16_t fsdpc_f32_to_f16(float value);

#endif
