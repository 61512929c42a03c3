"""Folders of torch's distributed checkpoints (DCP), read by torch's own reader, tensor by tensor.

The index of such a folder is a pickle. Only the classes that torch puts into an index are
unpickled, and only their instances get attributes, so that the pickle cannot run code or change a
class.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsdpc._companions.spans import blocks_of
from fsdpc._torch import dcp_index_classes
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.held import Root

INDEX = ".metadata"  # torch writes this file last
KEYS = "fsdpc.keys"  # the key of the saved dict under which the result of ``keys_of`` is saved
_INDEX_BYTES = 1 << 30  # a larger index is refused; this is enough for several million chunks
_KEPT_BYTES = 256 << 20
_PLAIN = (str, int, float, bool, type(None))


class TextKeys(dict[Any, Any]):
    """A dict with keys that perhaps were not strings before the save: DCP writes every key as a
    string.
    """


@dataclass
class Stored:
    """A tensor in a file that torch wrote. ``read(first, target)`` fills the 1-D ``target`` with
    elements of the whole tensor, in row-major order from element ``first`` on, cast to the dtype of
    ``target``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, torch.Tensor], None]


@dataclass
class Pickled:
    """A value that is not a tensor. ``get`` reads the value, without running code of the file."""

    get: Callable[[], Any]


class _Kept(threading.local):
    """A cache of chunks of the tensor that this thread is reading, the newest chunk last."""

    def __init__(self) -> None:
        self.name = ""
        self.parts: dict[int, torch.Tensor] = {}

    def room(self, nbytes: int) -> None:
        """Drop the oldest chunks until there is room for ``nbytes`` more bytes."""
        used = sum(part.nbytes for part in self.parts.values())
        for number in list(self.parts):
            if used + nbytes > _KEPT_BYTES:
                used -= self.parts.pop(number).nbytes


