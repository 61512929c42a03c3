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
#include "codec/codec.h"
#include "kernels.h"
#include "steps.h"

typedef struct fsdpc_device fsdpc_device;
/* The driver's own handle: torch's `stream.cuda_stream` is one. NULL is the default stream. */
typedef struct fsdpc_stream fsdpc_stream;

/* Which memory a caller's buffer lies in. On the CPU device both are the same. */
enum fsdpc_memory_kind { FSDPC_ON_DEVICE, FSDPC_ON_HOST };

typedef struct fsdpc_device_caps {
    bool asynchronous;   /* work is queued on streams */
    bool host_memory;    /* the CPU can read and write its memory */
    bool virtual_memory; /* addresses can be reserved, and memory mapped behind them */
    /* A GPU with a simulated driver: its memory is host memory, with CPU tensors in it. */
    bool stand_in;
    int ordinal;        /* of the GPU among the process's, -1 for the CPU */
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

/* Zeroed, aligned to 4096 (2 MiB and huge pages where the kernel gives them, from 2 MiB on).
 * `bytes` 0 gives NULL. FSDPC_E_NOMEM. */
int fsdpc_device_alloc(fsdpc_device *device, size_t bytes, void **out);
/* `bytes` as given to alloc. NULL is allowed. Host sync with this thread's current stream, the default
 * stream and the device's own streams. */
void fsdpc_device_free(fsdpc_device *device, void *block, size_t bytes);
/* The values of a whole block of fsdpc_device_alloc are needed no more: its physical memory may go, and
 * what is not written anew reads as anything. */
int fsdpc_device_discard(fsdpc_device *device, void *block, size_t bytes);

/* A foreign allocator (device_alloc.c): with torch's, one caching allocator serves the process. */
typedef struct fsdpc_allocator {
    void *context;
    /* A block of undefined contents, aligned to caps.align_bytes or more, for use on `stream` and, after
     * events, on other streams. Returns a status with a text. */
    int (*alloc)(void *context, size_t bytes, fsdpc_stream *stream, void **out);
    void (*free)(void *context, void *block); /* no work of the device uses the block */
    void (*trim)(void *context);              /* (optional) returns unused memory to the driver */
    void (*release)(void *context); /* (optional) called once: replaced, and all blocks are freed */
} fsdpc_allocator;
/* Sets the allocator of later fsdpc_device_alloc calls; NULL: the device's own. A block is freed by the
 * allocator that made it. Copies the table. FSDPC_E_NOMEM. */
int fsdpc_device_set_allocator(fsdpc_device *device, const fsdpc_allocator *allocator);
/* Bytes of live blocks of all foreign allocators. */
size_t fsdpc_device_foreign_bytes(const fsdpc_device *device);

/* The kernels, split over threads when the buffer is large. Arguments are checked: an unknown
 * dtype, a negative n, or arithmetic on BYTES is FSDPC_E_INVAL. `src` of reduce:
 * NULL entries are skipped. norm2's result is independent of the number of threads. */
int fsdpc_device_cast(fsdpc_device *device, void *dst, fsdpc_dtype dst_type, const void *src,
                      fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_device_accumulate(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *src,
                            fsdpc_dtype src_type, int64_t n, double scale);
int fsdpc_device_reduce(fsdpc_device *device, void *acc, fsdpc_dtype acc_type,
                        const void *const *src, int src_count, fsdpc_dtype src_type, int64_t n,
                        double scale, bool add);
/* fsdpc_kernel_refresh. */
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
 * stream of the device. On a device that is not asynchronous the work is done when the call returns: these
 * functions are no-ops that succeed, streams and events are NULL.
 */

typedef struct fsdpc_event fsdpc_event;

/* A non-blocking stream (no implicit wait for the default stream); `urgent`: of high priority. */
int fsdpc_device_stream_new(fsdpc_device *device, bool urgent, fsdpc_stream **out);
/* Work may still be in flight on the stream. NULL is allowed. */
void fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream);
/* Sets this thread's current stream, any stream of the device, and returns the previous one. */
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
/* Whether the work of the event is done (true if never recorded). */
int fsdpc_device_poll(fsdpc_device *device, fsdpc_event *event, bool *done);
/* Host sync: FSDPC_E_TIMEOUT naming `what` after `timeout` seconds. The only function made to wait. */
int fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout, const char *what);
/* Number of host syncs so far, by finish and within other calls: no profiler shows them, as they poll. */
int64_t fsdpc_device_waits(const fsdpc_device *device);
/* Bytes of the GPU that no process uses, and all of them; both 0 for the processor. */
int fsdpc_device_free_bytes(fsdpc_device *device, size_t *free_bytes, size_t *total);

