/* Tests of the shared segment: rendezvous, waits, deaths and departures of ranks, agreements, cleanup. */
#include <errno.h>
#include <math.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "ranks.h"
#include "shm/shm_message.h"

static const fsdpc_wait WAIT = {.op = "gather", .unit = "layers.3"};

static int
join_group(int rank, ranks_run *run, fsdpc_shm **out)
{
    return rank_keep(run, rank, fsdpc_shm_create(rank, run->world, run->name, run->timeout_s, out));
}

static uint32_t
blocked_seq(const fsdpc_shm *shm, int rank)
{
    return atomic_load(&shm->control->slots[rank].blocked_seq);
}

/* --- arguments and a group of one ------------------------------------------------------------ */

static void
wrong_arguments_are_refused(void)
{
    fsdpc_shm *shm;
    char name[200];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    CHECK_ERROR(fsdpc_shm_create(0, 257, "a", 1, &shm), FSDPC_E_INVAL, "257");
    CHECK_ERROR(fsdpc_shm_create(0, 0, "a", 1, &shm), FSDPC_E_INVAL, "256");
    CHECK_ERROR(fsdpc_shm_create(2, 2, "a", 1, &shm), FSDPC_E_INVAL, "rank 2");
    CHECK_ERROR(fsdpc_shm_create(-1, 2, "a", 1, &shm), FSDPC_E_INVAL, "rank -1");
    CHECK_ERROR(fsdpc_shm_create(0, 1, "", 1, &shm), FSDPC_E_INVAL, "name");
    CHECK_ERROR(fsdpc_shm_create(0, 1, NULL, 1, &shm), FSDPC_E_INVAL, "name");
    CHECK_ERROR(fsdpc_shm_create(0, 1, name, 1, &shm), FSDPC_E_INVAL, "199");
    CHECK_ERROR(fsdpc_shm_create(0, 1, "a", 0, &shm), FSDPC_E_INVAL, "timeout");
    CHECK_ERROR(fsdpc_shm_create(0, 1, "a", NAN, &shm), FSDPC_E_INVAL, "timeout");
    CHECK(shm == NULL);
    fsdpc_shm_free(NULL);
}

static void
one_rank_needs_nobody(void)
{
    fsdpc_shm *shm;
    REQUIRE_OK(fsdpc_shm_create(0, 1, "alone", 3, &shm));
    for (int i = 0; i < 3; i++) {
        CHECK_INT(fsdpc_shm_barrier(shm, &WAIT), FSDPC_OK);
        CHECK_INT(fsdpc_shm_agree(shm, "text", &WAIT), FSDPC_OK);
    }
    CHECK(!fsdpc_shm_left(shm, 0));
    fsdpc_shm_leave(shm);
    CHECK(fsdpc_shm_left(shm, 0));
    fsdpc_shm_free(shm);
}

