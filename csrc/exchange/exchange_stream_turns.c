/* The check that all ranks gather and reduce units in the same order. Only the order decides which
 * collectives match, so a rank in another order would get wrong values. But a comparison before each
 * collective would be a host sync in every step.
 *
 * A turn is one collective in the sequence of a pass; a path is the hash of all turns up to one turn. Paths
 * on which the ranks have agreed once are kept in a set, and a turn on a known path is not compared. On a new
 * path (in the first step, and where the order changes) the ranks compare one word each before the
 * collective, which is a host sync. Ranks may still take different known paths. So a digest of the path
 * travels with the used bits, and the host checks the digests of all ranks in a later pass, when the digests
 * have arrived. Gathers and reductions are two sequences with a set each, because ranks may interleave the
 * two differently. The sets of two ranks are equal when both ranks are at the same turn of the sequence.
 */
#include <stdio.h>
#include <string.h>

#include "exchange/exchange_stream_impl.h"
#include "base/mem.h"
#include "base/status.h"

enum { KNOWN = 8192, DIGEST_BITS = 24, START = 1, BEGIN = 1 << 30, END };
enum { REDUCES = 1, SPARE = 2 };

/* Writes a digest as a pair of floats. A max-reduction of the ranks' pairs gives the largest digest, and the
 * negative of the smallest digest. A float represents 24 bits exactly. */
static void
write_extremes(uint64_t digest, float pair[2])
{
    pair[0] = (float)(digest >> (64 - DIGEST_BITS));
    pair[1] = -pair[0];
}

/* True if the reduced pair says that all ranks had the same digest. */
static bool
extremes_are_equal(const float pair[2])
{
    return pair[0] == -pair[1];
}

static uint64_t
mix(uint64_t path, uint64_t turn)
{
    uint64_t x = path * UINT64_C(0x9e3779b97f4a7c15) + turn + 1;
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (x ^ (x >> 31)) | 1;
}

static int
most_ranks(const fsdpc_exchange *x)
{
    int most = x->world;
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_unit *unit = x->units[u];
        int replicas =
            fsdpc_unit_replicate(unit) ? fsdpc_comm_world(fsdpc_unit_replicate(unit)) : 1;
        most = replicas > most ? replicas : most;
    }
    return most;
}

int
fsdpc_stream_turns_open(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    void *block;
    int most = most_ranks(x);
    t->off = x->trust_order || most == 1;
    if (t->off) {
        return FSDPC_OK;
    }
    t->path[0] = t->path[1] = t->digest[0] = t->digest[1] = START;
    t->words = (size_t)most;
    for (int i = 0; i < 2; i++) {
        t->known[i].most = KNOWN / 2;
        t->known[i].table = fsdpc_mem_calloc(KNOWN, sizeof *t->known[i].table);
        if (!t->known[i].table) {
            return fsdpc_error(FSDPC_E_NOMEM, "no memory for the order of units");
        }
    }
    FSDPC_TRY(fsdpc_device_host_alloc(s->device, t->words * sizeof(uint64_t), &block));
    t->pinned = block;
    FSDPC_TRY(fsdpc_device_alloc(s->device, t->words * sizeof(uint64_t), &block));
    t->device = block;
    FSDPC_TRY(fsdpc_device_host_alloc(s->device, sizeof *t->digests, &block));
    t->digests = block;
    FSDPC_TRY(fsdpc_device_event_new(s->device, &t->put));
    return fsdpc_device_event_new(s->device, &t->arrived);
}

void
fsdpc_stream_turns_close(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    fsdpc_device_host_free(s->device, t->pinned, t->words * sizeof(uint64_t));
    fsdpc_device_free(s->device, t->device, t->words * sizeof(uint64_t));
    fsdpc_device_host_free(s->device, t->digests, sizeof *t->digests);
    fsdpc_device_event_free(s->device, t->put);
    fsdpc_device_event_free(s->device, t->arrived);
    fsdpc_mem_free(t->known[0].table);
    fsdpc_mem_free(t->known[1].table);
}

/* --- paths ------------------------------------------------------------------------------------- */

static bool
is_known(const struct fsdpc_paths *known, uint64_t path)
{
    uint64_t at = path % KNOWN;
    for (; known->table[at]; at = (at + 1) % KNOWN) {
        if (known->table[at] == path) {
            return true;
        }
    }
    return false;
}

