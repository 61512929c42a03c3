/* Tests of communicators: every collective is compared with plain loops. The tests also cover failures,
 * collectives by the program's callbacks, and flights, which are collectives in the background. */
#include <math.h>

#include "carrier.h"
#include "comm/hosts.h"
#include "items.h"
#include "ranks.h"

static fsdpc_device *device;

/* --- values ---------------------------------------------------------------------------------- */

static const fsdpc_dtype TYPES[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
/* Ranks exchange data through buffers in shared memory, in chunks of 128 Ki floats. The last count is larger
 * than a chunk. No count is divisible by all world sizes. */
static const int64_t COUNTS[] = {1, 17, 1000, 43691, 131075};
enum { LARGEST = 131075 };
/* The thread sanitizer is slow and finds nothing new with more types, so fewer types are tried with it. */
#ifdef __SANITIZE_THREAD__
enum { ALL_TYPES = 2 };
#else
enum { ALL_TYPES = 4 };
#endif

/* Returns a number that is rarely exact in a 16-bit type. Signs and magnitudes are mixed. */
static double
value_of(int rank, int64_t i)
{
    double base = (double)((i * 7919 + rank * 104729) % 10007) / 1000.0 - 5.0;
    return i % 5 == 0 ? base * 1e-3 : base;
}

static void
fill(void *buffer, fsdpc_dtype dtype, int64_t n, int rank)
{
    for (int64_t i = 0; i < n; i++) {
        item_put(buffer, dtype, i, value_of(rank, i));
    }
}

/* Returns the value of a rank's element after rounding to `dtype`. */
static double
stored(fsdpc_dtype dtype, int rank, int64_t i)
{
    return item_stored(dtype, value_of(rank, i));
}

/* Returns the reduction of all ranks' elements, computed in rank order in F32 (F64 for F64) and then rounded
 * to `dtype`. */
static double
expected(fsdpc_dtype dtype, enum fsdpc_op op, int world, int64_t i)
{
    double result = stored(dtype, 0, i);
    for (int rank = 1; rank < world; rank++) {
        double next = stored(dtype, rank, i);
        if (op == FSDPC_SUM) {
            result = dtype == FSDPC_F64 ? result + next : (double)((float)result + (float)next);
        } else if (op == FSDPC_MAX ? next > result : next < result) {
            result = next;
        }
    }
    return item_stored(dtype, result);
}

static void
check_range(const void *buffer, fsdpc_dtype dtype, enum fsdpc_op op, int world, int64_t from,
            int64_t to)
{
    for (int64_t i = from; i < to; i++) {
        double got = item_get(buffer, dtype, i);
        double want = expected(dtype, op, world, i);
        if (got != want) {
            TEST_FAIL("%s, op %d, %d ranks: element %lld is %.9g, expected %.9g",
                      fsdpc_dtype_name(dtype), (int)op, world, (long long)i, got, want);
            return;
        }
    }
    atomic_fetch_add(&test_checks, 1);
}

/* --- collectives ------------------------------------------------------------------------------ */

static void
try_all_gather(fsdpc_comm *comm, unsigned char *buffer, size_t piece)
{
    int world = fsdpc_comm_world(comm), rank = fsdpc_comm_rank(comm);
    size_t wrong = 0;
    for (size_t i = 0; i < piece * (size_t)world; i++) {
        bool own = i / piece == (size_t)rank;
        buffer[i] = own ? (unsigned char)(i * 31 + i / piece * 7) : 255;
    }
    REQUIRE_OK(fsdpc_comm_all_gather(comm, buffer, piece, "gather of unit a"));
    for (size_t i = 0; i < piece * (size_t)world; i++) {
        wrong += buffer[i] != (unsigned char)(i * 31 + i / piece * 7);
    }
    CHECK_INT(wrong, 0);
}

static void
try_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece, fsdpc_dtype dtype)
{
    int world = fsdpc_comm_world(comm), rank = fsdpc_comm_rank(comm);
    fill(buffer, dtype, piece * world, rank);
    REQUIRE_OK(fsdpc_comm_reduce_scatter(comm, buffer, piece, dtype, "reduce of unit a"));
    check_range(buffer, dtype, FSDPC_SUM, world, piece * rank, piece * (rank + 1));
}

static void
try_all_reduce(fsdpc_comm *comm, void *buffer, int64_t n, fsdpc_dtype dtype, enum fsdpc_op op)
{
    fill(buffer, dtype, n, fsdpc_comm_rank(comm));
    REQUIRE_OK(fsdpc_comm_all_reduce(comm, buffer, n, dtype, op, "norm"));
    check_range(buffer, dtype, op, fsdpc_comm_world(comm), 0, n);
}

static void
try_broadcast(fsdpc_comm *comm, unsigned char *buffer, size_t bytes, int root)
{
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++) {
        buffer[i] = fsdpc_comm_rank(comm) == root ? (unsigned char)(i * 13 + 5) : 0;
    }
    REQUIRE_OK(fsdpc_comm_broadcast(comm, buffer, bytes, root, "states"));
    for (size_t i = 0; i < bytes; i++) {
        wrong += buffer[i] != (unsigned char)(i * 13 + 5);
    }
    CHECK_INT(wrong, 0);
}

