/* Chooses a kernel table: the widest that the processor runs, or the requested one. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "base/status.h"

struct choice {
    const char *name;
    const fsdpc_kernels *(*table)(void);
};

/* Widest first. */
static const struct choice choices[] = {
    {"avx512", fsdpc_kernels_avx512},
    {"avx2", fsdpc_kernels_avx2},
    {"plain", fsdpc_kernels_plain},
};
enum { CHOICES = sizeof choices / sizeof choices[0] };

int
fsdpc_kernels_by_name(const char *name, const fsdpc_kernels **out)
{
    *out = NULL;
    for (int i = 0; i < CHOICES; i++) {
        if (strcmp(choices[i].name, name) == 0) {
            *out = choices[i].table();
            if (!*out) {
                return fsdpc_error(FSDPC_E_UNAVAILABLE,
                                   "this processor does not run the %s kernels", name);
            }
            return FSDPC_OK;
        }
    }
    return fsdpc_error(FSDPC_E_INVAL, "kernels '%s': choose from plain, avx2, avx512", name);
}

int
fsdpc_kernels_select(const fsdpc_kernels **out)
{
    const char *wanted = getenv("FSDPC_SIMD");
    *out = NULL;
    if (wanted && *wanted) {
        int status = fsdpc_kernels_by_name(wanted, out);
        return status ? fsdpc_error_prepend(status, "FSDPC_SIMD") : FSDPC_OK;
    }
    for (int i = 0; !*out; i++) {
        *out = choices[i].table();
    }
    return FSDPC_OK;
}
