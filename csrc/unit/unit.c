/* A unit's memory: master shard, shard gradient, address range. See unit.h. */
#include "unit/unit.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/forks.h"
#include "base/mem.h"
#include "base/status.h"
#include "unit/grad_slots.h"
#include "unit/unit_impl.h"

/* Maps the master shards of all ranks, side by side in the segment. So a peer can cast the piece of a late
 * rank, and a gather waits for no other rank (see exchange_shared_gather.c). */
static int
map_shared_masters(fsdpc_unit *unit, fsdpc_shm *shm)
{
    size_t page = fsdpc_shm_page_bytes();
    unit->master_stride = fsdpc_round_up(unit->layout->shard_bytes, page);
    /* One more page holds the count of ranks that have freed the unit. */
    unit->master_map_bytes = unit->master_stride * (size_t)unit->world + page;
    FSDPC_TRY(fsdpc_shm_alloc(shm, unit->master_map_bytes, true, &unit->master_offset));
    FSDPC_TRY(
        fsdpc_shm_map(shm, unit->master_offset, unit->master_map_bytes, NULL, &unit->master_map));
    for (int r = 0; r < unit->world; r++) {
        unit->peers[r] = (char *)unit->master_map + unit->master_stride * (size_t)r;
    }
    unit->master = unit->peers[unit->rank];
    return fsdpc_forks_add(unit->master, unit->master_stride, fsdpc_forks_values, NULL);
}

static int
make_masters(fsdpc_unit *unit)
{
    unit->peers = fsdpc_mem_calloc((size_t)unit->world, sizeof *unit->peers);
    if (!unit->peers) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a unit");
    }
    fsdpc_shm *shm = fsdpc_comm_segment(unit->shard);
    if (unit->layout->shard_bytes == 0) {
        return FSDPC_OK;
    }
    if (shm && unit->world > 1) {
        return map_shared_masters(unit, shm);
    }
    FSDPC_TRY(fsdpc_unit_shard_alloc(unit, unit->layout->shard_bytes, &unit->master));
    unit->peers[unit->rank] = unit->master;
    return FSDPC_OK;
}

static int
check_codecs(const fsdpc_unit *unit)
{
    bool coded = false;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        coded = coded || unit->layout->segments[s].reduce_coded_bytes > 0;
    }
    return coded && unit->world > 1 && fsdpc_device_get_caps(unit->device)->asynchronous &&
                   !fsdpc_comm_has_all_to_all(fsdpc_comm_for_reductions(unit->shard))
               ? fsdpc_error(FSDPC_E_UNAVAILABLE,
                             "a GPU's gradients travel coded over NCCL only, not over '%s': "
                             "leave reduce_codec away",
                             fsdpc_comm_kind(unit->shard))
               : FSDPC_OK;
}

static int
make_buffers(fsdpc_unit *unit)
{
    const fsdpc_layout *layout = unit->layout;
    FSDPC_TRY(make_masters(unit));
    FSDPC_TRY(fsdpc_unit_make_grads(unit));
    unit->grads.used = fsdpc_mem_calloc((size_t)layout->param_count, 1);
    unit->grads.local_used = fsdpc_mem_calloc((size_t)layout->param_count, 1);
    unit->local_offset = fsdpc_mem_calloc((size_t)layout->segment_count, sizeof(size_t));
    if (!unit->grads.used || !unit->grads.local_used || !unit->local_offset) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a unit");
    }
    unit->direct = unit->footprint.direct;
    return unit->direct
               ? FSDPC_OK
               : fsdpc_range_init_on(unit->device, &unit->range, unit->footprint.range_bytes);
}

