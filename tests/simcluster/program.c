/* The program of each rank (it makes a group, units and a tree, and trains), and a model of the right values.
 *
 * The program is linked into each copy of the core. It depends on the case alone, so the ranks agree on what
 * must be the same and know what the others do. Weights are whole numbers that differ between units,
 * positions and versions. Gradients are fractions: a sum in another order differs in its last bits.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "sim.h"
#include "exchange/exchange_shared_impl.h"
#include "tree/tree_impl.h"
#include "unit/grad.h"
#include "unit/unit_impl.h"

/* Rounds of a step have numbers: backwards from 0, late gradients 8, batches of evaluation k from 16 + 8k. */
enum { LATE_ROUND = 8, EVALUATION = 16, BATCHES = 8 };
enum { PARAMS = 2, PIECE = 64, NUMEL_MOST = PIECE * SIM_RANKS, ROOT = 0 };

/* The ranks of a communicator, by their numbers in the world. */
typedef struct group {
    const struct model *m;
    int rank, world; /* this rank's place in the group, and the group's size */
    int members[SIM_RANKS];
} group;

typedef struct model {
    const sim_case *c;
    int net;            /* 1 in the second of two models, else 0 */
    struct model *twin; /* the second model, if this is the first of two; else NULL */
    int rank, version, step, event;
    group shard, replicas; /* without replicas, `shard` has all ranks, `replicas` only this one */
    bool frozen[SIM_UNITS];
    int held[SIM_UNITS];          /* the version of each unit's weights */
    bool swapped;                 /* the next change of weights puts the old ones back */
    int done;                     /* how many passes, backwards and meetings it has done */
    bool gone;                    /* this rank has left before the end */
    int rounds[SIM_UNITS];        /* bit i: the gradients of round i are still to be taken */
    fsdpc_comm *comm, *replicate; /* replicate: NULL without replicas */
    fsdpc_unit *units[SIM_UNITS];
    fsdpc_tree *tree;
} model;

static fsdpc_device *device;

/* Defined in this file: else the linker takes libgcc's function of the same name, for split stacks. */
int sim_pthread_create(pthread_t *out, void *(*function)(void *), void *argument);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int
__wrap_pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*function)(void *),
                      void *argument)
{
    (void)attr;
    return sim_pthread_create(out, function, argument);
}

/* A rank that notifies others has ended its wait; sim_wait_ended() checks why the wait has ended. */
void __real_fsdpc_shm_notify(fsdpc_shm *);
void __wrap_fsdpc_shm_notify(fsdpc_shm *);
void
__wrap_fsdpc_shm_notify(fsdpc_shm *shm)
{
    sim_wait_ended(true);
    __real_fsdpc_shm_notify(shm);
}

/* A rank may take its fallback without a wake-up by another rank, so sim_wait_ended() gets false. */
bool __real_fsdpc_shared_must_act(fsdpc_exchange *, struct fsdpc_shared_wait *, enum fsdpc_shm_way);
bool __wrap_fsdpc_shared_must_act(fsdpc_exchange *, struct fsdpc_shared_wait *, enum fsdpc_shm_way);
bool
__wrap_fsdpc_shared_must_act(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                             enum fsdpc_shm_way way)
{
    const bool act = __real_fsdpc_shared_must_act(x, wait, way);
    if (act) {
        sim_wait_ended(false);
    }
    return act;
}

/* Other ranks may run between two pieces that are summed. */
int __real_fsdpc_grad_sum_pieces(const fsdpc_unit *, int, const char *const *, int, char *);
int __wrap_fsdpc_grad_sum_pieces(const fsdpc_unit *, int, const char *const *, int, char *);
int
__wrap_fsdpc_grad_sum_pieces(const fsdpc_unit *unit, int owner, const char *const *buffers,
                             int count, char *out)
{
    sim_point("sum");
    return __real_fsdpc_grad_sum_pieces(unit, owner, buffers, count, out);
}

void sim_boot(void);
sim_program sim_rank_main;

/* --- the plain model ------------------------------------------------------------------------- */

static int64_t
numel_of(const sim_case *c, int unit, int param)
{
    const int64_t draw = (int64_t)sim_drawn(c, 1, unit, param, 0);
    if (c->wide && param == 0) { /* large enough that each rank has a shard of it */
        return PIECE * (c->world - 1) + 1 + (draw & 15);
    }
    return 1 + (draw & INT64_MAX) % (param == 0 ? 64 : 9);
}

/* Returns the number from which a unit's values are computed; it differs between the two models. */
static int
key_of(const model *m, int unit)
{
    return unit + m->net * SIM_UNITS;
}

static float
value_of(int unit, int64_t i, int version)
{
    return (float)((i * 7 + unit * 31 + version * 3) % 251);
}

static float
grad_of(int rank, int unit, int param, int64_t i, int step, int round)
{
    int64_t mixed = i * 7919 + rank * 104729 + unit * 3101 + param * 1777 + step * 911 + round * 57;
    return (float)((double)(mixed % 10007) / 1000.0 - 5.0);
}

/* True for a batch of an evaluation in which this rank runs no unit. Sometimes no rank runs one. */
static bool
is_idle(const sim_case *c, int rank, int step, int round)
{
    return c->idle && round >= EVALUATION &&
           (sim_drawn(c, 200, 0, step, round) % 4 == 0 ||
            sim_drawn(c, 201 + rank, 0, step, round) % 8 == 0);
}

/* True at the one place of a run where SIM_STRAYS makes the rank leave out a unit, which a wire forbids. */
static bool
leaves_out(const sim_case *c, int rank, int unit, int step, int round)
{
    const uint64_t draw = c->at / 2;
    const int there = c->at % 2 ? EVALUATION : (int)(draw % (uint64_t)c->rounds);
    return c->wire && c->fault == SIM_STRAYS && !c->thaws && rank == c->victim && round == there &&
           unit == 1 + (int)(draw / 4 % (uint64_t)(c->units - 1)) &&
           step == (int)(draw / 16 % (uint64_t)c->steps);
}

