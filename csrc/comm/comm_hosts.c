/* See hosts.h. */
#include "comm/hosts.h"

#include <string.h>

#include "base/mem.h"
#include "comm/comm_impl.h"

const fsdpc_hosts *
fsdpc_comm_hosts(const fsdpc_comm *comm)
{
    return comm->hosts;
}

int
fsdpc_comm_senders(const fsdpc_comm *comm)
{
    return comm->hosts ? comm->hosts->host_count - 1 : comm->world - 1;
}

int
fsdpc_comm_ranks_per_host(const fsdpc_comm *comm)
{
    const fsdpc_hosts *hosts = comm->hosts;
    for (int host = 0; hosts && host < hosts->host_count; host++) {
        int count = 0;
        for (int r = 0; r < comm->world; r++) {
            count += hosts->host_of[r] == host;
        }
        if (count != hosts->local_world) {
            return 0;
        }
    }
    return hosts ? hosts->local_world : 0;
}

void
fsdpc_hosts_free(fsdpc_hosts *hosts)
{
    if (!hosts) {
        return;
    }
    if (hosts->turns) {
        fsdpc_shm_unmap(hosts->turns,
                        fsdpc_round_up(sizeof *hosts->turns * (size_t)hosts->local_world,
                                       fsdpc_shm_page_bytes()));
    }
    fsdpc_mem_free(hosts->host_of);
    fsdpc_mem_free(hosts->ranks);
    fsdpc_mem_free(hosts->carriers);
    fsdpc_mem_free(hosts);
}

/* --- routes and turns ---------------------------------------------------------------------------- */

bool
fsdpc_hosts_carries(const fsdpc_comm *comm, int carrier, int owner)
{
    const fsdpc_hosts *hosts = comm->hosts;
    const int host = hosts->host_of[carrier];
    return host != hosts->host_of[owner] &&
           hosts->carriers[(size_t)host * (size_t)comm->world + (size_t)owner] == carrier;
}

static uint64_t
word_of(const fsdpc_mark *mark)
{
    uint64_t word = 0;
    memcpy(&word, mark->words, sizeof word);
    return word;
}

void
fsdpc_comm_say_turn(const fsdpc_comm *comm, const fsdpc_mark *mark)
{
    const fsdpc_hosts *hosts = comm->hosts;
    if (hosts && hosts->turns && mark) {
        struct fsdpc_turns *own = &hosts->turns[hosts->local_rank];
        atomic_store(&own->marks[comm->flights % FSDPC_HOSTS_TURNS], word_of(mark));
        atomic_store(&own->said, comm->flights + 1);
    }
}

/* True if the rank of `turns` published a mark other than `mark` for `flight`. A rank writes `said` last.
 * `said` is read again at the end: a rank FSDPC_HOSTS_TURNS flights ahead may have overwritten the mark. */
static bool
says_other(const struct fsdpc_turns *turns, uint64_t flight, const fsdpc_mark *mark)
{
    if (atomic_load(&turns->said) <= flight) {
        return false;
    }
    const bool other = atomic_load(&turns->marks[flight % FSDPC_HOSTS_TURNS]) != word_of(mark);
    return other && atomic_load(&turns->said) < flight + FSDPC_HOSTS_TURNS;
}

bool
fsdpc_hosts_disagree(const fsdpc_comm *comm, const fsdpc_mark *mark)
{
    const fsdpc_hosts *hosts = comm->hosts;
    for (int r = 0; mark && hosts && hosts->turns && r < hosts->local_world; r++) {
        if (says_other(&hosts->turns[r], comm->flights, mark)) {
            return true;
        }
    }
    return false;
}
