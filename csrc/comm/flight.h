/* Collectives in flight: begun by one call, landed by a later one, with the caller's work between.
 *
 * Where a communicator's library sends from rank to rank in the background ("c10d" over gloo or MPI), a flight
 * is a set of such transfers, in chunks, so that all links are busy in both directions. Elsewhere it is the
 * kind's blocking collective, done when begin returns. All ranks must begin the flights of a communicator in one
 * order; they may land them in any.
 *
 * Each rank gives a mark that says what it means, and the marks travel ahead of the data. Data moves only
 * between ranks with equal marks: ranks that mean different things never read each other's bytes, and find out
 * when they land.
 */
#ifndef FSDPC_FLIGHT_H
#define FSDPC_FLIGHT_H

#include "comm/comm.h"

typedef struct fsdpc_flight fsdpc_flight;

typedef struct fsdpc_mark {
    int32_t words[2];
    int32_t without_data; /* 1: no data comes, because this rank knows that another one differs */
    uint32_t note[2];     /* for the caller: ranks with other notes read each other's data */
} fsdpc_mark;

/* The first word of marks of a kind's own collectives; callers' marks have larger ones. */
enum fsdpc_now { FSDPC_NOW_GATHER = INT32_MIN, FSDPC_NOW_SCATTER, FSDPC_NOW_SUM, FSDPC_NOW_END };

/* Where the pieces of other ranks land: rank r's piece of parts[i] at base + stride * (r, or r - 1 above this
 * rank) + offsets[i]; by carriers the carrier's, and r is its host. */
typedef struct fsdpc_landing {
    char *base;
    size_t stride;
    const size_t *offsets;
} fsdpc_landing;

/* Where elements go. */
typedef enum fsdpc_route {
    FSDPC_TO_ALL, /* from each rank to each other one */
    FSDPC_BY_CARRIERS /* between hosts only, to and from carriers (hosts.h); all ranks of the host share the memory */
} fsdpc_route;

/* Gathers the parts, as fsdpc_comm_all_gather_parts does; by carriers: those of the ranks that this rank carries.
 * count 0: the ranks only compare marks. mark NULL: the ranks compare nothing. The caller leaves the parts' memory
 * alone until the flight has landed. */
int fsdpc_flight_gather(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        fsdpc_route route, const fsdpc_mark *mark, const char *what,
                        fsdpc_flight **out);
/* Every rank gets its own pieces of all ranks' parts, in `landing`; by carriers: of its carriers' parts.
 * fsdpc_flight_is_summed: as the kind sums, in place of its own piece (fsdpc_comm_reduce_scatter_parts). */
int fsdpc_flight_reduce(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        const fsdpc_landing *landing, fsdpc_route route, const fsdpc_mark *mark,
                        const char *what, fsdpc_flight **out);
/* The same without an order and without marks (`landing` NULL: a gather): the key names the flight, below
 * FSDPC_FLIGHT_KEYS, equal on all ranks. Flights of one key match in their order. Only where flights go on in the
 * background. */
enum { FSDPC_FLIGHT_KEYS = 1 << 29 };
int fsdpc_flight_by_key(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        const fsdpc_landing *landing, uint32_t key, const char *what,
                        fsdpc_flight **out);
/* True if all other ranks have begun the flight, and what they send is here: landing waits for no rank's program, only
 * for what this one still sends. Of flights with a key; a backend may say so late, or never. */
bool fsdpc_flight_is_here(const fsdpc_flight *flight);
/* Waits until the flight's memory is this rank's again. *agreed (optional): all marks were equal, and the data
 * is there; else what ranks with equal marks sent each other is there. */
int fsdpc_flight_land(fsdpc_flight *flight, const char *what, bool *agreed);
/* One mark per rank, after landing; borrowed. */
const fsdpc_mark *fsdpc_flight_marks(const fsdpc_flight *flight);
bool fsdpc_flight_is_summed(const fsdpc_flight *flight);
/* What this rank sends to ranks of other hosts, without marks; 0 where flights are collectives of the kind. */
uint64_t fsdpc_flight_sent_bytes(const fsdpc_flight *flight);
/* Its place in the order of the communicator's flights; 0 where flights are collectives of the kind. */
uint64_t fsdpc_flight_number(const fsdpc_flight *flight);
/* NULL is allowed. True if the flight's memory is this rank's. False: the flight has not landed, so other ranks may
 * still send to its memory, which must stay as long as the process. Local. */
bool fsdpc_flight_free(fsdpc_flight *flight);
/* True: a flight of the communicator has failed before it was the caller's, and other ranks may still send to the memory of
 * its parts and of its landing. That memory must stay as long as the process. NULL is allowed. */
bool fsdpc_comm_has_lost(const fsdpc_comm *comm);

/* [Note: landed in order] Other ranks of this host may wait for this rank's part of a flight; until the part has landed they
 * begin no later one. So this rank lands such flights before it waits for any later one of the communicator, or for ranks of its
 * host, even if it does not need what they bring, and whichever exchange began them. Otherwise ranks that run different units
 * wait for each other. The exchange that began such flights is their lander. */
typedef struct fsdpc_lander {
    uint64_t first; /* the number of its first flight; UINT64_MAX: it has none */
    int (*land_first)(void *context);
    void *context;
    struct fsdpc_lander *next;
} fsdpc_lander;
/* The lander stays the caller's until it is removed. Removing another one is a no-op. */
void fsdpc_comm_add_lander(fsdpc_comm *comm, fsdpc_lander *lander);
void fsdpc_comm_remove_lander(fsdpc_comm *comm, const fsdpc_lander *lander);
/* Lands the landers' flights that have a number below this one, in their order. */
int fsdpc_comm_land_before(fsdpc_comm *comm, uint64_t number);

/* True if flights go on in the background. */
bool fsdpc_comm_flies(const fsdpc_comm *comm);
/* *key: the first of two that no earlier call gave. All ranks must call this in one order. */
int fsdpc_comm_next_keys(fsdpc_comm *comm, uint32_t *key);

#endif
