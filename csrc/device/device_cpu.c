/* The CPU device: mapped memory, and the kernels split over the threads of a pool.
 *
 * A big buffer is cut into parts that the threads take one after the other; each part is one call
 * of the kernel. A small buffer is a single call on the calling thread. Norms are always cut in the same way,
 * whatever the number of threads, and their parts are added in order, so that the result does not
 * depend on that number.
 */
#include "device/device_impl.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"
#include "base/pool.h"
#include "base/status.h"

enum {
    PAGE_BYTES = 4096,
    HUGE_BYTES = 2 << 20,
    CACHE_LINE_BYTES = 64,
    PART_BYTES = 256 << 10, /* the least bytes of a part: less is not worth waking a thread */
    PART_ITEMS = 1024,      /* parts start at multiples of this, so never inside a cache line */
    PARTS_PER_THREAD = 4,   /* so that a thread that is preempted delays the loop less */
    NORM_PARTS = 256,
    NORM_PART_ITEMS = 32 << 10,
    SOURCES_MAX = 256, /* a reduce of more sources than this stays on one thread */
};

struct cpu {
    const fsdpc_kernels *kernels;
    fsdpc_pool *pool;
    _Atomic int threads;
};

/* --- memory -------------------------------------------------------------------------------- */

/* Maps more than needed and unmaps the parts before and after the aligned block. */
static int
map_aligned(size_t bytes, size_t align, void **out)
{
    const size_t reserved = bytes + align - PAGE_BYTES;
    char *start = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        return fsdpc_error_errno(errno, "allocation of %zu bytes of host memory", bytes);
    }
    char *block = (char *)fsdpc_round_up((uintptr_t)start, align);
    const size_t before = (size_t)(block - start);
    const size_t after = reserved - before - bytes;
    if (before) {
        munmap(start, before);
    }
    if (after) {
        munmap(block + bytes, after);
    }
    *out = block;
    return FSDPC_OK;
}

static size_t
mapped_bytes(size_t bytes)
{
    return fsdpc_round_up(bytes, bytes >= HUGE_BYTES ? HUGE_BYTES : PAGE_BYTES);
}

static int
cpu_alloc(void *context, size_t bytes, void **out)
{
    (void)context;
    if (bytes > PTRDIFF_MAX - 2 * (size_t)HUGE_BYTES) {
        return fsdpc_error(FSDPC_E_NOMEM, "allocation of %zu bytes of host memory", bytes);
    }
    if (bytes < HUGE_BYTES) {
        return map_aligned(mapped_bytes(bytes), PAGE_BYTES, out);
    }
    FSDPC_TRY(map_aligned(mapped_bytes(bytes), HUGE_BYTES, out));
    (void)madvise(*out, mapped_bytes(bytes),
                  MADV_HUGEPAGE); /* best effort: small pages work as well */
    return FSDPC_OK;
}

static void
cpu_free(void *context, void *block, size_t bytes)
{
    (void)context;
    munmap(block, mapped_bytes(bytes));
}

/* Gives up private pages. They read as zeros, and get memory again when they are written. */
static int
cpu_discard(void *context, void *block, size_t bytes)
{
    (void)context;
    if (madvise(block, mapped_bytes(bytes), MADV_DONTNEED) != 0) {
        return fsdpc_error_errno(errno, "giving up %zu bytes of host memory", bytes);
    }
    return FSDPC_OK;
}

/* --- parallel loops ------------------------------------------------------------------------ */

/* One kernel call. Each task below reads the fields that its kernel needs. */
struct call {
    const fsdpc_kernels *kernels;
    char *dst;
    const char *src;
    const void *const *sources;
    int source_count;
    fsdpc_dtype dst_type, src_type;
    double scale;
    bool add;
};

/* Returns the size of a part, if n items are cut into at most `parts` parts of at least `least` items. */
static int64_t
part_items(int64_t n, int64_t parts, int64_t least)
{
    const int64_t share = n / parts + 1;
    const int64_t items = share > least ? share : least;
    return (items + PART_ITEMS - 1) / PART_ITEMS * PART_ITEMS;
}

static int
run(struct cpu *cpu, fsdpc_pool_task *task, struct call *call, int64_t n, size_t item_bytes)
{
    const int threads = atomic_load(&cpu->threads);
    const int64_t grain =
        part_items(n, threads * PARTS_PER_THREAD, PART_BYTES / (int64_t)item_bytes);
    call->kernels = cpu->kernels;
    fsdpc_pool_run(cpu->pool, threads, n, grain, task, call);
    return FSDPC_OK;
}

static size_t
pair_bytes(fsdpc_dtype a, fsdpc_dtype b)
{
    return fsdpc_dtype_bytes(a) + fsdpc_dtype_bytes(b);
}

static char *
dst_at(const struct call *call, int64_t i)
{
    return call->dst + (size_t)i * fsdpc_dtype_bytes(call->dst_type);
}

