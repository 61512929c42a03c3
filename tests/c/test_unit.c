/* Tests of one unit, whose gradients are packed, accumulated, summed, measured and replaced. */
#include <math.h>

#include "engine.h"

static fsdpc_comm *
alone(void)
{
    fsdpc_comm *comm;
    REQUIRE_OK(fsdpc_comm_self(engine_device, &comm));
    return comm;
}

/* --- arguments ------------------------------------------------------------------------------- */

static void
wrong_arguments_are_refused(void)
{
    fsdpc_comm *comm = alone();
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "layers.3", .shard = comm, .divide = 0};
    CHECK_ERROR(fsdpc_unit_new(&options, engine_specs[0], 2, &unit), FSDPC_E_INVAL, "layers.3");
    options.divide = NAN;
    CHECK_ERROR(fsdpc_unit_new(&options, engine_specs[0], 2, &unit), FSDPC_E_INVAL, "divide");
    options.divide = 1;
    fsdpc_param_spec bad = {"weight", -1, FSDPC_F32, FSDPC_F32, FSDPC_F32, true, 0, 0, 0, false};
    CHECK_ERROR(fsdpc_unit_new(&options, &bad, 1, &unit), FSDPC_E_INVAL, "unit layers.3");
    CHECK(strstr(fsdpc_error_text(), "weight") != NULL);
    CHECK(unit == NULL);
    fsdpc_unit_free(NULL);
    unit = engine_unit(comm, 1, "u", true);
    float full[130] = {0};
    CHECK_ERROR(fsdpc_unit_write(unit, FSDPC_GRAD, 1, full, FSDPC_ON_DEVICE), FSDPC_E_INVAL,
                "frozen");
    CHECK_STR(fsdpc_unit_name(unit), "u");
    CHECK(!fsdpc_unit_is_direct(unit));
    fsdpc_unit_free(unit);
    unit = engine_unit(comm, 0, "u", true);
    CHECK(fsdpc_unit_is_direct(unit) && fsdpc_unit_full(unit) == fsdpc_unit_master(unit));
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

/* --- packing --------------------------------------------------------------------------------- */

static const fsdpc_param_spec matrix_specs[] = {
    {"a", 12, FSDPC_F32, FSDPC_F32, FSDPC_BF16, true, 0, 0, 0, false},
    {"b", 6, FSDPC_F32, FSDPC_F32, FSDPC_BF16, true, 0, 0, 0, false},
    {"c", 5, FSDPC_F32, FSDPC_F32, FSDPC_BF16, true, 0, 0, 0, false},
};

/* Gradient a is a transposed 3x4 matrix, b is one value expanded to six elements, and c is absent. */
static void
make_strided(const float *values, fsdpc_tensor *grads)
{
    static const int64_t shape[] = {4, 3}, strides[] = {1, 4};
    static const int64_t six[] = {6}, zero[] = {0};
    grads[0] = (fsdpc_tensor){values, FSDPC_F32, 2, shape, strides, false};
    grads[1] = (fsdpc_tensor){values + 1, FSDPC_F32, 1, six, zero, false};
    grads[2] = (fsdpc_tensor){0};
}

static void
fill_values(float *values)
{
    for (int i = 0; i < 12; i++) {
        values[i] = 1.0f + (float)i * 0.3f;
    }
}

static float
strided_value(const float *values, int param, int64_t k)
{
    return param == 0 ? values[k % 3 * 4 + k / 3] : param == 1 ? values[1] : 0;
}

