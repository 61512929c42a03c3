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


@dataclass(frozen=True)
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
    limits = np.searchsorted(rows[:, 0], [place.index for place in places] + [1 << 62])
    ends = np.searchsorted(rows[:, 0], [place.index for place in places], side="right")
    return [
        _digest(place, rows[low:high], crcs[low:high], block_bytes)
        for place, low, high in zip(places, limits, ends, strict=False)
    ]


def _digest(place: Place, rows: np.ndarray, crcs: np.ndarray, block_bytes: int) -> Digest:
    begins, lengths = rows[:, 1], rows[:, 2]
    expected = np.cumsum(lengths) - lengths
    if int(lengths.sum()) != place.nbytes or not np.array_equal(begins, expected):
        raise CheckpointError(
            f"tensor {place.name!r}: the ranks' parts cover {int(lengths.sum())} of its "
            f"{place.nbytes} bytes, or some of them twice: do all ranks of the model take part, "
            "and no others (group=)?"
        )
    blocks = []
    starts = np.flatnonzero(begins % block_bytes == 0)
    for low, high in zip(starts, [*starts[1:], len(rows)], strict=True):
        blocks.append(
            int(crcs[low])
            if high == low + 1
            else _C.ckpt_combine(crcs[low:high].copy(), lengths[low:high].copy())
        )
    sizes = np.full(len(blocks), block_bytes, dtype=np.int64)
    if len(blocks):
        sizes[-1] = place.nbytes - block_bytes * (len(blocks) - 1)
    whole = _C.ckpt_combine(np.array(blocks, dtype=np.uint32), sizes)
    return Digest(whole, tuple(blocks))
