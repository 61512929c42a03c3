/* Tests of arenas for every device: ranges share slots and use spare memory, and wrong slots are refused. */
#ifndef FSDPC_TEST_ARENA_CASES_H
#define FSDPC_TEST_ARENA_CASES_H

#include "test.h"
#include "unit/arena.h"

/* Where the slots of an arena lie. */
typedef struct arena_place {
    fsdpc_device *device;
    fsdpc_shm *shm; /* NULL: private memory */
    size_t unit;    /* bytes of a page, or of the device's allocation granularity */
} arena_place;

static fsdpc_arena *
new_arena(const arena_place *p)
{
    fsdpc_arena *arena;
    REQUIRE_OK(p->shm ? fsdpc_arena_new(p->shm, &arena) : fsdpc_arena_new_on(p->device, &arena));
    return arena;
}

/* Initializes a range. Do not move the struct afterwards: an arena identifies a range by its pointer. */
static void
init_range(const arena_place *p, fsdpc_range *range, size_t bytes)
{
    REQUIRE_OK(fsdpc_range_init_on(p->device, range, bytes));
}

static void
await_copies(const arena_place *p)
{
    fsdpc_event *event;
    REQUIRE_OK(fsdpc_device_event_new(p->device, &event));
    REQUIRE_OK(fsdpc_device_record(p->device, event));
    REQUIRE_OK(fsdpc_device_finish(p->device, event, 30, "the test"));
    fsdpc_device_event_free(p->device, event);
}

/* Fills a range by a copy to its writable address, as an exchange does. */
static void
fill(const arena_place *p, const fsdpc_arena *arena, const fsdpc_range *range, int value)
{
    void *host;
    REQUIRE_OK(fsdpc_device_host_alloc(p->device, range->bytes, &host));
    memset(host, value, range->bytes);
    REQUIRE_OK(
        fsdpc_device_copy_in(p->device, fsdpc_arena_writable(arena, range), host, range->bytes));
    await_copies(p);
    fsdpc_device_host_free(p->device, host, range->bytes);
}

static bool
all_at(const arena_place *p, const void *address, size_t bytes, unsigned char value)
{
    void *host;
    REQUIRE_OK(fsdpc_device_host_alloc(p->device, bytes, &host));
    REQUIRE_OK(fsdpc_device_copy_out(p->device, host, address, bytes));
    await_copies(p);
    const unsigned char *seen = host;
    bool all = seen[0] == value && memcmp(seen, seen + 1, bytes - 1) == 0;
    fsdpc_device_host_free(p->device, host, bytes);
    return all;
}

static bool
all_are(const arena_place *p, const fsdpc_range *range, unsigned char value)
{
    return all_at(p, range->address, range->bytes, value);
}

/* --- cases ----------------------------------------------------------------------------------- */

static void
ranges_of_one_slot_show_the_same_bytes(const arena_place *p)
{
    const size_t unit = p->unit;
    int first, second;
    fsdpc_arena *arena = new_arena(p);
    fsdpc_range large, small;
    init_range(p, &large, 2 * unit + 1);
    init_range(p, &small, 0);
    fsdpc_range other;
    init_range(p, &other, 2 * unit);
    CHECK_INT(large.bytes, 3 * unit);
    CHECK_INT(small.bytes, unit);
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 3 * unit - 5, &first));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * unit, &second));
    CHECK_INT(fsdpc_arena_slot_count(arena), 2);
    CHECK_INT(fsdpc_arena_bytes(arena), 5 * unit);
    void *before = large.address;
    REQUIRE_OK(fsdpc_arena_bind(arena, &large, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &other, second));
    CHECK((!before || large.address == before) && large.slot == first);
    fill(p, arena, &large, 1);
    fill(p, arena, &other, 2);
    CHECK(all_are(p, &small, 1) && all_are(p, &large, 1));
    CHECK(all_at(p, fsdpc_arena_slot_address(arena, first), 3 * unit, 1));
    CHECK(all_at(p, fsdpc_arena_slot_address(arena, second), 2 * unit, 2));
    CHECK(fsdpc_arena_slot_address(arena, 2) == NULL);
    fill(p, arena, &small, 7);
    CHECK(all_at(p, large.address, unit, 7));
    CHECK(all_at(p, (char *)large.address + unit, 2 * unit, 1));
    /* After `small` is bound to the other slot, its address shows the bytes of that slot. */
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, second));
    CHECK(all_are(p, &small, 2));
    CHECK_INT(small.slot, second);
    /* A range can still be read after its arena is freed. */
    fsdpc_arena_free(arena);
    CHECK(all_are(p, &other, 2));
    fsdpc_range_fini(&large);
    CHECK(all_are(p, &small, 2));
    fsdpc_range_fini(&small);
    fsdpc_range_fini(&other);
    fsdpc_range_fini(&other);
}

