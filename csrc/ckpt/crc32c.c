/* CRC-32C: the register's 32 bits are a polynomial over GF(2), modulo the Castagnoli polynomial. The highest
 * bit is the coefficient of x^0. Each byte that follows multiplies the register by x^8. So the digest of a
 * whole is the digest of its first part times a power of x, plus the digest of its second part.
 *
 * The SSE4.2 instruction digests 8 bytes. Its result takes 3 cycles, but a further instruction can start in
 * every cycle. So long buffers are read in three lanes, whose registers are then combined by the same
 * arithmetic.
 */
#include "ckpt/crc32c.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#define POLYNOMIAL 0x82F63B78u
enum { LANE_BYTES = 2048 };

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;
static uint32_t step_table[8][256]; /* [i][byte]: effect of the byte after i more bytes */
static uint32_t lane_table[4][256]; /* [i][byte]: effect of register byte i after LANE_BYTES */

/* Returns a * b modulo the polynomial. */
static uint32_t
multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) {
            product ^= b;
        }
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* Returns x^(8 * bytes) modulo the polynomial. */
static uint32_t
power(uint64_t bytes)
{
    uint32_t result = 1u << 31, square = 1u << 23;
    for (; bytes != 0; bytes >>= 1) {
        if (bytes & 1) {
            result = multiply(result, square);
        }
        square = multiply(square, square);
    }
    return result;
}

static void
make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (int later = 0; later < 8; later++) {
            step_table[later][byte] = multiply(byte, power((uint64_t)later + 1));
        }
        for (int place = 0; place < 4; place++) {
            lane_table[place][byte] = multiply(byte << 8 * place, power(LANE_BYTES));
        }
    }
}

static uint32_t
plain(uint32_t crc, const unsigned char *data, size_t bytes)
{
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint32_t next = 0;
        for (int i = 0; i < 8; i++) {
            unsigned char byte = data[i];
            if (i < 4) {
                byte ^= (unsigned char)(crc >> 8 * i);
            }
            next ^= step_table[7 - i][byte];
        }
        crc = next;
    }
    for (; bytes > 0; bytes--, data++) {
        crc = (crc >> 8) ^ step_table[0][(crc ^ *data) & 0xFF];
    }
    return crc;
}

uint32_t
fsdpc_crc32c_plain(uint32_t crc, const void *data, size_t bytes)
{
    pthread_once(&tables_once, make_tables);
    return ~plain(~crc, data, bytes);
}

static inline uint64_t
word_at(const unsigned char *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

#if defined(__x86_64__)

static uint32_t
after_lane(uint32_t crc)
{
    return lane_table[0][crc & 0xFF] ^ lane_table[1][crc >> 8 & 0xFF] ^
           lane_table[2][crc >> 16 & 0xFF] ^ lane_table[3][crc >> 24];
}

/* Digests `data` by the SSE4.2 instruction and adds the data's whole words of 8 bytes to `sum`. */
__attribute__((target("sse4.2"))) static uint32_t
by_instruction(uint32_t crc, const unsigned char *data, size_t bytes, uint64_t *sum)
{
    uint64_t sums[3] = {0};
    for (; bytes >= 3 * LANE_BYTES; bytes -= 3 * LANE_BYTES, data += 3 * LANE_BYTES) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < LANE_BYTES; i += 8) {
            const uint64_t word[3] = {word_at(data + i), word_at(data + LANE_BYTES + i),
                                      word_at(data + (size_t)2 * LANE_BYTES + i)};
            if (i % 64 == 0) { /* the processor itself does not prefetch three lanes well */
                for (size_t lane = 3; lane < 6; lane++) {
                    __builtin_prefetch(data + lane * LANE_BYTES + i);
                }
            }
            a = _mm_crc32_u64(a, word[0]);
            b = _mm_crc32_u64(b, word[1]);
            c = _mm_crc32_u64(c, word[2]);
            for (int lane = 0; lane < 3; lane++) {
                sums[lane] += word[lane];
            }
        }
        crc = after_lane(after_lane((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    uint64_t rest = crc;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        rest = _mm_crc32_u64(rest, word_at(data));
        sums[0] += word_at(data);
    }
    crc = (uint32_t)rest;
    for (; bytes > 0; bytes--, data++) {
        crc = _mm_crc32_u8(crc, *data);
    }
    *sum += sums[0] + sums[1] + sums[2];
    return crc;
}

#endif

uint32_t
fsdpc_crc32c_and_sum(uint32_t crc, const void *data, size_t bytes, uint64_t *sum)
{
    pthread_once(&tables_once, make_tables);
    *sum = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) {
        return ~by_instruction(~crc, data, bytes, sum);
    }
#endif
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        *sum += word_at((const unsigned char *)data + i);
    }
    return ~plain(~crc, data, bytes);
}

uint32_t
fsdpc_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    uint64_t sum;
    return fsdpc_crc32c_and_sum(crc, data, bytes, &sum);
}

uint32_t
fsdpc_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes)
{
    return multiply(a, power(b_bytes)) ^ b;
}
