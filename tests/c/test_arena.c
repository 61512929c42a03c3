/* The arena: fixed addresses over shared slots, spare memory and back, nothing left behind. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/arena.h"

#include "ranks.h"

static size_t
page(void)
{
    return fsdpc_shm_page_bytes();
}

static bool
all_are(const fsdpc_range *range, unsigned char value)
{
    const unsigned char *bytes = range->address;
    for (size_t i = 0; i < range->bytes; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* As an exchange writes. */
static void
fill(const fsdpc_arena *arena, const fsdpc_range *range, int value)
{
    memset(fsdpc_arena_writable(arena, range), value, range->bytes);
}

static fsdpc_shm *
alone(void)
{
    fsdpc_shm *shm;
    REQUIRE_OK(fsdpc_shm_create(0, 1, "alone", 3, &shm));
    return shm;
}

static int
count_mappings(void)
{
    char line[4096];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file)) {
        count += strchr(line, '\n') != NULL;
    }
    fclose(file);
    return count;
}

/* --- ranges ---------------------------------------------------------------------------------- */

static void
unbound_ranges_read_as_zeros(void)
{
    fsdpc_range range;
    REQUIRE_OK(fsdpc_range_init(&range, page() + 1));
    CHECK_INT(range.bytes, 2 * page());
    CHECK_INT(range.slot, -1);
    CHECK(!range.spare);
    CHECK(all_are(&range, 0));
    fsdpc_range_fini(&range);
    CHECK(range.address == NULL);
    fsdpc_range_fini(&range);
    REQUIRE_OK(fsdpc_range_init(&range, 0));
    CHECK_INT(range.bytes, page());
    fsdpc_range_fini(&range);
    CHECK_ERROR(fsdpc_range_init(&range, (size_t)1 << 60), FSDPC_E_NOMEM, "addresses");
    fsdpc_range_fini(&range);
}

/* --- slots ----------------------------------------------------------------------------------- */

static void
ranges_of_one_slot_show_the_same_bytes(fsdpc_shm *shm)
{
    fsdpc_arena *arena;
    fsdpc_range large, small, other;
    int first, second;
    REQUIRE_OK(fsdpc_arena_new(shm, &arena));
    REQUIRE_OK(fsdpc_range_init(&large, 3 * page()));
    REQUIRE_OK(fsdpc_range_init(&small, page()));
    REQUIRE_OK(fsdpc_range_init(&other, 2 * page()));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 3 * page() - 5, &first));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * page(), &second));
    CHECK_INT(fsdpc_arena_slot_count(arena), 2);
    CHECK_INT(fsdpc_arena_bytes(arena), 5 * page());
    void *before = large.address;
    memset(large.address, 9, large.bytes); /* lost with the binding */
    REQUIRE_OK(fsdpc_arena_bind(arena, &large, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &other, second));
    CHECK(large.address == before);
    CHECK(all_are(&large, 0) && all_are(&other, 0));
    fill(arena, &large, 1);
    fill(arena, &other, 2);
    CHECK(all_are(&small, 1) && all_are(&large, 1));
    ((unsigned char *)fsdpc_arena_writable(arena, &small))[page() - 1] = 7;
    CHECK_INT(((unsigned char *)large.address)[page() - 1], 7);
    CHECK_INT(((unsigned char *)large.address)[page()], 1);
    /* Bound anew: the other slot's bytes. */
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, second));
    CHECK(all_are(&small, 2));
    CHECK_INT(small.slot, second);
    /* Ranges outlive the arena. */
    fsdpc_arena_free(arena);
    CHECK(all_are(&other, 2));
    fsdpc_range_fini(&large);
    fsdpc_range_fini(&small);
    fsdpc_range_fini(&other);
}

