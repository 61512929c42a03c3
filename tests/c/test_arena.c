/* Tests of arenas: ranges keep their addresses while they share slots or use spare memory, and no mapping and
 * no file is left behind. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "arena_cases.h"
#include "ranks.h"

static arena_place here; /* host memory */

static size_t
page(void)
{
    return fsdpc_shm_page_bytes();
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
    CHECK(all_are(&here, &range, 0));
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

/* A new slot is zero. A range that is bound to the slot loses the bytes that the range had before. */
static void
new_slots_are_zero(const arena_place *p)
{
    int slot;
    fsdpc_arena *arena = new_arena(p);
    fsdpc_range range;
    init_range(p, &range, 3 * page());
    memset(range.address, 9, range.bytes);
    CHECK_INT(fsdpc_arena_add_slot(arena, (size_t)1 << 46, &slot), FSDPC_E_NOMEM);
    CHECK_INT(slot, -1);
    CHECK_INT(fsdpc_arena_slot_count(arena), 0);
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 3 * page(), &slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &range, slot));
    CHECK(all_are(p, &range, 0));
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
}

static void
writes_of_the_program_are_its_own(const arena_place *p)
{
    int slot;
    fsdpc_arena *arena = new_arena(p);
    fsdpc_range one, two;
    init_range(p, &one, 3 * page());
    init_range(p, &two, 2 * page());
    bool changed;
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 3 * page(), &slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, slot));
    fill(p, arena, &one, 5);
    fsdpc_arena_watch_writes();
    REQUIRE_OK(fsdpc_arena_take_back(arena, &one, &changed));
    CHECK(!changed && !one.written);
    unsigned char *last = (unsigned char *)one.address + 3 * page() - 1;
    for (int i = 0; i < 2; i++) {
        *last = 9;
        CHECK(one.written && !two.written && all_are(p, &two, 5));
        *last = i ? 9 : 5;
        REQUIRE_OK(fsdpc_arena_take_back(arena, &one, &changed));
        CHECK(changed == (i == 1) && all_are(p, &one, 5));
    }
    fill(p, arena, &one, 6);
    CHECK(all_are(p, &one, 6) && all_are(p, &two, 6));
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

/* A fault that is not a write into a range goes to the signal handler that was set before. Without such a
 * handler, the signal ends the process. */
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

/* --- nothing left behind --------------------------------------------------------------------- */

static void
nothing_is_left_behind(arena_place *p)
{
    REQUIRE_OK(make_and_use(p));
    int mappings = count_mappings(), files = count_entries("/proc/self/fd");
    for (int i = 0; i < 50; i++) {
        REQUIRE_OK(make_and_use(p));
    }
    CHECK(count_mappings() < mappings + 25); /* a sanitizer adds mappings of its own */
    CHECK_INT(count_entries("/proc/self/fd"), files);
}

/* --- slots of several ranks ------------------------------------------------------------------ */

static void
ranks_see_the_same_slots(int rank, ranks_run *run)
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
    /* Spare memory is private to a rank: the other rank does not see what is written there. */
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

int
main(void)
{
    REQUIRE_OK(fsdpc_device_cpu(&here.device));
    here.unit = page();
    other_faults_are_passed_on();
    ranks_do(ranks_see_the_same_slots, .world = 2);
    unbound_ranges_read_as_zeros();
    for (int shared = 0; shared < 2; shared++) {
        here.shm = shared ? alone() : NULL;
        arenas_work(&here);
        new_slots_are_zero(&here);
        writes_of_the_program_are_its_own(&here);
        nothing_is_left_behind(&here);
        fsdpc_shm_free(here.shm);
    }
    return test_result();
}
