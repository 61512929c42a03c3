/* Blocks of physical memory and their mappings, which sim_memory.c and sim_verify.c share. */
#ifndef SIMGPU_SIM_MEMORY_H
#define SIMGPU_SIM_MEMORY_H

#include "sim.h"

typedef enum kind { VIRTUAL, PLAIN, HOST } kind;

typedef struct physical {
    struct physical *next;
    kind kind;
    uint64_t handle; /* cuMemCreate's handle; 0 after cuMemRelease, and for other kinds */
    int fd;
    size_t bytes;
    int mappings;
    sim_space space;
} physical;

typedef struct use {
    uint64_t time;
    const char *what;
} use;

typedef struct mapping {
    uintptr_t base;
    size_t bytes, offset;
    physical *memory;
    int rights;     /* PROT_* */
    uint64_t since; /* sim_now() when the memory was mapped */
    use *last;      /* the last use through these addresses, by each actor */
} mapping;

extern mapping *sim_mappings;
extern int sim_mapping_count;

const char *sim_label_of(uintptr_t address);
/* Notes an access that a kernel declares. */
void sim_verify_note(uintptr_t address, size_t bytes, bool write, const mapping *found);

#endif
