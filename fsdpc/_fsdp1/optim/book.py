"""The map between an optimizer's keys, the optimizer's parameters and the names of the model's
parameters.

An optimizer refers to the sharded parameters. With ``use_orig_params`` there is one sharded
parameter per original parameter: this rank's elements, or the whole parameter in its original shape
if the unit is not sharded. Otherwise there is one flat parameter per dtype segment of a unit, and
each flat parameter covers several original parameters. The optimizer may also refer to parameters
that no unit manages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdpc._engine.writeback import owner_of
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._fsdp1.names import clean_fqn, join
from fsdpc._fsdp1.root import FRONT
from fsdpc._fsdp1.state.keys import managed_names
from fsdpc._spans.span import Span

Key = Hashable  # an optimizer's key of a parameter: an id, or a name


@dataclass
class UnitEntry:
    """A unit and the names of its parameters in the given model."""

    member: Any
    unit: Any
    names: list[list[str]]  # per parameter: the first name, then the names of tied sites

    def __post_init__(self) -> None:
        self.layout = self.unit.flat.layout()
        self.spans = self.unit.spans()
        self.params = [ShardedParam(self, p, covers) for p, _, covers in self.unit.optim_params]

    @property
    def comm(self) -> Any:
        return self.unit.groups.shard


@dataclass
class ShardedParam:
    """A parameter of the optimizer (``param``), which has elements of one or several original
    parameters. ``covers``: the indices of these original parameters in the unit.
    """

    of: UnitEntry
    param: nn.Parameter
    covers: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The first name of each original parameter."""
        return [self.of.names[i][0] for i in self.covers]

    @property
    def text(self) -> str:
        """The names of the original parameters and of the unit, for messages."""
        names = self.names
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"{shown} of unit {self.of.unit.name!r}"

    @property
    def segment_index(self) -> int:
        return self.of.layout["params"][self.covers[0]]["segment"]

    @property
    def piece_numel(self) -> int:
        """The number of elements of each rank's shard of the segment."""
        segment = self.of.layout["segments"][self.segment_index]
        return segment["piece_numel"] // self.of.unit.items[self.covers[0]]

    def span(self, rank: int) -> Span:
        """Return the elements of the parameter that ``rank`` has. For a flat parameter this is the
        rank's whole shard of the segment.
        """
        if self.of.unit.use_orig_params:
            return self.of.spans[self.covers[0]][rank]
        return Span(0, 0, self.of.layout["segments"][self.segment_index]["piece_numel"])

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the parameter in the optimizer of ``rank``."""
        if self.of.unit.use_orig_params and not self.of.unit.is_sharded:
            return tuple(self.of.unit.shapes[self.covers[0]])
        return (self.span(rank).count,)

    def check_cut(self, name: str) -> None:
        """Raise ``NotImplementedError`` if this is a flat parameter of bytes whose original
        parameters have elements of several bytes. ``name``: the state's name, for the message.
        """
        unit = self.of.unit
        wide = [i for i in self.covers if unit.items[i] > 1]
        if wide and not unit.use_orig_params:
            raise NotImplementedError(
                f"optimizer state {name!r} of {self.of.names[wide[0]][0]} (unit {unit.name!r}): "
                f"the flat parameter holds the bytes of {unit.dtypes[wide[0]]} values, and a "
                "state of bytes has no form by names: make the optimizer of the parameters that "
                "train ([p for p in model.parameters() if p.requires_grad]), or wrap with "
                "use_orig_params=True"
            )


@dataclass
class Book:
    """All parameters of a model, with their names in the unsharded model."""

    units: list[UnitEntry]
    plain: dict[str, nn.Parameter]  # parameters that no unit manages
    names: dict[int, list[str]] = field(default_factory=dict)  # id(parameter): first names
    # Maps the first name of each parameter to all names of the parameter.
    aliases: dict[str, list[str]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes and from which ranks send values."""
        return self.units[0].unit.device if self.units else torch.device("cpu")

    def names_of(self, param: nn.Parameter) -> list[str]:
        """Return the first names of the original parameters that ``param`` covers. ``KeyError``:
        ``param`` is not in the model.
        """
        found = self.names.get(id(param))
        if found is None:
            raise KeyError(_stranger(param))
        return found


