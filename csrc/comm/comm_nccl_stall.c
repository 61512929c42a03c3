/* Describes how far a rank is in the collectives of an NCCL communicator and its twin, for the reports
 * that stalled ranks send to each other. Only the ring is read; neither CUDA nor NCCL is called.
 */
#include <stdio.h>
#include <string.h>

#include "comm/comm_nccl_impl.h"

/* Reads the oldest collective in flight and returns true. If there is none, reads the last completed one. */
static bool
read_ring(nccl_comm *comm, fsdpc_nccl_entry *entries)
{
    pthread_mutex_lock(&comm->lock);
    const bool waits = comm->first < comm->next;
    const uint64_t at = waits ? comm->first : comm->next - 1;
    *entries = (fsdpc_nccl_entry){0};
    if (comm->next > 0) {
        *entries = comm->ring[at % FSDPC_NCCL_RING];
    }
    pthread_mutex_unlock(&comm->lock);
    return waits;
}

static int
write_waits(char *text, size_t bytes, const char *before, const fsdpc_nccl_entry *entry)
{
    return snprintf(text, bytes, "%sin %s (collective %llu, %zu bytes)", before, entry->what,
                    (unsigned long long)entry->sequence, entry->bytes);
}

double
fsdpc_comm_nccl_stall(fsdpc_comm *base, char *text, size_t bytes)
{
    fsdpc_nccl_entry entries[2] = {{0}};
    nccl_comm *both[2] = {(nccl_comm *)base, (nccl_comm *)base->twin};
    const double now = fsdpc_nccl_now_s();
    double longest = 0;
    size_t written = 0;
    for (int i = 0; i < 2 && both[i]; i++) {
        if (read_ring(both[i], &entries[i])) {
            const int more =
                write_waits(text + written, bytes - written, written ? " and " : "", &entries[i]);
            written += (size_t)more < bytes - written ? (size_t)more : bytes - written - 1;
            longest = now - entries[i].since_s > longest ? now - entries[i].since_s : longest;
        }
    }
    if (written == 0) {
        const fsdpc_nccl_entry *last = &entries[entries[1].since_s > entries[0].since_s];
        snprintf(text, bytes,
                 last->what[0] ? "in none of its collectives, after %s (collective %llu)"
                               : "in none of its collectives yet",
                 last->what, (unsigned long long)last->sequence);
    }
    return longest;
}

void
fsdpc_comm_nccl_note_others(fsdpc_comm *base, const char *text)
{
    nccl_comm *both[2] = {(nccl_comm *)base, (nccl_comm *)base->twin};
    for (int i = 0; i < 2 && both[i]; i++) {
        pthread_mutex_lock(&both[i]->lock);
        snprintf(both[i]->others, sizeof both[i]->others, "%s", text);
        pthread_mutex_unlock(&both[i]->lock);
    }
}
