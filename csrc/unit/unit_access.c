/* Functions by which other files read and set the fields of a unit. */
#include <string.h>

#include "unit/unit_impl.h"

#define GET(TYPE, NAME, VALUE)        \
    TYPE NAME(const fsdpc_unit *unit) \
    {                                 \
        return VALUE;                 \
    }
#define SET(TYPE, NAME, PLACE)              \
    void NAME(fsdpc_unit *unit, TYPE value) \
    {                                       \
        unit->PLACE = value;                \
    }

/* clang-format off */
GET(int, fsdpc_unit_born, unit->born)
GET(const char *, fsdpc_unit_name, unit->name)
GET(const fsdpc_footprint *, fsdpc_unit_footprint, &unit->footprint)
GET(const fsdpc_layout *, fsdpc_unit_layout, unit->layout)
GET(fsdpc_comm *, fsdpc_unit_comm, unit->shard)
GET(int, fsdpc_unit_rank, unit->rank)
GET(void *, fsdpc_unit_master, unit->master)
GET(void *, fsdpc_unit_grad, unit->grad)
GET(void *, fsdpc_unit_full, unit->direct ? unit->master : unit->range.address)
GET(bool, fsdpc_unit_is_direct, unit->direct)
GET(struct fsdpc_unit_use *, fsdpc_unit_use, unit->use)
GET(uint64_t, fsdpc_unit_gathers, unit->gathers)
GET(fsdpc_device *, fsdpc_unit_device, unit->device)
GET(fsdpc_comm *, fsdpc_unit_replicate, unit->replicate)
GET(bool, fsdpc_unit_reshards, unit->reshard)
GET(bool, fsdpc_unit_keeps, unit->keeps)
GET(double, fsdpc_unit_divide, unit->divide)
GET(bool, fsdpc_unit_is_spare, unit->range.spare)
GET(bool, fsdpc_unit_is_hooked, unit->grads.hooked)
GET(bool, fsdpc_unit_withholds, unit->grads.withheld)
GET(bool, fsdpc_unit_has_local, unit->grads.local_any)
GET(bool, fsdpc_unit_sends_local, unit->grads.local_any && !unit->grads.hooked && !unit->grads.withheld)
GET(const uint8_t *, fsdpc_unit_local_used, unit->grads.local_used)
GET(uint8_t *, fsdpc_unit_used, unit->grads.used)
GET(void *, fsdpc_unit_partial, unit->partial)
SET(struct fsdpc_unit_use *, fsdpc_unit_set_use, use)
SET(bool, fsdpc_unit_set_reshards, reshard)
SET(bool, fsdpc_unit_set_keeps, keeps)
SET(double, fsdpc_unit_set_divide, divide)
SET(bool, fsdpc_unit_set_hooked, grads.hooked)
SET(bool, fsdpc_unit_set_withholds, grads.withheld)
SET(bool, fsdpc_unit_set_add, grads.add)
/* clang-format on */

fsdpc_range *
fsdpc_unit_range(fsdpc_unit *unit)
{
    return &unit->range;
}

void
fsdpc_unit_count_gather(fsdpc_unit *unit)
{
    unit->gathers++;
}

const char *
fsdpc_unit_peer_master(const fsdpc_unit *unit, int r)
{
    return unit->peers[r];
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
