/* Libraries, kernels and launches. A kernel is a host function, together with a declaration of its accesses.
 *
 * Kernels come from tests (simgpu_kernel) or from the project's own sources, compiled for the host into the
 * library $SIMGPU_KERNELS: its function NAME__host is the kernel NAME, and sim_declare.c declares the
 * accesses of each kernel. A kernel that sim_declare.c does not list cannot be found, because its accesses
 * would not be checked.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { MAX_PARAMS = 32764 };

typedef struct kernel {
    struct kernel *next;
    const char *name;
    size_t params_bytes;
    simgpu_launcher launcher;
    simgpu_declare declare;
    bool loaded;
} kernel;

struct CUlib_st {
    struct CUlib_st *next;
    bool live;
};

static kernel *kernels;
static struct CUlib_st *libraries;

static kernel *
find_kernel(const char *name)
{
    for (kernel *k = kernels; k; k = k->next) {
        if (strcmp(k->name, name) == 0) {
            return k;
        }
    }
    return NULL;
}

static kernel *
add_kernel(const char *name, size_t params_bytes, simgpu_launcher launcher, simgpu_declare declare)
{
    kernel *made = find_kernel(name);
    if (!made) {
        made = sim_alloc(1, sizeof *made);
        made->name = sim_intern(name);
        made->next = kernels;
        kernels = made;
    }
    made->params_bytes = params_bytes;
    made->launcher = launcher;
    made->declare = declare;
    return made;
}

SIM_EXPORT void
simgpu_kernel(const char *name, size_t params_bytes, simgpu_launcher launcher,
              simgpu_declare declare)
{
    sim_lock();
    add_kernel(name, params_bytes, launcher, declare);
    sim_unlock();
}

/* Loads one of the project's own kernels. */
static kernel *
load_kernel(const char *name)
{
    static void *library;
    char symbol[128];
    const char *file = getenv("SIMGPU_KERNELS");
    const sim_declared *declared = sim_find_declared(name);
    if (!library && file) {
        library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "simgpu: %s\n", dlerror());
        }
    }
    snprintf(symbol, sizeof symbol, "%s__host", name);
    void *found = library ? dlsym(library, symbol) : NULL;
    if (found && !declared) {
        sim_say(false, "kernel %s has no row in sim_declare.c", name);
    }
    if (!found || !declared) {
        return NULL;
    }
    simgpu_launcher launcher;
    memcpy(&launcher, &found, sizeof launcher);
    return add_kernel(name, declared->params_bytes, launcher, declared->declare);
}

static bool
is_kernel(const void *handle)
{
    for (const kernel *k = kernels; k; k = k->next) {
        if (k == handle) {
            return true;
        }
    }
    return false;
}

static bool
is_library(const struct CUlib_st *library)
{
    for (struct CUlib_st *l = libraries; l; l = l->next) {
        if (l == library) {
            return l->live;
        }
    }
    return false;
}

/* --- entry points ------------------------------------------------------------------------------------ */

