#include "ckpt/json_scan.h"

#include <string.h>

#include "base/status.h"

enum { DEEPEST = 16 };

int
fsdpc_json_error(const fsdpc_json *json, const char *problem)
{
    return fsdpc_error(FSDPC_E_INVAL, "header, byte %zu: %s", json->at, problem);
}

char
fsdpc_json_peek(fsdpc_json *json)
{
    while (json->at < json->bytes && json->text[json->at] != '\0' &&
           strchr(" \t\r\n", json->text[json->at]) != NULL) {
        json->at++;
    }
    return json->at < json->bytes ? json->text[json->at] : '\0';
}

int
fsdpc_json_expect(fsdpc_json *json, char wanted)
{
    if (fsdpc_json_peek(json) != wanted) {
        char problem[] = "expected '?'";
        problem[10] = wanted;
        return fsdpc_json_error(json, problem);
    }
    json->at++;
    return FSDPC_OK;
}

int
fsdpc_json_next(fsdpc_json *json, char close, bool *more)
{
    *more = fsdpc_json_peek(json) == ',';
    return fsdpc_json_expect(json, *more ? ',' : close);
}

int
fsdpc_json_open(fsdpc_json *json, char open, char close, bool *more)
{
    FSDPC_TRY(fsdpc_json_expect(json, open));
    *more = fsdpc_json_peek(json) != close;
    return *more ? FSDPC_OK : fsdpc_json_expect(json, close);
}

/* --- strings --------------------------------------------------------------------------------- */

/* Returns the length of the UTF-8 sequence at `at`, or 0 if the sequence is not well formed. */
static size_t
sequence(const fsdpc_json *json, size_t at)
{
    const unsigned char *s = (const unsigned char *)json->text + at;
    const size_t left = json->bytes - at;
    if (s[0] < 0x80) {
        return 1;
    }
    const size_t length = s[0] >= 0xC2 && s[0] < 0xE0   ? 2
                          : s[0] >= 0xE0 && s[0] < 0xF0 ? 3
                          : s[0] >= 0xF0 && s[0] < 0xF5 ? 4
                                                        : 0;
    if (length == 0 || length > left) {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    const bool too_long = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    const bool no_character = (s[0] == 0xED && s[1] >= 0xA0) || (s[0] == 0xF4 && s[1] >= 0x90);
    return too_long || no_character ? 0 : length;
}

/* Reads the four digits of \uXXXX. */
static int
hex4(fsdpc_json *json, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef";
        char c = json->at < json->bytes ? json->text[json->at] : '\0';
        c = c >= 'A' && c <= 'F' ? (char)(c - 'A' + 'a') : c;
        const char *found = c == '\0' ? NULL : strchr(digits, c);
        if (found == NULL) {
            return fsdpc_json_error(json, "a \\u escape without four digits");
        }
        *out = *out << 4 | (uint32_t)(found - digits);
        json->at++;
    }
    return FSDPC_OK;
}

static void
put(fsdpc_json *json, uint32_t byte)
{
    json->strings[json->used++] = (char)byte;
}

static void
put_character(fsdpc_json *json, uint32_t code)
{
    if (code < 0x80) {
        put(json, code);
        return;
    }
    if (code < 0x800) {
        put(json, 0xC0 | code >> 6);
    } else {
        if (code < 0x10000) {
            put(json, 0xE0 | code >> 12);
        } else {
            put(json, 0xF0 | code >> 18);
            put(json, 0x80 | (code >> 12 & 0x3F));
        }
        put(json, 0x80 | (code >> 6 & 0x3F));
    }
    put(json, 0x80 | (code & 0x3F));
}

/* Reads the rest of an escape whose "\u" has been read. */
static int
unicode_escape(fsdpc_json *json)
{
    uint32_t code = 0, low = 0;
    FSDPC_TRY(hex4(json, &code));
    if (code >= 0xD800 && code < 0xDC00 && json->bytes - json->at >= 2 &&
        memcmp(json->text + json->at, "\\u", 2) == 0) {
        json->at += 2;
        FSDPC_TRY(hex4(json, &low));
        if (low < 0xDC00 || low > 0xDFFF) {
            return fsdpc_json_error(json, "half a character (a lone surrogate)");
        }
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code >= 0xD800 && code < 0xE000) {
        return fsdpc_json_error(json, "half a character (a lone surrogate)");
    }
    put_character(json, code);
    return FSDPC_OK;
}

static int
escape(fsdpc_json *json)
{
    const char *names = "\"\\/bfnrtu", *values = "\"\\/\b\f\n\r\t";
    const char c = json->at < json->bytes ? json->text[json->at] : '\0';
    const char *found = c == '\0' ? NULL : strchr(names, c);
    if (found == NULL) {
        return fsdpc_json_error(json, "an unknown escape in a string");
    }
    json->at++;
    if (*found == 'u') {
        return unicode_escape(json);
    }
    put(json, (unsigned char)values[found - names]);
    return FSDPC_OK;
}

