/* A device: memory, order of work, and the kernels of kernels.h on it.
 *
 * The `cpu` device runs everything at once on the calling thread and its helper threads; a device
 * with streams (a GPU) enqueues. Callers see one interface; entries marked (optional) may be NULL
 * in the implementer's table (device_impl.h) and then have the default named there.
 */
#ifndef FSDPC_DEVICE_H
#define FSDPC_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dtype.h"
#include "kernels.h"

typedef struct fsdpc_device fsdpc_device;

typedef struct fsdpc_device_caps {
    bool asynchronous;  /* work is queued on streams */
    bool host_memory;   /* the CPU can read and write its memory */
    size_t align_bytes; /* wanted alignment of parameters and shard cuts */
} fsdpc_device_caps;

/* The process-wide CPU device, made on first call with the kernels of this processor and
 * `FSDPC_NUM_THREADS` (default: 1) threads. Never freed. Thread safe. */
int fsdpc_device_cpu(fsdpc_device **out);
/* Number of threads that big kernels may use, the caller included (1..256). Local. */
int fsdpc_device_set_threads(fsdpc_device *device, int threads);
int fsdpc_device_threads(const fsdpc_device *device);
const char *fsdpc_device_name(const fsdpc_device *device);         /* "cpu" */
const char *fsdpc_device_kernels_name(const fsdpc_device *device); /* "avx512" */
const fsdpc_device_caps *fsdpc_device_get_caps(const fsdpc_device *device);

/* Zeroed, aligned to 4096 (2 MiB and huge pages where the kernel gives them, from 2 MiB on).
 * `bytes` 0 gives NULL. FSDPC_E_NOMEM. */
int fsdpc_device_alloc(fsdpc_device *device, size_t bytes, void **out);
/* `bytes` as given to alloc. NULL is allowed. */
void fsdpc_device_free(fsdpc_device *device, void *block, size_t bytes);

/* The kernels, split over threads when the buffer is large. Arguments are checked: an unknown
 * dtype, a negative n, or BYTES where arithmetic is asked for is FSDPC_E_INVAL. `src` of reduce:
 * NULL entries are skipped. norm2's result is independent of the number of threads. */
int fsdpc_device_cast(fsdpc_device *device, void *dst, fsdpc_dtype dst_type, const void *src,
                      fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_device_accumulate(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *src,
                            fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_device_reduce(fsdpc_device *device, void *acc, fsdpc_dtype acc_type,
                        const void *const *src, int src_count, fsdpc_dtype src_type, int64_t n,
                        double scale, bool add);
int fsdpc_device_norm2(fsdpc_device *device, const void *src, fsdpc_dtype type, int64_t n,
                       fsdpc_norm *out);
int fsdpc_device_norm_p(fsdpc_device *device, const void *src, fsdpc_dtype type, int64_t n,
                        double p, double *out);
int fsdpc_device_scale(fsdpc_device *device, void *x, fsdpc_dtype type, int64_t n, double factor);
int fsdpc_device_pack(fsdpc_device *device, void *dst, fsdpc_dtype dst_type, const void *src,
                      fsdpc_dtype src_type, int ndim, const int64_t *shape, const int64_t *strides,
                      double scale);
int fsdpc_device_poison(fsdpc_device *device, void *dst, fsdpc_dtype type, int64_t n);
int fsdpc_device_zero(fsdpc_device *device, void *dst, size_t bytes);

#endif
