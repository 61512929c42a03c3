"""Where the elements that an optimizer sees lie in whole parameters, and which ranks share them.

Random bits and blocks of 256 elements depend on an element's index in the whole parameter, so that
results are the same on any number of ranks. A sharded parameter of FSDP holds one range of one
whole parameter (``use_orig_params=True``) or ranges of several behind each other; a DTensor holds
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpc._engine.writeback import owner_of
from fsdpc._spans.rows import rows


@dataclass(frozen=True)
class Span:
    """A range of elements of one whole parameter.

    ``start``: its first element in this rank's local tensor; ``first``: the same element's index in
    the whole parameter, whose ``shape`` is the original one; ``key``: the parameter's number among
    those of the local tensor; ``cuts``: the indices at which ranks' ranges of the whole parameter
    begin, without 0; the same on all ranks.
    """

    start: int
    length: int
    first: int
    shape: tuple[int, ...]
    key: int
    cuts: tuple[int, ...]
    name: str | None = None


class Group:
    """The ranks that share a parameter: a communicator, a process group, or this rank alone."""

    def __init__(self, comm: Any = None, group: Any = None) -> None:
        self.comm = comm
        self.group = group

    @property
    def identity(self) -> int:
        """Equal for groups that are the same object to their owner; 0 for this rank alone."""
        found = self.group if self.comm is None else self.comm
        return 0 if found is None else id(found)

    @property
    def world(self) -> int:
        """The number of ranks."""
        if self.comm is not None:
            return self.comm.world
        return 1 if self.group is None else dist.get_world_size(self.group)

    def all_reduce(self, values: np.ndarray, op: str, what: str) -> None:
        """Sum or maximum over the ranks, in place. Collective over the group."""
        if self.world == 1 or values.size == 0:
            return
        if self.comm is not None:
            self.comm.all_reduce(values, op=op, what=what)
            return
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        dist.all_reduce(torch.from_numpy(values), op=ops[op], group=self.group)

    def sum_on_gpu(self, own: Tensor, what: str) -> Tensor:
        """The sum over the ranks of a 1-D tensor on a GPU, added alike on all of them, in the order
        of torch's current stream. Collective over the group.
        """
        if self.world == 1:
            return own
        rows = own.new_empty((self.world, own.numel()))
        if self.comm is not None:
            rows[self.comm.rank].copy_(own)
            self.comm.all_gather(rows, what=what)
        else:
            dist.all_gather_into_tensor(rows.view(-1), own, group=self.group)
        return rows.sum(0)


ALONE = Group()


@dataclass
class Place:
    """A parameter's spans on this rank. ``every``: one span per whole parameter that the parameter
    covers on any rank, perhaps empty here; the same number on all ranks of ``group``.
    """

    every: list[Span]
    group: Group

    @property
    def spans(self) -> list[Span]:
        """Those with elements on this rank."""
        return [span for span in self.every if span.length]


def local_of(value: Any) -> Tensor:
    """A DTensor's local tensor, any other tensor itself."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def locals_of(values: list[Tensor]) -> list[Tensor]:
    """``local_of`` of each. Thousands of plain tensors cost one look at each type."""
    return [value if type(value) is Tensor else local_of(value) for value in values]


def place_of(param: Tensor) -> Place:
    """The place of an optimizer's parameter. Local.

    ``NotImplementedError``: a DTensor whose local elements are not whole rows.
    """
    if isinstance(param, DTensor):
        return _place_of_rows(param)
    unit = owner_of(param)
    rows = unit.optim_params if unit else ()
    covers = next((covers for shown, _, covers in rows if shown is param), ())
    if covers:
        return _place_in_unit(unit, covers)
    span = Span(0, param.numel(), 0, tuple(param.shape), 0, ())
    return Place([span], ALONE)


def _place_in_unit(unit: Any, covers: Sequence[int]) -> Place:
    spans = unit.flat.layout()["spans"]
    rank = unit.groups.shard.rank
    found = []
    for key, index in enumerate(covers):
        begin, position, length = spans[index][rank]
        starts = {first for first, _, length in spans[index] if length and first}
        found.append(
            Span(
                0 if unit.use_orig_params else position,
                length,
                begin,
                tuple(unit.shapes[index]),
                key,
                tuple(sorted(starts)),
                f"{unit.name}.{unit.infos[index].name}" if unit.name else unit.infos[index].name,
            )
        )
    return Place(found, Group(comm=unit.groups.shard))


def _place_of_rows(param: DTensor) -> Place:
    mesh, shape = param.device_mesh, tuple(param.shape)
    cut = [dim for dim, place in enumerate(param.placements) if not isinstance(place, Replicate)]
    if not cut:
        return Place([Span(0, param.numel(), 0, shape, 0, ())], ALONE)
    place = param.placements[cut[0]]
    if len(cut) > 1 or type(place) is not Shard or place.dim != 0:
        raise NotImplementedError(
            f"a DTensor parameter of shape {shape} with placements {tuple(param.placements)}: this "
            "optimizer depends on elements' places in the whole parameter and supports rows over "
            "one mesh dimension (Shard(0)) and replicas. AdamW, Adam, SGD and Lion support all"
        )
    world, rank = mesh.size(cut[0]), mesh.get_local_rank(cut[0])
    row = param.numel() // max(shape[0], 1)
    own, end = rows(shape, world, rank)
    starts = {rows(shape, world, r)[0] for r in range(world)} - {0, shape[0]}
    cuts = tuple(sorted(start * row for start in starts))
    span = Span(0, (end - own) * row, own * row, shape, 0, cuts)
    return Place([span], Group(group=mesh.get_group(cut[0])))


def group_of(param: Tensor) -> list[Group]:
    """The groups over which a sum over the parameter's elements must be added. Local."""
    unit = owner_of(param)
    if unit is not None:
        return [Group(comm=unit.groups.shard)]
    if not isinstance(param, DTensor):
        return []
    return [
        Group(group=param.device_mesh.get_group(dim))
        for dim, place in enumerate(param.placements)
        if not isinstance(place, Replicate)
    ]


def by_group(groups: Sequence[Group]) -> list[Group]:
    """The different groups of more than one rank, in the order of first appearance."""
    return list({group.identity: group for group in groups if group.world > 1}.values())


class Slots:
    """Values of pieces of whole parameters that several ranks hold, combined in one collective per
    group. Every rank makes the same slots in the same order.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.groups: dict[int, tuple[Group, int]] = {}  # with their numbers of slots

    def add(self, group: Group, count: int) -> int:
        """``count`` more slots of a group; the number of the first."""
        known, used = self.groups.get(group.identity, (group, 0))
        self.groups[group.identity] = (known, used + count)
        return used

    def combine(
        self, op: str, what: str, fill: Callable[[Group, np.ndarray], None]
    ) -> dict[int, np.ndarray]:
        """Arrays of ``(slots, width)`` by group, filled in and combined. Collective."""
        results = {}
        for identity, (group, count) in self.groups.items():
            values = np.zeros((count, self.width), dtype=np.float64)
            fill(group, values)
            group.all_reduce(values, op, what)
            results[identity] = values
        return results
