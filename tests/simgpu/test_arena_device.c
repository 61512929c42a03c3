/* Tests of the arena in a GPU's memory, with and without virtual memory management. With virtual
 * memory management, a range keeps one address as long as it exists, even if it is bound to another slot.
 * Memory is unmapped only when no work uses it any more.
 */
#include "arena_cases.h"
#include "gpu.h"

static fsdpc_device *gpu;
static arena_place there = {.unit = GRANULE};

static void
slots_and_spare_memory_are_the_devices(void)
{
    int slot, other;
    fsdpc_arena *arena = new_arena(&there);
    fsdpc_range one, two;
    init_range(&there, &one, GRANULE);
    init_range(&there, &two, GRANULE);
    CHECK(!simgpu_accessible(one.address, 1, false));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * GRANULE, &slot));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, GRANULE, &other));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, other));
    const int64_t maps = simgpu_count().maps, bytes = simgpu_count().device_bytes;
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, other));
    CHECK_INT(simgpu_count().maps, maps);
    REQUIRE_OK(fsdpc_arena_spare(arena, &two));
    CHECK_INT(simgpu_count().device_bytes, bytes + GRANULE);
    REQUIRE_OK(fsdpc_arena_restore(arena, &two));
    CHECK_INT(simgpu_count().device_bytes, bytes);
    /* After the arena is freed, a slot's memory stays until the last range that maps the slot is freed. */
    fsdpc_arena_free(arena);
    CHECK_INT(simgpu_count().device_bytes, bytes);
    fsdpc_range_fini(&one);
    CHECK(simgpu_count().device_bytes < bytes);
    fsdpc_range_fini(&two);
}

/* Binds a range to another slot right after work on its first slot was queued. Returns true if the simulator
 * reports no race and no fault. */
static bool
taken_in_time(int skipped_record)
{
    fsdpc_arena *arena;
    fsdpc_range range;
    fsdpc_stream *stream;
    int slots[2];
    const simgpu_counters before = simgpu_count();
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
    REQUIRE_OK(fsdpc_arena_new_on(gpu, &arena));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &range, GRANULE));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, GRANULE, &slots[0]));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, GRANULE, &slots[1]));
    REQUIRE_OK(fsdpc_arena_bind(arena, &range, slots[0]));
    fsdpc_device_use(gpu, stream);
    REQUIRE_OK(fsdpc_device_zero(gpu, range.address, GRANULE));
    fsdpc_device_use(gpu, NULL);
    if (skipped_record) {
        REQUIRE(simgpu_skip("cuEventRecord", skipped_record));
    }
    REQUIRE_OK(fsdpc_arena_bind(arena, &range, slots[1]));
    const simgpu_counters after = simgpu_count();
    CHECK(simgpu_drain());
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
    fsdpc_device_stream_free(gpu, stream);
    return after.races == before.races && after.faults == before.faults;
}

static void
a_failed_call_leaves_nothing(void)
{
    static const struct {
        const char *entry;
        int calls;
    } parts[] = {
        {"cuMemAddressReserve", 4}, {"cuMemCreate", 6}, {"cuMemMap", 12}, {"cuMemSetAccess", 12}};
    REQUIRE_OK(make_and_use(&there));
    const int leaks = simgpu_leaks(NULL, 0);
    for (int i = 0; i < 4; i++) {
        for (int k = 1; k <= parts[i].calls; k++) {
            REQUIRE(simgpu_fail(parts[i].entry, k, CUDA_ERROR_OUT_OF_MEMORY));
            CHECK_INT(make_and_use(&there), FSDPC_E_DEVMEM);
            CHECK_INT(simgpu_leaks(NULL, 0), leaks);
        }
    }
    test_alloc_sweep(make_and_use, &there);
    CHECK_INT(simgpu_leaks(NULL, 0), leaks);
}

static void
without_virtual_memory_each_slot_has_one_address(void)
{
    fsdpc_device *with = gpu;
    fsdpc_arena *arena;
    fsdpc_range one, two;
    int first, second;
    simgpu_get_options()->vmm = false;
    REQUIRE_OK(fsdpc_device_cuda(1, &gpu));
    const arena_place plain = {.device = gpu};
    const int leaks = simgpu_leaks(NULL, 0);
    REQUIRE_OK(fsdpc_arena_new_on(gpu, &arena));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &one, 5000));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &two, 100));
    CHECK(one.address == NULL && one.bytes == 5120);
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 5000, &first));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 6000, &second));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, first));
    CHECK(one.address && one.address == two.address);
    CHECK(one.address == fsdpc_arena_slot_address(arena, first));
    fill(&plain, arena, &one, 5);
    CHECK(all_are(&plain, &two, 5));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, second));
    CHECK(one.address == fsdpc_arena_slot_address(arena, second));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, first));
    CHECK_ERROR(fsdpc_arena_spare(arena, &two), FSDPC_E_UNAVAILABLE, "virtual memory");
    fsdpc_arena_free(arena);
    CHECK(all_are(&plain, &two, 5));
    fsdpc_range_fini(&one);
    fsdpc_range_fini(&two);
    CHECK_INT(simgpu_leaks(NULL, 0), leaks);
    gpu = with;
    simgpu_get_options()->vmm = true;
}

static void
host_memory_stays_with_the_host(void)
{
    fsdpc_device *cpu;
    fsdpc_arena *arena;
    fsdpc_range range, far;
    int slot;
    REQUIRE_OK(fsdpc_device_cpu(&cpu));
    REQUIRE_OK(fsdpc_arena_new_on(cpu, &arena));
    REQUIRE_OK(fsdpc_range_init_on(cpu, &range, 1));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &far, 1));
    CHECK(range.device == NULL);
    REQUIRE_OK(fsdpc_arena_add_slot(arena, GRANULE, &slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &range, slot));
    *(char *)range.address = 3;
    CHECK_ERROR(fsdpc_arena_bind(arena, &far, slot), FSDPC_E_INTERNAL, "different devices");
    CHECK(*(char *)fsdpc_arena_slot_address(arena, slot) == 0); /* the range maps it privately */
    void *address = &address;
    CHECK_ERROR(fsdpc_device_reserve(cpu, 4096, &address), FSDPC_E_UNAVAILABLE, "device cpu");
    CHECK_ERROR(fsdpc_device_reserve(gpu, 4096, &address), FSDPC_E_INVAL, "not a multiple");
    fsdpc_range_fini(&range);
    fsdpc_range_fini(&far);
    fsdpc_arena_free(arena);
}

int
main(void)
{
    simgpu_get_options()->devices = 2;
    simgpu_get_options()->quiet = true;
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    there.device = gpu;
    arenas_work(&there);
    const int leaks = simgpu_leaks(NULL, 0);
    arenas_work(&there);
    slots_and_spare_memory_are_the_devices();
    CHECK_INT(simgpu_leaks(NULL, 0), leaks);
    const simgpu_counters right = simgpu_count();
    CHECK_INT(right.races + right.faults, 0);
    CHECK(taken_in_time(0));
    simgpu_policy_eager(); /* under the lazy policy, late work would write to the new slot unnoticed */
    CHECK(taken_in_time(0));
    CHECK(!taken_in_time(2));
    simgpu_policy_lazy();
    a_failed_call_leaves_nothing();
    without_virtual_memory_each_slot_has_one_address();
    host_memory_stays_with_the_host();
    return test_result();
}
