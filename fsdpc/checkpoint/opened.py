"""A checkpoint on disk: its tensors and where they lie, checked before anything is read.

What fsdpc has written has a manifest. Any other folder or file of safetensors is read as well,
without checksums.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdpc import _C
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.dtypes import dtype_of
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import Place
from fsdpc.checkpoint.manifest import Manifest
from fsdpc.checkpoint.saving import OPTIMIZER, OPTIMIZER_JSON, STATE_JSON
from fsdpc.checkpoint.values import from_json

_MOST_HEADER_BYTES = 100_000_000
_MOST_JSON_BYTES = 1 << 30


@dataclass
class StoredFile:
    """A safetensors file and its tensors, in the order in which they lie."""

    path: Path
    name: str  # in the manifest
    nbytes: int
    places: list[Place]
    metadata: dict[str, str]
    read: Callable[[np.ndarray], None] | None = None  # reads ranges where it is another format


@dataclass
class StoredSet:
    """The tensors of a set by name: ``where[name]`` is a file and a place in it."""

    files: list[StoredFile] = field(default_factory=list)
    where: dict[str, tuple[StoredFile, Place]] = field(default_factory=dict)


class Opened:
    """A checkpoint whose headers were read and compared with the manifest. Local.

    ``path``: a folder, or one safetensors file. ``CheckpointError`` names the file and what is
    wrong: damaged or hostile headers, missing files, names that leave the folder, symbolic links.
    """

    numbered = False  # parameters of the optimizer have names

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path if path.is_dir() else path.parent
        if path.is_dir():
            for folder in (OPTIMIZER, os.path.dirname(STATE_JSON)):
                _refuse_link(path / folder)
        self.manifest = self._read_manifest() if path.is_dir() else None
        self.model = self._open_model()
        has_optimizer = path.is_dir() and os.path.lexists(path / OPTIMIZER)
        self.optimizer = self._open_set(OPTIMIZER, OPTIMIZER) if has_optimizer else None

    @property
    def sets(self) -> dict[str, StoredSet]:
        named = {"model": self.model, OPTIMIZER: self.optimizer}
        return {name: found for name, found in named.items() if found is not None}

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint, compared with the manifest."""
        content = self._read_small(name)
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.root / name} is damaged: {error}") from error
        if not isinstance(body, dict):
            raise CheckpointError(f"{self.root / name} is damaged: it holds no object")
        return body

    def values(self, name: str, key: str) -> Any:
        """The plain values under one key of a JSON file."""
        body = self.read_json(name)
        if key not in body:
            raise CheckpointError(f"{self.root / name} is damaged: it has no {key!r}")
        return from_json(body[key], f"{key!r} in {self.root / name}")

    @property
    def kind(self) -> str:
        """What it is, in words."""
        if self.manifest is None:
            return "safetensors without a manifest of fsdpc"
        step = "" if self.manifest.step is None else f" of step {self.manifest.step}"
        return f"fsdpc checkpoint{step}, written by {self.manifest.world} ranks"

    def scheduler_state(self) -> Any:
        """``None`` if there is none."""
        return None if self.manifest is None else self.values(STATE_JSON, "scheduler")

    def extra_states(self) -> dict[str, Any]:
        """``get_extra_state()`` of modules."""
        return {} if self.manifest is None else self.values(STATE_JSON, "extra_state")

    def optimizer_forms(
        self, shape_of: Callable[[str], tuple[int, ...] | None]
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """``kinds`` and ``groups`` as in ``optimizer.State``."""
        return self.values(OPTIMIZER_JSON, "kinds"), self.values(OPTIMIZER_JSON, "param_groups")

    # --- the parts ---

    def _read_manifest(self) -> Manifest | None:
        if not os.path.lexists(self.path / _manifest.NAME):
            return None
        try:
            return _manifest.decode(_read(self.path / _manifest.NAME))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _read_small(self, name: str) -> bytes:
        content = _read(self.root / name)
        if self.manifest is not None:
            known = self.manifest.files.get(name)
            if known is None:
                raise CheckpointError(f"{self.root / name} is not in the manifest")
            if (len(content), _C.ckpt_crc32c(content)) != known:
                raise CheckpointError(f"{self.root / name} is damaged: its checksum differs")
        return content

    def _open_model(self) -> StoredSet:
        if self.path.is_dir():
            return self._open_set("", "model")
        return _collect([self._open_file(self.path.name)])

    def _open_set(self, folder: str, name: str) -> StoredSet:
        prefix = f"{folder}/" if folder else ""
        index = f"{prefix}{name}.safetensors.index.json"
        single = f"{prefix}{name}.safetensors"
        if os.path.lexists(self.root / index):
            if os.path.lexists(self.root / single):
                raise CheckpointError(
                    f"{self.root} has both {single} and {index}: remove the one that is not meant"
                )
            table = self.read_json(index).get("weight_map")
            names = _file_names(table, self.root / index)
            found = _collect([self._open_file(prefix + file) for file in names])
            _compare_index(table, found, self.root / index)
        elif os.path.lexists(self.root / single):
            found = _collect([self._open_file(single)])
        else:
            raise CheckpointError(
                f"{self.root / folder if folder else self.root} is no checkpoint: it has neither "
                f"{index.removeprefix(prefix)} nor {single.removeprefix(prefix)}"
            )
        if self.manifest is not None:
            expected = {p for p in self.manifest.headers if os.path.dirname(p) == folder}
            if expected != {file.name for file in found.files}:
                raise CheckpointError(f"{self.root}: the files of {name} are not the manifest's")
        return found

    def _open_file(self, name: str) -> StoredFile:
        path = self.root / name
        header, nbytes = _read_header(path)
        if self.manifest is not None:
            known = self.manifest.headers.get(name)
            if known is None or (nbytes, _C.ckpt_crc32c(header)) != known:
                raise CheckpointError(
                    f"{path} is damaged: its size or header is not the manifest's"
                )
        try:
            rows, metadata = _C.ckpt_header(header[8:], nbytes - len(header))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        places = []
        for number, (tensor, dtype, shape, begin, end) in enumerate(rows):
            torch_dtype = _dtype(dtype, f"{path}: tensor {tensor!r}")
            place = Place(tensor, torch_dtype, shape, len(header) + begin, end - begin, number)
            places.append(place)
        found = StoredFile(path, name, nbytes, places, metadata)
        if self.manifest is not None:
            _compare_digests(found, self.manifest)
        return found


def _dtype(name: str, what: str) -> torch.dtype:
    try:
        return dtype_of(name, what)
    except TypeError as error:
        raise CheckpointError(str(error)) from error


def _compare_digests(file: StoredFile, manifest: Manifest) -> None:
    known = manifest.tensors.get(file.name, {})
    for place in file.places:
        blocks = -(-place.nbytes // manifest.block_bytes) or 1
        if place.name not in known or len(known[place.name].blocks) != blocks:
            raise CheckpointError(f"{file.path}: the manifest does not fit tensor {place.name!r}")
    if len(known) != len(file.places):
        raise CheckpointError(f"{file.path}: the manifest has other tensors")


def _collect(files: list[StoredFile]) -> StoredSet:
    found = StoredSet(files)
    for file in files:
        for place in file.places:
            if place.name in found.where:
                raise CheckpointError(
                    f"tensor {place.name!r} is in {found.where[place.name][0].path} and in "
                    f"{file.path}"
                )
            place.index = len(found.where)
            found.where[place.name] = (file, place)
    return found


def _file_names(table: Any, index: Path) -> list[str]:
    """The files of an index, each a plain name in its folder."""
    if not isinstance(table, dict) or not all(
        isinstance(name, str) and isinstance(file, str) for name, file in table.items()
    ):
        raise CheckpointError(f"{index} has no weight_map of names to files")
    names: Iterable[str] = sorted(set(table.values()))
    for name in names:
        if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder")
    return list(names)


def _compare_index(table: dict[str, str], found: StoredSet, index: Path) -> None:
    held = {name: file.path.name for name, (file, _) in found.where.items()}
    for name in sorted(table.keys() | held.keys()):
        if table.get(name) != held.get(name):
            raise CheckpointError(
                f"{index}: tensor {name!r} should be in {table.get(name)!r} but is in "
                f"{held.get(name)!r}"
            )


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link, and links are not followed")


def open_regular(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file, not by way of a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        hint = ": it is a symbolic link, and links are not followed" if path.is_symlink() else ""
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}){hint}") from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file")
    return fd, info.st_size


def _pread(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    parts, at = [], offset
    while at < offset + nbytes:
        part = os.pread(fd, offset + nbytes - at, at)
        if not part:
            raise CheckpointError(
                f"{path} ends at byte {at} of {offset + nbytes}: the file was cut"
            )
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _read(path: Path) -> bytes:
    fd, size = open_regular(path)
    try:
        if size > _MOST_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, which is too many")
        return _pread(fd, size, 0, path)
    finally:
        os.close(fd)


def _read_header(path: Path) -> tuple[bytes, int]:
    """A file's bytes before its data, and its size; the length is checked before it is used."""
    fd, size = open_regular(path)
    try:
        if size < 8:
            raise CheckpointError(f"{path} has {size} bytes: no safetensors file is so short")
        first = _pread(fd, 8, 0, path)
        length = int.from_bytes(first, "little")
        if length == 0:
            raise CheckpointError(f"{path} was never finished: its header is empty")
        if length > _MOST_HEADER_BYTES or length > size - 8:
            raise CheckpointError(
                f"{path}: a header of {length} bytes in a file of {size} bytes: the file was cut, "
                "or is no safetensors file"
            )
        return first + _pread(fd, length, 8, path), size
    finally:
        os.close(fd)
