/* Optimizer steps, packed activations and codes on the simulated GPU must equal those of the processor bit
 * for bit; where the processor gives a NaN, the GPU must give any NaN. The cases cover every rule, types,
 * ends of tensors, empty tensors, addresses off a boundary, indices beyond 2^32, values that are not finite,
 * and factors that lie in device memory only. */
#include <math.h>
#include <stdlib.h>

#include "activation/activation.h"
#include "cuda_params.h"
#include "device/device.h"
#include "engine.h"
#include "gpu.h"
#include "optim/optim.h"

enum { TENSORS = 40, BLOCKS = 6, ROUNDS = 12, GUARD = 0xA5, MOST = 9001 };
enum part { PARAM, GRAD, STATE0, STATE1, STATE2, SCALE0, SCALE1, EDGES, PARTS };

static const int64_t sizes[] = {0, 1, 3, 255, 256, 257, 1023, 4095, 4097, MOST};
static const int64_t firsts[] = {0,
                                 77,
                                 256,
                                 4093,
                                 ((int64_t)1 << 31) - 5,
                                 ((int64_t)1 << 32) - 100,
                                 ((int64_t)1 << 33) + 7,
                                 ((int64_t)1 << 40) + 4096};
static fsdpc_device *gpu;
static double size = 1; /* random values are multiplied by this number */
static uint64_t state = 11;

static int64_t
below(int64_t n)
{
    return (int64_t)(engine_random(&state) % (uint64_t)n);
}

/* A block of memory on the device and a block with the same contents on the host. */
struct block {
    char *device, *host;
    size_t bytes;
    fsdpc_dtype type;
    int64_t n;
    size_t offset;
};

struct tensors {
    int count;
    fsdpc_optim_tensor device[TENSORS], host[TENSORS];
    struct block blocks[TENSORS][PARTS];
    float *steps[TENSORS]; /* on the device */
    float begun[TENSORS];
};

static void *
memory(size_t bytes)
{
    CUdeviceptr block;
    REQUIRE_CU(cuMemAlloc(&block, bytes + 64));
    return (void *)(uintptr_t)block;
}

/* Returns a block whose elements begin 0 to 3 elements after a 16-byte boundary. */
static struct block
block_of(fsdpc_dtype type, int64_t n)
{
    const size_t item = fsdpc_dtype_bytes(type);
    struct block made = {.type = type, .n = n, .offset = (size_t)below(4) * item};
    made.bytes = (size_t)n * item + made.offset + 32;
    made.device = memory(made.bytes);
    made.host = aligned_alloc(64, (made.bytes + 63) / 64 * 64);
    REQUIRE(made.host != NULL);
    memset(made.host, GUARD, made.bytes);
    return made;
}

static double
number(bool wild)
{
    static const double corners[] = {0.0, -0.0, 1e-41, -1e-42, 3e38, INFINITY, NAN, 1e-7};
    if (wild && below(40) == 0) {
        return corners[below(8)];
    }
    return ((double)below(1 << 24) / (1 << 23) - 1.0) * exp2(-(double)below(9)) * size;
}

static void
fill(struct block *block, bool wild, bool positive)
{
    for (int64_t i = 0; i < block->n; i++) {
        const double value = number(wild);
        if (block->type == FSDPC_BYTES) {
            block->host[block->offset + (size_t)i] = (char)below(256);
        } else {
            item_put(block->host + block->offset, block->type, i, positive ? fabs(value) : value);
        }
    }
}

static void
to_device(const struct block *block)
{
    memcpy(block->device, block->host, block->bytes);
}

static bool
same(const struct block *block)
{
    const size_t item = fsdpc_dtype_bytes(block->type);
    const char *got = block->device, *want = block->host;
    if (memcmp(got, want, block->offset) != 0 ||
        memcmp(got + block->bytes - 32, want + block->bytes - 32, 32) != 0) {
        fprintf(stderr, "bytes around the elements were written\n");
        return false;
    }
    for (int64_t i = 0; i < block->n; i++) {
        const size_t at = block->offset + (size_t)i * item;
        if (memcmp(got + at, want + at, item) == 0) {
            continue;
        }
        const bool is_float = block->type != FSDPC_BYTES;
        const double a = is_float ? item_get(got + block->offset, block->type, i) : got[at];
        const double b = is_float ? item_get(want + block->offset, block->type, i) : want[at];
        if (!is_float || !isnan(a) || !isnan(b)) {
            fprintf(stderr, "%s %lld of %lld: %a, not %a\n", fsdpc_dtype_name(block->type),
                    (long long)i, (long long)block->n, a, b);
            return false;
        }
    }
    return true;
}

