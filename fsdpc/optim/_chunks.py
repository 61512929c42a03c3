"""Offloaded states, which are stepped chunk by chunk through buffers.

A store is a file (``_disk.py``), or pinned host memory for parameters on a GPU (``_host.py``). It
has each state of each parameter as one range. A chunk is the part of the states that one buffer has
at a time (``_companions/state_layout.py``). The optimizer's class steps a chunk with its normal
step method. This method gets slices of parameters; the states of these slices are tensors over the
buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdpc._companions.state_layout import PAGE, Chunk, Extent, Field, Slice, lay_out
from fsdpc._engine.device import stand_in
from fsdpc._engine.interop import around
from fsdpc.optim._places import Place, local_of

MASTER = "master"
AVERAGE = "average"  # the name of the state that optim.Average adds to any optimizer
NARROW = (torch.bfloat16, torch.float16)
Wishes = Sequence[tuple[Tensor, Sequence[Extent]]]  # (parameter, its extents)


class Entry(NamedTuple):
    """A range of a parameter's elements that has a place in the layout of a store. ``index`` is the
    number of ``extent`` among the extents of ``param``.
    """

    param: Tensor
    index: int
    extent: Extent
    is_last: bool


class Ends(NamedTuple):
    """The elements [begin, end) of a parameter that a slice has. Only the last slice of a parameter
    increases the parameter's step counter.
    """

    begin: int
    end: int
    is_last: bool


class GuardedState(defaultdict[Any, Any]):
    """An optimizer's ``state`` with offloaded states. A read waits for transfers that still run,
    and raises an error if a failed step has updated only some of the states.
    """

    broken: str | None = None
    _quiet = 0

    def __init__(self, content: Any = (), store: Store | None = None) -> None:
        super().__init__(dict, content)
        self.store = store

    def check(self) -> None:
        """Raise an error if a failed step has updated only some of the states. Otherwise wait for
        transfers that still run.
        """
        if self.broken is not None:
            assert self.store is not None
            raise self.store.error(self.broken)
        if self.store is not None and not self._quiet:
            self.store.finish()

    def end_in_the_middle(self, error: BaseException) -> None:
        """Record that a step has failed after it had updated only some of the states."""
        assert self.store is not None
        self.broken = (
            f"a step of {self.store.name} ended in the middle ({error}): parameters and states are "
            "partly of this step and partly of the one before. Load a checkpoint of the model and "
            "of the optimizer"
        )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context in which reads of states do not wait for transfers, for code that does
        not need the values.
        """
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def __getitem__(self, key: Any) -> Any:
        self.check()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.check()
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.check()
        return super().pop(key, *default)

    def popitem(self) -> Any:
        self.check()
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.check()
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the keys. The override makes ``dict(state)`` call ``__getitem__``, which
        checks the states.
        """
        return super().__iter__()

    def copy(self) -> Any:
        """Return an ordinary ``defaultdict`` of the same states."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def items(self) -> Any:
        self.check()
        return super().items()

    def values(self) -> Any:
        self.check()
        return super().values()

    def clear(self) -> None:
        super().clear()
        self.broken = None

    def __reduce__(self) -> Any:
        """Make copies and pickles ordinary ``defaultdict`` objects, whose states are in memory."""
        return defaultdict, (dict,), None, None, iter(self.items())


