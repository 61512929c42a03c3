/* Fixed addresses over shared slots.
 *
 * A range is an address for life: a unit's gathered parameters are always found there. Behind the
 * ranges stand a few slots (memory in a file that can be mapped many times); several ranges may
 * show the same slot, and the exchange makes sure that only one of them is in use at a time. When
 * two units in use need the same slot, private memory is mapped behind one range for a while (spare).
 *
 *   range of unit 1  [=====]--.            .--[=====]  range of unit 3
 *   range of unit 2  [===]----+- slot 0  <-'
 *                             '- slot 1 (of unit 2)
 *
 * On a device without host memory (arena_device.c) slots are pieces of its memory with addresses of
 * their own, too, for collectives to use and register.
 *
 * With a shared segment the slots lie in it, and all ranks of the host see the same bytes; without
 * one they lie in a private memfd. The arena never frees a range's addresses, and moves a range only
 * on a device without host memory, where bind gives a range its addresses: tensors over the range
 * must be pointed there after each bind.
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
    size_t bytes;  /* whole pages, or grains of the device */
    int slot;      /* -1: none bound yet (reads give zeros, writes are lost with the binding) */
    bool spare;    /* private memory is mapped at the moment */
    bool veiled;   /* private memory is mapped for debugging, see fsdpc_arena_veil */
    bool live;     /* set by the exchange: the slot holds this range's values, or gets them */
    bool written;  /* the program has written into this range: fsdpc_arena_take_back */
    struct fsdpc_range *next; /* in the list of all ranges in host memory */
    /* On a device without host memory: that device, and the piece that is shown here; else NULL. */
    fsdpc_device *device;
    fsdpc_piece *shown;
    size_t reserved; /* bytes at `address`, as many as the largest piece shown there */
} fsdpc_range;

typedef struct fsdpc_arena fsdpc_arena;

/* Reserves addresses; no memory is used. bytes 0 is rounded up to one page. */
int fsdpc_range_init(fsdpc_range *range, size_t bytes);
/* fsdpc_range_init on any device; in device memory an unbound range cannot be read. */
int fsdpc_range_init_on(fsdpc_device *device, fsdpc_range *range, size_t bytes);
/* Gives the addresses back: no pointer into the range is valid any more. Safe on a zeroed range. */
void fsdpc_range_fini(fsdpc_range *range);

/* `shm` (borrowed, may be NULL) is where slots are made. */
int fsdpc_arena_new(fsdpc_shm *shm, fsdpc_arena **out);
/* An arena with slots in the device's memory, for ranges of the same device. A device with host memory gives
 * the arena of fsdpc_arena_new(NULL). */
int fsdpc_arena_new_on(fsdpc_device *device, fsdpc_arena **out);
/* Frees the arena. Its slots stay mapped behind ranges that still show them. NULL is allowed. */
void fsdpc_arena_free(fsdpc_arena *arena);
/* Makes a slot; its number goes to *slot. With a segment: all ranks must make the same calls. */
int fsdpc_arena_add_slot(fsdpc_arena *arena, size_t bytes, int *slot);
/* With a segment: gives the memory of all slots back to the kernel; nobody may use the slots any more. */
void fsdpc_arena_discard(fsdpc_arena *arena);
int fsdpc_arena_slot_count(const fsdpc_arena *arena);
/* A slot's own address, the same for the arena's life. */
void *fsdpc_arena_slot_address(const fsdpc_arena *arena, int slot);
size_t fsdpc_arena_slot_bytes(const fsdpc_arena *arena, int slot);
/* Bytes of all slots. */
size_t fsdpc_arena_bytes(const fsdpc_arena *arena);
/* Bytes of private memory that is mapped now behind ranges, and how often such memory was mapped. */
size_t fsdpc_arena_spare_bytes(const fsdpc_arena *arena);
uint64_t fsdpc_arena_spare_count(const fsdpc_arena *arena);

/* Shows `slot` behind the range (slot bytes >= range bytes), in place of whatever an arena showed
 * there before. Not while this arena's spare memory is there. */
int fsdpc_arena_bind(fsdpc_arena *arena, fsdpc_range *range, int slot);
/* Puts private memory behind the range, zeroed (on a device: in the order of the current stream);
 * restore goes back to the bound slot. */
int fsdpc_arena_spare(fsdpc_arena *arena, fsdpc_range *range);
int fsdpc_arena_restore(fsdpc_arena *arena, fsdpc_range *range);

/* Where an exchange writes the values that a range shows: in host memory the range itself is read-only. */
void *fsdpc_arena_writable(const fsdpc_arena *arena, const fsdpc_range *range);
/* Drops what the program has written into a range in host memory: the range shows its slot again. *changed:
 * the values had been changed, and not put back. Call it while the slot holds the range's values. */
int fsdpc_arena_take_back(fsdpc_arena *arena, fsdpc_range *range, bool *changed);
/* Lets the program write into ranges again if it has set its own handler of SIGSEGV meanwhile. */
void fsdpc_arena_watch_writes(void);

/* For debugging, in host memory only: maps private memory behind a range that is not in use, so that no
 * value of a slot can be read through the range while other units use the slot. The caller writes the
 * pattern. unveil maps the bound slot again. A second veil or unveil is a no-op. */
int fsdpc_arena_veil(fsdpc_range *range);
int fsdpc_arena_unveil(fsdpc_arena *arena, fsdpc_range *range);

#endif
