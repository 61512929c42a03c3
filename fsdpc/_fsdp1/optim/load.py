"""Conversion of an unsharded model's optimizer state dict to this rank's shard of the state.

A value has one of three sources: this rank's dict, rank 0's dict, or a distributed value, whose
rows are gathered from the ranks. Values of rank 0's dict are broadcast one by one, in the same
order on all ranks. Each value is cut to this rank's elements before the next value is fetched.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc._comm.bootstrap import comm_for_group
from fsdpc._comm.objects import broadcast
from fsdpc._comm.plain import Outline
from fsdpc._engine.device import engine_device
from fsdpc._fsdp1.optim.book import Book, Key, ShardedParam, UnitEntry
from fsdpc._fsdp1.optim.describe import State, equal
from fsdpc._spans import rows as _sharded
from fsdpc._spans.window import Wanted, gather
from fsdpc._spans.window import broadcast as broadcast_elements
from fsdpc._states.keys import is_cut, numbers_of, shape_of
from fsdpc._torch import ShardedTensor, tree_map


class Source(Protocol):
    """A source of the values of a state dict. ``tree``: the dict's structure, with the same keys on
    all ranks.
    """

    tree: dict[str, Any]

    def fetch(self, value: Any, what: str) -> Any:
        """Return the full value of a leaf of ``tree``. Every rank must fetch the same leaves."""

    def elements(self, value: Any, begin: int, end: int, what: str) -> torch.Tensor:
        """Return elements ``[begin, end)`` of a tensor in ``tree`` as a 1-D tensor, which may be a
        view. Every rank must read the same leaves; the ranges may differ between ranks.
        """


class OwnDict:
    """A source for the case that every rank has the dict. Distributed values in the dict are
    gathered over their ranks.
    """

    def __init__(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.tree = _checked(state_dict)
        self._device = device

    def fetch(self, value: Any, what: str) -> Any:
        if _sharded.is_distributed(value):
            size = torch.Size(_sharded.size_of(value))
            return self.elements(value, 0, size.numel(), what).view(size)
        return value

    def elements(self, value: Any, begin: int, end: int, what: str) -> torch.Tensor:
        if isinstance(value, ShardedTensor):
            return _from_rows(value, begin, end, what, value._process_group, self._device)
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            if list(value.placements) == _sharded.placements(mesh):
                group = mesh.get_group(mesh.ndim - 1)
                return _from_rows(value, begin, end, what, group, self._device)
            value = value.full_tensor()
        return value.reshape(-1)[begin:end]


def _from_rows(
    value: Any, begin: int, end: int, what: str, group: Any, device: torch.device
) -> torch.Tensor:
    """Return elements ``[begin, end)`` of a distributed value. The transfer runs on ``device``.
    Collective over ``group``.
    """
    comm = comm_for_group(group, device=engine_device(device))
    shape = _sharded.size_of(value)
    rows = _sharded.unwrap(value, shape, comm.world, comm.rank, what)
    own = rows.detach().reshape(-1)
    if not _sharded.is_cut(shape):
        return own[begin:end]
    spans = [_sharded.block(shape, comm.world, rank) for rank in range(comm.world)]
    want = Wanted(begin, torch.empty(end - begin, dtype=own.dtype, device=device))
    gather(comm, spans[0].count, own.dtype, [(0, own)], {0: spans}, {0: want}, what, device)
    return want.values


class FirstRanksDict:
    """A source for the case that only the group's rank 0 has the dict. Collective."""

    def __init__(self, state_dict: dict[str, Any] | None, group: Any, device: torch.device) -> None:
        self._comm = comm_for_group(group, device=engine_device(device))
        self._device = device
        outline: Any = None
        self._held: list[torch.Tensor] = []
        if self._comm.rank == 0:
            try:
                outline = {"tree": tree_map(self._outline, _checked(state_dict))}
            except (TypeError, ValueError) as error:
                outline = {type(error).__name__: str(error)}
        outline = broadcast(self._comm, outline, "names of the optimizer state dict")
        if "tree" not in outline:
            raise (
                TypeError(outline["TypeError"])
                if "TypeError" in outline
                else ValueError(*outline.values())
            )
        self.tree = outline["tree"]

    def _outline(self, value: Any) -> Any:
        if isinstance(value, (DTensor, ShardedTensor)):
            raise TypeError(
                "with rank0_only the optimizer state dict must hold whole tensors, but it holds a "
                f"{type(value).__name__}: load it with ShardedOptimStateDictConfig, on every rank"
            )
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value.detach().to("cpu", copy=True)
        if isinstance(value, torch.Tensor):
            self._held.append(value)
            return Outline(tuple(value.shape), value.dtype, len(self._held) - 1)
        return value

    def fetch(self, value: Any, what: str) -> Any:
        if not isinstance(value, Outline):
            return value
        return self.elements(value, 0, value.numel, what).view(value.shape)

    def elements(self, value: Any, begin: int, end: int, what: str) -> torch.Tensor:
        if not isinstance(value, Outline):  # a 0-dim tensor: its value is in the tree
            return value.reshape(-1)[begin:end]
        want = Wanted(begin, torch.empty(end - begin, dtype=value.dtype, device=self._device))
        whole = None
        if self._comm.rank == 0:
            whole = self._held[value.index].detach().contiguous().view(-1)
        broadcast_elements(self._comm, whole, value.numel, want, what, self._device)
        return want.values


