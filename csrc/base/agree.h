/* Compares a text that should be equal on all ranks. Each rank makes a record of its text, with the text's
 * digest and beginning, and the records of all ranks are compared.
 *
 * These functions are pure; the shared segment or the c10d communicator exchanges the records.
 */
#ifndef FSDPC_AGREE_H
#define FSDPC_AGREE_H

#include <stdint.h>

enum { FSDPC_AGREE_TEXT_BYTES = 4096, FSDPC_AGREE_DIGEST_BYTES = 64 * 1024 };

typedef struct fsdpc_agree_record {
    uint64_t digest; /* of the text's length and its first FSDPC_AGREE_DIGEST_BYTES */
    uint64_t bytes;  /* length of the whole text */
    char text[FSDPC_AGREE_TEXT_BYTES]; /* the text's beginning, ended by a zero byte */
} fsdpc_agree_record;

void fsdpc_agree_fill(fsdpc_agree_record *record, const char *text);
/* Fails with FSDPC_E_MISMATCH if texts differ. The error names `what` and the lowest rank whose text differs
 * from rank 0's text. It quotes the first line in which these two texts differ. `get` returns the
 * record of a rank. */
int fsdpc_agree_compare(const fsdpc_agree_record *(*get)(const void *context, int rank),
                        const void *context, int world, const char *what);

#endif
