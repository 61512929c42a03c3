/* Codecs: how values travel in fewer bits.
 *
 * A codec cuts a row into blocks of consecutive elements, the last one perhaps shorter, and makes of each block codes
 * of 4 or 8 bits and one scale. So the codes of a parameter that is cut between rows depend on the parameter alone, on
 * any number of ranks. A block with a value that is not finite comes back as NaN, in every element: the scale says so.
 *
 *   name          block  scale                            code
 *   int8          256    float32, the largest magnitude   csrc/activation: off by at most largest / 252
 *   float8_e4m3   256    float32, the largest magnitude   OCP E4M3 of x / largest * 448
 *   float8_e5m2   256    float32, the largest magnitude   E5M2 of x / largest * 57344
 *   mxfp8         32     E8M0, 2^(floor(log2(largest)) - 8)   OCP E4M3 of x / scale, at most 448
 *   nvfp4         512    float32, largest / 2688, s; and of each 16   E2M1 of x / (s * part), at most 6
 *                        elements E4M3 of their largest / 6 / s, part
 *   nf4           64     float32, the largest magnitude   the nearest of the 16 levels of QLoRA (arXiv 2305.14314)
 *   int4          128    float32, the largest magnitude   8 + x / largest * 7, an integer from 1 to 15
 *   int4_stochastic  the block, scale and code of int4, rounded stochastically: the error is 0 on average
 *
 * All others round to nearest. Halves go to even; halves between two levels of nf4 go down. The random bits of stochastic
 * rounding are a hash of the block's values and the element's place in the block: equal blocks have equal codes. Every
 * instruction set gives equal bits, and so does a GPU (kernels/cuda_codec.cu), but for codes in blocks that are not finite.
 *
 * The memory of coded rows has all codes first, row by row (two codes of 4 bits in a byte, the first one in the upper
 * half; a row begins with a byte), then, from a multiple of 16 bytes on, all scales.
 */
#ifndef FSDPC_CODEC_H
#define FSDPC_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "codec_bits.h"

/* "" is FSDPC_UNCODED. FSDPC_E_INVAL naming the accepted texts when `name` is none of them. */
int fsdpc_codec_from_name(const char *name, fsdpc_codec *out);
const char *fsdpc_codec_name(fsdpc_codec codec);

/* The bytes of `rows` (>= 0) coded rows of `row` (> 0) elements, a multiple of 16; 0 for FSDPC_UNCODED. */
size_t fsdpc_codec_bytes(fsdpc_codec codec, int64_t rows, int64_t row);
/* Where in these bytes the scales begin. */
size_t fsdpc_codec_scales(fsdpc_codec codec, int64_t rows, int64_t row);
/* The first element from element i of a matrix on that begins a block. */
int64_t fsdpc_codec_block(fsdpc_codec codec, int64_t row, int64_t i);

/* The three functions below take a codec and contiguous rows of `row` elements of a floating-point dtype. An
 * error is one of the choice of kernels (kernels.h).
 *
 * `lost` (NULL: none) has one float per element, which is added to the values; after the call it is what coding lost of
 * these sums. In blocks that are not finite, and in blocks of zeros, it stays as it was. */
int fsdpc_codec_encode(fsdpc_codec codec, const void *values, fsdpc_dtype type, int64_t rows,
                       int64_t row, float *lost, void *coded);
/* Decodes n elements of the rows, from element `begin` on, which must be the first of a block. */
int fsdpc_codec_decode(fsdpc_codec codec, const void *coded, int64_t rows, int64_t row,
                       int64_t begin, int64_t n, void *values, fsdpc_dtype type);
/* Writes to `dst` what coding and decoding make of n elements of `src`. The first one begins a block, `at`
 * elements behind the begin of its row; the last one ends a block. */
int fsdpc_codec_round(fsdpc_codec codec, const void *src, fsdpc_dtype src_type, int64_t row,
                      int64_t at, int64_t n, void *dst, fsdpc_dtype dst_type);

#endif
