/* Tests of one unit on one to three ranks, in host memory over each kind of group, and in a GPU's memory in
 * many legal orders of the work that the simulator delays. Values are written and read, whole and in blocks,
 * from and to the device and the host, and the gradients that the optimizer sees are compared with the CPU's.
 * No race may be found, every value must be right, and all memory must be given back. */
#include <math.h>

#include "waits.h"

enum { SCHEDULES = 7 };

/* A run's option of 0 or more chooses a schedule of the GPU. With the two negative options, the unit lies in
 * host memory. With HOST_SHARED, the ranks communicate over a shared segment. With HOST_WIRE, a carrier hides
 * the segment from the core. */
enum { HOST_SHARED = -1, HOST_WIRE = -2 };

typedef struct subject {
    fsdpc_device *device;
    bool host; /* the unit lies in host memory */
    fsdpc_comm *comm;
    fsdpc_unit *unit;
    fsdpc_stream *stream; /* the caller's current stream, which is not always the default stream */
    /* [which][parameter]: the round that wrote these values last */
    int round[FSDPC_GRAD + 1][ENGINE_PARAMS];
} subject;

/* --- a rank ---------------------------------------------------------------------------------------- */

static subject
join(int rank, ranks_run *run)
{
    subject s = {.device = engine_device, .host = run->option < 0};
    if (s.host) {
        s.comm = engine_join(rank, run, run->option == HOST_WIRE);
        return s;
    }
    start_rank(rank, run);
    REQUIRE_OK(fsdpc_device_cuda(0, &s.device));
    if (run->world == 1) {
        REQUIRE_OK(fsdpc_comm_self(s.device, &s.comm));
    } else {
        fsdpc_comm_nccl_options options = {.name = "shard", .timeout_s = 30, .poll_ms = 20};
        REQUIRE_OK(fsdpc_comm_nccl(s.device, rank, run->world, ids[0], &options, &s.comm));
    }
    if (run->option % 2) {
        REQUIRE_OK(fsdpc_device_stream_new(s.device, false, &s.stream));
        simgpu_label_stream((CUstream)s.stream, "caller");
    }
    fsdpc_device_use(s.device, s.stream);
    return s;
}

static void
leave(subject *s)
{
    expect_no_reports();
    CHECK_INT(simnccl_count().mismatches, 0);
    fsdpc_device_use(s->device, NULL);
    fsdpc_device_stream_free(s->device, s->stream);
    fsdpc_comm_free(s->comm);
}

/* --- a caller's buffers ------------------------------------------------------------------------------ */

/* A buffer of the caller. The test fills and reads `host`. If the caller's memory is on the device, `device`
 * is the caller's buffer, and the test copies between `host` and `device`. */
typedef struct buffer {
    char *host;
    void *device;
    size_t bytes;
    bool pinned;
} buffer;

/* On a GPU every second host buffer is pinned: copies to and from a pinned buffer may continue after the
 * call. */
static buffer
new_buffer(const subject *s, size_t bytes, enum fsdpc_memory_kind place)
{
    static int made;
    buffer b = {.bytes = bytes, .pinned = !s->host && place == FSDPC_ON_HOST && made++ % 2};
    void *block = NULL;
    if (b.pinned) {
        REQUIRE_OK(fsdpc_device_host_alloc(s->device, bytes + 1, &block));
    }
    b.host = b.pinned ? block : malloc(bytes + 1);
    REQUIRE(b.host != NULL);
    memset(b.host, 0xee, bytes);
    if (place == FSDPC_ON_DEVICE && bytes > 0) {
        REQUIRE_OK(fsdpc_device_alloc(s->device, bytes, &b.device));
        simgpu_label(b.device, bytes, "a caller's tensor");
    }
    return b;
}

static void *
address(const buffer *b)
{
    return b->device ? b->device : b->bytes > 0 ? b->host : NULL;
}

static void
free_buffer(const subject *s, buffer *b)
{
    fsdpc_device_free(s->device, b->device, b->bytes);
    if (b->pinned) {
        fsdpc_device_host_free(s->device, b->host, b->bytes + 1);
    } else {
        free(b->host);
    }
    *b = (buffer){0};
}

