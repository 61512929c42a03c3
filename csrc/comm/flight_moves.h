/* The transfers of a flight with each peer, in chunks. Small pieces travel to a peer as one packet,
 * which the sender fills and the receiver copies out: even a small transfer takes tens of microseconds.
 */
#ifndef FSDPC_FLIGHT_MOVES_H
#define FSDPC_FLIGHT_MOVES_H

#include "comm/comm_impl.h"
#include "comm/flight.h"

typedef struct fsdpc_load {
    const fsdpc_comm_part *parts;
    int count;
    const fsdpc_landing *landing; /* NULL: a gather, which receives pieces in place */
    fsdpc_route route;
} fsdpc_load;

/* A small piece to copy out of a received packet. */
typedef struct fsdpc_small_piece {
    char *to;
    const char *from;
    size_t bytes;
    int peer;
} fsdpc_small_piece;

typedef struct fsdpc_moves {
    fsdpc_comm_move *moves;
    int count;
    uint64_t sent_bytes; /* bytes sent to ranks of other hosts */
    char *packets;       /* NULL: there are no packets */
    fsdpc_small_piece *small;
    int small_count;
} fsdpc_moves;

/* Lists the transfers and fills the packets that this rank sends. After a failure nothing is left to free. */
int fsdpc_moves_make(const fsdpc_comm *comm, const fsdpc_load *load, const char *what,
                     fsdpc_moves *out);
/* After landing, copies small pieces to their places, except those of ranks marked in `skip` (NULL: none). */
void fsdpc_moves_unpack(const fsdpc_moves *moves, const bool *skip);
/* Frees the lists. `landed` false: the packets are not freed, because other ranks may still send to them. */
void fsdpc_moves_free(fsdpc_moves *moves, bool landed);

#endif
