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

/* A gradient or any other dense tensor that is read: borrowed pointers. data NULL: absent. */
typedef struct fsdpc_tensor {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides; /* elements */
    bool contiguous;
} fsdpc_tensor;

/* --- streams and events: the order of work on an asynchronous device ------------------------- */

/* Work is put on the calling thread's chosen stream: one of the device's own, or the caller's (NULL,
 * the default: what fsdpc_device_set_caller said on this thread, else the legacy stream). On a
 * device that is not asynchronous there is one order anyway: these calls succeed and do nothing,
 * handles are NULL and every event is done. */
typedef struct fsdpc_stream fsdpc_stream;
typedef struct fsdpc_event fsdpc_event;

/* `name` is for traces and profilers, borrowed for the device's life. Before free all work on the
 * stream must be done. */
int fsdpc_device_stream_new(fsdpc_device *device, const char *name, fsdpc_stream **out);
void fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream);
/* For this thread. `raw` is the driver's handle of the stream that the caller computes on now. */
void fsdpc_device_set_caller(fsdpc_device *device, void *raw);
void fsdpc_device_use(fsdpc_device *device, fsdpc_stream *stream);
/* The driver's handle of a stream (NULL: the caller's), for libraries beside the driver. */
void *fsdpc_device_stream_raw(fsdpc_device *device, fsdpc_stream *stream);
/* Made at set-up; an event may be recorded and waited for any number of times, without a wait of the
 * host. Waiting for one that was never recorded waits for nothing. */
int fsdpc_device_event_new(fsdpc_device *device, fsdpc_event **out);
void fsdpc_device_event_free(fsdpc_device *device, fsdpc_event *event);
/* All work put on `stream` so far. */
int fsdpc_device_record(fsdpc_device *device, fsdpc_event *event, fsdpc_stream *stream);
/* Work put on `stream` from now on waits for the event as recorded last. */
int fsdpc_device_await(fsdpc_device *device, fsdpc_stream *stream, fsdpc_event *event);
int fsdpc_device_is_done(fsdpc_device *device, fsdpc_event *event, bool *out);
/* The host waits, by queries and short sleeps: FSDPC_E_TIMEOUT after `timeout_s`, with `what` in the
 * text. Not for use in a step. */
int fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout_s,
                        const char *what);

/* --- many tensors in one go ------------------------------------------------------------------- */

/* A stretch of the destination: one tensor's elements in order, or a gap that gets zeros. */
typedef struct fsdpc_pack_entry {
    int64_t n;         /* elements of dst_type */
    size_t dst_offset; /* bytes */
    fsdpc_dtype dst_type;
    int source; /* index among the sources, -1: a gap */
} fsdpc_pack_entry;
typedef struct fsdpc_pack_plan fsdpc_pack_plan;
/* Entries in order of dst_offset, copied. (optional) in the table: FSDPC_E_UNAVAILABLE. */
int fsdpc_device_pack_plan_new(fsdpc_device *device, const fsdpc_pack_entry *entries, int count,
                               int source_count, fsdpc_pack_plan **out);
void fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan);
/* One launch. sources[i].data NULL: zeros. The sources may be given back to an allocator that reuses
 * memory in the order of the stream as soon as this returns. */
int fsdpc_device_pack_many(fsdpc_device *device, const fsdpc_pack_plan *plan, void *dst,
                           const fsdpc_tensor *sources, double scale);

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
