/* Loading and launching the kernels of cuda_params.h. */
#include "device/device_cuda_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/deadline.h"
#include "device/cuda_image.h"

enum {
    THREAD_ITEMS = 8, /* elements per thread; more if a launch would need too many blocks */
    WAVES = 2,        /* a launch has at most WAVES times as many blocks as the GPU runs at once */
};

/* --- loading -------------------------------------------------------------------------------------- */

/* FSDPC_CUDA_IMAGE names a file to use in place of the image in the extension, such as an image for other
 * GPUs or older drivers. The file stays mapped, because the driver may read it until it unloads the image. */
static int
image_from_file(const char *file, const void **image)
{
    int status = FSDPC_OK;
    struct stat info;
    const int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return fsdpc_error_errno(errno, "FSDPC_CUDA_IMAGE=%s", file);
    }
    if (fstat(fd, &info) != 0 || info.st_size == 0) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_IO, "FSDPC_CUDA_IMAGE=%s: an empty file", file), done);
    }
    void *mapped = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) {
        FSDPC_GOTO(fsdpc_error_errno(errno, "FSDPC_CUDA_IMAGE=%s", file), done);
    }
    *image = mapped;
done:
    close(fd);
    return status;
}

static int
find_image(const void **image)
{
    size_t bytes;
    const char *file = getenv("FSDPC_CUDA_IMAGE");
    if (file && *file) {
        return image_from_file(file, image);
    }
    *image = fsdpc_cuda_image(&bytes);
    return *image ? FSDPC_OK
                  : fsdpc_error(FSDPC_E_UNAVAILABLE,
                                "this fsdpc was built without CUDA kernels: build it where nvcc is "
                                "found (see NVCC in setup.py)");
}

/* With lazy loading, an image that the driver cannot read causes an error only at the first kernel's load. */
static int
check_load(const struct fsdpc_cuda *cuda, fsdpc_cu_result result, const char *kernel)
{
    return fsdpc_cuda_check(cuda->driver, result,
                            "fsdpc's kernels do not load on %s with driver %d.%d (%s; another "
                            "nvcc's image can be named by FSDPC_CUDA_IMAGE)",
                            cuda->title, cuda->driver->version / 1000,
                            cuda->driver->version % 1000 / 10, kernel);
}

static int
load_function(struct fsdpc_cuda *cuda, const char *name, fsdpc_cu_function *out)
{
    fsdpc_cu_kernel kernel;
    const fsdpc_cuda_driver *d = cuda->driver;
    FSDPC_TRY(check_load(cuda, d->library_get_kernel(&kernel, cuda->library, name), name));
    FSDPC_TRY(check_load(cuda, d->kernel_get_function(out, kernel), name));
    return d->func_load ? check_load(cuda, d->func_load(*out), name) : FSDPC_OK;
}

int
fsdpc_cuda_kernels_init(struct fsdpc_cuda *cuda)
{
    static const char *const names[] = {
#define NAME(kernel, params) #kernel,
        FSDPC_CUDA_KERNELS(NAME)
#undef NAME
    };
    const void *image = NULL;
    FSDPC_TRY(find_image(&image));
    const int status = check_load(
        cuda, cuda->driver->library_load(&cuda->library, image, NULL, NULL, 0, NULL, NULL, 0),
        "the image");
    if (status != FSDPC_OK) {
        cuda->library = NULL;
        return status;
    }
    for (int k = 0; k < FSDPC_CUDA_KERNEL_COUNT; k++) {
        FSDPC_TRY(load_function(cuda, names[k], &cuda->functions[k]));
    }
    return FSDPC_OK;
}

void
fsdpc_cuda_kernels_fini(struct fsdpc_cuda *cuda)
{
    if (cuda->library) {
        (void)cuda->driver->library_unload(cuda->library);
        cuda->library = NULL;
    }
}

/* --- launching ------------------------------------------------------------------------------------ */

int
fsdpc_cuda_launch(const struct fsdpc_cuda *cuda, enum fsdpc_cuda_kernel kernel, int64_t blocks,
                  const void *params)
{
    void *list[] = {(void *)(uintptr_t)params};
    if (blocks > INT32_MAX) {
        return fsdpc_error(FSDPC_E_INVAL, "%lld blocks are too many for one launch",
                           (long long)blocks);
    }
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda,
             launch(cuda->functions[kernel], (unsigned)blocks, 1, 1, FSDPC_CUDA_THREADS, 1, 1, 0,
                    fsdpc_cuda_current(cuda), list, NULL),
             "launch of kernel %d with %lld blocks", (int)kernel, (long long)blocks);
    return FSDPC_OK;
}

