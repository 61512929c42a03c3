/* Loading NCCL. See nccl_api.h. */
#include "comm/nccl_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

/* A second copy of the library must call its own functions, not those of the copy that torch has loaded.
 * Sanitizers refuse RTLD_DEEPBIND; under sanitizers there is no other copy. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { OWN_CALLS = 0 };
#else
enum { OWN_CALLS = RTLD_DEEPBIND };
#endif

static int
open_library(void **library)
{
    const char *file = getenv("FSDPC_LIBNCCL");
    bool named = file && *file;
    *library =
        dlopen(named ? file : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL | (named ? OWN_CALLS : 0));
    if (!*library) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "no NCCL here: its library cannot be loaded (%s); a CUDA build of torch "
                           "brings it, FSDPC_LIBNCCL names another file",
                           dlerror());
    }
    return FSDPC_OK;
}

static int
find_entry(void *library, const char *name, bool required, void *field)
{
    void *entry = dlsym(library, name);
    if (!entry && required) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "NCCL lacks %s: fsdpc needs version 2.18 or newer",
                           name);
    }
    memcpy(field, &entry, sizeof entry);
    return FSDPC_OK;
}

static int
fill(void *library, fsdpc_nccl *nccl)
{
    Dl_info found;
    void *symbol;
#define FIND(field, name, required, result, params) \
    FSDPC_TRY(find_entry(library, name, required, &nccl->field));
    FSDPC_NCCL_ENTRIES(FIND)
#undef FIND
    if (nccl->get_version(&nccl->version) != FSDPC_NCCL_SUCCESS ||
        nccl->version < FSDPC_NCCL_OLDEST) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "NCCL is of version %d.%d.%d: fsdpc needs 2.18 or newer",
                           nccl->version / 10000, nccl->version / 100 % 100, nccl->version % 100);
    }
    memcpy(&symbol, &nccl->get_version, sizeof symbol);
    if (dladdr(symbol, &found) && found.dli_fname) {
        snprintf(nccl->path, sizeof nccl->path, "%s", found.dli_fname);
    }
    return FSDPC_OK;
}

/* NCCL reads NCCL_COMM_BLOCKING when a communicator starts, from the environment
 * or from its configuration files. Only the environment is checked here. */
static int
check_environment(void)
{
    const char *blocking = getenv("NCCL_COMM_BLOCKING");
    if (blocking && *blocking && strcmp(blocking, "0") != 0) {
        return fsdpc_error(
            FSDPC_E_UNAVAILABLE,
            "NCCL_COMM_BLOCKING=%s makes NCCL's calls block, so that no wait for other "
            "ranks would have a deadline: unset it",
            blocking);
    }
    return FSDPC_OK;
}

static int
load(fsdpc_nccl *nccl)
{
    void *library;
    FSDPC_TRY(check_environment());
    FSDPC_TRY(open_library(&library));
    int status = fill(library, nccl);
    if (status != FSDPC_OK) {
        memset(nccl, 0, sizeof *nccl);
        dlclose(library);
    }
    return status;
}

int
fsdpc_nccl_get(const fsdpc_nccl **out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static fsdpc_nccl nccl;
    pthread_mutex_lock(&lock);
    int status = nccl.version ? FSDPC_OK : load(&nccl);
    pthread_mutex_unlock(&lock);
    *out = status == FSDPC_OK ? &nccl : NULL;
    return status;
}

fsdpc_nccl_type
fsdpc_nccl_type_of(fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return FSDPC_NCCL_FLOAT32;
    case FSDPC_F64:
        return FSDPC_NCCL_FLOAT64;
    case FSDPC_F16:
        return FSDPC_NCCL_FLOAT16;
    case FSDPC_BF16:
        return FSDPC_NCCL_BFLOAT16;
    default:
        return FSDPC_NCCL_UINT8;
    }
}

fsdpc_nccl_config
fsdpc_nccl_config_new(void)
{
    return (fsdpc_nccl_config){
        .bytes = sizeof(fsdpc_nccl_config),
        .magic = (unsigned)FSDPC_NCCL_CONFIG_MAGIC,
        .version = FSDPC_NCCL_CONFIG_VERSION,
        .blocking = 0,
        .cga_cluster = FSDPC_NCCL_UNSET,
        .min_ctas = FSDPC_NCCL_UNSET,
        .max_ctas = FSDPC_NCCL_UNSET,
        .split_share = FSDPC_NCCL_UNSET,
        .traffic_class = FSDPC_NCCL_UNSET,
        .collnet = FSDPC_NCCL_UNSET,
        .cta_policy = FSDPC_NCCL_UNSET,
        .shrink_share = FSDPC_NCCL_UNSET,
        .nvls_ctas = FSDPC_NCCL_UNSET,
        .channels_per_net_peer = FSDPC_NCCL_UNSET,
        .nvlink_centric = FSDPC_NCCL_UNSET,
    };
}
