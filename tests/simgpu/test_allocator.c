/* Tests of a device that takes its memory from another allocator. The device zeroes the memory and gives it
 * back only when no work uses it any more. If the driver has no memory for a slot, the device makes the
 * allocator give its cached blocks back to the driver.
 */
#include "unit/arena.h"
#include "comm/comm.h"
#include "engine.h"
#include "gpu.h"

/* A fake caching allocator. As soon as a block is given back, the allocator overwrites it, as another user of
 * the block would. */
typedef struct cache {
    size_t bytes; /* size of each block */
    CUdeviceptr unused[64];
    int unused_count, out, trims;
} cache;

static fsdpc_device *gpu;

static int
cache_alloc(void *context, size_t bytes, fsdpc_stream *stream, void **out)
{
    cache *from = context;
    CUdeviceptr block;
    REQUIRE(bytes <= from->bytes);
    if (from->unused_count > 0) {
        block = from->unused[--from->unused_count];
    } else {
        REQUIRE_CU(cuMemAlloc(&block, from->bytes));
    }
    /* Fill the block as if another tensor had used it before. The fill runs on the stream that will use the
     * block. */
    REQUIRE_CU(cuMemsetD8Async(block, 0x5A, from->bytes, (CUstream)stream));
    from->out++;
    *out = (void *)(uintptr_t)block;
    return FSDPC_OK;
}

static void
cache_free(void *context, void *block)
{
    cache *to = context;
    simgpu_host_write(block, to->bytes, "somebody else's tensor");
    REQUIRE(to->unused_count < 64);
    to->unused[to->unused_count++] = (CUdeviceptr)(uintptr_t)block;
    to->out--;
}

static void
cache_trim(void *context)
{
    cache *c = context;
    c->trims++;
    while (c->unused_count > 0) {
        REQUIRE_CU(cuMemFree(c->unused[--c->unused_count]));
    }
}

static void
set(cache *c)
{
    fsdpc_allocator table = {
        .context = c, .alloc = cache_alloc, .free = cache_free, .trim = cache_trim};
    REQUIRE_OK(fsdpc_device_set_allocator(gpu, c ? &table : NULL));
}

static void
blocks_are_zero_on_every_stream(void)
{
    cache c = {.bytes = 4096};
    fsdpc_stream *stream;
    void *block, *host;
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
    REQUIRE_OK(fsdpc_device_host_alloc(gpu, 4096, &host));
    set(&c);
    for (int round = 0; round < 3; round++) {
        unsigned sum = 0;
        REQUIRE_OK(fsdpc_device_alloc(gpu, 4000, &block));
        fsdpc_device_use(gpu, stream);
        REQUIRE_OK(fsdpc_device_copy_out(gpu, host, block, 4000));
        REQUIRE_OK(fsdpc_device_poison(gpu, block, FSDPC_F32, 1000)); /* still queued at the free */
        fsdpc_device_use(gpu, NULL);
        CHECK_INT(fsdpc_device_foreign_bytes(gpu), 4000);
        fsdpc_device_free(gpu, block, 4000);
        for (int i = 0; i < 4000; i++) {
            sum += ((unsigned char *)host)[i];
        }
        CHECK_INT(sum, 0);
    }
    CHECK(c.out == 0 && c.unused_count == 1);
    cache_trim(&c);
    set(NULL);
    fsdpc_device_host_free(gpu, host, 4096);
    fsdpc_device_stream_free(gpu, stream);
    expect_no_reports();
}

/* The memory of a unit's shard and gradients comes from the allocator. The memory of its range does not. */
static void
units_use_it(void)
{
    cache c = {.bytes = 64 << 10};
    fsdpc_comm *comm;
    float values[1000];
    void *out[ENGINE_PARAMS] = {values};
    REQUIRE_OK(fsdpc_comm_self(gpu, &comm));
    set(&c);
    fsdpc_unit *unit = engine_unit(comm, 0, "u", true);
    const fsdpc_layout *layout = unit->layout;
    CHECK_INT(c.out, 2);
    CHECK_INT(fsdpc_device_foreign_bytes(gpu), layout->shard_bytes + layout->grad_bytes);
    for (int i = 0; i < 1000; i++) {
        values[i] = (float)i;
    }
    REQUIRE_OK(fsdpc_unit_write(unit, FSDPC_MASTER, 0, values, FSDPC_ON_HOST));
    memset(values, 0, sizeof values);
    REQUIRE_OK(fsdpc_unit_read(unit, FSDPC_MASTER, out, FSDPC_ON_HOST));
    CHECK(values[0] == 0 && values[999] == 999);
    fsdpc_unit_free(unit);
    CHECK_INT(c.out, 0);
    CHECK_INT(fsdpc_device_foreign_bytes(gpu), 0);
    cache_trim(&c);
    set(NULL);
    fsdpc_comm_free(comm);
    expect_no_reports();
}

/* If the driver has too little memory because the allocator's cache keeps some of it, the cache gives this
 * memory back, and the slot gets memory. */
static void
slots_find_what_the_cache_keeps(void)
{
    const size_t grain = fsdpc_device_grain(gpu);
    cache c = {.bytes = 8 * grain};
    fsdpc_piece *piece;
    void *block;
    set(&c);
    REQUIRE_OK(fsdpc_device_alloc(gpu, 8 * grain, &block));
    fsdpc_device_free(gpu, block, 8 * grain);
    size_t before = simgpu_get_options()->memory_bytes;
    simgpu_get_options()->memory_bytes = (size_t)simgpu_count().device_bytes + 2 * grain;
    REQUIRE_OK(fsdpc_device_piece_new(gpu, 4 * grain, &piece));
    CHECK_INT(c.trims, 1);
    CHECK_INT(c.unused_count, 0);
    fsdpc_device_piece_free(gpu, piece);
    CHECK_ERROR(fsdpc_device_piece_new(gpu, 40 * grain, &piece), FSDPC_E_DEVMEM, "device memory");
    CHECK_INT(c.trims, 2);
    set(NULL);
    simgpu_get_options()->memory_bytes = before;
    expect_no_reports();
}

int
main(void)
{
    static const char *const policies[] = {"eager", "lazy", "random:1", "random:2"};
    gpu_start();
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    for (int i = 0; i < 4; i++) {
        REQUIRE(simgpu_policy(policies[i]));
        blocks_are_zero_on_every_stream();
        units_use_it();
        slots_find_what_the_cache_keeps();
    }
    return test_result();
}