/* Tries all collectives with `room` bytes at `buffer` and the first `types` of TYPES. */
static void
try_all(fsdpc_comm *comm, void *buffer, size_t room, size_t types)
{
    int world = fsdpc_comm_world(comm);
    for (size_t c = 0; c < sizeof COUNTS / sizeof *COUNTS; c++) {
        int64_t n = COUNTS[c];
        REQUIRE((size_t)(n * world) * sizeof(double) <= room);
        for (size_t t = 0; t < types; t++) {
            fsdpc_dtype dtype = TYPES[t];
            try_reduce_scatter(comm, buffer, n, dtype);
            try_all_reduce(comm, buffer, n, dtype, (enum fsdpc_op)(t % 3));
            try_all_reduce(comm, buffer, n, dtype, FSDPC_SUM);
        }
        try_all_gather(comm, buffer, (size_t)n * 5);
        try_broadcast(comm, buffer, (size_t)n * 5, (int)c % world);
    }
    CHECK_INT(fsdpc_comm_all_gather(comm, NULL, 0, NULL), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_reduce(comm, NULL, 0, FSDPC_F32, FSDPC_SUM, NULL), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter(comm, NULL, 0, FSDPC_F32, NULL), FSDPC_OK);
    CHECK_INT(fsdpc_comm_broadcast(comm, NULL, 0, 0, NULL), FSDPC_OK);
    CHECK_INT(fsdpc_comm_barrier(comm, NULL), FSDPC_OK);
    CHECK_INT(fsdpc_comm_agree(comm, "world", "options"), FSDPC_OK);
}

static void
shm_rank(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    size_t room = (size_t)run->world * LARGEST * 8;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    CHECK_STR(fsdpc_comm_kind(comm), "shm");
    CHECK_INT(fsdpc_comm_rank(comm), rank);
    CHECK_INT(fsdpc_comm_world(comm), run->world);
    CHECK(fsdpc_comm_device(comm) == device && fsdpc_comm_segment(comm) != NULL);
    void *private = malloc(room);
    REQUIRE(private != NULL);
    try_all(comm, private, room, run->threads ? 2 : ALL_TYPES);
    free(private);
    fsdpc_comm_free(comm);
}

static void
collectives_equal_plain_loops(bool threads)
{
    for (int world = threads ? 2 : 1; world <= (threads ? 3 : 4); world++) {
        ranks_do(shm_rank, .world = world, .threads = threads);
    }
}

/* --- extremes with NaN ------------------------------------------------------------------------- */

static void
nan_wins_over_numbers(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    for (size_t t = 0; t < sizeof TYPES / sizeof *TYPES; t++) {
        double store[4];
        for (int op = FSDPC_MAX; op <= FSDPC_MIN; op++) {
            item_put(store, TYPES[t], 0, rank == 1 ? (double)NAN : 3);
            item_put(store, TYPES[t], 1, rank == 1 ? INFINITY : 3);
            item_put(store, TYPES[t], 2, rank == 1 ? -INFINITY : 3);
            REQUIRE_OK(fsdpc_comm_all_reduce(comm, store, 3, TYPES[t], (enum fsdpc_op)op, "flags"));
            CHECK(isnan(item_get(store, TYPES[t], 0)));
            CHECK(item_get(store, TYPES[t], 1) == (op == FSDPC_MAX ? INFINITY : 3));
            CHECK(item_get(store, TYPES[t], 2) == (op == FSDPC_MAX ? 3 : -INFINITY));
        }
    }
    fsdpc_comm_free(comm);
}

/* --- arguments, self ----------------------------------------------------------------------------- */

