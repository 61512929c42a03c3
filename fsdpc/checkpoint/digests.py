"""Digests of tensors put together from those of the ranks' parts.

CRC-32C of parts combine to that of the whole, so that the digests of a tensor and of its blocks do
not depend on how many ranks wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpc import _C
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.layout import BLOCK_BYTES, Place


@dataclass(frozen=True, slots=True)
class Digest:
    """CRC-32C of a tensor's bytes and of each of its blocks."""

    whole: int
    blocks: tuple[int, ...]


def combine(
    places: Sequence[Place],
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    block_bytes: int = BLOCK_BYTES,
) -> list[Digest]:
    """The digest of each tensor. ``parts``: per rank, the rows of ``fragments`` and their digests.

    ``CheckpointError``: the parts do not cover a tensor exactly once.
    """
    rows = np.concatenate([rows for rows, _ in parts])
    crcs = np.concatenate([crcs for _, crcs in parts])
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    rows, crcs = rows[order], crcs[order]
    indices = [place.index for place in places]
    low = np.searchsorted(rows[:, 0], indices)
    counts = np.searchsorted(rows[:, 0], indices, side="right") - low
    chosen = np.repeat(low - _before(counts), counts) + np.arange(counts.sum())
    begins, lengths, crcs = rows[chosen, 1], rows[chosen, 2], crcs[chosen]
    _check_cover(places, counts, begins, lengths)
    starts = np.flatnonzero(begins % block_bytes == 0)
    blocks = _combined(crcs, lengths, np.diff(starts, append=len(begins)))
    nbytes = np.array([place.nbytes for place in places], dtype=np.int64)
    per_tensor = -(-nbytes // block_bytes)
    sizes = np.full(len(blocks), block_bytes, dtype=np.int64)
    ends, some = np.cumsum(per_tensor), per_tensor > 0
    sizes[ends[some] - 1] = (nbytes - block_bytes * (per_tensor - 1))[some]
    wholes = _combined(blocks, sizes, per_tensor)
    every, bounds = blocks.tolist(), zip((ends - per_tensor).tolist(), ends.tolist(), strict=True)
    cut = [tuple(every[begin:end]) for begin, end in bounds]
    pairs = zip(wholes.tolist(), cut, strict=True)
    return [Digest(whole, part or (whole,)) for whole, part in pairs]  # a tensor may be empty


def _before(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _combined(crcs: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    digests = np.empty(len(counts), dtype=np.uint32)
    parts, sizes = np.ascontiguousarray(crcs), np.ascontiguousarray(lengths)
    _C.ckpt_combine(parts, sizes, counts.astype(np.int64), digests)
    return digests


def combine_parts(crcs: np.ndarray, lengths: np.ndarray) -> int:
    """The digest of parts that lie one behind the other."""
    return int(_combined(crcs, np.ascontiguousarray(lengths), np.array([len(crcs)]))[0])


def _check_cover(
    places: Sequence[Place], counts: np.ndarray, begins: np.ndarray, lengths: np.ndarray
) -> None:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    first = _before(counts)
    held = ends[first + counts] - ends[first]
    gaps = begins != ends[:-1] - np.repeat(ends[first], counts)
    wrong = held != [place.nbytes for place in places]
    wrong[np.repeat(np.arange(len(places)), counts)[gaps]] = True
    if wrong.any():
        i = int(np.argmax(wrong))
        raise CheckpointError(
            f"tensor {places[i].name!r}: the ranks' parts cover {int(held[i])} of its "
            f"{places[i].nbytes} bytes, or some of them twice: do all ranks of the model take "
            "part, and no others (group=)?"
        )
