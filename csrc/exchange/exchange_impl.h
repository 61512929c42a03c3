/* The implementation of an exchange: the common part, and the table of functions that each kind fills. */
#ifndef FSDPC_EXCHANGE_IMPL_H
#define FSDPC_EXCHANGE_IMPL_H

#include "exchange/exchange.h"
#include "unit/grad.h"

struct fsdpc_exchange_i {
    const char *kind;
    bool any_order;
    int (*open)(fsdpc_exchange *x, const fsdpc_exchange_plan *plan);
    void (*close)(fsdpc_exchange *x);
    /* (optional) default: changed masters are not detected. See fsdpc_exchange_compare. */
    void (*compare)(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched);
    int (*begin)(fsdpc_exchange *x, uint64_t tag);
    int (*rest)(fsdpc_exchange *x);  /* (optional) NULL: this kind leaves nothing in flight */
    int (*leave)(fsdpc_exchange *x); /* (optional) NULL: this kind does not wait */
    /* Makes the unit's values readable. If `wait` is false, only starts a prefetch, which sets `begun` of the
     * unit's use, or does nothing if the prefetch would need a wait. */
    int (*gather)(fsdpc_exchange *x, fsdpc_unit *unit, bool wait);
    int (*release)(fsdpc_exchange *x, fsdpc_unit *unit);
    int (*reduce)(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
    /* (optional) default: false. See fsdpc_exchange_is_summed. */
    bool (*summed)(fsdpc_exchange *x, const fsdpc_unit *unit);
    int (*make_room)(fsdpc_exchange *x, const fsdpc_unit *unit); /* (optional) default: nothing */
    int (*end)(fsdpc_exchange *x);
    /* (optional) default: nothing. See fsdpc_exchange_settle. */
    int (*settle)(fsdpc_exchange *x, fsdpc_unit *unit);
    int (*announce)(fsdpc_exchange *x, uint64_t tag, int unit, int param); /* (optional) */
    int (*before_hook)(fsdpc_exchange *x, const char *what);               /* (optional) */
    int (*forget)(fsdpc_exchange *x); /* (optional) NULL: this kind keeps no coding error */
    int (*share)(fsdpc_exchange *x, void *buffer, size_t piece_bytes,
                 const char *what); /* (optional) default: FSDPC_E_UNAVAILABLE */
};

/* The state that an exchange keeps for one of its units; fsdpc_unit_use(unit) points to it. */
struct fsdpc_unit_use {
    int id;   /* index of the unit in `units` and in `uses` */
    int slot; /* index of the unit's gather slot; -1 for a direct unit */
    int refs;
    int floor;  /* how many references fsdpc_exchange_drop leaves */
    bool ready; /* true: all values of the unit are in place */
    bool begun; /* true: the unit has taken its slot; its gather may still be in flight */
    /* `posted`: how often this rank has sent the unit's gradients in this backward. `consumed`: how many of
     * these rounds are summed; for "wire" and "stream" 1 if the sum was found complete before the end of the
     * backward, else 0. */
    uint64_t posted, consumed;
};

/* Memory of one slot or one unit. The comment of each field of this type says what the memory holds. */
struct fsdpc_exchange_room {
    char *memory;
    size_t bytes;
};

struct fsdpc_exchange {
    const struct fsdpc_exchange_i *ops;
    fsdpc_comm *comm;
    fsdpc_shm *shm; /* "shared": the segment that the ranks share; NULL for other kinds */
    int rank, world;
    fsdpc_unit **units;          /* borrowed */
    struct fsdpc_unit_use *uses; /* one per unit */
    /* true after fsdpc_exchange_detach: the units may be in another exchange */
    bool detached;
    /* fsdpc_forks() when this process made the exchange, or when this forked child first used it */
    int forks;
    int *trace_ids;
    int unit_count;
    fsdpc_arena *arena;
    /* "wire", "stream": for each slot, the id of the unit whose values it holds; -1: none */
    int *slot_unit;
    uint64_t *slot_tag;
    uint64_t tag;
    uint64_t backwards; /* count of finished synchronised backwards */
    bool poison, trust_order;
    /* "stream" with replicas: even a group of one rank must reduce units in a fixed order */
    bool in_turn;
    bool settles_apart; /* what fsdpc_exchange_settle_apart has set */
    int reduce_slots;
    size_t max_reduce_bytes, sum_reduce_bytes;
    fsdpc_trace *trace;
    enum fsdpc_phase phase;
    uint32_t step;
    uint64_t sent_bytes; /* fsdpc_exchange_sent_bytes */
    size_t coded_bytes;  /* "wire", "stream": bytes for coded pieces, outside of the slots */
    size_t lost_bytes;   /* size in bytes of all coding errors in `lost` */
    /* "wire", "stream": for each unit, the coding error of gradients of segments with error
     * feedback. `memory` NULL: the unit has no such segment. `lost` NULL: no error is kept. */
    struct fsdpc_exchange_room *lost;
    uint64_t copied_bytes; /* bytes that the gather in progress has cast, for the trace */