/* True if the rank runs the unit in this round. gets() says whether a parameter also gets a gradient then. */
static bool
runs(const sim_case *c, int rank, int unit, int step, int round)
{
    return !is_idle(c, rank, step, round) && !leaves_out(c, rank, unit, step, round) &&
           (unit == ROOT ? !c->rootless
                         : !c->skips || sim_drawn(c, 2 + rank, unit, step, round) % 4 != 0);
}

/* The step before which the unit is unfrozen. 0: it is never frozen; c->steps: it stays frozen to the end. */
static int
thaw_step(const sim_case *c, int unit)
{
    const uint64_t draw = sim_drawn(c, 400, unit, 0, 0);
    return !c->thaws || draw % 4 == 0 ? 0 : 1 + (int)(draw / 4 % (uint64_t)c->steps);
}

static bool
gets(const sim_case *c, int rank, int unit, int param, int step, int round)
{
    return runs(c, rank, unit, step, round) && step >= thaw_step(c, unit) &&
           sim_drawn(c, 100 + rank, unit * PARAMS + param, step, round) % 4 != 0;
}

/* Returns what a rank sends for an element: the sum of the gradients of all rounds, in their order. */
static float
sent(const model *m, int rank, int unit, int param, int64_t i)
{
    float sum = 0;
    for (int round = 0; round < m->c->rounds; round++) {
        if (gets(m->c, rank, unit, param, m->step, round)) {
            sum += grad_of(rank, key_of(m, unit), param, i, m->step, round);
        }
    }
    return sum;
}

/* True if all ranks run the same units in the same order, and none is delayed (naps, computes) or fails. */
static bool
in_step(const sim_case *c)
{
    return !c->own_order && !c->skips && !c->nested && !c->uneven && !c->idle && !c->naps &&
           !c->computes && c->fault == SIM_NO_FAULT;
}

/* True if the unit gets more gradients after its reduction: unit 1 and, unless ranks are in step, half of the
 * other children. A rank may get no gradient of a late unit, so ranks send late units in different orders. */
static bool
is_late(const sim_case *c, int unit)
{
    return c->late &&
           (unit == 1 || (unit != ROOT && !in_step(c) && sim_drawn(c, 7, unit, 0, 0) % 2));
}

/* True if the rank runs the unit in the last round and the parameter gets gradients after the unit's sum. */
static bool
gets_late(const sim_case *c, int rank, int unit, int param, int step)
{
    return is_late(c, unit) && runs(c, rank, unit, step, c->rounds - 1) &&
           gets(c, rank, unit, param, step, LATE_ROUND);
}

/* Ranks of a shard group have adjacent numbers. Replicas of a shard are on ranks r, r + shards, and so on. */
static void
draw_groups(model *m)
{
    const int replicas = m->c->replicas ? m->c->replicas : 1, shards = m->c->world / replicas;
    m->shard = (group){.m = m, .rank = m->rank % shards, .world = shards};
    m->replicas = (group){.m = m, .rank = m->rank / shards, .world = replicas};
    for (int i = 0; i < shards; i++) {
        m->shard.members[i] = m->replicas.rank * shards + i;
    }
    for (int i = 0; i < replicas; i++) {
        m->replicas.members[i] = i * shards + m->shard.rank;
    }
}

/* Sums of() over a shard group: first over the ranks of each host, in rank order, then over the hosts. */
static float
sum_of_ranks(const model *m, int replica, float (*of)(const model *, int, const void *),
             const void *what)
{
    float sum = 0, hosts[SIM_RANKS] = {0};
    const int first = replica * m->shard.world;
    for (int r = first; r < first + m->shard.world; r++) {
        hosts[m->c->host_of[r]] += of(m, r, what);
    }
    for (int host = 0; host < m->c->world; host++) {
        sum += hosts[host];
    }
    return sum;
}

struct element {
    int unit, param;
    int64_t i;
};

static float
sent_of(const model *m, int rank, const void *what)
{
    const struct element *e = what;
    return sent(m, rank, e->unit, e->param, e->i);
}

static float
late_of(const model *m, int rank, const void *what)
{
    const struct element *e = what;
    return gets_late(m->c, rank, e->unit, e->param, m->step)
               ? grad_of(rank, key_of(m, e->unit), e->param, e->i, m->step, LATE_ROUND)
               : 0;
}

/* Late gradients have a separate sum. Each sum is divided by the world; with replicas, only the total is. */
static float
expected_sum(const model *m, int unit, int param, int64_t i)
{
    float sum = 0;
    const struct element element = {unit, param, i};
    const float part = (float)(1.0 / m->c->world), within = m->replicate ? 1 : part;
    for (int k = 0; k < m->replicas.world; k++) {
        sum += sum_of_ranks(m, k, sent_of, &element) * within +
               sum_of_ranks(m, k, late_of, &element) * within;
    }
    return m->replicate ? sum * part : sum;
}

static bool
any_gets(const model *m, int unit, int param)
{
    for (int r = 0; r < m->c->world; r++) {
        for (int round = 0; round < m->c->rounds; round++) {
            if (gets(m->c, r, unit, param, m->step, round)) {
                return true;
            }
        }
        if (gets_late(m->c, r, unit, param, m->step)) {
            return true;
        }
    }
    return false;
}

/* True if a rank gets gradients of the unit. Else no rank sends the unit: its parameters count as unused. */
static bool
any_sends(const model *m, int unit)
{
    for (int p = 0; p < PARAMS; p++) {
        if (any_gets(m, unit, p)) {
            return true;
        }
    }
    return false;
}

/* --- invariants ------------------------------------------------------------------------------ */