static void
gradients_are_packed_with_strides_and_gaps(void)
{
    fsdpc_comm *comm = engine_pretend(1, 3);
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "u", .shard = comm, .divide = 3, .reshard = true};
    REQUIRE_OK(fsdpc_unit_new(&options, matrix_specs, 3, &unit));
    float values[12];
    fsdpc_tensor grads[3];
    uint8_t bits[3] = {9, 9, 9};
    fill_values(values);
    make_strided(values, grads);
    size_t bytes = unit->layout->reduce_bytes;
    uint16_t *buffer = malloc(bytes), *expected = calloc(1, bytes);
    for (int times = 0; times < 3; times++) {
        /* Round 0 packs `grads`, round 1 packs `grads` and a kept copy, and round 2 packs two kept copies. */
        memset(buffer, 0xff, bytes);
        memset(expected, 0, bytes);
        for (int kept = 0; kept < times; kept++) {
            REQUIRE_OK(fsdpc_grad_keep_local(unit, grads));
        }
        CHECK(unit->grads.local_any == (times > 0));
        REQUIRE_OK(fsdpc_grad_pack(unit, times == 2 ? NULL : grads, buffer, bits));
        for (int i = 0; i < 3; i++) {
            for (int64_t k = 0; k < unit->layout->params[i].numel; k++) {
                float one = strided_value(values, i, k), sum = times ? one + one : one;
                expected[unit->layout->params[i].offset + k] = fsdpc_f32_to_bf16(sum);
            }
        }
        CHECK(memcmp(buffer, expected, bytes) == 0); /* the padding is zero as well */
        CHECK(bits[0] == 1 && bits[1] == 1 && bits[2] == 0);
        CHECK(!unit->grads.local_any && !unit->grads.local_used[0]);
    }
    /* The kept gradient of parameter 0 is dropped, so the packed gradient is zero. */
    REQUIRE_OK(fsdpc_grad_keep_local(unit, grads));
    fsdpc_grad_drop_local(unit, 0);
    REQUIRE_OK(fsdpc_grad_pack(unit, NULL, buffer, bits));
    CHECK(bits[0] == 0 && bits[1] == 1 && buffer[0] == 0);
    free(buffer);
    free(expected);
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

/* --- sums ------------------------------------------------------------------------------------ */

static void
sums_are_in_rank_order(void)
{
    enum { WORLD = 3 };
    const int rounds[RANKS_MAX] = {1, 1, 1};
    for (int kind = 0; kind < ENGINE_KINDS; kind++) {
        for (int rank = 0; rank < WORLD; rank++) {
            void *buffers[WORLD];
            fsdpc_unit *ours = NULL;
            fsdpc_comm *comms[WORLD];
            fsdpc_unit *units[WORLD];
            for (int r = 0; r < WORLD; r++) {
                engine_grads grads;
                comms[r] = engine_pretend(r, WORLD);
                units[r] = engine_unit(comms[r], kind, "u", true);
                buffers[r] = malloc(units[r]->layout->reduce_bytes + 1);
                engine_make_grads(units[r], 0, 4, 0, &grads);
                uint8_t bits[ENGINE_PARAMS] = {0};
                REQUIRE_OK(fsdpc_grad_pack(units[r], grads.tensors, buffers[r], bits));
                free(grads.memory);
                ours = r == rank ? units[r] : ours;
            }
            REQUIRE_OK(fsdpc_grad_sum(ours, (const void *const *)buffers, WORLD));
            CHECK(ours->grads.add);
            for (int i = 0; i < ours->layout->param_count; i++) {
                ours->grads.used[i] = ours->layout->params[i].trainable_index >= 0 &&
                                      engine_used(ours, rounds, 0, i, 4);
            }
            CHECK_INT(engine_count_wrong_grads(ours, rounds, 0, 4, false), 0);
            for (int r = 0; r < WORLD; r++) {
                free(buffers[r]);
                fsdpc_unit_free(units[r]);
                fsdpc_comm_free(comms[r]);
            }
        }
    }
}

/* On a single rank, the first gradients replace the old values, and an absent gradient counts as zeros. Later
 * gradients are added. */
static void
direct_gradients_replace_and_add(void)
{
    fsdpc_comm *comm = alone();
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "u", .shard = comm, .divide = 2, .reshard = true};
    REQUIRE_OK(fsdpc_unit_new(&options, matrix_specs, 3, &unit));
    float values[12];
    fsdpc_tensor grads[3], none[3] = {0};
    uint8_t bits[3] = {0};
    int64_t length;
    fill_values(values);
    make_strided(values, grads);
    float *a = fsdpc_unit_grad_part(unit, 0, &length);
    CHECK_INT(length, 12);
    float *c = fsdpc_unit_grad_part(unit, 2, &length);
    c[0] = 55;
    REQUIRE_OK(fsdpc_grad_direct(unit, grads, bits));
    CHECK(bits[0] == 1 && bits[1] == 1 && bits[2] == 0);
    CHECK(c[0] == 0);
    for (int k = 0; k < 12; k++) {
        CHECK(a[k] == strided_value(values, 0, k) * 0.5f);
    }
    REQUIRE_OK(fsdpc_grad_keep_local(unit, grads));
    REQUIRE_OK(fsdpc_grad_direct(unit, grads, bits));
    for (int k = 0; k < 12; k++) {
        float half = strided_value(values, 0, k) * 0.5f;
        CHECK(a[k] == half + half + half);
    }
    /* Another call without gradients changes neither `bits` nor the sums. */
    float before = a[3];
    REQUIRE_OK(fsdpc_grad_direct(unit, none, bits));
    CHECK(bits[0] == 1 && bits[2] == 0 && a[3] == before);
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

