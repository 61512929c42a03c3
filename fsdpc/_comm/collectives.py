"""The callbacks of a "c10d" communicator: torch's collectives, and torch's sends and receives.

Ranks on several hosts exchange units by sends and receives in the background (``post``, ``land``;
csrc/comm/flight.h). A wait for such a transfer fails after ``FSDPC_TIMEOUT`` with an error that
names the missing rank. If a connection ends, the error is raised at once and names the rank at its
other end. All other collectives are torch's and have torch's timeout.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm import interruptible
from fsdpc._comm import verdict as _verdict
from fsdpc._comm.channel import Channel
from fsdpc._comm.stall import Location, Stall
from fsdpc._comm.table import report, table
from fsdpc._comm.texts import ALL_GATHER

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# The name of torch's function, which differs between versions of torch. The function itself is
# looked up at each call: see ALL_GATHER in texts.py.
_REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
# Words in backends' error texts: for a rank that is late, and for a rank whose connection ended.
_LATE = ("timed out", "timeout")
_LOST = (*_LATE, "closed", "reset by peer", "broken pipe", "refused")
# The tag of the trial in _sends_in_background; comm_flight.c has the tags of all other messages.
_TRIAL_TAG = (1 << 30) - 2
# All in seconds. _LONGEST_PAUSE_S: the longest pause between two checks of the watching thread.
# _SPARE_S: how much longer a rank waits for the table of a stall than for the hosts' answers.
# _REASON_S: how long a rank waits for another rank to publish why a connection has ended.
# _SILENCE_S: a store that has not answered for this long counts as gone.
_LONGEST_PAUSE_S, _SPARE_S, _REASON_S, _SILENCE_S = 1.0, 1.0, 0.7, 1.0

T = TypeVar("T")
Transfers = list[tuple[dist.Work, int]]
wires: weakref.WeakSet[Collectives] = weakref.WeakSet()


class Collectives:
    """The callbacks of one group. Each ``memory`` is a 1-D array of bytes, valid during the call.

    ``flies``: units are exchanged by sends and receives, if the backend supports these in the
    background. ``timeout``: the seconds that sends and receives may take. ``locations``: where the
    ranks run, for error messages.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        channel: Channel | None = None,
        *,
        flies: bool = False,
        timeout: float = _C.DEFAULT_TIMEOUT,
        locations: Sequence[Location] = (),
    ) -> None:
        self._pg = weakref.ref(pg)  # a communicator must not keep a destroyed group alive
        self._rank = pg.rank()
        self.flies = flies and _sends_in_background(pg)
        self._timeout = timeout
        self._locations = locations
        self._channel = channel  # a rank that fails publishes the reason through this channel
        # The channel is connected now, because once a rank has failed, connecting may take as long
        # as the store's timeout.
        self._asking = channel.for_watching() if channel else None
        self.stalls: _verdict.Group | Hosts | None = None
        # Transfers that were given up. They are kept until the group fails. Then they are dropped,
        # because the connections must end.
        self._given_up: Transfers = []
        self._broken = False
        self._late: list[int] = []  # the ranks for which a wait of this rank timed out, if known
        wires.add(self)

    def publish(self, text: str) -> None:
        """Publish this rank's failure for the other ranks' error messages. Local; never raises."""
        if self._channel is not None:
            self._channel.publish(f"rank {self._rank} gave up: {text}")

    # --- what is known of a failure ---------------------------------------------------------------

    def _reason(self) -> str:
        """Return the failure that another rank has published, else "". Wait for the failure for up
        to ``_REASON_S`` seconds. A rank that raises publishes the reason in the store before its
        connections end, but this rank may see the end of the connections first.
        """
        until = time.monotonic() + _REASON_S
        if isinstance(self.stalls, Hosts) and not self.stalls.answers:
            return ""

        def ask() -> str:
            with suppress(RuntimeError):  # the store may be gone
                while self._asking and time.monotonic() < until:
                    failure = self._asking.failure()
                    if failure:
                        return failure
                    time.sleep(0.02)
            return ""

        return _within(_REASON_S, ask) or ""

    def _why(self, late: list[int] | None) -> str:
        """Return what is known of the cause of a failed collective, else "".

        ``late`` are the ranks that are known to be late; None if the collective did not time out,
        but another rank has ended it.
        """
        reason = self._reason()
        if reason or late is None:
            return reason
        with suppress(OSError):
            found = self.stalls.verdict(True, late) if self.stalls else None
            return found[1].lstrip("\n") if found else ""
        return ""

    @contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        """Show on the board what this rank waits for; add the cause, if known, to an error."""
        _C.board_begin(what)
        try:
            yield
        except Exception as error:
            self._break()
            text = str(error).lower()
            known = isinstance(error, _C.PeerError)
            if not known and any(word in text for word in _LOST):
                is_late = isinstance(error, _C.CommTimeout) or any(word in text for word in _LATE)
                note = self._why(self._late if is_late else None)
                if note and note not in str(error):
                    error.add_note(note)
            raise
        except BaseException as error:  # Ctrl-C, after which the program may go on
            self._break()
            self.publish(f"{type(error).__name__} in {what}")
            raise
        finally:
            _C.board_end()

    def _group(self) -> dist.ProcessGroup:
        pg = self._pg()
        if pg is None:
            raise RuntimeError(
                f"rank {self._rank}: the process group was destroyed while its model is in use: "
                "call destroy_process_group() after the last step"
            )
        return pg

    # --- torch's collectives ----------------------------------------------------------------------

    def all_gather(self, memory: np.ndarray, piece_bytes: int, what: str) -> None:
        whole = torch.from_numpy(memory)
        gather = getattr(dist, ALL_GATHER)
        with self._shown(what or "all_gather"):
            gather(whole, self._piece(whole, piece_bytes), group=self._group())

    def reduce_scatter(self, memory: np.ndarray, piece_numel: int, dtype: str, what: str) -> None:
        whole = torch.from_numpy(memory).view(getattr(torch, dtype))
        scatter = getattr(dist, _REDUCE_SCATTER)
        with self._shown(what or "reduce_scatter"):
            scatter(self._piece(whole, piece_numel), whole, group=self._group())

    def all_reduce(self, memory: np.ndarray, numel: int, dtype: str, op: str, what: str) -> None:
        whole = torch.from_numpy(memory).view(getattr(torch, dtype))
        with self._shown(what or "all_reduce"):
            dist.all_reduce(whole, op=_OPS[op], group=self._group())

    def broadcast(self, memory: np.ndarray, root: int, what: str) -> None:
        with self._shown(what or "broadcast"):
            dist.broadcast(torch.from_numpy(memory), group=self._group(), group_src=root)

    def barrier(self, what: str) -> None:
        with self._shown(what or "barrier"):
            dist.barrier(group=self._group())

    def _piece(self, whole: torch.Tensor, numel: int) -> torch.Tensor:
        return whole[self._rank * numel : (self._rank + 1) * numel]

    # --- transfers in the background --------------------------------------------------------------

    def post(self, moves: list[tuple[np.ndarray, int, bool]], tag: int, what: str) -> Transfers:
        """Begin sends and receives with one tag. A move is (memory, rank in the group, whether to
        send). The caller keeps the memory until all moves have landed, or for ever if a move never
        lands.
        """
        pg = self._group()
        works = []
        for memory, peer, send in moves:
            begin = pg.send if send else pg.recv
            try:
                works.append((begin([torch.from_numpy(memory)], peer, tag), peer))
            except RuntimeError as error:
                raise self._failed(peer, error, what) from error
        return works

    def land(self, works: Transfers, skip: bytes | None, what: str) -> None:
        """Wait for the transfers, except those with ranks r whose ``skip[r]`` is set. Such ranks
        begin no matching transfers. ``CommTimeout``: a rank is late. ``PeerError``: a rank has
        ended. After these errors, and after an exception of a signal handler (Ctrl-C), transfers
        no longer write to memory.
        """
        until = time.monotonic() + self._timeout
        failed: list[tuple[int, RuntimeError]] = []

        def wait() -> None:
            for work, peer in works:
                if skip and skip[peer]:
                    continue
                left = max(until - time.monotonic(), 0.001)
                try:
                    work.wait(timedelta(seconds=left))
                except RuntimeError as error:
                    failed.append((peer, error))
                    return

        with self._shown(what):
            interruptible.run(wait, lambda: _cut([work for work, _ in works]))
            for peer, error in failed:
                raise self._failed(peer, error, what) from error

    def give_up(self, works: Transfers) -> None:
        """Stop waiting for transfers without cancelling them: data that another rank has begun to
        send must be received, or the connection could not carry any later message. Local.
        """
        if not self._broken:
            self._given_up.extend(works)

    def _break(self) -> None:
        self._broken = True
        self._given_up.clear()

    def _failed(self, peer: int, error: RuntimeError, what: str) -> Exception:
        """Return an error that names the rank, or ``error`` if no rank is late or gone."""
        text = str(error).lower()
        if any(word in text for word in _LATE):
            more = f"; it is {self._place(peer)}"
            self._late = [peer]
            return _C.CommTimeout(_C.Comm.late_text(self._rank, self._timeout, what, [peer], more))
        if any(word in text for word in _LOST):
            reason = self._reason() or (
                f"the connection to rank {peer} ({self._place(peer)}) is closed: the process has "
                "ended, or its host cannot be reached"
            )
            return _C.PeerError(f"{what}: rank {self._rank} cannot go on: {reason}")
        return error

    def _place(self, peer: int) -> str:
        if peer >= len(self._locations):
            return f"rank {peer} of {self._group().size()}"
        place = self._locations[peer]
        return f"process {place.pid} on host {place.host_name}"


