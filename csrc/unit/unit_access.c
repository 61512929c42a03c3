/* What exchanges and the tree read and set of a unit. */
#include <string.h>

#include "unit/unit_impl.h"

struct fsdpc_unit_use *
fsdpc_unit_use(const fsdpc_unit *unit)
{
    return unit->use;
}

void
fsdpc_unit_set_use(fsdpc_unit *unit, struct fsdpc_unit_use *use)
{
    unit->use = use;
}

void
fsdpc_unit_count_gather(fsdpc_unit *unit)
{
    unit->gathers++;
}

uint64_t
fsdpc_unit_gathers(const fsdpc_unit *unit)
{
    return unit->gathers;
}

fsdpc_device *
fsdpc_unit_device(const fsdpc_unit *unit)
{
    return unit->device;
}

fsdpc_comm *
fsdpc_unit_replicate(const fsdpc_unit *unit)
{
    return unit->replicate;
}

bool
fsdpc_unit_reshards(const fsdpc_unit *unit)
{
    return unit->reshard;
}

void
fsdpc_unit_set_reshards(fsdpc_unit *unit, bool reshard)
{
    unit->reshard = reshard;
}

bool
fsdpc_unit_keeps(const fsdpc_unit *unit)
{
    return unit->keeps;
}

void
fsdpc_unit_set_keeps(fsdpc_unit *unit, bool keeps)
{
    unit->keeps = keeps;
}

double
fsdpc_unit_divide(const fsdpc_unit *unit)
{
    return unit->divide;
}

void
fsdpc_unit_set_divide(fsdpc_unit *unit, double divide)
{
    unit->divide = divide;
}

fsdpc_range *
fsdpc_unit_range(fsdpc_unit *unit)
{
    return &unit->range;
}

bool
fsdpc_unit_is_spare(const fsdpc_unit *unit)
{
    return unit->range.spare;
}

const char *
fsdpc_unit_peer_master(const fsdpc_unit *unit, int r)
{
    return unit->peers[r];
}

bool
fsdpc_unit_is_hooked(const fsdpc_unit *unit)
{
    return unit->grads.hooked;
}

void
fsdpc_unit_set_hooked(fsdpc_unit *unit, bool hooked)
{
    unit->grads.hooked = hooked;
}

bool
fsdpc_unit_withholds(const fsdpc_unit *unit)
{
    return unit->grads.withheld;
}

void
fsdpc_unit_set_withholds(fsdpc_unit *unit, bool withholds)
{
    unit->grads.withheld = withholds;
}

bool
fsdpc_unit_has_local(const fsdpc_unit *unit)
{
    return unit->grads.local_any;
}

bool
fsdpc_unit_sends_local(const fsdpc_unit *unit)
{
    return unit->grads.local_any && !unit->grads.hooked && !unit->grads.withheld;
}

const uint8_t *
fsdpc_unit_local_used(const fsdpc_unit *unit)
{
    return unit->grads.local_used;
}

void
fsdpc_unit_set_add(fsdpc_unit *unit, bool add)
{
    unit->grads.add = add;
}

uint8_t *
fsdpc_unit_used(const fsdpc_unit *unit)
{
    return unit->grads.used;
}

void
fsdpc_unit_add_used(fsdpc_unit *unit, const uint8_t *bits)
{
    for (int i = 0; i < unit->layout->param_count; i++) {
        unit->grads.used[i] |= bits[i];
    }
}

void
fsdpc_unit_clear_used(fsdpc_unit *unit)
{
    memset(unit->grads.used, 0, (size_t)unit->layout->param_count);
}

void *
fsdpc_unit_partial(const fsdpc_unit *unit)
{
    return unit->partial;
}

fsdpc_unit_memory
fsdpc_unit_get_memory(const fsdpc_unit *unit)
{
    const fsdpc_layout *layout = unit->layout;
    return (fsdpc_unit_memory){
        .master = layout->shard_bytes,
        .grad = (unit->slots ? 0 : unit->footprint.grad_bytes + unit->footprint.grad_out_bytes) +
                (unit->partial ? unit->footprint.partial_bytes : 0) + unit->retired_bytes,
        .local = unit->local ? unit->local_bytes : 0,
    };
}
