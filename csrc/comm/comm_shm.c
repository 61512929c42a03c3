/* The communicator of the ranks of one host: rounds over staging memory in the shared segment.
 *
 * Buffers are copied through the stage chunk by chunk. All sums add the ranks in order. Values
 * and gradients of units do not pass through the stage: units share memory (exchange_shared.c).
 *
 * A round is: write to the stage, barrier, read the other ranks' stages. The stage has two halves
 * used in turn; a rank that writes a half for round k + 2 has passed the barrier of round k + 1,
 * which the others entered after reading round k. So one barrier a round is enough.
 */
#include <stdalign.h>
#include <stdio.h>
#include <string.h>

#include "comm/comm_impl.h"
#include "base/forks.h"
#include "base/mem.h"
#include "base/status.h"

enum {
    STAGE_BYTES = 512 * 1024, /* size of half a rank's stage: small enough to stay in a cache */
    TILE_NUMEL = 64 * 1024,   /* elements of a tile: 16-bit types are summed in F32, tile by tile */
    /* Above this size, an all_reduce among more than two ranks splits the
     * work among the ranks; up to this size, every rank does all the work. */
    SPLIT_BYTES = 64 * 1024,
};

enum shm_call_op {
    CALL_ALL_GATHER = 1,
    CALL_REDUCE_SCATTER,
    CALL_ALL_REDUCE,
    CALL_BROADCAST,
    CALL_BARRIER,
    CALL_AGREE,
    CALLS,
};

/* What a rank calls. Every round compares all ranks' calls. Ranks that call different collectives, or one
 * collective for different reasons (barriers of a save and of a load), get an error, not wrong bytes. */
typedef struct shm_call {
    uint16_t op;
    uint16_t dtype;
    uint32_t detail; /* root or reduction */
    uint64_t count;  /* bytes or elements */
    uint64_t reason; /* reason_of(what) */
    char what[40];   /* the argument `what`, cut to fit, for error texts */
} shm_call;

typedef struct shm_call_line {
    alignas(128) shm_call halves[2];
} shm_call_line;

typedef struct shm_group {
    fsdpc_comm base;
    fsdpc_shm *shm;
    uint32_t round;
    void *map;
    size_t map_bytes;
    shm_call_line *calls; /* one line per rank */
    char *stage;          /* two halves of STAGE_BYTES bytes per rank */
    float *tile;
} shm_group;

static shm_group *
group_of(fsdpc_comm *comm)
{
    return (shm_group *)comm;
}

/* --- rounds --------------------------------------------------------------------------------- */

static char *
stage_of(const shm_group *self, int rank)
{
    size_t half = (size_t)rank * 2 + (self->round & 1);
    return self->stage + half * STAGE_BYTES;
}

static bool
same_call(const shm_call *a, const shm_call *b)
{
    return a->op == b->op && a->dtype == b->dtype && a->detail == b->detail &&
           a->count == b->count && a->reason == b->reason;
}

static void
describe_call(const shm_call *call, char *text, size_t bytes)
{
    static const char *const names[CALLS] = {
        "nothing", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "agree"};
    static const char *const details[CALLS] = {"", "", "", ", reduction ", ", root ", "", ""};
    size_t op = call->op < CALLS ? call->op : 0;
    bool reduces = op == CALL_REDUCE_SCATTER || op == CALL_ALL_REDUCE;
    char detail[16] = "";
    if (details[op][0]) {
        snprintf(detail, sizeof detail, "%u", call->detail);
    }
    snprintf(text, bytes, "%s(%llu %s%s%s) for %s", names[op], (unsigned long long)call->count,
             reduces ? fsdpc_dtype_name((fsdpc_dtype)call->dtype) : "bytes", details[op], detail,
             call->what);
}

static int
compare_calls(const shm_group *self, int one, int other, int half, const char *what)
{
    const shm_call *first = &self->calls[one].halves[half];
    const shm_call *second = &self->calls[other].halves[half];
    if (same_call(first, second)) {
        return FSDPC_OK;
    }
    char here[128], there[128];
    describe_call(first, here, sizeof here);
    describe_call(second, there, sizeof there);
    int status = fsdpc_error(FSDPC_E_MISMATCH,
                             "%s: the ranks call different collectives: rank %d %s, rank %d %s",
                             what, one, here, other, there);
    if ((first->op == CALL_AGREE) != (second->op == CALL_AGREE)) {
        fsdpc_shm_abort(self->shm, fsdpc_error_text()); /* ends waits in agree's 2nd barrier */
    }
    return status;
}

static int
check_calls(const shm_group *self, int half, const char *what)
{
    for (int rank = 1; rank < self->base.world; rank++) {
        FSDPC_TRY(compare_calls(self, 0, rank, half, what));
    }
    return FSDPC_OK;
}