static void
one_rank_has_nothing_to_do(void)
{
    fsdpc_comm *comm;
    float x[4] = {1, 2, 3, 4};
    REQUIRE_OK(fsdpc_comm_self(device, &comm));
    CHECK_STR(fsdpc_comm_kind(comm), "self");
    CHECK(fsdpc_comm_segment(comm) == NULL);
    CHECK_INT(fsdpc_comm_all_gather(comm, x, sizeof x, "a"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_reduce_scatter(comm, x, 4, FSDPC_F32, "a"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_all_reduce(comm, x, 4, FSDPC_F32, FSDPC_SUM, "a"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_broadcast(comm, x, sizeof x, 0, "a"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_barrier(comm, "a"), FSDPC_OK);
    CHECK_INT(fsdpc_comm_agree(comm, "text", "a"), FSDPC_OK);
    for (int i = 0; i < 4; i++) {
        CHECK(x[i] == (float)(i + 1));
    }

    CHECK_ERROR(fsdpc_comm_all_gather(comm, NULL, 4, "unit b"), FSDPC_E_INVAL, "unit b");
    CHECK_ERROR(fsdpc_comm_reduce_scatter(comm, x, -1, FSDPC_F32, "u"), FSDPC_E_INVAL, "-1");
    CHECK_ERROR(fsdpc_comm_reduce_scatter(comm, x, 4, FSDPC_BYTES, "u"), FSDPC_E_INVAL, "uint8");
    CHECK_ERROR(fsdpc_comm_all_reduce(comm, x, 4, (fsdpc_dtype)99, FSDPC_SUM, "u"), FSDPC_E_INVAL,
                "unknown");
    CHECK_ERROR(fsdpc_comm_all_reduce(comm, x, INT64_MAX, FSDPC_F32, FSDPC_SUM, "u"), FSDPC_E_INVAL,
                "overflow");
    CHECK_ERROR(fsdpc_comm_all_reduce(comm, x, 4, FSDPC_F32, (enum fsdpc_op)7, "u"), FSDPC_E_INVAL,
                "7");
    CHECK_ERROR(fsdpc_comm_broadcast(comm, x, 4, 1, "u"), FSDPC_E_INVAL, "root 1");
    CHECK_ERROR(fsdpc_comm_agree(comm, NULL, "u"), FSDPC_E_INVAL, "NULL");
    /* After a wrong argument the communicator still works; after an abort every call fails. */
    CHECK_INT(fsdpc_comm_barrier(comm, NULL), FSDPC_OK);
    fsdpc_comm_abort(comm, "no more");
    fsdpc_comm_abort(comm, "again");
    CHECK_ERROR(fsdpc_comm_barrier(comm, NULL), FSDPC_E_COMM, "no more");
    CHECK_ERROR(fsdpc_comm_all_gather(comm, x, 4, NULL), FSDPC_E_COMM, "no more");
    fsdpc_comm_free(comm);
    fsdpc_comm_free(NULL);
}

/* --- failures in a group -------------------------------------------------------------------------- */

static int
run_collective(fsdpc_comm *comm, int which, void *buffer)
{
    switch (which) {
    case 0:
        return fsdpc_comm_all_gather(comm, buffer, 1 << 20, "gather of unit x");
    case 1:
        return fsdpc_comm_reduce_scatter(comm, buffer, 1 << 18, FSDPC_F32, "reduce of unit x");
    case 2:
        return fsdpc_comm_all_reduce(comm, buffer, 1 << 18, FSDPC_F32, FSDPC_SUM, "norm of x");
    case 3:
        return fsdpc_comm_broadcast(comm, buffer, 1 << 20, 0, "states of x");
    default:
        return fsdpc_comm_barrier(comm, "barrier of x");
    }
}

static void
die_in_a_collective(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    void *buffer = calloc((size_t)run->world, 1 << 20);
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    REQUIRE_OK(run_collective(comm, run->option, buffer));
    if (rank == run->killed) {
        raise(SIGKILL);
    }
    int status;
    do {
        status = run_collective(comm, run->option, buffer);
    } while (status == FSDPC_OK);
    rank_keep(run, rank, status);
    /* Later calls of any kind fail with the same text. */
    CHECK_ERROR(fsdpc_comm_barrier(comm, "later"), FSDPC_E_PEER, run->results[rank].text);
    fsdpc_comm_free(comm);
    free(buffer);
}

static void
survivors_name_the_dead(void)
{
    for (int option = 0; option < 5; option++) {
        ranks_run run = ranks_do(die_in_a_collective, .world = 3, .kills = true,
                                 .killed = option % 3, .option = option);
        for (int rank = 0; rank < 3; rank++) {
            char part[32];
            snprintf(part, sizeof part, "rank %d (pid", run.killed);
            if (rank != run.killed) {
                check_result(&run, rank, FSDPC_E_PEER, part);
                check_result(&run, rank, FSDPC_E_PEER, " of ");
            }
        }
    }
}

static void
call_something_else(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    void *buffer = calloc((size_t)run->world, 1 << 20);
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    rank_keep(run, rank, run_collective(comm, rank == 1 ? run->option : 0, buffer));
    CHECK_ERROR(fsdpc_comm_barrier(comm, "later"), FSDPC_E_MISMATCH, "different collectives");
    fsdpc_comm_free(comm);
    free(buffer);
}

static void
different_collectives_are_noticed(bool threads)
{
    for (int option = 1; option < 5; option++) {
        ranks_run run =
            ranks_do(call_something_else, .world = 2, .threads = threads, .option = option);
        for (int rank = 0; rank < 2; rank++) {
            check_result(&run, rank, FSDPC_E_MISMATCH, "rank 0 all_gather(1048576 bytes)");
        }
    }
}

/* Ranks 0 and 1 call barriers for different reasons (option 0), a barrier and an agreement (option 1), or
 * agreements for different reasons (option 2). A third rank, if there is one, calls nothing. */
static void
mean_something_else(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    const char *what = rank == 1 && run->option != 1 ? "load" : "save";
    bool agrees = run->option == 2 || (run->option == 1 && rank == 1);
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    REQUIRE_OK(fsdpc_comm_agree(comm, "", "start"));
    if (rank == 2) {
        CHECK(rank_await(&run->flags[0], 2));
    } else {
        rank_keep(run, rank,
                  agrees ? fsdpc_comm_agree(comm, "", what) : fsdpc_comm_barrier(comm, what));
        atomic_fetch_add(&run->flags[0], 1);
    }
    fsdpc_comm_free(comm);
}

/* Returns how many of the ranks 0 and 1 report that their calls differ. With a third rank, which calls
 * nothing, a loaded machine may delay rank 0 or rank 1 past the timeout. The delayed rank then reports only
 * that the other rank gave up. */
static int
count_mismatches(int option, bool threads)
{
    const bool missing = option >= 3;
    ranks_run run = ranks_do(mean_something_else, .world = 2 + missing, .threads = threads,
                             .option = option % 3, .timeout_s = missing ? 2 : 0);
    int found = 0;
    for (int rank = 0; rank < 2; rank++) {
        const int status = run.results[rank].status;
        found += status == FSDPC_E_MISMATCH;
        CHECK(status == FSDPC_E_MISMATCH || status == FSDPC_E_PEER ||
              (missing && status == FSDPC_E_TIMEOUT));
        if (!missing || status == FSDPC_E_MISMATCH) {
            check_result(&run, rank, status, "different collectives: rank");
        }
    }
    return found;
}

static void
reasons_are_compared(bool threads)
{
    for (int option = 0; option < 6; option++) {
        int found = count_mismatches(option, threads);
        for (int again = 0; option >= 3 && found == 0 && again < 3; again++) {
            found = count_mismatches(option, threads);
        }
        CHECK(found > 0);
    }
}

static void
stay_away(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    float x = 1;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    REQUIRE_OK(fsdpc_comm_barrier(comm, "start"));
    if (rank == 1) {
        CHECK(rank_await(&run->flags[0], 1));
    } else {
        rank_keep(run, rank,
                  fsdpc_comm_all_reduce(comm, &x, 1, FSDPC_F32, FSDPC_SUM, "norm of step 4"));
        CHECK_ERROR(fsdpc_comm_barrier(comm, "later"), FSDPC_E_TIMEOUT, "norm of step 4");
        atomic_store(&run->flags[0], 1);
    }
    fsdpc_comm_free(comm);
}

static void
the_deadline_names_the_missing(void)
{
    ranks_run run = ranks_do(stay_away, .world = 2, .timeout_s = 0.4);
    check_result(&run, 0, FSDPC_E_TIMEOUT, "for rank 1");
}

static void
give_up(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    if (rank == 1) {
        fsdpc_comm_abort(comm, "loss is NaN");
        CHECK_ERROR(fsdpc_comm_barrier(comm, "x"), FSDPC_E_COMM, "loss is NaN");
        CHECK(rank_await(&run->flags[0], 1));
    } else {
        rank_keep(run, rank, fsdpc_comm_barrier(comm, "x"));
        atomic_store(&run->flags[0], 1);
    }
    fsdpc_comm_free(comm);
}

static void
an_abort_reaches_the_others(bool threads)
{
    ranks_run run = ranks_do(give_up, .world = 2, .threads = threads);
    check_result(&run, 0, FSDPC_E_PEER, "loss is NaN");
}

static void
disagree(int rank, ranks_run *run)
{
    fsdpc_comm *comm;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &comm));
    rank_keep(run, rank, fsdpc_comm_agree(comm, rank ? "a\nlr 2" : "a\nlr 1", "the options"));
    CHECK_INT(fsdpc_comm_barrier(comm, "still sound"), FSDPC_OK);
    fsdpc_comm_free(comm);
}

static void
disagreement_breaks_nothing(void)
{
    ranks_run run = ranks_do(disagree, .world = 2);
    for (int rank = 0; rank < 2; rank++) {
        check_result(&run, rank, FSDPC_E_MISMATCH,
                     "the options: rank 0 has \"lr 1\", rank 1 has \"lr 2\"");
    }
}

/* --- callbacks --------------------------------------------------------------------------------------- */

static void
callbacks_carry_everything(int rank, ranks_run *run)
{
    carrier self = {0};
    fsdpc_comm_callbacks calls = carrier_callbacks(&self);
    fsdpc_comm *comm;
    size_t room = (size_t)run->world * LARGEST * 8;
    void *buffer = malloc(room);
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &self.inner));
    REQUIRE_OK(fsdpc_comm_c10d(device, rank, run->world, &calls, &comm));
    memset(&calls, 0, sizeof calls); /* the communicator has a copy of the callbacks */
    CHECK_STR(fsdpc_comm_kind(comm), "c10d");
    try_all(comm, buffer, room, 1);
    CHECK(self.calls > 0);
    if (run->world > 1) {
        CHECK_ERROR(fsdpc_comm_agree(comm, rank == 1 ? "x 1" : "x 2", "the model"),
                    FSDPC_E_MISMATCH, "rank 0 has \"x 2\", rank 1 has \"x 1\"");
    }
    fsdpc_comm_free(comm);
    CHECK_INT(self.released, 1);
    fsdpc_comm_free(self.inner);
    free(buffer);
}

