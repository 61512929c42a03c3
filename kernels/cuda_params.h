/* Parameters of the CUDA kernels: each kernel of cuda_*.cu takes one struct by value.
 *
 * This file is valid C11 and CUDA C++, because the host and the kernels include it. Pointers are to device
 * memory. Pointers to floats are aligned to an element; pointers to bytes (FSDPC_BYTES) need no alignment.
 * Types are fsdpc_dtype values. kernels.h says what each kernel does. The results are those of
 * kernels_cpu.c, bit for bit, except for the payload of a NaN that went through an operation,
 * and except for norms, which add squares in another order.
 */
#ifndef FSDPC_CUDA_PARAMS_H
#define FSDPC_CUDA_PARAMS_H

#include <stdint.h>

#include "base/dtype.h"
#include "steps.h"

enum {
    FSDPC_CUDA_THREADS = 256, /* threads per block, in every kernel */
    FSDPC_CUDA_RESIDENT =
        4, /* blocks that a multiprocessor shall hold at a time, so at most 64 registers per thread */
    FSDPC_CUDA_TILE_BYTES = 16384, /* bytes of a pack's destination that one block writes */
    FSDPC_CUDA_PACK_SOURCES = 384, /* at most this many sources in the parameters of a launch */
    FSDPC_CUDA_REDUCE_SOURCES = 256,
    FSDPC_CUDA_NORM_BLOCKS = 1024, /* at most this many partial results of a sum of squares */
    FSDPC_CUDA_NORM_BLOCK_ITEMS = 4096,
    FSDPC_CUDA_VIEW_DIMS = 16,
    FSDPC_CUDA_SPANS = 128, /* at most this many spans in one launch */
    FSDPC_CUDA_STEP_TENSORS = 32,
    FSDPC_CUDA_STEP_TILE = 4096, /* elements of a tensor that one block steps */
    FSDPC_CUDA_ACTIVATION_ITEMS = 4096,
    FSDPC_CUDA_CODINGS = 48,       /* at most this many fsdpc_cuda_coding in one launch */
    FSDPC_CUDA_CODING_BLOCKS = 32, /* blocks of values that one block of threads codes */
    FSDPC_CUDA_PLAIN_BLOCK = 256,  /* values in a block if the codec is FSDPC_UNCODED */
    FSDPC_CUDA_LANDED = 40,        /* at most this many fsdpc_cuda_landed in one launch */
};

/* X(kernel, its struct) */
#define FSDPC_CUDA_KERNELS(X)                              \
    X(fsdpc_cuda_cast, fsdpc_cuda_cast_params)             \
    X(fsdpc_cuda_scale, fsdpc_cuda_scale_params)           \
    X(fsdpc_cuda_pack, fsdpc_cuda_pack_params)             \
    X(fsdpc_cuda_pack_add, fsdpc_cuda_pack_params)         \
    X(fsdpc_cuda_reduce, fsdpc_cuda_reduce_params)         \
    X(fsdpc_cuda_refresh, fsdpc_cuda_refresh_params)       \
    X(fsdpc_cuda_norm, fsdpc_cuda_norm_params)             \
    X(fsdpc_cuda_norm_sum, fsdpc_cuda_norm_sum_params)     \
    X(fsdpc_cuda_clip, fsdpc_cuda_clip_params)             \
    X(fsdpc_cuda_step_begin, fsdpc_cuda_step_begin_params) \
    X(fsdpc_cuda_step, fsdpc_cuda_step_params)             \
    X(fsdpc_cuda_step_wide, fsdpc_cuda_step_params)        \
    X(fsdpc_cuda_step8, fsdpc_cuda_step_params)            \
    X(fsdpc_cuda_pack8, fsdpc_cuda_activation_params)      \
    X(fsdpc_cuda_unpack8, fsdpc_cuda_activation_params)    \
    X(fsdpc_cuda_encode, fsdpc_cuda_coding_params)         \
    X(fsdpc_cuda_decode, fsdpc_cuda_coding_params)         \
    X(fsdpc_cuda_sum_landed, fsdpc_cuda_landed_params)

/* dst[i] = convert(src[i] * scale); values of type FSDPC_BYTES are copied. If the types of dst and src are
 * equal, dst may be src. */
typedef struct fsdpc_cuda_cast_params {
    void *dst;
    const void *src;
    int64_t n;
    double scale;
    int dst_type, src_type;
} fsdpc_cuda_cast_params;

