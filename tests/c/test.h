/* The harness of the C tests. Each test_*.c is a program of its own that includes this file once.
 *
 * If a check fails, CHECK* report this and go on, and REQUIRE* report this and end the program. Use REQUIRE*
 * for conditions that later lines need. main ends with `return test_result();`. Exit codes: 0 passed,
 * 1 failed, 77 skipped. Checks may be used from several threads.
 */
#ifndef FSDPC_TEST_H
#define FSDPC_TEST_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"

enum { TEST_SKIPPED = 77 };

static _Atomic int test_failures, test_checks;

#define TEST_FAIL(...)                                          \
    do {                                                        \
        fprintf(stderr, "%s:%d: failed: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                           \
        fputc('\n', stderr);                                    \
        atomic_fetch_add(&test_failures, 1);                    \
    } while (0)

#define CHECK(condition)                   \
    do {                                   \
        atomic_fetch_add(&test_checks, 1); \
        if (!(condition)) {                \
            TEST_FAIL("%s", #condition);   \
        }                                  \
    } while (0)

#define CHECK_INT(expr, expected)                                              \
    do {                                                                       \
        long long got_ = (long long)(expr), expected_ = (long long)(expected); \
        atomic_fetch_add(&test_checks, 1);                                     \
        if (got_ != expected_) {                                               \
            TEST_FAIL("%s is %lld, expected %lld", #expr, got_, expected_);    \
        }                                                                      \
    } while (0)

#define CHECK_STR(expr, expected)                                                           \
    do {                                                                                    \
        const char *got_ = (expr), *expected_ = (expected);                                 \
        atomic_fetch_add(&test_checks, 1);                                                  \
        if (got_ == NULL || strcmp(got_, expected_) != 0) {                                 \
            TEST_FAIL("%s is '%s', expected '%s'", #expr, got_ ? got_ : "NULL", expected_); \
        }                                                                                   \
    } while (0)

/* Checks the status, and that the error text contains `part`, such as the name of a parameter. */
#define CHECK_ERROR(expr, status, part)                                        \
    do {                                                                       \
        fsdpc_error_clear();                                                   \
        CHECK_INT(expr, status);                                               \
        if (strstr(fsdpc_error_text(), part) == NULL) {                        \
            TEST_FAIL("error text '%s' lacks '%s'", fsdpc_error_text(), part); \
        }                                                                      \
    } while (0)

#define REQUIRE(condition)                 \
    do {                                   \
        atomic_fetch_add(&test_checks, 1); \
        if (!(condition)) {                \
            TEST_FAIL("%s", #condition);   \
            exit(1);                       \
        }                                  \
    } while (0)

#define REQUIRE_OK(expr)                                                                      \
    do {                                                                                      \
        int required_ = (expr);                                                               \
        atomic_fetch_add(&test_checks, 1);                                                    \
        if (required_ != FSDPC_OK) {                                                          \
            TEST_FAIL("%s: %s: %s", #expr, fsdpc_status_text(required_), fsdpc_error_text()); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

/* True if an emulator runs the program, see run.sh. The memory of the process is then also the emulator's. */
static inline int
test_is_emulated(void)
{
    const char *emulator = getenv("RUN_WITH");
    return emulator && *emulator;
}

/* Ends the program as skipped, with the reason on one line. */
__attribute__((unused)) static void
test_skip(const char *reason)
{
    printf("skipped: %s\n", reason);
    exit(TEST_SKIPPED);
}

/* Calls `action` again and again, with the first, second, ... allocation failing, until no allocation fails.
 * The action must release all that it made, also after a failure, and return its status. */
__attribute__((unused)) static void
test_alloc_sweep(int (*action)(void *), void *argument)
{
    int64_t live = fsdpc_mem_live();
    for (int64_t n = 1;; n++) {
        fsdpc_mem_fail_after(n);
        int status = action(argument);
        bool failed = fsdpc_mem_failed();
        fsdpc_mem_fail_after(0);
        CHECK_INT(status, failed ? FSDPC_E_NOMEM : FSDPC_OK);
        CHECK_INT(fsdpc_mem_live(), live);
        if (!failed) {
            CHECK(n > 1); /* an action without allocations would test nothing */
            return;
        }
    }
}

__attribute__((unused)) static int
test_result(void)
{
    if (test_failures == 0 && test_checks == 0) {
        TEST_FAIL("no check was made");
    }
    return test_failures ? 1 : 0;
}

#endif
