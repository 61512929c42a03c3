/* Ranges and slots: code for host memory, and code that serves host memory and devices. See arena.h. */
#include "unit/arena_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/forks.h"
#include "base/mem.h"
#include "base/room.h"
#include "base/status.h"

#define HUGE_BYTES ((size_t)1 << 21)

/* Reserves addresses. With MAP_NORESERVE a range that has no slot yet reads as zeros and costs no memory. */
static void *
reserve(size_t bytes)
{
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

/* Reserves addresses that begin at a huge page: reserves more than is needed, and cuts off the ends. */
static void *
reserve_aligned(size_t bytes)
{
    char *start = reserve(bytes + HUGE_BYTES);
    if (!start) {
        return NULL;
    }
    size_t before = (HUGE_BYTES - (uintptr_t)start % HUGE_BYTES) % HUGE_BYTES;
    if (before > 0) {
        munmap(start, before);
    }
    munmap(start + before + bytes, HUGE_BYTES - before);
    return start + before;
}

static enum fsdpc_fork_kind
in_a_child(const void *owner)
{
    const fsdpc_range *range = owner;
    if (range->slot < 0 || range->spare || range->veiled) {
        return FSDPC_FORK_ALONE;
    }
    return range->live ? FSDPC_FORK_VALUES : FSDPC_FORK_BLANK;
}

int
fsdpc_range_init(fsdpc_range *range, size_t bytes)
{
    memset(range, 0, sizeof *range);
    range->slot = -1;
    size_t rounded = fsdpc_round_up(bytes ? bytes : 1, fsdpc_shm_page_bytes());
    void *address = rounded >= HUGE_BYTES ? reserve_aligned(rounded) : reserve(rounded);
    if (!address) {
        return fsdpc_error_errno(errno, "cannot reserve %zu bytes of addresses", rounded);
    }
    range->address = address;
    range->bytes = rounded;
    int status = fsdpc_forks_add(address, rounded, in_a_child, range);
    if (status != FSDPC_OK) {
        munmap(address, rounded);
        memset(range, 0, sizeof *range);
        range->slot = -1;
        return status;
    }
    fsdpc_arena_list_range(range);
    return FSDPC_OK;
}

int
fsdpc_range_init_on(fsdpc_device *device, fsdpc_range *range, size_t bytes)
{
    return fsdpc_device_get_caps(device)->host_memory
               ? fsdpc_range_init(range, bytes)
               : fsdpc_arena_device_range_init(device, range, bytes);
}

void
fsdpc_range_fini(fsdpc_range *range)
{
    if (range->device) {
        fsdpc_arena_device_range_fini(range);
        return;
    }
    if (range->address) {
        fsdpc_arena_unlist_range(range);
        fsdpc_forks_remove(range->address);
        munmap(range->address, range->bytes);
    }
    memset(range, 0, sizeof *range);
    range->slot = -1;
}

int
fsdpc_arena_new(fsdpc_shm *shm, fsdpc_arena **out)
{
    *out = NULL;
    fsdpc_arena *arena = fsdpc_mem_calloc(1, sizeof *arena);
    if (!arena) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an arena");
    }
    arena->shm = shm;
    arena->forks = fsdpc_forks();
    arena->file = -1;
    *out = arena;
    return FSDPC_OK;
}

int
fsdpc_arena_new_on(fsdpc_device *device, fsdpc_arena **out)
{
    FSDPC_TRY(fsdpc_arena_new(NULL, out));
    if (!fsdpc_device_get_caps(device)->host_memory) {
        (*out)->device = device;
    }
    return FSDPC_OK;
}

void
fsdpc_arena_free(fsdpc_arena *arena)
{
    if (!arena) {
        return;
    }
    for (int i = 0; !arena->device && i < arena->slot_count; i++) {
        fsdpc_shm_unmap(arena->slots[i].address, arena->slots[i].bytes);
    }
    if (arena->file >= 0) {
        close(arena->file);
    }
    if (arena->device) {
        fsdpc_arena_device_drop(arena);
    }
    fsdpc_mem_free(arena->slots);
    fsdpc_mem_free(arena);
}