/* The rule and the properties of the tensors of one case. */
struct shape {
    fsdpc_optim_rule rule;
    fsdpc_optim_states how;
    fsdpc_dtype types[3]; /* of parameters, gradients, states */
    int states;
    bool wild;
    int64_t tensors;
};

static int64_t
blocks_of(int64_t first, int64_t n, int64_t block)
{
    return n == 0 ? 0 : (first + n - 1) / block - first / block + 1;
}

static void
make_part(struct tensors *all, int i, enum part part, fsdpc_dtype type, int64_t n, bool positive,
          bool wild)
{
    struct block *block = &all->blocks[i][part];
    *block = block_of(type, n);
    fill(block, wild, positive);
    to_device(block);
}

static void
make_tensor(struct tensors *all, int i, const struct shape *shape)
{
    const bool eight = shape->how != FSDPC_OPTIM_WHOLE, mini = shape->rule.kind == FSDPC_OPTIM_MINI;
    const int64_t n = sizes[below(10)], first = firsts[below(8)];
    fsdpc_optim_tensor *t = &all->host[i];
    *t = (fsdpc_optim_tensor){.param_type = shape->types[0],
                              .grad_type = shape->types[1],
                              .state_type = shape->types[2],
                              .numel = n,
                              .first = first,
                              .block = 16 + below(300),
                              .key = (uint64_t)below(5) << 32 | (uint64_t)i};
    all->begun[i] = (float)below(3);
    all->steps[i] = memory(sizeof(float));
    *all->steps[i] = all->begun[i];
    t->step = (double)all->begun[i] + 1;
    make_part(all, i, PARAM, shape->types[0], n, false, shape->wild);
    make_part(all, i, GRAD, shape->types[1], n, false, shape->wild);
    for (int s = 0; s < shape->states; s++) {
        const int64_t held = mini && s == 1 ? blocks_of(first, n, t->block) : n;
        make_part(all, i, STATE0 + (enum part)s,
                  eight            ? FSDPC_BYTES
                  : mini && s == 1 ? FSDPC_F32
                                   : shape->types[2],
                  held, s > 0, false);
    }
    for (int s = 0; s < 2 && eight; s++) {
        make_part(all, i, SCALE0 + (enum part)s, FSDPC_F32, blocks_of(first, n, FSDPC_OPTIM_BLOCK),
                  s == 1, false);
    }
    if (eight) {
        make_part(all, i, EDGES, FSDPC_F32, 6, true, false);
    }
    fsdpc_optim_tensor *d = &all->device[i];
    *d = *t;
    const struct block *b = all->blocks[i];
#define AT(part, side) (b[part].side ? b[part].side + b[part].offset : NULL)
    t->param = AT(PARAM, host), d->param = AT(PARAM, device);
    t->grad = AT(GRAD, host), d->grad = AT(GRAD, device);
    for (int s = 0; s < 3; s++) {
        t->states[s] = AT(STATE0 + s, host), d->states[s] = AT(STATE0 + s, device);
    }
    for (int s = 0; s < 2; s++) {
        t->scales[s] = (void *)AT(SCALE0 + s, host), d->scales[s] = (void *)AT(SCALE0 + s, device);
    }
    if (eight && (shape->how == FSDPC_OPTIM_EDGES8 || i % 2)) {
        t->edges = (void *)AT(EDGES, host), d->edges = (void *)AT(EDGES, device);
    }
#undef AT
}

static struct tensors *
make(const struct shape *shape)
{
    struct tensors *all = calloc(1, sizeof *all);
    REQUIRE(all != NULL);
    all->count = (int)shape->tensors;
    for (int i = 0; i < all->count; i++) {
        make_tensor(all, i, shape);
    }
    return all;
}

