/* Tests of one launch that packs many tensors into one buffer, with and without adding them to a base. The
 * results on the GPU and on the CPU device must equal those of CPU kernels that take one tensor at a time.
 * The cases cover every pair of types, addresses on and off a boundary, strides, broadcasts, missing tensors,
 * gaps that are zeroed or left unchanged, and NaNs. */
#include <stdlib.h>

#include "device/device.h"
#include "gpu.h"
#include "kernel_cases.h"

enum { FEW = 24, MANY = 400, IN_PARAMETERS = 384, DIMS = 5, GUARD = 0x5A };
#ifdef __SANITIZE_ADDRESS__
enum { ROUNDS = 16, SIDE = 18 }; /* enough rounds that each pair of make_pack()'s choices occurs */
#else
enum { ROUNDS = 40, SIDE = 40 };
#endif

static fsdpc_device *cpu, *gpu;

static int64_t
below(int64_t n)
{
    return (int64_t)(random_bits() % (uint64_t)n);
}

static void *
memory(size_t bytes)
{
    CUdeviceptr block;
    REQUIRE_CU(cuMemAlloc(&block, bytes + 64));
    return (void *)(uintptr_t)block;
}

static void
free_memory(void *block)
{
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)block));
}

typedef struct pack {
    int count;
    fsdpc_pack_target targets[MANY];
    fsdpc_pack_base bases[MANY];
    fsdpc_pack_source sources[MANY];
    int64_t shapes[MANY][DIMS], strides[MANY][DIMS];
    void *blocks[MANY];
    fsdpc_dtype base;
    size_t bytes, base_bytes;
    bool adds, in_place, strided;
} pack;

/* Makes a source: either a permuted view with steps and with some strides of 0, or a flat source, which
 * sometimes has several tiles. Half of the sources begin at an address that is not aligned for vector loads.
 * Returns the number of elements. */
static int64_t
make_source(pack *p, int i, fsdpc_dtype type)
{
    int64_t reach = 1, n = 1, *shape = p->shapes[i], *strides = p->strides[i];
    const bool flat = below(3) != 0;
    const int dims = flat ? 1 : 1 + (int)below(DIMS);
    for (int d = 0; d < dims; d++) {
        shape[d] =
            flat ? below(p->count > FEW || below(3) ? 600 : 30000) : 1 + below(dims > 3 ? 7 : SIDE);
        strides[d] = flat ? 1 : below(9) == 0 ? 0 : reach * (1 + below(2));
        reach += strides[d] * (shape[d] - 1);
        n *= shape[d];
    }
    const size_t item = fsdpc_dtype_bytes(type);
    p->blocks[i] = memory((size_t)(reach + 2) * item);
    fill(p->blocks[i], type, reach + 2);
    p->sources[i] = (fsdpc_pack_source){
        .data = below(5) ? (char *)p->blocks[i] + (size_t)below(2) * item : NULL,
        .dtype = type,
        .ndim = dims,
        .shape = shape,
        .strides = flat ? NULL : strides,
        .add = p->adds && below(3) != 0,
    };
    p->strided = p->strided || (!flat && p->sources[i].data);
    return n;
}

static size_t
gap(fsdpc_dtype type)
{
    const size_t item = fsdpc_dtype_bytes(type);
    return below(8) ? (size_t)below(3) * item : 20000 / item * item;
}

/* If something is added, all destinations have one type. Otherwise some destinations have other types. */
static void
make_pack(pack *p, int round, int count)
{
    memset(p, 0, sizeof *p);
    p->count = count;
    p->adds = round % 2;
    p->base = round / 8 % 2 ? FSDPC_F64 : FSDPC_F32;
    p->in_place = p->adds && floats[round / 2 % 4] == p->base && round % 3 == 0;
    for (int i = 0; i < count; i++) {
        const fsdpc_dtype dst = floats[p->adds || below(4) ? round / 2 % 4 : below(4)];
        const size_t item = fsdpc_dtype_bytes(dst), space = gap(dst);
        const int64_t n = make_source(p, i, floats[below(4)]);
        p->bytes = (p->bytes + item - 1) / item * item + space;
        p->base_bytes += p->in_place ? space : (size_t)below(5) * fsdpc_dtype_bytes(p->base);
        p->targets[i] = (fsdpc_pack_target){n, p->bytes, dst};
        p->bases[i] = (fsdpc_pack_base){p->base_bytes, p->base};
        p->bytes += (size_t)n * item;
        p->base_bytes += (size_t)n * fsdpc_dtype_bytes(p->base);
    }
    p->bytes += 16;
}

/* Computes, with the CPU device, the result that the pack must have for tensor i. */
static void
want_one(const pack *p, int i, char *dst, const char *base, double scale)
{
    const fsdpc_pack_source *source = &p->sources[i];
    const int64_t n = p->targets[i].n, one = 1;
    const fsdpc_dtype type = p->targets[i].dtype;
    char *flat = new_bytes((size_t)n * 8), *sum = new_bytes((size_t)n * 8);
    if (source->data) {
        REQUIRE_OK(fsdpc_device_pack(cpu, flat, source->dtype, source->data, source->dtype,
                                     source->ndim, source->shape,
                                     source->strides ? source->strides : &one, 1.0));
    }
    if (source->add) {
        memcpy(sum, base + p->bases[i].offset, (size_t)n * fsdpc_dtype_bytes(p->base));
        if (source->data) {
            REQUIRE_OK(fsdpc_device_accumulate(cpu, sum, p->base, flat, source->dtype, n, scale));
        }
        REQUIRE_OK(fsdpc_device_cast(cpu, dst, type, sum, p->base, n, 1.0));
    } else if (source->data) {
        REQUIRE_OK(fsdpc_device_cast(cpu, dst, type, flat, source->dtype, n, scale));
    } else {
        memset(dst, 0, (size_t)n * fsdpc_dtype_bytes(type));
    }
    free(flat);
    free(sum);
}

