/* Functions that all three kinds of exchange have in common: set-up, references, counts. See exchange.h. */
#include "exchange/exchange.h"

#include <string.h>

#include "comm/hosts.h"
#include "exchange/exchange_impl.h"
#include "base/forks.h"
#include "base/mem.h"
#include "base/status.h"

static int
take_unit(fsdpc_exchange *x, int id)
{
    fsdpc_unit *unit = x->units[id];
    if (fsdpc_unit_use(unit)) {
        return fsdpc_error(FSDPC_E_STATE, "unit %s belongs to another tree", fsdpc_unit_name(unit));
    }
    x->uses[id] = (struct fsdpc_unit_use){.id = id, .slot = -1};
    fsdpc_unit_set_use(unit, &x->uses[id]);
    x->unit_count = id + 1;
    return FSDPC_OK;
}

static int
copy_units(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
    size_t count = (size_t)plan->unit_count;
    x->units = fsdpc_mem_calloc(count, sizeof *x->units);
    x->uses = fsdpc_mem_calloc(count, sizeof *x->uses);
    x->trace_ids = fsdpc_mem_calloc(count, sizeof *x->trace_ids);
    x->slot_unit = fsdpc_mem_calloc((size_t)plan->slot_count, sizeof *x->slot_unit);
    x->slot_tag = fsdpc_mem_calloc((size_t)plan->slot_count, sizeof *x->slot_tag);
    if (!x->units || !x->uses || !x->trace_ids || !x->slot_unit || !x->slot_tag) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange of %d units",
                           plan->unit_count);
    }
    for (int s = 0; s < plan->slot_count; s++) {
        x->slot_unit[s] = -1;
    }
    for (int i = 0; i < plan->unit_count; i++) {
        fsdpc_unit *unit = x->units[i] = plan->units[i];
        FSDPC_TRY(take_unit(x, i));
        x->trace_ids[i] = plan->unit_ids[i];
        size_t bytes = fsdpc_unit_footprint(unit)->reduce_bytes;
        x->sum_reduce_bytes += bytes;
        x->max_reduce_bytes = bytes > x->max_reduce_bytes ? bytes : x->max_reduce_bytes;
    }
    return FSDPC_OK;
}

static int
make_slots(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
    const fsdpc_hosts *hosts = fsdpc_comm_hosts(x->comm);
    fsdpc_shm *shm = hosts ? hosts->shm : x->shm;
    FSDPC_TRY(shm ? fsdpc_arena_new(shm, &x->arena)
                  : fsdpc_arena_new_on(fsdpc_comm_device(x->comm), &x->arena));
    for (int s = 0; s < plan->slot_count; s++) {
        int slot;
        FSDPC_TRY(fsdpc_arena_add_slot(x->arena, plan->slot_bytes[s], &slot));
    }
    for (int i = 0; i < x->unit_count; i++) {
        fsdpc_unit *unit = x->units[i];
        if (!fsdpc_unit_is_direct(unit)) {
            x->uses[i].slot = plan->slot_of[i];
            FSDPC_TRY(fsdpc_arena_bind(x->arena, fsdpc_unit_range(unit), x->uses[i].slot));
        }
    }
    return FSDPC_OK;
}

/* Set-up needs host syncs, which would fail inside the driver during a capture. */
static int
check_capture(const fsdpc_exchange_plan *plan)
{
    uint64_t capture;
    FSDPC_TRY(fsdpc_device_capture(fsdpc_comm_device(plan->comm), &capture));
    return capture == 0 ? FSDPC_OK
                        : fsdpc_error(FSDPC_E_STATE,
                                      "the first forward sets the model up and cannot be captured "
                                      "into a CUDA graph: run a few ordinary steps before");
}

int
fsdpc_exchange_new(const fsdpc_exchange_plan *plan, fsdpc_exchange **out)
{
    int status = FSDPC_OK;
    *out = NULL;
    FSDPC_TRY(check_capture(plan));
    fsdpc_exchange *x = fsdpc_mem_calloc(1, sizeof *x);
    if (!x) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    x->comm = plan->comm;
    x->forks = fsdpc_forks();
    x->rank = fsdpc_comm_rank(plan->comm);
    x->world = fsdpc_comm_world(plan->comm);
    x->shm = x->world > 1 ? fsdpc_comm_segment(plan->comm) : NULL;
    x->poison = plan->poison;
    x->trust_order = plan->trust_order;
    x->trace = plan->trace;
    x->reduce_slots = plan->reduce_slots;
    FSDPC_GOTO(copy_units(x, plan), fail);
    FSDPC_GOTO(make_slots(x, plan), fail);
    if (fsdpc_device_get_caps(fsdpc_comm_device(x->comm))->asynchronous) {
        x->ops = &fsdpc_exchange_stream;
    } else {
        x->ops = x->shm ? &fsdpc_exchange_shared : &fsdpc_exchange_wire;
    }
    FSDPC_GOTO(x->ops->open(x, plan), fail);
    *out = x;
    return FSDPC_OK;
fail:
    fsdpc_exchange_free(x);
    return status;
}

