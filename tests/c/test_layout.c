/* Tests of layouts: coverage, alignment, segments, refused parameters, allocation failures.
 * tests/unit/test_layout_properties.py checks the same contract against a NumPy model. */
#include "base/mem.h"
#include "unit/footprint.h"
#include "test.h"

#define F32_SPEC(text, count) {text, count, FSDPC_F32, FSDPC_BF16, FSDPC_F32, true, 0, 0, 0, false}

static const fsdpc_param_spec mixed[] = {
    F32_SPEC("embed", 1000),
    {"scale", 3, FSDPC_F64, FSDPC_F64, FSDPC_F64, true, 0, 0, 0, false},
    F32_SPEC("bias", 7),
    {"frozen", 50, FSDPC_F32, FSDPC_BF16, FSDPC_F32, false, 0, 0, 0, false},
    {"codes", 333, FSDPC_BYTES, FSDPC_BYTES, FSDPC_BYTES, false, 0, 0, 0, false},
    F32_SPEC("empty", 0),
    F32_SPEC("scalar", 1),
};
enum { MIXED = sizeof mixed / sizeof *mixed };

static void
equal_kinds_share_a_segment(void)
{
    fsdpc_layout *layout;
    REQUIRE_OK(fsdpc_layout_build(mixed, MIXED, 3, 64, &layout));
    CHECK_INT(layout->segment_count, 4);
    CHECK_INT(layout->trainable_count, 5);
    CHECK_INT(layout->params[0].segment, layout->params[2].segment);
    CHECK_INT(layout->params[0].segment, layout->params[6].segment);
    CHECK(layout->params[3].segment != layout->params[0].segment);
    CHECK_INT(layout->params[2].trainable_index, 2);
    CHECK_INT(layout->params[3].trainable_index, -1);
    CHECK_INT(layout->params[6].trainable_index, 4);
    CHECK_STR(layout->params[4].name, "codes");
    CHECK_INT(layout->segments[layout->params[1].segment].accumulate, FSDPC_F64);
    fsdpc_layout_free(layout);
}

/* Checks that no two parameters share a byte of the gathered buffer, and that exactly one rank owns each
 * element of a parameter. */
static void
check_coverage(int world, size_t align_bytes)
{
    fsdpc_layout *layout;
    REQUIRE_OK(fsdpc_layout_build(mixed, MIXED, world, align_bytes, &layout));
    unsigned char *taken = fsdpc_mem_calloc(layout->full_bytes, 1);
    REQUIRE(taken != NULL);
    int64_t used = 0;
    for (int p = 0; p < MIXED; p++) {
        const fsdpc_segment *segment = &layout->segments[layout->params[p].segment];
        size_t bytes = (size_t)mixed[p].numel * fsdpc_dtype_bytes(segment->compute);
        size_t offset = fsdpc_layout_full_offset(layout, p);
        CHECK_INT(offset % align_bytes, 0);
        REQUIRE(offset + bytes <= layout->full_bytes);
        for (size_t b = 0; b < bytes; b++) {
            CHECK_INT(taken[offset + b]++, 0);
        }
        used += (int64_t)bytes;
        int64_t next = 0;
        for (int rank = 0; rank < world; rank++) {
            fsdpc_span span = fsdpc_layout_span(layout, p, rank);
            if (span.length > 0) {
                CHECK_INT(span.param_begin, next);
                CHECK(span.piece_begin + span.length <= segment->piece_numel);
                CHECK_INT(rank * segment->piece_numel + span.piece_begin,
                          layout->params[p].offset + span.param_begin);
            }
            next += span.length;
        }
        CHECK_INT(next, mixed[p].numel);
    }
    CHECK_INT(layout->padding_bytes, (int64_t)layout->full_bytes - used);
    fsdpc_mem_free(taken);
    fsdpc_layout_free(layout);
}

static void
every_element_has_one_place_and_one_owner(void)
{
    static const int worlds[] = {1, 2, 3, 7, 8, 64, 1000};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        check_coverage(worlds[i], 16);
        check_coverage(worlds[i], 4096);
    }
}

