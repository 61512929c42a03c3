"""Small Python objects between ranks, through a unit's communicator.

Unlike torch's object collectives they end in an error that names who did not come, at the
communicator's deadline, and need no device memory.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np


def exchange(comm: Any, value: Any, what: str) -> list[Any]:
    """Every rank's ``value``, in rank order. Collective; ``what`` goes into error texts."""
    if comm.world == 1:
        return [value]
    text = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    sizes = np.zeros(comm.world, dtype=np.int64)
    sizes[comm.rank] = len(text)
    comm.all_gather(sizes, what=what)
    room = int(sizes.max())
    everyone = np.zeros((comm.world, room), dtype=np.uint8)
    everyone[comm.rank, : len(text)] = text
    comm.all_gather(everyone.reshape(-1), what=what)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def broadcast(comm: Any, value: Any, what: str) -> Any:
    """Rank 0's ``value``; what the others pass is ignored. Collective."""
    if comm.world == 1:
        return value
    text = np.frombuffer(pickle.dumps(value) if comm.rank == 0 else b"", dtype=np.uint8)
    size = np.array([len(text)], dtype=np.int64)
    comm.broadcast(size, root=0, what=what)
    room = text.copy() if comm.rank == 0 else np.empty(int(size[0]), dtype=np.uint8)
    comm.broadcast(room, root=0, what=what)
    return value if comm.rank == 0 else pickle.loads(room.tobytes())
