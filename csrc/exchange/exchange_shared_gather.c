/* Gathering through slots that all ranks of a host share.
 *
 * Each slot has a small record in the segment: which unit it holds, for which tag, which ranks hold the slot,
 * and how many chunks of each rank's piece have been claimed and finished. A gather
 *   1. takes hold of the slot: joins a slot that shows this unit at this tag, claims a slot that no rank
 *      holds, else waits (or uses private memory, if every rank that it waits for waits as well),
 *   2. casts this rank's piece chunk by chunk, then the unclaimed chunks of those pieces whose owner's
 *      master shard is final for this tag,
 *   3. waits for chunks that other ranks are casting.
 * So a rank waits only while another rank casts a chunk, or until the owner of a piece has begun the
 * same pass. The order in which ranks gather units does not matter. A release drops the hold; other
 * ranks can join the values until the slot is claimed for another unit.
 *
 * [Note: tags] A rank publishes its tag when it begins a root forward, after its optimizer step. If
 * the owner of a piece is waiting too (ranks run different numbers of forwards), its master shard cannot
 * change before this rank catches up, so an older tag with the same count of backwards is enough. Such
 * a tag is used only if no rank can continue with private memory: otherwise the owner may be behind, and wait
 * for a slot ([Note: stuck] in shm_stuck.c).
 */
#include <sched.h>

#include "exchange/exchange_shared_impl.h"
#include "base/mem.h"
#include "base/pause.h"
#include "base/status.h"

enum { CHUNK_BYTES = 1 << 20, LOCK_SPINS = 200 };

/* --- the slot's record ----------------------------------------------------------------------- */

static _Atomic uint32_t *
slot_next(struct fsdpc_slot_ctl *slot)
{
    return (_Atomic uint32_t *)(slot + 1);
}

static uint8_t *
slot_held(const fsdpc_exchange *x, struct fsdpc_slot_ctl *slot)
{
    return (uint8_t *)(slot_next(slot) + x->world);
}

size_t
fsdpc_shared_slot_stride(int world)
{
    return fsdpc_round_up(sizeof(struct fsdpc_slot_ctl) + (size_t)world * 5, 64);
}

void
fsdpc_shared_slot_clear(fsdpc_exchange *x, int slot)
{
    fsdpc_shared_slot(x, slot)->unit = -1;
}

/* A rank holds the lock for a few stores only. The checks here detect a rank that dies or stops meanwhile. */
static int
lock_slot(fsdpc_exchange *x, struct fsdpc_slot_ctl *slot, const fsdpc_wait *what)
{
    int64_t deadline = 0;
    for (uint32_t tries = 1;; tries++) {
        uint32_t holder = 0;
        if (atomic_compare_exchange_weak(&slot->lock, &holder, (uint32_t)x->rank + 1)) {
            return FSDPC_OK;
        }
        if (tries % LOCK_SPINS != 0) {
            fsdpc_pause();
            continue;
        }
        sched_yield();
        FSDPC_TRY(fsdpc_shm_check(x->shm, what));
        deadline = deadline ? deadline : fsdpc_shm_deadline(x->shm);
        if (holder > 0 && fsdpc_shm_now_ns() > deadline) {
            const int late = (int)holder - 1;
            return fsdpc_shm_timeout_error(x->shm, what, &late, 1);
        }
    }
}

static void
unlock_slot(struct fsdpc_slot_ctl *slot)
{
    atomic_store(&slot->lock, 0);
}

/* --- chunks ---------------------------------------------------------------------------------- */

