/* What arena.c and arena_device.c share. */
#ifndef FSDPC_ARENA_IMPL_H
#define FSDPC_ARENA_IMPL_H

#include "unit/arena.h"

typedef struct fsdpc_arena_slot {
    size_t bytes;
    uint64_t offset;    /* in the segment or in the private file */
    fsdpc_piece *piece; /* on a device */
    void *address;      /* the slot's own address */
} fsdpc_arena_slot;

struct fsdpc_arena {
    fsdpc_shm *shm;       /* borrowed; NULL: the private file holds the slots */
    fsdpc_device *device; /* not NULL: the slots are pieces of this device's memory */
    int forks;            /* fsdpc_forks() when made */
    int file;             /* -1 until the first private slot */
    uint64_t file_bytes;
    fsdpc_arena_slot *slots;
    int slot_count;
    size_t total_bytes, spare_bytes;
    uint64_t spare_count;
};

/* True if the range in host memory shows its slot. */
static inline bool
fsdpc_range_is_shown(const fsdpc_range *range)
{
    return range->slot >= 0 && !range->spare && !range->veiled;
}

/* arena_write.c lists ranges in host memory, each from its init to its fini. */
void fsdpc_arena_list_range(fsdpc_range *range);
void fsdpc_arena_unlist_range(fsdpc_range *range);

/* arena_device.c: the part of each call that touches memory. */
int fsdpc_arena_device_range_init(fsdpc_device *device, fsdpc_range *range, size_t bytes);
void fsdpc_arena_device_range_fini(fsdpc_range *range);
int fsdpc_arena_device_slot(fsdpc_arena *arena, fsdpc_arena_slot *slot);
void fsdpc_arena_device_drop(fsdpc_arena *arena);
int fsdpc_arena_device_bind(const fsdpc_arena_slot *slot, fsdpc_range *range);
int fsdpc_arena_device_spare(fsdpc_range *range);

#endif
