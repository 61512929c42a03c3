/* Collectives in flight: begun by one call, landed by a later one, with the caller's work between.
 *
 * Where a communicator's library sends from rank to rank in the background ("c10d" over gloo or MPI), a
 * flight is a set of such transfers, in chunks, so that all links are busy in both directions. Elsewhere a
 * flight is the kind's blocking collective, done when the call that begins the flight returns. All ranks must
 * begin the flights of a communicator in one order; they may land them in any order.
 *
 * Each rank gives a mark that says what flight it means, and the marks travel ahead of the data. Data moves
 * only between ranks with equal marks: ranks that mean different flights never read each other's bytes, and
 * learn at landing that they differ.
 */
#ifndef FSDPC_FLIGHT_H
#define FSDPC_FLIGHT_H

#include "comm/comm.h"

typedef struct fsdpc_flight fsdpc_flight;

typedef struct fsdpc_mark {
    int32_t words[2];
    int32_t without_data; /* 1: no data comes, because this rank knows that another one differs */
    uint32_t note[2];     /* for the caller: marks that differ in `note` alone count as equal */
} fsdpc_mark;

/* The first word of the marks of a kind's own collectives; the first word of callers' marks is larger. */
enum fsdpc_now { FSDPC_NOW_GATHER = INT32_MIN, FSDPC_NOW_SCATTER, FSDPC_NOW_SUM, FSDPC_NOW_END };

/* Where pieces land: rank r's piece of parts[i] at base + stride * n + offsets[i]. n is r, or r - 1 if r is
 * above this rank. By carriers, n comes from the carrier's host and this host in the same way. */
typedef struct fsdpc_landing {
    char *base;
    size_t stride;
    const size_t *offsets;
} fsdpc_landing;

/* Where elements go. */
typedef enum fsdpc_route {
    FSDPC_TO_ALL,     /* from each rank to each other one */
    FSDPC_BY_CARRIERS /* between hosts only, by carriers (hosts.h); ranks of a host share memory */
} fsdpc_route;

/* Gathers the parts, as fsdpc_comm_all_gather_parts does; by carriers, only from ranks that
 * this rank carries. count 0: the ranks only compare marks. mark NULL: the ranks compare
 * nothing. The caller leaves the parts' memory alone until the flight has landed. */
int fsdpc_flight_gather(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        fsdpc_route route, const fsdpc_mark *mark, const char *what,
                        fsdpc_flight **out);
/* `landing` gets this rank's pieces of all other ranks' parts; by carriers, of its carriers' parts. If
 * fsdpc_flight_is_summed, this rank's own pieces are sums instead (fsdpc_comm_reduce_scatter_parts). */
int fsdpc_flight_reduce(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        const fsdpc_landing *landing, fsdpc_route route, const fsdpc_mark *mark,
                        const char *what, fsdpc_flight **out);
/* Begins a reduction (`landing` NULL: a gather) without a mark; flights of different keys may begin
 * in any order. The key, equal on all ranks and below FSDPC_FLIGHT_KEYS, names the flight. Flights
 * of one key match in their order. FSDPC_E_INVAL unless flights go on in the background. */
enum { FSDPC_FLIGHT_KEYS = 1 << 29 };
int fsdpc_flight_by_key(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        const fsdpc_landing *landing, uint32_t key, const char *what,
                        fsdpc_flight **out);
/* For a flight with a key: true if all other ranks have begun it and their data is here. Then landing waits
 * for no rank's program, only for what this rank still sends. A backend may make this true late, or never. */
bool fsdpc_flight_is_here(const fsdpc_flight *flight);
/* Waits until the flight's memory is this rank's again. *agreed (optional): true if all marks were
 * equal and all data is there; if false, at most the data of ranks with this rank's mark is there. */
int fsdpc_flight_land(fsdpc_flight *flight, const char *what, bool *agreed);
/* The marks of all ranks, by rank; readable after landing; borrowed. */
const fsdpc_mark *fsdpc_flight_marks(const fsdpc_flight *flight);
bool fsdpc_flight_is_summed(const fsdpc_flight *flight);
/* How many bytes this rank sends to other hosts, without marks; 0 where flights are blocking collectives. */
uint64_t fsdpc_flight_sent_bytes(const fsdpc_flight *flight);
/* The flight's place in the order of the communicator's flights; 0 where flights are blocking collectives. */
uint64_t fsdpc_flight_number(const fsdpc_flight *flight);
/* NULL is allowed. True if the flight's memory is this rank's again. False: the flight has not landed, so
 * other ranks may still send to its memory, which must stay as long as the process. Local. */
bool fsdpc_flight_free(fsdpc_flight *flight);
/* True if a flight of the communicator failed that was not returned to its caller: other ranks may still send
 * to the memory of its parts and its landing, which must stay as long as the process. NULL is allowed. */
bool fsdpc_comm_has_lost(const fsdpc_comm *comm);

/* [Note: landed in order] Other ranks of this host may wait for this rank's part of a flight, and begin no
 * later flight until it has landed. So this rank lands such flights before it waits for a later flight of the
 * communicator or for ranks of its host, even if it needs no data of them, and whichever exchange began them.
 * Else ranks that run different units wait for each other. The exchange that began a flight is its lander. */
typedef struct fsdpc_lander {
    uint64_t first; /* the number of its first flight; UINT64_MAX: it has none */
    int (*land_first)(void *context);
    void *context;
    struct fsdpc_lander *next;
} fsdpc_lander;
/* The caller keeps the lander's memory until it removes the lander. Removing an unknown lander is a no-op. */
void fsdpc_comm_add_lander(fsdpc_comm *comm, fsdpc_lander *lander);
void fsdpc_comm_remove_lander(fsdpc_comm *comm, const fsdpc_lander *lander);
/* Lands the landers' flights with numbers below `number`, the lowest number first. */
int fsdpc_comm_land_before(fsdpc_comm *comm, uint64_t number);

/* True if flights go on in the background. */
bool fsdpc_comm_flies(const fsdpc_comm *comm);
/* *key and *key + 1 are keys that no earlier call has returned. All ranks must call this in one order. */
int fsdpc_comm_next_keys(fsdpc_comm *comm, uint32_t *key);

#endif