int
fsdpc_cuda_check_aligned(const char *what, const void *pointer, fsdpc_dtype type)
{
    return (uintptr_t)pointer % fsdpc_dtype_bytes(type) == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "%s: address %p is not aligned to %s", what, pointer,
                             fsdpc_dtype_name(type));
}

static int64_t
blocks_for(const struct fsdpc_cuda *cuda, int64_t n)
{
    const int64_t most = (int64_t)cuda->multiprocessors * FSDPC_CUDA_RESIDENT * WAVES;
    const int64_t items = (int64_t)FSDPC_CUDA_THREADS * THREAD_ITEMS;
    const int64_t wanted = (n + items - 1) / items;
    return wanted < most ? wanted : most;
}

int
fsdpc_cuda_cast_any(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                    fsdpc_dtype src_type, int64_t n, double scale)
{
    const struct fsdpc_cuda *cuda = context;
    const fsdpc_cuda_cast_params params = {.dst = dst,
                                           .src = src,
                                           .n = n,
                                           .scale = scale,
                                           .dst_type = (int)dst_type,
                                           .src_type = (int)src_type};
    FSDPC_TRY(fsdpc_cuda_check_aligned("cast", dst, dst_type));
    FSDPC_TRY(fsdpc_cuda_check_aligned("cast", src, src_type));
    return fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_cast, blocks_for(cuda, n), &params);
}

/* --- lists of spans ------------------------------------------------------------------------------- */

/* Fills in a span that `blocks` blocks of threads process. *total blocks belong to the spans before it. */
static int
add_span(fsdpc_cuda_span *span, const fsdpc_stretch *from, int64_t blocks, int64_t *total)
{
    FSDPC_TRY(fsdpc_cuda_check_aligned("norm", from->data, from->dtype));
    *span = (fsdpc_cuda_span){from->data, from->n, (int32_t)*total, (int32_t)from->dtype};
    *total += blocks;
    return FSDPC_OK;
}

static int
spans_at_once(int count)
{
    return count < FSDPC_CUDA_SPANS ? count : FSDPC_CUDA_SPANS;
}

int
fsdpc_cuda_scale_by(void *context, const fsdpc_stretch *list, int count, const double *factor)
{
    const struct fsdpc_cuda *cuda = context;
    for (int done = 0; done < count; done += FSDPC_CUDA_SPANS) {
        int64_t blocks = 0;
        fsdpc_cuda_scale_params params = {.factor = factor, .count = spans_at_once(count - done)};
        for (int i = 0; i < params.count; i++) {
            const fsdpc_stretch *one = &list[done + i];
            FSDPC_TRY(add_span(&params.span[i], one, blocks_for(cuda, one->n), &blocks));
        }
        FSDPC_TRY(fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_scale, blocks, &params));
    }
    return FSDPC_OK;
}

/* --- sums ------------------------------------------------------------------------------------------ */

static int
fill_reduce(fsdpc_cuda_reduce_params *params, const void *const *src, int src_count)
{
    if (src_count > FSDPC_CUDA_REDUCE_SOURCES) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "reduce: %d sources, at most %d on a GPU",
                           src_count, FSDPC_CUDA_REDUCE_SOURCES);
    }
    FSDPC_TRY(fsdpc_cuda_check_aligned("reduce", params->acc, (fsdpc_dtype)params->acc_type));
    for (int s = 0; s < src_count; s++) {
        FSDPC_TRY(fsdpc_cuda_check_aligned("reduce", src[s], (fsdpc_dtype)params->src_type));
        params->src[s] = src[s];
    }
    params->src_count = src_count;
    return FSDPC_OK;
}

int
fsdpc_cuda_reduce_any(void *context, void *acc, fsdpc_dtype acc_type, const void *const *src,
                      int src_count, fsdpc_dtype src_type, int64_t n, double scale, bool add)
{
    const struct fsdpc_cuda *cuda = context;
    fsdpc_cuda_reduce_params params = {.acc = acc,
                                       .n = n,
                                       .scale = scale,
                                       .acc_type = (int)acc_type,
                                       .src_type = (int)src_type,
                                       .add = add};
    FSDPC_TRY(fill_reduce(&params, src, src_count));
    return fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_reduce, blocks_for(cuda, n), &params);
}

int
fsdpc_cuda_accumulate_any(void *context, void *acc, fsdpc_dtype acc_type, const void *src,
                          fsdpc_dtype src_type, int64_t n, double scale)
{
    return fsdpc_cuda_reduce_any(context, acc, acc_type, &src, 1, src_type, n, scale, true);
}