static void
let_units_go(fsdpc_exchange *x)
{
    for (int i = 0; i < x->unit_count && !x->detached; i++) {
        fsdpc_unit_set_use(x->units[i], NULL);
    }
    x->detached = true;
}

void
fsdpc_exchange_free(fsdpc_exchange *x)
{
    if (!x) {
        return;
    }
    if (x->ops) {
        x->ops->close(x);
    }
    fsdpc_arena_free(x->arena);
    let_units_go(x);
    fsdpc_mem_free(x->units);
    fsdpc_mem_free(x->uses);
    fsdpc_mem_free(x->trace_ids);
    fsdpc_mem_free(x->slot_unit);
    fsdpc_mem_free(x->slot_tag);
    fsdpc_mem_free(x);
}

void
fsdpc_exchange_set_clock(fsdpc_exchange *x, enum fsdpc_phase phase, uint32_t step)
{
    x->phase = phase;
    x->step = step;
}

/* In a forked child of a group of one rank: keeps slots with live values, and marks all others as empty. */
static int
enter_child(fsdpc_exchange *x)
{
    FSDPC_TRY(fsdpc_comm_check(x->comm));
    x->forks = fsdpc_forks();
    for (int i = 0; i < x->unit_count; i++) {
        int slot = x->uses[i].slot;
        if (slot >= 0 && x->slot_unit[slot] == i && !fsdpc_unit_range(x->units[i])->live) {
            x->slot_unit[slot] = -1;
        }
    }
    return FSDPC_OK;
}

static int
check_attached(fsdpc_exchange *x)
{
    if (x->detached) {
        return fsdpc_error(FSDPC_E_STATE, "the tree is detached from its units");
    }
    return x->forks == fsdpc_forks() ? FSDPC_OK : enter_child(x);
}

void
fsdpc_exchange_compare(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched)
{
    if (x->ops->compare && !x->detached) {
        x->ops->compare(x, tag, grad, touched);
    }
}

int
fsdpc_exchange_begin(fsdpc_exchange *x, uint64_t tag)
{
    FSDPC_TRY(check_attached(x));
    fsdpc_forks_forget();
    fsdpc_arena_watch_writes();
    x->tag = tag;
    return fsdpc_comm_say_numbers(x->comm, x->ops->begin(x, tag));
}

int
fsdpc_exchange_rest(fsdpc_exchange *x)
{
    return x->ops->rest ? fsdpc_comm_say_numbers(x->comm, x->ops->rest(x)) : FSDPC_OK;
}

int
fsdpc_exchange_leave(fsdpc_exchange *x)
{
    if (!x->ops->leave) {
        return FSDPC_OK;
    }
    return fsdpc_comm_say_numbers(x->comm, x->ops->leave(x));
}

/* Prepends operation and unit, unless the error names the unit already, and then fsdpc_comm_numbers. */
static int
explain(const fsdpc_exchange *x, int status, const char *op, const fsdpc_unit *unit)
{
    if (status != FSDPC_OK && !strstr(fsdpc_error_text(), fsdpc_unit_name(unit))) {
        (void)fsdpc_error_prepend(status, "%s of unit %s", op, fsdpc_unit_name(unit));
    }
    return fsdpc_comm_say_numbers(x->comm, status);
}

/* Ends the program's writes into gathered values. Fails unless the program has restored the old values. */
static int
end_writes(fsdpc_exchange *x, fsdpc_unit *unit)
{
    bool changed;
    FSDPC_TRY(fsdpc_arena_take_back(x->arena, fsdpc_unit_range(unit), &changed));
    if (!changed) {
        return FSDPC_OK;
    }
    const int status = fsdpc_error(
        FSDPC_E_STATE,
        "parameters of unit %s were changed in place during forward or backward on rank %d, where "
        "they are copies for reading: change them between steps or inside summon_full_params, or "
        "compute with a tensor of your own (weight = self.weight * 0.5)",
        fsdpc_unit_name(unit), x->rank);
    return fsdpc_comm_say_numbers(x->comm, status);
}