/* Checks invariant 1 (decision 41): a module reads exactly the values of the unit's version, held[u]. */
static void
check_values(const model *m, int u)
{
    const fsdpc_segment *seg = &m->units[u]->layout->segments[0];
    const float *full = (const float *)fsdpc_unit_full(m->units[u]);
    for (int64_t i = 0; i < seg->piece_numel * m->shard.world; i++) {
        if (full[i] != value_of(key_of(m, u), i, m->held[u])) {
            sim_violation(
                "values: rank %d reads %g in element %lld of unit %d at step %d, version %d "
                "has %g",
                m->rank, (double)full[i], (long long)i, u, m->step, m->held[u],
                (double)value_of(key_of(m, u), i, m->held[u]));
            return;
        }
    }
}

static float
expected_at(const model *m, int u, int64_t at)
{
    const fsdpc_layout *layout = m->units[u]->layout;
    for (int p = 0; p < PARAMS; p++) {
        const fsdpc_param_place *place = &layout->params[p];
        if (at >= place->offset && at < place->offset + place->numel) {
            return expected_sum(m, u, p, at - place->offset);
        }
    }
    return 0;
}

/* True if late gradients may be sent with the first ones. On the rank that leaves out a unit, other units
 * wait for that unit's turn, so all gradients are sent together and the sum is rounded differently. */
static bool
may_join_late(const model *m)
{
    bool any = false;
    for (int u = 1; m->c->late && u < m->c->units; u++) {
        any = any || leaves_out(m->c, m->c->victim, u, m->step, m->c->rounds - 1);
    }
    return any;
}

static bool
is_sum(const model *m, float got, float expected)
{
    const double apart = (double)got - (double)expected;
    return memcmp(&got, &expected, sizeof expected) == 0 || got + expected == 0 ||
           (may_join_late(m) && apart < 1e-5 && apart > -1e-5);
}

/* Checks invariant 2: each sum and each mark of a used parameter follows from this step's gradients. */
static void
check_sums(const model *m)
{
    for (int u = 0; u < m->c->units; u++) {
        const fsdpc_unit *unit = m->units[u];
        const fsdpc_segment *seg = &unit->layout->segments[0];
        const float *sums = (const float *)((const char *)unit->grad + seg->grad_offset);
        for (int64_t k = 0; any_sends(m, u) && k < seg->piece_numel; k++) {
            int64_t at = seg->piece_numel * m->shard.rank + k;
            float expected = expected_at(m, u, at);
            if (!is_sum(m, sums[k], expected)) {
                sim_violation(
                    "sums: rank %d has %.9g in element %lld of unit %d's gradient at step %d, "
                    "not %.9g",
                    m->rank, (double)sums[k], (long long)at, u, m->step, (double)expected);
                return;
            }
        }
        for (int p = 0; p < PARAMS; p++) {
            if (unit->grads.used[p] != any_gets(m, u, p)) {
                sim_violation("sums: parameter %d of unit %d has the mark %d on rank %d at step %d",
                              p, u, unit->grads.used[p], m->rank, m->step);
            }
        }
    }
}

/* --- the program ----------------------------------------------------------------------------- */

/* Checks invariant 8: other ranks do not see a computing rank as waiting. Then lets some time pass. */
static void
compute(const model *m)
{
    if (m->tree && !m->c->wire && fsdpc_shm_stands(m->tree->exchanges[0]->shm, m->shard.rank)) {
        sim_violation("waits: rank %d computes at step %d, and the others read that it waits",
                      m->rank, m->step);
    }
    sim_compute();
}

/* True if this rank's shards have elements of each unit that it trains. */
static bool
holds_all(const model *m)
{
    bool all = true;
    for (int u = 0; u < m->c->units; u++) {
        bool any = false;
        for (int p = 0; p < PARAMS; p++) {
            any = any || fsdpc_layout_span(m->units[u]->layout, p, m->shard.rank).length > 0;
        }
        all = all && (any || m->frozen[u]);
    }
    return all;
}

/* Does what an optimizer step does: changes this rank's shards and clears the gradients. */
static void
set_version(model *m, int version)
{
    const bool begins = !m->tree;
    m->version = version;
    for (int u = 0; u < m->c->units; u++) {
        fsdpc_unit *unit = m->units[u];
        if (m->frozen[u] && !begins) {
            continue;
        }
        m->held[u] = version;
        const fsdpc_segment *seg = &unit->layout->segments[0];
        float *piece = unit->master;
        sim_point("weights");
        for (int64_t i = 0; i < seg->piece_numel; i++) {
            piece[i] = value_of(key_of(m, u), seg->piece_numel * m->shard.rank + i, version);
        }
        unit->grads.add = false;
        memset(unit->grads.used, 0, PARAMS);
    }
    /* Report every second change, and each change if a shard is empty. Samples of weights show the others. */
    if (m->tree && (version % 2 == 0 || !holds_all(m))) {
        fsdpc_tree_touch(m->tree);
    }
    compute(m);
}

static int
make_unit(model *m, int u)
{
    char name[16];
    m->frozen[u] = thaw_step(m->c, u) > 0;
    snprintf(name, sizeof name, "%c%d", m->net ? 'v' : 'u', u);
    const fsdpc_unit_options options = {.name = name,
                                        .shard = m->comm,
                                        .replicate = m->replicate,
                                        .divide = m->c->world,
                                        .reshard = u != ROOT};
    fsdpc_param_spec specs[PARAMS];
    for (int p = 0; p < PARAMS; p++) {
        specs[p] = (fsdpc_param_spec){.name = p ? "b" : "a",
                                      .numel = numel_of(m->c, u, p),
                                      .storage = FSDPC_F32,
                                      .compute = FSDPC_F32,
                                      .reduce = FSDPC_F32,
                                      .trainable = !m->frozen[u]};
    }
    return fsdpc_unit_new(&options, specs, PARAMS, &m->units[u]);
}