/* Fills the caller's tensor by a copy on the caller's stream. The caller may fill the tensor again as soon as
 * the unit's call has queued its work. */
static void
upload(const subject *s, const buffer *b)
{
    if (b->device) {
        REQUIRE_OK(fsdpc_device_copy_in(s->device, b->device, b->host, b->bytes));
    }
}

static void
download(const subject *s, buffer *b)
{
    if (b->device) {
        REQUIRE_OK(fsdpc_device_copy_out(s->device, b->host, b->device, b->bytes));
        gpu_finish(s->device);
    }
}

static uint8_t
byte_of(size_t k, int param, int round)
{
    return (uint8_t)(k * 37 + k / 241 + (size_t)param * 11 + (size_t)round * 101);
}

static void
fill_bytes(buffer *b, size_t begin, int param, int round)
{
    for (size_t k = 0; k < b->bytes; k++) {
        b->host[k] = (char)byte_of(begin + k, param, round);
    }
}

static int64_t
wrong_bytes(const buffer *b, size_t begin, int param, int round)
{
    int64_t wrong = 0;
    simgpu_cpu_read(b->host, b->pinned ? b->bytes : 0, "a look at values");
    for (size_t k = 0; k < b->bytes; k++) {
        wrong += (uint8_t)b->host[k] != byte_of(begin + k, param, round);
    }
    return wrong;
}

/* --- whole parameters -------------------------------------------------------------------------------- */

static size_t
item_of(const fsdpc_unit *unit, enum fsdpc_which which, int param)
{
    const fsdpc_layout *layout = unit->layout;
    fsdpc_dtype dtype = which == FSDPC_GRAD
                            ? fsdpc_unit_grad_dtype(unit, param)
                            : layout->segments[layout->params[param].segment].storage;
    return fsdpc_dtype_bytes(dtype);
}

static bool
is_there(const fsdpc_unit *unit, enum fsdpc_which which, int param)
{
    return which == FSDPC_MASTER || unit->layout->params[param].trainable_index >= 0;
}

/* Writes a parameter. The source is overwritten as soon as the call allows this. */
static void
write_one(subject *s, enum fsdpc_which which, int param, enum fsdpc_memory_kind place, int round)
{
    const fsdpc_unit *unit = s->unit;
    size_t bytes = (size_t)unit->layout->params[param].numel * item_of(unit, which, param);
    buffer b = new_buffer(s, bytes, place);
    s->round[which][param] = round;
    fill_bytes(&b, 0, param, round);
    upload(s, &b);
    REQUIRE_OK(fsdpc_unit_write(s->unit, which, param, address(&b), place));
    if (b.device) {
        REQUIRE_OK(fsdpc_device_zero(s->device, b.device, b.bytes));
    } else {
        simgpu_cpu_write(b.host, b.pinned ? b.bytes : 0, "the next value");
        memset(b.host, 0x55, b.bytes);
    }
    free_buffer(s, &b);
}

static void
read_all(const subject *s, enum fsdpc_which which, enum fsdpc_memory_kind place, bool reads)
{
    const fsdpc_unit *unit = s->unit;
    buffer full[ENGINE_PARAMS] = {0};
    void *data[ENGINE_PARAMS] = {0};
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (reads && is_there(unit, which, i)) {
            size_t bytes = (size_t)unit->layout->params[i].numel * item_of(unit, which, i);
            full[i] = new_buffer(s, bytes, place);
            data[i] = address(&full[i]);
        }
    }
    REQUIRE_OK(fsdpc_unit_read(s->unit, which, data, place));
    for (int i = 0; i < unit->layout->param_count; i++) {
        download(s, &full[i]);
        CHECK_INT(wrong_bytes(&full[i], 0, i, s->round[which][i]), 0);
        free_buffer(s, &full[i]);
    }
}

/* Writes and reads whole parameters. First all ranks ask for the values, then only the last rank does, and in
 * the last read no rank does. */
