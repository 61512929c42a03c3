"""From the optimizer of a sharded model to the state dict of the unsharded model's optimizer.

Units are gathered one by one and, within a unit, one state of one dtype segment at a time, through
a window of bounded size: a rank that keeps nothing allocates only the window.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdpc._fsdp1.optim.book import Book, Key, UnitEntry
from fsdpc._fsdp1.optim.describe import ABSENT, Plan, State, plan_states
from fsdpc._fsdp1.state.sharded import mesh_of
from fsdpc._spans import rows as _sharded
from fsdpc._spans.span import Span
from fsdpc._spans.window import Wanted, gather


class Keep(Protocol):
    """The elements of full states that a rank keeps, and their form."""

    def span(self, entry: UnitEntry, i: int) -> Span:
        """The kept elements of the unit's ``i``-th parameter."""

    def made(self, entry: UnitEntry, i: int, values: torch.Tensor) -> Any:
        """The dict's value for the kept elements ``values``, a 1-D tensor."""

    def device(self, entry: UnitEntry) -> torch.device:
        """The device on which the kept elements are assembled."""

    offload: bool  # to the CPU


def gather_states(
    book: Book,
    held: list[tuple[Key, nn.Parameter]],
    state: dict[Key, Any],
    keep: Keep | None,
) -> dict[str, State]:
    """The state of every parameter of the model, by name. Collective over the units' groups.

    ``keep``: this rank's share; ``None``: nothing.
    """
    keys = {id(param): key for key, param in held}
    kept: dict[str, State] = {}
    for entry in book.units:
        _gather_unit(entry, keys, state, keep, kept)
    if keep is not None:
        for name, param in book.plain.items():
            key = keys.get(id(param))
            if key is not None and key in state:
                kept[name] = {n: _copied(value, keep.offload) for n, value in state[key].items()}
    return kept


def _copied(value: Any, offload: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True) if offload else value.detach().clone()


def _gather_unit(
    entry: UnitEntry,
    keys: dict[int, Key],
    state: dict[Key, Any],
    keep: Keep | None,
    kept: dict[str, State],
) -> None:
    states: list[Any] = [
        state.get(keys[id(part.param)]) if id(part.param) in keys else ABSENT
        for part in entry.parts
    ]
    plans = plan_states(entry, states)
    _keep_same(entry, plans, keep, kept)
    for name, dtype, members in _cut_runs(entry, plans):
        wanted = _gather_run(entry, name, dtype, members, states, keep)
        for i, want in wanted.items():
            kept[entry.names[i][0]][name] = keep.made(entry, i, want.values)  # type: ignore[union-attr]


def _keep_same(
    entry: UnitEntry, plans: list[Plan | None], keep: Keep | None, kept: dict[str, State]
) -> None:
    if keep is None:
        return
    device = _device(entry, keep.offload)
    for part, plan in zip(entry.parts, plans, strict=True):
        if plan is not None:
            for name in entry.first_names(part):
                kept[name] = {n: _on(device, value) for n, value in plan.same.items()}


