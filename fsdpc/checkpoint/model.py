"""A model's tensors as entries: units of fsdpc, of torch's FSDP, DTensors and plain tensors.

The names are those of the unsharded model's ``state_dict()``; a tied parameter has the first of its
names. Entries are in the order of the units and, within a unit, in the order of its flat parameter,
so that a rank's shard of a unit is one contiguous range of the file.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc._companions.spans import NO_SPANS, block_spans, table_of, whole_span
from fsdpc._engine import writeback as _writeback
from fsdpc._engine.empties import is_unwritten
from fsdpc._engine.interop import over
from fsdpc._engine.lowbit import check_memory, holds_codes, scales
from fsdpc._fsdp1.collect import is_unit_module, unit_modules
from fsdpc._fsdp1.names import clean_fqn, cleaner, join
from fsdpc._fsdp1.optim.book import UnitEntry, read_book
from fsdpc._fsdp2.extension import is_opaque
from fsdpc._fsdp2.state import states_below
from fsdpc.checkpoint import torch_fsdp
from fsdpc.checkpoint.dtensor import block_of
from fsdpc.checkpoint.entries import Coding, Entry, OptimParam, flat, flat_and_home
from fsdpc.lowbit import coded_layers


@dataclass
class Model:
    """What a checkpoint contains of a model. This object is equal on all ranks, except for the
    spans and the memory of its entries.
    """

    everyone: tuple[int, int]
    entries: list[Entry] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)  # other name -> the entry's name
    params: list[OptimParam] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # get_extra_state() of modules
    touched: list[torch.Tensor] = field(default_factory=list)  # the tensors that a load changes
    # Non-persistent buffers that nobody has written since to_empty().
    unwritten: list[str] = field(default_factory=list)

    def add(self, entry: Entry, names: list[str]) -> None:
        self.entries.append(entry)
        for name in names:
            if name != entry.name:
                self.aliases[name] = entry.name

    def add_param(self, param: OptimParam) -> None:
        self.params.append(param)
        self.touched.append(param.param)


def read_model(model: nn.Module, everyone: tuple[int, int]) -> Model:
    """Return the tensors of a model. ``everyone`` is this rank and the number of ranks that take
    part. All of these ranks have the tensors that are not sharded. Local.

    Raises ``RuntimeError`` inside ``summon_full_params``, and ``TypeError`` or ``ValueError`` if it
    is not known which elements of a parameter this rank has. The error names the parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, param in model.named_parameters():
        if param.is_meta:
            _refuse_meta(param, f"parameter {clean_fqn(name)}")
    found = Model(everyone)
    if unit_modules(model):
        _add_units(found, model)
    elif torch_fsdp.handles(model):
        torch_fsdp.add_units(found, model)
        _add_params(found, model)
    else:
        if is_managed(model):
            raise ValueError("pass the whole FullyShardedDataParallel instance, not a part of it")
        for state in states_below(model):  # of fully_shard
            state.reshard_now()
            state.adopt_values()
        _add_params(found, model)
    _add_buffers(found, model)
    found.extra = extra_states(model)
    _rename(found, cleaner(model))
    _check_names(found)
    _add_codings(found, model)
    return found


