/* See flight_moves.h. Both ranks of a pair list their transfers in the same order, so that these match. */
#include "comm/flight_moves.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/hosts.h"

enum {
    CHUNK_BYTES = 1 << 20,  /* largest message: a larger one uses a link in one direction only */
    SMALL_BYTES = 64 << 10, /* largest piece in a packet: copying it is faster than a transfer */
};

/* Makes the lists in two passes: the first has no memory in `out` and only counts, the second fills `out`. */
struct lister {
    const fsdpc_comm *comm;
    const fsdpc_load *load;
    fsdpc_moves *out;
    size_t packet_bytes; /* bytes of each packet, to or from a peer; 0: there are no packets */
};

/* --- who sends what to whom ----------------------------------------------------------------------- */

static size_t
piece_bytes(const fsdpc_comm_part *part)
{
    return (size_t)part->piece_numel * fsdpc_dtype_bytes(part->dtype);
}

/* Each rank begins with a different peer, so that no rank receives the data of all ranks at once. */
static int
peer_at(const fsdpc_comm *comm, int step, bool send)
{
    return (comm->rank + (send ? step : comm->world - step)) % comm->world;
}

static char *
landing_of(const struct lister *l, int peer, int part)
{
    const fsdpc_landing *landing = l->load->landing;
    const bool by_host = l->load->route == FSDPC_BY_CARRIERS;
    const int from = by_host ? l->comm->hosts->host_of[peer] : peer;
    const int own = by_host ? l->comm->hosts->host : l->comm->rank;
    return landing->base + landing->stride * (size_t)(from < own ? from : from - 1) +
           landing->offsets[part];
}

/* Returns the address of the piece that this rank sends to `peer` (`send`) or receives from `peer`. */
static char *
place_of(const struct lister *l, int part, int peer, bool send)
{
    const fsdpc_comm_part *p = &l->load->parts[part];
    if (!send && l->load->landing) {
        return landing_of(l, peer, part);
    }
    const bool own = send && !l->load->landing;
    return (char *)p->buffer + piece_bytes(p) * (size_t)(own ? l->comm->rank : peer);
}

/* True if `from` sends a piece to `to`: its own piece in a gather, the piece of `to` in a reduction. */
static bool
sends(const struct lister *l, int from, int to)
{
    return l->load->route == FSDPC_TO_ALL ||
           (l->load->landing ? fsdpc_hosts_carries(l->comm, from, to)
                             : fsdpc_hosts_carries(l->comm, to, from));
}

static bool
moves_with(const struct lister *l, int peer, bool send)
{
    return send ? sends(l, l->comm->rank, peer) : sends(l, peer, l->comm->rank);
}

static bool
shares_host(const fsdpc_comm *comm, int rank)
{
    return comm->hosts && comm->hosts->host_of[rank] == comm->hosts->host;
}

/* --- lists ------------------------------------------------------------------------------------------ */

static void
add(struct lister *l, char *memory, size_t bytes, int peer, bool send)
{
    fsdpc_moves *out = l->out;
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES) {
        if (out->moves) {
            const size_t left = bytes - at;
            out->moves[out->count] =
                (fsdpc_comm_move){memory + at, left < CHUNK_BYTES ? left : CHUNK_BYTES, peer, send};
        }
        out->count++;
    }
    out->sent_bytes += send && !shares_host(l->comm, peer) ? bytes : 0;
}

static bool
is_packed(const struct lister *l, int part)
{
    return l->packet_bytes > 0 && piece_bytes(&l->load->parts[part]) <= SMALL_BYTES;
}

static void
list_part(struct lister *l, int part, int peer, bool send)
{
    const size_t bytes = piece_bytes(&l->load->parts[part]);
    if (!is_packed(l, part) && moves_with(l, peer, send)) {
        add(l, place_of(l, part, peer, send), bytes, peer, send);
    }
}

static void
pack(struct lister *l, int part, char *at, int peer, bool send)
{
    const size_t bytes = piece_bytes(&l->load->parts[part]);
    char *place = place_of(l, part, peer, send);
    if (send) {
        memcpy(at, place, bytes);
    } else {
        l->out->small[l->out->small_count] = (fsdpc_small_piece){place, at, bytes, peer};
    }
}

static void
list_packet(struct lister *l, int peer, bool send)
{
    fsdpc_moves *out = l->out;
    if (l->packet_bytes == 0 || !moves_with(l, peer, send)) {
        return;
    }
    const size_t place = 2 * (size_t)peer + send;
    char *at = out->packets ? out->packets + l->packet_bytes * place : NULL;
    add(l, at, l->packet_bytes, peer, send);
    for (int i = 0; i < l->load->count; i++) {
        if (is_packed(l, i)) {
            if (at) {
                pack(l, i, at, peer, send);
                at += piece_bytes(&l->load->parts[i]);
            }
            out->small_count += !send;
        }
    }
}

static void
list_all(struct lister *l)
{
    l->out->count = l->out->small_count = 0;
    l->out->sent_bytes = 0;
    for (int i = 0; i <= l->load->count; i++) {
        for (int step = 1; step < l->comm->world; step++) {
            for (int send = 0; send < 2; send++) {
                const int peer = peer_at(l->comm, step, send);
                if (i < l->load->count) {
                    list_part(l, i, peer, send);
                } else {
                    list_packet(l, peer, send);
                }
            }
        }
    }
}

/* Returns the bytes of all small parts; 0 if fewer than two are small, as a packet would save no transfer. */
static size_t
bytes_of_packet(const fsdpc_load *load)
{
    size_t bytes = 0;
    int small = 0;
    for (int i = 0; i < load->count; i++) {
        const size_t piece = piece_bytes(&load->parts[i]);
        if (piece <= SMALL_BYTES) {
            bytes += piece;
            small++;
        }
    }
    return small < 2 ? 0 : bytes;
}

int
fsdpc_moves_make(const fsdpc_comm *comm, const fsdpc_load *load, const char *what, fsdpc_moves *out)
{
    struct lister lister = {comm, load, out, bytes_of_packet(load)};
    *out = (fsdpc_moves){0};
    list_all(&lister);
    const size_t peers = 2 * (size_t)comm->world;
    fsdpc_moves made = {.moves = fsdpc_mem_calloc((size_t)out->count + 1, sizeof *out->moves)};
    const bool packs = lister.packet_bytes > 0 && out->count > 0;
    if (packs) {
        made.packets = fsdpc_mem_calloc(peers, lister.packet_bytes);
        made.small = fsdpc_mem_calloc((size_t)out->small_count + 1, sizeof *out->small);
    }
    if (!made.moves || (packs && (!made.packets || !made.small))) {
        const int count = out->count;
        fsdpc_moves_free(&made, true);
        *out = (fsdpc_moves){0};
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %d transfers", what, count);
    }
    *out = made;
    list_all(&lister);
    return FSDPC_OK;
}

void
fsdpc_moves_unpack(const fsdpc_moves *moves, const bool *skip)
{
    for (int i = 0; i < moves->small_count; i++) {
        const fsdpc_small_piece *piece = &moves->small[i];
        if (!skip || !skip[piece->peer]) {
            memcpy(piece->to, piece->from, piece->bytes);
        }
    }
}

void
fsdpc_moves_free(fsdpc_moves *moves, bool landed)
{
    fsdpc_mem_free(moves->moves);
    fsdpc_mem_free(moves->small);
    (landed ? fsdpc_mem_free : fsdpc_mem_leave)(moves->packets);
    *moves = (fsdpc_moves){0};
}
