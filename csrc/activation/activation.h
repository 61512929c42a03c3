/* Saved activations in 8 bits: one signed byte per element, one float32 scale per 256 elements.
 *
 * code = round(x / absmax * 127), to nearest, halves to even; x is about code * absmax / 127, off by at
 * most absmax / 254 and one rounding. The scale is the block's absmax / 127. A block with a value that
 * is not finite gets the scale NaN and comes back as NaN, so that it is seen. Local; equal bits on
 * every instruction set.
 */
#ifndef FSDPC_ACTIVATION_H
#define FSDPC_ACTIVATION_H

#include <stdint.h>

#include "base/dtype.h"

enum { FSDPC_ACTIVATION_BLOCK = 256 };

/* Packs n elements (n >= 0) of type F32, BF16 or F16; `scales` has one value per block. FSDPC_E_TYPE for
 * other types. */
int fsdpc_activation_pack(const void *values, fsdpc_dtype type, int64_t n, int8_t *codes,
                          float *scales);
/* The reverse. */
int fsdpc_activation_unpack(const int8_t *codes, const float *scales, int64_t n, void *values,
                            fsdpc_dtype type);

#endif
