/* Allocates host memory, copies, and maps pieces of memory at reserved addresses. On a device that does not
 * queue its work, a copy is a memcpy, and host memory is the device's own memory.
 */
#include "device/device_impl.h"

#include <string.h>

#include "base/status.h"

/* --- host memory and copies --------------------------------------------------------------------- */

int
fsdpc_device_host_alloc(fsdpc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    if (!device->i->host_alloc) {
        return fsdpc_device_alloc(device, bytes, out);
    }
    return bytes ? device->i->host_alloc(device->context, bytes, out) : FSDPC_OK;
}

void
fsdpc_device_host_free(fsdpc_device *device, void *block, size_t bytes)
{
    if (!device->i->host_free) {
        fsdpc_device_free(device, block, bytes);
    } else if (block) {
        device->i->host_free(device->context, block);
    }
}

static int
check_copy(size_t bytes, const void *a, const void *b)
{
    return bytes == 0 || (a && b)
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "copy: a buffer of %zu bytes is NULL", bytes);
}

/* Copies by `own`, the device's function for this direction, or by memcpy if the device has none (NULL). */
static int
copy_by(int (*own)(void *, void *, const void *, size_t), const fsdpc_device *device, void *dst,
        const void *src, size_t bytes)
{
    FSDPC_TRY(check_copy(bytes, dst, src));
    if (bytes && own) {
        return own(device->context, dst, src, bytes);
    }
    if (bytes) {
        memcpy(dst, src, bytes);
    }
    return FSDPC_OK;
}

int
fsdpc_device_copy_in(fsdpc_device *device, void *dst, const void *host, size_t bytes)
{
    return copy_by(device->i->copy_in, device, dst, host, bytes);
}

int
fsdpc_device_copy_out(fsdpc_device *device, void *host, const void *src, size_t bytes)
{
    return copy_by(device->i->copy_out, device, host, src, bytes);
}

int
fsdpc_device_copy(fsdpc_device *device, void *dst, const void *src, size_t bytes)
{
    return copy_by(device->i->copy, device, dst, src, bytes);
}

/* --- addresses and pieces of memory -------------------------------------------------------------- */

static int
check_pieces(const fsdpc_device *device)
{
    return device->i->reserve
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_UNAVAILABLE,
                             "device %s has no memory pieces to map: use a memory file",
                             device->i->name);
}

size_t
fsdpc_device_grain(const fsdpc_device *device)
{
    return device->i->grain ? device->i->grain(device->context) : 1;
}

static int
check_grain(const fsdpc_device *device, size_t bytes, const char *what)
{
    FSDPC_TRY(check_pieces(device));
    return bytes && bytes % fsdpc_device_grain(device) == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "%s of %zu bytes: not a multiple of %zu", what, bytes,
                             fsdpc_device_grain(device));
}

int
fsdpc_device_reserve(fsdpc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    FSDPC_TRY(check_grain(device, bytes, "a reservation"));
    return device->i->reserve(device->context, bytes, out);
}

void
fsdpc_device_unreserve(fsdpc_device *device, void *address, size_t bytes)
{
    if (address) {
        device->i->unreserve(device->context, address, bytes);
    }
}

int
fsdpc_device_piece_new(fsdpc_device *device, size_t bytes, fsdpc_piece **out)
{
    *out = NULL;
    FSDPC_TRY(check_grain(device, bytes, "a piece"));
    int status = device->i->piece_new(device->context, bytes, out);
    if (status == FSDPC_E_DEVMEM && fsdpc_device_trim(device)) {
        status = device->i->piece_new(device->context, bytes, out);
    }
    return status;
}

void
fsdpc_device_piece_free(fsdpc_device *device, fsdpc_piece *piece)
{
    if (piece) {
        device->i->piece_free(device->context, piece);
    }
}

int
fsdpc_device_show(fsdpc_device *device, void **address, fsdpc_piece *piece)
{
    FSDPC_TRY(check_pieces(device));
    return device->i->show(device->context, address, piece);
}

int
fsdpc_device_hide(fsdpc_device *device, void *address, fsdpc_piece *piece)
{
    FSDPC_TRY(check_pieces(device));
    return device->i->hide(device->context, address, piece);
}
