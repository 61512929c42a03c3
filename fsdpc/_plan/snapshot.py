"""A plan in the format of ``torch.cuda.memory._dump_snapshot``, for torch's own memory viewer.

Time in the viewer is the order of the plan's timeline: each role is allocated where it appears and
freed where it goes. Frames name unit and role; categories colour by role. The viewer reads pickles
of protocol 4 at most, and needs the category ``unknown`` to exist.
"""

from __future__ import annotations

import pickle
from typing import Any

from fsdpc._plan.ledger import Plan

BASE = 1 << 40
ROOM = 1 << 44  # addresses between roles, more than any role is large
STEP_US = 1000


def snapshot(plan: Plan) -> dict[str, Any]:
    """The snapshot as plain values: segments (what lives at rest) and one device's trace."""
    trace: list[dict[str, Any]] = []
    live: dict[str, int] = {}
    rest = plan.timeline[0].roles
    roles = list(dict.fromkeys(role for point in plan.timeline for role in point.roles))
    address = {role: BASE + ROOM * i for i, role in enumerate(roles)}
    for time, point in enumerate(plan.timeline):
        changed = [r for r in roles if live.get(r, 0) != point.roles.get(r, 0)]
        for role in changed:  # frees first, so that the highest point is the plan's
            for action in ("free_requested", "free_completed") if live.get(role, 0) else ():
                trace.append(_entry(action, address[role], live[role], role, point.unit, time))
        for role in changed:
            live[role] = point.roles.get(role, 0)
            if live[role]:
                trace.append(_entry("alloc", address[role], live[role], role, point.unit, time))
    return {
        "segments": [_segment(address[role], size, role) for role, size in rest.items() if size],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def write(path: str, plan: Plan) -> None:
    """Writes the snapshot; open it at pytorch.org/memory_viz."""
    with open(path, "wb") as file:
        pickle.dump(snapshot(plan), file, protocol=4)


def _frames(role: str, unit: str) -> list[dict[str, Any]]:
    return [{"filename": "plan", "line": 0, "name": f"{role} ({unit or 'all units'})"}]


def _entry(action: str, address: int, size: int, role: str, unit: str, time: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time * STEP_US,
        "frames": _frames(role, unit),
        "category": role if role != "allocator" else "unknown",
    }


def _segment(address: int, size: int, role: str) -> dict[str, Any]:
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": _frames(role, ""),
    }
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }
