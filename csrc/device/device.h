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

#include "base/dtype.h"
#include "kernels.h"

typedef struct fsdpc_device fsdpc_device;
/* The driver's own handle: torch's `stream.cuda_stream` is one. NULL is the default stream. */
typedef struct fsdpc_stream fsdpc_stream;

/* Whose memory a caller's buffer is. Where the CPU is the device, both are the same. */
enum fsdpc_place { FSDPC_ON_DEVICE, FSDPC_ON_HOST };

typedef struct fsdpc_device_caps {
    bool asynchronous;   /* work is queued on streams */
    bool host_memory;    /* the CPU can read and write its memory */
    bool virtual_memory; /* addresses can be reserved and slots shown behind them */
    /* A GPU whose driver is simulated: its memory is host memory, and tensors in it are the CPU's. */
    bool stand_in;
    int ordinal;        /* of the GPU among the process's, -1 for the CPU */
    size_t align_bytes; /* wanted alignment of parameters and shard cuts */
    const char *note;   /* one sentence that users should see once, or NULL */
} fsdpc_device_caps;

/* The process-wide CPU device, made on first call with the kernels of this processor and
 * `FSDPC_NUM_THREADS` (default: 1) threads. Never freed. Thread safe. */
int fsdpc_device_cpu(fsdpc_device **out);
/* The process-wide device of one GPU, made on first call in its primary context (torch's), with all
 * kernels loaded. Never freed. Thread safe. FSDPC_E_UNAVAILABLE in one sentence where there is no
 * such GPU, no driver, or no kernels in this extension. */
int fsdpc_device_cuda(int ordinal, fsdpc_device **out);
/* Number of threads that big kernels may use, the caller included (1..256). Local. */
int fsdpc_device_set_threads(fsdpc_device *device, int threads);
int fsdpc_device_threads(const fsdpc_device *device);
const char *fsdpc_device_name(const fsdpc_device *device);         /* "cpu" */
const char *fsdpc_device_kernels_name(const fsdpc_device *device); /* "avx512" */
const fsdpc_device_caps *fsdpc_device_get_caps(const fsdpc_device *device);

/* Zeroed, aligned to 4096 (2 MiB and huge pages where the kernel gives them, from 2 MiB on).
 * `bytes` 0 gives NULL. FSDPC_E_NOMEM. */
int fsdpc_device_alloc(fsdpc_device *device, size_t bytes, void **out);
/* `bytes` as given to alloc. NULL is allowed. The host waits until the device has done
 * what this thread's current, the default and the device's own streams hold. */
void fsdpc_device_free(fsdpc_device *device, void *block, size_t bytes);

/* Somebody else's memory (device_alloc.c): with torch's, one cache serves the process. */
typedef struct fsdpc_allocator {
    void *context;
    /* At least caps.align_bytes aligned, of any contents, for use on `stream` and, by events, on
     * others; a status with its text. */
    int (*alloc)(void *context, size_t bytes, fsdpc_stream *stream, void **out);
    void (*free)(void *context, void *block); /* the device has done with it */
    void (*trim)(void *context);    /* (optional) what lies unused goes back to the driver */
    void (*release)(void *context); /* (optional) once: it is not set, and has no block any more */
} fsdpc_allocator;
/* What fsdpc_device_alloc gives comes from there from now on; NULL: from the device again. Blocks go
 * back to where they came from. Copies the table. FSDPC_E_NOMEM. */
int fsdpc_device_set_allocator(fsdpc_device *device, const fsdpc_allocator *allocator);
/* Bytes of blocks that are out now, from whichever allocator. */
size_t fsdpc_device_foreign_bytes(const fsdpc_device *device);

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
/* fsdpc_kernel_refresh. */
int fsdpc_device_refresh(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *seen,
                         fsdpc_dtype seen_type, int64_t n);
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

/* --- streams and events (device_stream.c) --------------------------------------------------------
 *
 * Every call above and below that touches memory queues its work on the calling thread's current
 * stream of the device. A device that is not asynchronous has done its work when the call returns:
 * there these functions succeed and do nothing, streams and events are NULL.
 */

