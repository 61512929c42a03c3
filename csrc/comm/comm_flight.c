/* See flight.h. */
#include "comm/flight.h"

#include <stddef.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/comm_impl.h"
#include "comm/flight_moves.h"
#include "comm/hosts.h"

enum {
    DATA_TAG = 1 << 30, /* above the small tags of a program's own sends */
    KEY_TAG = DATA_TAG + FSDPC_FLIGHT_KEYS,
    MARKS_TAG = DATA_TAG - 1, /* of marks of flights without a key; these match in posting order */
};

static const fsdpc_mark begun = {.words = {1}}; /* the mark of flights with a key */

struct fsdpc_flight {
    fsdpc_comm *comm;
    void *data, *marking; /* transfers of data and of marks; NULL: not begun, or ended */
    fsdpc_mark *marks;    /* one per rank */
    bool *skip;           /* skip[r]: rank r's mark differs from this rank's mark */
    fsdpc_moves moves;
    bool agreed; /* all ranks' marks are equal; known after landing */
    bool marked, summed;
    uint64_t number;
};

bool
fsdpc_comm_flies(const fsdpc_comm *comm)
{
    return comm->ops->post && comm->ops->flies(comm);
}

int
fsdpc_comm_next_keys(fsdpc_comm *comm, uint32_t *key)
{
    if (comm->keys + 3 >= FSDPC_FLIGHT_KEYS) {
        return fsdpc_error(FSDPC_E_INTERNAL, "a process group has no keys for another unit");
    }
    *key = comm->keys += 2;
    return FSDPC_OK;
}

int
fsdpc_comm_receivers(const fsdpc_comm *comm)
{
    int count = 0;
    for (int r = 0; fsdpc_comm_flies(comm) && r < comm->world; r++) {
        count += comm->hosts ? fsdpc_hosts_carries(comm, comm->rank, r) : r != comm->rank;
    }
    return count;
}

/* Returns a tag that is equal on ranks that begin the same flight. Data of other flights has other tags. */
static uint32_t
tag_of(const fsdpc_comm *comm, const fsdpc_mark *mark)
{
    uint64_t hash = 14695981039346656037u ^ comm->flights;
    for (int i = 0; mark && i < (int)(sizeof mark->words / sizeof mark->words[0]); i++) {
        hash = (hash ^ (uint32_t)mark->words[i]) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return (uint32_t)DATA_TAG | (uint32_t)(hash & (FSDPC_FLIGHT_KEYS - 1));
}

static int
post_marks(fsdpc_flight *flight, uint32_t tag, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    const int count = 2 * (comm->world - 1);
    fsdpc_comm_move *moves = fsdpc_mem_calloc((size_t)count, sizeof *moves);
    if (!moves) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the marks of %d ranks", what,
                           comm->world);
    }
    for (int step = 1, at = 0; step < comm->world; step++) {
        const int from = (comm->rank + comm->world - step) % comm->world;
        const int to = (comm->rank + step) % comm->world;
        moves[at++] = (fsdpc_comm_move){&flight->marks[from], sizeof *flight->marks, from, false};
        moves[at++] =
            (fsdpc_comm_move){&flight->marks[comm->rank], sizeof *flight->marks, to, true};
    }
    int status = comm->ops->post(comm, moves, count, tag, what, &flight->marking);
    fsdpc_mem_free(moves);
    return status;
}

static int
post_data(fsdpc_flight *flight, const fsdpc_load *load, uint32_t tag, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    fsdpc_moves *moves = &flight->moves;
    FSDPC_TRY(fsdpc_moves_make(comm, load, what, moves));
    return moves->count > 0
               ? comm->ops->post(comm, moves->moves, moves->count, tag, what, &flight->data)
               : FSDPC_OK;
}

static bool
agrees(const fsdpc_flight *flight, int rank)
{
    return memcmp(&flight->marks[rank], &flight->marks[flight->comm->rank],
                  offsetof(fsdpc_mark, note)) == 0;
}

static bool
marks_agree(const fsdpc_flight *flight)
{
    for (int r = 0; r < flight->comm->world; r++) {
        if (!agrees(flight, r)) {
            return false;
        }
    }
    return true;
}

/* --- the flight ---------------------------------------------------------------------------------- */