static void
unmake(struct tensors *all)
{
    for (int i = 0; i < all->count; i++) {
        for (int part = 0; part < PARTS; part++) {
            if (all->blocks[i][part].host) {
                REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)all->blocks[i][part].device));
                free(all->blocks[i][part].host);
            }
        }
        REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)all->steps[i]));
    }
    free(all);
}

static void
step_host(const struct shape *shape, struct tensors *all)
{
    if (shape->how == FSDPC_OPTIM_EDGES8) {
        REQUIRE_OK(fsdpc_optim_edges8(&shape->rule, all->host, all->count));
    } else if (shape->how == FSDPC_OPTIM_ADAM8) {
        REQUIRE_OK(fsdpc_optim_step8(&shape->rule, all->host, all->count, 1));
    } else {
        REQUIRE_OK(fsdpc_optim_step(&shape->rule, all->host, all->count, 1));
    }
}

static void
step_device(const fsdpc_optim_rule *rule, fsdpc_optim_states how, const fsdpc_step_control *control,
            struct tensors *all)
{
    void *scratch = memory((size_t)all->count * FSDPC_STEP_SCRATCH);
    REQUIRE_OK(
        fsdpc_optim_step_on(gpu, rule, how, control, all->device, all->steps, all->count, scratch));
    REQUIRE(simgpu_drain());
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)scratch));
}

static void
compare(const struct shape *shape, struct tensors *all, bool counted)
{
    for (int i = 0; i < all->count; i++) {
        for (int part = 0; part < PARTS; part++) {
            if (all->blocks[i][part].host && !same(&all->blocks[i][part])) {
                TEST_FAIL("part %d of tensor %d (%lld elements from %lld on), kind %d, how %d",
                          part, i, (long long)all->host[i].numel, (long long)all->host[i].first,
                          (int)shape->rule.kind, (int)shape->how);
                exit(1);
            }
        }
        const float expected = all->begun[i] + (counted ? 1 : 0);
        CHECK(*all->steps[i] == expected);
    }
    CHECK_INT(simgpu_reports(), 0);
}

static void
try_shape(const struct shape *shape)
{
    const fsdpc_step_control nothing = {NULL, NULL, NULL};
    struct tensors *all = make(shape);
    step_host(shape, all);
    step_device(&shape->rule, shape->how, &nothing, all);
    compare(shape, all, shape->how != FSDPC_OPTIM_EDGES8);
    unmake(all);
}

static struct shape
shape_of(fsdpc_optim_kind kind, int round)
{
    struct shape shape = {
        .rule = {.kind = kind,
                 .lr = 0.1,
                 .beta1 = round % 5 == 4 ? 0.3 : 0.9,
                 .beta2 = 0.99,
                 .eps = 1e-8,
                 .weight_decay = round % 3 ? 0.1 : 0,
                 .grad_scale = round % 4 == 1 ? 8 : 1,
                 .keeps_grads = round % 8 == 1,
                 .clip = round % 4 == 2 ? 0.7 : 1,
                 .decoupled = kind != FSDPC_OPTIM_SGD && round % 2 == 0,
                 .maximize = round % 4 == 3,
                 .nesterov = round % 2 == 1,
                 .seed = 12345},
        .states = kind == FSDPC_OPTIM_ADAM   ? 2 + round % 2
                  : kind == FSDPC_OPTIM_MINI ? 2
                                             : 1,
        .wild = round % 2 == 1,
        .tensors = round == 0 ? TENSORS : 1 + below(6),
    };
    if (kind == FSDPC_OPTIM_SGD) {
        shape.states = round % 3 ? 1 : 0;
        shape.rule.beta2 = 0.25;
    }
    return shape;
}

static void
every_rule_and_type(void)
{
    static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16};
    for (int kind = FSDPC_OPTIM_ADAM; kind <= FSDPC_OPTIM_MINI; kind++) {
        for (int round = 0; round < ROUNDS; round++) {
            struct shape shape = shape_of((fsdpc_optim_kind)kind, round);
            for (int i = 0; i < 3; i++) {
                shape.types[i] = round < 3 ? FSDPC_F32 : round < 5 ? FSDPC_F64 : types[below(3)];
            }
            try_shape(&shape);
        }
    }
}