static void
memory_is_handed_out_mapped_and_given_back(void)
{
    fsdpc_shm *shm;
    uint64_t first, second, huge, none;
    void *a, *b, *c;
    size_t page = fsdpc_shm_page_bytes();
    REQUIRE_OK(fsdpc_shm_create(0, 1, "alone", 3, &shm));
    REQUIRE_OK(fsdpc_shm_alloc(shm, page + 1, true, &first));
    REQUIRE_OK(fsdpc_shm_alloc(shm, 10, false, &second));
    REQUIRE_OK(fsdpc_shm_alloc(shm, 5 << 20, false, &huge));
    CHECK(second >= first + 2 * page);
    CHECK_INT(huge % (2 << 20), 0);
    REQUIRE_OK(fsdpc_shm_map(shm, first, 2 * page, NULL, &a));
    REQUIRE_OK(fsdpc_shm_map(shm, first, 2 * page, NULL, &b));
    REQUIRE_OK(fsdpc_shm_map(shm, huge, 4 << 20, NULL, &c));
    CHECK_INT((uintptr_t)c % (2 << 20), 0);
    memset(a, 7, 2 * page);
    CHECK_INT(((char *)b)[2 * page - 1], 7);
    /* Maps over an existing mapping, at the caller's address. */
    void *again;
    REQUIRE_OK(fsdpc_shm_map(shm, second, page, b, &again));
    CHECK(again == b);
    CHECK_INT(((char *)b)[0], 0);
    CHECK_INT(((char *)b)[page], 7);
    REQUIRE_OK(fsdpc_shm_discard(shm, first, 2 * page));
    CHECK_INT(((char *)a)[0], 0);
    CHECK_ERROR(fsdpc_shm_map(shm, first + 1, page, NULL, &again), FSDPC_E_INVAL, "pages");
    CHECK_ERROR(fsdpc_shm_map(shm, first, 0, NULL, &again), FSDPC_E_INVAL, "pages");
    CHECK_ERROR(fsdpc_shm_map(shm, UINT64_MAX / page * page, page, NULL, &again), FSDPC_E_INVAL,
                "pages");
    CHECK_ERROR(fsdpc_shm_discard(shm, 3, page), FSDPC_E_INVAL, "pages");
    CHECK_ERROR(fsdpc_shm_alloc(shm, (size_t)1 << 43, true, &none), FSDPC_E_NOMEM, "MiB are free");
    CHECK_ERROR(fsdpc_shm_alloc(shm, SIZE_MAX - page, false, &none), FSDPC_E_NOMEM,
                "exceed the segment's");
    fsdpc_shm_free(shm);
    /* Mappings stay valid after the handle is freed. */
    memset(a, 3, 2 * page);
    CHECK_INT(((char *)a)[page], 3);
    fsdpc_shm_unmap(a, 2 * page);
    fsdpc_shm_unmap(b, 2 * page);
    fsdpc_shm_unmap(c, 4 << 20);
    fsdpc_shm_unmap(NULL, 0);
}

static int
make_alone(void *argument)
{
    (void)argument;
    fsdpc_shm *shm;
    int status = fsdpc_shm_create(0, 1, "alone", 3, &shm);
    fsdpc_shm_free(shm);
    return status;
}

/* --- working groups -------------------------------------------------------------------------- */

enum { ROUNDS = 300 };

static void
count_in_step(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    uint64_t offset, second;
    void *map;
    size_t page = fsdpc_shm_page_bytes();
    rank_sleep_ms(rank == run->option ? 60 : 0); /* one comes late */
    REQUIRE_OK(join_group(rank, run, &shm));
    REQUIRE_OK(fsdpc_shm_alloc(shm, page, true, &offset));
    REQUIRE_OK(fsdpc_shm_alloc(shm, page, true, &second));
    REQUIRE(second != offset);
    REQUIRE_OK(fsdpc_shm_map(shm, offset, page, NULL, &map));
    int *mine = map; /* not atomic: only the barrier orders its accesses */
    for (int i = 1; i <= ROUNDS; i++) {
        mine[rank] = i * (rank + 1);
        REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
        for (int k = 0; k < run->world; k++) {
            CHECK_INT(mine[k], i * (k + 1));
        }
        REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    }
    CHECK_INT(fsdpc_shm_check(shm, &WAIT), FSDPC_OK);
    CHECK_INT(fsdpc_shm_agree(shm, "same\nfor all", &WAIT), FSDPC_OK);
    fsdpc_shm_unmap(map, page);
    fsdpc_shm_free(shm);
}

static void
ranks_meet_and_keep_step(bool threads)
{
    for (int world = 1; world <= 4; world++) {
        ranks_do(count_in_step, .world = world, .threads = threads, .option = world % 3);
    }
}

static void
a_sleeper_is_seen_and_woken(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    uint64_t offset;
    void *map;
    size_t page = fsdpc_shm_page_bytes();
    REQUIRE_OK(join_group(rank, run, &shm));
    REQUIRE_OK(fsdpc_shm_alloc(shm, page, true, &offset));
    REQUIRE_OK(fsdpc_shm_map(shm, offset, page, NULL, &map));
    _Atomic uint32_t *word = map;
    int64_t deadline = fsdpc_shm_deadline(shm);
    if (rank == 0) {
        while (atomic_load(word) == 0) {
            REQUIRE_OK(fsdpc_shm_wait_word(shm, word, 0, deadline, &WAIT));
        }
        CHECK_INT(blocked_seq(shm, 0) % 2, 0);
    } else {
        while (blocked_seq(shm, 0) % 2 == 0) {
            REQUIRE(fsdpc_shm_now_ns() < deadline);
            rank_sleep_ms(1);
        }
        atomic_store(word, 1);
        fsdpc_shm_wake(word);
    }
    REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    fsdpc_shm_unmap(map, page);
    fsdpc_shm_free(shm);
}

static void
say_something(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    char *text = calloc(1, 100000);
    REQUIRE_OK(join_group(rank, run, &shm));
    if (run->option == 0) {
        snprintf(text, 100, "line one\nranks %d\nline three", rank == 2 ? 5 : 4);
    } else {
        memset(text, 'a', 90000);
        text[run->option] = rank == 2 ? 'b' : 'a';
    }
    rank_keep(run, rank, fsdpc_shm_agree(shm, text, &WAIT));
    /* The ranks can still agree after a disagreement. */
    CHECK_INT(fsdpc_shm_agree(shm, "same", &WAIT), FSDPC_OK);
    fsdpc_shm_free(shm);
    free(text);
}

static void
disagreement_is_quoted_everywhere(bool threads)
{
    const struct {
        int option, status;
        const char *part;
    } cases[] = {{0, FSDPC_E_MISMATCH, "rank 0 has \"ranks 4\", rank 2 has \"ranks 5\""},
                 {10000, FSDPC_E_MISMATCH, "after the first 4095 bytes"},
                 {80000, FSDPC_OK, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ranks_run run =
            ranks_do(say_something, .world = 3, .threads = threads, .option = cases[i].option);
        for (int rank = 0; rank < 3; rank++) {
            check_result(&run, rank, cases[i].status, cases[i].part);
        }
    }
}

/* --- groups that do not come together ------------------------------------------------------- */

static void
come_unless_option(int rank, ranks_run *run)
{
    fsdpc_shm *shm = NULL;
    if (rank != run->option) {
        join_group(rank, run, &shm);
        fsdpc_shm_free(shm);
    }
}

static void
a_missing_rank_is_named(void)
{
    for (int missing = 0; missing < 3; missing += 2) {
        char part[64];
        ranks_run run =
            ranks_do(come_unless_option, .world = 3, .timeout_s = 0.4, .option = missing);
        snprintf(part, sizeof part, "\" for rank %d (FSDPC_TIMEOUT sets", missing);
        check_result(&run, 1, FSDPC_E_TIMEOUT, part);
        check_result(&run, missing == 0 ? 2 : 0, FSDPC_E_TIMEOUT, part);
    }
}

static void
come_with_another_world(int rank, ranks_run *run)
{
    fsdpc_shm *shm = NULL;
    int world = rank == 1 ? 5 : 3;
    rank_keep(run, rank, fsdpc_shm_create(rank, world, run->name, run->timeout_s, &shm));
    fsdpc_shm_free(shm);
}

static void
come_twice_as_one(int rank, ranks_run *run)
{
    fsdpc_shm *shm = NULL;
    int as = rank == 2 ? 1 : rank;
    rank_keep(run, rank, fsdpc_shm_create(as, 3, run->name, run->timeout_s, &shm));
    fsdpc_shm_free(shm);
}

static void
wrong_company_is_refused_by_all(void)
{
    ranks_run run = ranks_do(come_with_another_world, .world = 2);
    check_result(&run, 0, FSDPC_E_MISMATCH, "joined as rank 1 of 5");
    check_result(&run, 1, FSDPC_E_MISMATCH, "group has 3 ranks");
    run = ranks_do(come_twice_as_one, .world = 3);
    for (int rank = 0; rank < 3; rank++) {
        check_result(&run, rank, FSDPC_E_MISMATCH, "two processes joined as rank 1");
    }
}

static void
second_host(int rank, ranks_run *run)
{
    fsdpc_shm *shm = NULL;
    if (rank == 1) {
        REQUIRE(rank_await(&run->flags[0], 1));
        rank_keep(run, 1, fsdpc_shm_create(0, 2, run->name, 5, &shm));
        atomic_store(&run->flags[1], 1);
        return;
    }
    /* The group has two ranks, because a group of one does not listen. No process joins as rank 1. */
    atomic_store(&run->flags[0], 1);
    rank_keep(run, 0, fsdpc_shm_create(0, 2, run->name, 1.0, &shm));
}

static void
a_taken_name_is_said(void)
{
    ranks_run run = ranks_do(second_host, .world = 2);
    bool first = run.results[0].status == FSDPC_E_MISMATCH;
    check_result(&run, first ? 0 : 1, FSDPC_E_MISMATCH, "another process already is rank 0");
    check_result(&run, first ? 1 : 0, FSDPC_E_TIMEOUT, " s in the rendezvous of group");
}

/* Returns a socket that listens at the group's address if `listens`, else a socket connected to that
 * address. */
static int
group_socket(const ranks_run *run, bool listens)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int used = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "fsdpc.%s", run->name);
    socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
    int own = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (listens) {
        REQUIRE(bind(own, (struct sockaddr *)&address, bytes) == 0 && listen(own, 1) == 0);
        return own;
    }
    for (int i = 0; connect(own, (struct sockaddr *)&address, bytes) != 0; i++) {
        REQUIRE(i < 5000);
        rank_sleep_ms(2);
    }
    return own;
}

