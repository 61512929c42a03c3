"""Conversion from and to other formats.

Only one tensor is in memory at a time, except in a conversion to torch's distributed checkpoints
(DCP), which has all tensors in memory. A ``torch.save`` file is read with ``weights_only=True`` and
mapped, not loaded. Folders of DCP are read and written by torch's own library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from fsdpc._companions.spans import whole_span
from fsdpc._engine.lowbit import SCALES
from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.dcp_folder import KEYS, keys_of
from fsdpc.checkpoint.decoded import stored_values
from fsdpc.checkpoint.digests import Digests, combine
from fsdpc.checkpoint.dtypes import can_cast
from fsdpc.checkpoint.entries import Entry, flat
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.folders import Draft, sync
from fsdpc.checkpoint.layout import Layout, Place, lay_out
from fsdpc.checkpoint.loading import read_rows
from fsdpc.checkpoint.opened import Opened, StoredFile, StoredSet
from fsdpc.checkpoint.optimizer import state_name
from fsdpc.checkpoint.saving import (
    EXTRA_JSON,
    OPTIMIZER,
    OPTIMIZER_JSON,
    STATE_JSON,
    finish,
)
from fsdpc.checkpoint.torch_files import TorchFiles, open_any
from fsdpc.checkpoint.values import dump, to_json
from fsdpc.checkpoint.verify import digest_of
from fsdpc.checkpoint.write import Job, computed, joined, rows_of, write_job, write_rows

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
Fetch = Callable[[str], torch.Tensor]


@dataclass
class _Set:
    """A set of tensors: their entries, which have no values, and ``fetch(name)``, which reads the
    values of the tensor ``name``.
    """

    name: str
    folder: str
    entries: list[Entry]
    fetch: Fetch


def convert(
    source: Path,
    target: Path,
    dtype: str | None,
    to: str,
    trust_pickle: bool = False,
    prefix: str = "",
    values: bool = False,
) -> list[str]:
    """Convert ``source`` to the new folder ``target``.

    ``dtype`` is the dtype for the model's floats. ``to`` is ``"safetensors"``, or ``"dcp"``, which
    needs memory for the whole model. ``prefix`` takes from a DCP folder or a ``torch.save`` file
    only the names that begin with ``prefix``, and cuts off the prefix. ``values`` writes
    dequantized values instead of quantized weights. Returns the names and files of the source that
    were left out.

    Raises ``CheckpointError`` if the source is damaged, if the index of a DCP folder has other
    classes than torch's and ``trust_pickle`` is false, or if ``values`` is true and the source does
    not say how its weights were quantized. Raises ``ValueError`` if ``dtype`` or ``prefix`` is
    wrong, and ``FileExistsError`` if ``target`` exists.
    """
    cast = None if dtype is None else getattr(torch, _DTYPES.get(dtype, dtype), None)
    if dtype is not None and not (isinstance(cast, torch.dtype) and can_cast(cast)):
        raise ValueError(
            "--dtype must be float32, bfloat16, float16 or float64 (or fp32, bf16, fp16, fp64), "
            f"not {dtype!r}"
        )
    found = open_any(source, trust=trust_pickle, prefix=prefix)
    if isinstance(found, TorchFiles):
        sets, files, left = _from_torch(found)
        step = None
    else:
        if prefix:
            raise ValueError(
                f"--prefix is for folders of torch's distributed checkpoints and files of "
                f"torch.save, not {source}"
            )
        sets, files, step = _from_safetensors(found)
        left = found.left
    if values:
        _decode(found, sets[0])
    if to == "dcp":
        if target.exists():
            raise FileExistsError(f"{target} exists: choose another name")
        dcp.save(_dcp_state(found, sets, cast), checkpoint_id=str(target), no_dist=True)
        if found.manifest is not None:
            left.append(EXTRA_JSON)
        return left + ([] if step is None else [f"step {step}"])
    _write(target, sets, files, cast, _made(found, step), found.aliases)
    return left


def _made(found: Opened | TorchFiles, step: int | None) -> _manifest.Manifest:
    """Return a new manifest. Its ``codings``, which say how weights were quantized, are None if the
    source does not say this.
    """
    known = found.manifest is not None and found.manifest.codings is not None
    return _manifest.Manifest(step, codings={} if known else None)


def _decode(found: Opened | TorchFiles, model: _Set) -> None:
    """Replace quantized entries of the model's set by entries of dequantized values. Raises
    ``CheckpointError`` if codes are damaged, or if it is not known how they were made.
    """
    known = found.manifest is not None and found.manifest.codings is not None
    for at, entry in enumerate(model.entries):
        if entry.coding is not None:
            file, place = found.model.where[entry.name]
            assert found.manifest is not None
            if digest_of(file, place) != found.manifest.tensors[file.name][entry.name]:
                raise CheckpointError(f"{file.path}: tensor {entry.name!r} is damaged")
            model.entries[at] = stored_values(entry, _read_codes(file, place))
        elif entry.exact:
            raise CheckpointError(
                f"--values: {entry.name} has codes or scales of bitsandbytes, which only that "
                "library decodes: load the checkpoint into a model of it, and call its dequantize()"
            )
        elif entry.dtype == torch.uint8 and not known:
            raise CheckpointError(
                f"--values: {entry.name} has bytes, and {found.path} does not say if they are "
                f"codes, of how many values and how made (no {_manifest.NAME}, or an older one): "
                "load it into a model of fsdpc.lowbit.quantize and save that with values=True"
            )


def _read_codes(file: StoredFile, place: Place) -> Callable[[int, int], torch.Tensor]:
    def read(first: int, last: int) -> torch.Tensor:
        codes = torch.empty((last - first, place.shape[1]), dtype=place.dtype, device="cpu")
        entry = Entry(place.name, place.shape, place.dtype, codes.view(-1))
        begin = first * place.shape[1]
        read_rows(file, rows_of(place, entry, np.array([[begin, 0, codes.numel()]])))
        return codes

    return read


def _dcp_state(
    found: Opened | TorchFiles, sets: list[_Set], cast: torch.dtype | None
) -> dict[str, Any]:
    """Return the dict that ``save(format="dcp")`` would write."""
    tensors = {each.name: {e.name: _fetched(each, e, cast) for e in each.entries} for each in sets}
    if cast is not None:
        exact = {entry.name for each in sets for entry in each.entries if entry.exact}
        casts = {n for n, v in tensors["model"].items() if can_cast(v.dtype) and n not in exact}
        tensors["model"].update({name: tensors["model"][name].to(cast) for name in casts})
    state: dict[str, Any] = {"model": {**tensors["model"], **found.extra_states()}}
    if found.optimizer is not None:
        kinds, groups = found.optimizer_forms(lambda name: None)
        states: dict[str, dict[str, Any]] = {}
        for name, form in kinds.items():
            own = {key: tensors[OPTIMIZER].get(state_name(name, key)) for key in form}
            values = {k: v[1] for k, v in form.items() if v[0] == "value"}
            states[name] = {**own, **values}
        state["optimizer"] = {"state": states, "param_groups": groups}
    scheduled = found.scheduler_state()
    if scheduled is not None:
        state["scheduler"] = scheduled
    return {**state, KEYS: keys_of(state)}


def _fetched(of: _Set, entry: Entry, cast: torch.dtype | None) -> torch.Tensor:
    if entry.decoder is None:
        return of.fetch(entry.name)
    return entry.decoder.read(0, entry.numel, cast or entry.dtype).view(entry.shape)


def _write(
    target: Path,
    sets: list[_Set],
    files: dict[str, bytes],
    cast: torch.dtype | None,
    made: _manifest.Manifest,
    aliases: dict[str, str],
) -> None:
    draft = Draft(target.absolute(), overwrite=False)
    try:
        done = [_write_set(draft, found, cast, aliases) for found in sets]
        sync([draft.path / layout.path(file) for layout, _ in done for file in layout.files])
        finish(draft, done, files, made)
    except BaseException:
        draft.discard()
        raise


def _write_set(
    draft: Draft, found: _Set, cast: torch.dtype | None, aliases: dict[str, str]
) -> tuple[Layout, Digests]:
    form: dict[str, Any] = {"name": found.name, "folder": found.folder}
    if found.folder == "":
        form |= {"cast": cast, "aliases": aliases}
    layout = lay_out(found.entries, **form)
    parts = []
    for file in layout.files:
        path = layout.path(file)
        draft.create(path, file.nbytes, file.header)
        for place in file.places:
            old = found.entries[place.index]
            if old.decoder is not None:
                rows, decoders = write_rows(place, old), {place.index: old.decoder}
                own = computed(draft.path / path, rows, {place.index: place}, decoders)
                parts += [write_job(job) for job in own]
                continue
            memory = flat(found.fetch(place.name))
            span = whole_span(len(memory))
            entry = Entry(old.name, old.shape, old.dtype, memory, span)
            parts.append(write_job(Job(draft.path / path, rows_of(place, entry, span), [memory])))
    places = [place for file in layout.files for place in file.places]
    return layout, combine(places, [joined(parts)])


# --- sources -------------------------------------------------------------------------------------


def _from_safetensors(found: Opened) -> tuple[list[_Set], dict[str, bytes], int | None]:
    """Return the sets, the small files to copy, and the step."""
    sets = _sets(found)
    if found.manifest is None:
        return sets, _small({}, None), None
    kept = {}
    for path in found.manifest.files:
        content = found.read_small(path)
        if not path.endswith(".index.json"):
            kept[path] = content
    return sets, kept, found.manifest.step


def _from_torch(found: TorchFiles) -> tuple[list[_Set], dict[str, bytes], list[str]]:
    """Return the sets, the small files, and the names of what is left out: an optimizer state whose
    parameters have numbers instead of names, states of parameters that the model does not have, and
    values that are not plain.
    """
    if found.optimizer is not None and not found.numbered:
        found.leave_other_states()
    left = list(found.left)
    if found.numbered:
        found.optimizer = None
        left.append("the optimizer's state, which is by numbers, not names: load it with a model")
    scheduled, extra = found.scheduler_state(), found.extra_states()
    plain = {"the scheduler": scheduled, **extra}
    for name, value in list(plain.items()):
        try:
            to_json(value, name)
        except TypeError as error:
            left.append(f"{name} ({error})")
            del plain[name]
    scheduled = plain.pop("the scheduler", None)
    files = _small(plain, scheduled)
    sets = _sets(found)
    if found.optimizer is not None:
        shapes = {name: tuple(place.shape) for name, (_, place) in found.model.where.items()}
        kinds, groups = found.optimizer_forms(shapes.get)
        files[OPTIMIZER_JSON] = dump(
            {
                "kinds": to_json(kinds, "the optimizer's state"),
                "param_groups": to_json(groups, "param_groups"),
            }
        )
    return sets, files, left


def _small(extra: dict[str, Any], scheduled: Any) -> dict[str, bytes]:
    state = {"extra_state": to_json(extra, "get_extra_state()")}
    state["scheduler"] = to_json(scheduled, "the scheduler's state")
    return {STATE_JSON: dump(state), EXTRA_JSON: dump({"world": 0, "ranks": []})}


def _sets(found: Opened | TorchFiles) -> list[_Set]:
    sets, aliases = [], found.aliases
    for name, stored in found.sets.items():
        own = [place for alias, (_, place) in stored.where.items() if alias not in aliases]
        entries = [_outline(place) for place in own]
        _keep_codes(entries)
        folder = "" if name == "model" else OPTIMIZER
        sets.append(_Set(name, folder, entries, _fetch_stored(found, stored)))
    return sets


def _outline(place: Any) -> Entry:
    memory = torch.empty(0, dtype=place.dtype, device="cpu")
    return Entry(place.name, tuple(place.shape), place.dtype, memory, coding=place.coding)


def _keep_codes(entries: list[Entry]) -> None:
    """Mark the codes of bitsandbytes and their scales as exact, so that no cast changes them."""
    ends = tuple(f".{name}" for name in SCALES)
    names = {entry.name for entry in entries}
    for entry in entries:
        entry.exact = entry.name.endswith(ends) or f"{entry.name}.{SCALES[0]}" in names


def _fetch_stored(found: Opened | TorchFiles, stored: StoredSet) -> Fetch:
    def fetch(name: str) -> torch.Tensor:
        file, place = stored.where[name]
        value = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        span = whole_span(value.numel())
        entry = Entry(name, tuple(place.shape), place.dtype, value.view(-1), span)
        part = read_rows(file, rows_of(place, entry, span))
        if found.manifest is not None:
            (digest,) = combine([place], [part])
            if digest != found.manifest.tensors[file.name][name]:
                raise CheckpointError(f"{file.path}: tensor {name!r} is damaged")
        return value

    return fetch
