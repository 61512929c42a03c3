"""A timeline in the format of ``torch.cuda.memory._dump_snapshot``, for torch's own memory viewer.

Time in the viewer is the position in the timeline. The bytes of a role are freed and allocated
again at each point where they change. Frames name the role and the unit, and each role is a
category, so that the viewer can colour by role. The viewer reads pickles of protocol 4 at most, and
needs an entry with the category ``unknown``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpc.plan.rows import Key, Point

BASE = 1 << 40
ROOM = 1 << 44  # distance between the addresses of two roles; no role has more bytes
STEP_US = 1000


_NOTHING = ("alloc", "free_requested", "free_completed")  # make an ``unknown`` block and free it


def snapshot(points: Sequence[Point], kept: Mapping[Key, int]) -> dict[str, Any]:
    """Return the snapshot of a timeline as plain values, with the trace of one device. ``kept``:
    the bytes of each role that the viewer shows as allocated segments.
    """
    known = ("other", "")
    trace = [_entry(action, BASE - ROOM, 512, known, "", 0) for action in _NOTHING]
    live: dict[Key, int] = {}
    keys = list(dict.fromkeys(key for point in points for key in (*point.live, *kept)))
    address = {key: BASE + ROOM * i for i, key in enumerate(keys)}
    for time, point in enumerate(points):
        unit, now = point.unit, point.live
        changed = [k for k in keys if live.get(k, 0) != now.get(k, 0)]
        for key in changed:  # free first, so that the trace's peak is that of the points
            for action in ("free_requested", "free_completed") if live.get(key, 0) else ():
                trace.append(_entry(action, address[key], live[key], key, unit, time))
        for key in changed:
            live[key] = now.get(key, 0)
            if live[key]:
                trace.append(_entry("alloc", address[key], live[key], key, unit, time))
    return {
        "segments": [_segment(address[key], size, key) for key, size in kept.items() if size],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def write(path: str, found: dict[str, Any]) -> None:
    """Write a snapshot, which pytorch.org/memory_viz can show."""
    with open(path, "wb") as file:
        pickle.dump(found, file, protocol=4)


def _frames(key: Key, unit: str) -> list[dict[str, Any]]:
    role, own = key
    return [{"filename": "fsdpc", "line": 0, "name": f"{role} ({own or unit or 'all units'})"}]


def _entry(action: str, address: int, size: int, key: Key, unit: str, time: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time * STEP_US,
        "frames": _frames(key, unit),
        "category": "unknown" if key[0] in ("allocator", "other") else key[0],
    }


def _segment(address: int, size: int, key: Key) -> dict[str, Any]:
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": _frames(key, ""),
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
