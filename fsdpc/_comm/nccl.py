"""Communicators of GPUs: the rendezvous of their ranks, and the thread that watches the ranks.

The ranks meet through the process group's store, into which rank 0 writes NCCL's ids. Afterwards a
thread of each process checks whether another rank has failed or died. If so, the thread ends the
waits of its own rank, because NCCL would wait until the deadline.
"""

from __future__ import annotations

import os
import re
import select
import threading
import uuid
import weakref
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm import board as _board
from fsdpc._comm import verdict as _verdict
from fsdpc._comm import wire as _wire
from fsdpc._comm.channel import Channel, numbers_of, store_of
from fsdpc._comm.objects import check_equal, read, unreadable
from fsdpc._comm.plain import encode
from fsdpc._comm.stall import Location, Stall

WATCH_S = 0.5
_VERSION = "the version of NCCL"
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_held: weakref.WeakKeyDictionary[_C.Comm, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Hello:
    """The first message that a rank sends in the rendezvous."""

    settings: dict[str, Any]  # MismatchError if these differ between ranks
    host: str
    pid: int
    gpu: int
    visible: str  # CUDA_VISIBLE_DEVICES, which decides what GPU number `gpu` is
    registers: bool  # whether this rank can and wants to register memory with NCCL
    error: str  # this rank's failure, or ""
    # NCCL's ids for gathers and for reductions, and the prefix of keys: all ranks use rank 0's.
    ids: tuple[bytes, bytes, str]

    def to_bytes(self) -> bytes:
        return encode(astuple(self))

    @staticmethod
    def from_bytes(data: bytes, rank: int, what: str) -> _Hello:
        """Decode a message. ``CommError`` names a rank whose bytes are malformed."""
        kinds = (dict, str, int, int, str, bool, str, tuple)
        fields = read(data, rank, what)
        fits = isinstance(fields, tuple) and len(fields) == len(kinds)
        if not fits or not all(type(v) is kind for v, kind in zip(fields, kinds, strict=True)):
            raise unreadable(rank, what, "not a first message of fsdpc")
        _check_ids(fields[7], rank, what)
        if not 0 < fields[2] < 2**31 or not isinstance(fields[0].get(_VERSION), str):
            raise unreadable(rank, what, "no process id, or no version")
        return _Hello(*fields)


def _check_ids(ids: Any, rank: int, what: str) -> None:
    kinds = [type(each) for each in ids] if isinstance(ids, tuple) else []
    if kinds != [bytes, bytes, str]:
        raise unreadable(rank, what, "malformed ids")


def make_nccl_comm(
    pg: dist.ProcessGroup,
    device: int,
    timeout: float,
    *,
    host: str,
) -> _C.Comm:
    """Return a new communicator among the GPUs of a group. Collective over ``pg``.

    ``device`` is the number of this rank's GPU. ``host`` is equal for processes that can open
    pidfds of each other. ``timeout``, in seconds, must be equal on all ranks.
    ``NotImplementedError``: this rank has no such GPU or no NCCL. ``PeerError``: another rank has
    no such GPU or no NCCL. ``MismatchError``: the ranks' settings differ. ``CommTimeout`` names the
    missing ranks.
    """
    store = store_of(pg)
    if store is None:
        raise ValueError(
            f"the process group {pg.group_name!r} of backend {dist.get_backend(pg)!r} has no store "
            "for the rendezvous of its ranks: shard over another group, or on the CPU"
        )
    number = _made.get(pg, 0)
    _made[pg] = number + 1
    name = f"group {pg.group_name}/{number}"
    prefix, numbers = f"fsdpc/nccl/{number}", numbers_of(pg)
    starting = Channel(store, prefix, pg.rank(), pg.size(), timeout, name, numbers)
    everyone = _exchange_hellos(starting, device, host)
    channel = starting.renamed(f"fsdpc/nccl/{everyone[0].ids[2]}")
    start = _Start(starting, channel, device, name, timeout)
    try:
        comm = start.twice(everyone)
    except _C.CommError as error:
        raise type(error)(f"{error}{_sharing(everyone)}") from error
    if all(hello.host == host for hello in everyone):
        _wire.note_one_host(comm)
    starting.gather(b"", f"starting communicator {name}")  # deletes the previous round's keys
    watch(comm, channel, [Location(hello.host, hello.pid) for hello in everyone])
    return comm


@dataclass(frozen=True)
class _Start:
    starting: Channel
    channel: Channel
    device: int
    name: str
    timeout: float

    def twice(self, everyone: list[_Hello]) -> _C.Comm:
        try:
            return self.now(everyone[0].ids, register=all(hello.registers for hello in everyone))
        except NotImplementedError:  # raised on all ranks: registration broke the communicator
            mine = _new_ids() if self.starting.rank == 0 else None
            texts = self.starting.gather(encode(mine), self.name)
            ids = read(texts[0], 0, self.name)
            _check_ids(ids, 0, self.name)
            return self.now(ids, register=False)

    def now(self, ids: tuple[bytes, bytes, str], *, register: bool) -> _C.Comm:
        rank, world = self.starting.rank, self.starting.world
        how = (self.device, self.name, self.timeout, self.channel)
        free, _ = _C.cuda_memory(self.device)
        comm = _C.Comm.nccl(rank, world, ids[0], ids[1], *how, register=register)
        _held[comm] = max(free - _C.cuda_memory(self.device)[0], 0)
        return comm


def held_bytes(comm: _C.Comm) -> int:
    """Return the bytes of device memory that the start of a communicator took; 0 without NCCL.

    The number is the decrease of the GPU's free memory, so it includes what other processes
    allocated on this GPU in the meantime. Local.
    """
    return _held.get(comm, 0)


def _sharing(everyone: list[_Hello]) -> str:
    """Return a text for the end of an error message if ranks share a GPU and NCCL is older than
    2.30, else "".
    """
    version = everyone[0].settings[_VERSION]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (2, 30):
        return ""
    first: dict[Any, int] = {}
    for rank, hello in enumerate(everyone):
        other = first.setdefault((hello.host, hello.visible, hello.gpu), rank)
        if other != rank:
            return (
                f". Ranks {other} and {rank} share GPU {hello.gpu}, which {version} may refuse ("
                "2.30 does not): FSDPC_COLLECTIVES=shm stages through host memory"
            )
    return ""


def _new_ids() -> tuple[bytes, bytes, str]:
    return _C.nccl_id(), _C.nccl_id(), uuid.uuid4().hex


def _exchange_hellos(channel: Channel, device: int, host: str) -> list[_Hello]:
    what = f"starting communicator {channel.name}"
    with suppress(OSError, _C.CommError):  # a stall table then says less about this rank
        _board.open_board()
    ids, version, failure, registers = (b"", b"", ""), "", None, False
    wanted = os.environ.get("FSDPC_NCCL_REGISTER", "1") != "0"
    try:
        registers = wanted and _C.cuda_device(device)["virtual_memory"]
        version = _C.nccl_version()
        if channel.rank == 0:
            ids = _new_ids()
    except Exception as error:
        failure = error
    settings = {
        "FSDPC_TIMEOUT": channel.timeout,
        "FSDPC_NCCL_REGISTER": wanted,
        _VERSION: version.partition(" (")[0],
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    mine = _Hello(settings, host, os.getpid(), device, visible, registers, str(failure or ""), ids)
    texts = channel.gather(mine.to_bytes(), what)
    hellos = [_Hello.from_bytes(text, rank, what) for rank, text in enumerate(texts)]
    if failure is not None:
        raise failure
    for rank, hello in enumerate(hellos):
        if hello.error:
            raise _C.PeerError(f"{what}: rank {rank} cannot use its GPU {hello.gpu}: {hello.error}")
    for key in hellos[0].settings:
        check_equal(key, [hello.settings.get(key) for hello in hellos])
    return hellos


# --- watching others -----------------------------------------------------------------------------


class _Watched:
    """A communicator that is watched: a weak reference to it, and the state of its other ranks."""

    def __init__(self, comm: _C.Comm, channel: Channel, locations: list[Location]) -> None:
        self.comm = weakref.ref(comm)
        self.channel = channel
        self._asking = channel.for_watching()
        self._answers = True
        self._stall = _stalls_of(channel, self._asking, locations)
        self.peers: dict[int, tuple[int, int]] = {}  # {pidfd: (rank, process id)}
        for rank, location in enumerate(locations):
            if location.host == locations[channel.rank].host and rank != channel.rank:
                try:
                    self.peers[os.pidfd_open(location.pid)] = (rank, location.pid)
                except OSError:  # not permitted, or already dead: the deadline of a wait detects it
                    continue

    def died(self, descriptor: int) -> None:
        rank, pid = self.peers.pop(descriptor)
        os.close(descriptor)
        if not self._ask(lambda: self._asking.has_left(rank)):
            failure = self._ask(self._asking.failure)
            self._fail(failure or f"rank {rank} (process {pid}) died")

    def poll(self) -> None:
        failure = self._ask(self._asking.failure)
        if failure:
            self._fail(failure)
            return
        comm = self.comm()
        if comm is not None:
            self._ask(lambda: self._stall.poll(comm))

    def _ask(self, question: Any) -> Any:
        """Return ``question()``, or None once the store does not answer.

        A store that does not answer is no error: its process may have ended in good order.
        """
        try:
            return question() if self._answers else None
        except _C.StateError:  # the communicator is closed; keep watching the peers
            return None
        except RuntimeError:
            self._answers = False
            return None

    def _fail(self, text: str) -> None:
        comm = self.comm()
        self._answers = False
        self.channel.known = text
        if comm is not None:
            comm.fail(f"{text} (communicator {self.channel.name})")

    def close(self) -> None:
        for descriptor in self.peers:
            os.close(descriptor)
        self.peers.clear()


class _OneHost:
    """Reports of stalls for ranks of one host: a table of what their GPUs and programs do.

    The table is also part of the error when a deadline passes.
    """

    def __init__(self, group: _verdict.Group) -> None:
        self._group, self._noted = group, False

    def poll(self, comm: _C.Comm) -> None:
        seconds, _ = _C.nccl_stall(comm)
        if seconds >= self._group.stall:
            self._group.linger(seconds)
        self._group.news()
        stalled = seconds >= self._group.stall
        if stalled or self._noted:
            _C.nccl_note_others(comm, self._group.text if stalled else "")
        self._noted = stalled


def _stalls_of(channel: Channel, asking: Channel, locations: list[Location]) -> Stall | _OneHost:
    patience = min(_verdict.read_stall(), channel.timeout / 2)
    if len({location.host for location in locations}) == 1:
        with suppress(OSError):
            pids = [location.pid for location in locations]
            name, numbers = f"nccl {channel.name}", channel.numbers
            return _OneHost(_verdict.Group(name, channel.rank, pids, patience, numbers=numbers))
    return Stall(
        asking.for_stalls(),
        channel.rank,
        locations,
        patience=patience,
        seconds=lambda comm: _C.nccl_stall(comm)[0],
        note=_C.nccl_note_others,
        numbers=channel.numbers,
    )


_watched: list[_Watched] = []
_lock = threading.Lock()
_thread_pid: int | None = None


def watch(comm: _C.Comm, channel: Channel, locations: list[Location]) -> None:
    """Watch a communicator's ranks while the communicator exists. ``locations``: where they run."""
    global _thread_pid
    with _lock:
        # For the first communicator of this process (it may be a forked child), start the thread.
        if _thread_pid != os.getpid():
            _watched.clear()
            _thread_pid = os.getpid()
            threading.Thread(target=_watch_all, name="fsdpc-watch", daemon=True).start()
        _watched.append(_Watched(comm, channel, locations))


def _watch_all() -> None:
    while True:
        with _lock:
            for each in [w for w in _watched if w.comm() is None]:
                each.close()
                _watched.remove(each)
            everyone = list(_watched)
        poll = select.poll()
        owners = {fd: each for each in everyone for fd in each.peers}
        for fd in owners:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(WATCH_S * 1000):
            owners[fd].died(fd)
        for each in everyone:
            each.poll()


def publish(text: str) -> None:
    """Publish this process's failure to the ranks of all its communicators. Local."""
    for each in _own():
        each.channel.publish(f"rank {each.channel.rank} gave up: {text}")


def leave() -> None:
    """Publish that this process leaves all its communicators in good order. Local."""
    for each in _own():
        each.channel.leave()


def _own() -> list[_Watched]:
    with _lock:
        return list(_watched) if _thread_pid == os.getpid() else []
