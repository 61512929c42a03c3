/* The CUDA device: one GPU in its primary context. See device.h, device_cuda_impl.h.
 *
 * Everything that a step needs is made here or when a unit is set up: the context, the loaded
 * kernels, memory. A step then only records events, waits for events on streams, launches kernels and
 * copies. In a step the host waits for the GPU only in fsdpc_device_finish, which has a deadline.
 */
#include "device/device_cuda_impl.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

enum { MAX_GPUS = 64, ALIGN_BYTES = 128 };

static const char *
kernels_name(void *context)
{
    return ((struct fsdpc_cuda *)context)->title;
}

static int64_t
norm_parts(int64_t n)
{
    return fsdpc_cuda_norm_blocks(n);
}

static int
drain(void *context, const char *what)
{
    return fsdpc_cuda_sync_all(context, what);
}

static const fsdpc_device_i cuda_table = {
    .api_version = FSDPC_DEVICE_API_VERSION,
    .name = "cuda",
    .kernels_name = kernels_name,
    .alloc = fsdpc_cuda_alloc,
    .free = fsdpc_cuda_free,
    .cast = fsdpc_cuda_cast_any,
    .accumulate = fsdpc_cuda_accumulate_any,
    .reduce = fsdpc_cuda_reduce_any,
    .refresh = fsdpc_cuda_refresh_any,
    .norm2 = fsdpc_cuda_norm2,
    .norm_p = fsdpc_cuda_norm_p,
    .pack = fsdpc_cuda_pack_tensor,
    .poison = fsdpc_cuda_poison,
    .zero = fsdpc_cuda_zero,
    .stream_new = fsdpc_cuda_stream_new,
    .stream_free = fsdpc_cuda_stream_free,
    .use = fsdpc_cuda_use,
    .current = fsdpc_cuda_current_stream,
    .capture = fsdpc_cuda_capture,
    .event_new = fsdpc_cuda_event_new,
    .event_free = fsdpc_cuda_event_free,
    .record = fsdpc_cuda_record,
    .wait = fsdpc_cuda_wait,
    .poll = fsdpc_cuda_poll,
    .finish = fsdpc_cuda_finish,
    .waits = fsdpc_cuda_waits,
    .free_bytes = fsdpc_cuda_free_bytes,
    .drain = drain,
    .host_alloc = fsdpc_cuda_host_alloc,
    .host_free = fsdpc_cuda_host_free,
    .copy_in = fsdpc_cuda_copy_in,
    .copy_out = fsdpc_cuda_copy_out,
    .copy = fsdpc_cuda_copy,
    .grain = fsdpc_cuda_grain,
    .reserve = fsdpc_cuda_reserve,
    .unreserve = fsdpc_cuda_unreserve,
    .piece_new = fsdpc_cuda_piece_new,
    .piece_free = fsdpc_cuda_piece_free,
    .show = fsdpc_cuda_show,
    .hide = fsdpc_cuda_hide,
    .plan_new = fsdpc_cuda_plan_new,
    .plan_free = fsdpc_cuda_plan_free,
    .pack_onto = fsdpc_cuda_pack_onto,
    .norm_parts = norm_parts,
    .norm_into = fsdpc_cuda_norm_into,
    .norm_total = fsdpc_cuda_norm_total,
    .clip_factor = fsdpc_cuda_clip_factor,
    .scale_by = fsdpc_cuda_scale_by,
    .step = fsdpc_cuda_step_all,
    .activation = fsdpc_cuda_activation,
    .code = fsdpc_cuda_code,
    .sum_landed = fsdpc_cuda_sum_landed_all,
};

/* --- making one --------------------------------------------------------------------------------- */

static int
describe(struct fsdpc_cuda *cuda)
{
    char name[64] = "";
    int major = 0, minor = 0;
    FSDPC_CU(cuda, device_get_name(name, sizeof name, cuda->device), "the GPU's name");
    FSDPC_CU(cuda, device_get_attribute(&major, FSDPC_CU_ATTRIBUTE_CAPABILITY_MAJOR, cuda->device),
             "the GPU's capability");
    FSDPC_CU(cuda, device_get_attribute(&minor, FSDPC_CU_ATTRIBUTE_CAPABILITY_MINOR, cuda->device),
             "the GPU's capability");
    FSDPC_CU(cuda,
             device_get_attribute(&cuda->multiprocessors, FSDPC_CU_ATTRIBUTE_MULTIPROCESSORS,
                                  cuda->device),
             "the GPU's size");
    snprintf(cuda->title, sizeof cuda->title, "sm_%d%d, %s", major, minor, name);
    if (major < 8) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "%s: fsdpc's kernels need compute capability 8.0 or newer", cuda->title);
    }
    return FSDPC_OK;
}

