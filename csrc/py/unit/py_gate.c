/* Gates: one thread at a time uses a unit or a tree, and nothing is freed while a thread uses it.
 *
 * The core is single-threaded, and its calls release the GIL. So each method and hook that calls the core
 * enters the gate of its unit and, if the unit has a tree, the tree's gate. The same thread may enter
 * again (a hook calls Python, which calls a method); another thread waits, with a deadline. A call that
 * would free something in use is deferred until the last exit; then the gate's function `late` does the
 * work.
 *
 * A callback of a collective and a signal handler run in the middle of a core call, so every gate refuses
 * them.
 *
 * Gates are read and written under the GIL only.
 */
#include <time.h>

#include "py/unit/py_flat.h"
#include "base/deadline.h"

enum { NESTED_S = 5 };
#define LONGEST_NAP_NS 2000000

static _Thread_local int inside; /* number of uses that this thread has begun and not ended */

static bool
is_shut(const fsdpc_py_gate *gate)
{
    return gate->depth > 0 && gate->thread != PyThread_get_thread_ident();
}

static void
take(fsdpc_py_gate *gate)
{
    gate->thread = PyThread_get_thread_ident();
    gate->depth++;
}

static int
refuse(const char *name, const char *why)
{
    PyErr_Format(fsdpc_py_current()->state_error, "%s: %s", name, why);
    return -1;
}

/* --- waiting --------------------------------------------------------------------------------- */

static double
now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Returns how long to wait. A thread inside another unit waits less: others may wait for that unit. */
static double
patience(const fsdpc_unit *unit)
{
    const double most = unit ? fsdpc_comm_timeout(fsdpc_unit_comm(unit)) : fsdpc_timeout();
    return inside > 0 && most > NESTED_S ? NESTED_S : most;
}

typedef struct wait {
    double until;
    long nap_ns;
} wait;

static int
wait_a_little(wait *self, const fsdpc_unit *unit, const char *name)
{
    if (self->nap_ns == 0) {
        *self = (wait){now_s() + patience(unit), 20000};
    } else if (now_s() > self->until) {
        return refuse(name, "another thread is using this unit or its tree and has not left it "
                            "within the deadline (FSDPC_TIMEOUT, or 5 s inside another unit); only "
                            "one thread at a time may use a model");
    }
    const struct timespec nap = {.tv_nsec = self->nap_ns};
    Py_BEGIN_ALLOW_THREADS(void)
    nanosleep(&nap, NULL);
    Py_END_ALLOW_THREADS
    self->nap_ns = self->nap_ns * 2 < LONGEST_NAP_NS ? self->nap_ns * 2 : LONGEST_NAP_NS;
    return PyErr_CheckSignals();
}

static int
check_outside(const char *name)
{
    return !fsdpc_py_is_in_core()
               ? 0
               : refuse(name, "called inside a collective of this thread (from a callback or a "
                              "signal handler); call it after the collective has returned");
}

/* --- entering and leaving -------------------------------------------------------------------- */

static void
go_in(fsdpc_py_flat *flat, fsdpc_py_tree *tree, fsdpc_py_use *use)
{
    *use = (fsdpc_py_use){(fsdpc_py_flat *)Py_XNewRef(flat), (fsdpc_py_tree *)Py_XNewRef(tree)};
    inside++;
    if (flat) {
        take(&flat->gate);
    }
    if (tree) {
        take(&tree->gate);
    }
}

int
fsdpc_py_use_flat(fsdpc_py_flat *flat, fsdpc_py_use *use)
{
    wait waiting = {0};
    if (check_outside(fsdpc_unit_name(flat->unit)) < 0) {
        return -1;
    }
    /* Both gates are entered together, so no thread holds one of them while it waits for the other one. */
    while (is_shut(&flat->gate) || (flat->tree && is_shut(&flat->tree->gate))) {
        if (wait_a_little(&waiting, flat->unit, fsdpc_unit_name(flat->unit)) < 0) {
            return -1;
        }
    }
    go_in(flat, flat->tree, use);
    return 0;
}

int
fsdpc_py_use_tree(fsdpc_py_tree *tree, fsdpc_py_use *use)
{
    wait waiting = {0};
    if (check_outside("the tree") < 0) {
        return -1;
    }
    while (is_shut(&tree->gate)) {
        const fsdpc_unit *unit = tree->count > 0 ? tree->units[0]->unit : NULL;
        if (wait_a_little(&waiting, unit, "the tree") < 0) {
            return -1;
        }
    }
    go_in(NULL, tree, use);
    return 0;
}

int
fsdpc_py_try_flat(fsdpc_py_flat *flat)
{
    const char *name = fsdpc_unit_name(flat->unit);
    if (check_outside(name) < 0) {
        return -1;
    }
    if (is_shut(&flat->gate)) {
        return refuse(name, "another thread is using this unit");
    }
    take(&flat->gate);
    return 0;
}

void
fsdpc_py_leave_flat(fsdpc_py_flat *flat)
{
    flat->gate.depth--;
    if (flat->unbinds && !fsdpc_py_flat_in_use(flat)) {
        flat->gate.late((PyObject *)flat);
    }
}

/* Does the work that was deferred while the tree was in use. */
static void
finish_tree(fsdpc_py_tree *tree)
{
    tree->late_work = false;
    for (int i = 0; i < tree->count; i++) {
        if (tree->units[i]->unbinds) {
            tree->units[i]->gate.late((PyObject *)tree->units[i]);
        }
    }
    if (tree->closes) {
        tree->gate.late((PyObject *)tree);
    }
}

void
fsdpc_py_end_use(fsdpc_py_use *use)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    inside--;
    if (use->tree) {
        use->tree->gate.depth--;
    }
    if (use->flat) {
        fsdpc_py_leave_flat(use->flat);
    }
    if (use->tree && use->tree->late_work && !fsdpc_py_tree_in_use(use->tree)) {
        finish_tree(use->tree);
    }
    Py_XDECREF(use->flat);
    Py_XDECREF(use->tree);
    PyErr_Restore(type, value, traceback);
}

/* --- freeing --------------------------------------------------------------------------------- */

void
fsdpc_py_shut_tree(fsdpc_py_tree *tree)
{
    take(&tree->gate);
}

void
fsdpc_py_reopen_tree(fsdpc_py_tree *tree)
{
    tree->gate.depth--;
    for (int i = 0; i < tree->count; i++) {
        if (tree->units[i]->unbinds && !fsdpc_py_flat_in_use(tree->units[i])) {
            tree->units[i]->gate.late((PyObject *)tree->units[i]);
        }
    }
}

/* --- who is inside --------------------------------------------------------------------------- */

bool
fsdpc_py_flat_in_use(const fsdpc_py_flat *flat)
{
    return flat->gate.depth > 0 || (flat->tree && flat->tree->gate.depth > 0);
}

/* Checks the units' gates too: a call that entered only a unit's gate may have made the tree since then. */
bool
fsdpc_py_tree_in_use(const fsdpc_py_tree *tree)
{
    bool used = tree->gate.depth > 0;
    for (int i = 0; !used && i < tree->count; i++) {
        used = tree->units[i]->gate.depth > 0;
    }
    return used;
}
