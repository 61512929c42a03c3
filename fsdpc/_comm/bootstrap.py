"""Communicators of the C core for torch's process groups.

A group whose ranks all run on this host (same boot, PID and network namespace) uses shared memory
("shm"). Any other group calls back into ``torch.distributed`` ("c10d"). If the group's backend can
send and receive in the background, units are exchanged by sends and receives, and ranks of one host
also share memory. A group of one rank does not communicate ("self"). GPUs use NCCL ("nccl", see
``nccl.py``), whatever the group's backend is. A communicator is kept as long as torch keeps the
group.

Environment variables, read on every rank when a group is first used. Their values must be equal on
all ranks, except those of ``FSDPC_HOST`` and ``FSDPC_STALL``:

``FSDPC_COLLECTIVES``  ``auto`` (default), ``shm``, ``wire``, ``c10d`` or ``nccl``. With ``c10d``
                       every collective blocks, and torch's own counters, hooks and flight recorder
                       see it; ``wire`` is what ``auto`` chooses for several hosts. On the CPU
                       all values but ``nccl`` are allowed. On GPUs ``auto`` means ``nccl``. The
                       other values stage data through host memory, with host syncs in each
                       collective. They are for machines without NCCL, and for several ranks on one
                       GPU.
``FSDPC_TIMEOUT``      seconds that a rank waits for other ranks, for its own GPU and for its other
                       threads (torch's own collectives have torch's timeout); by default 600, or
                       0.9 of the default group's own timeout if that is less.
``FSDPC_NCCL_REGISTER``
                       0: slots of GPUs are not registered with NCCL (default 1).
``FSDPC_HOST``         the host's name, if it shall differ from the system's name: ranks with
                       different names count as ranks of different hosts, which share no memory.
``FSDPC_STALL``        seconds without progress after which each rank logs a table of all ranks
                       (0: no warnings; default 30).
``FSDPC_TRUST_ORDER``  1: over a wire, omit the small message that is sent beside each collective.
                       The message detects ranks whose collectives are of different units.

``set_collectives`` sets ``FSDPC_COLLECTIVES`` and ``FSDPC_TRUST_ORDER`` from a program.

The first communicator also installs exit handlers. At an orderly exit the process leaves its
groups; after an uncaught exception it sends the exception's type and text to its peers.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from types import TracebackType

import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

from fsdpc import _C
from fsdpc._comm import board as _board
from fsdpc._comm import nccl as _nccl
from fsdpc._comm import verdict as _verdict
from fsdpc._comm.channel import Channel, numbers_of, store_of
from fsdpc._comm.collectives import Collectives, follow_hosts, wires
from fsdpc._comm.error_file import follows, write_error_file
from fsdpc._comm.objects import check_equal, exchange
from fsdpc._comm.stall import Location
from fsdpc._comm.texts import gather_texts
from fsdpc._torch import group_timeouts

KINDS = ("auto", "shm", "wire", "c10d", "nccl")

# Maps each group to {number of this rank's GPU, or None for the CPU: the group's communicator}.
_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int | None, _C.Comm]] = (
    weakref.WeakKeyDictionary()
)
_wanted: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
# Maps each communicator to the object that reports stalls of the communicator's ranks.
_followed: weakref.WeakKeyDictionary[_C.Comm, _verdict.Group] = weakref.WeakKeyDictionary()
_live: weakref.WeakSet[_C.Comm] = weakref.WeakSet()


@dataclass(frozen=True)
class Groups:
    """The communicators of one unit.

    ``shard`` spans the ranks that share one copy of the parameters. ``replicate`` spans the ranks
    that hold the same shard of different copies; it is None without replication. Gradients are
    summed over both groups and divided by ``divide``, the product of the groups' sizes.
    """

    shard: _C.Comm
    replicate: _C.Comm | None
    shard_pg: dist.ProcessGroup | None
    replicate_pg: dist.ProcessGroup | None
    divide: float

    @property
    def comms(self) -> list[_C.Comm]:
        """``shard`` and, if there is replication, ``replicate``."""
        return [comm for comm in (self.shard, self.replicate) if comm is not None]


def make_groups(
    strategy: ShardingStrategy,
    shard_pg: dist.ProcessGroup,
    replicate_pg: dist.ProcessGroup | None = None,
    *,
    device: int | None = None,
) -> Groups:
    """Return the communicators for a sharding strategy. Collective over both groups.

    ``device`` is the number of this rank's GPU, or None for the CPU. ``NO_SHARD`` replicates over
    ``shard_pg``. With any other strategy there are replicas only over ``replicate_pg``.
    """
    if strategy is ShardingStrategy.NO_SHARD:
        if replicate_pg is not None:
            raise ValueError(
                "process_group is a pair of groups, but NO_SHARD replicates over one group: pass "
                "that group alone"
            )
        shard_pg, replicate_pg = None, shard_pg
    shard = _alone(device) if shard_pg is None else comm_for_group(shard_pg, device=device)
    replicate = None
    if replicate_pg is not None and replicate_pg.size() > 1:
        replicate = comm_for_group(replicate_pg, device=device)
    divide = float(shard.world * (replicate.world if replicate else 1))
    return Groups(shard, replicate, shard_pg, replicate_pg, divide)


def comm_for_group(
    pg: dist.ProcessGroup, *, kind: str | None = None, device: int | None = None
) -> _C.Comm:
    """Return a group's communicator, made at first use and kept as long as torch keeps ``pg``.

    Collective over ``pg``. A group has one communicator for the CPU (``device`` None) and one for
    GPUs, for which each rank gives its own GPU's number. ``kind`` overrides ``FSDPC_COLLECTIVES``
    and is ignored if the group already has a communicator. ``ValueError``: ``shm`` is chosen
    although the ranks are on several hosts, or the kind does not support this device's memory.
    ``MismatchError``: the ranks' environments differ. ``CommTimeout`` names the missing ranks.
    ``NotImplementedError``: this rank has no such GPU or no NCCL. ``PeerError``: another rank has
    no such GPU or no NCCL.
    """
    comms = _comms.setdefault(pg, {})
    comm = comms.get(device)
    if comm is None:
        comm, wanted = _numbered(pg, kind, device)
        comms[device] = comm
        if pg.size() > 1:
            _wanted[pg] = wanted
        _live.add(comm)
        _prepare_end()
    return comm


def comm_for_host(pg: dist.ProcessGroup) -> _C.Comm:
    """Return a communicator for arrays in host memory: any one that the group has, or a new one for
    the CPU. Collective over ``pg`` if the group has no communicator yet. Errors are those of
    ``comm_for_group``.
    """
    return next(iter(_comms.get(pg, {}).values()), None) or comm_for_group(pg)


def comm_beside(pg: dist.ProcessGroup) -> _C.Comm | None:
    """Return a new communicator of the ranks of ``pg``, for another thread of each process.

    None if the ranks do not share memory; the thread then needs its own process group. Collective
    over ``pg``. The ranks exchange messages through the group's communicator for the CPU, which is
    made if there is none. That communicator detects dead ranks at once.
    """
    kind = "auto" if os.environ.get("FSDPC_COLLECTIVES") == "nccl" else None
    comm = comm_for_group(pg, kind=kind)
    everyone = exchange(comm, [os.getpid(), uuid.uuid4().hex], "a communicator beside another")
    if comm.kind != "shm":
        return None
    name = f"fsdpc-{everyone[0][1]}"
    beside = _C.Comm.shm(comm.rank, comm.world, name, read_timeout())
    if numbers := numbers_of(pg):
        beside.set_numbers(numbers)
    _follow(beside, pg, name, [pid for pid, _ in everyone])
    _live.add(beside)
    return beside


def is_destroyed(pg: dist.ProcessGroup) -> bool:
    """Whether the group was destroyed. Its object may still exist in torch's caches. Local."""
    try:
        dist.get_backend(pg)
    except ValueError:
        return True
    return False


