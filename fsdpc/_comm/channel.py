"""The host channel of ranks on GPUs: an all-gather of bytes through the group's store.

Rank 0 collects all ranks' pieces and stores them under one key, so that the store's work grows with
the number of ranks and not with its square. A wait that exceeds ``FSDPC_TIMEOUT`` raises an error
that names the missing ranks. A rank that fails writes its error text into the store, and the waits
of all other ranks raise an error with this text. The keys of a round are deleted at the end of the
next round.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any

import numpy as np
import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm.table import spans
from fsdpc._torch import process_group_store

LEFT = "left in good order"
_LONGEST_NAP_S = 0.05
_PEERS_S = 0.2  # seconds between a waiting rank's checks for peers that have failed or left
_LENGTH = struct.Struct("<Q")
_EXIT_S = 5  # seconds to reach the store when this process ends; the store may be gone by then


def store_of(pg: dist.ProcessGroup) -> Any:
    """Return the store that torch keeps for a group, or None if there is none."""
    if process_group_store is None or dist.get_backend(pg) == "fake":
        return None
    return process_group_store(pg)


def numbers_of(pg: dist.ProcessGroup) -> str:
    """Return a note for messages that says how the group numbers its ranks.

    The note is empty if the ranks have the same numbers in the group as in the program.
    """
    ranks: list[int] = []
    with suppress(KeyError):  # torch may not know the group
        ranks = dist.get_process_group_ranks(pg)
    here = list(range(len(ranks)))
    return "" if ranks == here else f"ranks {spans(ranks)} are called {spans(here)} here"


def program_rank() -> int:
    """Return this rank's number in the program; 0 if ``torch.distributed`` is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def this_rank(comm: _C.Comm | None = None) -> str:
    """Return the name of this rank in messages: its number in the program, followed by its number
    in the communicator's group if the group numbers its ranks in another way. Local.
    """
    number = program_rank()
    return (
        f"{number} ({comm.rank} of its group)" if comm is not None and comm.numbers else f"{number}"
    )


def numbers_in(comm: _C.Comm) -> str:
    """Return a note for the end of a message in which ranks have the communicator's numbers, or ""
    if the program gives the ranks the same numbers. Local.
    """
    return f" ({comm.numbers})" if comm.numbers else ""


