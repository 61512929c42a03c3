/* Units with known values, for the tests of the engine.
 *
 * The value of an element of a gathered unit follows from the unit, the segment, the position and a
 * version. The value is exact in every dtype. A test increments the version wherever a training step
 * would change the parameters, so that a stale or missing element has a wrong value. Gradients are
 * fractions that depend on the rank, so that a sum in another order, or without one of the ranks,
 * differs in its last bits.
 */
#ifndef FSDPC_TEST_ENGINE_H
#define FSDPC_TEST_ENGINE_H

#include <errno.h>

#include "carrier.h"
#include "items.h"
#include "ranks.h"
#include "tree/tree.h"
#include "unit/unit_impl.h"

static fsdpc_device *engine_device;

static void engine_lay_by_rows(void);

__attribute__((constructor)) static void
engine_start(void)
{
    if (strstr(program_invocation_short_name, "_rows")) {
        engine_lay_by_rows();
    }
    if (fsdpc_device_cpu(&engine_device) != FSDPC_OK) {
        abort();
    }
}

/* --- values ---------------------------------------------------------------------------------- */

/* Returns an integer below 251, which is exact in bfloat16 and in a byte. */
static double
engine_value(int unit, int segment, int64_t position, int version)
{
    return (double)((position * 7 + unit * 31 + segment * 13 + version * 3) % 251);
}

/* Fills this rank's shard of every segment, including the padding. */
__attribute__((unused)) static void
engine_set_masters(fsdpc_unit *unit, int number, int version)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        char *piece = (char *)unit->master + seg->shard_offset;
        for (int64_t i = 0; i < seg->piece_numel; i++) {
            item_put(piece, seg->storage, i,
                     engine_value(number, s, seg->piece_numel * unit->rank + i, version));
        }
    }
}

/* Returns the values that a gather must give for a segment that is quantized for the gather, or NULL for a
 * segment that is not quantized. The caller frees the values. */
static char *
engine_decoded(const fsdpc_unit *unit, int number, int segment, int version)
{
    const fsdpc_segment *seg = &unit->layout->segments[segment];
    const int64_t n = seg->piece_numel * unit->world;
    if (seg->coded_bytes == 0) {
        return NULL;
    }
    char *values = malloc((size_t)n * 8), *decoded = malloc((size_t)n * 8);
    REQUIRE(values && decoded);
    for (int64_t i = 0; i < n; i++) {
        item_put(values, seg->storage, i, engine_value(number, segment, i, version));
    }
    REQUIRE_OK(fsdpc_codec_round(seg->codec, values, seg->storage, seg->row_numel, 0, n, decoded,
                                 seg->compute));
    free(values);
    return decoded;
}

/* Returns the number of elements of the gathered unit that do not have the value of this version. */
__attribute__((unused)) static int64_t
engine_count_wrong(fsdpc_unit *unit, int number, int version)
{
    int64_t wrong = 0;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        const char *full = (const char *)fsdpc_unit_full(unit) + seg->full_offset;
        char *decoded = engine_decoded(unit, number, s, version);
        for (int64_t i = 0; i < seg->piece_numel * unit->world; i++) {
            wrong +=
                item_get(full, seg->compute, i) != (decoded ? item_get(decoded, seg->compute, i)
                                                            : engine_value(number, s, i, version));
        }
        free(decoded);
    }
    return wrong;
}

__attribute__((unused)) static double
engine_grad(int rank, int unit, int param, int64_t i, int step, int round)
{
    int64_t mixed = i * 7919 + rank * 104729 + unit * 3101 + param * 1777 + step * 911 + round * 57;
    return (float)((double)(mixed % 10007) / 1000.0 - 5.0);
}

/* --- kinds of units -------------------------------------------------------------------------- */

enum { ENGINE_KINDS = 6, ENGINE_PARAMS = 4 };