/* Posts the mark after the data, so that a rank's data is here when its mark is here. */
static int
take_off_by_key(fsdpc_flight *flight, const fsdpc_load *load, uint32_t key, const char *what)
{
    const uint32_t tag = (uint32_t)KEY_TAG | key;
    flight->marks[flight->comm->rank] = begun;
    FSDPC_TRY(post_data(flight, load, tag, what));
    return post_marks(flight, tag, what);
}

/* Begins the flight's transfers. If `key` is NULL, flights match in the order in which ranks begin them. */
static int
take_off(fsdpc_flight *flight, const fsdpc_load *load, const fsdpc_mark *mark, const uint32_t *key,
         const char *what)
{
    fsdpc_comm *comm = flight->comm;
    if (key) {
        return take_off_by_key(flight, load, *key, what);
    }
    const uint32_t tag = tag_of(comm, mark);
    fsdpc_comm_say_turn(comm, mark);
    comm->flights++;
    if (mark) {
        FSDPC_TRY(post_marks(flight, MARKS_TAG, what));
    }
    return post_data(flight, load, tag, what);
}

/* Runs the flight as blocking collectives, for kinds without transfers in the background: first
 * the marks are gathered, then, if all marks are equal, the data is gathered or reduced. */
static int
go_at_once(fsdpc_flight *flight, const fsdpc_load *load, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    if (flight->marked) {
        FSDPC_TRY(fsdpc_comm_all_gather(comm, flight->marks, sizeof *flight->marks, what));
    }
    flight->agreed = marks_agree(flight);
    if (!flight->agreed) {
        return FSDPC_OK;
    }
    flight->summed = load->landing != NULL;
    return flight->summed ? fsdpc_comm_reduce_scatter_parts(comm, load->parts, load->count, what)
                          : fsdpc_comm_all_gather_parts(comm, load->parts, load->count, what);
}

/* Sets all ranks' marks to this rank's mark, because a fake process group delivers no other marks. */
static int
make(fsdpc_comm *comm, const fsdpc_mark *mark, const char *what, fsdpc_flight **out)
{
    fsdpc_flight *flight = *out = fsdpc_mem_calloc(1, sizeof *flight);
    fsdpc_mark *marks = fsdpc_mem_calloc((size_t)comm->world, sizeof *marks);
    bool *skip = fsdpc_mem_calloc((size_t)comm->world, sizeof *skip);
    if (!flight || !marks || !skip) {
        fsdpc_mem_free(marks);
        fsdpc_mem_free(skip);
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the marks of %d ranks", what,
                           comm->world);
    }
    flight->comm = comm;
    flight->marks = marks;
    flight->skip = skip;
    flight->number = comm->flights;
    flight->marked = mark != NULL;
    for (int r = 0; mark && r < comm->world; r++) {
        marks[r] = *mark;
    }
    return FSDPC_OK;
}

static int
begin(fsdpc_comm *comm, const fsdpc_load *load, const fsdpc_mark *mark, const uint32_t *key,
      const char *what, fsdpc_flight **out)
{
    int status = FSDPC_OK;
    *out = NULL;
    FSDPC_TRY(fsdpc_comm_check_parts(comm, load->parts, load->count, what));
    FSDPC_GOTO(make(comm, mark, what, out), fail);
    if (fsdpc_comm_flies(comm)) {
        FSDPC_GOTO(fsdpc_comm_enter(comm, what), fail);
        status = fsdpc_comm_leave(comm, take_off(*out, load, mark, key, what));
    } else {
        status = go_at_once(*out, load, what);
    }
fail:
    if (status != FSDPC_OK) {
        comm->lost = !fsdpc_flight_free(*out) || comm->lost;
        *out = NULL;
    }
    return status;
}

int
fsdpc_flight_gather(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, fsdpc_route route,
                    const fsdpc_mark *mark, const char *what, fsdpc_flight **out)
{
    const fsdpc_load load = {parts, count, NULL, route};
    return begin(comm, &load, mark, NULL, what, out);
}

int
fsdpc_flight_reduce(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                    const fsdpc_landing *landing, fsdpc_route route, const fsdpc_mark *mark,
                    const char *what, fsdpc_flight **out)
{
    const fsdpc_load load = {parts, count, landing, route};
    return begin(comm, &load, mark, NULL, what, out);
}

int
fsdpc_flight_by_key(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                    const fsdpc_landing *landing, uint32_t key, const char *what,
                    fsdpc_flight **out)
{
    const fsdpc_load load = {parts, count, landing, FSDPC_TO_ALL};
    *out = NULL;
    if (!fsdpc_comm_flies(comm) || key >= FSDPC_FLIGHT_KEYS) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: a key needs flights in the background", what);
    }
    return begin(comm, &load, NULL, &key, what, out);
}

