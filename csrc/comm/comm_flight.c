/* See flight.h. */
#include "comm/flight.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/comm_impl.h"
#include "comm/hosts.h"

enum {
    CHUNK_BYTES = 1 << 20,    /* one large message each way would take turns with the other */
    DATA_TAG = 1 << 30,       /* programs that send by themselves use small tags */
    MARKS_TAG = DATA_TAG - 1, /* in the order of flights */
};

struct fsdpc_flight {
    fsdpc_comm *comm;
    void *data, *marking; /* transfers of the kind, NULL: none, or landed */
    fsdpc_mark *marks;    /* one per rank */
    bool *skip;           /* ranks with other marks; allocated before anything is posted */
    uint64_t sent_bytes;
    bool agreed; /* known after landing */
    bool marked, summed;
};

bool
fsdpc_comm_flies(const fsdpc_comm *comm)
{
    return comm->ops->post && comm->ops->flies(comm);
}

/* --- transfers --------------------------------------------------------------------------------- */

/* The transfers of one flight; `moves` NULL counts them. */
struct list {
    fsdpc_comm_move *moves;
    int count;
    uint64_t sent_bytes; /* to other hosts */
};

static void
add(struct list *list, char *memory, size_t bytes, int peer, bool send)
{
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES) {
        if (list->moves) {
            const size_t left = bytes - at;
            list->moves[list->count] =
                (fsdpc_comm_move){memory + at, left < CHUNK_BYTES ? left : CHUNK_BYTES, peer, send};
        }
        list->count++;
    }
}

/* Every rank begins with another peer, so that no rank gets all at once. */
static int
peer_at(const fsdpc_comm *comm, int step, bool send)
{
    return (comm->rank + (send ? step : comm->world - step)) % comm->world;
}

/* What a flight moves. */
struct load {
    const fsdpc_comm_part *parts;
    int count;
    const fsdpc_landing *landing; /* NULL: a gather, which brings the others' pieces in place */
    fsdpc_route route;
};

static char *
landing_of(const fsdpc_comm *comm, const struct load *load, int peer, int part)
{
    const fsdpc_landing *landing = load->landing;
    const bool by_host = load->route == FSDPC_BY_CARRIERS;
    const int from = by_host ? comm->hosts->host_of[peer] : peer;
    const int own = by_host ? comm->hosts->host : comm->rank;
    return landing->base + landing->stride * (size_t)(from < own ? from : from - 1) +
           landing->offsets[part];
}

/* `from` sends to `to`: in a gather its own piece, in a reduction the receiver's. */
static bool
sends(const fsdpc_comm *comm, const struct load *load, int from, int to)
{
    return load->route == FSDPC_TO_ALL || (load->landing ? fsdpc_hosts_carries(comm, from, to)
                                                         : fsdpc_hosts_carries(comm, to, from));
}

static bool
shares_host(const fsdpc_comm *comm, int rank)
{
    return comm->hosts && comm->hosts->host_of[rank] == comm->hosts->host;
}

static void
list_moves(const fsdpc_comm *comm, const struct load *load, struct list *list)
{
    list->count = 0;
    list->sent_bytes = 0;
    for (int i = 0; i < load->count; i++) {
        const fsdpc_comm_part *part = &load->parts[i];
        const size_t bytes = (size_t)part->piece_numel * fsdpc_dtype_bytes(part->dtype);
        char *buffer = part->buffer;
        for (int step = 1; step < comm->world; step++) {
            const int from = peer_at(comm, step, false), to = peer_at(comm, step, true);
            if (sends(comm, load, from, comm->rank)) {
                char *into =
                    load->landing ? landing_of(comm, load, from, i) : buffer + bytes * (size_t)from;
                add(list, into, bytes, from, false);
            }
            if (sends(comm, load, comm->rank, to)) {
                const size_t piece = (size_t)(load->landing ? to : comm->rank);
                add(list, buffer + bytes * piece, bytes, to, true);
                list->sent_bytes += shares_host(comm, to) ? 0 : bytes;
            }
        }
    }
}

