/* fsdpc._C.FlatParameter: one unit as a Python object.
 *
 * Memory is exported without copies and without torch, as DLPack capsules and NumPy arrays over the unit's
 * buffers. If a flat parameter has a tree, the tree's hooks drive it; fsdpc._probe can gather, release and
 * reduce a flat parameter without a tree.
 *
 * This file defines the type, and makes and frees its objects; the methods are in unit/py_flat_*.c and in
 * this folder. */
#define PY_SSIZE_T_CLEAN
#include "py/step/py_step.h"

#include <string.h>

#include "base/mem.h"
#include "py/comm/py_comm.h"
#include "py/unit/py_layout.h"

/* --- life ------------------------------------------------------------------------------------ */

static int
make_unit(fsdpc_py_flat *self, fsdpc_unit_options options, PyObject *params)
{
    fsdpc_py_specs specs = {0};
    int result = -1;
    if (fsdpc_py_comm_get(self->shard_comm, &options.shard) < 0 ||
        (self->replicate_comm && fsdpc_py_comm_get(self->replicate_comm, &options.replicate) < 0) ||
        fsdpc_py_specs_parse(params, &specs) < 0 ||
        fsdpc_py_enter_device(fsdpc_comm_device(options.shard)) < 0) {
        goto done;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_unit_new(&options, specs.specs, specs.count, &self->unit));
    if (fsdpc_py_checked(status) < 0) {
        goto done;
    }
    self->full = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->full);
    self->full_data = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->full_data);
    self->arrived = fsdpc_mem_calloc((size_t)specs.count, 1);
    self->hooked = fsdpc_mem_calloc((size_t)specs.count, 1);
    self->grads = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->grads);
    self->views = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->views);
    self->held = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->held);
    if (!self->full || !self->full_data || !self->arrived || !self->hooked || !self->grads ||
        !self->views || !self->held) {
        PyErr_NoMemory();
        goto done;
    }
    result = 0;
done:
    fsdpc_py_specs_release(&specs);
    return result;
}

/* The `late` of the gate: unbinds the unit when the use during which flat_unbind was called has ended. */
static void
unbind_late(PyObject *self)
{
    fsdpc_py_flat_unbind((fsdpc_py_flat *)self);
}

static PyObject *
flat_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"name",    "comm",    "params",  "replicate", "divide",
                            "reshard", "offload", "foreign", NULL};
    const char *name;
    PyObject *comm, *params, *replicate = Py_None;
    double divide = 1.0;
    int reshard = 1, offload = 0, foreign = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sOO|Odppp:FlatParameter", names, &name, &comm,
                                     &params, &replicate, &divide, &reshard, &offload, &foreign)) {
        return NULL;
    }
    fsdpc_py_flat *self = (fsdpc_py_flat *)type->tp_alloc(type, 0);
    if (!self) {
        return NULL;
    }
    PyObject_GC_UnTrack(self); /* hidden from gc until the object is complete */
    self->id = -1;
    self->gate.late = unbind_late;
    self->shard_comm = Py_NewRef(comm);
    self->replicate_comm = replicate == Py_None ? NULL : Py_NewRef(replicate);
    self->foreign = foreign != 0;
    const fsdpc_unit_options options = {.name = name,
                                        .divide = divide,
                                        .reshard = reshard != 0,
                                        .offload = offload != 0,
                                        .foreign = foreign != 0};
    if (make_unit(self, options, params) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int
flat_traverse(fsdpc_py_flat *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->shard_comm);
    Py_VISIT(self->replicate_comm);
    Py_VISIT((PyObject *)self->tree);
    Py_VISIT(self->on_unattached);
    Py_VISIT(self->after_backward);
    Py_VISIT(self->comm_hook);
    Py_VISIT(self->on_changed);
    Py_VISIT(self->on_kept);
    Py_VISIT(self->on_moved);
    Py_VISIT(self->on_values);
    Py_VISIT(self->versions);
    Py_VISIT(self->versions_thrice);
    Py_VISIT((PyObject *)self->call);
    int count = self->unit ? fsdpc_unit_layout(self->unit)->param_count : 0;
    for (int i = 0; self->full && i < count; i++) {
        Py_VISIT(self->full[i]);
    }
    for (int i = 0; i < self->site_count; i++) {
        Py_VISIT(self->sites[i].dict);
        Py_VISIT(self->sites[i].full);
        Py_VISIT(self->sites[i].sharded);
        Py_VISIT(self->sites[i].placeholder);
    }
    for (int i = 0; i < self->sharded_count; i++) {
        Py_VISIT(self->sharded[i].param);
        Py_VISIT(self->sharded[i].grad);
        Py_VISIT(self->sharded[i].shown);
        Py_VISIT(self->sharded[i].alias);
        Py_VISIT(self->sharded[i].dict);
    }
    return 0;
}