int
fsdpc_exchange_gather(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(check_attached(x));
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (use->refs > 0) {
        use->refs++;
        fsdpc_exchange_note(x, FSDPC_TRACE_JOIN, unit, 0);
        return FSDPC_OK;
    }
    x->copied_bytes = 0;
    if (!fsdpc_unit_is_direct(unit)) {
        FSDPC_TRY(use->begun ? FSDPC_OK : end_writes(x, unit));
        fsdpc_unit_range(unit)->live = true;
        int status = x->ops->gather(x, unit, true);
        if (status != FSDPC_OK) {
            return explain(x, status, "gather", unit);
        }
    } else {
        fsdpc_unit_count_gather(unit);
    }
    use->refs = 1;
    fsdpc_exchange_note(x, FSDPC_TRACE_GATHER, unit, x->copied_bytes);
    return FSDPC_OK;
}

int
fsdpc_exchange_prefetch(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(check_attached(x));
    const struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (use->refs > 0 || use->begun || fsdpc_unit_is_direct(unit)) {
        return FSDPC_OK;
    }
    x->copied_bytes = 0;
    fsdpc_unit_range(unit)->live = true;
    int status = x->ops->gather(x, unit, false);
    if (status != FSDPC_OK) {
        return explain(x, status, "prefetch", unit);
    }
    if (use->begun) {
        fsdpc_exchange_note(x, FSDPC_TRACE_PREFETCH, unit, x->copied_bytes);
    }
    return FSDPC_OK;
}

static int
let_go(fsdpc_exchange *x, fsdpc_unit *unit)
{
    int status = FSDPC_OK;
    fsdpc_unit_use(unit)->refs = 0;
    fsdpc_exchange_note(x, FSDPC_TRACE_RELEASE, unit, 0);
    if (!fsdpc_unit_is_direct(unit)) {
        status = end_writes(x, unit);
        fsdpc_unit_range(unit)->live = false;
        FSDPC_KEEP(x->ops->release(x, unit));
    }
    return status;
}

int
fsdpc_exchange_release(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(check_attached(x));
    if (fsdpc_unit_use(unit)->refs <= 0) {
        return fsdpc_error(FSDPC_E_STATE, "unit %s is released but was not gathered",
                           fsdpc_unit_name(unit));
    }
    if (--fsdpc_unit_use(unit)->refs > 0) {
        return FSDPC_OK;
    }
    return let_go(x, unit);
}

int
fsdpc_unit_refs(const fsdpc_unit *unit)
{
    const struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    return use ? use->refs : 0;
}

void
fsdpc_unit_set_floor(fsdpc_unit *unit, int refs)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (use) {
        use->floor = refs;
    }
}

int
fsdpc_exchange_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    FSDPC_TRY(check_attached(x));
    if (fsdpc_unit_layout(unit)->trainable_count == 0) {
        return FSDPC_OK;
    }
    return explain(x, x->ops->reduce(x, unit, grads), "reduce", unit);
}

bool
fsdpc_exchange_any_order(const fsdpc_exchange *x)
{
    return x->ops->any_order || (x->world == 1 && !x->in_turn);
}

bool
fsdpc_exchange_is_summed(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    return x->ops->summed && !fsdpc_unit_has_local(unit) && x->ops->summed(x, unit);
}

int
fsdpc_exchange_make_room(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    FSDPC_TRY(check_attached(x));
    return x->ops->make_room ? fsdpc_comm_say_numbers(x->comm, x->ops->make_room(x, unit))
                             : FSDPC_OK;
}

void
fsdpc_exchange_settle_apart(fsdpc_exchange *x, bool apart)
{
    x->settles_apart = apart;
}

int
fsdpc_exchange_settle(fsdpc_exchange *x, fsdpc_unit *unit)
{
    return x->ops->settle ? fsdpc_comm_say_numbers(x->comm, x->ops->settle(x, unit)) : FSDPC_OK;
}

int
fsdpc_exchange_end(fsdpc_exchange *x)
{
    FSDPC_TRY(check_attached(x));
    FSDPC_TRY(fsdpc_comm_say_numbers(x->comm, x->ops->end(x)));
    fsdpc_exchange_note(x, FSDPC_TRACE_BACKWARD_END, NULL, 0);
    x->backwards++;
    return FSDPC_OK;
}

