/* Memory of the CUDA device. Large blocks are physical memory mapped at reserved addresses, so that
 * collectives can register them. Small blocks, and all blocks without virtual memory, are plain allocations.
 */
#include "device/device_cuda_impl.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

/* True if blocks of this size are mapped. Smaller blocks, if mapped, would waste most of a granule. */
static bool
is_mapped(const struct fsdpc_cuda *cuda, size_t bytes)
{
    return cuda->virtual_memory && bytes >= cuda->granule / 2;
}

/* --- pieces behind addresses ---------------------------------------------------------------------- */

int
fsdpc_cuda_map(const struct fsdpc_cuda *cuda, fsdpc_cu_ptr address, size_t bytes,
               fsdpc_cu_handle physical)
{
    const fsdpc_cu_access access = {.location = cuda->memory.location,
                                    .flags = FSDPC_CU_ACCESS_READWRITE};
    FSDPC_CU(cuda, mem_map(address, bytes, 0, physical, 0), "mapping %zu bytes of device memory",
             bytes);
    const int status =
        fsdpc_cuda_check(cuda->driver, cuda->driver->mem_set_access(address, bytes, &access, 1),
                         "access to %zu bytes of device memory", bytes);
    if (status != FSDPC_OK) {
        (void)cuda->driver->mem_unmap(address, bytes);
    }
    return status;
}

static int
map_somewhere(const struct fsdpc_cuda *cuda, size_t bytes, fsdpc_cu_handle physical,
              fsdpc_cu_ptr *out)
{
    fsdpc_cu_ptr address;
    FSDPC_CU(cuda, address_reserve(&address, bytes, cuda->granule, 0, 0),
             "reservation of %zu bytes of addresses", bytes);
    const int status = fsdpc_cuda_map(cuda, address, bytes, physical);
    if (status != FSDPC_OK) {
        (void)cuda->driver->address_free(address, bytes);
        return status;
    }
    *out = address;
    return FSDPC_OK;
}

static int
alloc_mapped(const struct fsdpc_cuda *cuda, size_t bytes, fsdpc_cu_ptr *out)
{
    const size_t rounded = fsdpc_round_up(bytes, cuda->granule);
    fsdpc_cu_handle physical;
    FSDPC_CU(cuda, mem_create(&physical, rounded, &cuda->memory, 0),
             "allocation of %zu bytes of device memory", rounded);
    const int status = map_somewhere(cuda, rounded, physical, out);
    (void)cuda->driver->mem_release(physical);
    return status;
}

static void
free_mapped(const struct fsdpc_cuda *cuda, fsdpc_cu_ptr address, size_t bytes)
{
    const size_t rounded = fsdpc_round_up(bytes, cuda->granule);
    (void)cuda->driver->mem_unmap(address, rounded);
    (void)cuda->driver->address_free(address, rounded);
}

static bool
attribute(const struct fsdpc_cuda *cuda, unsigned which)
{
    int value = 0;
    return cuda->driver->device_get_attribute(&value, which, cuda->device) == FSDPC_CU_SUCCESS &&
           value != 0;
}

static bool
has_entries(const fsdpc_cuda_driver *d)
{
    return d->address_reserve && d->address_free && d->mem_create && d->mem_release && d->mem_map &&
           d->mem_unmap && d->mem_set_access && d->mem_granularity;
}

/* Tries what an arena needs: one piece of memory mapped at two addresses. */
static bool
shows_twice(const struct fsdpc_cuda *cuda)
{
    bool works = false;
    fsdpc_cu_handle physical;
    fsdpc_cu_ptr first, second;
    const size_t bytes = 2 * cuda->granule;
    if (cuda->driver->mem_create(&physical, bytes, &cuda->memory, 0) != FSDPC_CU_SUCCESS) {
        return false;
    }
    if (map_somewhere(cuda, bytes, physical, &first) == FSDPC_OK) {
        works = map_somewhere(cuda, bytes, physical, &second) == FSDPC_OK;
        if (works) {
            free_mapped(cuda, second, bytes);
        }
        free_mapped(cuda, first, bytes);
    }
    (void)cuda->driver->mem_release(physical);
    return works;
}

/* Tries a mapping: on MIG instances and in sandboxes, mappings may fail although attributes allow them. */
static bool
maps(struct fsdpc_cuda *cuda, int handle_types, unsigned char rdma_capable)
{
    cuda->memory.handle_types = handle_types;
    cuda->memory.rdma_capable = rdma_capable;
    return cuda->driver->mem_granularity(&cuda->granule, &cuda->memory,
                                         FSDPC_CU_GRANULARITY_RECOMMENDED) == FSDPC_CU_SUCCESS &&
           cuda->granule > 0 && shows_twice(cuda);
}

/* Tries shareable handles with RDMA first, because NCCL registers such memory. Then tries plain handles. */
static bool
try_virtual_memory(struct fsdpc_cuda *cuda)
{
    if (!has_entries(cuda->driver) || !attribute(cuda, FSDPC_CU_ATTRIBUTE_VIRTUAL_MEMORY)) {
        return false;
    }
    const int handles =
        attribute(cuda, FSDPC_CU_ATTRIBUTE_POSIX_HANDLES) ? FSDPC_CU_HANDLE_POSIX : 0;
    const bool rdma = attribute(cuda, FSDPC_CU_ATTRIBUTE_RDMA_VIRTUAL_MEMORY);
    return (rdma && maps(cuda, handles, 1)) || (handles && maps(cuda, handles, 0)) ||
           maps(cuda, 0, 0);
}

