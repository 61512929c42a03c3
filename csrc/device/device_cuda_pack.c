/* Packing of many tensors into one buffer by one launch.
 *
 * The destinations of the tensors are constant: a plan keeps them in device memory. The sources are
 * parameters of the launch. A list of sources that is too long for a launch, or that has strides,
 * goes through a stage: pinned memory that the same stream copies to device memory. A stage is
 * reused when the event after its launch is done; the host never waits for a stage. The stage of a
 * captured launch is not reused, because the graph copies the stage again each time it runs.
 */
#include "device/device_cuda_impl.h"

#include <string.h>

#include "base/mem.h"

enum { STAGE_BYTES = 16 << 10 };

struct fsdpc_cuda_stage {
    struct fsdpc_cuda_stage *next;
    size_t bytes;
    char *host, *device;
    fsdpc_event *read; /* recorded after the launch that reads the stage */
    bool taken;
};

/* A pack plan's device memory: an entry per target or gap, and for each tile the index of its entry. */
struct plan {
    void *block;
    size_t block_bytes;
    const fsdpc_cuda_pack_entry *entries;
    const int32_t *tile_entry;
    int64_t tiles;
};

/* --- stages ---------------------------------------------------------------------------------------- */

static void
free_stage(struct fsdpc_cuda *cuda, struct fsdpc_cuda_stage *stage)
{
    if (stage->host) {
        fsdpc_cuda_host_free(cuda, stage->host);
    }
    if (stage->device) {
        (void)cuda->driver->mem_free(fsdpc_cuda_address(stage->device));
    }
    if (stage->read) {
        fsdpc_cuda_event_free(cuda, stage->read);
    }
    fsdpc_mem_free(stage);
}

/* Allocates the stage's device memory. It is not zeroed: a copy fills it before the launch that reads it. */
static int
make_twin(const struct fsdpc_cuda *cuda, struct fsdpc_cuda_stage *stage)
{
    fsdpc_cu_ptr address = 0;
    FSDPC_CU(cuda, mem_alloc(&address, stage->bytes), "memory for a list of tensors");
    stage->device = (char *)(uintptr_t)address;
    return FSDPC_OK;
}

static int
make_stage(struct fsdpc_cuda *cuda, size_t bytes, struct fsdpc_cuda_stage **out)
{
    int status = FSDPC_OK;
    void *host = NULL;
    struct fsdpc_cuda_stage *stage = fsdpc_mem_calloc(1, sizeof *stage);
    if (!stage) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a list of tensors");
    }
    stage->bytes = fsdpc_round_up(bytes, STAGE_BYTES);
    stage->taken = true;
    FSDPC_GOTO(fsdpc_cuda_event_new(cuda, &stage->read), fail);
    FSDPC_GOTO(fsdpc_cuda_host_alloc(cuda, stage->bytes, &host), fail);
    stage->host = host;
    FSDPC_GOTO(make_twin(cuda, stage), fail);
    *out = stage;
    return FSDPC_OK;
fail:
    free_stage(cuda, stage);
    return status;
}

static bool
is_free(struct fsdpc_cuda *cuda, const struct fsdpc_cuda_stage *stage, size_t bytes)
{
    bool done = false;
    return !stage->taken && stage->bytes >= bytes &&
           fsdpc_cuda_poll(cuda, stage->read, &done) == FSDPC_OK && done;
}

static int
find_stage(struct fsdpc_cuda *cuda, size_t bytes, struct fsdpc_cuda_stage **out)
{
    struct fsdpc_cuda_stage *found = NULL;
    pthread_mutex_lock(&cuda->lock);
    for (struct fsdpc_cuda_stage *stage = cuda->stages; stage && !found; stage = stage->next) {
        if (is_free(cuda, stage, bytes)) {
            found = stage;
            found->taken = true;
        }
    }
    pthread_mutex_unlock(&cuda->lock);
    if (!found) {
        FSDPC_TRY(make_stage(cuda, bytes, &found));
        pthread_mutex_lock(&cuda->lock);
        found->next = cuda->stages;
        cuda->stages = found;
        pthread_mutex_unlock(&cuda->lock);
    }
    *out = found;
    return FSDPC_OK;
}

/* If there is a base, launches the kernel that adds to the base; otherwise the plain kernel. */
static int
launch_pack(struct fsdpc_cuda *cuda, const fsdpc_cuda_pack_params *params)
{
    return fsdpc_cuda_launch(cuda,
                             params->base ? FSDPC_K_fsdpc_cuda_pack_add : FSDPC_K_fsdpc_cuda_pack,
                             params->tiles, params);
}

