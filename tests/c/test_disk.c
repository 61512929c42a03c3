/* Tests of a file of optimizer states: bytes are written and read back by both kinds of I/O, in parts and in
 * several buffers at once; bad calls are refused; failures and timeouts leave a usable file. */
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/deadline.h"
#include "disk/disk.h"

enum { PAGES = 700, BYTES = PAGES * FSDPC_DISK_PAGE, BUFFERS = 3 };

static unsigned char *memory[BUFFERS];
static enum { AS_IT_IS, RESERVES_NOTHING, CANNOT_RESERVE, FULL } file_system;

/* Replaces the C library's function, to simulate file systems that the test machine does not have. */
int
fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    switch (file_system) {
    case RESERVES_NOTHING:
        return ftruncate(fd, offset + bytes);
    case CANNOT_RESERVE:
        errno = EOPNOTSUPP;
        return -1;
    case FULL:
        errno = ENOSPC;
        return -1;
    default:
        return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    }
}

static fsdpc_disk_options
options_of(fsdpc_disk_io io, bool direct)
{
    return (fsdpc_disk_options){.folder = ".",
                                .rank = 3,
                                .buffers = (void *const *)memory,
                                .buffer_count = BUFFERS,
                                .buffer_bytes = BYTES,
                                .io = io,
                                .direct = direct};
}

static void
fill(int buffer, int version)
{
    for (int i = 0; i < BYTES; i++) {
        memory[buffer][i] = (unsigned char)(i * 7 + i / 4096 * 13 + version);
    }
}

/* Splits the pages of a buffer into three parts, which are in reverse order in the file. */
static void
parts_of(int buffer, fsdpc_disk_part parts[3])
{
    const int64_t page = FSDPC_DISK_PAGE, base = (int64_t)buffer * BYTES, first = 400 * page,
                  second = 1 * page, third = BYTES - first - second;
    parts[0] = (fsdpc_disk_part){base + second + third, first, 0};
    parts[1] = (fsdpc_disk_part){base + third, second, first};
    parts[2] = (fsdpc_disk_part){base, third, first + second};
}

static void
bytes_come_back(fsdpc_disk_io io, bool direct)
{
    fsdpc_disk *disk;
    fsdpc_disk_info info;
    fsdpc_disk_part parts[3];
    const fsdpc_disk_options options = options_of(io, direct);
    REQUIRE_OK(fsdpc_disk_open(&options, &disk));
    REQUIRE_OK(fsdpc_disk_grow(disk, (int64_t)BUFFERS * BYTES));
    for (int b = 0; b < BUFFERS; b++) {
        fill(b, b);
        parts_of(b, parts);
        CHECK_INT(fsdpc_disk_start(disk, true, b, parts, 3), FSDPC_OK);
    }
    for (int b = BUFFERS - 1; b >= 0; b--) {
        CHECK_INT(fsdpc_disk_wait(disk, b), FSDPC_OK);
        memset(memory[b], 0, BYTES);
    }
    for (int b = 0; b < BUFFERS; b++) { /* reads the bytes of buffer b into the next buffer */
        parts_of(b, parts);
        CHECK_INT(fsdpc_disk_start(disk, false, (b + 1) % BUFFERS, parts, 3), FSDPC_OK);
    }
    for (int b = 0; b < BUFFERS; b++) {
        const int to = (b + 1) % BUFFERS;
        CHECK_INT(fsdpc_disk_wait(disk, to), FSDPC_OK);
        int64_t wrong = 0;
        for (int i = 0; i < BYTES; i++) {
            wrong += memory[to][i] != (unsigned char)(i * 7 + i / 4096 * 13 + b);
        }
        CHECK_INT(wrong, 0);
    }
    fsdpc_disk_describe(disk, &info);
    CHECK_INT(info.read_bytes, (int64_t)BUFFERS * BYTES);
    CHECK_INT(info.written_bytes, (int64_t)BUFFERS * BYTES);
    CHECK_INT(info.bytes, (int64_t)BUFFERS * BYTES);
    CHECK(io == FSDPC_DISK_AUTO || strcmp(info.io, "threads") == 0);
    CHECK(fsdpc_disk_close(disk));
}