/* On the CPU gradients are added in the order in which they arrive. A large sum absorbs small gradients that
 * would count if they were first added to each other. */
static void
direct_gradients_are_added_in_order(void)
{
    fsdpc_comm *comm = alone();
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "u", .shard = comm, .divide = 1, .reshard = true};
    REQUIRE_OK(fsdpc_unit_new(&options, matrix_specs, 3, &unit));
    float large[12], one[12];
    fsdpc_tensor grads[3] = {{.data = large, .dtype = FSDPC_F32, .contiguous = true}};
    uint8_t bits[3] = {0};
    int64_t length;
    for (int k = 0; k < 12; k++) {
        large[k] = 16777216; /* 2^24; the next larger float is 2^24 + 2 */
        one[k] = 1;
    }
    REQUIRE_OK(fsdpc_grad_direct(unit, grads, bits));
    grads[0].data = one;
    REQUIRE_OK(fsdpc_grad_keep_local(unit, grads));
    REQUIRE_OK(fsdpc_grad_direct(unit, grads, bits));
    const float *sum = fsdpc_unit_grad_part(unit, 0, &length);
    CHECK(length == 12 && sum[0] == 16777216 && sum[11] == 16777216);
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

/* --- the gradient that is seen --------------------------------------------------------------- */

static void
norms_and_scaling(void)
{
    fsdpc_comm *comm = alone();
    fsdpc_unit *unit = engine_unit(comm, 0, "u", true);
    const uint8_t both[] = {1, 1}, second[] = {0, 1};
    int64_t length;
    float *a = fsdpc_unit_grad_part(unit, 0, &length), *b = fsdpc_unit_grad_part(unit, 1, &length);
    a[1] = 3, a[999] = -12, b[36] = 4;
    fsdpc_norm norm;
    REQUIRE_OK(fsdpc_unit_grad_norm(unit, both, 2, &norm));
    CHECK(norm.sum == 169 && norm.max == 12 && !norm.nonfinite);
    REQUIRE_OK(fsdpc_unit_grad_norm(unit, second, 2, &norm));
    CHECK(norm.sum == 16 && norm.max == 4);
    REQUIRE_OK(fsdpc_unit_grad_norm(unit, both, 1, &norm));
    CHECK(norm.sum == 19 && norm.max == 12);
    REQUIRE_OK(fsdpc_unit_scale_grads(unit, second, 0.5));
    CHECK(b[36] == 2 && a[1] == 3);
    b[0] = NAN;
    REQUIRE_OK(fsdpc_unit_grad_norm(unit, both, 2, &norm));
    CHECK(norm.nonfinite && isnan(norm.max));
    REQUIRE_OK(fsdpc_unit_zero_grad(unit, 1));
    CHECK(b[0] == 0 && b[36] == 0 && a[999] == -12);
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

/* Sums have a wider dtype than the gradients that the optimizer sees. A change of a sum reaches the
 * gradient, and a change of a gradient reaches the sum. */
static void
narrow_gradients_follow_the_sums(void)
{
    static const fsdpc_param_spec spec = {"w",  8, FSDPC_BF16, FSDPC_BF16, FSDPC_F32,
                                          true, 0, 0,          0,          false};
    fsdpc_comm *comm = alone();
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "u", .shard = comm, .divide = 1, .reshard = true};
    REQUIRE_OK(fsdpc_unit_new(&options, &spec, 1, &unit));
    int64_t length;
    uint16_t *seen = fsdpc_unit_grad_part(unit, 0, &length);
    float *sum = fsdpc_unit_grad(unit);
    CHECK_INT(fsdpc_unit_grad_dtype(unit, 0), FSDPC_BF16);
    CHECK((void *)seen != (void *)sum);
    const float fine = 1.00048828125f; /* 1 + 2^-11, which bfloat16 rounds to 1 */
    for (int i = 0; i < 8; i++) {
        sum[i] = fine;
    }
    REQUIRE_OK(fsdpc_unit_finish_grad(unit));
    CHECK(fsdpc_bf16_to_f32(seen[7]) == 1);
    /* Unchanged elements keep their full precision; changed elements take the values that were written. */
    seen[2] = fsdpc_f32_to_bf16(-7);
    REQUIRE_OK(fsdpc_unit_reload_grad(unit, 0));
    CHECK(sum[0] == fine && sum[2] == -7 && sum[7] == fine);
    float values[8] = {0.1f, 2, 3, 4, 5, 6, 7, 8};
    REQUIRE_OK(fsdpc_unit_take_grad(unit, 0, values, FSDPC_F32));
    CHECK(sum[0] == 0.1f && seen[0] == fsdpc_f32_to_bf16(0.1f) && sum[7] == 8);
    const uint8_t mask[] = {1};
    REQUIRE_OK(fsdpc_unit_scale_grads(unit, mask, 2));
    CHECK(fsdpc_bf16_to_f32(seen[7]) == 16);
    REQUIRE_OK(fsdpc_unit_reload_grad(unit, 0));
    CHECK(sum[7] == 16);
    REQUIRE_OK(fsdpc_unit_zero_grad(unit, 0));
    CHECK(sum[7] == 0 && seen[7] == 0);
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

/* --- nothing left behind --------------------------------------------------------------------- */

static int
make_and_keep(void *argument)
{
    fsdpc_comm *comm = argument;
    fsdpc_unit_options options = {
        .name = "u", .shard = comm, .replicate = comm, .divide = 1, .reshard = true};
    fsdpc_unit *unit = NULL;
    int status = fsdpc_unit_new(&options, engine_specs[2], 3, &unit);
    fsdpc_unit_free(unit);
    return status;
}

static int
count_mappings(void)
{
    int count = 0, c;
    FILE *file = fopen("/proc/self/maps", "r");
    REQUIRE(file != NULL);
    while ((c = fgetc(file)) != EOF) {
        count += c == '\n';
    }
    fclose(file);
    return count;
}

/* --- memory for gradients that come later ---------------------------------------------------- */

/* A thaw that fails does not change the unit. A thaw that succeeds moves gradients to their new places. */
static int
thaw_and_free(void *argument)
{
    const uint8_t segments[ENGINE_PARAMS] = {0, 1};
    const float values[] = {1.5f, -2.0f, 3.0f};
    fsdpc_comm *comm = argument;
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "u", .shard = comm, .divide = 1};
    FSDPC_TRY(fsdpc_unit_new(&options, engine_specs[1], 4, &unit));
    int status = fsdpc_unit_take_grad(unit, 3, values, FSDPC_F32);
    if (status == FSDPC_OK) {
        status = fsdpc_unit_thaw(unit, segments);
        int64_t length;
        const float *now = fsdpc_unit_grad_part(unit, 3, &length);
        CHECK(length == 3 && memcmp(now, values, sizeof values) == 0);
        CHECK_INT(unit->layout->params[1].trainable_index, status == FSDPC_OK ? 1 : -1);
        CHECK_INT(unit->layout->params[3].trainable_index, status == FSDPC_OK ? 2 : 1);
    }
    fsdpc_unit_free(unit);
    return status;
}

