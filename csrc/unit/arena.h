/* Fixed addresses over shared slots.
 *
 * A range consists of addresses that never change: a unit's gathered parameters are always found there. A
 * slot is memory in a file that can be mapped many times. A few slots are mapped at the addresses of the
 * ranges. Several ranges may show the same slot, and the exchange makes sure that only one of these ranges is
 * in use at a time. If two units in use need the same slot, one of their ranges shows private memory for a
 * while (spare).
 *
 *   range of unit 1  [=====]--.            .--[=====]  range of unit 3
 *   range of unit 2  [===]----+- slot 0  <-'
 *                             '- slot 1 (of unit 2)
 *
 * On a device without host memory (its memory is not the CPU's, see arena_device.c), slots are pieces of the
 * device's memory. Each slot also has addresses of its own, which collectives use and register.
 *
 * With a shared segment the slots lie in the segment, and all ranks of the host see the same bytes. Without a
 * segment the slots lie in a private memfd. The arena never frees a range's addresses. It moves a range only
 * on a device without host memory, where bind gives a range its addresses: tensors over the range must be
 * pointed to these addresses after each bind.
 */
#ifndef FSDPC_ARENA_H
#define FSDPC_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"
#include "shm/shm.h"

typedef struct fsdpc_range {
    void *address; /* on a device without host memory NULL until an arena binds it */
    size_t bytes;  /* a multiple of the page size, or of the device's grain */
    int slot;      /* -1: no slot is bound yet (reads give zeros; the first bind drops writes) */
    bool spare;    /* private memory is mapped here now, in place of the slot */
    bool veiled;   /* private memory is mapped for debugging, see fsdpc_arena_veil */
    bool live;     /* set by the exchange: the slot holds or receives this range's values */
    bool written;  /* the program has written into this range: see fsdpc_arena_take_back */
    struct fsdpc_range *next; /* in the list of all ranges in host memory */
    /* On a device without host memory: that device, and the piece that is shown here; else NULL. */
    fsdpc_device *device;
    fsdpc_piece *shown;
    size_t reserved; /* bytes reserved at `address`: the size of the largest piece shown so far */
} fsdpc_range;

typedef struct fsdpc_arena fsdpc_arena;

/* Reserves addresses; no memory is used. bytes 0 is rounded up to one page. */
int fsdpc_range_init(fsdpc_range *range, size_t bytes);
/* Like fsdpc_range_init, on any device. In device memory a range cannot be read before it has a slot. */
int fsdpc_range_init_on(fsdpc_device *device, fsdpc_range *range, size_t bytes);
/* Gives the addresses back: no pointer into the range is valid any more. Safe on a zeroed range. */
void fsdpc_range_fini(fsdpc_range *range);

/* Makes an arena whose slots lie in `shm` (borrowed), or in a private file if `shm` is NULL. */
int fsdpc_arena_new(fsdpc_shm *shm, fsdpc_arena **out);
/* Makes an arena with slots in the device's memory, for ranges of the same device. On a device with host
 * memory the call is the same as fsdpc_arena_new(NULL). */
int fsdpc_arena_new_on(fsdpc_device *device, fsdpc_arena **out);
/* Frees the arena. Its slots stay mapped at ranges that still show them. NULL is allowed. */
void fsdpc_arena_free(fsdpc_arena *arena);
/* Makes a slot and sets *slot to its number. With a segment, all ranks must make the same calls. */
int fsdpc_arena_add_slot(fsdpc_arena *arena, size_t bytes, int *slot);
/* With a segment, gives the memory of all slots back to the kernel; nobody may use the slots afterwards. */
void fsdpc_arena_discard(fsdpc_arena *arena);
int fsdpc_arena_slot_count(const fsdpc_arena *arena);
/* Returns a slot's own address, which does not change during the arena's life. */
void *fsdpc_arena_slot_address(const fsdpc_arena *arena, int slot);
size_t fsdpc_arena_slot_bytes(const fsdpc_arena *arena, int slot);
/* Returns the bytes of all slots. */
size_t fsdpc_arena_bytes(const fsdpc_arena *arena);
/* Return the bytes of private memory that ranges show now, and how often such memory was mapped. */
size_t fsdpc_arena_spare_bytes(const fsdpc_arena *arena);
uint64_t fsdpc_arena_spare_count(const fsdpc_arena *arena);

/* Maps the memory of `slot` at the range's addresses (slot bytes >= range bytes), in place of what an arena
 * mapped there before. Must not be called while the range shows spare memory of this arena. */
int fsdpc_arena_bind(fsdpc_arena *arena, fsdpc_range *range, int slot);
/* fsdpc_arena_spare maps private zeroed memory at the range's addresses (on a device, zeroed in the order of
 * the current stream). fsdpc_arena_restore maps the bound slot again. */
int fsdpc_arena_spare(fsdpc_arena *arena, fsdpc_range *range);
int fsdpc_arena_restore(fsdpc_arena *arena, fsdpc_range *range);

/* Returns the address at which an exchange must write a range's values. In host memory a range that shows
 * its slot is read-only, so the address is the slot's own. */
void *fsdpc_arena_writable(const fsdpc_arena *arena, const fsdpc_range *range);
/* Drops what the program has written into a range in host memory: the range shows its slot again. Sets
 * *changed to whether the written values differed from the slot's. The slot must hold the range's values. */
int fsdpc_arena_take_back(fsdpc_arena *arena, fsdpc_range *range, bool *changed);
/* Installs our handler of SIGSEGV again if the program has replaced it. Without our handler a write into a
 * range would end the program. */
void fsdpc_arena_watch_writes(void);

/* For debugging, in host memory only: maps private memory at the addresses of a range that is not in use. So
 * no value of a slot can be read through the range while other units use the slot. The caller fills the
 * private memory with a pattern. unveil maps the bound slot again. A second veil or unveil is a no-op. */
int fsdpc_arena_veil(fsdpc_range *range);
int fsdpc_arena_unveil(fsdpc_arena *arena, fsdpc_range *range);

#endif
