/* Types and functions that the files of the CUDA device share. */
#ifndef FSDPC_DEVICE_CUDA_IMPL_H
#define FSDPC_DEVICE_CUDA_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/cuda_driver.h"
#include "cuda_params.h"
#include "device/device_impl.h"
#include "base/status.h"

#define FSDPC_CUDA_KERNEL_ID(kernel, params) FSDPC_K_##kernel,
enum fsdpc_cuda_kernel { FSDPC_CUDA_KERNELS(FSDPC_CUDA_KERNEL_ID) FSDPC_CUDA_KERNEL_COUNT };
#undef FSDPC_CUDA_KERNEL_ID

struct fsdpc_event {
    fsdpc_cu_event handle;
    bool recorded;
    fsdpc_event *next; /* in the pool */
};

struct fsdpc_cuda_stream; /* a stream that the device made */
struct
    fsdpc_cuda_stage; /* pinned memory and its twin on the device, for lists that do not fit a launch */

struct fsdpc_cuda {
    const fsdpc_cuda_driver *driver;
    fsdpc_cu_device device;
    fsdpc_cu_context context; /* the GPU's primary context, retained */
    int multiprocessors;
    int urgent; /* highest priority of a stream */
    char title[96], note[160];

    fsdpc_cu_library library;
    fsdpc_cu_function functions[FSDPC_CUDA_KERNEL_COUNT];

    bool virtual_memory;
    size_t granule;
    fsdpc_cu_memory memory; /* properties of the physical memory that is requested */

    pthread_mutex_t lock; /* guards the lists below */
    fsdpc_event *events;  /* the pool: events that are not in use */
    struct fsdpc_cuda_stream *streams;
    struct fsdpc_cuda_stage *stages;

    _Atomic int64_t waits; /* how often the host has waited */

    pthread_mutex_t norm_lock; /* guards the memory below, which one norm at a time uses */
    void *norm_parts;          /* device memory: the parts, then the total */
    void *norm_host;           /* pinned */
};

/* FSDPC_TRY for a call of the driver. The text after the call names the call's purpose. */
#define FSDPC_CU(cuda, call, ...) \
    FSDPC_TRY(fsdpc_cuda_check((cuda)->driver, (cuda)->driver->call, __VA_ARGS__))

static inline fsdpc_cu_ptr
fsdpc_cuda_address(const void *pointer)
{
    return (fsdpc_cu_ptr)(uintptr_t)pointer;
}

/* device_cuda_context.c */

/* Makes the device's context current on this thread, because threads of autograd may have no context. */
int fsdpc_cuda_enter(const struct fsdpc_cuda *cuda);

/* device_cuda_stream.c */

fsdpc_cu_stream fsdpc_cuda_current(const struct fsdpc_cuda *cuda);
int fsdpc_cuda_stream_new(void *context, bool urgent, fsdpc_stream **out);
void fsdpc_cuda_stream_free(void *context, fsdpc_stream *stream);
fsdpc_stream *fsdpc_cuda_use(void *context, fsdpc_stream *stream);
fsdpc_stream *fsdpc_cuda_current_stream(void *context);
int fsdpc_cuda_capture(void *context, uint64_t *id);
/* Sets which calls this thread may make while any stream is captured, and returns the previous setting. */
unsigned fsdpc_cuda_exchange_mode(const struct fsdpc_cuda *cuda, unsigned mode);
int fsdpc_cuda_event_new(void *context, fsdpc_event **out);
void fsdpc_cuda_event_free(void *context, fsdpc_event *event);
int fsdpc_cuda_record(void *context, fsdpc_event *event);
int fsdpc_cuda_wait(void *context, fsdpc_event *event);
int fsdpc_cuda_poll(void *context, fsdpc_event *event, bool *done);
int fsdpc_cuda_finish(void *context, fsdpc_event *event, double timeout, const char *what);
int64_t fsdpc_cuda_waits(void *context);
int fsdpc_cuda_free_bytes(void *context, size_t *free_bytes, size_t *total);
/* Waits on the host for all work queued on the current stream. Called when device memory is allocated or a
 * pack plan is made. */
int fsdpc_cuda_sync(struct fsdpc_cuda *cuda, const char *what);
/* Waits like fsdpc_cuda_sync, for the current stream, the default stream and all streams that the device
 * made. Called before memory is freed or unmapped. */
int fsdpc_cuda_sync_all(struct fsdpc_cuda *cuda, const char *what);
void fsdpc_cuda_drop_streams(struct fsdpc_cuda *cuda);

/* device_cuda_memory.c */

