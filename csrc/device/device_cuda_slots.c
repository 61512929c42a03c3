/* Addresses of the CUDA device and the pieces of memory that are mapped at them; see device.h. */
#include "device/device_cuda_impl.h"

#include <stdatomic.h>

#include "base/mem.h"

struct fsdpc_piece {
    size_t bytes;
    _Atomic int holders;      /* the owner and each mapping count as one */
    fsdpc_cu_handle physical; /* with virtual memory */
    void *block;              /* without virtual memory */
};

/* Without virtual memory a piece is a plain block, whose size need not be a multiple of a granule. */
enum { PLAIN_GRAIN = 512 };

size_t
fsdpc_cuda_grain(void *context)
{
    const struct fsdpc_cuda *cuda = context;
    return cuda->virtual_memory ? cuda->granule : PLAIN_GRAIN;
}

int
fsdpc_cuda_reserve(void *context, size_t bytes, void **out)
{
    const struct fsdpc_cuda *cuda = context;
    fsdpc_cu_ptr address;
    if (!cuda->virtual_memory) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, address_reserve(&address, bytes, cuda->granule, 0, 0),
             "reservation of %zu bytes of addresses", bytes);
    *out = (void *)(uintptr_t)address;
    return FSDPC_OK;
}

void
fsdpc_cuda_unreserve(void *context, void *address, size_t bytes)
{
    const struct fsdpc_cuda *cuda = context;
    if (cuda->virtual_memory && fsdpc_cuda_enter(cuda) == FSDPC_OK) {
        (void)cuda->driver->address_free(fsdpc_cuda_address(address), bytes);
    }
}

static int
fill_piece(struct fsdpc_cuda *cuda, fsdpc_piece *piece)
{
    if (!cuda->virtual_memory) {
        return fsdpc_cuda_alloc(cuda, piece->bytes, &piece->block);
    }
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, mem_create(&piece->physical, piece->bytes, &cuda->memory, 0),
             "allocation of %zu bytes of device memory", piece->bytes);
    return FSDPC_OK;
}

int
fsdpc_cuda_piece_new(void *context, size_t bytes, fsdpc_piece **out)
{
    fsdpc_piece *piece = fsdpc_mem_calloc(1, sizeof *piece);
    if (!piece) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a slot");
    }
    piece->bytes = bytes;
    piece->holders = 1;
    const int status = fill_piece(context, piece);
    if (status != FSDPC_OK) {
        fsdpc_mem_free(piece);
        return status;
    }
    *out = piece;
    return FSDPC_OK;
}

void
fsdpc_cuda_piece_free(void *context, fsdpc_piece *piece)
{
    struct fsdpc_cuda *cuda = context;
    if (atomic_fetch_sub(&piece->holders, 1) > 1) {
        return;
    }
    if (piece->block) {
        fsdpc_cuda_free(cuda, piece->block, piece->bytes);
    } else if (fsdpc_cuda_enter(cuda) == FSDPC_OK) {
        (void)cuda->driver->mem_release(piece->physical);
    }
    fsdpc_mem_free(piece);
}

int
fsdpc_cuda_show(void *context, void **address, fsdpc_piece *piece)
{
    const struct fsdpc_cuda *cuda = context;
    if (cuda->virtual_memory) {
        FSDPC_TRY(fsdpc_cuda_enter(cuda));
        FSDPC_TRY(
            fsdpc_cuda_map(cuda, fsdpc_cuda_address(*address), piece->bytes, piece->physical));
    } else {
        *address = piece->block;
    }
    atomic_fetch_add(&piece->holders, 1);
    return FSDPC_OK;
}

int
fsdpc_cuda_hide(void *context, void *address, fsdpc_piece *piece)
{
    struct fsdpc_cuda *cuda = context;
    if (cuda->virtual_memory) {
        FSDPC_TRY(fsdpc_cuda_enter(cuda));
        FSDPC_TRY(fsdpc_cuda_sync_all(cuda, "taking a slot from behind its addresses"));
        const unsigned mode = fsdpc_cuda_exchange_mode(cuda, FSDPC_CU_CAPTURE_RELAXED);
        const fsdpc_cu_result result =
            cuda->driver->mem_unmap(fsdpc_cuda_address(address), piece->bytes);
        (void)fsdpc_cuda_exchange_mode(cuda, mode);
        FSDPC_TRY(fsdpc_cuda_check(cuda->driver, result, "unmapping %zu bytes of device memory",
                                   piece->bytes));
    }
    fsdpc_cuda_piece_free(cuda, piece);
    return FSDPC_OK;
}