def _add_codings(found: Model, model: nn.Module) -> None:
    clean = cleaner(model)
    entries = {entry.name: entry for entry in found.entries}
    for path, layer in coded_layers(model):
        name = clean(clean_fqn(join(path, "weight")))
        entry = entries.get(found.aliases.get(name, name))
        if entry is not None:
            entry.coding = Coding(layer.codec, layer.row, layer.value_dtype)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the results of the modules' own ``get_extra_state``, by clean names. Local."""
    having = [
        (join(clean_fqn(name), "_extra_state"), module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and not is_unit_module(module)
    ]
    clean = cleaner(model) if having else str
    return {clean(name): module.get_extra_state() for name, module in having}


def is_managed(model: nn.Module) -> bool:
    """Return True if a parameter of ``model`` is in the flat shard of a unit outside ``model``."""
    owners = [_writeback.owner_of(param) for param in model.parameters()]
    return any(unit is not None and not unit.dtensors for unit in owners)


def set_extra(model: nn.Module, extra: dict[str, Any]) -> None:
    """Call ``set_extra_state`` of the modules that ``extra`` names. Local."""
    clean = cleaner(model)
    modules = {clean(clean_fqn(name)): module for name, module in model.named_modules()}
    for key, value in extra.items():
        modules[key.rpartition("_extra_state")[0].rstrip(".")].set_extra_state(value)


def _rename(found: Model, clean: Callable[[str], str]) -> None:
    for entry in found.entries:
        entry.name = clean(entry.name)
    aliases = ((clean(alias), clean(name)) for alias, name in found.aliases.items())
    found.aliases = {alias: name for alias, name in aliases if alias != name}
    found.unwritten = [clean(name) for name in found.unwritten]


def _check_names(found: Model) -> None:
    names = [entry.name for entry in found.entries] + list(found.aliases)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tensors of the model have the name {twice!r}")


# --- fsdpc's units -------------------------------------------------------------------------------


def _add_units(found: Model, model: nn.Module) -> None:
    book = read_book(model)
    for named in book.units:
        unit, rank = named.unit, named.comm.rank
        if unit.summoned:
            raise RuntimeError(
                f"unit {unit.name!r} is inside summon_full_params: leave the context before "
                "saving or loading a checkpoint"
            )
        _writeback.adopt_values(unit)
        entries = _unit_entries(named)
        for i in _flat_order(named):
            found.add(entries[i], named.names[i])
            _add_scales(found, named.names[i], unit.infos[i].param)
        for sharded in named.params:
            covers = []
            for i in sharded.covers:
                spans = table_of(*named.spans[i][rank])
                spans[:, 1] -= sharded.span(rank).at
                covers.append((entries[i], spans))
            found.add_param(OptimParam(sharded.param, covers, sharded.check_cut))
    for name, param in book.plain.items():
        _add_param(found, name, param, book.aliases[name])


def _flat_order(named: UnitEntry) -> list[int]:
    params = named.layout["params"]
    return sorted(range(len(params)), key=lambda i: (params[i]["segment"], params[i]["offset"]))


def _unit_entries(named: UnitEntry) -> list[Entry]:
    unit = named.unit
    replicas = unit.groups.replicate
    replica = (replicas.rank, replicas.world) if replicas is not None else (0, 1)
    entries = []
    for i, (shape, dtype) in enumerate(zip(unit.shapes, unit.dtypes, strict=True)):
        begin, _, count = named.spans[i][named.comm.rank]
        entries.append(
            Entry(
                named.names[i][0],
                tuple(shape),
                dtype,
                over(unit.flat.shard_part(i), dtype).view(-1),
                table_of(begin, 0, count),
                replica,
                on_host=unit.flat.offloaded,
                ranks=named.comm.world * replica[1],
                unit=unit,
                number=i,
                exact=holds_codes(unit.infos[i].param),
            )
        )
    return entries


# --- plain tensors and DTensors ------------------------------------------------------------------


@torch.no_grad()  # to_local() must not record a graph
def _add_params(found: Model, model: nn.Module) -> None:
    """Add the parameters that are in no unit, each with all its names."""
    taken = {id(each.param) for each in found.params}
    params: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for raw, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in taken:
            params.setdefault(id(param), (param, []))[1].append(clean_fqn(raw))
    for param, names in params.values():
        _add_param(found, names[0], param, names)


def _add_param(found: Model, name: str, param: nn.Parameter, names: list[str]) -> None:
    entry = tensor_entry(name, param, f"parameter {name}", found.everyone)
    unit = _writeback.owner_of(param)
    entry.on_host = unit is not None and unit.flat.offloaded
    entry.exact = holds_codes(param)
    found.add(entry, names)
    found.add_param(OptimParam(param, [(entry, entry.spans)]))
    _add_scales(found, names, param)


def _add_scales(found: Model, names: list[str], param: nn.Parameter) -> None:
    """Add the scales of a quantized parameter. Every rank has all of these scales."""
    for key, scale in scales(param):
        entry = tensor_entry(f"{names[0]}.{key}", scale, f"scales of {names[0]}", found.everyone)
        entry.exact = True
        found.add(entry, [f"{name}.{key}" for name in names])
        found.touched.append(scale)


def _add_buffers(found: Model, model: nn.Module) -> None:
    buffers: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, buffer, is_saved in named_buffers(model):
        if is_saved:
            buffers.setdefault(id(buffer), (buffer, []))[1].append(name)
        elif is_unwritten(buffer):
            found.unwritten.append(name)
    for buffer, names in buffers.values():
        entry = tensor_entry(names[0], buffer, f"buffer {names[0]}", found.everyone)
        entry.steady = False
        found.add(entry, names)
        found.touched.append(buffer)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield for each buffer its name, the buffer, and whether the buffer is persistent."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None:
                is_saved = key not in module._non_persistent_buffers_set
                yield clean_fqn(join(prefix, key)), buffer, is_saved


def tensor_entry(
    name: str, tensor: torch.Tensor, what: str, everyone: tuple[int, int] = (0, 1)
) -> Entry:
    """Return the entry of a DTensor, or of a plain tensor that all ranks have and rank 0 saves."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        _refuse_meta(tensor, what)
        raise TypeError(
            f"{what} is a {tensor.layout} tensor: a checkpoint holds dense tensors with values"
        )
    if isinstance(tensor, DTensor):
        return _dtensor_entry(name, tensor, what)
    check_memory(tensor, what, "save the others (only=), and it by its library")
    shape = tuple(tensor.shape)
    span = whole_span(math.prod(shape))
    memory, home = flat_and_home(tensor)
    return Entry(name, shape, tensor.dtype, memory, span, everyone, everyone[1] > 1, home)


def _refuse_meta(tensor: torch.Tensor, what: str) -> None:
    if tensor.is_meta:
        raise TypeError(
            f"{what} is on the meta device, without memory: give the model its memory first "
            "(model.to_empty(device=...)), then load; buffers that no checkpoint holds need "
            "their values after that"
        )


class _Block(NamedTuple):
    """The block of a DTensor that this rank has. Several tensors use the same ``spans``
    array, which must not be changed. ``sizes`` is None if this rank is not in the mesh.
    """

    sizes: tuple[int, ...] | None
    replica: tuple[int, int]
    spans: np.ndarray
    ranks: int


# A cache of the blocks of each mesh, by shape and placements. A model has few different blocks.
_blocks: weakref.WeakKeyDictionary[Any, dict[Any, _Block]] = weakref.WeakKeyDictionary()


def _block_of(tensor: DTensor, shape: tuple[int, ...], what: str) -> _Block:
    mesh = tensor.device_mesh
    known = _blocks.setdefault(mesh, {})
    key = shape, tensor.placements
    if key not in known:
        offsets, sizes, replica = block_of(tensor, what)
        if offsets is None:
            known[key] = _Block(None, replica, NO_SPANS, 0)
        else:
            known[key] = _Block(sizes, replica, block_spans(shape, offsets, sizes), mesh.size())
    return known[key]


def _dtensor_entry(name: str, tensor: DTensor, what: str) -> Entry:
    shape, local = tuple(tensor.shape), tensor.to_local()
    if is_opaque(local):
        raise TypeError(
            f"{what} is a {type(local).__name__}, whose memory only its own code knows: save the "
            "state dict with torch.distributed.checkpoint"
        )
    sizes, replica, spans, ranks = _block_of(tensor, shape, what)
    if sizes is None:
        return Entry(name, shape, tensor.dtype, flat(local)[:0])
    if tuple(local.shape) != sizes and math.prod(sizes):
        raise ValueError(
            f"{what}: this rank's part has shape {tuple(local.shape)}, but by its placements "
            f"{tensor.placements} it is {sizes}"
        )
    memory, home = flat_and_home(local)
    return Entry(name, shape, tensor.dtype, memory, spans, replica, home=home, ranks=ranks)