/* Reads the marks atomically, because the library may be writing them. */
bool
fsdpc_flight_is_here(const fsdpc_flight *flight)
{
    for (int r = 0; r < flight->comm->world; r++) {
        const _Atomic int32_t *word = (const _Atomic int32_t *)&flight->marks[r].words[0];
        if (atomic_load(word) != begun.words[0]) {
            return false;
        }
    }
    return true;
}

/* Receives data from the ranks whose mark equals this rank's mark, and from no others. Their data must be
 * received even if other ranks' marks differ, or else the library could not receive later messages. */
static int
land_data(fsdpc_flight *flight, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    void *data = flight->data;
    if (!data) {
        return FSDPC_OK;
    }
    for (int r = 0; r < comm->world; r++) {
        flight->skip[r] = !agrees(flight, r);
    }
    const bool *skip = flight->agreed ? NULL : flight->skip;
    flight->data = NULL;
    FSDPC_TRY(comm->ops->land(comm, data, skip, what));
    fsdpc_moves_unpack(&flight->moves, skip);
    return FSDPC_OK;
}

static int
land(fsdpc_flight *flight, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    void *marking = flight->marking;
    flight->marking = NULL;
    FSDPC_TRY(marking ? comm->ops->land(comm, marking, NULL, what) : FSDPC_OK);
    flight->agreed = marks_agree(flight);
    return land_data(flight, what);
}

int
fsdpc_flight_now(fsdpc_comm *comm, const fsdpc_comm_part *part, const fsdpc_landing *landing,
                 const fsdpc_mark *mark, const char *what)
{
    int status = FSDPC_OK;
    const fsdpc_load load = {part, 1, landing, FSDPC_TO_ALL};
    fsdpc_flight *flight;
    FSDPC_GOTO(make(comm, mark, what, &flight), done);
    FSDPC_GOTO(take_off(flight, &load, mark, NULL, what), done);
    FSDPC_GOTO(land(flight, what), done);
    for (int r = 0; r < comm->world && status == FSDPC_OK && !flight->agreed; r++) {
        if (memcmp(&flight->marks[r], mark, sizeof *mark) != 0) {
            status = fsdpc_error(FSDPC_E_MISMATCH,
                                 "%s: rank %d makes another collective than rank %d, or one of "
                                 "another size: all ranks must make the same calls in one order",
                                 what, r, comm->rank);
        }
    }
done:
    comm->lost = !fsdpc_flight_free(flight) || comm->lost;
    return status;
}

int
fsdpc_flight_land(fsdpc_flight *flight, const char *what, bool *agreed)
{
    fsdpc_comm *comm = flight->comm;
    FSDPC_TRY(fsdpc_comm_check(comm));
    if (fsdpc_comm_flies(comm)) {
        FSDPC_TRY(fsdpc_comm_enter(comm, what));
        FSDPC_TRY(fsdpc_comm_leave(comm, land(flight, what)));
    }
    if (agreed) {
        *agreed = flight->agreed;
    }
    return FSDPC_OK;
}

const fsdpc_mark *
fsdpc_flight_marks(const fsdpc_flight *flight)
{
    return flight->marks;
}

bool
fsdpc_flight_is_summed(const fsdpc_flight *flight)
{
    return flight->summed;
}

uint64_t
fsdpc_flight_sent_bytes(const fsdpc_flight *flight)
{
    return flight->moves.sent_bytes;
}

uint64_t
fsdpc_flight_number(const fsdpc_flight *flight)
{
    return flight->number;
}

bool
fsdpc_comm_has_lost(const fsdpc_comm *comm)
{
    return comm && comm->lost;
}

bool
fsdpc_flight_free(fsdpc_flight *flight)
{
    if (!flight) {
        return true;
    }
    const bool landed = !flight->marking && !flight->data;
    if (flight->marking) {
        flight->comm->ops->drop(flight->comm, flight->marking);
    }
    if (flight->data) {
        flight->comm->ops->drop(flight->comm, flight->data);
    }
    (landed ? fsdpc_mem_free : fsdpc_mem_leave)(flight->marks);
    fsdpc_moves_free(&flight->moves, landed && flight->agreed);
    fsdpc_mem_free(flight->skip);
    fsdpc_mem_free(flight);
    return landed;
}