/* Rank 1 first connects and sends bytes that are no message, and only then joins as a rank. */
static void
a_stranger_is_sent_away(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    if (rank == 1) {
        int stranger = group_socket(run, false);
        char answer[4096];
        REQUIRE(send(stranger, "GET / HTTP/1.1", 14, 0) == 14);
        REQUIRE(recv(stranger, answer, sizeof answer, 0) > 0);
        CHECK_INT(recv(stranger, answer, sizeof answer, 0), 0);
        close(stranger);
    }
    REQUIRE_OK(join_group(rank, run, &shm));
    CHECK_INT(fsdpc_shm_barrier(shm, &WAIT), FSDPC_OK);
    fsdpc_shm_free(shm);
}

/* Listens in place of rank 0, and sends bytes that are no message (option 0) or closes the connection (1). */
static void
pose_as_host(int rank, ranks_run *run)
{
    fsdpc_shm *shm = NULL;
    if (rank == 1) {
        REQUIRE(rank_await(&run->flags[0], 1));
        join_group(rank, run, &shm);
        return;
    }
    int listener = group_socket(run, true);
    atomic_store(&run->flags[0], 1);
    int guest = accept(listener, NULL, NULL);
    char hello[4096];
    REQUIRE(recv(guest, hello, sizeof hello, 0) > 0);
    if (run->option == 0) {
        REQUIRE(send(guest, "220 ready", 9, 0) == 9);
        (void)recv(guest, hello, sizeof hello, 0);
    }
    close(guest);
    close(listener);
}

static void
what_ended_the_rendezvous_is_named(void)
{
    const char *const parts[] = {"rank 0 sent bytes that are no message of fsdpc",
                                 "rank 0 closed the connection"};
    for (int option = 0; option < 2; option++) {
        ranks_run run = ranks_do(pose_as_host, .world = 2, .option = option);
        check_result(&run, 1, option == 0 ? FSDPC_E_MISMATCH : FSDPC_E_PEER, parts[option]);
    }
    CHECK_ERROR(fsdpc_shm_connection_error(ENOBUFS, "rank 3"), FSDPC_E_IO,
                "the connection to rank 3 failed: No buffer space available");
}