def _on(device: torch.device, value: Any) -> Any:
    """A copy of a ``same`` value; numbers stay on the CPU, as in torch."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.to(device, copy=True)
    return _copied(value, True)


def _cut_runs(
    entry: UnitEntry, plans: list[Plan | None]
) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """Parts of one segment, of elements of one size, with state of one name and dtype: they are
    gathered together.
    """
    runs: dict[tuple[int, int, str, str], list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for j, plan in enumerate(plans):
        for name, dtype in plan.cut.items() if plan is not None else ():
            dtypes[str(dtype)] = dtype
            part = entry.parts[j]
            run = (entry.segment_index(part), entry.unit.items[part.covers[0]], name, str(dtype))
            runs.setdefault(run, []).append(j)
    for run in sorted(runs):
        yield run[2], dtypes[run[3]], runs[run]


def _gather_run(
    entry: UnitEntry,
    name: str,
    dtype: torch.dtype,
    members: list[int],
    states: list[Any],
    keep: Keep | None,
) -> dict[int, Wanted]:
    """The elements that this rank keeps of one state, by index of the parameter. Collective."""
    wanted: dict[int, Wanted] = {}
    covered = [i for j in members for i in entry.parts[j].covers]
    for i in covered if keep is not None else ():
        kept = keep.span(entry, i)  # type: ignore[union-attr]
        where = keep.device(entry)  # type: ignore[union-attr]
        wanted[i] = Wanted(kept.begin, torch.empty(kept.count, dtype=dtype, device=where))
    rank = entry.comm.rank
    parts = [
        (entry.begin(entry.parts[j], rank), states[j][name].reshape(-1))
        for j in members
        if entry.length(entry.parts[j], rank)
    ]
    first = entry.parts[members[0]]
    piece = entry.segment(first)["piece_numel"] // entry.unit.items[first.covers[0]]
    what = f"optimizer state {name} of unit {entry.unit.name}"
    spans = dict(enumerate(entry.spans))
    gather(entry.comm, piece, dtype, parts, spans, wanted, what, entry.unit.device)
    return wanted


# --- what is kept ---


def _device(entry: UnitEntry, offload: bool) -> torch.device:
    return torch.device("cpu") if offload else entry.unit.device


@dataclass
class Whole:
    """Full values in the original shapes."""

    offload: bool

    def span(self, entry: UnitEntry, i: int) -> Span:
        return Span(0, 0, entry.unit.shapes[i].numel())

    def made(self, entry: UnitEntry, i: int, values: torch.Tensor) -> torch.Tensor:
        return values.view(entry.unit.shapes[i])

    def device(self, entry: UnitEntry) -> torch.device:
        return _device(entry, self.offload)


@dataclass
class Rows:
    """This rank's rows as a ``ShardedTensor``, or as a ``DTensor`` of the unit's mesh."""

    use_dtensor: bool
    offload: bool

    def span(self, entry: UnitEntry, i: int) -> Span:
        pg, shape = entry.unit.groups.shard_pg, entry.unit.shapes[i]
        if not self._cut(entry, i):
            return Span(0, 0, shape.numel())
        return _sharded.block(shape, pg.size(), pg.rank())

    def made(self, entry: UnitEntry, i: int, values: torch.Tensor) -> Any:
        shape = entry.unit.shapes[i]
        if not self._cut(entry, i):
            return values.view(shape).cpu() if self.offload else values.view(shape)
        pg = entry.unit.groups.shard_pg
        rows = values.view(_sharded.rows_shape(shape, pg.size(), pg.rank()))
        wrapped = _sharded.wrap_rows(rows, shape, pg, _mesh(entry, self.use_dtensor))
        return wrapped.cpu() if self.offload else wrapped

    def device(self, entry: UnitEntry) -> torch.device:
        # A DTensor is made on its mesh's device, then offloaded.
        return _device(entry, self.offload and _mesh(entry, self.use_dtensor) is None)

    def _cut(self, entry: UnitEntry, i: int) -> bool:
        return entry.unit.is_sharded and _sharded.is_cut(entry.unit.shapes[i])


def _mesh(entry: UnitEntry, use_dtensor: bool) -> Any:
    mesh = entry.member._device_mesh
    if use_dtensor and mesh is None:
        raise AssertionError(
            "Expected _device_mesh to be not None, got None: "
            "ShardedOptimStateDictConfig(_use_dtensor=True) needs a model built with a "
            f"device_mesh; unit {entry.unit.name!r} has none"
        )
    return None if mesh is None else mesh_of(entry.member)


def copy_unknown(state: dict[Key, Any], known: set[Key], kept: dict[Any, Any]) -> None:
    """Copy entries that belong to no parameter, with a warning. Local."""
    for key, value in state.items():
        if key in known or key in kept:
            continue
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy "
            "everything to the returned state_dict. In most cases, this is a user-defined state "
            "that is not associated with any particular parameter.",
            stacklevel=4,
        )
        kept[key] = value
