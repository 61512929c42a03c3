/* Computes where each parameter of a unit lies: pure arithmetic, no memory is touched.
 *
 * A unit's buffers consist of segments. A segment is cut into `world` equal pieces; piece r belongs to
 * rank r. There are two kinds of segments, and a unit may have both:
 *
 * Flat: all parameters without rows (row_numel 0) that have equal (storage, compute, reduce dtype,
 * trainable). They lie end to end in the order given. Each starts at an offset that is a multiple of
 * `align_bytes` in every dtype that a parameter may have. Pieces are multiples of `align_bytes` in every
 * dtype. A cut may go through a parameter.
 *
 *   full (gathered) buffer, compute dtype      rank 1's shard, storage dtype
 *   | seg 0: p0 p1 | p1 p2 . | seg 1: p3 . |   | seg 0 piece 1 | seg 1 piece 1 |
 *   |<- piece 0 -> |<piece 1>|
 *
 * By rows: one parameter (row_numel > 0). A piece has ceil(rows / world) rows, so that rank r owns the rows
 * of torch.chunk(parameter, world, 0)[r]: the last ranks may own fewer rows, or none. The parameter is
 * contiguous in the full buffer, and padding follows its last row. A piece may have any size, so in the full
 * and reduce buffers the pieces of ranks > 0 are aligned to one element only; each segment starts at a
 * multiple of `align_bytes` in every buffer, and so does a rank's part in its shard and shard gradient.
 *
 *   5 rows, 4 ranks: | row 0, row 1 | row 2, row 3 | row 4, padding | padding |
 *
 * Cuts depend only on sizes, `world` and `align_bytes`, not on the compute and reduce dtypes. A frozen
 * segment may become trainable later; only the layout of the gradient buffers changes then. Offsets in
 * elements hold for every dtype; each buffer has its own byte offset per segment.
 */
#ifndef FSDPC_LAYOUT_H
#define FSDPC_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "codec/codec.h"

typedef struct fsdpc_param_spec {
    const char *name; /* copied */
    int64_t numel;    /* number of elements, >= 0; with FSDPC_BYTES an element is a byte */
    fsdpc_dtype storage, compute, reduce;
    bool trainable;    /* false: no room in gradient buffers. Must be false for FSDPC_BYTES. */
    int64_t row_numel; /* elements of one row, a divisor of numel; 0: may be cut anywhere */
    /* How gathered values and gradients are coded between ranks. Only for floats that are cut by rows. */
    fsdpc_codec codec;
    fsdpc_codec reduce_codec;
    bool feedback; /* the error that reduce_codec makes is added to the next gradient */
} fsdpc_param_spec;

typedef struct fsdpc_param_place {
    char *name;
    int segment;
    int64_t offset; /* elements from the start of the segment */
    int64_t numel;
    int trainable_index; /* position among the unit's trainable parameters, or -1 */
} fsdpc_param_place;

typedef struct fsdpc_segment {
    fsdpc_dtype storage, compute, reduce;
    fsdpc_dtype accumulate;   /* of the shard gradient: F64 if storage or reduce is F64, else F32 */
    bool trainable;           /* has room in gradient buffers */
    int64_t numel;            /* elements up to the end of the last parameter */
    int64_t row_numel;        /* > 0: by rows; 0: flat */
    fsdpc_codec codec;        /* by rows: how gathered values are coded in every exchange */
    size_t coded_bytes;       /* bytes of a coded piece; 0: pieces travel in the compute dtype */
    fsdpc_codec reduce_codec; /* by rows: how gradients are coded if ranks send them as pieces */
    size_t reduce_coded_bytes; /* bytes of a coded piece; 0: pieces travel in the reduce dtype */
    bool feedback;             /* the sender keeps the error of coding its gradients */
    int64_t piece_numel;       /* elements of one rank's piece; world * piece_numel >= numel */
    int first, count;          /* its parameters: layout->order[first] to [first + count - 1] */
    size_t full_offset;        /* bytes, in the gathered buffer (compute dtype) */
    size_t shard_offset;       /* bytes, in each rank's shard (storage dtype) */
    size_t grad_offset;        /* bytes, in each rank's shard gradient (accumulate dtype) */
    size_t reduce_offset;      /* bytes, in each rank's reduce buffer (reduce dtype) */
} fsdpc_segment;

typedef struct fsdpc_layout {
    int world;
    size_t align_bytes;
    int param_count, segment_count, trainable_count;
    fsdpc_param_place *params;
    fsdpc_segment *segments;
    int *order;            /* all parameters, segment by segment, by rising offset */
    size_t full_bytes;     /* gathered unit */
    size_t shard_bytes;    /* one rank's master shard */
    size_t grad_bytes;     /* one rank's shard gradient */
    size_t reduce_bytes;   /* one rank's packed full gradient */
    size_t coded_bytes;    /* coded pieces of all segments and ranks */
    int64_t padding_bytes; /* the part of full_bytes that holds no parameter */
} fsdpc_layout;

/* A run of the gradient buffer: consecutive trainable segments with the same accumulate dtype, and the gaps
 * between them. A collective over the buffer needs one call per run. */
typedef struct fsdpc_grad_run {
    size_t offset; /* bytes, in each rank's shard gradient */
    int64_t numel;
    fsdpc_dtype dtype;
} fsdpc_grad_run;

/* The elements of one parameter that one rank owns. With length 0 the rank owns none. */
typedef struct fsdpc_span {
    int64_t param_begin; /* first element of the parameter that this rank owns */
    int64_t piece_begin; /* position of that element in the rank's piece of the segment */
    int64_t length;
} fsdpc_span;

/* Builds the layout. `align_bytes` is a power of two from 16 to 2 MiB; a unit holds at most 2^52
 * elements, the padding of segments by rows included. On success *out is owned by the caller
 * (fsdpc_layout_free). Errors: FSDPC_E_INVAL with the parameter's name, FSDPC_E_NOMEM; *out is then NULL. An
 * empty list (param_count 0) gives a layout of zero bytes. */
int fsdpc_layout_build(const fsdpc_param_spec *specs, int param_count, int world,
                       size_t align_bytes, fsdpc_layout **out);
/* Sets which segments are trainable, one byte each: offsets and cuts of values are unchanged, offsets in
 * gradient buffers and trainable_index change. FSDPC_BYTES stays frozen (checked by assert only). */
void fsdpc_layout_set_trainable(fsdpc_layout *layout, const uint8_t *trainable);
/* NULL is allowed. */
void fsdpc_layout_free(fsdpc_layout *layout);

/* Returns the elements of `param` that `rank` owns. Both must be in range (checked by assert only). */
fsdpc_span fsdpc_layout_span(const fsdpc_layout *layout, int param, int rank);
/* Sets *run to the next run from *segment on, and moves *segment past the run. Returns false if there is no
 * further run. */
bool fsdpc_layout_next_run(const fsdpc_layout *layout, int *segment, fsdpc_grad_run *run);
/* Returns the bytes of a rank's shard that hold no parameter. */
int64_t fsdpc_layout_shard_padding(const fsdpc_layout *layout, int rank);
/* Returns the byte offset of a parameter's first element in the gathered buffer. */
size_t fsdpc_layout_full_offset(const fsdpc_layout *layout, int param);
/* Returns the byte offset of a trainable parameter's first element in the reduce buffer. */
size_t fsdpc_layout_reduce_offset(const fsdpc_layout *layout, int param);

#endif
