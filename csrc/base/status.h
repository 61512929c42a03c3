/* Status codes, the thread's last error text, and the three check macros.
 *
 * Every fallible function of the core returns int: FSDPC_OK (0) or a negative FSDPC_E_* code.
 * The code decides the Python exception class. The text says what happened; it names the parameter,
 * the unit, the rank and a remedy, as far as the failing layer knows them. Outer layers prepend what
 * they know with fsdpc_error_prepend(). The core never prints and never exits.
 */
#ifndef FSDPC_STATUS_H
#define FSDPC_STATUS_H

#include <stddef.h>

/* X(name, value, text); py_status.c maps the codes to Python's exceptions. */
#define FSDPC_STATUS_TABLE(X)                   \
    X(OK, 0, "success")                         \
    X(E_INVAL, -1, "invalid argument")          \
    X(E_TYPE, -2, "wrong type")                 \
    X(E_NOMEM, -3, "out of host memory")        \
    X(E_DEVMEM, -4, "out of device memory")     \
    X(E_STATE, -5, "call out of order")         \
    X(E_COMM, -6, "communication failed")       \
    X(E_PEER, -7, "a rank died")                \
    X(E_TIMEOUT, -8, "deadline passed")         \
    X(E_MISMATCH, -9, "ranks disagree")         \
    X(E_IO, -10, "system call failed")          \
    X(E_UNAVAILABLE, -11, "not available here") \
    X(E_INTERRUPT, -12, "interrupted")          \
    X(E_INTERNAL, -13, "internal error")

enum fsdpc_status {
#define FSDPC_STATUS_ENUM(name, value, text) FSDPC_##name = value,
    FSDPC_STATUS_TABLE(FSDPC_STATUS_ENUM)
#undef FSDPC_STATUS_ENUM
};

/* Returns a short text for a code ("a rank died"), never NULL. Static storage. */
const char *fsdpc_status_text(int status);

enum { FSDPC_ERROR_BYTES = 4096 };
/* Sets this thread's error text (printf style, cut at 4 KiB) and returns `status`, so that a caller
 * can write `return fsdpc_error(FSDPC_E_INVAL, "...")`. */
int fsdpc_error(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Sets the error text to the message and the text of `errnum`. Returns FSDPC_E_NOMEM for ENOMEM and ENOSPC,
 * else FSDPC_E_IO. */
int fsdpc_error_errno(int errnum, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Puts "prefix: " before this thread's error text; returns `status`. */
int fsdpc_error_prepend(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns this thread's last error text, or "" if there is none. Valid until the thread's next error. */
const char *fsdpc_error_text(void);
/* Returns the errno of this thread's last error if fsdpc_error_errno set that error, else 0. */
int fsdpc_error_errnum(void);
void fsdpc_error_clear(void);
/* Holds an error during a clean-up that returns no status, because errors of the clean-up must not replace
 * the text of the first error. */
typedef struct fsdpc_kept_error {
    char text[FSDPC_ERROR_BYTES];
    int errnum;
} fsdpc_kept_error;
void fsdpc_error_keep(fsdpc_kept_error *kept);
void fsdpc_error_restore(const fsdpc_kept_error *kept);

/* TRY returns an error at once: use TRY only while there is nothing to free. GOTO sets `status` (declared as
 * `int status = FSDPC_OK`) and jumps to the label of the clean-up if there is an error. KEEP is for the
 * clean-up: `status` keeps the first error. */
#define FSDPC_TRY(expr)                \
    do {                               \
        int try_status_ = (expr);      \
        if (try_status_ != FSDPC_OK) { \
            return try_status_;        \
        }                              \
    } while (0)
#define FSDPC_GOTO(expr, label)   \
    do {                          \
        status = (expr);          \
        if (status != FSDPC_OK) { \
            goto label;           \
        }                         \
    } while (0)
#define FSDPC_KEEP(expr)           \
    do {                           \
        int keep_status_ = (expr); \
        if (status == FSDPC_OK) {  \
            status = keep_status_; \
        }                          \
    } while (0)

#endif
