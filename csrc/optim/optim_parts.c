/* Chooses the loops, cuts tensors into parts, runs the parts on threads, and sums squares. */
#include <pthread.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "kernels.h"
#include "optim/optim_impl.h"

int
fsdpc_optim_select(const fsdpc_optim_loops **out)
{
    const fsdpc_kernels *kernels;
    *out = NULL;
    FSDPC_TRY(fsdpc_kernels_select(&kernels));
    if (strcmp(kernels->name, "avx512") == 0) {
        *out = fsdpc_optim_loops_avx512();
    } else if (strcmp(kernels->name, "avx2") == 0) {
        *out = fsdpc_optim_loops_avx2();
    }
    if (*out == NULL) {
        *out = fsdpc_optim_loops_plain();
    }
    return FSDPC_OK;
}

/* --- threads ----------------------------------------------------------------------------------- */

static fsdpc_pool *pool;
static int pool_status = FSDPC_OK;

static void
make_pool(void)
{
    pool_status = fsdpc_pool_new(&pool);
}

/* Runs a task on one thread pool of the process. The pool is never freed, like the CPU device's pool. */
static int
run(int threads, int64_t n, int64_t grain, fsdpc_pool_task *task, void *context)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (threads > 1) {
        pthread_once(&once, make_pool);
        if (pool_status != FSDPC_OK) {
            return fsdpc_error(pool_status, "cannot make a pool of threads for optimizer steps");
        }
        fsdpc_pool_run(pool, threads, n, grain, task, context);
    } else if (n > 0) {
        task(context, 0, n);
    }
    return FSDPC_OK;
}

enum { SHARES = 8 }; /* shares of work per thread: fast threads take shares of delayed ones */

static int64_t
grain_for(int64_t parts, int threads)
{
    const int64_t grain = parts / ((int64_t)threads * SHARES);
    return grain > 0 ? grain : 1;
}

/* --- parts ------------------------------------------------------------------------------------- */

struct loop {
    const fsdpc_optim_tensor *tensors;
    int count;
    int64_t *starts; /* for each tensor, the index of its first part; then the count of all parts */
    fsdpc_optim_part *part;
    void *context;
};

int64_t
fsdpc_optim_parts_of(const fsdpc_optim_tensor *tensor)
{
    if (tensor->numel == 0) {
        return 0;
    }
    const int64_t last = tensor->first + tensor->numel - 1;
    return last / FSDPC_OPTIM_PART - tensor->first / FSDPC_OPTIM_PART + 1;
}

static int
tensor_of(const struct loop *loop, int64_t number)
{
    int low = 0, high = loop->count;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (loop->starts[middle] <= number) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static void
do_parts(void *context, int64_t begin, int64_t end)
{
    const struct loop *loop = context;
    int index = tensor_of(loop, begin);
    for (int64_t number = begin; number < end; number++) {
        while (loop->starts[index + 1] <= number) {
            index++;
        }
        const fsdpc_optim_tensor *tensor = &loop->tensors[index];
        const int64_t slot = tensor->first / FSDPC_OPTIM_PART + number - loop->starts[index];
        const int64_t from = slot * FSDPC_OPTIM_PART - tensor->first;
        const int64_t to = from + FSDPC_OPTIM_PART;
        loop->part(loop->context, index, from > 0 ? from : 0,
                   to < tensor->numel ? to : tensor->numel);
    }
}

int
fsdpc_optim_for_parts(const fsdpc_optim_tensor *tensors, int count, int threads,
                      fsdpc_optim_part *part, void *context)
{
    struct loop loop = {tensors, count, NULL, part, context};
    loop.starts = fsdpc_mem_calloc((size_t)count + 1, sizeof *loop.starts);
    if (loop.starts == NULL) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the parts of %d tensors", count);
    }
    for (int i = 0; i < count; i++) {
        loop.starts[i + 1] = loop.starts[i] + fsdpc_optim_parts_of(&tensors[i]);
    }
    const int64_t parts = loop.starts[count];
    const int status = run(threads, parts, grain_for(parts, threads), do_parts, &loop);
    fsdpc_mem_free(loop.starts);
    return status;
}