typedef struct fsdpc_event fsdpc_event;

/* An own stream that does not wait for the default one; `urgent`: its work goes first. */
int fsdpc_device_stream_new(fsdpc_device *device, bool urgent, fsdpc_stream **out);
/* Its work may still be queued. NULL is allowed. */
void fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream);
/* Makes it this thread's current stream and returns what was; any stream of the same device. */
fsdpc_stream *fsdpc_device_use(fsdpc_device *device, fsdpc_stream *stream);
fsdpc_stream *fsdpc_device_current(fsdpc_device *device);

/* From the device's pool, back into it: no driver call once the pool is filled. An event may be
 * recorded or given back as soon as the waits for it have been queued. */
int fsdpc_device_event_new(fsdpc_device *device, fsdpc_event **out);
void fsdpc_device_event_free(fsdpc_device *device, fsdpc_event *event);
/* *id != 0: work on the current stream is being recorded into a graph (a capture), not run, and this
 * is the capture. Then nothing may be polled or waited for by the host, and events of other captures
 * or of none mean nothing: whoever runs the graph orders it. */
int fsdpc_device_capture(fsdpc_device *device, uint64_t *id);
/* Marks what has been queued so far on the current stream. */
int fsdpc_device_record(fsdpc_device *device, fsdpc_event *event);
/* Later work on the current stream waits for the mark; the host does not. */
int fsdpc_device_wait(fsdpc_device *device, fsdpc_event *event);
/* Whether the marked work is done (true without a mark). */
int fsdpc_device_poll(fsdpc_device *device, fsdpc_event *event, bool *done);
/* The host waits: FSDPC_E_TIMEOUT naming `what` after so many seconds. The only place that does. */
int fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout, const char *what);
/* How often the host has begun to wait for the device, by finish and within other calls: a wait by
 * queries is in no profiler's trace. */
int64_t fsdpc_device_waits(const fsdpc_device *device);

/* --- host memory and copies (device_memory.c) ------------------------------------------------------ */

/* Zeroed host memory that the device reaches by itself; FSDPC_E_NOMEM. */
int fsdpc_device_host_alloc(fsdpc_device *device, size_t bytes, void **out);
void fsdpc_device_host_free(fsdpc_device *device, void *block, size_t bytes);
/* Host memory stays as it is until the copy is done. */
int fsdpc_device_copy_in(fsdpc_device *device, void *dst, const void *host, size_t bytes);
int fsdpc_device_copy_out(fsdpc_device *device, void *host, const void *src, size_t bytes);
/* The same, and the host waits for it as in finish: never in a step. */
int fsdpc_device_read_back(fsdpc_device *device, void *host, const void *src, size_t bytes,
                           const char *what);
/* Within the device's memory; the two do not overlap. */
int fsdpc_device_copy(fsdpc_device *device, void *dst, const void *src, size_t bytes);

/* --- addresses and pieces of memory (device_memory.c) -----------------------------------------------
 *
 * What an arena (arena.h) is made of: an address is reserved once, and pieces of memory are shown
 * behind it; one piece may be shown behind several. For devices without host memory:
 * FSDPC_E_UNAVAILABLE elsewhere. Only at set-up: hiding waits for the work of this thread's
 * current, the default and the device's own streams.
 *
 * Where caps.virtual_memory is false a piece is a block with an address of its own: reserve gives
 * NULL, the first show sets the address, and showing another piece there is FSDPC_E_UNAVAILABLE.
 */
typedef struct fsdpc_piece fsdpc_piece;

/* The grain: sizes of reservations and pieces are multiples of it. */
size_t fsdpc_device_grain(const fsdpc_device *device);
int fsdpc_device_reserve(fsdpc_device *device, size_t bytes, void **out);
/* Nothing is shown there any more. */
void fsdpc_device_unreserve(fsdpc_device *device, void *address, size_t bytes);
/* FSDPC_E_DEVMEM. The caller holds it until piece_free; the memory stays as long as it is shown. */
int fsdpc_device_piece_new(fsdpc_device *device, size_t bytes, fsdpc_piece **out);
void fsdpc_device_piece_free(fsdpc_device *device, fsdpc_piece *piece);
/* The piece's first bytes behind an address where nothing is shown. */
int fsdpc_device_show(fsdpc_device *device, void **address, size_t bytes, fsdpc_piece *piece);
int fsdpc_device_hide(fsdpc_device *device, void *address, size_t bytes, fsdpc_piece *piece);

