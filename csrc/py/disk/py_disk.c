/* A Python capsule that owns a file of optimizer states and the Python buffers of the file's transfers. */
#include "py/disk/py_disk.h"

#include <string.h>

#include "base/mem.h"
#include "disk/disk.h"

static const char capsule_name[] = "fsdpc._C.disk";

struct holder {
    fsdpc_disk *disk;
    Py_buffer views[FSDPC_DISK_MAX_BUFFERS];
    int count;
};

static void
release(struct holder *holder)
{
    for (int i = 0; i < holder->count; i++) {
        PyBuffer_Release(&holder->views[i]);
    }
    fsdpc_mem_free(holder);
}

/* Closes the file. If a transfer may still use the buffers, they are not released but leak. */
static void
capsule_end(PyObject *capsule)
{
    struct holder *holder = PyCapsule_GetPointer(capsule, capsule_name);
    bool ended = FSDPC_PY_UNLOCKED(fsdpc_disk_close(holder->disk));
    if (ended) {
        release(holder);
    }
}

static struct holder *
holder_of(PyObject *object)
{
    return PyCapsule_GetPointer(object, capsule_name);
}

/* Parses arguments by a table whose first row is the disk. Returns the holder, or NULL with an exception. */
static struct holder *
parse(const char *function, const fsdpc_py_arg *table, int rows, PyObject *const *args,
      Py_ssize_t count, PyObject *keywords)
{
    PyObject **disk = table[0].out;
    return fsdpc_py_args(function, table, rows, args, count, keywords) < 0 ? NULL
                                                                           : holder_of(*disk);
}

/* --- opening ----------------------------------------------------------------------------------- */

static int
take_buffers(PyObject *sequence, struct holder *holder)
{
    const Py_ssize_t count = PySequence_Size(sequence);
    if (count < 1 || count > FSDPC_DISK_MAX_BUFFERS) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "1 to %d buffers are needed", FSDPC_DISK_MAX_BUFFERS);
        }
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        const int failed =
            item == NULL ||
            PyObject_GetBuffer(item, &holder->views[i], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0;
        Py_XDECREF(item);
        if (failed) {
            return -1;
        }
        holder->count++;
        if (holder->views[i].len != holder->views[0].len) {
            PyErr_SetString(PyExc_ValueError, "buffers of equal length are needed");
            return -1;
        }
    }
    return 0;
}

static int
parse_io(const char *text, fsdpc_disk_io *out)
{
    static const char *const names[] = {"auto", "io_uring", "threads"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (fsdpc_disk_io)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "io '%.40s': choose from auto, io_uring, threads", text);
    return -1;
}

static PyObject *
open_holder(struct holder *holder, fsdpc_disk_options *options)
{
    void *memory[FSDPC_DISK_MAX_BUFFERS];
    for (int i = 0; i < holder->count; i++) {
        memory[i] = holder->views[i].buf;
    }
    options->buffers = memory;
    options->buffer_count = holder->count;
    options->buffer_bytes = holder->views[0].len;
    const int status = fsdpc_disk_open(options, &holder->disk);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    PyObject *capsule = PyCapsule_New(holder, capsule_name, capsule_end);
    if (capsule == NULL) {
        fsdpc_disk_close(holder->disk);
    }
    return capsule;
}

static PyObject *
disk_open(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    fsdpc_disk_options options = {.direct = true};
    PyObject *buffers;
    const char *io = "auto";
    int32_t rank;
    const fsdpc_py_arg table[] = {
        {"folder", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &options.folder},
        {"rank", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &rank},
        {"buffers", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &buffers},
        {"io", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &io},
        {"direct", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &options.direct},
    };
    if (fsdpc_py_args("disk_open", table, 5, args, count, keywords) < 0 ||
        parse_io(io, &options.io) < 0) {
        return NULL;
    }
    struct holder *holder = fsdpc_mem_calloc(1, sizeof *holder);
    if (holder == NULL) {
        return PyErr_NoMemory();
    }
    options.rank = rank;
    PyObject *capsule = take_buffers(buffers, holder) < 0 ? NULL : open_holder(holder, &options);
    if (capsule == NULL) {
        release(holder);
    }
    return capsule;
}

/* --- using ------------------------------------------------------------------------------------- */

