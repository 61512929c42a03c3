/* The ring of trace entries. See trace.h.
 *
 * A writer claims the next number, and then the cell of that number in the ring. `stamp` of a cell is
 * the number of its entry plus one, or BUSY while the entry is written, so a reader detects an entry
 * that changes during the read. A writer that has fallen a whole round of the ring behind drops its
 * entry, so that it does not overwrite a newer entry. Fields are stored with release and loaded with acquire
 * order: a reader that loads a field of a newer entry also loads the newer `stamp`.
 */
#include "base/trace.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "base/mem.h"
#include "base/status.h"

#define BUSY UINT64_MAX

static const size_t MAX_CAPACITY = (size_t)1 << 32;

struct cell {
    _Atomic uint64_t stamp, time, bytes, step_unit, op_phase;
};

struct fsdpc_trace {
    _Atomic uint64_t next;  /* number of the next entry */
    _Atomic uint64_t first; /* entries with lower numbers were cleared */
    uint64_t capacity;      /* a power of two */
    struct cell *cells;
};

static const char *const op_names[] = {
#define OP_NAME(name, text) [FSDPC_TRACE_##name] = text,
    FSDPC_TRACE_TABLE(OP_NAME)
#undef OP_NAME
};

static const char *const phase_names[] = {
#define PHASE_NAME(name, text) [FSDPC_PHASE_##name] = text,
    FSDPC_PHASE_TABLE(PHASE_NAME)
#undef PHASE_NAME
};

static uint64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct cell *
cell_of(const fsdpc_trace *trace, uint64_t number)
{
    return &trace->cells[number & (trace->capacity - 1)];
}

int
fsdpc_trace_new(size_t capacity, fsdpc_trace **out)
{
    *out = NULL;
    if (capacity > MAX_CAPACITY) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "the trace has %zu entries, but at most %zu are supported", capacity,
                           MAX_CAPACITY);
    }
    size_t rounded = 1;
    while (rounded < capacity) {
        rounded *= 2;
    }
    fsdpc_trace *trace = fsdpc_mem_calloc(1, sizeof *trace);
    struct cell *cells = fsdpc_mem_calloc(rounded, sizeof *cells);
    if (!trace || !cells) {
        fsdpc_mem_free(trace);
        fsdpc_mem_free(cells);
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a trace of %zu entries", rounded);
    }
    trace->capacity = rounded;
    trace->cells = cells;
    *out = trace;
    return FSDPC_OK;
}

void
fsdpc_trace_free(fsdpc_trace *trace)
{
    if (trace) {
        fsdpc_mem_free(trace->cells);
        fsdpc_mem_free(trace);
    }
}

static bool
claim(struct cell *cell, uint64_t number)
{
    uint64_t held = atomic_load_explicit(&cell->stamp, memory_order_relaxed);
    if (held == BUSY || held > number) {
        return false;
    }
    return atomic_compare_exchange_strong(&cell->stamp, &held, BUSY);
}

int64_t
fsdpc_trace_add(fsdpc_trace *trace, enum fsdpc_trace_op op, enum fsdpc_phase phase, uint32_t step,
                int32_t unit, uint64_t bytes)
{
    const uint64_t now = now_ns();
    if (!trace) {
        return (int64_t)now;
    }
    uint64_t number = atomic_fetch_add_explicit(&trace->next, 1, memory_order_relaxed);
    struct cell *cell = cell_of(trace, number);
    if (!claim(cell, number)) {
        return (int64_t)now;
    }
    uint64_t step_unit = (uint64_t)step << 32 | (uint32_t)unit;
    uint64_t op_phase = (uint64_t)op << 8 | (uint64_t)phase;
    atomic_store_explicit(&cell->time, now, memory_order_release);
    atomic_store_explicit(&cell->bytes, bytes, memory_order_release);
    atomic_store_explicit(&cell->step_unit, step_unit, memory_order_release);
    atomic_store_explicit(&cell->op_phase, op_phase, memory_order_release);
    atomic_store_explicit(&cell->stamp, number + 1, memory_order_release);
    return (int64_t)now;
}

static uint64_t
load(const _Atomic uint64_t *field)
{
    return atomic_load_explicit(field, memory_order_acquire);
}

/* Returns false if entry `number` is not finished, or was replaced while it was read. */
static bool
read_cell(const struct cell *cell, uint64_t number, fsdpc_trace_entry *out)
{
    if (load(&cell->stamp) != number + 1) {
        return false;
    }
    uint64_t time = load(&cell->time), bytes = load(&cell->bytes);
    uint64_t step_unit = load(&cell->step_unit), op_phase = load(&cell->op_phase);
    if (load(&cell->stamp) != number + 1) {
        return false;
    }
    *out = (fsdpc_trace_entry){
        .time_ns = (int64_t)time,
        .bytes = bytes,
        .step = (uint32_t)(step_unit >> 32),
        .unit = (int32_t)(uint32_t)step_unit,
        .op = (uint8_t)(op_phase >> 8),
        .phase = (uint8_t)op_phase,
    };
    return true;
}

size_t
fsdpc_trace_copy(const fsdpc_trace *trace, fsdpc_trace_entry *out, size_t room)
{
    if (!trace) {
        return 0;
    }
    uint64_t begin = load(&trace->first), end = load(&trace->next);
    if (end - begin > trace->capacity) {
        begin = end - trace->capacity;
    }
    if (end - begin > room) {
        begin = end - room;
    }
    size_t copied = 0;
    for (uint64_t number = begin; number < end && copied < room; number++) {
        if (read_cell(cell_of(trace, number), number, &out[copied])) {
            copied++;
        }
    }
    return copied;
}

void
fsdpc_trace_clear(fsdpc_trace *trace)
{
    if (trace) {
        atomic_store(&trace->first, atomic_load(&trace->next));
    }
}

const char *
fsdpc_trace_op_name(unsigned op)
{
    return op < FSDPC_TRACE_OP_COUNT ? op_names[op] : "?";
}

const char *
fsdpc_phase_name(unsigned phase)
{
    return phase < FSDPC_PHASE_COUNT ? phase_names[phase] : "?";
}
