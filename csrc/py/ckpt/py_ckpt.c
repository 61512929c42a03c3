/* Digests, headers, ranges of files, and copies of many pieces. Ranges are a table of int64 with a row per
 * range: address in memory (0: none), offset in the file, bytes, offset in the tensor, type in memory, type
 * in the file. The caller keeps the memory alive. The GIL is released while a file is read or written.
 */
#include "py/ckpt/py_ckpt.h"

#include <string.h>

#include "ckpt/crc32c.h"
#include "ckpt/header.h"
#include "ckpt/range_io.h"
#include "base/mem.h"

enum { COLUMNS = 6 };

/* --- digests --------------------------------------------------------------------------------- */

static PyObject *
ckpt_crc32c(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    PyObject *data = NULL;
    int64_t crc = 0;
    bool plain = false;
    const fsdpc_py_arg table[] = {
        {"data", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &data},
        {"crc", FSDPC_PY_INT, FSDPC_PY_OPTIONAL, &crc},
        {"plain", FSDPC_PY_BOOL, FSDPC_PY_KEYWORD, &plain},
    };
    Py_buffer view;
    if (fsdpc_py_args("ckpt_crc32c", table, 3, args, count, keywords) < 0 ||
        PyObject_GetBuffer(data, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return NULL;
    }
    uint32_t result = FSDPC_PY_UNLOCKED(
        (plain ? fsdpc_crc32c_plain : fsdpc_crc32c)((uint32_t)crc, view.buf, (size_t)view.len));
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(result);
}

static PyObject *
ckpt_digest(PyObject *Py_UNUSED(module), PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return NULL;
    }
    uint64_t sum;
    const uint32_t crc =
        FSDPC_PY_UNLOCKED(fsdpc_crc32c_and_sum(0, view.buf, (size_t)view.len, &sum));
    PyBuffer_Release(&view);
    return Py_BuildValue("(kK)", (unsigned long)crc, (unsigned long long)sum);
}

