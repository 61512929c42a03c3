"""From and to other files, tensor by tensor: one tensor is in memory at a time.

A ``torch.save`` file is read with ``weights_only=True`` and mapped, not loaded. Folders of torch's
distributed checkpoints (DCP) go through torch's own library, whose index is a pickle. Optimizer
state is kept between checkpoints of fsdpc; other sources give the tensors of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.digests import Digest, combine
from fsdpc.checkpoint.dtypes import can_cast
from fsdpc.checkpoint.entries import Entry, flat, whole_span
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.folders import Draft, sync
from fsdpc.checkpoint.layout import Layout, lay_out
from fsdpc.checkpoint.loading import read_table
from fsdpc.checkpoint.opened import Opened, StoredSet
from fsdpc.checkpoint.saving import finish
from fsdpc.checkpoint.values import dump, to_json
from fsdpc.checkpoint.write import Job, rows_of, write_job

Fetch = Callable[[str], torch.Tensor]


@dataclass
class _Set:
    """Tensors by name, without values, and how to get one's values. ``left``: names in the source
    that are not taken.
    """

    name: str
    folder: str
    entries: list[Entry]
    fetch: Fetch
    left: list[str] = field(default_factory=list)


def convert(
    source: Path,
    target: Path,
    dtype: str | None,
    to: str,
    trust_pickle: bool = False,
    prefix: str = "",
) -> list[str]:
    """Convert ``source`` to the new folder ``target``. ``dtype``: of the model's floats. ``to``:
    ``"safetensors"`` or ``"dcp"``, which holds the whole model in memory. ``prefix``: of the names
    that are taken, and lose it, from a DCP folder or a ``torch.save`` file. Returns the names and
    files of the source that were left out.

    ``CheckpointError``: a damaged source. ``ValueError``: a DCP folder without ``trust_pickle``, or
    an unknown dtype. ``FileExistsError``.
    """
    cast = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(cast, torch.dtype) and can_cast(cast)):
        raise ValueError(f"--dtype must be float32, bfloat16, float16 or float64, not {dtype!r}")
    sets, files, step = _open(source, trust_pickle, prefix)
    if to == "dcp":
        if target.exists():
            raise FileExistsError(f"{target} exists: choose another name")
        state = {entry.name: found.fetch(entry.name) for found in sets for entry in found.entries}
        if cast is not None:
            state = {name: _cast(name, value, cast) for name, value in state.items()}
        dcp.save(state, checkpoint_id=str(target), no_dist=True)
        return sets[0].left + [path for path in files if (source / path).is_file()]
    _write(target, sets, files, cast, step)
    return sets[0].left


def _cast(name: str, value: torch.Tensor, cast: torch.dtype) -> torch.Tensor:
    keep = name.startswith("state.") or not can_cast(value.dtype)
    return value if keep else value.to(cast)


def _write(
    target: Path,
    sets: list[_Set],
    files: dict[str, bytes],
    cast: torch.dtype | None,
    step: int | None,
) -> None:
    draft = Draft(target.absolute(), overwrite=False)
    try:
        done = [_write_set(draft, found, cast) for found in sets]
        sync([draft.path / layout.path(file) for layout, _ in done for file in layout.files])
        finish(draft, done, files, _manifest.Manifest(step))
    except BaseException:
        draft.discard()
        raise


def _write_set(draft: Draft, found: _Set, cast: torch.dtype | None) -> tuple[Layout, list[Digest]]:
    own = cast if found.folder == "" else None
    layout = lay_out(found.entries, name=found.name, folder=found.folder, cast=own)
    parts = []
    for file in layout.files:
        path = layout.path(file)
        draft.create(path, file.nbytes, file.header)
        for place in file.places:
            old = found.entries[place.index]
            memory = flat(found.fetch(place.name))
            span = whole_span(len(memory))
            entry = Entry(old.name, old.shape, old.dtype, memory, span)
            parts.append(write_job(Job(draft.path / path, rows_of(place, entry, span), [memory])))
    return layout, combine([place for file in layout.files for place in file.places], parts)


# --- sources -------------------------------------------------------------------------------------


def _open(
    source: Path, trust_pickle: bool, prefix: str
) -> tuple[list[_Set], dict[str, bytes], int | None]:
    """The sets, the small files to keep, and the step."""
    nothing = {
        "fsdpc/state.json": dump({"extra_state": to_json({}, ""), "scheduler": to_json(None, "")}),
        "fsdpc/extra.json": dump({"world": 0, "ranks": []}),
    }
    if (source / ".metadata").is_file():
        if not trust_pickle:
            raise ValueError(
                f"{source} is a folder of torch's distributed checkpoints, whose .metadata is a "
                "pickle: it can run code when torch reads it. --trust-pickle reads it all the same"
            )
        return [_open_dcp(source, prefix)], nothing, None
    if source.is_dir() or source.suffix == ".safetensors":
        if prefix:
            raise ValueError(
                f"--prefix is for folders of torch's distributed checkpoints and files of "
                f"torch.save, not {source}"
            )
        return _open_safetensors(source, nothing)
    return [_open_torch(source, prefix)], nothing, None


def _open_safetensors(
    source: Path, nothing: dict[str, bytes]
) -> tuple[list[_Set], dict[str, bytes], int | None]:
    found = Opened(source)
    sets = []
    for name, stored in found.sets.items():
        entries = [_outline(n, p.shape, p.dtype) for n, (_, p) in stored.where.items()]
        folder = "" if name == "model" else name
        sets.append(_Set(name, folder, entries, _fetch_stored(found, stored)))
    if found.manifest is None:
        return sets, nothing, None
    kept = {}
    for path in found.manifest.files:
        found.read_json(path)  # compares its checksum
        if not path.endswith(".index.json"):
            kept[path] = (source / path).read_bytes()
    return sets, kept, found.manifest.step


def _outline(name: str, shape: Any, dtype: torch.dtype) -> Entry:
    return Entry(name, tuple(shape), dtype, torch.empty(0, dtype=dtype, device="cpu"))


def _fetch_stored(found: Opened, stored: StoredSet) -> Fetch:
    def fetch(name: str) -> torch.Tensor:
        file, place = stored.where[name]
        value = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        span = whole_span(value.numel())
        entry = Entry(name, tuple(place.shape), place.dtype, value.view(-1), span)
        (digest,) = combine([place], [read_table(file.path, rows_of(place, entry, span))])
        if found.manifest is not None and digest != found.manifest.tensors[file.name][name]:
            raise CheckpointError(f"{file.path}: tensor {name!r} is damaged")
        return value

    return fetch


def _open_torch(source: Path, prefix: str) -> _Set:
    state = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    left: list[str] = []
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        left = [str(name) for name in state if name != "state_dict"]
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{source} holds no state dict: a dict of names to tensors")
    state, more = _below(state, prefix, source)
    strange = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ValueError(f"{source}: {strange[0]!r} is no tensor, so it cannot be converted")
    entries, first = [], {}
    for name, value in state.items():
        memory = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() == 0 or first.setdefault(memory, name) == name:
            entries.append(_outline(name, value.shape, value.dtype))
    return _Set("model", "", entries, lambda name: state[name].detach(), left + more)


def _below(every: dict[str, Any], prefix: str, source: Path) -> tuple[dict[str, Any], list[str]]:
    """What has the prefix, without it, and the names of the rest. ``ValueError``: nothing has."""
    known = {n.removeprefix(prefix): v for n, v in every.items() if n.startswith(prefix)}
    if prefix and not known:
        first = next(iter(every), None)
        raise ValueError(f"{source} has no name with the prefix {prefix!r}, but {first!r}")
    return known, [name for name in every if not name.startswith(prefix)]


def _open_dcp(source: Path, prefix: str) -> _Set:
    reader = FileSystemReader(str(source))
    known, left = _below(reader.read_metadata().state_dict_metadata, prefix, source)
    strange = [n for n, value in known.items() if not isinstance(value, TensorStorageMetadata)]
    if strange:
        raise ValueError(
            f"{source}: {prefix + strange[0]!r} is no tensor, so it cannot be converted (--prefix "
            "takes the names under one key: --prefix model.)"
        )
    entries = [_outline(n, value.size, value.properties.dtype) for n, value in known.items()]

    def fetch(name: str) -> torch.Tensor:
        value = torch.empty(known[name].size, dtype=known[name].properties.dtype, device="cpu")
        dcp.load({prefix + name: value}, checkpoint_id=str(source), no_dist=True)
        return value

    return _Set("model", "", entries, fetch, left)
