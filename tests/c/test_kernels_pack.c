/* Tests of the kernels that exist in plain C only: they pack strided tensors, compute norms, and fill memory
 * with poison. */
#include "test.h"

#include <math.h>

#include "kernels.h"

static const fsdpc_kernels *plain;

static void
packing_follows_shape_and_strides(void)
{
    static const int64_t shape[] = {3, 1, 5, 70}, strides[] = {-400, 999, 1, 5};
    uint16_t src[1600];
    float got[3 * 5 * 70];
    int wrong = 0;
    for (int i = 0; i < 1600; i++) {
        src[i] = fsdpc_f32_to_bf16((float)(i % 251));
    }
    REQUIRE_OK(fsdpc_kernel_pack_strided(plain, got, FSDPC_F32, src + 800, FSDPC_BF16, 4, shape,
                                         strides, 0.5));
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 5; j++) {
            for (int k = 0; k < 70; k++) {
                const int at = 800 - 400 * i + j + 5 * k;
                wrong += got[(i * 5 + j) * 70 + k] != (float)(at % 251) * 0.5f;
            }
        }
    }
    CHECK_INT(wrong, 0);
}

static void
packing_takes_rows_scalars_and_broadcasts(void)
{
    static const int64_t shape[] = {4, 100}, rows[] = {150, 1}, constant[] = {0, 0};
    static const int64_t contiguous[] = {100, 1};
    double src[600], got[400];
    int wrong = 0;
    for (int i = 0; i < 600; i++) {
        src[i] = i;
    }
    REQUIRE_OK(fsdpc_kernel_pack_strided(plain, got, FSDPC_F64, src, FSDPC_F64, 2, shape, rows, 1));
    for (int i = 0; i < 400; i++) {
        wrong += got[i] != i / 100 * 150 + i % 100;
    }
    REQUIRE_OK(fsdpc_kernel_pack_strided(plain, got, FSDPC_F64, src + 7, FSDPC_F64, 2, shape,
                                         constant, 1));
    for (int i = 0; i < 400; i++) {
        wrong += got[i] != 7;
    }
    REQUIRE_OK(
        fsdpc_kernel_pack_strided(plain, got, FSDPC_F64, src, FSDPC_F64, 2, shape, contiguous, 2));
    for (int i = 0; i < 400; i++) {
        wrong += got[i] != 2 * i;
    }
    REQUIRE_OK(
        fsdpc_kernel_pack_strided(plain, got, FSDPC_F64, src + 9, FSDPC_F64, 0, NULL, NULL, 1));
    wrong += got[0] != 9;
    CHECK_INT(wrong, 0);
}

static void
packing_refuses_impossible_shapes(void)
{
    int64_t shape[17] = {0}, strides[17] = {0};
    char dst[8] = "kept";
    CHECK_INT(
        fsdpc_kernel_pack_strided(plain, dst, FSDPC_F32, dst, FSDPC_F32, 2, shape, strides, 1),
        FSDPC_OK);
    CHECK_STR(dst, "kept");
    CHECK_ERROR(
        fsdpc_kernel_pack_strided(plain, dst, FSDPC_F32, dst, FSDPC_F32, 17, shape, strides, 1),
        FSDPC_E_INVAL, "17 dimensions");
    shape[0] = shape[1] = INT64_MAX / 2;
    CHECK_ERROR(
        fsdpc_kernel_pack_strided(plain, dst, FSDPC_F32, dst, FSDPC_F32, 2, shape, strides, 1),
        FSDPC_E_INVAL, "too many elements");
    shape[1] = -1;
    CHECK_ERROR(
        fsdpc_kernel_pack_strided(plain, dst, FSDPC_F32, dst, FSDPC_F32, 2, shape, strides, 1),
        FSDPC_E_INVAL, "dimension 1");
}

static void
other_norms_and_poison(void)
{
    static const float values[] = {1, -2, 3, -4};
    uint16_t halves[40];
    CHECK(fsdpc_kernel_norm_p(values, FSDPC_F32, 4, 1) == 10);
    CHECK(fabs(fsdpc_kernel_norm_p(values, FSDPC_F32, 4, 3) - 100) < 1e-9);
    CHECK(fsdpc_kernel_norm_p(values, FSDPC_F32, 0, 3) == 0);
    fsdpc_kernel_poison(halves, FSDPC_F16, 40);
    fsdpc_norm norm = plain->norm2(halves, FSDPC_F16, 40);
    CHECK(isnan(norm.sum) && norm.nonfinite);
    fsdpc_kernel_poison(NULL, FSDPC_F16, 0);
}

int
main(void)
{
    plain = fsdpc_kernels_plain();
    packing_follows_shape_and_strides();
    packing_takes_rows_scalars_and_broadcasts();
    packing_refuses_impossible_shapes();
    other_norms_and_poison();
    return test_result();
}