static const char *
src_at(const struct call *call, int64_t i)
{
    return call->src + (size_t)i * fsdpc_dtype_bytes(call->src_type);
}

static void
cast_task(void *context, int64_t begin, int64_t end)
{
    const struct call *call = context;
    call->kernels->cast(dst_at(call, begin), call->dst_type, src_at(call, begin), call->src_type,
                        end - begin, call->scale);
}

static int
cpu_cast(void *context, void *dst, fsdpc_dtype dst_type, const void *src, fsdpc_dtype src_type,
         int64_t n, double scale)
{
    struct call call = {
        .dst = dst, .src = src, .dst_type = dst_type, .src_type = src_type, .scale = scale};
    return run(context, cast_task, &call, n, pair_bytes(dst_type, src_type));
}

static void
accumulate_task(void *context, int64_t begin, int64_t end)
{
    const struct call *call = context;
    call->kernels->accumulate(dst_at(call, begin), call->dst_type, src_at(call, begin),
                              call->src_type, end - begin, call->scale);
}

static int
cpu_accumulate(void *context, void *acc, fsdpc_dtype acc_type, const void *src,
               fsdpc_dtype src_type, int64_t n, double scale)
{
    struct call call = {
        .dst = acc, .src = src, .dst_type = acc_type, .src_type = src_type, .scale = scale};
    return run(context, accumulate_task, &call, n, pair_bytes(acc_type, src_type));
}

static void
reduce_task(void *context, int64_t begin, int64_t end)
{
    const struct call *call = context;
    const void *sources[SOURCES_MAX];
    const void *const *list = call->sources;
    if (begin > 0) {
        const size_t skip = (size_t)begin * fsdpc_dtype_bytes(call->src_type);
        for (int s = 0; s < call->source_count; s++) {
            sources[s] = list[s] ? (const char *)list[s] + skip : NULL;
        }
        list = sources;
    }
    call->kernels->reduce(dst_at(call, begin), call->dst_type, list, call->source_count,
                          call->src_type, end - begin, call->scale, call->add);
}

static int
cpu_reduce(void *context, void *acc, fsdpc_dtype acc_type, const void *const *src, int src_count,
           fsdpc_dtype src_type, int64_t n, double scale, bool add)
{
    struct call call = {.dst = acc,
                        .sources = src,
                        .source_count = src_count,
                        .dst_type = acc_type,
                        .src_type = src_type,
                        .scale = scale,
                        .add = add};
    if (src_count > SOURCES_MAX) {
        call.kernels = ((struct cpu *)context)->kernels;
        reduce_task(&call, 0, n);
        return FSDPC_OK;
    }
    const size_t src_bytes = fsdpc_dtype_bytes(src_type) * (size_t)src_count;
    return run(context, reduce_task, &call, n, src_bytes + fsdpc_dtype_bytes(acc_type));
}

static void
refresh_task(void *context, int64_t begin, int64_t end)
{
    const struct call *call = context;
    fsdpc_kernel_refresh(call->kernels, dst_at(call, begin), call->dst_type, src_at(call, begin),
                         call->src_type, end - begin);
}

static int
cpu_refresh(void *context, void *acc, fsdpc_dtype acc_type, const void *grad, fsdpc_dtype grad_type,
            int64_t n)
{
    struct call call = {.dst = acc, .src = grad, .dst_type = acc_type, .src_type = grad_type};
    return run(context, refresh_task, &call, n, pair_bytes(acc_type, grad_type));
}

static int
cpu_scale(void *context, void *x, fsdpc_dtype type, int64_t n, double factor)
{
    return cpu_cast(context, x, type, x, type, n, factor);
}

/* --- norms --------------------------------------------------------------------------------- */

struct norm_call {
    struct call call;
    int64_t n, part;
    double p;
    fsdpc_norm results[NORM_PARTS];
};

static void
norm_task(void *context, int64_t begin, int64_t end)
{
    struct norm_call *norm = context;
    const struct call *call = &norm->call;
    for (int64_t k = begin; k < end; k++) {
        const int64_t start = k * norm->part;
        const int64_t count = norm->n - start < norm->part ? norm->n - start : norm->part;
        const char *src = src_at(call, start);
        if (norm->p == 2) {
            norm->results[k] = call->kernels->norm2(src, call->src_type, count);
        } else {
            norm->results[k].sum = fsdpc_kernel_norm_p(src, call->src_type, count, norm->p);
        }
    }
}

static double
larger(double a, double b)
{
    return isnan(a) || a >= b ? a : b; /* returns b if b is NaN, as no comparison holds then */
}