class Store:
    """The offloaded states of one optimizer on this rank. Subclasses decide where the states are,
    and transfer chunks.
    """

    error: type[RuntimeError] = RuntimeError
    masters = False  # whether 16-bit parameters have a float32 master among the states
    ordinal: int | None = None  # the GPU on which steps run; None: the host
    page = PAGE  # bytes; states are transferred in multiples of a page

    def __init__(self, name: str, chunk_bytes: int) -> None:
        self.name = name
        self.chunk_bytes = chunk_bytes
        self.chunks: list[Chunk] = []
        self.entries: list[Entry] = []
        self.held: dict[Tensor, list[dict[str, Tensor]]] = {}  # per extent: states by name
        self.mapped: set[Tensor] = set()  # parameters whose states are stepped without buffers
        self.zero: set[tuple[Tensor, str]] = set()  # states that have never been written
        self.end = 0

    # --- what a subclass has ---------------------------------------------------------------------

    def choose(self, wanted: Wishes) -> None:
        """Choose the parameters whose states are in this store. ``NotImplementedError``: a
        parameter is not supported.
        """
        raise NotImplementedError

    def knows(self, param: Tensor) -> bool:
        """Return whether this store has decided where the parameter's states are. Equal on all
        ranks.
        """
        return param in self.held

    def takes(self, param: Tensor) -> bool:
        """Return whether the parameter's states are in this store."""
        return True

    def _grow(self, begin: int, end: int) -> Any:
        """Return new, zeroed memory for bytes [begin, end) of the store. ``_view`` makes tensors
        over this memory.
        """
        raise NotImplementedError

    def _view(self, memory: Any, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """Return a tensor over ``count`` elements of ``memory``, which is a result of ``_grow`` or
        a buffer.
        """
        raise NotImplementedError

    def passes(self, active: Sequence[Tensor]) -> Any:
        """Start the transfers of the first chunks that have states of these parameters, and return
        the pass over all such chunks.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until the store has the states of the last step."""

    def settle(self) -> None:
        """Wait for transfers that still run, and ignore their errors."""
        raise NotImplementedError

    # --- where states lie ------------------------------------------------------------------------

    def reserve(self, wanted: Wishes) -> None:
        """Reserve space for the states of parameters that have no space yet. ``OSError``,
        ``MemoryError``: there is too little space.
        """
        new: list[Entry] = []
        params = [param for param, _ in wanted if param not in self.held]
        for param, extents in wanted:
            if param in self.held:
                self._check_names(extents, self.held[param])
                continue
            last = len(extents) - 1
            new += [Entry(param, i, extent, i == last) for i, extent in enumerate(extents)]
        sizes = [entry.extent.wanted for entry in new]
        layout = lay_out(sizes, self.chunk_bytes, self.end, self.page)
        begin, number = self.end, len(self.entries)
        memory = self._grow(begin, layout.end) if layout.end > begin else None
        self.held.update((param, []) for param in params)
        for entry, offsets in zip(new, layout.offsets, strict=True):
            extent, places = entry.extent, tuple(at - begin for at in offsets)
            states = self.states(memory, extent, Slice(0, 0, extent.units, places))
            self.held[entry.param].append(states)
            self.zero.update((entry.param, name) for name in states)
        for chunk in layout.chunks:
            chunk.slices = [s._replace(number=s.number + number) for s in chunk.slices]
        self.entries += new
        self.chunks += layout.chunks
        self.end = layout.end

    def _check_names(self, extents: Sequence[Extent], held: Sequence[dict[str, Tensor]]) -> None:
        for extent, own in zip(extents, held, strict=True):
            if missing := {field.name for field in extent.states} - own.keys():
                raise ValueError(
                    f"{self.name}: states {sorted(missing)} cannot be added to parameters whose "
                    "states are offloaded already: set the option before the first step"
                )

    def states(self, memory: Any, extent: Extent, units: Slice) -> dict[str, Tensor]:
        """Return the states of a slice as 1-D tensors over ``memory``. ``units`` is the slice: a
        range of the extent's units (``Extent.unit`` elements each). In ``memory``, the states begin
        at ``units.places``.
        """
        low, high = extent.ends(units.begin, units.end)
        found = {}
        for state, place in zip(extent.states, units.places, strict=True):
            count = units.end - units.begin
            if not state.per_unit:
                place += (low + extent.lead - units.begin * extent.unit) * state.item
                count = high - low
            found[state.name] = self.view(memory, state.dtype, count, place)
        return found

    def view(self, memory: Any, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """Return the tensor of ``_view``, or an empty tensor if ``memory`` is None."""
        if memory is None:
            return torch.empty(0, dtype=dtype, device="cpu")
        return self._view(memory, dtype, count, offset)

    def zeros(self, param: Tensor, name: str) -> Tensor:
        """Fill the state with zeros and return it as ``tensor`` does."""
        if (param, name) in self.zero:
            self.zero.remove((param, name))
        else:
            self.finish()
            self.held[param][0][name].zero_()
        return self.tensor(param, name)

    def tensor(self, param: Tensor, name: str) -> Tensor:
        """Return the state as ``optimizer.state`` shows it: a DTensor if the parameter is a
        DTensor.
        """
        found = self.held[param][0][name].view(local_of(param).shape)
        return around(found, param._spec) if isinstance(param, DTensor) else found

    def adopt(self, param: Tensor, state: dict[str, Any]) -> None:
        """Copy states that were loaded, or set by the user, to their places in the store."""
        for name, own in next(iter(self.held.get(param, ())), {}).items():
            given = state.get(name)
            if isinstance(given, Tensor) and self.take_in(own, given):
                self.zero.discard((param, name))
                state[name] = self.tensor(param, name)

    def take_in(self, own: Tensor, given: Tensor) -> bool:
        """Copy ``given`` to ``own`` and return True. If both are the same memory, return False."""
        local = local_of(given).detach()
        if local.data_ptr() == own.data_ptr() and local.dtype == own.dtype:
            return False
        self.finish()
        own.copy_(local.reshape(own.shape))
        return True

    def due(self, active: Sequence[Tensor]) -> list[Chunk]:
        """Return the chunks that have states of these parameters, in the order of the layout."""
        wanted = {id(param) for param in active}
        return [
            chunk
            for chunk in self.chunks
            if any(id(self.entries[s.number].param) in wanted for s in chunk.slices)
        ]


def whole_extent(param: Tensor, states: Sequence[tuple[str, torch.dtype]]) -> Extent:
    """Return an ``Extent`` that has all elements of a parameter on this rank, and states with one
    value per element.
    """
    fields = tuple(Field(name, dtype.itemsize, dtype) for name, dtype in states)
    return Extent(0, local_of(param).numel(), fields)


class ChunkStates:
    """The states of a chunk's slices, as tensors over a buffer. An optimizer that steps slices has
    this object in place of a ``Store``.
    """

    masters = False

    def __init__(self) -> None:
        self.held: dict[int, dict[str, Tensor]] = {}

    def takes(self, shown: Tensor) -> bool:
        """Return True, because this object has the states of all slices."""
        return True

    def zeros(self, shown: Tensor, name: str) -> Tensor:
        """Return the memory of a state that a step makes. The step ignores the old content."""
        return self.held[id(shown)][name]


def step_chunks(optimizer: Any, reading: Any, members: Sequence[Any], scaling: Any) -> None:
    """Step the parameters of ``members`` chunk by chunk. ``members`` has one ``Members`` for each
    group. If the step fails after it has changed values, every later use of the states raises the
    store's error.
    """
    rows: dict[int, tuple[int, Tensor, Tensor]] = {}
    for number, found in enumerate(members):
        for param, value, grad in zip(found.params, found.values, found.grads, strict=True):
            rows[id(param)] = (number, value.view(-1), grad.view(-1))

    def step(chunk: Chunk, buffer: Any) -> None:
        _step_chunk(optimizer, chunk, buffer, rows, members, scaling)

    try:
        reading.run(step)
    except BaseException as error:
        reading.store.settle()
        if reading.began:
            optimizer.state.end_in_the_middle(error)
        raise
    for found in members:
        for param in found.params:
            optimizer._show_states(param)


def _step_chunk(
    optimizer: Any,
    chunk: Chunk,
    buffer: Any,
    rows: dict[int, tuple[int, Tensor, Tensor]],
    members: Sequence[Any],
    scaling: Any,
) -> None:
    store = optimizer._store
    worker = worker_of(optimizer)
    shown: list[list[Tensor]] = [[] for _ in members]
    grads: list[list[Tensor]] = [[] for _ in members]
    masters: list[tuple[Tensor, Tensor]] = []
    for units in chunk.slices:
        param, _, extent, is_last = store.entries[units.number]
        if id(param) not in rows:
            continue
        number, value, grad = rows[id(param)]
        states = store.states(buffer, extent, units)
        low, high = (extent.start + end for end in extent.ends(units.begin, units.end))
        part = value[low:high]
        master = states.get(MASTER)
        if master is not None:
            follow(master, part)
            masters.append((part, master))
            part = master
        ends = Ends(low, high, is_last and units.end == extent.units)
        optimizer._lend(worker, part, param, ends, states)
        worker._store.held[id(part)] = states
        shown[number].append(part)
        grads[number].append(grad[low:high])
    for group, found, parts, own in zip(optimizer.param_groups, members, shown, grads, strict=True):
        if parts:
            slices = found._replace(params=parts, values=parts, grads=own, copies=[])
            worker._step_group(group, slices, scaling)
    for part, master in masters:
        part.copy_(master)


def worker_of(optimizer: Any) -> Any:
    """Return an optimizer that steps slices of parameters by the rules of ``optimizer``. The states
    of the slices are separate from ``optimizer.state``.
    """
    worker = object.__new__(type(optimizer))
    worker.__dict__.update(optimizer.__dict__)
    worker.state, worker._store, worker._known, worker._order = {}, ChunkStates(), {}, {}
    worker._begun, worker._where = {}, optimizer._store.ordinal
    return worker


def follow(master: Tensor, value: Tensor) -> None:
    """Copy to the master those elements of ``value`` that differ in a bit from the rounded master.
    The program has changed these elements since the last step. On a GPU there is no host sync.
    """
    changed = master.to(value.dtype).view(torch.int16) != value.view(torch.int16)
    if value.is_cuda or stand_in() or bool(changed.any()):
        torch.where(changed, value.to(master.dtype), master, out=master)


def slice_of_place(place: Place, begin: int, end: int) -> Place:
    """Return the place of elements [begin, end) of a parameter's local tensor."""
    cut = []
    for span in place.spans:
        low, high = max(span.at, begin), min(span.at + span.count, end)
        if low < high:
            first = span.begin + low - span.at
            cut.append(span._replace(begin=first, at=low - begin, count=high - low))
    return Place(cut, place.group)
