"""Where states lie in a file or in host memory, and in buffers: arithmetic, for the optimizers that
keep them there and for the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PAGE = 4096
BUFFERS = 3  # of states on a disk: one is read, one stepped, one written
STAGES = 2  # of states in host memory, on the GPU: one is filled, one stepped and emptied
ALIGN = 64  # of a state that shares pages with others


def chunk_bytes_of(buffer_bytes: int, buffers: int = BUFFERS) -> int:
    """Bytes of each buffer, in whole pages, where all buffers have ``buffer_bytes``."""
    return buffer_bytes // buffers // PAGE * PAGE


def chosen_for_host(
    sizes: Sequence[int], ratio: float, before: tuple[int, int] = (0, 0)
) -> list[bool]:
    """Which parameters have their states, of ``sizes`` bytes, in host memory: one after the other,
    as long as those are at most ``ratio`` of all. ``before``: bytes in host memory, and of all,
    that were chosen earlier.
    """
    held, total = before[0], before[1] + sum(sizes)
    found = []
    for size in sizes:
        found.append(held + size <= ratio * total)
        held += size if found[-1] else 0
    return found


class Wanted(NamedTuple):
    """States of one parameter that need space: elements on this rank, (name, bytes of an item)."""

    numel: int
    states: tuple[tuple[str, int], ...]


class Slice(NamedTuple):
    """Elements [begin, end) of parameter ``number``, and where a buffer holds each state."""

    number: int
    begin: int
    end: int
    places: tuple[int, ...]


@dataclass
class Chunk:
    """What one buffer holds: slices, and the ranges of the file, (offset, bytes, place)."""

    slices: list[Slice]
    parts: list[tuple[int, int, int]]
    crc: int | None = None
    versions: int = 0

    @property
    def used(self) -> int:
        """Bytes of the buffer."""
        return max((place + count for _, count, place in self.parts), default=0)


@dataclass
class Layout:
    """Where states lie. ``offsets``: per parameter, of each of its states in the file."""

    offsets: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    end: int = 0


def lay_out(wanted: Sequence[Wanted], chunk_bytes: int, begin: int = 0) -> Layout:
    """Place states from byte ``begin`` on: arithmetic, for optimizers and for planners.

    A parameter whose states fit into a buffer shares a chunk with its neighbours; a larger one has
    pages of its own per state, and chunks that hold the same elements of each.
    """
    found = Layout(end=_up(begin, PAGE))
    open_chunk: Chunk | None = None
    for number, want in enumerate(wanted):
        sizes = [_up(want.numel * item, ALIGN) for _, item in want.states]
        if sum(sizes) <= chunk_bytes:
            start = open_chunk.used if open_chunk else 0
            if open_chunk is None or start + sum(sizes) > chunk_bytes:
                found.end, start = _up(found.end, PAGE), 0
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
            _lay_out_large(found, number, want, chunk_bytes)
    found.end = _up(found.end, PAGE)
    for chunk in found.chunks:
        parts = [(at, _up(count, PAGE), place) for at, count, place in chunk.parts]
        chunk.parts = [part for part in parts if part[1] > 0]
    return found


def _lay_out_large(found: Layout, number: int, want: Wanted, chunk_bytes: int) -> None:
    items = [item for _, item in want.states]
    sizes = [_up(want.numel * item, PAGE) for item in items]
    found.end = _up(found.end, PAGE)
    offsets = tuple(found.end + sum(sizes[:k]) for k in range(len(sizes)))
    most = chunk_bytes // sum(items) // PAGE * PAGE  # elements: whole pages of every state
    for begin in range(0, want.numel, most):
        end = min(begin + most, want.numel)
        counts = [_up((end - begin) * item, PAGE) for item in items]
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
