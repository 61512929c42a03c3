/* The interface that an implementer of a device fills in. Callers use device.h.
 *
 * device.c checks every argument before it calls an entry: dtypes are known and fit
 * the entry, n > 0, and pointers are not NULL (except sources of reduce, which may
 * be). Entries need not check again. All entries are required unless they are marked
 * (optional). An asynchronous device queues the work in the order of the calls.
 */
#ifndef FSDPC_DEVICE_IMPL_H
#define FSDPC_DEVICE_IMPL_H

#include "device/device.h"

enum { FSDPC_DEVICE_API_VERSION = 2 };

typedef struct fsdpc_device_i {
    int api_version; /* the FSDPC_DEVICE_API_VERSION that the implementer was built with */
    const char *name;

    /* (optional) NULL: the device has no helper threads and accepts only 1 thread. */
    int (*set_threads)(void *context, int threads);
    int (*threads)(void *context);
    const char *(*kernels_name)(void *context);

    /* Allocates a zeroed block; bytes > 0. */
    int (*alloc)(void *context, size_t bytes, void **out);
    void (*free)(void *context, void *block, size_t bytes);
    int (*discard)(void *context, void *block, size_t bytes); /* (optional) default: nothing */

    int (*cast)(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                fsdpc_dtype src_type, int64_t n, double scale);
    int (*accumulate)(void *context, void *acc, fsdpc_dtype acc_type, const void *src,
                      fsdpc_dtype src_type, int64_t n, double scale);
    int (*reduce)(void *context, void *acc, fsdpc_dtype acc_type, const void *const *src,
                  int src_count, fsdpc_dtype src_type, int64_t n, double scale, bool add);
    int (*refresh)(void *context, void *acc, fsdpc_dtype acc_type, const void *grad,
                   fsdpc_dtype grad_type, int64_t n);
    int (*norm2)(void *context, const void *src, fsdpc_dtype type, int64_t n, fsdpc_norm *out);
    int (*norm_p)(void *context, const void *src, fsdpc_dtype type, int64_t n, double p,
                  double *out);
    /* (optional) If this is NULL, device.c calls cast, in place. */
    int (*scale)(void *context, void *x, fsdpc_dtype type, int64_t n, double factor);
    int (*pack)(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                fsdpc_dtype src_type, int ndim, const int64_t *shape, const int64_t *strides,
                double scale);
    int (*poison)(void *context, void *dst, fsdpc_dtype type, int64_t n);
    int (*zero)(void *context, void *dst, size_t bytes);

    /* All entries below are optional: a device with caps.asynchronous has all of them, other devices none. */
    int (*stream_new)(void *context, bool urgent, fsdpc_stream **out);
    void (*stream_free)(void *context, fsdpc_stream *stream);
    fsdpc_stream *(*use)(void *context, fsdpc_stream *stream);
    fsdpc_stream *(*current)(void *context);
    int (*capture)(void *context, uint64_t *id);
    int (*event_new)(void *context, fsdpc_event **out);
    void (*event_free)(void *context, fsdpc_event *event);
    int (*record)(void *context, fsdpc_event *event);
    int (*wait)(void *context, fsdpc_event *event);
    int (*poll)(void *context, fsdpc_event *event, bool *done);
    int (*finish)(void *context, fsdpc_event *event, double timeout, const char *what);
    int64_t (*waits)(void *context); /* counts host waits; NULL: the host never waits */
    int (*free_bytes)(void *context, size_t *free_bytes, size_t *total); /* NULL: unknown */
    /* The host waits for all streams that fsdpc_device_free waits for. */
    int (*drain)(void *context, const char *what);
    int (*host_alloc)(void *context, size_t bytes, void **out);
    void (*host_free)(void *context, void *block);
    int (*copy_in)(void *context, void *dst, const void *host, size_t bytes);
    int (*copy_out)(void *context, void *host, const void *src, size_t bytes);
    int (*copy)(void *context, void *dst, const void *src, size_t bytes);
    size_t (*grain)(void *context);
    int (*reserve)(void *context, size_t bytes, void **out);
    void (*unreserve)(void *context, void *address, size_t bytes);
    int (*piece_new)(void *context, size_t bytes, fsdpc_piece **out);
    void (*piece_free)(void *context, fsdpc_piece *piece);
    int (*show)(void *context, void **address, fsdpc_piece *piece);
    int (*hide)(void *context, void *address, fsdpc_piece *piece);
    int (*plan_new)(void *context, fsdpc_pack_plan *plan);
    void (*plan_free)(void *context, fsdpc_pack_plan *plan);
    int (*pack_onto)(void *context, const fsdpc_pack_plan *plan, void *buffer, const void *base,
                     const fsdpc_pack_source *sources, double scale);
    int64_t (*norm_parts)(int64_t n);
    int (*norm_into)(void *context, const fsdpc_stretch *list, int count, double p, void *parts);
    int (*norm_total)(void *context, const void *parts, int64_t count, bool add, void *total);
    int (*clip_factor)(void *context, const void *total, double p, double max_norm, double *out);
    int (*scale_by)(void *context, const fsdpc_stretch *list, int count, const double *factor);
    int (*step)(void *context, const fsdpc_steps *steps);
    /* Makes codes from values if `pack` is true, else values from codes. */
    int (*activation)(void *context, bool pack, void *values, fsdpc_dtype type, int64_t n,
                      int8_t *codes, float *scales);
    int (*code)(void *context, bool encode, const fsdpc_coding *list, int count);
    int (*sum_landed)(void *context, const fsdpc_landed *list, int count, int senders, int own,
                      double scale, bool add);
} fsdpc_device_i;

struct fsdpc_pack_plan {
    int count;
    fsdpc_pack_target *targets;
    fsdpc_pack_base *bases; /* or NULL */
    size_t bytes;
    bool keep_gaps;
    void *own; /* the implementer's */
};

struct fsdpc_device {
    const fsdpc_device_i *i;
    void *context; /* the implementer's own data */
    fsdpc_device_caps caps;
    /* The fields below belong to device_alloc.c, whose lock guards them. */
    struct fsdpc_source *source; /* the foreign allocator; NULL: the device's own memory is used */
    struct fsdpc_block *blocks;
    size_t foreign_bytes;
};

/* Tries to return memory to the driver after an allocation failed. Returns true if
 * some memory may have been returned. */
bool fsdpc_device_trim(fsdpc_device *device);

/* Checks the arguments of a scaling, in place, of n elements at x. Fails with FSDPC_E_INVAL. */
int fsdpc_device_check_scale(const void *x, fsdpc_dtype type, int64_t n);

#endif