/* Maps the slot at an address of its own, through which the exchange writes the slot. */
static int
map_private_slot(fsdpc_arena *arena, fsdpc_arena_slot *slot)
{
    void *mapped = mmap(NULL, slot->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena->file,
                        (off_t)slot->offset);
    if (mapped == MAP_FAILED) {
        return fsdpc_error_errno(errno, "cannot map %zu bytes of a gather slot", slot->bytes);
    }
    int status = fsdpc_forks_add(mapped, slot->bytes, NULL, NULL);
    if (status != FSDPC_OK) {
        munmap(mapped, slot->bytes);
        return status;
    }
    slot->address = mapped;
    return FSDPC_OK;
}

/* Extends the private file and allocates its pages, so that a lack of memory is an error here. */
static int
grow_private_file(fsdpc_arena *arena, size_t bytes, uint64_t *offset)
{
    if (arena->file < 0) {
        arena->file = memfd_create("fsdpc-arena", MFD_CLOEXEC);
        if (arena->file < 0) {
            return fsdpc_error_errno(errno, "cannot make a memory file for gather slots");
        }
    }
    FSDPC_TRY(fsdpc_room_check(bytes, "a gather slot"));
    int error = posix_fallocate(arena->file, (off_t)arena->file_bytes, (off_t)bytes);
    if (error) {
        return fsdpc_error_errno(error, "cannot get %zu bytes for a gather slot", bytes);
    }
    *offset = arena->file_bytes;
    arena->file_bytes += bytes;
    return FSDPC_OK;
}

int
fsdpc_arena_add_slot(fsdpc_arena *arena, size_t bytes, int *slot)
{
    *slot = -1;
    bytes = fsdpc_round_up(bytes ? bytes : 1, arena->device ? fsdpc_device_grain(arena->device)
                                                            : fsdpc_shm_page_bytes());
    fsdpc_arena_slot *grown =
        fsdpc_mem_realloc(arena->slots, (size_t)arena->slot_count + 1, sizeof *grown);
    if (!grown) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the table of gather slots");
    }
    arena->slots = grown;
    fsdpc_arena_slot made = {.bytes = bytes};
    if (arena->device) {
        FSDPC_TRY(fsdpc_arena_device_slot(arena, &made));
    } else if (arena->shm) {
        FSDPC_TRY(fsdpc_shm_alloc(arena->shm, bytes, true, &made.offset));
        FSDPC_TRY(fsdpc_shm_map(arena->shm, made.offset, bytes, NULL, &made.address));
    } else {
        FSDPC_TRY(grow_private_file(arena, bytes, &made.offset));
        FSDPC_TRY(map_private_slot(arena, &made));
    }
    arena->slots[arena->slot_count] = made;
    arena->total_bytes += bytes;
    *slot = arena->slot_count++;
    return FSDPC_OK;
}

void
fsdpc_arena_discard(fsdpc_arena *arena)
{
    for (int i = 0; arena->shm && i < arena->slot_count; i++) {
        (void)fsdpc_shm_discard(arena->shm, arena->slots[i].offset, arena->slots[i].bytes);
    }
}

int
fsdpc_arena_slot_count(const fsdpc_arena *arena)
{
    return arena->slot_count;
}

void *
fsdpc_arena_slot_address(const fsdpc_arena *arena, int slot)
{
    return slot >= 0 && slot < arena->slot_count ? arena->slots[slot].address : NULL;
}

size_t
fsdpc_arena_slot_bytes(const fsdpc_arena *arena, int slot)
{
    return slot >= 0 && slot < arena->slot_count ? arena->slots[slot].bytes : 0;
}

size_t
fsdpc_arena_bytes(const fsdpc_arena *arena)
{
    return arena->total_bytes;
}

size_t
fsdpc_arena_spare_bytes(const fsdpc_arena *arena)
{
    return arena->spare_bytes;
}

uint64_t
fsdpc_arena_spare_count(const fsdpc_arena *arena)
{
    return arena->spare_count;
}

