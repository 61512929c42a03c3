/* Device and pinned memory, as mapped host memory.
 *
 * physical   a block of memory and the history of its accesses; made by cuMemCreate (as a memfd, so that
 *            two ranges can map it), cuMemAlloc or cuMemHostAlloc
 * range      reserved addresses, unreadable where nothing is mapped
 * mapping    addresses at which a physical block is mapped, with access rights
 *
 * Fresh device memory is full of NaN. Freed addresses stay reserved and unreadable for the life of the
 * process, so that any later use of them is found.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_memory.h"

enum { ALIGN = 512 };

typedef struct range {
    uintptr_t base;
    size_t bytes;
    bool live;
} range;

typedef struct label {
    uintptr_t base;
    size_t bytes;
    const char *text;
} label;

static physical *memories;
mapping *sim_mappings;
int sim_mapping_count;
static int mapping_capacity;
static range *ranges;
static int range_count, range_capacity;
static label *labels;
static int label_count, label_capacity;
static sim_space foreign;
static uint64_t handles_made;

/* --- finding ------------------------------------------------------------------------------------ */

static mapping *
find_mapping(uintptr_t address)
{
    for (int i = 0; i < sim_mapping_count; i++) {
        if (address >= sim_mappings[i].base &&
            address - sim_mappings[i].base < sim_mappings[i].bytes) {
            return &sim_mappings[i];
        }
    }
    return NULL;
}

static range *
find_range(uintptr_t address, size_t bytes)
{
    for (int i = 0; i < range_count; i++) {
        if (ranges[i].live && address >= ranges[i].base &&
            address - ranges[i].base <= ranges[i].bytes &&
            bytes <= ranges[i].bytes - (address - ranges[i].base)) {
            return &ranges[i];
        }
    }
    return NULL;
}

static physical *
find_handle(uint64_t handle)
{
    for (physical *memory = memories; memory; memory = memory->next) {
        if (handle && memory->handle == handle) {
            return memory;
        }
    }
    return NULL;
}

/* True if the driver has given out this address at some time. Freed addresses stay reserved, unreadable. */
static bool
was_ours(uintptr_t address)
{
    for (int i = 0; i < range_count; i++) {
        if (address >= ranges[i].base && address - ranges[i].base < ranges[i].bytes) {
            return true;
        }
    }
    return false;
}

const char *
sim_label_of(uintptr_t address)
{
    char text[64];
    for (int i = label_count - 1; i >= 0; i--) {
        if (address >= labels[i].base && address - labels[i].base < labels[i].bytes) {
            return labels[i].text;
        }
    }
    const mapping *found = find_mapping(address);
    snprintf(text, sizeof text, "unnamed memory at 0x%llx",
             (unsigned long long)(found ? found->base : address & ~(uintptr_t)4095));
    return sim_intern(text);
}

SIM_EXPORT void
simgpu_label(const void *ptr, size_t bytes, const char *text)
{
    sim_lock();
    int i = 0;
    while (i < label_count && (labels[i].base != (uintptr_t)ptr || labels[i].bytes != bytes)) {
        i++;
    }
    if (i < label_count) { /* the label moves to the end, as the last label wins */
        memmove(&labels[i], &labels[i + 1], (size_t)(label_count - i - 1) * sizeof *labels);
        label_count--;
    }
    labels = sim_grow(labels, label_count, &label_capacity, sizeof *labels);
    labels[label_count++] =
        (label){.base = (uintptr_t)ptr, .bytes = bytes, .text = sim_intern(text)};
    sim_unlock();
}

/* --- accesses ----------------------------------------------------------------------------------- */

static bool
refuse(simgpu_task *task, uintptr_t address, bool write, const char *why)
{
    sim_say(false, "%s: %s by %s (%s), %s", sim_label_of(address), write ? "written" : "read",
            sim_actor_name(task->actor), task->what, why);
    sim_sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    task->broken = true;
    return false;
}

