/* Messages between ranks that share no memory, with the rules of a library of sends and receives. See sim.h.
 *
 * A send matches a receive of the same tag. Between two ranks, those of one tag match in posting order, and
 * messages of different tags may overtake each other. A message takes the sender's bytes when it leaves, at a
 * time that the seed draws: bytes that the sender changes earlier are sent as changed. A message is written
 * when it arrives, even if no rank waits for it. When a rank dies, its messages that have not left are lost.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { LEAVES_NS = 20000, SLOWEST_BITS = 9 };

struct sim_transfer {
    struct sim_transfer *next; /* in the list w.first[send][from][to] */
    struct sim_transfer *other;
    struct sim_transfer *next_send;
    bool send, over, dropped, cut; /* cut: this receive writes no memory any more */
    uint32_t tag;
    void *memory;
    size_t bytes;
    int from, to;
    int64_t leaves_ns, comes_ns;
    char *copy;
};

static struct {
    sim_transfer *first[2][SIM_RANKS][SIM_RANKS]; /* [send][from][to] */
    char *reasons[SIM_RANKS];
    bool closed[SIM_RANKS], dropped[SIM_RANKS];
    sim_transfer *sends; /* the sends of all ranks that are not freed yet */
    int64_t trip_ns;     /* longest trip of a message */
} w;

int64_t sim_wire_due_ns = SIM_NEVER;

void
sim_wire_begin(const sim_case *c)
{
    sim_wire_due_ns = SIM_NEVER;
    w.trip_ns = INT64_C(1000) << sim_mix(c->seed * 7 + 5) % (SLOWEST_BITS + 1);
}

static void
free_transfer(sim_transfer *self)
{
    sim_transfer **at = &w.first[self->send][self->from][self->to];
    while (*at != self) {
        at = &(*at)->next;
    }
    *at = self->next;
    for (at = &w.sends; self->send && *at; at = &(*at)->next_send) {
        if (*at == self) {
            *at = self->next_send;
            break;
        }
    }
    if (self->other) {
        self->other->other = NULL;
    }
    free(self->copy);
    free(self);
}

void
sim_wire_end(void)
{
    for (int a = 0; a < SIM_RANKS; a++) {
        for (int b = 0; b < SIM_RANKS; b++) {
            for (int send = 0; send < 2; send++) {
                while (w.first[send][a][b]) {
                    free_transfer(w.first[send][a][b]);
                }
            }
        }
        free(w.reasons[a]);
        w.reasons[a] = NULL;
        w.closed[a] = w.dropped[a] = false;
    }
}

/* Returns the first unmatched transfer in the other direction with the same tag, or NULL. */
static sim_transfer *
match(const sim_transfer *self)
{
    sim_transfer *found = w.first[!self->send][self->from][self->to];
    while (found && (found->tag != self->tag || found->other || found->over)) {
        found = found->next;
    }
    return found;
}

static int64_t
due_of(const sim_transfer *send)
{
    const bool comes = send->other && !send->other->cut;
    return !send->copy ? send->leaves_ns : comes ? send->comes_ns : SIM_NEVER;
}

sim_transfer *
sim_wire_post(int peer, bool send, uint32_t tag, void *memory, size_t bytes)
{
    const int own = sim_rank();
    sim_transfer *made = calloc(1, sizeof *made);
    *made = (sim_transfer){.send = send,
                           .tag = tag,
                           .memory = memory,
                           .bytes = bytes,
                           .from = send ? own : peer,
                           .to = send ? peer : own,
                           .leaves_ns = sim_now_ns() + (int64_t)(sim_draw() % LEAVES_NS)};
    made->comes_ns = made->leaves_ns + (int64_t)(sim_draw() % (uint64_t)w.trip_ns);
    sim_transfer **at = &w.first[send][made->from][made->to];
    while (*at) {
        at = &(*at)->next;
    }
    *at = made;
    made->other = match(made);
    if (made->other) {
        made->other->other = made;
    }
    if (send) {
        made->next_send = w.sends;
        w.sends = made;
    }
    const int64_t due_ns = send ? due_of(made) : made->other ? due_of(made->other) : SIM_NEVER;
    sim_wire_due_ns = due_ns < sim_wire_due_ns ? due_ns : sim_wire_due_ns;
    sim_wake_polls();
    return made;
}

