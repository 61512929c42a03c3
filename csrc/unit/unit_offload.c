/* CPU offload: master shard and shard gradient lie in pinned host memory, which the device accesses in
 * place, and the user's optimizer runs on the CPU.
 *
 * The CPU is like a stream that does not wait for the others. So the device's work on master shard and
 * shard gradient is followed by an event (fsdpc_unit_touch), and the host waits for that event before the
 * CPU accesses the two (fsdpc_unit_settle). The device needs no wait for the CPU: a kernel sees all writes
 * made before its launch. The end of a backward waits once for all units.
 */
#include <stdio.h>

#include "base/status.h"
#include "unit/unit_impl.h"

int
fsdpc_unit_open_shard_device(fsdpc_unit *unit)
{
    unit->offload = unit->offload && fsdpc_device_get_caps(unit->device)->asynchronous;
    unit->shard_device = unit->device;
    if (!unit->offload) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_device_cpu(&unit->shard_device));
    FSDPC_TRY(fsdpc_device_event_new(unit->device, &unit->touched[FSDPC_MASTER]));
    return fsdpc_device_event_new(unit->device, &unit->touched[FSDPC_GRAD]);
}

void
fsdpc_unit_close_shard_device(fsdpc_unit *unit)
{
    for (int which = 0; which < 2; which++) {
        fsdpc_device_event_free(unit->device, unit->touched[which]);
    }
}

int
fsdpc_unit_shard_alloc(fsdpc_unit *unit, size_t bytes, void **out)
{
    return unit->offload ? fsdpc_device_host_alloc(unit->device, bytes, out)
                         : fsdpc_device_alloc(unit->device, bytes, out);
}

void
fsdpc_unit_shard_free(fsdpc_unit *unit, void *block, size_t bytes)
{
    if (unit->offload) {
        fsdpc_device_host_free(unit->device, block, bytes);
    } else {
        fsdpc_device_free(unit->device, block, bytes);
    }
}

bool
fsdpc_unit_is_offloaded(const fsdpc_unit *unit)
{
    return unit->offload;
}

int
fsdpc_unit_touch(fsdpc_unit *unit, enum fsdpc_which which)
{
    if (!unit->offload) {
        return FSDPC_OK;
    }
    unit->in_flight[which] = true;
    return fsdpc_device_record(unit->device, unit->touched[which]);
}

fsdpc_event *
fsdpc_unit_in_flight(const fsdpc_unit *unit, enum fsdpc_which which)
{
    return unit->in_flight[which] ? unit->touched[which] : NULL;
}

void
fsdpc_unit_settled(fsdpc_unit *unit, enum fsdpc_which which)
{
    unit->in_flight[which] = false;
}

int
fsdpc_unit_settle(fsdpc_unit *unit)
{
    for (int which = 0; which < 2; which++) {
        if (unit->in_flight[which]) {
            FSDPC_TRY(fsdpc_device_finish(unit->device, unit->touched[which],
                                          fsdpc_comm_timeout(unit->shard),
                                          "the end of the device's work on offloaded values"));
            unit->in_flight[which] = false;
        }
    }
    return FSDPC_OK;
}
