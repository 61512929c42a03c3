/* Detects mixed values when ranks run different numbers of forwards without gradients and change weights.
 *
 * [Note: changed weights] A rank that has run all its batches may change its weights (swap averages out, step
 * an optimizer) while another rank, with more batches, still gathers them. A program makes the same change on
 * every rank. A forward must not mix values from before the change with values from after the change.
 *
 * Nothing counts the changes of a program: changes are plain operations on tensors, autograd does not see all
 * of them, and a rank may hold no element of the parameters that change. So each rank compares samples of its
 * own values when a pass begins, and publishes two tags of passes:
 *   changed  the last pass at whose start most units on this rank differed from the pass `before`. A unit
 *            differs if samples of both its first and its last trainable parameter on this rank differ. A
 *            change by a backward of all ranks does not count;
 *   touched  the last pass before which anything may have changed: the samples, the memory, or (by autograd's
 *            count of writes) a parameter, even one without elements on this rank. A backward is a change.
 * It also publishes `weights`, its weights' number: see [Note: numbers of weights] in exchange_weights.c.
 * If one rank changes its weights once between two passes and another rank changes them twice, both ranks
 * have the same tags but different numbers. A rank that has begun a later pass without gradients, or waits
 * elsewhere, has run fewer batches. If such a rank has changed its weights and this rank has not touched its
 * own, reading that rank's values is a mismatch. For two ranks in passes of one tag it is unknown which has
 * run more batches, and a program may write parameters of which one rank holds no elements. There a change is
 * a mismatch only if both ranks hold elements of what has changed. A program in which all ranks run every
 * pass gets an error only if it writes elements in a way that autograd does not count.
 *
 * A rank that waits elsewhere (for a state dict) has not published its changes. So this rank compares the
 * waiting rank's values with the values that this rank read after the waiting rank's last pass, or else with
 * the waiting rank's samples. If a rank ended this forward, or a later one, while this rank waited elsewhere,
 * its values are compared with its samples. A rank that has left changes nothing any more: passes with and
 * without gradients read its values as long as no other rank has touched its own weights since.
 *
 * A pass with gradients is compared only with ranks that wait elsewhere or have left: its tag (next_pass in
 * tree.c) differs from all tags without gradients. Ranks publish in it if the pass before had no gradients.
 */
#include "exchange/exchange_shared_impl.h"
#include "base/status.h"

size_t
fsdpc_shared_samples_bytes(const fsdpc_exchange *x)
{
    return fsdpc_weights_bytes(x) * (size_t)x->world;
}

/* Compares a rank's present values with that rank's samples in `all`, which is `samples` or `seen`. */
static enum fsdpc_found
compare_rank(const fsdpc_exchange *x, _Atomic uint64_t *all, int rank, bool keep)
{
    const size_t each = fsdpc_weights_bytes(x) / sizeof *all;
    return fsdpc_weights_compare(x, rank, all + each * (size_t)rank, keep);
}

/* --- publishing ------------------------------------------------------------------------------ */

void
fsdpc_shared_compare(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched)
{
    struct fsdpc_rank_ctl *own = &x->shared->ranks[x->rank];
    const uint64_t before = x->tag;
    const bool samples = !grad || x->shared->checks;
    x->shared->checks = !grad;
    x->shared->compared = samples;
    if (!samples) {
        atomic_store(&own->touched, tag);
        return;
    }
    enum fsdpc_found found = compare_rank(x, x->shared->samples, x->rank, false);
    bool follows = before != 0 && atomic_load(&own->sampled) == before &&
                   before >> FSDPC_TAG_BITS == tag >> FSDPC_TAG_BITS;
    if (!follows || touched || found != FSDPC_SAME) {
        atomic_store(&own->touched, tag);
    }
    if (follows && found == FSDPC_MOST) {
        x->shared->earlier = atomic_load(&own->changed);
        atomic_store(&own->before, before);
        atomic_store(&own->changed, tag);
    }
    /* Samples are stored after these tags, so that a rank that finds new samples also finds the new tags. */
    (void)(found != FSDPC_SAME && compare_rank(x, x->shared->samples, x->rank, true));
    const fsdpc_pass pass = {tag, grad, touched};
    fsdpc_weights_number(x, &x->shared->numbers, own->known, &pass, found);
    atomic_store(&own->weights, x->shared->numbers.last);
    atomic_store(&own->sampled, tag);
}

