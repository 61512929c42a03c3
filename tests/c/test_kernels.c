/* Tests of kernels. Scalar conversions are compared with their definition, and every table of kernels with
 * the kernels in plain C.
 *
 * The 16-bit types are tried with all their bit patterns, float32 with a few million random patterns. Sizes
 * and addresses are near multiples of a vector's length. Some sizes are near the smallest size for which
 * stores bypass the caches (streaming).
 */
#include "kernel_cases.h"

enum {
    BIG = (1 << 20) | 5,
    STREAMED = (4 << 20) | 5, /* just enough float32 elements that stores bypass the caches */
};

static const int64_t sizes[] = {0,  1,  2,  7,  15, 16, 17,  31,   33,
                                63, 64, 65, 66, 67, 96, 127, 1000, 4096 + 3};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static const fsdpc_kernels *tables[3];
static int table_count;

/* --- the scalar rules ---------------------------------------------------------------------- */

static float
float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Returns the value of a 16-bit float as a double, by the definition of the format. */
static double
value_of(unsigned bits, int exponent_bits, int mantissa_bits)
{
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = (int)bits & ((1 << mantissa_bits) - 1);
    const double sign = bits & 0x8000u ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return mantissa ? NAN : sign * INFINITY;
    }
    if (exponent == 0) {
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static void
every_16_bit_pattern_has_its_value_and_comes_back(void)
{
    int wrong = 0;
    for (unsigned bits = 0; bits < 65536; bits++) {
        const float half = fsdpc_f16_to_f32((uint16_t)bits);
        const float brain = fsdpc_bf16_to_f32((uint16_t)bits);
        const bool half_nan = isnan(half), brain_nan = isnan(brain);
        wrong += !same_value(half, value_of(bits, 5, 10));
        wrong += !same_value(brain, value_of(bits, 8, 7));
        wrong += fsdpc_f32_to_f16(half) != (half_nan ? bits | 0x0200u : bits);
        wrong += fsdpc_f32_to_bf16(brain) != (brain_nan ? bits | 0x0040u : bits);
    }
    CHECK_INT(wrong, 0);
}

/* Returns true if `bits` is the 16-bit number nearest to `value`. If two numbers are equally near, only the
 * even one counts. */
static bool
is_nearest(float value, uint16_t bits, int exponent_bits, int mantissa_bits)
{
    const unsigned infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    const unsigned magnitude = bits & 0x7FFFu;
    const double wanted = fabs((double)value);
    /* For rounding, infinity counts as a number that is one step above the largest number. */
    const double largest = value_of(infinity - 1, exponent_bits, mantissa_bits);
    const double step = largest - value_of(infinity - 2, exponent_bits, mantissa_bits);
    const double at =
        magnitude == infinity ? largest + step : value_of(magnitude, exponent_bits, mantissa_bits);
    const double up = magnitude + 1 >= infinity
                          ? largest + step
                          : value_of(magnitude + 1, exponent_bits, mantissa_bits);
    const double down = magnitude ? value_of(magnitude - 1, exponent_bits, mantissa_bits) : -up;
    const bool even = (magnitude & 1u) == 0;
    if (magnitude > infinity || !!(bits & 0x8000u) != !!signbit(value)) {
        return false;
    }
    const double above = (at + up) / 2, below = (at + down) / 2;
    if (magnitude != infinity && (wanted > above || (wanted == above && !even))) {
        return false;
    }
    return wanted > below || (wanted == below && even) || magnitude == 0;
}

static void
check_rounding(float value, int *wrong)
{
    if (isnan(value)) {
        const uint16_t sign = (uint16_t)(signbit(value) ? 0x8000u : 0);
        *wrong += (fsdpc_f32_to_f16(value) & 0xFE00u) != (sign | 0x7E00u);
        *wrong += (fsdpc_f32_to_bf16(value) & 0xFFC0u) != (sign | 0x7FC0u);
        return;
    }
    *wrong += !is_nearest(value, fsdpc_f32_to_f16(value), 5, 10);
    *wrong += !is_nearest(value, fsdpc_f32_to_bf16(value), 8, 7);
}

static void
floats_round_to_the_nearest_even(void)
{
    static const float edges[] = {65504.0f,        65519.996f,    65520.0f,  65536.0f,
                                  0x1p-14f,        0x1p-24f,      0x1p-25f,  0x1.8p-24f,
                                  0x1.000002p-25f, 0x1p-149f,     0x1p-126f, 3.3895314e38f,
                                  3.3961775e38f,   3.4028235e38f, 0.0f};
    int wrong = 0;
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        check_rounding(edges[i], &wrong);
        check_rounding(-edges[i], &wrong);
    }
    check_rounding(INFINITY, &wrong);
    check_rounding(-INFINITY, &wrong);
    for (int i = 0; i < 300000; i++) {
        check_rounding(float_of((uint32_t)(random_bits() >> 32)), &wrong);
        check_rounding(fsdpc_f16_to_f32((uint16_t)random_bits()) * 1.00048828125f,
                       &wrong); /* ties */
    }
    CHECK_INT(wrong, 0);
    CHECK_INT(fsdpc_f32_to_f16(65519.996f), 0x7BFF);
    CHECK_INT(fsdpc_f32_to_f16(65520.0f), 0x7C00);
    CHECK_INT(fsdpc_f32_to_f16(0x1p-25f), 0);
    CHECK_INT(fsdpc_f32_to_bf16(3.4028235e38f), 0x7F80);
    CHECK_INT(fsdpc_f32_to_bf16(0x1p-133f), 1);
}