/* --- host memory and copies (device_memory.c) ------------------------------------------------------ */

/* Zeroed pinned host memory; FSDPC_E_NOMEM. */
int fsdpc_device_host_alloc(fsdpc_device *device, size_t bytes, void **out);
void fsdpc_device_host_free(fsdpc_device *device, void *block, size_t bytes);
/* Asynchronous: the caller keeps the host memory unchanged until the copy is done. */
int fsdpc_device_copy_in(fsdpc_device *device, void *dst, const void *host, size_t bytes);
int fsdpc_device_copy_out(fsdpc_device *device, void *host, const void *src, size_t bytes);
/* Within the device's memory, without overlap. */
int fsdpc_device_copy(fsdpc_device *device, void *dst, const void *src, size_t bytes);

/* --- addresses and pieces of memory (device_memory.c) -----------------------------------------------
 *
 * The parts of an arena (arena.h): an address is reserved once, and pieces of memory are mapped behind it
 * ("shown"); one piece may be mapped at several addresses. For devices without host memory:
 * FSDPC_E_UNAVAILABLE elsewhere. Only at set-up: hide is a host sync with this thread's current stream, the
 * default stream and the device's own streams.
 *
 * CUDA maps a piece as a whole or not at all ("not supported" for a part of it), so that what is
 * reserved has the size of the piece. Where caps.virtual_memory is false a piece is a block with an
 * address of its own: reserve gives NULL, and show sets the address.
 */
typedef struct fsdpc_piece fsdpc_piece;

/* The grain: sizes of reservations and pieces are multiples of it. */
size_t fsdpc_device_grain(const fsdpc_device *device);
int fsdpc_device_reserve(fsdpc_device *device, size_t bytes, void **out);
/* No piece is mapped at the address. */
void fsdpc_device_unreserve(fsdpc_device *device, void *address, size_t bytes);
/* FSDPC_E_DEVMEM. The caller owns the handle until piece_free; a mapping keeps the memory alive. */
int fsdpc_device_piece_new(fsdpc_device *device, size_t bytes, fsdpc_piece **out);
void fsdpc_device_piece_free(fsdpc_device *device, fsdpc_piece *piece);
/* Maps the whole piece at a reserved address without a mapping. */
int fsdpc_device_show(fsdpc_device *device, void **address, fsdpc_piece *piece);
int fsdpc_device_hide(fsdpc_device *device, void *address, fsdpc_piece *piece);

/* --- many tensors at once (device_pack.c) ---------------------------------------------------------- */

/* Where one tensor goes in a flat buffer. */
typedef struct fsdpc_pack_target {
    int64_t n;
    size_t offset; /* bytes, a multiple of the item */
    fsdpc_dtype dtype;
} fsdpc_pack_target;
/* A tensor; data NULL: zeros are written. strides NULL: contiguous, shape is not read. */
typedef struct fsdpc_pack_source {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides;
    bool add; /* fsdpc_device_pack_onto: added to the base */
} fsdpc_pack_source;
typedef struct fsdpc_pack_plan fsdpc_pack_plan;

/* Where a target's elements lie in a second buffer, the base: F32 or F64, aligned to the item. */
typedef struct fsdpc_pack_base {
    size_t offset;
    fsdpc_dtype dtype;
} fsdpc_pack_base;

/* A plan to pack tensors into a buffer of `bytes`: targets by rising offset, without overlap, with a base
 * for each (bases NULL: no source is added). Gaps between targets become zeros, unless keep_gaps leaves
 * them unchanged. Made once for a unit. FSDPC_E_INVAL, FSDPC_E_NOMEM, FSDPC_E_DEVMEM. */
int fsdpc_device_pack_plan(fsdpc_device *device, const fsdpc_pack_target *targets,
                           const fsdpc_pack_base *bases, int count, size_t bytes, bool keep_gaps,
                           fsdpc_pack_plan **out);
void fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan);
/* One source per target, with as many elements; where sources[i].add the target becomes base + source *
 * scale, in the base's type, rounded once (without data: the base's values). `base` may be NULL, if no
 * source is added, and `buffer` itself, if offsets and types agree. One launch on a device that queues. */
