"""Offloading to host memory of the tensors that autograd saves for backward.

The forward queues a copy of each saved tensor to pinned memory on a lane, which is a stream for
copies (``_companions/lane.py``). The tensor stays on the GPU until torch's stream waits for the
copy, a few tensors later, so that copies overlap with the forward. After this wait the memory of
the tensor is free for other tensors. When backward needs a tensor, the copy of this tensor back to
the GPU is usually queued already. Backward has queued it when it used tensors that were saved
later.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fsdpc._companions.lane import Lane, ordinal_of, pinned
from fsdpc._companions.saved import AHEAD, HELD, MIN_BYTES, pinned_bytes
from fsdpc.activations.compression import Table, View, flat, unpack

_said: list[str] = []  # not empty if this process has warned already


@dataclass
class Offloaded:
    """The counts of one ``offload``.

    ``tensors`` and ``nbytes`` count the copies to the host; a tensor that is saved several times
    counts once. ``no_room`` counts the tensors that stayed on the GPU because no pinned memory was
    left. ``resident`` counts the last tensors of the forward, which backward uses without a copy
    back. ``ahead`` counts the copies back that were queued before backward needed the tensor, and
    ``late`` those that were queued only at that moment. ``pinned_bytes`` is the pinned memory of
    this process, which is kept for the next step.
    """

    tensors: int = 0
    nbytes: int = 0
    no_room: int = 0
    resident: int = 0
    ahead: int = 0
    late: int = 0
    pinned_bytes: int = 0


@contextmanager
def offload(
    model: nn.Module, *, min_bytes: int = MIN_BYTES, max_pinned_bytes: int | None = None
) -> Iterator[Offloaded]:
    """Offload what autograd saves for backward while ``model`` runs in the ``with`` block.

    Tensors of at least ``min_bytes`` on the model's GPU are copied to pinned host memory on a
    separate stream while the forward runs, and back while the backward runs. The values are equal
    to the bit. A tensor that is saved several times is copied once. These tensors stay on the GPU:
    parameters (also gathered ones), buffers, tensors with gaps between their elements, the last few
    tensors, and tensors that do not fit in ``max_pinned_bytes`` of pinned memory (default: no
    bound). The pinned memory is kept for the next step. The host waits only when pinned memory is
    allocated. Yields the counts of what was copied.

    If the model computes on the CPU, saved tensors are in host memory already: nothing is copied,
    no hook is set, and one warning per process says so. Local. Raises ``NotImplementedError`` for
    parameters on another type of device or on several GPUs, ``StateError`` if a CUDA graph captures
    the forward, and ``RuntimeError`` in backward if a saved tensor was changed in place.
    """
    ordinals = set()
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "cuda", "meta"):
            raise NotImplementedError(
                f"fsdpc.activations.offload() copies nothing from {param.device}, where parameter "
                f"{name!r} is: use fsdpc.activations.checkpoint()"
            )
        ordinals.add(ordinal_of(param))
    gpus = ordinals - {None}
    if len(gpus) > 1:
        raise NotImplementedError(
            f"parameters on several GPUs ({gpus}): offload each part by itself"
        )
    if not gpus:
        if not _said:
            _said.append("said")
            warnings.warn(
                "fsdpc.activations.offload(): the model is in host memory, where offloaded "
                "activations would be: nothing is copied. compress() and checkpoint() save memory "
                "there",
                stacklevel=3,
            )
        yield Offloaded()
        return
    table = _Table(model, _pool_of(gpus.pop()), min_bytes, max_pinned_bytes)
    try:
        with saved_tensors_hooks(table.pack, unpack):
            yield table.counts
    finally:
        table.end_forward()


class _Pool:
    """The lane of one GPU, and its pinned buffers, which are kept for reuse. The copies on a lane
    run in order, so a buffer that was given back can be filled again without a wait.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.lane = Lane(ordinal)
        self.free: dict[int, list[Tensor]] = {}
        self.nbytes = 0

    def take(self, nbytes: int, most: int | None) -> Tensor | None:
        """Return a pinned buffer for ``nbytes`` bytes, or None if there is no room."""
        size = pinned_bytes(nbytes)
        if self.free.get(size):
            return self.free[size].pop()
        if most is not None and self.nbytes + size > most:
            return None
        try:
            buffer = pinned(self.ordinal, size)
        except MemoryError:
            return None
        self.nbytes += size
        return buffer

    def give(self, buffer: Tensor) -> None:
        self.free.setdefault(len(buffer), []).append(buffer)


@cache
def _pool_of(ordinal: int) -> _Pool:
    return _Pool(ordinal)


