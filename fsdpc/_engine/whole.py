"""Full values of a unit's parameters and gradients: gathered from the shards and written back.

They are private copies, on the unit's device by default.
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
        """What C's layout counts for one element of each parameter: its bytes if the engine only
        carries the parameter's values, else 1.
        """
        return [
            dtype.itemsize if carried else 1
            for dtype, carried in zip(self.dtypes, self.carried, strict=True)
        ]

    def spans(self) -> list[list[Span]]:
        """For each parameter, every rank's elements in that rank's piece of the segment. Local."""
        return [
            [Span(begin // item, at // item, count // item) for begin, at, count in spans]
            for item, spans in zip(self.items, self.flat.layout()["spans"], strict=True)
        ]

    def gather_full(self, to: torch.device | None = None) -> list[Tensor]:
        """Private full copies of the parameters in original shapes and storage dtypes, on the
        unit's device or ``to``. Collective over the shard group.
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
        """This rank's block of rows of each parameter (see ``rows.py``), whole parameters if they
        have no rows: private copies in storage dtypes, on the unit's device or ``to``. Collective
        over the shard group.
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
        """Write the parameters from every rank's rows, as ``read_rows`` returns them. Collective
        over the shard group. ``ValueError``: a shape is not the one that ``read_rows`` returns.
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
        """Write this rank's slices of full tensors (original shapes) into the shard. Local.
        ``ValueError``: a tensor does not have its parameter's shape.
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
        """``value`` contiguous, on the unit's device, in the storage dtype of parameter ``i``."""
        info = self.infos[i]
        _lowbit.check_is_kept(info.param, f"unit {self.name}: parameter {info.name}", value.dtype)
        return value.detach().to(self.device, self.dtypes[i]).contiguous()

    def gather_full_grads(self, to: torch.device | None = None) -> list[Tensor | None]:
        """Full gradients in original shapes and storage dtypes, on the unit's device or ``to``:
        None for a parameter of which no rank has a gradient; zeros stand for ranks that have none.
        Collective over the shard group.
        """
        with self.adopted_grads() as mask:
            have = np.frombuffer(mask, dtype=np.uint8).astype(np.float32)
            for param, _, covers in self.optim_params:
                if self.holds_nothing(param):  # whatever `.grad` the program has put there
                    have[list(covers)] = 0
            if len(have) and self.is_sharded:
                self.groups.shard.all_reduce(have, op="max", what=f"gradients of unit {self.name}")
            for param, view, covers in self.optim_params:
                if view is not None and param.grad is None and any(have[i] for i in covers):
                    view.zero_()  # cleared on this rank alone
            where = to or self.device
            grads: list[Tensor | None] = [
                torch.empty(s, dtype=d, device=where) if have[i] else None
                for i, (s, d) in enumerate(zip(self.shapes, self.dtypes, strict=True))
            ]
            self.flat.read(grads, grad=True)
        return grads

    def scatter_full_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Write this rank's slices of full gradients; None clears the gradient. Local."""
        for i, grad in enumerate(grads):
            if grad is not None:
                self.flat.write(i, self._own(grad, i), grad=True)
        for param, view, covers in self.optim_params:
            some = view is not None and any(grads[i] is not None for i in covers)
            param.grad = view if some and not self.holds_nothing(param) else None