/* Small, large and empty parts of several dtypes. Each part has a buffer of its own. */
static const struct {
    int64_t numel;
    fsdpc_dtype dtype;
} parts_table[] = {{5, FSDPC_F32},      {0, FSDPC_F32},      {7, FSDPC_F32},  {3, FSDPC_BF16},
                   {200001, FSDPC_F32}, {11, FSDPC_F64},     {1, FSDPC_F64},  {0, FSDPC_BF16},
                   {60000, FSDPC_BF16}, {60000, FSDPC_BF16}, {2, FSDPC_BF16}, {9, FSDPC_F16}};
enum { PARTS = sizeof parts_table / sizeof *parts_table };

static void
new_parts(fsdpc_comm_part *parts, const fsdpc_comm *comm, bool gather)
{
    for (int i = 0; i < PARTS; i++) {
        const int64_t n = parts_table[i].numel, world = fsdpc_comm_world(comm);
        const fsdpc_dtype dtype = parts_table[i].dtype;
        parts[i] = (fsdpc_comm_part){malloc((size_t)(n * world) * 8 + 1), n, dtype};
        REQUIRE(parts[i].buffer != NULL);
        for (int64_t k = 0; k < n * world; k++) {
            bool own = k / (n ? n : 1) == fsdpc_comm_rank(comm);
            double value = value_of(gather ? i : fsdpc_comm_rank(comm), k);
            item_put(parts[i].buffer, dtype, k, gather && !own ? -1.0 : value);
        }
    }
}

/* Returns the number of wrong elements. After a gather all elements are compared, and after a sum only this
 * rank's shards. */
static int64_t
count_wrong_parts(const fsdpc_comm_part *parts, const fsdpc_comm *comm, bool gather)
{
    int64_t wrong = 0;
    for (int i = 0; i < PARTS; i++) {
        const int64_t n = parts[i].piece_numel, own = n * fsdpc_comm_rank(comm);
        for (int64_t k = gather ? 0 : own; k < (gather ? n * fsdpc_comm_world(comm) : own + n);
             k++) {
            double value = gather ? stored(parts[i].dtype, i, k)
                                  : expected(parts[i].dtype, FSDPC_SUM, fsdpc_comm_world(comm), k);
            wrong += item_get(parts[i].buffer, parts[i].dtype, k) != value;
        }
        free(parts[i].buffer);
    }
    return wrong;
}

/* Counts the calls of callbacks. Small parts share a call, but a part of 200001 elements has a call of its
 * own, and so has a part of 60000 elements on 3 ranks. */
static void
small_parts_go_together(int rank, ranks_run *run)
{
    static const int gathers[] = {3, 3, 6}, scatters[] = {6, 6, 8};
    carrier self = {0};
    fsdpc_comm_callbacks calls = carrier_callbacks(&self);
    fsdpc_comm_part parts[PARTS];
    fsdpc_comm *comm;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &self.inner));
    REQUIRE_OK(fsdpc_comm_c10d(device, rank, run->world, &calls, &comm));
    for (int times = 0; times < 2; times++) {
        self.calls = 0;
        new_parts(parts, comm, true);
        CHECK_INT(fsdpc_comm_all_gather_parts(comm, parts, PARTS, "parts"), FSDPC_OK);
        CHECK_INT(count_wrong_parts(parts, comm, true), 0);
        CHECK_INT(self.calls, gathers[run->world - 1]);
        self.calls = 0;
        new_parts(parts, comm, false);
        CHECK_INT(fsdpc_comm_reduce_scatter_parts(comm, parts, PARTS, "parts"), FSDPC_OK);
        CHECK_INT(count_wrong_parts(parts, comm, false), 0);
        CHECK_INT(self.calls, scatters[run->world - 1]);
    }
    fsdpc_comm_free(comm);
    fsdpc_comm_free(self.inner);
}