SIM_EXPORT CUresult
cuLibraryLoadData(CUlibrary *library, const void *code, int *options, void **values, unsigned count,
                  int *library_options, void **library_values, unsigned library_count)
{
    SIM_ENTER(cuLibraryLoadData, false);
    (void)options, (void)values, (void)library_options, (void)library_values;
    SIM_REFUSE(!library || !code || count || library_count, CUDA_ERROR_INVALID_VALUE);
    *library = sim_alloc(1, sizeof **library);
    (*library)->live = true;
    (*library)->next = libraries;
    libraries = *library;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuLibraryUnload(CUlibrary library)
{
    SIM_ENTER(cuLibraryUnload, false);
    SIM_REFUSE(!is_library(library), CUDA_ERROR_INVALID_HANDLE);
    library->live = false;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuLibraryGetKernel(CUkernel *handle, CUlibrary library, const char *name)
{
    SIM_ENTER(cuLibraryGetKernel, false);
    SIM_REFUSE(!is_library(library), CUDA_ERROR_INVALID_HANDLE);
    kernel *found = find_kernel(name);
    found = found ? found : load_kernel(name);
    *handle = (CUkernel)found;
    return sim_leave(found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}

SIM_EXPORT CUresult
cuKernelGetFunction(CUfunction *function, CUkernel handle)
{
    SIM_ENTER(cuKernelGetFunction, true);
    SIM_REFUSE(!is_kernel(handle), CUDA_ERROR_INVALID_HANDLE);
    *function = (CUfunction)handle;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuFuncLoad(CUfunction function)
{
    SIM_ENTER(cuFuncLoad, true);
    SIM_REFUSE(!is_kernel(function), CUDA_ERROR_INVALID_HANDLE);
    ((kernel *)function)->loaded = true;
    return sim_leave(CUDA_SUCCESS);
}

typedef struct launch {
    const kernel *kernel;
    simgpu_launch shape;
    _Alignas(16) char params[];
} launch;

static enum simgpu_progress
run_launch(void *context, simgpu_task *task)
{
    const launch *made = context;
    const simgpu_launch *s = &made->shape;
    if (sim_options.verify) {
        sim_verify_begin();
    }
    bool may = made->kernel->declare(task, made->params, s);
    if (sim_options.verify) {
        sim_verify_run();
    }
    if (!may && !task->broken) {
        sim_say(false, "kernel %s refused its parameters", made->kernel->name);
        sim_sticky = CUDA_ERROR_LAUNCH_FAILED;
    }
    if (may && !task->broken) {
        made->kernel->launcher(made->params, s->grid[0], s->grid[1], s->grid[2], s->block[0],
                               s->block[1], s->block[2], s->shared_bytes);
    }
    if (sim_options.verify) {
        sim_verify_end(made->kernel->name);
    }
    return SIMGPU_DONE;
}

static bool
fits(const simgpu_launch *shape)
{
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        if (shape->grid[i] == 0 || shape->block[i] == 0 ||
            shape->grid[i] > (i ? 65535u : 0x7fffffffu) ||
            shape->block[i] > (i < 2 ? 1024u : 64u)) {
            return false;
        }
        threads *= shape->block[i];
    }
    return threads <= 1024 && shape->shared_bytes <= 48 * 1024;
}

SIM_EXPORT CUresult
cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
               unsigned bz, unsigned shared_bytes, CUstream stream, void **params, void **extra)
{
    SIM_ENTER(cuLaunchKernel, true);
    simgpu_launch shape = {
        .grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared_bytes = shared_bytes};
    SIM_REFUSE(!is_kernel(function), CUDA_ERROR_INVALID_HANDLE);
    const kernel *k = (const kernel *)function;
    SIM_REFUSE(extra || !params || !params[0] || !fits(&shape) || k->params_bytes > MAX_PARAMS,
               CUDA_ERROR_INVALID_VALUE);
    launch *made = sim_alloc(1, sizeof *made + k->params_bytes);
    made->kernel = k;
    made->shape = shape;
    memcpy(made->params, params[0], k->params_bytes);
    sim_counters.launches++;
    sim_counters.late_loads += !k->loaded;
    simgpu_work work = {.name = k->name, .context = made, .run = run_launch, .drop = free};
    SIM_TRY(sim_enqueue_counted(stream, &work));
    return sim_leave(sim_sticky);
}

int
sim_kernel_leaks(char *text, size_t bytes)
{
    int count = 0;
    for (struct CUlib_st *library = libraries; library; library = library->next) {
        count += library->live;
    }
    if (count) {
        sim_list(text, bytes, 0, "kernel libraries: %d\n", count);
    }
    return count;
}

void
sim_kernels_reset(void)
{
    while (libraries) {
        struct CUlib_st *library = libraries;
        libraries = library->next;
        free(library);
    }
    for (kernel *k = kernels; k; k = k->next) {
        k->loaded = false;
    }
}
