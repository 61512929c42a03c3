/* What each kernel of kernels/ reads and writes, from its parameters. */
#include <string.h>

#include "sim.h"

static const sim_declared declared[] = {
    {NULL, 0, NULL},
};

const sim_declared *
sim_find_declared(const char *name)
{
    for (const sim_declared *row = declared; row->name; row++) {
        if (strcmp(row->name, name) == 0) {
            return row;
        }
    }
    return NULL;
}
