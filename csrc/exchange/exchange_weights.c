/* Finds out whether a rank's weights have changed since an earlier pass, and numbers a rank's weights.
 *
 * [Note: numbers of weights] A rank numbers the versions of its weights since all ranks met (in a backward,
 * a training forward, or full parameters). If a program puts old weights back, they get their old number.
 * Weights are told apart by samples, so the numbers of two ranks are comparable if each rank holds elements
 * of the parameters that the other rank samples. Number 0 (unknown): weights changed, but not in most units.
 */
#include <string.h>

#include "exchange/exchange_weights.h"

enum { EACH = 8, SAMPLES = 2 * EACH }; /* EACH samples of the first parameter, then of the last */

size_t
fsdpc_weights_bytes(const fsdpc_exchange *x)
{
    return sizeof(uint64_t) * SAMPLES * (size_t)x->unit_count;
}

/* Returns the first (step 1) or last (step -1) trainable parameter that has elements on the rank, or -1. */
static int
outermost(const fsdpc_layout *layout, int rank, int step)
{
    for (int i = step > 0 ? 0 : layout->param_count - 1; i >= 0 && i < layout->param_count;
         i += step) {
        const int param = layout->order[i];
        if (layout->params[param].trainable_index >= 0 &&
            fsdpc_layout_span(layout, param, rank).length > 0) {
            return param;
        }
    }
    return -1;
}

/* Reads EACH elements, evenly spread over the rank's elements of the parameter, as bytes into `out`. */
static void
read_samples(const fsdpc_unit *unit, const char *master, int rank, int param, uint64_t out[EACH])
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    const fsdpc_segment *seg = &layout->segments[layout->params[param].segment];
    const fsdpc_span span = fsdpc_layout_span(layout, param, rank);
    const size_t item = fsdpc_dtype_bytes(seg->storage);
    const char *first = master + seg->shard_offset;
    for (int k = 0; k < EACH; k++) {
        int64_t at = span.piece_begin + span.length * (2 * k + 1) / (2 * EACH);
        out[k] = 0;
        memcpy(&out[k], first + (size_t)at * item, item < sizeof *out ? item : sizeof *out);
    }
}

/* Counts the samples of the parameter that differ from its values. `keep`: the values become the samples. */
static int
compare_param(const fsdpc_unit *unit, const char *master, int rank, int param,
              _Atomic uint64_t *samples, bool keep)
{
    uint64_t now[EACH];
    int changed = 0;
    read_samples(unit, master, rank, param, now);
    for (int k = 0; k < EACH; k++) {
        changed += atomic_load_explicit(&samples[k], memory_order_relaxed) != now[k];
        if (keep) {
            atomic_store_explicit(&samples[k], now[k], memory_order_relaxed);
        }
    }
    return changed;
}

/* Returns the address of rank `rank`'s shard of a unit, or NULL if the shard has no trainable element. */
static const char *
master_of(const fsdpc_exchange *x, int unit, int rank)
{
    const fsdpc_unit *of = x->units[unit];
    const char *master = rank == x->rank ? fsdpc_unit_master(of) : fsdpc_unit_peer_master(of, rank);
    return outermost(fsdpc_unit_layout(of), rank, 1) < 0 ? NULL : master;
}

enum fsdpc_found
fsdpc_weights_compare(const fsdpc_exchange *x, int rank, _Atomic uint64_t *samples, bool keep)
{
    int units = 0, whole = 0, any = 0;
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_layout *layout = fsdpc_unit_layout(x->units[u]);
        const char *master = master_of(x, u, rank);
        units += layout->trainable_count > 0;
        if (!master) {
            continue;
        }
        _Atomic uint64_t *own = samples + (size_t)u * SAMPLES;
        int begin = compare_param(x->units[u], master, rank, outermost(layout, rank, 1), own, keep);
        int end =
            compare_param(x->units[u], master, rank, outermost(layout, rank, -1), own + EACH, keep);
        whole += begin > 0 && end > 0;
        any += begin + end;
    }
    return 2 * whole > units ? FSDPC_MOST : any > 0 ? FSDPC_SOME : FSDPC_SAME;
}

