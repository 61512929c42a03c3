"""Copies between a GPU and pinned host memory on a stream of their own.

See csrc/device/lane.h for the order of calls. A lane's user keeps the memory of both ends of a
copy until the stream that may use that memory next has joined the copy's mark.
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
    """The GPU that a tensor's memory belongs to; None for host memory. With a simulated driver CPU
    tensors count as the memory of its GPU 0. Local.
    """
    return engine_device(tensor.device) if tensor.device.type in ("cpu", "cuda") else None


def pinned(ordinal: int, nbytes: int) -> Tensor:
    """Zeroed pinned memory: a CPU tensor of uint8, or ``MemoryError``. Freeing is a host sync."""
    return over(_C.pinned_new(ordinal, nbytes), torch.uint8)


class Lane:
    """A stream of one GPU for copies, beside torch's current stream."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._lane = _C.lane_new(ordinal)

    def begin(self) -> None:
        """Later copies come behind all work of torch's current stream so far."""
        _C.lane_begin(self._lane)

    def out(self, host: int, source: int, nbytes: int) -> None:
        """Queue a copy from an address on the GPU to one in pinned memory."""
        _C.lane_out(self._lane, host, source, nbytes)

    def back(self, target: int, host: int, nbytes: int) -> None:
        """Queue a copy from an address in pinned memory to one on the GPU."""
        _C.lane_in(self._lane, target, host, nbytes)

    def mark(self) -> int:
        """The number that stands for all copies so far."""
        return _C.lane_mark(self._lane)

    def join(self, mark: int) -> None:
        """Later work of torch's current stream comes behind the mark."""
        _C.lane_join(self._lane, mark)

    def finish(self, mark: int, what: str = "copies to pinned host memory") -> None:
        """Wait on the host for the mark. ``TimeoutError`` after ``FSDPC_TIMEOUT`` seconds."""
        _C.lane_finish(self._lane, mark, what)

    def counts(self) -> dict[str, int]:
        """What was copied, and who waited how often; see ``_C.lane_counts``."""
        return _C.lane_counts(self._lane)


# --- copies of what an optimizer writes next ------------------------------------------------------

_before_write: list[Callable[[], object]] = []
_hooks: list[Any] = []  # at most one; torch refuses a removal while it calls the hooks of a step


def call_before_write(function: Callable[[], object]) -> None:
    """Call ``function`` once, before the next step of any optimizer. Local."""
    _before_write.append(function)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda *_: before_write()))


def before_write() -> None:
    """Call what ``call_before_write`` was given; for steps outside ``Optimizer.step``. Local."""
    while _before_write:
        _before_write.pop()()
