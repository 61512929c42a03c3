/* Compares a table of kernels with the kernels in plain C, bit for bit. The cases cover every pair of types,
 * sizes near multiples of a vector's length, aligned and unaligned addresses, infinities, subnormals and
 * NaNs. They also check that the bytes around a result are unchanged.
 */
#ifndef FSDPC_TEST_KERNEL_CASES_H
#define FSDPC_TEST_KERNEL_CASES_H

#include <math.h>

#include "kernels.h"
#include "test.h"

/* The kernels that are tested. */
typedef struct kernel_set {
    const fsdpc_kernels *table;
    void (*refresh)(const fsdpc_kernels *table, void *acc, fsdpc_dtype acc_type, const void *grad,
                    fsdpc_dtype grad_type, int64_t n);
    bool aligned; /* elements must lie at multiples of their size */
    bool any_nan; /* a NaN result may differ in its bits from the plain kernels' NaN */
} kernel_set;

enum {
    KERNEL_GUARD = 64,      /* bytes after a destination that must stay as they were */
    KERNEL_PATTERN = 10007, /* fill makes so many values, and then repeats them */
    KERNEL_SOURCES = 70,    /* sources of a reduction; above REDUCE_SOURCES_MAX of vector.inc */
};

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static const double scales[] = {1.0, 0.25, 1.0 / 3, -2.0, 65536.0};

static const fsdpc_kernels *plain;

__attribute__((constructor)) static void
find_plain(void)
{
    plain = fsdpc_kernels_plain();
}

/* --- values -------------------------------------------------------------------------------- */

static uint64_t
random_bits(void)
{
    static uint64_t state = 0x9E3779B97F4A7C15u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void *
new_bytes(size_t bytes)
{
    void *block = aligned_alloc(64, (bytes + 64) / 64 * 64);
    REQUIRE(block != NULL);
    memset(block, 0xA5, bytes);
    return block;
}

static void
put(void *block, fsdpc_dtype type, int64_t i, double value)
{
    plain->cast((char *)block + (size_t)i * fsdpc_dtype_bytes(type), type, &value, FSDPC_F64, 1,
                1.0);
}

static double
item(const void *block, fsdpc_dtype type, int64_t i)
{
    double value;
    plain->cast(&value, FSDPC_F64, (const char *)block + (size_t)i * fsdpc_dtype_bytes(type), type,
                1, 1.0);
    return value;
}

static double
ordinary(void)
{
    return ((double)(random_bits() >> 11) * 0x1p-53 - 0.5) * 8;
}

__attribute__((unused)) static void
fill_ordinary(void *block, fsdpc_dtype type, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        put(block, type, i, ordinary());
    }
}

/* Fills a block with random bit patterns, ordinary numbers and special values by turns. */
static void
fill(void *block, fsdpc_dtype type, int64_t n)
{
    static const double specials[] = {0.0,      -0.0,    INFINITY, -INFINITY, 65519.0, 65520.0,
                                      0x1p-133, 0x1p-24, 0x1p-25,  3.39e38,   -1e-42,  1.0};
    const size_t bytes = fsdpc_dtype_bytes(type);
    for (int64_t i = 0; i < n && i < KERNEL_PATTERN; i++) {
        const uint64_t bits = random_bits();
        if (i % 7 == 0 || type == FSDPC_BYTES) {
            memcpy((char *)block + (size_t)i * bytes, &bits, bytes);
        } else {
            put(block, type, i, i % 3 ? ordinary() : specials[bits % 12]);
        }
    }
    const size_t known = KERNEL_PATTERN * bytes, all = (size_t)n * bytes;
    for (size_t at = known; at < all; at += known) {
        memcpy((char *)block + at, block, all - at < known ? all - at : known);
    }
}

/* True if two arrays are equal bit for bit; with `any_nan` a NaN equals any other NaN. */
static bool
same(const void *a, const void *b, fsdpc_dtype type, int64_t n, bool any_nan)
{
    const size_t bytes = fsdpc_dtype_bytes(type);
    if (memcmp(a, b, (size_t)n * bytes) == 0) {
        return true;
    }
    for (int64_t i = 0; i < n; i++) {
        const size_t at = (size_t)i * bytes;
        if (memcmp((const char *)a + at, (const char *)b + at, bytes) != 0 &&
            !(any_nan && isnan(item(a, type, i)) && isnan(item(b, type, i)))) {
            fprintf(stderr, "element %lld of %lld: %a, not %a\n", (long long)i, (long long)n,
                    item(a, type, i), item(b, type, i));
            return false;
        }
    }
    return true;
}

