/* A scanner over JSON text, value by value: no tree, no recursion, bounded nesting. */
#ifndef FSDPC_JSON_SCAN_H
#define FSDPC_JSON_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdpc_json {
    const char *text;
    size_t bytes, at;
    char *strings; /* room for decoded strings: at least `bytes` */
    size_t used;
} fsdpc_json;

/* All errors are FSDPC_E_INVAL with the byte where the text stopped making sense. */
int fsdpc_json_error(const fsdpc_json *json, const char *problem);
/* The next character that is no white space; 0 at the end. Does not consume it. */
char fsdpc_json_peek(fsdpc_json *json);
/* Consumes one character, which must be `wanted`. */
int fsdpc_json_expect(fsdpc_json *json, char wanted);
/* After a value of an object or array that ends with `close`: consumes "," (*more true) or `close`. */
int fsdpc_json_next(fsdpc_json *json, char close, bool *more);
/* Consumes the opening character and, of an empty object or array, the closing one (*more false). */
int fsdpc_json_open(fsdpc_json *json, char open, char close, bool *more);
/* Reads a string, decoded to UTF-8, into `strings` behind the earlier ones. */
int fsdpc_json_string(fsdpc_json *json, const char **text, size_t *bytes);
/* Reads an integer from 0 to 2^63 - 1, without sign, fraction or exponent. */
int fsdpc_json_count(fsdpc_json *json, int64_t *out);
/* Consumes any value, at most 16 deep. */
int fsdpc_json_skip(fsdpc_json *json);

#endif