/* --- checking -------------------------------------------------------------------------------- */

/* Returns FSDPC_E_MISMATCH and ends the group. `unit` is NULL at the end of a forward. */
static int
refuse(fsdpc_exchange *x, const fsdpc_unit *unit, int changed, int unchanged)
{
    int status = fsdpc_error(
        FSDPC_E_MISMATCH,
        "%s%s: rank %d has changed its parameters, and rank %d, in a forward or a "
        "wait elsewhere, has not: rank %d would read values from before and from after the change. "
        "Run as many batches on every rank before parameters change (averages swapped in or out, "
        "an optimizer step), or call fsdpc.barrier(model) on all ranks before the change",
        unit ? "gather of unit " : "end of forward", unit ? fsdpc_unit_name(unit) : "", changed,
        unchanged, x->rank);
    fsdpc_shm_abort(x->shm, fsdpc_error_text());
    return status;
}

/* True if this rank's weights changed after pass `since` of this step. *before is the pass before the change.
 * The change may be older than this pass, because a rank checks nothing in a pass without gathers. */
static bool
changed_here(const fsdpc_exchange *x, uint64_t since, uint64_t *before)
{
    struct fsdpc_rank_ctl *own = &x->shared->ranks[x->rank];
    const uint64_t changed = atomic_load(&own->changed);
    *before = atomic_load(&own->before);
    return changed > since && changed >> FSDPC_TAG_BITS == x->tag >> FSDPC_TAG_BITS;
}

/* True if rank r lacks this rank's last change, or if nobody can tell. Rank r's last pass is `ready`. The
 * values of r are compared with what this rank has read since that pass, or else with r's samples. Samples
 * tell nothing if r has begun no pass, or if this rank's change before the last one came after `ready`. */
static bool
lacks_change(const fsdpc_exchange *x, int r, uint64_t ready)
{
    const struct fsdpc_shared *s = x->shared;
    const bool seen = s->seen_at[r] > ready && s->seen_at[r] >= s->earlier;
    if (!seen && (ready == 0 || s->earlier > ready)) {
        return true;
    }
    return compare_rank(x, seen ? s->seen : s->samples, r, false) == FSDPC_SAME;
}

/* True if this rank and rank r have both begun this pass and their weights have different numbers. *who is
 * set to the rank whose change is the later one. */
static bool
other_number(const fsdpc_exchange *x, int r, int *who)
{
    const uint64_t own = atomic_load(&x->shared->ranks[x->rank].weights);
    const uint64_t other = atomic_load(&x->shared->ranks[r].weights);
    const uint64_t changed = atomic_load(&x->shared->ranks[x->rank].changed);
    const uint64_t theirs = atomic_load(&x->shared->ranks[r].changed);
    *who = changed > theirs || (changed == theirs && own > other) ? x->rank : r;
    return own != other && fsdpc_weights_alike(x, r, own, other);
}

/* True if rank r, which waits elsewhere, has put back earlier weights, and this rank has other weights. */
static bool
older_number(const fsdpc_exchange *x, int r)
{
    const struct fsdpc_rank_ctl *other = &x->shared->ranks[r];
    const uint64_t own = atomic_load(&x->shared->ranks[x->rank].weights);
    if (!x->shared->compared || !fsdpc_weights_alike(x, r, own, atomic_load(&other->weights))) {
        return false;
    }
    const uint64_t hash = fsdpc_weights_hash(x, r);
    bool found = false;
    for (int n = 0; n < FSDPC_KNOWN_WEIGHTS; n++) {
        found = found || atomic_load(&other->known[n]) == hash;
    }
    return found && atomic_load(&other->known[own % FSDPC_KNOWN_WEIGHTS]) != hash;
}