def _checked(state_dict: Any) -> dict[str, Any]:
    if not isinstance(state_dict, dict) or "state" not in state_dict:
        raise ValueError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict'
        )
    state = state_dict["state"]
    if state and all(isinstance(key, int) for key in state):
        raise ValueError(
            "`optim_state_dict` has parameter ids for keys, but must have parameter names, as "
            "optim_state_dict() returns: convert an unsharded optimizer's ids with "
            "rekey_optim_state_dict()"
        )
    return state_dict


def sharded_states(
    book: Book, held: list[tuple[Key, nn.Parameter]], source: Source, whole: bool = False
) -> dict[Any, Any]:
    """Return the state of every parameter in the optimizer, by the optimizer's keys. The result
    also has the entries of the saved dict that belong to no parameter. ``whole``: the optimizer
    keeps states of whole parameters, such as one value per row or column. Collective if the source
    is collective.
    """
    saved = source.tree["state"]
    loader = _Loader(source, saved, _numbers(book, saved), whole)
    keys = {id(param): key for key, param in held}
    result: dict[Any, Any] = {}
    for entry in book.units:
        for sharded in entry.params:
            if id(sharded.param) in keys:
                state = loader.state(sharded)  # collective: values may come from other ranks
                # With `whole`, a rank may keep the state of a parameter and have no elements of the
                # parameter.
                here = whole or not entry.unit.holds_nothing(sharded.param)
                if state is not None and here:
                    result[keys[id(sharded.param)]] = state
    for name, param in book.plain.items():
        state = _find(saved, book.aliases[name])
        if id(param) in keys and state is not None:
            result[keys[id(param)]] = {
                n: _own(loader.fetch(value, n, name)) for n, value in state.items()
            }
    known = {alias for aliases in book.aliases.values() for alias in aliases}
    for key in [key for key in saved if key not in known]:
        result[key] = tree_map(lambda leaf, key=key: loader.fetch(leaf, "", key), saved[key])
    return result


def _numbers(book: Book, saved: dict[str, Any]) -> set[str]:
    """Return the names of those saved states that are one number per parameter of a unit."""
    members = [
        pair for entry in book.units for pair in zip(entry.names, entry.unit.shapes, strict=True)
    ]
    found = [(tuple(shape), _find(saved, names)) for names, shape in members]
    return numbers_of(
        (shape, {name: shape_of(value) for name, value in state.items()})
        for shape, state in found
        if isinstance(state, dict)
    )


def _find(saved: dict[str, Any], names: list[str]) -> Any:
    """Return the value saved under the first of these names that is in ``saved``, or ``None``."""
    return next((saved[name] for name in names if name in saved), None)


