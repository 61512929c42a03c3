"""Saves that go on while training does: a snapshot in host memory, and a thread that writes it.

The snapshot's memory is kept for the next save, so that its pages are there already: copying runs
at the memory's speed then.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fsdpc.checkpoint import priority
from fsdpc.checkpoint.entries import NO_SPANS, Entry
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import Layout
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.saving import Advance, Plan, write_plan

_ALIGNED = 64

_staging = torch.empty(0, dtype=torch.uint8, device="cpu")
_running: list[SaveHandle] = []


class SaveHandle:
    """A save in the background."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._raised = False

    @property
    def done(self) -> bool:
        """True once the checkpoint is there, or has failed on this rank. Local."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable. Local, but it ends on no rank before all of them
        have written. ``CheckpointError``: the save has failed. ``TimeoutError``.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"checkpoint {self.target} is still being written")
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            self._raised = True
            raise CheckpointError(f"in the background: {self._error}") from self._error


def finish_running(*, refuse: bool = False) -> None:
    """Wait for the save in the background, if there is one; its error is raised here once. Local.
    ``CheckpointError``: with ``refuse``, one is still running.
    """
    while _running:
        handle = _running[0]
        if refuse and not handle.done:
            raise CheckpointError(f"checkpoint {handle.target} is still being written")
        handle._done.wait()
        _running.remove(handle)
        if not handle._raised:
            handle._raise()


def start(
    plan: Plan,
    ranks: Ranks,
    *,
    advance: Advance | None = None,
    failpoint: Callable[[str], object] | None = None,
    after: Callable[[], object] | None = None,
) -> SaveHandle:
    """Copy what this rank writes and return; a thread writes it, then calls ``after``. Collective
    over ``ranks``. ``CheckpointError``: a rank has no memory for the copy.
    """
    with ranks.step(f"copying checkpoint {plan.target}"):
        plan.sets = _snapshot(plan.sets)
    handle = SaveHandle(plan.target)

    def write() -> None:
        priority.lower()
        try:
            write_plan(plan, ranks, advance=advance, failpoint=failpoint)
            if after is not None:
                after()
        except BaseException as error:  # noqa: BLE001  it is raised at the next call
            handle._error = error
        finally:
            handle._done.set()

    # Not a daemon: the interpreter waits for it at exit.
    thread = threading.Thread(target=write, name=f"fsdpc checkpoint {plan.target.name}")
    _running.append(handle)
    thread.start()
    return handle


@atexit.register
def _report() -> None:
    """At exit, when the interpreter has waited for the threads: errors that no call has raised."""
    for handle in _running:
        if handle._error is not None and not handle._raised:
            print(f"fsdpc: in the background: {handle._error}", file=sys.stderr, flush=True)


def _snapshot(sets: list[tuple[Layout, list[Entry]]]) -> list[tuple[Layout, list[Entry]]]:
    """The sets with entries whose memory is a copy in the staging, of the written spans only."""
    global _staging
    wanted = [
        [(entry, entry.own(index)) for index, entry in enumerate(entries)] for _, entries in sets
    ]
    total = sum(_room(entry, spans) for some in wanted for entry, spans in some)
    if total > len(_staging):
        _staging = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one goes first
        _staging = torch.empty(total, dtype=torch.uint8, device="cpu")
    copied, at = [], 0
    for (layout, _), some in zip(sets, wanted, strict=True):
        entries = []
        for entry, spans in some:
            room = _room(entry, spans)
            entries.append(_copied(entry, spans, _staging[at : at + room]))
            at += room
        copied.append((layout, entries))
    return copied


def _room(entry: Entry, spans: np.ndarray) -> int:
    nbytes = int(spans[:, 2].sum()) * entry.dtype.itemsize
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _copied(entry: Entry, spans: np.ndarray, room: torch.Tensor) -> Entry:
    count = int(spans[:, 2].sum())
    memory = room[: count * entry.dtype.itemsize].view(entry.dtype)
    own = spans.copy() if count else NO_SPANS
    at = 0
    for row in own:
        memory[at : at + row[2]].copy_(entry.memory[row[1] : row[1] + row[2]])
        row[1] = at
        at += int(row[2])
    return Entry(entry.name, entry.shape, entry.dtype, memory, own)
