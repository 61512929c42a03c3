/* Which parts of the core were reached: linked into the copies of the core of `make simcluster-coverage` alone, which
 * are compiled to call this at the begin of each basic block. A block's byte, at its place in the library, becomes 1
 * in the file $SIM_COVERAGE, as variables of a copy do not outlive a run.
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
    /* All copies use one range, so that a run does not need new ones. */
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
