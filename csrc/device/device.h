/* The interface of a device: its memory, its streams, and the kernels of kernels.h on it.
 *
 * The `cpu` device runs all work immediately, on the calling thread and its helper threads. A device with
 * streams (a GPU) enqueues work. Callers see one interface. In the implementer's table (device_impl.h),
 * entries that are marked (optional) may be NULL; the table says what happens if they are.
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
/* A stream is the driver's own handle, such as torch's `stream.cuda_stream`. NULL is the default stream. */
typedef struct fsdpc_stream fsdpc_stream;

/* Which memory a caller's buffer lies in. On the CPU device the two kinds mean the same memory. */
enum fsdpc_memory_kind { FSDPC_ON_DEVICE, FSDPC_ON_HOST };

typedef struct fsdpc_device_caps {
    bool asynchronous;   /* work is queued on streams */
    bool host_memory;    /* the CPU can read and write the device's memory */
    bool virtual_memory; /* addresses can be reserved, and memory can be mapped at them */
    /* A GPU with a simulated driver: its memory is host memory, and tensors in it are CPU tensors. */
    bool stand_in;
    int ordinal;        /* the GPU's number among this process's GPUs, -1 for the CPU */
    size_t align_bytes; /* preferred alignment of parameters and of the ends of shards */
    const char *note;   /* one sentence that users should see once, or NULL */
} fsdpc_device_caps;

/* The process-wide CPU device, made on first call with the kernels of this processor and
 * `FSDPC_NUM_THREADS` (default: 1) threads. Never freed. Thread safe. */
int fsdpc_device_cpu(fsdpc_device **out);
/* Returns the process-wide device of one GPU, made on first call in the GPU's primary context
 * (torch's), with all kernels loaded. Never freed. Thread safe. Fails with FSDPC_E_UNAVAILABLE, and
 * a text of one sentence, if there is no such GPU, no driver, or no kernels in this extension. */
int fsdpc_device_cuda(int ordinal, fsdpc_device **out);
/* Sets the number of threads that big kernels may use, the caller included (1..256). Local. */
int fsdpc_device_set_threads(fsdpc_device *device, int threads);
int fsdpc_device_threads(const fsdpc_device *device);
const char *fsdpc_device_name(const fsdpc_device *device);         /* "cpu" */
const char *fsdpc_device_kernels_name(const fsdpc_device *device); /* "avx512" */
const fsdpc_device_caps *fsdpc_device_get_caps(const fsdpc_device *device);

/* Allocates a zeroed block, aligned to caps.align_bytes or more. (On the CPU, blocks of 2 MiB or more are
 * aligned to 2 MiB and have huge pages if possible; smaller blocks are aligned to 4096 bytes.) 0 bytes give
 * NULL. Fails with FSDPC_E_NOMEM or FSDPC_E_DEVMEM. */
int fsdpc_device_alloc(fsdpc_device *device, size_t bytes, void **out);
/* Frees a block. `bytes` is as given to alloc; `block` may be NULL. The host waits for
 * this thread's current stream, the default stream and the device's own streams. */
void fsdpc_device_free(fsdpc_device *device, void *block, size_t bytes);
/* Discards the values of a whole block of fsdpc_device_alloc, so that its physical
 * memory may be freed. The block's bytes are undefined until they are written again. */
int fsdpc_device_discard(fsdpc_device *device, void *block, size_t bytes);

/* A foreign allocator (device_alloc.c). If torch's is set, one caching allocator serves torch and fsdpc. */
typedef struct fsdpc_allocator {
    void *context;
    /* Allocates a block of undefined contents, aligned to caps.align_bytes or more, for use on
     * `stream`. Other streams first wait for `stream` by events. Returns a status; a failure sets a text. */
    int (*alloc)(void *context, size_t bytes, fsdpc_stream *stream, void **out);
    void (*free)(void *context, void *block); /* called when no work uses the block any more */
    void (*trim)(void *context);              /* (optional) returns unused memory to the driver */
    /* (optional) Called once, when another allocator has been set and all its blocks have been freed. */
    void (*release)(void *context);
} fsdpc_allocator;
/* Sets the allocator of later fsdpc_device_alloc calls; NULL selects the device's own memory. A block is
 * freed by the allocator that made it. Copies the table. Fails with FSDPC_E_NOMEM if memory is short. */
int fsdpc_device_set_allocator(fsdpc_device *device, const fsdpc_allocator *allocator);
/* Returns the bytes of all live blocks that foreign allocators made. */
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