/* Rank 2 opens more silent connections than rank 0 keeps, and only then rank 1 joins. */
static void
come_behind_a_crowd(int rank, ranks_run *run)
{
    enum { CROWD = 100 };
    fsdpc_shm *shm;
    int crowd[CROWD];
    if (rank == 2) {
        for (int i = 0; i < CROWD; i++) {
            crowd[i] = group_socket(run, false);
        }
        atomic_store(&run->flags[0], 1);
        CHECK(rank_await(&run->flags[1], 2));
        for (int i = 0; i < CROWD; i++) {
            close(crowd[i]);
        }
        return;
    }
    if (rank == 1) {
        REQUIRE(rank_await(&run->flags[0], 1));
    }
    rank_keep(run, rank, fsdpc_shm_create(rank, 2, run->name, run->timeout_s, &shm));
    atomic_fetch_add(&run->flags[1], 1);
    fsdpc_shm_free(shm);
}

static void
silent_connections_keep_nobody_out(void)
{
    ranks_run run = ranks_do(come_behind_a_crowd, .world = 3, .timeout_s = 20);
    check_result(&run, 0, FSDPC_OK, "");
    check_result(&run, 1, FSDPC_OK, "");
}

/* An interrupt check that kills the process at its fifth call. By then the other ranks have joined. */
static int
die_soon(void)
{
    static int checks;
    if (++checks == 5) {
        raise(SIGKILL);
    }
    return 0;
}

static void
die_in_the_meeting(int rank, ranks_run *run)
{
    fsdpc_shm *shm = NULL;
    if (rank == 3) {
        return; /* never joins, so that the rendezvous does not end */
    }
    if (rank == run->killed) {
        fsdpc_shm_interrupt_check = die_soon;
    }
    join_group(rank, run, &shm);
    fsdpc_shm_free(shm);
}

static void
death_in_the_meeting_ends_it(void)
{
    for (int killed = 0; killed < 3; killed += 2) {
        /* The timeout is short, because a rank that connects after rank 0's death waits until the timeout. */
        ranks_run run = ranks_do(die_in_the_meeting, .world = 4, .kills = true, .killed = killed,
                                 .timeout_s = 4);
        if (killed == 2) {
            check_result(&run, 0, FSDPC_E_PEER, "rank 2");
            check_result(&run, 1, FSDPC_E_PEER, "rank 2");
        } else {
            CHECK(run.results[1].status == FSDPC_E_PEER ||
                  run.results[1].status == FSDPC_E_TIMEOUT);
            CHECK(strstr(run.results[1].text, "rank 0") != NULL);
        }
    }
}

/* --- death, departure, silence ---------------------------------------------------------------- */

enum where { IN_BARRIER, ON_WORD };

static int
wait_somewhere(fsdpc_shm *shm, enum where where)
{
    if (where == IN_BARRIER) {
        return fsdpc_shm_barrier(shm, &WAIT);
    }
    uint64_t offset;
    void *map;
    size_t page = fsdpc_shm_page_bytes();
    REQUIRE_OK(fsdpc_shm_alloc(shm, page, true, &offset));
    REQUIRE_OK(fsdpc_shm_map(shm, offset, page, NULL, &map));
    int64_t deadline = fsdpc_shm_deadline(shm);
    int status;
    do {
        status = fsdpc_shm_wait_word(shm, map, 0, deadline, &WAIT);
    } while (status == FSDPC_OK);
    fsdpc_shm_unmap(map, page);
    return status;
}

/* The killed rank dies when all other ranks sleep in a wait. */
static void
wait_for_the_killed(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    REQUIRE_OK(join_group(rank, run, &shm));
    if (rank == run->killed) {
        for (int i = 0; i < run->world; i++) {
            while (i != rank && blocked_seq(shm, i) % 2 == 0) {
                rank_sleep_ms(1);
            }
        }
        raise(SIGKILL);
    }
    rank_keep(run, rank, wait_somewhere(shm, (enum where)run->option));
    /* Later calls fail as well. */
    CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_PEER, "died");
    CHECK_ERROR(fsdpc_shm_agree(shm, "", &WAIT), FSDPC_E_PEER, "died");
    CHECK_ERROR(fsdpc_shm_check(shm, &WAIT), FSDPC_E_PEER, "died");
    fsdpc_shm_free(shm);
}

