/* Tests of counted allocations, injected failures and size arithmetic. */
#include "test.h"

static void
blocks_are_zeroed_and_counted(void)
{
    int64_t before = fsdpc_mem_live();
    unsigned char *block = fsdpc_mem_calloc(1000, 3);
    REQUIRE(block != NULL);
    CHECK_INT(fsdpc_mem_live(), before + 1);
    int sum = 0;
    for (int i = 0; i < 3000; i++) {
        sum += block[i];
    }
    CHECK_INT(sum, 0);
    fsdpc_mem_free(block);
    fsdpc_mem_free(NULL);
    CHECK_INT(fsdpc_mem_live(), before);
}

static void
growing_keeps_the_content_and_the_count(void)
{
    int64_t before = fsdpc_mem_live();
    int *numbers = fsdpc_mem_realloc(NULL, 4, sizeof *numbers);
    REQUIRE(numbers != NULL);
    for (int i = 0; i < 4; i++) {
        numbers[i] = i * i;
    }
    numbers = fsdpc_mem_realloc(numbers, 4096, sizeof *numbers);
    REQUIRE(numbers != NULL);
    CHECK_INT(numbers[3], 9);
    CHECK_INT(fsdpc_mem_live(), before + 1);
    fsdpc_mem_free(numbers);

    char *copy = fsdpc_mem_strdup("layers.0.weight");
    CHECK_STR(copy, "layers.0.weight");
    fsdpc_mem_free(copy);
    CHECK_INT(fsdpc_mem_live(), before);
}

static void
empty_blocks_are_not_failures(void)
{
    void *none = fsdpc_mem_calloc(0, 8), *empty = fsdpc_mem_realloc(NULL, 0, 8);
    CHECK(none != NULL && empty != NULL && none != empty);
    fsdpc_mem_free(none);
    fsdpc_mem_free(empty);
}

static void
wrapping_products_are_refused(void)
{
    int64_t before = fsdpc_mem_live();
    CHECK(fsdpc_mem_calloc(SIZE_MAX / 2, 3) == NULL);
    CHECK(fsdpc_mem_realloc(NULL, SIZE_MAX, 2) == NULL);
    CHECK_INT(fsdpc_mem_live(), before);

    size_t out = 0;
    CHECK(!fsdpc_size_mul(SIZE_MAX / 2 + 1, 2, &out));
    CHECK(fsdpc_size_mul(SIZE_MAX / 2, 2, &out) && out == SIZE_MAX - 1);
    CHECK(!fsdpc_size_add(SIZE_MAX, 1, &out));
    CHECK(fsdpc_size_add(SIZE_MAX - 1, 1, &out) && out == SIZE_MAX);
    CHECK_INT(fsdpc_round_up(0, 16), 0);
    CHECK_INT(fsdpc_round_up(1, 16), 16);
    CHECK_INT(fsdpc_round_up(16, 16), 16);
    CHECK_INT(fsdpc_round_up(17, 12), 24);
}

static void
the_nth_allocation_fails_once(void)
{
    int64_t before = fsdpc_mem_live();
    char *kept = fsdpc_mem_strdup("kept");
    fsdpc_mem_fail_after(2);
    void *first = fsdpc_mem_calloc(1, 1);
    CHECK(first != NULL && !fsdpc_mem_failed());
    CHECK(fsdpc_mem_realloc(kept, 100, 1) == NULL);
    CHECK(fsdpc_mem_failed());
    CHECK_STR(kept, "kept");
    void *third = fsdpc_mem_strdup("x");
    CHECK(third != NULL);
    fsdpc_mem_fail_after(1);
    CHECK(!fsdpc_mem_failed());
    fsdpc_mem_fail_after(0);
    void *fourth = fsdpc_mem_calloc(1, 1);
    CHECK(fourth != NULL && !fsdpc_mem_failed());
    fsdpc_mem_free(kept);
    fsdpc_mem_free(first);
    fsdpc_mem_free(third);
    fsdpc_mem_free(fourth);
    CHECK_INT(fsdpc_mem_live(), before);
}

int
main(void)
{
    blocks_are_zeroed_and_counted();
    growing_keeps_the_content_and_the_count();
    empty_blocks_are_not_failures();
    wrapping_products_are_refused();
    the_nth_allocation_fails_once();
    return test_result();
}