/* Rank r waits elsewhere. True if only one of rank r and this rank changed weights. Keeps samples of r. */
static bool
waits_elsewhere(fsdpc_exchange *x, int r, uint64_t touched, int *who)
{
    struct fsdpc_shared *s = x->shared;
    const struct fsdpc_rank_ctl *other = &s->ranks[r];
    const uint64_t ready = atomic_load(&other->ready);
    uint64_t before;
    if (touched <= ready) {
        return compare_rank(x, s->samples, r, false) == FSDPC_MOST;
    }
    *who = x->rank;
    const bool differs = changed_here(x, ready, &before) &&
                         atomic_load(&s->ranks[x->rank].changed) > s->seen_at[r] &&
                         atomic_load(&other->touched) <= before &&
                         fsdpc_weights_share(x, x->rank, r) && lacks_change(x, r, ready);
    if (s->compared && s->seen_at[r] != x->tag) {
        compare_rank(x, s->seen, r, true);
        s->seen_at[r] = x->tag;
    }
    return differs;
}

/* True if rank r has ended this forward, or a later one, without waiting for this rank, and changed weights
 * that this rank may still read. One sample that differs is enough: the change may have just begun. */
static bool
is_changed_behind(const fsdpc_exchange *x, int r)
{
    return atomic_load(&x->shared->ranks[r].early) >= x->tag &&
           compare_rank(x, x->shared->samples, r, false) != FSDPC_SAME;
}

/* True if rank r's values belong to other weights than those of this rank in this pass. *who is set to the
 * rank that has changed its weights. */
static bool
differs(fsdpc_exchange *x, int r, int *who)
{
    struct fsdpc_rank_ctl *own = &x->shared->ranks[x->rank], *other = &x->shared->ranks[r];
    const uint64_t ready = atomic_load(&other->ready), touched = atomic_load(&own->touched);
    uint64_t before;
    *who = r;
    if (ready < x->tag) {
        return atomic_load(&other->sampled) == ready &&
               (waits_elsewhere(x, r, touched, who) || older_number(x, r));
    }
    if (!x->shared->checks) {
        return false;
    }
    if (is_changed_behind(x, r)) {
        return true;
    }
    if (atomic_load(&other->changed) >> FSDPC_TAG_BITS >= x->tag >> FSDPC_TAG_BITS &&
        touched <= atomic_load(&other->before)) {
        return ready > x->tag || fsdpc_weights_share(x, r, x->rank);
    }
    if (other_number(x, r, who)) {
        return true;
    }
    *who = x->rank;
    return changed_here(x, 0, &before) && atomic_load(&other->touched) <= before &&
           (ready > x->tag || fsdpc_weights_share(x, x->rank, r));
}

/* Rank `left` has left. Fails if a rank has touched its weights since: `left` cannot have changed its own. */
static int
check_left(fsdpc_exchange *x, const fsdpc_unit *unit, int left)
{
    const fsdpc_wait what = {.op = "gather", .unit = fsdpc_unit_name(unit)};
    const uint64_t ready = atomic_load(&x->shared->ranks[left].ready);
    for (int r = 0; ready < x->tag && r < x->world; r++) {
        if (atomic_load(&x->shared->ranks[r].touched) > ready) {
            return fsdpc_shm_left_error(x->shm, left, &what);
        }
    }
    return FSDPC_OK;
}

int
fsdpc_shared_check_end(fsdpc_exchange *x)
{
    const bool reads = x->shared->checks && x->shared->read_at == x->tag;
    for (int r = 0; reads && r < x->world; r++) {
        if (r != x->rank && is_changed_behind(x, r)) {
            return refuse(x, NULL, r, x->rank);
        }
    }
    return FSDPC_OK;
}

int
fsdpc_shared_check_changes(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    int who;
    x->shared->read_at = x->tag;
    for (int r = 0; r < x->world; r++) {
        const bool behind = atomic_load(&x->shared->ranks[r].ready) < x->tag;
        if (behind && fsdpc_shm_left(x->shm, r)) {
            FSDPC_TRY(check_left(x, unit, r));
        } else if (r != x->rank && (behind || x->shared->checks) && differs(x, r, &who)) {
            return refuse(x, unit, who, who == r ? x->rank : r);
        }
    }
    return FSDPC_OK;
}

int
fsdpc_shared_check_join(fsdpc_exchange *x, const fsdpc_unit *unit, int claimer, uint64_t touched)
{
    uint64_t before;
    return x->shared->checks && changed_here(x, 0, &before) && touched <= before &&
                   fsdpc_weights_share(x, x->rank, claimer)
               ? refuse(x, unit, x->rank, claimer)
               : FSDPC_OK;
}
