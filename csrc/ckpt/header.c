/* Reads the JSON in one pass, then sorts twice: by name, to find duplicates, and by place, to check that
 * the tensors cover the data without gaps or overlaps. Decoded strings are never longer than their source,
 * so one block of the header's size is enough for all strings.
 */
#include "ckpt/header.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "ckpt/json_scan.h"

enum { MOST_DIMS = 64 };

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

typedef struct parser {
    fsdpc_json json;
    fsdpc_header *out;
    size_t tensor_room, dim_count, dim_room, metadata_room;
    bool has_metadata;
} parser;

/* Makes room for one more item after the first `count` items. */
static int
grow(void **items, size_t count, size_t *room, size_t item_bytes)
{
    if (count < *room) {
        return FSDPC_OK;
    }
    const size_t wanted = *room == 0 ? 16 : *room * 2;
    void *grown = fsdpc_mem_realloc(*items, wanted, item_bytes);
    if (grown == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a header of %zu entries", count);
    }
    *items = grown;
    *room = wanted;
    return FSDPC_OK;
}

static int
tensor_error(const fsdpc_header_tensor *tensor, const char *problem)
{
    const int shown = tensor->name.bytes < 200 ? (int)tensor->name.bytes : 200;
    return fsdpc_error(FSDPC_E_INVAL, "header, tensor '%.*s': %s", shown, tensor->name.text,
                       problem);
}

/* --- one tensor ------------------------------------------------------------------------------ */

static bool
is_text(const char *text, size_t bytes, const char *wanted)
{
    return bytes == strlen(wanted) && memcmp(text, wanted, bytes) == 0;
}

static int
read_dtype(parser *self, fsdpc_header_tensor *tensor, int *bits)
{
    const char *text;
    size_t bytes;
    FSDPC_TRY(fsdpc_json_string(&self->json, &text, &bytes));
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (is_text(text, bytes, dtypes[i].name)) {
            tensor->dtype = dtypes[i].name;
            *bits = dtypes[i].bits;
            return FSDPC_OK;
        }
    }
    return tensor_error(tensor, "unknown dtype");
}

static int
read_shape(parser *self, fsdpc_header_tensor *tensor)
{
    bool more = false;
    tensor->first_dim = self->dim_count;
    FSDPC_TRY(fsdpc_json_open(&self->json, '[', ']', &more));
    while (more) {
        if (tensor->ndim == MOST_DIMS) {
            return tensor_error(tensor, "more than 64 dimensions");
        }
        FSDPC_TRY(grow((void **)&self->out->dims, self->dim_count, &self->dim_room,
                       sizeof *self->out->dims));
        FSDPC_TRY(fsdpc_json_count(&self->json, &self->out->dims[self->dim_count++]));
        tensor->ndim++;
        FSDPC_TRY(fsdpc_json_next(&self->json, ']', &more));
    }
    return FSDPC_OK;
}

static int
read_offsets(parser *self, fsdpc_header_tensor *tensor)
{
    FSDPC_TRY(fsdpc_json_expect(&self->json, '['));
    FSDPC_TRY(fsdpc_json_count(&self->json, &tensor->begin));
    FSDPC_TRY(fsdpc_json_expect(&self->json, ','));
    FSDPC_TRY(fsdpc_json_count(&self->json, &tensor->end));
    return fsdpc_json_expect(&self->json, ']');
}

/* Checks that shape and dtype need as many bytes as there are between the offsets. */
static int
check_bytes(const parser *self, const fsdpc_header_tensor *tensor, int bits)
{
    int64_t total = bits;
    for (int i = 0; i < tensor->ndim; i++) {
        if (__builtin_mul_overflow(total, self->out->dims[tensor->first_dim + (size_t)i], &total)) {
            return tensor_error(tensor, "its shape has more than 2^63 bits");
        }
    }
    if (total % 8 != 0 || tensor->end < tensor->begin || tensor->end - tensor->begin != total / 8) {
        return tensor_error(tensor, "its offsets do not match its shape and dtype");
    }
    return FSDPC_OK;
}

static int
read_field(parser *self, fsdpc_header_tensor *tensor, int *bits, unsigned *present)
{
    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    const char *text;
    size_t bytes;
    FSDPC_TRY(fsdpc_json_string(&self->json, &text, &bytes));
    FSDPC_TRY(fsdpc_json_expect(&self->json, ':'));
    unsigned field = 0;
    while (field < 3 && !is_text(text, bytes, fields[field])) {
        field++;
    }
    if (field == 3) {
        return fsdpc_json_skip(&self->json);
    }
    if (*present & 1u << field) {
        return tensor_error(tensor, "a field stands there twice");
    }
    *present |= 1u << field;
    return field == 0   ? read_dtype(self, tensor, bits)
           : field == 1 ? read_shape(self, tensor)
                        : read_offsets(self, tensor);
}

static int
read_tensor(parser *self, fsdpc_header_text name)
{
    fsdpc_header *out = self->out;
    FSDPC_TRY(
        grow((void **)&out->tensors, out->tensor_count, &self->tensor_room, sizeof *out->tensors));
    fsdpc_header_tensor *tensor = &out->tensors[out->tensor_count++];
    *tensor = (fsdpc_header_tensor){.name = name};
    bool more = false;
    int bits = 0;
    unsigned present = 0;
    FSDPC_TRY(fsdpc_json_open(&self->json, '{', '}', &more));
    while (more) {
        FSDPC_TRY(read_field(self, tensor, &bits, &present));
        FSDPC_TRY(fsdpc_json_next(&self->json, '}', &more));
    }
    if (present != 7) {
        return tensor_error(tensor, "it needs dtype, shape and data_offsets");
    }
    return check_bytes(self, tensor, bits);
}

