/* Headers of safetensors files. A file may come from anyone, so a header is checked in full before any of
 * its values is used. */
#ifndef FSDPC_HEADER_H
#define FSDPC_HEADER_H

#include <stddef.h>
#include <stdint.h>

/* A decoded UTF-8 string of the header, which may contain NUL. */
typedef struct fsdpc_header_text {
    const char *text;
    size_t bytes;
} fsdpc_header_text;

typedef struct fsdpc_header_tensor {
    fsdpc_header_text name;
    const char *dtype; /* a static string such as "F32" */
    size_t first_dim;  /* index in dims */
    int ndim;
    int64_t begin, end; /* bytes, from the start of the data */
} fsdpc_header_tensor;

typedef struct fsdpc_header {
    fsdpc_header_tensor *tensors; /* in the order of their place in the file */
    size_t tensor_count;
    int64_t *dims;
    fsdpc_header_text *metadata; /* key, value, key, value */
    size_t metadata_count;       /* pairs */
    char *strings;               /* the memory that the texts point into */
} fsdpc_header;

/* Parses `json`, a header without its length field; `data_bytes` is the size of the data after the header.
 * Fails with FSDPC_E_INVAL and names the byte or the tensor if the text is not the JSON of a header, a dtype
 * is unknown, sizes overflow or do not match shapes, tensors overlap or leave a gap, or a name occurs twice.
 * Fails with FSDPC_E_NOMEM if memory is short. The caller owns the content of *out (fsdpc_header_clear). */
int fsdpc_header_parse(const char *json, size_t bytes, int64_t data_bytes, fsdpc_header *out);
void fsdpc_header_clear(fsdpc_header *header);

#endif
