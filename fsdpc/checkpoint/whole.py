"""Gathering of the full values of a model's tensors, bucket by bucket, into memory of the caller.
The units that shard the tensors gather the values. A rank needs memory for one bucket, and for the
values of this bucket before a cast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpc import _C
from fsdpc._fsdp1.collect import unit_modules
from fsdpc._fsdp1.names import cleaner
from fsdpc._fsdp2.state import states_below
from fsdpc._torch import storage_use_count
from fsdpc.checkpoint import torch_fsdp
from fsdpc.checkpoint.dtypes import can_cast
from fsdpc.checkpoint.kept import Stamp, stamp_of
from fsdpc.checkpoint.layout import file_dtype
from fsdpc.checkpoint.model import Model, named_buffers, read_model
from fsdpc.checkpoint.names import Only, chooser, cut_model

_NONE = torch.empty(0, device="cpu")
ALIGNED = 4096  # tensors in a bucket begin at pages, so that readers can map each tensor


@dataclass
class Part:
    """A tensor with all its names. ``dtype`` is its dtype in the bucket, ``stored`` its dtype in
    the model. The tensor is parameter ``number`` of ``unit``. If ``unit`` is None, the tensor is
    ``tensor``: a DTensor, or a plain tensor. Each rank has its own values of a plain tensor.
    """

    names: list[str]
    dtype: torch.dtype
    stored: torch.dtype
    shape: tuple[int, ...]
    unit: Any = None
    number: int = 0
    tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """The number of bytes that the tensor takes in a bucket."""
        return -(-self.nbytes // ALIGNED) * ALIGNED

    @property
    def is_direct(self) -> bool:
        """Whether the values have the same dtype and layout in the unit and in the bucket."""
        return self.dtype == self.stored and self.unit.dims[self.number] <= 0


def room_of(bucket: Sequence[Part]) -> int:
    """Return the number of bytes of a bucket."""
    return sum(part.room for part in bucket)


def placed(bucket: Sequence[Part], room: Tensor) -> list[Tensor]:
    """Return the bucket's tensors as views of ``room``, a 1-D tensor of bytes."""
    found, at = [], 0
    for part in bucket:
        found.append(room[at : at + part.nbytes].view(part.dtype).view(part.shape))
        at += part.room
    return found