def set_collectives(kind: str, *, trust_order: bool = False) -> None:
    """Choose how ranks exchange gathered values and gradients, for models sharded from now on.

    ``kind``: ``"auto"`` (shared memory among the ranks of a host, otherwise a wire),
    ``"shm"`` (shared memory), ``"wire"`` (torch's sends and receives, in the background),
    ``"c10d"`` (torch's blocking collectives, which torch's counters, debug modes, flight recorder
    and fake process groups see) or ``"nccl"``. GPUs use NCCL with ``"auto"`` and ``"nccl"``; with
    the other kinds their data is staged through host memory. ``trust_order``: over a wire, send no
    small message beside each collective. These messages detect ranks whose collectives are of
    different units. Without the messages such ranks get wrong values or hang. The function sets
    ``FSDPC_COLLECTIVES`` and ``FSDPC_TRUST_ORDER``, which child processes inherit.

    Local, but every rank must make the same call. ``ValueError``: there is no such kind.
    ``RuntimeError``: a model was already sharded over a group that uses another kind. A group keeps
    its kind.
    """
    kind = _read_kind(kind)
    for pg, before in _wanted.items():
        if before != kind and not is_destroyed(pg):
            raise RuntimeError(
                f"set_collectives({kind!r}): the process group {pg.group_name!r} of {pg.size()} "
                f"ranks uses {before!r} already, and a group keeps its kind: call set_collectives "
                "before the first model is sharded, or shard over a new group"
            )
    os.environ["FSDPC_COLLECTIVES"] = kind
    os.environ["FSDPC_TRUST_ORDER"] = "1" if trust_order else "0"