int
fsdpc_unit_new(const fsdpc_unit_options *options, const fsdpc_param_spec *specs, int count,
               fsdpc_unit **out)
{
    int status = FSDPC_OK;
    *out = NULL;
    if (!(options->divide > 0)) {
        return fsdpc_error(FSDPC_E_INVAL, "unit %s: divide must be > 0, got %g", options->name,
                           options->divide);
    }
    fsdpc_unit *unit = fsdpc_mem_calloc(1, sizeof *unit);
    if (!unit) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for unit %s", options->name);
    }
    unit->range.slot = -1;
    unit->shard = options->shard;
    unit->replicate = options->replicate;
    unit->device = fsdpc_comm_device(options->shard);
    unit->rank = fsdpc_comm_rank(options->shard);
    unit->world = fsdpc_comm_world(options->shard);
    unit->born = fsdpc_comm_agreements(options->shard);
    unit->divide = options->divide;
    unit->reshard = options->reshard;
    unit->offload = options->offload;
    unit->foreign = options->foreign;
    unit->name = fsdpc_mem_strdup(options->name);
    if (!unit->name) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for unit %s", options->name), fail);
    }
    FSDPC_GOTO(fsdpc_unit_open_shard_device(unit), fail);
    size_t align = fsdpc_device_get_caps(unit->device)->align_bytes;
    FSDPC_GOTO(fsdpc_layout_build(specs, count, unit->world, align, &unit->layout), fail);
    FSDPC_GOTO(check_codecs(unit), fail);
    FSDPC_GOTO(make_buffers(unit), fail);
    *out = unit;
    return FSDPC_OK;
fail:
    status = fsdpc_error_prepend(status, "unit %s", options->name);
    fsdpc_unit_free(unit);
    return status;
}

/* Freeing is local, and a late rank may still read this rank's shard. So the last rank to free the unit frees
 * the memory of all ranks. */
static void
give_masters_back(fsdpc_unit *unit)
{
    size_t shards = unit->master_stride * (size_t)unit->world;
    _Atomic uint32_t *freed = (_Atomic uint32_t *)((char *)unit->master_map + shards);
    if (atomic_fetch_add(freed, 1) + 1 == (uint32_t)unit->world) {
        (void)fsdpc_shm_discard(fsdpc_comm_segment(unit->shard), unit->master_offset,
                                unit->master_map_bytes);
    }
    fsdpc_forks_remove(unit->master);
    fsdpc_shm_unmap(unit->master_map, unit->master_map_bytes);
}

void
fsdpc_unit_free(fsdpc_unit *unit)
{
    if (!unit) {
        return;
    }
    fsdpc_range_fini(&unit->range);
    fsdpc_grad_close(unit);
    fsdpc_unit_free_retired(unit);
    fsdpc_mem_free(unit->digests);
    if (unit->layout) {
        fsdpc_unit_free_grads(unit);
        fsdpc_unit_free_partial(unit);
        fsdpc_device_free(unit->device, unit->local, unit->local_bytes);
        if (!unit->master_map) {
            fsdpc_unit_shard_free(unit, unit->master, unit->layout->shard_bytes);
        }
    }
    if (unit->master_map) {
        give_masters_back(unit);
    }
    fsdpc_unit_close_shard_device(unit);
    fsdpc_layout_free(unit->layout);
    fsdpc_mem_free(unit->peers);
    fsdpc_mem_free(unit->grads.used);
    fsdpc_mem_free(unit->grads.local_used);
    fsdpc_mem_free(unit->local_offset);
    fsdpc_mem_free(unit->name);
    fsdpc_mem_free(unit);
}

int
fsdpc_unit_rename(fsdpc_unit *unit, const char *name)
{
    char *copy = fsdpc_mem_strdup(name);
    if (!copy) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the name of unit %s", name);
    }
    fsdpc_mem_free(unit->name);
    unit->name = copy;
    return FSDPC_OK;
}

int
fsdpc_unit_finish_grad(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    for (int s = 0; unit->grad_out && s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        fsdpc_dtype dtype;
        char *out = fsdpc_unit_grad_out(unit, s, &dtype);
        if (seg->trainable) {
            FSDPC_TRY(fsdpc_device_cast(unit->shard_device, out, dtype,
                                        (char *)unit->grad + seg->grad_offset, seg->accumulate,
                                        seg->piece_numel, 1.0));
        }
    }
    return FSDPC_OK;
}
