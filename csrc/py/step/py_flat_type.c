/* fsdpc._C.FlatParameter: one unit as a Python object.
 *
 * Memory is exported as DLPack capsules and NumPy arrays over the unit's buffers, without copies
 * and without torch. A flat parameter without a tree can gather(), release() and reduce(); the
 * hooks of its tree drive one that has a tree.
 *
 * This file has the type and its life; the methods are in unit/py_flat_*.c and in files of this folder.
 */
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

/* At the gate: see flat_unbind. */
static void
unbind_late(PyObject *self)
{
    fsdpc_py_flat_unbind((fsdpc_py_flat *)self);
}

static PyObject *
flat_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"name",   "comm",    "params",  "replicate",
                            "divide", "reshard", "offload", NULL};
    const char *name;
    PyObject *comm, *params, *replicate = Py_None;
    double divide = 1.0;
    int reshard = 1, offload = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sOO|Odpp:FlatParameter", names, &name, &comm,
                                     &params, &replicate, &divide, &reshard, &offload)) {
        return NULL;
    }
    fsdpc_py_flat *self = (fsdpc_py_flat *)type->tp_alloc(type, 0);
    if (!self) {
        return NULL;
    }
    PyObject_GC_UnTrack(self); /* not visible to gc before it is complete */
    self->id = -1;
    self->gate.late = unbind_late;
    self->shard_comm = Py_NewRef(comm);
    self->replicate_comm = replicate == Py_None ? NULL : Py_NewRef(replicate);
    const fsdpc_unit_options options = {
        .name = name, .divide = divide, .reshard = reshard != 0, .offload = offload != 0};
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
        Py_VISIT(self->sites[i].stand_in);
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
    /* Freeing waits for the GPU: see free_core in py_tree.c. No thread can find the unit here. */
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

/* Methods that call the core pass the unit's gate: guarded_name(self, ...) calls
 * fsdpc_py_flat_name. */
#define GUARDED(name, parameters, given)               \
    static PyObject *guarded_##name parameters         \
    {                                                  \
        fsdpc_py_use use;                              \
        if (fsdpc_py_use_flat(self, &use) < 0) {       \
            return NULL;                               \
        }                                              \
        PyObject *result = fsdpc_py_flat_##name given; \
        fsdpc_py_end_use(&use);                        \
        return result;                                 \
    }
#define GUARDED_ONE(name) GUARDED(name, (fsdpc_py_flat * self, PyObject * one), (self, one))
#define GUARDED_FAST(name)                                                                       \
    GUARDED(name,                                                                                \
            (fsdpc_py_flat * self, PyObject *const *args, Py_ssize_t count, PyObject *keywords), \
            (self, args, count, keywords))

/* clang-format off */
GUARDED_FAST(write)
GUARDED_FAST(read)
GUARDED_ONE(read_blocks)
GUARDED_ONE(write_blocks)
GUARDED_ONE(grad_norm)
GUARDED_ONE(scale_grads)
GUARDED_ONE(replace)
GUARDED_ONE(thaw)
GUARDED_ONE(place)
GUARDED_ONE(replace_grad)
GUARDED_ONE(grad_bits)
GUARDED_ONE(pack_grads)
GUARDED_ONE(take_sums)
GUARDED_ONE(adopt)
GUARDED_ONE(enter)
GUARDED_ONE(leave)
GUARDED_ONE(unshard)
GUARDED_ONE(reshard)
GUARDED_ONE(forward_failed)
/* clang-format on */

#define FAST(function) (PyCFunction)(void (*)(void)) function