#define ENGINE_SPEC(n, numel, storage, compute, reduce, trainable) \
    {n, numel, FSDPC_##storage, FSDPC_##compute, FSDPC_##reduce, trainable, 0, 0, 0, false}

/* The kinds of units, in order: float32 only; mixed precision with frozen parameters and bytes; low precision
 * with a double; large enough for several chunks; frozen; a single element. */
static fsdpc_param_spec engine_specs[ENGINE_KINDS][ENGINE_PARAMS] = {
    {ENGINE_SPEC("a", 1000, F32, F32, F32, true), ENGINE_SPEC("b", 37, F32, F32, F32, true)},
    {ENGINE_SPEC("a", 601, F32, BF16, F32, true), ENGINE_SPEC("frozen", 130, F32, BF16, F32, false),
     ENGINE_SPEC("bytes", 77, BYTES, BYTES, BYTES, false),
     ENGINE_SPEC("b", 3, F32, BF16, F32, true)},
    {ENGINE_SPEC("a", 515, BF16, BF16, BF16, true), ENGINE_SPEC("b", 41, F64, F64, F64, true),
     ENGINE_SPEC("c", 260, F16, F32, F32, true)},
    {ENGINE_SPEC("a", 700001, F32, F32, BF16, true), ENGINE_SPEC("b", 5, F32, F32, BF16, true)},
    {ENGINE_SPEC("a", 300, F32, F32, F32, false)},
    {ENGINE_SPEC("a", 0, F32, F32, F32, true), ENGINE_SPEC("b", 1, F32, F32, F32, true)},
};
static const int engine_spec_counts[ENGINE_KINDS] = {2, 4, 3, 2, 1, 2};

/* Sets the row length of every parameter of every kind of unit to at most 13 elements, so that hardly any
 * shard is a multiple of 16 bytes. Test programs whose names contain "_rows" call this. */
static void
engine_lay_by_rows(void)
{
    for (int kind = 0; kind < ENGINE_KINDS; kind++) {
        for (int i = 0; i < engine_spec_counts[kind]; i++) {
            int64_t row = 13;
            while (engine_specs[kind][i].numel % row != 0) {
                row--;
            }
            engine_specs[kind][i].row_numel = row;
        }
    }
}

__attribute__((unused)) static fsdpc_unit *
engine_unit(fsdpc_comm *comm, int kind, const char *name, bool reshard)
{
    fsdpc_unit *unit;
    fsdpc_unit_options options = {
        .name = name, .shard = comm, .divide = fsdpc_comm_world(comm), .reshard = reshard};
    REQUIRE_OK(fsdpc_unit_new(&options, engine_specs[kind], engine_spec_counts[kind], &unit));
    return unit;
}

/* --- gradients ------------------------------------------------------------------------------- */

static uint64_t
engine_mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

__attribute__((unused)) static uint64_t
engine_random(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return engine_mix(*state);
}

/* Returns true if a parameter gets a gradient in this round. About three parameters of four do. */
static bool
engine_present(int rank, int unit, int param, int step, int round)
{
    return engine_mix(
               (uint64_t)(rank * 1000003 + unit * 10007 + param * 1009 + step * 101 + round + 1)) %
               4 !=
           0;
}

typedef struct engine_grads {
    fsdpc_tensor tensors[ENGINE_PARAMS];
    int64_t shape[ENGINE_PARAMS];
    float *memory;
} engine_grads;

/* Makes this rank's gradients of one round in *out. */
__attribute__((unused)) static void
engine_make_grads(const fsdpc_unit *unit, int number, int step, int round, engine_grads *out)
{
    static const int64_t one = 1;
    const fsdpc_layout *layout = unit->layout;
    size_t total = 0;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < layout->param_count; i++) {
        total += (size_t)layout->params[i].numel;
    }
    float *next = out->memory = malloc(total * sizeof *next + 1);
    REQUIRE(next != NULL);
    for (int i = 0; i < layout->param_count; i++) {
        int64_t numel = layout->params[i].numel;
        out->shape[i] = numel;
        if (layout->params[i].trainable_index < 0 ||
            !engine_present(unit->rank, number, i, step, round)) {
            continue;
        }
        for (int64_t k = 0; k < numel; k++) {
            next[k] = (float)engine_grad(unit->rank, number, i, k, step, round);
        }
        out->tensors[i] = (fsdpc_tensor){next, FSDPC_F32, 1, &out->shape[i], &one, true};
        next += numel;
    }
}

