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
} fsdpc_device_i;

struct fsdpc_device {
    const fsdpc_device_i *i;
    void *context; /* owned by the implementer */
    fsdpc_device_caps caps;
};

#endif