/* Makes a non-blocking stream, without implicit waits for the default stream. `urgent`: high priority. */
int fsdpc_device_stream_new(fsdpc_device *device, bool urgent, fsdpc_stream **out);
/* Frees a stream, on which work may still be in flight. NULL is allowed. */
void fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream);
/* Makes `stream`, any stream of the device, this thread's current stream. Returns the previous one. */
fsdpc_stream *fsdpc_device_use(fsdpc_device *device, fsdpc_stream *stream);
fsdpc_stream *fsdpc_device_current(fsdpc_device *device);

/* Takes an event from the device's pool. The driver is called only if the pool is empty.
 * An event may be recorded again or freed as soon as the waits for it have been queued. */
int fsdpc_device_event_new(fsdpc_device *device, fsdpc_event **out);
void fsdpc_device_event_free(fsdpc_device *device, fsdpc_event *event);
/* Sets *id to the number of the capture if the current stream is being captured into a graph,
 * else to 0. During a capture the host must not poll or wait, and events that were recorded
 * outside of the capture have no effect: the caller must order the launch of the graph. */
int fsdpc_device_capture(fsdpc_device *device, uint64_t *id);
/* Records the event after all work that has been queued on the current stream so far. */
int fsdpc_device_record(fsdpc_device *device, fsdpc_event *event);
/* Later work on the current stream waits for the event; the host does not. */
int fsdpc_device_wait(fsdpc_device *device, fsdpc_event *event);
/* Sets *done to true if the work before the event is done, or if the event was never recorded. */
int fsdpc_device_poll(fsdpc_device *device, fsdpc_event *event, bool *done);
/* Waits on the host for the event. Fails with FSDPC_E_TIMEOUT, naming `what`, after `timeout` seconds. */
int fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout, const char *what);
/* Returns how often the host has waited, in fsdpc_device_finish and other calls. A profiler does not show
 * these waits, because they poll. */
int64_t fsdpc_device_waits(const fsdpc_device *device);
/* Gets the bytes of the GPU that no process uses, and all bytes of the GPU; both are 0 for the CPU device. */
int fsdpc_device_free_bytes(fsdpc_device *device, size_t *free_bytes, size_t *total);

/* --- host memory and copies (device_memory.c) ------------------------------------------------------ */

/* Allocates zeroed pinned host memory. Fails with FSDPC_E_NOMEM if memory is short. */
int fsdpc_device_host_alloc(fsdpc_device *device, size_t bytes, void **out);
void fsdpc_device_host_free(fsdpc_device *device, void *block, size_t bytes);
/* Asynchronous: until the copy is done the caller keeps the host memory and does not change it. */
int fsdpc_device_copy_in(fsdpc_device *device, void *dst, const void *host, size_t bytes);
int fsdpc_device_copy_out(fsdpc_device *device, void *host, const void *src, size_t bytes);
/* Copies within the device's memory. The two ranges must not overlap. */
int fsdpc_device_copy(fsdpc_device *device, void *dst, const void *src, size_t bytes);

/* --- addresses and pieces of memory (device_memory.c) -----------------------------------------------
 *
 * What an arena (arena.h) is made of: an address is reserved once, and pieces of memory are mapped at it
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
/* Frees a reserved address. No piece may be mapped at the address any more. */
void fsdpc_device_unreserve(fsdpc_device *device, void *address, size_t bytes);
/* Allocates a piece, or fails with FSDPC_E_DEVMEM. A mapping keeps the memory alive after piece_free. */
int fsdpc_device_piece_new(fsdpc_device *device, size_t bytes, fsdpc_piece **out);
void fsdpc_device_piece_free(fsdpc_device *device, fsdpc_piece *piece);
/* Maps the whole piece at a reserved address that has no mapping. */
int fsdpc_device_show(fsdpc_device *device, void **address, fsdpc_piece *piece);
int fsdpc_device_hide(fsdpc_device *device, void *address, fsdpc_piece *piece);

/* --- many tensors at once (device_pack.c) ---------------------------------------------------------- */

/* The place of one tensor in a flat buffer. */
typedef struct fsdpc_pack_target {
    int64_t n;
    size_t offset; /* in bytes; a multiple of the element's size */
    fsdpc_dtype dtype;
} fsdpc_pack_target;
/* A tensor to pack. data NULL: zeros are written. strides NULL: the tensor is contiguous, and shape is not
 * read. */
typedef struct fsdpc_pack_source {
    const void *data;
    fsdpc_dtype dtype;
    int ndim;
    const int64_t *shape, *strides;
    bool add; /* true: fsdpc_device_pack_onto adds the tensor to the base */
} fsdpc_pack_source;
typedef struct fsdpc_pack_plan fsdpc_pack_plan;

/* The place of a target's elements in a second buffer, the base. The dtype is F32 or F64. The offset, in
 * bytes, is a multiple of the element's size. */
