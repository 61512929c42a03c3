/* A device: memory, order of work, and the kernels of kernels.h on it.
 *
 * The `cpu` device runs everything at once on the calling thread and its helper threads; a device
 * with streams (a GPU) enqueues. Callers see one interface. In the implementer's table (device_impl.h)
 * entries that are marked (optional) may be NULL; the table names what happens then.
 */
#ifndef FSDPC_DEVICE_H
#define FSDPC_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "codec/codec.h"
#include "kernels.h"
#include "steps.h"

typedef struct fsdpc_device fsdpc_device;
/* The driver's own handle: torch's `stream.cuda_stream` is one. NULL is the default stream. */
typedef struct fsdpc_stream fsdpc_stream;

/* Which memory a caller's buffer lies in. On the CPU device the two kinds mean the same memory. */
enum fsdpc_memory_kind { FSDPC_ON_DEVICE, FSDPC_ON_HOST };

typedef struct fsdpc_device_caps {
    bool asynchronous;   /* work is queued on streams */
    bool host_memory;    /* the CPU can read and write the device's memory */
    bool virtual_memory; /* addresses can be reserved, and memory mapped behind them */
    /* A GPU with a simulated driver: its memory is host memory, and tensors in it are CPU tensors. */
    bool stand_in;
    int ordinal;        /* the GPU's number among this process's GPUs, -1 for the CPU */
    size_t align_bytes; /* wanted alignment of parameters and shard cuts */
    const char *note;   /* one sentence that users should see once, or NULL */
} fsdpc_device_caps;

/* The process-wide CPU device, made on first call with the kernels of this processor and
 * `FSDPC_NUM_THREADS` (default: 1) threads. Never freed. Thread safe. */
int fsdpc_device_cpu(fsdpc_device **out);
/* The process-wide device of one GPU, made on first call in its primary context (torch's), with all
 * kernels loaded. Never freed. Thread safe. FSDPC_E_UNAVAILABLE, with a text of one sentence,
 * without such a GPU, without a driver, or without kernels in this extension. */
int fsdpc_device_cuda(int ordinal, fsdpc_device **out);
/* Number of threads that big kernels may use, the caller included (1..256). Local. */
int fsdpc_device_set_threads(fsdpc_device *device, int threads);
int fsdpc_device_threads(const fsdpc_device *device);
const char *fsdpc_device_name(const fsdpc_device *device);         /* "cpu" */
const char *fsdpc_device_kernels_name(const fsdpc_device *device); /* "avx512" */
const fsdpc_device_caps *fsdpc_device_get_caps(const fsdpc_device *device);

/* A zeroed block, aligned to caps.align_bytes or more; the CPU's to 4096, and from 2 MiB on to 2 MiB, with
 * huge pages where the kernel gives them. `bytes` 0 gives NULL. FSDPC_E_NOMEM or FSDPC_E_DEVMEM. */
int fsdpc_device_alloc(fsdpc_device *device, size_t bytes, void **out);
/* `bytes`: as given to alloc; `block`: NULL is allowed. The host waits for this thread's current stream, the
 * default stream and the device's own streams. */
void fsdpc_device_free(fsdpc_device *device, void *block, size_t bytes);
/* The caller no longer needs the values of a whole block of fsdpc_device_alloc: its physical memory may go.
 * Until they are written again, the block's bytes have any value. */
int fsdpc_device_discard(fsdpc_device *device, void *block, size_t bytes);

/* A foreign allocator (device_alloc.c): with torch's, one caching allocator serves torch and fsdpc. */
typedef struct fsdpc_allocator {
    void *context;
    /* A block of undefined contents, aligned to caps.align_bytes or more, for use on `stream` and, after
     * events, on other streams. Returns a status with a text. */
    int (*alloc)(void *context, size_t bytes, fsdpc_stream *stream, void **out);
    void (*free)(void *context, void *block); /* no work of the device uses the block */
    void (*trim)(void *context);              /* (optional) returns unused memory to the driver */
    void (*release)(void *context); /* (optional) called once, after replacement and last free */
} fsdpc_allocator;
/* Sets the allocator of later fsdpc_device_alloc calls; NULL: the device's own. A block is freed by the
 * allocator that made it. Copies the table. FSDPC_E_NOMEM. */