/* Fills `grads` with a gradient of ones for every parameter. */
__attribute__((unused)) static void
engine_fill_grads(const fsdpc_unit *unit, engine_grads *grads)
{
    static const int64_t one = 1;
    float *next = grads->memory;
    for (int i = 0; i < unit->layout->param_count; i++) {
        int64_t numel = unit->layout->params[i].numel;
        if (unit->layout->params[i].trainable_index >= 0) {
            grads->tensors[i] = (fsdpc_tensor){next, FSDPC_F32, 1, &grads->shape[i], &one, true};
            for (int64_t k = 0; k < numel; k++) {
                next[k] = 1.0f;
            }
        }
        next += numel;
    }
}

/* Returns the value that a rank sends for an element: the gradient of the first round, or if `first` is
 * false, the sum of the gradients of all later rounds. */
static double
engine_sent(const fsdpc_segment *seg, bool travels, int rank, int rounds, int unit, int param,
            int64_t k, int step, bool first)
{
    double wide = 0;
    float narrow = 0;
    for (int round = first ? 0 : 1; round < (first && rounds > 1 ? 1 : rounds); round++) {
        if (engine_present(rank, unit, param, step, round)) {
            double value = engine_grad(rank, unit, param, k, step, round);
            wide += value;
            narrow += (float)value;
        }
    }
    double sum = seg->accumulate == FSDPC_F64 ? wide : narrow;
    return travels ? item_stored(seg->reduce, sum) : sum;
}

/* How ranks that send and receive are placed on hosts: each rank on a host of its own; even ranks on one host
 * and odd ranks on another; or two consecutive ranks on each host. */
enum { ENGINE_APART, ENGINE_BY_TURNS, ENGINE_IN_PAIRS };
__attribute__((unused)) static int engine_hosts;

static int
engine_host(int rank)
{
    return engine_hosts == ENGINE_BY_TURNS ? rank % 2 : engine_hosts ? rank / 2 : rank;
}

/* Replaces the values of the ranks by one value per host: the sum of the values of the host's ranks, rounded
 * once. Returns the number of hosts. */
static int
engine_sum_hosts(const fsdpc_segment *seg, int world, double *sent)
{
    int hosts = 0;
    double sums[RANKS_MAX] = {0};
    for (int r = 0; r < world; r++) {
        const int host = engine_host(r);
        sums[host] =
            seg->reduce == FSDPC_F64 ? sums[host] + sent[r] : (float)sums[host] + (float)sent[r];
        hosts = host >= hosts ? host + 1 : hosts;
    }
    for (int h = 0; h < hosts; h++) {
        sent[h] = item_stored(seg->reduce, sums[h]);
    }
    return hosts;
}

/* Returns the gradient after `step`, summed in rank order, if rank r took part in rounds[r] rounds. */
static double
engine_expected(const fsdpc_unit *unit, const int *rounds, int number, int param, int64_t k,
                int step, bool wire)
{
    const fsdpc_segment *seg = &unit->layout->segments[unit->layout->params[param].segment];
    double all = 0;
    for (int sending = 0; sending < 2; sending++) {
        double wide = 0;
        float narrow = 0;
        double sent[RANKS_MAX];
        int count = unit->world;
        for (int r = 0; r < unit->world; r++) {
            sent[r] = engine_sent(seg, unit->world > 1, r, rounds[r], number, param, k, step,
                                  sending == 0);
        }
        count = engine_hosts ? engine_sum_hosts(seg, count, sent) : count;
        for (int i = 0; i < count; i++) {
            wide += sent[i];
            narrow += (float)sent[i];
        }
        double sum = seg->accumulate == FSDPC_F64 ? wide : narrow;
        sum = wire ? item_stored(seg->reduce, sum) : sum;
        double scale = 1 / unit->divide;
        float scaled = (float)sum * (float)scale;
        all = seg->accumulate == FSDPC_F64 ? all + sum * scale : (float)all + scaled;
    }
    return all;
}