/* A chunk is a range of bytes of a rank's shard, which may hold a part of a segment or many segments. */
static uint32_t
chunks_of_unit(const fsdpc_unit *unit)
{
    return (uint32_t)((fsdpc_unit_layout(unit)->shard_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES);
}

/* Returns the last segment that starts at or before a byte of the shard. */
static int
segment_at(const fsdpc_layout *layout, size_t byte)
{
    int low = 0, high = layout->segment_count - 1;
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (layout->segments[middle].shard_offset <= byte) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* Returns the first element at or behind a byte of the segment. In a coded segment that is the first element
 * there that begins a block, so that each chunk covers the blocks that begin in the chunk. */
static int64_t
element_at(const fsdpc_segment *seg, size_t byte)
{
    const int64_t i = (int64_t)((byte - seg->shard_offset) / fsdpc_dtype_bytes(seg->storage));
    return seg->codec == FSDPC_UNCODED ? i : fsdpc_codec_block(seg->codec, seg->row_numel, i);
}

static int
fill_chunk(fsdpc_exchange *x, fsdpc_unit *unit, int r, uint32_t chunk)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    const size_t first = (size_t)chunk * CHUNK_BYTES, last = first + CHUNK_BYTES;
    for (int s = segment_at(layout, first); s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        const size_t item = fsdpc_dtype_bytes(seg->storage);
        const size_t end = seg->shard_offset + (size_t)seg->piece_numel * item;
        if (seg->shard_offset >= last) {
            break;
        }
        size_t from = first > seg->shard_offset ? first : seg->shard_offset;
        size_t to = end < last ? end : last;
        if (from < to) {
            const int64_t begin = element_at(seg, from);
            FSDPC_TRY(fsdpc_exchange_cast_piece(x, unit, s, r, begin, element_at(seg, to) - begin));
        }
    }
    return FSDPC_OK;
}

/* Casts the chunks of rank r's piece that no rank has claimed yet. */
static int
fill_piece(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, int r, uint32_t chunks)
{
    _Atomic uint32_t *next = &slot_next(slot)[r];
    while (atomic_load(next) < chunks) {
        uint32_t chunk = atomic_fetch_add(next, 1);
        if (chunk >= chunks) {
            break;
        }
        FSDPC_TRY(fill_chunk(x, unit, r, chunk));
        if (atomic_fetch_add(&slot->done, 1) + 1 == slot->total) {
            fsdpc_shared_notify(x);
        }
    }
    return FSDPC_OK;
}

/* See [Note: tags]. */
static bool
masters_final(fsdpc_exchange *x, int r, bool older)
{
    uint64_t ready = atomic_load(&x->shared->ranks[r].ready);
    return ready >= x->tag || (older && ready >> FSDPC_TAG_BITS >= x->tag >> FSDPC_TAG_BITS);
}

static bool
all_final(fsdpc_exchange *x, bool older)
{
    for (int r = 0; r < x->world; r++) {
        if (r != x->rank && !masters_final(x, r, older)) {
            return false;
        }
    }
    return true;
}

/* Waits, or fails if this rank needs the master shard of a rank that has left in good order. A rank may
 * finish its master shard just before it leaves, so the departure is read first and the tag afterwards. */
static int
wait_for_masters(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, enum fsdpc_shm_way way)
{
    for (int r = 0; way == FSDPC_WAY_NONE && r < x->world; r++) {
        if (fsdpc_shm_left(x->shm, r) && !masters_final(x, r, true)) {
            return fsdpc_shm_left_error(x->shm, r, &wait->what);
        }
    }
    return fsdpc_shared_wait_step(x, wait, way);
}

/* --- taking hold ----------------------------------------------------------------------------- */

enum hold { JOINED, CLAIMED, BUSY };

static enum hold
hold_locked(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, uint32_t chunks,
            bool may_claim)
{
    bool same = slot->unit == fsdpc_unit_use(unit)->id && slot->tag == x->tag;
    if (!same && (slot->holders > 0 || !may_claim)) {
        return BUSY;
    }
    if (!same) {
        slot->unit = fsdpc_unit_use(unit)->id;
        slot->tag = x->tag;
        slot->touched = atomic_load(&x->shared->ranks[x->rank].touched);
        slot->claimer = x->rank;
        slot->total = chunks * (uint32_t)x->world;
        atomic_store(&slot->done, 0);
        for (int r = 0; r < x->world; r++) {
            atomic_store(&slot_next(slot)[r], 0);
        }
    }
    slot->holders++;
    slot_held(x, slot)[x->rank] = 1;
    return same ? JOINED : CLAIMED;
}

int
fsdpc_shared_drop_prefetched(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        if (x->uses[u].begun && x->uses[u].refs == 0) {
            FSDPC_TRY(fsdpc_shared_release(x, x->units[u]));
        }
    }
    return FSDPC_OK;
}