/* Returns a hash of the first two words of `what`. The rest, such as a path, may differ between ranks. */
static uint64_t
reason_of(const char *what)
{
    uint64_t hash = 0;
    for (int words = 0; *what && (words += *what == ' ') < 2; what++) {
        hash = (hash ^ (unsigned char)*what) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static void
publish_call(shm_group *self, const shm_call *call, const char *what, int half)
{
    shm_call *own = &self->calls[self->base.rank].halves[half];
    *own = *call;
    own->reason = reason_of(what);
    snprintf(own->what, sizeof own->what, "%s", what);
}

/* Returns the error of a barrier that returned `status`. After a timeout, compares the calls of the ranks
 * that have come, because a mismatch among them is a better error than the number of a missing rank. */
static int
explain(const shm_group *self, int half, int status, const char *what)
{
    for (int r = 0; status == FSDPC_E_TIMEOUT && r < self->base.world; r++) {
        if (fsdpc_shm_came(self->shm, r)) {
            FSDPC_TRY(compare_calls(self, self->base.rank, r, half, what));
        }
    }
    return status;
}

/* Publishes `call` and this rank's stage, passes a barrier,
 * and checks that all ranks make the same call. */
static int
join_round(shm_group *self, const shm_call *call, const char *what)
{
    const int half = (int)(self->round & 1);
    fsdpc_wait wait = {.op = what, .unit = ""};
    publish_call(self, call, what, half);
    FSDPC_TRY(explain(self, half, fsdpc_shm_barrier(self->shm, &wait), what));
    FSDPC_TRY(check_calls(self, half, what));
    self->round++;
    return FSDPC_OK;
}

/* --- arithmetic ----------------------------------------------------------------------------- */

/* Sums 16-bit types through F32, tile by tile: each sum is rounded once, at the end. */
static int
sum_narrow(shm_group *self, char *dst, const void *const *src, fsdpc_dtype dtype, int64_t n)
{
    int world = self->base.world;
    fsdpc_device *device = self->base.device;
    const void *from[FSDPC_SHM_MAX_RANKS];
    int64_t item = (int64_t)fsdpc_dtype_bytes(dtype);
    for (int64_t at = 0; at < n; at += TILE_NUMEL) {
        int64_t part = n - at < TILE_NUMEL ? n - at : TILE_NUMEL;
        for (int rank = 0; rank < world; rank++) {
            from[rank] = (const char *)src[rank] + at * item;
        }
        FSDPC_TRY(fsdpc_device_reduce(device, self->tile, FSDPC_F32, from, world, dtype, part, 1.0,
                                      false));
        FSDPC_TRY(
            fsdpc_device_cast(device, dst + at * item, dtype, self->tile, FSDPC_F32, part, 1.0));
    }
    return FSDPC_OK;
}

/* dst[i] = reduction over all ranks' src[rank][i], in rank order. dst may be this rank's source. */
static int
combine(shm_group *self, void *dst, const void *const *src, fsdpc_dtype dtype, enum fsdpc_op op,
        int64_t n)
{
    if (op != FSDPC_SUM) {
        fsdpc_comm_extreme(dst, src, self->base.world, dtype, n, op == FSDPC_MAX);
        return FSDPC_OK;
    }
    if (fsdpc_dtype_accumulate(dtype) != dtype) {
        return sum_narrow(self, dst, src, dtype, n);
    }
    return fsdpc_device_reduce(self->base.device, dst, dtype, src, self->base.world, dtype, n, 1.0,
                               false);
}

/* --- collectives ------------------------------------------------------------------------ */

static int
all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    shm_group *self = group_of(comm);
    size_t world = (size_t)comm->world;
    shm_call call = {.op = CALL_ALL_GATHER, .count = piece_bytes};
    char *all = buffer;
    for (size_t at = 0; at < piece_bytes; at += STAGE_BYTES) {
        size_t n = piece_bytes - at < STAGE_BYTES ? piece_bytes - at : STAGE_BYTES;
        uint32_t round = self->round;
        memcpy(stage_of(self, comm->rank), all + (size_t)comm->rank * piece_bytes + at, n);
        FSDPC_TRY(join_round(self, &call, what));
        for (size_t i = 1; i < world; i++) {
            size_t peer = ((size_t)comm->rank + i) % world;
            const char *half = self->stage + (peer * 2 + (round & 1)) * STAGE_BYTES;
            memcpy(all + peer * piece_bytes + at, half, n);
        }
    }
    return FSDPC_OK;
}

/* Copies bytes [at, at + n) of the other ranks' pieces into this rank's stage: piece i to i * slot_bytes. */
static void
stage_pieces(shm_group *self, const char *all, size_t piece_bytes, size_t at, size_t n,
             size_t slot_bytes)
{
    char *stage = stage_of(self, self->base.rank);
    for (int i = 0; i < self->base.world; i++) {
        if (i != self->base.rank) {
            memcpy(stage + (size_t)i * slot_bytes, all + (size_t)i * piece_bytes + at, n);
        }
    }
}

static int
reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    shm_group *self = group_of(comm);
    size_t item = fsdpc_dtype_bytes(dtype);
    size_t world = (size_t)comm->world;
    size_t rank = (size_t)comm->rank;
    size_t piece = (size_t)piece_numel * item;
    shm_call call = {
        .op = CALL_REDUCE_SCATTER, .dtype = (uint16_t)dtype, .count = (uint64_t)piece_numel};
    size_t slot = STAGE_BYTES / world / 64 * 64;
    for (size_t at = 0; at < piece; at += slot) {
        const void *src[FSDPC_SHM_MAX_RANKS];
        size_t n = piece - at < slot ? piece - at : slot;
        char *own = (char *)buffer + rank * piece + at;
        stage_pieces(self, buffer, piece, at, n, slot);
        for (size_t i = 0; i < world; i++) {
            src[i] = i == rank ? own : stage_of(self, (int)i) + rank * slot;
        }
        FSDPC_TRY(join_round(self, &call, what));
        FSDPC_TRY(combine(self, own, src, dtype, FSDPC_SUM, (int64_t)(n / item)));
    }
    return FSDPC_OK;
}