int fsdpc_device_set_allocator(fsdpc_device *device, const fsdpc_allocator *allocator);
/* Bytes of live blocks of all foreign allocators. */
size_t fsdpc_device_foreign_bytes(const fsdpc_device *device);

/* The kernels, split over threads when the buffer is large. Arguments are checked: an unknown
 * dtype, a negative n, or arithmetic on BYTES is FSDPC_E_INVAL. Among the sources of reduce
 * NULL entries are skipped. norm2's result is independent of the number of threads. */
int fsdpc_device_cast(fsdpc_device *device, void *dst, fsdpc_dtype dst_type, const void *src,
                      fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_device_accumulate(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *src,
                            fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_device_reduce(fsdpc_device *device, void *acc, fsdpc_dtype acc_type,
                        const void *const *src, int src_count, fsdpc_dtype src_type, int64_t n,
                        double scale, bool add);
/* As fsdpc_kernel_refresh (kernels.h). */
int fsdpc_device_refresh(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *grad,
                         fsdpc_dtype grad_type, int64_t n);
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
 * stream of the device. On a device that is not asynchronous the work is done when the call returns: there
 * the functions of this section are no-ops that succeed, and streams and events are NULL.
 */

typedef struct fsdpc_event fsdpc_event;

/* A non-blocking stream (no implicit wait for the default stream); `urgent`: of high priority. */
int fsdpc_device_stream_new(fsdpc_device *device, bool urgent, fsdpc_stream **out);
/* Work may still be in flight on the stream. NULL is allowed. */
void fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream);
/* Makes any stream of the device this thread's current stream, and returns the previous one. */
fsdpc_stream *fsdpc_device_use(fsdpc_device *device, fsdpc_stream *stream);
fsdpc_stream *fsdpc_device_current(fsdpc_device *device);

/* Events come from a pool of the device: no driver call once the pool is filled. An event may be recorded
 * again or freed as soon as the waits for it have been queued. */
int fsdpc_device_event_new(fsdpc_device *device, fsdpc_event **out);
void fsdpc_device_event_free(fsdpc_device *device, fsdpc_event *event);
/* *id != 0: the current stream is being captured into a graph; *id names the capture. Then the host must
 * not poll or wait, and events recorded outside of this capture have no effect: the launch of the graph
 * is ordered by its caller. */
int fsdpc_device_capture(fsdpc_device *device, uint64_t *id);
/* The event stands for all work queued so far on the current stream. */
int fsdpc_device_record(fsdpc_device *device, fsdpc_event *event);
/* Later work on the current stream waits for the event; the host does not. */
int fsdpc_device_wait(fsdpc_device *device, fsdpc_event *event);
/* *done: whether the work of the event is done (true for an event that was never recorded). */
int fsdpc_device_poll(fsdpc_device *device, fsdpc_event *event, bool *done);
/* The host waits for the event. FSDPC_E_TIMEOUT, naming `what`, after `timeout` seconds. */
int fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout, const char *what);
/* Number of host syncs so far, by finish and within other calls: no profiler shows them, as they poll. */
int64_t fsdpc_device_waits(const fsdpc_device *device);
/* Bytes of the GPU that no process uses, and all bytes of the GPU; both are 0 for the CPU device. */
int fsdpc_device_free_bytes(fsdpc_device *device, size_t *free_bytes, size_t *total);

/* --- host memory and copies (device_memory.c) ------------------------------------------------------ */

/* Zeroed pinned host memory; FSDPC_E_NOMEM. */
int fsdpc_device_host_alloc(fsdpc_device *device, size_t bytes, void **out);
void fsdpc_device_host_free(fsdpc_device *device, void *block, size_t bytes);
/* Asynchronous: until the copy is done the caller keeps the host memory and does not change it. */
int fsdpc_device_copy_in(fsdpc_device *device, void *dst, const void *host, size_t bytes);
int fsdpc_device_copy_out(fsdpc_device *device, void *host, const void *src, size_t bytes);
/* A copy within the device's memory; the two ranges do not overlap. */
int fsdpc_device_copy(fsdpc_device *device, void *dst, const void *src, size_t bytes);

