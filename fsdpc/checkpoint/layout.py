"""The place of each tensor in the files of a set, computed without communication on every rank.

A set is one or several safetensors files and their index. In a file, tensors follow each other in
the order of the entries, without gaps. The data begin at a multiple of the page size, behind a
header that is padded with spaces.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fsdpc import _C
from fsdpc.checkpoint.dtypes import can_cast, name_of
from fsdpc.checkpoint.entries import Coding, Decoder, Entry

FILE_BYTES = 5_000_000_000
BLOCK_BYTES = 4 << 20
ELEMENT_BYTES = 16  # size of the widest dtype; ranges are cut at multiples of this size
_PAGE = 4096
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"  # the only key of a header that is no tensor's name
_text = json.encoder.encode_basestring


@dataclass
class Place:
    """The place of a tensor in its file. ``offset`` is the position of the tensor's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    index: int  # position of the tensor in the set
    coding: Coding | None = None


@dataclass
class File:
    """One file of a set. ``header`` has all bytes before the data; ``keys`` are the names of the
    tensors as JSON strings.
    """

    name: str
    header: bytes
    nbytes: int
    places: list[Place]
    keys: list[str]
    frozen: bool = False  # see ``Entry``


@dataclass
class Layout:
    """The files of a set. The object is cached and must not be changed. ``folder`` is the folder of
    the set in the checkpoint, "" for a model.
    """

    folder: str
    index_name: str
    files: list[File]
    aliases: dict[str, str]

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return a digest of the names, dtypes, shapes and places of all tensors."""
        crc = 0
        for file in self.files:
            form = f"{file.name} {file.frozen}".encode() + file.header
            crc = _C.ckpt_crc32c(form, crc)
        return crc

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def path(self, file: File | str) -> str:
        name = file if isinstance(file, str) else file.name
        return f"{self.folder}/{name}" if self.folder else name

    @functools.cached_property
    def index(self) -> bytes:
        """Return the content of the index file, as Hugging Face's libraries write it."""
        places = [place for file in self.files for place in file.places]
        table = {place.name: file.name for file in self.files for place in file.places}
        sizes = {
            "total_parameters": sum(math.prod(place.shape) for place in places),
            "total_size": sum(place.nbytes for place in places),
        }
        # json.dumps with an indent uses the slow encoder, which is written in Python.
        text = json.encoder.encode_basestring_ascii
        lines = [f"    {text(name)}: {text(file)}" for name, file in sorted(table.items())]
        body = json.dumps({"metadata": sizes}, indent=2).removesuffix("\n}")
        weights = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
        return f'{body},\n  "weight_map": {weights}\n}}\n'.encode()


def file_dtype(entry: Entry, cast: torch.dtype | None) -> torch.dtype:
    """Return the dtype of an entry in the file. ``cast``, if it is given, is the dtype of all
    entries of 16-, 32- or 64-bit floats that are not ``exact``. Other entries keep their dtype.
    """
    casts = cast is not None and can_cast(entry.dtype) and not entry.exact
    return cast if casts else entry.dtype


def lay_out(
    entries: Sequence[Entry],
    *,
    name: str,
    folder: str = "",
    cast: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    aliases: dict[str, str] | None = None,
) -> Layout:
    """Lay out entries in files of at most ``file_bytes`` (a larger tensor has a file for itself),
    named ``name-00001-of-0000N.safetensors``. Raises ``TypeError`` if safetensors does not have a
    dtype, and ``ValueError`` if safetensors reserves the name of a tensor.
    """
    tensors = tuple(
        (e.name, file_dtype(e, cast), tuple(e.shape), e.frozen, e.coding) for e in entries
    )
    return _laid_out(tensors, name, folder, file_bytes, tuple((aliases or {}).items()))


@functools.lru_cache(maxsize=16)  # a program saves the same few models again and again
def _laid_out(
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], bool, Coding | None], ...],
    name: str,
    folder: str,
    file_bytes: int,
    renamed: tuple[tuple[str, str], ...],
) -> Layout:
    groups: list[list[Place]] = [[]]
    used, kind = 0, False
    for index, (tensor, dtype, shape, frozen, coding) in enumerate(tensors):
        name_of(dtype, tensor)
        if tensor == _METADATA:
            raise ValueError(f"a tensor named {_METADATA!r} has no place in safetensors: rename it")
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and (used + nbytes > file_bytes or frozen != kind):
            groups.append([])
            used = 0
        kind = frozen
        groups[-1].append(Place(tensor, dtype, shape, used, nbytes, index, coding))
        used += nbytes
    aliases = dict(renamed)
    groups = groups if groups[-1] else []  # without tensors there is no file
    files = [
        _file(f"{name}-{number:05d}-of-{len(groups):05d}.safetensors", places, aliases)
        for number, places in enumerate(groups, 1)
    ]
    for file in files:
        file.frozen = tensors[file.places[0].index][3]
    return Layout(folder, f"{name}.safetensors.index.json", files, aliases)