def _stranger(param: nn.Parameter) -> str:
    """Return the error text for a parameter that is not in the model."""
    unit = owner_of(param)
    info = next((i for i in unit.infos if i.param is param), None) if unit is not None else None
    if info is None:
        return (
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the "
            "model: make the optimizer from the parameters of the wrapped model"
        )
    name = f"parameter {info.name!r} of unit {unit.name!r}"
    if unit.use_orig_params:
        return (
            f"the optimizer holds {name}, which is not in the given model: pass the model whose "
            "parameters the optimizer was made from"
        )
    return (
        f"the optimizer was made before the model was wrapped: a flat parameter has replaced "
        f"{name} (use_orig_params=False), so the optimizer's steps change nothing. Make the "
        "optimizer from model.parameters() after wrapping, or wrap with use_orig_params=True"
    )


def read_book(model: nn.Module) -> Book:
    """Return the book of the parameters of ``model``. Local. ``ValueError``: ``model`` contains no
    unit, or contains a parameter whose unit is outside ``model``.
    """
    units = [
        _unit_entry(name, member)
        for name, _, member in FRONT.placed([model])
        if member._unit is not None
    ]
    if not unit_modules(model):
        raise ValueError(
            f"{type(model).__name__} contains no FullyShardedDataParallel: its optimizer's own "
            "state_dict() is complete"
        )
    book = Book(units, {})
    for entry in units:
        for sharded in entry.params:
            book.names[id(sharded.param)] = sharded.names
        for names in entry.names:
            book.aliases[names[0]] = names
    _add_plain(book, model)
    return book


def _unit_entry(prefix: str, member: Any) -> UnitEntry:
    names: list[list[str]] = [[join(prefix, info.name)] for info in member._unit.infos]
    for name, i in managed_names(member).items():
        if join(prefix, name) not in names[i]:
            names[i].append(join(prefix, name))
    return UnitEntry(member, member._unit, names)


def _add_plain(book: Book, model: nn.Module) -> None:
    sharded = set(book.names)
    for raw, param in model.named_parameters(remove_duplicate=False):
        name = clean_fqn(raw)
        if id(param) in sharded:
            continue
        if id(param) in book.names:
            book.aliases[book.names[id(param)][0]].append(name)
            continue
        if owner_of(param) is not None or getattr(param, "_is_flat_param", False):
            raise ValueError(
                f"parameter {name!r} is sharded by a unit that is not in the given model: pass the "
                "FullyShardedDataParallel instance or a module that contains it"
            )
        book.plain[name] = param
        book.names[id(param)] = [name]
        book.aliases[name] = [name]


def is_named(state: dict[Any, Any]) -> bool:
    """Return whether the keys of an optimizer's state are names (NamedOptimizer) instead of ids."""
    return isinstance(next(iter(state), None), str)


def keys_of_optimizer(optim: Any, model: nn.Module, named: bool) -> list[tuple[Key, nn.Parameter]]:
    """Return the optimizer's (key, parameter) pairs in the order of the optimizer's parameters."""
    params = [param for group in optim.param_groups for param in group["params"]]
    if not named:
        return list(enumerate(params))
    raw = {id(param): name for name, param in model.named_parameters()}
    return [(raw[id(param)], param) for param in params]


def keys_of_input(
    model: nn.Module, optim_input: Iterable[Any] | None
) -> list[tuple[Key, nn.Parameter]]:
    """Return the (key, parameter) pairs of an optimizer over ``optim_input`` (``None``: over
    ``model.parameters()``). Raises torch's errors: ``TypeError``, ``ValueError``,
    ``AssertionError``.
    """
    if optim_input is None:
        return list(enumerate(model.parameters()))
    if not isinstance(optim_input, Iterable):
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        )
    entries = list(optim_input)
    if not entries:
        raise ValueError("Optimizer input should not be empty")
    if all(isinstance(entry, nn.Parameter) for entry in entries):
        return list(enumerate(entries))
    if not all(isinstance(entry, dict) for entry in entries):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    if not all("params" in entry for entry in entries):
        raise AssertionError(
            'A parameter group should map "params" to a list of the parameters in the group'
        )
    return list(enumerate(param for entry in entries for param in entry["params"]))
