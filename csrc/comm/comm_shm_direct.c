/* Memory that all ranks of a group see, and collectives that leave the bytes where they lie.
 *
 * A buffer is one range of the segment, mapped whole by every rank: the parts of all ranks, one
 * after another (or the one common part), and a last page that counts the ranks which have freed
 * it; the last of them gives the memory back. Reads of peers' parts lie between two meetings: the
 * first says that all have written, the second that all have read.
 */
#include <string.h>

#include "comm/comm_shm_impl.h"
#include "base/mem.h"
#include "base/status.h"

/* --- buffers -------------------------------------------------------------------------------- */

static _Atomic uint32_t *
freed_count(const fsdpc_comm_buffer *buffer)
{
    return (_Atomic uint32_t *)(void *)(buffer->base + buffer->all_bytes - fsdpc_shm_page_bytes());
}

static int
place_buffer(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer)
{
    void *base;
    size_t parts;
    int count = buffer->common ? 1 : self->base.world;
    if (!fsdpc_size_mul(buffer->bytes, (size_t)count, &parts) ||
        !fsdpc_size_add(parts, fsdpc_shm_page_bytes(), &buffer->all_bytes)) {
        return fsdpc_error(FSDPC_E_NOMEM, "a shared buffer of %zu bytes for each of %d ranks",
                           buffer->bytes, count);
    }
    FSDPC_TRY(fsdpc_shm_alloc(self->shm, buffer->all_bytes, true, &buffer->offset));
    FSDPC_TRY(fsdpc_shm_map(self->shm, buffer->offset, buffer->all_bytes, NULL, &base));
    buffer->base = base;
    return FSDPC_OK;
}

/* Tells the others how it went here; on FSDPC_OK all ranks have the buffer. */
static int
vote(fsdpc_comm_shm_group *self, fsdpc_call call, int status)
{
    char text[FSDPC_COMM_TEXT_BYTES] = "";
    int refusing = -1;
    if (status != FSDPC_OK) {
        strncpy(text, fsdpc_error_text(), sizeof text - 1);
    }
    call.verdict = status;
    FSDPC_TRY(fsdpc_comm_shm_meet(self, &call, "new shared buffer", &refusing));
    if (status != FSDPC_OK) {
        return fsdpc_error(status, "%s", text);
    }
    if (refusing >= 0) {
        return fsdpc_error(FSDPC_E_NOMEM, "rank %d could not make its shared buffer of %llu bytes",
                           refusing, (unsigned long long)call.count);
    }
    return FSDPC_OK;
}

int
fsdpc_comm_shm_buffer_new(fsdpc_comm *comm, size_t bytes, bool common, fsdpc_comm_buffer **out)
{
    fsdpc_comm_shm_group *self = fsdpc_comm_shm_of(comm);
    fsdpc_call call = {.op = FSDPC_CALL_BUFFER, .detail = common, .count = bytes};
    fsdpc_comm_buffer *buffer = fsdpc_mem_calloc(1, sizeof *buffer);
    int made = buffer ? FSDPC_OK : fsdpc_error(FSDPC_E_NOMEM, "no memory for a shared buffer");
    size_t page = fsdpc_shm_page_bytes();
    int status = FSDPC_OK;
    /* First that all ask for the same, because asking for more moves what comes after. */
    FSDPC_GOTO(vote(self, call, made), fail);
    *buffer = (fsdpc_comm_buffer){.comm = comm, .common = common, .id = ++self->buffers_made};
    bool fits = bytes <= SIZE_MAX - page;
    buffer->bytes = fits ? fsdpc_round_up(bytes ? bytes : 1, page) : SIZE_MAX / page * page;
    FSDPC_GOTO(vote(self, call, place_buffer(self, buffer)), fail);
    buffer->next = self->buffers;
    self->buffers = buffer;
    *out = buffer;
    return FSDPC_OK;
fail:
    if (status == FSDPC_E_MISMATCH) {
        fsdpc_comm_break(comm, status, fsdpc_error_text());
    }
    if (buffer && buffer->offset) {
        (void)fsdpc_shm_discard(self->shm, buffer->offset, buffer->all_bytes);
        fsdpc_shm_unmap(buffer->base, buffer->all_bytes);
    }
    fsdpc_mem_free(buffer);
    return status;
}

void
fsdpc_comm_shm_buffer_free(fsdpc_comm_buffer *buffer)
{
    if (buffer->comm) {
        fsdpc_comm_shm_group *self = fsdpc_comm_shm_of(buffer->comm);
        fsdpc_comm_buffer **link = &self->buffers;
        while (*link != buffer) {
            link = &(*link)->next;
        }
        *link = buffer->next;
        if (atomic_fetch_add(freed_count(buffer), 1) + 1 == (uint32_t)self->base.world) {
            /* Failing only costs memory until the group ends. */
            (void)fsdpc_shm_discard(self->shm, buffer->offset, buffer->all_bytes);
        }
    }
    fsdpc_shm_unmap(buffer->base, buffer->all_bytes);
    fsdpc_mem_free(buffer);
}

fsdpc_comm_buffer *
fsdpc_comm_shm_find(const fsdpc_comm_shm_group *self, const void *address, size_t bytes)
{
    for (fsdpc_comm_buffer *buffer = self->buffers; buffer; buffer = buffer->next) {
        const char *part = fsdpc_comm_buffer_view(buffer, self->base.rank);
        uintptr_t at = (uintptr_t)address - (uintptr_t)part;
        if (at < buffer->bytes && bytes <= buffer->bytes - at) {
            return buffer;
        }
    }
    return NULL;
}

