/* Copies and fills on streams. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

typedef struct move {
    uintptr_t dst, src;
    size_t bytes;
    bool dst_tracked, src_tracked;
    char *staged; /* a copy of a source that is not pinned; else NULL */
    unsigned fill;
    int fill_bytes; /* size of the value to fill with; 0: this is a copy, not a fill */
} move;

static enum simgpu_progress
run_move(void *context, simgpu_task *task)
{
    move *made = context;
    if ((made->src_tracked && !sim_access(task, made->src, made->bytes, false)) ||
        (made->dst_tracked && !sim_access(task, made->dst, made->bytes, true))) {
        return SIMGPU_DONE;
    }
    if (made->fill_bytes == 1) {
        memset((void *)made->dst, (int)made->fill, made->bytes);
    } else if (made->fill_bytes == 4) {
        for (size_t i = 0; i < made->bytes / 4; i++) {
            memcpy((char *)made->dst + 4 * i, &made->fill, 4);
        }
    } else {
        memmove((void *)made->dst, made->staged ? made->staged : (char *)made->src, made->bytes);
    }
    return SIMGPU_DONE;
}

static void
drop_move(void *context)
{
    move *made = context;
    free(made->staged);
    free(made);
}

static CUresult
put(CUstream stream, const char *name, move from)
{
    move *made = sim_alloc(1, sizeof *made);
    *made = from;
    simgpu_work work = {.name = name, .context = made, .run = run_move, .drop = drop_move};
    return sim_enqueue_counted(stream, &work);
}

SIM_EXPORT CUresult
cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    SIM_ENTER(cuMemcpyDtoDAsync, true);
    if (bytes == 0) {
        return sim_leave(CUDA_SUCCESS);
    }
    sim_counters.copies++;
    return sim_leave(put(stream, "copy",
                         (move){.dst = (uintptr_t)dst,
                                .src = (uintptr_t)src,
                                .bytes = bytes,
                                .dst_tracked = true,
                                .src_tracked = true}));
}

/* If the source is not pinned, the driver first takes a copy of the source. */
SIM_EXPORT CUresult
cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
    SIM_ENTER(cuMemcpyHtoDAsync, true);
    if (bytes == 0) {
        return sim_leave(CUDA_SUCCESS);
    }
    move made = {.dst = (uintptr_t)dst,
                 .src = (uintptr_t)src,
                 .bytes = bytes,
                 .dst_tracked = true,
                 .src_tracked = sim_is_pinned((uintptr_t)src, bytes)};
    SIM_TRY(sim_capture_copy(sim_stream_actor(stream), made.src_tracked));
    if (!made.src_tracked) {
        made.staged = sim_alloc(1, bytes);
        memcpy(made.staged, src, bytes);
        sim_counters.pageable++;
    }
    sim_counters.copies++;
    return sim_leave(put(stream, "copy to the device", made));
}

/* Where the destination is not pinned, the call lasts until the copy is done. */
SIM_EXPORT CUresult
cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    SIM_ENTER(cuMemcpyDtoHAsync, true);
    if (bytes == 0) {
        return sim_leave(CUDA_SUCCESS);
    }
    move made = {.dst = (uintptr_t)dst,
                 .src = (uintptr_t)src,
                 .bytes = bytes,
                 .src_tracked = true,
                 .dst_tracked = sim_is_pinned((uintptr_t)dst, bytes)};
    SIM_TRY(sim_capture_copy(sim_stream_actor(stream), made.dst_tracked));
    sim_counters.copies++;
    CUresult result = put(stream, "copy to the host", made);
    int actor = sim_stream_actor(stream);
    if (!result && !made.dst_tracked) {
        sim_counters.pageable++;
        sim_counters.host_syncs++;
        result = sim_demand(actor, sim_actors[actor].enqueued);
        sim_observe(sim_actors[actor].clock);
    }
    return sim_leave(result ? result : sim_sticky);
}

static CUresult
fill(enum sim_entry entry, CUdeviceptr dst, unsigned value, size_t count, int fill_bytes,
     CUstream stream)
{
    SIM_TRY(sim_enter(entry, true));
    if (count == 0) {
        return sim_leave(CUDA_SUCCESS);
    }
    SIM_REFUSE(dst % (unsigned)fill_bytes, CUDA_ERROR_INVALID_VALUE);
    sim_counters.memsets++;
    return sim_leave(put(stream, "fill",
                         (move){.dst = (uintptr_t)dst,
                                .bytes = count * (size_t)fill_bytes,
                                .fill = value,
                                .fill_bytes = fill_bytes,
                                .dst_tracked = true}));
}

SIM_EXPORT CUresult
cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream)
{
    return fill(SIM_cuMemsetD8Async, dst, value, count, 1, stream);
}

SIM_EXPORT CUresult
cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t count, CUstream stream)
{
    return fill(SIM_cuMemsetD32Async, dst, value, count, 4, stream);
}