static void
whole_parameters(subject *s, int round)
{
    const int last = s->unit->world - 1;
    for (int which = FSDPC_MASTER; which <= FSDPC_GRAD; which++) {
        for (int i = 0; i < s->unit->layout->param_count; i++) {
            if (is_there(s->unit, which, i)) {
                write_one(s, which, i, (i + round) % 2 ? FSDPC_ON_HOST : FSDPC_ON_DEVICE, round);
            }
        }
        read_all(s, which, FSDPC_ON_HOST, true);
        read_all(s, which, FSDPC_ON_DEVICE, true);
        read_all(s, which, FSDPC_ON_HOST, s->unit->rank == last);
    }
    read_all(s, FSDPC_MASTER, FSDPC_ON_HOST, false);
}

/* --- blocks ------------------------------------------------------------------------------------------ */

typedef struct blocks {
    int64_t length[ENGINE_PARAMS];
    size_t begin[ENGINE_PARAMS];
    buffer own[ENGINE_PARAMS];
    void *data[ENGINE_PARAMS];
} blocks;

/* For each parameter, makes this rank's block, which consists of whole rows of `row` elements. With `some`,
 * every third parameter has no block. */
static void
make_blocks(const subject *s, int64_t row, enum fsdpc_memory_kind place, bool some, blocks *out)
{
    const fsdpc_layout *layout = s->unit->layout;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < layout->param_count; i++) {
        if (some && i % 3 == 1) {
            continue;
        }
        int64_t numel = layout->params[i].numel, rows = (numel + row - 1) / row;
        size_t item = item_of(s->unit, FSDPC_MASTER, i);
        out->length[i] = (rows + layout->world - 1) / layout->world * row;
        int64_t begin = out->length[i] * s->unit->rank;
        out->begin[i] = (size_t)(begin < numel ? begin : numel) * item;
        int64_t length = fsdpc_unit_block_length(s->unit, i, out->length[i]);
        out->own[i] = new_buffer(s, (size_t)length * item, place);
        out->data[i] = address(&out->own[i]);
    }
}

static void
free_blocks(const subject *s, blocks *b)
{
    for (int i = 0; i < ENGINE_PARAMS; i++) {
        free_buffer(s, &b->own[i]);
    }
}

static void
write_in_blocks(subject *s, int64_t row, enum fsdpc_memory_kind place, bool some, int round)
{
    blocks b;
    make_blocks(s, row, place, some, &b);
    for (int i = 0; i < s->unit->layout->param_count; i++) {
        s->round[FSDPC_MASTER][i] = b.length[i] ? round : s->round[FSDPC_MASTER][i];
        fill_bytes(&b.own[i], b.begin[i], i, round);
        upload(s, &b.own[i]);
    }
    REQUIRE_OK(fsdpc_unit_write_blocks(s->unit, b.length, (const void *const *)b.data, place));
    free_blocks(s, &b);
}

static void
read_in_blocks(const subject *s, int64_t row, enum fsdpc_memory_kind place, bool some)
{
    blocks b;
    make_blocks(s, row, place, some, &b);
    REQUIRE_OK(fsdpc_unit_read_blocks(s->unit, b.length, b.data, place));
    for (int i = 0; i < s->unit->layout->param_count; i++) {
        download(s, &b.own[i]);
        CHECK_INT(wrong_bytes(&b.own[i], b.begin[i], i, s->round[FSDPC_MASTER][i]), 0);
    }
    free_blocks(s, &b);
}

static void
blocks_of_rows(subject *s)
{
    write_in_blocks(s, 7, FSDPC_ON_HOST, false, 5);
    read_in_blocks(s, 1, FSDPC_ON_DEVICE, false);
    read_all(s, FSDPC_MASTER, FSDPC_ON_DEVICE, true);
    write_in_blocks(s, 1000, FSDPC_ON_DEVICE, false, 6); /* some ranks have no rows */
    read_in_blocks(s, 7, FSDPC_ON_HOST, false);
    read_all(s, FSDPC_MASTER, FSDPC_ON_HOST, true);
}