/* --- many tensors at once (device_pack.c) ---------------------------------------------------------- */

/* Where one tensor goes in a flat buffer. */
typedef struct fsdpc_pack_target {
    int64_t n;
    size_t offset; /* bytes, a multiple of the item */
    fsdpc_dtype dtype;
} fsdpc_pack_target;
/* A tensor; data NULL: none, zeros are written. strides NULL: contiguous, and shape is not read. */
typedef struct fsdpc_pack_source {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides;
    bool add; /* fsdpc_device_pack_onto: to what the base holds */
} fsdpc_pack_source;
typedef struct fsdpc_pack_plan fsdpc_pack_plan;

/* The way into a buffer of `bytes`: targets by rising offset, without overlap; what lies between
 * them becomes zeros. Made once for a unit. FSDPC_E_INVAL, FSDPC_E_NOMEM, FSDPC_E_DEVMEM. */
int fsdpc_device_pack_plan(fsdpc_device *device, const fsdpc_pack_target *targets, int count,
                           size_t bytes, fsdpc_pack_plan **out);
void fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan);
/* `sources` as many as targets, with as many elements. One launch where the device queues. */
int fsdpc_device_pack_all(fsdpc_device *device, const fsdpc_pack_plan *plan, void *buffer,
                          const fsdpc_pack_source *sources, double scale);

/* Where a target's elements lie in a second buffer, the base: F32 or F64, aligned to the item. */
typedef struct fsdpc_pack_base {
    size_t offset;
    fsdpc_dtype dtype;
} fsdpc_pack_base;
/* With a base for each target (bases NULL: nothing is added to); keep_gaps leaves alone what lies
 * between the targets. */
int fsdpc_device_pack_plan_onto(fsdpc_device *device, const fsdpc_pack_target *targets,
                                const fsdpc_pack_base *bases, int count, size_t bytes,
                                bool keep_gaps, fsdpc_pack_plan **out);
/* pack_all with such a plan; where sources[i].add the target becomes base + source * scale, in the
 * base's type, rounded once (without data: the base's values). `base` may be `buffer` itself if
 * offsets and types agree. One launch where the device queues. */
int fsdpc_device_pack_onto(fsdpc_device *device, const fsdpc_pack_plan *plan, void *buffer,
                           const void *base, const fsdpc_pack_source *sources, double scale);

/* --- norms that stay on the device (device_norm.c) --------------------------------------------------
 *
 * For devices that queue: FSDPC_E_UNAVAILABLE elsewhere, where fsdpc_device_norm2 is at once. A part
 * is FSDPC_NORM_PART_BYTES of device memory; how many an array of n elements leaves is a function of
 * n. Parts of several units lie end to end and are summed in that order.
 */
enum { FSDPC_NORM_PART_BYTES = 24 };
int64_t fsdpc_device_norm_parts(const fsdpc_device *device, int64_t n);
/* Leaves sum of |x|^p in `parts`, with p 2 the largest and whether all are finite, too. p > 0, finite. */
int fsdpc_device_norm_into(fsdpc_device *device, const void *src, fsdpc_dtype type, int64_t n,
                           double p, void *parts);
/* *total (one part) = the sum of parts; with `add` on top of what it holds. */
int fsdpc_device_norm_total(fsdpc_device *device, const void *parts, int64_t count, bool add,
                            void *total);
/* Two doubles on the device: out[0] = the norm of order p, out[1] = the factor
 * min(1, max_norm / (norm + 1e-6)). */
int fsdpc_device_clip_factor(fsdpc_device *device, const void *total, double p, double max_norm,
                             double *out);
/* x[i] *= *factor, a double on the device; nothing is read or written where it is 1. */
int fsdpc_device_scale_by(fsdpc_device *device, void *x, fsdpc_dtype type, int64_t n,
                          const double *factor);

#endif
