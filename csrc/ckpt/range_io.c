#include "ckpt/range_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

static bool
is_valid(const fsdpc_file_range *range)
{
    const size_t item = fsdpc_dtype_bytes(range->file_type);
    int64_t end;
    if (range->file_offset < 0 || range->bytes < 0 || range->tensor_offset < 0 || item == 0 ||
        fsdpc_dtype_bytes(range->memory_type) == 0 ||
        __builtin_add_overflow(range->file_offset, range->bytes, &end) ||
        __builtin_add_overflow(range->tensor_offset, range->bytes, &end)) {
        return false;
    }
    return range->memory_type == range->file_type ||
           (fsdpc_dtype_is_float(range->memory_type) && fsdpc_dtype_is_float(range->file_type) &&
            range->bytes % (int64_t)item == 0);
}

int64_t
fsdpc_range_digests(const fsdpc_file_range *ranges, size_t count, int64_t block_bytes)
{
    int64_t digests = 0;
    if (block_bytes <= 0) {
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        const fsdpc_file_range *range = &ranges[i];
        if (!is_valid(range)) {
            return -1;
        }
        if (range->bytes > 0) {
            const int64_t last = (range->tensor_offset + range->bytes - 1) / block_bytes;
            digests += last - range->tensor_offset / block_bytes + 1;
        }
    }
    return digests;
}

int
fsdpc_file_error(int errnum, const char *doing, const char *path, int64_t offset)
{
    if (offset < 0) {
        fsdpc_error_errno(errnum, "%s %s", doing, path);
    } else {
        fsdpc_error_errno(errnum, "%s %s at byte %lld", doing, path, (long long)offset);
    }
    return FSDPC_E_IO;
}

int
fsdpc_file_rename(const char *from, const char *to, bool exchange)
{
    const unsigned how = exchange ? RENAME_EXCHANGE : RENAME_NOREPLACE;
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, how) == 0) {
        return FSDPC_OK;
    }
    const bool unknown = errno == EINVAL || errno == ENOSYS;
    if (unknown && exchange) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "%s: this file system cannot swap two folders at once; choose a name "
                           "that is free",
                           to);
    }
    /* A plain rename also fails if `to` is a folder that is not empty. */
    if (unknown && rename(from, to) == 0) {
        return FSDPC_OK;
    }
    return fsdpc_file_error(errno, "renaming to", to, -1);
}

int
fsdpc_file_open(const char *path, int flags, int *fd)
{
    struct stat stat;
    *fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (*fd < 0) {
        return fsdpc_file_error(errno, "opening", path, -1);
    }
    int status = FSDPC_OK;
    if (fstat(*fd, &stat) < 0) {
        status = fsdpc_file_error(errno, "looking at", path, -1);
    } else if (!S_ISREG(stat.st_mode)) {
        status = fsdpc_error(FSDPC_E_INVAL, "%s is not a regular file", path);
    }
    if (status != FSDPC_OK) {
        close(*fd);
        *fd = -1;
    }
    return status;
}