static void
faults_have_names(fsdpc_disk_io io)
{
    fsdpc_disk *disk;
    fsdpc_disk_info info;
    fsdpc_disk_part part = {0, 2 * FSDPC_DISK_PAGE, 0};
    fsdpc_disk_options options = options_of(io, true);
    REQUIRE_OK(fsdpc_disk_open(&options, &disk));
    REQUIRE_OK(fsdpc_disk_grow(disk, 4 * FSDPC_DISK_PAGE));
    REQUIRE_OK(fsdpc_disk_grow(disk, FSDPC_DISK_PAGE)); /* a file never gets shorter */
    fsdpc_disk_describe(disk, &info);
    CHECK_INT(info.bytes, 4 * FSDPC_DISK_PAGE);
    CHECK_ERROR(fsdpc_disk_grow(disk, INT64_MAX / 2), FSDPC_E_IO, "rank 3: reserving");
    part.offset = 3 * FSDPC_DISK_PAGE;
    CHECK_ERROR(fsdpc_disk_start(disk, false, 0, &part, 1), FSDPC_E_INVAL, "outside of the file");
    part.offset = 0;
    REQUIRE(ftruncate(info.fd, FSDPC_DISK_PAGE) == 0);
    CHECK_INT(fsdpc_disk_start(disk, false, 0, &part, 1), FSDPC_OK);
    CHECK_ERROR(fsdpc_disk_start(disk, false, 3, &part, 1), FSDPC_E_INVAL,
                "buffer 3 does not exist");
    CHECK_ERROR(fsdpc_disk_wait(disk, 0), FSDPC_E_IO, "which ends there");
    CHECK_INT(fsdpc_disk_wait(disk, 0), FSDPC_OK); /* the previous wait has returned the error */
    CHECK_ERROR(fsdpc_disk_wait(disk, 7), FSDPC_E_INVAL, "buffer 7 does not exist");
    CHECK(fsdpc_disk_close(disk));
    options.folder = "/nowhere";
    CHECK_ERROR(fsdpc_disk_open(&options, &disk), FSDPC_E_IO, "rank 3: making a file of states");
    options.folder = ".";
    options.buffer_bytes = 100;
    CHECK_ERROR(fsdpc_disk_open(&options, &disk), FSDPC_E_INVAL, "whole pages");
    CHECK(fsdpc_disk_close(NULL));
}

static void
space_is_there_or_refused(void)
{
    fsdpc_disk *disk;
    fsdpc_disk_info info;
    struct stat found;
    const fsdpc_disk_options options = options_of(FSDPC_DISK_AUTO, true);
    REQUIRE_OK(fsdpc_disk_open(&options, &disk));
    REQUIRE_OK(fsdpc_disk_grow(disk, FSDPC_DISK_PAGE));
    file_system = RESERVES_NOTHING;
    CHECK_ERROR(fsdpc_disk_grow(disk, BYTES), FSDPC_E_IO, "is sparse: the file system holds");
    file_system = FULL;
    CHECK_ERROR(fsdpc_disk_grow(disk, BYTES), FSDPC_E_IO, "No space left");
    fsdpc_disk_describe(disk, &info);
    CHECK_INT(info.bytes, FSDPC_DISK_PAGE); /* unchanged by the two calls that failed */
    CHECK(fstat(info.fd, &found) == 0 && found.st_size == FSDPC_DISK_PAGE);
    file_system = CANNOT_RESERVE;
    REQUIRE_OK(fsdpc_disk_grow(disk, BYTES));
    CHECK(fstat(info.fd, &found) == 0 && found.st_size == BYTES);
    CHECK((int64_t)found.st_blocks * 512 >= BYTES); /* allocated by writing, not by fallocate */
    file_system = AS_IT_IS;
    CHECK(fsdpc_disk_close(disk));
}

/* A wait ends at its timeout, even if the kernel has not finished the transfer. A close waits for a transfer
 * in flight. */
static void
waits_end(void)
{
    fsdpc_disk *disk;
    fsdpc_disk_part parts[3];
    const fsdpc_disk_options options = options_of(FSDPC_DISK_AUTO, true);
    REQUIRE_OK(fsdpc_disk_open(&options, &disk));
    REQUIRE_OK(fsdpc_disk_grow(disk, (int64_t)BUFFERS * BYTES));
    parts_of(0, parts);
    CHECK_INT(fsdpc_disk_start(disk, true, 0, parts, 3), FSDPC_OK);
    fsdpc_set_timeout(1e-9);
    const int status = fsdpc_disk_wait(disk, 0);
    CHECK(status == FSDPC_OK || status == FSDPC_E_TIMEOUT);
    fsdpc_set_timeout(FSDPC_DEFAULT_TIMEOUT_S);
    CHECK_INT(fsdpc_disk_wait(disk, 0), FSDPC_OK);
    CHECK_INT(fsdpc_disk_start(disk, false, 1, parts, 3), FSDPC_OK);
    CHECK(fsdpc_disk_close(disk)); /* while a transfer is in flight */
}

static int
open_and_close(void *argument)
{
    fsdpc_disk *disk;
    const fsdpc_disk_options options = options_of(*(fsdpc_disk_io *)argument, true);
    FSDPC_TRY(fsdpc_disk_open(&options, &disk));
    return fsdpc_disk_close(disk) ? FSDPC_OK : FSDPC_E_TIMEOUT;
}

int
main(void)
{
    char folder[] = "/tmp/fsdpc-test-disk-XXXXXX";
    fsdpc_disk_io threads = FSDPC_DISK_THREADS;
    REQUIRE(mkdtemp(folder) != NULL && chdir(folder) == 0);
    for (int b = 0; b < BUFFERS; b++) {
        REQUIRE(posix_memalign((void **)&memory[b], FSDPC_DISK_PAGE, BYTES) == 0);
    }
    for (int direct = 0; direct < 2; direct++) {
        bytes_come_back(FSDPC_DISK_AUTO, direct);
        bytes_come_back(FSDPC_DISK_THREADS, direct);
    }
    faults_have_names(FSDPC_DISK_AUTO);
    faults_have_names(FSDPC_DISK_THREADS);
    space_is_there_or_refused();
    waits_end();
    test_alloc_sweep(open_and_close, &threads);
    for (int b = 0; b < BUFFERS; b++) {
        free(memory[b]);
    }
    CHECK(chdir("/") == 0 && rmdir(folder) == 0); /* the folder is empty */
    return test_result();
}
