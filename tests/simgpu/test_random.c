/* Random programs test two claims of the simulator. First, all schedules of a program agree on whether the
 * program has a race. Second, a program without a race leaves the same values in every schedule. */
#include "gpu.h"

enum { PROGRAMS = 400, CALLS = 40, STREAMS = 3, BUFFERS = 4, EVENTS = 4, FLOATS = 8 };

typedef struct call {
    enum { LAUNCH, RECORD, WAIT, SYNC, ASK, FILL, KINDS } kind;
    int stream; /* an index; STREAMS stands for the NULL stream */
    int event, dst, src, from, count;
    float add;
} call;

static uint64_t state;

static int
draw(int below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)below);
}

/* Half of the programs (`careful`) wait for an event before each launch and record an event after it, so that
 * some of these programs have no race. */
static void
make_program(call *program, bool careful)
{
    for (int i = 0; i < CALLS; i++) {
        static const int kinds[] = {LAUNCH, LAUNCH, LAUNCH, RECORD, WAIT, WAIT, FILL, SYNC, ASK};
        call *c = &program[i];
        *c = (call){.kind = kinds[draw(9)],
                    .stream = draw(STREAMS + 1),
                    .event = draw(EVENTS),
                    .dst = draw(BUFFERS),
                    .src = draw(BUFFERS),
                    .from = draw(FLOATS),
                    .add = (float)draw(1000) / 8};
        c->count = 1 + draw(FLOATS - c->from);
        /* Three calls become a wait, a launch and a record, mostly with event 0. */
        if (careful && i >= 2 && i % 3 == 2) {
            program[i - 2].kind = WAIT;
            program[i - 1].kind = LAUNCH;
            c->kind = RECORD;
            program[i - 2].stream = program[i - 1].stream = c->stream;
            program[i - 2].event = c->event = draw(50) ? 0 : 1;
        }
    }
}

typedef struct outcome {
    float values[BUFFERS][FLOATS];
    int64_t races;
} outcome;

static void
run_call(const call *c, CUstream stream, CUevent event, float *const *buffers)
{
    float *dst = buffers[c->dst] + c->from, *src = buffers[c->src] + c->from;
    switch (c->kind) {
    case LAUNCH:
        CHECK_CU(gpu_axpb(stream, dst, src, (size_t)c->count, 0.5f, c->add), CUDA_SUCCESS);
        break;
    case FILL:
        CHECK_CU(gpu_axpb(stream, dst, NULL, (size_t)c->count, 0, c->add), CUDA_SUCCESS);
        break;
    case RECORD:
        CHECK_CU(cuEventRecord(event, stream), CUDA_SUCCESS);
        break;
    case WAIT:
        CHECK_CU(cuStreamWaitEvent(stream, event, 0), CUDA_SUCCESS);
        break;
    case SYNC:
        CHECK_CU(cuStreamSynchronize(stream), CUDA_SUCCESS);
        break;
    default: /* asks until the event is done */
        while (cuEventQuery(event) == CUDA_ERROR_NOT_READY) {}
        break;
    }
}

static void
run(const call *program, const char *policy, outcome *out)
{
    CUstream streams[STREAMS + 1] = {NULL};
    CUevent events[EVENTS];
    float *buffers[BUFFERS];
    gpu_start();
    REQUIRE(simgpu_policy(policy));
    for (int i = 0; i < STREAMS; i++) {
        streams[i] = gpu_stream("side");
    }
    for (int i = 0; i < EVENTS; i++) {
        events[i] = gpu_event();
    }
    for (int i = 0; i < BUFFERS; i++) {
        buffers[i] = gpu_floats(FLOATS, "buffer");
        CHECK_CU(gpu_axpb(NULL, buffers[i], NULL, FLOATS, 0, (float)i), CUDA_SUCCESS);
    }
    CHECK_CU(cuCtxSynchronize(), CUDA_SUCCESS);
    for (int i = 0; i < CALLS; i++) {
        run_call(&program[i], streams[program[i].stream], events[program[i].event], buffers);
    }
    CHECK(simgpu_drain());
    for (int i = 0; i < BUFFERS; i++) {
        memcpy(out->values[i], buffers[i], sizeof out->values[i]);
    }
    out->races = simgpu_count().races;
    CHECK_INT(simgpu_count().faults, 0);
}

int
main(void)
{
    static const char *const policies[] = {
        "eager",          "lazy",     "order:0,1,2", "order:2,1,0", "order:1,host,0,2",
        "order:2,0,host", "random:1", "random:2",    "random:3",    "random:4"};
    int with_race = 0, without = 0, differing = 0;
    call program[CALLS];
    for (int p = 0; p < PROGRAMS; p++) {
        outcome first, other;
        bool differs = false;
        state = (uint64_t)p + 1;
        make_program(program, p % 2);
        run(program, policies[0], &first);
        for (size_t i = 1; i < sizeof policies / sizeof *policies; i++) {
            run(program, policies[i], &other);
            differs |= memcmp(first.values, other.values, sizeof first.values) != 0;
            if ((first.races > 0) != (other.races > 0)) {
                TEST_FAIL("program %d: %lld races under %s, %lld under %s", p,
                          (long long)first.races, policies[0], (long long)other.races, policies[i]);
            }
        }
        if (differs && first.races == 0) {
            TEST_FAIL("program %d has no race but other values in another schedule", p);
        }
        with_race += first.races > 0;
        without += first.races == 0;
        differing += differs;
    }
    printf("%d programs with a race (%d with other values in another schedule), %d without\n",
           with_race, differing, without);
    CHECK(with_race > PROGRAMS / 10 && without > PROGRAMS / 10 && differing > PROGRAMS / 20);
    simgpu_reset();
    return test_result();
}
