/* The table of element types. See dtype.h. */
#include "base/dtype.h"

#include <string.h>

#include "base/status.h"

struct row {
    size_t bytes;
    const char *name;
    uint8_t dlpack_code, dlpack_bits;
};

static const struct row table[FSDPC_DTYPE_COUNT] = {
#define ROW(name, value, bytes, text, code, bits) [value] = {bytes, text, code, bits},
    FSDPC_DTYPE_TABLE(ROW)
#undef ROW
};

static bool
known(fsdpc_dtype dtype)
{
    return (unsigned)dtype < FSDPC_DTYPE_COUNT;
}

size_t
fsdpc_dtype_bytes(fsdpc_dtype dtype)
{
    return known(dtype) ? table[dtype].bytes : 0;
}

const char *
fsdpc_dtype_name(fsdpc_dtype dtype)
{
    return known(dtype) ? table[dtype].name : "?";
}

int
fsdpc_dtype_from_name(const char *name, fsdpc_dtype *out)
{
    for (unsigned i = 0; i < FSDPC_DTYPE_COUNT; i++) {
        if (strcmp(name, table[i].name) == 0) {
            *out = (fsdpc_dtype)i;
            return FSDPC_OK;
        }
    }
    return fsdpc_error(FSDPC_E_INVAL,
                       "dtype '%s' is not one of float32, bfloat16, float16, float64, uint8 "
                       "(uint8 carries any other type as bytes)",
                       name);
}

bool
fsdpc_dtype_is_float(fsdpc_dtype dtype)
{
    return known(dtype) && dtype != FSDPC_BYTES;
}

fsdpc_dtype
fsdpc_dtype_accumulate(fsdpc_dtype dtype)
{
    return dtype == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32;
}

uint8_t
fsdpc_dtype_dlpack_code(fsdpc_dtype dtype)
{
    return known(dtype) ? table[dtype].dlpack_code : 0;
}

uint8_t
fsdpc_dtype_dlpack_bits(fsdpc_dtype dtype)
{
    return known(dtype) ? table[dtype].dlpack_bits : 0;
}