static int
make_norm_memory(struct fsdpc_cuda *cuda)
{
    const size_t bytes = (FSDPC_CUDA_NORM_BLOCKS + 1) * sizeof(fsdpc_cuda_norm_value);
    FSDPC_TRY(fsdpc_cuda_alloc(cuda, bytes, &cuda->norm_parts));
    return fsdpc_cuda_host_alloc(cuda, sizeof(fsdpc_cuda_norm_value), &cuda->norm_host);
}

static int
open_context(struct fsdpc_cuda *cuda)
{
    int least;
    FSDPC_CU(cuda, primary_retain(&cuda->context, cuda->device), "the context of GPU %d",
             cuda->device);
    FSDPC_TRY(fsdpc_cuda_enter(cuda));
    FSDPC_CU(cuda, ctx_stream_priorities(&least, &cuda->urgent), "the priorities of streams");
    return FSDPC_OK;
}

static void
close_device(struct fsdpc_cuda *cuda)
{
    if (cuda->norm_host) {
        fsdpc_cuda_host_free(cuda, cuda->norm_host);
    }
    if (cuda->norm_parts) {
        fsdpc_cuda_free(cuda, cuda->norm_parts,
                        (FSDPC_CUDA_NORM_BLOCKS + 1) * sizeof(fsdpc_cuda_norm_value));
    }
    fsdpc_cuda_kernels_fini(cuda);
    fsdpc_cuda_drop_streams(cuda);
    if (cuda->context) {
        (void)cuda->driver->ctx_set_current(NULL);
        (void)cuda->driver->primary_release(cuda->device);
    }
    pthread_mutex_destroy(&cuda->lock);
    pthread_mutex_destroy(&cuda->norm_lock);
    fsdpc_mem_free(cuda);
}

static int
open_device(int ordinal, struct fsdpc_cuda **out)
{
    int status = FSDPC_OK;
    const fsdpc_cuda_driver *driver;
    FSDPC_TRY(fsdpc_cuda_driver_get(&driver));
    if (ordinal < 0 || ordinal >= driver->device_count || ordinal >= MAX_GPUS) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "no CUDA device %d here: the driver reports %d devices (is "
                           "CUDA_VISIBLE_DEVICES set?)",
                           ordinal, driver->device_count);
    }
    struct fsdpc_cuda *cuda = fsdpc_mem_calloc(1, sizeof *cuda);
    if (!cuda) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a CUDA device");
    }
    cuda->driver = driver;
    pthread_mutex_init(&cuda->lock, NULL);
    pthread_mutex_init(&cuda->norm_lock, NULL);
    FSDPC_GOTO(
        fsdpc_cuda_check(driver, driver->device_get(&cuda->device, ordinal), "GPU %d", ordinal),
        fail);
    FSDPC_GOTO(describe(cuda), fail);
    FSDPC_GOTO(open_context(cuda), fail);
    FSDPC_GOTO(fsdpc_cuda_kernels_init(cuda), fail);
    FSDPC_GOTO(fsdpc_cuda_memory_init(cuda), fail);
    FSDPC_GOTO(make_norm_memory(cuda), fail);
    *out = cuda;
    return FSDPC_OK;
fail:
    close_device(cuda);
    return status;
}

/* If the first call fails, it undoes its work, and the next call tries again. */
int
fsdpc_device_cuda(int ordinal, fsdpc_device **out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static fsdpc_device devices[MAX_GPUS];
    int status = FSDPC_OK;
    struct fsdpc_cuda *cuda = NULL;
    *out = NULL;
    pthread_mutex_lock(&lock);
    if (ordinal < 0 || ordinal >= MAX_GPUS || !devices[ordinal].context) {
        FSDPC_GOTO(open_device(ordinal, &cuda), done);
        devices[ordinal] = (fsdpc_device){.i = &cuda_table,
                                          .context = cuda,
                                          .caps = {.asynchronous = true,
                                                   .stand_in = cuda->driver->stand_in,
                                                   .ordinal = ordinal,
                                                   .virtual_memory = cuda->virtual_memory,
                                                   .align_bytes = ALIGN_BYTES,
                                                   .note = cuda->note[0] ? cuda->note : NULL}};
    }
    *out = &devices[ordinal];
done:
    pthread_mutex_unlock(&lock);
    return status;
}