uint64_t
fsdpc_weights_hash(const fsdpc_exchange *x, int rank)
{
    uint64_t hash = 0, now[EACH];
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_layout *layout = fsdpc_unit_layout(x->units[u]);
        const char *master = master_of(x, u, rank);
        const int ends[] = {outermost(layout, rank, 1), outermost(layout, rank, -1)};
        for (int k = 0; master && k < SAMPLES; k++) {
            if (k % EACH == 0) {
                read_samples(x->units[u], master, rank, ends[k / EACH], now);
            }
            hash = (hash ^ now[k % EACH]) * UINT64_C(0x9e3779b97f4a7c15);
            hash ^= hash >> 29;
        }
    }
    return hash ? hash : 1;
}

/* True if, in most units, rank `other` holds elements of a parameter that rank `rank` takes samples of. */
bool
fsdpc_weights_share(const fsdpc_exchange *x, int rank, int other)
{
    int units = 0, shared = 0;
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_layout *layout = fsdpc_unit_layout(x->units[u]);
        const int first = outermost(layout, rank, 1), last = outermost(layout, rank, -1);
        units += layout->trainable_count > 0;
        shared += first >= 0 && (fsdpc_layout_span(layout, first, other).length > 0 ||
                                 fsdpc_layout_span(layout, last, other).length > 0);
    }
    return 2 * shared > units;
}

/* --- numbers --------------------------------------------------------------------------------- */

static uint64_t
number_of(uint64_t weights)
{
    return weights & (((uint64_t)1 << FSDPC_PASS_BITS) - 1);
}

static uint64_t
meeting_of(uint64_t tag)
{
    return tag >> FSDPC_PASS_BITS << FSDPC_PASS_BITS;
}

/* Returns the number of this rank's weights. Weights that have no number yet get a new one. */
static uint64_t
find_number(const fsdpc_exchange *x, fsdpc_numbers *own, _Atomic uint64_t *known)
{
    const uint64_t hash = fsdpc_weights_hash(x, x->rank);
    for (uint64_t n = own->newest; n > 0 && n + FSDPC_KNOWN_WEIGHTS > own->newest; n--) {
        if (atomic_load(&known[n % FSDPC_KNOWN_WEIGHTS]) == hash) {
            return n;
        }
    }
    own->newest++;
    atomic_store(&known[own->newest % FSDPC_KNOWN_WEIGHTS], hash);
    return own->newest;
}

static void
forget_numbers(fsdpc_numbers *own, _Atomic uint64_t *known)
{
    own->newest = 0;
    for (int n = 0; n < FSDPC_KNOWN_WEIGHTS; n++) {
        atomic_store(&known[n], 0);
    }
}

/* Keeps earlier numbers in a pass with gradients: ranks in other passes may still read this rank's values. */
void
fsdpc_weights_number(const fsdpc_exchange *x, fsdpc_numbers *own, _Atomic uint64_t *known,
                     const fsdpc_pass *pass, enum fsdpc_found found)
{
    const uint64_t met = meeting_of(pass->grad ? own->last : pass->tag);
    if (pass->grad && own->last >> FSDPC_TAG_BITS != pass->tag >> FSDPC_TAG_BITS) {
        own->last = meeting_of(pass->tag);
    } else if (!pass->grad && (meeting_of(own->last) != met || own->newest == 0)) {
        forget_numbers(own, known);
        own->last = met | find_number(x, own, known);
    } else if (number_of(own->last) > 0 && (found != FSDPC_SAME || pass->touched)) {
        own->last = found == FSDPC_MOST ? met | find_number(x, own, known) : met;
    }
}

bool
fsdpc_weights_alike(const fsdpc_exchange *x, int r, uint64_t own, uint64_t other)
{
    return meeting_of(own) == meeting_of(other) && number_of(own) > 0 && number_of(other) > 0 &&
           fsdpc_weights_share(x, x->rank, r) && fsdpc_weights_share(x, r, x->rank);
}