static void
blocks_of_some_parameters(subject *s)
{
    write_in_blocks(s, 1, FSDPC_ON_DEVICE, false, 7);
    write_in_blocks(s, 7, FSDPC_ON_HOST, true, 8);
    read_in_blocks(s, 7, FSDPC_ON_DEVICE, true);
    read_in_blocks(s, 1000, FSDPC_ON_HOST, false);
    read_all(s, FSDPC_MASTER, FSDPC_ON_HOST, s->unit->rank == s->unit->world - 1);
}

/* Makes a unit. With `offload`, the unit's shard is in pinned host memory. */
static fsdpc_unit *
new_unit(const subject *s, int kind, bool offload)
{
    fsdpc_unit *unit;
    fsdpc_unit_options options = {.name = "u", .shard = s->comm, .divide = 1, .offload = offload};
    REQUIRE_OK(fsdpc_unit_new(&options, engine_specs[kind], engine_spec_counts[kind], &unit));
    return unit;
}

/* In host memory other ranks may still read this rank's shard, so all ranks meet at a barrier first. */
static void
free_unit(subject *s)
{
    REQUIRE_OK(s->host ? fsdpc_comm_barrier(s->comm, "next unit") : FSDPC_OK);
    fsdpc_unit_free(s->unit);
}

static void
values_in_and_out(int rank, ranks_run *run)
{
    subject s = join(rank, run);
    for (int kind = 0; kind < ENGINE_KINDS; kind++) {
        if (kind == 3 && run->option > 2) {
            continue; /* this unit is so large that a read fills the buffer (window) twice */
        }
        s.unit = new_unit(&s, kind, run->option % 3 == 2);
        simgpu_label(s.unit->master, s.unit->layout->shard_bytes, "shard");
        whole_parameters(&s, 1);
        blocks_of_rows(&s);
        if (s.host || run->option < 2) {
            blocks_of_some_parameters(&s);
        }
        if (!s.host) { /* round 2 writes each parameter from the memory that round 1 did not use for it */
            whole_parameters(&s, 2);
        }
        free_unit(&s);
    }
    leave(&s);
}

/* The blocks are larger than the buffer (window) through which values pass over a wire. */
static void
blocks_of_a_large_parameter(int rank, ranks_run *run)
{
    static const fsdpc_param_spec specs[] = {ENGINE_SPEC("a", 10, F64, F64, F64, true),
                                             ENGINE_SPEC("large", 5000001, F32, F32, F32, true)};
    subject s = join(rank, run);
    const fsdpc_unit_options options = {.name = "u", .shard = s.comm, .divide = 1};
    REQUIRE_OK(fsdpc_unit_new(&options, specs, 2, &s.unit));
    blocks_of_some_parameters(&s);
    free_unit(&s);
    leave(&s);
}

/* --- what is queued ---------------------------------------------------------------------------------- */

/* Writes from device memory are queued behind the work that the caller queued before: the host does not wait,
 * and nothing is allocated. */
static void
device_sources_are_queued(int rank, ranks_run *run)
{
    subject s = join(rank, run);
    s.unit = engine_unit(s.comm, 1, "u", true);
    buffer b = new_buffer(&s, 601 * 4, FSDPC_ON_DEVICE);
    const simgpu_counters before = simgpu_count();
    REQUIRE_OK(fsdpc_unit_write(s.unit, FSDPC_MASTER, 0, b.device, FSDPC_ON_DEVICE));
    REQUIRE_OK(fsdpc_unit_write(s.unit, FSDPC_GRAD, 0, b.device, FSDPC_ON_DEVICE));
    const simgpu_counters after = simgpu_count();
    CHECK_INT(after.host_syncs - before.host_syncs, 0);
    CHECK_INT(after.not_ready - before.not_ready, 0);
    CHECK_INT(after.allocations - before.allocations, 0);
    free_buffer(&s, &b);
    fsdpc_unit_free(s.unit);
    leave(&s);
}

/* --- gradients --------------------------------------------------------------------------------------- */

/* A unit on the GPU and an equal unit on the CPU. */
typedef struct pair {
    subject gpu;
    fsdpc_comm *cpu_comm;
    fsdpc_unit *cpu;
    uint64_t random;
} pair;