int fsdpc_device_pack_onto(fsdpc_device *device, const fsdpc_pack_plan *plan, void *buffer,
                           const void *base, const fsdpc_pack_source *sources, double scale);

/* --- norms that stay on the device (device_norm.c) --------------------------------------------------
 *
 * For devices that queue: FSDPC_E_UNAVAILABLE elsewhere, where fsdpc_device_norm2 is synchronous. A part is
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
/* *total (one part) = the sum of parts, with `add` plus *total. */
int fsdpc_device_norm_total(fsdpc_device *device, const void *parts, int64_t count, bool add,
                            void *total);
/* Two doubles on the device: out[0] = the norm of order p, out[1] = the factor
 * min(1, max_norm / (norm + 1e-6)). */
int fsdpc_device_clip_factor(fsdpc_device *device, const void *total, double p, double max_norm,
                             double *out);
/* x[i] *= *factor, a double on the device; nothing is read or written where it is 1. Launches as above. */
int fsdpc_device_scale_by(fsdpc_device *device, const fsdpc_stretch *list, int count,
                          const double *factor);

/* --- optimizer steps, packed activations and codes (device_steps.c) ----------------------------------
 *
 * For devices that queue: FSDPC_E_UNAVAILABLE elsewhere. All memory is the device's; the host learns nothing
 * and waits for nothing. csrc/optim/optim.h and csrc/activation/activation.h have the formulas.
 */
typedef struct fsdpc_steps {
    fsdpc_step_rule rule;
    fsdpc_step_control control;
    const fsdpc_step_tensor *tensors; /* in host memory, read before the call returns */
    int count;
    const fsdpc_step_codes *codes; /* the maps of m and of v, for states of 8 bits; host memory */
    void *scratch;                 /* count * FSDPC_STEP_SCRATCH bytes, until the step is done */
} fsdpc_steps;
enum { FSDPC_STEP_SCRATCH = 256 };
/* One step of all tensors: a launch per 32 tensors for their numbers, and one for all elements (two where
 * float64 is among other types). Tensors without elements count their step. FSDPC_E_INVAL: memory that
 * is not aligned to its type. */
int fsdpc_device_step(fsdpc_device *device, const fsdpc_steps *steps);
/* n elements of F32, BF16 or F16 to codes and one scale per FSDPC_STEP_BLOCK, and back. */
int fsdpc_device_pack8(fsdpc_device *device, const void *values, fsdpc_dtype type, int64_t n,
                       int8_t *codes, float *scales);
int fsdpc_device_unpack8(fsdpc_device *device, const int8_t *codes, const float *scales, int64_t n,
                         void *values, fsdpc_dtype type);

/* Pieces of a matrix of floats; each piece is coded by itself (csrc/codec/codec.h). The values of the pieces lie end to
 * end. The codes of a piece begin `stride` bytes behind the begin of the previous piece's codes. */
typedef struct fsdpc_coding {
    fsdpc_codec codec;
    int pieces;
    int64_t rows, row; /* of each piece; elements of each row */
    void *values;
    fsdpc_dtype type;
    void *coded; /* at a multiple of 16 bytes */
    size_t stride;
    float *lost; /* one per value, or NULL: fsdpc_codec_encode */
} fsdpc_coding;
/* Encode: values to codes, with FSDPC_UNCODED copies of the values. Decode: codes to values; FSDPC_E_INVAL for
 * FSDPC_UNCODED. A launch for up to 48; the list is read before the call
 * returns. */
int fsdpc_device_encode(fsdpc_device *device, const fsdpc_coding *list, int count);
int fsdpc_device_decode(fsdpc_device *device, const fsdpc_coding *list, int count);

/* Pieces of several ranks and their sum. `from`: one piece, as values this rank's own; as codes that of the first other
 * rank, and `stride` bytes behind it that of the next one. FSDPC_UNCODED: these are values of from.type, too. */
typedef struct fsdpc_landed {
    fsdpc_coding from;
    void *sum;
    fsdpc_dtype sum_type;
} fsdpc_landed;
/* As fsdpc_device_reduce of what is decoded, in the order of `senders` ranks, of which this one is `own`. A launch for up
 * to 40. */
int fsdpc_device_sum_landed(fsdpc_device *device, const fsdpc_landed *list, int count, int senders,
                            int own, double scale, bool add);

#endif
