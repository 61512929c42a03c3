/* The trace: a ring of fixed-size entries about the engine's operations, always on, a few ns per entry.
 *
 * Tests (counts and order of gathers and reduces), memory figures and error reports read the trace.
 * Several threads may write at once, because a writer claims its entry atomically.
 */
#ifndef FSDPC_TRACE_H
#define FSDPC_TRACE_H

#include <stddef.h>
#include <stdint.h>

typedef struct fsdpc_trace fsdpc_trace;

/* X(NAME, text) */
#define FSDPC_TRACE_TABLE(X)                                                                     \
    X(STEP, "step")         /* a root forward began; bytes = forwards since the last backward */ \
    X(GATHER, "gather")     /* the unit's values became readable */                              \
    X(JOIN, "join")         /* the values were readable already */                               \
    X(PREFETCH, "prefetch") /* gather begun before it is needed */                               \
    X(RELEASE, "release")   /* last reference dropped */                                         \
    X(SPARE, "spare")       /* slot in use by another unit: private memory was mapped */         \
    X(PACK, "pack")         /* gradients packed into a reduce slot */                            \
    X(REDUCE, "reduce")     /* own slice summed into the shard gradient */                       \
    X(SEND, "send")         /* a send of bytes to other hosts begins */                          \
    X(ABSENT, "absent")     /* reduced without this rank's contribution */                       \
    X(WAIT, "wait")         /* waited for others; bytes = nanoseconds */                         \
    X(BACKWARD_END, "backward_end")

enum fsdpc_trace_op {
#define FSDPC_TRACE_ENUM(name, text) FSDPC_TRACE_##name,
    FSDPC_TRACE_TABLE(FSDPC_TRACE_ENUM)
#undef FSDPC_TRACE_ENUM
        FSDPC_TRACE_OP_COUNT
};

/* X(NAME, text) */
#define FSDPC_PHASE_TABLE(X)  \
    X(IDLE, "idle")           \
    X(FORWARD, "forward")     \
    X(BACKWARD, "backward")   \
    X(RECOMPUTE, "recompute") \
    X(OTHER, "other")

enum fsdpc_phase {
#define FSDPC_PHASE_ENUM(name, text) FSDPC_PHASE_##name,
    FSDPC_PHASE_TABLE(FSDPC_PHASE_ENUM)
#undef FSDPC_PHASE_ENUM
        FSDPC_PHASE_COUNT
};

typedef struct fsdpc_trace_entry {
    int64_t time_ns; /* CLOCK_MONOTONIC */
    uint64_t bytes;
    uint32_t step;
    int32_t unit; /* -1: none */
    uint8_t op, phase;
} fsdpc_trace_entry;

/* `capacity` is rounded up to a power of two. */
int fsdpc_trace_new(size_t capacity, fsdpc_trace **out);
void fsdpc_trace_free(fsdpc_trace *trace);
/* Adds an entry and returns its time (CLOCK_MONOTONIC, ns). If `trace` is NULL, only returns the time. */
int64_t fsdpc_trace_add(fsdpc_trace *trace, enum fsdpc_trace_op op, enum fsdpc_phase phase,
                        uint32_t step, int32_t unit, uint64_t bytes);
/* Copies the latest entries, at most `room`, oldest first; returns their number. */
size_t fsdpc_trace_copy(const fsdpc_trace *trace, fsdpc_trace_entry *out, size_t room);
void fsdpc_trace_clear(fsdpc_trace *trace);
const char *fsdpc_trace_op_name(unsigned op);
const char *fsdpc_phase_name(unsigned phase);

#endif