/* --- sum of squares ---------------------------------------------------------------------------- */

struct squares {
    const fsdpc_kernels *kernels;
    const fsdpc_optim_tensor *tensors;
    const int64_t *starts;
    double *sums; /* one per part */
};

static void
square_part(void *context, int index, int64_t begin, int64_t end)
{
    const struct squares *squares = context;
    const fsdpc_optim_tensor *tensor = &squares->tensors[index];
    const char *data = tensor->grad;
    const size_t offset = (size_t)begin * fsdpc_dtype_bytes(tensor->grad_type);
    const int64_t number = squares->starts[index] + begin / FSDPC_OPTIM_PART;
    squares->sums[number] =
        squares->kernels->norm2(data + offset, tensor->grad_type, end - begin).sum;
}

int
fsdpc_optim_sum_squares(void *const *data, const fsdpc_dtype *types, const int64_t *numels,
                        int count, int threads, double *out)
{
    int status = FSDPC_OK;
    int64_t parts = 0;
    struct squares squares = {NULL, NULL, NULL, NULL};
    fsdpc_optim_tensor *tensors = fsdpc_mem_calloc((size_t)count, sizeof *tensors);
    int64_t *starts = fsdpc_mem_calloc((size_t)count, sizeof *starts);
    if (tensors == NULL || starts == NULL) {
        status = fsdpc_error(FSDPC_E_NOMEM, "no memory for the norm of %d tensors", count);
        goto done;
    }
    for (int i = 0; i < count; i++) {
        tensors[i] =
            (fsdpc_optim_tensor){.grad = data[i], .grad_type = types[i], .numel = numels[i]};
        starts[i] = parts;
        parts += fsdpc_optim_parts_of(&tensors[i]);
    }
    squares.tensors = tensors;
    squares.starts = starts;
    squares.sums = fsdpc_mem_calloc((size_t)parts, sizeof *squares.sums);
    if (squares.sums == NULL) {
        status = fsdpc_error(FSDPC_E_NOMEM, "no memory for the norm of %d tensors", count);
        goto done;
    }
    FSDPC_GOTO(fsdpc_kernels_select(&squares.kernels), done);
    FSDPC_GOTO(fsdpc_optim_for_parts(tensors, count, threads, square_part, &squares), done);
    *out = 0;
    for (int64_t i = 0; i < parts; i++) {
        *out += squares.sums[i];
    }
done:
    fsdpc_mem_free(squares.sums);
    fsdpc_mem_free(starts);
    fsdpc_mem_free(tensors);
    return status;
}

struct blocks {
    const fsdpc_kernels *kernels;
    const char *data;
    fsdpc_dtype type;
    int64_t first, n, block;
    double *out;
};

static void
square_blocks(void *context, int64_t begin, int64_t end)
{
    const struct blocks *b = context;
    for (int64_t i = begin; i < end; i++) {
        const int64_t start = (b->first / b->block + i) * b->block - b->first;
        const int64_t from = start > 0 ? start : 0;
        const int64_t to = start + b->block < b->n ? start + b->block : b->n;
        const size_t offset = (size_t)from * fsdpc_dtype_bytes(b->type);
        b->out[i] = b->kernels->norm2(b->data + offset, b->type, to - from).sum;
    }
}

int
fsdpc_optim_block_squares(void *data, fsdpc_dtype type, int64_t first, int64_t n, int64_t block,
                          int threads, double *out)
{
    struct blocks blocks = {NULL, data, type, first, n, block, out};
    FSDPC_TRY(fsdpc_kernels_select(&blocks.kernels));
    if (n == 0) {
        return FSDPC_OK;
    }
    const int64_t count = (first + n - 1) / block - first / block + 1;
    return run(threads, count, grain_for(count, threads), square_blocks, &blocks);
}