static void
stochastic_rounding(void)
{
    static const fsdpc_dtype types[] = {FSDPC_BF16, FSDPC_F32, FSDPC_F16};
    for (int round = 0; round < ROUNDS; round++) {
        struct shape shape = shape_of(FSDPC_OPTIM_ADAM, round);
        shape.rule.stochastic = true;
        shape.states = 2;
        shape.types[0] = types[round % 3];
        shape.types[1] = types[round / 3 % 3];
        shape.types[2] = FSDPC_BF16;
        try_shape(&shape);
    }
}

static void
states_of_8_bits(void)
{
    static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16};
    for (int round = 0; round < ROUNDS; round++) {
        struct shape shape = shape_of(FSDPC_OPTIM_ADAM, round);
        shape.how = round % 4 == 3 ? FSDPC_OPTIM_EDGES8 : FSDPC_OPTIM_ADAM8;
        shape.states = 2;
        shape.tensors = 1 + below(4);
        shape.types[0] = types[round % 3];
        shape.types[1] = types[round / 3 % 3];
        size = round % 4 == 2 ? 1e-38 : 1; /* the reciprocals of some scales overflow */
        try_shape(&shape);
    }
    size = 1;
}

/* The step uses the gradient scale and the clipping factor on the device. The host's rule has other values,
 * which the step must not use. */
static void
the_device_knows_scale_and_factor(void)
{
    struct shape shape = shape_of(FSDPC_OPTIM_ADAM, 0);
    shape.rule.grad_scale = 16;
    shape.rule.clip = 0.3;
    float *values = memory(2 * sizeof *values);
    double *clip = memory(sizeof *clip);
    struct tensors *all = make(&shape);
    step_host(&shape, all);
    values[0] = 16;
    values[1] = 0;
    *clip = 0.3;
    const fsdpc_step_control control = {&values[0], &values[1], clip};
    shape.rule.grad_scale = shape.rule.clip = 5;
    step_device(&shape.rule, FSDPC_OPTIM_WHOLE, &control, all);
    compare(&shape, all, true);
    /* The value 1 says that a gradient was not finite. Then no parameter changes and no step is counted. */
    values[1] = 1;
    for (int i = 0; i < all->count; i++) {
        all->begun[i]++;
    }
    step_device(&shape.rule, FSDPC_OPTIM_WHOLE, &control, all);
    compare(&shape, all, false);
    unmake(all);
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)values));
    REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)clip));
}

static void
ranges_of_one_parameter_share_a_counter(void)
{
    struct shape shape = shape_of(FSDPC_OPTIM_ADAM, 0);
    const fsdpc_step_control nothing = {NULL, NULL, NULL};
    struct tensors *all = make(&shape);
    float *own[TENSORS];
    memcpy(own, all->steps, sizeof own);
    for (int i = 0; i < all->count; i++) {
        all->steps[i] = own[0];
        all->host[i].step = *own[0] + 1.0;
        all->begun[i] = *own[0];
    }
    step_host(&shape, all);
    const int64_t before = simgpu_count().launches;
    step_device(&shape.rule, FSDPC_OPTIM_WHOLE, &nothing, all);
    /* Two launches count the steps of 32 and of 8 tensors. A third launch makes the step of all tensors. */
    CHECK_INT(simgpu_count().launches - before, 3);
    compare(&shape, all, true);
    memcpy(all->steps, own, sizeof own);
    unmake(all);
}