/* --- tables against the plain one ---------------------------------------------------------- */

static void
tables_agree_on_big_buffers(const kernel_set *set)
{
    static const int skips[] = {0, 2, 4, 12, 1}; /* 1: no store of floats bypasses the caches */
    for (int k = 0; k < 5; k++) {
        const int skip = skips[k];
        for (int b = 0; b < 3; b++) {
            const double scale = (k + b) % 2 ? 1.0 : 0.75;
            compare_cast(set, floats[b], floats[k % 3], BIG, skip, skip, scale);
            compare_cast(set, floats[b], floats[(b + k) % 3], b ? 2 * STREAMED : STREAMED, skip,
                         skip, scale);
        }
        for (int count = 1; count <= 5; count++) {
            const fsdpc_dtype type = floats[(k + count) % 3];
            compare_reduce(set, FSDPC_F32, type, count, BIG, skip, 0.5, count % 2);
        }
        compare_reduce(set, FSDPC_F32, floats[k % 3], 1 + k, STREAMED, skip, 0.5, false);
        compare_norm(set, floats[k % 3], BIG, skip, k % 2);
        compare_cast(set, FSDPC_BYTES, FSDPC_BYTES, 4 * STREAMED + 3, skip, skip, 1.0);
    }
    compare_cast(set, FSDPC_F64, FSDPC_F64, STREAMED, 4, 4, 1.0);
    compare_scale(set, FSDPC_F32, STREAMED, 0, 0.3);
    compare_accumulate(set, FSDPC_F32, FSDPC_BF16, STREAMED, 4, 0.3);
}

static void
tables_agree_on_every_16_bit_pattern(const fsdpc_kernels *table)
{
    uint16_t *all = new_bytes(65536 * sizeof *all);
    char *got = new_bytes(65536 * 8), *want = new_bytes(65536 * 8);
    for (int i = 0; i < 65536; i++) {
        all[i] = (uint16_t)i;
    }
    for (int from = 1; from <= 2; from++) {
        for (int to = 0; to < 4; to++) {
            for (int k = 0; k < 5; k++) {
                table->cast(got, floats[to], all, floats[from], 65536, scales[k]);
                plain->cast(want, floats[to], all, floats[from], 65536, scales[k]);
                CHECK(same(got, want, floats[to], 65536, false));
            }
        }
        memset(got, 0, 65536 * 4);
        memset(want, 0, 65536 * 4);
        table->accumulate(got, FSDPC_F32, all, floats[from], 65536, 1.5);
        plain->accumulate(want, FSDPC_F32, all, floats[from], 65536, 1.5);
        CHECK(same(got, want, FSDPC_F32, 65536, false));
    }
    free(all);
    free(got);
    free(want);
}