/* Opens a buffer of items of `itemsize` bytes. If `writable`, read-only buffers are refused. */
static int
open_items(PyObject *object, const char *what, Py_ssize_t itemsize, bool writable, Py_buffer *view)
{
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) < 0) {
        return -1;
    }
    if (view->itemsize != itemsize) {
        PyErr_Format(PyExc_ValueError, "%s must have items of %zd bytes, not %zd", what, itemsize,
                     view->itemsize);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

typedef struct combine_job {
    Py_buffer crcs, lengths, counts, digests;
    int opened;
} combine_job;

/* Returns true if the counts of the groups add up to the number of parts; else sets an exception. */
static bool
combine_fits(const combine_job *job)
{
    const int64_t *count = job->counts.buf;
    const int64_t parts = job->crcs.len / 4, groups = job->counts.len / 8;
    int64_t rest = parts;
    for (int64_t i = 0; i < groups && rest >= 0; i++) {
        rest = count[i] < 0 || count[i] > rest ? -1 : rest - count[i];
    }
    if (parts != job->lengths.len / 8 || groups != job->digests.len / 4 || rest != 0) {
        PyErr_SetString(PyExc_ValueError, "crcs, lengths, counts and digests do not fit together");
        return false;
    }
    return true;
}

static void
combine_run(const combine_job *job)
{
    const uint32_t *crc = job->crcs.buf;
    const int64_t *length = job->lengths.buf, *count = job->counts.buf;
    uint32_t *digest = job->digests.buf;
    for (Py_ssize_t group = 0; group < job->counts.len / 8; group++) {
        uint32_t whole = 0;
        for (int64_t i = 0; i < count[group]; i++, crc++, length++) {
            whole = whole == 0 ? *crc : fsdpc_crc32c_combine(whole, *crc, (uint64_t)*length);
        }
        digest[group] = whole;
    }
}

static PyObject *
ckpt_combine(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
             PyObject *keywords)
{
    PyObject *objects[4] = {NULL};
    const fsdpc_py_arg table[] = {
        {"crcs", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &objects[0]},
        {"lengths", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &objects[1]},
        {"counts", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &objects[2]},
        {"digests", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &objects[3]},
    };
    combine_job job;
    Py_buffer *views[] = {&job.crcs, &job.lengths, &job.counts, &job.digests};
    const Py_ssize_t sizes[] = {4, 8, 8, 4};
    if (fsdpc_py_args("ckpt_combine", table, 4, args, count, keywords) < 0) {
        return NULL;
    }
    for (job.opened = 0; job.opened < 4; job.opened++) {
        const int i = job.opened;
        if (open_items(objects[i], table[i].name, sizes[i], i == 3, views[i]) < 0) {
            break;
        }
    }
    const bool good = job.opened == 4 && combine_fits(&job);
    if (good) {
        combine_run(&job);
    }
    while (job.opened > 0) {
        PyBuffer_Release(views[--job.opened]);
    }
    return good ? Py_NewRef(Py_None) : NULL;
}

/* --- copies ---------------------------------------------------------------------------------- */

static PyObject *
ckpt_copy(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *moves = NULL;
    const fsdpc_py_arg table[] = {{"moves", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &moves}};
    Py_buffer view;
    if (fsdpc_py_args("ckpt_copy", table, 1, args, count, keywords) < 0 ||
        open_items(moves, "moves", 8, false, &view) < 0) {
        return NULL;
    }
    const int64_t *row = view.buf, *end = row + view.len / 8;
    bool good = (end - row) % 3 == 0;
    for (const int64_t *each = row; good && each < end; each += 3) {
        good = each[2] == 0 || (each[2] > 0 && each[0] != 0 && each[1] != 0);
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS;
        for (; row < end; row += 3) {
            if (row[2] > 0) {
                memcpy((void *)(uintptr_t)row[1], (const void *)(uintptr_t)row[0], (size_t)row[2]);
            }
        }
        Py_END_ALLOW_THREADS;
    } else {
        PyErr_SetString(
            PyExc_ValueError,
            "moves must be rows of 3: address, target and bytes, with bytes >= 0 and no "
            "address 0 unless bytes is 0");
    }
    PyBuffer_Release(&view);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* --- headers --------------------------------------------------------------------------------- */

static PyObject *
text_of(fsdpc_header_text text)
{
    return PyUnicode_DecodeUTF8(text.text, (Py_ssize_t)text.bytes, "strict");
}

static PyObject *
dimension(const void *dims, Py_ssize_t d)
{
    return PyLong_FromLongLong(((const int64_t *)dims)[d]);
}

static PyObject *
tensor_row(const void *context, Py_ssize_t number)
{
    const fsdpc_header *header = context;
    const fsdpc_header_tensor *tensor = &header->tensors[number];
    PyObject *shape = fsdpc_py_list(tensor->ndim, dimension, header->dims + tensor->first_dim);
    if (shape != NULL) {
        Py_SETREF(shape, PyList_AsTuple(shape));
    }
    return Py_BuildValue("(NsNLL)", text_of(tensor->name), tensor->dtype, shape,
                         (long long)tensor->begin, (long long)tensor->end);
}

static PyObject *
metadata_dict(const fsdpc_header *header)
{
    PyObject *result = PyDict_New();
    for (size_t i = 0; result != NULL && i < header->metadata_count; i++) {
        PyObject *key = text_of(header->metadata[2 * i]);
        PyObject *value = text_of(header->metadata[2 * i + 1]);
        if (key == NULL || value == NULL || PyDict_SetItem(result, key, value) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return result;
}

static PyObject *
ckpt_header(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    PyObject *json = NULL;
    int64_t data_bytes = 0;
    const fsdpc_py_arg table[] = {
        {"json", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &json},
        {"data_bytes", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &data_bytes},
    };
    Py_buffer view;
    if (fsdpc_py_args("ckpt_header", table, 2, args, count, keywords) < 0 ||
        PyObject_GetBuffer(json, &view, PyBUF_C_CONTIGUOUS) < 0) {
        return NULL;
    }
    fsdpc_header header;
    int status =
        FSDPC_PY_UNLOCKED(fsdpc_header_parse(view.buf, (size_t)view.len, data_bytes, &header));
    PyBuffer_Release(&view);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    PyObject *result =
        Py_BuildValue("(NN)", fsdpc_py_list((Py_ssize_t)header.tensor_count, tensor_row, &header),
                      metadata_dict(&header));
    fsdpc_header_clear(&header);
    return result;
}

/* --- ranges ---------------------------------------------------------------------------------- */

typedef struct range_job {
    const char *path;
    fsdpc_write_options options;
    fsdpc_file_range *ranges;
    size_t count;
    Py_buffer digests;
    int32_t fd; /* descriptor of a file that is read */
} range_job;

/* Returns an invalid type for a number that names no type. A cast would truncate numbers above 32 bits. */
static fsdpc_dtype
type_of(int64_t number)
{
    return (fsdpc_dtype)(number < 0 || number > INT8_MAX ? INT8_MAX : number);
}

static int
read_ranges(PyObject *table, range_job *job)
{
    Py_buffer view;
    if (open_items(table, "ranges", 8, false, &view) < 0) {
        return -1;
    }
    const int64_t *row = view.buf;
    job->count = (size_t)view.len / (COLUMNS * sizeof *row);
    job->ranges = fsdpc_mem_calloc(job->count, sizeof *job->ranges);
    if (job->ranges == NULL) {
        PyErr_NoMemory();
    } else if (view.len % (Py_ssize_t)(COLUMNS * sizeof *row) != 0) {
        PyErr_Format(PyExc_ValueError, "ranges must have %d columns", COLUMNS);
        fsdpc_mem_free(job->ranges);
        job->ranges = NULL;
    }
    for (size_t i = 0; job->ranges != NULL && i < job->count; i++, row += COLUMNS) {
        job->ranges[i] = (fsdpc_file_range){
            .memory = (void *)(uintptr_t)row[0],
            .file_offset = row[1],
            .bytes = row[2],
            .tensor_offset = row[3],
            .memory_type = type_of(row[4]),
            .file_type = type_of(row[5]),
        };
    }
    PyBuffer_Release(&view);
    return job->ranges == NULL ? -1 : 0;
}

/* Opens the buffer for digests, and checks that it has exactly one item per digest. */
static int
open_digests(PyObject *digests, range_job *job)
{
    const int64_t parts = fsdpc_range_digests(job->ranges, job->count, job->options.block_bytes);
    if (open_items(digests, "digests", 4, true, &job->digests) < 0) {
        return -1;
    }
    if (parts < 0 || job->digests.len / 4 != parts) {
        PyErr_Format(PyExc_ValueError,
                     parts < 0 ? "ranges of %s are not valid"
                               : "ranges of %s have another number of digests",
                     job->path);
        PyBuffer_Release(&job->digests);
        return -1;
    }
    return 0;
}

static int
open_job(const char *function, bool write, PyObject *const *args, Py_ssize_t count,
         PyObject *keywords, range_job *job)
{
    PyObject *ranges = NULL, *digests = NULL;
    const fsdpc_py_arg common[] = {
        {"path", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &job->path},
        {"ranges", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &ranges},
        {"block_bytes", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &job->options.block_bytes},
        {"digests", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &digests},
    };
    const fsdpc_py_arg of_write[] = {
        common[0],
        common[1],
        common[2],
        common[3],
        {"direct", FSDPC_PY_BOOL, FSDPC_PY_KEYWORD, &job->options.direct},
        {"skip_edges", FSDPC_PY_BOOL, FSDPC_PY_KEYWORD, &job->options.skip_edges},
        {"no_sync", FSDPC_PY_BOOL, FSDPC_PY_KEYWORD, &job->options.no_sync},
    };
    const fsdpc_py_arg of_read[] = {
        common[0],
        common[1],
        common[2],
        common[3],
        {"fd", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &job->fd},
    };
    if (fsdpc_py_args(function, write ? of_write : of_read, write ? 7 : 5, args, count, keywords) <
            0 ||
        read_ranges(ranges, job) < 0) {
        return -1;
    }
    if (open_digests(digests, job) < 0) {
        fsdpc_mem_free(job->ranges);
        return -1;
    }
    return 0;
}

static void
close_job(range_job *job)
{
    PyBuffer_Release(&job->digests);
    fsdpc_mem_free(job->ranges);
}

static PyObject *
ckpt_write(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    range_job job = {.options.direct = true};
    fsdpc_write_result result = {0};
    if (open_job("ckpt_write", true, args, count, keywords, &job) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(
        fsdpc_range_write(job.path, job.ranges, job.count, &job.options, job.digests.buf, &result));
    close_job(&job);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return Py_BuildValue("(LL)", (long long)result.direct_bytes, (long long)result.cached_bytes);
}

static PyObject *
ckpt_read(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    range_job job = {0};
    if (open_job("ckpt_read", false, args, count, keywords, &job) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_range_read(job.fd, job.path, job.ranges, job.count,
                                                    job.options.block_bytes, job.digests.buf));
    close_job(&job);
    return fsdpc_py_none_or(status);
}

static PyObject *
ckpt_rename(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    const char *from = NULL, *to = NULL;
    bool exchange = false;
    const fsdpc_py_arg table[] = {
        {"source", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &from},
        {"target", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &to},
        {"exchange", FSDPC_PY_BOOL, FSDPC_PY_KEYWORD, &exchange},
    };
    if (fsdpc_py_args("ckpt_rename", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    const int status = fsdpc_file_rename(from, to, exchange);
    return fsdpc_py_none_or(status);
}

PyMethodDef fsdpc_py_ckpt_methods[] = {
    FSDPC_PY_FUNCTION(ckpt_crc32c, FSDPC_PY_KEYWORDS, "($module, /, data, crc=0, *, plain=False)",
                      "CRC-32C of what `crc` covers followed by a buffer; `plain`: without the\n"
                      "processor's instruction."),
    FSDPC_PY_FUNCTION(ckpt_combine, FSDPC_PY_KEYWORDS,
                      "($module, /, crcs, lengths, counts, digests)",
                      "CRC-32C of groups of parts, one behind the other, from theirs (uint32) and\n"
                      "their lengths in bytes (int64); `counts` (int64): parts of each group.\n"
                      "Fills `digests` (uint32), one a group; 0 for no parts. ValueError."),
    FSDPC_PY_FUNCTION(ckpt_copy, FSDPC_PY_KEYWORDS, "($module, /, moves)",
                      "Copies memory: rows of int64, each the address of the bytes, where they go\n"
                      "and how many they are. The caller keeps both alive. ValueError."),
    FSDPC_PY_FUNCTION(
        ckpt_digest, METH_O, "($module, data, /)",
        "(CRC-32C of a buffer, sum of its whole words of 8 bytes modulo 2**64), from\n"
        "one reading of memory."),
    FSDPC_PY_FUNCTION(
        ckpt_rename, FSDPC_PY_KEYWORDS, "($module, /, source, target, *, exchange=False)",
        "Renames as a whole onto a free name, or swaps two names. FileExistsError: the name is\n"
        "taken; NotImplementedError: this file system cannot swap; OSError."),
    FSDPC_PY_FUNCTION(
        ckpt_header, FSDPC_PY_KEYWORDS, "($module, /, json, data_bytes)",
        "A safetensors header, without its length field, of a file with so many bytes behind it:\n"
        "([(name, dtype, shape, begin, end)], metadata). ValueError names what is wrong."),
    FSDPC_PY_FUNCTION(ckpt_write, FSDPC_PY_KEYWORDS,
                      "($module, /, path, ranges, block_bytes, digests, *, direct=True, "
                      "skip_edges=False, no_sync=False)",
                      "Writes sorted ranges of memory into a file that exists, makes them durable\n"
                      "and fills `digests` (uint32). Returns the bytes written past the page\n"
                      "cache and through it. OSError, ValueError."),
    FSDPC_PY_FUNCTION(ckpt_read, FSDPC_PY_KEYWORDS,
                      "($module, /, path, ranges, block_bytes, digests, fd)",
                      "Reads ranges of the open file `fd`, which errors call `path`, into memory\n"
                      "and fills `digests` (uint32). OSError, ValueError."),
    {NULL, NULL, 0, NULL},
};
