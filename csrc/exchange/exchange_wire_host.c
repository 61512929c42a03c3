/* Ranks that share a host in a group of several hosts use one set of gather slots, and reduce buffers that
 * all ranks of the host read. Each rank counts its uses of slots and buffers in words of the host's segment.
 * Flights "by carriers" (hosts.h) go only between hosts:
 *   gather   count CLEARED, wait for all ranks; cast, fly by carriers; land, count FILLED; wait for all ranks
 *   reduce   pack, count PACKED; at the next reduction: wait for all ranks, sum the pieces of the ranks that
 *            this rank carries (in the order of ranks), count READ, fly by carriers; land, sum over hosts
 */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "exchange/exchange_wire_impl.h"

/* The head of the control memory. The words of each rank follow the head. */
struct header {
    _Atomic uint32_t changes, closed;
    char pad[64 - 8];
};

/* Maps memory that the ranks of this host share. A rank that is alone on its host gets private memory. */
static int
map_memory(fsdpc_exchange *x, size_t *bytes, uint64_t *offset, char **out)
{
    fsdpc_shm *shm = x->wire->host->hosts->shm;
    void *mapped;
    *bytes = fsdpc_round_up(*bytes, fsdpc_shm_page_bytes());
    if (shm) {
        FSDPC_TRY(fsdpc_shm_alloc(shm, *bytes, true, offset));
        FSDPC_TRY(fsdpc_shm_map(shm, *offset, *bytes, NULL, &mapped));
    } else {
        FSDPC_TRY(fsdpc_device_alloc(fsdpc_comm_device(x->comm), *bytes, &mapped));
        memset(mapped, 0, *bytes);
    }
    *out = mapped;
    return FSDPC_OK;
}

/* Frees the memory. `last` is set if no other rank uses the memory any more. */
static void
unmap_memory(fsdpc_exchange *x, char *memory, uint64_t offset, size_t bytes, bool last)
{
    fsdpc_shm *shm = x->wire->host->hosts->shm;
    if (!memory) {
        return;
    }
    if (!shm) {
        fsdpc_device_free(fsdpc_comm_device(x->comm), memory, bytes);
        return;
    }
    if (last) {
        (void)fsdpc_shm_discard(shm, offset, bytes);
    }
    fsdpc_shm_unmap(memory, bytes);
}

static size_t
buffers_bytes(const fsdpc_exchange *x)
{
    return x->max_reduce_bytes * (size_t)x->reduce_slots *
           (size_t)x->wire->host->hosts->local_world;
}

int
fsdpc_wire_host_open(fsdpc_exchange *x, int slot_count)
{
    const fsdpc_hosts *hosts = fsdpc_comm_hosts(x->comm);
    if (!hosts) {
        return FSDPC_OK;
    }
    struct fsdpc_wire_host *host = x->wire->host = fsdpc_mem_calloc(1, sizeof *host);
    if (!host) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    host->hosts = hosts;
    host->fills = fsdpc_mem_calloc((size_t)slot_count + 1, sizeof *host->fills);
    if (!host->fills) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    const int counts[] = {slot_count, slot_count, x->reduce_slots, x->reduce_slots};
    for (int word = 0; word <= FSDPC_WIRE_READ; word++) {
        host->word_at[word] = (int)host->words;
        host->words += (size_t)counts[word];
    }
    host->words = fsdpc_round_up(host->words, 8); /* two ranks' words never share a cache line */
    host->ctl_bytes =
        sizeof(struct header) + sizeof(uint64_t) * host->words * (size_t)hosts->local_world;
    FSDPC_TRY(map_memory(x, &host->ctl_bytes, &host->ctl_offset, &host->ctl));
    host->buffers_bytes = buffers_bytes(x);
    return host->buffers_bytes > 0
               ? map_memory(x, &host->buffers_bytes, &host->buffers_offset, &host->buffers)
               : FSDPC_OK;
}

static struct header *
header_of(const struct fsdpc_wire_host *host)
{
    return (struct header *)host->ctl;
}

void
fsdpc_wire_host_close(fsdpc_exchange *x, bool keep)
{
    struct fsdpc_wire_host *host = x->wire->host;
    if (!host) {
        return;
    }
    const bool last =
        host->ctl && !keep &&
        atomic_fetch_add(&header_of(host)->closed, 1) + 1 == (uint32_t)host->hosts->local_world;
    if (last) {
        fsdpc_arena_discard(x->arena);
    }
    if (!keep) {
        unmap_memory(x, host->buffers, host->buffers_offset, host->buffers_bytes, last);
    }
    unmap_memory(x, host->ctl, host->ctl_offset, host->ctl_bytes, last);
    fsdpc_mem_free(host->fills);
    fsdpc_mem_free(host);
    x->wire->host = NULL;
}

char *
fsdpc_wire_host_buffer(const fsdpc_exchange *x, int rank, int slot)
{
    return x->wire->host->buffers +
           x->max_reduce_bytes * ((size_t)rank * (size_t)x->reduce_slots + (size_t)slot);
}

/* --- words --------------------------------------------------------------------------------------- */

static _Atomic uint64_t *
word_of(const struct fsdpc_wire_host *host, int rank, enum fsdpc_wire_word word, int index)
{
    _Atomic uint64_t *words = (_Atomic uint64_t *)(host->ctl + sizeof(struct header));
    return words + host->words * (size_t)rank + host->word_at[word] + index;
}

void
fsdpc_wire_say_change(const fsdpc_exchange *x)
{
    atomic_fetch_add(fsdpc_wire_changes(x), 1);
    fsdpc_shm_wake(fsdpc_wire_changes(x));
}

void
fsdpc_wire_say(const fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value)
{
    const struct fsdpc_wire_host *host = x->wire->host;
    atomic_store(word_of(host, host->hosts->local_rank, word, index), value);
    fsdpc_wire_say_change(x);
}

bool
fsdpc_wire_has_said(const fsdpc_exchange *x, int rank, enum fsdpc_wire_word word, int index,
                    uint64_t value)
{
    return atomic_load(word_of(x->wire->host, rank, word, index)) >= value;
}

_Atomic uint32_t *
fsdpc_wire_changes(const fsdpc_exchange *x)
{
    return &header_of(x->wire->host)->changes;
}