static void
a_failed_callback_breaks_the_communicator(void)
{
    const int statuses[] = {FSDPC_E_TIMEOUT, 5};
    for (int i = 0; i < 2; i++) {
        carrier self = {.fail_at = 2, .fail_status = statuses[i]};
        fsdpc_comm_callbacks calls = carrier_callbacks(&self);
        fsdpc_comm *comm;
        float x[2] = {0};
        REQUIRE_OK(fsdpc_comm_self(device, &self.inner));
        REQUIRE_OK(fsdpc_comm_c10d(device, 0, 1, &calls, &comm));
        CHECK_INT(fsdpc_comm_barrier(comm, "a"), FSDPC_OK);
        int status = statuses[i] < 0 ? statuses[i] : FSDPC_E_INTERNAL;
        const char *part = statuses[i] < 0 ? "the wire broke" : "returned 5";
        CHECK_ERROR(fsdpc_comm_all_gather(comm, x, 4, "b"), status, part);
        CHECK_ERROR(fsdpc_comm_barrier(comm, "c"), status, part);
        CHECK_ERROR(fsdpc_comm_agree(comm, "t", "c"), status, part);
        CHECK_INT(self.calls, 2); /* no callback was called after the failure */
        fsdpc_comm_free(comm);
        fsdpc_comm_free(self.inner);
    }
    fsdpc_comm *comm;
    carrier self = {0};
    fsdpc_comm_callbacks calls = carrier_callbacks(&self);
    CHECK_ERROR(fsdpc_comm_c10d(device, 2, 2, &calls, &comm), FSDPC_E_INVAL, "rank 2");
    calls.broadcast = NULL;
    CHECK_ERROR(fsdpc_comm_c10d(device, 0, 2, &calls, &comm), FSDPC_E_INVAL, "callbacks");
    CHECK_ERROR(fsdpc_comm_c10d(device, 0, 2, NULL, &comm), FSDPC_E_INVAL, "callbacks");
}

/* --- allocations -------------------------------------------------------------------------------------- */

static int
make_local_ones(void *argument)
{
    (void)argument;
    carrier self = {0};
    fsdpc_comm_callbacks calls = carrier_callbacks(&self);
    fsdpc_comm *alone = NULL, *called = NULL, *shared = NULL;
    int status = FSDPC_OK;
    FSDPC_GOTO(fsdpc_comm_self(device, &alone), end);
    self.inner = alone;
    FSDPC_GOTO(fsdpc_comm_c10d(device, 0, 1, &calls, &called), end);
    FSDPC_GOTO(fsdpc_comm_agree(called, "text", "x"), end);
    FSDPC_GOTO(fsdpc_comm_shm(device, 0, 1, "alone", 5, &shared), end);
end:
    fsdpc_comm_free(shared);
    fsdpc_comm_free(called);
    fsdpc_comm_free(alone);
    return status;
}

/* --- flights ------------------------------------------------------------------------------------- */

enum { FLIGHT_PIECE = 400003 }; /* number of floats: two chunks, the second of an odd size */

static fsdpc_comm *
join_flying(int rank, ranks_run *run)
{
    fsdpc_comm *inner;
    REQUIRE_OK(fsdpc_comm_shm(device, rank, run->world, run->name, run->timeout_s, &inner));
    return carrier_over(device, rank, run->world, inner, run->option ? run->name : NULL);
}

/* Two gathers and a reduction run at once. Each rank waits for them (lands them) in an order of its own. */
static void
run_flights(int rank, ranks_run *run)
{
    const int world = run->world;
    const int64_t whole = (int64_t)FLIGHT_PIECE * world;
    fsdpc_comm *comm = join_flying(rank, run);
    float *gathered[2], *packed = calloc((size_t)whole, sizeof(float));
    float *landed = calloc((size_t)whole, sizeof(float));
    fsdpc_flight *flights[3];
    const size_t offset = 0;
    const fsdpc_landing landing = {(char *)landed, FLIGHT_PIECE * sizeof(float), &offset};
    CHECK_INT(fsdpc_comm_flies(comm), run->option);
    for (int k = 0; k < 2; k++) {
        const fsdpc_mark mark = {.words = {k, 7}};
        gathered[k] = calloc((size_t)whole, sizeof(float));
        fill(gathered[k] + (int64_t)FLIGHT_PIECE * rank, FSDPC_F32, FLIGHT_PIECE, rank + k);
        const fsdpc_comm_part part = {gathered[k], FLIGHT_PIECE, FSDPC_F32};
        REQUIRE_OK(fsdpc_flight_gather(comm, &part, 1, FSDPC_TO_ALL, &mark, "gather", &flights[k]));
    }
    fill(packed, FSDPC_F32, whole, rank);
    const fsdpc_comm_part part = {packed, FLIGHT_PIECE, FSDPC_F32};
    const fsdpc_mark mark = {.words = {9, 7}};
    REQUIRE_OK(
        fsdpc_flight_reduce(comm, &part, 1, &landing, FSDPC_TO_ALL, &mark, "reduce", &flights[2]));
    const bool summed = fsdpc_flight_is_summed(flights[2]);
    CHECK_INT(summed, !run->option);
    for (int k = 0; k < 3; k++) {
        bool agreed = false;
        fsdpc_flight *flight = flights[(k + rank) % 3];
        REQUIRE_OK(fsdpc_flight_land(flight, "landing", &agreed));
        CHECK(agreed);
        fsdpc_flight_free(flight);
    }
    int wrong = 0;
    for (int64_t i = 0; i < whole; i++) {
        for (int k = 0; k < 2; k++) {
            const int from = (int)(i / FLIGHT_PIECE);
            wrong += gathered[k][i] != (float)stored(FSDPC_F32, from + k, i % FLIGHT_PIECE);
        }
    }
    for (int64_t i = 0; i < FLIGHT_PIECE; i++) {
        const int64_t at = (int64_t)FLIGHT_PIECE * rank + i;
        for (int r = 0, place = 0; r < world && !summed; r++) {
            wrong += r != rank &&
                     landed[(int64_t)FLIGHT_PIECE * place++ + i] != (float)stored(FSDPC_F32, r, at);
        }
        wrong += summed && packed[at] != (float)expected(FSDPC_F32, FSDPC_SUM, world, at);
    }
    CHECK_INT(wrong, 0);
    REQUIRE_OK(fsdpc_comm_barrier(comm, "the end"));
    free(gathered[0]);
    free(gathered[1]);
    free(packed);
    free(landed);
    fsdpc_comm_free(comm);
}