static void
spare_memory_is_private_and_the_slot_comes_back(fsdpc_shm *shm)
{
    fsdpc_arena *arena;
    fsdpc_range one, two;
    int slot;
    REQUIRE_OK(fsdpc_arena_new(shm, &arena));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * page(), &slot));
    REQUIRE_OK(fsdpc_range_init(&one, 2 * page()));
    REQUIRE_OK(fsdpc_range_init(&two, page()));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, slot));
    fill(arena, &one, 5);
    CHECK_INT(fsdpc_arena_restore(arena, &two), FSDPC_OK); /* nothing to restore */
    for (int i = 1; i <= 3; i++) {
        REQUIRE_OK(fsdpc_arena_spare(arena, &two));
        CHECK(two.spare && all_are(&two, 0));
        CHECK_INT(fsdpc_arena_spare_bytes(arena), page());
        CHECK_INT(fsdpc_arena_spare_count(arena), i);
        memset(two.address, 6, two.bytes);
        REQUIRE_OK(fsdpc_arena_spare(arena, &two)); /* spare already: stays */
        CHECK(all_are(&two, 6) && all_are(&one, 5));
        CHECK_INT(fsdpc_arena_spare_count(arena), i);
        REQUIRE_OK(fsdpc_arena_restore(arena, &two));
        CHECK(!two.spare && all_are(&two, 5));
        CHECK_INT(fsdpc_arena_spare_bytes(arena), 0);
    }
    CHECK_INT(fsdpc_arena_bytes(arena), 2 * page());
    /* An arena that goes while spare memory is mapped leaves the range to the next one. */
    fsdpc_arena *next;
    REQUIRE_OK(fsdpc_arena_spare(arena, &two));
    fsdpc_arena_free(arena);
    REQUIRE_OK(fsdpc_arena_new(shm, &next));
    REQUIRE_OK(fsdpc_arena_add_slot(next, page(), &slot));
    REQUIRE_OK(fsdpc_arena_bind(next, &two, slot));
    CHECK(!two.spare && all_are(&two, 0));
    REQUIRE_OK(fsdpc_arena_spare(next, &two));
    CHECK_INT(fsdpc_arena_spare_bytes(next), page());
    REQUIRE_OK(fsdpc_arena_restore(next, &two));
    CHECK_INT(fsdpc_arena_spare_bytes(next), 0);
    fsdpc_range_fini(&one);
    fsdpc_range_fini(&two);
    fsdpc_arena_free(next);
}

static void
writes_of_the_program_are_its_own(fsdpc_shm *shm)
{
    fsdpc_arena *arena;
    fsdpc_range one, two;
    int slot;
    bool changed;
    REQUIRE_OK(fsdpc_arena_new(shm, &arena));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 3 * page(), &slot));
    REQUIRE_OK(fsdpc_range_init(&one, 3 * page()));
    REQUIRE_OK(fsdpc_range_init(&two, 2 * page()));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, slot));
    fill(arena, &one, 5);
    fsdpc_arena_watch_writes();
    REQUIRE_OK(fsdpc_arena_take_back(arena, &one, &changed));
    CHECK(!changed && !one.written);
    unsigned char *last = (unsigned char *)one.address + 3 * page() - 1;
    for (int i = 0; i < 2; i++) {
        *last = 9;
        CHECK(one.written && !two.written && all_are(&two, 5));
        *last = i ? 9 : 5;
        REQUIRE_OK(fsdpc_arena_take_back(arena, &one, &changed));
        CHECK(changed == (i == 1) && all_are(&one, 5));
    }
    fill(arena, &one, 6);
    CHECK(all_are(&one, 6) && all_are(&two, 6));
    fsdpc_range_fini(&one);
    fsdpc_range_fini(&two);
    fsdpc_arena_free(arena);
}

static volatile sig_atomic_t passed_on;

static void
count_and_end(int number)
{
    passed_on++;
    _exit(number == SIGSEGV && passed_on == 1 ? 41 : 42);
}

/* Handlers of before and of later see all other faults; without one the process ends by the signal. */
static void
other_faults_are_passed_on(void)
{
    for (int i = 0; i < 3; i++) {
        int status;
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            signal(SIGSEGV, i ? count_and_end : SIG_DFL);
            fsdpc_arena_watch_writes();
            if (i == 2) {
                raise(SIGSEGV);
            }
            char *none = mmap(NULL, page(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            *(volatile char *)none = 1;
            _exit(0);
        }
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(i ? WIFEXITED(status) && WEXITSTATUS(status) == 41
                : WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
}

static void
wrong_slots_are_refused(fsdpc_shm *shm)
{
    fsdpc_arena *arena;
    fsdpc_range range;
    int slot, none;
    REQUIRE_OK(fsdpc_arena_new(shm, &arena));
    REQUIRE_OK(fsdpc_range_init(&range, 2 * page()));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, page(), &slot));
    CHECK_ERROR(fsdpc_arena_bind(arena, &range, slot), FSDPC_E_INTERNAL, "slot 0 does not hold");
    CHECK_ERROR(fsdpc_arena_bind(arena, &range, 1), FSDPC_E_INTERNAL, "slot 1");
    CHECK_ERROR(fsdpc_arena_bind(arena, &range, -1), FSDPC_E_INTERNAL, "slot -1");
    CHECK_INT(range.slot, -1);
    CHECK(all_are(&range, 0));
    CHECK_INT(fsdpc_arena_add_slot(arena, (size_t)1 << 46, &none), FSDPC_E_NOMEM);
    CHECK_INT(none, -1);
    CHECK_INT(fsdpc_arena_slot_count(arena), 1);
    CHECK_INT(fsdpc_arena_bytes(arena), page());
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
    fsdpc_arena_free(NULL);
}

/* --- nothing left behind --------------------------------------------------------------------- */

static int
make_and_use(void *argument)
{
    int status = FSDPC_OK;
    fsdpc_arena *arena = NULL;
    fsdpc_range range = {0};
    FSDPC_GOTO(fsdpc_arena_new(argument, &arena), done);
    FSDPC_GOTO(fsdpc_range_init(&range, 3 * page()), done);
    for (int i = 0; i < 3; i++) {
        int slot;
        FSDPC_GOTO(fsdpc_arena_add_slot(arena, 3 * page(), &slot), done);
        FSDPC_GOTO(fsdpc_arena_bind(arena, &range, slot), done);
        FSDPC_GOTO(fsdpc_arena_spare(arena, &range), done);
        FSDPC_GOTO(fsdpc_arena_restore(arena, &range), done);
    }
done:
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
    return status;
}

static void
nothing_is_left_behind(fsdpc_shm *shm)
{
    REQUIRE_OK(make_and_use(shm));
    int mappings = count_mappings(), files = count_entries("/proc/self/fd");
    for (int i = 0; i < 50; i++) {
        REQUIRE_OK(make_and_use(shm));
    }
    CHECK(count_mappings() < mappings + 25); /* a sanitizer maps some of its own */
    CHECK_INT(count_entries("/proc/self/fd"), files);
}

/* --- slots of several ranks ------------------------------------------------------------------ */

static void
show_each_other(int rank, ranks_run *run)
{
    static const fsdpc_wait what = {.op = "arena", .unit = ""};
    fsdpc_shm *shm;
    fsdpc_arena *arena;
    fsdpc_range range;
    int slot;
    REQUIRE_OK(fsdpc_shm_create(rank, run->world, run->name, run->timeout_s, &shm));
    REQUIRE_OK(fsdpc_arena_new(shm, &arena));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, page(), &slot));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * page(), &slot));
    REQUIRE_OK(fsdpc_range_init(&range, 2 * page()));
    REQUIRE_OK(fsdpc_arena_bind(arena, &range, slot));
    size_t half = range.bytes / 2;
    memset((char *)fsdpc_arena_writable(arena, &range) + half * (size_t)rank, rank + 1, half);
    REQUIRE_OK(fsdpc_shm_barrier(shm, &what));
    fsdpc_arena_watch_writes();
    ((char *)range.address)[half * (size_t)rank] = 77; /* the program's write */
    REQUIRE_OK(fsdpc_shm_barrier(shm, &what));
    CHECK_INT(((char *)range.address)[half * (size_t)(1 - rank)], 2 - rank);
    bool changed;
    REQUIRE_OK(fsdpc_arena_take_back(arena, &range, &changed));
    CHECK(changed);
    for (size_t i = 0; i < range.bytes; i += 64) {
        CHECK_INT(((char *)range.address)[i], i < half ? 1 : 2);
    }
    REQUIRE_OK(fsdpc_shm_barrier(shm, &what));
    /* One rank's spare memory is its own. */
    if (rank == 0) {
        REQUIRE_OK(fsdpc_arena_spare(arena, &range));
        memset(range.address, 99, range.bytes);
    }
    REQUIRE_OK(fsdpc_shm_barrier(shm, &what));
    CHECK_INT(((char *)range.address)[half], rank == 0 ? 99 : 2);
    REQUIRE_OK(fsdpc_arena_restore(arena, &range));
    CHECK_INT(((char *)range.address)[half], 2);
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
    fsdpc_shm_free(shm);
}

static void
ranks_see_the_same_slots(void)
{
    ranks_do(show_each_other, .world = 2);
}

static void
slots_of_both_kinds_work(fsdpc_shm *shm)
{
    ranges_of_one_slot_show_the_same_bytes(shm);
    spare_memory_is_private_and_the_slot_comes_back(shm);
    writes_of_the_program_are_its_own(shm);
    wrong_slots_are_refused(shm);
    test_alloc_sweep(make_and_use, shm);
    nothing_is_left_behind(shm);
}

int
main(void)
{
    other_faults_are_passed_on();
    ranks_see_the_same_slots();
    unbound_ranges_read_as_zeros();
    slots_of_both_kinds_work(NULL);
    fsdpc_shm *shm = alone();
    slots_of_both_kinds_work(shm);
    fsdpc_shm_free(shm);
    return test_result();
}
