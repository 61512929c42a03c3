"""A cache of what a save or a stream has read from a model, and what a save has read from an
optimizer.

The next save uses the cache, because reading many small tensors takes long. The cache has addresses
instead of tensors and modules, so that it does not keep tensors and modules alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._engine.released import ReleasedParameter
from fsdpc._fsdp1.collect import is_unit_module
from fsdpc._fsdp2.extension import is_opaque
from fsdpc._fsdp2.state import states_of
from fsdpc._states.groups import plain_options
from fsdpc._torch import TensorGuards
from fsdpc.checkpoint import torch_fsdp
from fsdpc.checkpoint.entries import Entry, OptimParam, parts_of_some, settle
from fsdpc.checkpoint.layout import Layout, PlannedSet, Table, lay_out
from fsdpc.checkpoint.model import Model, extra_states, read_model
from fsdpc.checkpoint.optimizer import State, read_state, state_name
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.write import planned_set


class Forms:
    """The addresses, shapes, strides and dtypes of tensors. A ``Forms`` of an earlier save, after
    ``let_go``, is equal to the ``Forms`` of this save as long as no tensor has got another address
    or form. Two ``Forms`` are never equal under autocast, in inference mode, or if a tensor occurs
    twice. Raises ``RuntimeError`` or ``ValueError`` if a tensor has no address.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        self._tensors: list[Tensor] | None = tensors
        self._guards: Any = None

    def let_go(self) -> bool:
        """Drop the tensors. Returns False if torch's guards cannot describe the tensors. Local."""
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            return self._guards is not None
        if TensorGuards is None or any(
            map(is_opaque, {type(tensor): tensor for tensor in tensors}.values())
        ):
            return False
        try:
            self._guards = TensorGuards(
                *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
        except (RuntimeError, TypeError, ValueError):
            return False
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Forms):
            return NotImplemented
        kept, now = (self, other) if self._guards is not None else (other, self)
        if kept._guards is None or now._tensors is None:
            return False
        if not np.array_equal(kept.addresses, now.addresses):
            return False
        return bool(kept._guards.check(*now._tensors))


@dataclass
class Stamp:
    """A description of a model, by which a later save can tell whether the model has changed.
    ``values`` stay equal as long as the tensors have the same names, places in modules, forms and
    memory; the last of the values is their ``Forms``. ``tensors`` are the parameters and buffers,
    ``locals`` the local parts of these tensors on this rank, and ``units`` the model's FSDP units.
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
    params: list[tuple[int, list[tuple[Entry, np.ndarray]]]]  # int: index in ``Stamp.tensors``
    layout: Layout
    tables: list[Table]


FROZEN_BYTES = 1 << 20  # from this total size on, frozen parameters get separate files
_NONE = torch.empty(0, device="cpu")
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


class Reading:
    """A model's tensors for a save: read anew, or kept from an earlier save if the model has not
    changed. ``settled`` needs the ``parts`` of every rank. ``whole`` means that all tensors of the
    model are saved as they are, so that the reading may be kept for the next save. Local; raises as
    ``read_model`` does.
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
        still = [entry for each in self._found.params if not each.param.requires_grad
                 for entry, _ in each.covers]  # fmt: skip
        if sum(entry.numel * entry.dtype.itemsize for entry in still) >= FROZEN_BYTES:
            for entry in still:
                entry.frozen = True
            self._found.entries.sort(key=lambda entry: entry.frozen)
        self._now = stamp_of(self._model, self._options) if self._whole else None
        if self._now is not None and not self._now.values[-1].let_go():
            self._now = None
        self.parts = parts_of_some(self._found.entries, self._everyone[1])

    @property
    def entries(self) -> list[Entry]:
        """Return the model's tensors. Call ``settled`` first, unless the model was read anew."""
        return self._found.entries

    @property
    def stamp(self) -> list[Any] | None:
        """Return the values of the model's stamp, or None if the reading cannot be kept. Saves that
        use the same kept reading get the same list object.
        """
        if self._old is not None:
            return self._old.stamp
        return None if self._now is None else self._now.values

    def settled(self, received: Sequence[np.ndarray]) -> Model:
        """Return the model's tensors, with the replicas found from ``received``, the ``parts`` of
        every rank. If the model was not read anew, the result has no parameters until
        ``add_params`` is called. Local.
        """
        self._received = received
        if self._old is not None and not _equal(received, self._old.received):
            self._read()
        if self._old is None:
            settle(self._found.entries, received, self._everyone[0])
            return self._found
        found = Model(self._everyone, list(self._old.entries), dict(self._old.aliases))
        found.extra = extra_states(self._model)
        self._found = found
        return found

    @property
    def params(self) -> list[Tensor]:
        """Return the Parameter objects that an optimizer of the model may have."""
        if self._old is None:
            return [each.param for each in self._found.params]
        assert self._now is not None
        return [self._now.tensors[number] for number, _ in self._old.params]

    def add_params(self) -> None:
        """Fill in ``params`` of the ``Model`` object that ``settled`` returned, if it has no
        parameters yet. Local.
        """
        if self._old is not None:
            pairs = zip(self.params, self._old.params, strict=True)
            self._found.params = [OptimParam(param, covers) for param, (_, covers) in pairs]  # type: ignore[arg-type]

    def planned(self) -> PlannedSet:
        """Return what this rank writes of the model, and keep the reading if possible. Local.
        Raises ``TypeError`` if safetensors does not have a tensor's dtype.
        """
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
    """Return a stamp of the model, or None if a later change of the model might go unnoticed.
    Local. Reshards modules of ``fully_shard``.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    different = dict.fromkeys(module for _, module in modules)
    units = [each._unit for each in different if is_unit_module(each)]
    states = dict.fromkeys(state for each in different for state in states_of(each))
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
    same = list(map(id, found))  # equal ids: one object under several names
    unlike = dict(zip(same, found, strict=True)).values()
    tensors = [t for t in unlike if t is not None and type(t) is not ReleasedParameter]
    specs = list(map(attrgetter("_spec"), [t for t in tensors if isinstance(t, DTensor)]))
    local = _locals_of(tensors)
    frozen = list(map(attrgetter("requires_grad"), tensors))
    try:
        forms = Forms(local)
    except (RuntimeError, ValueError):
        return None
    names = [
        (name, type(m), *m._parameters, None, *m._buffers, *sorted(m._non_persistent_buffers_set))
        for name, m in modules
    ]
    references = [weakref.ref(unit) for unit in bound]
    values = [list(options), references, names, same, specs, frozen, forms]
    return Stamp(values, tensors, local, bound)


def _locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor on this rank."""
    types = set(map(type, tensors))
    wide = {kind for kind in types if issubclass(kind, DTensor)}
    if wide == types:
        return list(map(attrgetter("_local_tensor"), tensors))
    return [t._local_tensor if type(t) in wide else t for t in tensors]  # type: ignore[attr-defined]