int
fsdpc_json_string(fsdpc_json *json, const char **text, size_t *bytes)
{
    FSDPC_TRY(fsdpc_json_expect(json, '"'));
    const size_t start = json->used;
    while (json->at < json->bytes && json->text[json->at] != '"') {
        if (json->text[json->at] == '\\') {
            json->at++;
            FSDPC_TRY(escape(json));
            continue;
        }
        const size_t length = sequence(json, json->at);
        if (length == 0 || (unsigned char)json->text[json->at] < 0x20) {
            return fsdpc_json_error(json,
                                    "a string that is not UTF-8 or holds a control character");
        }
        memcpy(json->strings + json->used, json->text + json->at, length);
        json->used += length;
        json->at += length;
    }
    if (json->at == json->bytes) {
        return fsdpc_json_error(json, "a string without end");
    }
    json->at++;
    *text = json->strings + start;
    *bytes = json->used - start;
    return FSDPC_OK;
}

/* --- other values ---------------------------------------------------------------------------- */

int
fsdpc_json_count(fsdpc_json *json, int64_t *out)
{
    fsdpc_json_peek(json);
    int64_t value = 0;
    size_t at = json->at;
    for (; at < json->bytes && json->text[at] >= '0' && json->text[at] <= '9'; at++) {
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, json->text[at] - '0', &value)) {
            return fsdpc_json_error(json, "a number above 2^63");
        }
    }
    const char after = at < json->bytes ? json->text[at] : '\0';
    if (at == json->at || (json->text[json->at] == '0' && at - json->at > 1) || after == '.' ||
        after == 'e' || after == 'E') {
        return fsdpc_json_error(json, "expected an integer that is not negative");
    }
    json->at = at;
    *out = value;
    return FSDPC_OK;
}

static size_t
digits(const char *text, size_t at, size_t end)
{
    while (at < end && text[at] >= '0' && text[at] <= '9') {
        at++;
    }
    return at;
}

/* Returns true if the text is a number by JSON's grammar. */
static bool
is_number(const char *text, size_t length)
{
    size_t at = length > 0 && text[0] == '-' ? 1 : 0;
    size_t whole = digits(text, at, length);
    bool valid = whole > at && (text[at] != '0' || whole == at + 1);
    at = whole;
    if (at < length && text[at] == '.') {
        const size_t fraction = digits(text, at + 1, length);
        valid = valid && fraction > at + 1;
        at = fraction;
    }
    if (at < length && (text[at] == 'e' || text[at] == 'E')) {
        at += at + 1 < length && (text[at + 1] == '+' || text[at + 1] == '-') ? 2 : 1;
        const size_t exponent = digits(text, at, length);
        valid = valid && exponent > at;
        at = exponent;
    }
    return valid && at == length;
}

/* Skips a number, true, false or null: consumes the text up to the next separator and checks it. */
static int
skip_word(fsdpc_json *json)
{
    static const char *const words[] = {"true", "false", "null"};
    const size_t start = json->at;
    while (json->at < json->bytes && json->text[json->at] != '\0' &&
           strchr(",]}: \t\r\n\"", json->text[json->at]) == NULL) {
        json->at++;
    }
    const size_t length = json->at - start;
    const char *word = json->text + start;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (length == strlen(words[i]) && memcmp(word, words[i], length) == 0) {
            return FSDPC_OK;
        }
    }
    return is_number(word, length) ? FSDPC_OK : fsdpc_json_error(json, "expected a value");
}

/* Consumes a value. For an object or array, consumes the opening bracket and pushes the closing bracket. */
static int
skip_one(fsdpc_json *json, char *closers, int *depth)
{
    const char c = fsdpc_json_peek(json);
    const char *text;
    size_t bytes;
    if (c == '"') {
        const size_t used = json->used;
        FSDPC_TRY(fsdpc_json_string(json, &text, &bytes));
        json->used = used;
        return FSDPC_OK;
    }
    if (c != '{' && c != '[') {
        return skip_word(json);
    }
    if (*depth == DEEPEST) {
        return fsdpc_json_error(json, "values are nested too deep");
    }
    closers[(*depth)++] = c == '{' ? '}' : ']';
    json->at++;
    return FSDPC_OK;
}

int
fsdpc_json_skip(fsdpc_json *json)
{
    char closers[DEEPEST];
    int depth = 0;
    bool fresh = false; /* true: the last item read was an opening bracket */
    do {
        const int before = depth;
        const char *text;
        size_t bytes;
        if (!(fresh && fsdpc_json_peek(json) == closers[depth - 1])) {
            if (depth > 0 && closers[depth - 1] == '}') {
                const size_t used = json->used;
                FSDPC_TRY(fsdpc_json_string(json, &text, &bytes));
                json->used = used;
                FSDPC_TRY(fsdpc_json_expect(json, ':'));
            }
            FSDPC_TRY(skip_one(json, closers, &depth));
            fresh = depth > before;
            if (fresh) {
                continue;
            }
        }
        bool more = false;
        while (depth > 0 && !more) {
            FSDPC_TRY(fsdpc_json_next(json, closers[depth - 1], &more));
            depth -= !more;
        }
        fresh = false;
    } while (depth > 0);
    return FSDPC_OK;
}