class Channel:
    """All-gathers of bytes among the ranks of a group, through the group's store.

    Each channel has its own prefix of keys. ``numbers``: the result of ``numbers_of``. A channel is
    the ``exchange`` argument of ``Comm.nccl``. Only one thread may use a channel at a time; a
    watching thread uses a second channel with its own connection (``for_watching``).
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        timeout: float,
        name: str,
        numbers: str = "",
    ) -> None:
        self._base = store  # keeps the store alive: its server may be in this process
        self._store = dist.PrefixStore(prefix, store)
        self.rank, self.world, self.timeout, self.name = rank, world, timeout, name
        self.numbers = numbers
        self._round = 0
        self.known: str | None = None  # text of another rank's failure; the watching thread sets it

    def renamed(self, prefix: str) -> Channel:
        """Return a channel among the same ranks under another prefix of keys."""
        options = (self.rank, self.world, self.timeout, self.name, self.numbers)
        return Channel(self._base, prefix, *options)

    def __call__(self, memory: np.ndarray, piece_bytes: int, what: str) -> None:
        """All-gather in place. ``memory`` is a 1-D uint8 array, ``piece_bytes`` bytes per rank."""
        begin = self.rank * piece_bytes
        pieces = self.gather(memory[begin : begin + piece_bytes].tobytes(), what)
        for rank, piece in enumerate(pieces):
            if len(piece) != piece_bytes:
                raise _C.CommError(
                    f"{what}: rank {rank} sent {len(piece)} bytes, not {piece_bytes} "
                    f"(communicator {self.name})"
                )
        memory[:] = np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def gather(self, mine: bytes, what: str) -> list[bytes]:
        """Return the bytes of all ranks. Collective. ``CommError``: a rank or the store fails or is
        late.
        """
        try:
            return self._gather(mine, what)
        except _C.CommError as error:
            self.publish(f"rank {self.rank} gave up: {error}")
            raise
        except RuntimeError as error:  # the store fails: nothing can be published
            raise _C.CommError(
                f"{what}: rank {self.rank}: the process group's store does not respond "
                f"(communicator {self.name}); the process that hosts the store, mostly rank 0's, "
                f"may have ended: {error}"
            ) from error

    def _gather(self, mine: bytes, what: str) -> list[bytes]:
        number, self._round = self._round, self._round + 1
        keys, everything = [f"{number}/{rank}" for rank in range(self.world)], f"{number}/all"
        self._check_failure(what)
        self._store.set(keys[self.rank], mine)
        if self.rank == 0:
            self._await(keys, keys, what)
            pieces = self._read(keys)
            self._store.set(everything, _joined(pieces))
        else:
            self._await([everything], keys, what)
            pieces = self._split(self._store.get(everything), what)
        # All ranks are in this round, so no rank reads the keys of the round before.
        if number > 0:
            self._store.delete_key(f"{number - 1}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"{number - 1}/all")
        return pieces

    def _split(self, everything: bytes, what: str) -> list[bytes]:
        """Undo ``_joined``. ``CommError`` if ``everything`` is not a result of ``_joined``."""
        lengths_end = _LENGTH.size * self.world
        if len(everything) >= lengths_end:
            lengths = [n for (n,) in _LENGTH.iter_unpack(everything[:lengths_end])]
            if lengths_end + sum(lengths) == len(everything):
                ends = list(accumulate(lengths, initial=lengths_end))[1:]
                return [everything[e - n : e] for n, e in zip(lengths, ends, strict=True)]
        raise _C.CommError(
            f"{what}: rank {self.rank} cannot read the message of rank 0 to all {self.world} ranks "
            f"in the process group's store ({len(everything)} bytes, communicator {self.name})"
        )

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return self._store.multi_get(keys)
        return [self._store.get(key) for key in keys]

    def _await(self, wanted: list[str], keys: list[str], what: str) -> None:
        """Wait until all keys in ``wanted`` exist. ``keys[r]`` is rank r's key, for errors."""
        begun = checked = time.monotonic()
        nap = 0.0002
        while not self._store.check(wanted):
            now = time.monotonic()
            if self.known or now - checked > _PEERS_S:
                checked = now
                self._check_peers(wanted, keys, what)
            if now - begun > self.timeout:
                raise _C.CommTimeout(self._late(keys, what))
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP_S)

    def _check_failure(self, what: str) -> None:
        failure = self.known or self.failure()
        if failure:
            raise _C.PeerError(f"{what}: rank {self.rank} cannot go on: {failure}")

    def _check_peers(self, wanted: list[str], keys: list[str], what: str) -> None:
        self._check_failure(what)
        if not self._store.check(["left"]):
            return
        owed = {rank: [keys[rank]] for rank in self._absent(keys)}
        if self.rank != 0:
            owed[0] = wanted  # rank 0 may have left before it stored all pieces
        for rank, missing in owed.items():
            if self._store.check([f"left/{rank}"]) and not self._store.check(missing):
                raise _C.PeerError(
                    f"{what}: rank {self.rank} cannot go on: rank {rank} {LEFT} (communicator "
                    f"{self.name})"
                )

    def _absent(self, keys: list[str], first: int = 0) -> list[int]:
        """Return the ranks whose keys are missing. Bisection is fast if few are missing."""
        if self._store.check(keys):
            return []
        half = len(keys) // 2
        if half == 0:
            return [first]
        return self._absent(keys[:half], first) + self._absent(keys[half:], first + half)

    def _late(self, keys: list[str], what: str) -> str:
        more = f"; every rank must make this call (communicator {self.name})"
        return _C.Comm.late_text(self.rank, self.timeout, what, self._absent(keys), more)

    # --- how ranks end ---------------------------------------------------------------------------

    def failure(self) -> str | None:
        """Return the error text of the first rank that failed, or None. Local.

        ``RuntimeError`` if the store does not answer.
        """
        if not self._store.check(["failed"]):
            return None
        return self._store.get("failed").decode(errors="replace")

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left in good order. Local.

        ``RuntimeError`` if the store does not answer.
        """
        return self._store.check([f"left/{rank}"])

    def publish(self, text: str) -> None:
        """Publish this rank's failure to the other ranks; only the first failure counts. Local."""
        self._say(lambda store: store.compare_set("failed", "", text))

    def leave(self) -> None:
        """Publish that this rank leaves in good order. Local."""

        def words(store: Any) -> None:
            store.set(f"left/{self.rank}", "1")
            store.set("left", "1")  # waiting ranks check this key before those of each rank

        self._say(words)

    def for_watching(self) -> Channel:
        """Return a channel with the same keys and its own connection, for the watching thread."""
        twin = self.renamed("")
        twin._store = self._parallel()
        return twin

    def for_stalls(self) -> Any:
        """Return the store under this channel's prefix, for messages other than all-gathers."""
        return self._store

    def _say(self, words: Callable[[Any], Any]) -> None:
        """Call ``words`` with a connection to the store. Ignore errors: the store may be gone."""
        try:
            words(self._parallel(timedelta(seconds=_EXIT_S)))
        except Exception:
            pass

    def _parallel(self, timeout: timedelta | None = None) -> Any:
        """Open a second connection to the store, within ``timeout`` (None: the store's timeout).
        Return ``self._store`` if the store allows no second connection.
        """
        clone = getattr(self._store, "clone", None)
        if clone is None:
            return self._store
        before = self._store.timeout
        if timeout is not None:
            self._store.set_timeout(timeout)
        try:
            return clone()
        finally:
            self._store.set_timeout(before)


def _joined(pieces: list[bytes]) -> bytes:
    return b"".join([*(_LENGTH.pack(len(piece)) for piece in pieces), *pieces])