/* --- the wire's library ------------------------------------------------------------------------ */

typedef struct transfers {
    int count;
    struct {
        sim_transfer *transfer;
        int peer;
    } each[];
} transfers;

static int
wire_post(void *context, const fsdpc_comm_move *moves, int count, uint32_t tag, const char *what,
          void **out)
{
    const group *g = context;
    transfers *made = fsdpc_mem_calloc(1, sizeof *made + (size_t)count * sizeof *made->each);
    if (!made) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %d transfers of rank %d", what, count,
                           g->m->rank);
    }
    for (int i = 0; i < count; i++) {
        const fsdpc_comm_move *move = &moves[i];
        sim_point("wire");
        made->each[made->count].peer = move->peer;
        made->each[made->count++].transfer =
            sim_wire_post(g->members[move->peer], move->send, tag, move->memory, move->bytes);
    }
    *out = made;
    return FSDPC_OK;
}

static int
wire_closed(const model *m, int peer, const char *what)
{
    const char *reason = sim_wire_reason(peer);
    return fsdpc_error(FSDPC_E_PEER, "rank %d %s%s while rank %d waits in %s", peer,
                       reason ? "gave up: " : "has closed its connections", reason ? reason : "",
                       m->rank, what);
}

static int
wire_wait(const model *m, sim_transfer *transfer, int peer, int64_t deadline_ns, const char *what)
{
    for (;;) {
        int64_t until_ns;
        sim_point("wire");
        const enum sim_way way = sim_wire_look(transfer, &until_ns);
        if (way == SIM_OVER) {
            return FSDPC_OK;
        }
        if (way == SIM_CLOSED) {
            return wire_closed(m, peer, what);
        }
        if (sim_now_ns() >= deadline_ns) {
            return fsdpc_error(FSDPC_E_TIMEOUT, "rank %d waited %g s in %s for rank %d", m->rank,
                               m->c->timeout_s, what, peer);
        }
        (void)sim_sleep_in_poll(until_ns < deadline_ns ? until_ns : deadline_ns);
    }
}

static int
wire_land(void *context, void *memory, const bool *skip, const char *what)
{
    int status = FSDPC_OK;
    const group *g = context;
    transfers *set = memory;
    const int64_t deadline_ns = sim_now_ns() + (int64_t)(g->m->c->timeout_s * 1e9);
    for (int i = 0; i < set->count; i++) {
        const int peer = set->each[i].peer;
        sim_transfer *transfer = set->each[i].transfer;
        if (status == FSDPC_OK && !(skip && skip[peer])) {
            status = wire_wait(g->m, transfer, g->members[peer], deadline_ns, what);
            (status == FSDPC_OK ? sim_wire_forget : sim_wire_skip)(transfer);
        } else {
            sim_wire_skip(transfer);
        }
    }
    fsdpc_mem_free(set);
    if (status != FSDPC_OK) {
        sim_wire_cut();
    }
    return status;
}

static void
wire_drop(void *context, void *memory)
{
    transfers *set = memory;
    (void)context;
    for (int i = 0; i < set->count; i++) {
        sim_wire_drop(set->each[i].transfer);
    }
    fsdpc_mem_free(set);
}

/* Sends the buffer from `root` to all other ranks; if root is -1, every rank sends to every other rank. */
static int
wire_exchange(void *context, void *buffer, size_t bytes, int root, uint32_t tag, const char *what)
{
    void *set;
    const group *g = context;
    fsdpc_comm_move moves[2 * SIM_RANKS];
    int count = 0;
    for (int r = 0; r < g->world; r++) {
        if (r != g->rank && (root == -1 || root == g->rank)) {
            moves[count++] = (fsdpc_comm_move){buffer, bytes, r, true};
        }
        if (r != g->rank && (root == -1 || root == r)) {
            moves[count++] = (fsdpc_comm_move){buffer, bytes, r, false};
        }
    }
    FSDPC_TRY(wire_post(context, moves, count, tag, what, &set));
    return wire_land(context, set, NULL, what);
}

static int
wire_broadcast(void *context, void *buffer, size_t bytes, int root, const char *what)
{
    return wire_exchange(context, buffer, bytes, root, 1, what);
}

static int
wire_barrier(void *context, const char *what)
{
    return wire_exchange(context, NULL, 0, -1, 2, what);
}

/* Never called: the core makes these collectives from wire_post() and wire_land(). */
static int
wire_piece(void *context, void *buffer, size_t bytes, const char *what)
{
    (void)context, (void)buffer, (void)bytes;
    return fsdpc_error(FSDPC_E_INTERNAL, "%s: no flight", what);
}

static int
wire_pieces(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype, const char *what)
{
    (void)numel, (void)dtype;
    return wire_piece(context, buffer, 0, what);
}

static int
wire_extreme(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
             const char *what)
{
    (void)op;
    return wire_pieces(context, buffer, numel, dtype, what);
}

static int
join_hosts(const model *m)
{
    char segment[32];
    snprintf(segment, sizeof segment, "host%d", m->c->host_of[m->rank]);
    return fsdpc_comm_set_hosts(m->comm, m->c->host_of, segment, m->c->timeout_s);
}

static int
join_wire(group *g, fsdpc_comm **out)
{
    const fsdpc_comm_callbacks calls = {.context = g,
                                        .all_gather = wire_piece,
                                        .reduce_scatter = wire_pieces,
                                        .all_reduce = wire_extreme,
                                        .broadcast = wire_broadcast,
                                        .barrier = wire_barrier,
                                        .post = wire_post,
                                        .land = wire_land,
                                        .drop = wire_drop};
    return fsdpc_comm_c10d(device, g->rank, g->world, &calls, out);
}

