"""Bytes of saved activations that ``fsdpc.activations`` compresses or offloads: arithmetic without
torch, which the planner uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 256  # elements that share a scale
MIN_BYTES = 1 << 20  # the smallest tensor that is offloaded
HELD = 4  # tensors whose copies may be under way before torch's stream waits for one
AHEAD = 3  # tensors that are on their way back before they are needed
_GRAIN = 1 << 12


def bytes_per_element(dtype: str, item: int) -> float:
    """Bytes of a compressed element that had ``item`` bytes, with its part of a block's scale."""
    return 1 + 4 / BLOCK if dtype == "int8" else min(item, 2)


def pinned_bytes(nbytes: int) -> int:
    """Bytes of the pinned buffer of an offloaded tensor."""
    return -(-nbytes // _GRAIN) * _GRAIN


class Away(NamedTuple):
    """Where the saved tensors of an offloaded forward are, in bytes.

    ``stay``: tensors that are not copied; ``copied``: tensors copied to the host; ``pinned``: host
    memory; ``resident``: the last tensors, which are in both memories until backward; ``moving``:
    the most GPU memory of copied tensors at other times: those on their way, and the one in use.
    """

    stay: int
    copied: int
    pinned: int
    resident: int
    moving: int


def away(sizes: Sequence[int], min_bytes: int = MIN_BYTES) -> Away:
    """The bytes for saved tensors of ``sizes`` bytes, in the order of the forward, each once."""
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
