/* Maximum and minimum over the ranks' buffers, for all_reduce. (For a sum, all_reduce calls the device.)
 *
 * Comparisons do not round the values, and the bits of the winner are
 * copied. A NaN wins over all numbers; of several NaNs the first one wins.
 */
#include <string.h>

#include "comm/comm_impl.h"

/* True if b must replace a. */
static bool
replaces(double a, double b, bool largest)
{
    if (a != a) {
        return false;
    }
    return b != b || (largest ? b > a : b < a);
}

static double
value_at(const void *src, fsdpc_dtype dtype, int64_t i)
{
    float single;
    double wide;
    uint16_t half;
    switch (dtype) {
    case FSDPC_F64:
        memcpy(&wide, (const char *)src + i * 8, 8);
        return wide;
    case FSDPC_F32:
        memcpy(&single, (const char *)src + i * 4, 4);
        return single;
    default:
        memcpy(&half, (const char *)src + i * 2, 2);
        return dtype == FSDPC_BF16 ? fsdpc_bf16_to_f32(half) : fsdpc_f16_to_f32(half);
    }
}

void
fsdpc_comm_extreme(void *dst, const void *const *src, int count, fsdpc_dtype dtype, int64_t n,
                   bool largest)
{
    size_t bytes = fsdpc_dtype_bytes(dtype);
    for (int64_t i = 0; i < n; i++) {
        int winner = 0;
        double best = value_at(src[0], dtype, i);
        for (int k = 1; k < count; k++) {
            double other = value_at(src[k], dtype, i);
            if (replaces(best, other, largest)) {
                best = other;
                winner = k;
            }
        }
        /* memmove, because dst may be src[winner]. */
        memmove((char *)dst + (size_t)i * bytes, (const char *)src[winner] + (size_t)i * bytes,
                bytes);
    }
}
