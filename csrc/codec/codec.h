/* Codecs, which send values in fewer bits.
 *
 * A codec cuts a row into blocks of consecutive elements; the last block may be shorter. Each block becomes
 * codes of 4 or 8 bits and one scale. Parameters are sharded between rows, so the codes are the same on any
 * number of ranks. A block with a value that is not finite has a scale that makes the whole block NaN.
 *
 *   name          block  scale                            code
 *   int8          256    float32, the largest magnitude   csrc/activation: off by at most largest / 252
 *   float8_e4m3   256    float32, the largest magnitude   OCP E4M3 of x / largest * 448
 *   float8_e5m2   256    float32, the largest magnitude   E5M2 of x / largest * 57344
 *   mxfp8         32     E8M0, 2^(floor(log2(largest)) - 8)   OCP E4M3 of x / scale, at most 448
 *   nvfp4         512    s (float32): largest / 2688      E2M1 of x / (s * part), at most 6
 *                        part (E4M3), one for each 16 elements: their largest magnitude / 6 / s
 *   nf4           64     float32, the largest magnitude   the nearest of the 16 levels of QLoRA (arXiv 2305.14314)
 *   int4          128    float32, the largest magnitude   8 + x / largest * 7, an integer from 1 to 15
 *   int4_stochastic  the block, scale and code of int4, rounded stochastically: the error is 0 on average
 *
 * All codecs but int4_stochastic round to nearest, ties to even (nf4: ties to the lower level). Stochastic
 * rounding uses a hash of the block's values and the element's index, so equal blocks get equal codes. All
 * instruction sets and GPUs (kernels/cuda_codec.cu) give equal bits, except for codes of non-finite blocks.
 *
 * Memory of coded rows has all codes first, row by row, and then all scales, from a multiple of 16 bytes
 * on. Two codes of 4 bits share a byte, the first one in the upper half; each row begins with a new byte.
 */
#ifndef FSDPC_CODEC_H
#define FSDPC_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "codec_bits.h"

/* Finds the codec called `name` ("": FSDPC_UNCODED), or fails with FSDPC_E_INVAL and lists the names. */
int fsdpc_codec_from_name(const char *name, fsdpc_codec *out);
const char *fsdpc_codec_name(fsdpc_codec codec);

/* The bytes of `rows` (>= 0) coded rows of `row` (> 0) elements, a multiple of 16; 0 for FSDPC_UNCODED. */
size_t fsdpc_codec_bytes(fsdpc_codec codec, int64_t rows, int64_t row);
/* Returns the offset of the scales in the memory of coded rows. */
size_t fsdpc_codec_scales(fsdpc_codec codec, int64_t rows, int64_t row);
/* Returns the index of the first element, from element i of a matrix on, that begins a block. */
int64_t fsdpc_codec_block(fsdpc_codec codec, int64_t row, int64_t i);

/* The three functions below take a codec and contiguous rows of `row` elements of a floating-point
 * dtype. They return the error of fsdpc_kernels_select (kernels.h) if no kernels can be selected.
 *
 * `lost` (or NULL) has one float per element, which encoding adds to the value and then replaces
 * with the coding error. For blocks of zeros, and blocks with a value that is not finite,
 * `lost` stays unchanged. */
int fsdpc_codec_encode(fsdpc_codec codec, const void *values, fsdpc_dtype type, int64_t rows,
                       int64_t row, float *lost, void *coded);
/* Decodes n elements of the rows, from element `begin` on. Element `begin` must be the first of a block. */
int fsdpc_codec_decode(fsdpc_codec codec, const void *coded, int64_t rows, int64_t row,
                       int64_t begin, int64_t n, void *values, fsdpc_dtype type);
/* Encodes and decodes n elements of `src`, and writes the results to `dst`. The first
 * element begins a block and is element `at` of its row; the last element ends a block. */
int fsdpc_codec_round(fsdpc_codec codec, const void *src, fsdpc_dtype src_type, int64_t row,
                      int64_t at, int64_t n, void *dst, fsdpc_dtype dst_type);

#endif
