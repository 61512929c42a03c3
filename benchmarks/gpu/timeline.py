"""Timelines of a GPU from torch's profiler: the work on each stream, and the waits of the host.

On the CPU (in dry runs) torch's outermost operators take the place of kernels, and threads take the
place of streams, so that the same code runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from gpu.machine import Device

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
JOB = "fsdpc: the profiled job"
WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "CtxSynchronize")


@dataclass(frozen=True)
class Interval:
    """A kernel, copy or fill on a stream; times are in microseconds."""

    name: str
    stream: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The work on the device and the waits of the host in one profiled call."""

    work: list[Interval]  # sorted by begin
    waits: int  # the number of calls in which the host waits for the device


def record(job: Callable[[], object], device: Device) -> Timeline:
    """Profile `job` once, with an idle device before and after the job."""
    device.synchronize()
    activities = [ProfilerActivity.CPU]
    if not device.dry:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        with record_function(JOB):
            job()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return read(events, device.dry)


def read(events: list[dict], dry: bool) -> Timeline:
    """Make a timeline from a Chrome trace. Waits of the host after the job do not count."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    waits = sum(
        any(word in event["name"] for word in WAITS)
        for event in within_job(timed)
        if event.get("cat") in CALLS
    )
    if dry:
        found = outermost([event for event in timed if event.get("cat") == "cpu_op"])
    else:
        found = [event for event in timed if event.get("cat") in WORK]
    work = [
        Interval(
            event["name"],
            int(event.get("args", {}).get("stream", event["tid"])),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
        )
        for event in found
    ]
    return Timeline(sorted(work, key=lambda one: one.begin), waits)


def within_job(events: list[dict]) -> list[dict]:
    """Return the events of all threads that begin while the host runs the job."""
    job = next(e for e in events if e["name"] == JOB and e.get("cat") == "user_annotation")
    first = float(job["ts"])
    last = first + float(job["dur"])
    return [event for event in events if first <= float(event["ts"]) < last]


def outermost(events: list[dict]) -> list[dict]:
    """Return the operators that were not called by another operator of the same thread."""
    found: list[dict] = []
    ends: dict[object, float] = {}
    for event in sorted(events, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        if float(event["ts"]) >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = float(event["ts"]) + float(event["dur"])
            found.append(event)
    return found


def busy(intervals: list[Interval]) -> float:
    """Return the microseconds during which at least one of the intervals runs."""
    total, until = 0.0, float("-inf")
    for one in sorted(intervals, key=lambda one: one.begin):
        if one.end > until:
            total += one.end - max(one.begin, until)
            until = one.end
    return total


def hidden(movers: list[Interval], others: list[Interval]) -> float | None:
    """Return the share of the movers' busy time in which others run, or None without movers."""
    moving = busy(movers)
    if moving == 0:
        return None
    return (moving + busy(others) - busy([*movers, *others])) / moving
