"""The gathered value of one parameter, made in Python, in memory that exists between a gather and
its release.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpc._torch import preserved_versions


class Gathered:
    """What all ranks sent of one parameter, equally much each, and the tensor that is made of it.

    This class is for a plain parameter, which travels in ``dtype``. ``padded``: the size of a shard
    on the ranks that have most.
    """

    def __init__(self, padded: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.padded, self.dtype, self.device = padded, dtype, device
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []  # of each tensor sent by a rank
        self.outputs: list[Tensor] = []  # 1-D, all ranks' parts end to end
        self.inner: tuple[Tensor, ...] = ()  # further tensors, with memory only while gathered
        self.made = False

    def send(self, local: Tensor) -> list[Tensor]:
        """What this rank sends of its rows."""
        padded = torch.zeros(self.padded, dtype=self.dtype, device=self.device)
        padded.narrow(0, 0, local.shape[0]).copy_(local)
        return [padded]

    def finish(self, local: Tensor, out: Any) -> Tensor | None:
        """Make the gathered tensor, which may have more rows than the parameter. The first time
        returns the tensor; later None, and ``out``, the parameter over it, has its values again.
        """
        return None if self.made else self.outputs[0]

    def check(self, tensors: Iterable[Tensor]) -> None:
        """``RuntimeError``: what is sent has other shapes or dtypes than at the first gather."""
        kinds = [(tensor.size(), tensor.dtype) for tensor in tensors]
        if self.made and kinds != self.kinds:
            raise RuntimeError(
                f"the parameter sends {kinds}, but at the first gather {self.kinds}: its buffers "
                "stay, so fsdp_pre_all_gather must return the same shapes and dtypes each time"
            )
        self.kinds = kinds

    def fill(self, rows: Tensor, places: Sequence[int], local: Tensor, out: Any) -> Tensor | None:
        """Take what all ranks sent and ``finish``. ``rows[r]`` are the bytes of rank ``r``, those
        of the tensor ``k`` from ``places[k]`` on.
        """
        world = rows.shape[0]
        if not self.made:
            self.outputs = [
                torch.empty(size.numel() * world, dtype=dtype, device=rows.device)
                for size, dtype in self.kinds
            ]
        for tensor in (*self.outputs, *self.inner):
            _allocate(tensor)
        with preserved_versions(tuple(self.outputs)):
            for output, place in zip(self.outputs, places, strict=True):
                nbytes = output.numel() // world * output.itemsize
                part = rows[:, place : place + nbytes].view(output.dtype)
                output.view(world, -1).copy_(part)
        value = self.finish(local, out)
        self.made = True
        return value

    def shaped(self) -> tuple[Tensor, ...]:
        """The outputs in the shapes in which ranks sent them, all ranks' rows end to end."""
        pairs = zip(self.outputs, self.kinds, strict=True)
        return tuple(output.view(-1, *size[1:]) for output, (size, _) in pairs)

    def ranges(self) -> list[tuple[int, int]]:
        """The first and the end address of each tensor's memory."""
        storages = [tensor.untyped_storage() for tensor in (*self.outputs, *self.inner)]
        return [(s.data_ptr(), s.data_ptr() + s.size()) for s in storages]

    def drop(self) -> None:
        """Give the memory back; the tensors stay."""
        for tensor in (*self.outputs, *self.inner):
            tensor.untyped_storage().resize_(0)


def _allocate(tensor: Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if storage.size() != size:
        storage.resize_(size)
