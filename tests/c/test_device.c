/* Tests of the CPU device: arguments, results that do not depend on threads, memory, the pool, fork. */
#include "test.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/device.h"
#include "base/pool.h"

enum { N = 700001 }; /* number of elements: several parts for each thread, and a remainder */

static fsdpc_device *device;

/* --- arguments ----------------------------------------------------------------------------- */

static void
bad_arguments_are_refused(void)
{
    float x[4] = {1, 2, 3, 4};
    const void *list[] = {x};
    const int64_t shape[] = {4}, strides[] = {1};
    const fsdpc_dtype unknown = (fsdpc_dtype)17;
    fsdpc_norm norm;
    double sum;
    CHECK_ERROR(fsdpc_device_cast(device, x, unknown, x, FSDPC_F32, 4, 1), FSDPC_E_INVAL, "17");
    CHECK_ERROR(fsdpc_device_cast(device, x, FSDPC_F32, x, FSDPC_BYTES, 4, 1), FSDPC_E_INVAL,
                "uint8");
    CHECK_ERROR(fsdpc_device_cast(device, x, FSDPC_BYTES, x, FSDPC_BYTES, 4, 2), FSDPC_E_INVAL,
                "scaled");
    CHECK_ERROR(fsdpc_device_cast(device, x, FSDPC_F32, x, FSDPC_F32, -1, 1), FSDPC_E_INVAL, "-1");
    CHECK_ERROR(fsdpc_device_cast(device, x, FSDPC_F32, x, FSDPC_F32, INT64_MAX, 1), FSDPC_E_INVAL,
                "fit");
    CHECK_ERROR(fsdpc_device_cast(device, NULL, FSDPC_F32, x, FSDPC_F32, 4, 1), FSDPC_E_INVAL,
                "NULL");
    CHECK_ERROR(fsdpc_device_accumulate(device, x, FSDPC_BF16, x, FSDPC_BF16, 4, 1), FSDPC_E_INVAL,
                "bfloat16");
    CHECK_ERROR(fsdpc_device_reduce(device, x, FSDPC_F16, list, 1, FSDPC_F16, 4, 1, false),
                FSDPC_E_INVAL, "float16");
    CHECK_ERROR(fsdpc_device_reduce(device, x, FSDPC_F32, list, -1, FSDPC_F32, 4, 1, false),
                FSDPC_E_INVAL, "sources is negative (-1)");
    CHECK_ERROR(fsdpc_device_reduce(device, x, FSDPC_F32, NULL, 1, FSDPC_F32, 4, 1, false),
                FSDPC_E_INVAL, "NULL");
    CHECK_ERROR(fsdpc_device_refresh(device, x, FSDPC_BF16, x, FSDPC_BF16, 4), FSDPC_E_INVAL,
                "float32 or float64");
    CHECK_ERROR(fsdpc_device_refresh(device, x, FSDPC_F32, x, FSDPC_BYTES, 4), FSDPC_E_INVAL,
                "uint8");
    CHECK_ERROR(fsdpc_device_refresh(device, x, FSDPC_F32, NULL, FSDPC_F32, 4), FSDPC_E_INVAL,
                "NULL");
    CHECK_ERROR(fsdpc_device_norm2(device, x, FSDPC_BYTES, 4, &norm), FSDPC_E_INVAL, "uint8");
    CHECK_ERROR(fsdpc_device_norm_p(device, x, FSDPC_F32, 4, 0, &sum), FSDPC_E_INVAL, "order");
    CHECK_ERROR(fsdpc_device_norm_p(device, x, FSDPC_F32, 4, INFINITY, &sum), FSDPC_E_INVAL, "inf");
    CHECK_ERROR(fsdpc_device_scale(device, x, FSDPC_BYTES, 4, 1), FSDPC_E_INVAL, "uint8");
    CHECK_ERROR(fsdpc_device_pack(device, x, FSDPC_F32, x, FSDPC_F32, 17, shape, strides, 1),
                FSDPC_E_INVAL, "17");
    CHECK_ERROR(fsdpc_device_pack(device, x, FSDPC_F32, NULL, FSDPC_F32, 1, shape, strides, 1),
                FSDPC_E_INVAL, "NULL");
    CHECK_ERROR(fsdpc_device_poison(device, x, unknown, 4), FSDPC_E_INVAL, "17");
    CHECK_ERROR(fsdpc_device_zero(device, NULL, 4), FSDPC_E_INVAL, "NULL");
    CHECK_ERROR(fsdpc_device_set_threads(device, 0), FSDPC_E_INVAL, "1 to 256");
    CHECK_ERROR(fsdpc_device_set_threads(device, 257), FSDPC_E_INVAL, "1 to 256");
    CHECK(x[0] == 1 && x[3] == 4);
}