int
fsdpc_cuda_refresh_any(void *context, void *acc, fsdpc_dtype acc_type, const void *grad,
                       fsdpc_dtype grad_type, int64_t n)
{
    const struct fsdpc_cuda *cuda = context;
    const fsdpc_cuda_refresh_params params = {
        .acc = acc, .grad = grad, .n = n, .acc_type = (int)acc_type, .grad_type = (int)grad_type};
    FSDPC_TRY(fsdpc_cuda_check_aligned("refresh", acc, acc_type));
    FSDPC_TRY(fsdpc_cuda_check_aligned("refresh", grad, grad_type));
    return fsdpc_cuda_launch(cuda, FSDPC_K_fsdpc_cuda_refresh, blocks_for(cuda, n), &params);
}

/* --- norms ----------------------------------------------------------------------------------------- */

_Static_assert(sizeof(fsdpc_cuda_norm_value) == FSDPC_NORM_PART_BYTES, "as in device.h");

int
fsdpc_cuda_norm_into(void *context, const fsdpc_stretch *list, int count, double p, void *parts)
{
    fsdpc_cuda_norm_value *next = parts;
    for (int done = 0; done < count; done += FSDPC_CUDA_SPANS) {
        int64_t blocks = 0;
        fsdpc_cuda_norm_params params = {
            .partials = next, .p = p, .count = spans_at_once(count - done)};
        for (int i = 0; i < params.count; i++) {
            const fsdpc_stretch *one = &list[done + i];
            FSDPC_TRY(add_span(&params.span[i], one, fsdpc_cuda_norm_blocks(one->n), &blocks));
        }
        FSDPC_TRY(fsdpc_cuda_launch(context, FSDPC_K_fsdpc_cuda_norm, blocks, &params));
        next += blocks;
    }
    return FSDPC_OK;
}

int
fsdpc_cuda_norm_total(void *context, const void *parts, int64_t count, bool add, void *total)
{
    const fsdpc_cuda_norm_sum_params params = {
        .partials = parts, .out = total, .count = count, .add = add};
    return fsdpc_cuda_launch(context, FSDPC_K_fsdpc_cuda_norm_sum, 1, &params);
}

int
fsdpc_cuda_clip_factor(void *context, const void *total, double p, double max_norm, double *out)
{
    const fsdpc_cuda_clip_params params = {.total = total,
                                           .norm = out,
                                           .factor = out + 1,
                                           .p = p,
                                           .max_norm = max_norm,
                                           .epsilon = 1e-6};
    return fsdpc_cuda_launch(context, FSDPC_K_fsdpc_cuda_clip, 1, &params);
}

static int
norm_to_host(struct fsdpc_cuda *cuda, const void *src, fsdpc_dtype type, int64_t n, double p,
             fsdpc_norm *out)
{
    int status = FSDPC_OK;
    fsdpc_event *done = NULL;
    fsdpc_cuda_norm_value *parts = cuda->norm_parts, *total = parts + FSDPC_CUDA_NORM_BLOCKS;
    FSDPC_TRY(fsdpc_cuda_event_new(cuda, &done));
    const fsdpc_stretch all = {(void *)(uintptr_t)src, n, type};
    FSDPC_GOTO(fsdpc_cuda_norm_into(cuda, &all, 1, p, parts), end);
    FSDPC_GOTO(fsdpc_cuda_norm_total(cuda, parts, fsdpc_cuda_norm_blocks(n), false, total), end);
    FSDPC_GOTO(fsdpc_cuda_copy_out(cuda, cuda->norm_host, total, sizeof *total), end);
    FSDPC_GOTO(fsdpc_cuda_record(cuda, done), end);
    FSDPC_GOTO(fsdpc_cuda_finish(cuda, done, fsdpc_timeout(), "a norm"), end);
    const fsdpc_cuda_norm_value *value = cuda->norm_host;
    *out = (fsdpc_norm){.sum = value->sum, .max = value->max, .nonfinite = value->nonfinite != 0};
end:
    fsdpc_cuda_event_free(cuda, done);
    return status;
}

static int
norm_of(struct fsdpc_cuda *cuda, const void *src, fsdpc_dtype type, int64_t n, double p,
        fsdpc_norm *out)
{
    pthread_mutex_lock(&cuda->norm_lock);
    const int status = norm_to_host(cuda, src, type, n, p, out);
    pthread_mutex_unlock(&cuda->norm_lock);
    return status;
}

int
fsdpc_cuda_norm2(void *context, const void *src, fsdpc_dtype type, int64_t n, fsdpc_norm *out)
{
    return norm_of(context, src, type, n, 2, out);
}

int
fsdpc_cuda_norm_p(void *context, const void *src, fsdpc_dtype type, int64_t n, double p,
                  double *out)
{
    fsdpc_norm norm = {0};
    FSDPC_TRY(norm_of(context, src, type, n, p, &norm));
    *out = norm.sum;
    return FSDPC_OK;
}