static void
activations(void)
{
    static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16};
    for (int round = 0; round < 3 * ROUNDS; round++) {
        const int64_t n = sizes[below(10)], blocks = blocks_of(0, n, FSDPC_ACTIVATION_BLOCK);
        struct block values = block_of(types[round % 3], n), codes = block_of(FSDPC_BYTES, n);
        struct block scales = block_of(FSDPC_F32, blocks), out = block_of(types[round % 3], n);
        struct block *const all[] = {&values, &codes, &scales, &out};
        size = round % 12 == 6 ? 1e-38 : 1; /* reciprocals of scales of float32 blocks overflow */
        fill(&values, round % 2, false);
        size = 1;
        for (int i = 0; i < 4; i++) {
            to_device(all[i]);
        }
#define HOST(block) ((void *)((block).host + (block).offset))
#define DEVICE(block) ((void *)((block).device + (block).offset))
        REQUIRE_OK(fsdpc_activation_pack(HOST(values), values.type, n, HOST(codes), HOST(scales)));
        REQUIRE_OK(fsdpc_activation_unpack(HOST(codes), HOST(scales), n, HOST(out), values.type));
        REQUIRE_OK(
            fsdpc_device_pack8(gpu, DEVICE(values), values.type, n, DEVICE(codes), DEVICE(scales)));
        REQUIRE_OK(
            fsdpc_device_unpack8(gpu, DEVICE(codes), DEVICE(scales), n, DEVICE(out), values.type));
        REQUIRE(simgpu_drain());
        CHECK(same(&scales) && same(&out) && (round % 2 || same(&codes)));
        for (int i = 0; i < 4; i++) {
            REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)all[i]->device));
            free(all[i]->host);
        }
    }
    CHECK_INT(simgpu_reports(), 0);
}

/* Rows are encoded in several pieces; the bytes that pad codes must not change. Codes of blocks with values
 * that are not finite are not compared. In every second round, the error of earlier codes is added to the
 * values. */
static void
codes(void)
{
    static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    static const int64_t lengths[] = {1, 5, 31, 33, 256, 300, 1101};
    for (int round = 0; round < (FSDPC_CODECS + 1) * ROUNDS; round++) {
        const fsdpc_codec codec = (fsdpc_codec)(1 + round % (FSDPC_CODECS - 1));
        const int64_t rows = 1 + below(3), row = lengths[below(7)];
        const int pieces = 1 + (int)below(3);
        const size_t bytes = fsdpc_codec_bytes(codec, rows, row);
        struct block values = block_of(types[below(4)], pieces * rows * row);
        struct block coded = block_of(FSDPC_BYTES, pieces * (int64_t)bytes);
        struct block out = block_of(types[below(4)], values.n);
        struct block lost = block_of(FSDPC_F32, values.n);
        struct block *const all[] = {&values, &coded, &out, &lost};
        fsdpc_coding list[3];
        coded.offset = 0;
        size = round % 4 == 1 && values.type == FSDPC_F32 ? 1e-38 : 1;
        fill(&values, round % 3 == 2, false);
        fill(&lost, false, false);
        size = 1;
        if (round % 5 == 0) { /* blocks of zeros */
            memset(HOST(values), 0, (size_t)(values.n / 2) * fsdpc_dtype_bytes(values.type));
        }
        for (int i = 0; i < 4; i++) {
            to_device(all[i]);
        }
        const size_t stride = (size_t)(rows * row) * fsdpc_dtype_bytes(values.type);
        for (int i = 0; i < pieces; i++) {
            char *own = (char *)HOST(values) + stride * (size_t)i,
                 *to = coded.host + bytes * (size_t)i;
            const bool keeps = round % 2 == 1;
            list[i] = (fsdpc_coding){
                .codec = codec,
                .pieces = 1,
                .rows = rows,
                .row = row,
                .values = (char *)DEVICE(values) + stride * (size_t)i,
                .type = values.type,
                .coded = coded.device + bytes * (size_t)i,
                .stride = bytes,
                .lost = keeps ? (float *)DEVICE(lost) + i * rows * row : NULL,
            };
            REQUIRE_OK(fsdpc_codec_encode(codec, own, values.type, rows, row,
                                          keeps ? (float *)HOST(lost) + i * rows * row : NULL, to));
            REQUIRE_OK(fsdpc_codec_decode(codec, to, rows, row, 0, rows * row,
                                          (char *)HOST(out) + (size_t)(i * rows * row) *
                                                                  fsdpc_dtype_bytes(out.type),
                                          out.type));
        }
        REQUIRE_OK(fsdpc_device_encode(gpu, list, pieces));
        list[0] = (fsdpc_coding){codec,    pieces,       rows,  row, DEVICE(out),
                                 out.type, coded.device, bytes, NULL};
        REQUIRE_OK(fsdpc_device_decode(gpu, list, 1));
        REQUIRE(simgpu_drain());
        CHECK(same(&out) && same(&lost) && (round % 3 == 2 || same(&coded)));
        for (int i = 0; i < 4; i++) {
            REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)all[i]->device));
            free(all[i]->host);
        }
    }
    CHECK_INT(simgpu_reports(), 0);
}