/* Sets *busy if the slot is in use. If may_wait, *busy means that the caller must use private memory: a wait
 * could not end, because this rank holds the slot for another unit, or all other ranks seem to wait as well.
 *
 * A slot is not claimed before every rank has begun this pass, unless all ranks wait: a rank that is ahead
 * (no_sync does not synchronise the ranks) would hold a slot that it cannot fill, while the ranks that are
 * behind need the slot for the previous pass. */
static int
take_hold(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, bool may_wait,
          bool *busy)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    fsdpc_shared_wait_begin(x, &wait, "gather", unit);
    uint32_t chunks = chunks_of_unit(unit);
    *busy = false;
    if (may_wait && slot_held(x, slot)[x->rank]) {
        /* This rank may hold the slot only for a prefetch, which can be dropped. */
        FSDPC_TRY(fsdpc_shared_drop_prefetched(x));
    }
    for (;;) {
        fsdpc_shared_wait_read(x, &wait);
        bool final = all_final(x, false);
        enum fsdpc_shm_way way = final                ? FSDPC_WAY_PRIVATE
                                 : all_final(x, true) ? FSDPC_WAY_OLDER
                                                      : FSDPC_WAY_NONE;
        bool act = may_wait && !final && fsdpc_shared_must_act(x, &wait, way);
        FSDPC_GOTO(lock_slot(x, slot, &wait.what), done);
        enum hold hold = hold_locked(x, unit, slot, chunks, final || act);
        unlock_slot(slot);
        if (hold == CLAIMED && !final) {
            fsdpc_shared_notify(x); /* Ranks that may not claim a slot can now join this one. */
        }
        if (hold != BUSY) {
            fsdpc_shared_wait_was_worth(x, &wait);
            goto done;
        }
        *busy = !may_wait || slot_held(x, slot)[x->rank] || act;
        if (!*busy) {
            FSDPC_GOTO(fsdpc_shared_drop_prefetched(x), done);
            *busy = final && fsdpc_shared_must_act(x, &wait, way);
        }
        if (*busy) {
            goto done;
        }
        FSDPC_GOTO(wait_for_masters(x, &wait, way), done);
    }
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

/* --- gather ---------------------------------------------------------------------------------- */

/* True if this rank could fill unclaimed chunks by accepting masters whose tag is older than this pass's. */
static bool
older_helps(fsdpc_exchange *x, struct fsdpc_slot_ctl *slot, uint32_t chunks)
{
    for (int r = 0; r < x->world; r++) {
        if (atomic_load(&slot_next(slot)[r]) < chunks && !masters_final(x, r, false) &&
            masters_final(x, r, true)) {
            return true;
        }
    }
    return false;
}

/* Fills this rank's piece. With `all`, also fills other ranks' pieces, and waits for all values. */
static int
complete(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_slot_ctl *slot, bool all)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    uint32_t chunks = chunks_of_unit(unit);
    fsdpc_shared_wait_begin(x, &wait, "gather", unit);
    FSDPC_GOTO(fill_piece(x, unit, slot, x->rank, chunks), done);
    while (all && atomic_load(&slot->done) < slot->total) {
        fsdpc_shared_wait_read(x, &wait);
        enum fsdpc_shm_way way = older_helps(x, slot, chunks) ? FSDPC_WAY_OLDER : FSDPC_WAY_NONE;
        bool act = fsdpc_shared_must_act(x, &wait, way);
        for (int k = 1; k < x->world; k++) {
            int r = (x->rank + k) % x->world;
            if (masters_final(x, r, act)) {
                FSDPC_GOTO(fill_piece(x, unit, slot, r, chunks), done);
            }
        }
        if (!act && atomic_load(&slot->done) < slot->total) {
            FSDPC_GOTO(wait_for_masters(x, &wait, way), done);
        }
    }
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

