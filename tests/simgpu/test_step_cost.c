/* The cost of a training step on a GPU, per unit, counted on the simulated GPU: launches, gathers,
 * reductions, allocations, waits of the host, and bytes moved. There are two ranks and units of one size, in
 * several precisions.
 *
 * Bytes are per unsharded parameter. Casting and summing shards costs less with more ranks and is counted
 * separately. The other bytes do not depend on the number of ranks, so a large job pays all of them: both
 * gathers write every parameter, the pack reads and writes every gradient, and the reduction reads every
 * gradient. */
#include "steps.h"

enum { NUMEL = 40000, MOST = 6 };

typedef struct precision {
    const char *name;
    int segments;
    fsdpc_param_spec specs[MOST];
    int count;
    fsdpc_dtype grad;
    double most_bytes; /* upper bound of the bytes moved per unsharded parameter */
} precision;

#define SPEC(n, numel, storage, compute, reduce, trains) \
    {n, numel, FSDPC_##storage, FSDPC_##compute, FSDPC_##reduce, trains, 0, 0, 0, false}
#define BY_ROWS(n, numel, storage, compute, reduce, row) \
    {n, numel, FSDPC_##storage, FSDPC_##compute, FSDPC_##reduce, true, row, 0, 0, false}

static const precision precisions[] = {
    {"fp32", 1, {SPEC("w", NUMEL, F32, F32, F32, true)}, 1, FSDPC_F32, 20},
    {"bf16 compute, fp32 reduce", 1, {SPEC("w", NUMEL, F32, BF16, F32, true)}, 1, FSDPC_BF16, 14},
    {"bf16 compute, bf16 reduce", 1, {SPEC("w", NUMEL, F32, BF16, BF16, true)}, 1, FSDPC_BF16, 10},
    {"two dtypes, frozen beside",
     3,
     {SPEC("w", NUMEL / 2, F32, BF16, BF16, true), SPEC("norm", NUMEL / 4, F32, F32, F32, true),
      SPEC("frozen", NUMEL / 4, BF16, BF16, BF16, false)},
     3,
     FSDPC_BF16,
     14},
    {"bf16, six parameters",
     1,
     {SPEC("wide", 16 * 1000, F32, BF16, F32, true), SPEC("odd", 15 * 1001, F32, BF16, F32, true),
      SPEC("tall", 7001, F32, BF16, F32, true), SPEC("one", 1, F32, BF16, F32, true),
      SPEC("norm", 983, F32, BF16, F32, true), SPEC("bias", 1000, F32, BF16, F32, true)},
     6,
     FSDPC_BF16,
     14},
    {"the same by rows",
     6,
     {BY_ROWS("wide", 16 * 1000, F32, BF16, F32, 1000),
      BY_ROWS("odd", 15 * 1001, F32, BF16, F32, 15), BY_ROWS("tall", 7001, F32, BF16, F32, 1),
      BY_ROWS("one", 1, F32, BF16, F32, 1), BY_ROWS("norm", 983, F32, BF16, F32, 1),
      BY_ROWS("bias", 1000, F32, BF16, F32, 1)},
     6,
     FSDPC_BF16,
     14},
};

typedef struct costs {
    simgpu_counters gpu;
    simnccl_counters nccl;
} costs;

static costs
count_now(void)
{
    CHECK(simgpu_drain());
    return (costs){simgpu_count(), simnccl_count()};
}

static const precision *p; /* the precision of the models that are opened next */

static void
open_precise(model *m, int rank, const ranks_run *run)
{
    const fsdpc_tree_options options = {.backward_prefetch = FSDPC_PREFETCH_PRE};
    *m = (model){.rank = rank, .world = run->world, .replicas = 1, .kinds = kinds};
    REQUIRE_OK(fsdpc_device_cuda(0, &m->device));
    m->comm = open_comm(m, rank, run->world, 0, false);
    simgpu_get_options()->foreign = true; /* gradients are allocated with malloc here */
    for (int u = 0; u < UNITS; u++) {
        const fsdpc_unit_options unit = {
            .name = names[u], .shard = m->comm, .divide = run->world, .reshard = u != ROOT};
        REQUIRE_OK(fsdpc_unit_new(&unit, p->specs, p->count, &m->units[u]));
    }
    REQUIRE_OK(fsdpc_tree_new(m->units, depths, UNITS, &options, &m->tree));
}

/* Reduces the gradients of each unit whose reduction is due now. One buffer in the compute dtype serves as
 * every gradient. */
static int
send_ready(model *m, void *memory, bool at_end)
{
    fsdpc_tensor grads[MOST] = {{0}};
    for (int i = 0; i < p->count; i++) {
        if (p->specs[i].trainable) {
            grads[i] = (fsdpc_tensor){memory, p->specs[i].compute, 0, NULL, NULL, true};
        }
    }
    for (int u; (u = fsdpc_tree_next_due(m->tree, at_end)) >= 0;) {
        FSDPC_TRY(fsdpc_tree_reduce(m->tree, u, grads));
    }
    return FSDPC_OK;
}

static int
one_step(model *m, void *memory)
{
    FSDPC_TRY(fsdpc_tree_begin_forward(m->tree, true));
    for (int u = 0; u < UNITS; u++) {
        m->units[u]->grads.add = false;
        FSDPC_TRY(fsdpc_tree_forward_enter(m->tree, u));
        FSDPC_TRY(u == ROOT ? FSDPC_OK : fsdpc_tree_forward_leave(m->tree, u, true));
    }
    FSDPC_TRY(fsdpc_tree_forward_leave(m->tree, ROOT, true));
    FSDPC_TRY(fsdpc_tree_begin_backward(m->tree));
    for (int u = UNITS - 1; u >= 0; u--) {
        FSDPC_TRY(fsdpc_tree_backward_enter(m->tree, u));
        FSDPC_TRY(fsdpc_tree_backward_done(m->tree, u, true));
        FSDPC_TRY(send_ready(m, memory, u == ROOT));
    }
    return fsdpc_tree_end_backward(m->tree, true);
}

/* Computes from the layout the bytes that both gathers write (*gathered), that a pack reads and writes
 * (*packed), and that a reduction reads (*reduced). Returns the sum. */
static double
whole_bytes(const model *m, double *gathered, double *packed, double *reduced)
{
    const fsdpc_layout *layout = m->units[0]->layout;
    *gathered = *packed = *reduced = 0;
    for (int i = 0; i < layout->param_count; i++) {
        const fsdpc_param_place *place = &layout->params[i];
        const fsdpc_segment *seg = &layout->segments[place->segment];
        double n = (double)place->numel / NUMEL;
        double compute = (double)fsdpc_dtype_bytes(seg->compute);
        double reduce = (double)fsdpc_dtype_bytes(seg->reduce);
        *gathered += 2 * n * compute;
        *packed += seg->trainable ? n * (compute + reduce) : 0;
        *reduced += seg->trainable ? n * reduce : 0;
    }
    return *gathered + *packed + *reduced;
}

/* Returns the bytes of shards that the launches of a step read and write, per element of a shard. */
static double
shard_bytes(const model *m, double gathers)
{
    double bytes = 0;
    const fsdpc_layout *layout = m->units[0]->layout;
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        double n = (double)seg->piece_numel * m->world / NUMEL;
        bytes += n * gathers *
                 (double)(fsdpc_dtype_bytes(seg->storage) + fsdpc_dtype_bytes(seg->compute));
        bytes +=
            seg->trainable
                ? n * (double)(fsdpc_dtype_bytes(seg->reduce) + fsdpc_dtype_bytes(seg->accumulate))
                : 0;
    }
    return bytes;
}

static void
check_bytes(const model *m, const costs *a, const costs *b, double gathers)
{
    double gathered, packed, reduced, whole = whole_bytes(m, &gathered, &packed, &reduced);
    double all = (double)NUMEL * UNITS;
    double moved = (double)(b->gpu.bytes_read + b->gpu.bytes_written - a->gpu.bytes_read -
                            a->gpu.bytes_written) /
                   all;
    double expected = packed + shard_bytes(m, gathers) / m->world;
    /* The difference consists of lists of tensors, padding and used bits. */
    CHECK(fabs(moved - expected) < 0.03 * expected);
    /* The bytes that a rank gives to NCCL: its piece for a gather, and the whole buffer for a reduction. */
    double sent = (double)(b->nccl.bytes_sent - a->nccl.bytes_sent) / all;
    double sending = gathered / 2 * gathers / m->world + reduced;
    CHECK(fabs(sent - sending) < 0.03 * sending);
    CHECK(whole <= p->most_bytes);
    printf("| %-25s | %4.1f = %.1f + %.1f + %.1f | %5.1f / ranks |\n", p->name, whole, gathered,
           packed, reduced, shard_bytes(m, 2));
}

static void
measure(model *m)
{
    void *memory = calloc(NUMEL, 8);
    REQUIRE(memory != NULL);
    CHECK_INT(m->units[0]->layout->segment_count, p->segments);
    CHECK_INT(one_step(m, memory), FSDPC_OK);
    costs a = count_now();
    CHECK_INT(one_step(m, memory), FSDPC_OK);
    expect_nothing_made(&a.gpu);
    costs b = count_now();
    int64_t launches = b.gpu.launches - a.gpu.launches, per_gather = p->segments;
    int64_t gathers = (b.nccl.all_gathers - a.nccl.all_gathers) / per_gather;
    int64_t scatters = b.nccl.reduce_scatters - a.nccl.reduce_scatters;
    int64_t trains = 0;
    for (int s = 0; s < p->segments; s++) {
        trains += m->units[0]->layout->segments[s].trainable;
    }
    CHECK(launches <= 4 * UNITS);
    CHECK(gathers <= 2 * UNITS && gathers > UNITS);
    CHECK_INT(scatters, UNITS * trains);
    /* All segments of a unit are joined in one group of NCCL calls. */
    CHECK_INT(b.nccl.joined - a.nccl.joined, gathers * (per_gather - 1) + UNITS * (trains - 1));
    if (m->rank == 0) {
        printf("| %-25s | %.1f launches, %.1f gathers, %.1f reductions, 0 allocations, 0 waits |\n",
               p->name, (double)launches / UNITS, (double)gathers / UNITS,
               (double)scatters / (double)trains / UNITS);
        check_bytes(m, &a, &b, (double)gathers / UNITS);
    }
    free(memory);
}

int
main(void)
{
    printf(
        "A step of %d units on 2 ranks, per unit, and bytes moved per unsharded parameter =\n"
        "written by two gathers + packed + read by the reduction; beside them those of shards:\n",
        UNITS);
    for (size_t i = 0; i < sizeof precisions / sizeof *precisions; i++) {
        p = &precisions[i];
        with_models(2, LAZY, open_precise, measure);
    }
    return test_result();
}