/* The sum of coded values must equal the sum of the decoded values. One segment has a codec, the other has
 * none. The device encodes the values. */
static void
sums_of_codes(void)
{
    enum { SENDERS = 4, SEGMENTS = 2 };
    static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F16, FSDPC_F64};
    static const int64_t lengths[] = {1, 5, 31, 33, 256, 300, 1101};
    fsdpc_device *cpu;
    REQUIRE_OK(fsdpc_device_cpu(&cpu));
    for (int round = 0; round < 8 * ROUNDS; round++) {
        const int senders = 1 + (int)below(SENDERS), own = (int)below(senders);
        const bool add = below(2);
        const double scale = below(2) ? 1.0 : 1.0 / 3;
        const int64_t rows = 1 + below(3), row = lengths[below(7)], n = rows * row;
        const fsdpc_dtype type = types[below(4)];
        const fsdpc_dtype wide = type == FSDPC_F64 || below(4) == 0 ? FSDPC_F64 : FSDPC_F32;
        const size_t item = fsdpc_dtype_bytes(type);
        const fsdpc_codec codecs[] = {(fsdpc_codec)(round % FSDPC_CODECS), FSDPC_UNCODED};
        size_t at[SEGMENTS], stride = 0;
        for (int s = 0; s < SEGMENTS; s++) {
            at[s] = stride;
            stride += fsdpc_round_up(
                codecs[s] ? fsdpc_codec_bytes(codecs[s], rows, row) : (size_t)n * item, 16);
        }
        struct block values = block_of(type, SEGMENTS * senders * n);
        struct block sent = block_of(FSDPC_BYTES, senders * (int64_t)stride);
        struct block sums = block_of(wide, SEGMENTS * n);
        struct block *const all[] = {&values, &sent, &sums};
        fsdpc_coding list[2 * SEGMENTS];
        fsdpc_landed landed[SEGMENTS];
        int count = 0;
        sent.offset = 0;
        fill(&values, false, false);
        fill(&sums, false, false);
        for (int i = 0; i < 3; i++) {
            to_device(all[i]);
        }
        for (int s = 0; s < SEGMENTS; s++) {
            const size_t first = (size_t)(s * senders * n);
            char *ours = (char *)DEVICE(values) + first * item;
            for (int behind = 0; behind < 2; behind++) {
                const int from = behind ? own + 1 : 0, end = behind ? senders : own;
                if (from < end) {
                    list[count++] = (fsdpc_coding){
                        .codec = codecs[s],
                        .pieces = end - from,
                        .rows = rows,
                        .row = row,
                        .values = ours + (size_t)(from * n) * item,
                        .type = type,
                        .coded = sent.device + at[s] + stride * (size_t)(behind ? own : 0),
                        .stride = stride,
                    };
                }
            }
            landed[s] = (fsdpc_landed){.from = {.codec = codecs[s],
                                                .pieces = 1,
                                                .rows = rows,
                                                .row = row,
                                                .values = ours + (size_t)(own * n) * item,
                                                .type = type,
                                                .coded = sent.device + at[s],
                                                .stride = stride},
                                       .sum = (char *)DEVICE(sums) +
                                              (size_t)(s * n) * fsdpc_dtype_bytes(wide),
                                       .sum_type = wide};
            double decoded[SENDERS][3 * 1101];
            const void *sources[SENDERS];
            for (int r = 0; r < senders; r++) {
                const char *piece = (char *)HOST(values) + (first + (size_t)(r * n)) * item;
                sources[r] = decoded[r];
                REQUIRE_OK(
                    r == own || codecs[s] == FSDPC_UNCODED
                        ? fsdpc_device_cast(cpu, decoded[r], wide, piece, type, n, 1.0)
                        : fsdpc_codec_round(codecs[s], piece, type, row, 0, n, decoded[r], wide));
            }
            REQUIRE_OK(fsdpc_device_reduce(
                cpu, (char *)HOST(sums) + (size_t)(s * n) * fsdpc_dtype_bytes(wide), wide, sources,
                senders, wide, n, scale, add));
        }
        REQUIRE_OK(fsdpc_device_encode(gpu, list, count));
        REQUIRE_OK(fsdpc_device_sum_landed(gpu, landed, SEGMENTS, senders, own, scale, add));
        REQUIRE(simgpu_drain());
        CHECK(same(&sums));
        for (int i = 0; i < 3; i++) {
            REQUIRE_CU(cuMemFree((CUdeviceptr)(uintptr_t)all[i]->device));
            free(all[i]->host);
        }
    }
    CHECK_INT(simgpu_reports(), 0);
}

