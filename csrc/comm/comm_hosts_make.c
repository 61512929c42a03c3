/* Finds out which ranks share a host: the hosts' numbers, carriers and shared segments. See hosts.h. */
#include <stdio.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/comm_impl.h"
#include "comm/hosts.h"

/* Numbers the hosts in the order of their first ranks. Lists this host's ranks, and sets local_rank. */
static void
number_hosts(const fsdpc_comm *comm, const int *names, fsdpc_hosts *hosts)
{
    for (int r = 0; r < comm->world; r++) {
        int first = 0;
        while (names[first] != names[r]) {
            first++;
        }
        hosts->host_of[r] = first == r ? hosts->host_count++ : hosts->host_of[first];
    }
    hosts->host = hosts->host_of[comm->rank];
    for (int r = 0; r < comm->world; r++) {
        if (hosts->host_of[r] == hosts->host) {
            hosts->local_rank = r == comm->rank ? hosts->local_world : hosts->local_rank;
            hosts->ranks[hosts->local_world++] = r;
        }
    }
}

/* Rank number n of a host is carried, on another host with m ranks, by that host's rank number n modulo m.
 * `scratch` has three zeros per rank. */
static void
choose_carriers(const fsdpc_comm *comm, fsdpc_hosts *hosts, int *scratch)
{
    int *members = scratch, *position = members + comm->world, *seen = position + comm->world;
    for (int r = 0; r < comm->world; r++) {
        position[r] = seen[hosts->host_of[r]]++;
    }
    for (int host = 0; host < hosts->host_count; host++) {
        int *carriers = hosts->carriers + (size_t)host * (size_t)comm->world, count = 0;
        for (int r = 0; r < comm->world; r++) {
            if (hosts->host_of[r] == host) {
                members[count++] = r;
            }
        }
        for (int r = 0; r < comm->world; r++) {
            carriers[r] = members[position[r] % count];
        }
    }
}

static int
map_turns(fsdpc_hosts *hosts)
{
    uint64_t offset;
    void *mapped;
    const size_t bytes = fsdpc_round_up(sizeof(struct fsdpc_turns) * (size_t)hosts->local_world,
                                        fsdpc_shm_page_bytes());
    FSDPC_TRY(fsdpc_shm_alloc(hosts->shm, bytes, true, &offset));
    FSDPC_TRY(fsdpc_shm_map(hosts->shm, offset, bytes, NULL, &mapped));
    hosts->turns = mapped;
    return FSDPC_OK;
}

/* Adds the ranks' numbers to an error, because errors of the rendezvous call a host's ranks 0, 1, ... */
static int
say_numbers(const fsdpc_hosts *hosts, int status)
{
    char list[256];
    int at = 0;
    for (int i = 0; i < hosts->local_world && at < (int)sizeof list; i++) {
        at += snprintf(list + at, sizeof list - (size_t)at, "%s%d", i ? ", " : "", hosts->ranks[i]);
    }
    return fsdpc_error_prepend(status, "ranks %s, which share a host and are called 0 to %d here",
                               list, hosts->local_world - 1);
}

static int
share_host(fsdpc_comm *comm, const char *segment, double timeout_s, fsdpc_hosts *hosts)
{
    const int status = fsdpc_comm_shm(comm->device, hosts->local_rank, hosts->local_world, segment,
                                      timeout_s, &comm->local);
    if (status != FSDPC_OK) {
        return say_numbers(hosts, status);
    }
    hosts->shm = fsdpc_comm_segment(comm->local);
    fsdpc_shm_set_numbers(hosts->shm, hosts->ranks);
    return map_turns(hosts);
}

static int
make_hosts(fsdpc_comm *comm, const int *names, const char *segment, double timeout_s,
           fsdpc_hosts *hosts)
{
    int status = FSDPC_OK;
    const size_t world = (size_t)comm->world;
    int *scratch = fsdpc_mem_calloc(world, 3 * sizeof *scratch);
    hosts->host_of = fsdpc_mem_calloc(world, sizeof *hosts->host_of);
    hosts->ranks = fsdpc_mem_calloc(world, sizeof *hosts->ranks);
    hosts->carriers = fsdpc_mem_calloc(world * world, sizeof *hosts->carriers);
    if (!scratch || !hosts->host_of || !hosts->ranks || !hosts->carriers) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for the hosts of %d ranks", comm->world),
                   done);
    }
    number_hosts(comm, names, hosts);
    choose_carriers(comm, hosts, scratch);
    FSDPC_GOTO(hosts->local_world > 1 ? share_host(comm, segment, timeout_s, hosts) : FSDPC_OK,
               done);
done:
    fsdpc_mem_free(scratch);
    return status;
}

int
fsdpc_comm_set_hosts(fsdpc_comm *comm, const int *names, const char *segment, double timeout_s)
{
    if (comm->hosts || !fsdpc_comm_flies(comm)) {
        return fsdpc_error(FSDPC_E_STATE,
                           "hosts are for a communicator that sends in the background, once");
    }
    fsdpc_hosts *hosts = comm->hosts = fsdpc_mem_calloc(1, sizeof *hosts);
    const int status =
        hosts ? make_hosts(comm, names, segment, timeout_s, hosts)
              : fsdpc_error(FSDPC_E_NOMEM, "no memory for the hosts of %d ranks", comm->world);
    if (status != FSDPC_OK) {
        fsdpc_hosts_free(hosts);
        fsdpc_comm_free(comm->local);
        comm->hosts = NULL;
        comm->local = NULL;
    }
    return status;
}
