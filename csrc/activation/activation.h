/* Saved activations in 8 bits: one signed byte per element, one float32 scale per 256 elements, the
 * largest magnitude of the block.
 *
 * steps = round(x / scale * 126), to nearest, halves to even; code = steps + sign(x). So a code has the sign
 * of its value, and only zero has the code 0: backwards that ask for the sign (ReLU) read what was saved. A
 * code comes back as steps / 126 * scale, the codes 1 and -1, of no step, as a quarter of a step: x is off by
 * at most scale / 252 and one rounding; the block's largest magnitude and zero come back exactly. A block
 * with a value that is not finite gets the scale NaN and comes back as NaN, so that it is seen. Local; equal
 * bits on every instruction set.
 */
#ifndef FSDPC_ACTIVATION_H
#define FSDPC_ACTIVATION_H

#include <stdint.h>

#include "base/dtype.h"

enum { FSDPC_ACTIVATION_BLOCK = 256, FSDPC_ACTIVATION_STEPS = 126 };

/* Packs n elements (n >= 0) of type F32, BF16 or F16; `scales` has one value per block. FSDPC_E_TYPE for
 * other types. */
int fsdpc_activation_pack(const void *values, fsdpc_dtype type, int64_t n, int8_t *codes,
                          float *scales);
/* The reverse of fsdpc_activation_pack. */
int fsdpc_activation_unpack(const int8_t *codes, const float *scales, int64_t n, void *values,
                            fsdpc_dtype type);

#endif