/* Takes a stage in relaxed capture mode: in other modes, queries and allocations fail during captures. */
static int
take_stage(struct fsdpc_cuda *cuda, size_t bytes, struct fsdpc_cuda_stage **out)
{
    const unsigned mode = fsdpc_cuda_exchange_mode(cuda, FSDPC_CU_CAPTURE_RELAXED);
    const int status = find_stage(cuda, bytes, out);
    (void)fsdpc_cuda_exchange_mode(cuda, mode);
    return status;
}

static int
launch_staged(struct fsdpc_cuda *cuda, struct fsdpc_cuda_stage *stage, size_t bytes,
              const fsdpc_cuda_pack_params *params, bool *again)
{
    uint64_t capture;
    FSDPC_TRY(fsdpc_cuda_copy_in(cuda, stage->device, stage->host, bytes));
    FSDPC_TRY(launch_pack(cuda, params));
    FSDPC_TRY(fsdpc_cuda_capture(cuda, &capture));
    *again = !capture;
    return fsdpc_cuda_record(cuda, stage->read);
}

static int
give_stage(struct fsdpc_cuda *cuda, struct fsdpc_cuda_stage *stage, int status, bool again)
{
    pthread_mutex_lock(&cuda->lock);
    /* After a failure a launch may still read the stage, so the stage is not reused. */
    stage->taken = status != FSDPC_OK || !again;
    pthread_mutex_unlock(&cuda->lock);
    return status;
}

/* --- plans ------------------------------------------------------------------------------------------ */

static int64_t
tiles_of(int64_t n, fsdpc_dtype type)
{
    const int64_t items = FSDPC_CUDA_TILE_BYTES / (int64_t)fsdpc_dtype_bytes(type);
    return (n + items - 1) / items;
}

/* Calls `visit` for each target and each gap; returns the number of tiles. */
static int64_t
for_each_entry(const fsdpc_pack_plan *plan, void (*visit)(void *, const fsdpc_cuda_pack_entry *),
               void *argument)
{
    size_t end = 0;
    fsdpc_cuda_pack_entry entry = {0};
    for (int i = 0; i <= plan->count; i++) {
        const fsdpc_pack_target *target = i < plan->count ? &plan->targets[i] : NULL;
        const size_t begin = target ? target->offset : plan->bytes;
        entry.dst_offset = (int64_t)end;
        entry.n = (int64_t)(begin - end);
        entry.dst_type = FSDPC_BYTES;
        entry.source = -1;
        if (entry.n > 0 && !plan->keep_gaps) {
            visit(argument, &entry);
            entry.first_tile += tiles_of(entry.n, FSDPC_BYTES);
        }
        if (target) {
            entry.dst_offset = (int64_t)begin;
            entry.n = target->n;
            entry.dst_type = (int32_t)target->dtype;
            entry.source = i;
            entry.base_offset = plan->bases ? (int64_t)plan->bases[i].offset : 0;
            entry.base_type = plan->bases ? (int32_t)plan->bases[i].dtype : 0;
            visit(argument, &entry);
            entry.first_tile += tiles_of(entry.n, target->dtype);
            end = begin + (size_t)target->n * fsdpc_dtype_bytes(target->dtype);
        }
    }
    return entry.first_tile;
}

static void
count_entry(void *argument, const fsdpc_cuda_pack_entry *entry)
{
    (void)entry;
    ++*(size_t *)argument;
}

struct writer {
    fsdpc_cuda_pack_entry *entries;
    int32_t *tile_entry;
    int32_t count;
};

static void
write_entry(void *argument, const fsdpc_cuda_pack_entry *entry)
{
    struct writer *writer = argument;
    const int64_t tiles = tiles_of(entry->n, (fsdpc_dtype)entry->dst_type);
    for (int64_t t = 0; t < tiles; t++) {
        writer->tile_entry[entry->first_tile + t] = writer->count;
    }
    writer->entries[writer->count++] = *entry;
}