def trust_order() -> bool:
    """Whether ranks do not check that their collectives have the same order
    (``FSDPC_TRUST_ORDER``). The function is called when a tree is made.
    """
    return os.environ.get("FSDPC_TRUST_ORDER") == "1"


@cache
def _alone(device: int | None) -> _C.Comm:
    """Return the communicator of a single rank. All groups of one rank get the same communicator,
    so that their units can share the slots of a tree.
    """
    if device is not None:
        _say_note(device)
    return _C.Comm.self_(device)


@cache
def _say_note(device: int) -> None:
    """Log the engine's note on a GPU, if there is one, once in each process."""
    note = _C.cuda_device(device)["note"]
    if note:
        logging.getLogger("fsdpc").warning(note)


def _numbered(pg: dist.ProcessGroup, kind: str | None, device: int | None) -> tuple[_C.Comm, str]:
    """Call ``_make_comm``, and let messages that name ranks say how the group numbers them."""
    numbers = numbers_of(pg)
    try:
        comm, wanted = _make_comm(pg, kind, device)
    except Exception as error:
        if numbers and "rank" in str(error):
            error.add_note(numbers)
        raise
    if numbers and pg.size() > 1:
        comm.set_numbers(numbers)
    return comm, wanted


def _make_comm(pg: dist.ProcessGroup, kind: str | None, device: int | None) -> tuple[_C.Comm, str]:
    """Return the new communicator, and the kind that was requested."""
    if pg.size() > 1 and device is None and dist.get_backend(pg) != "fake":
        return _make_cpu(pg, kind)
    wanted, timeout = _read_kind(kind), read_timeout()
    _C.set_timeout(timeout)
    if pg.size() == 1:
        return _alone(device), wanted
    if device is None:
        _refuse_nccl(wanted)
        return _C.Comm.c10d(pg.rank(), pg.size(), Collectives(pg)), wanted
    if wanted in ("shm", "wire", "c10d"):
        return _make_staged(pg, wanted, device), wanted
    return _make_nccl(pg, timeout, device), wanted


@dataclass(frozen=True)
class _Offer:
    """The message that each rank sends to the other ranks of its group before the rendezvous."""

    wanted: str
    timeout: str
    host: str
    pid: str
    name: str
    # Texts of this rank's errors, or "". A refusal makes all ranks raise. An obstacle makes all
    # ranks raise only if the group's communicator is to be "shm".
    refusal: str = ""
    obstacle: str = ""


def _make_cpu(pg: dist.ProcessGroup, kind: str | None) -> tuple[_C.Comm, str]:
    mine, error = _offer(kind, pg.size())
    everyone = [_Offer(*each) for each in gather_texts(pg, astuple(mine))]
    _raise_first([each.refusal for each in everyone], pg.rank(), error)
    check_equal("FSDPC_COLLECTIVES", [each.wanted for each in everyone])
    check_equal("FSDPC_TIMEOUT", [float(each.timeout) for each in everyone])
    hosts = [each.host for each in everyone]
    return _connect(pg, mine, everyone, hosts, error), mine.wanted


def _connect(
    pg: dist.ProcessGroup,
    mine: _Offer,
    everyone: list[_Offer],
    hosts: list[str],
    error: Exception | None,
) -> _C.Comm:
    wanted, pids = mine.wanted, [int(each.pid) for each in everyone]
    stranger = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if wanted == "shm" and stranger is not None:
        raise ValueError(
            f"FSDPC_COLLECTIVES=shm needs all ranks of the group on one host, but rank 0 is at "
            f"{hosts[0]} and rank {stranger} at {hosts[stranger]}; use auto or wire"
        )
    name = f"fsdpc-{everyone[0].name}"
    if wanted in ("wire", "c10d") or stranger is not None:
        timeout = float(mine.timeout)
        channel = _channel_of(pg, name, timeout)
        locations = [Location(each.host, int(each.pid)) for each in everyone]
        flies = wanted != "c10d"
        collectives = Collectives(pg, channel, flies=flies, timeout=timeout, locations=locations)
        comm = _C.Comm.c10d(pg.rank(), pg.size(), collectives)
        shares = collectives.flies and stranger is not None and len(set(hosts)) < len(hosts)
        segment = _share_hosts(comm, everyone, hosts, timeout) if shares else ""
        if stranger is None:
            collectives.stalls = _follow(comm, pg, name, pids)
        elif channel is not None:
            collectives.stalls = follow_hosts(channel, locations)
            if segment:
                _verdict.follow_segment(segment, collectives.stalls)
        return comm
    _raise_first([each.obstacle for each in everyone], pg.rank(), error)
    comm = _C.Comm.shm(pg.rank(), pg.size(), name, float(mine.timeout))
    _follow(comm, pg, name, pids)
    return comm


