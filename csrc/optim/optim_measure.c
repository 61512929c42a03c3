/* Norms and largest magnitudes of gradients, weights and updates, measured in the pass that steps them.
 *
 * A tile is measured before and after its step, while it is in the first-level cache, so that it is not read
 * from memory again. Each part has its own values, which threads do not share; they are added in order.
 */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "kernels.h"
#include "optim/optim_impl.h"

int
fsdpc_optim_meter_open(fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensors, int count)
{
    int64_t parts = 0;
    bool measures = false;
    *meter = (fsdpc_optim_meter){NULL, NULL, NULL};
    for (int i = 0; i < count; i++) {
        parts += fsdpc_optim_parts_of(&tensors[i]);
        measures = measures || tensors[i].measures != NULL;
    }
    if (!measures || parts == 0) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_kernels_select(&meter->kernels));
    meter->starts = fsdpc_mem_calloc((size_t)count, sizeof *meter->starts);
    meter->values = fsdpc_mem_calloc((size_t)parts, FSDPC_OPTIM_MEASURES * sizeof *meter->values);
    if (meter->starts == NULL || meter->values == NULL) {
        fsdpc_mem_free(meter->starts);
        fsdpc_mem_free(meter->values);
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the statistics of %d tensors", count);
    }
    for (int i = 1; i < count; i++) {
        meter->starts[i] = meter->starts[i - 1] + fsdpc_optim_parts_of(&tensors[i - 1]);
    }
    return FSDPC_OK;
}

static void
note(double *values, fsdpc_optim_measured what, double sum, double most)
{
    values[2 * what] += sum;
    if (most > values[2 * what + 1] || isnan(most)) { /* NaN counts as the largest */
        values[2 * what + 1] = most;
    }
}

void
fsdpc_optim_meter_close(fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensors, int count)
{
    for (int i = 0; i < count && meter->values != NULL; i++) {
        const int64_t parts = tensors[i].measures == NULL ? 0 : fsdpc_optim_parts_of(&tensors[i]);
        for (int64_t part = 0; part < parts; part++) {
            const double *values = meter->values + (meter->starts[i] + part) * FSDPC_OPTIM_MEASURES;
            for (int what = 0; what < FSDPC_OPTIM_MEASURED; what++) {
                note(tensors[i].measures, (fsdpc_optim_measured)what, values[2 * what],
                     values[2 * what + 1]);
            }
        }
    }
    fsdpc_mem_free(meter->starts);
    fsdpc_mem_free(meter->values);
}

static double *
values_at(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor, int index,
          int64_t begin)
{
    const int64_t part =
        (tensor->first + begin) / FSDPC_OPTIM_PART - tensor->first / FSDPC_OPTIM_PART;
    return meter->values + (meter->starts[index] + part) * FSDPC_OPTIM_MEASURES;
}

static void
measure(const fsdpc_optim_meter *meter, double *values, fsdpc_optim_measured what,
        const void *memory, fsdpc_dtype type, int64_t n)
{
    const fsdpc_norm found = meter->kernels->norm2(memory, type, n);
    note(values, what, found.sum, found.max);
}

static const char *
tile_of(const void *memory, fsdpc_dtype type, int64_t begin)
{
    return (const char *)memory + (size_t)begin * fsdpc_dtype_bytes(type);
}

void
fsdpc_optim_before_tile(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor, int index,
                        int64_t begin, int64_t n, void *old)
{
    const char *param = tile_of(tensor->param, tensor->param_type, begin);
    const char *grad = tile_of(tensor->grad, tensor->grad_type, begin);
    measure(meter, values_at(meter, tensor, index, begin), FSDPC_OPTIM_GRADS, grad,
            tensor->grad_type, n);
    if (tensor->param_type == FSDPC_F64) {
        memcpy(old, param, (size_t)n * sizeof(double));
    } else {
        meter->kernels->cast(old, FSDPC_F32, param, tensor->param_type, n, 1);
    }
}

void
fsdpc_optim_behind_tile(const fsdpc_optim_meter *meter, const fsdpc_optim_tensor *tensor, int index,
                        int64_t begin, int64_t n, void *old)
{
    const char *param = tile_of(tensor->param, tensor->param_type, begin);
    double *values = values_at(meter, tensor, index, begin);
    measure(meter, values, FSDPC_OPTIM_WEIGHTS, param, tensor->param_type, n);
    if (tensor->param_type == FSDPC_F64) {
        const double *now = (const double *)(const void *)param;
        double *change = old;
        for (int64_t i = 0; i < n; i++) {
            change[i] = now[i] - change[i];
        }
        measure(meter, values, FSDPC_OPTIM_UPDATES, change, FSDPC_F64, n);
        return;
    }
    /* The second half of `old` holds the values after the step. */
    float *change = old, *now = change + FSDPC_OPTIM_MEASURED_TILE;
    meter->kernels->cast(now, FSDPC_F32, param, tensor->param_type, n, 1);
    for (int64_t i = 0; i < n; i++) {
        change[i] = now[i] - change[i];
    }
    measure(meter, values, FSDPC_OPTIM_UPDATES, change, FSDPC_F32, n);
}
