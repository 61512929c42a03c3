/* Finding and starting the CUDA driver. See cuda_driver.h.
 *
 * Only cuGetProcAddress_v2 is looked up as a symbol. It returns all other entries, each at the version whose
 * prototype stands in our table, so that a newer driver cannot give an entry of another shape.
 */
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

typedef fsdpc_cu_result get_proc_address(const char *name, void **entry, int version,
                                         uint64_t flags, int *found);

enum { OLDEST_DRIVER = 12000 };

#define FORKED                                                            \
    "CUDA cannot start in a process forked from one that used it: start " \
    "processes with spawn or torchrun"

static int
no_entry(const char *name)
{
    return fsdpc_error(FSDPC_E_UNAVAILABLE,
                       "the CUDA driver lacks %s: fsdpc needs a driver for CUDA 12.0 or newer",
                       name);
}

static int
open_library(void **library, get_proc_address **get)
{
    const char *file = getenv("FSDPC_LIBCUDA");
    file = file && *file ? file : "libcuda.so.1";
    *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!*library) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "no CUDA device here: the driver's library cannot be loaded (%s)",
                           dlerror());
    }
    /* POSIX lets an object pointer hold a function; C does not, hence the copy. */
    void *symbol = dlsym(*library, "cuGetProcAddress_v2");
    memcpy(get, &symbol, sizeof symbol);
    return symbol ? FSDPC_OK : no_entry("cuGetProcAddress_v2");
}

static int
find_entry(get_proc_address *get, const char *name, int version, bool required, void *field)
{
    void *entry = NULL;
    int found = 0;
    fsdpc_cu_result result = get(name, &entry, version, FSDPC_CU_LEGACY_STREAM, &found);
    if (result != FSDPC_CU_SUCCESS) {
        entry = NULL;
    }
    if (!entry && required) {
        return no_entry(name);
    }
    memcpy(field, &entry, sizeof entry);
    return FSDPC_OK;
}

static int
find_entries(get_proc_address *get, fsdpc_cuda_driver *driver)
{
#define FIND(field, name, version, required, params) \
    FSDPC_TRY(find_entry(get, name, version, required, &driver->field));
    FSDPC_CUDA_ENTRIES(FIND)
#undef FIND
    return FSDPC_OK;
}

static int
start(fsdpc_cuda_driver *driver)
{
    fsdpc_cu_result result = driver->init(0);
    if (result == FSDPC_CU_STUB_LIBRARY) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "no CUDA device here: libcuda.so.1 is the toolkit's stub, not a driver");
    }
    if (result == FSDPC_CU_NO_DEVICE) {
        return fsdpc_error(
            FSDPC_E_UNAVAILABLE,
            "no CUDA device here: the driver reports no GPU (is CUDA_VISIBLE_DEVICES "
            "set?)");
    }
    if (result == FSDPC_CU_NOT_INITIALIZED) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "%s", FORKED);
    }
    FSDPC_TRY(fsdpc_cuda_check(driver, result, "no CUDA device here: the driver does not start"));
    FSDPC_TRY(fsdpc_cuda_check(driver, driver->driver_get_version(&driver->version),
                               "the CUDA driver's version"));
    if (driver->version < OLDEST_DRIVER) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "the CUDA driver is of version %d.%d: fsdpc needs 12.0 or newer",
                           driver->version / 1000, driver->version % 1000 / 10);
    }
    FSDPC_TRY(fsdpc_cuda_check(driver, driver->device_get_count(&driver->device_count),
                               "the number of CUDA devices"));
    if (driver->device_count < 1) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "no CUDA device here: the driver reports no GPU");
    }
    return FSDPC_OK;
}

static int
load(fsdpc_cuda_driver *driver)
{
    int status = FSDPC_OK;
    void *library = NULL;
    get_proc_address *get = NULL;
    FSDPC_GOTO(open_library(&library, &get), fail);
    FSDPC_GOTO(find_entries(get, driver), fail);
    FSDPC_GOTO(start(driver), forget);
    driver->stand_in = dlsym(library, "fsdpc_stand_in") != NULL;
    return FSDPC_OK;
fail:
    if (library) {
        dlclose(library);
    }
forget: /* a driver that was started may have threads, so its library stays loaded */
    memset(driver, 0, sizeof *driver);
    return status;
}

int
fsdpc_cuda_driver_get(const fsdpc_cuda_driver **out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static fsdpc_cuda_driver driver;
    pthread_mutex_lock(&lock);
    int status = driver.init ? FSDPC_OK : load(&driver);
    pthread_mutex_unlock(&lock);
    *out = status == FSDPC_OK ? &driver : NULL;
    return status;
}

static int
status_of(fsdpc_cu_result result)
{
    switch (result) {
    case FSDPC_CU_OUT_OF_MEMORY:
        return FSDPC_E_DEVMEM;
    case FSDPC_CU_NOT_INITIALIZED:
    case FSDPC_CU_NOT_SUPPORTED:
    case FSDPC_CU_NO_DEVICE:
        return FSDPC_E_UNAVAILABLE;
    default:
        return FSDPC_E_INTERNAL;
    }
}

int
fsdpc_cuda_check(const fsdpc_cuda_driver *driver, fsdpc_cu_result result, const char *format, ...)
{
    const char *name = NULL, *text = NULL;
    char what[256];
    va_list arguments;
    if (result == FSDPC_CU_SUCCESS) {
        return FSDPC_OK;
    }
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    /* A forked child has its parent's table of entries, but no initialised driver. */
    if (result == FSDPC_CU_NOT_INITIALIZED) {
        return fsdpc_error(status_of(result), "%s: %s", what, FORKED);
    }
    /* For an unknown result error_name and error_string return NULL. */
    (void)driver->error_name(result, &name);
    (void)driver->error_string(result, &text);
    return fsdpc_error(status_of(result), "%s: %s (%u): %s", what,
                       name ? name : "unknown CUDA error", result, text ? text : "no text");
}