def _file(name: str, places: list[Place], aliases: dict[str, str]) -> File:
    kept = {place.name for place in places}
    dropped = {alias: first for alias, first in sorted(aliases.items()) if first in kept}
    form = {"format": "pt", **dropped}
    members = [f'"{_METADATA}":{json.dumps(form, separators=(",", ":"), ensure_ascii=False)}']
    for place, key in zip(places, keys := list(map(_text, [p.name for p in places])), strict=True):
        shape = ",".join(map(str, place.shape))
        members.append(
            f'{key}:{{"dtype":"{name_of(place.dtype, place.name)}","shape":[{shape}],'
            f'"data_offsets":[{place.offset},{place.offset + place.nbytes}]}}'
        )
    text = f"{{{','.join(members)}}}".encode()
    start = -(-(_LENGTH_BYTES + len(text)) // _PAGE) * _PAGE
    if start > _MOST_HEADER_BYTES:
        raise ValueError(f"{name}: {len(places)} tensors do not fit into one header")
    header = (start - _LENGTH_BYTES).to_bytes(8, "little") + text.ljust(start - _LENGTH_BYTES)
    data = sum(place.nbytes for place in places)
    for place in places:
        place.offset += start
    return File(name, header, start + data, places, keys)


def fingerprint(layouts: Sequence[Layout]) -> str:
    """Return a text that is equal on two ranks if all names, shapes and dtypes are equal."""
    crcs = " ".join(f"{layout.fingerprint:08x}" for layout in layouts)
    return f"{crcs} {sum(len(file.places) for layout in layouts for file in layout.files)}"


# The columns of a table of ranges. ``ckpt_write`` takes the first six columns.
MEMORY, OFFSET, NBYTES, IN_TENSOR, MEMORY_TYPE, FILE_TYPE, INDEX = range(7)
COMPUTED = 4096  # the address of the first computed value; not 0, which stands for no memory


@dataclass
class Table:
    """The ranges of a file that a rank writes, in the order of the file. The object must not be
    changed. ``gpu`` has for each range the GPU on which its memory is, -1 for host memory, or -2
    for computed values. The address of a computed value is ``COMPUTED`` plus its position, in
    bytes, among the values of its decoder. ``steady``: see ``Entry``.
    """

    rows: np.ndarray
    gpu: np.ndarray
    steady: np.ndarray

    @property
    def none(self) -> Table:
        """Return an empty table with the same columns."""
        return Table(self.rows[:0], self.gpu[:0], self.steady[:0])


@dataclass
class PlannedSet:
    """The ranges that a rank writes of a set: one table for each file. ``keep`` has the tensors
    into which the addresses of the tables point. ``decoders`` has the decoders of computed values
    by ``Place.index``.
    """

    layout: Layout
    tables: list[Table]
    keep: list[torch.Tensor]
    decoders: dict[int, Decoder] = field(default_factory=dict)


def fragments(rows: np.ndarray, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """Cut ranges at the borders of their tensors' blocks. Returns the parts as rows ``(index of
    the tensor, offset in the tensor, bytes)``, in the order in which ``ckpt_write`` returns their
    digests.
    """
    first = rows[:, IN_TENSOR] // block_bytes
    last = (rows[:, IN_TENSOR] + rows[:, NBYTES] - 1) // block_bytes
    counts = np.where(rows[:, NBYTES] > 0, last - first + 1, 0)
    row = np.repeat(np.arange(len(rows)), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    block = first[row] + nth
    begin = np.maximum(block * block_bytes, rows[row, IN_TENSOR])
    end = np.minimum((block + 1) * block_bytes, rows[row, IN_TENSOR] + rows[row, NBYTES])
    return np.stack([rows[row, INDEX], begin, end - begin], axis=1).astype(np.int64)
