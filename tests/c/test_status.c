/* Tests of the error of a thread: codes, texts, prefixes and truncation. */
#include <errno.h>
#include <pthread.h>

#include "test.h"

static void
codes_have_texts(void)
{
    for (int status = FSDPC_E_INTERNAL; status < FSDPC_OK; status++) {
        CHECK(strcmp(fsdpc_status_text(status), "unknown status") != 0);
    }
    CHECK_STR(fsdpc_status_text(FSDPC_OK), "success");
    CHECK_STR(fsdpc_status_text(-1000), "unknown status");
}

static void
prefixes_grow_outwards(void)
{
    CHECK_INT(fsdpc_error(FSDPC_E_COMM, "rank %d", 3), FSDPC_E_COMM);
    CHECK_INT(fsdpc_error_prepend(FSDPC_E_COMM, "unit '%s'", "layers.1"), FSDPC_E_COMM);
    CHECK_STR(fsdpc_error_text(), "unit 'layers.1': rank 3");
    fsdpc_error_prepend(FSDPC_E_COMM, "step %d", 7);
    CHECK_STR(fsdpc_error_text(), "step 7: unit 'layers.1': rank 3");
    fsdpc_error_clear();
    CHECK_STR(fsdpc_error_text(), "");
}

static void
errno_is_kept_until_the_next_error(void)
{
    CHECK_INT(fsdpc_error_errno(ENOENT, "open %s", "there"), FSDPC_E_IO);
    CHECK_INT(fsdpc_error_errnum(), ENOENT);
    CHECK(strncmp(fsdpc_error_text(), "open there: ", 12) == 0);
    CHECK(strlen(fsdpc_error_text()) > 12);
    CHECK_INT(fsdpc_error_errno(ENOMEM, "map"), FSDPC_E_NOMEM);
    CHECK_INT(fsdpc_error_errno(ENOSPC, "grow"), FSDPC_E_NOMEM);
    CHECK_INT(fsdpc_error_errnum(), ENOSPC);
    fsdpc_error(FSDPC_E_INVAL, "other");
    CHECK_INT(fsdpc_error_errnum(), 0);
}

/* Tries all lengths of text and prefix around the limit. Nothing is written past the buffer (the sanitizers
 * would report it), and the text is terminated and begins with the outermost prefix that fits. */
static void
long_texts_are_cut(void)
{
    enum { LIMIT = FSDPC_ERROR_BYTES };
    static char text[LIMIT + 8], prefix[LIMIT + 8];
    for (int length = LIMIT - 6; length < LIMIT + 6; length++) {
        memset(text, 'a', (size_t)length);
        text[length] = '\0';
        fsdpc_error(FSDPC_E_INVAL, "%s", text);
        CHECK_INT(strlen(fsdpc_error_text()), length < LIMIT ? length : LIMIT - 1);
        fsdpc_error_errno(EIO, "%s", text);
        CHECK(strlen(fsdpc_error_text()) < LIMIT);
        fsdpc_error_prepend(FSDPC_E_INVAL, "outer");
        CHECK_INT(strlen(fsdpc_error_text()), LIMIT - 1);
        CHECK(strncmp(fsdpc_error_text(), "outer: aaa", 10) == 0);

        memset(prefix, 'p', (size_t)length);
        prefix[length] = '\0';
        fsdpc_error(FSDPC_E_INVAL, "inner");
        fsdpc_error_prepend(FSDPC_E_INVAL, "%s", prefix);
        CHECK(strlen(fsdpc_error_text()) < LIMIT);
        CHECK(fsdpc_error_text()[0] == 'p' || strcmp(fsdpc_error_text(), "inner") == 0);
    }
}

static void *
other_thread(void *unused)
{
    (void)unused;
    CHECK_STR(fsdpc_error_text(), "");
    fsdpc_error(FSDPC_E_IO, "theirs");
    return NULL;
}

static void
threads_have_their_own_text(void)
{
    fsdpc_error(FSDPC_E_INVAL, "mine");
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK_STR(fsdpc_error_text(), "mine");
}

static int trace[8], trace_length;

static int
note(int value, int status)
{
    trace[trace_length++] = value;
    return status;
}

static int
unwinds(int failing)
{
    int status = FSDPC_OK;
    FSDPC_TRY(note(1, failing == 1 ? FSDPC_E_IO : FSDPC_OK));
    FSDPC_GOTO(note(2, failing == 2 ? FSDPC_E_COMM : FSDPC_OK), release);
    note(3, FSDPC_OK);
release:
    FSDPC_KEEP(note(4, failing ? FSDPC_E_STATE : FSDPC_OK));
    FSDPC_KEEP(note(5, failing == 4 ? FSDPC_E_PEER : FSDPC_OK));
    return status;
}

static void
macros_unwind_and_keep_the_first_error(void)
{
    CHECK_INT(unwinds(1), FSDPC_E_IO);
    CHECK_INT(trace_length, 1);
    trace_length = 0;
    CHECK_INT(unwinds(2), FSDPC_E_COMM);
    CHECK(trace_length == 4 && trace[1] == 2 && trace[2] == 4 && trace[3] == 5);
    trace_length = 0;
    CHECK_INT(unwinds(4), FSDPC_E_STATE);
    CHECK_INT(trace_length, 5);
    trace_length = 0;
    CHECK_INT(unwinds(0), FSDPC_OK);
    CHECK_INT(trace_length, 5);
}

int
main(void)
{
    codes_have_texts();
    prefixes_grow_outwards();
    errno_is_kept_until_the_next_error();
    long_texts_are_cut();
    threads_have_their_own_text();
    macros_unwind_and_keep_the_first_error();
    return test_result();
}