static int
map_spare(fsdpc_range *range)
{
    void *mapped = mmap(range->address, range->bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (mapped == MAP_FAILED) {
        return fsdpc_error_errno(errno, "cannot map %zu bytes of spare memory", range->bytes);
    }
    return FSDPC_OK;
}

/* Maps the memory of the range's slot at the range's addresses, privately and read-only (see arena_write.c).
 * In a forked child the slots belong to the parent, so the range gets private memory in place of its slot. */
static int
show(fsdpc_arena *arena, fsdpc_range *range)
{
    const fsdpc_arena_slot *slot = &arena->slots[range->slot];
    if (arena->device) {
        return fsdpc_arena_device_bind(slot, range);
    }
    if (arena->forks != fsdpc_forks()) {
        return map_spare(range);
    }
    if (arena->shm) {
        return fsdpc_shm_show(arena->shm, slot->offset, range->bytes, range->address);
    }
    void *mapped = mmap(range->address, range->bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED,
                        arena->file, (off_t)slot->offset);
    if (mapped == MAP_FAILED) {
        return fsdpc_error_errno(errno, "cannot map %zu bytes of a gather slot", range->bytes);
    }
    return FSDPC_OK;
}

int
fsdpc_arena_bind(fsdpc_arena *arena, fsdpc_range *range, int slot)
{
    if (slot < 0 || slot >= arena->slot_count || arena->slots[slot].bytes < range->bytes) {
        return fsdpc_error(FSDPC_E_INTERNAL, "slot %d does not hold a range of %zu bytes", slot,
                           range->bytes);
    }
    if (range->device != arena->device) {
        return fsdpc_error(FSDPC_E_INTERNAL, "a range and a slot of different devices");
    }
    const int shown = range->slot;
    range->slot = slot;
    int status = show(arena, range);
    if (status != FSDPC_OK) {
        range->slot = shown;
        return status;
    }
    fsdpc_arena_watch_writes();
    range->written = false;
    /* If an earlier arena left private memory mapped at the range, show() has replaced it. */
    range->spare = range->veiled = false;
    return FSDPC_OK;
}

int
fsdpc_arena_spare(fsdpc_arena *arena, fsdpc_range *range)
{
    if (range->spare) {
        return FSDPC_OK;
    }
    FSDPC_TRY(range->device ? fsdpc_arena_device_spare(range) : map_spare(range));
    range->spare = true;
    range->veiled = false;
    arena->spare_bytes += range->bytes;
    arena->spare_count++;
    return FSDPC_OK;
}

int
fsdpc_arena_restore(fsdpc_arena *arena, fsdpc_range *range)
{
    if (!range->spare) {
        return FSDPC_OK;
    }
    FSDPC_TRY(show(arena, range));
    range->spare = false;
    arena->spare_bytes -= range->bytes;
    return FSDPC_OK;
}

int
fsdpc_arena_veil(fsdpc_range *range)
{
    if (range->veiled) {
        return FSDPC_OK;
    }
    FSDPC_TRY(map_spare(range));
    range->veiled = true;
    return FSDPC_OK;
}

int
fsdpc_arena_unveil(fsdpc_arena *arena, fsdpc_range *range)
{
    if (!range->veiled) {
        return FSDPC_OK;
    }
    FSDPC_TRY(show(arena, range));
    range->veiled = false;
    return FSDPC_OK;
}

void *
fsdpc_arena_writable(const fsdpc_arena *arena, const fsdpc_range *range)
{
    bool own = arena->device || !fsdpc_range_is_shown(range) || arena->forks != fsdpc_forks();
    return own ? range->address : arena->slots[range->slot].address;
}

int
fsdpc_arena_take_back(fsdpc_arena *arena, fsdpc_range *range, bool *changed)
{
    *changed = false;
    if (!range->written) {
        return FSDPC_OK;
    }
    if (fsdpc_range_is_shown(range)) {
        const void *values = fsdpc_arena_writable(arena, range);
        *changed = memcmp(values, range->address, range->bytes) != 0;
        FSDPC_TRY(show(arena, range));
    }
    range->written = false;
    return FSDPC_OK;
}
