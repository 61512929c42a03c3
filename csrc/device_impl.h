/* A device as its implementer sees it. Callers use device.h.
 *
 * device.c checks every argument before it calls an entry: dtypes are known and fit the entry,
 * n > 0, pointers are not NULL (but sources of reduce may be). So entries need not check again.
 * All entries are required unless marked (optional). An asynchronous device queues the work in
 * call order.
 */
#ifndef FSDPC_DEVICE_IMPL_H
#define FSDPC_DEVICE_IMPL_H

#include "device.h"

enum { FSDPC_DEVICE_API_VERSION = 1 };

/* Streams and events of an asynchronous device. `stream` NULL is the caller's. */
struct fsdpc_device_order {
    int (*stream_new)(void *context, const char *name, fsdpc_stream **out);
    void (*stream_free)(void *context, fsdpc_stream *stream);
    void (*set_caller)(void *context, void *raw);
    void (*use)(void *context, fsdpc_stream *stream);
    void *(*stream_raw)(void *context, fsdpc_stream *stream);
    int (*event_new)(void *context, fsdpc_event **out);
    void (*event_free)(void *context, fsdpc_event *event);
    int (*record)(void *context, fsdpc_event *event, fsdpc_stream *stream);
    int (*await)(void *context, fsdpc_stream *stream, fsdpc_event *event);
    int (*is_done)(void *context, fsdpc_event *event, bool *out);
    int (*finish)(void *context, fsdpc_event *event, double timeout_s, const char *what);
};

typedef struct fsdpc_device_i {
    int api_version; /* FSDPC_DEVICE_API_VERSION of the implementer */
    const char *name;

    /* (optional) NULL: the device has no helper threads, 1 is the only value accepted. */
    int (*set_threads)(void *context, int threads);
    int (*threads)(void *context);
    const char *(*kernels_name)(void *context);

    /* bytes > 0. Zeroed. */
    int (*alloc)(void *context, size_t bytes, void **out);
    void (*free)(void *context, void *block, size_t bytes);

    int (*cast)(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                fsdpc_dtype src_type, int64_t n, double scale);
    int (*accumulate)(void *context, void *acc, fsdpc_dtype acc_type, const void *src,
                      fsdpc_dtype src_type, int64_t n, double scale);
    int (*reduce)(void *context, void *acc, fsdpc_dtype acc_type, const void *const *src,
                  int src_count, fsdpc_dtype src_type, int64_t n, double scale, bool add);
    int (*norm2)(void *context, const void *src, fsdpc_dtype type, int64_t n, fsdpc_norm *out);
    int (*norm_p)(void *context, const void *src, fsdpc_dtype type, int64_t n, double p,
                  double *out);
    /* (optional) NULL: cast in place. */
    int (*scale)(void *context, void *x, fsdpc_dtype type, int64_t n, double factor);
    int (*pack)(void *context, void *dst, fsdpc_dtype dst_type, const void *src,
                fsdpc_dtype src_type, int ndim, const int64_t *shape, const int64_t *strides,
                double scale);
    int (*poison)(void *context, void *dst, fsdpc_dtype type, int64_t n);
    int (*zero)(void *context, void *dst, size_t bytes);

    /* (optional, all together) NULL: one order for everything, see device.h. */
    const struct fsdpc_device_order *order;
    /* (optional, all together) NULL: FSDPC_E_UNAVAILABLE. */
    int (*pack_plan_new)(void *context, const fsdpc_pack_entry *entries, int count,
                         int source_count, fsdpc_pack_plan **out);
    void (*pack_plan_free)(void *context, fsdpc_pack_plan *plan);
    int (*pack_many)(void *context, const fsdpc_pack_plan *plan, void *dst,
                     const fsdpc_tensor *sources, double scale);
} fsdpc_device_i;

struct fsdpc_device {
    const fsdpc_device_i *i;
    void *context; /* owned by the implementer */
    fsdpc_device_caps caps;
};

#endif
