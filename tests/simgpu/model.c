/* See model.h. */
#include "model.h"

#include "gpu.h"

typedef struct model {
    const model_fault *fault;
    int step, unit;
    bool backward;
    CUresult failed;
    const char *failed_call;
    CUfunction axpb, scatter;
    CUstream compute, gather, reduce;
    CUevent gathered[MODEL_UNITS], released[MODEL_SLOTS + 1], packed[MODEL_REDUCES];
    CUevent reduced[MODEL_REDUCES], stepped, lost[MODEL_STEPS];
    CUmemGenericAllocationHandle slots[MODEL_SLOTS + 1], sums[MODEL_REDUCES];
    CUdeviceptr ranges[MODEL_UNITS], sum_ranges[MODEL_REDUCES];
    int slot_of[MODEL_UNITS];
    float *shards, *grads, *acts, *local; /* plain device memory */
    float *pinned, *pinned_weights;
    bool kept[MODEL_UNITS]; /* the unit has been gathered, and not released since then */
} model;

static bool
at(const model *m, enum model_site site)
{
    return m->fault && m->fault->site == site && m->fault->step == m->step &&
           m->fault->unit == m->unit && m->fault->backward == m->backward;
}

static void
keep(model *m, CUresult result, const char *call)
{
    if (result && !m->failed) {
        m->failed = result;
        m->failed_call = call;
    }
}