static int
join_memory(const group *g, fsdpc_comm **out)
{
    char name[32];
    snprintf(name, sizeof name, "sim%d-%d", g->members[0], g->members[1]);
    FSDPC_TRY(fsdpc_comm_shm(device, g->rank, g->world, name, g->m->c->timeout_s, out));
    fsdpc_shm_set_numbers(fsdpc_comm_segment(*out), g->members);
    return FSDPC_OK;
}

static int
join(model *m)
{
    FSDPC_TRY(m->c->wire ? join_wire(&m->shard, &m->comm) : join_memory(&m->shard, &m->comm));
    FSDPC_TRY(m->c->hosts ? join_hosts(m) : FSDPC_OK);
    return !m->c->replicas ? FSDPC_OK
           : m->c->near    ? join_memory(&m->replicas, &m->replicate)
                           : join_wire(&m->replicas, &m->replicate);
}

/* Agrees twice: texts of the first agreement must not show in the second. */
static int
agree(fsdpc_comm *comm)
{
    FSDPC_TRY(fsdpc_comm_agree(comm, "the same program", "agreement"));
    return fsdpc_comm_agree(comm, "and the same step", "agreement");
}

static int
make_tree(model *m)
{
    const sim_case *c = m->c;
    const int depths[SIM_UNITS] = {0, 1, 1, 1, 1};
    const fsdpc_tree_options options = {.backward_prefetch =
                                            (enum fsdpc_prefetch)c->backward_prefetch,
                                        .forward_prefetch = c->forward_prefetch,
                                        .gather_slots = c->gather_slots,
                                        .reduce_slots = c->reduce_slots,
                                        .trust_order = c->trusts,
                                        .poison = c->poison};
    return fsdpc_tree_new(m->units, depths, c->units, &options, &m->tree);
}

/* Called before each model makes its units: the core tells two models apart by the number of agreements. */
static int
agree_all(const model *m)
{
    FSDPC_TRY(agree(m->comm));
    return m->replicate ? agree(m->replicate) : FSDPC_OK;
}

static int
make_units(model *m)
{
    for (int u = 0; u < m->c->units; u++) {
        FSDPC_TRY(make_unit(m, u));
    }
    set_version(m, 0);
    return make_tree(m);
}

static int
open_model(model *m, sim_outcome *out)
{
    FSDPC_TRY(join(m));
    out->joined = true;
    FSDPC_TRY(agree_all(m));
    return make_units(m);
}

static int
open_twin(model *m)
{
    if (!m->twin) {
        return FSDPC_OK;
    }
    *m->twin =
        (model){.c = m->c, .net = 1, .rank = m->rank, .comm = m->comm, .replicate = m->replicate};
    draw_groups(m->twin);
    FSDPC_TRY(agree_all(m));
    return make_units(m->twin);
}

static int
child(const model *m, int position)
{
    const int shift = m->c->own_order ? m->rank + m->step : 0;
    return 1 + (position + shift) % (m->c->units - 1);
}

/* True if the child at position i + 1 runs inside of the child at position i. */
static bool
has_inner(const model *m, int i)
{
    return m->c->nested && i % 2 == 0 && i < m->c->units - 2;
}

/* Invariant 7: a rank that runs the same passes as the others waits for them at the end of a forward. */
static void
check_end(const model *m)
{
    const fsdpc_exchange *x = m->tree->exchanges[0];
    if (m->c->fault == SIM_NO_FAULT && !m->c->uneven && !m->c->wire &&
        x->shared->ranks[m->shard.rank].early == x->tag) {
        sim_violation("memory: rank %d has not waited for the others at the end of a forward",
                      m->rank);
    }
}

/* Only ranks that run units in different orders, or wait for long, need private memory or overflow slots. */
static void
check_memory(const model *m, int u)
{
    if (in_step(m->c) && !m->c->wire &&
        (fsdpc_unit_is_spare(m->units[u]) || m->tree->exchanges[0]->shared->over_used[u])) {
        sim_violation("memory: rank %d uses more for unit %d, at step %d, than ranks in step need",
                      m->rank, u, m->step);
    }
}

static int
enter_child(model *m, int u, int (*enter)(fsdpc_tree *, int))
{
    FSDPC_TRY(enter(m->tree, u));
    /* A rank takes private memory by itself after some time, so no other rank had to wake it. */
    sim_wait_ended(!fsdpc_unit_is_spare(m->units[u]));
    check_memory(m, u);
    check_values(m, u);
    compute(m);
    return FSDPC_OK;
}

static int
forward_child(model *m, int i, bool grad, int round)
{
    const int u = child(m, i);
    const bool here = runs(m->c, m->rank, u, m->step, round);
    if (leaves_out(m->c, m->rank, u, m->step, round)) {
        sim_note_fault();
    }
    if (here) {
        sim_say("forward of unit %d, step %d", u, m->step);
        FSDPC_TRY(enter_child(m, u, fsdpc_tree_forward_enter));
    }
    FSDPC_TRY(has_inner(m, i) ? forward_child(m, i + 1, grad, round) : FSDPC_OK);
    if (here) {
        check_values(m, u);
        FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, u, grad));
    }
    return FSDPC_OK;
}

static int
forward(model *m, bool grad, int round)
{
    const bool rooted = runs(m->c, m->rank, ROOT, m->step, round);
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree, grad));
    FSDPC_TRY(rooted ? fsdpc_tree_forward_enter(m->tree, ROOT) : FSDPC_OK);
    /* The twin runs in all batches of an evaluation or in none; else a rank might never run the twin. */
    if (m->twin && sim_drawn(m->c, 403, 0, m->step, round / BATCHES) % 4 == 0) {
        FSDPC_TRY(forward(m->twin, false, round % EVALUATION + EVALUATION)); /* a teacher */
    }
    for (int i = 0; i < m->c->units - 1; i += m->c->nested ? 2 : 1) {
        FSDPC_TRY(forward_child(m, i, grad, round));
    }
    if (rooted) {
        check_values(m, ROOT);
        FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, ROOT, grad));
    }
    if (!grad) {
        FSDPC_TRY(fsdpc_tree_end_forward(m->tree));
        sim_wait_ended(true);
        check_end(m);
        compute(m);
    }
    m->done++;
    return FSDPC_OK;
}