class _Away:
    """The elements of an offloaded tensor, in pinned memory and at times also on the GPU."""

    def __init__(self, table: _Table, number: int, source: Tensor, buffer: Tensor) -> None:
        self.table = table
        self.number = number  # position in the order in which autograd saved the tensors
        self.buffer = buffer
        self.like = torch.empty(0, dtype=source.dtype, device=source.device)
        self.numel = source.numel()
        self.version = source._version
        self.changed = False
        # The number of saved views, and the number of these that backward has not used yet.
        self.uses = self.left = 0
        self.here: Tensor | None = None
        self.mark = 0  # the lane's mark after the copy that fills `here`; 0 if there is no copy
        self.was_needed = False

    def fetch(self) -> None:
        lane = self.table.pool.lane
        self.here = self.like.new_empty(self.numel)
        lane.begin()  # wait for earlier work of torch's stream, which may use this memory
        lane.back(self.here.data_ptr(), self.buffer.data_ptr(), self.nbytes)
        self.mark = lane.mark()

    @property
    def nbytes(self) -> int:
        return self.numel * self.like.element_size()

    def unpack(self) -> Tensor:
        """Return the values, and queue the copies back of the tensors that backward needs next."""
        values = self.values()
        self.table.fetch_before(self.number)
        return values

    def values(self) -> Tensor:
        """Return the values on the GPU, after torch's current stream has waited for their copy."""
        if self.here is None:
            self.table.counts.late += 1
            self.fetch()
        here = self.here
        assert here is not None
        if self.mark:
            self.table.pool.lane.join(self.mark)
        elif here._version != self.version:
            self.changed = True
        if self.changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation, while it was being offloaded: {self.numel} elements of "
                f"{self.like.dtype}"
            )
        self.left -= 1
        if self.left <= 0:
            self.here, self.mark, self.left = None, 0, self.uses
            self.was_needed = True
        return here

    def __del__(self) -> None:
        if self.here is not None and self.mark:
            self.table.pool.lane.join(self.mark)  # the copy must end before the memory is reused
        self.table.pool.give(self.buffer)


class _View(View):
    """A saved tensor whose elements are offloaded."""

    def __init__(self, held: _Away, shape: torch.Size, strides: tuple[int, ...]) -> None:
        super().__init__(held, shape, strides)
        held.uses += 1
        held.left += 1


class _Table(Table):
    """The tensors that were saved in one forward."""

    view = _View

    def __init__(
        self, model: nn.Module, pool: _Pool, min_bytes: int, max_pinned_bytes: int | None
    ) -> None:
        super().__init__(model, max(1, min_bytes))
        self.pool = pool
        self.most = max_pinned_bytes
        self.counts = Offloaded()
        self.order: list[Any] = []
        self.held: deque[tuple[int, Tensor, Any]] = deque()

    def _is_wanted(self, tensor: Tensor) -> bool:
        wanted = super()._is_wanted(tensor) and not tensor.is_conj()
        return wanted and ordinal_of(tensor) == self.pool.ordinal

    def _hold(self, tensor: Tensor, dense: bool) -> _Away | None:
        if not dense:
            return None
        source = flat(tensor, dense)
        buffer = self.pool.take(source.numel() * source.element_size(), self.most)
        self.counts.pinned_bytes = self.pool.nbytes
        if buffer is None:
            self.counts.no_room += 1
            return None
        lane = self.pool.lane
        away = _Away(self, len(self.order), source, buffer)
        lane.begin()
        lane.out(buffer.data_ptr(), source.data_ptr(), away.nbytes)
        self.order.append(weakref.ref(away))
        self.held.append((lane.mark(), source, self.order[-1]))
        self.counts.tensors += 1
        self.counts.nbytes += away.nbytes
        if len(self.held) > HELD:
            self._let_go()
        return away

    def _let_go(self) -> None:
        """Let torch's stream wait for the copy of the oldest held tensor, then drop the tensor."""
        mark, source, entry = self.held.popleft()
        self.pool.lane.join(mark)
        away = entry()
        if away is not None and away.version != source._version:
            away.changed = True

    def end_forward(self) -> None:
        """Keep the last tensors on the GPU: backward needs them first."""
        while self.held:
            _, source, entry = self.held[0]
            self._let_go()
            away = entry()
            if away is not None:
                away.here = source
                self.counts.resident += 1

    def fetch_before(self, number: int) -> None:
        """Queue the copies back of the tensors that were saved just before tensor ``number``."""
        for at in range(number - 1, max(-1, number - 1 - AHEAD), -1):
            away = self.order[at]()
            if away is not None and away.here is None and not away.was_needed:
                self.counts.ahead += 1
                away.fetch()