static void
tables_agree_on_millions_of_floats(const fsdpc_kernels *table)
{
    enum { BATCH = 1 << 16 };
    uint32_t *src = new_bytes(BATCH * sizeof *src);
    char *got = new_bytes(BATCH * 2), *want = new_bytes(BATCH * 2);
    for (int batch = 0; batch < 48; batch++) {
        for (int i = 0; i < BATCH; i++) {
            src[i] = (uint32_t)(random_bits() >> 32);
            src[i] = i % 4 ? src[i] : (src[i] & 0xFFFF8000u); /* ties of bfloat16 */
        }
        for (int to = 1; to <= 2; to++) {
            table->cast(got, floats[to], src, FSDPC_F32, BATCH, 1.0);
            plain->cast(want, floats[to], src, FSDPC_F32, BATCH, 1.0);
            CHECK(same(got, want, floats[to], BATCH, false));
        }
    }
    free(src);
    free(got);
    free(want);
}

/* --- promises of the contract -------------------------------------------------------------- */

static void
product_and_sum_are_rounded_separately(const fsdpc_kernels *table)
{
    enum { N = 96 };
    float acc[N], src[N], other[N];
    int fused_differs = 0;
    for (int i = 0; i < N; i++) {
        acc[i] = -1.0f - (float)i * 0x1p-10f;
        src[i] = 1.0f + (float)(i + 1) * 0x1p-13f;
        other[i] = 0.0f;
    }
    float expected[N];
    const float factor = 1.0f + 0x1p-12f;
    for (int i = 0; i < N; i++) {
        volatile float product = src[i] * factor;
        expected[i] = acc[i] + product;
        fused_differs += fmaf(src[i], factor, acc[i]) != expected[i];
    }
    CHECK(fused_differs > N / 2); /* else the test could not notice a fused multiply-add */
    float sum[N];
    memcpy(sum, acc, sizeof sum);
    table->accumulate(sum, FSDPC_F32, src, FSDPC_F32, N, factor);
    CHECK(memcmp(sum, expected, sizeof sum) == 0);
    const void *list[2] = {src, other};
    memcpy(sum, acc, sizeof sum);
    table->reduce(sum, FSDPC_F32, list, 2, FSDPC_F32, N, factor, true);
    CHECK(memcmp(sum, expected, sizeof sum) == 0);
}

static void
sums_are_taken_in_list_order(const fsdpc_kernels *table)
{
    enum { N = 37 };
    float one[N], big[N], minus[N], acc[N];
    for (int i = 0; i < N; i++) {
        one[i] = 1.0f;
        big[i] = 0x1p25f;
        minus[i] = -0x1p25f;
    }
    const void *lost[] = {one, NULL, big, minus}, *kept[] = {big, minus, NULL, one};
    table->reduce(acc, FSDPC_F32, lost, 4, FSDPC_F32, N, 1.0, false);
    CHECK(acc[0] == 0.0f && acc[N - 1] == 0.0f);
    table->reduce(acc, FSDPC_F32, kept, 4, FSDPC_F32, N, 2.0, false);
    CHECK(acc[0] == 2.0f && acc[N - 1] == 2.0f);
    table->reduce(acc, FSDPC_F32, kept, 4, FSDPC_F32, N, 2.0, true);
    CHECK(acc[0] == 4.0f && acc[N - 1] == 4.0f);
}

static void
the_sum_may_be_one_of_the_sources(const fsdpc_kernels *table)
{
    enum { N = STREAMED };
    float *a = new_bytes(N * sizeof *a), *b = new_bytes(N * sizeof *b);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        a[i] = (float)i;
        b[i] = 0.5f;
    }
    const void *list[] = {b, a};
    table->reduce(a, FSDPC_F32, list, 2, FSDPC_F32, N, 0.5, false);
    for (int i = 0; i < N; i++) {
        wrong += a[i] != ((float)i + 0.5f) * 0.5f;
    }
    CHECK_INT(wrong, 0);
    free(a);
    free(b);
}

