"""``fsdpc.memory_report``: planned memory beside the memory that a sharded model uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdpc import _C
from fsdpc._comm.nccl import held_bytes
from fsdpc._engine.marks import hosts
from fsdpc.optim._chunks import AVERAGE
from fsdpc.optim._host import HostStore
from fsdpc.plan.ledger import COMM_BYTES, CONTEXT_BYTES
from fsdpc.plan.noticed import process_bytes
from fsdpc.plan.rows import ENGINE, SLOTS, Line
from fsdpc.plan.show import beside, size
from fsdpc.plan.sources.held import (
    cache_line,
    engine_lines,
    gpu_of,
    nbytes,
    state_tensors,
    states_of,
)

MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1}


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank by role. ``str()`` gives a table. ``equal``: all bytes are as planned."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not any(line.differs for line in self.lines)

    def __str__(self) -> str:
        return "\n".join([beside("Memory of this rank", self.lines), *self.notes])


def memory_report(model: nn.Module, optimizer: Any = None) -> MemoryReport:
    """Return a report that compares planned memory with the memory of this rank, and marks
    differences. Local.

    If ``optimizer`` is given, the report includes the optimizer's states. The planned bytes of
    states are known only for some classes of optimizers. The notes give the memory of the process,
    and, on a GPU, of torch's cache. ``StateError``: no forward has run yet, so that the slots do
    not exist. ``TypeError``: ``model`` is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_report expects an nn.Module but got {type(model).__name__}")
    trees = [m._tree for m in hosts(model) if m._tree is not None]
    if not trees:
        raise _C.StateError(
            f"memory_report: {type(model).__name__} has no gather slots yet; run one forward first"
        )
    lines = engine_lines(trees)
    lines.append(Line("buffers", None, nbytes(model.buffers())))
    if optimizer is not None:
        lines.append(_states(optimizer))
    lines += _of_the_driver(trees, {line.role: line.actual for line in lines})
    return MemoryReport(tuple(lines), tuple(_notes(trees)))


def _of_the_driver(trees: Sequence[Any], held: dict[str, int]) -> Iterator[Line]:
    """Yield the measured GPU memory of NCCL and of the driver, beside what plans assume."""
    units = [unit for tree in trees for unit in tree.units]
    comms = {id(comm): comm for unit in units for comm in unit.groups.comms}.values()
    devices = {comm.device for comm in comms if comm.device is not None}
    if len(devices) != 1:
        return
    started = sum(held_bytes(comm) for comm in comms)
    assumed = sum(COMM_BYTES[min(comm.world, 3)] for comm in comms if comm.kind == "nccl")
    note = "NCCL, when it started; buffers that it makes later are in the next line"
    yield Line("communicators", assumed, started, note, assumed=True)
    device = devices.pop()
    free, total = _C.cuda_memory(device)
    known = started + sum(held[role] for role in SLOTS)
    if torch.cuda.is_available():
        known += torch.cuda.memory_reserved(device)
        known -= sum(tree.memory_stats()["coded_bytes"] for tree in trees)  # reserved, too
    else:  # the simulated GPU, whose driver counts all memory
        known += sum(held[role] for role in ENGINE if role not in SLOTS)
    note = "what the GPU has in use beside torch's cache and the lines above, by all processes"
    yield Line("device context", CONTEXT_BYTES, max(total - free - known, 0), note, assumed=True)


def _states(optimizer: Any) -> Line:
    store = getattr(optimizer, "_store", None)
    if store is not None:
        return _offloaded_states(optimizer, store)
    actual = states_of(optimizer)
    name = type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not optimizer.state:
        return Line("optimizer states", None, actual, f"{name} has not stepped yet")
    if name not in MOMENTS or any(
        g.get("amsgrad") or g.get("momentum") or g.get("centered") for g in optimizer.param_groups
    ):
        return Line("optimizer states", None, actual, name)
    moments = MOMENTS[name]
    steps = sum(4 for p in params if p in optimizer.state)
    planned = moments * nbytes(params) + steps
    return Line(
        "optimizer states",
        planned if params else None,
        actual,
        f"{name}: {moments} moments in the parameter's dtype",
    )


def _offloaded_states(optimizer: Any, store: Any) -> Line:
    """Return the line of an optimizer with offloaded states: its buffers, and the states that are
    not offloaded.
    """
    planned = actual = sum(len(buffer) for buffer in store.buffers)
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = dict.get(optimizer.state, param, {})
            beside = optimizer._beside(param)
            stays = not store.takes(param) and param not in store.mapped
            here = [v for k, v in state.items() if k in beside or stays and k != AVERAGE]
            average = nbytes(state_tensors([state[AVERAGE]])) if AVERAGE in state else 0
            actual += nbytes(state_tensors(here)) + average
            planned += sum(count for name, count in beside.items() if name in state) + average
            if state and stays:
                planned += sum(extent.nbytes for extent in optimizer._extents(group, param))
    if isinstance(store, HostStore):
        note = f"{size(store.host_bytes)} more in pinned host memory, which pass through buffers"
    else:
        note = f"buffers; {size(_C.disk_info(store.disk)['bytes'])} of states on a disk"
    return Line("optimizer states", planned, actual, note)


def _notes(trees: Sequence[Any]) -> Iterator[str]:
    yield "gather slots on shared memory are counted once per host, not per rank"
    figures = process_bytes()
    if figures:
        yield (
            f"process: {size(figures['Pss_Anon'])} of its own, {size(figures['Pss_Shmem'])} its "
            "part of memory shared with other ranks"
        )
    for device in {gpu_of(tree) for tree in trees} - {None}:
        yield cache_line(device)
