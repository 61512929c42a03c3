/* The arena in a GPU's memory: addresses for life over shared slots, with virtual memory management
 * and without, and what is taken away only when nobody uses it any more.
 */
#include "gpu.h"

#include "unit/arena.h"

static fsdpc_device *gpu;

static void
sync_host(void)
{
    fsdpc_event *event;
    REQUIRE_OK(fsdpc_device_event_new(gpu, &event));
    REQUIRE_OK(fsdpc_device_record(gpu, event));
    REQUIRE_OK(fsdpc_device_finish(gpu, event, 30, "the test"));
    fsdpc_device_event_free(gpu, event);
}

static void
write_word(void *address, uint64_t word)
{
    uint64_t *host;
    void *block;
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, sizeof word, &block));
    host = block;
    *host = word;
    REQUIRE_OK(fsdpc_device_copy_in(gpu, address, host, sizeof word));
    sync_host();
    fsdpc_device_host_free(gpu, host, sizeof word);
}

static uint64_t
read_word(const void *address)
{
    void *block;
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, sizeof(uint64_t), &block));
    REQUIRE_OK(fsdpc_device_copy_out(gpu, block, address, sizeof(uint64_t)));
    sync_host();
    const uint64_t word = *(uint64_t *)block;
    fsdpc_device_host_free(gpu, block, sizeof word);
    return word;
}

static void
ranges_of_one_slot_show_the_same_bytes(void)
{
    fsdpc_arena *arena;
    fsdpc_range large, small, other;
    int first, second;
    REQUIRE_OK(fsdpc_arena_new_on(gpu, &arena));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &large, GRANULE + 1));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &small, 0));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &other, GRANULE));
    CHECK_INT(large.bytes, 2 * GRANULE);
    CHECK_INT(small.bytes, GRANULE);
    CHECK(!simgpu_accessible(large.address, 1, false));
    void *const address = large.address;
    REQUIRE_OK(fsdpc_arena_add_slot(arena, 2 * GRANULE - 5, &first));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, GRANULE, &second));
    REQUIRE_OK(fsdpc_arena_bind(arena, &large, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, first));
    REQUIRE_OK(fsdpc_arena_bind(arena, &other, second));
    CHECK_INT(fsdpc_arena_bytes(arena), 3 * GRANULE);
    CHECK(large.address == address && large.slot == first);
    CHECK_ERROR(fsdpc_arena_bind(arena, &large, second), FSDPC_E_INTERNAL, "does not hold");

    write_word(large.address, 11);
    write_word(other.address, 22);
    CHECK_INT(read_word(small.address), 11);
    CHECK_INT(read_word(fsdpc_arena_slot_address(arena, first)), 11);
    CHECK_INT(read_word(fsdpc_arena_slot_address(arena, second)), 22);
    CHECK(fsdpc_arena_slot_address(arena, 2) == NULL);
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, second));
    CHECK_INT(read_word(small.address), 22);
    const int64_t maps = simgpu_count().maps;
    REQUIRE_OK(fsdpc_arena_bind(arena, &small, second));
    CHECK_INT(simgpu_count().maps, maps);

    /* A slot outlives its arena behind the ranges that show it, and ends with the last of them. */
    const int64_t bytes = simgpu_count().device_bytes;
    fsdpc_arena_free(arena);
    CHECK_INT(simgpu_count().device_bytes, bytes);
    CHECK_INT(read_word(large.address), 11);
    fsdpc_range_fini(&large);
    CHECK(simgpu_count().device_bytes < bytes);
    CHECK_INT(read_word(small.address), 22);
    fsdpc_range_fini(&small);
    fsdpc_range_fini(&other);
    fsdpc_range_fini(&other);
}