static void
death_is_named_by_the_survivors(void)
{
    for (int option = IN_BARRIER; option <= ON_WORD; option++) {
        for (int killed = 0; killed < 3; killed++) {
            char part[64];
            ranks_run run = ranks_do(wait_for_the_killed, .world = 3, .kills = true,
                                     .killed = killed, .option = option);
            for (int rank = 0; rank < 3; rank++) {
                if (rank != killed) {
                    snprintf(part, sizeof part, "rank %d (pid ", killed);
                    check_result(&run, rank, FSDPC_E_PEER, part);
                    snprintf(part, sizeof part, "this rank (%d) waited in gather of unit layers.3",
                             rank);
                    check_result(&run, rank, FSDPC_E_PEER, part);
                }
            }
        }
    }
}

static void
leave_early(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    REQUIRE_OK(join_group(rank, run, &shm));
    REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    if (rank == 1) {
        fsdpc_shm_free(shm);
        return;
    }
    rank_keep(run, rank, fsdpc_shm_barrier(shm, &WAIT));
    CHECK(fsdpc_shm_left(shm, 1));
    /* Rank 1 has left but has not died: this is an error only for a rank that waits for rank 1. */
    CHECK_INT(fsdpc_shm_check(shm, &WAIT), FSDPC_OK);
    CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_STATE, "earlier collective");
    REQUIRE(rank == 0 || rank_await(&run->flags[0], 1));
    atomic_store(&run->flags[rank], 1);
    fsdpc_shm_free(shm);
}

static void
departure_is_not_death(bool threads)
{
    ranks_run run = ranks_do(leave_early, .world = 3, .threads = threads);
    check_result(&run, 0, FSDPC_E_PEER, "rank 1 has left");
    check_result(&run, 2, FSDPC_E_PEER, "rank 1 has left");
}

static void
stay_away_from_the_barrier(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    fsdpc_wait before = {.op = "reduce", .unit = "embedding"};
    REQUIRE_OK(join_group(rank, run, &shm));
    REQUIRE_OK(fsdpc_shm_barrier(shm, &before));
    if (rank == 1) {
        CHECK(rank_await(&run->flags[0], 1) && rank_await(&run->flags[2], 1));
    } else {
        rank_keep(run, rank, fsdpc_shm_barrier(shm, &WAIT));
        CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_STATE, "earlier collective");
        atomic_store(&run->flags[rank], 1);
    }
    fsdpc_shm_free(shm);
}

static void
the_deadline_names_who_is_missing(bool threads)
{
    ranks_run run =
        ranks_do(stay_away_from_the_barrier, .world = 3, .threads = threads, .timeout_s = 0.5);
    for (int rank = 0; rank < 3; rank += 2) {
        check_result(&run, rank, FSDPC_E_TIMEOUT, "0.5 s in gather of unit layers.3 for rank 1");
        check_result(&run, rank, FSDPC_E_TIMEOUT, "rank 1 (pid ");
    }
}

static void
stop_and_go_on(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    REQUIRE_OK(join_group(rank, run, &shm));
    REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    if (rank == 1) {
        atomic_store(&run->counter, (uint64_t)getpid());
        raise(SIGSTOP);
        CHECK(rank_await(&run->flags[0], 1));
        rank_keep(run, rank, fsdpc_shm_barrier(shm, &WAIT));
    } else {
        rank_keep(run, rank, fsdpc_shm_barrier(shm, &WAIT));
        fsdpc_shm_free(shm);
        shm = NULL;
        atomic_store(&run->flags[0], 1);
        /* Repeat the signal, because the rank may not have stopped yet. */
        for (int i = 0; i < 50; i++) {
            kill((pid_t)atomic_load(&run->counter), SIGCONT);
            rank_sleep_ms(10);
        }
    }
    fsdpc_shm_free(shm);
}