/* Gathers into private memory that replaces the slot at the unit's addresses. This rank alone fills it. */
static int
gather_spare(fsdpc_exchange *x, fsdpc_unit *unit)
{
    int status = FSDPC_OK;
    struct fsdpc_shared_wait wait;
    FSDPC_TRY(fsdpc_arena_spare(x->arena, fsdpc_unit_range(unit)));
    fsdpc_exchange_note(x, FSDPC_TRACE_SPARE, unit, fsdpc_unit_range(unit)->bytes);
    fsdpc_shared_wait_begin(x, &wait, "gather", unit);
    uint32_t chunks = chunks_of_unit(unit);
    for (int k = 0; k < x->world; k++) {
        int r = (x->rank + k) % x->world;
        while (r != x->rank) {
            fsdpc_shared_wait_read(x, &wait);
            enum fsdpc_shm_way way = masters_final(x, r, true) ? FSDPC_WAY_OLDER : FSDPC_WAY_NONE;
            if (masters_final(x, r, false) || fsdpc_shared_must_act(x, &wait, way)) {
                break;
            }
            FSDPC_GOTO(wait_for_masters(x, &wait, way), done);
        }
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            FSDPC_GOTO(fill_chunk(x, unit, r, chunk), done);
        }
    }
    fsdpc_unit_use(unit)->begun = fsdpc_unit_use(unit)->ready = true;
done:
    fsdpc_shared_wait_end(x, &wait, unit);
    return status;
}

int
fsdpc_shared_gather(fsdpc_exchange *x, fsdpc_unit *unit, bool may_wait)
{
    struct fsdpc_slot_ctl *slot = fsdpc_shared_slot(x, fsdpc_unit_use(unit)->slot);
    fsdpc_wait what = {.op = "gather", .unit = fsdpc_unit_name(unit)};
    FSDPC_TRY(fsdpc_shm_check(x->shm, &what));
    if (!fsdpc_unit_use(unit)->begun) {
        bool busy;
        FSDPC_TRY(take_hold(x, unit, slot, may_wait, &busy));
        if (busy) {
            FSDPC_TRY(may_wait ? gather_spare(x, unit) : FSDPC_OK);
            return may_wait ? fsdpc_shared_check_changes(x, unit) : FSDPC_OK;
        }
        fsdpc_unit_use(unit)->begun = true;
        FSDPC_TRY(fsdpc_arena_unveil(x->arena, fsdpc_unit_range(unit)));
        FSDPC_TRY(fsdpc_shared_check_join(x, unit, slot->claimer, slot->touched));
    }
    if (!fsdpc_unit_use(unit)->ready && !fsdpc_unit_is_spare(unit)) {
        FSDPC_TRY(complete(x, unit, slot, may_wait));
        fsdpc_unit_use(unit)->ready = may_wait;
    }
    return may_wait ? fsdpc_shared_check_changes(x, unit) : FSDPC_OK;
}

/* --- release --------------------------------------------------------------------------------- */

int
fsdpc_shared_release(fsdpc_exchange *x, fsdpc_unit *unit)
{
    fsdpc_unit_use(unit)->begun = fsdpc_unit_use(unit)->ready = false;
    if (fsdpc_unit_is_spare(unit)) {
        FSDPC_TRY(fsdpc_arena_restore(x->arena, fsdpc_unit_range(unit)));
        return x->poison ? fsdpc_exchange_veil(x, unit) : FSDPC_OK;
    }
    if (x->poison) {
        FSDPC_TRY(fsdpc_exchange_veil(x, unit));
    }
    struct fsdpc_slot_ctl *slot = fsdpc_shared_slot(x, fsdpc_unit_use(unit)->slot);
    fsdpc_wait what = {.op = "release", .unit = fsdpc_unit_name(unit)};
    FSDPC_TRY(lock_slot(x, slot, &what));
    slot_held(x, slot)[x->rank] = 0;
    bool last = --slot->holders == 0;
    unlock_slot(slot);
    if (last) {
        fsdpc_shared_notify(x);
    }
    return FSDPC_OK;
}
