/* Status codes and the per-thread error text. See status.h. */
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char error_text[FSDPC_ERROR_BYTES];
static _Thread_local int error_errnum;

const char *
fsdpc_status_text(int status)
{
    switch (status) {
#define CASE(name, value, text) \
    case value:                 \
        return text;
        FSDPC_STATUS_TABLE(CASE)
#undef CASE
    default:
        return "unknown status";
    }
}

int
fsdpc_error(int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(error_text, FSDPC_ERROR_BYTES, format, args);
    va_end(args);
    error_errnum = 0;
    return status;
}

int
fsdpc_error_errno(int errnum, const char *format, ...)
{
    char reason[128];
    va_list args;
    va_start(args, format);
    int used = vsnprintf(error_text, FSDPC_ERROR_BYTES, format, args);
    va_end(args);
    if (used < 0) {
        used = 0;
    }
    if (used < FSDPC_ERROR_BYTES) {
        /* XSI's strerror_r fills the buffer; GNU's may return a static text instead. */
#if defined(__GLIBC__) && defined(_GNU_SOURCE)
        const char *text = strerror_r(errnum, reason, sizeof reason);
#else
        const char *text = strerror_r(errnum, reason, sizeof reason) == 0 ? reason : "?";
#endif
        snprintf(error_text + used, (size_t)(FSDPC_ERROR_BYTES - used), ": %s", text);
    }
    error_errnum = errnum;
    return errnum == ENOMEM || errnum == ENOSPC ? FSDPC_E_NOMEM : FSDPC_E_IO;
}

int
fsdpc_error_prepend(int status, const char *format, ...)
{
    char joined[FSDPC_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    int used = vsnprintf(joined, FSDPC_ERROR_BYTES, format, args);
    va_end(args);
    int room = FSDPC_ERROR_BYTES - used - (int)sizeof ": ";
    if (used < 0 || room < 0) {
        return status;
    }
    snprintf(joined + used, (size_t)(FSDPC_ERROR_BYTES - used), ": %.*s", room, error_text);
    memcpy(error_text, joined, FSDPC_ERROR_BYTES);
    return status;
}

const char *
fsdpc_error_text(void)
{
    return error_text;
}

int
fsdpc_error_errnum(void)
{
    return error_errnum;
}

void
fsdpc_error_clear(void)
{
    error_text[0] = '\0';
    error_errnum = 0;
}

void
fsdpc_error_keep(fsdpc_kept_error *kept)
{
    memcpy(kept->text, error_text, sizeof error_text);
    kept->errnum = error_errnum;
}

void
fsdpc_error_restore(const fsdpc_kept_error *kept)
{
    memcpy(error_text, kept->text, sizeof error_text);
    error_errnum = kept->errnum;
}
