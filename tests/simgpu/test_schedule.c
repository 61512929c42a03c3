/* The model of the schedule must be right in every order, and each planted fault must be found.
 *
 * Every fault runs in all schedules. In each schedule, one of these means must find the fault: the clocks,
 * the mappings, the driver's own refusals or the list of leaks. These means do not depend on the schedule.
 * The printed table names the means. The table also says in how many schedules the final weights were wrong:
 * a test that only compares values would find the fault in these schedules only. */
#include "gpu.h"
#include "model.h"

enum { WEIGHTS = MODEL_UNITS * MODEL_FLOATS, SCHEDULES = 22 };

typedef struct outcome {
    float weights[WEIGHTS], loss[MODEL_STEPS];
    char error[128], report[16384]; /* all reports */
    simgpu_counters seen;
    int leaks;
} outcome;

/* Streams are created in the order compute (0), gather (1), reduce (2). */
static void
choose_schedule(int index)
{
    static const char *const texts[] = {
        "eager",
        "lazy",
        "order:0,1,2",
        "order:0,2,1",
        "order:1,0,2",
        "order:1,2,0",
        "order:2,0,1",
        "order:2,1,0",
        "order:0,host,1,2",
        "order:1,host,0,2",
        "order:2,host,0,1",
        "order:0,1,host,2",
        "order:1,2,host,0",
        "order:0,2,host,1",
    };
    enum { NAMED = sizeof texts / sizeof *texts };
    if (index < NAMED) {
        REQUIRE(simgpu_policy(texts[index]));
    } else {
        simgpu_policy_random((uint64_t)(index - NAMED));
    }
}

static void
run(const model_fault *fault, int schedule, outcome *out)
{
    memset(out, 0, sizeof *out);
    gpu_start();
    simgpu_get_options()->granule = MODEL_GRANULE;
    choose_schedule(schedule);
    model_run(fault, out->weights, out->loss, out->error, sizeof out->error);
    (void)simgpu_drain();
    out->seen = simgpu_count();
    out->leaks = simgpu_leaks(NULL, 0);
    for (int i = 0, used = 0; i < simgpu_reports() && used < (int)sizeof out->report; i++) {
        used += snprintf(out->report + used, sizeof out->report - (size_t)used, "%s\n",
                         simgpu_report(i));
    }
}

static bool
same_values(const outcome *a, const outcome *b)
{
    return memcmp(a->weights, b->weights, sizeof a->weights) == 0 &&
           memcmp(a->loss, b->loss, sizeof a->loss) == 0;
}

static void
the_right_schedule_is_right_in_every_order(outcome *right)
{
    for (int i = 0; i < SCHEDULES; i++) {
        outcome now;
        run(NULL, i, &now);
        if (i == 0) {
            *right = now;
        }
        CHECK_STR(now.error, "");
        CHECK_STR(now.report, "");
        CHECK_INT(now.seen.races, 0);
        CHECK_INT(now.seen.faults, 0);
        CHECK_INT(now.leaks, 0);
        CHECK_INT(now.seen.late_loads, 0);
        CHECK_INT(now.seen.events_created, right->seen.events_created);
        CHECK_INT(now.seen.launches, right->seen.launches);
        CHECK(same_values(&now, right));
    }
    for (int i = 0; i < WEIGHTS; i++) {
        CHECK(right->weights[i] == right->weights[i] && right->weights[i] != 0);
    }
}

/* --- the planted faults -------------------------------------------------------------------------------- */

typedef struct row {
    const char *name;
    model_fault fault;
    const char *found_by;
    const char *says; /* part of the report or of the error */
} row;