/* Finds out whether memory can be mapped at reserved addresses, and with which types of handles. */
int fsdpc_cuda_memory_init(struct fsdpc_cuda *cuda);
int fsdpc_cuda_alloc(void *context, size_t bytes, void **out);
void fsdpc_cuda_free(void *context, void *block, size_t bytes);
int fsdpc_cuda_host_alloc(void *context, size_t bytes, void **out);
void fsdpc_cuda_host_free(void *context, void *block);
int fsdpc_cuda_copy_in(void *context, void *dst, const void *host, size_t bytes);
int fsdpc_cuda_copy_out(void *context, void *host, const void *src, size_t bytes);
int fsdpc_cuda_copy(void *context, void *dst, const void *src, size_t bytes);
int fsdpc_cuda_zero(void *context, void *dst, size_t bytes);
int fsdpc_cuda_poison(void *context, void *dst, fsdpc_dtype type, int64_t n);

/* Maps physical memory at an address. The mapping keeps the memory alive after mem_release. */
int fsdpc_cuda_map(const struct fsdpc_cuda *cuda, fsdpc_cu_ptr address, size_t bytes,
                   fsdpc_cu_handle physical);

/* device_cuda_slots.c */

size_t fsdpc_cuda_grain(void *context);
int fsdpc_cuda_reserve(void *context, size_t bytes, void **out);
void fsdpc_cuda_unreserve(void *context, void *address, size_t bytes);
int fsdpc_cuda_piece_new(void *context, size_t bytes, fsdpc_piece **out);
void fsdpc_cuda_piece_free(void *context, fsdpc_piece *piece);
int fsdpc_cuda_show(void *context, void **address, fsdpc_piece *piece);
int fsdpc_cuda_hide(void *context, void *address, fsdpc_piece *piece);

/* device_cuda_kernels.c */

/* Loads the image and all its functions, so that no launch has to load one. */
int fsdpc_cuda_kernels_init(struct fsdpc_cuda *cuda);
void fsdpc_cuda_kernels_fini(struct fsdpc_cuda *cuda);
int fsdpc_cuda_launch(const struct fsdpc_cuda *cuda, enum fsdpc_cuda_kernel kernel, int64_t blocks,
                      const void *params);
/* Fails with FSDPC_E_INVAL if the address is not a multiple of the type's size, as a GPU requires. */
int fsdpc_cuda_check_aligned(const char *what, const void *pointer, fsdpc_dtype type);
int fsdpc_cuda_cast_any(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                        fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_cuda_accumulate_any(void *context, void *acc, fsdpc_dtype acc_type, const void *src,
                              fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_cuda_reduce_any(void *context, void *acc, fsdpc_dtype acc_type, const void *const *src,
                          int src_count, fsdpc_dtype src_type, int64_t n, double scale, bool add);
int fsdpc_cuda_refresh_any(void *context, void *acc, fsdpc_dtype acc_type, const void *grad,
                           fsdpc_dtype grad_type, int64_t n);
int fsdpc_cuda_norm2(void *context, const void *src, fsdpc_dtype type, int64_t n, fsdpc_norm *out);
int fsdpc_cuda_norm_p(void *context, const void *src, fsdpc_dtype type, int64_t n, double p,
                      double *out);
int fsdpc_cuda_norm_into(void *context, const fsdpc_stretch *list, int count, double p,
                         void *parts);
int fsdpc_cuda_norm_total(void *context, const void *parts, int64_t count, bool add, void *total);
int fsdpc_cuda_clip_factor(void *context, const void *total, double p, double max_norm,
                           double *out);
int fsdpc_cuda_scale_by(void *context, const fsdpc_stretch *list, int count, const double *factor);

/* device_cuda_steps.c */

int fsdpc_cuda_step_all(void *context, const fsdpc_steps *steps);
int fsdpc_cuda_activation(void *context, bool pack, void *values, fsdpc_dtype type, int64_t n,
                          int8_t *codes, float *scales);
int fsdpc_cuda_code(void *context, bool encode, const fsdpc_coding *list, int count);
int fsdpc_cuda_sum_landed_all(void *context, const fsdpc_landed *list, int count, int senders,
                              int own, double scale, bool add);

/* device_cuda_pack.c */

int fsdpc_cuda_pack_tensor(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                           fsdpc_dtype src_type, int ndim, const int64_t *shape,
                           const int64_t *strides, double scale);
int fsdpc_cuda_plan_new(void *context, fsdpc_pack_plan *plan);
void fsdpc_cuda_plan_free(void *context, fsdpc_pack_plan *plan);
int fsdpc_cuda_pack_onto(void *context, const fsdpc_pack_plan *plan, void *buffer, const void *base,
                         const fsdpc_pack_source *sources, double scale);

#endif
