"""The positions of an optimizer's elements in whole parameters, and the ranks that share a
parameter.

Random bits and blocks of 256 elements depend on an element's index in the whole parameter, so that
results are the same on any number of ranks. A sharded parameter of FSDP has one range of one whole
parameter (``use_orig_params=True``), or ranges of several whole parameters one behind the other. A
DTensor has rows of a whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdpc._companions.spans import touched
from fsdpc._engine.writeback import owner_of
from fsdpc._spans.rows import block
from fsdpc._spans.span import Span

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class ParamSpan(NamedTuple):
    """A ``Span`` of an optimizer's parameter, and the whole parameter whose elements it has.

    ``shape``: the shape of the whole parameter; ``key``: its number among the whole parameters that
    the optimizer's parameter covers; ``cuts``: the indices, except 0, at which the spans of ranks
    begin in the whole parameter. These three are equal on all ranks.
    """

    begin: int
    at: int
    count: int
    shape: tuple[int, ...]
    key: int = 0
    cuts: tuple[int, ...] = ()
    name: str | None = None

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)


class Group:
    """The ranks that share a parameter: a communicator, a process group, or this rank alone.
    ``watch``: a communicator of the same ranks, which detects ranks that do not take part.
    """

    def __init__(self, comm: Any = None, group: Any = None, watch: Any = None) -> None:
        self.comm = comm
        self.group = group
        self.watch = comm if watch is None else watch

    @property
    def identity(self) -> int:
        """A dictionary key that is equal for two objects with the same communicator or process
        group. The key is 0 for this rank alone.
        """
        found = self.group if self.comm is None else self.comm
        return 0 if found is None else id(found)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        if self.comm is not None:
            return self.comm.rank
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        """The number of ranks."""
        if self.comm is not None:
            return self.comm.world
        return 1 if self.group is None else dist.get_world_size(self.group)

    def all_reduce(self, values: np.ndarray, op: str, what: str) -> None:
        """Replace ``values`` by their sum or maximum over the ranks. Collective over the group."""
        if self.world == 1 or values.size == 0:
            return
        if self.comm is not None:
            self.comm.all_reduce(values, op=op, what=what)
            return
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        dist.all_reduce(torch.from_numpy(values), op=ops[op], group=self.group)

    def exchange(
        self,
        into: Tensor,
        out: Tensor,
        into_counts: Sequence[int],
        out_counts: Sequence[int],
        what: str,
    ) -> Callable[[], None]:
        """Send each rank its part of ``out``, and receive this rank's parts from all ranks in
        ``into``. Both are 1-D tensors of one dtype; the counts are the sizes of the parts. The
        exchange ends when the returned function is called; until then, neither tensor may be
        changed. Collective over the group.

        ``PeerError``, ``CommTimeout``: the ranks share memory, and a rank does not take part.
        """
        assert self.group is not None, what
        if self.watch is not None and self.watch.one_memory:
            self.watch.barrier(what)  # raises an error that names a missing rank
        staged = into.is_cuda and dist.get_backend(self.group) == "gloo"
        took, given = (into.cpu(), out.cpu()) if staged else (into, out)
        counts = list(into_counts), list(out_counts)
        work = dist.all_to_all_single(took, given, *counts, group=self.group, async_op=True)

        def end() -> None:
            work.wait()
            if staged:
                into.copy_(took)

        return end

    def broadcast(self, value: Tensor, owner: int, what: str) -> None:
        """Copy ``value`` of rank ``owner`` to ``value`` of every rank. The tensor must be
        contiguous, and have the same shape and dtype on all ranks. Collective over the group.
        """
        if self.world == 1:
            return
        assert self.group is not None, what
        staged = value.is_cuda and dist.get_backend(self.group) == "gloo"
        sent = value.cpu() if staged else value
        dist.broadcast(sent, group=self.group, group_src=owner)
        if staged:
            value.copy_(sent)

    def sum_on_gpu(self, own: Tensor, what: str) -> Tensor:
        """Return the sum over the ranks of a 1-D tensor on a GPU. All ranks add in the same order.
        The work is queued on torch's current stream. Collective over the group.
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
    """A parameter's spans on this rank. ``every`` has one span for each whole parameter that the
    parameter covers on any rank of ``group``. A span may be empty on this rank, but the number of
    spans is the same on all ranks.
    """

    every: list[ParamSpan]
    group: Group

    @property
    def spans(self) -> list[ParamSpan]:
        """The spans with elements on this rank."""
        return [span for span in self.every if span.count]