/* Small parts travel to a rank as one packet. run_packets gathers the parts, and then reduces them into
 * memory with gaps between the parts. */
enum { PACKET_PARTS = 5 };
static const int64_t PACKET_NUMEL[PACKET_PARTS] = {5, 20000, 16384, 0, 1};

/* Checks that the shards of all other ranks have arrived, in `landed` if it is not NULL, else in `whole`. */
static void
check_part(int rank, int world, const float *whole, const char *landed, size_t stride, int p)
{
    const int64_t n = PACKET_NUMEL[p];
    int wrong = 0;
    for (int r = 0, place = 0; r < world; r++) {
        const float *from =
            landed ? (const float *)(landed + stride * (size_t)place) : whole + n * r;
        const int64_t first = landed ? n * rank : 0;
        place += r != rank;
        for (int64_t i = 0; i < n && (r != rank || !landed); i++) {
            wrong += from[i] != (float)stored(FSDPC_F32, r + p, first + i);
        }
    }
    CHECK_INT(wrong, 0);
}

static void
run_packets(int rank, ranks_run *run)
{
    const int world = run->world;
    fsdpc_comm *comm = join_flying(rank, run);
    fsdpc_comm_part parts[PACKET_PARTS];
    size_t offsets[PACKET_PARTS], stride = 0;
    for (int p = 0; p < PACKET_PARTS; p++) {
        float *memory = calloc((size_t)(PACKET_NUMEL[p] * world) + 1, sizeof(float));
        parts[p] = (fsdpc_comm_part){memory, PACKET_NUMEL[p], FSDPC_F32};
        offsets[p] = stride;
        stride += (size_t)(PACKET_NUMEL[p] + 3) * sizeof(float);
    }
    char *landed = calloc((size_t)world, stride);
    const fsdpc_landing landing = {landed, stride, offsets};
    for (int reduces = 0; reduces < 2; reduces++) {
        bool agreed = false;
        fsdpc_flight *flight;
        const int before = flying_moved;
        const fsdpc_mark mark = {.words = {reduces, 7}};
        for (int p = 0; p < PACKET_PARTS; p++) {
            const int64_t n = PACKET_NUMEL[p];
            float *to = (float *)parts[p].buffer + (reduces ? 0 : n * rank);
            fill(to, FSDPC_F32, reduces ? n * world : n, rank + p);
        }
        REQUIRE_OK(reduces ? fsdpc_flight_reduce(comm, parts, PACKET_PARTS, &landing, FSDPC_TO_ALL,
                                                 &mark, "reduce", &flight)
                           : fsdpc_flight_gather(comm, parts, PACKET_PARTS, FSDPC_TO_ALL, &mark,
                                                 "gather", &flight));
        CHECK_INT(fsdpc_flight_sent_bytes(flight), (5 + 20000 + 16384 + 1) * 4 * (world - 1));
        /* Three sends and three receives per other rank: the marks, the large part and a packet. */
        CHECK_INT(flying_moved - before, 6 * (world - 1));
        REQUIRE_OK(fsdpc_flight_land(flight, "landing", &agreed));
        CHECK(agreed);
        fsdpc_flight_free(flight);
        for (int p = 0; p < PACKET_PARTS; p++) {
            check_part(rank, world, parts[p].buffer, reduces ? landed + offsets[p] : NULL, stride,
                       p);
        }
    }
    REQUIRE_OK(fsdpc_comm_barrier(comm, "the end"));
    for (int p = 0; p < PACKET_PARTS; p++) {
        free(parts[p].buffer);
    }
    free(landed);
    fsdpc_comm_free(comm);
}

/* Each rank begins reductions that are matched by their keys, in an order of its own, and then a gather. All
 * ranks wait for these flights in one order, in which the gather is second. */