static void
nothing_is_a_valid_amount(void)
{
    fsdpc_norm norm;
    double sum = 7;
    REQUIRE_OK(fsdpc_device_cast(device, NULL, FSDPC_F32, NULL, FSDPC_BF16, 0, 2));
    REQUIRE_OK(fsdpc_device_accumulate(device, NULL, FSDPC_F32, NULL, FSDPC_F32, 0, 1));
    REQUIRE_OK(fsdpc_device_reduce(device, NULL, FSDPC_F32, NULL, 0, FSDPC_F32, 0, 1, true));
    REQUIRE_OK(fsdpc_device_norm2(device, NULL, FSDPC_F16, 0, &norm));
    CHECK(norm.sum == 0 && norm.max == 0 && !norm.nonfinite);
    REQUIRE_OK(fsdpc_device_norm_p(device, NULL, FSDPC_F32, 0, 1, &sum));
    CHECK(sum == 0);
    REQUIRE_OK(fsdpc_device_scale(device, NULL, FSDPC_F32, 0, 2));
    REQUIRE_OK(fsdpc_device_poison(device, NULL, FSDPC_F32, 0));
    REQUIRE_OK(fsdpc_device_zero(device, NULL, 0));
}

static void
the_device_says_what_it_is(void)
{
    fsdpc_device *again;
    REQUIRE_OK(fsdpc_device_cpu(&again));
    CHECK(again == device);
    CHECK_STR(fsdpc_device_name(device), "cpu");
    CHECK_STR(fsdpc_device_kernels_name(device), "plain");
    const fsdpc_device_caps *caps = fsdpc_device_get_caps(device);
    CHECK(!caps->asynchronous && caps->host_memory);
    CHECK_INT(caps->align_bytes, 64);
    CHECK_INT(fsdpc_device_threads(device), 3);
}

/* --- memory -------------------------------------------------------------------------------- */

static void
memory_is_aligned_and_zeroed(void)
{
    static const size_t sizes[] = {1, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 3};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *block;
        void *out;
        size_t used = 0;
        REQUIRE_OK(fsdpc_device_alloc(device, sizes[i], &out));
        block = out;
        CHECK_INT((uintptr_t)block % (sizes[i] >= 2 << 20 ? 2 << 20 : 4096), 0);
        for (size_t k = 0; k < sizes[i]; k++) {
            used += block[k];
        }
        CHECK_INT(used, 0);
        memset(block, 1, sizes[i]);
        fsdpc_device_free(device, block, sizes[i]);
    }
    void *none = &none;
    REQUIRE_OK(fsdpc_device_alloc(device, 0, &none));
    CHECK(none == NULL);
    fsdpc_device_free(device, NULL, 0);
}

static void
memory_runs_out_with_an_error(void)
{
    void *out = &out;
    CHECK_ERROR(fsdpc_device_alloc(device, SIZE_MAX, &out), FSDPC_E_NOMEM, "host memory");
    CHECK(out == NULL);
    CHECK_ERROR(fsdpc_device_alloc(device, (size_t)1 << 60, &out), FSDPC_E_NOMEM, "host memory");
    CHECK(out == NULL);
}

static long
mapped_pages(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    REQUIRE(file != NULL && fscanf(file, "%ld", &pages) == 1);
    fclose(file);
    return pages;
}

static void
memory_is_given_back(void)
{
    const size_t sizes[] = {5000, (3 << 20) + 1, 64 << 20};
    const long before = mapped_pages();
    for (int i = 0; i < 300; i++) {
        void *out;
        REQUIRE_OK(fsdpc_device_alloc(device, sizes[i % 3], &out));
        fsdpc_device_free(device, out, sizes[i % 3]);
    }
    CHECK(test_is_emulated() ||
          mapped_pages() - before < 100); /* less than a page for each round */
}

/* --- threads ------------------------------------------------------------------------------- */

struct results {
    fsdpc_norm norm;
    double sum;
    float *reduced, *refreshed;
    uint16_t *narrow;
};

