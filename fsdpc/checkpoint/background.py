"""Saves that go on while training does: a snapshot in host memory, and a thread that writes it.

The snapshot's memory is kept for the next save, so that its pages are there already: copying runs
at the memory's speed then.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Literal

import torch.distributed as dist

from fsdpc._comm.bootstrap import ON_UNCAUGHT
from fsdpc.checkpoint import priority
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import PlannedSet
from fsdpc.checkpoint.ranks import Ranks, ranks_of
from fsdpc.checkpoint.saving import Advance, Plan, write_plan
from fsdpc.checkpoint.staging import Landing, snapshot
from fsdpc.checkpoint.storage import AnyPath
from fsdpc.checkpoint.unchanged import Unchanged

WhenBusy = Literal["wait", "raise"]

_running: list[SaveHandle] = []


class SaveHandle:
    """A save in the background."""

    def __init__(self, target: AnyPath, landing: Landing) -> None:
        self.target = target
        self._landing = landing
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._raised = False

    @property
    def done(self) -> bool:
        """True once the checkpoint is there, or the save has failed on this rank. Local."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable. Local, but no rank returns before all of them have
        written. ``CheckpointError``: the save has failed. ``TimeoutError``: it is still running.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"checkpoint {self.target} is still being written")
        self._raise()

    def join(self) -> None:
        """Order later work of torch's current stream behind the snapshot; the host does not wait.
        Optimizer steps do that themselves: call this before other writes to parameters on a GPU.
        Local.
        """
        self._landing.join()

    def _raise(self) -> None:
        if self._error is not None:
            self._raised = True
            raise CheckpointError(f"in the background: {self._error}") from self._error


def make_room(when_busy: WhenBusy, group: dist.ProcessGroup | None) -> None:
    """Before a new save, wait for the one in the background, or refuse the new one. Collective over
    ``group``. ``ValueError``: ``when_busy`` is no such word.
    """
    if when_busy not in ("wait", "raise"):
        raise ValueError(f"when_busy must be 'wait' or 'raise', not {when_busy!r}")
    if when_busy == "raise":
        refuse_running(ranks_of(group, beside=True))
    finish_running()


def refuse_running(beside: Ranks) -> None:
    """``CheckpointError`` on every rank if a save in the background is still running on one: one
    rank may be done while another is not. Collective over ``beside``, which no save uses.
    """
    with beside.step("saving another checkpoint"):
        for handle in _running:
            if not handle.done:
                raise CheckpointError(f"checkpoint {handle.target} is still being written")


def finish_running() -> None:
    """Wait for the save in the background, if there is one; its error is raised here once.
    Local.
    """
    for handle in list(_running):
        handle._done.wait()
        with contextlib.suppress(ValueError):  # another thread has waited for it, too
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
    target: AnyPath | None = None,
) -> SaveHandle:
    """Copy what this rank writes and return; a thread writes it, then calls ``after``, which takes
    it to ``target`` (default: the plan's). Collective over ``ranks``. ``CheckpointError``: a rank
    has no memory for the copy. From GPUs the copy may still be under way on return: the thread
    waits for it, and so does the stream of the next optimizer step.
    """
    landing = Landing(plan.params)
    unchanged = Unchanged(plan.target, ranks)
    unchanged.look(plan, f"saving checkpoint {plan.target}")
    try:
        with ranks.step(f"copying checkpoint {plan.target}"):
            tables = [table for each in plan.sets for table in each.tables]
            keep = [memory for each in plan.sets for memory in each.keep]
            copied, memory = snapshot(tables, keep, landing)
            left = iter(copied)
            plan.sets = [
                PlannedSet(each.layout, [next(left) for _ in each.tables], memory)
                for each in plan.sets
            ]
    except BaseException:
        landing.join()  # now the sources of these copies may be freed
        landing.give_back()
        raise
    landing.await_write()
    handle = SaveHandle(plan.target if target is None else target, landing)

    def reach(name: str) -> None:
        if name == "create":  # in the first step that ends well on all ranks or on none
            landing.finish()
        if failpoint is not None:
            failpoint(name)

    def write() -> None:
        priority.lower()
        try:
            write_plan(plan, ranks, advance=advance, failpoint=reach, unchanged=unchanged)
            if after is not None:
                after()
        except BaseException as error:  # noqa: BLE001  it is raised at the next call
            handle._error = error
        finally:
            landing.give_back()
            handle._done.set()

    # Not a daemon: the interpreter waits for it at exit.
    thread = threading.Thread(target=write, name=f"fsdpc checkpoint {plan.target.name}")
    _running.append(handle)
    thread.start()
    return handle


def _forget_in_child() -> None:
    """A forked child (a worker of a loader) has no thread that writes, and would wait for ever."""
    for handle in [handle for handle in _running if not handle.done]:
        handle._done = threading.Event()
        handle._error = CheckpointError(
            f"checkpoint {handle.target} is written by process {os.getppid()}, which has forked "
            "this one meanwhile: wait there"
        )
        handle._done.set()
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _wait_at_exit() -> None:
    """Wait for saves before thread pools refuse work: writing and storage drivers use pools."""
    for handle in _running:
        handle._done.wait()


importlib.import_module("concurrent.futures.thread")  # its exit function must run after ours
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]


def _finish_first(error: BaseException) -> None:
    """Wait for running saves before the exception aborts all communicators, those of saves too.
    Ctrl-C ends the wait.
    """
    for handle in [handle for handle in _running if not handle.done]:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        print(
            f"fsdpc: {what}: the save of {handle.target} in the background is finished first",
            file=sys.stderr,
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            handle._done.wait()


ON_UNCAUGHT.append(_finish_first)


@atexit.register
def _report() -> None:
    """Print errors that no call has raised, at exit, after the interpreter waited for threads."""
    for handle in _running:
        if handle._error is not None and not handle._raised:
            print(f"fsdpc: in the background: {handle._error}", file=sys.stderr, flush=True)