bool
sim_access(simgpu_task *task, uintptr_t address, size_t bytes, bool write)
{
    if (task->counted) {
        *(write ? &sim_counters.bytes_written : &sim_counters.bytes_read) += (int64_t)bytes;
    }
    while (bytes > 0) {
        const mapping *found = find_mapping(address);
        if (!found && (!sim_options.foreign || was_ours(address))) {
            return refuse(task, address, write, "but nothing is mapped there");
        }
        if (!found) {
            sim_space_access(&foreign, address, address + bytes, task, write,
                             sim_label_of(address));
            return true;
        }
        if (!(found->rights & (write ? PROT_WRITE : PROT_READ))) {
            return refuse(task, address, write, "which its mapping does not allow");
        }
        if (task->stamp < found->since) {
            sim_say(true, "%s: used by %s (%s), put there before the memory was mapped",
                    sim_label_of(address), sim_actor_name(task->actor), task->what);
        }
        uint64_t lo = found->offset + (address - found->base);
        size_t part = found->bytes - (address - found->base);
        part = part < bytes ? part : bytes;
        sim_space_access(&found->memory->space, lo, lo + part, task, write, sim_label_of(address));
        found->last[task->actor] = (use){.time = task->time, .what = task->what};
        sim_verify_note(address, part, write, found);
        address += part;
        bytes -= part;
    }
    return true;
}

SIM_EXPORT bool
simgpu_task_read(simgpu_task *task, const void *ptr, size_t bytes)
{
    return sim_access(task, (uintptr_t)ptr, bytes, false);
}

SIM_EXPORT bool
simgpu_task_write(simgpu_task *task, void *ptr, size_t bytes)
{
    return sim_access(task, (uintptr_t)ptr, bytes, true);
}

SIM_EXPORT bool
simgpu_accessible(const void *ptr, size_t bytes, bool write)
{
    bool may = true;
    uintptr_t address = (uintptr_t)ptr, end = address + bytes;
    sim_lock();
    while (may && address < end) {
        const mapping *found = find_mapping(address);
        may = found && (found->rights & (write ? PROT_WRITE : PROT_READ));
        address = found ? found->base + found->bytes : end;
    }
    sim_unlock();
    return may;
}

SIM_EXPORT bool
simgpu_is_virtual(const void *ptr, size_t bytes)
{
    bool is = true;
    uintptr_t address = (uintptr_t)ptr, end = address + bytes;
    sim_lock();
    while (is && address < end) {
        const mapping *found = find_mapping(address);
        is = found && found->memory->kind == VIRTUAL;
        address = found ? found->base + found->bytes : end;
    }
    sim_unlock();
    return is;
}

bool
sim_is_pinned(uintptr_t address, size_t bytes)
{
    const mapping *found = find_mapping(address);
    return found && bytes <= found->bytes - (address - found->base);
}

enum sim_place
sim_place_of(uintptr_t address)
{
    const mapping *found = find_mapping(address);
    if (!found) {
        return was_ours(address) ? SIM_ON_DEVICE : SIM_ELSEWHERE;
    }
    return found->memory->kind == VIRTUAL || found->memory->kind == PLAIN ? SIM_ON_DEVICE
                                                                          : SIM_ON_HOST;
}

/* Reports work that may still use a mapping which the processor removes: all users of the mapping that the
 * processor has not observed as done. */
static void
check_unused(const mapping *gone, const char *act)
{
    const uint64_t *seen = sim_actors[sim_processor()].clock;
    for (int i = 0; i < SIM_ACTORS; i++) {
        if (gone->last[i].time > seen[i]) {
            sim_say(true, "%s: used by %s (%s), then %s, nothing orders them",
                    sim_label_of(gone->base), sim_actor_name(i), gone->last[i].what, act);
        }
    }
}

/* --- pieces of memory ----------------------------------------------------------------------------- */