class Folder:
    """The values of a DCP folder. Local. ``trust`` allows the index to contain any class.

    Raises ``CheckpointError`` if the index is damaged or contains classes that torch does not put
    into an index, or if the files do not match the index.
    """

    def __init__(self, path: Path, trust: bool = False) -> None:
        self.path, self.root = path, Root(path)
        metadata = self._read_index(trust)
        try:
            self._paths = dict(metadata.planner_data or {})
            for name, keys in self._paths.items():
                if not keys or ".".join(map(str, keys)) != name:
                    raise self._misplaced(name, keys)
            self._stored = {
                name: _without_doubles(form) if isinstance(form, TensorStorageMetadata) else None
                for name, form in metadata.state_dict_metadata.items()
            }
            self._check_files(metadata.storage_data)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged index may have values of any type
            raise CheckpointError(
                f"{path / INDEX} is damaged: {type(error).__name__}: {error}"
            ) from error
        own = self.root.folder.proc_path
        self._reader = FileSystemReader(own if os.path.isdir(own) else str(path))
        self._reader.set_up_storage_reader(metadata, True)
        self._kept = _Kept()

    def _misplaced(self, name: str, keys: Any) -> CheckpointError:
        return CheckpointError(f"{self.path / INDEX} is damaged: {name!r} stands at {keys!r:.200}")

    def tree(self) -> dict[str, Any]:
        """Return the saved dict, with ``Stored`` and ``Pickled`` objects in place of its values."""
        root: dict[Any, Any] = {}
        for name, form in self._stored.items():
            *parents, last = where = self._paths.get(name, (name,))
            place, leaf = root, self._leaf(name, form)
            try:
                for key in parents:
                    place = place.setdefault(key, {})
                alone = place.setdefault(last, leaf) is leaf
            except (AttributeError, TypeError) as error:  # a value stands where a dict must be
                raise self._misplaced(name, where) from error
            if not alone:
                raise self._misplaced(name, where)
        if isinstance(root.get(KEYS), Pickled):
            try:
                keys = {path: (own, counts) for path, own, counts in root.pop(KEYS).get()}
                for path in keys:  # DCP does not write empty dicts
                    place = root
                    for key in path:
                        place = place.setdefault(key, {})
                return dict(_shaped(root, keys))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.path}: the value {KEYS!r} is damaged: {type(error).__name__}: {error}"
                ) from error
        return dict(_shaped(root, None))

    def _leaf(self, name: str, form: TensorStorageMetadata | None) -> Stored | Pickled:
        if form is None:
            return Pickled(lambda: self._value(name))
        shape = tuple(form.size)
        return Stored(form.properties.dtype, shape, lambda first, to: self._fill(name, first, to))

    def _fill(self, name: str, first: int, target: torch.Tensor) -> None:
        form = self._stored[name]
        assert form is not None
        plan = _Blocks(name, form, *_blocks(tuple(form.size), first, target))
        direct = []
        for item in plan.create_local_plan().items:
            number = item.storage_index.index
            assert number is not None
            if 2 * math.prod(item.lengths) > math.prod(form.chunks[number].sizes):
                direct.append(item)
            else:
                part = _part(self._chunk(name, number), item.storage_offsets, item.lengths)
                plan.resolve_tensor(item).copy_(part)
        if direct:
            self._read(name, LoadPlan(direct), plan)

    def _chunk(self, name: str, number: int) -> torch.Tensor:
        """Return a whole chunk of a tensor, and keep the chunk in a cache. Torch's reader always
        reads a whole chunk. A rank that has some columns of a matrix needs a few elements of each
        row. Without the cache it would read the chunk once per row.
        """
        form, kept = self._stored[name], self._kept
        assert form is not None
        if kept.name != name:
            kept.name, kept.parts = name, {}
        found = kept.parts.get(number)
        if found is None:
            chunk, dtype = form.chunks[number], form.properties.dtype
            kept.room(math.prod(chunk.sizes) * dtype.itemsize)
            found = torch.empty(chunk.sizes, dtype=dtype, device="cpu")
            plan = _Blocks(name, form, [chunk], [found])
            self._read(name, plan.create_local_plan(), plan)
            kept.parts[number] = found
        return found

    def _value(self, name: str) -> Any:
        plan = _Value(name)
        self._read(name, plan.create_local_plan(), plan)
        return plan.value

    def _read(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        try:
            self._reader.read_data(self._reader.prepare_local_plan(plan), planner).wait()
        except Exception as error:  # a damaged file can make torch's reader raise anything
            raise CheckpointError(
                f"{self.path}: {name!r} cannot be read: {type(error).__name__}: {error}"
            ) from error

    # --- the index ---

    def _read_index(self, trust: bool) -> Metadata:
        held = self.root.open(INDEX)
        if held.size > _INDEX_BYTES:
            raise CheckpointError(f"{self.path / INDEX} has {held.size} bytes, which is no index")
        content = held.read(held.size, 0, self.path / INDEX)
        try:
            unpickler = (pickle.Unpickler if trust else _Unpickler)(io.BytesIO(content))
            found = unpickler.load()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path / INDEX} {error}") from None
        except Exception as error:  # a pickle can raise anything
            raise CheckpointError(
                f"{self.path / INDEX} is damaged: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{self.path / INDEX} is no index of torch's")
        return found

    def _check_files(self, places: Any) -> None:
        """Check that no chunk of a tensor is missing, and that no file is missing or too short.
        Raises ``CheckpointError`` otherwise.
        """
        sizes: dict[str, int] = {}
        for name, form in self._stored.items():
            if form is None:
                keys = [MetadataIndex(name)]
            else:
                keys = [MetadataIndex(name, chunk.offsets) for chunk in form.chunks]
                problem = _gap(tuple(form.size), form.chunks)
                if problem:
                    raise CheckpointError(f"{self.path}: the parts of {name!r} {problem}")
            for key in keys:
                if key not in places:
                    raise CheckpointError(f"{self.path}: the index has no place of {name!r}")
                place = places[key]
                file = place.relative_path
                if file not in sizes:
                    sizes[file] = self._size(file)
                if place.offset < 0 or place.offset + place.length > sizes[file]:
                    raise CheckpointError(
                        f"{self.path / file} has {sizes[file]} bytes, but {name!r} is to end at "
                        f"byte {place.offset + place.length}: the file was cut"
                    )

    def _size(self, file: str) -> int:
        # An object of another class could define its own ``==``, so only a str is accepted.
        if type(file) is not str or file != os.path.basename(file) or file in ("", ".", ".."):
            raise CheckpointError(
                f"{self.path / INDEX} names the file {file!r}, which is not in its folder"
            )
        return self.root.open(file).size