def local_of(value: Any) -> Tensor:
    """Return the local tensor of a DTensor, or any other tensor itself."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def locals_of(values: list[Tensor]) -> list[Tensor]:
    """Return ``local_of`` of each value. For a plain tensor, only the type is checked."""
    return [value if type(value) is Tensor else local_of(value) for value in values]


def place_of(param: Tensor) -> Place:
    """Return the place of an optimizer's parameter. Local.

    ``NotImplementedError``: ``param`` is a DTensor whose local elements are not whole rows.
    """
    if isinstance(param, DTensor):
        return _place_of_rows(param)
    unit = owner_of(param)
    rows = unit.optim_params if unit else ()
    covers = next((covers for shown, _, covers in rows if shown is param), ())
    if covers:
        return _place_in_unit(unit, covers)
    return Place([_whole(param)], ALONE)


def _whole(param: Tensor) -> ParamSpan:
    return ParamSpan(0, 0, param.numel(), tuple(param.shape))


def _place_in_unit(unit: Any, covers: Sequence[int]) -> Place:
    spans, rank = unit.spans(), unit.groups.shard.rank
    every = []
    for key, index in enumerate(covers):
        begin, at, count = spans[index][rank]
        at = 0 if unit.use_orig_params else at
        name = f"{unit.name}.{unit.infos[index].name}" if unit.name else unit.infos[index].name
        shape, cuts = tuple(unit.shapes[index]), _cuts(spans[index])
        every.append(ParamSpan(begin, at, count, shape, key, cuts, name))
    return Place(every, Group(comm=unit.groups.shard, group=unit.groups.shard_pg))


def _cuts(spans: Sequence[Span]) -> tuple[int, ...]:
    return tuple(sorted({span.begin for span in spans if span.count and span.begin}))


def _place_of_rows(param: DTensor) -> Place:
    mesh, shape = param.device_mesh, tuple(param.shape)
    cut = [dim for dim, place in enumerate(param.placements) if not isinstance(place, Replicate)]
    if not cut:
        return Place([_whole(param)], ALONE)
    place = param.placements[cut[0]]
    if len(cut) > 1 or type(place) is not Shard or place.dim != 0:
        raise NotImplementedError(
            f"a DTensor parameter of shape {shape} with placements {tuple(param.placements)}: this "
            "optimizer depends on elements' places in the whole parameter and supports rows over "
            "one mesh dimension (Shard(0)) and replicas. AdamW, Adam, SGD and Lion support all"
        )
    spans = [block(shape, mesh.size(cut[0]), rank) for rank in range(mesh.size(cut[0]))]
    here = ParamSpan(*spans[mesh.get_local_rank(cut[0])], shape, cuts=_cuts(spans))
    unit = owner_of(param)
    watch = None if unit is None else unit.groups.shard
    return Place([here], Group(group=mesh.get_group(cut[0]), watch=watch))


def spans_of_ranks(param: Tensor) -> list[list[Span]]:
    """Return the spans of all ranks for each whole parameter in ``Place.every``. In these spans,
    ``at`` may differ from ``ParamSpan.at``. Local.
    """
    if isinstance(param, DTensor):
        dims = [d for d, p in enumerate(param.placements) if not isinstance(p, Replicate)]
        world = param.device_mesh.size(dims[0]) if dims else 1
        return [[block(tuple(param.shape), world, rank) for rank in range(world)]]
    unit = owner_of(param)
    rows = unit.optim_params if unit else ()
    covers = next((covers for shown, _, covers in rows if shown is param), ())
    if covers:
        spans = unit.spans()
        return [spans[index] for index in covers]
    return [[Span(0, 0, param.numel())]]


def names_of(param: Tensor, given: str | None = None) -> list[str | None]:
    """Return the names that the whole parameters in ``Place.every`` have in the model. A name is
    None if it is not known before the first forward. ``given``: the name of the optimizer's
    parameter, from which the names of whole parameters in a flat parameter follow. Local.
    """
    unit = owner_of(param)
    rows = unit.optim_params if unit else ()
    covers = next((covers for shown, _, covers in rows if shown is param), ())
    if not covers or given is not None and (unit.use_orig_params or unit.dtensors):
        return [given]
    if given is not None:
        prefix = given.split(".")[:-1]
    elif unit.tree is None:
        return [None] * len(covers)
    else:
        is_root = unit.tree.units[0] is unit and unit.name[:1].isupper()  # its class's name
        prefix = [] if is_root else unit.name.split(".")
    return [".".join([*filter(None, prefix), unit.infos[index].name]) for index in covers]


def clean(name: str | None) -> str | None:
    """Return a parameter's name without the components that wrappers add."""
    if name is None:
        return None
    return ".".join(each for each in name.split(".") if each not in WRAPPERS)