/* Copies the bytes of a message that leaves; its sender may then use the memory again. */
static void
leave(sim_transfer *send)
{
    if (!send->copy) {
        send->copy = malloc(send->bytes + 1);
        memcpy(send->copy, send->memory, send->bytes);
    }
}

static void
come(sim_transfer *send)
{
    sim_transfer *taker = send->other;
    if (send->bytes != taker->bytes) {
        sim_violation("wire: rank %d sends %zu bytes where rank %d takes %zu", send->from,
                      send->bytes, send->to, taker->bytes);
        return;
    }
    leave(send);
    memcpy(taker->memory, send->copy, taker->bytes);
    taker->over = send->over = true;
    taker->other = send->other = NULL;
}

/* Sends and delivers the messages that are due. */
void
sim_wire_advance(void)
{
    const int64_t now_ns = sim_now_ns();
    sim_wire_due_ns = SIM_NEVER;
    for (sim_transfer *each = w.sends, *next; each; each = next) {
        next = each->next_send;
        if (!each->copy && each->leaves_ns <= now_ns) {
            leave(each);
        }
        if (each->other && !each->other->cut && each->comes_ns <= now_ns && !sim_violated()) {
            come(each);
        }
        const int64_t due_ns = each->over ? SIM_NEVER : due_of(each);
        sim_wire_due_ns = due_ns < sim_wire_due_ns ? due_ns : sim_wire_due_ns;
        if (each->over && each->dropped) {
            free_transfer(each);
        }
    }
}

enum sim_way
sim_wire_look(sim_transfer *self, int64_t *until_ns)
{
    const sim_transfer *send = self->send ? self : self->other;
    if (sim_now_ns() >= sim_wire_due_ns) {
        sim_wire_advance();
    }
    *until_ns = self->send ? self->leaves_ns : send && send->other ? send->comes_ns : SIM_NEVER;
    if (self->over || (self->send && self->copy)) {
        return SIM_OVER;
    }
    return w.closed[self->send ? self->to : self->from] && (self->send || !send) ? SIM_CLOSED
                                                                                 : SIM_ON_ITS_WAY;
}

void
sim_wire_forget(sim_transfer *self)
{
    if (self->send && !self->over) {
        leave(self);
        self->dropped = true; /* freed once the other rank has taken the message */
        return;
    }
    free_transfer(self);
}

/* A dropped receive stays, as its message may still come; a dropped send leaves now for its receiver. */
void
sim_wire_drop(sim_transfer *self)
{
    w.dropped[sim_rank()] = true;
    if (self->send) {
        sim_wire_forget(self);
    }
}

bool
sim_wire_has_dropped(int rank)
{
    return w.dropped[rank];
}

/* A posted send cannot be called back: a later message would be received in its place. */
void
sim_wire_skip(sim_transfer *self)
{
    self->send ? sim_wire_forget(self) : free_transfer(self);
}

void
sim_wire_cut(void)
{
    for (int other = 0; other < SIM_RANKS; other++) {
        for (sim_transfer *each = w.first[0][other][sim_rank()]; each; each = each->next) {
            each->cut = true;
        }
    }
}

void
sim_wire_give_reason(int rank, const char *text)
{
    free(w.reasons[rank]);
    w.reasons[rank] = strdup(text);
}

const char *
sim_wire_reason(int rank)
{
    return w.reasons[rank];
}

/* Loses a message and later ones of its tag, because messages of one tag arrive in the order of posting. */
static void
lose(sim_transfer *send)
{
    const uint32_t tag = send->tag;
    for (sim_transfer *each = send, *next; each; each = next) {
        next = each->next;
        if (each->tag == tag && !each->over) {
            free_transfer(each);
        }
    }
}

static sim_transfer *
first_lost(int from, int to)
{
    sim_transfer *each = w.first[1][from][to];
    while (each && (each->copy || each->over || each->leaves_ns <= sim_now_ns())) {
        each = each->next;
    }
    return each;
}

void
sim_wire_close(int rank)
{
    w.closed[rank] = true;
    for (int other = 0; other < SIM_RANKS; other++) {
        while (w.first[0][other][rank]) { /* nobody waits for this rank's receives */
            free_transfer(w.first[0][other][rank]);
        }
        for (sim_transfer *lost; (lost = first_lost(rank, other)) != NULL;) {
            lose(lost);
        }
        for (sim_transfer *each = w.first[1][rank][other]; each; each = each->next) {
            leave(each);
        }
    }
    sim_wake_polls();
}