static void
run_all(const float *x, const uint16_t *y, struct results *out)
{
    const void *list[] = {y, NULL, y};
    out->reduced = malloc(N * sizeof *out->reduced);
    out->refreshed = malloc(N * sizeof *out->refreshed);
    out->narrow = malloc(N * sizeof *out->narrow);
    REQUIRE(out->reduced != NULL && out->refreshed != NULL && out->narrow != NULL);
    REQUIRE_OK(fsdpc_device_norm2(device, x, FSDPC_F32, N, &out->norm));
    REQUIRE_OK(fsdpc_device_norm_p(device, x, FSDPC_F32, N, 1.5, &out->sum));
    REQUIRE_OK(
        fsdpc_device_reduce(device, out->reduced, FSDPC_F32, list, 3, FSDPC_BF16, N, 0.3, false));
    REQUIRE_OK(fsdpc_device_accumulate(device, out->reduced, FSDPC_F32, x, FSDPC_F32, N, 0.7));
    REQUIRE_OK(fsdpc_device_scale(device, out->reduced, FSDPC_F32, N, 1.1));
    memcpy(out->refreshed, x, N * sizeof *x);
    REQUIRE_OK(fsdpc_device_refresh(device, out->refreshed, FSDPC_F32, y, FSDPC_BF16, N));
    REQUIRE_OK(fsdpc_device_cast(device, out->narrow, FSDPC_F16, out->reduced, FSDPC_F32, N, 0.5));
}

static void
results_do_not_depend_on_the_number_of_threads(void)
{
    float *x = malloc(N * sizeof *x);
    uint16_t *y = malloc(N * sizeof *y);
    struct results first = {0};
    REQUIRE(x != NULL && y != NULL);
    for (int i = 0; i < N; i++) {
        x[i] = sinf((float)i) * 3;
        y[i] = fsdpc_f32_to_bf16(cosf((float)i));
    }
    for (int threads = 1; threads <= 5; threads++) {
        struct results now;
        REQUIRE_OK(fsdpc_device_set_threads(device, threads));
        CHECK_INT(fsdpc_device_threads(device), threads);
        run_all(x, y, threads == 1 ? &first : &now);
        if (threads == 1) {
            continue;
        }
        CHECK(now.norm.sum == first.norm.sum && now.norm.max == first.norm.max);
        CHECK(now.sum == first.sum);
        CHECK(memcmp(now.reduced, first.reduced, N * sizeof *now.reduced) == 0);
        CHECK(memcmp(now.refreshed, first.refreshed, N * sizeof *now.refreshed) == 0);
        free(now.refreshed);
        CHECK(memcmp(now.narrow, first.narrow, N * sizeof *now.narrow) == 0);
        free(now.reduced);
        free(now.narrow);
    }
    float expected = 0;
    for (int i = 0; i < 2; i++) {
        expected += fsdpc_bf16_to_f32(y[N - 1]);
    }
    expected = (expected * 0.3f + x[N - 1] * 0.7f) * 1.1f;
    CHECK(first.reduced[N - 1] == expected);
    free(first.reduced);
    free(first.refreshed);
    free(first.narrow);
    free(x);
    free(y);
}

static void
norms_join_their_parts(void)
{
    float *x = calloc(N, sizeof *x);
    fsdpc_norm norm;
    REQUIRE(x != NULL);
    x[0] = 3;
    x[N - 1] = -4;
    REQUIRE_OK(fsdpc_device_norm2(device, x, FSDPC_F32, N, &norm));
    CHECK(norm.sum == 25 && norm.max == 4 && !norm.nonfinite);
    x[N / 2] = NAN;
    REQUIRE_OK(fsdpc_device_norm2(device, x, FSDPC_F32, N, &norm));
    CHECK(norm.nonfinite && isnan(norm.max) && isnan(norm.sum));
    free(x);
}

struct marks {
    _Atomic int done[1000];
    _Atomic int calls;
};

static void
mark(void *context, int64_t begin, int64_t end)
{
    struct marks *marks = context;
    atomic_fetch_add(&marks->calls, 1);
    for (int64_t i = begin; i < end; i++) {
        atomic_fetch_add(&marks->done[i], 1);
    }
}

static int
marked_once(struct marks *marks, int n)
{
    int right = 0;
    for (int i = 0; i < 1000; i++) {
        right += atomic_load(&marks->done[i]) == (i < n);
    }
    return right == 1000;
}

static void
a_loop_does_each_part_once(fsdpc_pool *pool)
{
    for (int round = 0; round < 400; round++) {
        struct marks marks = {0};
        const int n = round * 37 % 1001;
        fsdpc_pool_run(pool, round % 7, n, 1 + round % 13, mark, &marks);
        CHECK(marked_once(&marks, n));
        if (round % 50 == 0) {
            usleep(2000); /* lets the helpers fall asleep */
        }
    }
}

static void *
loop_from_thread(void *argument)
{
    a_loop_does_each_part_once(argument);
    return NULL;
}

static void
two_callers_do_not_wait_for_each_other(fsdpc_pool *pool)
{
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, loop_from_thread, pool) == 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
}

struct nested {
    fsdpc_pool *pool;
    struct marks marks;
};

static void
run_inner(void *context, int64_t begin, int64_t end)
{
    struct nested *nested = context;
    for (int64_t i = begin; i < end; i++) {
        fsdpc_pool_run(nested->pool, 4, 10, 1, mark, &nested->marks);
    }
}

