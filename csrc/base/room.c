/* Reads the kernel's figures of free memory. See room.h. */
#include "base/room.h"

#include <stdio.h>

#include "base/status.h"

static uint64_t
read_number(const char *path)
{
    unsigned long long value;
    FILE *file = fopen(path, "re");
    if (!file) {
        return UINT64_MAX;
    }
    /* The text "max", or any other text that is not a number, means that there is no limit. */
    int fields = fscanf(file, "%llu", &value);
    fclose(file);
    return fields == 1 ? value : UINT64_MAX;
}

static uint64_t
free_on_host(void)
{
    char line[128];
    uint64_t bytes = UINT64_MAX;
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file) {
        return bytes;
    }
    while (fgets(line, sizeof line, file)) {
        unsigned long long kib;
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) {
            bytes = (uint64_t)kib * 1024;
            break;
        }
    }
    fclose(file);
    return bytes;
}

/* Reads the root of the control group file system, which in a container is this process's own group. Limits
 * below the host's memory are usual only in containers. */
static uint64_t
free_in_group(void)
{
    uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
    uint64_t used = read_number("/sys/fs/cgroup/memory.current");
    if (limit == UINT64_MAX) {
        limit = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
        used = read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes");
    }
    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return UINT64_MAX;
    }
    return used < limit ? limit - used : 0;
}

uint64_t
fsdpc_room_free(void)
{
    uint64_t host = free_on_host(), group = free_in_group();
    return host < group ? host : group;
}

int
fsdpc_room_check(size_t bytes, const char *who)
{
    uint64_t host = free_on_host(), group = free_in_group();
    if (bytes <= host && bytes <= group) {
        return FSDPC_OK;
    }
    return fsdpc_error(FSDPC_E_NOMEM,
                       "%s needs %.1f MiB of shared memory, but %.1f MiB are free %s", who,
                       (double)bytes / 1048576, (double)(host < group ? host : group) / 1048576,
                       host < group ? "on this host" : "under this control group's limit");
}
