"""Digests of tensors, combined from the digests of the parts that the ranks wrote.

The CRC-32C of a tensor can be computed from the CRC-32C of its parts. So the digests of a tensor
and of its blocks do not depend on the number of ranks that wrote the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpc import _C
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import BLOCK_BYTES, Place


@dataclass(frozen=True, slots=True)
class Digest:
    """The CRC-32C of a tensor's bytes, and of each block of the tensor."""

    whole: int
    blocks: tuple[int, ...]


@dataclass
class Digests:
    """The digests of several tensors in arrays; one object per tensor would slow down a save."""

    wholes: np.ndarray
    blocks: np.ndarray  # the digests of the blocks of all tensors, one tensor after the other
    counts: np.ndarray  # how many blocks each tensor has

    def __iter__(self) -> Iterator[Digest]:
        """Yield a ``Digest`` for each tensor."""
        blocks, at = self.blocks.tolist(), 0
        for whole, count in zip(self.wholes.tolist(), self.counts.tolist(), strict=True):
            # An empty tensor has no blocks, and the digest of the whole tensor stands in for them.
            yield Digest(whole, tuple(blocks[at : at + count]) or (whole,))
            at += count

    def texts(self) -> tuple[list[str], list[str]]:
        """Return two lists with one hexadecimal text for each tensor. The first list has the digest
        of the whole tensor. The second list has the digests of the tensor's blocks, or an empty
        text if the tensor does not have several blocks.
        """
        wholes, blocks = (each.astype(">u4").tobytes().hex() for each in (self.wholes, self.blocks))
        own, ends = [""] * len(self.counts), 8 * np.cumsum(self.counts)
        for number in np.flatnonzero(self.counts > 1).tolist():
            own[number] = blocks[ends[number] - 8 * self.counts[number] : ends[number]]
        return [wholes[at : at + 8] for at in range(0, len(wholes), 8)], own


def combine(
    places: Sequence[Place],
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    block_bytes: int = BLOCK_BYTES,
) -> Digests:
    """Return the digests of the tensors at ``places``. ``parts`` has for each rank the rows that
    ``fragments`` returned for the rank, and the digest of the bytes of each row.

    Raises ``CheckpointError`` if the parts do not cover each byte of a tensor exactly once.
    """
    rows = np.concatenate([rows for rows, _ in parts])
    crcs = np.concatenate([crcs for _, crcs in parts])
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    rows, crcs = rows[order], crcs[order]
    indices = np.array([place.index for place in places], dtype=np.int64)
    low = np.searchsorted(rows[:, 0], indices)
    counts = np.searchsorted(rows[:, 0], indices, side="right") - low
    chosen = np.repeat(low - _before(counts), counts) + np.arange(counts.sum())
    begins, lengths, crcs = rows[chosen, 1], rows[chosen, 2], crcs[chosen]
    nbytes = np.array([place.nbytes for place in places], dtype=np.int64)
    _check_cover(places, nbytes, (counts, begins, lengths))
    starts = np.flatnonzero(begins % block_bytes == 0)
    blocks = _combined(crcs, lengths, np.diff(starts, append=len(begins)))
    per_tensor = -(-nbytes // block_bytes)
    if (per_tensor == 1).all():  # the only block of a tensor is the whole tensor
        return Digests(blocks, blocks, per_tensor)
    sizes = np.full(len(blocks), block_bytes, dtype=np.int64)
    ends, some = np.cumsum(per_tensor), per_tensor > 0
    sizes[ends[some] - 1] = (nbytes - block_bytes * (per_tensor - 1))[some]
    return Digests(_combined(blocks, sizes, per_tensor), blocks, per_tensor)


def _before(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _combined(crcs: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    digests = np.empty(len(counts), dtype=np.uint32)
    parts, sizes = np.ascontiguousarray(crcs), np.ascontiguousarray(lengths)
    _C.ckpt_combine(parts, sizes, counts.astype(np.int64), digests)
    return digests


def combine_parts(crcs: np.ndarray, lengths: np.ndarray) -> int:
    """Return the digest of all bytes of consecutive parts. ``crcs`` are the parts' digests."""
    return int(_combined(crcs, np.ascontiguousarray(lengths), np.array([len(crcs)]))[0])


def _check_cover(
    places: Sequence[Place], nbytes: np.ndarray, parts: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    counts, begins, lengths = parts
    ends = np.concatenate([[0], np.cumsum(lengths)])
    first = _before(counts)
    held = ends[first + counts] - ends[first]
    gaps = begins != ends[:-1] - np.repeat(ends[first], counts)
    wrong = held != nbytes
    wrong[np.repeat(np.arange(len(places)), counts)[gaps]] = True
    if wrong.any():
        i = int(np.argmax(wrong))
        raise CheckpointError(
            f"tensor {places[i].name!r}: the ranks' parts cover {int(held[i])} of its "
            f"{places[i].nbytes} bytes, or some of them twice: do all ranks of the model take "
            "part, and no others (group=)?"
        )
