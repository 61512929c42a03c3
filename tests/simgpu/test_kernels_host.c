/* Every CUDA kernel, compiled for the host, must give the same bits as the plain C kernel.
 *
 * Where an operation involves NaNs, the test only checks that the result is NaN. Sums of squares are added in
 * another order, so they are compared within a bound. */
#include "cuda_params.h"
#include "kernel_cases.h"

#define DECLARE(kernel, params)                                                                   \
    void kernel##__host(const void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                        unsigned);
FSDPC_CUDA_KERNELS(DECLARE)

#define LAUNCH(kernel, params, blocks) \
    kernel##__host(params, (unsigned)(blocks), 1, 1, FSDPC_CUDA_THREADS, 1, 1, 0)

enum { SPAN = 16, BIG = 300007 };

static const int64_t sizes[] = {0, 1, 3, 7, 8, 9, 31, 64, 257, 4099, BIG};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static int64_t
random_below(int64_t n)
{
    return (int64_t)(random_bits() % (uint64_t)n);
}

/* --- the kernels as a table ------------------------------------------------------------------- */

static void
launch_cast(void *dst, fsdpc_dtype dst_type, const void *src, fsdpc_dtype src_type, int64_t n,
            double scale)
{
    fsdpc_cuda_cast_params p = {
        .dst = dst, .src = src, .n = n, .scale = scale, .dst_type = dst_type, .src_type = src_type};
    LAUNCH(fsdpc_cuda_cast, &p, 1 + n % 3);
}

static void
launch_reduce(void *acc, fsdpc_dtype acc_type, const void *const *src, int count,
              fsdpc_dtype src_type, int64_t n, double scale, bool add)
{
    fsdpc_cuda_reduce_params p = {.acc = acc,
                                  .n = n,
                                  .scale = scale,
                                  .acc_type = acc_type,
                                  .src_type = src_type,
                                  .src_count = count,
                                  .add = add};
    memcpy(p.src, src, (size_t)count * sizeof *src);
    LAUNCH(fsdpc_cuda_reduce, &p, fsdpc_cuda_norm_blocks(n));
}

static void
launch_accumulate(void *acc, fsdpc_dtype acc_type, const void *src, fsdpc_dtype src_type, int64_t n,
                  double scale)
{
    launch_reduce(acc, acc_type, &src, 1, src_type, n, scale, true);
}

static void
launch_refresh(const fsdpc_kernels *table, void *acc, fsdpc_dtype acc_type, const void *grad,
               fsdpc_dtype grad_type, int64_t n)
{
    (void)table;
    fsdpc_cuda_refresh_params p = {
        .acc = acc, .grad = grad, .n = n, .acc_type = acc_type, .grad_type = grad_type};
    LAUNCH(fsdpc_cuda_refresh, &p, 1 + n % 3);
}

static void
launch_scale(void *x, fsdpc_dtype type, int64_t n, double factor)
{
    fsdpc_cuda_scale_params p = {.factor = &factor, .count = 1, .span = {{x, n, 0, type}}};
    LAUNCH(fsdpc_cuda_scale, &p, 1 + n % 3);
}

static fsdpc_cuda_norm_value
summed(const fsdpc_cuda_norm_value *partials, int64_t count)
{
    fsdpc_cuda_norm_value total = {.sum = 5, .max = 0.5};
    fsdpc_cuda_norm_sum_params p = {.partials = partials, .out = &total, .count = count};
    LAUNCH(fsdpc_cuda_norm_sum, &p, 1);
    return total;
}

static fsdpc_cuda_norm_value
launch_norm(const void *src, fsdpc_dtype type, int64_t n, double order)
{
    static fsdpc_cuda_norm_value partials[FSDPC_CUDA_NORM_BLOCKS];
    fsdpc_cuda_norm_params p = {.p = order,
                                .partials = partials,
                                .count = 1,
                                .span = {{(void *)(uintptr_t)src, n, 0, type}}};
    LAUNCH(fsdpc_cuda_norm, &p, fsdpc_cuda_norm_blocks(n));
    return summed(partials, fsdpc_cuda_norm_blocks(n));
}