/* --- addresses and pieces of memory (device_memory.c) -----------------------------------------------
 *
 * What an arena (arena.h) is made of: an address is reserved once, and pieces of memory are mapped behind it
 * ("shown"); one piece may be mapped at several addresses. Only for devices without host memory; others
 * return FSDPC_E_UNAVAILABLE. Only at set-up: in hide the host waits for this thread's current stream, the
 * default stream and the device's own streams.
 *
 * CUDA maps a piece as a whole or not at all ("not supported" for a part of it), so a reservation
 * has the size of its piece. Where caps.virtual_memory is false a piece is a block with an
 * address of its own: reserve gives NULL, and show sets the address.
 */
typedef struct fsdpc_piece fsdpc_piece;

/* Sizes of reservations and pieces are multiples of this number of bytes. */
size_t fsdpc_device_grain(const fsdpc_device *device);
int fsdpc_device_reserve(fsdpc_device *device, size_t bytes, void **out);
/* No piece may be mapped at the address any more. */
void fsdpc_device_unreserve(fsdpc_device *device, void *address, size_t bytes);
/* FSDPC_E_DEVMEM. The caller owns the piece until piece_free; a mapping keeps the memory alive longer. */
int fsdpc_device_piece_new(fsdpc_device *device, size_t bytes, fsdpc_piece **out);
void fsdpc_device_piece_free(fsdpc_device *device, fsdpc_piece *piece);
/* Maps the whole piece at a reserved address that has no mapping. */
int fsdpc_device_show(fsdpc_device *device, void **address, fsdpc_piece *piece);
int fsdpc_device_hide(fsdpc_device *device, void *address, fsdpc_piece *piece);

/* --- many tensors at once (device_pack.c) ---------------------------------------------------------- */

/* Where one tensor goes in a flat buffer. */
typedef struct fsdpc_pack_target {
    int64_t n;
    size_t offset; /* in bytes; a multiple of the element's size */
    fsdpc_dtype dtype;
} fsdpc_pack_target;
/* A tensor to pack. data NULL: zeros are written for it. strides NULL: contiguous, shape is not read. */
typedef struct fsdpc_pack_source {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides;
    bool add; /* fsdpc_device_pack_onto adds it to the base */
} fsdpc_pack_source;
typedef struct fsdpc_pack_plan fsdpc_pack_plan;

/* Where a target's elements lie in a second buffer, the base, as F32 or F64 and aligned to their size. */
typedef struct fsdpc_pack_base {
    size_t offset;
    fsdpc_dtype dtype;
} fsdpc_pack_base;

/* A plan to pack tensors into a buffer of `bytes` bytes: targets by rising offset, without overlap, with a
 * base for each (bases NULL: no source is ever added). Gaps between targets become zeros, unless keep_gaps
 * leaves them unchanged. Made once for a unit. FSDPC_E_INVAL, FSDPC_E_NOMEM, FSDPC_E_DEVMEM. */
int fsdpc_device_pack_plan(fsdpc_device *device, const fsdpc_pack_target *targets,
                           const fsdpc_pack_base *bases, int count, size_t bytes, bool keep_gaps,
                           fsdpc_pack_plan **out);
void fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan);
/* Packs one source per target, with as many elements. Where sources[i].add, the target becomes the base plus
 * source * scale, in the base's type, rounded once (source without data: the base's values). `base` may be
 * NULL if no source is added, and `buffer` if offsets and types agree. One launch on a device that queues. */
int fsdpc_device_pack_onto(fsdpc_device *device, const fsdpc_pack_plan *plan, void *buffer,
                           const void *base, const fsdpc_pack_source *sources, double scale);

/* --- norms that stay on the device (device_norm.c) --------------------------------------------------
 *
 * Only for devices that queue; others return FSDPC_E_UNAVAILABLE (use fsdpc_device_norm2 there). A part is
 * FSDPC_NORM_PART_BYTES of device memory; n elements give a number of parts that depends on n alone. Parts
 * of several units lie end to end and are summed in that order.
 */
enum { FSDPC_NORM_PART_BYTES = 24 };
int64_t fsdpc_device_norm_parts(const fsdpc_device *device, int64_t n);
/* Elements of one dtype, n > 0. */
typedef struct fsdpc_stretch {
    void *data;
    int64_t n;
    fsdpc_dtype dtype;
} fsdpc_stretch;
/* Writes the sum of |x|^p to `parts`, stretch by stretch; for p 2 also the largest |x| and whether all x are
 * finite. p > 0, finite. One launch for up to 128 stretches. */
