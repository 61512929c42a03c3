/* CRC-32C (Castagnoli): digests of parts can be combined to the digest of the whole. */
#ifndef FSDPC_CRC32C_H
#define FSDPC_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Returns the digest of the bytes that `crc` covers (0: none) followed by `bytes` bytes of `data`. Uses the
 * processor's CRC instruction if there is one. Any alignment. Any thread. */
uint32_t fsdpc_crc32c(uint32_t crc, const void *data, size_t bytes);
/* As fsdpc_crc32c, and sets *sum to the sum of the whole words of 8 bytes of `data`, modulo 2^64. */
uint32_t fsdpc_crc32c_and_sum(uint32_t crc, const void *data, size_t bytes, uint64_t *sum);
/* As fsdpc_crc32c, but in plain C without the processor's instruction. */
uint32_t fsdpc_crc32c_plain(uint32_t crc, const void *data, size_t bytes);
/* Returns the digest of A followed by B, from the digests of A and B and the length of B. */
uint32_t fsdpc_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes);

#endif
