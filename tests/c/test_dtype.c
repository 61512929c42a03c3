/* Tests of the table of element types. */
#include "base/dtype.h"
#include "test.h"

static void
names_lead_back_to_their_type(void)
{
    for (unsigned i = 0; i < FSDPC_DTYPE_COUNT; i++) {
        fsdpc_dtype dtype = (fsdpc_dtype)i, found = FSDPC_DTYPE_COUNT;
        CHECK_INT(fsdpc_dtype_from_name(fsdpc_dtype_name(dtype), &found), FSDPC_OK);
        CHECK_INT(found, dtype);
        CHECK_INT(fsdpc_dtype_dlpack_bits(dtype), 8 * fsdpc_dtype_bytes(dtype));
    }
}

static void
unknown_types_are_refused(void)
{
    fsdpc_dtype out = FSDPC_F16;
    CHECK_ERROR(fsdpc_dtype_from_name("float8_e4m3fn", &out), FSDPC_E_INVAL, "float8_e4m3fn");
    CHECK_ERROR(fsdpc_dtype_from_name("float8_e4m3fn", &out), FSDPC_E_INVAL, "bfloat16");
    CHECK_ERROR(fsdpc_dtype_from_name("", &out), FSDPC_E_INVAL, "''");
    CHECK_INT(out, FSDPC_F16);
    CHECK_INT(fsdpc_dtype_bytes(FSDPC_DTYPE_COUNT), 0);
    CHECK_STR(fsdpc_dtype_name((fsdpc_dtype)1000), "?");
    CHECK(!fsdpc_dtype_is_float(FSDPC_DTYPE_COUNT));
    CHECK_INT(fsdpc_dtype_dlpack_bits(FSDPC_DTYPE_COUNT), 0);
}

static void
gradients_are_kept_at_least_in_single_precision(void)
{
    CHECK_INT(fsdpc_dtype_accumulate(FSDPC_BF16), FSDPC_F32);
    CHECK_INT(fsdpc_dtype_accumulate(FSDPC_F16), FSDPC_F32);
    CHECK_INT(fsdpc_dtype_accumulate(FSDPC_F32), FSDPC_F32);
    CHECK_INT(fsdpc_dtype_accumulate(FSDPC_F64), FSDPC_F64);
    CHECK(fsdpc_dtype_is_float(FSDPC_BF16) && !fsdpc_dtype_is_float(FSDPC_BYTES));
}

/* The codes of the DLPack standard are 1 for unsigned integers, 2 for IEEE floats and 4 for bfloat. */
static void
dlpack_tells_the_halves_apart(void)
{
    CHECK_INT(fsdpc_dtype_dlpack_code(FSDPC_F16), 2);
    CHECK_INT(fsdpc_dtype_dlpack_code(FSDPC_BF16), 4);
    CHECK_INT(fsdpc_dtype_dlpack_code(FSDPC_F64), 2);
    CHECK_INT(fsdpc_dtype_dlpack_code(FSDPC_BYTES), 1);
}

int
main(void)
{
    names_lead_back_to_their_type();
    unknown_types_are_refused();
    gradients_are_kept_at_least_in_single_precision();
    dlpack_tells_the_halves_apart();
    return test_result();
}