/* Launches a norm twice: both launches must give the same bits. */
static fsdpc_norm
launch_norm2(const void *src, fsdpc_dtype type, int64_t n)
{
    const fsdpc_cuda_norm_value first = launch_norm(src, type, n, 2);
    const fsdpc_cuda_norm_value again = launch_norm(src, type, n, 2);
    CHECK(memcmp(&first, &again, sizeof first) == 0);
    return (fsdpc_norm){first.sum, first.max, first.nonfinite != 0};
}

static const fsdpc_kernels launches = {.name = "cuda",
                                       .cast = launch_cast,
                                       .accumulate = launch_accumulate,
                                       .reduce = launch_reduce,
                                       .norm2 = launch_norm2,
                                       .scale = launch_scale};
static const kernel_set cuda = {
    .table = &launches, .refresh = launch_refresh, .aligned = true, .any_nan = true};

/* --- casts and factors ------------------------------------------------------------------------ */

static void
copies_take_any_address(void)
{
    for (int to = 0; to < SPAN; to++) {
        for (int from = 0; from < SPAN; from++) {
            compare_cast(&cuda, FSDPC_BYTES, FSDPC_BYTES, random_below(70), to, from, 1.0);
            compare_cast(&cuda, FSDPC_BYTES, FSDPC_BYTES, 5000 + random_below(16), to, from, 1.0);
        }
    }
    compare_cast(&cuda, FSDPC_BYTES, FSDPC_BYTES, BIG, 3, 3, 1.0);
}

static void
buffers_are_scaled_in_place_by_a_factor_in_memory(void)
{
    for (int t = 0; t < 4; t++) {
        struct bed bed = new_bed(5003, floats[t], floats[t], 0);
        double factor = 0.37;
        fill_sums(&bed, floats[t], 5003);
        /* Two spans of odd lengths: the first span takes two blocks, the second span takes one block. */
        fsdpc_cuda_scale_params p = {
            .factor = &factor,
            .count = 2,
            .span = {{bed.got, 4001, 0, floats[t]},
                     {bed.got + 4001 * fsdpc_dtype_bytes(floats[t]), 1002, 2, floats[t]}}};
        LAUNCH(fsdpc_cuda_scale, &p, 3);
        plain->scale(bed.want, floats[t], 5003, factor);
        CHECK(as_wanted(&bed, floats[t], 5003, true));
        factor = 1.0;
        memcpy(bed.got, bed.src, bed.bytes);
        LAUNCH(fsdpc_cuda_scale, &p, 3);
        CHECK(memcmp(bed.got, bed.src, bed.bytes) == 0);
        free_bed(&bed);
    }
}

/* --- norms ------------------------------------------------------------------------------------ */

static void
other_norms_are_the_plain_ones(void)
{
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < SIZES; i++) {
            char *src = new_bytes((size_t)sizes[i] * fsdpc_dtype_bytes(floats[t]) + 1);
            fill_ordinary(src, floats[t], sizes[i]);
            const double want = fsdpc_kernel_norm_p(src, floats[t], sizes[i], 3);
            const fsdpc_cuda_norm_value got = launch_norm(src, floats[t], sizes[i], 3);
            CHECK(fabs(got.sum - want) <= 1e-12 * want && got.max == 0 && !got.nonfinite);
            free(src);
        }
    }
    /* There are so many elements that the launch has more than 500 blocks. */
    compare_norm(&cuda, FSDPC_F32,
                 (int64_t)FSDPC_CUDA_NORM_BLOCKS * FSDPC_CUDA_NORM_BLOCK_ITEMS / 2 + 77, 0, true);
}

