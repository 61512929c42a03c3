"""Where states lie in a file or in host memory, and in buffers: arithmetic, for the optimizers that
keep them there and for the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, NamedTuple

PAGE = 4096
BUFFERS = 3  # for states on a disk: one is read, one stepped, one written
STAGES = 2  # on the GPU, for states in host memory: one is filled, one stepped and emptied
ALIGN = 64  # bytes, for states that share pages, and for all states in host memory
BLOCK = 256  # elements that share a scale in states of 8 bits
MIN_8BIT = 4096  # elements of the smallest whole parameter with states of 8 bits


def chunk_bytes_of(buffer_bytes: int, buffers: int = BUFFERS) -> int:
    """Bytes of each buffer, in whole pages, where all buffers have ``buffer_bytes``."""
    return buffer_bytes // buffers // PAGE * PAGE


def chosen_for_host(
    sizes: Sequence[int], ratio: float, before: tuple[int, int] = (0, 0)
) -> list[bool]:
    """Which parameters have their states, of ``sizes`` bytes, in host memory: one after the other,
    as long as the states there are at most ``ratio`` of all. ``before``: bytes of earlier states
    in host memory, and bytes of all earlier states.
    """
    held, total = before[0], before[1] + sum(sizes)
    found = []
    for size in sizes:
        found.append(held + size <= ratio * total)
        held += size if found[-1] else 0
    return found


class Field(NamedTuple):
    """A state with one value of ``item`` bytes per element, or per unit. ``dtype``: torch's; the
    planner leaves it out.
    """

    name: str
    item: int
    dtype: Any = None
    per_unit: bool = False


class Extent(NamedTuple):
    """Elements [start, start + length) of a parameter on this rank, whose states are laid out in
    units of ``unit`` elements. Units are counted from the begin of the whole parameter: ``lead``
    elements of the first unit lie before ``start``.
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
        """Bytes of the states."""
        return sum(f.item * (self.units if f.per_unit else self.length) for f in self.states)

    @property
    def wanted(self) -> Wanted:
        sizes = tuple((f.name, f.item * (1 if f.per_unit else self.unit)) for f in self.states)
        return Wanted(self.units, sizes)

    def ends(self, begin: int, end: int) -> tuple[int, int]:
        """The elements of units [begin, end), counted from ``start``."""
        low, high = begin * self.unit - self.lead, end * self.unit - self.lead
        return max(low, 0), min(high, self.length)


def extent_of_8bit(
    start: int, length: int, first: int, is_wide: bool, dtypes: tuple[Any, Any] = (None, None)
) -> Extent:
    """The extent of ``AdamW8bit`` for elements of one parameter, from index ``first`` on in it. If
    ``is_wide``: codes and scales (of ``dtypes``), in chunks of whole blocks; else float32 values.
    """
    codes, values = dtypes
    if not is_wide:
        fields = tuple(Field(f"values.{which}", 4, values) for which in (0, 1))
        return Extent(start, length, fields)
    fields = tuple(Field(f"codes.{which}", 1, codes) for which in (0, 1))
    fields += tuple(Field(f"scales.{which}", 4, values, True) for which in (0, 1))
    return Extent(start, length, fields, BLOCK, first % BLOCK)


class Wanted(NamedTuple):
    """States that need space: ``numel`` units on this rank; each state's (name, bytes per unit)."""

    numel: int
    states: tuple[tuple[str, int], ...]


class Slice(NamedTuple):
    """Units [begin, end) of extent ``number``, and where a buffer holds each state."""

    number: int
    begin: int
    end: int
    places: tuple[int, ...]


@dataclass
class Chunk:
    """What one buffer holds: slices, and parts of the file (offset, bytes, place in the buffer)."""

    slices: list[Slice]
    parts: list[tuple[int, int, int]]
    crc: int | None = None
    versions: int = 0

    @property
    def used(self) -> int:
        """Bytes of the buffer that the parts take."""
        return max((place + count for _, count, place in self.parts), default=0)


@dataclass
class Layout:
    """Where states lie. ``offsets``: for each extent, where each of its states is in the file."""

    offsets: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    end: int = 0


def _fewest(items: Sequence[int], page: int) -> int:
    """The fewest units of which every state has whole pages."""
    return lcm(*(page // gcd(page, item) for item in items))


def lay_out(wanted: Sequence[Wanted], chunk_bytes: int, begin: int = 0, page: int = PAGE) -> Layout:
    """Place states from byte ``begin`` on: arithmetic, for optimizers and for planners.

    An extent whose states fit into a buffer shares a chunk with its neighbours; a larger extent has
    pages of its own per state, and chunks that hold the same units of each state. ``ValueError``: a
    buffer of ``chunk_bytes`` has no room for a page of each state.
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