static PyObject *
disk_grow(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *object;
    int64_t bytes;
    const fsdpc_py_arg table[] = {
        {"disk", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
        {"bytes", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &bytes},
    };
    struct holder *holder = parse("disk_grow", table, 2, args, count, keywords);
    if (holder == NULL) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_disk_grow(holder->disk, bytes));
    return fsdpc_py_none_or(status);
}

static int
read_parts(PyObject *tuple, fsdpc_disk_part *parts)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        long long offset, bytes, place;
        PyObject *row = PyTuple_GET_ITEM(tuple, i);
        if (!PyTuple_Check(row)) {
            PyErr_SetString(PyExc_TypeError, "a part is a tuple (offset, bytes, place)");
            return -1;
        }
        if (!PyArg_ParseTuple(row, "LLL", &offset, &bytes, &place)) {
            return -1;
        }
        parts[i] = (fsdpc_disk_part){offset, bytes, place};
    }
    return 0;
}

static PyObject *
disk_start(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *object, *rows, *result = NULL;
    bool write;
    int32_t buffer;
    const fsdpc_py_arg table[] = {
        {"disk", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
        {"write", FSDPC_PY_BOOL, FSDPC_PY_REQUIRED, &write},
        {"buffer", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &buffer},
        {"parts", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &rows},
    };
    struct holder *holder = parse("disk_start", table, 4, args, count, keywords);
    PyObject *tuple = holder ? PySequence_Tuple(rows) : NULL;
    if (tuple == NULL) {
        return NULL;
    }
    const int parts_count = (int)PyTuple_GET_SIZE(tuple);
    fsdpc_disk_part *parts = fsdpc_mem_calloc((size_t)parts_count + 1, sizeof *parts);
    if (parts == NULL) {
        PyErr_NoMemory();
    } else if (read_parts(tuple, parts) == 0) {
        int status =
            FSDPC_PY_UNLOCKED(fsdpc_disk_start(holder->disk, write, buffer, parts, parts_count));
        result = fsdpc_py_none_or(status);
    }
    fsdpc_mem_free(parts);
    Py_DECREF(tuple);
    return result;
}

static PyObject *
disk_wait(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *object;
    int32_t buffer;
    const fsdpc_py_arg table[] = {
        {"disk", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
        {"buffer", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &buffer},
    };
    struct holder *holder = parse("disk_wait", table, 2, args, count, keywords);
    if (holder == NULL) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_disk_wait(holder->disk, buffer));
    return fsdpc_py_none_or(status);
}

static PyObject *
disk_info(PyObject *Py_UNUSED(module), PyObject *object)
{
    fsdpc_disk_info info;
    struct holder *holder = holder_of(object);
    if (holder == NULL) {
        return NULL;
    }
    fsdpc_disk_describe(holder->disk, &info);
    return Py_BuildValue("{s:i,s:s,s:O,s:O,s:L,s:L,s:L}", "fd", info.fd, "io", info.io, "direct",
                         info.direct ? Py_True : Py_False, "in_memory",
                         info.in_memory ? Py_True : Py_False, "bytes", (long long)info.bytes,
                         "read_bytes", (long long)info.read_bytes, "written_bytes",
                         (long long)info.written_bytes);
}

PyMethodDef fsdpc_py_disk_methods[] = {
    FSDPC_PY_FUNCTION(
        disk_open, FSDPC_PY_KEYWORDS, "(folder, rank, buffers, io='auto', direct=True)",
        "A file without a name in a folder, whose parts move to and from buffers of whole pages."),
    FSDPC_PY_FUNCTION(
        disk_grow, FSDPC_PY_KEYWORDS, "(disk, bytes)",
        "Make the file `bytes` long and reserve space for all of it. OSError: too little space."),
    FSDPC_PY_FUNCTION(
        disk_start, FSDPC_PY_KEYWORDS, "(disk, write, buffer, parts)",
        "Start to move parts, (offset in the file, bytes, place in the buffer), in whole pages."),
    FSDPC_PY_FUNCTION(disk_wait, FSDPC_PY_KEYWORDS, "(disk, buffer)",
                      "Wait until the buffer's parts have moved. OSError: one has not."),
    FSDPC_PY_FUNCTION(
        disk_info, METH_O, "(disk)",
        "fd, io, direct, in_memory, bytes of the file, read_bytes and written_bytes so far."),
    {NULL, NULL, 0, NULL},
};