typedef struct grads {
    fsdpc_tensor tensors[PARAMS];
    int64_t shape[PARAMS];
    float values[PARAMS][NUMEL_MOST];
} grads;

static void
add_grads(const model *m, int u, int round, grads *to)
{
    static const int64_t one = 1;
    for (int p = 0; p < PARAMS; p++) {
        if (!gets(m->c, m->rank, u, p, m->step, round)) {
            continue;
        }
        to->shape[p] = numel_of(m->c, u, p);
        to->tensors[p] = (fsdpc_tensor){to->values[p], FSDPC_F32, 1, &to->shape[p], &one, true};
        for (int64_t i = 0; i < to->shape[p]; i++) {
            to->values[p][i] += grad_of(m->rank, key_of(m, u), p, i, m->step, round);
        }
    }
}

/* Computes the gradients as autograd leaves them: the sum of all rounds since gradients were last taken. */
static void
take_grads(model *m, int u, grads *out)
{
    memset(out, 0, sizeof *out);
    for (int round = 0; round <= LATE_ROUND; round++) {
        if (m->rounds[u] & 1 << round) {
            add_grads(m, u, round, out);
        }
    }
    m->rounds[u] = 0;
}

static int
send_due(model *m, bool at_end)
{
    int u;
    while ((u = fsdpc_tree_next_due(m->tree, at_end)) >= 0) {
        grads own;
        take_grads(m, u, &own);
        sim_say("reduction of unit %d, step %d", u, m->step);
        FSDPC_TRY(fsdpc_tree_reduce(m->tree, u, own.tensors));
        check_memory(m, u);
    }
    return FSDPC_OK;
}

static int
finish(model *m, int u, int round, bool sync)
{
    grads own;
    if (m->frozen[u]) {
        return fsdpc_tree_drop_hold(m->tree, u);
    }
    FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, sync));
    m->rounds[u] |= 1 << round;
    if (sync) {
        return send_due(m, false);
    }
    take_grads(m, u, &own);
    return fsdpc_tree_keep_local(m->tree, u, own.tensors);
}

static int
backward_child(model *m, int i, int round, bool sync)
{
    const int u = child(m, i);
    const bool here = runs(m->c, m->rank, u, m->step, round);
    if (here) {
        sim_say("backward of unit %d, step %d", u, m->step);
        FSDPC_TRY(enter_child(m, u, fsdpc_tree_backward_enter));
    }
    FSDPC_TRY(has_inner(m, i) ? backward_child(m, i + 1, round, sync) : FSDPC_OK);
    if (here) {
        check_values(m, u);
        FSDPC_TRY(finish(m, u, round, sync));
    }
    if (here && sync && is_late(m->c, u) && !m->frozen[u]) {
        FSDPC_TRY(enter_child(m, u, fsdpc_tree_backward_enter));
        return finish(m, u, LATE_ROUND, sync);
    }
    return FSDPC_OK;
}

static int
backward(model *m, int round, bool sync)
{
    const bool rooted = !m->c->rootless;
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    FSDPC_TRY(rooted ? fsdpc_tree_backward_enter(m->tree, ROOT) : FSDPC_OK);
    for (int i = m->c->units - 2; i >= 0; i--) {
        if (!m->c->nested || i % 2 == 0) {
            FSDPC_TRY(backward_child(m, i, round, sync));
        }
    }
    if (rooted) {
        check_values(m, ROOT);
        FSDPC_TRY(finish(m, ROOT, round, sync));
    }
    FSDPC_TRY(sync ? send_due(m, true) : FSDPC_OK);
    FSDPC_TRY(fsdpc_tree_end_backward(m->tree, sync));
    sim_wait_ended(true);
    m->done++;
    compute(m);
    return FSDPC_OK;
}

/* --- collectives between steps --------------------------------------------------------------- */

static float
item_of(const model *m, int rank, int i)
{
    return grad_of(rank, i, 0, 0, m->step, 0);
}

static float
sum_of(const group *g, int i)
{
    float sum = 0;
    for (int r = 0; r < g->world; r++) {
        sum += item_of(g->m, g->members[r], i);
    }
    return sum;
}

static void
check_item(const group *g, const char *what, float got, float expected)
{
    if (got != expected) {
        sim_violation("sums: %s on rank %d at step %d is %.9g, not %.9g", what, g->m->rank,
                      g->m->step, (double)got, (double)expected);
    }
}

/* Sums one value over all ranks of the group, as a norm does. */
static int
add_up(const group *g, fsdpc_comm *comm)
{
    float sum = item_of(g->m, g->m->rank, 0);
    FSDPC_TRY(fsdpc_comm_all_reduce(comm, &sum, 1, FSDPC_F32, FSDPC_SUM, "norm"));
    check_item(g, "the norm", sum, sum_of(g, 0));
    return FSDPC_OK;
}

static int
spread(const group *g, fsdpc_comm *comm)
{
    const int root = g->m->step % g->world;
    float got = item_of(g->m, g->m->rank, 1);
    FSDPC_TRY(fsdpc_comm_broadcast(comm, &got, sizeof got, root, "spread"));
    check_item(g, "the value of the root", got, item_of(g->m, g->members[root], 1));
    return FSDPC_OK;
}