static bool
engine_used(const fsdpc_unit *unit, const int *rounds, int number, int param, int step)
{
    for (int r = 0; r < unit->world; r++) {
        for (int round = 0; round < rounds[r]; round++) {
            if (engine_present(r, number, param, step, round)) {
                return true;
            }
        }
    }
    return false;
}

/* Returns the number of elements and of `used` flags of this rank's gradient that are wrong. Padding must be
 * zero. */
__attribute__((unused)) static int64_t
engine_count_wrong_grads(const fsdpc_unit *unit, const int *rounds, int number, int step, bool wire)
{
    int64_t wrong = 0;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        const char *sums = (char *)unit->grad + seg->grad_offset;
        for (int64_t k = 0; seg->trainable && k < seg->piece_numel; k++) {
            int64_t at = seg->piece_numel * unit->rank + k;
            double expected = 0;
            for (int i = 0; i < unit->layout->param_count; i++) {
                const fsdpc_param_place *place = &unit->layout->params[i];
                if (place->segment == s && at >= place->offset &&
                    at < place->offset + place->numel) {
                    expected =
                        engine_expected(unit, rounds, number, i, at - place->offset, step, wire);
                }
            }
            wrong += item_get(sums, seg->accumulate, k) != expected;
        }
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        bool used = unit->layout->params[i].trainable_index >= 0 &&
                    engine_used(unit, rounds, number, i, step);
        wrong += unit->grads.used[i] != used;
    }
    return wrong;
}

/* --- communicators --------------------------------------------------------------------------- */

/* If true, a wire moves units by sends and receives, else by blocking collectives. */
__attribute__((unused)) static bool engine_flies;

/* Returns true if a run rounds a sum before it divides the sum: only blocking collectives over a wire do. */
__attribute__((unused)) static bool
engine_rounds(bool wire, int world)
{
    return wire && world > 1 && !engine_flies;
}

/* Joins the group of a run. The communicator uses shared memory. If `wire` is true, a communicator of
 * carrier.h wraps it, so that the engine sees no shared memory. */
__attribute__((unused)) static fsdpc_comm *
engine_join(int rank, ranks_run *run, bool wire)
{
    fsdpc_comm *comm;
    if (run->world == 1) {
        REQUIRE_OK(fsdpc_comm_self(engine_device, &comm));
        return comm;
    }
    REQUIRE_OK(fsdpc_comm_shm(engine_device, rank, run->world, run->name, run->timeout_s, &comm));
    const char *name = engine_flies ? run->name : NULL;
    comm = wire ? carrier_over(engine_device, rank, run->world, comm, name) : comm;
    if (wire && engine_hosts) {
        int hosts[RANKS_MAX];
        char host[96];
        for (int r = 0; r < run->world; r++) {
            hosts[r] = engine_host(r);
        }
        snprintf(host, sizeof host, "%s-%d", run->name, hosts[rank]);
        REQUIRE_OK(fsdpc_comm_set_hosts(comm, hosts, host, run->timeout_s));
    }
    return comm;
}

/* Returns a communicator whose collectives do nothing, because the other ranks do not exist. Tests use it to
 * look at what one rank does on its own. */
__attribute__((unused)) static fsdpc_comm *
engine_pretend(int rank, int world)
{
    return carrier_over(engine_device, rank, world, NULL, NULL);
}

#endif