/* One launch for several arrays gives the same bits as one launch for each array. */
static void
norms_of_a_list_are_those_of_its_spans(double order)
{
    static const int64_t counts[] = {1, 5003, 9000, 4096, 3, 40000, 4097};
    enum { COUNTS = sizeof counts / sizeof *counts, ROOM = 64 };
    static fsdpc_cuda_norm_value apart[ROOM], together[ROOM];
    void *blocks_of[COUNTS];
    fsdpc_cuda_norm_params list = {.partials = together, .p = order, .count = COUNTS};
    int64_t blocks = 0;
    for (int i = 0; i < COUNTS; i++) {
        const fsdpc_dtype type = floats[i % 4];
        blocks_of[i] = new_bytes((size_t)counts[i] * fsdpc_dtype_bytes(type));
        fill_ordinary(blocks_of[i], type, counts[i]);
        const fsdpc_cuda_span span = {blocks_of[i], counts[i], 0, type};
        fsdpc_cuda_norm_params one = {
            .partials = apart + blocks, .p = order, .count = 1, .span = {span}};
        LAUNCH(fsdpc_cuda_norm, &one, fsdpc_cuda_norm_blocks(counts[i]));
        list.span[i] = span;
        list.span[i].first_block = (int32_t)blocks;
        blocks += fsdpc_cuda_norm_blocks(counts[i]);
    }
    REQUIRE(blocks <= ROOM);
    LAUNCH(fsdpc_cuda_norm, &list, blocks);
    CHECK(memcmp(apart, together, (size_t)blocks * sizeof *apart) == 0);
    for (int i = 0; i < COUNTS; i++) {
        free(blocks_of[i]);
    }
}

/* The largest count is that of all units of a large model together. The values are whole numbers, so that
 * their sum does not depend on the order. */
static void
many_parts_are_summed_each_once(void)
{
    static const int64_t counts[] = {0, 1, 255, 1536, 1537, 5003};
    static fsdpc_cuda_norm_value parts[5003];
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        double want = 0;
        for (int64_t i = 0; i < counts[c]; i++) {
            parts[i] = (fsdpc_cuda_norm_value){.sum = (double)(i + 1), .max = (double)i};
            want += parts[i].sum;
        }
        fsdpc_cuda_norm_value total = summed(parts, counts[c]);
        CHECK(total.sum == want && !total.nonfinite);
        CHECK(total.max == (counts[c] ? (double)(counts[c] - 1) : 0));
        if (counts[c]) {
            parts[counts[c] - 1].nonfinite = 1;
            total = summed(parts, counts[c]);
            CHECK(total.nonfinite == 1);
        }
    }
}

static void
norms_of_units_add_up_to_a_factor(void)
{
    fsdpc_cuda_norm_value total = {.sum = 9, .max = 2};
    const fsdpc_cuda_norm_value part = {.sum = 16, .max = 3};
    double norm, factor;
    fsdpc_cuda_norm_sum_params add = {.partials = &part, .out = &total, .count = 1, .add = 1};
    LAUNCH(fsdpc_cuda_norm_sum, &add, 1);
    CHECK(total.sum == 25 && total.max == 3 && !total.nonfinite);
    fsdpc_cuda_clip_params p = {.total = &total, .norm = &norm, .factor = &factor};
    p.p = 2, p.max_norm = 1, p.epsilon = 1e-6;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(norm == 5 && factor == 1 / (5 + 1e-6));
    p.max_norm = 50;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(norm == 5 && factor == 1);
    p.p = INFINITY, p.max_norm = 1.5;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(norm == 3 && factor == 1.5 / (3 + 1e-6));
    total.sum = 27, p.p = 3;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(fabs(norm - 3) < 1e-14);
    total.sum = NAN, p.p = 2;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(isnan(norm) && isnan(factor));
    total.sum = INFINITY;
    LAUNCH(fsdpc_cuda_clip, &p, 1);
    CHECK(isinf(norm) && factor == 0);
}

int
main(void)
{
    kernels_are_the_plain_ones(&cuda, sizes, SIZES);
    copies_take_any_address();
    buffers_are_scaled_in_place_by_a_factor_in_memory();
    other_norms_are_the_plain_ones();
    norms_of_a_list_are_those_of_its_spans(2);
    norms_of_a_list_are_those_of_its_spans(3);
    many_parts_are_summed_each_once();
    norms_of_units_add_up_to_a_factor();
    return test_result();
}
