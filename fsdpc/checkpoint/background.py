"""Saves in the background of training: a snapshot in host memory, and a thread that writes it.

The memory of the snapshot is kept for the next save. Its pages are then already allocated, so the
next copy runs at the speed of memory.
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
        """Return whether the save has ended on this rank, complete or failed. Local."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable. Local, but no rank returns before all ranks have
        written. Raises ``CheckpointError`` if the save has failed, and ``TimeoutError`` if it is
        still running after ``timeout`` seconds.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"checkpoint {self.target} is still being written")
        self._raise()

    def join(self) -> None:
        """Let torch's current stream wait for the copies of the snapshot; the host does not wait.
        This happens by itself before an optimizer step. Call this method before any other write to
        parameters on a GPU. Local.
        """
        self._landing.join()

    def _raise(self) -> None:
        if self._error is not None:
            self._raised = True
            raise CheckpointError(f"in the background: {self._error}") from self._error


def make_room(when_busy: WhenBusy, group: dist.ProcessGroup | None) -> None:
    """Make sure, before a new save, that no save is running in the background. With ``when_busy``
    "wait", wait for the running save. With "raise", refuse the new save (``CheckpointError``).
    Collective over ``group``. Raises ``ValueError`` if ``when_busy`` has another value.
    """
    if when_busy not in ("wait", "raise"):
        raise ValueError(f"when_busy must be 'wait' or 'raise', not {when_busy!r}")
    if when_busy == "raise":
        refuse_running(ranks_of(group, beside=True))
    finish_running()


def refuse_running(beside: Ranks) -> None:
    """Raise ``CheckpointError`` on every rank if a save in the background is still running on at
    least one rank, even if it has ended on others. Collective over ``beside``, whose communicator
    must not be in use by a save.
    """
    with beside.step("saving another checkpoint"):
        for handle in _running:
            if not handle.done:
                raise CheckpointError(f"checkpoint {handle.target} is still being written")


def finish_running() -> None:
    """Wait for the save in the background, if there is one. If the save has failed and no call has
    raised its error yet, raise the error. Local.
    """
    for handle in list(_running):
        handle._done.wait()
        with contextlib.suppress(ValueError):  # another thread has removed the handle
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
    """Copy the values that this rank writes, start a thread that writes them, and return. After the
    write the thread calls ``after``, which moves the checkpoint to ``target`` (default: the plan's
    target). Collective over ``ranks``. Raises ``CheckpointError`` if a rank has no memory for the
    copy. A copy from a GPU may still be running when the function returns: the thread waits for the
    copy, and so does the stream of the next optimizer step.
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
        landing.join()  # after this the sources of the copies may be freed
        landing.give_back()
        raise
    landing.await_write()
    handle = SaveHandle(plan.target if target is None else target, landing)

    def reach(name: str) -> None:
        if name == "create":  # here an error of one rank is raised on all ranks
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

    # The thread is not a daemon, so the interpreter waits for the thread at exit.
    thread = threading.Thread(target=write, name=f"fsdpc checkpoint {plan.target.name}")
    _running.append(handle)
    thread.start()
    return handle


def _forget_in_child() -> None:
    """Mark running saves as failed in a forked child (a data loader's worker): the child does not
    have the thread that writes, and would wait for ever.
    """
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
    """Wait for running saves before the interpreter shuts down thread pools, which saves use."""
    for handle in _running:
        handle._done.wait()


# ``concurrent.futures.thread`` registers its exit function at its import. Functions that are
# registered later run first, so that module is imported before ``_wait_at_exit`` is registered.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]


def _finish_first(error: BaseException) -> None:
    """Wait for running saves before the uncaught exception ``error`` aborts all communicators, also
    those that saves use. Ctrl-C ends the wait.
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
    """Print at exit the errors of saves that no call has raised. Threads have ended by then."""
    for handle in _running:
        if handle._error is not None and not handle._raised:
            print(f"fsdpc: in the background: {handle._error}", file=sys.stderr, flush=True)