static physical *
new_physical(kind made, size_t bytes)
{
    physical *memory = sim_alloc(1, sizeof *memory);
    memory->kind = made;
    memory->bytes = bytes;
    memory->fd = -1;
    memory->next = memories;
    memories = memory;
    return memory;
}

static void
free_physical(physical *memory)
{
    physical **link = &memories;
    while (*link != memory) {
        link = &(*link)->next;
    }
    *link = memory->next;
    if (memory->fd >= 0) {
        close(memory->fd);
    }
    if (memory->kind == VIRTUAL || memory->kind == PLAIN) {
        sim_counters.device_bytes -= (int64_t)memory->bytes;
    } else if (memory->kind == HOST) {
        sim_counters.host_bytes -= (int64_t)memory->bytes;
    }
    sim_space_free(&memory->space);
    free(memory);
}

static bool
take_device_bytes(size_t bytes)
{
    if (bytes > sim_options.memory_bytes - (size_t)sim_counters.device_bytes) {
        return false;
    }
    sim_counters.device_bytes += (int64_t)bytes;
    if (sim_counters.device_bytes > sim_counters.peak_device_bytes) {
        sim_counters.peak_device_bytes = sim_counters.device_bytes;
    }
    sim_counters.allocations++;
    return true;
}

static void
add_mapping(uintptr_t base, size_t bytes, physical *memory, size_t offset, int rights)
{
    sim_mappings =
        sim_grow(sim_mappings, sim_mapping_count, &mapping_capacity, sizeof *sim_mappings);
    sim_mappings[sim_mapping_count++] = (mapping){.base = base,
                                                  .bytes = bytes,
                                                  .memory = memory,
                                                  .offset = offset,
                                                  .rights = rights,
                                                  .since = sim_now()};
    sim_mappings[sim_mapping_count - 1].last = sim_alloc(SIM_ACTORS, sizeof(use));
    memory->mappings++;
}