/* Equal on ranks that mean the same flight: what the others send for another one finds no taker. */
static uint32_t
tag_of(const fsdpc_comm *comm, const fsdpc_mark *mark)
{
    uint64_t hash = 14695981039346656037u ^ comm->flights;
    for (int i = 0; mark && i < (int)(sizeof mark->words / sizeof mark->words[0]); i++) {
        hash = (hash ^ (uint32_t)mark->words[i]) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return (uint32_t)DATA_TAG | (uint32_t)(hash & (DATA_TAG - 1));
}

static int
post_marks(fsdpc_flight *flight, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    const int count = 2 * (comm->world - 1);
    fsdpc_comm_move *moves = fsdpc_mem_calloc((size_t)count, sizeof *moves);
    if (!moves) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the marks of %d ranks", what,
                           comm->world);
    }
    for (int step = 1, at = 0; step < comm->world; step++) {
        const int from = peer_at(comm, step, false), to = peer_at(comm, step, true);
        moves[at++] = (fsdpc_comm_move){&flight->marks[from], sizeof *flight->marks, from, false};
        moves[at++] =
            (fsdpc_comm_move){&flight->marks[comm->rank], sizeof *flight->marks, to, true};
    }
    int status = comm->ops->post(comm, moves, count, MARKS_TAG, what, &flight->marking);
    fsdpc_mem_free(moves);
    return status;
}

static int
post_data(fsdpc_flight *flight, const struct load *load, uint32_t tag, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    struct list list = {0};
    list_moves(comm, load, &list);
    flight->sent_bytes = list.sent_bytes;
    if (list.count == 0) {
        return FSDPC_OK;
    }
    list.moves = fsdpc_mem_calloc((size_t)list.count, sizeof *list.moves);
    if (!list.moves) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %d transfers", what, list.count);
    }
    list_moves(comm, load, &list);
    int status = comm->ops->post(comm, list.moves, list.count, tag, what, &flight->data);
    fsdpc_mem_free(list.moves);
    return status;
}

static bool
agrees(const fsdpc_flight *flight, int rank)
{
    return memcmp(&flight->marks[rank], &flight->marks[flight->comm->rank],
                  sizeof *flight->marks) == 0;
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

static int
take_off(fsdpc_flight *flight, const struct load *load, const fsdpc_mark *mark, const char *what)
{
    fsdpc_comm *comm = flight->comm;
    const uint32_t tag = tag_of(comm, mark);
    fsdpc_comm_say_turn(comm, mark);
    comm->flights++;
    if (mark) {
        FSDPC_TRY(post_marks(flight, what));
    }
    return post_data(flight, load, tag, what);
}

/* The same by a blocking collective, only if all ranks mean the same. */
static int
go_at_once(fsdpc_flight *flight, const struct load *load, const char *what)
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

/* Every mark is this rank's until another one comes: a process group may be a fake, which moves nothing. */
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
    flight->marked = mark != NULL;
    for (int r = 0; mark && r < comm->world; r++) {
        marks[r] = *mark;
    }
    return FSDPC_OK;
}

static int
begin(fsdpc_comm *comm, const struct load *load, const fsdpc_mark *mark, const char *what,
      fsdpc_flight **out)
{
    int status = FSDPC_OK;
    *out = NULL;
    FSDPC_TRY(fsdpc_comm_check_parts(comm, load->parts, load->count, what));
    FSDPC_GOTO(make(comm, mark, what, out), fail);
    if (fsdpc_comm_flies(comm)) {
        FSDPC_GOTO(fsdpc_comm_enter(comm, what), fail);
        status = fsdpc_comm_leave(comm, take_off(*out, load, mark, what));
    } else {
        status = go_at_once(*out, load, what);
    }
fail:
    if (status != FSDPC_OK) {
        fsdpc_flight_free(*out);
        *out = NULL;
    }
    return status;
}

int
fsdpc_flight_gather(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, fsdpc_route route,
                    const fsdpc_mark *mark, const char *what, fsdpc_flight **out)
{
    const struct load load = {parts, count, NULL, route};
    return begin(comm, &load, mark, what, out);
}

int
fsdpc_flight_reduce(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                    const fsdpc_landing *landing, fsdpc_route route, const fsdpc_mark *mark,
                    const char *what, fsdpc_flight **out)
{
    const struct load load = {parts, count, landing, route};
    return begin(comm, &load, mark, what, out);
}

/* With ranks of other marks nothing moves. What the others send has to arrive, or the library could not receive
 * anything behind it. */
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
    flight->data = NULL;
    return comm->ops->land(comm, data, flight->agreed ? NULL : flight->skip, what);
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
    const struct load load = {part, 1, landing, FSDPC_TO_ALL};
    fsdpc_flight *flight;
    FSDPC_GOTO(make(comm, mark, what, &flight), done);
    FSDPC_GOTO(take_off(flight, &load, mark, what), done);
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
    fsdpc_flight_free(flight);
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
    return flight->sent_bytes;
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
    fsdpc_mem_free(flight->skip);
    fsdpc_mem_free(flight);
    return landed;
}
