"""Methods of a unit that gather the full values of parameters and gradients from the shards, and
write full values back to the shards.

The gathered values are private copies. They are on the unit's device by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdpc._engine import lowbit as _lowbit
from fsdpc._engine import writeback as _writeback
from fsdpc._spans.rows import block, block_shape, is_cut
from fsdpc._spans.span import Span


class WholeValues:
    """Base of ``Unit``."""

    name: str
    groups: Any
    infos: list[Any]
    flat: Any
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    carried: list[bool]
    device: torch.device
    is_sharded: bool
    optim_params: list[tuple[Any, Tensor | None, tuple[int, ...]]]
    adopted_grads: Any
    holds_nothing: Any

    @property
    def items(self) -> list[int]:
        """For each parameter, how many elements of the engine's layout one element takes. This is
        the element's size in bytes if the engine transfers the parameter as raw bytes, else 1.
        """
        return [
            dtype.itemsize if carried else 1
            for dtype, carried in zip(self.dtypes, self.carried, strict=True)
        ]

    def spans(self) -> list[list[Span]]:
        """Return, for each parameter, the elements that each rank has and where they are in the
        rank's shard of the segment. Local.
        """
        return [
            [Span(begin // item, at // item, count // item) for begin, at, count in spans]
            for item, spans in zip(self.items, self.flat.layout()["spans"], strict=True)
        ]

    def gather_full(self, to: torch.device | None = None) -> list[Tensor]:
        """Return private full copies of the parameters in their original shapes and storage dtypes,
        on the unit's device or on ``to``. Collective over the shard group.
        """
        _writeback.adopt_values(self)
        full = self._empty(self.shapes, to)
        self.flat.read(full)
        return full

    def _empty(self, shapes: Sequence[Sequence[int]], to: torch.device | None) -> list[Tensor]:
        where = to or self.device
        return [
            torch.empty(tuple(s), dtype=d, device=where)
            for s, d in zip(shapes, self.dtypes, strict=True)
        ]

    def attend_gather(self) -> None:
        """Take part in other ranks' ``gather_full`` without keeping values. Collective."""
        _writeback.adopt_values(self)
        self.flat.read([None] * len(self.infos))

    def read_rows(self, to: torch.device | None = None) -> list[Tensor]:
        """Return this rank's block of rows of each parameter (see ``rows.py``), or the whole
        parameter if the parameter is not cut into rows. The values are private copies in storage
        dtypes, on the unit's device or on ``to``. Collective over the shard group.
        """
        _writeback.adopt_values(self)
        rank, world = self.groups.shard.rank, self.groups.shard.world
        rows = self._empty([block_shape(s, world, rank) for s in self.shapes], to)
        self.flat.read_blocks(*self._blocks(rows))
        whole = [None if is_cut(s) else t for s, t in zip(self.shapes, rows, strict=True)]
        if any(tensor is not None for tensor in whole):
            self.flat.read(whole)
        return rows

    def write_rows(self, rows: Sequence[Tensor]) -> None:
        """Write new values of the parameters. Each rank passes the new values of the rows that
        ``read_rows`` returns on it. Collective over the shard group. ``ValueError``: a tensor does
        not have the shape that ``read_rows`` returns for its parameter.
        """
        rank, world = self.groups.shard.rank, self.groups.shard.world
        values = []
        for i, tensor in enumerate(rows):
            shape = block_shape(self.shapes[i], world, rank)
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"unit {self.name}: rank {rank}'s rows of parameter {self.infos[i].name} have "
                    f"shape {shape}, but the new value has shape {tuple(tensor.shape)}"
                )
            values.append(self._own(tensor, i))
            if not is_cut(self.shapes[i]):
                self.flat.write(i, values[i])
        self.flat.write_blocks(*self._blocks(values))

    def _blocks(self, rows: Sequence[Tensor]) -> tuple[list[int], list[Tensor | None]]:
        world = self.groups.shard.world
        blocks: list[int] = []
        tensors: list[Tensor | None] = []
        for shape, item, tensor in zip(self.shapes, self.items, rows, strict=True):
            cut = is_cut(shape)
            blocks.append(block(shape, world, 0).count * item if cut else 0)
            tensors.append(tensor if cut else None)
        return blocks, tensors

    def scatter_full(self, full: Sequence[Tensor]) -> None:
        """Write this rank's slices of full tensors, which have the original shapes, into the shard.
        Local. ``ValueError``: a tensor does not have its parameter's shape.
        """
        for i, tensor in enumerate(full):
            value = tensor.detach()
            if value.shape != self.shapes[i]:
                raise ValueError(
                    f"unit {self.name}: parameter {self.infos[i].name} has shape "
                    f"{tuple(self.shapes[i])}, but the new value has shape {tuple(value.shape)}"
                )
            self.flat.write(i, self._own(value, i))

    def _own(self, value: Tensor, i: int) -> Tensor:
        """Return ``value`` as a contiguous tensor on the unit's device, in the storage dtype of
        parameter ``i``.
        """
        info = self.infos[i]
        _lowbit.check_is_kept(info.param, f"unit {self.name}: parameter {info.name}", value.dtype)
        return value.detach().to(self.device, self.dtypes[i]).contiguous()

    def gather_full_grads(self, to: torch.device | None = None) -> list[Tensor | None]:
        """Return the full gradients in original shapes and storage dtypes, on the unit's device or
        on ``to``. The entry is None for a parameter of which no rank has a gradient. The elements
        of a rank that has no gradient are zeros. Collective over the shard group.
        """
        with self.adopted_grads() as mask:
            have = np.frombuffer(mask, dtype=np.uint8).astype(np.float32)
            for param, _, covers in self.optim_params:
                if self.holds_nothing(param):  # ignore a `.grad` that the program has set
                    have[list(covers)] = 0
            if len(have) and self.is_sharded:
                self.groups.shard.all_reduce(have, op="max", what=f"gradients of unit {self.name}")
            for param, view, covers in self.optim_params:
                if view is not None and param.grad is None and any(have[i] for i in covers):
                    view.zero_()  # this rank has no gradient, but another rank has one
            where = to or self.device
            grads: list[Tensor | None] = [
                torch.empty(s, dtype=d, device=where) if have[i] else None
                for i, (s, d) in enumerate(zip(self.shapes, self.dtypes, strict=True))
            ]
            self.flat.read(grads, grad=True)
        return grads

    def scatter_full_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Write this rank's slices of full gradients. A sharded parameter whose entries in
        ``grads`` are all None gets the gradient None. Local.
        """
        for i, grad in enumerate(grads):
            if grad is not None:
                self.flat.write(i, self._own(grad, i), grad=True)
        for param, view, covers in self.optim_params:
            some = view is not None and any(grads[i] is not None for i in covers)
            param.grad = view if some and not self.holds_nothing(param) else None
