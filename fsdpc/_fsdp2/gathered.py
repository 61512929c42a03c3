"""The gathered value of one parameter, made in Python. Its memory exists only from a gather to the
next release.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpc._torch import preserved_versions


class Gathered:
    """The tensors that all ranks sent for one parameter, with the same sizes on all ranks, and the
    gathered tensor that is made from them.

    This class is for a plain parameter, which is sent in ``dtype``. ``padded``: the size of the
    largest shard, to which all ranks pad.
    """

    def __init__(self, padded: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.padded, self.dtype, self.device = padded, dtype, device
        # The size and dtype of each tensor that a rank sends.
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        # For each of these tensors, a 1-D tensor with the data of all ranks end to end.
        self.outputs: list[Tensor] = []
        # Further tensors whose memory, like that of ``outputs``, is freed between gathers.
        self.inner: tuple[Tensor, ...] = ()
        self.made = False

    def send(self, local: Tensor) -> list[Tensor]:
        """Return the tensors that this rank sends for its rows."""
        padded = torch.zeros(self.padded, dtype=self.dtype, device=self.device)
        padded.narrow(0, 0, local.shape[0]).copy_(local)
        return [padded]

    def finish(self, local: Tensor, out: Any) -> Tensor | None:
        """Make the gathered tensor, which may have more rows than the parameter. The first call
        returns the tensor. Later calls return None, and ``out`` then has the gathered values again.
        ``out``: the parameter that was made from the tensor and shares its memory.
        """
        return None if self.made else self.outputs[0]

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Raise ``RuntimeError`` if the tensors to send have other shapes or dtypes than at the
        first gather.
        """
        kinds = [(tensor.size(), tensor.dtype) for tensor in tensors]
        if self.made and kinds != self.kinds:
            raise RuntimeError(
                f"the parameter sends {kinds}, but at the first gather {self.kinds}: its buffers "
                "stay, so fsdp_pre_all_gather must return the same shapes and dtypes each time"
            )
        self.kinds = kinds

    def fill(self, rows: Tensor, places: Sequence[int], local: Tensor, out: Any) -> Tensor | None:
        """Copy what all ranks sent into ``outputs`` and call ``finish``. ``rows[r]`` has the bytes
        of rank ``r``; the bytes of tensor ``k`` begin at ``places[k]``.
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
        """Return the outputs in the shapes in which the ranks sent them, with the rows of all ranks
        end to end.
        """
        pairs = zip(self.outputs, self.kinds, strict=True)
        return tuple(output.view(-1, *size[1:]) for output, (size, _) in pairs)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the start and the end address of each tensor's memory."""
        storages = [tensor.untyped_storage() for tensor in (*self.outputs, *self.inner)]
        return [(s.data_ptr(), s.data_ptr() + s.size()) for s in storages]

    def drop(self) -> None:
        """Free the memory of the tensors; the tensor objects stay."""
        for tensor in (*self.outputs, *self.inner):
            tensor.untyped_storage().resize_(0)


def _allocate(tensor: Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if storage.size() != size:
        storage.resize_(size)