/* Reduces one chunk for all_reduce: every rank computes the whole chunk. */
static int
reduce_whole(shm_group *self, char *chunk, int64_t n, fsdpc_dtype dtype, enum fsdpc_op op,
             const shm_call *call, const char *what)
{
    const void *src[FSDPC_SHM_MAX_RANKS];
    memcpy(stage_of(self, self->base.rank), chunk, (size_t)n * fsdpc_dtype_bytes(dtype));
    for (int i = 0; i < self->base.world; i++) {
        src[i] = i == self->base.rank ? chunk : stage_of(self, i);
    }
    FSDPC_TRY(join_round(self, call, what));
    return combine(self, chunk, src, dtype, op, n);
}

/* Reduces one chunk for all_reduce: each rank computes its slice, and a second round spreads the results. */
static int
reduce_split(shm_group *self, char *chunk, int64_t n, fsdpc_dtype dtype, enum fsdpc_op op,
             const shm_call *call, const char *what)
{
    const void *src[FSDPC_SHM_MAX_RANKS];
    const char *results[FSDPC_SHM_MAX_RANKS];
    int64_t world = self->base.world;
    int64_t rank = self->base.rank;
    int64_t item = (int64_t)fsdpc_dtype_bytes(dtype);
    int64_t begin = n * rank / world * item;
    int64_t end = n * (rank + 1) / world * item;
    memcpy(stage_of(self, (int)rank), chunk, (size_t)(n * item));
    for (int i = 0; i < world; i++) {
        src[i] = (i == rank ? chunk : stage_of(self, i)) + begin;
    }
    FSDPC_TRY(join_round(self, call, what));
    FSDPC_TRY(combine(self, chunk + begin, src, dtype, op, (end - begin) / item));
    memcpy(stage_of(self, (int)rank) + begin, chunk + begin, (size_t)(end - begin));
    for (int i = 0; i < world; i++) {
        results[i] = stage_of(self, i);
    }
    FSDPC_TRY(join_round(self, call, what));
    for (int64_t i = 0; i < world; i++) {
        int64_t from = n * i / world * item;
        int64_t to = n * (i + 1) / world * item;
        if (i != rank) {
            memcpy(chunk + from, results[i] + from, (size_t)(to - from));
        }
    }
    return FSDPC_OK;
}

static int
all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    shm_group *self = group_of(comm);
    int64_t item = (int64_t)fsdpc_dtype_bytes(dtype);
    shm_call call = {.op = CALL_ALL_REDUCE,
                     .dtype = (uint16_t)dtype,
                     .detail = (uint32_t)op,
                     .count = (uint64_t)numel};
    bool split = comm->world > 2 && numel * item > SPLIT_BYTES;
    int64_t chunk = STAGE_BYTES / item;
    for (int64_t at = 0; at < numel; at += chunk) {
        int64_t n = numel - at < chunk ? numel - at : chunk;
        char *part = (char *)buffer + at * item;
        FSDPC_TRY(split ? reduce_split(self, part, n, dtype, op, &call, what)
                        : reduce_whole(self, part, n, dtype, op, &call, what));
    }
    return FSDPC_OK;
}

