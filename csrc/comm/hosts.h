/* Which ranks of a communicator share a host, and which rank carries whose elements between hosts.
 *
 * Each rank has one carrier on every other host. On that host only the carrier receives and sends that
 * rank's elements, so that each byte travels once per host. Ranks of one host share memory. The positions
 * of ranks on their hosts decide who carries whom, so hosts may have different numbers of ranks.
 *
 *   host 0   rank 0 <-----> rank 2   host 1     rank 2 carries 0 and rank 3 carries 1 on host 1;
 *            rank 1 <-----> rank 3              rank 0 carries 2 and rank 1 carries 3 on host 0
 */
#ifndef FSDPC_HOSTS_H
#define FSDPC_HOSTS_H

#include <stdatomic.h>

#include "comm/flight.h"

enum {
    FSDPC_HOSTS_TURNS = 64
}; /* how many marks a rank keeps: a later flight overwrites the oldest mark */

/* The marks that one rank publishes to the other ranks of its host. */
struct fsdpc_turns {
    _Atomic uint64_t said; /* one above the number of the last flight whose mark is in `marks` */
    _Atomic uint64_t marks[FSDPC_HOSTS_TURNS];
    char pad[64 - sizeof(uint64_t)];
};

typedef struct fsdpc_hosts {
    fsdpc_shm *shm;       /* this host's segment; borrowed */
    int host_count, host; /* `host`: this host's number, in the order of the hosts' first ranks */
    int local_world, local_rank; /* how many ranks this host has; this rank's position among them */
    int *host_of;                /* [rank]: the number of the rank's host */
    int *ranks;                  /* the ranks of this host, ascending */
    int *carriers;               /* [host * world + rank]: who carries `rank` on `host` */
    struct fsdpc_turns *turns;   /* one per rank of this host, in shared memory; or NULL */
} fsdpc_hosts;

/* True if `carrier` carries `owner`'s elements on a host other than the owner's. */
bool fsdpc_hosts_carries(const fsdpc_comm *comm, int carrier, int owner);
/* Publishes the mark of this rank's next flight to the other ranks of this host, if they share memory. */
void fsdpc_comm_say_turn(const fsdpc_comm *comm, const fsdpc_mark *mark);
/* True if a rank of this host has published a mark other than `mark` for this rank's next flight. */
bool fsdpc_hosts_disagree(const fsdpc_comm *comm, const fsdpc_mark *mark);

#endif
