/* The inside of an exchange: the common part, and the table of functions that each kind fills. */
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
    int (*rest)(fsdpc_exchange *x);  /* (optional) default: nothing is in flight */
    int (*leave)(fsdpc_exchange *x); /* (optional) default: no wait */
    /* Makes the unit's values readable; with `wait` false starts a prefetch if that needs no wait
     * (then `begun` of the unit's use is set). */
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
    int (*forget)(fsdpc_exchange *x); /* (optional) default: nothing is kept */
    int (*share)(fsdpc_exchange *x, void *buffer, size_t piece_bytes,
                 const char *what); /* (optional) default: FSDPC_E_UNAVAILABLE */
};

/* What an exchange keeps of one of its units; fsdpc_unit_use(unit) points to it. */
struct fsdpc_unit_use {
    int id;   /* position in `units` and `uses` */
    int slot; /* -1 for a direct unit */
    int refs;
    int floor;  /* references that fsdpc_exchange_drop leaves */
    bool ready; /* all values are in place */
    bool begun; /* the slot is taken; the gather may be in flight (prefetch) */
    uint64_t posted,
        consumed; /* rounds reduced in this backward; "wire", "stream": consumed is 1 once summed */
};

/* Memory of one slot or one unit. The comment of each field of this type says what the memory holds. */
struct fsdpc_exchange_room {
    char *memory;
    size_t bytes;
};

struct fsdpc_exchange {
    const struct fsdpc_exchange_i *ops;
    fsdpc_comm *comm;
    fsdpc_shm *shm; /* "shared": the segment of its ranks; NULL for the other kinds */
    int rank, world;
    fsdpc_unit **units;          /* borrowed */
    struct fsdpc_unit_use *uses; /* one per unit */
    bool detached;               /* the units may be in another exchange by now */
    int forks;                   /* fsdpc_forks() when made, or when a forked child entered it */
    int *trace_ids;
    int unit_count;
    fsdpc_arena *arena;
    int *slot_unit; /* "wire", "stream": which unit's values a slot holds, -1: none */
    uint64_t *slot_tag;
    uint64_t tag;
    uint64_t backwards; /* count of finished synchronised backwards */
    bool poison, trust_order;
    bool in_turn;       /* "stream" with replicas: the order of units matters on one rank as well */
    bool settles_apart; /* fsdpc_exchange_settle_apart */
    int reduce_slots;
    size_t max_reduce_bytes, sum_reduce_bytes;
    fsdpc_trace *trace;
    enum fsdpc_phase phase;
    uint32_t step;
    uint64_t sent_bytes; /* fsdpc_exchange_sent_bytes */
    size_t coded_bytes;  /* "wire", "stream": memory for coded pieces, beside the slots */
    size_t lost_bytes;   /* of all rooms in `lost` */
    /* "wire", "stream": per unit the error that coding left in gradients of segments with error feedback.
     * `memory` NULL: the unit has no such segment. `lost` NULL: no error is kept. */
    struct fsdpc_exchange_room *lost;
    uint64_t copied_bytes; /* what the gather in progress has cast, for the trace */

    struct fsdpc_shared *shared;   /* "shared" kind's own state */
    struct fsdpc_streams *streams; /* "stream" kind's own state */
    struct fsdpc_wire *wire;       /* "wire" kind's own state */
};

/* Counts bytes that this rank sends for a unit, also in the trace. */
void fsdpc_exchange_sent(fsdpc_exchange *x, const fsdpc_unit *unit, uint64_t bytes);

extern const struct fsdpc_exchange_i fsdpc_exchange_shared;
extern const struct fsdpc_exchange_i fsdpc_exchange_wire;
extern const struct fsdpc_exchange_i fsdpc_exchange_stream;

/* True if gradients (of this unit; NULL: of any unit) are staged in a reduce slot: world > 1, or the unit
 * is offloaded (a copy over PCIe must not block the caller's stream). */
bool fsdpc_exchange_packs(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* Makes an error FSDPC_E_MISMATCH: rank `who` has unfrozen a parameter
 * (unit -1: it is not known which one), and rank `other` has not. */
int fsdpc_exchange_thaw_error(const fsdpc_exchange *x, int unit, int param, int who, int other);
/* Poison in host memory: until fsdpc_arena_unveil this rank reads NaN through the unit's range. */
int fsdpc_exchange_veil(fsdpc_exchange *x, fsdpc_unit *unit);
/* Where the unit's gathered values are written. */
char *fsdpc_exchange_values(const fsdpc_exchange *x, fsdpc_unit *unit);
/* The unit's gathered values become NaN. */
int fsdpc_exchange_poison(const fsdpc_exchange *x, fsdpc_unit *unit);
/* "wire", "stream": true if the unit's slot holds the values of another unit that is in use. */
bool fsdpc_exchange_slot_is_in_use(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* Casts elements [begin, begin + n) of rank r's piece of a segment from r's master into place. If the segment
 * travels coded, they must be whole blocks, and get the values that decoding would give. */
int fsdpc_exchange_cast_piece(fsdpc_exchange *x, fsdpc_unit *unit, int segment, int r,
                              int64_t begin, int64_t n);

/* Memory of `lost`: allocated with zeros, for so many receivers; zeroed; freed, also after a failed open. */
int fsdpc_exchange_open_lost(fsdpc_exchange *x, fsdpc_device *device, int receivers);
int fsdpc_exchange_zero_lost(fsdpc_exchange *x, fsdpc_device *device);
void fsdpc_exchange_close_lost(fsdpc_exchange *x, fsdpc_device *device);

#endif