static void
a_stopped_rank_is_late_not_dead(void)
{
    ranks_run run = ranks_do(stop_and_go_on, .world = 2, .timeout_s = 0.5);
    check_result(&run, 0, FSDPC_E_TIMEOUT, "for rank 1");
    /* Rank 1 continues after rank 0 has left, and completes the barrier that rank 0 had entered. */
    CHECK_INT(run.results[1].status, FSDPC_OK);
}

static void
give_up(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    REQUIRE_OK(join_group(rank, run, &shm));
    if (rank == 1) {
        while (blocked_seq(shm, 0) % 2 == 0) {
            rank_sleep_ms(1);
        }
        fsdpc_shm_abort(shm, "a tensor had the wrong shape");
        fsdpc_shm_abort(shm, "second words");
    } else {
        rank_keep(run, rank, wait_somewhere(shm, (enum where)run->option));
        fsdpc_shm_abort(shm, "too late");
    }
    const int status = rank == 1 ? FSDPC_E_COMM : FSDPC_E_PEER;
    CHECK_ERROR(fsdpc_shm_check(shm, &WAIT), status,
                rank == 1 ? "this rank (1) has given up" : "rank 1 (pid ");
    CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), status, "a tensor had the wrong shape");
    fsdpc_shm_free(shm);
}

static void
an_abort_ends_all_waits(bool threads)
{
    for (int option = IN_BARRIER; option <= ON_WORD; option++) {
        ranks_run run = ranks_do(give_up, .world = 2, .threads = threads, .option = option);
        check_result(&run, 0, FSDPC_E_PEER, "a tensor had the wrong shape");
    }
}

static int
interrupt_now(void)
{
    (void)fsdpc_error(FSDPC_E_INTERRUPT, "Ctrl-C");
    return 1;
}

static void
be_interrupted(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    REQUIRE_OK(join_group(rank, run, &shm));
    if (rank == 0) {
        fsdpc_shm_interrupt_check = interrupt_now;
        rank_keep(run, rank, fsdpc_shm_barrier(shm, &WAIT));
        fsdpc_shm_interrupt_check = NULL;
        CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_COMM, "layers.3: Ctrl-C");
        atomic_store(&run->flags[0], 1);
    } else {
        CHECK(rank_await(&run->flags[0], 1));
        fsdpc_shm_interrupt_check = interrupt_now; /* a wait reports this before rank 0's failure */
        CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_INTERRUPT, "Ctrl-C");
        fsdpc_shm_interrupt_check = NULL;
        CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_PEER, "rank 0 (pid ");
    }
    fsdpc_shm_free(shm);
}

static void
an_interrupt_ends_a_wait(void)
{
    ranks_run run = ranks_do(be_interrupted, .world = 2);
    check_result(&run, 0, FSDPC_E_INTERRUPT, "gather of unit layers.3");
}

static void
a_forked_child_is_not_the_rank(int rank, ranks_run *run)
{
    fsdpc_shm *shm;
    int status;
    REQUIRE_OK(join_group(rank, run, &shm));
    REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    int failures = test_failures;
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        CHECK_ERROR(fsdpc_shm_barrier(shm, &WAIT), FSDPC_E_STATE, "forked child");
        fsdpc_shm_abort(shm, "not mine to end");
        fsdpc_shm_free(shm);
        _exit(test_failures == failures ? 0 : 1);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
    CHECK_INT(fsdpc_shm_barrier(shm, &WAIT), FSDPC_OK);
    CHECK(!fsdpc_shm_left(shm, 1 - rank));
    REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    fsdpc_shm_free(shm);
}

/* --- nothing left behind ---------------------------------------------------------------------- */

/* Counts threads again until the number is the expected one, because a thread may be listed for a moment
 * after it was joined. */
static int
count_tasks(int expected)
{
    int count = count_entries("/proc/self/task");
    for (int i = 0; i < 1000 && count != expected; i++) {
        rank_sleep_ms(2);
        count = count_entries("/proc/self/task");
    }
    return count;
}

