/* Scalar conversions between float32 and the 16-bit types, in integer arithmetic.
 *
 * All other kernels must give the results of these functions: they round to nearest even, keep infinities
 * and subnormals, and quiet a NaN but keep its sign and the top bits of its payload (as the float16
 * instructions of CPUs do). Because of the integer arithmetic, results do not depend on
 * the rounding mode, nor on flush-to-zero settings that a caller may have switched on.
 *
 * float64 is converted to the 16-bit types through float32, as in torch, so it is rounded twice.
 *
 * load_* and store_* work at any alignment; `i` counts elements.
 */
#ifndef FSDPC_CONVERT_H
#define FSDPC_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline uint32_t
f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float
f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A shift is exact for every bit pattern, so a signalling NaN stays signalling until arithmetic uses it. */
static inline float
bf16_to_f32(uint16_t bits)
{
    return f32_from_bits((uint32_t)bits << 16);
}

static inline uint16_t
f32_to_bf16(float value)
{
    uint32_t bits = f32_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)((bits >> 16) | 0x0040u);
    }
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static inline float
f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1Fu;
    uint32_t mantissa = bits & 0x3FFu;
    if (exponent == 0x1F) {
        uint32_t quiet = mantissa ? 0x00400000u : 0;
        return f32_from_bits(sign | 0x7F800000u | quiet | mantissa << 13);
    }
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return f32_from_bits(sign | f32_bits(magnitude));
    }
    return f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Converts a |value| below 2^-14 to the bits of a float16. As an integer, the bits count steps of 2^-24. */
static inline uint32_t
f16_subnormal(uint32_t magnitude)
{
    uint32_t exponent = magnitude >> 23;
    if (exponent < 102) {
        return 0;
    }
    uint32_t mantissa = (magnitude & 0x007FFFFFu) | 0x00800000u;
    uint32_t shift = 126 - exponent;
    uint32_t kept = mantissa >> shift;
    uint32_t rest = mantissa & ((1u << shift) - 1);
    uint32_t half = 1u << (shift - 1);
    return kept + (rest > half || (rest == half && (kept & 1u)));
}

static inline uint16_t
f32_to_f16(float value)
{
    uint32_t bits = f32_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return (uint16_t)(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    }
    if (magnitude >= 0x477FF000u) { /* 65520, half way between the largest float16 and 2^16 */
        return (uint16_t)(sign | 0x7C00u);
    }
    if (magnitude < 0x38800000u) { /* 2^-14, the smallest normal float16 */
        return (uint16_t)(sign | f16_subnormal(magnitude));
    }
    magnitude += 0xFFFu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | (magnitude - 0x38000000u) >> 13);
}

static inline float
load_F32(const void *base, int64_t i)
{
    float value;
    memcpy(&value, (const char *)base + i * 4, sizeof value);
    return value;
}

static inline float
load_BF16(const void *base, int64_t i)
{
    uint16_t bits;
    memcpy(&bits, (const char *)base + i * 2, sizeof bits);
    return bf16_to_f32(bits);
}

static inline float
load_F16(const void *base, int64_t i)
{
    uint16_t bits;
    memcpy(&bits, (const char *)base + i * 2, sizeof bits);
    return f16_to_f32(bits);
}

static inline double
load_F64(const void *base, int64_t i)
{
    double value;
    memcpy(&value, (const char *)base + i * 8, sizeof value);
    return value;
}

static inline void
store_F32(void *base, int64_t i, float value)
{
    memcpy((char *)base + i * 4, &value, sizeof value);
}

static inline void
store_BF16(void *base, int64_t i, float value)
{
    uint16_t bits = f32_to_bf16(value);
    memcpy((char *)base + i * 2, &bits, sizeof bits);
}

static inline void
store_F16(void *base, int64_t i, float value)
{
    uint16_t bits = f32_to_f16(value);
    memcpy((char *)base + i * 2, &bits, sizeof bits);
}

static inline void
store_F64(void *base, int64_t i, double value)
{
    memcpy((char *)base + i * 8, &value, sizeof value);
}

#endif
