/* Comparing a text that should be equal on all ranks: each rank gives its digest and its beginning.
 *
 * Pure functions; the shared segment and the c10d communicator carry the records.
 */
#ifndef FSDPC_AGREE_H
#define FSDPC_AGREE_H

#include <stdint.h>

enum { FSDPC_AGREE_TEXT_BYTES = 4096, FSDPC_AGREE_DIGEST_BYTES = 64 * 1024 };

typedef struct fsdpc_agree_record {
    uint64_t digest;                   /* of the first FSDPC_AGREE_DIGEST_BYTES and of the length */
    uint64_t bytes;                    /* length of the whole text */
    char text[FSDPC_AGREE_TEXT_BYTES]; /* the text's beginning, ended by a zero byte */
} fsdpc_agree_record;

void fsdpc_agree_fill(fsdpc_agree_record *record, const char *text);
/* FSDPC_OK, or FSDPC_E_MISMATCH. The error quotes the first line in which the texts of rank 0 and of the
 * lowest rank with another text differ. `get` returns a rank's record. `what` names the occasion. */
int fsdpc_agree_compare(const fsdpc_agree_record *(*get)(const void *context, int rank),
                        const void *context, int world, const char *what);

#endif
