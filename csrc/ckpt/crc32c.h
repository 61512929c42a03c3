/* CRC-32C (Castagnoli), whose digests of parts combine to the digest of the whole. */
#ifndef FSDPC_CRC32C_H
#define FSDPC_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The digest of what `crc` covers (0: nothing) followed by `bytes` bytes of `data`, computed by the
 * processor's instruction where there is one. Any alignment; any thread. */
uint32_t fsdpc_crc32c(uint32_t crc, const void *data, size_t bytes);
/* As fsdpc_crc32c; *sum becomes the sum of the whole words of 8 bytes of `data`, modulo 2^64. */
uint32_t fsdpc_crc32c_and_sum(uint32_t crc, const void *data, size_t bytes, uint64_t *sum);
/* As fsdpc_crc32c, in plain C. */
uint32_t fsdpc_crc32c_plain(uint32_t crc, const void *data, size_t bytes);
/* The digest of A followed by B, from both digests and the length of B. */
uint32_t fsdpc_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes);

#endif
