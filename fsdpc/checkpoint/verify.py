"""Checking, comparing and describing whole checkpoints without a model, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fsdpc import _C
from fsdpc._companions.spans import whole_span
from fsdpc.checkpoint.digests import Digest, combine
from fsdpc.checkpoint.entries import Entry
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import Place, fragments
from fsdpc.checkpoint.loading import parts_in, read_table
from fsdpc.checkpoint.opened import Opened, StoredFile
from fsdpc.checkpoint.storage import AnyPath
from fsdpc.checkpoint.torch_files import TorchFiles, open_any
from fsdpc.checkpoint.write import rows_of

Advance = Callable[[int], object]


def digest_of(file: StoredFile, place: Place) -> Digest:
    """Return the digest of a tensor's bytes as they are on disk."""
    entry = Entry(
        place.name, place.shape, place.dtype, torch.empty(0, dtype=place.dtype, device="cpu")
    )
    if file.read is not None:
        return _digest_of_values(file, place, entry)
    rows = rows_of(place, entry, whole_span(entry.numel), memory=0)
    (digest,) = combine([place], [read_table(file, rows)])
    return digest


def _digest_of_values(file: StoredFile, place: Place, entry: Entry) -> Digest:
    values = np.empty(place.nbytes, dtype=np.uint8)
    rows = rows_of(place, entry, whole_span(entry.numel), memory=values.ctypes.data)
    assert file.read is not None
    file.read(rows)
    parts = fragments(rows)
    crcs = [_C.ckpt_crc32c(values[at : at + count]) for _, at, count in parts.tolist()]
    (digest,) = combine([place], [(parts, np.array(crcs, dtype=np.uint32))])
    return digest


@dataclass
class Report:
    """The result of ``verify``. ``damaged`` has a text for each damaged tensor or file.
    ``has_checksums`` is False if only sizes and headers could be checked.
    """

    tensors: int
    nbytes: int
    has_checksums: bool
    damaged: list[str]


def verify(path: AnyPath, advance: Advance | None = None) -> Report:
    """Compare every byte of a checkpoint with the checksums of its manifest. ``CheckpointError``:
    headers, sizes or the manifest are damaged, so the tensors are unknown.
    """
    found = open_any(path)
    report = Report(0, 0, found.manifest is not None, [])
    if found.manifest is not None:
        for name in found.manifest.files:
            try:
                found.read_small(name)
            except CheckpointError as error:
                report.damaged.append(str(error))
    for file, place in _places(found):
        report.tensors += 1
        report.nbytes += place.nbytes
        try:
            digest = digest_of(file, place)
        except OSError as error:
            report.damaged.append(f"{place.name} in {file.path}: {error}")
            continue
        if found.manifest is not None:
            known = found.manifest.tensors[file.name][place.name]
            if digest != known:
                blocks = [n for n, pair in enumerate(zip(digest.blocks, known.blocks, strict=True))
                          if pair[0] != pair[1]]  # fmt: skip
                report.damaged.append(f"{place.name} in {file.path}: blocks {blocks} differ")
        if advance is not None:
            advance(place.nbytes)
    for part in parts_in(found):
        own = verify(path / part, advance)
        report.tensors += own.tensors
        report.nbytes += own.nbytes
        report.damaged += own.damaged
    return report


def _places(found: Opened | TorchFiles) -> Iterator[tuple[StoredFile, Place]]:
    for stored in found.sets.values():
        yield from stored.where.values()


def compare(one: AnyPath, other: AnyPath, *, quick: bool = False) -> list[str]:
    """Return lines that state how the tensors of two checkpoints differ in names, shapes, dtypes
    and values (by their digests), and which tensors are damaged. The list is empty if the
    checkpoints are equal. With ``quick``, digests that a manifest contains are not computed again.
    """
    first, second = open_any(one), open_any(other)
    lines = []
    if (first.optimizer is None) != (second.optimizer is None):
        lines.append(f"only {one if first.optimizer else other} has optimizer state")
    for name in first.sets.keys() & second.sets.keys():
        a, b = first.sets[name].where, second.sets[name].where
        lines += [f"only in {one}: {key}" for key in sorted(a.keys() - b.keys())]
        lines += [f"only in {other}: {key}" for key in sorted(b.keys() - a.keys())]
        for key in sorted(a.keys() & b.keys()):
            (_, p), (_, q) = a[key], b[key]
            if (p.shape, p.dtype) != (q.shape, q.dtype):
                lines.append(f"{key}: {_form(p)} and {_form(q)}")
                continue
            digests = []
            for path, found, (file, place) in ((one, first, a[key]), (other, second, b[key])):
                known = _known(found, file, place)
                digests.append(known if quick and known else digest_of(file, place))
                if known not in (None, digests[-1]):
                    lines.append(f"{key}: damaged in {path}, not what its manifest says")
            if digests[0].whole != digests[1].whole:
                lines.append(f"{key}: values differ")
    return lines


def _known(found: Opened | TorchFiles, file: StoredFile, place: Place) -> Digest | None:
    return None if found.manifest is None else found.manifest.tensors[file.name][place.name]


def _form(place: Place) -> str:
    return f"{str(place.dtype).removeprefix('torch.')}{list(place.shape)}"


def describe(path: AnyPath) -> Iterator[str]:
    """Yield lines about a checkpoint, its files and every tensor."""
    found = open_any(path)
    yield f"{path}: {found.kind}"
    for part in parts_in(found):
        yield from describe(path / part)
    for stored in found.sets.values():
        for file in stored.files:
            yield f"{file.name}: {file.nbytes} bytes, {len(file.places)} tensors"
            for place in file.places:
                known = _known(found, file, place)
                digest = "" if known is None else f"  {known.whole:08x}"
                yield f"  {place.name}  {_form(place)}  {place.nbytes} bytes{digest}"
