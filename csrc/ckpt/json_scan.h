/* A scanner that reads JSON text value by value, without a tree or recursion, up to a bounded nesting. */
#ifndef FSDPC_JSON_SCAN_H
#define FSDPC_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdpc_json {
    const char *text;
    size_t bytes, at;
    char *strings; /* memory for decoded strings: at least `bytes` bytes */
    size_t used;
} fsdpc_json;

/* All errors are FSDPC_E_INVAL; their text names the byte at which the JSON is not valid. */
int fsdpc_json_error(const fsdpc_json *json, const char *problem);
/* Skips white space and returns the next character without consuming it, or 0 at the end. */
char fsdpc_json_peek(fsdpc_json *json);
/* Consumes one character, which must be `wanted`. */
int fsdpc_json_expect(fsdpc_json *json, char wanted);
/* Called after a value in an object or array: consumes "," (*more is true) or `close` (*more is false). */
int fsdpc_json_next(fsdpc_json *json, char close, bool *more);
/* Consumes `open`, and also `close` if the object or array is empty (*more is false). */
int fsdpc_json_open(fsdpc_json *json, char open, char close, bool *more);
/* Reads a string, decodes the string to UTF-8 and appends it to `strings`. */
int fsdpc_json_string(fsdpc_json *json, const char **text, size_t *bytes);
/* Reads an integer from 0 to 2^63 - 1, without sign, fraction or exponent. */
int fsdpc_json_count(fsdpc_json *json, int64_t *out);
/* Consumes a value of any kind, which may be nested at most 16 deep. */
int fsdpc_json_skip(fsdpc_json *json);

#endif