static void
frozen_parameters_get_gradients_later(void)
{
    const uint8_t bytes[ENGINE_PARAMS] = {0, 0, 1};
    fsdpc_comm *comm = alone();
    test_alloc_sweep(thaw_and_free, comm);
    fsdpc_unit *unit = engine_unit(comm, 1, "u", true);
    CHECK_ERROR(fsdpc_unit_thaw(unit, bytes), FSDPC_E_INVAL, "bytes");
    fsdpc_unit_free(unit);
    fsdpc_comm_free(comm);
}

static void
nothing_is_left_behind(void)
{
    fsdpc_comm *comm = alone();
    test_alloc_sweep(make_and_keep, comm);
    int mappings = count_mappings();
    for (int i = 0; i < 30; i++) {
        REQUIRE_OK(make_and_keep(comm));
    }
    CHECK(count_mappings() <= mappings + 2);
    fsdpc_comm_free(comm);
}

int
main(void)
{
    wrong_arguments_are_refused();
    gradients_are_packed_with_strides_and_gaps();
    sums_are_in_rank_order();
    direct_gradients_replace_and_add();
    direct_gradients_are_added_in_order();
    norms_and_scaling();
    narrow_gradients_follow_the_sums();
    frozen_parameters_get_gradients_later();
    nothing_is_left_behind();
    return test_result();
}