/* Fills the plan's block: first all entries, then, for each tile, the index of its entry. */
static int
fill_plan(struct fsdpc_cuda *cuda, const fsdpc_pack_plan *plan, struct plan *own, size_t entries)
{
    int status = FSDPC_OK;
    void *host = NULL;
    FSDPC_GOTO(fsdpc_cuda_host_alloc(cuda, own->block_bytes, &host), done);
    FSDPC_GOTO(fsdpc_cuda_alloc(cuda, own->block_bytes, &own->block), done);
    struct writer writer = {.entries = host};
    writer.tile_entry = (int32_t *)(writer.entries + entries);
    own->entries = own->block;
    own->tile_entry = (const int32_t *)(own->entries + entries);
    for_each_entry(plan, write_entry, &writer);
    FSDPC_GOTO(fsdpc_cuda_copy_in(cuda, own->block, host, own->block_bytes), done);
    FSDPC_GOTO(fsdpc_cuda_sync(cuda, "the plan of a unit"), done);
done:
    if (host) {
        fsdpc_cuda_host_free(cuda, host);
    }
    return status;
}

int
fsdpc_cuda_plan_new(void *context, fsdpc_pack_plan *plan)
{
    size_t entries = 0;
    struct plan *own = fsdpc_mem_calloc(1, sizeof *own);
    if (!own) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of a unit");
    }
    plan->own = own;
    own->tiles = for_each_entry(plan, count_entry, &entries);
    own->block_bytes = entries * sizeof *own->entries + (size_t)own->tiles * sizeof(int32_t);
    const int status = own->block_bytes ? fill_plan(context, plan, own, entries) : FSDPC_OK;
    if (status != FSDPC_OK) {
        fsdpc_cuda_plan_free(context, plan);
    }
    return status;
}

void
fsdpc_cuda_plan_free(void *context, fsdpc_pack_plan *plan)
{
    struct plan *own = plan->own;
    if (own->block) {
        fsdpc_cuda_free(context, own->block, own->block_bytes);
    }
    fsdpc_mem_free(own);
    plan->own = NULL;
}

/* --- sources ---------------------------------------------------------------------------------------- */

/* Sets *strided to false if the elements are contiguous in memory, whatever the strides say. */
static int
simplify_source(const fsdpc_pack_source *source, fsdpc_kernel_view *view, bool *strided)
{
    *strided = false;
    FSDPC_TRY(fsdpc_cuda_check_aligned("pack", source->data, source->dtype));
    if (!source->data || !source->strides) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_kernel_view_simplify(view, source->ndim, source->shape, source->strides));
    *strided = view->ndim > 1 || (view->ndim == 1 && view->strides[0] != 1);
    return FSDPC_OK;
}

static fsdpc_cuda_source
word_for(uint64_t address, fsdpc_dtype type)
{
    return address ? address | (uint64_t)type << FSDPC_CUDA_SOURCE_TYPE_SHIFT : 0;
}

static void
write_view(fsdpc_cuda_view *out, const void *data, const fsdpc_kernel_view *view)
{
    _Static_assert((int)FSDPC_CUDA_VIEW_DIMS >= (int)FSDPC_KERNEL_MAX_DIMS,
                   "a view holds any tensor");
    out->data = data;
    out->ndim = view->ndim;
    memcpy(out->shape, view->shape, sizeof view->shape);
    memcpy(out->strides, view->strides, sizeof view->strides);
}

/* Writes one word per source to `words`, and the views of strided tensors to `views`; each may be NULL. On
 * the device the views begin at `device_views`. *view_count becomes the number of strided tensors. */
static int
list_sources(const fsdpc_pack_plan *plan, const fsdpc_pack_source *sources,
             fsdpc_cuda_source *words, fsdpc_cuda_view *views, uint64_t device_views,
             size_t *view_count)
{
    *view_count = 0;
    for (int i = 0; i < plan->count; i++) {
        fsdpc_kernel_view view;
        bool strided;
        FSDPC_TRY(simplify_source(&sources[i], &view, &strided));
        if (strided && views) {
            write_view(&views[*view_count], sources[i].data, &view);
        }
        if (words) {
            words[i] =
                strided ? word_for(device_views + *view_count * sizeof *views, sources[i].dtype) |
                              FSDPC_CUDA_SOURCE_STRIDED
                        : word_for((uintptr_t)sources[i].data, sources[i].dtype);
            words[i] |= sources[i].add ? FSDPC_CUDA_SOURCE_ADD : 0;
        }
        *view_count += strided;
    }
    return FSDPC_OK;
}

