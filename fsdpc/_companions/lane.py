"""Copies between a GPU and pinned host memory on a separate stream.

See csrc/device/lane.h for the order of calls. The caller keeps the source and the destination of a
copy alive until the stream that may next use this memory has joined the copy's mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpc import _C
from fsdpc._engine.device import engine_device
from fsdpc._engine.interop import over


def ordinal_of(tensor: Tensor) -> int | None:
    """Return the number of the GPU that has a tensor's memory; None for host memory. With a
    simulated driver, CPU tensors count as memory of the driver's GPU 0. Local.
    """
    return engine_device(tensor.device) if tensor.device.type in ("cpu", "cuda") else None


def pinned(ordinal: int, nbytes: int) -> Tensor:
    """Return zeroed pinned memory as a uint8 CPU tensor. Freeing the memory is a host sync.

    ``MemoryError``: there is not enough memory.
    """
    return over(_C.pinned_new(ordinal, nbytes), torch.uint8)


class Lane:
    """A stream of one GPU for copies that run beside torch's current stream."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._lane = _C.lane_new(ordinal)

    def begin(self) -> None:
        """Let later copies wait for all work that is now queued on torch's current stream."""
        _C.lane_begin(self._lane)

    def out(self, host: int, source: int, nbytes: int) -> None:
        """Queue a copy from an address on the GPU to an address in pinned memory."""
        _C.lane_out(self._lane, host, source, nbytes)

    def back(self, target: int, host: int, nbytes: int) -> None:
        """Queue a copy from an address in pinned memory to an address on the GPU."""
        _C.lane_in(self._lane, target, host, nbytes)

    def mark(self) -> int:
        """Return a number that stands for all copies queued so far."""
        return _C.lane_mark(self._lane)

    def join(self, mark: int) -> None:
        """Let later work of torch's current stream wait for the copies before ``mark``."""
        _C.lane_join(self._lane, mark)

    def finish(self, mark: int, what: str = "copies to pinned host memory") -> None:
        """Block the host until the copies before ``mark`` are done.

        ``TimeoutError`` after ``FSDPC_TIMEOUT`` seconds.
        """
        _C.lane_finish(self._lane, mark, what)

    def counts(self) -> dict[str, int]:
        """Return counts of copies, bytes and waits; see ``_C.lane_counts``."""
        return _C.lane_counts(self._lane)


# --- copies of what an optimizer writes next ------------------------------------------------------

_before_write: list[Callable[[], object]] = []
_hooks: list[Any] = []  # at most one hook, which is never removed


def call_before_write(function: Callable[[], object]) -> None:
    """Call ``function`` once, before the next step of any optimizer. Local."""
    _before_write.append(function)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda *_: before_write()))


def before_write() -> None:
    """Call the functions that were passed to ``call_before_write`` and were not called yet. Local.

    Code that writes parameters without ``Optimizer.step`` must call this function first.
    """
    while _before_write:
        _before_write.pop()()