/* All ranks insert the same paths in the same order, so all ranks clear their sets at the same point. */
static void
learn(struct fsdpc_paths *known, uint64_t path)
{
    uint64_t at = path % KNOWN;
    if (is_known(known, path)) {
        return;
    }
    if (++known->count > known->most) {
        memset(known->table, 0, KNOWN * sizeof *known->table);
        known->count = 1;
        known->cleared++;
    }
    while (known->table[at]) {
        at = (at + 1) % KNOWN;
    }
    known->table[at] = path;
}

/* --- comparing now ------------------------------------------------------------------------------- */

static void
name_turn(const fsdpc_exchange *x, uint32_t turn, char *text, size_t bytes)
{
    uint32_t id = turn / 4;
    if (id < (uint32_t)x->unit_count) {
        snprintf(text, bytes, "the %s of unit %s%s", turn & REDUCES ? "reduce" : "gather",
                 fsdpc_unit_name(x->units[id]), turn & SPARE ? " into spare memory" : "");
    } else {
        snprintf(text, bytes, "%s", turn == END ? "the end of backward" : "another pass");
    }
}

static int
explain(const fsdpc_exchange *x, const struct fsdpc_turns *t, int rank, int other)
{
    char mine[200], theirs[200];
    name_turn(x, (uint32_t)t->pinned[rank], mine, sizeof mine);
    name_turn(x, (uint32_t)t->pinned[other], theirs, sizeof theirs);
    return fsdpc_error(
        FSDPC_E_MISMATCH,
        "rank %d is at %s while rank %d is at %s%s: the ranks run different units. If a module "
        "chooses by data what it runs, mark it with fsdpc.mark_data_dependent(module), so that "
        "every rank gathers all units below it",
        rank, mine, other, theirs,
        (uint32_t)t->pinned[rank] == (uint32_t)t->pinned[other] ? ", after different units before"
                                                                : "");
}

/* Fails if another rank has another word. The current stream must be the communicator's stream. */
static int
compare(fsdpc_exchange *x, fsdpc_comm *comm, uint64_t word, const char *what)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    const int rank = fsdpc_comm_rank(comm), world = fsdpc_comm_world(comm);
    t->pinned[rank] = word;
    FSDPC_TRY(fsdpc_device_copy_in(s->device, &t->device[rank], &t->pinned[rank], sizeof word));
    FSDPC_TRY(fsdpc_comm_all_gather(comm, t->device, sizeof word, what));
    FSDPC_TRY(fsdpc_device_copy_out(s->device, t->pinned, t->device, (size_t)world * sizeof word));
    FSDPC_TRY(fsdpc_device_record(s->device, s->sync_event));
    FSDPC_TRY(fsdpc_stream_await_host(x, s->sync_event, what));
    FSDPC_TRY(fsdpc_comm_check(comm));
    for (int r = 0; r < world; r++) {
        if (t->pinned[r] != word) {
            return explain(x, t, rank, r);
        }
    }
    return FSDPC_OK;
}

static int
compare_all(fsdpc_exchange *x, const fsdpc_unit *unit, bool reduce, uint64_t word)
{
    char what[FSDPC_STREAM_WHAT_BYTES];
    snprintf(what, sizeof what, "comparing the order of units before the %s of unit %s",
             reduce ? "reduce" : "gather",
             unit ? fsdpc_unit_name(unit) : "(none: the end of backward)");
    if (x->world > 1) {
        FSDPC_TRY(compare(x, reduce ? x->streams->reduce_comm : x->comm, word, what));
    }
    return reduce && unit && fsdpc_unit_replicate(unit)
               ? compare(x, fsdpc_comm_for_reductions(fsdpc_unit_replicate(unit)), word, what)
               : FSDPC_OK;
}

static int
take_turn(fsdpc_exchange *x, const fsdpc_unit *unit, bool reduce, uint32_t turn)
{
    struct fsdpc_turns *t = &x->streams->turns;
    uint64_t next = mix(t->path[reduce], turn);
    struct fsdpc_paths *known = &t->known[reduce];
    if (t->fresh[reduce] || !is_known(known, next)) {
        FSDPC_TRY(compare_all(x, unit, reduce, (next ^ t->fresh[reduce]) << 32 | turn));
        learn(known, next);
        if (t->fresh[reduce]) {
            learn(known, t->fresh[reduce]);
        }
        t->fresh[reduce] = 0;
    }
    t->path[reduce] = next;
    t->digest[reduce] = mix(t->digest[reduce], turn);
    return FSDPC_OK;
}

