/* Comparison of the ranks' texts. See agree.h. */
#include "base/agree.h"

#include <string.h>

#include "base/status.h"

enum { QUOTE_BYTES = 300 };

static uint64_t
digest(const char *text, uint64_t bytes)
{
    /* FNV-1a is enough: this program writes the texts, so nobody tries to make digests collide. */
    uint64_t value = 14695981039346656037u;
    uint64_t count = bytes < FSDPC_AGREE_DIGEST_BYTES ? bytes : FSDPC_AGREE_DIGEST_BYTES;
    for (uint64_t i = 0; i < count; i++) {
        value = (value ^ (unsigned char)text[i]) * 1099511628211u;
    }
    return (value ^ bytes) * 1099511628211u;
}

void
fsdpc_agree_fill(fsdpc_agree_record *record, const char *text)
{
    size_t bytes = strlen(text);
    size_t kept = bytes < FSDPC_AGREE_TEXT_BYTES - 1 ? bytes : FSDPC_AGREE_TEXT_BYTES - 1;
    record->digest = digest(text, bytes);
    record->bytes = bytes;
    memcpy(record->text, text, kept);
    memset(record->text + kept, 0, FSDPC_AGREE_TEXT_BYTES - kept);
}

static int
line_bytes(const char *line)
{
    size_t bytes = strcspn(line, "\n");
    return bytes < QUOTE_BYTES ? (int)bytes : QUOTE_BYTES;
}

static int
mismatch(const char *first, const char *second, int rank, const char *what)
{
    size_t line = 0;
    size_t at = 0;
    for (; first[at] && first[at] == second[at]; at++) {
        if (first[at] == '\n') {
            line = at + 1;
        }
    }
    if (!first[at] && !second[at]) {
        return fsdpc_error(FSDPC_E_MISMATCH,
                           "ranks 0 and %d disagree in %s (after the first %d bytes of the text)",
                           rank, what, FSDPC_AGREE_TEXT_BYTES - 1);
    }
    return fsdpc_error(
        FSDPC_E_MISMATCH, "ranks disagree in %s: rank 0 has \"%.*s\", rank %d has \"%.*s\"", what,
        line_bytes(first + line), first + line, rank, line_bytes(second + line), second + line);
}

int
fsdpc_agree_compare(const fsdpc_agree_record *(*get)(const void *context, int rank),
                    const void *context, int world, const char *what)
{
    const fsdpc_agree_record *first = get(context, 0);
    for (int rank = 1; rank < world; rank++) {
        const fsdpc_agree_record *other = get(context, rank);
        if (other->digest != first->digest || other->bytes != first->bytes) {
            return mismatch(first->text, other->text, rank, what);
        }
    }
    return FSDPC_OK;
}
