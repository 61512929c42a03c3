/* The random bits of stochastic rounding, for C and for CUDA: hashes of a parameter's key, an element's
 * index in the whole parameter and the step. They do not depend on the rank or the thread that uses them.
 */
#ifndef FSDPC_RANDOM_H
#define FSDPC_RANDOM_H

#include <stdint.h>

#ifdef __CUDACC__
#define FSDPC_RANDOM static __device__ __forceinline__
#else
#define FSDPC_RANDOM static inline __attribute__((always_inline, unused))
#endif

/* The finisher of MurmurHash3 for 64 bits: each input bit changes half of the result's bits on average. */
FSDPC_RANDOM uint64_t
fsdpc_random_mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

/* Returns the hash of all that the random bits of a tensor's step depend on, except the element's index. */
FSDPC_RANDOM uint64_t
fsdpc_random_of_step(uint64_t seed, uint64_t tensor_key, double step)
{
    const uint64_t key = fsdpc_random_mix(seed + 0x9e3779b97f4a7c15ull * (tensor_key + 1));
    return fsdpc_random_mix(key ^ (uint64_t)step);
}

/* Returns the key for `index` and all other indices with the same upper 32 bits. */
FSDPC_RANDOM uint64_t
fsdpc_random_key(uint64_t of_step, uint64_t index)
{
    return fsdpc_random_mix(of_step ^ index >> 32);
}

/* Begins the hash of a pair of elements. `number` is half the index of the pair's even element; `before` is
 * the lower half of fsdpc_random_key. */
#define FSDPC_RANDOM_STEP 0x9e3779b1u
FSDPC_RANDOM uint32_t
fsdpc_random_begin(uint32_t number, uint32_t before)
{
    return number * FSDPC_RANDOM_STEP + before;
}

/* Returns 32 random bits for a pair of elements. `h` is the result of fsdpc_random_begin. `between`, the
 * upper half of the key, is added between two rounds of multiply and shift (constants from Wellons' search
 * for good hashes). */
FSDPC_RANDOM uint32_t
fsdpc_random_end(uint32_t h, uint32_t between)
{
    h = (h ^ h >> 16) * 0x7feb352du;
    h = ((h ^ h >> 15) + between) * 0x846ca68bu;
    return h ^ h >> 16;
}

/* 16 random bits to round each of m, v and p of an element; any two of the three are independent. The
 * elements of a pair share a hash: p takes the sum of its halves (even element) or their difference (odd). */
typedef struct fsdpc_random {
    uint32_t m, v, p;
} fsdpc_random;

FSDPC_RANDOM fsdpc_random
fsdpc_random_even(uint32_t hash)
{
    const uint32_t low = hash & 0xffffu, high = hash >> 16;
    const fsdpc_random bits = {low, high, (low + high) & 0xffffu};
    return bits;
}

FSDPC_RANDOM fsdpc_random
fsdpc_random_odd(uint32_t hash)
{
    const uint32_t low = hash & 0xffffu, high = hash >> 16;
    const fsdpc_random bits = {high, low, (low - high) & 0xffffu};
    return bits;
}

#endif
