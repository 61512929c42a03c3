/* Many tensors added to what a buffer holds, by one launch, and on the CPU device, against kernels of
 * the CPU tensor by tensor:
 * every pair of types, addresses on and off a boundary, strides, missing tensors, gaps left alone.
 */
#include <stdlib.h>

#include "device/device.h"
#include "engine.h"
#include "gpu.h"

enum { TENSORS = 24, ROUNDS = 40, MOST_ROWS = 90, GUARD = 0x5A };

static const fsdpc_dtype floats[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
static uint64_t state = 7;

static int64_t
below(int64_t n)
{
    return (int64_t)(engine_random(&state) % (uint64_t)n);
}

static void *
memory(size_t bytes)
{
    CUdeviceptr block;
    REQUIRE_CU(cuMemAlloc(&block, bytes + 64));
    return (void *)(uintptr_t)block;
}

static void
fill(char *block, fsdpc_dtype type, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        item_put(block, type, i, (double)(below(4001) - 2000) / 64.0);
    }
}

typedef struct pack {
    fsdpc_pack_target targets[TENSORS];
    fsdpc_pack_base bases[TENSORS];
    fsdpc_pack_source sources[TENSORS];
    int64_t shapes[TENSORS][2], strides[TENSORS][2];
    void *blocks[TENSORS];
    fsdpc_dtype dst, base;
    size_t bytes, base_bytes;
    bool in_place;
} pack;

static void
make_source(pack *p, int i, fsdpc_dtype type)
{
    int64_t rows = p->shapes[i][0], columns = p->shapes[i][1];
    bool turned = below(3) == 0;
    size_t item = fsdpc_dtype_bytes(type), shift = (size_t)below(2) * item;
    p->strides[i][0] = turned ? 1 : columns;
    p->strides[i][1] = turned ? rows : 1;
    p->blocks[i] = memory((size_t)(rows * columns + 1) * item);
    fill(p->blocks[i], type, rows * columns + 1);
    p->sources[i] = (fsdpc_pack_source){
        .data = below(5) ? (char *)p->blocks[i] + shift : NULL,
        .dtype = type,
        .ndim = 2,
        .shape = p->shapes[i],
        .strides = turned ? p->strides[i] : NULL,
        .add = below(3) != 0,
    };
}

static void
make_pack(pack *p, int round)
{
    memset(p, 0, sizeof *p);
    p->dst = floats[round % 4];
    p->base = round / 4 % 2 ? FSDPC_F64 : FSDPC_F32;
    p->in_place = p->dst == p->base && round % 3 == 0;
    for (int i = 0; i < TENSORS; i++) {
        int64_t n = (p->shapes[i][0] = below(MOST_ROWS)) * (p->shapes[i][1] = 1 + below(90));
        size_t gap = (size_t)below(3) * fsdpc_dtype_bytes(p->dst);
        p->bytes += gap;
        p->base_bytes += p->in_place ? gap : (size_t)below(5) * fsdpc_dtype_bytes(p->base);
        p->targets[i] = (fsdpc_pack_target){n, p->bytes, p->dst};
        p->bases[i] = (fsdpc_pack_base){p->base_bytes, p->base};
        p->bytes += (size_t)n * fsdpc_dtype_bytes(p->dst);
        p->base_bytes += (size_t)n * fsdpc_dtype_bytes(p->base);
        make_source(p, i, floats[below(4)]);
    }
    p->bytes += 16;
}

/* What the CPU device makes of one tensor. */
static void
want_one(const pack *p, int i, char *dst, const char *base, double scale)
{
    const fsdpc_pack_source *source = &p->sources[i];
    int64_t n = p->targets[i].n;
    char *flat = malloc((size_t)n * 8 + 1), *sum = malloc((size_t)n * 8 + 1);
    REQUIRE(flat && sum);
    if (source->data) {
        const int64_t rows[] = {p->shapes[i][1], 1};
        REQUIRE_OK(fsdpc_device_pack(engine_device, flat, source->dtype, source->data,
                                     source->dtype, 2, source->shape,
                                     source->strides ? source->strides : rows, 1.0));
    }
    if (source->add) {
        memcpy(sum, base + p->bases[i].offset, (size_t)n * fsdpc_dtype_bytes(p->base));
        if (source->data) {
            REQUIRE_OK(fsdpc_device_accumulate(engine_device, sum, p->base, flat, source->dtype, n,
                                               scale));
        }
        REQUIRE_OK(fsdpc_device_cast(engine_device, dst, p->dst, sum, p->base, n, 1.0));
    } else if (source->data) {
        REQUIRE_OK(fsdpc_device_cast(engine_device, dst, p->dst, flat, source->dtype, n, scale));
    } else {
        memset(dst, 0, (size_t)n * fsdpc_dtype_bytes(p->dst));
    }
    free(flat);
    free(sum);
}

