/* Saved activations in 8 bits: one signed byte (the code) per element, and one float32 scale per block of
 * 256 elements. The scale is the largest magnitude in the block.
 *
 * steps = round(x / scale * 126), halves to even; code = steps + sign(x). So a code has the sign of its
 * value, and only zero has the code 0: a backward that needs the sign (ReLU) gets the sign that was saved. A
 * code is unpacked to steps / 126 * scale. The codes 1 and -1 have 0 steps; they are unpacked to a quarter of
 * a step and minus a quarter of a step. The error of x is at most scale / 252 plus one rounding error; zero
 * and the block's largest magnitude have no error. If a value is not finite, its whole block becomes
 * NaN, so that the user notices. Local. The results have equal bits on every instruction set.
 */
#ifndef FSDPC_ACTIVATION_H
#define FSDPC_ACTIVATION_H

#include <stdint.h>

#include "base/dtype.h"

enum { FSDPC_ACTIVATION_BLOCK = 256, FSDPC_ACTIVATION_STEPS = 126 };

/* Packs n elements (n >= 0) of type F32, BF16 or F16; `scales` has one value per block. Fails with
 * FSDPC_E_TYPE for other types. */
int fsdpc_activation_pack(const void *values, fsdpc_dtype type, int64_t n, int8_t *codes,
                          float *scales);
/* Unpacks the codes and scales of fsdpc_activation_pack into `values`. */
int fsdpc_activation_unpack(const int8_t *codes, const float *scales, int64_t n, void *values,
                            fsdpc_dtype type);

#endif
