"""Handlers that notice failed allocations, and add a report to the exception.

``is_shortage`` says whether an exception means that memory is exhausted. Wrapping, lazy
initialisation and forwards pass their exceptions to ``explain``. Backwards and optimizer steps run
in torch, so torch's backward function and the ``step`` of optimizers get a handler when the first
unit is made; a handler costs nothing until something is raised. An exception that is raised
elsewhere gets its report when it ends the program.

The module of the report (``fsdpc/plan/shortage.py``) is imported only when an allocation has
failed. Before the import, a reserve of address space is freed, so that the report has room
even if the limit of address space is reached.
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

RESERVE_BYTES = 16 << 20  # size of the reserve of address space, which is never written
REPORT = "fsdpc.plan.shortage"
HEAD = "fsdpc: out of memory"  # the first words of a report
STEP = "an optimizer's step"
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")

# For each tree: the program's host memory when the tree was made, without the tree's own memory.
PROGRAM_BYTES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

_reserve: list[mmap.mmap] = []
_watching: list[bool] = []


def is_shortage(error: BaseException) -> bool:
    """Return whether ``error`` means that an allocation failed, on the host or on a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, (_C.CommError, _C.StateError)):
        return False  # the text may quote another rank's error
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
    """If ``error`` means that an allocation failed, add the report to it as a note, once. Local;
    raises nothing.

    ``phase``: what the program did. ``name``: the name of the unit concerned, if it is known.
    ``host``: the ``UnitHost`` of the unit; if given, it gives the name. ``placed``: the pairs
    (depth, unit) of a tree that was being made. ``optimizer``: the optimizer that was in a step.
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
    except Exception as failure:  # for example no memory; ``error`` must not be hidden
        text = (
            f"{HEAD} in {phase}{f' of unit {name}' if name else ''} "
            f"(no report could be made: {type(failure).__name__}: {failure})"
        )
    try:
        error.add_note(text)
    except Exception:
        return


def watch() -> None:
    """Make the reserve, and install the handlers of torch's backward and of optimizers' steps if
    they are not there. Called whenever a unit is made. Local.
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
        if getattr(own, "hooked", False):  # torch has wrapped this step already
            kind.step = _handled(own, STEP)
    ON_UNCAUGHT.append(lambda error: explain(error, "the program, outside of the model's passes"))
    ON_TREE.append(_note_program)


def _note_program(tree: Any) -> None:
    own = ("master_bytes", "grad_bytes", "gather_bytes", "reduce_bytes")
    stats = tree.memory_stats()
    PROGRAM_BYTES[tree] = max(private_bytes() - sum(stats[key] for key in own), 0)


def process_bytes() -> dict[str, int]:
    """Return the host memory of this process: ``Pss_Anon`` is private memory, ``Pss_Shmem`` is the
    process's share of memory that ranks share. Empty if the kernel gives no figures.
    """
    try:
        with open("/proc/self/smaps_rollup") as file:
            rows = [line.split() for line in file if line.startswith(("Pss_Anon", "Pss_Shmem"))]
    except OSError:
        return {}
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in rows}


def private_bytes() -> int:
    """Return the sum of ``process_bytes``, or 0 if the kernel gives no figures. The result is exact
    only if no other process has touched the memory that ranks share. A call takes some 0.1 ms,
    while ``process_bytes`` takes 3 to 30 ms.
    """
    if os.getpid() != PROCESS:  # a forked process: Rss counts its parent's pages, too
        return sum(process_bytes().values())
    try:
        with open("/proc/self/status") as file:
            rows = [line.split() for line in file if line.startswith(("RssAnon", "RssShmem"))]
    except OSError:
        return 0
    return sum(int(kib) * 1024 for _, kib, *_ in rows)


def refill() -> None:
    """Make the reserve if there is none and memory allows it."""
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