static void
compare(const pack *p, fsdpc_device *device, double scale)
{
    fsdpc_pack_plan *plan;
    char *buffer = memory(p->bytes), *base = p->in_place ? buffer : memory(p->base_bytes);
    char *want = malloc(p->bytes), *before = malloc(p->base_bytes);
    REQUIRE(want && before);
    memset(buffer, GUARD, p->bytes);
    if (p->base_bytes) {
        fill(base, p->base, (int64_t)(p->base_bytes / fsdpc_dtype_bytes(p->base)));
    }
    memcpy(before, base, p->base_bytes);
    memcpy(want, buffer, p->bytes);
    bool keep = p->in_place || below(2);
    if (!keep) {
        memset(want, 0, p->bytes);
    }
    for (int i = 0; i < TENSORS; i++) {
        want_one(p, i, want + p->targets[i].offset, before, scale);
    }
    REQUIRE_OK(
        fsdpc_device_pack_plan_onto(device, p->targets, p->bases, TENSORS, p->bytes, keep, &plan));
    int64_t launches = simgpu_count().launches;
    CHECK_INT(fsdpc_device_pack_onto(device, plan, buffer, base, p->sources, scale), FSDPC_OK);
    CHECK_INT(simgpu_count().launches - launches, device != engine_device);
    CHECK(memcmp(buffer, want, p->bytes) == 0);
    CHECK(p->in_place || memcmp(base, before, p->base_bytes) == 0);
    fsdpc_device_pack_plan_free(device, plan);
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)buffer));
    if (!p->in_place) {
        REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)base));
    }
    free(want);
    free(before);
}

static void
refusals(fsdpc_device *gpu)
{
    fsdpc_pack_plan *plan;
    const fsdpc_pack_target target = {4, 0, FSDPC_F32};
    const fsdpc_pack_base narrow = {0, FSDPC_BF16}, askew = {2, FSDPC_F32};
    const fsdpc_pack_source source = {.data = &state, .dtype = FSDPC_F32, .add = true};
    float buffer[4];
    CHECK_INT(fsdpc_device_pack_plan_onto(gpu, &target, &narrow, 1, 16, true, &plan),
              FSDPC_E_INVAL);
    CHECK_INT(fsdpc_device_pack_plan_onto(gpu, &target, &askew, 1, 16, true, &plan), FSDPC_E_INVAL);
    REQUIRE_OK(fsdpc_device_pack_plan_onto(gpu, &target, NULL, 1, 16, true, &plan));
    CHECK_INT(fsdpc_device_pack_onto(gpu, plan, buffer, buffer, &source, 1.0), FSDPC_E_INVAL);
    fsdpc_device_pack_plan_free(gpu, plan);
    REQUIRE_OK(fsdpc_device_pack_plan_onto(engine_device, &target, NULL, 1, 16, true, &plan));
    CHECK_INT(fsdpc_device_pack_onto(engine_device, plan, buffer, buffer, &source, 1.0),
              FSDPC_E_INVAL);
    fsdpc_device_pack_plan_free(engine_device, plan);
}

int
main(void)
{
    fsdpc_device *gpu;
    gpu_start();
    simgpu_get_options()->foreign = true;
    simgpu_get_options()->verify = true;
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    for (int round = 0; round < ROUNDS; round++) {
        pack p;
        make_pack(&p, round);
        compare(&p, gpu, round % 5 == 0 ? 1.0 : 0.3);
        compare(&p, engine_device, round % 5 == 0 ? 1.0 : 0.3);
        for (int i = 0; i < TENSORS; i++) {
            REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)p.blocks[i]));
        }
    }
    CHECK_INT(simgpu_count().races, 0);
    CHECK_INT(simgpu_count().faults, 0);
    refusals(gpu);
    return test_result();
}