/* --- the whole header ------------------------------------------------------------------------ */

static int
read_metadata(parser *self)
{
    fsdpc_header *out = self->out;
    if (self->has_metadata) {
        return fsdpc_json_error(&self->json, "__metadata__ stands there twice");
    }
    self->has_metadata = true;
    if (fsdpc_json_peek(&self->json) == 'n') {
        return fsdpc_json_skip(&self->json);
    }
    bool more = false;
    FSDPC_TRY(fsdpc_json_open(&self->json, '{', '}', &more));
    while (more) {
        FSDPC_TRY(grow((void **)&out->metadata, out->metadata_count, &self->metadata_room,
                       2 * sizeof *out->metadata));
        fsdpc_header_text *pair = &out->metadata[2 * out->metadata_count++];
        FSDPC_TRY(fsdpc_json_string(&self->json, &pair[0].text, &pair[0].bytes));
        FSDPC_TRY(fsdpc_json_expect(&self->json, ':'));
        FSDPC_TRY(fsdpc_json_string(&self->json, &pair[1].text, &pair[1].bytes));
        FSDPC_TRY(fsdpc_json_next(&self->json, '}', &more));
    }
    return FSDPC_OK;
}

static int
read_all(parser *self)
{
    bool more = false;
    FSDPC_TRY(fsdpc_json_open(&self->json, '{', '}', &more));
    while (more) {
        fsdpc_header_text name = {0};
        FSDPC_TRY(fsdpc_json_string(&self->json, &name.text, &name.bytes));
        FSDPC_TRY(fsdpc_json_expect(&self->json, ':'));
        if (is_text(name.text, name.bytes, "__metadata__")) {
            FSDPC_TRY(read_metadata(self));
        } else {
            FSDPC_TRY(read_tensor(self, name));
        }
        FSDPC_TRY(fsdpc_json_next(&self->json, '}', &more));
    }
    fsdpc_json_peek(&self->json);
    return self->json.at == self->json.bytes
               ? FSDPC_OK
               : fsdpc_json_error(&self->json, "text behind the end of the header");
}

static int
compare_texts(const fsdpc_header_text *a, const fsdpc_header_text *b)
{
    const size_t shorter = a->bytes < b->bytes ? a->bytes : b->bytes;
    const int order = shorter == 0 ? 0 : memcmp(a->text, b->text, shorter);
    return order != 0 ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static int
by_name(const void *a, const void *b)
{
    const fsdpc_header_tensor *one = a, *other = b;
    return compare_texts(&one->name, &other->name);
}

static int
by_place(const void *a, const void *b)
{
    const fsdpc_header_tensor *one = a, *other = b;
    if (one->begin != other->begin) {
        return one->begin < other->begin ? -1 : 1;
    }
    if (one->end != other->end) {
        return one->end < other->end ? -1 : 1;
    }
    return by_name(a, b);
}

static int
by_key(const void *a, const void *b)
{
    return compare_texts(a, b);
}

static int
check_names(fsdpc_header *out)
{
    if (out->tensor_count > 1) {
        qsort(out->tensors, out->tensor_count, sizeof *out->tensors, by_name);
    }
    for (size_t i = 1; i < out->tensor_count; i++) {
        if (by_name(&out->tensors[i - 1], &out->tensors[i]) == 0) {
            return tensor_error(&out->tensors[i], "the name stands there twice");
        }
    }
    if (out->metadata_count > 1) {
        qsort(out->metadata, out->metadata_count, 2 * sizeof *out->metadata, by_key);
    }
    for (size_t i = 1; i < out->metadata_count; i++) {
        if (by_key(&out->metadata[2 * i - 2], &out->metadata[2 * i]) == 0) {
            return fsdpc_error(FSDPC_E_INVAL, "header: a key of __metadata__ stands there twice");
        }
    }
    return FSDPC_OK;
}

static int
check_places(fsdpc_header *out, int64_t data_bytes)
{
    if (out->tensor_count > 1) {
        qsort(out->tensors, out->tensor_count, sizeof *out->tensors, by_place);
    }
    int64_t end = 0;
    for (size_t i = 0; i < out->tensor_count; i++) {
        if (out->tensors[i].begin != end) {
            return tensor_error(&out->tensors[i], out->tensors[i].begin < end
                                                      ? "it overlaps another tensor"
                                                      : "there is a gap before it");
        }
        end = out->tensors[i].end;
    }
    if (end != data_bytes) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "the tensors need %lld bytes, but %lld follow the header: the file was "
                           "cut or never finished",
                           (long long)end, (long long)data_bytes);
    }
    return FSDPC_OK;
}

int
fsdpc_header_parse(const char *json, size_t bytes, int64_t data_bytes, fsdpc_header *out)
{
    int status = FSDPC_OK;
    *out = (fsdpc_header){0};
    out->strings = fsdpc_mem_calloc(bytes + 1, 1);
    if (out->strings == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a header of %zu bytes", bytes);
    }
    parser self = {.json = {.text = json, .bytes = bytes, .strings = out->strings}, .out = out};
    if (bytes == 0 || json[0] != '{') {
        FSDPC_GOTO(fsdpc_json_error(&self.json, "a header begins with '{'"), fail);
    }
    FSDPC_GOTO(read_all(&self), fail);
    FSDPC_GOTO(check_names(out), fail);
    FSDPC_GOTO(check_places(out, data_bytes), fail);
    return FSDPC_OK;
fail:
    fsdpc_header_clear(out);
    return status;
}

void
fsdpc_header_clear(fsdpc_header *header)
{
    fsdpc_mem_free(header->tensors);
    fsdpc_mem_free(header->dims);
    fsdpc_mem_free(header->metadata);
    fsdpc_mem_free(header->strings);
    *header = (fsdpc_header){0};
}