static void
run_keys(int rank, ranks_run *run)
{
    enum { WORLD = 3, KEYS = 3, OTHERS = WORLD - 1 };
    fsdpc_comm *comm = join_flying(rank, run);
    fsdpc_flight *flights[KEYS + 1];
    float *own[KEYS], *landed[KEYS], *whole = calloc(WORLD * FLIGHT_PIECE, sizeof(float));
    uint32_t keys[KEYS];
    const size_t offset = 0, bytes = FLIGHT_PIECE * sizeof(float);
    for (int k = 0; k < KEYS; k++) {
        REQUIRE_OK(fsdpc_comm_next_keys(comm, &keys[k]));
        own[k] = calloc(WORLD, bytes);
        landed[k] = calloc(OTHERS, bytes);
        for (int r = 0; r < WORLD; r++) {
            fill(own[k] + (int64_t)FLIGHT_PIECE * r, FSDPC_F32, FLIGHT_PIECE, rank + k + 10 * r);
        }
    }
    for (int i = 0; i < KEYS; i++) {
        const int k = (i + rank) % KEYS;
        const fsdpc_comm_part part = {own[k], FLIGHT_PIECE, FSDPC_F32};
        const fsdpc_landing landing = {(char *)landed[k], bytes, &offset};
        REQUIRE_OK(fsdpc_flight_by_key(comm, &part, 1, &landing, keys[k], "by key", &flights[k]));
        CHECK(!fsdpc_flight_is_here(flights[k])); /* flying.h receives only in flying_land */
    }
    const fsdpc_mark mark = {.words = {1, 7}};
    const fsdpc_comm_part part = {whole, FLIGHT_PIECE, FSDPC_F32};
    fill(whole + (int64_t)FLIGHT_PIECE * rank, FSDPC_F32, FLIGHT_PIECE, rank);
    REQUIRE_OK(fsdpc_flight_gather(comm, &part, 1, FSDPC_TO_ALL, &mark, "gather", &flights[KEYS]));
    for (int i = 0; i <= KEYS; i++) {
        fsdpc_flight *flight = flights[(i + 2) % (KEYS + 1)];
        REQUIRE_OK(fsdpc_flight_land(flight, "landing", NULL));
        CHECK(i == 1 || fsdpc_flight_is_here(flight)); /* i == 1: the gather, which has no key */
        fsdpc_flight_free(flight);
    }
    int wrong = 0;
    for (int r = 0; r < WORLD; r++) {
        const float *piece = whole + (int64_t)FLIGHT_PIECE * r;
        for (int64_t i = 0; i < FLIGHT_PIECE; i++) {
            for (int k = 0; k < KEYS && r != rank; k++) {
                const int64_t at = (int64_t)FLIGHT_PIECE * (r < rank ? r : r - 1) + i;
                wrong += landed[k][at] != (float)stored(FSDPC_F32, r + k + 10 * rank, i);
            }
            wrong += piece[i] != (float)stored(FSDPC_F32, r, i);
        }
    }
    CHECK_INT(wrong, 0);
    REQUIRE_OK(fsdpc_comm_barrier(comm, "the end"));
    for (int k = 0; k < KEYS; k++) {
        free(own[k]);
        free(landed[k]);
    }
    free(whole);
    fsdpc_comm_free(comm);
}

/* If a communicator has sends and receives, its blocking collectives add in rank order, in all types. */
static void
run_now(int rank, ranks_run *run)
{
    const int world = run->world;
    fsdpc_comm *comm = join_flying(rank, run);
    char *buffer = calloc((size_t)LARGEST * (size_t)world, sizeof(double));
    for (int t = 0; t < ALL_TYPES; t++) {
        for (size_t c = 0; c < sizeof COUNTS / sizeof *COUNTS; c++) {
            const int64_t n = COUNTS[c], whole = n * world;
            int wrong = 0;
            fill(buffer, TYPES[t], whole, rank);
            REQUIRE_OK(fsdpc_comm_all_reduce(comm, buffer, whole, TYPES[t], FSDPC_SUM, "sum"));
            for (int64_t i = 0; i < whole; i++) {
                wrong += item_get(buffer, TYPES[t], i) != expected(TYPES[t], FSDPC_SUM, world, i);
            }
            fill(buffer, TYPES[t], whole, rank);
            REQUIRE_OK(fsdpc_comm_reduce_scatter(comm, buffer, n, TYPES[t], "scatter"));
            for (int64_t i = n * rank; i < n * (rank + 1); i++) {
                wrong += item_get(buffer, TYPES[t], i) != expected(TYPES[t], FSDPC_SUM, world, i);
            }
            fill(buffer, TYPES[t], whole, rank);
            REQUIRE_OK(fsdpc_comm_all_gather(comm, buffer, (size_t)n * fsdpc_dtype_bytes(TYPES[t]),
                                             "gather"));
            for (int64_t i = 0; i < whole; i++) {
                wrong += item_get(buffer, TYPES[t], i) != stored(TYPES[t], (int)(i / n), i);
            }
            CHECK_INT(wrong, 0);
        }
    }
    CHECK_ERROR(rank == 0 ? fsdpc_comm_all_gather(comm, buffer, 8, "a gather")
                          : fsdpc_comm_reduce_scatter(comm, buffer, 2, FSDPC_F32, "a sum"),
                FSDPC_E_MISMATCH, "makes another collective");
    free(buffer);
    fsdpc_comm_free(comm);
}

/* The last rank gives another mark than the other ranks. With sends and receives, ranks with equal marks get
 * each other's data; with a blocking collective no rank gets data. Every rank gets all marks, and the next
 * flight succeeds. */
static void
run_other_marks(int rank, ranks_run *run)
{
    bool agreed = true;
    int32_t values[RANKS_MAX] = {0};
    fsdpc_flight *flight;
    fsdpc_comm *comm = join_flying(rank, run);
    const int last = run->world - 1;
    const fsdpc_comm_part part = {values, sizeof values[0], FSDPC_BYTES};
    const fsdpc_mark mark = {.words = {rank == last, 3}}, same = {.words = {5, 3}};
    values[rank] = rank + 1;
    REQUIRE_OK(fsdpc_flight_gather(comm, &part, 1, FSDPC_TO_ALL, &mark, "gather", &flight));
    REQUIRE_OK(fsdpc_flight_land(flight, "landing", &agreed));
    CHECK(!agreed);
    for (int r = 0; r < run->world; r++) {
        CHECK_INT(fsdpc_flight_marks(flight)[r].words[0], r == last);
        const bool came = run->option && (r == last) == (rank == last);
        CHECK_INT(values[r], r == rank || came ? r + 1 : 0);
    }
    fsdpc_flight_free(flight);
    REQUIRE_OK(fsdpc_flight_gather(comm, &part, 1, FSDPC_TO_ALL, &same, "gather", &flight));
    REQUIRE_OK(fsdpc_flight_land(flight, "landing", &agreed));
    CHECK(agreed);
    for (int r = 0; r < run->world; r++) {
        CHECK_INT(values[r], r + 1);
    }
    fsdpc_flight_free(flight);
    REQUIRE_OK(fsdpc_comm_barrier(comm, "the end"));
    fsdpc_comm_free(comm);
}