def _own(value: Any) -> Any:
    """Return a copy of a value, so that the optimizer does not change the saved dict."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


@dataclass
class _Loader:
    source: Source
    saved: dict[str, Any]
    numbers: set[str]
    whole: bool

    def fetch(self, value: Any, name: str, of: str) -> Any:
        return self.source.fetch(value, f"optimizer state {name} of {of}")

    def state(self, sharded: ShardedParam) -> State | None:
        entry = sharded.of
        found = {i: _find(self.saved, entry.names[i]) for i in sharded.covers}
        states = {i: state for i, state in found.items() if state}
        if not states:
            return None
        names = next(iter(states.values())).keys()
        if any(state.keys() != names for state in states.values()):
            raise ValueError(
                "Differing optimizer state names for the unflattened parameters: "
                f"{[entry.names[i][0] for i in states]} (unit {entry.unit.name!r})"
            )
        result: State = {}
        for name in names:
            values = {i: state[name] for i, state in states.items()}
            cut = all(
                is_cut(name, shape_of(value), tuple(entry.unit.shapes[i]), self.numbers)
                for i, value in values.items()
            )
            result[name] = (self._cut if cut else self._same)(sharded, name, values)
        return result

    def _cut(self, sharded: ShardedParam, name: str, values: dict[int, Any]) -> torch.Tensor:
        """Return this rank's elements of a state that has one element per element of the parameter.
        If an original parameter in a flat parameter has no saved state, its elements are zeros.
        """
        sharded.check_cut(name)
        entry, rank = sharded.of, sharded.of.comm.rank
        begun, numel = sharded.span(rank).at, sharded.span(rank).count
        result: torch.Tensor | None = None
        for i, value in values.items():
            begin, at, count = entry.spans[i][rank]
            what = f"optimizer state {name} of {entry.names[i][0]}"
            mine = self.source.elements(value, begin, begin + count, what)
            if result is None:
                result = torch.zeros(numel, dtype=mine.dtype, device=sharded.param.device)
            if mine.dtype != result.dtype:
                raise ValueError(
                    "All unflattened parameters comprising a single flat parameter must have "
                    "positive-dimension tensor state with the same dtype but got dtypes "
                    f"{result.dtype} and {mine.dtype} for state {name} ({entry.names[i][0]})"
                )
            result[at - begun : at - begun + count].copy_(mine)
        assert result is not None
        return result.view(sharded.shape(rank))

    def _same(self, sharded: ShardedParam, name: str, values: dict[int, Any]) -> Any:
        """Return the common value of a state that is a number, or a tensor of another shape than
        the parameter's.
        """
        entry, wholes = sharded.of, []
        for i, value in values.items():
            if not self.whole:
                _check_no_factor(entry, i, name, value)
            wholes.append(self.fetch(value, name, entry.names[i][0]))
        if not all(equal(whole, wholes[0]) for whole in wholes):
            raise ValueError(
                "All unflattened parameters comprising a single flat parameter must have scalar "
                f"state with the same value and dtype but got values {wholes} for state {name} and "
                f"unflattened parameter names {[entry.names[i][0] for i in values]}"
            )
        return _own(wholes[0])


def _check_no_factor(entry: UnitEntry, i: int, name: str, value: Any) -> None:
    shape, of = shape_of(value), tuple(entry.unit.shapes[i])
    if not shape or len(of) < 2 or (entry.unit.use_orig_params and not entry.unit.is_sharded):
        return
    broadcasts = len(shape) == len(of) and all(n in (1, m) for n, m in zip(shape, of, strict=True))
    if broadcasts or shape in (of[:-1], of[:-2] + of[-1:]):
        raise ValueError(
            f"Tensor optimizer state does not have same shape as its parameter: {name} of "
            f"{entry.names[i][0]} (unit {entry.unit.name!r}) has shape {shape}, the parameter "
            f"{of}. A shard is a 1-D range of elements, so it has no state per row or column: "
            "reset this optimizer's state, or use an optimizer with elementwise state"
        )