static void
without_sources_the_sum_is_zero(const fsdpc_kernels *table)
{
    float acc[20];
    const void *none[3] = {NULL, NULL, NULL};
    memset(acc, 0xFF, sizeof acc);
    table->reduce(acc, FSDPC_F32, none, 3, FSDPC_BF16, 20, 0.5, false);
    CHECK(acc[0] == 0.0f && acc[19] == 0.0f);
    acc[3] = 7.0f;
    table->reduce(acc, FSDPC_F32, NULL, 0, FSDPC_BF16, 20, 0.5, true);
    CHECK(acc[3] == 7.0f);
}

static void
norms_survive_large_and_strange_values(const fsdpc_kernels *table)
{
    enum { N = 77 };
    float src[N] = {0};
    src[5] = 3e38f;
    src[76] = -3.2e38f;
    fsdpc_norm norm = table->norm2(src, FSDPC_F32, N);
    const double expected = (double)src[5] * src[5] + (double)src[76] * src[76];
    CHECK(fabs(norm.sum - expected) <= 1e-12 * expected);
    CHECK(norm.max == -(double)src[76] && !norm.nonfinite);
    for (int at = 0; at < N; at += 19) { /* inside of vectors, and behind the last whole vector */
        memset(src, 0, sizeof src);
        src[at] = -INFINITY;
        norm = table->norm2(src, FSDPC_F32, N);
        CHECK(norm.nonfinite && norm.max == INFINITY && norm.sum == INFINITY);
        src[(at + 3) % N] = NAN;
        norm = table->norm2(src, FSDPC_F32, N);
        CHECK(norm.nonfinite && isnan(norm.max) && isnan(norm.sum));
    }
    norm = table->norm2(src, FSDPC_F32, 0);
    CHECK(norm.sum == 0 && norm.max == 0 && !norm.nonfinite);
}

/* --- choice -------------------------------------------------------------------------------- */

static void
the_environment_chooses_the_table(void)
{
    const fsdpc_kernels *table = NULL;
    unsetenv("FSDPC_SIMD");
    REQUIRE_OK(fsdpc_kernels_select(&table));
    CHECK(table == tables[0]);
    setenv("FSDPC_SIMD", "plain", 1);
    REQUIRE_OK(fsdpc_kernels_select(&table));
    CHECK_STR(table->name, "plain");
    setenv("FSDPC_SIMD", "sse9", 1);
    CHECK_ERROR(fsdpc_kernels_select(&table), FSDPC_E_INVAL, "plain, avx2, avx512");
    CHECK(table == NULL);
    unsetenv("FSDPC_SIMD");
}

static void
find_tables(void)
{
    static const char *const names[] = {"avx512", "avx2", "plain"};
    for (int i = 0; i < 3; i++) {
        const fsdpc_kernels *table;
        const int status = fsdpc_kernels_by_name(names[i], &table);
        if (status == FSDPC_OK) {
            CHECK_STR(table->name, names[i]);
            tables[table_count++] = table;
        } else {
            CHECK_INT(status, FSDPC_E_UNAVAILABLE);
            printf("skipped: %s\n", fsdpc_error_text());
        }
    }
}

int
main(void)
{
    find_tables();
    every_16_bit_pattern_has_its_value_and_comes_back();
    floats_round_to_the_nearest_even();
    for (int i = 0; i < table_count; i++) {
        const fsdpc_kernels *table = tables[i];
        if (table != plain) {
            const kernel_set set = {.table = table, .refresh = fsdpc_kernel_refresh};
            kernels_are_the_plain_ones(&set, sizes, SIZES);
            tables_agree_on_big_buffers(&set);
            tables_agree_on_every_16_bit_pattern(table);
            tables_agree_on_millions_of_floats(table);
        }
        product_and_sum_are_rounded_separately(table);
        sums_are_taken_in_list_order(table);
        the_sum_may_be_one_of_the_sources(table);
        without_sources_the_sum_is_zero(table);
        norms_survive_large_and_strange_values(table);
    }
    the_environment_chooses_the_table();
    return test_result();
}
