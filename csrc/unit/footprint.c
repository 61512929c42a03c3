/* The bytes of a unit. See footprint.h. */
#include "unit/footprint.h"

#include "base/mem.h"

static bool
needs_no_cast(const fsdpc_layout *layout)
{
    for (int s = 0; s < layout->segment_count; s++) {
        if (layout->segments[s].storage != layout->segments[s].compute ||
            layout->segments[s].codec != FSDPC_UNCODED) {
            return false;
        }
    }
    return true;
}

static bool
sees_other_grads(const fsdpc_layout *layout)
{
    for (int s = 0; s < layout->segment_count; s++) {
        if (layout->segments[s].trainable &&
            layout->segments[s].storage != layout->segments[s].accumulate) {
            return true;
        }
    }
    return false;
}

/* In which form the bytes of a gradient's piece are counted. */
enum form {
    ACCUMULATED, /* the piece in the accumulate dtype */
    SENT,        /* the piece as a rank sends it: in the reduce dtype, or coded */
    CODED,       /* the piece's codes; 0 bytes without a reduce codec */
    LOST,        /* the error that coding leaves, in float32; 0 bytes without error feedback */
};

static size_t
piece_bytes(const fsdpc_segment *seg, enum form form)
{
    if (form == LOST) {
        return seg->feedback ? (size_t)seg->piece_numel * sizeof(float) : 0;
    }
    if (form == CODED || (form == SENT && seg->reduce_coded_bytes > 0)) {
        return seg->reduce_coded_bytes;
    }
    return (size_t)seg->piece_numel *
           fsdpc_dtype_bytes(form == SENT ? seg->reduce : seg->accumulate);
}

/* Returns the bytes of `copies` pieces of each trainable segment; sets `offsets` as in footprint.h. */
static size_t
place_segments(const fsdpc_layout *layout, int copies, enum form form, size_t *offsets)
{
    size_t bytes = 0;
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (offsets) {
            offsets[s] = bytes;
        }
        if (seg->trainable) {
            bytes += fsdpc_round_up(piece_bytes(seg, form) * (size_t)copies, layout->align_bytes);
        }
    }
    return bytes;
}

size_t
fsdpc_footprint_local(const fsdpc_layout *layout, size_t *offsets)
{
    return place_segments(layout, layout->world, ACCUMULATED, offsets);
}

size_t
fsdpc_footprint_landing(const fsdpc_layout *layout, size_t *offsets)
{
    return place_segments(layout, 1, SENT, offsets);
}

size_t
fsdpc_footprint_packed(const fsdpc_layout *layout)
{
    return fsdpc_round_up(layout->reduce_bytes, layout->align_bytes);
}

size_t
fsdpc_footprint_codes(const fsdpc_layout *layout, size_t *offsets)
{
    return place_segments(layout, layout->world, CODED, offsets);
}

size_t
fsdpc_footprint_lost(const fsdpc_layout *layout, size_t *offsets)
{
    return place_segments(layout, 1, LOST, offsets);
}

static size_t
gathered_bytes(const fsdpc_layout *layout)
{
    size_t bytes = layout->full_bytes;
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        const size_t plain = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute);
        if (seg->coded_bytes > 0) {
            bytes -= (plain - seg->coded_bytes) * (size_t)layout->world;
        }
    }
    return bytes;
}

enum { SHARE_ALIGN = 64 };

bool
fsdpc_footprint_next_share(const fsdpc_layout *layout, int replicas, int *segment,
                           fsdpc_share *share)
{
    if (!fsdpc_layout_next_run(layout, segment, &share->run)) {
        return false;
    }
    share->numel = (share->run.numel + replicas - 1) / replicas;
    share->offset = share->end;
    share->end +=
        fsdpc_round_up((size_t)share->numel * fsdpc_dtype_bytes(share->run.dtype), SHARE_ALIGN);
    return true;
}

size_t
fsdpc_footprint_shares(const fsdpc_layout *layout, int replicas, size_t *begin)
{
    fsdpc_share share = {.end = 0};
    for (int s = 0; fsdpc_footprint_next_share(layout, replicas, &s, &share);) {}
    const size_t past_the_run = sizeof(double) * (size_t)replicas;
    *begin = fsdpc_round_up(layout->grad_bytes + past_the_run, SHARE_ALIGN);
    return share.end;
}

static size_t
partial_bytes(const fsdpc_layout *layout, int replicas)
{
    size_t begin;
    if (replicas <= 1 || layout->grad_bytes == 0) {
        return layout->grad_bytes * (size_t)replicas;
    }
    const size_t shares = fsdpc_footprint_shares(layout, replicas, &begin);
    return begin + shares * (size_t)replicas;
}

static size_t
landing_bytes(const fsdpc_layout *layout, const fsdpc_footprint_options *options, int senders)
{
    const size_t landing = fsdpc_footprint_landing(layout, NULL) * (size_t)senders;
    return fsdpc_footprint_packed(layout) - layout->reduce_bytes +
           (options->to_all ? landing : fsdpc_footprint_codes(layout, NULL)) + landing;
}

fsdpc_footprint
fsdpc_footprint_of(const fsdpc_layout *layout, const fsdpc_footprint_options *options)
{
    const bool reads_master = layout->world == 1 && needs_no_cast(layout) && !options->offload;
    const bool direct = options->foreign || reads_master;
    /* A group of one rank does not cast its gradients to the reduce dtype. */
    const size_t packed = layout->world > 1 ? layout->reduce_bytes : layout->grad_bytes;
    const size_t full = layout->full_bytes ? layout->full_bytes : 1;
    const size_t seen = sees_other_grads(layout) ? layout->shard_bytes : 0;
    const bool apart = !options->to_all || fsdpc_footprint_codes(layout, NULL) > 0;
    const int senders = apart ? options->senders : 0;
    return (fsdpc_footprint){
        .direct = direct,
        .master_bytes = layout->shard_bytes,
        .grad_bytes = layout->grad_bytes,
        .grad_out_bytes = seen,
        .grads_bytes = seen ? fsdpc_round_up(layout->grad_bytes, layout->align_bytes) + seen
                            : layout->grad_bytes,
        .partial_bytes = partial_bytes(layout, options->replicas),
        .local_bytes = fsdpc_footprint_local(layout, NULL),
        .range_bytes = direct ? 0 : fsdpc_round_up(full, options->range_grain),
        .reduce_bytes = fsdpc_round_up(
            packed + (senders > 0 && packed > 0 ? landing_bytes(layout, options, senders) : 0),
            options->page_bytes),
        .coded_bytes = layout->coded_bytes,
        .gathered_bytes = gathered_bytes(layout),
        .reduced_bytes = senders > 0 ? fsdpc_footprint_landing(layout, NULL) * (size_t)layout->world
                                     : layout->reduce_bytes,
        .lost_bytes = senders > 0 ? fsdpc_footprint_lost(layout, NULL) : 0,
    };
}

int
fsdpc_footprint_grad_slots(size_t largest, size_t all, int reduce_slots)
{
    const int slots = reduce_slots > 0 ? reduce_slots : 1;
    return (size_t)slots * largest < all ? slots : 0;
}

int
fsdpc_footprint_reduce_slots(int world, bool any_offload, size_t largest, int wanted)
{
    return largest == 0 || (world == 1 && !any_offload) ? 0 : wanted;
}
