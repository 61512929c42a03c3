/* Declares which memory each kernel of kernels/ reads and writes, as computed from the kernel's
 * parameters. */
#include <string.h>

#include "codec_bits.h"
#include "cuda_params.h"
#include "sim.h"

static size_t
bytes_of(int64_t n, int type)
{
    static const size_t item[] = {
        [FSDPC_F32] = 4, [FSDPC_BF16] = 2, [FSDPC_F16] = 2, [FSDPC_F64] = 8, [FSDPC_BYTES] = 1};
    return (size_t)n * item[type];
}

static size_t
partial_bytes(const simgpu_launch *launch)
{
    return launch->grid[0] * sizeof(fsdpc_cuda_norm_value);
}

static bool
declare_cast(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_cast_params *p = params;
    (void)launch;
    return simgpu_task_read(task, p->src, bytes_of(p->n, p->src_type)) &&
           simgpu_task_write(task, p->dst, bytes_of(p->n, p->dst_type));
}

static bool
declare_scale(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_scale_params *p = params;
    bool known = simgpu_task_read(task, p->factor, sizeof *p->factor);
    (void)launch;
    for (int64_t i = 0; known && i < p->count; i++) {
        const fsdpc_cuda_span *span = &p->span[i];
        known = simgpu_task_read(task, span->data, bytes_of(span->n, span->type)) &&
                simgpu_task_write(task, span->data, bytes_of(span->n, span->type));
    }
    return known;
}

/* Declares a read from the lowest to the highest element. With negative strides, the view's first element is
 * not the lowest. */