static void
spare_memory_is_private_and_the_slot_comes_back(const arena_place *p)
{
    int slot;
    fsdpc_arena *arena = new_arena(p);
    fsdpc_range one, two;
    init_range(p, &one, 2 * p->unit);
    init_range(p, &two, p->unit);
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * p->unit, &slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, slot));
    fill(p, arena, &one, 5);
    CHECK_INT(fsdpc_arena_restore(arena, &two), FSDPC_OK); /* nothing to restore */
    for (int i = 1; i <= 3; i++) {
        REQUIRE_OK(fsdpc_arena_spare(arena, &two));
        CHECK(two.spare && all_are(p, &two, 0));
        CHECK_INT(fsdpc_arena_spare_bytes(arena), p->unit);
        CHECK_INT(fsdpc_arena_spare_count(arena), i);
        fill(p, arena, &two, 6);
        REQUIRE_OK(fsdpc_arena_spare(arena, &two)); /* no change: `two` has spare memory */
        CHECK(all_are(p, &two, 6) && all_are(p, &one, 5));
        CHECK_INT(fsdpc_arena_spare_count(arena), i);
        REQUIRE_OK(fsdpc_arena_restore(arena, &two));
        CHECK(!two.spare && all_are(p, &two, 5));
        CHECK_INT(fsdpc_arena_spare_bytes(arena), 0);
    }
    CHECK_INT(fsdpc_arena_bytes(arena), 2 * p->unit);
    /* If an arena is freed while a range is in spare memory, the range can be bound to another arena. */
    REQUIRE_OK(fsdpc_arena_spare(arena, &two));
    fsdpc_arena_free(arena);
    fsdpc_arena *next = new_arena(p);
    REQUIRE_OK(fsdpc_arena_add_slot(next, p->unit, &slot));
    REQUIRE_OK(fsdpc_arena_bind(next, &two, slot));
    fill(p, next, &two, 4);
    CHECK(!two.spare && all_are(p, &two, 4));
    REQUIRE_OK(fsdpc_arena_spare(next, &two));
    CHECK_INT(fsdpc_arena_spare_bytes(next), p->unit);
    REQUIRE_OK(fsdpc_arena_restore(next, &two));
    CHECK_INT(fsdpc_arena_spare_bytes(next), 0);
    fsdpc_range_fini(&one);
    fsdpc_range_fini(&two);
    fsdpc_arena_free(next);
}

static void
wrong_slots_are_refused(const arena_place *p)
{
    int slot;
    fsdpc_arena *arena = new_arena(p);
    fsdpc_range range;
    init_range(p, &range, 2 * p->unit);
    REQUIRE_OK(fsdpc_arena_add_slot(arena, p->unit, &slot));
    CHECK_ERROR(fsdpc_arena_bind(arena, &range, slot), FSDPC_E_INTERNAL, "slot 0 does not hold");
    CHECK_ERROR(fsdpc_arena_bind(arena, &range, 1), FSDPC_E_INTERNAL, "slot 1");
    CHECK_ERROR(fsdpc_arena_bind(arena, &range, -1), FSDPC_E_INTERNAL, "slot -1");
    CHECK_INT(range.slot, -1);
    CHECK_INT(fsdpc_arena_slot_count(arena), 1);
    CHECK_INT(fsdpc_arena_bytes(arena), p->unit);
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
    fsdpc_arena_free(NULL);
}

static int
make_and_use(void *place)
{
    const arena_place *p = place;
    int status = FSDPC_OK;
    fsdpc_arena *arena = NULL;
    fsdpc_range range = {0};
    FSDPC_GOTO(p->shm ? fsdpc_arena_new(p->shm, &arena) : fsdpc_arena_new_on(p->device, &arena),
               done);
    FSDPC_GOTO(fsdpc_range_init_on(p->device, &range, 3 * p->unit), done);
    for (int i = 0; i < 3; i++) {
        int slot;
        FSDPC_GOTO(fsdpc_arena_add_slot(arena, 3 * p->unit, &slot), done);
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
arenas_work(arena_place *p)
{
    ranges_of_one_slot_show_the_same_bytes(p);
    spare_memory_is_private_and_the_slot_comes_back(p);
    wrong_slots_are_refused(p);
    test_alloc_sweep(make_and_use, p);
}

#endif