static void
a_loop_inside_a_loop_runs_alone(fsdpc_pool *pool)
{
    struct nested nested = {.pool = pool};
    fsdpc_pool_run(pool, 4, 20, 1, run_inner, &nested);
    for (int i = 0; i < 10; i++) {
        CHECK_INT(atomic_load(&nested.marks.done[i]), 20);
    }
}

static int
wait_for_child(pid_t child)
{
    int status = 0;
    for (int i = 0; i < 2000; i++) {
        if (waitpid(child, &status, WNOHANG) == child) {
            return WIFEXITED(status) ? WEXITSTATUS(status) : 100;
        }
        usleep(10000);
    }
    return 101;
}

static void
a_forked_child_starts_its_own_helpers(fsdpc_pool *pool)
{
#ifdef __SANITIZE_THREAD__ /* TSan ends a child that starts threads */
    (void)pool;
    return;
#endif
    if (test_is_emulated()) { /* qemu 7.2 ends a child that starts threads */
        return;
    }
    struct marks marks = {0};
    fsdpc_pool_run(pool, 4, 1000, 10, mark, &marks);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(20);
        struct marks own = {0};
        fsdpc_pool_run(pool, 4, 1000, 10, mark, &own);
        const int right = marked_once(&own, 1000);
        fsdpc_pool_free(pool);
        _exit(right ? 0 : 1);
    }
    CHECK_INT(wait_for_child(child), 0);
    memset(&marks, 0, sizeof marks);
    fsdpc_pool_run(pool, 4, 1000, 10, mark, &marks);
    CHECK(marked_once(&marks, 1000));
}

static int
make_and_free_a_pool(void *argument)
{
    fsdpc_pool *pool;
    struct marks marks = {0};
    (void)argument;
    int status = fsdpc_pool_new(&pool);
    if (status == FSDPC_OK) {
        fsdpc_pool_run(pool, 3, 100, 1, mark, &marks);
        CHECK(marked_once(&marks, 100));
    }
    fsdpc_pool_free(pool);
    return status;
}

/* --- start --------------------------------------------------------------------------------- */

static int
device_in_child(void)
{
    fsdpc_device *out;
    return -fsdpc_device_cpu(&out);
}

/* A process makes the device only once, so each failure is tried in a child process. */
static int
status_in_child(const char *name, const char *value, int64_t fail_after)
{
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(20);
        if (name) {
            setenv(name, value, 1);
        }
        fsdpc_mem_fail_after(fail_after);
        int code = device_in_child();
        if (code != 0) { /* the next attempt must succeed after a failure */
            if (name) {
                unsetenv(name);
            }
            code = device_in_child() == 0 ? code : 99;
        }
        _exit(code);
    }
    return -wait_for_child(child);
}

static void
settings_are_checked_at_the_start(void)
{
    CHECK_INT(status_in_child(NULL, NULL, 0), FSDPC_OK);
    CHECK_INT(status_in_child("FSDPC_NUM_THREADS", "2", 0), FSDPC_OK);
    CHECK_INT(status_in_child("FSDPC_NUM_THREADS", "0", 0), FSDPC_E_INVAL);
    CHECK_INT(status_in_child("FSDPC_NUM_THREADS", "two", 0), FSDPC_E_INVAL);
    CHECK_INT(status_in_child("FSDPC_NUM_THREADS", "300", 0), FSDPC_E_INVAL);
    CHECK_INT(status_in_child("FSDPC_SIMD", "neon", 0), FSDPC_E_INVAL);
    CHECK_INT(status_in_child(NULL, NULL, 1), FSDPC_E_NOMEM);
}

int
main(void)
{
    fsdpc_pool *pool;
    unsetenv("FSDPC_SIMD");
    unsetenv("FSDPC_NUM_THREADS");
    settings_are_checked_at_the_start();
    setenv("FSDPC_SIMD", "plain", 1);
    setenv("FSDPC_NUM_THREADS", "3", 1);
    REQUIRE_OK(fsdpc_device_cpu(&device));
    the_device_says_what_it_is();
    bad_arguments_are_refused();
    nothing_is_a_valid_amount();
    memory_is_aligned_and_zeroed();
    memory_runs_out_with_an_error();
    memory_is_given_back();
    results_do_not_depend_on_the_number_of_threads();
    norms_join_their_parts();
    REQUIRE_OK(fsdpc_pool_new(&pool));
    a_loop_does_each_part_once(pool);
    two_callers_do_not_wait_for_each_other(pool);
    a_loop_inside_a_loop_runs_alone(pool);
    a_forked_child_starts_its_own_helpers(pool);
    fsdpc_pool_free(pool);
    test_alloc_sweep(make_and_free_a_pool, NULL);
    return test_result();
}