static void
come_once(int rank, ranks_run *run, int turn, int tasks)
{
    char name[96];
    fsdpc_shm *shm;
    snprintf(name, sizeof name, "%s-%d", run->name, turn);
    REQUIRE_OK(fsdpc_shm_create(rank, run->world, name, run->timeout_s, &shm));
    REQUIRE_OK(fsdpc_shm_barrier(shm, &WAIT));
    if (tasks > 0) {
        CHECK_INT(count_tasks(tasks), tasks);
    }
    fsdpc_shm_free(shm);
}

static void
come_and_go(int rank, ranks_run *run)
{
    /* Run once before counting, because a sanitizer starts a thread of its own with the first thread. */
    come_once(rank, run, 0, 0);
    rank_sleep_ms(20);
    int fds = count_entries("/proc/self/fd");
    int tasks = count_entries("/proc/self/task");
    int64_t live = fsdpc_mem_live();
    for (int turn = 1; turn <= 20; turn++) {
        come_once(rank, run, turn, tasks + 1);
    }
    CHECK_INT(count_entries("/proc/self/fd"), fds);
    CHECK_INT(count_tasks(tasks), tasks);
    CHECK_INT(fsdpc_mem_live(), live);
}

/* Returns the number of lines of a file that contain `part`. */
static int
count_traces(const char *path, const char *part)
{
    char line[512];
    int count = 0;
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file)) {
        count += strstr(line, part) != NULL;
    }
    fclose(file);
    return count;
}

static int
count_names(const char *directory, const char *part)
{
    int count = 0;
    DIR *entries = opendir(directory);
    REQUIRE(entries != NULL);
    for (struct dirent *entry = readdir(entries); entry; entry = readdir(entries)) {
        count += strstr(entry->d_name, part) != NULL;
    }
    closedir(entries);
    return count;
}

static void
nothing_is_left_behind(void)
{
    /* One run ends normally. In the other run a rank dies, and no process cleans up afterwards. */
    const ranks_run runs[] = {
        ranks_do(come_and_go, .world = 3),
        ranks_do(wait_for_the_killed, .world = 2, .kills = true, .killed = 1),
    };
    for (int i = 0; i < 2; i++) {
        CHECK_INT(count_traces("/proc/net/unix", runs[i].name), 0);
        CHECK_INT(count_names("/dev/shm", "fsdpc"), 0);
    }
}

static void
run_all_kernels(void (*test)(void))
{
    test();
    fsdpc_shm_without_waitv = true;
    test();
    fsdpc_shm_without_pidfd = true;
    test();
    fsdpc_shm_without_waitv = fsdpc_shm_without_pidfd = false;
}

static void
groups_of_processes_work(void)
{
    ranks_meet_and_keep_step(false);
    ranks_do(a_sleeper_is_seen_and_woken, .world = 2);
    an_abort_ends_all_waits(false);
}

int
main(void)
{
    wrong_arguments_are_refused();
    one_rank_needs_nobody();
    memory_is_handed_out_mapped_and_given_back();
    test_alloc_sweep(make_alone, NULL);
    run_all_kernels(groups_of_processes_work);
    disagreement_is_quoted_everywhere(false);
    a_missing_rank_is_named();
    wrong_company_is_refused_by_all();
    a_taken_name_is_said();
    ranks_do(a_stranger_is_sent_away, .world = 2);
    silent_connections_keep_nobody_out();
    what_ended_the_rendezvous_is_named();
    death_in_the_meeting_ends_it();
    run_all_kernels(death_is_named_by_the_survivors);
    departure_is_not_death(false);
    the_deadline_names_who_is_missing(false);
    a_stopped_rank_is_late_not_dead();
    an_interrupt_ends_a_wait();
    ranks_do(a_forked_child_is_not_the_rank, .world = 2);
    nothing_is_left_behind();
    /* Threads come last, because a process with threads must not fork. */
    ranks_meet_and_keep_step(true);
    ranks_do(a_sleeper_is_seen_and_woken, .world = 2, .threads = true);
    disagreement_is_quoted_everywhere(true);
    an_abort_ends_all_waits(true);
    departure_is_not_death(true);
    the_deadline_names_who_is_missing(true);
    return test_result();
}