int fsdpc_device_norm_into(fsdpc_device *device, const fsdpc_stretch *list, int count, double p,
                           void *parts);
/* *total, itself one part, becomes the sum of `count` parts; with `add`, *total plus this sum. */
int fsdpc_device_norm_total(fsdpc_device *device, const void *parts, int64_t count, bool add,
                            void *total);
/* Writes two doubles on the device: out[0] = the norm of order p, out[1] = the factor
 * min(1, max_norm / (norm + 1e-6)). */
int fsdpc_device_clip_factor(fsdpc_device *device, const void *total, double p, double max_norm,
                             double *out);
/* x[i] *= *factor, a double on the device; if that is 1, no x is read or written. Launches as norm_into. */
int fsdpc_device_scale_by(fsdpc_device *device, const fsdpc_stretch *list, int count,
                          const double *factor);

/* --- optimizer steps, packed activations and codes (device_steps.c) ----------------------------------
 *
 * Only for devices that queue; others return FSDPC_E_UNAVAILABLE. All memory is the device's, unless noted;
 * the host waits for nothing. csrc/optim/optim.h and csrc/activation/activation.h have the formulas.
 */
typedef struct fsdpc_steps {
    fsdpc_step_rule rule;
    fsdpc_step_control control;
    const fsdpc_step_tensor *tensors; /* in host memory, read before the call returns */
    int count;
    const fsdpc_step_codes *codes; /* the maps of m and of v, for states of 8 bits; host memory */
    void *scratch;                 /* count * FSDPC_STEP_SCRATCH bytes, in use till the step ends */
} fsdpc_steps;
enum { FSDPC_STEP_SCRATCH = 256 };
/* One step of all tensors: a launch per 32 tensors for their numbers, and one for all elements (two where
 * float64 is among other types). A tensor without elements has its step counted. FSDPC_E_INVAL: memory that
 * is not aligned to its type. */
int fsdpc_device_step(fsdpc_device *device, const fsdpc_steps *steps);
/* n elements of F32, BF16 or F16 to codes and one scale per FSDPC_STEP_BLOCK elements, and back. */
int fsdpc_device_pack8(fsdpc_device *device, const void *values, fsdpc_dtype type, int64_t n,
                       int8_t *codes, float *scales);
int fsdpc_device_unpack8(fsdpc_device *device, const int8_t *codes, const float *scales, int64_t n,
                         void *values, fsdpc_dtype type);

/* Pieces of a matrix of floats; each piece is coded by itself (csrc/codec/codec.h). As values the pieces lie
 * end to end. As codes each piece begins `stride` bytes behind the begin of the previous one. */
typedef struct fsdpc_coding {
    fsdpc_codec codec;
    int pieces;
    int64_t rows, row; /* rows of each piece; elements of each row */
    void *values;
    fsdpc_dtype type;
    void *coded; /* at a multiple of 16 bytes */
    size_t stride;
    float *lost; /* one per value, or NULL; see fsdpc_codec_encode */
} fsdpc_coding;
/* Encode: values to codes; with FSDPC_UNCODED the codes are copies of the values. Decode: codes to values;
 * FSDPC_E_INVAL for FSDPC_UNCODED. One launch for up to 48 codings; the list is read before the call
 * returns. */
int fsdpc_device_encode(fsdpc_device *device, const fsdpc_coding *list, int count);
int fsdpc_device_decode(fsdpc_device *device, const fsdpc_coding *list, int count);

/* Pieces of several ranks and their sum. from.values: this rank's own piece. from.coded: the first other
 * rank's piece, coded; the next rank's from.stride bytes behind (FSDPC_UNCODED: values of from.type). */
typedef struct fsdpc_landed {
    fsdpc_coding from;
    void *sum;
    fsdpc_dtype sum_type;
} fsdpc_landed;
/* Sums as fsdpc_device_reduce: the decoded pieces of `senders` ranks, in their order; this rank has the
 * number `own`. One launch for up to 40 sums. */
int fsdpc_device_sum_landed(fsdpc_device *device, const fsdpc_landed *list, int count, int senders,
                            int own, double scale, bool add);

#endif
