/* Running CUDA threads on the host. See cuda_shim.h. */
#include "cuda_shim.h"

#include <cstdio>
#include <cstdlib>
#include <link.h>
#include <ucontext.h>

thread_local shim_index gridDim, blockDim, blockIdx, threadIdx;

namespace
{
enum { MAX_THREADS = 1024, STACK_BYTES = 64 << 10 };

enum fibre_state { IDLE, RUNNING, AT_BARRIER };

struct fibre {
    ucontext_t context;
    char *stack;
    unsigned thread;
    fibre_state state;
};

struct block {
    shim_kernel *kernel;
    const void *params;
    unsigned threads, next; /* next: the first that has not begun */
    fibre *current;         /* NULL outside of fibres */
    ucontext_t scheduler;
    fibre *fibres[MAX_THREADS];
    unsigned fibre_count;
    ~block()
    {
        for (unsigned i = 0; i < fibre_count; i++) {
            free(fibres[i]->stack);
            free(fibres[i]);
        }
    }
};

thread_local block here;

void
become(unsigned thread)
{
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / blockDim.x / blockDim.y;
}

/* One thread after the other until one stops at a barrier; then another fibre goes on. */
void
run_threads()
{
    while (here.next < here.threads) {
        here.current->thread = here.next++;
        become(here.current->thread);
        here.kernel(here.params);
    }
    here.current->state = IDLE;
}

fibre *
idle_fibre()
{
    for (unsigned i = 0; i < here.fibre_count; i++) {
        if (here.fibres[i]->state == IDLE) {
            return here.fibres[i];
        }
    }
    fibre *made = (fibre *)calloc(1, sizeof *made);
    if (!made || here.fibre_count == MAX_THREADS) {
        shim_stop("no memory for a fibre");
    }
    made->stack = (char *)malloc(STACK_BYTES);
    if (!made->stack) {
        shim_stop("no memory for a stack");
    }
    here.fibres[here.fibre_count++] = made;
    return made;
}

void
resume(fibre *f)
{
    here.current = f;
    f->state = RUNNING;
    swapcontext(&here.scheduler, &f->context);
    here.current = nullptr;
}

void
begin(fibre *f)
{
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK_BYTES;
    f->context.uc_link = &here.scheduler;
    makecontext(&f->context, run_threads, 0);
    resume(f);
}

unsigned
waiting()
{
    unsigned count = 0;
    for (unsigned i = 0; i < here.fibre_count; i++) {
        count += here.fibres[i]->state == AT_BARRIER;
    }
    return count;
}

void
run_block()
{
    here.next = 0;
    while (here.next < here.threads) {
        begin(idle_fibre());
    }
    for (unsigned count = waiting(); count > 0; count = waiting()) {
        if (count != here.threads) {
            shim_stop("some threads wait at a barrier that others never came to");
        }
        for (unsigned i = 0; i < here.fibre_count; i++) {
            if (here.fibres[i]->state == AT_BARRIER) {
                become(here.fibres[i]->thread);
                resume(here.fibres[i]);
            }
        }
    }
}
} // namespace

void
shim_stop(const char *what)
{
    fprintf(stderr, "cuda_shim: block %u: %s\n", blockIdx.x, what);
    abort();
}

namespace
{
/* Shared variables are this library's thread-local ones: all of them lie in one stretch. */
int
find_shared(struct dl_phdr_info *info, size_t, void *found)
{
    const uintptr_t here_lies = (uintptr_t)&threadIdx, at = (uintptr_t)info->dlpi_tls_data;
    for (int i = 0; at && i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_TLS && here_lies >= at && here_lies < at + part->p_memsz) {
            *(shim_bytes *)found = {at, at + part->p_memsz};
        }
    }
    return 0;
}
} // namespace

const shim_bytes &
shim_shared(void)
{
    static thread_local shim_bytes shared;
    if (!shared.end) {
        dl_iterate_phdr(find_shared, &shared);
        if (!shared.end) {
            shim_stop("shared memory cannot be found");
        }
    }
    return shared;
}

void
__syncthreads(void)
{
    fibre *self = here.current;
    self->state = AT_BARRIER;
    swapcontext(&self->context, &here.scheduler);
}

template <typename T, typename F>
static T
reduce_warp(unsigned lanes, T value, F both)
{
    enum { WARP = 32 };
    static thread_local T held[MAX_THREADS];
    const unsigned first = threadIdx.x / WARP * WARP;
    if (lanes != 0xffffffffu) {
        shim_stop("a reduction of a part of a warp");
    }
    held[threadIdx.x] = value;
    __syncthreads();
    T result = held[first];
    for (unsigned i = first + 1; i < first + WARP && i < here.threads; i++) {
        result = both(result, held[i]);
    }
    __syncthreads();
    return result;
}

int
__reduce_max_sync(unsigned lanes, int value)
{
    return reduce_warp(lanes, value, [](int a, int b) { return a > b ? a : b; });
}

unsigned
__reduce_add_sync(unsigned lanes, unsigned value)
{
    return reduce_warp(lanes, value, [](unsigned a, unsigned b) { return a + b; });
}

void
shim_launch(shim_kernel *kernel, const void *params, shim_grid grid)
{
    gridDim = {grid.gx, grid.gy, grid.gz};
    blockDim = {grid.bx, grid.by, grid.bz};
    here.kernel = kernel;
    here.params = params;
    here.threads = grid.bx * grid.by * grid.bz;
    if (here.threads == 0 || here.threads > MAX_THREADS) {
        shim_stop("a block has 1 to 1024 threads");
    }
    for (unsigned z = 0; z < grid.gz; z++) {
        for (unsigned y = 0; y < grid.gy; y++) {
            for (unsigned x = 0; x < grid.gx; x++) {
                blockIdx = {x, y, z};
                run_block();
            }
        }
    }
}