#define CALL(call) keep(m, call, #call)
/* Makes a call that the simulated driver skips if a fault is planted at `site`. */
#define CALL_AT(site, entry, call)                             \
    do {                                                       \
        if (at(m, site)) {                                     \
            keep(m, simgpu_skip(#entry, 1) ? 0 : 999, "skip"); \
        }                                                      \
        CALL(entry call);                                      \
    } while (0)

/* --- kernels ---------------------------------------------------------------------------------------- */

static void
axpb(model *m, CUstream stream, float *dst, const float *src, float scale, float add)
{
    axpb_params params = {
        .dst = dst, .src = src, .count = MODEL_FLOATS, .scale = scale, .add = add};
    void *list[] = {&params};
    CALL(cuLaunchKernel(m->axpb, 1, 1, 1, 32, 1, 1, 0, stream, list, NULL));
}

/* dst[i] += scale * src[i] */
static bool
accumulate_declare(simgpu_task *task, const void *params, const simgpu_launch *launch)
{
    const axpb_params *p = params;
    (void)launch;
    return simgpu_task_read(task, p->src, p->count * sizeof *p->src) &&
           simgpu_task_read(task, p->dst, p->count * sizeof *p->dst) &&
           simgpu_task_write(task, p->dst, p->count * sizeof *p->dst);
}

static void
accumulate_launch(const void *params, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                  unsigned by, unsigned bz, unsigned shared_bytes)
{
    const axpb_params *p = params;
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared_bytes;
    for (size_t i = 0; i < p->count; i++) {
        p->dst[i] += p->scale * p->src[i];
    }
}

static void
accumulate(model *m, CUstream stream, float *dst, const float *src, float scale)
{
    axpb_params params = {.dst = dst, .src = src, .count = MODEL_FLOATS, .scale = scale};
    void *list[] = {&params};
    CALL(cuLaunchKernel(m->scatter, 1, 1, 1, 32, 1, 1, 0, stream, list, NULL));
}

static float *
full(const model *m, int unit)
{
    return (float *)(uintptr_t)m->ranges[unit];
}

/* --- memory ------------------------------------------------------------------------------------------ */

static void
map(model *m, CUdeviceptr range, CUmemGenericAllocationHandle memory)
{
    CALL_AT(SITE_REMAP_MAP, cuMemMap, (range, MODEL_GRANULE, 0, memory, 0));
    CALL_AT(SITE_REMAP_ACCESS, cuMemSetAccess, (range, MODEL_GRANULE, &gpu_access, 1));
}

static float *
host_floats(size_t count, const char *name)
{
    void *block;
    REQUIRE_CU(cuMemHostAlloc(&block, count * sizeof(float), 0));
    simgpu_label(block, count * sizeof(float), name);
    return block;
}

static void
begin(model *m)
{
    char name[64];
    m->axpb = gpu_function("axpb");
    m->scatter = gpu_function("accumulate");
    m->compute = gpu_stream("compute stream");
    m->gather = gpu_stream("gather");
    m->reduce = gpu_stream("reduce");
    m->step = -1;                               /* the set-up has no planted faults */
    for (int i = 0; i < MODEL_SLOTS + 1; i++) { /* the last slot is spare */
        m->slots[i] = gpu_memory();
        m->released[i] = gpu_event();
    }
    for (int i = 0; i < MODEL_REDUCES; i++) {
        snprintf(name, sizeof name, "reduce slot %d", i);
        m->sums[i] = gpu_memory();
        m->sum_ranges[i] = gpu_range(name);
        map(m, m->sum_ranges[i], m->sums[i]);
        m->packed[i] = gpu_event();
        m->reduced[i] = gpu_event();
    }
    for (int i = 0; i < MODEL_UNITS; i++) {
        m->slot_of[i] = i % MODEL_SLOTS;
        snprintf(name, sizeof name, "unit %d slot %d", i, m->slot_of[i]);
        m->ranges[i] = gpu_range(name);
        map(m, m->ranges[i], m->slots[m->slot_of[i]]);
        m->gathered[i] = gpu_event();
    }
    m->stepped = gpu_event();
    m->shards = gpu_floats(MODEL_UNITS * MODEL_FLOATS, "shards");
    m->grads = gpu_floats(MODEL_UNITS * MODEL_FLOATS, "shard gradients");
    m->acts = gpu_floats((MODEL_UNITS + 1) * MODEL_FLOATS, "activations");
    m->local = gpu_floats(MODEL_FLOATS, "local gradient");
    m->pinned = host_floats(MODEL_STEPS, "loss");
    m->pinned_weights = host_floats(MODEL_UNITS * MODEL_FLOATS, "weights on the host");
    for (int i = 0; i < MODEL_STEPS; i++) {
        m->lost[i] = gpu_event();
    }
    for (int i = 0; i < MODEL_UNITS; i++) {
        axpb(m, m->compute, m->shards + i * MODEL_FLOATS, NULL, 0, 0.01f * (float)(i + 1));
        axpb(m, m->compute, m->grads + i * MODEL_FLOATS, NULL, 0, 0);
    }
    axpb(m, m->compute, m->acts, NULL, 0, 1);
    CALL(cuEventRecord(m->stepped, m->compute));
}

/* --- one step ---------------------------------------------------------------------------------------- */

/* Makes the unit's values readable: casts this rank's shard into place, then runs the collective. */
static void
gather(model *m, int unit)
{
    int slot = m->slot_of[unit];
    m->unit = unit;
    if (m->kept[unit]) {
        return;
    }
    if (at(m, SITE_WRONG_SLOT)) { /* as if the plan had named the other slot */
        CALL(cuCtxSynchronize());
        CALL(cuMemUnmap(m->ranges[unit], MODEL_GRANULE));
        CALL(cuMemMap(m->ranges[unit], MODEL_GRANULE, 0, m->slots[1 - slot], 0));
        CALL(cuMemSetAccess(m->ranges[unit], MODEL_GRANULE, &gpu_access, 1));
    }
    CALL_AT(SITE_GATHER_WAITS_FOR_READER, cuStreamWaitEvent, (m->gather, m->released[slot], 0));
    CALL_AT(SITE_GATHER_WAITS_FOR_STEP, cuStreamWaitEvent, (m->gather, m->stepped, 0));
    if (at(m, SITE_WAITED_TOO_EARLY)) {
        CALL(cuStreamWaitEvent(m->compute, m->gathered[unit], 0));
    }
    axpb(m, m->gather, full(m, unit), m->shards + unit * MODEL_FLOATS, 1, 0);
    axpb(m, m->gather, full(m, unit), full(m, unit), 1, 0.5f); /* stands for other ranks' shards */
    if (at(m, SITE_FREED_IN_STEP)) {
        CALL(cuMemUnmap(m->ranges[unit], MODEL_GRANULE));
    }
    CALL_AT(SITE_RECORD_GATHERED, cuEventRecord, (m->gathered[unit], m->gather));
    if (!at(m, SITE_WAITED_TOO_EARLY)) {
        CALL_AT(SITE_USE_WAITS_FOR_GATHER, cuStreamWaitEvent, (m->compute, m->gathered[unit], 0));
    }
    m->kept[unit] = true;
}

static void
release(model *m, int unit)
{
    m->unit = unit;
    CALL_AT(SITE_RECORD_RELEASED, cuEventRecord, (m->released[m->slot_of[unit]], m->compute));
    m->kept[unit] = false;
}

/* Gives spare memory to a range that is used at the same time as another range of its slot. */
static void
remap(model *m, int unit)
{
    m->unit = unit;
    CALL_AT(SITE_HOST_WAITS_BEFORE_REMAP, cuCtxSynchronize, ());
    CALL_AT(SITE_REMAP_UNMAP, cuMemUnmap, (m->ranges[unit], MODEL_GRANULE));
    map(m, m->ranges[unit], m->slots[MODEL_SLOTS]);
    m->slot_of[unit] = MODEL_SLOTS;
}

static void
forward(model *m)
{
    m->backward = false;
    for (int unit = 0; unit < MODEL_UNITS; unit++) {
        float *in = m->acts + unit * MODEL_FLOATS, *out = in + MODEL_FLOATS;
        gather(m, unit);
        axpb(m, m->compute, out, in, 0.5f, 0.25f);
        if (at(m, SITE_RELEASED_TOO_EARLY)) {
            CALL(cuEventRecord(m->released[m->slot_of[unit]], m->compute));
        }
        accumulate(m, m->compute, out, full(m, unit), 1);
        if (unit + 1 < MODEL_UNITS) { /* the last unit stays gathered, as backward begins with it */
            bool early = at(m, SITE_RELEASED_TOO_EARLY);
            m->kept[unit] = false;
            if (!early) {
                release(m, unit);
            }
        }
    }
}

static void
reduce(model *m, int unit)
{
    int slot = unit % MODEL_REDUCES;
    int packed_into = at(m, SITE_WRONG_REDUCE_SLOT) ? 1 - slot : slot;
    float *sum = (float *)(uintptr_t)m->sum_ranges[packed_into];
    CALL_AT(SITE_PACK_WAITS_FOR_REDUCE, cuStreamWaitEvent, (m->compute, m->reduced[slot], 0));
    axpb(m, m->compute, sum, m->local, 0.5f, 0);
    CALL_AT(SITE_RECORD_PACKED, cuEventRecord, (m->packed[slot], m->compute));
    CALL_AT(SITE_REDUCE_WAITS_FOR_PACK, cuStreamWaitEvent, (m->reduce, m->packed[slot], 0));
    axpb(m, m->reduce, sum, sum, 1, 0.125f); /* stands for other ranks' gradients */
    accumulate(m, m->reduce, m->grads + unit * MODEL_FLOATS, sum, 1);
    CALL_AT(SITE_RECORD_REDUCED, cuEventRecord, (m->reduced[slot], m->reduce));
}

static void
backward(model *m)
{
    m->backward = true;
    for (int unit = MODEL_UNITS - 1; unit >= 0; unit--) {
        gather(m, unit);
        axpb(m, m->compute, m->local, m->acts + unit * MODEL_FLOATS, 0.5f, 0.1f);
        accumulate(m, m->compute, m->local, full(m, unit), 0.5f);
        release(m, unit);
        reduce(m, unit);
    }
}

static void
optimizer(model *m)
{
    m->unit = 0;
    for (int i = 0; i < MODEL_REDUCES; i++) {
        CALL_AT(SITE_STEP_WAITS_FOR_REDUCE, cuStreamWaitEvent, (m->compute, m->reduced[i], 0));
    }
    for (int unit = 0; unit < MODEL_UNITS; unit++) {
        float *grad = m->grads + unit * MODEL_FLOATS;
        accumulate(m, m->compute, m->shards + unit * MODEL_FLOATS, grad, -0.1f);
        axpb(m, m->compute, grad, NULL, 0, 0);
    }
    CALL_AT(SITE_RECORD_STEPPED, cuEventRecord, (m->stepped, m->compute));
}

static void
send_loss(model *m)
{
    const float *last = m->acts + MODEL_UNITS * MODEL_FLOATS;
    CALL(cuMemcpyDtoHAsync(m->pinned + m->step, (CUdeviceptr)(uintptr_t)last, sizeof *last,
                           m->compute));
    CALL(cuEventRecord(m->lost[m->step], m->compute));
}

/* Reads the loss of `step`, which is the step before the current step, so that the host can run ahead. The
 * host waits by queries, as in the real code. */
static float
read_loss(model *m, int step)
{
    m->unit = 0;
    if (!at(m, SITE_HOST_WAITS_FOR_LOSS)) {
        while (!m->failed && cuEventQuery(m->lost[step]) == CUDA_ERROR_NOT_READY) {}
    }
    simgpu_cpu_read(m->pinned + step, sizeof(float), "loss.item()");
    return m->pinned[step];
}

static void
end(model *m, float *weights)
{
    for (int i = 0; i < MODEL_UNITS && !m->failed; i++) {
        CALL(cuMemcpyDtoHAsync(m->pinned_weights + i * MODEL_FLOATS,
                               (CUdeviceptr)(uintptr_t)(m->shards + i * MODEL_FLOATS),
                               MODEL_FLOATS * sizeof(float), m->compute));
    }
    m->unit = 0;
    m->step = MODEL_STEPS;
    m->backward = false;
    CALL_AT(SITE_HOST_WAITS_BEFORE_END, cuCtxSynchronize, ());
    simgpu_cpu_read(m->pinned_weights, sizeof(float) * MODEL_UNITS * MODEL_FLOATS, "state_dict");
    memcpy(weights, m->pinned_weights, sizeof(float) * MODEL_UNITS * MODEL_FLOATS);
    for (int i = 0; i < MODEL_UNITS; i++) {
        m->unit = i;
        CALL_AT(SITE_END_UNMAP, cuMemUnmap, (m->ranges[i], MODEL_GRANULE));
        CALL(cuMemAddressFree(m->ranges[i], MODEL_GRANULE));
        CALL(cuEventDestroy(m->gathered[i]));
    }
    for (int i = 0; i < MODEL_REDUCES; i++) {
        CALL(cuMemUnmap(m->sum_ranges[i], MODEL_GRANULE));
        CALL(cuMemAddressFree(m->sum_ranges[i], MODEL_GRANULE));
        CALL(cuMemRelease(m->sums[i]));
        CALL(cuEventDestroy(m->packed[i]));
        CALL(cuEventDestroy(m->reduced[i]));
    }
    for (int i = 0; i < MODEL_SLOTS + 1; i++) {
        m->unit = i;
        CALL_AT(SITE_END_RELEASE, cuMemRelease, (m->slots[i]));
        CALL_AT(SITE_END_EVENT, cuEventDestroy, (m->released[i]));
    }
    CALL(cuEventDestroy(m->stepped));
    for (int i = 0; i < MODEL_STEPS; i++) {
        CALL(cuEventDestroy(m->lost[i]));
    }
    CALL(cuStreamDestroy(m->compute));
    CALL(cuStreamDestroy(m->gather));
    CALL(cuStreamDestroy(m->reduce));
    CALL(cuMemFree((CUdeviceptr)(uintptr_t)m->shards));
    CALL(cuMemFree((CUdeviceptr)(uintptr_t)m->grads));
    CALL(cuMemFree((CUdeviceptr)(uintptr_t)m->acts));
    CALL(cuMemFree((CUdeviceptr)(uintptr_t)m->local));
    CALL(cuMemFreeHost(m->pinned));
    CALL(cuMemFreeHost(m->pinned_weights));
}

bool
model_run(const model_fault *fault, float *weights, float *loss, char *error, size_t error_bytes)
{
    model here = {.fault = fault}, *m = &here;
    error[0] = '\0';
    simgpu_kernel("accumulate", sizeof(axpb_params), accumulate_launch, accumulate_declare);
    begin(m);
    for (int step = 0; step < MODEL_STEPS && !m->failed; step++) {
        m->step = step;
        m->backward = false;
        if (step == 1 && !m->failed) {
            remap(m, 5); /* from now on, as if units 5 and 7 (of one slot) were used together */
        }
        if (step > 0) {
            loss[step - 1] = read_loss(m, step - 1);
        }
        forward(m);
        send_loss(m);
        backward(m);
        optimizer(m);
    }
    if (!m->failed) {
        m->step = MODEL_STEPS;
        m->backward = false;
        loss[MODEL_STEPS - 1] = read_loss(m, MODEL_STEPS - 1);
    }
    end(m, weights);
    if (m->failed) {
        const char *name = NULL;
        (void)cuGetErrorName(m->failed, &name);
        snprintf(error, error_bytes, "%.*s: %s", (int)strcspn(m->failed_call, " ("), m->failed_call,
                 name);
    }
    return !m->failed;
}