def _share_hosts(comm: _C.Comm, everyone: list[_Offer], hosts: list[str], timeout: float) -> str:
    """Make memory that the ranks of each host share. Return the name of this host's segment.

    If the ranks of one host cannot share memory, no host's ranks do, and the result is "".
    """
    for rank, each in enumerate(everyone):
        if each.obstacle and hosts.count(each.host) > 1:
            logging.getLogger("fsdpc").warning(
                f"ranks of one host send each other what they could share: rank {rank} cannot "
                f"share memory: {each.obstacle}"
            )
            return ""
    numbers = [hosts.index(host) for host in hosts]
    segment = f"fsdpc-{everyone[numbers[comm.rank]].name}-host"
    comm.set_hosts(numbers, segment, timeout)
    return segment


def _follow(
    comm: _C.Comm, pg: dist.ProcessGroup, name: str, pids: list[int]
) -> _verdict.Group | None:
    """Start to report stalls of the group, for as long as the communicator exists.

    None if there are no reports, because the first rank's board cannot be opened.
    """
    try:
        stall = _verdict.read_stall()
        group = _verdict.Group(name, pg.rank(), pids, stall, numbers=numbers_of(pg))
    except OSError:
        return None
    _verdict.follow(group)
    _followed[comm] = group
    return group


def _channel_of(pg: dist.ProcessGroup, name: str, timeout: float) -> Channel | None:
    store = store_of(pg)
    if store is None:
        return None
    return Channel(store, f"fsdpc/{name}", pg.rank(), pg.size(), timeout, name, numbers_of(pg))


def _offer(kind: str | None, world: int) -> tuple[_Offer, Exception | None]:
    """Return this rank's offer, and this rank's error, if there is one.

    The offer contains the error's text. A rank with an error must send its offer, too: otherwise
    the other ranks, which wait for all offers, would wait until the deadline.
    """
    pid, name = str(os.getpid()), uuid.uuid4().hex
    try:
        wanted, timeout = _read_kind(kind), read_timeout()
        _verdict.read_stall()
        _C.set_timeout(timeout)
        _refuse_nccl(wanted)
    except ValueError as error:
        return _Offer("", "0", "", pid, name, refusal=_one_line(error)), error
    host = this_host()
    with suppress(OSError, _C.CommError):  # without a board, stall tables say less of this rank
        _board.open_board()
    try:
        if wanted not in ("wire", "c10d"):
            _try_segment(world, timeout)
    except Exception as error:
        return _Offer(wanted, f"{timeout:.17g}", host, pid, name, obstacle=_one_line(error)), error
    return _Offer(wanted, f"{timeout:.17g}", host, pid, name), None


def _refuse_nccl(wanted: str) -> None:
    if wanted == "nccl":
        raise ValueError(
            "FSDPC_COLLECTIVES=nccl supports GPUs only, but these units are on the CPU; "
            "use auto, shm, wire or c10d"
        )


def _try_segment(world: int, timeout: float) -> None:
    """Check that this rank can allocate what the rendezvous needs: allocate it, then free it.

    The rendezvous needs the shared segment. Rank 0 also needs file descriptors: a socket and a
    pidfd for each peer, and those of the listener, of the memory and of the watcher.
    """
    _C.Comm.shm(0, 1, "fsdpc-try", timeout).close()
    opened = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            for _ in range(2 * world + 4):
                opened.append(os.dup(first.fileno()))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _raise_first(texts: list[str], rank: int, error: Exception | None) -> None:
    if texts[rank] and error is not None:
        raise error
    for other, text in enumerate(texts):
        if text:
            raise _C.PeerError(f"rank {other} could not join the group of {len(texts)}: {text}")


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines and lines[0] else type(error).__name__


