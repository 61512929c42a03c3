/* The random bits of stochastic rounding, for C and for CUDA: hashes of a parameter's key, an element's
 * index in the whole parameter and the step, so that results do not depend on who computes an element.
 */
#ifndef FSDPC_RANDOM_H
#define FSDPC_RANDOM_H

#include <stdint.h>

#ifdef __CUDACC__
#define FSDPC_RANDOM static __device__ __forceinline__
#else
#define FSDPC_RANDOM static inline __attribute__((always_inline, unused))
#endif

/* The finisher of MurmurHash3 for 64 bits: every bit of the input changes half of the result's bits. */
FSDPC_RANDOM uint64_t
fsdpc_random_mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

/* What the random bits of a tensor's step depend on beside the elements' indices. */
FSDPC_RANDOM uint64_t
fsdpc_random_of_step(uint64_t seed, uint64_t tensor_key, double step)
{
    const uint64_t key = fsdpc_random_mix(seed + 0x9e3779b97f4a7c15ull * (tensor_key + 1));
    return fsdpc_random_mix(key ^ (uint64_t)step);
}

/* The key of all elements whose indices have the same high half as `index`. */
FSDPC_RANDOM uint64_t
fsdpc_random_key(uint64_t of_step, uint64_t index)
{
    return fsdpc_random_mix(of_step ^ index >> 32);
}

/* Begins the hash of a pair of elements: `number` is half the index of the pair's even element. */
#define FSDPC_RANDOM_STEP 0x9e3779b1u
FSDPC_RANDOM uint32_t
fsdpc_random_begin(uint32_t number, uint32_t before)
{
    return number * FSDPC_RANDOM_STEP + before;
}

/* 32 random bits of a pair. Half of the key is mixed in before the first of two rounds of multiply and
 * shift (fsdpc_random_begin), half between the rounds (constants of Wellons' search for hashes of low bias). */
FSDPC_RANDOM uint32_t
fsdpc_random_end(uint32_t h, uint32_t between)
{
    h = (h ^ h >> 16) * 0x7feb352du;
    h = ((h ^ h >> 15) + between) * 0x846ca68bu;
    return h ^ h >> 16;
}

/* 16 random bits for each rounding of an element, those of m, v and p independent of each other. Two elements
 * share one hash: for p one takes the sum of its halves, the other the difference, which agree in one bit. */
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