/* One of several arrays that a launch works on. Consecutive thread blocks work on it: from its first_block to
 * the first_block of the next span, or to the end of the grid. */
typedef struct fsdpc_cuda_span {
    void *data;
    int64_t n;
    int32_t first_block, type;
} fsdpc_cuda_span;

/* Multiplies the elements of each span by *factor, in place. */
typedef struct fsdpc_cuda_scale_params {
    const double *factor;
    int64_t count;
    fsdpc_cuda_span span[FSDPC_CUDA_SPANS];
} fsdpc_cuda_scale_params;

/* --- pack: any number of tensors into one buffer ---------------------------------------------- */

/* A part of the destination: the elements of one tensor, or a gap. A unit makes its entries once. */
typedef struct fsdpc_cuda_pack_entry {
    int64_t first_tile; /* number of its first tile; it has ceil(n / elements of a tile) tiles */
    int64_t n;          /* elements */
    int64_t dst_offset; /* bytes from the buffer's start */
    int32_t dst_type;
    int32_t source;      /* index among the sources; -1: a gap, filled with zeros */
    int64_t base_offset; /* pack_add: bytes from the start of the base */
    int32_t base_type;   /* F32 or F64 */
    int32_t pad;
} fsdpc_cuda_pack_entry;

/* A tensor that is not contiguous. Strides are in elements. Dimensions are merged where possible. */
typedef struct fsdpc_cuda_view {
    const void *data;
    int64_t ndim;
    int64_t shape[FSDPC_CUDA_VIEW_DIMS];
    int64_t strides[FSDPC_CUDA_VIEW_DIMS];
} fsdpc_cuda_view;

/* A source in one word: an address, the type, and whether the address is that of the elements or of a
 * fsdpc_cuda_view. The word 0 means that there is no source, and zeros are written. */
typedef uint64_t fsdpc_cuda_source;
#define FSDPC_CUDA_SOURCE_TYPE_SHIFT 56
#define FSDPC_CUDA_SOURCE_STRIDED ((uint64_t)1 << 60)
#define FSDPC_CUDA_SOURCE_ADD ((uint64_t)1 << 61) /* pack_add: the source is added to the base */
#define FSDPC_CUDA_SOURCE_ADDRESS (((uint64_t)1 << FSDPC_CUDA_SOURCE_TYPE_SHIFT) - 1)

typedef struct fsdpc_cuda_pack_params {
    void *dst;
    const fsdpc_cuda_pack_entry *entries;
    const int32_t *tile_entry; /* for each tile, the index of its entry; NULL: only one entry */
    int64_t tiles;             /* also the number of thread blocks */
    double scale;
    const void *base;               /* for pack_add; may be equal to dst */
    const fsdpc_cuda_source *table; /* the sources; NULL: they are in `source` */
    fsdpc_cuda_source source[FSDPC_CUDA_PACK_SOURCES];
} fsdpc_cuda_pack_params;

/* --- reduce and norms --------------------------------------------------------------------------- */

/* The layout of fsdpc_norm in device memory. */
typedef struct fsdpc_cuda_norm_value {
    double sum;
    double max;
    int64_t nonfinite;
} fsdpc_cuda_norm_value;

/* Returns the number of blocks of a launch that writes partial norms of n elements. It depends on n only, so
 * that the order of the sum is the same on every GPU. */
static inline int64_t
fsdpc_cuda_norm_blocks(int64_t n)
{
    const int64_t blocks = (n + FSDPC_CUDA_NORM_BLOCK_ITEMS - 1) / FSDPC_CUDA_NORM_BLOCK_ITEMS;
    const int64_t most = FSDPC_CUDA_NORM_BLOCKS;
    return blocks < 1 ? 1 : blocks > most ? most : blocks;
}

/* r = src[0] + src[1] + ...; acc = add ? acc + r * scale : r * scale. NULL sources are skipped. */
typedef struct fsdpc_cuda_reduce_params {
    void *acc;
    int64_t n;
    double scale;
    int acc_type, src_type, src_count, add;
    const void *src[FSDPC_CUDA_REDUCE_SOURCES];
} fsdpc_cuda_reduce_params;

/* Sets acc[i] (F32 or F64) to grad[i] if acc[i], converted to grad's type, differs from grad[i] in a bit. */
typedef struct fsdpc_cuda_refresh_params {
    void *acc;
    const void *grad;
    int64_t n;
    int acc_type, grad_type;
} fsdpc_cuda_refresh_params;

/* Block b writes its partial norm to partials[b]: the sum of squares, or of |x|^p if p is not 2. A span of n
 * elements has fsdpc_cuda_norm_blocks(n) blocks. */