    struct fsdpc_shared *shared;   /* state of kind "shared" */
    struct fsdpc_streams *streams; /* state of kind "stream" */
    struct fsdpc_wire *wire;       /* state of kind "wire" */
};

/* Counts the bytes that this rank sends for a unit, and adds them to the trace. */
void fsdpc_exchange_sent(fsdpc_exchange *x, const fsdpc_unit *unit, uint64_t bytes);

extern const struct fsdpc_exchange_i fsdpc_exchange_shared;
extern const struct fsdpc_exchange_i fsdpc_exchange_wire;
extern const struct fsdpc_exchange_i fsdpc_exchange_stream;

/* True if the gradients of this unit (NULL: of any unit) are staged in a reduce slot: if there are
 * several ranks, or if the unit is offloaded (a copy over PCIe must not block the caller's stream). */
bool fsdpc_exchange_packs(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* Makes an FSDPC_E_MISMATCH error: rank `who` has unfrozen a
 * parameter (unit -1: unknown), and rank `other` has not. */
int fsdpc_exchange_thaw_error(const fsdpc_exchange *x, int unit, int param, int who, int other);
/* Poisons a unit in host memory: until fsdpc_arena_unveil this rank reads NaN through the unit's range. */
int fsdpc_exchange_veil(fsdpc_exchange *x, fsdpc_unit *unit);
/* Returns the address at which the unit's gathered values are written. */
char *fsdpc_exchange_values(const fsdpc_exchange *x, fsdpc_unit *unit);
/* Sets the unit's gathered values to NaN. */
int fsdpc_exchange_poison(const fsdpc_exchange *x, fsdpc_unit *unit);
/* "wire", "stream": true if the unit's slot holds the values of another unit that is in use. */
bool fsdpc_exchange_slot_is_in_use(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* Casts elements [begin, begin + n) of rank r's piece of a segment from r's master to their place in the
 * unit's values. If the segment is sent as codes, the elements must be whole blocks, and get the values that
 * decoding would give. */
int fsdpc_exchange_cast_piece(fsdpc_exchange *x, fsdpc_unit *unit, int segment, int r,
                              int64_t begin, int64_t n);

/* Allocate `lost` (filled with zeros) for the coding errors of `receivers` receivers; set it to zero again;
 * free it. fsdpc_exchange_close_lost may also be called after fsdpc_exchange_open_lost has failed. */
int fsdpc_exchange_open_lost(fsdpc_exchange *x, fsdpc_device *device, int receivers);
int fsdpc_exchange_zero_lost(fsdpc_exchange *x, fsdpc_device *device);
void fsdpc_exchange_close_lost(fsdpc_exchange *x, fsdpc_device *device);

#endif
