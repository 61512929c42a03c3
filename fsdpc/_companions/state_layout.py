"""The layout of optimizer states in a file or in host memory, and in buffers. Pure arithmetic, for
the optimizers that keep their states there and for the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, NamedTuple

PAGE = 4096
BUFFERS = 3  # for states on a disk: at a time one is read, one is stepped and one is written
STAGES = 2  # buffers on the GPU for states in host memory: one is filled, one is stepped
ALIGN = 64  # alignment in bytes of states that share pages, and of all states in host memory
BLOCK = 256  # the number of elements of 8-bit states that share a scale
MIN_8BIT = 4096  # states have 8 bits if the whole parameter has at least this many elements


def chunk_bytes_of(buffer_bytes: int, buffers: int = BUFFERS) -> int:
    """Return the bytes of each of ``buffers`` buffers that have ``buffer_bytes`` bytes together.

    The result is a multiple of the page size.
    """
    return buffer_bytes // buffers // PAGE * PAGE


def chosen_for_host(
    sizes: Sequence[int], ratio: float, before: tuple[int, int] = (0, 0)
) -> list[bool]:
    """Choose the parameters whose states are in host memory. ``sizes[i]``: bytes of states of
    parameter i.

    A parameter is chosen if the states in host memory, including the parameter's states, have at
    most the fraction ``ratio`` of the bytes of all states. ``before``: for the parameters of
    earlier calls, the bytes of states in host memory and the bytes of all states.
    """
    held, total = before[0], before[1] + sum(sizes)
    found = []
    for size in sizes:
        found.append(held + size <= ratio * total)
        held += size if found[-1] else 0
    return found


class Field(NamedTuple):
    """A state. It has one value of ``item`` bytes for each element; if ``per_unit``, for each unit
    of elements (see ``Extent``). ``dtype`` is torch's dtype; the planner does not set it.
    """

    name: str
    item: int
    dtype: Any = None
    per_unit: bool = False


class Extent(NamedTuple):
    """Elements [start, start + length) of the local part of a parameter, and their states.

    States are laid out in units of ``unit`` elements. Units are counted from the begin of the whole
    parameter, so ``lead`` elements of the first unit may lie before ``start``.
    """

    start: int
    length: int
    states: tuple[Field, ...]
    unit: int = 1
    lead: int = 0

    @property
    def units(self) -> int:
        return -(-(self.lead + self.length) // self.unit) if self.length else 0

    @property
    def nbytes(self) -> int:
        """The bytes of all states of these elements."""
        return sum(f.item * (self.units if f.per_unit else self.length) for f in self.states)

    @property
    def wanted(self) -> Wanted:
        sizes = tuple((f.name, f.item * (1 if f.per_unit else self.unit)) for f in self.states)
        return Wanted(self.units, sizes)

    def ends(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of the elements in units [begin, end). Elements count from ``start``."""
        low, high = begin * self.unit - self.lead, end * self.unit - self.lead
        return max(low, 0), min(high, self.length)


def extent_of_8bit(
    start: int, length: int, first: int, is_wide: bool, dtypes: tuple[Any, Any] = (None, None)
) -> Extent:
    """Return elements of one parameter and their states in ``AdamW8bit``.

    ``first`` is the index of the first element in the whole parameter. If ``is_wide``, the states
    are codes and scales, in units of one block of elements; else they are float32 values.
    ``dtypes``: torch's dtypes of the codes, and of the scales and values.
    """
    codes, values = dtypes
    if not is_wide:
        fields = tuple(Field(f"values.{which}", 4, values) for which in (0, 1))
        return Extent(start, length, fields)
    fields = tuple(Field(f"codes.{which}", 1, codes) for which in (0, 1))
    fields += tuple(Field(f"scales.{which}", 4, values, True) for which in (0, 1))
    return Extent(start, length, fields, BLOCK, first % BLOCK)


class Wanted(NamedTuple):
    """The states of ``numel`` units of an ``Extent``: each state's name and its bytes per unit."""

    numel: int
    states: tuple[tuple[str, int], ...]


