/* Checks that a kernel touches only what it declares. While the kernel runs, pages that it did not declare
 * are unreadable (an access ends the program by a signal), and bytes that it did not declare as written must
 * not change. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_memory.h"

enum { PAGE = 4096 };

typedef struct declared {
    uintptr_t address;
    size_t bytes;
    bool write;
    const physical *memory;
    size_t offset;
} declared;

static declared *declares;
static int declare_count, declare_capacity;
static bool noting;
static char **copies; /* a copy of each mapping's bytes, made before the kernel runs */

void
sim_verify_note(uintptr_t address, size_t bytes, bool write, const mapping *found)
{
    if (!noting) {
        return;
    }
    declares = sim_grow(declares, declare_count, &declare_capacity, sizeof *declares);
    declares[declare_count++] = (declared){.address = address,
                                           .bytes = bytes,
                                           .write = write,
                                           .memory = found->memory,
                                           .offset = found->offset + (address - found->base)};
}

void
sim_verify_begin(void)
{
    declare_count = 0;
    noting = true;
}

static bool
page_declared(uintptr_t page)
{
    for (int i = 0; i < declare_count; i++) {
        if (declares[i].address < page + PAGE && page < declares[i].address + declares[i].bytes) {
            return true;
        }
    }
    return false;
}

void
sim_verify_run(void)
{
    noting = false;
    copies = sim_alloc((size_t)sim_mapping_count + 1, sizeof *copies);
    for (int i = 0; i < sim_mapping_count; i++) {
        const mapping *m = &sim_mappings[i];
        if (!(m->rights & PROT_READ)) {
            continue;
        }
        copies[i] = sim_alloc(1, m->bytes);
        memcpy(copies[i], (void *)m->base, m->bytes);
        for (uintptr_t page = m->base; page < m->base + m->bytes; page += PAGE) {
            if (!page_declared(page)) {
                mprotect((void *)page, PAGE, PROT_NONE);
            }
        }
    }
}

static bool
write_declared(const physical *memory, size_t offset)
{
    for (int i = 0; i < declare_count; i++) {
        if (declares[i].write && declares[i].memory == memory && offset >= declares[i].offset &&
            offset - declares[i].offset < declares[i].bytes) {
            return true;
        }
    }
    return false;
}

void
sim_verify_end(const char *kernel)
{
    for (int i = 0; i < sim_mapping_count; i++) {
        const mapping *m = &sim_mappings[i];
        if (!copies[i]) {
            continue;
        }
        mprotect((void *)m->base, m->bytes, m->rights);
        const char *now = (const char *)m->base;
        for (size_t at = 0; at < m->bytes; at++) {
            if (at % PAGE == 0 && at + PAGE <= m->bytes &&
                memcmp(copies[i] + at, now + at, PAGE) == 0) {
                at += PAGE - 1;
            } else if (copies[i][at] != now[at] && !write_declared(m->memory, m->offset + at)) {
                sim_say(false, "kernel %s writes %s, byte %zu, which it did not declare", kernel,
                        sim_label_of(m->base + at), at);
                break;
            }
        }
        free(copies[i]);
    }
    free(copies);
    copies = NULL;
}
