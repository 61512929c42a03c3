/* Element types of parameters, slots and gradients.
 *
 * FSDPC_BYTES stands for any type that fsdpc transfers but never computes with (integers, quantised
 * data). Its item is one byte and its counts are byte counts, so the values arrive bit for bit.
 */
#ifndef FSDPC_DTYPE_H
#define FSDPC_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, value, item bytes, text, DLPack code, DLPack bits) */
#define FSDPC_DTYPE_TABLE(X)         \
    X(F32, 0, 4, "float32", 2, 32)   \
    X(BF16, 1, 2, "bfloat16", 4, 16) \
    X(F16, 2, 2, "float16", 2, 16)   \
    X(F64, 3, 8, "float64", 2, 64)   \
    X(BYTES, 4, 1, "uint8", 1, 8)

typedef enum fsdpc_dtype {
#define FSDPC_DTYPE_ENUM(name, value, bytes, text, code, bits) FSDPC_##name = value,
    FSDPC_DTYPE_TABLE(FSDPC_DTYPE_ENUM)
#undef FSDPC_DTYPE_ENUM
        FSDPC_DTYPE_COUNT
} fsdpc_dtype;

/* Returns the bytes of one item, or 0 for an unknown type. */
size_t fsdpc_dtype_bytes(fsdpc_dtype dtype);
const char *fsdpc_dtype_name(fsdpc_dtype dtype);
/* Fails with FSDPC_E_INVAL if `name` is not one of the table's texts; the error lists all texts. */
int fsdpc_dtype_from_name(const char *name, fsdpc_dtype *out);
/* Returns true for the types that can be cast and summed. */
bool fsdpc_dtype_is_float(fsdpc_dtype dtype);
/* Returns the type in which gradients of `dtype` are summed and stored: F64 for F64, else F32. */
fsdpc_dtype fsdpc_dtype_accumulate(fsdpc_dtype dtype);
uint8_t fsdpc_dtype_dlpack_code(fsdpc_dtype dtype);
uint8_t fsdpc_dtype_dlpack_bits(fsdpc_dtype dtype);

#endif
