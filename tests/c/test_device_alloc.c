/* Tests of a device with an allocator of the user's: where blocks come from, where they go back, when calls
 * of the device fail, and when the device releases the allocator. */
#include "device/device.h"
#include "base/mem.h"
#include "test.h"

typedef struct pool {
    int allocs, frees, releases, trims;
    size_t skew;     /* how many bytes after an aligned address each block begins */
    bool empty;      /* every allocation fails */
    void *blocks[8]; /* all blocks that the pool has given; no test needs more than 8 */
    fsdpc_stream *stream;
} pool;

static fsdpc_device *device;

static int
pool_alloc(void *context, size_t bytes, fsdpc_stream *stream, void **out)
{
    pool *from = context;
    if (from->empty) {
        return fsdpc_error(FSDPC_E_DEVMEM, "the pool is empty");
    }
    REQUIRE(from->allocs < 8);
    char *block = aligned_alloc(64, (bytes + from->skew + 63) / 64 * 64);
    REQUIRE(block != NULL);
    memset(block, 0xA5, bytes + from->skew);
    from->blocks[from->allocs++] = block;
    from->stream = stream;
    *out = block + from->skew;
    return FSDPC_OK;
}

static void
pool_free(void *context, void *block)
{
    pool *to = context;
    to->frees++;
    free((char *)block - to->skew);
}

static void
pool_release(void *context)
{
    ((pool *)context)->releases++;
}

static void
set(pool *p)
{
    fsdpc_allocator table = {
        .context = p, .alloc = pool_alloc, .free = pool_free, .release = pool_release};
    REQUIRE_OK(fsdpc_device_set_allocator(device, p ? &table : NULL));
}

static size_t
sum_of(const unsigned char *block, size_t bytes)
{
    size_t sum = 0;
    for (size_t i = 0; i < bytes; i++) {
        sum += block[i];
    }
    return sum;
}

static void
blocks_go_back_to_where_they_came_from(void)
{
    pool first = {0}, second = {0};
    void *own, *a, *b, *none = &none;
    REQUIRE_OK(fsdpc_device_alloc(device, 100, &own));
    set(&first);
    REQUIRE_OK(fsdpc_device_alloc(device, 1000, &a));
    REQUIRE_OK(fsdpc_device_alloc(device, 0, &none));
    CHECK(none == NULL && first.allocs == 1 && a == first.blocks[0]);
    CHECK_INT(sum_of(a, 1000), 0);
    set(&second);
    CHECK_INT(first.releases, 0); /* the device keeps `first` until its block is freed */
    REQUIRE_OK(fsdpc_device_alloc(device, 77, &b));
    CHECK(second.allocs == 1 && b == second.blocks[0]);
    CHECK_INT(fsdpc_device_foreign_bytes(device), 1077);
    set(NULL);
    fsdpc_device_free(device, a, 1000);
    CHECK(first.frees == 1 && first.releases == 1 && second.releases == 0);
    fsdpc_device_free(device, own, 100);
    fsdpc_device_free(device, b, 77);
    CHECK(first.frees == 1 && second.frees == 1 && second.releases == 1);
    CHECK_INT(fsdpc_device_foreign_bytes(device), 0);
    REQUIRE_OK(fsdpc_device_alloc(device, 10, &a));
    CHECK(first.allocs == 1 && second.allocs == 1);
    fsdpc_device_free(device, a, 10);
}

static void
what_an_allocator_refuses_is_an_error(void)
{
    pool p = {.empty = true};
    void *out = &out;
    set(&p);
    CHECK_ERROR(fsdpc_device_alloc(device, 100, &out), FSDPC_E_DEVMEM, "the pool is empty");
    CHECK(out == NULL);
    p.empty = false;
    p.skew = 8;
    CHECK_ERROR(fsdpc_device_alloc(device, 100, &out), FSDPC_E_INTERNAL, "not aligned to 64");
    CHECK(out == NULL && p.frees == 1);
    CHECK_INT(fsdpc_device_foreign_bytes(device), 0);
    set(NULL);
    CHECK_INT(p.releases, 1);
}

static void
the_heap_may_run_out(void)
{
    pool p = {0};
    void *out;
    const fsdpc_allocator table = {.context = &p, .alloc = pool_alloc, .free = pool_free};
    int64_t live = fsdpc_mem_live();
    fsdpc_mem_fail_after(1);
    CHECK_ERROR(fsdpc_device_set_allocator(device, &table), FSDPC_E_NOMEM, "allocator");
    set(&p);
    fsdpc_mem_fail_after(1);
    CHECK_ERROR(fsdpc_device_alloc(device, 100, &out), FSDPC_E_NOMEM, "block");
    CHECK(out == NULL && p.allocs == p.frees);
    fsdpc_mem_fail_after(0);
    set(NULL);
    CHECK_INT(p.releases, 1);
    CHECK_INT(fsdpc_mem_live(), live);
}

int
main(void)
{
    REQUIRE_OK(fsdpc_device_cpu(&device));
    blocks_go_back_to_where_they_came_from();
    what_an_allocator_refuses_is_an_error();
    the_heap_may_run_out();
    return test_result();
}
