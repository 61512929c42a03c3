"""A checkpoint on disk: its tensors and their places in files, checked before tensors are read.

A checkpoint that fsdpc has written has a manifest. Any other folder or file of safetensors is read
as well, without checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdpc import _C
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.dtypes import dtype_of
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.held import Held
from fsdpc.checkpoint.layout import Place
from fsdpc.checkpoint.manifest import Manifest
from fsdpc.checkpoint.saving import OPTIMIZER, OPTIMIZER_JSON, STATE_JSON
from fsdpc.checkpoint.steps import folder_of, read_steps
from fsdpc.checkpoint.storage import AnyPath, RemoteFile, place_of
from fsdpc.checkpoint.values import from_json

_MOST_HEADER_BYTES = 100_000_000
_MOST_JSON_BYTES = 1 << 30
_MOST_SHOWN = 12


@dataclass
class StoredFile:
    """A file, usually of safetensors, and its tensors in the order in which the file has them."""

    path: AnyPath
    name: str  # the file's name in the manifest
    nbytes: int
    places: list[Place]
    metadata: dict[str, str]
    held: Held | RemoteFile | None = None
    # Only for a file that is not safetensors: a function that reads a table of ranges, and the
    # tensors of the file (see ``Stored``).
    read: Callable[[np.ndarray], None] | None = None
    leaves: Sequence[Any] | None = None


@dataclass
class StoredSet:
    """The files and tensors of a set. ``where[name]`` is the file and the place of a tensor."""

    files: list[StoredFile] = field(default_factory=list)
    where: dict[str, tuple[StoredFile, Place]] = field(default_factory=dict)


class Opened:
    """A checkpoint whose headers were read and compared with the manifest. Local.

    ``path`` is a folder or one safetensors file. For ``links`` see ``Root``. Raises
    ``CheckpointError``, which names the file, for damaged or malicious headers, missing files,
    names that lead out of the folder, and symbolic links.
    """

    numbered = False  # true if an optimizer's state has its parameters by number, not by name

    def __init__(self, path: AnyPath, *, links: bool = False) -> None:
        self.path = path = place_of(path)
        self.root = (path if path.is_dir() else path.parent).held(links=links)
        self.manifest: Manifest | None = None
        self._small: dict[str, CheckpointError] = {}
        if path.is_dir():
            for folder in (OPTIMIZER, os.path.dirname(STATE_JSON)):
                self._refuse_link(folder)
            self.manifest = self._read_manifest()
        self.model = self._open_model()
        self.optimizer: StoredSet | None = None
        if path.is_dir() and self._has_optimizer():
            self.optimizer = self._open_set(OPTIMIZER, OPTIMIZER)
        if self.manifest is None and path.is_dir() and self.root.replaced():
            raise CheckpointError(f"{path} was removed while it was opened")

    @property
    def sets(self) -> dict[str, StoredSet]:
        named = {"model": self.model, OPTIMIZER: self.optimizer}
        return {name: found for name, found in named.items() if found is not None}

    @property
    def stamp(self) -> Any:
        """Return the stamps of the opened files; see ``Root.stamp``."""
        return self.root.stamp

    def check_unwritten(self) -> None:
        """Check the files as ``Root.check_unwritten`` does, but only if there is no manifest: the
        checksums of a manifest detect more.
        """
        if self.manifest is None:
            self.root.check_unwritten()

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, after it was compared with the manifest."""
        content = self.read_small(name)
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.root.path / name} is damaged: {error}") from error
        if not isinstance(body, dict):
            raise CheckpointError(f"{self.root.path / name} is damaged: it holds no object")
        return body

    def values(self, name: str, key: str) -> Any:
        """Return the plain values under one key of a JSON file."""
        body = self.read_json(name)
        if key not in body:
            raise CheckpointError(f"{self.root.path / name} is damaged: it has no {key!r}")
        return from_json(body[key], f"{key!r} in {self.root.path / name}")

    @property
    def kind(self) -> str:
        """Return a text for users that says what kind of checkpoint this is."""
        if self.manifest is None:
            return "safetensors without a manifest of fsdpc"
        step = "" if self.manifest.step is None else f" of step {self.manifest.step}"
        return f"fsdpc checkpoint{step}, written by {self.manifest.world} ranks"

    @property
    def aliases(self) -> dict[str, str]:
        """Return a dict from aliases of tensors to the names under which the tensors are stored.
        The aliases come from the metadata of the files.
        """
        pairs = [pair for file in self.model.files for pair in file.metadata.items()]
        where = self.model.where
        return {alias: name for alias, name in pairs if name in where and alias not in where}

    @property
    def left(self) -> list[str]:
        """Return the names in the folder, and the keys in files' metadata, that do not belong to
        the checkpoint.
        """
        files = [file for stored in self.sets.values() for file in stored.files]
        known = {"format", *self.aliases}
        left = [f"{key!r} in the metadata of {file.name}" for file in files for key in file.metadata
                if key not in known]  # fmt: skip
        return left + (self.root.unopened() if self.path.is_dir() else [])

    def scheduler_state(self) -> Any:
        """Return the scheduler's state, or ``None`` if there is none."""
        return None if self.manifest is None else self.values(STATE_JSON, "scheduler")

    def extra_states(self) -> dict[str, Any]:
        """Return the saved results of the modules' ``get_extra_state()``, by name."""
        return {} if self.manifest is None else self.values(STATE_JSON, "extra_state")

    def optimizer_forms(
        self, shape_of: Callable[[str], tuple[int, ...] | None]
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """Return ``kinds`` and ``groups`` of the optimizer's state; see ``optimizer.State``."""
        return self.values(OPTIMIZER_JSON, "kinds"), self.values(OPTIMIZER_JSON, "param_groups")

    # --- the parts ---

    def _refuse_link(self, folder: str) -> None:
        if self.root.is_link(folder):
            raise CheckpointError(
                f"{self.path / folder} is a symbolic link, and links are not followed"
            )

    def _has_optimizer(self) -> bool:
        if self.manifest is None:
            return self.root.exists(OPTIMIZER)
        return OPTIMIZER_JSON in self.manifest.files

    def _read_manifest(self) -> Manifest | None:
        if not self.root.exists(_manifest.NAME):
            for name in (STATE_JSON, OPTIMIZER_JSON):
                if self.root.exists(name):
                    raise CheckpointError(
                        f"{self.path} is a checkpoint of fsdpc without its {_manifest.NAME}, which "
                        f"has the checksums and says what belongs to it; there is {name}. Was all "
                        "of the folder copied? To read the tensors as they are, without optimizer, "
                        "extra and checksums, move the model's files to a folder of their own"
                    )
            return None
        try:
            found = _manifest.decode(self._read(_manifest.NAME))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        for name in found.files:
            try:
                self.root.open(name)
            except CheckpointError as error:  # ``_read`` raises the error later
                if self.root.replaced():
                    raise
                self._small[name] = error
        return found

    def _read(self, name: str) -> bytes:
        if name in self._small:
            raise self._small[name]
        held, path = self.root.open(name), self.root.path / name
        if held.size > _MOST_JSON_BYTES:
            raise CheckpointError(f"{path} has {held.size} bytes, which is too many")
        return held.read(held.size, 0, path)

    def read_small(self, name: str) -> bytes:
        """Return the content of a file without tensors, after it was compared with the manifest."""
        content = self._read(name)
        if self.manifest is not None:
            known = self.manifest.files.get(name)
            if known is None:
                raise CheckpointError(f"{self.root.path / name} is not in the manifest")
            if (len(content), _C.ckpt_crc32c(content)) != known:
                raise CheckpointError(f"{self.root.path / name} is damaged: its checksum differs")
        return content

    def _open_model(self) -> StoredSet:
        if self.path.is_dir():
            return self._open_set("", "model")
        return _collect([self._open_file(self.path.name)])

    def _open_set(self, folder: str, name: str) -> StoredSet:
        prefix = f"{folder}/" if folder else ""
        index = f"{prefix}{name}.safetensors.index.json"
        single = f"{prefix}{name}.safetensors"
        root = self.root.path
        if self.root.exists(index):
            if self.root.exists(single):
                raise CheckpointError(
                    f"{root} has both {single} and {index}: remove the one that is not meant"
                )
            table = self.read_json(index).get("weight_map")
            names = file_names(table, root / index)
            found = _collect([self._open_file(prefix + file) for file in names])
            compare_index(table, found, root / index)
        elif self.root.exists(single):
            found = _collect([self._open_file(single)])
        else:
            raise CheckpointError(
                f"{root / folder if folder else root} is no checkpoint: it has neither "
                f"{index.removeprefix(prefix)} nor {single.removeprefix(prefix)}"
                + ("" if folder else _inside(root))
            )
        if self.manifest is not None:
            expected = {p for p in self.manifest.headers if os.path.dirname(p) == folder}
            if expected != {file.name for file in found.files}:
                raise CheckpointError(f"{root}: the files of {name} are not the manifest's")
        return found

    def _open_file(self, name: str) -> StoredFile:
        path, held = self.root.path / name, self.root.open(name)
        header, nbytes = _read_header(held, path), held.size
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
        codings = self.manifest.codings if self.manifest is not None else None
        coded = (codings or {}).get(name, {})
        places = []
        for number, (tensor, dtype, shape, begin, end) in enumerate(rows):
            torch_dtype = _dtype(dtype, f"{path}: tensor {tensor!r}")
            at, coding = len(header) + begin, coded.get(tensor)
            places.append(Place(tensor, torch_dtype, shape, at, end - begin, number, coding))
        found = StoredFile(path, name, nbytes, places, metadata, held)
        if self.manifest is not None:
            _compare_digests(found, self.manifest)
        return found


def _inside(root: AnyPath) -> str:
    """Return a text for an error message that lists the checkpoints in a folder."""
    held = read_steps(root)
    notes = {folder_of(root, step).name: " (abandoned)" for step in held.abandoned}
    notes |= {folder_of(root, step).name: " (the newest)" for step in held.live[:1]}
    marks = ("fsdpc.json", "*.safetensors", "*.safetensors.index.json", ".metadata", "*.bin")
    names = sorted(
        path.name
        for path in root.iterdir()
        if path.is_dir() and path.name[0] != "." and any(any(path.glob(mark)) for mark in marks)
    )
    shown = ", ".join(name + notes.get(name, "") for name in names[:_MOST_SHOWN])
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    resume = " (Checkpointer(...).resume() takes the newest)" if held.live else ""
    return f", but checkpoints are in it, of which give one: {shown}{more}{resume}" if names else ""


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


def file_names(table: Any, index: AnyPath) -> list[str]:
    """Return the names of the files in an index, after checking that they are plain names."""
    if not isinstance(table, dict) or not all(
        isinstance(name, str) and isinstance(file, str) for name, file in table.items()
    ):
        raise CheckpointError(f"{index} has no weight_map of names to files")
    names: Iterable[str] = sorted(set(table.values()))
    for name in names:
        if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder")
    return list(names)


def compare_index(table: dict[str, str], found: StoredSet, index: AnyPath) -> None:
    held = {name: file.path.name for name, (file, _) in found.where.items()}
    for name in sorted(table.keys() | held.keys()):
        if table.get(name) != held.get(name):
            raise CheckpointError(
                f"{index}: tensor {name!r} should be in {table.get(name)!r} but is in "
                f"{held.get(name)!r}"
            )


def _read_header(held: Held | RemoteFile, path: AnyPath) -> bytes:
    """Return the bytes of a file before its data. The length of the header is checked first."""
    if held.size < 8:
        raise CheckpointError(f"{path} has {held.size} bytes: no safetensors file is so short")
    first = held.read(8, 0, path)
    length = int.from_bytes(first, "little")
    if length == 0:
        raise CheckpointError(f"{path} was never finished: its header is empty")
    if length > _MOST_HEADER_BYTES or length > held.size - 8:
        raise CheckpointError(
            f"{path}: a header of {length} bytes in a file of {held.size} bytes: the file was cut, "
            "or is no safetensors file"
        )
    return first + held.read(length, 8, path)