static void
precision_does_not_move_the_cuts(void)
{
    static const fsdpc_dtype dtypes[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    enum { DTYPES = sizeof dtypes / sizeof *dtypes };
    fsdpc_layout *first;
    fsdpc_param_spec specs[] = {F32_SPEC("a", 13), F32_SPEC("b", 78), F32_SPEC("c", 6)};
    REQUIRE_OK(fsdpc_layout_build(specs, 3, 3, 64, &first));
    for (int i = 0; i < DTYPES * DTYPES; i++) {
        for (int p = 0; p < 3; p++) {
            specs[p].compute = dtypes[i / DTYPES];
            specs[p].reduce = dtypes[i % DTYPES];
        }
        fsdpc_layout *layout;
        REQUIRE_OK(fsdpc_layout_build(specs, 3, 3, 64, &layout));
        CHECK_INT(layout->segments[0].piece_numel, first->segments[0].piece_numel);
        for (int p = 0; p < 3; p++) {
            CHECK_INT(layout->params[p].offset, first->params[p].offset);
        }
        fsdpc_layout_free(layout);
    }
    fsdpc_layout_free(first);
}

static void
frozen_segments_have_no_room_for_gradients(void)
{
    const fsdpc_param_spec frozen = mixed[3];
    fsdpc_layout *layout;
    REQUIRE_OK(fsdpc_layout_build(&frozen, 1, 2, 16, &layout));
    CHECK_INT(layout->grad_bytes, 0);
    CHECK_INT(layout->reduce_bytes, 0);
    CHECK_INT(layout->shard_bytes, 32 * 4);
    CHECK_INT(layout->full_bytes, 2 * 32 * 2);
    fsdpc_layout_free(layout);
}

/* A segment that becomes trainable or frozen has the same layout as a segment that was trainable or frozen
 * from the start. */
static void
trainable_segments_may_change(void)
{
    fsdpc_param_spec spec = {"odd", 37, FSDPC_F32, FSDPC_F32, FSDPC_BF16, false, 0, 0, 0, false};
    const uint8_t yes = 1, no = 0;
    fsdpc_layout *frozen, *trained;
    REQUIRE_OK(fsdpc_layout_build(&spec, 1, 3, 16, &frozen));
    spec.trainable = true;
    REQUIRE_OK(fsdpc_layout_build(&spec, 1, 3, 16, &trained));
    CHECK_INT(frozen->segments[0].piece_numel, trained->segments[0].piece_numel);
    CHECK_INT(frozen->full_bytes, trained->full_bytes);
    fsdpc_layout_set_trainable(frozen, &yes);
    CHECK_INT(frozen->grad_bytes, trained->grad_bytes);
    CHECK_INT(frozen->reduce_bytes, trained->reduce_bytes);
    CHECK_INT(frozen->params[0].trainable_index, 0);
    CHECK_INT(frozen->trainable_count, 1);
    fsdpc_layout_set_trainable(frozen, &no);
    CHECK_INT(frozen->grad_bytes, 0);
    CHECK_INT(frozen->params[0].trainable_index, -1);
    fsdpc_layout_free(frozen);
    fsdpc_layout_free(trained);
}

static void
an_empty_unit_takes_nothing(void)
{
    fsdpc_layout *layout;
    REQUIRE_OK(fsdpc_layout_build(NULL, 0, 4, 16, &layout));
    CHECK(layout->full_bytes == 0 && layout->shard_bytes == 0 && layout->reduce_bytes == 0);
    CHECK_INT(layout->segment_count, 0);
    fsdpc_layout_free(layout);
    fsdpc_layout_free(NULL);
}

static void
huge_units_do_not_wrap(void)
{
    const fsdpc_param_spec huge[] = {
        {"a", INT64_C(1) << 51, FSDPC_F64, FSDPC_F64, FSDPC_F64, true, 0, 0, 0, false},
        {"b", INT64_C(1) << 51, FSDPC_F64, FSDPC_F64, FSDPC_F64, true, 0, 0, 0, false},
    };
    fsdpc_layout *layout;
    REQUIRE_OK(fsdpc_layout_build(huge, 2, INT32_MAX, 1 << 21, &layout));
    CHECK(layout->full_bytes >= (size_t)1 << 55);
    fsdpc_span last = fsdpc_layout_span(layout, 1, INT32_MAX - 1);
    CHECK(last.length >= 0 && last.length <= huge[1].numel);
    fsdpc_layout_free(layout);
}

static void
padding_by_rows_does_not_wrap(void)
{
    fsdpc_param_spec spec = {"w", 1, FSDPC_F64, FSDPC_F64, FSDPC_F64, true, 1, 0, 0, false};
    fsdpc_layout *layout;
    REQUIRE_OK(fsdpc_layout_build(&spec, 1, INT32_MAX, 1 << 21, &layout));
    CHECK_INT(layout->segments[0].piece_numel, 1);
    CHECK_INT(fsdpc_layout_span(layout, 0, 0).length, 1);
    CHECK_INT(fsdpc_layout_span(layout, 0, INT32_MAX - 1).length, 0);
    fsdpc_layout_free(layout);
    spec.numel = spec.row_numel = INT64_C(1) << 40;
    CHECK_ERROR(fsdpc_layout_build(&spec, 1, INT32_MAX, 16, &layout), FSDPC_E_INVAL,
                "padded to a multiple of 2147483647 rows");
}

/* Behind the packed gradients, a reduce buffer has room for two kinds of codes: those that this rank makes
 * for all ranks, and those that each other rank sends to this rank. */
static void
coded_gradients_have_room(void)
{
    fsdpc_layout *layout;
    fsdpc_param_spec specs[] = {
        {"w", 600, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 100, FSDPC_NF4, FSDPC_INT4, true},
        {"b", 8, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 1, 0, 0, false},
    };
    const fsdpc_footprint_options alone = {.range_grain = 4096, .page_bytes = 1};
    const fsdpc_footprint_options wire = {.senders = 1, .range_grain = 4096, .page_bytes = 1};
    REQUIRE_OK(fsdpc_layout_build(specs, 2, 2, 16, &layout));
    const size_t coded = fsdpc_round_up(3 * 50, 16) + 16; /* three scales */
    CHECK_INT((int64_t)layout->segments[0].reduce_coded_bytes, (int64_t)coded);
    const size_t weights = fsdpc_round_up(3 * 50, 16) + fsdpc_round_up(3 * 2 * 4, 16);
    CHECK_INT((int64_t)layout->coded_bytes, (int64_t)(2 * weights));
    CHECK_INT((int64_t)fsdpc_footprint_codes(layout, NULL), (int64_t)(2 * coded));
    CHECK_INT((int64_t)fsdpc_footprint_landing(layout, NULL), (int64_t)(coded + 16));
    CHECK_INT((int64_t)fsdpc_footprint_of(layout, &alone).reduce_bytes, 2432);
    CHECK_INT((int64_t)fsdpc_footprint_of(layout, &wire).reduce_bytes,
              (int64_t)(2432 + 3 * coded + 16));
    CHECK_INT((int64_t)fsdpc_footprint_of(layout, &wire).gathered_bytes,
              (int64_t)(2 * weights + 32));
    CHECK_INT((int64_t)fsdpc_footprint_of(layout, &wire).reduced_bytes, (int64_t)(2 * coded + 32));
    CHECK_INT((int64_t)fsdpc_footprint_of(layout, &alone).reduced_bytes, 2432);
    CHECK_INT((int64_t)fsdpc_footprint_of(layout, &wire).lost_bytes, 300 * 4);
    fsdpc_layout_set_trainable(layout, (const uint8_t[]){0, 1});
    CHECK_INT((int64_t)fsdpc_footprint_codes(layout, NULL), 0);
    CHECK_INT((int64_t)fsdpc_footprint_lost(layout, NULL), 0);
    fsdpc_layout_free(layout);
}

static void
refused(fsdpc_param_spec spec, const char *part)
{
    fsdpc_layout *layout = (fsdpc_layout *)&spec;
    int64_t live = fsdpc_mem_live();
    const fsdpc_param_spec specs[] = {mixed[0], spec};
    CHECK_ERROR(fsdpc_layout_build(specs, 2, 2, 16, &layout), FSDPC_E_INVAL, part);
    CHECK(layout == NULL);
    CHECK_INT(fsdpc_mem_live(), live);
}

static void
bad_parameters_are_named(void)
{
    refused((fsdpc_param_spec){"w", -1, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0, 0, false},
            "'w'");
    refused(
        (fsdpc_param_spec){"w", INT64_MAX, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0, 0, false},
        "'w'");
    refused((fsdpc_param_spec){"w", INT64_C(1) << 52, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0,
                               0, false},
            "the unit passes");
    refused(
        (fsdpc_param_spec){"w", 1, FSDPC_DTYPE_COUNT, FSDPC_F32, FSDPC_F32, true, 0, 0, 0, false},
        "'w'");
    refused((fsdpc_param_spec){"w", 1, FSDPC_F32, FSDPC_BYTES, FSDPC_F32, false, 0, 0, 0, false},
            "uint8");
    refused((fsdpc_param_spec){"w", 1, FSDPC_BYTES, FSDPC_BYTES, FSDPC_F32, true, 0, 0, 0, false},
            "freeze");
    refused((fsdpc_param_spec){"w", 1, FSDPC_F32, FSDPC_F32, FSDPC_BYTES, true, 0, 0, 0, false},
            "freeze");
    refused((fsdpc_param_spec){"w", 10, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 3, 0, 0, false},
            "rows of 3");
    refused((fsdpc_param_spec){"w", 10, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, -1, 0, 0, false},
            "rows of -1");
    refused(
        (fsdpc_param_spec){"w", 10, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, FSDPC_INT8, 0, false},
        "int8 needs floating-point rows");
    refused(
        (fsdpc_param_spec){"w", 10, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0, FSDPC_INT4, false},
        "int4 needs floating-point rows");
    refused(
        (fsdpc_param_spec){"w", 10, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 5, FSDPC_INT8, 0, true},
        "error feedback needs a reduce_codec");
    /* For two ranks, one row of 2^51 elements is padded to 2^52 elements. With the parameter before it, the
     * unit has too many elements. */
    refused((fsdpc_param_spec){"w", INT64_C(1) << 51, FSDPC_F32, FSDPC_F32, FSDPC_F32, true,
                               INT64_C(1) << 51, 0, 0, false},
            "'w'");
    refused((fsdpc_param_spec){NULL, 1, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0, 0, false},
            "parameter 1");
}

static void
bad_arguments_are_refused(void)
{
    fsdpc_layout *layout;
    CHECK_ERROR(fsdpc_layout_build(mixed, MIXED, 0, 16, &layout), FSDPC_E_INVAL, "but is 0");
    CHECK_ERROR(fsdpc_layout_build(mixed, -1, 2, 16, &layout), FSDPC_E_INVAL, "-1");
    static const size_t aligns[] = {0, 8, 24, (size_t)1 << 22, SIZE_MAX};
    for (size_t i = 0; i < sizeof aligns / sizeof *aligns; i++) {
        CHECK_ERROR(fsdpc_layout_build(mixed, MIXED, 2, aligns[i], &layout), FSDPC_E_INVAL,
                    "power of two");
    }
}

static int
build_and_free(void *unused)
{
    (void)unused;
    fsdpc_layout *layout;
    int status = fsdpc_layout_build(mixed, MIXED, 5, 16, &layout);
    CHECK((layout != NULL) == (status == FSDPC_OK));
    fsdpc_layout_free(layout);
    return status;
}

int
main(void)
{
    equal_kinds_share_a_segment();
    every_element_has_one_place_and_one_owner();
    precision_does_not_move_the_cuts();
    frozen_segments_have_no_room_for_gradients();
    trainable_segments_may_change();
    an_empty_unit_takes_nothing();
    huge_units_do_not_wrap();
    padding_by_rows_does_not_wrap();
    coded_gradients_have_room();
    bad_parameters_are_named();
    bad_arguments_are_refused();
    test_alloc_sweep(build_and_free, NULL);
    return test_result();
}