static int
flat_clear(fsdpc_py_flat *self)
{
    fsdpc_py_flat_unbind(self);
    Py_CLEAR(self->on_unattached);
    Py_CLEAR(self->after_backward);
    Py_CLEAR(self->comm_hook);
    Py_CLEAR(self->on_changed);
    Py_CLEAR(self->on_kept);
    Py_CLEAR(self->on_moved);
    Py_CLEAR(self->on_values);
    Py_CLEAR(self->call);
    Py_CLEAR(self->tree);
    return 0;
}

static void
flat_dealloc(fsdpc_py_flat *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    flat_clear(self);
    fsdpc_mem_free(self->full);
    fsdpc_mem_free(self->full_data);
    fsdpc_mem_free(self->arrived);
    fsdpc_mem_free(self->hooked);
    fsdpc_mem_free(self->grads);
    fsdpc_mem_free(self->views);
    fsdpc_mem_free(self->held);
    if (self->unit) {
        fsdpc_py_enter_quietly(fsdpc_unit_device(self->unit));
    }
    /* Freeing waits for the GPU without the GIL: see free_core in py_tree.c. No thread can find the unit. */
    Py_BEGIN_ALLOW_THREADS
    fsdpc_unit_free(self->unit);
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->shard_comm);
    Py_XDECREF(self->replicate_comm);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- the type -------------------------------------------------------------------------------- */

static PyObject *
flat_unbind(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_flat_in_use(self)) {
        self->unbinds = true;
        if (self->tree) {
            self->tree->late_work = true;
        }
    } else {
        fsdpc_py_flat_unbind(self);
    }
    Py_RETURN_NONE;
}

static PyObject *
flat_layout(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    return fsdpc_py_layout_dict(fsdpc_unit_layout(self->unit), true);
}