static void
fill_floats(pair *p, void *out, fsdpc_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double value = (double)(engine_random(&p->random) % 200003) / 20000.0 - 5;
        item_put(out, dtype, i, value);
    }
}

static void
copy_to_gpu(const pair *p, void *dst, const void *src, size_t bytes)
{
    REQUIRE_OK(fsdpc_device_copy_in(p->gpu.device, dst, src, bytes));
}

static void
set_sums(pair *p)
{
    const fsdpc_layout *layout = p->cpu->layout;
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (seg->trainable) {
            fill_floats(p, (char *)p->cpu->grad + seg->grad_offset, seg->accumulate,
                        seg->piece_numel);
        }
    }
    copy_to_gpu(p, p->gpu.unit->grad, p->cpu->grad, layout->grad_bytes);
}

static void
change_seen(pair *p)
{
    for (int i = 0; i < p->cpu->layout->param_count; i++) {
        int64_t length;
        if (p->cpu->layout->params[i].trainable_index < 0) {
            continue;
        }
        char *seen = fsdpc_unit_grad_part(p->cpu, i, &length);
        size_t item = fsdpc_dtype_bytes(fsdpc_unit_grad_dtype(p->cpu, i));
        fill_floats(p, seen, fsdpc_unit_grad_dtype(p->cpu, i), length / 3);
        copy_to_gpu(p, fsdpc_unit_grad_part(p->gpu.unit, i, &length), seen, (size_t)length * item);
    }
}

static void
gradients_agree(const pair *p, const char *what)
{
    size_t bytes[] = {p->cpu->layout->grad_bytes, p->cpu->layout->shard_bytes};
    const void *wanted[] = {p->cpu->grad, p->cpu->grad_out};
    void *have[] = {p->gpu.unit->grad, p->gpu.unit->grad_out};
    for (int b = 0; b < 2; b++) {
        buffer got = {.bytes = bytes[b], .device = have[b], .host = malloc(bytes[b] + 1)};
        CHECK((have[b] == NULL) == (wanted[b] == NULL));
        download(&p->gpu, &got);
        if (have[b] && memcmp(got.host, wanted[b], bytes[b]) != 0) {
            TEST_FAIL("other %s after %s", b ? "seen gradients" : "sums", what);
        }
        free(got.host);
    }
}

#define BOTH(p, call, ...)                            \
    do {                                              \
        REQUIRE_OK(call((p)->cpu, __VA_ARGS__));      \
        REQUIRE_OK(call((p)->gpu.unit, __VA_ARGS__)); \
    } while (0)

static void
take_sums(pair *p, bool add)
{
    const fsdpc_layout *layout = p->cpu->layout;
    fsdpc_tensor here[8] = {0}, there[8] = {0};
    buffer held[8] = {0};
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (seg->trainable && seg->piece_numel > 0) {
            size_t bytes = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->reduce);
            held[s] = new_buffer(&p->gpu, bytes, FSDPC_ON_DEVICE);
            fill_floats(p, held[s].host, seg->reduce, seg->piece_numel);
            upload(&p->gpu, &held[s]);
            here[s] = (fsdpc_tensor){.data = held[s].host, .dtype = seg->reduce};
            there[s] = (fsdpc_tensor){.data = held[s].device, .dtype = seg->reduce};
        }
    }
    p->cpu->grads.add = p->gpu.unit->grads.add = add;
    REQUIRE_OK(fsdpc_unit_take_sums(p->cpu, here));
    REQUIRE_OK(fsdpc_unit_take_sums(p->gpu.unit, there));
    for (int s = 0; s < layout->segment_count; s++) {
        free_buffer(&p->gpu, &held[s]);
    }
}