def group_of(param: Tensor) -> list[Group]:
    """Return the groups of ranks over which partial sums must be added up to get the sum over all
    elements of a parameter. Local.
    """
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
    """Return the distinct groups that have more than one rank, in the order of first appearance."""
    return list({group.identity: group for group in groups if group.world > 1}.values())


def by_ranks(params: Iterable[Tensor]) -> list[tuple[list[Group], list[Tensor]]]:
    """Return the parameters grouped by their ``group_of``. The first item has the parameters for
    which ``group_of`` is empty. Local.
    """
    found: dict[tuple[int, ...], tuple[list[Group], list[Tensor]]] = {(): ([], [])}
    for param in params:
        groups = group_of(param)
        key = tuple(group.identity for group in groups)
        found.setdefault(key, (groups, []))[1].append(param)
    return list(found.values())


class SharedBlocks:
    """The blocks whose elements are on several ranks. Each block has a slot in an array of values.
    One collective per group combines the ranks' arrays. Every rank must pass the same spans, with
    the lengths of their blocks, in the same order.
    """

    def __init__(self, width: int, spans: Iterable[tuple[Group, ParamSpan, int]]) -> None:
        self.width = width
        self.groups: dict[int, tuple[Group, int]] = {}  # identity -> (group, number of slots)
        # id of a span -> (the group's identity, a block's length, the slot of each shared block)
        self._of: dict[int, tuple[int, int, dict[int, int]]] = {}
        for group, span, length in spans:
            blocks = sorted({cut // length for cut in span.cuts if cut % length})
            if blocks:
                _, used = self.groups.get(group.identity, (group, 0))
                self.groups[group.identity] = (group, used + len(blocks))
                slots = {number: used + i for i, number in enumerate(blocks)}
                self._of[id(span)] = group.identity, length, slots

    def slots_of(self, span: ParamSpan) -> tuple[int, tuple[int | None, int | None]]:
        """Return the identity of the group, and the slots of the span's first and last block. A
        slot is None if the block is not shared.
        """
        identity, length, slots = self._of.get(id(span), (0, 1, {}))
        blocks = touched(span, length)
        return identity, (slots.get(blocks[0]), slots.get(blocks[-1]))

    def combine(self, op: str, what: str, spans: Sequence[ParamSpan], ends: np.ndarray) -> None:
        """Combine the ranks' values of shared blocks in place. ``ends``: the values of each span's
        first and last block, none of them negative, of shape ``(spans, 2, width)``. Collective.
        """
        slots = [self.slots_of(span) for span in spans]
        for identity, (group, count) in self.groups.items():
            values = np.zeros((count, self.width), dtype=np.float64)
            of_group = [
                (i, end, slot)
                for i, (its_group, pair) in enumerate(slots)
                for end, slot in enumerate(pair)
                if its_group == identity and slot is not None
            ]
            for i, end, slot in of_group:
                values[slot] = np.maximum(values[slot], ends[i, end])
            group.all_reduce(values, op, what)
            for i, end, slot in of_group:
                ends[i, end] = values[slot]