static bool
same_value(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

/* --- one case ------------------------------------------------------------------------------ */

/* Memory for the source, the result and the expected result. The two results begin `at` bytes after the
 * beginning of their blocks. */
struct bed {
    char *src, *got, *want;
    size_t at, bytes;
};

/* Returns how many bytes after an aligned address the elements of a case begin: the size of `skip` elements
 * if elements must be aligned, else `skip`. */
static size_t
place(const kernel_set *set, fsdpc_dtype type, int skip)
{
    return (size_t)skip * (set->aligned ? fsdpc_dtype_bytes(type) : 1);
}

/* Allocates blocks with room for n elements of type `a` or of type `b`. The results begin at byte `at`. */
static struct bed
new_bed(int64_t n, fsdpc_dtype a, fsdpc_dtype b, size_t at)
{
    const size_t bytes_a = fsdpc_dtype_bytes(a), bytes_b = fsdpc_dtype_bytes(b);
    struct bed bed = {.at = at};
    bed.bytes = (size_t)n * (bytes_a > bytes_b ? bytes_a : bytes_b) + 2 * KERNEL_GUARD;
    bed.src = new_bytes(bed.bytes);
    bed.got = new_bytes(bed.bytes);
    bed.want = new_bytes(bed.bytes);
    return bed;
}

static void
free_bed(struct bed *bed)
{
    free(bed->src);
    free(bed->got);
    free(bed->want);
}

/* Returns true if the first n elements of the result are as expected and all other bytes are unchanged. */
static bool
as_wanted(const struct bed *bed, fsdpc_dtype type, int64_t n, bool any_nan)
{
    const size_t end = bed->at + (size_t)n * fsdpc_dtype_bytes(type);
    return same(bed->got + bed->at, bed->want + bed->at, type, n, any_nan) &&
           memcmp(bed->got, bed->want, bed->at) == 0 &&
           memcmp(bed->got + end, bed->want + end, bed->bytes - end) == 0;
}

/* Fills the result and the expected result with the same sums, to which a kernel then adds. */
static void
fill_sums(struct bed *bed, fsdpc_dtype type, int64_t n)
{
    fill(bed->want + bed->at, type, n);
    memcpy(bed->got, bed->want, bed->bytes);
}

static void
compare_cast(const kernel_set *set, fsdpc_dtype to, fsdpc_dtype from, int64_t n, int to_skip,
             int from_skip, double scale)
{
    struct bed bed = new_bed(n, to, from, place(set, to, to_skip));
    char *src = bed.src + place(set, from, from_skip);
    fill(src, from, n);
    set->table->cast(bed.got + bed.at, to, src, from, n, scale);
    plain->cast(bed.want + bed.at, to, src, from, n, scale);
    if (!as_wanted(&bed, to, n, set->any_nan && scale != 1)) {
        TEST_FAIL("%s cast %s from %s, n %lld, places %d and %d, scale %g", set->table->name,
                  fsdpc_dtype_name(to), fsdpc_dtype_name(from), (long long)n, to_skip, from_skip,
                  scale);
    }
    CHECK(true);
    free_bed(&bed);
}

static void
compare_scale(const kernel_set *set, fsdpc_dtype type, int64_t n, int skip, double scale)
{
    struct bed bed = new_bed(n, type, type, place(set, type, skip));
    fill_sums(&bed, type, n);
    set->table->scale(bed.got + bed.at, type, n, scale);
    plain->cast(bed.want + bed.at, type, bed.want + bed.at, type, n, scale);
    CHECK(as_wanted(&bed, type, n, set->any_nan));
    free_bed(&bed);
}

static void
compare_accumulate(const kernel_set *set, fsdpc_dtype acc, fsdpc_dtype from, int64_t n, int skip,
                   double scale)
{
    struct bed bed = new_bed(n, acc, from, place(set, acc, skip));
    char *src = bed.src + place(set, from, skip);
    fill(src, from, n);
    fill_sums(&bed, acc, n);
    set->table->accumulate(bed.got + bed.at, acc, src, from, n, scale);
    plain->accumulate(bed.want + bed.at, acc, src, from, n, scale);
    if (!as_wanted(&bed, acc, n, true)) {
        TEST_FAIL("%s accumulate %s to %s, n %lld, place %d, scale %g", set->table->name,
                  fsdpc_dtype_name(from), fsdpc_dtype_name(acc), (long long)n, skip, scale);
    }
    CHECK(true);
    free_bed(&bed);
}

/* Compares `refresh`, which replaces a sum by the element of grad at the same index if that element differs
 * from the rounded sum. Every third element of grad (in large arrays nearly every element) equals the rounded
 * sum. */
static void
compare_refresh(const kernel_set *set, fsdpc_dtype acc, fsdpc_dtype type, int64_t n, int skip,
                int seen_skip)
{
    struct bed bed = new_bed(n, acc, type, place(set, acc, skip));
    const size_t wide = fsdpc_dtype_bytes(acc), narrow = fsdpc_dtype_bytes(type);
    char *grad = bed.src + place(set, type, seen_skip);
    fill(grad, type, n);
    fill_sums(&bed, acc, n);
    for (int64_t i = 0; i < n; i++) {
        char *sum = bed.want + bed.at + (size_t)i * wide, *seen = grad + (size_t)i * narrow;
        uint64_t shown = 0;
        plain->cast(&shown, type, sum, acc, 1, 1.0);
        if (i % 3 == 0 || n > 1000) {
            memcpy(seen, &shown, i % 700 ? narrow : 0); /* one of 700 elements differs */
        }
        if (memcmp(seen, &shown, narrow) != 0) {
            plain->cast(sum, acc, seen, type, 1, 1.0);
        }
    }
    set->refresh(set->table, bed.got + bed.at, acc, grad, type, n);
    CHECK(as_wanted(&bed, acc, n, false));
    free_bed(&bed);
}

static void
compare_reduce(const kernel_set *set, fsdpc_dtype acc, fsdpc_dtype from, int count, int64_t n,
               int skip, double scale, bool add)
{
    const void *list[KERNEL_SOURCES] = {0};
    struct bed bed = new_bed(n, acc, from, place(set, acc, skip));
    const size_t bytes = (size_t)n * fsdpc_dtype_bytes(from) + KERNEL_GUARD;
    char *blocks[KERNEL_SOURCES];
    for (int s = 0; s < count; s++) {
        blocks[s] = new_bytes(bytes);
        char *source = blocks[s] + place(set, from, skip);
        fill(source, from, n);
        list[s] = count > 3 && s % 3 == 1 ? NULL : source;
    }
    fill_sums(&bed, acc, n);
    set->table->reduce(bed.got + bed.at, acc, list, count, from, n, scale, add);
    plain->reduce(bed.want + bed.at, acc, list, count, from, n, scale, add);
    if (!as_wanted(&bed, acc, n, true)) {
        TEST_FAIL("%s reduce of %d %s to %s, n %lld, place %d, scale %g, add %d", set->table->name,
                  count, fsdpc_dtype_name(from), fsdpc_dtype_name(acc), (long long)n, skip, scale,
                  add);
    }
    CHECK(true);
    for (int s = 0; s < count; s++) {
        free(blocks[s]);
    }
    free_bed(&bed);
}

static void
compare_norm(const kernel_set *set, fsdpc_dtype type, int64_t n, int skip, bool finite)
{
    char *block = new_bytes((size_t)n * fsdpc_dtype_bytes(type) + KERNEL_GUARD);
    char *src = block + place(set, type, skip);
    (finite ? fill_ordinary : fill)(src, type, n);
    const fsdpc_norm got = set->table->norm2(src, type, n), want = plain->norm2(src, type, n);
    /* Sums of n terms in two orders differ by less than 2 n units in the last place, and by far less if n is
     * large. */
    const double bound = fmin(2 * (double)n * 0x1p-53, 1e-12) * want.sum;
    CHECK_INT(got.nonfinite, want.nonfinite);
    CHECK(same_value(got.max, want.max));
    CHECK(isnan(want.sum) ? isnan(got.sum)
                          : got.sum == want.sum || fabs(got.sum - want.sum) <= bound);
    free(block);
}

/* Compares all kernels. Large sizes are tried with only some numbers of sources, because they take long. */
__attribute__((unused)) static void
kernels_are_the_plain_ones(const kernel_set *set, const int64_t *sizes, int size_count)
{
    for (int a = 0; a < 4; a++) {
        for (int k = 0; k < size_count; k++) {
            const int64_t n = sizes[k];
            const int skip = (int)(random_bits() % 3) * 2 + (k % 5 == 4);
            const double scale = scales[random_bits() % 5];
            for (int b = 0; b < 4; b++) {
                compare_cast(set, floats[b], floats[a], n, skip, skip, 1.0);
                compare_cast(set, floats[b], floats[a], n, skip, k % 2, scale);
            }
            compare_scale(set, floats[a], n, skip, scale);
            compare_norm(set, floats[a], n, skip, true);
            compare_norm(set, floats[a], n, skip + 1, false);
            for (int wide = 0; wide < 2; wide++) {
                const fsdpc_dtype acc = wide ? FSDPC_F64 : FSDPC_F32;
                compare_accumulate(set, acc, floats[a], n, skip, scale);
                compare_refresh(set, acc, floats[a], n, skip, skip);
                compare_refresh(set, acc, floats[a], n, (skip + 1) % 4, skip % 2);
                for (int count = 0; count <= 8; count++) {
                    if (n < 100000 || count == 1 || count == 3) {
                        compare_reduce(set, acc, floats[a], count, n, skip, scale, (count + k) % 2);
                        compare_reduce(set, acc, floats[a], count, n, skip, 1.0,
                                       (count + k) % 2 == 0);
                    }
                }
            }
        }
        compare_reduce(set, FSDPC_F32, floats[a], KERNEL_SOURCES, 100, 0, 0.5, true);
    }
    compare_cast(set, FSDPC_BYTES, FSDPC_BYTES, 1001, 3, 3, 1.0);
}

#endif