static void
take_grad(pair *p, int param)
{
    int64_t length;
    (void)fsdpc_unit_grad_part(p->cpu, param, &length);
    buffer values = new_buffer(&p->gpu, (size_t)length * sizeof(float), FSDPC_ON_DEVICE);
    fill_floats(p, values.host, FSDPC_F32, length);
    upload(&p->gpu, &values);
    REQUIRE_OK(fsdpc_unit_take_grad(p->cpu, param, values.host, FSDPC_F32));
    REQUIRE_OK(fsdpc_unit_take_grad(p->gpu.unit, param, values.device, FSDPC_F32));
    free_buffer(&p->gpu, &values);
}

static void
norms_agree(pair *p, const uint8_t *mask, double order)
{
    fsdpc_norm wanted, got;
    REQUIRE_OK(fsdpc_unit_grad_norm(p->cpu, mask, order, &wanted));
    REQUIRE_OK(fsdpc_unit_grad_norm(p->gpu.unit, mask, order, &got));
    CHECK(fabs(got.sum - wanted.sum) <= 1e-12 * wanted.sum && got.max == wanted.max);
    CHECK(got.nonfinite == wanted.nonfinite);
}

static void
change_both(pair *p)
{
    const uint8_t all[] = {1, 1, 1, 1}, first[] = {1, 0, 0, 0};
    const fsdpc_layout *layout = p->cpu->layout;
    set_sums(p);
    const simgpu_counters before = simgpu_count();
    REQUIRE_OK(fsdpc_unit_finish_grad(p->cpu));
    REQUIRE_OK(fsdpc_unit_finish_grad(p->gpu.unit));
    change_seen(p);
    for (int i = 0; i < layout->param_count; i++) {
        if (layout->params[i].trainable_index >= 0) {
            BOTH(p, fsdpc_unit_reload_grad, i);
        }
    }
    BOTH(p, fsdpc_unit_scale_grad, 0, 0.37);
    BOTH(p, fsdpc_unit_scale_grads, first, 3.0);
    BOTH(p, fsdpc_unit_zero_grad, layout->param_count - 1);
    const simgpu_counters after = simgpu_count();
    CHECK_INT(after.allocations - before.allocations, 0);
    CHECK_INT(after.host_allocations - before.host_allocations, 0);
    CHECK_INT(after.not_ready - before.not_ready, 0);
    gradients_agree(p, "changes of what is seen");
    norms_agree(p, all, 2);
    norms_agree(p, first, 2);
    norms_agree(p, all, 3);
    take_grad(p, 0);
    gradients_agree(p, "another gradient");
    take_sums(p, false);
    gradients_agree(p, "other sums");
    take_sums(p, true);
    gradients_agree(p, "more sums");
}

static void
gradients_are_the_cpu_units(int rank, ranks_run *run)
{
    pair p = {.gpu = join(rank, run), .random = (uint64_t)run->option};
    p.cpu_comm = engine_pretend(rank, run->world);
    /* Units on the two devices must have the same layout. */
    fsdpc_device_caps *caps = (fsdpc_device_caps *)(uintptr_t)fsdpc_device_get_caps(engine_device);
    caps->align_bytes = fsdpc_device_get_caps(p.gpu.device)->align_bytes;
    for (int kind = 0; kind < 3; kind++) {
        p.cpu = engine_unit(p.cpu_comm, kind, "u", true);
        p.gpu.unit = engine_unit(p.gpu.comm, kind, "u", true);
        change_both(&p);
        fsdpc_unit_free(p.cpu);
        fsdpc_unit_free(p.gpu.unit);
    }
    fsdpc_comm_free(p.cpu_comm);
    leave(&p.gpu);
}

/* --- memory ------------------------------------------------------------------------------------------ */

static int64_t
device_bytes(void)
{
    return simgpu_count().device_bytes;
}

static void
memory_is_given_back(int rank, ranks_run *run)
{
    subject s = join(rank, run);
    int64_t before = device_bytes();
    for (int round = 0; round < 2; round++) {
        s.unit = engine_unit(s.comm, 2, "u", true);
        CHECK(device_bytes() > before);
        whole_parameters(&s, 1);
        blocks_of_rows(&s);
        fsdpc_unit_free(s.unit);
        CHECK_INT(device_bytes(), before);
    }
    leave(&s);
}

