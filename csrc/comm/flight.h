/* Collectives in flight: begun by one call, landed by a later one, with the caller's work between.
 *
 * Where a communicator's library sends from rank to rank in the background ("c10d" over gloo or MPI), a
 * flight is a set of such transfers, in chunks, so that all links are busy in both directions. For other
 * communicators a flight is a blocking collective, done when the call that begins the flight returns.
 * All ranks must begin the flights of a communicator in one order; they may land flights in any order.
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
    int32_t without_data; /* 1: this rank sends no data: another rank's mark is known to differ */
    uint32_t note[2];     /* for the caller: marks that differ only in `note` count as equal */
} fsdpc_mark;

/* For the blocking collectives that are made of flights (comm_flight_now.c): the first word of their marks.
 * The first word of any other mark is at least FSDPC_NOW_END. */
enum fsdpc_now { FSDPC_NOW_GATHER = INT32_MIN, FSDPC_NOW_SCATTER, FSDPC_NOW_SUM, FSDPC_NOW_END };

/* Where pieces are received: rank r's piece of parts[i] goes to base + stride * n + offsets[i]. Here n is r,
 * or r - 1 if r is above this rank. With FSDPC_BY_CARRIERS, n is computed in the same way from the number of
 * rank r's host and the number of this host. */
typedef struct fsdpc_landing {
    char *base;
    size_t stride;
    const size_t *offsets;
} fsdpc_landing;

/* Which ranks send elements to which ranks. */
typedef enum fsdpc_route {
    FSDPC_TO_ALL,     /* from each rank to each other rank */
    FSDPC_BY_CARRIERS /* between hosts only, by carriers (hosts.h); ranks of a host share memory */
} fsdpc_route;

/* Gathers the parts, as fsdpc_comm_all_gather_parts does; with FSDPC_BY_CARRIERS, only from ranks
 * that this rank carries. If count is 0, the ranks only compare marks. If mark is NULL, the ranks
 * compare nothing. The caller must not touch the parts' memory until the flight has landed. */
int fsdpc_flight_gather(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        fsdpc_route route, const fsdpc_mark *mark, const char *what,
                        fsdpc_flight **out);
/* Sends the parts for a reduction. `landing` receives this rank's pieces from all other ranks (with
 * FSDPC_BY_CARRIERS: from its carriers). If fsdpc_flight_is_summed returns true, nothing is received
 * there: this rank's pieces of the parts hold the sums. */
int fsdpc_flight_reduce(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        const fsdpc_landing *landing, fsdpc_route route, const fsdpc_mark *mark,
                        const char *what, fsdpc_flight **out);
/* Begins a reduction (`landing` NULL: a gather) without a mark; flights of different keys may begin
 * in any order. The key, equal on all ranks and below FSDPC_FLIGHT_KEYS, names the flight. Flights of
 * one key match in their order. Fails with FSDPC_E_INVAL unless flights go on in the background. */
enum { FSDPC_FLIGHT_KEYS = 1 << 29 };
int fsdpc_flight_by_key(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                        const fsdpc_landing *landing, uint32_t key, const char *what,
                        fsdpc_flight **out);
/* For a flight with a key: true if all other ranks have begun it and their data is here. Landing then waits
 * only for what this rank still sends, not for other ranks. Backends may report this late or never. */
bool fsdpc_flight_is_here(const fsdpc_flight *flight);
/* Waits until the flight no longer uses its memory. *agreed (optional) becomes true if all marks were equal
 * and all data is there; if it becomes false, at most the data of ranks with this rank's mark is there. */
int fsdpc_flight_land(fsdpc_flight *flight, const char *what, bool *agreed);
/* Returns the marks of all ranks, by rank. They are borrowed and readable after landing. */
const fsdpc_mark *fsdpc_flight_marks(const fsdpc_flight *flight);
bool fsdpc_flight_is_summed(const fsdpc_flight *flight);
/* How many bytes this rank sends to other hosts, without marks; 0 if flights are blocking collectives. */
uint64_t fsdpc_flight_sent_bytes(const fsdpc_flight *flight);
/* The flight's place in the order of the communicator's flights; 0 if flights are blocking collectives. */
uint64_t fsdpc_flight_number(const fsdpc_flight *flight);
/* Frees a flight; NULL is allowed. Returns false if the flight has not landed: other ranks
 * may still send to its memory, which must then stay as long as the process. Local. */
bool fsdpc_flight_free(fsdpc_flight *flight);
/* True if a flight failed before its caller got it, and other ranks may still send to its memory. Then the
 * memory of its parts and of its landing must stay as long as the process. NULL is allowed. */
bool fsdpc_comm_has_lost(const fsdpc_comm *comm);

/* [Note: landed in order] Other ranks of this host may wait for this rank's part of a flight, and begin no
 * later flight until that part has landed. So before this rank waits for a later flight, or for ranks of its
 * host, it lands the earlier flights of all exchanges, even those whose data it does not need. Else, ranks
 * that run different units would wait for each other. The exchange that began a flight is its lander. */
typedef struct fsdpc_lander {
    uint64_t first; /* the number of the lander's first flight; UINT64_MAX: there is none */
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
/* Sets *key so that *key and *key + 1 are keys not returned before. All ranks must call this in one order. */
int fsdpc_comm_next_keys(fsdpc_comm *comm, uint32_t *key);

#endif
