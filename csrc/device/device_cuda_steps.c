/* Launches of the kernels for optimizer steps, packed activations and codes. */
#include "device/device_cuda_impl.h"

#include <string.h>

_Static_assert(sizeof(fsdpc_step_entry) <= FSDPC_STEP_SCRATCH, "as in device.h");

static int
check_aligned(const fsdpc_step_tensor *t, int kind)
{
    const bool codes = kind >= FSDPC_STEP_ADAM8;
    const int held = kind == FSDPC_STEP_MINI ? 1 : 3; /* Adam-mini: only m has state_type */
    FSDPC_TRY(fsdpc_cuda_check_aligned("step", t->param, (fsdpc_dtype)t->param_type));
    FSDPC_TRY(fsdpc_cuda_check_aligned("step", t->grad, (fsdpc_dtype)t->grad_type));
    for (int s = 0; s < held && !codes; s++) {
        FSDPC_TRY(fsdpc_cuda_check_aligned("step", t->states[s], (fsdpc_dtype)t->state_type));
    }
    return FSDPC_OK;
}

/* Launches the kernel that fills entries [done, done + count) of the step; adds their tiles to *tiles. */
static int
begin(struct fsdpc_cuda *cuda, const fsdpc_steps *steps, int done, int count, int64_t *tiles)
{
    fsdpc_cuda_step_begin_params params = {.rule = steps->rule,
                                           .control = steps->control,
                                           .entries = (fsdpc_step_entry *)steps->scratch + done,
                                           .count = count};
    for (int i = 0; i < count; i++) {
        params.tensor[i] = steps->tensors[done + i];
        FSDPC_TRY(check_aligned(&params.tensor[i], steps->rule.kind));
        params.tensor[i].first_tile = *tiles;
        *tiles += fsdpc_cuda_step_tiles(params.tensor[i].first, params.tensor[i].n);
    }
    return fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_step_begin, 1, &params);
}

static int
finish(struct fsdpc_cuda *cuda, const fsdpc_steps *steps, int64_t tiles)
{
    bool doubles = false, others = false;
    fsdpc_cuda_step_params params = {.entries = steps->scratch,
                                     .count = steps->count,
                                     .kind = steps->rule.kind,
                                     .nesterov = steps->rule.nesterov};
    if (steps->rule.kind >= FSDPC_STEP_ADAM8) {
        memcpy(params.codes, steps->codes, sizeof params.codes);
        return fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_step8, tiles, &params);
    }
    for (int i = 0; i < steps->count; i++) {
        const bool wide = steps->tensors[i].param_type == FSDPC_F64;
        doubles = doubles || wide || steps->rule.kind == FSDPC_STEP_MINI;
        others = others || (!wide && steps->rule.kind != FSDPC_STEP_MINI);
    }
    if (doubles) {
        FSDPC_TRY(fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_step_wide, tiles, &params));
    }
    return others ? fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_step, tiles, &params) : FSDPC_OK;
}

int
fsdpc_cuda_step_all(void *context, const fsdpc_steps *steps)
{
    int64_t tiles = 0;
    for (int done = 0, count; done < steps->count; done += count) {
        const int left = steps->count - done;
        count = left < FSDPC_CUDA_STEP_TENSORS ? left : FSDPC_CUDA_STEP_TENSORS;
        FSDPC_TRY(begin(context, steps, done, count, &tiles));
    }
    return finish(context, steps, tiles);
}

int
fsdpc_cuda_activation(void *context, bool pack, void *values, fsdpc_dtype type, int64_t n,
                      int8_t *codes, float *scales)
{
    const int64_t items = FSDPC_CUDA_ACTIVATION_ITEMS;
    const fsdpc_cuda_activation_params params = {
        .values = values, .codes = codes, .scales = scales, .n = n, .type = (int32_t)type};
    FSDPC_TRY(fsdpc_cuda_check_aligned("activations", values, type));
    return fsdpc_cuda_launch(context, pack ? FSDPC_K_fsdpc_cuda_pack8 : FSDPC_K_fsdpc_cuda_unpack8,
                             n / items + (n % items != 0), &params);
}

/* Fills `coding` for a launch. Its blocks of threads follow the *total blocks of earlier codings. */
static int
place_coding(fsdpc_cuda_coding *coding, const fsdpc_coding *from, int64_t *total)
{
    const bool plain = from->codec == FSDPC_UNCODED;
    const int64_t block = plain ? FSDPC_CUDA_PLAIN_BLOCK : fsdpc_codec_forms[from->codec].block;
    const int64_t many = FSDPC_CUDA_CODING_BLOCKS, rows = plain ? 1 : from->rows;
    const int64_t row = plain ? from->rows * from->row : from->row;
    const int64_t blocks = (row / block + (row % block != 0)) * rows * from->pieces;
    FSDPC_TRY(fsdpc_cuda_check_aligned("codes", from->values, from->type));
    *coding = (fsdpc_cuda_coding){
        .values = from->values,
        .coded = from->coded,
        .rows = rows,
        .row = row,
        .stride = (int64_t)from->stride,
        .scales = (int64_t)fsdpc_codec_scales(from->codec, rows, row),
        .blocks = blocks,
        .lost = from->lost,
        .first_block = (int32_t)*total,
        .type = (int32_t)from->type,
        .codec = (int32_t)from->codec,
    };
    *total += blocks / many + (blocks % many != 0);
    return FSDPC_OK;
}

int
fsdpc_cuda_code(void *context, bool encode, const fsdpc_coding *list, int count)
{
    for (int done = 0; done < count; done += FSDPC_CUDA_CODINGS) {
        int64_t blocks = 0;
        const int left = count - done;
        fsdpc_cuda_coding_params params = {.count = left < FSDPC_CUDA_CODINGS ? left
                                                                              : FSDPC_CUDA_CODINGS};
        for (int i = 0; i < params.count; i++) {
            FSDPC_TRY(place_coding(&params.coding[i], &list[done + i], &blocks));
        }
        FSDPC_TRY(fsdpc_cuda_launch(context,
                                    encode ? FSDPC_K_fsdpc_cuda_encode : FSDPC_K_fsdpc_cuda_decode,
                                    blocks, &params));
    }
    return FSDPC_OK;
}

int
fsdpc_cuda_sum_landed_all(void *context, const fsdpc_landed *list, int count, int senders, int own,
                          double scale, bool add)
{
    for (int done = 0; done < count; done += FSDPC_CUDA_LANDED) {
        int64_t blocks = 0;
        const int left = count - done;
        fsdpc_cuda_landed_params params = {.count =
                                               left < FSDPC_CUDA_LANDED ? left : FSDPC_CUDA_LANDED,
                                           .scale = scale,
                                           .senders = senders,
                                           .own = own,
                                           .add = add};
        for (int i = 0; i < params.count; i++) {
            const fsdpc_landed *from = &list[done + i];
            FSDPC_TRY(fsdpc_cuda_check_aligned("sums", from->sum, from->sum_type));
            FSDPC_TRY(place_coding(&params.landed[i].from, &from->from, &blocks));
            params.landed[i].sum = from->sum;
            params.landed[i].sum_type = (int32_t)from->sum_type;
        }
        FSDPC_TRY(fsdpc_cuda_launch(context, FSDPC_K_fsdpc_cuda_sum_landed, blocks, &params));
    }
    return FSDPC_OK;
}