/* Unmaps the memory; its addresses stay reserved. */
static void
remove_mapping(mapping *gone)
{
    physical *memory = gone->memory;
    mmap((void *)gone->base, gone->bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    free(gone->last);
    *gone = sim_mappings[--sim_mapping_count];
    if (--memory->mappings == 0 && memory->handle == 0) {
        free_physical(memory);
    }
}

static void
add_range(uintptr_t base, size_t bytes, bool live)
{
    ranges = sim_grow(ranges, range_count, &range_capacity, sizeof *ranges);
    ranges[range_count++] = (range){.base = base, .bytes = bytes, .live = live};
}

static uintptr_t
reserve_addresses(size_t bytes, size_t alignment)
{
    char *base = mmap(NULL, bytes + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? 0 : ((uintptr_t)base + alignment - 1) / alignment * alignment;
}

/* --- virtual memory management ---------------------------------------------------------------------- */

static CUresult
enter_vmm(enum sim_entry entry)
{
    CUresult result = sim_enter(entry, false);
    return result || sim_options.vmm ? result : CUDA_ERROR_NOT_SUPPORTED;
}

static bool
whole(size_t bytes)
{
    return bytes > 0 && bytes % sim_options.granule == 0;
}

SIM_EXPORT CUresult
cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option)
{
    SIM_TRY(enter_vmm(SIM_cuMemGetAllocationGranularity));
    SIM_REFUSE(!granularity || !prop || option < 0 || option > 1, CUDA_ERROR_INVALID_VALUE);
    *granularity = sim_options.granule;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemAddressReserve(CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr wish,
                    unsigned long long flags)
{
    SIM_TRY(enter_vmm(SIM_cuMemAddressReserve));
    (void)wish;
    SIM_REFUSE(!ptr || !whole(bytes) || flags || (alignment & (alignment - 1)),
               CUDA_ERROR_INVALID_VALUE);
    uintptr_t base =
        reserve_addresses(bytes, alignment > sim_options.granule ? alignment : sim_options.granule);
    SIM_REFUSE(!base, CUDA_ERROR_OUT_OF_MEMORY);
    add_range(base, bytes, true);
    *ptr = base;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemAddressFree(CUdeviceptr ptr, size_t bytes)
{
    SIM_TRY(enter_vmm(SIM_cuMemAddressFree));
    range *found = find_range((uintptr_t)ptr, bytes);
    SIM_REFUSE(!found || found->base != ptr || found->bytes != bytes, CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < sim_mapping_count; i++) {
        if (sim_mappings[i].base >= ptr && sim_mappings[i].base - ptr < bytes) {
            sim_say(false, "%s: its addresses are freed while memory is mapped there",
                    sim_label_of(sim_mappings[i].base));
            return sim_leave(CUDA_ERROR_INVALID_VALUE);
        }
    }
    found->live = false;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
            unsigned long long flags)
{
    SIM_TRY(enter_vmm(SIM_cuMemCreate));
    SIM_REFUSE(!handle || !prop || !whole(bytes) || flags ||
                   prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
                   prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE,
               CUDA_ERROR_INVALID_VALUE);
    SIM_REFUSE(prop->location.id < 0 || prop->location.id >= sim_options.devices,
               CUDA_ERROR_INVALID_DEVICE);
    SIM_REFUSE(!take_device_bytes(bytes), CUDA_ERROR_OUT_OF_MEMORY);
    physical *memory = new_physical(VIRTUAL, bytes);
    memory->fd = memfd_create("simgpu", MFD_CLOEXEC);
    void *window = MAP_FAILED;
    if (memory->fd >= 0 && ftruncate(memory->fd, (off_t)bytes) == 0) {
        window = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
    }
    if (window == MAP_FAILED) {
        free_physical(memory);
        return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    memset(window, 0xff, bytes);
    munmap(window, bytes);
    memory->handle = ++handles_made;
    *handle = memory->handle;
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemRelease(CUmemGenericAllocationHandle handle)
{
    SIM_TRY(enter_vmm(SIM_cuMemRelease));
    physical *memory = find_handle(handle);
    if (!memory) {
        sim_say(false, "memory handle %llu is released but was not there",
                (unsigned long long)handle);
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    memory->handle = 0;
    sim_counters.frees++;
    if (memory->mappings == 0) {
        free_physical(memory);
    }
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemMap(CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
         unsigned long long flags)
{
    SIM_TRY(enter_vmm(SIM_cuMemMap));
    physical *memory = find_handle(handle);
    SIM_REFUSE(!memory || !whole(bytes) || offset % sim_options.granule || flags ||
                   offset > memory->bytes || bytes > memory->bytes - offset ||
                   !find_range((uintptr_t)ptr, bytes),
               CUDA_ERROR_INVALID_VALUE);
    /* As with driver 580 on an H200, memory can be mapped only as a whole, but any number of times. */
    SIM_REFUSE(offset || bytes != memory->bytes, CUDA_ERROR_NOT_SUPPORTED);
    for (int i = 0; i < sim_mapping_count; i++) {
        if (sim_mappings[i].base < ptr + bytes &&
            ptr < sim_mappings[i].base + sim_mappings[i].bytes) {
            sim_say(false, "%s: mapped while other memory is mapped there",
                    sim_label_of(sim_mappings[i].base));
            return sim_leave(CUDA_ERROR_ALREADY_MAPPED);
        }
    }
    void *placed = mmap((void *)(uintptr_t)ptr, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        memory->fd, (off_t)offset);
    SIM_REFUSE(placed == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    add_mapping((uintptr_t)ptr, bytes, memory, offset, PROT_NONE);
    sim_counters.maps++;
    return sim_leave(CUDA_SUCCESS);
}

/* Calls act() for the mappings that fill [ptr, ptr + bytes) exactly. If there are none, returns false. */
static bool
for_mappings(uintptr_t ptr, size_t bytes, void (*act)(mapping *, int), int argument)
{
    uintptr_t end = ptr + bytes;
    for (uintptr_t at = ptr; at < end;) {
        const mapping *found = find_mapping(at);
        if (!found || found->base != at || found->bytes > end - at ||
            found->memory->kind != VIRTUAL) {
            return false;
        }
        at += found->bytes;
    }
    for (uintptr_t at = ptr; at < end;) {
        mapping *found = find_mapping(at);
        at += found->bytes;
        act(found, argument);
    }
    return true;
}

static void
unmap_one(mapping *gone, int unused)
{
    (void)unused;
    check_unused(gone, "unmapped");
    remove_mapping(gone);
    sim_counters.unmaps++;
}

static void
set_rights(mapping *found, int rights)
{
    found->rights = rights;
    mprotect((void *)found->base, found->bytes, rights);
}

SIM_EXPORT CUresult
cuMemUnmap(CUdeviceptr ptr, size_t bytes)
{
    SIM_TRY(enter_vmm(SIM_cuMemUnmap));
    SIM_REFUSE(!whole(bytes) || !for_mappings((uintptr_t)ptr, bytes, unmap_one, 0),
               CUDA_ERROR_INVALID_VALUE);
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemSetAccess(CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
    SIM_TRY(enter_vmm(SIM_cuMemSetAccess));
    SIM_REFUSE(!desc || count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                   !whole(bytes) || (desc->flags & ~CU_MEM_ACCESS_FLAGS_PROT_READWRITE) ||
                   desc->flags == 2,
               CUDA_ERROR_INVALID_VALUE);
    int rights = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                 : desc->flags                                     ? PROT_READ
                                                                   : PROT_NONE;
    SIM_REFUSE(!for_mappings((uintptr_t)ptr, bytes, set_rights, rights), CUDA_ERROR_INVALID_VALUE);
    return sim_leave(CUDA_SUCCESS);
}

/* --- plain memory ------------------------------------------------------------------------------------- */

/* Maps the memory at new addresses. If there are none left, frees the memory and returns 0. */
static uintptr_t
map_anonymous(physical *memory)
{
    size_t page = 4096, all = (memory->bytes + page - 1) / page * page;
    uintptr_t base = reserve_addresses(all, page);
    if (!base || mprotect((void *)base, all, PROT_READ | PROT_WRITE) != 0) {
        free_physical(memory);
        return 0;
    }
    memset((void *)base, 0xff, memory->bytes);
    add_range(base, all, false); /* false: not made by cuMemAddressReserve */
    add_mapping(base, memory->bytes, memory, 0, PROT_READ | PROT_WRITE);
    return base;
}

SIM_EXPORT CUresult
cuMemAlloc(CUdeviceptr *ptr, size_t bytes)
{
    SIM_ENTER(cuMemAlloc, true);
    SIM_REFUSE(!ptr || bytes == 0, CUDA_ERROR_INVALID_VALUE);
    SIM_TRY(sim_capture_unsafe("an allocation"));
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    SIM_REFUSE(!take_device_bytes(bytes), CUDA_ERROR_OUT_OF_MEMORY);
    physical *memory = new_physical(PLAIN, bytes);
    *ptr = map_anonymous(memory);
    return sim_leave(*ptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

static mapping *
find_start(uintptr_t address, kind wanted)
{
    mapping *found = find_mapping(address);
    return found && found->base == address && found->memory->kind == wanted ? found : NULL;
}

/* A real driver waits for the whole device in this call, so this function runs all work that was enqueued. */
SIM_EXPORT CUresult
cuMemFree(CUdeviceptr ptr)
{
    SIM_ENTER(cuMemFree, true);
    if (ptr == 0) {
        return sim_leave(CUDA_SUCCESS);
    }
    if (!find_start((uintptr_t)ptr, PLAIN)) {
        sim_say(false, "%s: freed but not allocated", sim_label_of((uintptr_t)ptr));
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    SIM_TRY(sim_capture_unsafe("giving memory back"));
    sim_counters.host_syncs++;
    CUresult result = sim_demand_all();
    mapping *found = find_start((uintptr_t)ptr, PLAIN);
    if (found) {
        remove_mapping(found);
        sim_counters.frees++;
    }
    return sim_leave(result);
}

SIM_EXPORT CUresult
cuMemHostAlloc(void **ptr, size_t bytes, unsigned flags)
{
    SIM_ENTER(cuMemHostAlloc, true);
    SIM_REFUSE(!ptr || bytes == 0 || flags > 7, CUDA_ERROR_INVALID_VALUE);
    SIM_TRY(sim_capture_unsafe("an allocation of pinned memory"));
    physical *memory = new_physical(HOST, bytes);
    sim_counters.host_bytes += (int64_t)bytes;
    sim_counters.host_allocations++;
    *ptr = (void *)map_anonymous(memory);
    return sim_leave(*ptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

SIM_EXPORT CUresult
cuMemFreeHost(void *ptr)
{
    SIM_ENTER(cuMemFreeHost, true);
    mapping *found = find_start((uintptr_t)ptr, HOST);
    if (!found) {
        sim_say(false, "%s: given back but not allocated", sim_label_of((uintptr_t)ptr));
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    check_unused(found, "freed");
    remove_mapping(found);
    return sim_leave(CUDA_SUCCESS);
}

SIM_EXPORT CUresult
cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    SIM_ENTER(cuMemGetInfo, true);
    *total = sim_options.memory_bytes;
    *free_bytes =
        sim_options.memory_bytes - (size_t)sim_counters.device_bytes - sim_options.foreign_bytes;
    return sim_leave(CUDA_SUCCESS);
}

/* Fails for the processor's own memory, which the driver does not know. */
SIM_EXPORT CUresult
cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
    SIM_ENTER(cuPointerGetAttribute, true);
    const mapping *found = find_mapping((uintptr_t)address);
    SIM_REFUSE(attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE || !found, CUDA_ERROR_INVALID_VALUE);
    const unsigned type = sim_place_of((uintptr_t)address) == SIM_ON_DEVICE ? CU_MEMORYTYPE_DEVICE
                                                                            : CU_MEMORYTYPE_HOST;
    memcpy(value, &type, sizeof type);
    return sim_leave(CUDA_SUCCESS);
}

/* --- the end --------------------------------------------------------------------------------------------- */

int
sim_memory_leaks(char *text, size_t bytes)
{
    int count = 0;
    static const char *const kinds[] = {"mapping", "device memory", "host memory"};
    for (int i = 0; i < sim_mapping_count; i++) {
        count =
            sim_list(text, bytes, count, "%s: %s, %zu bytes\n", kinds[sim_mappings[i].memory->kind],
                     sim_label_of(sim_mappings[i].base), sim_mappings[i].bytes);
    }
    for (physical *memory = memories; memory; memory = memory->next) {
        if (memory->handle) {
            count = sim_list(text, bytes, count, "memory handle %llu, %zu bytes\n",
                             (unsigned long long)memory->handle, memory->bytes);
        }
    }
    for (int i = 0; i < range_count; i++) {
        if (ranges[i].live) {
            count = sim_list(text, bytes, count, "addresses: %s, %zu bytes\n",
                             sim_label_of(ranges[i].base), ranges[i].bytes);
        }
    }
    return count;
}

/* Also releases all reserved addresses, so that the next test starts afresh. */
void
sim_memory_reset(void)
{
    while (sim_mapping_count) {
        remove_mapping(&sim_mappings[sim_mapping_count - 1]);
    }
    while (memories) {
        free_physical(memories);
    }
    for (int i = 0; i < range_count; i++) {
        munmap((void *)ranges[i].base, ranges[i].bytes);
    }
    range_count = label_count = 0;
    sim_space_free(&foreign);
}
