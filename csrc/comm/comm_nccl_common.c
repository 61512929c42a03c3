/* Functions that all files of the NCCL communicator use: clock, CUDA context, failure. */
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "comm/comm_nccl_impl.h"

bool
fsdpc_nccl_is_forked(const nccl_comm *comm)
{
    return comm->owner != getpid();
}

double
fsdpc_nccl_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void
fsdpc_nccl_nap(int us)
{
    struct timespec time = {.tv_nsec = (long)us * 1000};
    nanosleep(&time, NULL);
}

int
fsdpc_nccl_use_context(const nccl_comm *comm)
{
    fsdpc_cu_context current = NULL;
    FSDPC_TRY(fsdpc_cuda_check(comm->driver, comm->driver->ctx_get_current(&current),
                               "the thread's CUDA context"));
    if (current == comm->context) {
        return FSDPC_OK;
    }
    return fsdpc_cuda_check(comm->driver, comm->driver->ctx_set_current(comm->context),
                            "setting the thread's CUDA context");
}

void
fsdpc_nccl_fail(nccl_comm *comm, int status, const char *format, ...)
{
    char text[FSDPC_COMM_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fsdpc_comm_break(&comm->base, status, text);
    if (fsdpc_nccl_is_forked(comm)) {
        return;
    }
    pthread_mutex_lock(&comm->lock);
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}
