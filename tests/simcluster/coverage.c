/* Records which basic blocks of the core were reached. Only `make simcluster-coverage` links this file. The
 * core then calls this code at the begin of each block. It writes 1 to the file $SIM_COVERAGE at the
 * block's offset in the library. (The variables of a copy of the core do not outlive a run; the file does.)
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BYTES = 16 << 20 };

extern const char __ehdr_start __attribute__((visibility("hidden")));
void *__real_mmap(void *, size_t, int, int, int, off_t);
int __real_close(int);
int __real_ftruncate(int, off_t);
void __sanitizer_cov_trace_pc(void);

static uint8_t *
map_file(void)
{
    /* All copies map the file at the same address in every run, so that mappings do not pile up. */
    void *const at = (void *)(UINT64_C(1) << 45);
    const int fd = open(getenv("SIM_COVERAGE"), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || __real_ftruncate(fd, BYTES) != 0) {
        abort();
    }
    void *map = __real_mmap(at, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    __real_close(fd);
    return map;
}

void
__sanitizer_cov_trace_pc(void)
{
    static uint8_t *reached;
    reached = reached ? reached : map_file();
    const uintptr_t at = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&__ehdr_start;
    if (at < BYTES) {
        reached[at] = 1;
    }
}