/* --- collectives ---------------------------------------------------------------------------- */

/* The same bytes in `rank`'s part as `address` in this rank's. */
static char *
seen_at(const fsdpc_comm_shm_group *self, const fsdpc_comm_buffer *buffer, const char *address,
        int rank)
{
    const char *own = fsdpc_comm_buffer_view(buffer, self->base.rank);
    return (char *)fsdpc_comm_buffer_view(buffer, rank) + (address - own);
}

static uint64_t
place_of(const fsdpc_comm_shm_group *self, const fsdpc_comm_buffer *buffer, const char *address)
{
    const char *own = fsdpc_comm_buffer_view(buffer, self->base.rank);
    return buffer->id << 48 ^ (uint64_t)(address - own) ^ (uint64_t)1 << 47;
}

int
fsdpc_comm_shm_direct_gather(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer, char *address,
                             size_t piece_bytes, const char *what)
{
    fsdpc_call call = {.op = FSDPC_CALL_ALL_GATHER,
                       .count = piece_bytes,
                       .place = place_of(self, buffer, address)};
    FSDPC_TRY(fsdpc_comm_shm_meet(self, &call, what, NULL));
    if (buffer->common) {
        return FSDPC_OK;
    }
    for (int i = 1; i < self->base.world; i++) {
        int peer = (self->base.rank + i) % self->base.world;
        size_t at = (size_t)peer * piece_bytes;
        memcpy(address + at, seen_at(self, buffer, address, peer) + at, piece_bytes);
    }
    return fsdpc_comm_shm_meet(self, &call, what, NULL);
}

static int
refuse_common(const fsdpc_comm_buffer *buffer, const char *what)
{
    if (buffer->common) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "%s: a common buffer holds one copy for all ranks, there is nothing to "
                           "sum; use one with a part per rank",
                           what);
    }
    return FSDPC_OK;
}

int
fsdpc_comm_shm_direct_scatter(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer, char *address,
                              int64_t piece_numel, fsdpc_dtype dtype, const char *what)
{
    fsdpc_call call = {.op = FSDPC_CALL_REDUCE_SCATTER,
                       .dtype = (uint16_t)dtype,
                       .count = (uint64_t)piece_numel,
                       .place = place_of(self, buffer, address)};
    const void *src[FSDPC_SHM_MAX_RANKS];
    size_t at = (size_t)self->base.rank * (size_t)piece_numel * fsdpc_dtype_bytes(dtype);
    FSDPC_TRY(refuse_common(buffer, what));
    FSDPC_TRY(fsdpc_comm_shm_meet(self, &call, what, NULL));
    for (int i = 0; i < self->base.world; i++) {
        src[i] = seen_at(self, buffer, address, i) + at;
    }
    FSDPC_TRY(fsdpc_comm_shm_combine(self, address + at, src, dtype, FSDPC_SUM, piece_numel));
    return fsdpc_comm_shm_meet(self, &call, what, NULL);
}

/* Each rank reduces its slice in place; then all take the other slices from where they are. */
int
fsdpc_comm_shm_direct_reduce(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer, char *address,
                             int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op, const char *what)
{
    fsdpc_call call = {.op = FSDPC_CALL_ALL_REDUCE,
                       .dtype = (uint16_t)dtype,
                       .detail = (uint32_t)op,
                       .count = (uint64_t)numel,
                       .place = place_of(self, buffer, address)};
    const void *src[FSDPC_SHM_MAX_RANKS];
    int64_t world = self->base.world;
    int64_t rank = self->base.rank;
    int64_t item = (int64_t)fsdpc_dtype_bytes(dtype);
    /* Cut so that products cannot wrap: slices of equal length, the last may be shorter. */
    int64_t slice = (numel + world - 1) / world;
    int64_t begin = rank * slice < numel ? rank * slice : numel;
    int64_t end = begin + slice < numel ? begin + slice : numel;
    FSDPC_TRY(refuse_common(buffer, what));
    FSDPC_TRY(fsdpc_comm_shm_meet(self, &call, what, NULL));
    for (int i = 0; i < world; i++) {
        src[i] = seen_at(self, buffer, address, i) + begin * item;
    }
    FSDPC_TRY(fsdpc_comm_shm_combine(self, address + begin * item, src, dtype, op, end - begin));
    FSDPC_TRY(fsdpc_comm_shm_meet(self, &call, what, NULL));
    for (int64_t i = 0; i < world; i++) {
        int64_t from = i * slice < numel ? i * slice : numel;
        int64_t to = from + slice < numel ? from + slice : numel;
        if (i != rank) {
            memcpy(address + from * item, seen_at(self, buffer, address, (int)i) + from * item,
                   (size_t)((to - from) * item));
        }
    }
    return fsdpc_comm_shm_meet(self, &call, what, NULL);
}

int
fsdpc_comm_shm_direct_broadcast(fsdpc_comm_shm_group *self, fsdpc_comm_buffer *buffer,
                                char *address, size_t bytes, int root, const char *what)
{
    fsdpc_call call = {.op = FSDPC_CALL_BROADCAST,
                       .detail = (uint32_t)root,
                       .count = bytes,
                       .place = place_of(self, buffer, address)};
    FSDPC_TRY(fsdpc_comm_shm_meet(self, &call, what, NULL));
    if (buffer->common) {
        return FSDPC_OK;
    }
    if (self->base.rank != root) {
        memcpy(address, seen_at(self, buffer, address, root), bytes);
    }
    return fsdpc_comm_shm_meet(self, &call, what, NULL);
}