def _make_nccl(pg: dist.ProcessGroup, timeout: float, device: int) -> _C.Comm:
    comm = _nccl.make_nccl_comm(pg, device, timeout, host=this_host())
    _say_note(device)
    return comm


def _make_staged(pg: dist.ProcessGroup, wanted: str, device: int) -> _C.Comm:
    """Return a communicator that stages GPU memory through host memory. It communicates through the
    group's CPU communicator, which is made if there is none.
    """
    comm = comm_for_group(pg, kind=wanted).staged(device)
    logging.getLogger("fsdpc").warning(
        f"FSDPC_COLLECTIVES={wanted} on a GPU: gathers and reductions are staged through host "
        "memory, which is slow; unset it to use NCCL"
    )
    _say_note(device)
    return comm


def _read_kind(kind: str | None) -> str:
    wanted = os.environ.get("FSDPC_COLLECTIVES") or "auto" if kind is None else kind
    if wanted not in KINDS:
        raise ValueError(f"FSDPC_COLLECTIVES must be one of {', '.join(KINDS)}, but is {wanted!r}")
    return wanted


def read_timeout() -> float:
    """Return the seconds that a rank waits for other ranks: ``FSDPC_TIMEOUT``, by default 600.

    The default is shorter if torch's collectives would time out earlier, because torch's errors do
    not name the missing ranks. Local.
    """
    limits = [_C.DEFAULT_TIMEOUT, *(0.9 * seconds for seconds in group_timeouts())]
    text = os.environ.get("FSDPC_TIMEOUT") or str(min(limits))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"FSDPC_TIMEOUT must be a number of seconds above 0, but is {text!r}")
    return seconds


def this_host() -> str:
    """Return a name of the host that is equal for processes that can share memory and open pidfds
    of each other.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        spaces = [f"{name}:{os.stat(f'/proc/self/ns/{name}').st_ino}" for name in ("pid", "net")]
    except OSError:  # without Linux's procfs every process counts as a host of its own
        return f"{socket.gethostname()} process {os.getpid()} {uuid.uuid4().hex}"
    return " ".join([os.environ.get("FSDPC_HOST") or socket.gethostname(), boot, *spaces])


# --- the end of the process ----------------------------------------------------------------------

_prepared_pid: int | None = None
# Functions that are called with an uncaught exception, before its text goes to peers and the user.
ON_UNCAUGHT: list[Callable[[BaseException], None]] = []


def _prepare_end() -> None:
    """Install the handlers by which peers learn how this process ends, once in each process."""
    global _prepared_pid
    if _prepared_pid == os.getpid():
        return
    _prepared_pid = os.getpid()
    atexit.register(_leave)
    _chain_excepthook()
    from multiprocessing import parent_process, util

    # Children of multiprocessing run neither atexit handlers nor sys.excepthook.
    if parent_process() is not None:
        util.Finalize(None, _end_of_child, exitpriority=100)


def _own_comms() -> list[_C.Comm]:
    """Return the communicators that this process made and may end; none in a forked child."""
    return list(_live) if _prepared_pid == os.getpid() else []


def _leave() -> None:
    for comm in _own_comms():
        comm.close()
    _nccl.leave()
    _verdict.end()


def _abort(error: BaseException) -> None:
    for call in ON_UNCAUGHT:
        call(error)
    text = _last_words(error)
    write_error_file(error)
    _nccl.publish(text)
    # If this rank fails because of another rank, it publishes its error to ``wires`` only if the
    # error reports a rank's death: this rank may be the first to report the death.
    cause = not follows(error) or " died while " in text
    for wire in list(wires) if cause and _prepared_pid == os.getpid() else []:
        wire.publish(text)
    for comm in _own_comms():
        comm.abort(text)


def _last_words(error: BaseException) -> str:
    """Return the error in one line: its first line, and the first line of its first note.

    After a failed allocation, that note says what the program was doing.
    """
    notes = [line for note in getattr(error, "__notes__", []) for line in note.splitlines()[:1]]
    return "; ".join([_one_line(error), *notes[:1]])


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _abort(error)
        previous(kind, error, trace)

    sys.excepthook = report


def _end_of_child() -> None:
    """End a child of multiprocessing: abort if an exception ends it, else leave in good order.

    The function runs while such an exception is still being handled.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch.multiprocessing turns exceptions into sys.exit(1)
        error = error.__context__ if error.code else None
    if error is None:
        _leave()
    else:
        _abort(error)
        _verdict.end()
