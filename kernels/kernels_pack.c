/* Gathers a strided tensor into a flat buffer: parameters and gradients that are not contiguous.
 *
 * The shape is first simplified (fsdpc_kernel_view_simplify). If the rows of the last dimension are
 * contiguous and long, they are cast one by one straight from the source. Otherwise the elements are
 * collected in order in a small buffer, which is cast when it is full, so that short rows (as of a
 * transposed weight) do not cost a call each.
 */
#include <string.h>

#include "kernels.h"
#include "base/mem.h"
#include "base/status.h"

enum { BLOCK_BYTES = 8192, DIRECT_ROW = 64 };

static int
count_elements(int ndim, const int64_t *shape, int64_t *out)
{
    size_t numel = 1;
    bool fits = true;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 0) {
            return fsdpc_error(FSDPC_E_INVAL, "dimension %d of the shape is negative (%lld)", d,
                               (long long)shape[d]);
        }
        fits = fits && fsdpc_size_mul(numel, (size_t)shape[d], &numel);
    }
    if (!fits || numel > (size_t)INT64_MAX / 8) {
        return fsdpc_error(FSDPC_E_INVAL, "the shape of %d dimensions overflows: too many elements",
                           ndim);
    }
    *out = (int64_t)numel;
    return FSDPC_OK;
}

int
fsdpc_kernel_view_simplify(fsdpc_kernel_view *view, int ndim, const int64_t *shape,
                           const int64_t *strides)
{
    if (ndim < 0 || ndim > FSDPC_KERNEL_MAX_DIMS) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "the tensor has %d dimensions, but at most %d are supported", ndim,
                           FSDPC_KERNEL_MAX_DIMS);
    }
    FSDPC_TRY(count_elements(ndim, shape, &view->numel));
    view->ndim = 0;
    for (int d = 0; d < ndim; d++) {
        int last = view->ndim - 1;
        if (shape[d] == 1) {
            continue;
        }
        if (last >= 0 && view->strides[last] == strides[d] * shape[d]) {
            view->shape[last] *= shape[d];
            view->strides[last] = strides[d];
            continue;
        }
        view->shape[view->ndim] = shape[d];
        view->strides[view->ndim++] = strides[d];
    }
    return FSDPC_OK;
}

/* Moves to the next index of the leading `ndim` dimensions and returns the change of the offset. */
static int64_t
advance(const fsdpc_kernel_view *view, int ndim, int64_t *index)
{
    int64_t change = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        if (++index[d] < view->shape[d]) {
            return change + view->strides[d];
        }
        change -= (view->shape[d] - 1) * view->strides[d];
        index[d] = 0;
    }
    return change;
}

struct job {
    const fsdpc_kernels *kernels;
    char *dst;
    const char *src;
    fsdpc_dtype dst_type, src_type;
    size_t dst_bytes, src_bytes;
    double scale;
};

static void
convert(const struct job *job, int64_t at, const void *src, int64_t n)
{
    job->kernels->cast(job->dst + (size_t)at * job->dst_bytes, job->dst_type, src, job->src_type, n,
                       job->scale);
}

static void
pack_rows(const struct job *job, const fsdpc_kernel_view *view)
{
    int64_t index[FSDPC_KERNEL_MAX_DIMS] = {0};
    const int outer = view->ndim - 1;
    const int64_t row = view->shape[outer];
    int64_t offset = 0;
    for (int64_t done = 0; done < view->numel; done += row) {
        convert(job, done, job->src + offset * (int64_t)job->src_bytes, row);
        offset += advance(view, outer, index);
    }
}

static void
pack_elements(const struct job *job, const fsdpc_kernel_view *view)
{
    int64_t index[FSDPC_KERNEL_MAX_DIMS] = {0};
    _Alignas(64) char block[BLOCK_BYTES];
    const int64_t capacity = BLOCK_BYTES / (int64_t)job->src_bytes;
    int64_t offset = 0;
    int64_t held = 0;
    for (int64_t done = 0; done < view->numel; done++) {
        if (held == capacity) {
            convert(job, done - held, block, held);
            held = 0;
        }
        memcpy(block + (size_t)held++ * job->src_bytes, job->src + offset * (int64_t)job->src_bytes,
               job->src_bytes);
        offset += advance(view, view->ndim, index);
    }
    convert(job, view->numel - held, block, held);
}

int
fsdpc_kernel_pack_strided(const fsdpc_kernels *kernels, void *dst, fsdpc_dtype dst_type,
                          const void *src, fsdpc_dtype src_type, int ndim, const int64_t *shape,
                          const int64_t *strides, double scale)
{
    fsdpc_kernel_view view;
    FSDPC_TRY(fsdpc_kernel_view_simplify(&view, ndim, shape, strides));
    struct job job = {.kernels = kernels,
                      .dst = dst,
                      .src = src,
                      .dst_type = dst_type,
                      .src_type = src_type,
                      .dst_bytes = fsdpc_dtype_bytes(dst_type),
                      .src_bytes = fsdpc_dtype_bytes(src_type),
                      .scale = scale};
    if (view.numel == 0) {
        return FSDPC_OK;
    }
    if (view.ndim == 0) {
        convert(&job, 0, src, 1);
    } else if (view.strides[view.ndim - 1] == 1 && view.shape[view.ndim - 1] >= DIRECT_ROW) {
        pack_rows(&job, &view);
    } else {
        pack_elements(&job, &view);
    }
    return FSDPC_OK;
}
