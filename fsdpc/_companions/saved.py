"""The number of bytes of saved activations that ``fsdpc.activations`` compresses or offloads.

Pure arithmetic without torch, which the planner uses, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 256  # the number of elements that share a scale
MIN_BYTES = 1 << 20  # the smallest tensor that is offloaded
# How many copies to the host may be unfinished. After one more copy is queued, torch's stream waits
# for the oldest copy.
HELD = 4
AHEAD = 3  # how many tensors are copied back to the GPU before backward needs them
_GRAIN = 1 << 12


def bytes_per_element(dtype: str, item: int) -> float:
    """Return the number of bytes to which an element of ``item`` bytes is compressed. The result
    includes the element's share of the scale.
    """
    return 1 + 4 / BLOCK if dtype == "int8" else min(item, 2)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes of the pinned buffer for an offloaded tensor of ``nbytes`` bytes."""
    return -(-nbytes // _GRAIN) * _GRAIN


class Away(NamedTuple):
    """The memory of the saved tensors of a forward with offloading, in bytes.

    ``stay``: tensors that are not copied. ``copied``: tensors that are copied to the host.
    ``pinned``: the host memory for the copies. ``resident``: the last tensors, which are in both
    memories until backward. ``moving``: the peak of the GPU memory of copied tensors during forward
    and backward, namely of the tensor in use and of the tensors whose copies are unfinished.
    """

    stay: int
    copied: int
    pinned: int
    resident: int
    moving: int


def away(sizes: Sequence[int], min_bytes: int = MIN_BYTES) -> Away:
    """Return the bytes for saved tensors of ``sizes`` bytes, one per tensor, in forward order."""
    large = [size for size in sizes if size >= min_bytes]
    width = max(HELD, AHEAD) + 1
    windows = (sum(large[at : at + width]) for at in range(max(1, len(large) - width + 1)))
    return Away(
        sum(sizes) - sum(large),
        sum(large),
        sum(map(pinned_bytes, large)),
        sum(large[-HELD:]),
        max(windows),
    )