static int
pack_staged(struct fsdpc_cuda *cuda, const fsdpc_pack_plan *plan, const fsdpc_pack_source *sources,
            fsdpc_cuda_pack_params *params, size_t views)
{
    bool again = true;
    struct fsdpc_cuda_stage *stage;
    const size_t list_bytes = (size_t)plan->count * sizeof(fsdpc_cuda_source);
    const size_t bytes = list_bytes + views * sizeof(fsdpc_cuda_view);
    FSDPC_TRY(take_stage(cuda, bytes, &stage));
    int status = list_sources(plan, sources, (fsdpc_cuda_source *)stage->host,
                              (fsdpc_cuda_view *)(stage->host + list_bytes),
                              (uintptr_t)stage->device + list_bytes, &views);
    params->table = (const fsdpc_cuda_source *)stage->device;
    if (status == FSDPC_OK) {
        status = launch_staged(cuda, stage, bytes, params, &again);
    }
    return give_stage(cuda, stage, status, again);
}

static int
check_pack(const fsdpc_pack_plan *plan, const char *buffer, const char *base)
{
    for (int i = 0; i < plan->count; i++) {
        FSDPC_TRY(fsdpc_cuda_check_aligned("pack", buffer + plan->targets[i].offset,
                                           plan->targets[i].dtype));
        if (base && plan->bases) {
            FSDPC_TRY(fsdpc_cuda_check_aligned("pack", base + plan->bases[i].offset,
                                               plan->bases[i].dtype));
        }
    }
    return FSDPC_OK;
}

static bool
adds(const fsdpc_pack_plan *plan, const fsdpc_pack_source *sources)
{
    for (int i = 0; i < plan->count; i++) {
        if (sources[i].add) {
            return true;
        }
    }
    return false;
}

int
fsdpc_cuda_pack_onto(void *context, const fsdpc_pack_plan *plan, void *buffer, const void *base,
                     const fsdpc_pack_source *sources, double scale)
{
    const struct plan *own = plan->own;
    const bool short_list = plan->count <= FSDPC_CUDA_PACK_SOURCES;
    fsdpc_cuda_pack_params params = {.dst = buffer,
                                     .entries = own->entries,
                                     .tile_entry = own->tile_entry,
                                     .tiles = own->tiles,
                                     .scale = scale,
                                     .base = adds(plan, sources) ? base : NULL};
    size_t views;
    if (own->tiles == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(check_pack(plan, buffer, params.base));
    FSDPC_TRY(list_sources(plan, sources, short_list ? params.source : NULL, NULL, 0, &views));
    if (short_list && views == 0) {
        return launch_pack(context, &params);
    }
    return pack_staged(context, plan, sources, &params, views);
}

/* Packs one strided tensor. The stage holds the tensor's entry, and then the tensor's view. */
static int
pack_view(struct fsdpc_cuda *cuda, const fsdpc_cuda_pack_entry *entry, char *dst,
          const fsdpc_kernel_view *view, const void *src, fsdpc_dtype src_type, double scale)
{
    bool again = true;
    struct fsdpc_cuda_stage *stage;
    const size_t bytes = sizeof *entry + sizeof(fsdpc_cuda_view);
    FSDPC_TRY(take_stage(cuda, bytes, &stage));
    memcpy(stage->host, entry, sizeof *entry);
    write_view((fsdpc_cuda_view *)(stage->host + sizeof *entry), src, view);
    fsdpc_cuda_pack_params params = {.dst = dst,
                                     .entries = (const fsdpc_cuda_pack_entry *)stage->device,
                                     .tiles = tiles_of(entry->n, (fsdpc_dtype)entry->dst_type),
                                     .scale = scale};
    params.source[0] =
        word_for((uintptr_t)stage->device + sizeof *entry, src_type) | FSDPC_CUDA_SOURCE_STRIDED;
    const int status = launch_staged(cuda, stage, bytes, &params, &again);
    return give_stage(cuda, stage, status, again);
}

int
fsdpc_cuda_pack_tensor(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                       fsdpc_dtype src_type, int ndim, const int64_t *shape, const int64_t *strides,
                       double scale)
{
    const fsdpc_pack_source source = {
        .data = src, .dtype = src_type, .ndim = ndim, .shape = shape, .strides = strides};
    fsdpc_kernel_view view;
    bool strided;
    FSDPC_TRY(fsdpc_kernel_view_simplify(&view, ndim, shape, strides));
    if (view.numel == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(simplify_source(&source, &view, &strided));
    if (!strided) {
        return fsdpc_cuda_cast_any(context, dst, dst_type, src, src_type, view.numel, scale);
    }
    FSDPC_TRY(fsdpc_cuda_check_aligned("pack", dst, dst_type));
    const fsdpc_cuda_pack_entry entry = {.n = view.numel, .dst_type = (int32_t)dst_type};
    return pack_view(context, &entry, dst, &view, src, src_type, scale);
}