/* Returns true if all targets are as wanted and the bytes between the targets equal those in `want`. */
static bool
packed_as_wanted(const pack *p, const char *buffer, char *want, double scale)
{
    for (int i = 0; i < p->count; i++) {
        const fsdpc_pack_target *t = &p->targets[i];
        const size_t bytes = (size_t)t->n * fsdpc_dtype_bytes(t->dtype);
        if (!same(buffer + t->offset, want + t->offset, t->dtype, t->n, p->adds || scale != 1)) {
            return false;
        }
        memcpy(want + t->offset, buffer + t->offset, bytes);
    }
    return memcmp(buffer, want, p->bytes) == 0;
}

static int
run_pack(const pack *p, fsdpc_device *device, const fsdpc_pack_plan *plan, char *buffer,
         const char *base, double scale)
{
    return p->adds ? fsdpc_device_pack_onto(device, plan, buffer, base, p->sources, scale)
                   : fsdpc_device_pack_onto(device, plan, buffer, NULL, p->sources, scale);
}

/* Packs twice with one plan. The second time nothing may be allocated. */
static void
compare(const pack *p, fsdpc_device *device, double scale)
{
    fsdpc_pack_plan *plan;
    char *buffer = memory(p->bytes), *base = p->in_place ? buffer : memory(p->base_bytes);
    char *want = new_bytes(p->bytes), *before = new_bytes(p->base_bytes);
    const bool keep = p->adds && (p->in_place || below(2));
    REQUIRE_OK(
        p->adds
            ? fsdpc_device_pack_plan(device, p->targets, p->bases, p->count, p->bytes, keep, &plan)
            : fsdpc_device_pack_plan(device, p->targets, NULL, p->count, p->bytes, false, &plan));
    for (int time = 0; time < 2; time++) {
        memset(buffer, GUARD, p->bytes);
        if (p->base_bytes) {
            fill(base, p->base, (int64_t)(p->base_bytes / fsdpc_dtype_bytes(p->base)));
        }
        memcpy(before, base, p->base_bytes);
        memcpy(want, buffer, p->bytes);
        memset(want, 0, keep ? 0 : p->bytes);
        for (int i = 0; i < p->count; i++) {
            want_one(p, i, want + p->targets[i].offset, before, scale);
        }
        const simgpu_counters count = simgpu_count();
        REQUIRE_OK(run_pack(p, device, plan, buffer, base, scale));
        CHECK_INT(simgpu_count().launches - count.launches,
                  device == gpu && (p->count > 0 || !keep));
        CHECK_INT(simgpu_count().copies - count.copies,
                  device == gpu && (p->strided || p->count > IN_PARAMETERS));
        if (time > 0) {
            expect_nothing_made(&count);
        }
        CHECK(simgpu_drain());
        CHECK(packed_as_wanted(p, buffer, want, scale));
        CHECK(p->in_place || memcmp(base, before, p->base_bytes) == 0);
        gpu_finish(gpu);
    }
    fsdpc_device_pack_plan_free(device, plan);
    free_memory(buffer);
    if (!p->in_place) {
        free_memory(base);
    }
    free(want);
    free(before);
}

static void
refusals(void)
{
    fsdpc_pack_plan *plan;
    const fsdpc_pack_target target = {4, 0, FSDPC_F32};
    const fsdpc_pack_base narrow = {0, FSDPC_BF16}, askew = {2, FSDPC_F32};
    const fsdpc_pack_source source = {.data = &target, .dtype = FSDPC_F32, .add = true};
    fsdpc_device *const devices[] = {gpu, cpu};
    float buffer[4];
    for (int d = 0; d < 2; d++) {
        CHECK_INT(fsdpc_device_pack_plan(devices[d], &target, &narrow, 1, 16, true, &plan),
                  FSDPC_E_INVAL);
        CHECK_INT(fsdpc_device_pack_plan(devices[d], &target, &askew, 1, 16, true, &plan),
                  FSDPC_E_INVAL);
        REQUIRE_OK(fsdpc_device_pack_plan(devices[d], &target, NULL, 1, 16, true, &plan));
        CHECK_INT(fsdpc_device_pack_onto(devices[d], plan, buffer, buffer, &source, 1.0),
                  FSDPC_E_INVAL);
        fsdpc_device_pack_plan_free(devices[d], plan);
    }
}

int
main(void)
{
    static const char *const policies[] = {"lazy", "eager", "random:7", "order:1,host,0"};
    static pack p;
    fsdpc_stream *stream;
    gpu_start();
    simgpu_get_options()->foreign = true;
    simgpu_get_options()->verify = true;
    REQUIRE_OK(fsdpc_device_cpu(&cpu));
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    REQUIRE_OK(fsdpc_device_stream_new(gpu, false, &stream));
    for (int round = 0; round < ROUNDS; round++) {
        REQUIRE(simgpu_policy(policies[round % 4]));
        fsdpc_device_use(gpu, round % 3 ? NULL : stream);
        make_pack(&p, round, round < 2 ? 0 : round < 4 ? MANY : FEW);
        compare(&p, gpu, scales[round % 5]);
        compare(&p, cpu, scales[round % 5]);
        for (int i = 0; i < p.count; i++) {
            free_memory(p.blocks[i]);
        }
    }
    fsdpc_device_use(gpu, NULL);
    fsdpc_device_stream_free(gpu, stream);
    expect_no_reports();
    refusals();
    return test_result();
}