static fsdpc_norm
norm_of_parts(struct cpu *cpu, const void *src, fsdpc_dtype type, int64_t n, double p)
{
    struct norm_call norm;
    fsdpc_norm total = {0};
    norm.call = (struct call){.kernels = cpu->kernels, .src = src, .src_type = type};
    norm.part = part_items(n, NORM_PARTS, NORM_PART_ITEMS);
    norm.n = n;
    norm.p = p;
    const int64_t parts = (n + norm.part - 1) / norm.part;
    memset(norm.results, 0, (size_t)parts * sizeof *norm.results);
    fsdpc_pool_run(cpu->pool, atomic_load(&cpu->threads), parts, 1, norm_task, &norm);
    for (int64_t k = 0; k < parts; k++) {
        total.sum += norm.results[k].sum;
        total.max = larger(total.max, norm.results[k].max);
        total.nonfinite |= norm.results[k].nonfinite;
    }
    return total;
}

static int
cpu_norm2(void *context, const void *src, fsdpc_dtype type, int64_t n, fsdpc_norm *out)
{
    *out = norm_of_parts(context, src, type, n, 2);
    return FSDPC_OK;
}

static int
cpu_norm_p(void *context, const void *src, fsdpc_dtype type, int64_t n, double p, double *out)
{
    *out = norm_of_parts(context, src, type, n, p).sum;
    return FSDPC_OK;
}

/* --- the rest ------------------------------------------------------------------------------ */

static int
cpu_pack(void *context, void *dst, fsdpc_dtype dst_type, const void *src, fsdpc_dtype src_type,
         int ndim, const int64_t *shape, const int64_t *strides, double scale)
{
    const struct cpu *cpu = context;
    return fsdpc_kernel_pack_strided(cpu->kernels, dst, dst_type, src, src_type, ndim, shape,
                                     strides, scale);
}

static int
cpu_poison(void *context, void *dst, fsdpc_dtype type, int64_t n)
{
    (void)context;
    fsdpc_kernel_poison(dst, type, n);
    return FSDPC_OK;
}

static int
cpu_zero(void *context, void *dst, size_t bytes)
{
    (void)context;
    memset(dst, 0, bytes);
    return FSDPC_OK;
}

static int
cpu_set_threads(void *context, int threads)
{
    struct cpu *cpu = context;
    atomic_store(&cpu->threads, threads);
    return FSDPC_OK;
}

static int
cpu_threads(void *context)
{
    return atomic_load(&((struct cpu *)context)->threads);
}

static const char *
cpu_kernels_name(void *context)
{
    return ((struct cpu *)context)->kernels->name;
}

static int
threads_from_environment(int *out)
{
    const char *text = getenv("FSDPC_NUM_THREADS");
    char *end = NULL;
    *out = 1;
    if (!text || !*text) {
        return FSDPC_OK;
    }
    const long threads = strtol(text, &end, 10);
    if (*end || threads < 1 || threads > FSDPC_POOL_MAX_THREADS) {
        return fsdpc_error(FSDPC_E_INVAL, "FSDPC_NUM_THREADS=%s: choose 1 to %d", text,
                           FSDPC_POOL_MAX_THREADS);
    }
    *out = (int)threads;
    return FSDPC_OK;
}

static const fsdpc_device_i cpu_table = {
    .api_version = FSDPC_DEVICE_API_VERSION,
    .name = "cpu",
    .set_threads = cpu_set_threads,
    .threads = cpu_threads,
    .kernels_name = cpu_kernels_name,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .discard = cpu_discard,
    .cast = cpu_cast,
    .accumulate = cpu_accumulate,
    .reduce = cpu_reduce,
    .refresh = cpu_refresh,
    .norm2 = cpu_norm2,
    .norm_p = cpu_norm_p,
    .scale = cpu_scale,
    .pack = cpu_pack,
    .poison = cpu_poison,
    .zero = cpu_zero,
};

static struct cpu cpu_context;
static fsdpc_device cpu_device = {
    .i = &cpu_table,
    .context = &cpu_context,
    .caps = {.asynchronous = false,
             .host_memory = true,
             .ordinal = -1,
             .align_bytes = CACHE_LINE_BYTES},
};

static int
set_up(void)
{
    int threads;
    const fsdpc_kernels *kernels;
    FSDPC_TRY(threads_from_environment(&threads));
    FSDPC_TRY(fsdpc_kernels_select(&kernels));
    FSDPC_TRY(fsdpc_pool_new(&cpu_context.pool));
    atomic_store(&cpu_context.threads, threads);
    cpu_context.kernels = kernels;
    return FSDPC_OK;
}

/* If the first call fails, it undoes its work, and the next call tries again. */
int
fsdpc_device_cpu(fsdpc_device **out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int status = FSDPC_OK;
    *out = NULL;
    pthread_mutex_lock(&lock);
    if (!cpu_context.kernels) {
        status = set_up();
    }
    pthread_mutex_unlock(&lock);
    if (status == FSDPC_OK) {
        *out = &cpu_device;
    }
    return status;
}