class _Unpickler(pickle._Unpickler):
    """The unpickler that is written in Python: unlike the one in C, this class lets a subclass
    refuse single opcodes of a pickle.
    """

    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        found = dcp_index_classes().get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype):
            found = getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            found = _member_of
        if found is None:
            raise _foreign(f"{module}.{name}")
        return found

    def load_build(self) -> None:
        """Set attributes, but only of instances of the classes of torch's index. Attributes of a
        class or a function would remain after the load, and could change the results of the checks
        of names and places.
        """
        state, target = self.stack[-1], self.stack[-2]
        if not dataclasses.is_dataclass(target) or isinstance(target, type):
            raise _foreign(f"attributes for {target!r:.60}")
        if isinstance(state, tuple) and len(state) == 2:  # pickle would set even __class__
            raise _foreign(f"attributes in two parts for a {type(target).__name__}")
        pickle._Unpickler.load_build(self)

    dispatch[pickle.BUILD[0]] = load_build


def _member_of(kind: Any, name: Any) -> enum.Enum:
    """Return a member of an Enum, in place of ``getattr``: the first releases of Python 3.11 pickle
    a member as a call of ``getattr``.
    """
    if not (isinstance(kind, enum.EnumMeta) and type(name) is str and name in kind.__members__):
        raise _foreign(f"builtins.getattr of {kind!r:.60}")
    return kind.__members__[name]


def _foreign(what: str) -> CheckpointError:
    return CheckpointError(
        f"has {what}, which is not of an index of torch's, so that reading it could run code "
        "(convert --trust-pickle reads it all the same)"
    )


def _without_doubles(form: TensorStorageMetadata) -> TensorStorageMetadata:
    """Return the tensor's metadata, with chunks that several ranks have written listed once."""
    chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)): chunk for chunk in form.chunks}
    return TensorStorageMetadata(form.properties, form.size, list(chunks.values()))


def _gap(shape: tuple[int, ...], chunks: Sequence[ChunkStorageMetadata]) -> str:
    """Return why the chunks do not cover each element of the tensor exactly once, or an empty text
    if they do.
    """
    boxes = sorted((tuple(c.offsets), tuple(c.sizes)) for c in chunks if math.prod(c.sizes))
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held != whole:
        return f"have {held} elements, the tensor has {whole}: a rank's part is missing"
    ends = [tuple(map(sum, zip(*box, strict=True))) for box in boxes]
    dims = range(len(shape))
    for (begin, _), end in zip(boxes, ends, strict=True):
        if not all(0 <= begin[d] < end[d] <= shape[d] for d in dims):
            return f"have one at {begin} that ends at {end}, outside of the tensor"
    cut = [d for d in dims if any(sizes[d] != shape[d] for _, sizes in boxes)]
    # If only one dimension is cut, only neighbours in the sorted list can overlap.
    for i, (_, sizes) in enumerate(boxes):
        for j in range(i + 1, min(len(boxes), i + 2) if len(cut) == 1 else len(boxes)):
            other = boxes[j][0]
            if all(other[d] < ends[i][d] and boxes[i][0][d] < ends[j][d] for d in dims):
                return f"overlap, at {boxes[i][0]} of {sizes} and at {other}"
    return ""