static PyObject *
fsdpc_py_flat_forward_failed(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_forward_failed(self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static int
check_param(const fsdpc_py_flat *self, int param)
{
    int count = fsdpc_unit_layout(self->unit)->param_count;
    if (param >= 0 && param < count) {
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "unit %s has %d parameters; index %d is out of range",
                 fsdpc_unit_name(self->unit), count, param);
    return -1;
}

static PyObject *
hook_of(fsdpc_py_flat *self, PyObject *args)
{
    const char *kind;
    int param = -1;
    static const char *const names[] = {"pre_forward", "post_forward", "pre_backward", "input_done",
                                        "grad"};
    if (!PyArg_ParseTuple(args, "s|i:hook", &kind, &param)) {
        return NULL;
    }
    for (int k = 0; k < 5; k++) {
        if (strcmp(kind, names[k]) == 0) {
            if (k == FSDPC_HOOK_GRAD && check_param(self, param) < 0) {
                return NULL;
            }
            return fsdpc_py_hook_new((enum fsdpc_py_hook_kind)k, (PyObject *)self, param);
        }
    }
    PyErr_Format(PyExc_ValueError, "hook: unknown kind '%s'", kind);
    return NULL;
}

/* Methods that call the core must enter the unit's gate. For each line, GATED defines the wrapper
 * gated_<name>, which calls fsdpc_py_flat_<name> inside the gate, and ROW defines the method's row of the
 * table. X(kind of parameters, name, flags, arguments in help(), docstring). */
/* clang-format off */
#define GATED_METHODS(X) \
    X(FAST, write, FSDPC_PY_KEYWORDS, "(param, tensor, grad=False)", \
      "Copies this rank's part from a full tensor. Local.") \
    X(FAST, read, FSDPC_PY_KEYWORDS, "(tensors, grad=False)", \
      "Fills full tensors (None: skipped) from all ranks' parts. Collective.") \
    X(ONE, read_blocks, METH_VARARGS, "(blocks, tensors)", \
      "Fills this rank's block of each parameter: elements [rank * blocks[i], (rank + 1) * " \
      "blocks[i]), cut at the end; 0 and None: skipped. Collective.") \
    X(ONE, write_blocks, METH_VARARGS, "(blocks, tensors)", \
      "Replaces values by all ranks' blocks. Collective.") \
    X(ONE, grad_norm, METH_VARARGS, "(mask, p)", \
      "(sum |g|^p, max |g|, non-finite seen) over this rank's part.") \
    X(ONE, scale_grads, METH_VARARGS, "(mask, factor)", \
      "Multiplies this rank's gradients in place.") \
    X(ONE, replace_param, METH_VARARGS, "(number, param)", \
      "Replaces the parameter in row `number` of bind()'s `sharded`, over the same memory.") \
    X(ONE, replace_full, METH_VARARGS, "(number, tensor)", \
      "Of a foreign unit: the gathered tensor of a parameter from now on.") \
    X(ONE, place_param, METH_VARARGS, "(number, dict, key)", \
      "The module entry where the parameter in that row has to stand when a forward begins.") \
    X(ONE, replace_grad, METH_VARARGS, "(number, grad)", \
      "Replaces the gradient in row `number` of bind()'s `sharded` by another tensor over the " \
      "same memory.") \
    X(ONE, grad_bits, METH_NOARGS, "()", \
      "One byte per parameter: this rank has a gradient of it to send.") \
    X(ONE, pack_grads, METH_O, "(buffer)", \
      "Writes this rank's gradients into a buffer of layout()['reduce_bytes'] bytes, each " \
      "segment in rank order, gaps and missing gradients as zeros.") \
    X(ONE, take_sums, METH_VARARGS, "(pieces, used)", \
      "Adds this rank's pieces (one per trainable segment) of sums made elsewhere to the " \
      "gradient; `used`: bytes as of grad_bits() over all ranks.") \
    X(ONE, thaw, METH_VARARGS, "(segments)", \
      "Allocates gradients of more segments (one byte each). All gradients move, so " \
      "renew_grads() must follow. Only without a tree; the same call on every rank.") \
    X(ONE, adopt_grads, METH_NOARGS, "()", \
      "Copies gradients that the user assigned to .grad into the unit's memory.") \
    X(ONE, enter_forward, METH_NOARGS, "()", \
      "One more reference to the gathered values, within a pass.") \
    X(ONE, leave_forward, METH_NOARGS, "()", \
      "Undoes one enter_forward().") \
    X(ONE, unshard, METH_NOARGS, "()", \
      "Shows the gathered parameters in the modules until reshard() or the next pass. " \
      "Collective outside of a pass.") \
    X(ONE, reshard, METH_NOARGS, "()", \
      "Undoes unshard(); without one a no-op.") \
    X(ONE, forward_failed, METH_NOARGS, "()", \
      "Must be called when the module's forward raised.")
/* clang-format on */

#define GATED(kind, name, ...)                                \
    static PyObject *gated_##name kind##_PARAMETERS           \
    {                                                         \
        fsdpc_py_use use;                                     \
        if (fsdpc_py_use_flat(self, &use) < 0) {              \
            return NULL;                                      \
        }                                                     \
        PyObject *result = fsdpc_py_flat_##name kind##_GIVEN; \
        fsdpc_py_end_use(&use);                               \
        return result;                                        \
    }
#define ONE_PARAMETERS (fsdpc_py_flat * self, PyObject * one)
#define ONE_GIVEN (self, one)
#define FAST_PARAMETERS \
    (fsdpc_py_flat * self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
#define FAST_GIVEN (self, args, count, keywords)
#define ROW(kind, name, flags, arguments, doc) \
    FSDPC_PY_METHOD(name, gated_##name, flags, arguments, doc),

GATED_METHODS(GATED)

static PyMethodDef methods[] = {
    /* clang-format off */
    GATED_METHODS(ROW)
    /* clang-format on */
    FSDPC_PY_METHOD(layout, flat_layout, METH_NOARGS, "()", "The placement of all parameters."),
    FSDPC_PY_METHOD(shard_part, fsdpc_py_flat_shard_part, METH_O, "(i)",
                    "DLPack capsule: this rank's part of parameter i (1-D, storage dtype)."),
    FSDPC_PY_METHOD(grad_part, fsdpc_py_flat_grad_part, METH_O, "(i)",
                    "DLPack capsule: gradient of this rank's part of parameter i (1-D)."),
    FSDPC_PY_METHOD(shard_segment, fsdpc_py_flat_shard_segment, METH_O, "(s)",
                    "DLPack capsule: this rank's piece of segment s."),
    FSDPC_PY_METHOD(grad_segment, fsdpc_py_flat_grad_segment, METH_O, "(s)",
                    "DLPack capsule: gradient of this rank's piece of segment s."),
    FSDPC_PY_METHOD(full_param, fsdpc_py_flat_full_param, METH_FASTCALL, "(i, shape)",
                    "DLPack capsule over the gathered parameter i: valid while the unit is "
                    "gathered, at an address that never changes; on a GPU, "
                    "from the time that the unit has a tree."),
    FSDPC_PY_METHOD(note_full, fsdpc_py_flat_note_full, METH_NOARGS, "()",
                    "Takes note of where the gathered parameters of bind() lie now."),
    FSDPC_PY_METHOD(unbind, flat_unbind, METH_NOARGS, "()",
                    "Drops the torch objects. torch's hooks on these objects keep the unit alive "
                    "in cycles that gc cannot see."),
    FSDPC_PY_METHOD(renew_grads, fsdpc_py_flat_renew_grads, METH_O, "(grads)",
                    "Sets the tensors over the gradients after thaw(), None where a parameter has "
                    "no gradient memory."),
    FSDPC_PY_METHOD(
        bind, fsdpc_py_flat_bind, FSDPC_PY_KEYWORDS,
        "(full, sites, sharded, watched, versions=None, by_gather=False, dtensors=False, "
        "row_dims=None)",
        "Sets the torch objects of this unit. versions: a tensor that shares the version counter "
        "of `full`; by_gather: sites show `full` while the unit is gathered. row_dims: bytes, the "
        "dimension of each of `full` that lies first in the unit's memory."),
    FSDPC_PY_METHOD(hook, hook_of, METH_VARARGS, "(kind, param=-1)", "A C callable for torch."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, flat_new},
    {Py_tp_dealloc, flat_dealloc},
    {Py_tp_traverse, flat_traverse},
    {Py_tp_clear, flat_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, fsdpc_py_flat_getset},
    {Py_tp_doc,
     "FlatParameter(name, comm, params, replicate=None, divide=1.0, reshard=True, "
     "offload=False, foreign=False)\n--\n\n"
     "The parameters of one unit laid end to end and cut into equal pieces, one per rank of comm.\n"
     "params: (name, numel, storage, compute, reduce, trainable[, row_numel[, codec[, "
     "reduce_codec[, feedback]]]])\n"
     "each; with row_numel > 0 the parameter is cut between rows, as by torch.chunk. offload: "
     "shard and "
     "gradient\n"
     "lie in host memory (where comm's device has other). foreign: on_values makes the gathered\n"
     "tensors. Collective over comm."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpc._C.FlatParameter",
    .basicsize = sizeof(fsdpc_py_flat),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
fsdpc_py_flat_exec(PyObject *module)
{
    return fsdpc_py_add_type(module, &spec, &fsdpc_py_state(module)->unit_type);
}
