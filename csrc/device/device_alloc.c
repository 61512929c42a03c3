/* The memory of a device: the device's own, or a foreign allocator's.
 *
 * A block refers to its allocator, which frees the block even after another
 * allocator was set. An allocator lives until its last block is freed. Callbacks run
 * without the lock, because they may take locks of their own (an interpreter's).
 */
#include "device/device_impl.h"

#include <pthread.h>

#include "base/deadline.h"
#include "base/mem.h"
#include "base/status.h"

/* A reference-counted allocator: the device, its blocks and calls in progress hold references. */
struct fsdpc_source {
    fsdpc_allocator table;
    int refs;
};

struct fsdpc_block {
    struct fsdpc_block *next;
    struct fsdpc_source *source;
    void *address;
    size_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- allocators ---------------------------------------------------------------------------------- */

/* Returns the device's foreign allocator, with a reference that the caller drops, or NULL if none is set. */
static struct fsdpc_source *
take_source(fsdpc_device *device)
{
    pthread_mutex_lock(&lock);
    struct fsdpc_source *source = device->source;
    if (source) {
        source->refs++;
    }
    pthread_mutex_unlock(&lock);
    return source;
}

static void
drop_source(struct fsdpc_source *source)
{
    pthread_mutex_lock(&lock);
    const bool last = source && --source->refs == 0;
    pthread_mutex_unlock(&lock);
    if (last) {
        if (source->table.release) {
            source->table.release(source->table.context);
        }
        fsdpc_mem_free(source);
    }
}

int
fsdpc_device_set_allocator(fsdpc_device *device, const fsdpc_allocator *allocator)
{
    struct fsdpc_source *source = NULL;
    if (allocator) {
        source = fsdpc_mem_calloc(1, sizeof *source);
        if (!source) {
            return fsdpc_error(FSDPC_E_NOMEM, "no memory for an allocator");
        }
        *source = (struct fsdpc_source){.table = *allocator, .refs = 1};
    }
    pthread_mutex_lock(&lock);
    struct fsdpc_source *before = device->source;
    device->source = source;
    pthread_mutex_unlock(&lock);
    drop_source(before);
    return FSDPC_OK;
}

bool
fsdpc_device_trim(fsdpc_device *device)
{
    struct fsdpc_source *source = take_source(device);
    const bool can = source && source->table.trim;
    if (can) {
        source->table.trim(source->table.context);
    }
    drop_source(source);
    return can;
}

size_t
fsdpc_device_foreign_bytes(const fsdpc_device *device)
{
    pthread_mutex_lock(&lock);
    const size_t bytes = device->foreign_bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* --- blocks --------------------------------------------------------------------------------------- */

/* Zeroes a block. The host waits until this is done, so that the block is zero for every stream. */
static int
zero(fsdpc_device *device, void *block, size_t bytes)
{
    int status = FSDPC_OK;
    fsdpc_event *zeroed;
    FSDPC_TRY(fsdpc_device_event_new(device, &zeroed));
    FSDPC_GOTO(fsdpc_device_zero(device, block, bytes), done);
    FSDPC_GOTO(fsdpc_device_record(device, zeroed), done);
    FSDPC_GOTO(fsdpc_device_finish(device, zeroed, fsdpc_timeout(), "zeroing new memory"), done);
done:
    fsdpc_device_event_free(device, zeroed);
    return status;
}

static int
fill_block(fsdpc_device *device, struct fsdpc_block *block)
{
    const fsdpc_allocator *from = &block->source->table;
    FSDPC_TRY(
        from->alloc(from->context, block->bytes, fsdpc_device_current(device), &block->address));
    if (!block->address || (uintptr_t)block->address % device->caps.align_bytes) {
        return fsdpc_error(
            FSDPC_E_INTERNAL,
            "the allocator of device %s returned address %p, which is not aligned to %zu bytes",
            device->i->name, block->address, device->caps.align_bytes);
    }
    return zero(device, block->address, block->bytes);
}

/* A block that may still be in use is leaked rather than freed. */
static void
give_back(fsdpc_device *device, struct fsdpc_block *block)
{
    const fsdpc_allocator *to = &block->source->table;
    fsdpc_kept_error kept;
    fsdpc_error_keep(&kept);
    if (block->address &&
        (!device->i->drain ||
         device->i->drain(device->context, "giving device memory back") == FSDPC_OK)) {
        to->free(to->context, block->address);
    }
    fsdpc_error_restore(&kept);
    drop_source(block->source);
    fsdpc_mem_free(block);
}

static int
alloc_from(fsdpc_device *device, struct fsdpc_source *source, size_t bytes, void **out)
{
    struct fsdpc_block *block = fsdpc_mem_calloc(1, sizeof *block);
    if (!block) {
        drop_source(source);
        return fsdpc_error(FSDPC_E_NOMEM, "no memory to note a block of the device");
    }
    block->source = source;
    block->bytes = bytes;
    int status = fill_block(device, block);
    if (status != FSDPC_OK) {
        give_back(device, block);
        return status;
    }
    pthread_mutex_lock(&lock);
    block->next = device->blocks;
    device->blocks = block;
    device->foreign_bytes += bytes;
    pthread_mutex_unlock(&lock);
    *out = block->address;
    return FSDPC_OK;
}

int
fsdpc_device_alloc(fsdpc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    if (bytes == 0) {
        return FSDPC_OK;
    }
    struct fsdpc_source *source = take_source(device);
    return source ? alloc_from(device, source, bytes, out)
                  : device->i->alloc(device->context, bytes, out);
}

/* Removes the block at an address from the list. Returns NULL if the memory is the device's own. */
static struct fsdpc_block *
take_block(fsdpc_device *device, const void *address)
{
    pthread_mutex_lock(&lock);
    struct fsdpc_block **at = &device->blocks;
    while (*at && (*at)->address != address) {
        at = &(*at)->next;
    }
    struct fsdpc_block *found = *at;
    if (found) {
        *at = found->next;
        device->foreign_bytes -= found->bytes;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void
fsdpc_device_free(fsdpc_device *device, void *block, size_t bytes)
{
    struct fsdpc_block *foreign = block ? take_block(device, block) : NULL;
    if (foreign) {
        give_back(device, foreign);
    } else if (block) {
        device->i->free(device->context, block, bytes);
    }
}

int
fsdpc_device_discard(fsdpc_device *device, void *block, size_t bytes)
{
    return device->i->discard ? device->i->discard(device->context, block, bytes) : FSDPC_OK;
}