static void
spare_memory_comes_and_goes(void)
{
    fsdpc_arena *arena;
    fsdpc_range one, two;
    int slot;
    REQUIRE_OK(fsdpc_arena_new_on(gpu, &arena));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &one, GRANULE));
    REQUIRE_OK(fsdpc_range_init_on(gpu, &two, GRANULE));
    REQUIRE_OK(fsdpc_arena_add_slot(arena, GRANULE, &slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &one, slot));
    REQUIRE_OK(fsdpc_arena_bind(arena, &two, slot));
    write_word(one.address, 7);
    const int64_t bytes = simgpu_count().device_bytes;
    REQUIRE_OK(fsdpc_arena_spare(arena, &two));
    REQUIRE_OK(fsdpc_arena_spare(arena, &two));
    CHECK_INT(fsdpc_arena_spare_bytes(arena), GRANULE);
    CHECK_INT(simgpu_count().device_bytes, bytes + GRANULE);
    CHECK_INT(read_word(two.address), 0);
    write_word(two.address, 8);
    CHECK_INT(read_word(one.address), 7);
    REQUIRE_OK(fsdpc_arena_restore(arena, &two));
    CHECK_INT(read_word(two.address), 7);
    CHECK_INT(fsdpc_arena_spare_bytes(arena), 0);
    CHECK_INT(fsdpc_arena_spare_count(arena), 1);
    CHECK_INT(simgpu_count().device_bytes, bytes);
    REQUIRE_OK(fsdpc_arena_spare(arena, &two));
    fsdpc_range_fini(&two);
    fsdpc_range_fini(&one);
    fsdpc_arena_free(arena);
}

/* Work of an own stream is still held back when its slot is taken from behind the range. */
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

static int
whole_life(void *device)
{
    int status = FSDPC_OK, slot;
    fsdpc_arena *arena = NULL;
    fsdpc_range range = {0};
    FSDPC_GOTO(fsdpc_arena_new_on(device, &arena), done);
    FSDPC_GOTO(fsdpc_range_init_on(device, &range, GRANULE), done);
    FSDPC_GOTO(fsdpc_arena_add_slot(arena, GRANULE, &slot), done);
    FSDPC_GOTO(fsdpc_arena_bind(arena, &range, slot), done);
    FSDPC_GOTO(fsdpc_arena_spare(arena, &range), done);
    FSDPC_GOTO(fsdpc_arena_restore(arena, &range), done);
done:
    fsdpc_range_fini(&range);
    fsdpc_arena_free(arena);
    return status;
}

static void
a_failed_call_leaves_nothing(void)
{
    static const struct {
        const char *entry;
        int calls;
    } parts[] = {
        {"cuMemAddressReserve", 2}, {"cuMemCreate", 2}, {"cuMemMap", 4}, {"cuMemSetAccess", 4}};
    REQUIRE_OK(whole_life(gpu));
    const int leaks = simgpu_leaks(NULL, 0);
    for (int i = 0; i < 4; i++) {
        for (int k = 1; k <= parts[i].calls; k++) {
            REQUIRE(simgpu_fail(parts[i].entry, k, CUDA_ERROR_OUT_OF_MEMORY));
            CHECK_INT(whole_life(gpu), FSDPC_E_DEVMEM);
            CHECK_INT(simgpu_leaks(NULL, 0), leaks);
        }
    }
    test_alloc_sweep(whole_life, gpu);
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
    write_word(one.address, 5);
    CHECK_INT(read_word(two.address), 5);
    CHECK_ERROR(fsdpc_arena_bind(arena, &one, second), FSDPC_E_UNAVAILABLE, "another slot");
    CHECK_ERROR(fsdpc_arena_spare(arena, &two), FSDPC_E_UNAVAILABLE, "virtual memory");
    fsdpc_arena_free(arena);
    CHECK_INT(read_word(two.address), 5);
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
    CHECK(*(char *)fsdpc_arena_slot_address(arena, slot) == 0); /* the write was private */
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
    ranges_of_one_slot_show_the_same_bytes();
    spare_memory_comes_and_goes();
    const int leaks = simgpu_leaks(NULL, 0);
    ranges_of_one_slot_show_the_same_bytes();
    spare_memory_comes_and_goes();
    CHECK_INT(simgpu_leaks(NULL, 0), leaks);
    const simgpu_counters right = simgpu_count();
    CHECK_INT(right.races + right.faults, 0);
    CHECK(taken_in_time(0));
    simgpu_policy_eager(); /* work that has not run yet would go to the new slot unnoticed */
    CHECK(taken_in_time(0));
    CHECK(!taken_in_time(2));
    simgpu_policy_lazy();
    a_failed_call_leaves_nothing();
    without_virtual_memory_each_slot_has_one_address();
    host_memory_stays_with_the_host();
    return test_result();
}