/* Two of three ranks share a host. Checks which rank sends to which, and which calls are refused. */
static void
run_hosts(int rank, ranks_run *run)
{
    const int names[] = {7, 4, 7}, apart[] = {1, 2, 3};
    char segment[96], nobody[96];
    fsdpc_comm *comm = join_flying(rank, run);
    snprintf(segment, sizeof segment, "%s-%d", run->name, names[rank]);
    snprintf(nobody, sizeof nobody, "%s-nobody", run->name);
    CHECK_INT(fsdpc_comm_senders(comm), 2);
    if (!run->option) {
        CHECK_ERROR(fsdpc_comm_set_hosts(comm, names, segment, 1), FSDPC_E_STATE, "sends");
    } else {
        if (rank == 0) { /* rank 2, on the same host, does not join the segment `nobody` */
            CHECK_ERROR(fsdpc_comm_set_hosts(comm, names, nobody, 0.2), FSDPC_E_TIMEOUT, "");
            CHECK(!fsdpc_comm_hosts(comm));
        }
        REQUIRE_OK(fsdpc_comm_set_hosts(comm, names, segment, run->timeout_s));
        CHECK_ERROR(fsdpc_comm_set_hosts(comm, apart, segment, 1), FSDPC_E_STATE, "once");
        CHECK_INT(fsdpc_comm_senders(comm), 1);
        CHECK_INT(fsdpc_comm_ranks_per_host(comm), 0);
        CHECK_INT(fsdpc_comm_hosts(comm)->shm != NULL, rank != 1);
        CHECK(fsdpc_hosts_carries(comm, 1, 0) && fsdpc_hosts_carries(comm, 1, 2));
        CHECK(fsdpc_hosts_carries(comm, 0, 1) && !fsdpc_hosts_carries(comm, 2, 1));
        CHECK(!fsdpc_hosts_carries(comm, 0, 2) && !fsdpc_hosts_carries(comm, 0, 0));
    }
    REQUIRE_OK(fsdpc_comm_barrier(comm, "the end"));
    fsdpc_comm_free(comm);
}

/* A failure to post or to land breaks the communicator, and each posted transfer is dropped exactly once. */
static void
flights_fail(void)
{
    for (int at = 1; at <= 4; at++) {
        carrier self = {.fail_at = at, .fail_status = FSDPC_E_COMM};
        fsdpc_comm *comm;
        fsdpc_flight *flight;
        char bytes[2] = {0};
        const fsdpc_comm_part part = {bytes, 1, FSDPC_BYTES};
        const fsdpc_mark mark = {.words = {1, 1}};
        fsdpc_comm_callbacks calls = carrier_callbacks(&self);
        self.flies = calloc(1, sizeof *self.flies);
        snprintf(self.flies->name, sizeof self.flies->name, "test-flights-%d", (int)getpid());
        calls.post = carrier_post;
        calls.land = carrier_land;
        calls.drop = carrier_drop;
        flying *peer = calloc(1, sizeof *peer);
        *peer = (flying){.rank = 1};
        memcpy(peer->name, self.flies->name, sizeof peer->name);
        void *sent;
        const fsdpc_comm_move marks = {(void *)&mark, sizeof mark, 0, true};
        REQUIRE_OK(flying_post(peer, &marks, 1, (1 << 30) - 1, "marks", &sent));
        flying_drop(peer, sent);
        REQUIRE_OK(fsdpc_comm_c10d(device, 0, 2, &calls, &comm));
        int status = fsdpc_flight_gather(comm, &part, 1, FSDPC_TO_ALL, &mark, "gather", &flight);
        if (status == FSDPC_OK) {
            status = at == 4 ? fsdpc_error(FSDPC_E_COMM, "the wire broke")
                             : fsdpc_flight_land(flight, "landing", NULL);
            fsdpc_flight_free(flight);
        }
        CHECK_INT(status, FSDPC_E_COMM);
        CHECK_INT(fsdpc_comm_check(comm), at == 4 ? FSDPC_OK : FSDPC_E_COMM);
        CHECK_INT(self.flies->dropped, at == 1 ? 0 : at == 2 ? 1 : 2);
        flying_end(self.flies);
        flying_end(peer);
        self.flies = NULL;
        fsdpc_comm_free(comm);
    }
}

int
main(void)
{
    REQUIRE_OK(fsdpc_device_cpu(&device));
    one_rank_has_nothing_to_do();
    test_alloc_sweep(make_local_ones, NULL);
    collectives_equal_plain_loops(false);
    ranks_do(nan_wins_over_numbers, .world = 3);
    survivors_name_the_dead();
    different_collectives_are_noticed(false);
    reasons_are_compared(false);
    the_deadline_names_the_missing();
    an_abort_reaches_the_others(false);
    disagreement_breaks_nothing();
    for (int world = 1; world <= 3; world++) {
        ranks_do(callbacks_carry_everything, .world = world);
        ranks_do(small_parts_go_together, .world = world);
    }
    a_failed_callback_breaks_the_communicator();
    for (int flies = 0; flies < 2; flies++) {
        ranks_do(run_flights, .world = 2, .option = flies);
        ranks_do(run_flights, .world = 3, .option = flies);
        ranks_do(run_other_marks, .world = 3, .option = flies);
        ranks_do(run_hosts, .world = 3, .option = flies);
    }
    ranks_do(run_packets, .world = 2, .option = true);
    ranks_do(run_keys, .world = 3, .option = true);
    ranks_do(run_packets, .world = 3, .option = true);
    ranks_do(run_now, .world = 2, .option = true);
    ranks_do(run_now, .world = 3, .option = true);
    flights_fail();
    /* Threads come last, because a process with threads must not fork. */
    collectives_equal_plain_loops(true);
    different_collectives_are_noticed(true);
    reasons_are_compared(true);
    an_abort_reaches_the_others(true);
    return test_result();
}