class Slice(NamedTuple):
    """Units [begin, end) of the ``Extent`` with index ``number``. ``places``: for each state, the
    byte offset of these units in a buffer.
    """

    number: int
    begin: int
    end: int
    places: tuple[int, ...]


@dataclass
class Chunk:
    """The contents of one buffer: slices of extents, and the parts of the file or of host memory
    that lie in the buffer, as (file offset, bytes, buffer offset).
    """

    slices: list[Slice]
    parts: list[tuple[int, int, int]]
    crc: int | None = None
    versions: int = 0

    @property
    def used(self) -> int:
        """The number of bytes of the buffer that the parts use."""
        return max((place + count for _, count, place in self.parts), default=0)


@dataclass
class Layout:
    """Where states lie in a file or in host memory, and the chunks into which they are divided.

    ``offsets``: for each ``Extent``, the byte offset of each of its states. ``end``: the end of the
    last state, rounded up to pages.
    """

    offsets: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    end: int = 0


def _fewest(items: Sequence[int], page: int) -> int:
    """Return the smallest number of units for which every state fills whole pages."""
    return lcm(*(page // gcd(page, item) for item in items))


def lay_out(wanted: Sequence[Wanted], chunk_bytes: int, begin: int = 0, page: int = PAGE) -> Layout:
    """Return the layout of states in a file or in host memory, from byte ``begin`` on.

    An extent whose states fit into a buffer may share a chunk with its neighbours. For a larger
    extent, each state has its own pages, and each chunk has the same units of all states.
    ``ValueError``: a buffer of ``chunk_bytes`` cannot hold the smallest number of units for which
    every state fills whole pages.
    """
    found = Layout(end=_up(begin, page))
    open_chunk: Chunk | None = None
    for number, want in enumerate(wanted):
        sizes = [_up(want.numel * item, ALIGN) for _, item in want.states]
        if sum(sizes) <= chunk_bytes:
            start = open_chunk.used if open_chunk else 0
            if open_chunk is None or start + sum(sizes) > chunk_bytes:
                found.end, start = _up(found.end, page), 0
                open_chunk = Chunk([], [])
                found.chunks.append(open_chunk)
            places = tuple(start + sum(sizes[:k]) for k in range(len(sizes)))
            base = found.end - start
            found.offsets.append(tuple(base + place for place in places))
            open_chunk.slices.append(Slice(number, 0, want.numel, places))
            open_chunk.parts = [(base, start + sum(sizes), 0)]
            found.end += sum(sizes)
        else:
            open_chunk = None
            _lay_out_large(found, number, want, chunk_bytes, page)
    found.end = _up(found.end, page)
    for chunk in found.chunks:
        parts = [(at, _up(count, page), place) for at, count, place in chunk.parts]
        chunk.parts = [part for part in parts if part[1] > 0]
    return found


def _lay_out_large(found: Layout, number: int, want: Wanted, chunk_bytes: int, page: int) -> None:
    items = [item for _, item in want.states]
    sizes = [_up(want.numel * item, page) for item in items]
    found.end = _up(found.end, page)
    offsets = tuple(found.end + sum(sizes[:k]) for k in range(len(sizes)))
    fewest = _fewest(items, page)
    most = chunk_bytes // sum(items) // fewest * fewest
    if most == 0:
        raise ValueError(
            f"buffer_bytes is too small: each buffer has {chunk_bytes} bytes, and the least part "
            f"of these states that is moved has {sum(items) * fewest}"
        )
    for begin in range(0, want.numel, most):
        end = min(begin + most, want.numel)
        counts = [_up((end - begin) * item, page) for item in items]
        places = tuple(sum(counts[:k]) for k in range(len(counts)))
        parts = [
            (offset + begin * item, count, place)
            for offset, item, count, place in zip(offsets, items, counts, places, strict=True)
        ]
        found.chunks.append(Chunk([Slice(number, begin, end, places)], parts))
    found.offsets.append(offsets)
    found.end += sum(sizes)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