typedef struct fsdpc_pack_base {
    size_t offset;
    fsdpc_dtype dtype;
} fsdpc_pack_base;

/* Makes a plan to pack tensors into a buffer of `bytes` bytes. Each plan of a unit is made once. Targets have
 * rising offsets and do not overlap. Each target has a base (`bases` NULL: no source is ever added). Gaps
 * between targets become zeros, or stay unchanged with keep_gaps. Fails with FSDPC_E_INVAL, FSDPC_E_NOMEM or
 * FSDPC_E_DEVMEM. */
int fsdpc_device_pack_plan(fsdpc_device *device, const fsdpc_pack_target *targets,
                           const fsdpc_pack_base *bases, int count, size_t bytes, bool keep_gaps,
                           fsdpc_pack_plan **out);
void fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan);
/* Packs one source per target, with as many elements as the target. If sources[i].add is true, the
 * target becomes base + source * scale in the base's type, rounded once (a source without data adds nothing).
 * `base` may be NULL if no source is added, and may be `buffer` if offsets and types agree. One launch on a
 * device that queues. */
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
/* A contiguous run of n > 0 elements of one dtype. */
typedef struct fsdpc_stretch {
    void *data;
    int64_t n;
    fsdpc_dtype dtype;
} fsdpc_stretch;
/* Writes the sums of |x|^p to `parts`, stretch by stretch; if p is 2, also the largest |x| and
 * whether all x are finite. p is positive and finite. One launch for up to 128 stretches. */
int fsdpc_device_norm_into(fsdpc_device *device, const fsdpc_stretch *list, int count, double p,
                           void *parts);
/* Sets *total, itself one part, to the sum of `count` parts; with `add`, adds this sum to *total. */
int fsdpc_device_norm_total(fsdpc_device *device, const void *parts, int64_t count, bool add,
                            void *total);
/* Writes two doubles on the device: out[0] = the norm of order p, out[1] = the factor
 * min(1, max_norm / (norm + 1e-6)). */
int fsdpc_device_clip_factor(fsdpc_device *device, const void *total, double p, double max_norm,
                             double *out);
/* x[i] *= *factor, a double on the device. A factor of 1 leaves x alone. As many launches as norm_into. */
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
    /* In host memory, for states of 8 bits: codes[0] maps m to codes, and codes[1] maps v to codes. */
    const fsdpc_step_codes *codes;
    void *scratch; /* count * FSDPC_STEP_SCRATCH bytes, in use until the step ends */
} fsdpc_steps;
enum { FSDPC_STEP_SCRATCH = 256 };
/* Steps all tensors: one launch per 32 tensors fills their entries in `scratch`, and one launch steps
 * all elements (two if tensors of float64 and of other types are mixed). For a tensor without
 * elements only its step number rises. Fails with FSDPC_E_INVAL if memory is not aligned to its type. */
int fsdpc_device_step(fsdpc_device *device, const fsdpc_steps *steps);
/* Convert n elements of F32, BF16 or F16 to codes, with one scale per FSDPC_STEP_BLOCK elements, and back. */
int fsdpc_device_pack8(fsdpc_device *device, const void *values, fsdpc_dtype type, int64_t n,
                       int8_t *codes, float *scales);
int fsdpc_device_unpack8(fsdpc_device *device, const int8_t *codes, const float *scales, int64_t n,
                         void *values, fsdpc_dtype type);

/* Pieces of a matrix of floats, each of which is coded by itself (csrc/codec/codec.h). In `values` the
 * pieces are contiguous. In `coded` each piece begins `stride` bytes after the begin of the previous one. */
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
/* Encode values to codes, or decode codes to values. With FSDPC_UNCODED,
 * encoding copies the values, and decoding fails with FSDPC_E_INVAL. One
 * launch for up to 48 codings; the list is read before the call returns. */
int fsdpc_device_encode(fsdpc_device *device, const fsdpc_coding *list, int count);
int fsdpc_device_decode(fsdpc_device *device, const fsdpc_coding *list, int count);

/* Pieces of several ranks and their sum. from.values is this rank's own piece. from.coded holds the other
 * ranks' pieces, from.stride bytes apart, as codes (with FSDPC_UNCODED: as values of from.type). */
typedef struct fsdpc_landed {
    fsdpc_coding from;
    void *sum;
    fsdpc_dtype sum_type;
} fsdpc_landed;
/* Sums the decoded pieces of `senders` ranks in rank order, as fsdpc_device_reduce
 * does. `own` is this rank's number among the senders. One launch for up to 40 sums. */
int fsdpc_device_sum_landed(fsdpc_device *device, const fsdpc_landed *list, int count, int senders,
                            int own, double scale, bool add);

#endif