# --- optimizers ----------------------------------------------------------------------------------


@dataclass
class _KeptStates:
    model: list[Any]  # ``Reading.stamp``
    stamp: list[Any]
    state: State  # without entries
    names: list[list[str]]  # for each group, the names of its parameters
    # The tensors that must be equal on all ranks that have them: for each form (dtype, shape and
    # device), the positions of these tensors in the layout and among the stamp's tensors.
    wholes: list[tuple[list[int], list[int]]]
    layout: Layout
    tables: list[Table]


_kept_states: weakref.WeakKeyDictionary[Any, _KeptStates] = weakref.WeakKeyDictionary()


class StateReading:
    """An optimizer's state for a save: read anew, or kept from an earlier save. ``whole`` is the
    same as for ``Reading``. Collective over ``ranks``; raises as ``read_state`` does.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        found: Model,
        ranks: Ranks,
        reading: Reading,
        whole: bool,
    ) -> None:
        self._optimizer, self._model = optimizer, reading.stamp if whole else None
        is_known = isinstance(optimizer, torch.optim.Optimizer)
        kept = _kept_states.pop(optimizer, None) if is_known else None
        with ranks.step("reading the optimizer's state") as seen:
            may_keep = is_known and self._model is not None
            self._now = now = _stamp_of_states(optimizer, reading.params) if may_keep else None
            if kept is not None and now is not None:
                if kept.model is self._model and kept.stamp == now.values:
                    seen.value = _digests_of(kept.wholes, now)
        if not _agree(seen.values):
            kept = None
        self._old = kept
        if kept is None:
            reading.add_params()
            self._params = found.params
            self.state = read_state(optimizer, found, ranks)
        else:
            pairs = zip(optimizer.param_groups, kept.names, strict=True)
            self.state = kept.state
            self.state.groups = [{**plain_options(g), "params": names} for g, names in pairs]

    def planned(self, layout: Callable[[Sequence[Entry]], Layout]) -> PlannedSet:
        """Return what this rank writes of the state, and keep the reading if possible. Local.
        Raises ``TypeError`` if safetensors does not have a tensor's dtype.
        """
        old = self._old
        if old is not None:
            assert self._now is not None
            _kept_states[self._optimizer] = old
            return PlannedSet(old.layout, old.tables, self._now.tensors)
        made = planned_set(layout(self.state.entries), self.state.entries)
        if self._now is not None and self._model is not None:
            held = {tensor.data_ptr() for tensor in self._now.tensors}
            in_them = all(
                not e.memory.numel() or e.memory.data_ptr() in held for e in self.state.entries
            )
            if in_them and self._now.values[-1].let_go():
                self._keep(made, self._now, self._model)
        return made

    def _keep(self, made: PlannedSet, now: _StateStamp, model: list[Any]) -> None:
        self.state.entries, kinds = [], self.state.kinds
        names_of = [each.names[0] for each in self._params]
        places = (place for file in made.layout.files for place in file.places)
        known = {place.name: n for n, place in enumerate(places)}
        sites = ((names_of[number], key) for number, key in now.sites())
        wholes: dict[Any, tuple[list[int], list[int]]] = {}
        for number, ((name, key), tensor) in enumerate(zip(sites, now.tensors, strict=True)):
            if kinds[name][key] == "whole":
                form = tensor.dtype, tensor.shape, tensor.device
                own = wholes.setdefault(form, ([], []))
                own[0].append(known[state_name(name, key)])
                own[1].append(number)
        names = [group["params"] for group in self.state.groups]
        _kept_states[self._optimizer] = _KeptStates(
            model, now.values, self.state, names, list(wholes.values()), made.layout, made.tables
        )


@dataclass
class _StateStamp:
    """A ``Stamp`` of an optimizer's states. ``sites`` yields for each tensor the number of its
    parameter and its key in the parameter's state.
    """

    values: list[Any]
    tensors: list[Tensor]
    sites: Callable[[], Iterator[tuple[int, str]]]


def _stamp_of_states(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor]
) -> _StateStamp | None:
    """Return a stamp of the states, or None if a later change of the states might go unnoticed.
    Local.
    """
    if hasattr(optimizer, "span_states"):
        return None
    numbers = {id(param): number for number, param in enumerate(params)}
    members = [list(map(id, group["params"])) for group in optimizer.param_groups]
    groups = [list(map(numbers.get, group)) for group in members]
    if any(None in group for group in groups):
        return None
    # The lookup is by ids, because the hash of a tensor is a Python function, which is slow.
    state_of = dict(zip(map(id, optimizer.state), optimizer.state.values(), strict=True))
    none: dict[str, Any] = {}
    states = [state_of.get(number, none) for number in chain.from_iterable(members)]
    # Equal tuples of keys get one number. Many kept tuples would start the garbage collector.
    known: dict[Any, int] = {}
    keys = [known.setdefault(own, len(known)) for own in map(tuple, states)]
    values = list(chain.from_iterable([state.values() for state in states]))
    other = {kind for kind in set(map(type, values)) if not issubclass(kind, Tensor)}
    plain = [(type(value), value) for value in values if type(value) in other] if other else []
    shown = [value for value in values if type(value) not in other] if other else values
    tensors = _locals_of(shown)
    if not all(kind in (int, float, bool, str, type(None)) for kind, _ in plain):
        return None

    def sites() -> Iterator[tuple[int, str]]:
        for number, state in zip(chain.from_iterable(groups), states, strict=True):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield number, key

    try:
        forms = Forms(tensors)
    except (RuntimeError, ValueError):
        return None
    return _StateStamp([groups, keys, list(known), plain, forms], tensors, sites)


def _digests_of(wholes: Sequence[tuple[list[int], list[int]]], now: _StateStamp) -> np.ndarray:
    """Return each tensor's position in the layout, and a digest. The digest of a tensor of at most
    eight bytes (such as ``step``) is these bytes. The digest of a larger tensor is the CRC of its
    bytes.
    Two tensors with equal CRCs are taken for equal, and the first rank's tensor is saved.
    """
    found = [np.empty((2, 0), np.int64)]
    for places, numbers in wholes:
        rows = _rows_of(now, numbers)
        if rows.shape[1] <= 8:
            digests = np.pad(rows, ((0, 0), (0, 8 - rows.shape[1]))).view(np.int64)[:, 0]
        else:
            digests = np.array([_C.ckpt_crc32c(row) for row in rows])
        found.append(np.stack([np.array(places), digests]))
    return np.concatenate(found, axis=1)


def _rows_of(now: _StateStamp, numbers: Sequence[int]) -> np.ndarray:
    """Return the bytes of the tensors with these numbers, one row for each tensor. The tensors have
    the same dtype, shape and device.
    """
    first, count = now.tensors[numbers[0]], len(numbers)
    if first.numel() == 1 and first.device.type == "cpu":  # `step`: stack() would be slower
        nbytes = first.dtype.itemsize
        rows = np.empty((count, nbytes), np.uint8)
        targets = rows.ctypes.data + nbytes * np.arange(count)
        sources = now.values[-1].addresses[numbers]
        _C.ckpt_copy(np.stack([sources, targets, np.full(count, nbytes)], axis=1))
        return rows
    together = torch.stack([now.tensors[number] for number in numbers]).view(-1)
    return together.view(torch.uint8).cpu().numpy().reshape(count, -1)


def _agree(values: Sequence[np.ndarray | None]) -> bool:
    """Return True if every rank has digests and if each tensor that several ranks have is equal on
    these ranks. Under FSDP1 with original parameters, a rank has no state for a parameter of which
    it has no elements.
    """
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return False
    together = np.concatenate(found, axis=1)
    places, crcs = together[:, np.argsort(together[0], kind="stable")]
    return not ((places[1:] == places[:-1]) & (crcs[1:] != crcs[:-1])).any()


def _has_states_by_name(param: OptimParam) -> bool:
    """Return whether an optimizer's state of this parameter can be saved by parameter names."""
    try:
        if param.check_cut is not None:
            param.check_cut("")
    except NotImplementedError:
        return False
    return True


def _equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
