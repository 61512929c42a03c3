"""Allocations that fail: where they are noticed, so that each gets a report.

An exception means that memory is exhausted if ``is_shortage``. Wrapping, lazy initialisation and
forwards pass theirs to ``explain``. Backwards and optimizer steps run in torch, so torch's function
for the first and the ``step`` of optimizers get a handler when the first unit is made; a handler
costs nothing until something is raised. What is raised elsewhere gets its report when the exception
ends the program.

The report (``fsdpc/plan/shortage.py``) is loaded by name, and only then. A reserve of address space
is freed before, so that a report can be made under an exhausted limit.
"""

from __future__ import annotations

import errno
import functools
import importlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsdpc import _C
from fsdpc._comm.bootstrap import ON_UNCAUGHT
from fsdpc._engine.companions import register
from fsdpc._engine.tree import ON_TREE, PROCESS
from fsdpc._torch import PROFILE_STEP, RUN_BACKWARD

RESERVE_BYTES = 16 << 20  # of address space: no page of it is touched
REPORT = "fsdpc.plan.shortage"
HEAD = "fsdpc: out of memory"  # how the note begins
STEP = "an optimizer's step"
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")

# For each tree the host memory that the program used beside the tree when it was made.
PROGRAM_BYTES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

_reserve: list[mmap.mmap] = []
_watching: list[bool] = []


def is_shortage(error: BaseException) -> bool:
    """Whether an allocation has failed, on the host or on a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, (_C.CommError, _C.StateError)):
        return False  # its text may quote another rank's error
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def explain(
    error: BaseException,
    phase: str,
    *,
    name: str = "",
    host: Any = None,
    placed: Sequence[tuple[int, Any]] = (),
    optimizer: Any = None,
) -> None:
    """Add the report to ``error`` as a note, once, if an allocation has failed. Local; raises
    nothing.

    ``phase``: what the program did; ``name``: the unit's, or ``host``: the unit's host, if one is
    known; ``placed``: (depth, unit) of a tree that was being made; ``optimizer``: the optimizer
    that stepped.
    """
    if not is_shortage(error) or any(n.startswith(HEAD) for n in getattr(error, "__notes__", ())):
        return
    if host is not None:
        name = host._name if host._unit is None else host._unit.name or "(root)"
    while _reserve:
        _reserve.pop().close()
    try:
        make = importlib.import_module(REPORT).report
        text = make(error, phase, name, placed, optimizer)
    except Exception as failure:  # no memory, for example: the first error counts
        text = (
            f"{HEAD} in {phase}{f' of unit {name}' if name else ''} "
            f"(no report could be made: {type(failure).__name__}: {failure})"
        )
    try:
        error.add_note(text)
    except Exception:
        return


def watch() -> None:
    """Called when a unit is made: from then on torch's backward and optimizers' steps report
    shortages, and the reserve exists. Local.
    """
    refill()
    if _watching:
        return
    _watching.append(True)
    backward = getattr(torch.autograd, RUN_BACKWARD)
    setattr(torch.autograd, RUN_BACKWARD, _handled(backward, "backward"))
    hooked = getattr(torch.optim.Optimizer, PROFILE_STEP)

    def hook(step: Callable[..., Any]) -> Callable[..., Any]:
        return _handled(hooked(step), STEP)

    setattr(torch.optim.Optimizer, PROFILE_STEP, staticmethod(hook))
    for kind in _subclasses(torch.optim.Optimizer):
        own = kind.__dict__.get("step")
        if getattr(own, "hooked", False):  # an optimizer of this class exists already
            kind.step = _handled(own, STEP)
    ON_UNCAUGHT.append(lambda error: explain(error, "the program, outside of the model's passes"))
    ON_TREE.append(_note_program)


def _note_program(tree: Any) -> None:
    own = ("master_bytes", "grad_bytes", "gather_bytes", "reduce_bytes")
    stats = tree.memory_stats()
    PROGRAM_BYTES[tree] = max(private_bytes() - sum(stats[key] for key in own), 0)


def process_bytes() -> dict[str, int]:
    """The process's part of the host's memory: ``Pss_Anon`` its own, ``Pss_Shmem`` its share of
    what ranks share. Empty where the kernel gives no figure.
    """
    try:
        with open("/proc/self/smaps_rollup") as file:
            rows = [line.split() for line in file if line.startswith(("Pss_Anon", "Pss_Shmem"))]
    except OSError:
        return {}
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in rows}


def private_bytes() -> int:
    """The sum of ``process_bytes`` while no other process has touched the memory that ranks share,
    0 where the kernel gives no figure. It takes some 0.1 ms, ``process_bytes`` 3 to 30.
    """
    if os.getpid() != PROCESS:  # forked: the parent has a part of these pages
        return sum(process_bytes().values())
    try:
        with open("/proc/self/status") as file:
            rows = [line.split() for line in file if line.startswith(("RssAnon", "RssShmem"))]
    except OSError:
        return 0
    return sum(int(kib) * 1024 for _, kib, *_ in rows)


def refill() -> None:
    """Make the reserve, if there is none yet and there is memory for it."""
    if not _reserve:
        try:
            _reserve.append(mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE))
        except (OSError, ValueError):
            return


def _handled(run: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @functools.wraps(run)
    def handled(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            explain(error, phase, optimizer=args[0] if phase == STEP and args else None)
            raise

    return handled


def _subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


register("explain", explain)
register("watch", watch)
