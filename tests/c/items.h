/* Functions that read and write an element of a buffer of any dtype as a double. */
#ifndef FSDPC_TEST_ITEMS_H
#define FSDPC_TEST_ITEMS_H

#include "base/dtype.h"
#include "kernels.h"

__attribute__((unused)) static double
item_get(const void *buffer, fsdpc_dtype dtype, int64_t i)
{
    switch (dtype) {
    case FSDPC_F64:
        return ((const double *)buffer)[i];
    case FSDPC_F32:
        return ((const float *)buffer)[i];
    case FSDPC_BF16:
        return fsdpc_bf16_to_f32(((const uint16_t *)buffer)[i]);
    case FSDPC_F16:
        return fsdpc_f16_to_f32(((const uint16_t *)buffer)[i]);
    default:
        return ((const uint8_t *)buffer)[i];
    }
}

__attribute__((unused)) static void
item_put(void *buffer, fsdpc_dtype dtype, int64_t i, double value)
{
    switch (dtype) {
    case FSDPC_F64:
        ((double *)buffer)[i] = value;
        break;
    case FSDPC_F32:
        ((float *)buffer)[i] = (float)value;
        break;
    case FSDPC_BF16:
        ((uint16_t *)buffer)[i] = fsdpc_f32_to_bf16((float)value);
        break;
    case FSDPC_F16:
        ((uint16_t *)buffer)[i] = fsdpc_f32_to_f16((float)value);
        break;
    default:
        ((uint8_t *)buffer)[i] = (uint8_t)value;
    }
}

/* Returns `value` rounded to `dtype`. */
__attribute__((unused)) static double
item_stored(fsdpc_dtype dtype, double value)
{
    double item;
    item_put(&item, dtype, 0, value);
    return item_get(&item, dtype, 0);
}

#endif