int
fsdpc_cuda_memory_init(struct fsdpc_cuda *cuda)
{
    cuda->memory = (fsdpc_cu_memory){
        .type = FSDPC_CU_MEMORY_PINNED,
        .location = {.type = FSDPC_CU_LOCATION_DEVICE, .id = cuda->device},
    };
    cuda->virtual_memory = try_virtual_memory(cuda);
    fsdpc_error_clear();
    if (!cuda->virtual_memory) {
        snprintf(cuda->note, sizeof cuda->note,
                 "this GPU has no virtual memory management (part of a GPU, or an old driver): "
                 "each slot is a plain allocation");
    }
    return FSDPC_OK;
}

/* --- blocks --------------------------------------------------------------------------------------- */

int
fsdpc_cuda_alloc(void *context, size_t bytes, void **out)
{
    struct fsdpc_cuda *cuda = context;
    fsdpc_cu_ptr address = 0;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    if (is_mapped(cuda, bytes)) {
        FSDPC_TRY(alloc_mapped(cuda, bytes, &address));
    } else {
        FSDPC_CU(cuda, mem_alloc(&address, bytes), "allocation of %zu bytes of device memory",
                 bytes);
    }
    void *block = (void *)(uintptr_t)address;
    int status = fsdpc_cuda_zero(cuda, block, bytes);
    if (status == FSDPC_OK) {
        status = fsdpc_cuda_sync(cuda, "zeroing new memory");
    }
    if (status != FSDPC_OK) {
        fsdpc_cuda_free(cuda, block, bytes);
        return status;
    }
    *out = block;
    return FSDPC_OK;
}

/* Frees memory by `give` after a host sync. Memory that may be in use, because the GPU does not finish or
 * the current stream is captured, is leaked rather than freed. */
static void
give_back(struct fsdpc_cuda *cuda, const char *what,
          void (*give)(const struct fsdpc_cuda *, void *, size_t), void *block, size_t bytes)
{
    fsdpc_kept_error kept;
    fsdpc_error_keep(&kept);
    if (fsdpc_cuda_enter(cuda) != FSDPC_OK || fsdpc_cuda_sync_all(cuda, what) != FSDPC_OK) {
        fsdpc_error_restore(&kept);
        return;
    }
    const unsigned mode = fsdpc_cuda_exchange_mode(cuda, FSDPC_CU_CAPTURE_RELAXED);
    give(cuda, block, bytes);
    (void)fsdpc_cuda_exchange_mode(cuda, mode);
}

static void
give_block(const struct fsdpc_cuda *cuda, void *block, size_t bytes)
{
    if (is_mapped(cuda, bytes)) {
        free_mapped(cuda, fsdpc_cuda_address(block), bytes);
    } else {
        (void)cuda->driver->mem_free(fsdpc_cuda_address(block));
    }
}

void
fsdpc_cuda_free(void *context, void *block, size_t bytes)
{
    give_back(context, "giving device memory back", give_block, block, bytes);
}

int
fsdpc_cuda_host_alloc(void *context, size_t bytes, void **out)
{
    const struct fsdpc_cuda *cuda = context;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    const fsdpc_cu_result result = cuda->driver->host_alloc(out, bytes, FSDPC_CU_HOST_PORTABLE);
    if (result == FSDPC_CU_OUT_OF_MEMORY) {
        return fsdpc_error(FSDPC_E_NOMEM, "allocation of %zu bytes of pinned host memory", bytes);
    }
    FSDPC_TRY(fsdpc_cuda_check(cuda->driver, result, "allocation of pinned host memory"));
    memset(*out, 0, bytes);
    return FSDPC_OK;
}

static void
give_pinned(const struct fsdpc_cuda *cuda, void *block, size_t bytes)
{
    (void)bytes;
    (void)cuda->driver->host_free(block);
}

void
fsdpc_cuda_host_free(void *context, void *block)
{
    give_back(context, "giving pinned memory back", give_pinned, block, 0);
}

/* --- copies and fills ------------------------------------------------------------------------------ */

int
fsdpc_cuda_copy_in(void *context, void *dst, const void *host, size_t bytes)
{
    const struct fsdpc_cuda *cuda = context;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, copy_to_device(fsdpc_cuda_address(dst), host, bytes, fsdpc_cuda_current(cuda)),
             "copy of %zu bytes to the GPU", bytes);
    return FSDPC_OK;
}

int
fsdpc_cuda_copy_out(void *context, void *host, const void *src, size_t bytes)
{
    const struct fsdpc_cuda *cuda = context;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, copy_to_host(host, fsdpc_cuda_address(src), bytes, fsdpc_cuda_current(cuda)),
             "copy of %zu bytes from the GPU", bytes);
    return FSDPC_OK;
}

int
fsdpc_cuda_copy(void *context, void *dst, const void *src, size_t bytes)
{
    const struct fsdpc_cuda *cuda = context;
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(
        cuda,
        copy(fsdpc_cuda_address(dst), fsdpc_cuda_address(src), bytes, fsdpc_cuda_current(cuda)),
        "copy of %zu bytes on the GPU", bytes);
    return FSDPC_OK;
}

static int
set_bytes(const struct fsdpc_cuda *cuda, void *dst, unsigned char value, size_t bytes)
{
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, set_bytes(fsdpc_cuda_address(dst), value, bytes, fsdpc_cuda_current(cuda)),
             "filling %zu bytes of device memory", bytes);
    return FSDPC_OK;
}

int
fsdpc_cuda_zero(void *context, void *dst, size_t bytes)
{
    return set_bytes(context, dst, 0, bytes);
}

int
fsdpc_cuda_poison(void *context, void *dst, fsdpc_dtype type, int64_t n)
{
    const uint8_t byte = type == FSDPC_BYTES ? 0x7F : 0xFF; /* see fsdpc_kernel_poison */
    return set_bytes(context, dst, byte, (size_t)n * fsdpc_dtype_bytes(type));
}