static int
collect(const group *g, fsdpc_comm *comm)
{
    float all[SIM_RANKS];
    all[g->rank] = item_of(g->m, g->m->rank, 2);
    FSDPC_TRY(fsdpc_comm_all_gather(comm, all, sizeof *all, "collect"));
    for (int r = 0; r < g->world; r++) {
        check_item(g, "a rank's value", all[r], item_of(g->m, g->members[r], 2));
    }
    return FSDPC_OK;
}

static int
deal(const group *g, fsdpc_comm *comm)
{
    float all[SIM_RANKS];
    for (int r = 0; r < g->world; r++) {
        all[r] = item_of(g->m, g->m->rank, r);
    }
    FSDPC_TRY(fsdpc_comm_reduce_scatter(comm, all, 1, FSDPC_F32, "deal"));
    check_item(g, "a dealt sum", all[g->rank], sum_of(g, g->rank));
    return FSDPC_OK;
}

static int (*const ways[])(const group *, fsdpc_comm *) = {add_up, spread, collect, deal};
enum { MEETINGS = 2, WAYS = 4 };

/* Returns the index in `ways` of the collective that a meeting after a step makes, or -1 if none. */
static int
way_of(const sim_case *c, int step, int meeting)
{
    const uint64_t draw = sim_drawn(c, 6, step, 0, 0);
    if (draw % 32 >= (meeting == 0 ? 24 : 12)) {
        return -1;
    }
    return (int)(meeting == 0 ? draw % WAYS : draw / 32 % WAYS);
}

static int
barrier(const model *m, const char *what)
{
    FSDPC_TRY(fsdpc_comm_barrier(m->comm, what));
    return m->replicate ? fsdpc_comm_barrier(m->replicate, what) : FSDPC_OK;
}

static int
meet(model *m)
{
    for (int k = 0; k < MEETINGS; k++) {
        const int way = way_of(m->c, m->step, k);
        FSDPC_TRY(way >= 0 ? ways[way](&m->shard, m->comm) : FSDPC_OK);
        FSDPC_TRY(way >= 0 && m->replicate ? ways[way](&m->replicas, m->replicate) : FSDPC_OK);
        m->done++;
    }
    return FSDPC_OK;
}

static const char AFTER_AN_EVALUATION[] = "after an evaluation";

/* Calls a collective that no other rank calls: a barrier with the program's text, or a barrier with another
 * text. If the program never calls collect(), the collective may be an all-gather of one float. */
static int
stray(const model *m)
{
    bool collects = false;
    for (int step = 0; step < m->c->steps; step++) {
        for (int k = 0; k < MEETINGS; k++) {
            const int way = way_of(m->c, step, k);
            collects = collects || (way >= 0 && ways[way] == collect);
        }
    }
    float all[SIM_RANKS] = {0};
    if (collects || m->c->at % 2) {
        return fsdpc_comm_barrier(m->comm, m->c->at / 2 % 2 ? AFTER_AN_EVALUATION : "stray");
    }
    FSDPC_TRY(fsdpc_comm_all_gather(m->comm, all, sizeof *all, "stray"));
    sim_violation("sums: rank %d gathers what no other rank has given", m->rank);
    return FSDPC_OK;
}

/* --- training -------------------------------------------------------------------------------- */

/* Returns how many evaluations run before a step. */
static int
evaluations(const sim_case *c, int step)
{
    return c->evaluates ? (int)(sim_drawn(c, 3, step, 0, 0) % 4) : 0;
}

static int
event_count(const sim_case *c)
{
    int count = 1; /* faults may strike before an evaluation, a step, its meetings, and the end */
    for (int step = 0; step < c->steps; step++) {
        count += evaluations(c, step) + 2;
    }
    return count;
}

static int
event(model *m)
{
    const sim_case *c = m->c;
    const bool now =
        m->rank == c->victim && !m->net && m->event++ == (int)(c->at % (uint64_t)event_count(c));
    if (now && c->fault == SIM_RAISES) {
        sim_note_fault();
        return fsdpc_error(FSDPC_E_STATE, "the program of rank %d raises", m->rank);
    }
    if (now && c->fault == SIM_STRAYS && !c->wire && !c->thaws) {
        sim_note_fault();
        return stray(m);
    }
    if (now && c->fault == SIM_LEAVES) {
        sim_note_fault();
        m->gone = true;
    }
    return FSDPC_OK;
}

/* True if the fault SIM_CHANGES is in evaluation `k`. The victim then runs one batch less than the others, so
 * that it changes its weights while the others may still read them. */
static bool
changes_early(const model *m, int k)
{
    const sim_case *c = m->c;
    return c->fault == SIM_CHANGES && !m->net && k == (int)(c->at % 2) &&
           m->step == (int)(c->at / 2) % c->steps;
}

static int
batches(const model *m, int k)
{
    const int more = m->c->uneven ? (int)(sim_drawn(m->c, 4 + m->rank, m->step, k, 1) % 3)
                                  : sim_drawn(m->c, 8, m->step, k, 1) % (m->c->idle ? 2 : 4) == 0;
    return 1 + more + (changes_early(m, k) && m->rank != m->c->victim ? 1 : 0);
}

/* True if weights change after evaluation `k`. They may change only where all ranks run equally many batches
 * or wait for each other: else ranks with fewer batches would change weights that others still read. */
static bool
changes_after(const model *m, int k)
{
    return changes_early(m, k) ||
           ((!m->c->uneven || m->c->joins) && sim_drawn(m->c, 5, m->step, k, 1) % 4 != 0);
}

