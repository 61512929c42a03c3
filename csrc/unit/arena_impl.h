/* Types and functions that arena.c, arena_device.c and arena_write.c share. */
#ifndef FSDPC_ARENA_IMPL_H
#define FSDPC_ARENA_IMPL_H

#include "unit/arena.h"

typedef struct fsdpc_arena_slot {
    size_t bytes;
    uint64_t offset;    /* of the slot in the segment or in the private file */
    fsdpc_piece *piece; /* on a device */
    void *address;      /* the slot's own address */
} fsdpc_arena_slot;

struct fsdpc_arena {
    fsdpc_shm *shm;       /* borrowed; NULL: the private file holds the slots */
    fsdpc_device *device; /* not NULL: the slots are pieces of this device's memory */
    int forks;            /* the value of fsdpc_forks() when the arena was made */
    int file;             /* the private file's descriptor; -1 until the first private slot */
    uint64_t file_bytes;
    fsdpc_arena_slot *slots;
    int slot_count;
    size_t total_bytes, spare_bytes;
    uint64_t spare_count;
};

/* True if the addresses of the range, which is in host memory, are mapped to its slot. */
static inline bool
fsdpc_range_is_shown(const fsdpc_range *range)
{
    return range->slot >= 0 && !range->spare && !range->veiled;
}

/* arena_write.c keeps a list of the ranges in host memory; a range is listed from its init to its fini. */
void fsdpc_arena_list_range(fsdpc_range *range);
void fsdpc_arena_unlist_range(fsdpc_range *range);

/* Functions of arena_device.c: the part of each call that touches the device's memory. */
int fsdpc_arena_device_range_init(fsdpc_device *device, fsdpc_range *range, size_t bytes);
void fsdpc_arena_device_range_fini(fsdpc_range *range);
int fsdpc_arena_device_slot(fsdpc_arena *arena, fsdpc_arena_slot *slot);
void fsdpc_arena_device_drop(fsdpc_arena *arena);
int fsdpc_arena_device_bind(const fsdpc_arena_slot *slot, fsdpc_range *range);
int fsdpc_arena_device_spare(fsdpc_range *range);

#endif
