/* Tests of the ring of trace entries: order, wrapping, clearing, many writers with a reader. */
#include <pthread.h>

#include "test.h"
#include "base/trace.h"

static void
add(fsdpc_trace *trace, uint64_t number)
{
    fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, FSDPC_PHASE_FORWARD, (uint32_t)number, -1, number);
}

static void
entries_come_back_as_they_were(void)
{
    fsdpc_trace *trace;
    fsdpc_trace_entry got[4];
    REQUIRE_OK(fsdpc_trace_new(4, &trace));
    CHECK_INT(fsdpc_trace_copy(trace, got, 4), 0);
    fsdpc_trace_add(trace, FSDPC_TRACE_REDUCE, FSDPC_PHASE_BACKWARD, UINT32_MAX, 5, UINT64_MAX);
    fsdpc_trace_add(trace, FSDPC_TRACE_STEP, FSDPC_PHASE_IDLE, 7, -1, 0);
    REQUIRE(fsdpc_trace_copy(trace, got, 4) == 2);
    CHECK(got[0].op == FSDPC_TRACE_REDUCE && got[0].phase == FSDPC_PHASE_BACKWARD);
    CHECK(got[0].step == UINT32_MAX && got[0].unit == 5 && got[0].bytes == UINT64_MAX);
    CHECK(got[1].op == FSDPC_TRACE_STEP && got[1].phase == FSDPC_PHASE_IDLE);
    CHECK(got[1].step == 7 && got[1].unit == -1 && got[1].bytes == 0);
    CHECK(got[0].time_ns > 0 && got[0].time_ns <= got[1].time_ns);
    CHECK_INT(fsdpc_trace_copy(trace, got, 1), 1);
    CHECK_INT(got[0].unit, -1); /* the latest */
    fsdpc_trace_free(trace);
}

static void
old_entries_are_overwritten_in_order(void)
{
    fsdpc_trace *trace;
    fsdpc_trace_entry got[16];
    REQUIRE_OK(fsdpc_trace_new(5, &trace)); /* rounded up to 8 */
    for (uint64_t i = 0; i < 21; i++) {
        add(trace, i);
    }
    REQUIRE(fsdpc_trace_copy(trace, got, 16) == 8);
    for (uint64_t i = 0; i < 8; i++) {
        CHECK_INT(got[i].bytes, 13 + i);
    }
    fsdpc_trace_clear(trace);
    CHECK_INT(fsdpc_trace_copy(trace, got, 16), 0);
    add(trace, 99);
    REQUIRE(fsdpc_trace_copy(trace, got, 16) == 1);
    CHECK_INT(got[0].bytes, 99);
    fsdpc_trace_free(trace);
}

static void
names_and_limits(void)
{
    fsdpc_trace *trace = NULL;
    fsdpc_trace_entry only;
    CHECK_STR(fsdpc_trace_op_name(FSDPC_TRACE_BACKWARD_END), "backward_end");
    CHECK_STR(fsdpc_trace_op_name(FSDPC_TRACE_OP_COUNT), "?");
    CHECK_STR(fsdpc_phase_name(FSDPC_PHASE_RECOMPUTE), "recompute");
    CHECK_STR(fsdpc_phase_name(255), "?");
    CHECK_ERROR(fsdpc_trace_new(SIZE_MAX, &trace), FSDPC_E_INVAL, "at most");
    CHECK(trace == NULL);
    REQUIRE_OK(fsdpc_trace_new(0, &trace));
    add(trace, 1);
    CHECK_INT(fsdpc_trace_copy(trace, &only, 1), 1);
    fsdpc_trace_free(trace);
    add(NULL, 1);
    fsdpc_trace_free(NULL);
}

static int
make_and_free(void *unused)
{
    (void)unused;
    fsdpc_trace *trace;
    int status = fsdpc_trace_new(64, &trace);
    CHECK((trace != NULL) == (status == FSDPC_OK));
    fsdpc_trace_free(trace);
    return status;
}

enum { WRITERS = 3, ENTRIES = 20000, RING = 64 };

struct writer {
    fsdpc_trace *trace;
    int id;
};

static void *
write_many(void *argument)
{
    struct writer *writer = argument;
    for (uint32_t i = 0; i < ENTRIES; i++) {
        /* The last field follows from the others, so that an entry mixed from two writes is detected. */
        fsdpc_trace_add(writer->trace, FSDPC_TRACE_PACK, FSDPC_PHASE_OTHER, i, writer->id,
                        (uint64_t)i * WRITERS + (uint64_t)writer->id);
    }
    return NULL;
}

static void
check_entries(const fsdpc_trace_entry *got, size_t count)
{
    int64_t last[WRITERS] = {-1, -1, -1};
    for (size_t i = 0; i < count; i++) {
        REQUIRE(got[i].unit >= 0 && got[i].unit < WRITERS);
        CHECK_INT(got[i].bytes, (uint64_t)got[i].step * WRITERS + (uint64_t)got[i].unit);
        CHECK(got[i].op == FSDPC_TRACE_PACK && got[i].phase == FSDPC_PHASE_OTHER);
        CHECK((int64_t)got[i].step > last[got[i].unit]);
        last[got[i].unit] = got[i].step;
    }
}

static void
writers_and_a_reader_do_not_mix_entries(void)
{
    fsdpc_trace *trace;
    fsdpc_trace_entry got[RING];
    struct writer writers[WRITERS];
    pthread_t threads[WRITERS];
    REQUIRE_OK(fsdpc_trace_new(RING, &trace));
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (struct writer){trace, i};
        REQUIRE(pthread_create(&threads[i], NULL, write_many, &writers[i]) == 0);
    }
    for (int i = 0; i < 2000; i++) {
        check_entries(got, fsdpc_trace_copy(trace, got, RING));
    }
    for (int i = 0; i < WRITERS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(fsdpc_trace_copy(trace, got, RING), RING);
    check_entries(got, RING);
    fsdpc_trace_free(trace);
}

int
main(void)
{
    entries_come_back_as_they_were();
    old_entries_are_overwritten_in_order();
    names_and_limits();
    test_alloc_sweep(make_and_free, NULL);
    writers_and_a_reader_do_not_mix_entries();
    return test_result();
}