static bool
read_view(simgpu_task *task, const fsdpc_cuda_view *view, int type)
{
    int64_t low = 0, high = 0;
    if (!simgpu_task_read(task, view, sizeof *view)) {
        return false;
    }
    for (int64_t d = 0; d < view->ndim; d++) {
        const int64_t reach = (view->shape[d] - 1) * view->strides[d];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    return simgpu_task_read(task, (const char *)view->data - bytes_of(-low, type),
                            bytes_of(high - low + 1, type));
}

static bool
declare_base(simgpu_task *task, const fsdpc_cuda_pack_params *p, const fsdpc_cuda_pack_entry *entry)
{
    return simgpu_task_read(task, (const char *)p->base + entry->base_offset,
                            bytes_of(entry->n, entry->base_type));
}

static bool
declare_pack_entry(simgpu_task *task, const fsdpc_cuda_pack_params *p,
                   const fsdpc_cuda_pack_entry *entry)
{
    char *dst = (char *)p->dst + entry->dst_offset;
    fsdpc_cuda_source word = 0;
    if (entry->source >= 0 && p->table &&
        !simgpu_task_read(task, &p->table[entry->source], sizeof *p->table)) {
        return false;
    }
    if (entry->source >= 0) {
        word = p->table ? p->table[entry->source] : p->source[entry->source];
    }
    const void *address = (const void *)(uintptr_t)(word & FSDPC_CUDA_SOURCE_ADDRESS);
    const int type = (int)(word >> FSDPC_CUDA_SOURCE_TYPE_SHIFT & 15);
    if (word & FSDPC_CUDA_SOURCE_ADD) {
        if (!address && dst == (const char *)p->base + entry->base_offset) {
            return true; /* the destination stays as it is */
        }
        if (!declare_base(task, p, entry)) {
            return false;
        }
    }
    if (!simgpu_task_write(task, dst, bytes_of(entry->n, entry->dst_type))) {
        return false;
    }
    if (word & FSDPC_CUDA_SOURCE_STRIDED) {
        return read_view(task, address, type);
    }
    return !address || simgpu_task_read(task, address, bytes_of(entry->n, type));
}

static bool
declare_pack(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_pack_params *p = params;
    int32_t seen = -1;
    if (launch->grid[0] != p->tiles ||
        (p->tile_entry &&
         !simgpu_task_read(task, p->tile_entry, (size_t)p->tiles * sizeof *p->tile_entry))) {
        return false;
    }
    for (int64_t tile = 0; tile < p->tiles; tile++) {
        const int32_t entry = p->tile_entry ? p->tile_entry[tile] : 0;
        if (entry != seen && (!simgpu_task_read(task, &p->entries[entry], sizeof *p->entries) ||
                              !declare_pack_entry(task, p, &p->entries[entry]))) {
            return false;
        }
        seen = entry;
    }
    return true;
}

static bool
declare_reduce(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    (void)launch;
    const fsdpc_cuda_reduce_params *p = params;
    const size_t bytes = bytes_of(p->n, p->acc_type);
    for (int s = 0; s < p->src_count; s++) {
        if (p->src[s] && !simgpu_task_read(task, p->src[s], bytes_of(p->n, p->src_type))) {
            return false;
        }
    }
    return (!p->add || simgpu_task_read(task, p->acc, bytes)) &&
           simgpu_task_write(task, p->acc, bytes);
}

static bool
declare_refresh(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_refresh_params *p = params;
    (void)launch;
    return simgpu_task_read(task, p->acc, bytes_of(p->n, p->acc_type)) &&
           simgpu_task_read(task, p->grad, bytes_of(p->n, p->grad_type)) &&
           simgpu_task_write(task, p->acc, bytes_of(p->n, p->acc_type));
}

static bool
declare_norm(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_norm_params *p = params;
    bool known = simgpu_task_write(task, p->partials, partial_bytes(launch));
    for (int64_t i = 0; known && i < p->count; i++) {
        known = simgpu_task_read(task, p->span[i].data, bytes_of(p->span[i].n, p->span[i].type));
    }
    return known;
}

static bool
declare_norm_sum(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_norm_sum_params *p = params;
    return launch->grid[0] == 1 &&
           simgpu_task_read(task, p->partials, (size_t)p->count * sizeof *p->partials) &&
           (!p->add || simgpu_task_read(task, p->out, sizeof *p->out)) &&
           simgpu_task_write(task, p->out, sizeof *p->out);
}

static bool
declare_clip(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_clip_params *p = params;
    (void)launch;
    return simgpu_task_read(task, p->total, sizeof *p->total) &&
           simgpu_task_write(task, p->norm, sizeof *p->norm) &&
           simgpu_task_write(task, p->factor, sizeof *p->factor);
}

static bool
declare_step_begin(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_step_begin_params *p = params;
    const fsdpc_step_control *c = &p->control;
    bool known = launch->grid[0] == 1 && p->count <= FSDPC_CUDA_STEP_TENSORS &&
                 (!c->grad_scale || simgpu_task_read(task, c->grad_scale, sizeof *c->grad_scale)) &&
                 (!c->found_inf || simgpu_task_read(task, c->found_inf, sizeof *c->found_inf)) &&
                 (!c->clip || simgpu_task_read(task, c->clip, sizeof *c->clip)) &&
                 simgpu_task_write(task, p->entries, (size_t)p->count * sizeof *p->entries);
    for (int64_t i = 0; known && i < p->count; i++) {
        known = simgpu_task_read(task, p->tensor[i].step, sizeof *p->tensor[i].step);
    }
    return known;
}

static bool
declare_range(simgpu_task *task, void *data, size_t bytes, bool write)
{
    if (!data || !bytes) {
        return true;
    }
    return write ? simgpu_task_write(task, data, bytes) : simgpu_task_read(task, data, bytes);
}

static bool
declare_codes(simgpu_task *task, const fsdpc_step_tensor *t, bool write)
{
    const int64_t last = (t->first + t->n - 1) / FSDPC_STEP_BLOCK;
    const size_t scales = (size_t)(last - t->first / FSDPC_STEP_BLOCK + 1) * sizeof(float);
    bool known = true;
    for (int s = 0; s < 2 && known && t->n > 0; s++) {
        known = declare_range(task, t->states[s], (size_t)t->n, write) &&
                declare_range(task, t->scales[s], scales, write);
    }
    return known;
}

static bool
declare_states(simgpu_task *task, const fsdpc_step_tensor *t, int kind)
{
    const bool mini = kind == FSDPC_STEP_MINI;
    bool known = true;
    for (int s = 0; s < (mini ? 1 : 3) && known; s++) {
        known = declare_range(task, t->states[s], bytes_of(t->n, t->state_type), true);
    }
    if (known && mini && t->n > 0) {
        const int64_t blocks = (t->first + t->n - 1) / t->block - t->first / t->block + 1;
        known = declare_range(task, t->states[1], (size_t)blocks * sizeof(float), false);
    }
    return known;
}

static bool
declare_step(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const fsdpc_cuda_step_params *p = params;
    bool known = simgpu_task_read(task, p->entries, (size_t)p->count * sizeof *p->entries);
    int64_t tiles = 0;
    for (int64_t i = 0; known && i < p->count; i++) {
        const fsdpc_step_entry *e = &p->entries[i];
        const fsdpc_step_tensor *t = &e->tensor;
        const bool eight = p->kind >= FSDPC_STEP_ADAM8, edges = p->kind == FSDPC_STEP_EDGES8;
        known = e->tensor.first_tile == tiles;
        tiles += fsdpc_cuda_step_tiles(t->first, t->n);
        if (!known || e->idle) {
            continue;
        }
        known = (edges || declare_range(task, t->step, sizeof *t->step, true)) &&
                declare_range(task, t->param, bytes_of(t->n, t->param_type), !edges) &&
                declare_range(task, t->grad, bytes_of(t->n, t->grad_type),
                              !edges && e->grad_scale != 1) &&
                declare_range(task, t->edges, t->n ? 6 * sizeof(float) : 0, edges) &&
                (eight ? declare_codes(task, t, !edges) : declare_states(task, t, p->kind));
    }
    return known && launch->grid[0] == tiles;
}

static bool
declare_activation(simgpu_task *task, const fsdpc_cuda_activation_params *p, bool pack)
{
    const size_t blocks = (size_t)((p->n + FSDPC_STEP_BLOCK - 1) / FSDPC_STEP_BLOCK);
    return declare_range(task, p->values, bytes_of(p->n, p->type), !pack) &&
           declare_range(task, p->codes, (size_t)p->n, pack) &&
           declare_range(task, p->scales, blocks * sizeof(float), pack);
}

static bool
declare_pack8(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    (void)launch;
    return declare_activation(task, params, true);
}

static bool
declare_unpack8(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    (void)launch;
    return declare_activation(task, params, false);
}

/* Declares the codes of each piece separately, because no piece includes the padding between them. */
static bool
declare_coded(simgpu_task *task, const fsdpc_cuda_coding *c, int64_t pieces, bool encode)
{
    const struct fsdpc_codec_form form = fsdpc_codec_forms[c->codec];
    const int64_t per_row = (c->row + form.block - 1) / form.block;
    const size_t codes = c->codec == FSDPC_UNCODED
                             ? bytes_of(c->rows * c->row, c->type)
                             : (size_t)c->rows * (size_t)((c->row * form.code_bits + 7) / 8);
    const size_t scales = (size_t)(c->rows * per_row * form.scale_bytes);
    bool known = true;
    for (int64_t i = 0; known && i < pieces; i++) {
        uint8_t *coded = c->coded + i * c->stride;
        known = declare_range(task, coded, codes, encode) &&
                declare_range(task, coded + c->scales, scales, encode);
    }
    return known;
}

static bool
declare_coding(simgpu_task *task, const fsdpc_cuda_coding *c, bool encode)
{
    const int64_t block =
        c->codec == FSDPC_UNCODED ? FSDPC_CUDA_PLAIN_BLOCK : fsdpc_codec_forms[c->codec].block;
    const int64_t pieces = c->blocks / ((c->row + block - 1) / block * c->rows);
    const int64_t values = pieces * c->rows * c->row;
    return declare_range(task, c->values, bytes_of(values, c->type), !encode) &&
           (!c->lost || declare_range(task, c->lost, bytes_of(values, FSDPC_F32), true)) &&
           declare_coded(task, c, pieces, encode);
}

static bool
declare_codings(simgpu_task *task, const fsdpc_cuda_coding_params *p, bool encode)
{
    bool known = p->count <= FSDPC_CUDA_CODINGS;
    for (int64_t i = 0; known && i < p->count; i++) {
        known = declare_coding(task, &p->coding[i], encode);
    }
    return known;
}

static bool
declare_encode(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    (void)launch;
    return declare_codings(task, params, true);
}

static bool
declare_decode(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    (void)launch;
    return declare_codings(task, params, false);
}

static bool
declare_sum_landed(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    (void)launch;
    const fsdpc_cuda_landed_params *p = params;
    bool known = p->count <= FSDPC_CUDA_LANDED;
    for (int64_t i = 0; known && i < p->count; i++) {
        const fsdpc_cuda_landed *l = &p->landed[i];
        const int64_t values = l->from.rows * l->from.row;
        known = declare_range(task, l->from.values, bytes_of(values, l->from.type), false) &&
                declare_range(task, l->sum, bytes_of(values, l->sum_type), true) &&
                declare_coded(task, &l->from, p->senders - 1, false);
    }
    return known;
}

static const sim_declared declared[] = {
    {"fsdpc_cuda_cast", sizeof(fsdpc_cuda_cast_params), declare_cast},
    {"fsdpc_cuda_scale", sizeof(fsdpc_cuda_scale_params), declare_scale},
    {"fsdpc_cuda_pack", sizeof(fsdpc_cuda_pack_params), declare_pack},
    {"fsdpc_cuda_pack_add", sizeof(fsdpc_cuda_pack_params), declare_pack},
    {"fsdpc_cuda_reduce", sizeof(fsdpc_cuda_reduce_params), declare_reduce},
    {"fsdpc_cuda_refresh", sizeof(fsdpc_cuda_refresh_params), declare_refresh},
    {"fsdpc_cuda_norm", sizeof(fsdpc_cuda_norm_params), declare_norm},
    {"fsdpc_cuda_norm_sum", sizeof(fsdpc_cuda_norm_sum_params), declare_norm_sum},
    {"fsdpc_cuda_clip", sizeof(fsdpc_cuda_clip_params), declare_clip},
    {"fsdpc_cuda_step_begin", sizeof(fsdpc_cuda_step_begin_params), declare_step_begin},
    {"fsdpc_cuda_step", sizeof(fsdpc_cuda_step_params), declare_step},
    {"fsdpc_cuda_step_wide", sizeof(fsdpc_cuda_step_params), declare_step},
    {"fsdpc_cuda_step8", sizeof(fsdpc_cuda_step_params), declare_step},
    {"fsdpc_cuda_pack8", sizeof(fsdpc_cuda_activation_params), declare_pack8},
    {"fsdpc_cuda_unpack8", sizeof(fsdpc_cuda_activation_params), declare_unpack8},
    {"fsdpc_cuda_encode", sizeof(fsdpc_cuda_coding_params), declare_encode},
    {"fsdpc_cuda_decode", sizeof(fsdpc_cuda_coding_params), declare_decode},
    {"fsdpc_cuda_sum_landed", sizeof(fsdpc_cuda_landed_params), declare_sum_landed},
    {NULL, 0, NULL},
};

const sim_declared *
sim_find_declared(const char *name)
{
    for (const sim_declared *row = declared; row->name; row++) {
        if (strcmp(row->name, name) == 0) {
            return row;
        }
    }
    return NULL;
}