/* One launch takes as many codings as fit into its parameters. */
static void
many_codings_take_few_launches(void)
{
    enum { MANY = FSDPC_CUDA_CODINGS + 2 };
    fsdpc_coding list[MANY];
    struct block values = block_of(FSDPC_F32, MANY * 4), coded = block_of(FSDPC_BYTES, MANY * 32);
    fill(&values, false, false);
    to_device(&values);
    for (int i = 0; i < MANY; i++) {
        list[i] = (fsdpc_coding){FSDPC_INT8,
                                 1,
                                 1,
                                 4,
                                 (float *)DEVICE(values) + 4 * i,
                                 FSDPC_F32,
                                 coded.device + 32 * i,
                                 32,
                                 NULL};
    }
    const int64_t before = simgpu_count().launches;
    REQUIRE_OK(fsdpc_device_encode(gpu, list, MANY));
    memset(DEVICE(values), 0, MANY * 4 * sizeof(float));
    REQUIRE_OK(fsdpc_device_decode(gpu, list, MANY));
    REQUIRE(simgpu_drain());
    CHECK_INT(simgpu_count().launches - before, 4);
    for (int i = 0; i < MANY * 4; i++) {
        CHECK(fabsf(((float *)DEVICE(values))[i] - ((float *)HOST(values))[i]) < 0.01f);
    }
    list[1].coded = coded.device + 8;
    CHECK_ERROR(fsdpc_device_encode(gpu, list, 2), FSDPC_E_INVAL, "codes: rows 1 of 1 times 4");
    free(values.host);
    free(coded.host);
}

static void
what_cannot_be_done_is_refused(void)
{
    const fsdpc_step_control nothing = {NULL, NULL, NULL};
    struct shape shape = shape_of(FSDPC_OPTIM_ADAM, 0);
    fsdpc_device *cpu;
    struct tensors *all = make(&shape);
    REQUIRE_OK(fsdpc_device_cpu(&cpu));
    CHECK_ERROR(fsdpc_optim_step_on(cpu, &shape.rule, FSDPC_OPTIM_WHOLE, &nothing, all->device,
                                    all->steps, 1, all),
                FSDPC_E_UNAVAILABLE, "no kernels for optimizer steps");
    all->device[0].param = (char *)all->device[0].param + 2;
    all->device[0].numel = 1;
    CHECK_ERROR(fsdpc_optim_step_on(gpu, &shape.rule, FSDPC_OPTIM_WHOLE, &nothing, all->device,
                                    all->steps, 1, all),
                FSDPC_E_INVAL, "not aligned to float32");
    all->device[0].param_type = FSDPC_F64;
    CHECK_ERROR(fsdpc_optim_step_on(gpu, &shape.rule, FSDPC_OPTIM_WHOLE, &nothing, all->device,
                                    all->steps, 1, all),
                FSDPC_E_TYPE, "float64 cannot be mixed");
    unmake(all);
}

int
main(void)
{
    gpu_start();
    REQUIRE_OK(fsdpc_device_cuda(0, &gpu));
    simgpu_get_options()->verify = true;
    every_rule_and_type();
    stochastic_rounding();
    states_of_8_bits();
    the_device_knows_scale_and_factor();
    ranges_of_one_parameter_share_a_counter();
    activations();
    codes();
    sums_of_codes();
    many_codings_take_few_launches();
    what_cannot_be_done_is_refused();
    return test_result();
}