_Keys = dict[tuple[Any, ...], tuple[tuple[Any, ...], bool]]


def _shaped(tree: Any, keys: _Keys | None, path: tuple[Any, ...] = ()) -> Any:
    """Return the tree in its form before the save. A dict whose path is in ``keys`` gets its
    original keys. A dict whose keys are 0, 1, ... becomes a list, because torch's reader returns a
    saved list as such a dict.
    """
    if not isinstance(tree, dict):
        return tree
    found = {key: _shaped(value, keys, (*path, key)) for key, value in tree.items()}
    if keys is not None and path in keys:
        own, counts = keys[path]
        made = {key: found[str(key)] for key in own}
        return Counter(made) if counts else made
    if found and all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    return TextKeys(found) if keys is None and any(map(_may_be_other, found)) else found


def _may_be_other(key: Any) -> bool:
    """Return True if the key perhaps was not a string before the save."""
    if not isinstance(key, str) or key[:1] == "(" or key in ("None", "True", "False"):
        return True
    try:
        float(key)
    except ValueError:
        return False
    return True


def keys_of(tree: Any, path: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Return what DCP would lose of the dicts in ``tree``: DCP writes every key as a string and
    does not write empty dicts. The result has a row for each dict that is empty or has a key that
    is not a string: the path of the dict (as DCP writes the path), the dict's keys, and whether the
    dict is a Counter. Raises ``TypeError`` if a key is neither a plain value nor a tuple of plain
    values.
    """
    if isinstance(tree, list):
        return tuple(row for i, value in enumerate(tree) for row in keys_of(value, (*path, i)))
    if not isinstance(tree, Mapping):
        return ()
    for key in tree:
        if not all(type(part) in _PLAIN for part in (key if type(key) is tuple else (key,))):
            raise TypeError(
                f"a key of {'.'.join(map(str, path))} is {key!r:.60}, which torch's format would "
                "write as a text: save without format="
            )
    rows = [row for key, value in tree.items() for row in keys_of(value, (*path, str(key)))]
    if not all(type(key) is str for key in tree) or not tree:
        rows.append((path, tuple(tree), isinstance(tree, Counter)))
    return tuple(rows)


# --- what torch's reader is to read --------------------------------------------------------------


class _Planner(LoadPlanner):
    """A planner for torch's reader that plans a load on a single rank."""

    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        pass

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise NotImplementedError

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _blocks(
    shape: tuple[int, ...], first: int, target: torch.Tensor
) -> tuple[list[ChunkStorageMetadata], list[torch.Tensor]]:
    """Return the blocks of a tensor that together have the elements from ``first`` on, as many as
    the 1-D ``target`` has. Return also the part of ``target`` for each block.
    """
    blocks, targets, at = [], [], 0
    for offsets, sizes in blocks_of(shape, first, len(target)):
        count = math.prod(sizes)
        blocks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        targets.append(target[at : at + count].view(sizes))
        at += count
    return blocks, targets


class _Blocks(_Planner):
    """A planner that reads blocks of a tensor, each into its target."""

    def __init__(
        self,
        name: str,
        form: TensorStorageMetadata,
        blocks: list[ChunkStorageMetadata],
        targets: list[torch.Tensor],
    ) -> None:
        self._name, self._form = name, form
        self._blocks, self._targets = blocks, targets

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(create_read_items_for_chunk_list(self._name, self._form, self._blocks))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index
        assert index is not None
        return _part(self._targets[index], read_item.dest_offsets, read_item.lengths)


def _part(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _Value(_Planner):
    """A planner that reads one value that is not a tensor."""

    def __init__(self, name: str) -> None:
        self._index, self.value = MetadataIndex(name), None

    def create_local_plan(self) -> LoadPlan:
        none = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, self._index, none, self._index, none, none)
        return LoadPlan([item])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = torch.load(value, map_location="cpu", weights_only=True)