def _cut(works: Sequence[dist.Work]) -> None:
    """Cancel the transfers. This ends the connections of transfers that have not landed, so that
    nothing writes to memory after a wait has failed.
    """
    for work in works:
        try:
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the timeout has cancelled all other transfers of the group, too


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of ``call()``, or None if the call takes longer than ``seconds``: a store
    that cannot be reached may not answer for minutes.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _sends_in_background(pg: dist.ProcessGroup) -> bool:
    """Whether the group's backend sends from rank to rank in the background. Collective."""
    if pg.size() == 1 or dist.get_backend(pg) == "fake":
        return False
    left, right = (pg.rank() - 1) % pg.size(), (pg.rank() + 1) % pg.size()
    out = torch.tensor([pg.rank()], device="cpu")
    into = torch.tensor([-1], device="cpu")
    try:
        works = [pg.recv([into], left, _TRIAL_TAG), pg.send([out], right, _TRIAL_TAG)]
        for work in works:
            work.wait()
    except (NotImplementedError, RuntimeError) as error:
        if any(word in str(error).lower() for word in _LOST):
            raise
        return False
    return into.item() == left


class Hosts:
    """Reports of stalls for a group on several hosts: the store carries the ranks' status."""

    def __init__(self, channel: Channel, patience: float, locations: Sequence[Location]) -> None:
        asking = channel.for_watching()
        self._polls_since = math.inf
        self._stall = Stall(
            asking.for_stalls(),
            channel.rank,
            locations,
            patience=patience,
            seconds=lambda _: _verdict.waited(),
            note=lambda _, text: None,
            numbers=channel.numbers,
        )

    def poll(self) -> None:
        """Check for stalls. Errors of the store (``RuntimeError``) are ignored: the run goes on."""
        self._polls_since = time.monotonic()
        with suppress(RuntimeError):
            self._stall.poll(self)
        self._polls_since = math.inf

    @property
    def answers(self) -> bool:
        """False once the store has kept the watching thread waiting for ``_SILENCE_S`` seconds."""
        return time.monotonic() - self._polls_since < _SILENCE_S

    def verdict(self, gives_up: bool, late: list[int]) -> tuple[list[int], str] | None:
        """Return the latest table of the current wait as (ranks that are the cause, text).

        If there is no table yet and ``gives_up`` is false, return None. If ``gives_up`` is true,
        wait a few seconds for a missing table. If none comes, or if the store does not answer,
        return a table of this host's ranks.
        """
        if not gives_up:
            return self._stall.verdict
        if self._stall.verdict is None and self.answers:
            self._stall.urge(self._wait)
        return self._stall.verdict or self._of_this_host(late)

    def _wait(self, took: threading.Event) -> None:
        _verdict.wake()
        took.wait(self._stall.answer_s + _SPARE_S)

    def _of_this_host(self, late: list[int]) -> tuple[list[int], str]:
        rows = _verdict.statuses(self._stall.members)
        # Ranks that gave up earlier may have ended, too. They are not the cause.
        guilty = [row.rank for row in rows if row.status.gone and (not late or row.rank in late)]
        message = report(rows, guilty) if guilty else table(rows)
        head = (
            "the process group's store, mostly in rank 0's process, does not answer: of this host"
        )
        return guilty, f"\n{head}{message}"


def follow_hosts(channel: Channel, locations: Sequence[Location]) -> Hosts:
    """Report stalls of a group on several hosts for as long as the result exists. Local."""
    patience = min(_verdict.read_stall(), channel.timeout / 2)
    hosts = Hosts(channel, patience, locations)
    _verdict.follow_remote(hosts, _verdict.pause_of(patience, _LONGEST_PAUSE_S))
    return hosts
