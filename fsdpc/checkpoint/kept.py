"""What a save or a stream has found in a model, kept for the next: many small tensors take long
to read. What is kept has addresses, no tensors and no modules, so that nothing lives longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpc._engine.released import ReleasedParameter
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._fsdp2.extension import is_opaque
from fsdpc._fsdp2.state import states_below
from fsdpc.checkpoint import torch_fsdp
from fsdpc.checkpoint.entries import Entry, OptimParam, parts_of_some, settle
from fsdpc.checkpoint.layout import Layout, PlannedSet, Table, lay_out
from fsdpc.checkpoint.model import Model, extra_states, read_model
from fsdpc.checkpoint.write import planned_set


@dataclass
class Stamp:
    """``values``: equal as long as the tensors have the same names, places, forms and memory.
    ``tensors``: the parameters and buffers; ``locals``: what this rank has of them; ``units``.
    """

    values: list[Any]
    tensors: list[Tensor]
    locals: list[Tensor]
    units: list[Any]


@dataclass
class _Kept:
    stamp: list[Any]
    parts: np.ndarray
    received: Sequence[np.ndarray]
    entries: list[Entry]  # without memory
    aliases: dict[str, str]
    params: list[tuple[int, list[tuple[Entry, np.ndarray]]]]  # number in the stamp's tensors
    layout: Layout
    tables: list[Table]


_NONE = torch.empty(0, device="cpu")
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


class Reading:
    """A model as it is to be saved. ``parts``: for ``settled``, from every rank. ``whole``: it is
    saved as it is, so that the reading may be kept. Local; errors as ``read_model``.
    """

    def __init__(
        self,
        model: nn.Module,
        everyone: tuple[int, int],
        cast: torch.dtype | None,
        file_bytes: int,
        *,
        whole: bool,
    ) -> None:
        self._model, self._everyone, self._whole = model, everyone, whole
        self._cast, self._file_bytes = cast, file_bytes
        self._options = [everyone, cast, file_bytes]
        kept = _kept.pop(model, None) if isinstance(model, nn.Module) else None
        self._now = stamp_of(model, self._options) if kept is not None and whole else None
        if kept is not None and self._now is not None and kept.stamp == self._now.values:
            self._old, self.parts = kept, kept.parts
        else:
            self._read()

    def _read(self) -> None:
        self._old, self._found = None, read_model(self._model, self._everyone)
        self._now = stamp_of(self._model, self._options) if self._whole else None
        self.parts = parts_of_some(self._found.entries, self._everyone[1])

    def settled(self, received: Sequence[np.ndarray]) -> Model:
        """The model's tensors, with the replicas that the ranks have found. Local."""
        self._received = received
        if self._old is not None and not _equal(received, self._old.received):
            self._read()
        if self._old is None:
            settle(self._found.entries, received, self._everyone[0])
            return self._found
        assert self._now is not None
        found = Model(self._everyone, list(self._old.entries), dict(self._old.aliases))
        found.params = [OptimParam(self._now.tensors[i], c) for i, c in self._old.params]  # type: ignore[arg-type]
        found.extra = extra_states(self._model)
        self._found = found
        return found

    def planned(self) -> PlannedSet:
        """What this rank writes of it. Local. ``TypeError``: a dtype without a name."""
        if self._old is not None:
            assert self._now is not None
            _kept[self._model] = self._old
            return PlannedSet(self._old.layout, self._old.tables, self._now.locals)
        form: dict[str, Any] = {"cast": self._cast, "file_bytes": self._file_bytes}
        entries, aliases = self._found.entries, self._found.aliases
        made = planned_set(lay_out(entries, name="model", aliases=aliases, **form), entries)
        if self._now is not None and all(entry.home is None for entry in entries):
            self._keep(made, self._now)
        return made

    def _keep(self, made: PlannedSet, now: Stamp) -> None:
        numbers = {id(tensor): number for number, tensor in enumerate(now.tensors)}
        params = []
        for each in self._found.params:
            if id(each.param) not in numbers or not _has_states_by_name(each):
                return
            params.append((numbers[id(each.param)], each.covers))
        for entry in self._found.entries:
            entry.memory, entry.unit = _NONE, None
        self._found.entries, entries = list(self._found.entries), self._found.entries
        aliases, tables = dict(self._found.aliases), made.tables
        _kept[self._model] = _Kept(
            now.values, self.parts, self._received, entries, aliases, params, made.layout, tables
        )


def stamp_of(model: nn.Module, options: Sequence[Any]) -> Stamp | None:
    """None: it cannot be told whether the model changes. Local; shows sharded parameters."""
    modules = list(model.named_modules(remove_duplicate=False))
    units = [each._unit for each in unit_modules(model)]
    states = states_below(model)
    for state in states:
        state.reshard_now()
    inner = [each._unit for state in states for each in (state, *state._others)]
    bound = [unit for unit in (*units, *inner) if unit is not None]
    other = not units and torch_fsdp.handles(model)
    if other or any(unit.summoned or unit.foreign for unit in bound):
        return None
    found = [param for unit in bound for param, _, _ in unit.optim_params]
    for _, module in modules:
        found += module._parameters.values()
        found += module._buffers.values()
    seen: dict[int, int] = {}
    same = [seen.setdefault(id(tensor), len(seen)) for tensor in found]
    unlike = {id(tensor): tensor for tensor in found}.values()
    tensors = [t for t in unlike if t is not None and type(t) is not ReleasedParameter]
    specs = [t._spec for t in tensors if isinstance(t, DTensor)]
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    forms = _forms_of(local)
    if forms is None:
        return None
    names = [
        (name, type(m), *m._parameters, None, *m._buffers, *sorted(m._non_persistent_buffers_set))
        for name, m in modules
    ]
    references = [weakref.ref(unit) for unit in bound]
    values = [list(options), references, names, same, specs, *forms]
    return Stamp(values, tensors, local, bound)


def _has_states_by_name(param: OptimParam) -> bool:
    """Whether an optimizer's state of it has a form in a checkpoint."""
    try:
        if param.check_cut is not None:
            param.check_cut("")
    except NotImplementedError:
        return False
    return True


def _forms_of(tensors: list[Tensor]) -> list[list[Any]] | None:
    """Where and in which form their values are. None: torch has no word for it."""
    if any(map(is_opaque, {type(tensor): tensor for tensor in tensors}.values())):
        return None
    known: dict[Any, int] = {}
    try:
        places = [tensor.data_ptr() for tensor in tensors]
        # Few forms, each once: a new object for each tensor would call Python's garbage collector.
        forms = [known.setdefault(_form_of(tensor), len(known)) for tensor in tensors]
    except (RuntimeError, ValueError):  # NotImplementedError is one of the first
        return None
    return [places, forms, list(known)]


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits


def _equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