static int
broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    shm_group *self = group_of(comm);
    shm_call call = {.op = CALL_BROADCAST, .detail = (uint32_t)root, .count = bytes};
    for (size_t at = 0; at < bytes; at += STAGE_BYTES) {
        size_t n = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
        char *stage = stage_of(self, root);
        if (comm->rank == root) {
            memcpy(stage, (char *)buffer + at, n);
        }
        FSDPC_TRY(join_round(self, &call, what));
        if (comm->rank != root) {
            memcpy((char *)buffer + at, stage, n);
        }
    }
    return FSDPC_OK;
}

static int
barrier(fsdpc_comm *comm, const char *what)
{
    shm_call call = {.op = CALL_BARRIER};
    return join_round(group_of(comm), &call, what);
}

static int
agree(fsdpc_comm *comm, const char *text, const char *what)
{
    shm_group *self = group_of(comm);
    const shm_call call = {.op = CALL_AGREE};
    const int half = (int)(self->round & 1);
    fsdpc_wait wait = {.op = what, .unit = ""};
    publish_call(self, &call, what, half);
    const int agreed = fsdpc_shm_agree(self->shm, text, &wait);
    int status = explain(self, half, agreed, what);
    if (status != agreed) {
        fsdpc_comm_break(comm, status, fsdpc_error_text()); /* some ranks may find no mismatch */
        return status;
    }
    if (status == FSDPC_OK || status == FSDPC_E_MISMATCH) {
        self->round++; /* even if the check fails: slow ranks still read this half */
        FSDPC_TRY(check_calls(self, half, what));
    }
    return status;
}

/* --- life ----------------------------------------------------------------------------------- */

static void
abort_group(fsdpc_comm *comm, const char *text)
{
    fsdpc_shm_abort(group_of(comm)->shm, text);
}

static void
close_group(fsdpc_comm *comm)
{
    fsdpc_shm_leave(group_of(comm)->shm);
}

static fsdpc_shm *
segment(const fsdpc_comm *comm)
{
    return ((const shm_group *)comm)->shm;
}

static void
release(fsdpc_comm *comm)
{
    shm_group *self = group_of(comm);
    fsdpc_shm_unmap(self->map, self->map_bytes);
    fsdpc_shm_free(self->shm);
    fsdpc_mem_free(self->tile);
    fsdpc_mem_free(self);
}

static const fsdpc_comm_ops shm_ops = {
    .kind = "shm",
    .caps = {.one_memory = true, .names_absentees = true},
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .barrier = barrier,
    .agree = agree,
    .abort = abort_group,
    .close = close_group,
    .segment = segment,
    .free = release,
};

static int
map_stage(shm_group *self, int world)
{
    uint64_t offset;
    void *map;
    size_t calls = fsdpc_round_up((size_t)world * sizeof *self->calls, fsdpc_shm_page_bytes());
    size_t stage = (size_t)world * 2 * STAGE_BYTES;
    FSDPC_TRY(fsdpc_shm_alloc(self->shm, calls + stage, false, &offset));
    FSDPC_TRY(fsdpc_shm_map(self->shm, offset, calls + stage, NULL, &map));
    self->map = map;
    self->map_bytes = calls + stage;
    self->calls = map;
    self->stage = (char *)map + calls;
    return FSDPC_OK;
}

int
fsdpc_comm_shm(fsdpc_device *device, int rank, int world, const char *name, double timeout_s,
               fsdpc_comm **out)
{
    *out = NULL;
    int status = FSDPC_OK;
    if (!fsdpc_device_get_caps(device)->host_memory) {
        return fsdpc_error(FSDPC_E_INVAL, "device %s has no memory that ranks of a host can share",
                           fsdpc_device_name(device));
    }
    shm_group *self = fsdpc_mem_calloc(1, sizeof *self);
    float *tile = fsdpc_mem_calloc(TILE_NUMEL, sizeof *tile);
    if (!self || !tile) {
        fsdpc_mem_free(tile);
        fsdpc_mem_free(self);
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a communicator");
    }
    self->tile = tile;
    self->base = (fsdpc_comm){.ops = &shm_ops,
                              .device = device,
                              .rank = rank,
                              .world = world,
                              .forks = fsdpc_forks(),
                              .timeout_s = timeout_s};
    FSDPC_GOTO(fsdpc_shm_create(rank, world, name, timeout_s, &self->shm), fail);
    FSDPC_GOTO(map_stage(self, world), fail);
    *out = &self->base;
    return FSDPC_OK;
fail:
    if (self->shm) {
        fsdpc_shm_abort(self->shm, fsdpc_error_text());
    }
    release(&self->base);
    return status;
}