/* Runs the step's evaluations: batches without gradients, after which weights may change. */
static int
evaluate(model *m)
{
    const sim_case *c = m->c;
    for (int k = 0; k < evaluations(c, m->step); k++) {
        FSDPC_TRY(event(m));
        for (int i = 0; i < batches(m, k) && !m->gone; i++) {
            sim_say("evaluation %d, batch %d, step %d", k, i, m->step);
            FSDPC_TRY(forward(m, false, EVALUATION + k * BATCHES + i));
        }
        if (!m->gone && c->meets && !changes_early(m, k)) {
            FSDPC_TRY(barrier(m, AFTER_AN_EVALUATION));
            if (c->joins) {
                FSDPC_TRY(fsdpc_tree_meet_all(m->tree));
            }
            m->done++;
        }
        if (!m->gone && changes_after(m, k)) {
            if (changes_early(m, k) && m->rank == c->victim) {
                sim_note_fault();
            }
            set_version(m, m->version + (m->swapped ? -1 : 1));
            m->swapped = c->swaps && !m->swapped;
        }
    }
    return FSDPC_OK;
}

/* Returns the first frozen unit that is to be trained from this step on, or -1 if there is none. */
static int
next_thawed(const model *m)
{
    for (int u = 0; u < m->c->units; u++) {
        if (m->frozen[u] && m->step >= thaw_step(m->c, u)) {
            return u;
        }
    }
    return -1;
}

/* Unfreezes units as fsdpc/_engine/root.py does when the flags of parameters have changed before a pass. */
static int
thaw(model *m)
{
    char units[64] = "";
    const uint8_t segment = 1;
    const int first = next_thawed(m);
    if (first < 0 || m->gone) {
        return FSDPC_OK;
    }
    if (m->c->fault == SIM_STRAYS && m->rank == m->c->victim) {
        sim_note_fault();
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_tree_announce(m->tree, first, 0));
    snprintf(units, sizeof units, "unit %d at step %d", first, m->step);
    FSDPC_TRY(fsdpc_comm_agree(m->comm, units, "unfreezing"));
    FSDPC_TRY(m->replicate ? fsdpc_comm_agree(m->replicate, units, "unfreezing") : FSDPC_OK);
    FSDPC_TRY(fsdpc_tree_detach(m->tree));
    fsdpc_tree_free(m->tree);
    m->tree = NULL;
    for (int u; (u = next_thawed(m)) >= 0;) {
        FSDPC_TRY(fsdpc_unit_thaw(m->units[u], &segment));
        m->frozen[u] = false;
    }
    return make_tree(m);
}

static int
step(model *m)
{
    const sim_case *c = m->c;
    FSDPC_TRY(event(m));
    FSDPC_TRY(thaw(m));
    for (int round = 0; round < c->rounds && !m->gone; round++) {
        FSDPC_TRY(forward(m, true, round));
        FSDPC_TRY(backward(m, round, round == c->rounds - 1));
    }
    if (!m->gone) {
        check_sums(m);
        FSDPC_TRY(event(m));
    }
    if (!m->gone) {
        FSDPC_TRY(m->net || (c->parts && m->step == c->steps - 1) ? FSDPC_OK : meet(m));
        set_version(m, m->version + 1);
        m->swapped = false;
    }
    return FSDPC_OK;
}

static int
turn(model *m)
{
    FSDPC_TRY(sim_drawn(m->c, 401, m->step, 0, 0) % 2 ? thaw(m) : FSDPC_OK);
    FSDPC_TRY(evaluate(m));
    return m->gone ? FSDPC_OK : step(m);
}

static int
turn_of_twin(model *m)
{
    if (!m->twin) {
        return FSDPC_OK;
    }
    m->twin->step = m->step;
    return turn(m->twin);
}

static int
train(model *m)
{
    const sim_case *c = m->c;
    for (m->step = 0; m->step < c->steps && !m->gone; m->step++) {
        const bool before = sim_drawn(c, 402, m->step, 0, 0) % 2;
        FSDPC_TRY(before ? turn_of_twin(m) : FSDPC_OK);
        FSDPC_TRY(turn(m));
        FSDPC_TRY(before || m->gone ? FSDPC_OK : turn_of_twin(m));
    }
    FSDPC_TRY(m->gone ? FSDPC_OK : event(m));
    return m->gone || c->parts ? FSDPC_OK : barrier(m, "close");
}

static void
free_units(model *m)
{
    fsdpc_tree_free(m->tree);
    for (int u = 0; u < SIM_UNITS; u++) {
        fsdpc_unit_free(m->units[u]);
    }
}

static void
close_model(model *m)
{
    if (m->twin) {
        free_units(m->twin);
    }
    free_units(m);
    fsdpc_comm_free(m->replicate);
    fsdpc_comm_free(m->comm);
}

void
sim_boot(void)
{
    (void)fsdpc_device_cpu(&device);
}

void
sim_rank_main(int rank, const sim_case *c, sim_outcome *out)
{
    model twin = {0}, m = {.c = c, .rank = rank, .twin = c->twins ? &twin : NULL};
    draw_groups(&m);
    const int64_t live = fsdpc_mem_live();
    const bool starved = c->fault == SIM_NO_MEMORY && rank == c->victim;
    fsdpc_error_clear();
    fsdpc_mem_fail_after(starved ? (int64_t)c->at : 0);
    int status = open_model(&m, out);
    status = status == FSDPC_OK ? open_twin(&m) : status;
    status = status == FSDPC_OK ? train(&m) : status;
    if (starved && fsdpc_mem_failed()) {
        sim_note_fault();
    }
    fsdpc_mem_fail_after(0);
    out->status = status;
    out->done = m.done + twin.done;
    sim_note_close();
    if (status != FSDPC_OK) {
        snprintf(out->text, sizeof out->text, "%s", fsdpc_error_text());
        sim_say("raises: %s", out->text);
        sim_wire_give_reason(rank, out->text);
        if (m.comm) {
            fsdpc_comm_abort(m.comm, out->text);
        }
        if (m.replicate) {
            fsdpc_comm_abort(m.replicate, out->text);
        }
    }
    close_model(&m);
    out->live = fsdpc_mem_live() - live;
}