#define AT(site, step, unit, backward) {site, step, unit, backward}
static const row rows[] = {
    {"no wait for the gather, forward", AT(SITE_USE_WAITS_FOR_GATHER, 1, 3, false), "clocks",
     "unit 3 slot 1"},
    {"no wait for the gather, backward", AT(SITE_USE_WAITS_FOR_GATHER, 1, 3, true), "clocks",
     "unit 3 slot 1"},
    {"no wait for the slot's last reader, forward", AT(SITE_GATHER_WAITS_FOR_READER, 0, 4, false),
     "clocks", "slot 0"},
    {"no wait for the slot's last reader, backward", AT(SITE_GATHER_WAITS_FOR_READER, 0, 4, true),
     "clocks", "slot 0"},
    {"gather does not wait for the optimizer", AT(SITE_GATHER_WAITS_FOR_STEP, 2, 0, false),
     "clocks", "shards"},
    {"pack does not wait for the reduce slot", AT(SITE_PACK_WAITS_FOR_REDUCE, 1, 6, true), "clocks",
     "reduce slot 0"},
    {"reduce does not wait for the pack", AT(SITE_REDUCE_WAITS_FOR_PACK, 1, 6, true), "clocks",
     "reduce slot 0"},
    {"optimizer does not wait for the last sums", AT(SITE_STEP_WAITS_FOR_REDUCE, 1, 0, true),
     "clocks", "shard gradients"},
    {"gather's end is not recorded", AT(SITE_RECORD_GATHERED, 1, 2, false), "clocks",
     "unit 2 slot 0"},
    {"release is not recorded", AT(SITE_RECORD_RELEASED, 0, 2, false), "clocks", "slot 0"},
    {"pack's end is not recorded", AT(SITE_RECORD_PACKED, 1, 8, true), "clocks", "reduce slot 0"},
    {"reduce's end is not recorded", AT(SITE_RECORD_REDUCED, 1, 9, true), "clocks",
     "reduce slot 1"},
    {"optimizer's end is not recorded", AT(SITE_RECORD_STEPPED, 1, 0, true), "clocks", "shards"},
    {"release is recorded before the last reader", AT(SITE_RELEASED_TOO_EARLY, 1, 2, false),
     "clocks", "slot 0"},
    {"wait comes before the record it means", AT(SITE_WAITED_TOO_EARLY, 1, 6, false), "clocks",
     "unit 6 slot 0"},
    {"unit gathered into the other slot", AT(SITE_WRONG_SLOT, 1, 9, true), "clocks", "slot"},
    {"gradients packed into the other reduce slot", AT(SITE_WRONG_REDUCE_SLOT, 1, 5, true),
     "clocks", "reduce slot 0"},
    {"host reads the loss without waiting", AT(SITE_HOST_WAITS_FOR_LOSS, 2, 0, false), "clocks",
     "loss"},
    {"range remapped while in use", AT(SITE_HOST_WAITS_BEFORE_REMAP, 1, 5, false), "any", "unit 5"},
    {"memory taken away while in use", AT(SITE_HOST_WAITS_BEFORE_END, 3, 0, false), "any", "unit"},
    {"slot unmapped between gather and use", AT(SITE_FREED_IN_STEP, 1, 4, true), "any", "unit 4"},
    {"remap skips the unmap", AT(SITE_REMAP_UNMAP, 1, 5, false), "driver",
     "cuMemMap: CUDA_ERROR_ALREADY_MAPPED"},
    {"remap skips the map", AT(SITE_REMAP_MAP, 1, 5, false), "driver",
     "cuMemSetAccess: CUDA_ERROR_INVALID_VALUE"},
    {"remap skips the access rights", AT(SITE_REMAP_ACCESS, 1, 5, false), "mapping",
     "which its mapping does not allow"},
    {"end skips an unmap", AT(SITE_END_UNMAP, 3, 7, false), "driver",
     "cuMemAddressFree: CUDA_ERROR_INVALID_VALUE"},
    {"end skips a release of memory", AT(SITE_END_RELEASE, 3, 1, false), "leaks", ""},
    {"end skips an event", AT(SITE_END_EVENT, 3, 0, false), "leaks", ""},
};
enum { ROWS = sizeof rows / sizeof *rows };

static const char *
found_by(const outcome *now)
{
    if (now->error[0]) {
        return strstr(now->error, "ILLEGAL_ADDRESS") ? "mapping" : "driver";
    }
    if (now->seen.races) {
        return "clocks";
    }
    return now->leaks ? "leaks" : "nothing";
}

static void
planted_faults_are_found(const outcome *right)
{
    int found = 0;
    printf("%-46s %-8s %s\n", "planted fault", "found by", "wrong values in");
    for (int r = 0; r < ROWS; r++) {
        int wrong = 0, seen = 0;
        const char *by = "nothing";
        for (int i = 0; i < SCHEDULES; i++) {
            outcome now;
            run(&rows[r].fault, i, &now);
            by = found_by(&now);
            wrong += !same_values(&now, right);
            bool reported = strstr(now.report, rows[r].says) || strstr(now.error, rows[r].says);
            bool as_expected = strcmp(rows[r].found_by, "any") == 0
                                   ? strcmp(by, "nothing") != 0
                                   : strcmp(by, rows[r].found_by) == 0;
            seen += reported && as_expected;
            if (!reported || !as_expected) {
                TEST_FAIL("%s, schedule %d: found by %s: '%.300s' '%s'", rows[r].name, i, by,
                          now.report, now.error);
            }
        }
        CHECK_INT(seen, SCHEDULES);
        found += seen == SCHEDULES;
        printf("%-46s %-8s %2d of %d schedules\n", rows[r].name, by, wrong, SCHEDULES);
    }
    printf("%d of %d planted faults found in every schedule\n", found, ROWS);
}

int
main(void)
{
    static outcome right;
    the_right_schedule_is_right_in_every_order(&right);
    planted_faults_are_found(&right);
    simgpu_reset();
    return test_result();
}