int
fsdpc_exchange_drop(fsdpc_exchange *x)
{
    int status = FSDPC_OK;
    for (int i = 0; i < x->unit_count && !x->detached; i++) {
        struct fsdpc_unit_use *use = &x->uses[i];
        if (use->floor > 0 && use->refs >= use->floor) {
            use->refs = use->floor;
        } else if (use->refs > 0 || use->begun) {
            FSDPC_KEEP(let_go(x, x->units[i]));
        }
    }
    return status;
}

int
fsdpc_exchange_detach(fsdpc_exchange *x)
{
    int status = FSDPC_OK;
    for (int i = 0; i < x->unit_count; i++) {
        x->uses[i].floor = 0;
    }
    FSDPC_KEEP(fsdpc_exchange_drop(x));
    let_units_go(x);
    return status;
}

int
fsdpc_exchange_share(fsdpc_exchange *x, void *buffer, size_t piece_bytes, const char *what)
{
    if (!x->ops->share) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "%s: exchange %s works in host memory", what,
                           x->ops->kind);
    }
    return x->world > 1 ? x->ops->share(x, buffer, piece_bytes, what) : FSDPC_OK;
}

int
fsdpc_exchange_slot_count(const fsdpc_exchange *x)
{
    return fsdpc_arena_slot_count(x->arena);
}

size_t
fsdpc_exchange_largest_slot(const fsdpc_exchange *x)
{
    size_t largest = 0;
    for (int i = 0; i < x->unit_count; i++) {
        size_t bytes = fsdpc_unit_is_direct(x->units[i]) ? 0 : fsdpc_unit_range(x->units[i])->bytes;
        largest = bytes > largest ? bytes : largest;
    }
    return largest;
}

int
fsdpc_exchange_reduce_slots(const fsdpc_exchange *x)
{
    bool any_offload = false;
    for (int i = 0; i < x->unit_count; i++) {
        any_offload = any_offload || fsdpc_unit_is_offloaded(x->units[i]);
    }
    return fsdpc_footprint_reduce_slots(x->world, any_offload, x->max_reduce_bytes,
                                        x->reduce_slots);
}

size_t
fsdpc_exchange_gather_bytes(const fsdpc_exchange *x)
{
    return fsdpc_arena_bytes(x->arena) + x->coded_bytes;
}

size_t
fsdpc_exchange_reduce_bytes(const fsdpc_exchange *x)
{
    return (size_t)fsdpc_exchange_reduce_slots(x) * x->max_reduce_bytes + x->lost_bytes;
}

size_t
fsdpc_exchange_coded_bytes(const fsdpc_exchange *x)
{
    return x->coded_bytes + x->lost_bytes;
}

size_t
fsdpc_exchange_spare_bytes(const fsdpc_exchange *x)
{
    return fsdpc_arena_spare_bytes(x->arena);
}

uint64_t
fsdpc_exchange_spare_count(const fsdpc_exchange *x)
{
    return fsdpc_arena_spare_count(x->arena);
}

uint64_t
fsdpc_exchange_sent_bytes(const fsdpc_exchange *x)
{
    return x->sent_bytes;
}

fsdpc_comm *
fsdpc_exchange_comm(const fsdpc_exchange *x)
{
    return x->comm;
}

int
fsdpc_exchange_unit_count(const fsdpc_exchange *x)
{
    return x->unit_count;
}

fsdpc_unit *
fsdpc_exchange_unit(const fsdpc_exchange *x, int id)
{
    return x->units[id];
}

const char *
fsdpc_exchange_kind(const fsdpc_exchange *x)
{
    return x->ops->kind;
}

int
fsdpc_exchange_announce(fsdpc_exchange *x, uint64_t tag, const fsdpc_unit *unit, int param)
{
    FSDPC_TRY(check_attached(x));
    if (!x->ops->announce || x->world == 1) {
        return FSDPC_OK;
    }
    const int id = unit ? fsdpc_unit_use(unit)->id : -1;
    return fsdpc_comm_say_numbers(x->comm, x->ops->announce(x, tag, id, param));
}

int
fsdpc_exchange_forget(fsdpc_exchange *x)
{
    return x->ops->forget ? fsdpc_comm_say_numbers(x->comm, x->ops->forget(x)) : FSDPC_OK;
}

int
fsdpc_exchange_before_hook(fsdpc_exchange *x, const char *what)
{
    return x->ops->before_hook && x->world > 1
               ? fsdpc_comm_say_numbers(x->comm, x->ops->before_hook(x, what))
               : FSDPC_OK;
}