int
fsdpc_stream_turn(fsdpc_exchange *x, const fsdpc_unit *unit, bool reduce)
{
    const struct fsdpc_streams *s = x->streams;
    /* A captured step is not checked: each replay repeats the captured order. */
    if (s->turns.off || s->capture != 0 ||
        (x->world == 1 && !(reduce && fsdpc_unit_replicate(unit)))) {
        return FSDPC_OK;
    }
    uint32_t turn = (uint32_t)fsdpc_unit_use(unit)->id * 4 + (reduce ? REDUCES : 0);
    if (!reduce && fsdpc_unit_is_spare(unit) && fsdpc_comm_registers(x->comm)) {
        /* Spare memory is not registered. If only some ranks used it, NCCL's calls would differ. */
        turn |= SPARE;
    }
    return take_turn(x, unit, reduce, turn);
}

/* --- ends and beginnings ---------------------------------------------------------------------------- */

static int
check_digests(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    bool done = false;
    if (!t->awaited) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_device_poll(s->device, t->arrived, &done));
    if (!done) {
        return FSDPC_OK;
    }
    t->awaited = false;
    const float *got = t->digests->got;
    if (extremes_are_equal(got) && extremes_are_equal(got + 2)) {
        return FSDPC_OK;
    }
    int status = fsdpc_error(FSDPC_E_MISMATCH,
                             "rank %d: in the last backward or the forwards before it the ranks %s "
                             "units in different order: the results are invalid. If a module "
                             "chooses by data what it runs, mark it with "
                             "fsdpc.mark_data_dependent(module)",
                             x->rank, extremes_are_equal(got) ? "reduced" : "gathered");
    fsdpc_comm_abort(x->comm, fsdpc_error_text());
    return status;
}

int
fsdpc_stream_turns_begin(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    if (t->off || s->capture != 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(check_digests(x));
    if (t->path[0] != START) {
        uint64_t over = mix(t->path[0], BEGIN);
        t->fresh[0] = is_known(&t->known[0], over) ? 0 : over;
        t->path[0] = START;
    }
    return FSDPC_OK;
}

int
fsdpc_stream_turns_end(fsdpc_exchange *x)
{
    struct fsdpc_turns *t = &x->streams->turns;
    if (t->off || x->streams->capture != 0) {
        return FSDPC_OK;
    }
    /* The path of this step's gathers ends here. It is mixed into the path of the reductions. */
    t->path[1] = mix(t->path[1], t->path[0]);
    /* With one rank per shard group, only reductions are compared, over replicas. */
    if (x->world > 1) {
        FSDPC_TRY(take_turn(x, NULL, true, END));
    }
    t->path[0] = t->path[1] = START;
    return FSDPC_OK;
}

int
fsdpc_stream_turns_put(fsdpc_exchange *x, float *bits)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    float now[FSDPC_STREAM_TURN_FLOATS];
    for (int i = 0; i < 2; i++) {
        write_extremes(t->digest[i], now + 2 * i);
        t->digest[i] = START;
    }
    if (t->off || s->capture != 0 || memcmp(now, t->digests->own, sizeof now) == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_stream_await_host(x, t->put, "the order of units"));
    memcpy(t->digests->own, now, sizeof now);
    FSDPC_TRY(fsdpc_device_copy_in(s->device, bits, t->digests->own, sizeof now));
    return fsdpc_device_record(s->device, t->put);
}

int
fsdpc_stream_turns_take(fsdpc_exchange *x, const float *bits)
{
    struct fsdpc_streams *s = x->streams;
    struct fsdpc_turns *t = &s->turns;
    if (t->off || s->capture != 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(check_digests(x));
    if (t->awaited) {
        return FSDPC_OK; /* the last digests have not arrived yet: this rank skips this check */
    }
    FSDPC_TRY(fsdpc_device_copy_out(s->device, t->digests->got, bits, sizeof t->digests->got));
    t->awaited = true;
    return fsdpc_device_record(s->device, t->arrived);
}