typedef struct fsdpc_cuda_norm_params {
    fsdpc_cuda_norm_value *partials;
    double p;
    int64_t count;
    fsdpc_cuda_span span[FSDPC_CUDA_SPANS];
} fsdpc_cuda_norm_params;

/* One block computes *out = (add ? *out : 0) + partials[0] + ... in an order that depends on count only. */
typedef struct fsdpc_cuda_norm_sum_params {
    const fsdpc_cuda_norm_value *partials;
    fsdpc_cuda_norm_value *out;
    int64_t count;
    int add;
} fsdpc_cuda_norm_sum_params;

/* One thread computes *norm = total->sum ^ (1 / p) (total->max if p is infinite), and
 * *factor = min(1, max_norm / (*norm + epsilon)), which is NaN if *norm is NaN. */
typedef struct fsdpc_cuda_clip_params {
    const fsdpc_cuda_norm_value *total;
    double *norm, *factor;
    double p, max_norm, epsilon;
} fsdpc_cuda_clip_params;

/* --- optimizer steps (steps.h) ------------------------------------------------------------------- */

/* Returns how many tiles a tensor has. Tiles begin at multiples of FSDPC_CUDA_STEP_TILE in the whole
 * parameter. A tensor without elements has one tile, in which its step counter is advanced. */
static inline int64_t
fsdpc_cuda_step_tiles(int64_t first, int64_t n)
{
    const int64_t last = n > 0 ? first + n - 1 : first;
    return last / FSDPC_CUDA_STEP_TILE - first / FSDPC_CUDA_STEP_TILE + 1;
}

/* Thread i of one block sets entries[i] to tensor[i], and to the rates for the step of this tensor. */
typedef struct fsdpc_cuda_step_begin_params {
    fsdpc_step_rule rule;
    fsdpc_step_control control;
    fsdpc_step_entry *entries;
    int64_t count;
    fsdpc_step_tensor tensor[FSDPC_CUDA_STEP_TENSORS];
} fsdpc_cuda_step_begin_params;

/* A launch has one block for each tile of all entries. */
typedef struct fsdpc_cuda_step_params {
    const fsdpc_step_entry *entries;
    int64_t count;
    int32_t kind, nesterov;
    fsdpc_step_codes codes[2]; /* for step8: the maps of m and of v to codes */
} fsdpc_cuda_step_params;

/* --- saved activations (csrc/activation/activation.h) --------------------------------------------- */

/* Converts values to codes, with one scale per FSDPC_STEP_BLOCK values, or codes to values. */
typedef struct fsdpc_cuda_activation_params {
    void *values;
    int8_t *codes;
    float *scales;
    int64_t n;
    int32_t type, pad;
} fsdpc_cuda_activation_params;

/* --- codes (csrc/codec/codec.h) -------------------------------------------------------------------- */

/* Pieces of rows. The values of pieces are contiguous; codes of a piece begin at a multiple of `stride`. */
typedef struct fsdpc_cuda_coding {
    void *values;
    uint8_t *coded;
    int64_t rows, row;      /* rows of each piece; elements of each row */
    int64_t stride, scales; /* from a coded piece: bytes to the next one; bytes to its scales */
    int64_t blocks;         /* number of blocks of values in all pieces */
    float *lost;            /* each value's coding error, see fsdpc_codec_encode; or NULL */
    int32_t first_block;    /* the first thread block that works on these pieces */
    int32_t type, codec, pad;
} fsdpc_cuda_coding;

/* Converts values to codes, or codes to values. */
typedef struct fsdpc_cuda_coding_params {
    int64_t count;
    fsdpc_cuda_coding coding[FSDPC_CUDA_CODINGS];
} fsdpc_cuda_coding_params;

/* The pieces of one sum. from.values: this rank's piece. from.coded: the pieces of the other senders, in the
 * order of senders. */
typedef struct fsdpc_cuda_landed {
    fsdpc_cuda_coding from;
    void *sum; /* F32 or F64 */
    int32_t sum_type, pad;
} fsdpc_cuda_landed;

/* Sums the pieces of all senders in the order of senders, with the operations of fsdpc_cuda_reduce. */
typedef struct fsdpc_cuda_landed_params {
    int64_t count;
    double scale;
    int32_t senders, own, add, pad;
    fsdpc_cuda_landed landed[FSDPC_CUDA_LANDED];
} fsdpc_cuda_landed_params;

#endif