static PyMethodDef methods[] = {
    {"layout", FAST(flat_layout), METH_NOARGS, "layout()\n--\n\nThe placement of all parameters."},
    {"shard_part", FAST(fsdpc_py_flat_shard_part), METH_O,
     "shard_part(i)\n--\n\nDLPack capsule: this rank's part of parameter i (1-D, storage dtype)."},
    {"grad_part", FAST(fsdpc_py_flat_grad_part), METH_O,
     "grad_part(i)\n--\n\nDLPack capsule: gradient of this rank's part of parameter i (1-D)."},
    {"shard_segment", FAST(fsdpc_py_flat_shard_segment), METH_O,
     "shard_segment(s)\n--\n\nDLPack capsule: this rank's piece of segment s."},
    {"grad_segment", FAST(fsdpc_py_flat_grad_segment), METH_O,
     "grad_segment(s)\n--\n\nDLPack capsule: gradient of this rank's piece of segment s."},
    {"full_param", FAST(fsdpc_py_flat_full_param), METH_FASTCALL,
     "full_param(i, shape)\n--\n\nDLPack capsule over the gathered parameter i: valid while the "
     "unit is gathered, at an address that never changes."},
    {"write", FAST(guarded_write), METH_FASTCALL | METH_KEYWORDS,
     "write(param, tensor, grad=False)\n--\n\nCopies this rank's part from a full tensor. Local."},
    {"read", FAST(guarded_read), METH_FASTCALL | METH_KEYWORDS,
     "read(tensors, grad=False)\n--\n\nFills full tensors (None: skipped) from all ranks' parts. "
     "Collective."},
    {"read_blocks", FAST(guarded_read_blocks), METH_VARARGS,
     "read_blocks(blocks, tensors)\n--\n\nFills this rank's block of each parameter: elements "
     "[rank * blocks[i], (rank + 1) * blocks[i]), cut at the end; 0 and None: skipped. "
     "Collective."},
    {"write_blocks", FAST(guarded_write_blocks), METH_VARARGS,
     "write_blocks(blocks, tensors)\n--\n\nReplaces values by all ranks' blocks. Collective."},
    {"grad_norm", FAST(guarded_grad_norm), METH_VARARGS,
     "grad_norm(mask, p)\n--\n\n(sum |g|^p, max |g|, non-finite seen) over this rank's part."},
    {"scale_grads", FAST(guarded_scale_grads), METH_VARARGS,
     "scale_grads(mask, factor)\n--\n\nMultiplies this rank's gradients in place."},
    {"replace_param", FAST(guarded_replace), METH_VARARGS,
     "replace_param(number, param)\n--\n\nReplaces the parameter in row `number` of bind()'s "
     "`sharded`, over the same memory."},
    {"place_param", FAST(guarded_place), METH_VARARGS,
     "place_param(number, dict, key)\n--\n\nThe module entry where the parameter in that row has "
     "to stand when a forward begins."},
    {"replace_grad", FAST(guarded_replace_grad), METH_VARARGS,
     "replace_grad(number, grad)\n--\n\nReplaces the gradient in row `number` of bind()'s "
     "`sharded` "
     "by "
     "another tensor over the same memory."},
    {"grad_bits", FAST(guarded_grad_bits), METH_NOARGS,
     "grad_bits()\n--\n\nOne byte per parameter: this rank has a gradient of it to send."},
    {"pack_grads", FAST(guarded_pack_grads), METH_O,
     "pack_grads(buffer)\n--\n\nWrites this rank's gradients into a buffer of "
     "layout()['reduce_bytes'] bytes, each segment in rank order, gaps and missing gradients as "
     "zeros."},
    {"take_sums", FAST(guarded_take_sums), METH_VARARGS,
     "take_sums(pieces, used)\n--\n\nAdds this rank's pieces (one per trainable segment) of sums "
     "made elsewhere to the gradient; `used`: bytes as of grad_bits() over all ranks."},
    {"unbind", FAST(flat_unbind), METH_NOARGS,
     "unbind()\n--\n\nDrops the torch objects. torch's hooks on these objects keep the unit alive "
     "in cycles that gc cannot see."},
    {"thaw", FAST(guarded_thaw), METH_VARARGS,
     "thaw(segments)\n--\n\nAllocates gradients of more segments (one byte each). All gradients "
     "move, so renew_grads() must follow. Only without a tree; the same call on every rank."},
    {"renew_grads", FAST(fsdpc_py_flat_renew_grads), METH_O,
     "renew_grads(grads)\n--\n\nSets the tensors over the gradients after thaw(), None where a "
     "parameter has no gradient memory."},
    {"adopt_grads", FAST(guarded_adopt), METH_NOARGS,
     "adopt_grads()\n--\n\nCopies gradients that the user assigned to .grad into the unit's "
     "memory."},
    {"bind", FAST(fsdpc_py_flat_bind), METH_FASTCALL | METH_KEYWORDS,
     "bind(full, sites, sharded, watched, versions=None, by_gather=False, dtensors=False, "
     "row_dims=None)\n--\n\nSets the torch objects of this unit. versions: a tensor that shares "
     "the version counter of `full`; by_gather: sites show `full` while the unit is gathered. "
     "row_dims: bytes, the dimension of each of `full` that lies first in the unit's memory."},
    {"hook", FAST(hook_of), METH_VARARGS, "hook(kind, param=-1)\n--\n\nA C callable for torch."},
    {"enter_forward", FAST(guarded_enter), METH_NOARGS,
     "enter_forward()\n--\n\nOne more reference to the gathered values, within a pass."},
    {"leave_forward", FAST(guarded_leave), METH_NOARGS,
     "leave_forward()\n--\n\nUndoes one enter_forward()."},
    {"unshard", FAST(guarded_unshard), METH_NOARGS,
     "unshard()\n--\n\nShows the gathered parameters in the modules until reshard() or the next "
     "pass. Collective outside of a pass."},
    {"reshard", FAST(guarded_reshard), METH_NOARGS,
     "reshard()\n--\n\nUndoes unshard(); without one a no-op."},
    {"forward_failed", FAST(guarded_forward_failed), METH_NOARGS,
     "forward_failed()\n--\n\nMust be called when the module's forward raised."},
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
     "offload=False)\n--\n\n"
     "The parameters of one unit laid end to end and cut into equal pieces, one per rank of comm.\n"
     "params: (name, numel, storage, compute, reduce, trainable[, row_numel]) each; with\n"
     "row_numel > 0 the parameter is cut between rows, as by torch.chunk. offload: shard and "
     "gradient\n"
     "lie in host memory (where comm's device has other). Collective over comm."},
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