class Rooms:
    """Memory for buckets. The memory is reused when no other tensor refers to it."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return a tensor of at least ``nbytes`` bytes. On a GPU the tensor is always new, because
        torch's allocator reuses the memory.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        for room in self._kept:
            if len(room) >= nbytes and _is_free(room):
                return room
        self._kept = [room for room in self._kept if not _is_free(room)]  # free but too small
        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._kept.append(made)
        return made


def _is_free(room: Tensor) -> bool:
    storage = room.untyped_storage()
    return storage_use_count(storage) <= 2  # the uses by ``room`` and by ``storage``


class Whole:
    """The tensors of a model in ``buckets``, in the order of the units; buffers come last.

    Local. Raises ``TypeError``, ``ValueError`` or ``RuntimeError`` as ``read_model`` does, or if
    the model has units of torch's ``FullyShardedDataParallel``.
    """

    def __init__(
        self,
        model: nn.Module,
        everyone: tuple[int, int],
        rooms: Rooms,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int,
        only: Only = None,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and can_cast(dtype)):
            raise TypeError(
                f"dtype must be torch.float32, bfloat16, float16 or float64, not {dtype!r}"
            )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
        found = read_model(model, everyone)
        self._stamp = stamp_of(model, everyone)
        if not unit_modules(model) and torch_fsdp.handles(model):
            raise TypeError(
                "the model is sharded by torch's FullyShardedDataParallel, whose units cannot be "
                "read one by one here: call fsdpc.install() before it is wrapped, or use torch's "
                "fully_shard"
            )
        if only is not None:
            cut_model(found, chooser(only), only)
        self._tensors = found.touched
        self.buckets = list(_cut(_parts(model, found, dtype), bucket_bytes))
        self._rooms = rooms

    def let_go(self) -> list[Any] | None:
        """Drop the references to tensors and units. They come back when ``hold`` is called with an
        equal stamp. Return the stamp's values, or None if later changes of the model could not be
        detected. Local.
        """
        stamp, self._stamp = self._stamp, None
        if stamp is None or not stamp.values[-1].let_go():
            return None
        known = {
            id(each): number for number, each in enumerate([None, *stamp.tensors, *stamp.units])
        }
        held = [*self._tensors, *(each for part in self.parts for each in (part.tensor, part.unit))]
        if not all(id(each) in known for each in held):
            return None
        self._numbers = [known[id(each)] for each in held]
        self._tensors = [_NONE for _ in self._tensors]
        for part in self.parts:
            part.tensor = part.unit = None
        return stamp.values

    def hold(self, stamp: Stamp) -> None:
        """Refer to the tensors and units of ``stamp`` in place of those that ``let_go`` dropped.
        Local.
        """
        known = [None, *stamp.tensors, *stamp.units]
        held = iter([known[number] for number in self._numbers])
        self._tensors = [next(held) for _ in self._tensors]
        for part in self.parts:
            part.tensor, part.unit = next(held), next(held)
        self._stamp = stamp

    @property
    def parts(self) -> Iterator[Part]:
        return (part for bucket in self.buckets for part in bucket)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        for part in self.parts:
            if part.unit is not None:
                return torch.device(part.unit.device)
            if part.tensor is not None:
                return part.tensor.device
        return torch.device("cpu")

    @cached_property
    def digest(self) -> int:
        """A checksum of the names, dtypes and shapes in the buckets, by which ranks compare their
        buckets.
        """
        crc = 0
        for number, bucket in enumerate(self.buckets):
            for part in bucket:
                text = repr((number, part.names, part.dtype, part.stored, part.shape))
                crc = _C.ckpt_crc32c(text.encode(), crc)
        return crc

    def versions(self) -> list[int]:
        """Return the tensors' version counters. An in-place write changes a tensor's counter."""
        return [tensor._version for tensor in self._tensors]

    @torch.no_grad()
    def read(self, bucket: Sequence[Part], room: Tensor | None) -> list[tuple[str, Tensor]]:
        """Read the bucket's values into ``room`` and return the tensors under all their names. If
        ``room`` is None, only take part in the reads of the other ranks. Collective over the groups
        of the bucket's units.
        """
        targets = [None] * len(bucket) if room is None else placed(bucket, room)
        units: dict[int, list[tuple[Part, Tensor | None]]] = {}
        for part, target in zip(bucket, targets, strict=True):
            if part.unit is not None:
                units.setdefault(id(part.unit), []).append((part, target))
            elif isinstance(part.tensor, DTensor):
                full = part.tensor.full_tensor()
                if target is not None:
                    target.copy_(full)
            elif target is not None and part.tensor is not None:
                target.copy_(part.tensor)
        for items in units.values():
            self._read_unit(items)
        pairs = zip(bucket, targets, strict=True)
        return [(name, t) for part, t in pairs if t is not None for name in part.names]

    def _read_unit(self, items: Sequence[tuple[Part, Tensor | None]]) -> None:
        unit = items[0][0].unit
        own: list[Tensor | None] = [None] * len(unit.infos)
        cast = [(part, target) for part, target in items if target is not None]
        cast = [(part, target) for part, target in cast if not part.is_direct]
        scratch = iter(self._scratches(cast))
        for part, target in items:
            is_direct = target is None or part.is_direct
            own[part.number] = target if is_direct else next(scratch)
        unit.flat.read(own)
        for part, target in cast:
            value = own[part.number]
            assert value is not None
            dim = unit.dims[part.number]
            target.copy_(value.movedim(0, dim) if dim > 0 else value)

    def _scratches(self, cast: Sequence[tuple[Part, Tensor]]) -> list[Tensor]:
        """Return temporary memory for values before they are cast, in the dtypes and layouts that
        the units have.
        """
        if not cast:
            return []
        forms = [
            Part(part.names, part.stored, part.stored, tuple(part.unit.shapes[part.number]))
            for part, _ in cast
        ]
        return placed(forms, self._rooms.take(room_of(forms), cast[0][1].device))


def _cut(parts: Iterable[Part], bucket_bytes: int) -> Iterator[list[Part]]:
    """Yield the parts in buckets. A bucket has at most ``bucket_bytes`` bytes, before and after the
    cast, or a single part.
    """
    bucket: list[Part] = []
    used = 0
    for part in parts:
        nbytes = math.prod(part.shape) * max(part.dtype.itemsize, part.stored.itemsize)
        nbytes = -(-nbytes // ALIGNED) * ALIGNED
        if bucket and used + nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(part)
        used += nbytes
    if bucket:
        yield bucket


def _parts(model: nn.Module, found: Model, dtype: torch.dtype | None) -> Iterator[Part]:
    units, tensors = _owners(model, found), _tensors(model, found)
    others: dict[str, list[str]] = {}
    for alias, name in found.aliases.items():
        others.setdefault(name, []).append(alias)
    for entry in found.entries:
        names = [entry.name, *others.get(entry.name, [])]
        part = Part(names, file_dtype(entry, dtype), entry.dtype, entry.shape)
        part.unit, part.number = units.get(entry.name, (None, 0))
        if part.unit is None:
            scale = entry.memory.view(entry.shape) if entry.exact else None
            part.tensor = tensors.get(entry.name, scale)
        yield part


def _owners(model: nn.Module, found: Model) -> dict[str, tuple[Any, int]]:
    """Return a dict from the name of each sharded tensor to a pair: the unit that shards the
    tensor, and the number of the tensor in this unit.
    """
    flat = {e.name: (e.unit, e.number) for e in found.entries if e.unit is not None}
    numbers = {}
    states = [each for state in states_below(model) for each in (state, *state._others)]
    for unit in (state._unit for state in states if state._unit is not None):
        for number, param in enumerate(unit.shard_params):
            if unit.parallel[number] is None:
                numbers[id(param)] = (unit, number)
    held = ((each.covers[0][0].name, numbers.get(id(each.param))) for each in found.params)
    return flat | {name: place for name, place in held if place is not None}


def _tensors(model: nn.Module, found: Model) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, to look up tensors that no unit shards."""
    tensors: dict[str, Tensor] = {each.names[0]: each.param for each in found.params if each.covers}
    clean = cleaner(model)
    for name, buffer, is_saved in named_buffers(model):
        if is_saved:
            tensors.setdefault(clean(name), buffer)
    return tensors
