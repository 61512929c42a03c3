"""Exchange of plain values between ranks, through a unit's communicator.

Unlike torch's object collectives, these functions raise an error at the communicator's deadline
that names the missing ranks, need no device memory, and never run code that a sender chooses
(``plain.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpc import _C
from fsdpc._comm.plain import Malformed, decode, encode

_VALUE, _PROBLEM = b"v", b"p"


def exchange(comm: Any, value: Any, what: str) -> list[Any]:
    """Return every rank's ``value``, in rank order. Collective; ``what`` goes into error messages.

    ``TypeError`` on every rank if some rank's value is not plain; the error names the place in the
    value. ``CommError`` names a rank whose message is malformed.
    """
    if comm.world == 1:
        return [value]
    mine, problem = _packed(value)
    text = np.frombuffer(mine, dtype=np.uint8)
    sizes = np.zeros(comm.world, dtype=np.int64)
    sizes[comm.rank] = len(text)
    comm.all_gather(sizes, what=what)
    room = int(sizes.max())
    everyone = np.zeros((comm.world, room), dtype=np.uint8)
    everyone[comm.rank, : len(text)] = text
    comm.all_gather(everyone.reshape(-1), what=what)
    if problem is not None:
        raise TypeError(f"{what}: {problem}") from problem
    rows = zip(everyone, sizes, strict=True)
    return [_unpacked(row[:size].tobytes(), rank, what) for rank, (row, size) in enumerate(rows)]


def check_equal(setting: str, values: list[Any]) -> None:
    """Raise ``MismatchError`` if a rank's value of the setting differs from rank 0's. Local."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise _C.MismatchError(
                f"{setting} differs between ranks: {values[0]} on rank 0, {value} on rank {rank}"
            )


def read(data: bytes, rank: int, what: str) -> Any:
    """Decode a rank's message. ``CommError`` names a rank whose bytes are malformed. Local."""
    try:
        return decode(data)
    except Malformed as error:
        raise unreadable(rank, what, error) from error


def unreadable(rank: int, what: str, why: object) -> _C.CommError:
    """Return the error that a rank's message cannot be read."""
    return _C.CommError(f"{what}: the message of rank {rank} cannot be read: {why}")


def broadcast(comm: Any, value: Any, what: str) -> Any:
    """Return rank 0's ``value``; other ranks' values are ignored. Collective.

    Errors are those of ``exchange``.
    """
    if comm.world == 1:
        return value
    mine, problem = _packed(value) if comm.rank == 0 else (b"", None)
    size = np.array([len(mine)], dtype=np.int64)
    comm.broadcast(size, root=0, what=what)
    room = np.empty(int(size[0]), dtype=np.uint8)
    room[: len(mine)] = np.frombuffer(mine, dtype=np.uint8)
    comm.broadcast(room, root=0, what=what)
    if problem is not None:
        raise TypeError(f"{what}: {problem}") from problem
    return value if comm.rank == 0 else _unpacked(room.tobytes(), 0, what)


def _packed(value: Any) -> tuple[bytes, TypeError | None]:
    """Return the bytes to send, and a ``TypeError`` if the value is not plain, else None.

    A rank with an error sends the error's text, because the other ranks wait for bytes in any case.
    """
    try:
        return _VALUE + encode(value), None
    except TypeError as error:
        return _PROBLEM + encode(str(error)), error


def _unpacked(data: bytes, rank: int, what: str) -> Any:
    value = read(data[1:], rank, what)
    if data[:1] not in (_VALUE, _PROBLEM):
        raise unreadable(rank, what, "its first byte says neither value nor problem")
    if data[:1] == _PROBLEM:
        raise TypeError(f"{what}: on rank {rank} {value}")
    return value