static int
make_and_read(subject *s)
{
    static float full[700001];
    void *data[ENGINE_PARAMS] = {full};
    fsdpc_unit_options options = {.name = "layers.3", .shard = s->comm, .divide = 1};
    FSDPC_TRY(fsdpc_unit_new(&options, engine_specs[3], 2, &s->unit));
    int status = fsdpc_unit_write(s->unit, FSDPC_MASTER, 0, full, FSDPC_ON_HOST);
    FSDPC_KEEP(fsdpc_unit_read(s->unit, FSDPC_MASTER, data, FSDPC_ON_HOST));
    fsdpc_unit_free(s->unit);
    return status;
}

/* Each call of these driver entries fails once while a unit is made, written and read. */
static void
failures_give_memory_back(int rank, ranks_run *run)
{
    static const char *const entries[] = {"cuMemAlloc",        "cuMemCreate",
                                          "cuMemMap",          "cuMemcpyHtoDAsync",
                                          "cuMemcpyDtoHAsync", "cuMemsetD8Async"};
    subject s = join(rank, run);
    int64_t before = device_bytes();
    for (int e = 0; e < 6; e++) {
        int64_t calls = simgpu_calls(entries[e]);
        REQUIRE_OK(make_and_read(&s));
        calls = simgpu_calls(entries[e]) - calls;
        CHECK(calls > 0 || strcmp(entries[e], "cuMemAlloc") == 0);
        for (int k = 1; k <= calls; k++) {
            REQUIRE(simgpu_fail(entries[e], k, CUDA_ERROR_OUT_OF_MEMORY));
            int status = make_and_read(&s);
            CHECK_INT(status, FSDPC_E_DEVMEM);
            CHECK_INT(device_bytes(), before);
        }
    }
    leave(&s);
}

/* --- ranks that do not come --------------------------------------------------------------------------- */

/* One rank stays away. The other rank gets an error that names the read. The read gives back its memory. */
static void
a_rank_stays_away(int rank, ranks_run *run)
{
    subject s = {0};
    start_rank(rank, run);
    REQUIRE_OK(fsdpc_device_cuda(0, &s.device));
    fsdpc_comm_nccl_options options = {.name = "shard", .timeout_s = 1, .poll_ms = 20};
    REQUIRE_OK(fsdpc_comm_nccl(s.device, rank, run->world, ids[0], &options, &s.comm));
    s.unit = engine_unit(s.comm, 0, "layers.3", true);
    REQUIRE_OK(fsdpc_device_stream_new(s.device, false, &s.stream));
    fsdpc_device_use(s.device, s.stream);
    if (rank > 0) {
        void *data[ENGINE_PARAMS] = {0};
        int status = fsdpc_unit_read(s.unit, FSDPC_MASTER, data, FSDPC_ON_HOST);
        CHECK_INT(status, FSDPC_E_TIMEOUT);
        CHECK(strstr(fsdpc_error_text(), "full parameters of unit layers.3") != NULL);
        atomic_store(&run->flags[rank], 1);
    } else {
        while (!atomic_load(&run->flags[1])) {
            usleep(1000);
        }
    }
    fsdpc_unit_free(s.unit);
    leave(&s);
}

int
main(void)
{
    for (int world = 1; world <= 3; world++) {
        for (int option = 0; option < SCHEDULES; option = next_option(world, option)) {
            with_ranks(world, option, values_in_and_out);
        }
        with_ranks(world, HOST_SHARED, values_in_and_out);
        with_ranks(world, HOST_SHARED, blocks_of_a_large_parameter);
        with_ranks(world, world, gradients_are_the_cpu_units);
        with_ranks(world, 1, memory_is_given_back);
    }
    for (int world = 2; world <= 3; world++) {
        with_ranks(world, HOST_WIRE, values_in_and_out);
        with_ranks(world, HOST_WIRE, blocks_of_a_large_parameter);
    }
    with_ranks(1, 1, device_sources_are_queued);
    with_ranks(2, 1, device_sources_are_queued);
    with_ranks(1, 0, failures_give_memory_back);
    with_ranks(2, 1, a_rank_stays_away);
    return test_result();
}
