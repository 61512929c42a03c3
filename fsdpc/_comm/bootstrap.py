"""From torch's process groups to communicators of the C core.

A group whose ranks all run on this host (same boot, PID and network namespace) uses shared memory
("shm"); any other group calls back into ``torch.distributed`` ("c10d"), by sends and receives in
the background where its backend has them, and then shares memory inside each host; a group of one
rank needs neither ("self"). GPUs use NCCL
("nccl", see ``nccl.py``), whatever the group's backend is.
Communicators are kept as long as torch keeps the group.

Environment, read on every rank when a group is first used; all ranks need the same values:

``FSDPC_COLLECTIVES``  ``auto`` (default), ``shm``, ``wire``, ``c10d`` or ``nccl``. With ``c10d``
                       torch's own counters, hooks and flight recorder see every collective, and
                       each blocks; ``wire`` is what ``auto`` takes among several hosts. The CPU
                       takes all but ``nccl``. On GPUs ``auto`` is ``nccl``; the others are staged
                       through host memory, with host syncs in each collective: for several
                       ranks on one GPU, or where there is no NCCL.
``FSDPC_TIMEOUT``      seconds that a rank waits for others (in torch's own collectives their
                       deadline holds), for its own GPU and for its other threads; by default 600,
                       or 0.9 of the default group's own timeout if that is less.
``FSDPC_NCCL_REGISTER``
                       0: slots of GPUs are not registered with NCCL (default 1).
``FSDPC_HOST``         the host's name, where another one than the system's is meant: ranks with
                       different names count as ranks of different hosts, which share no memory.
``FSDPC_STALL``        seconds without progress after which each rank logs a table of all ranks
                       (0: no warnings; default 30).
``FSDPC_TRUST_ORDER``  1: over a wire, skip the small message beside each collective that detects
                       ranks whose collectives are of different units.

``set_collectives`` sets ``FSDPC_COLLECTIVES`` and ``FSDPC_TRUST_ORDER`` from a program.

The first communicator also installs exit handlers: at an orderly exit the process leaves its
groups; after an uncaught exception the peers get its type and text.
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

# The communicators of a group, by the GPU's number (None: the CPU).
_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int | None, _C.Comm]] = (
    weakref.WeakKeyDictionary()
)
_wanted: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
# The object that reports stalls of a communicator's ranks.
_followed: weakref.WeakKeyDictionary[_C.Comm, _verdict.Group] = weakref.WeakKeyDictionary()
_live: weakref.WeakSet[_C.Comm] = weakref.WeakSet()


@dataclass(frozen=True)
class Groups:
    """Communicators of one unit.

    ``shard`` spans the ranks that share one copy of the parameters, ``replicate`` the ranks that
    hold the same piece in different copies (None without replication). Gradients are summed over
    both groups and divided by ``divide``, the product of their sizes.
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
    """Communicators for a sharding strategy on a GPU, or on the CPU (None). Collective over both
    groups.

    ``NO_SHARD`` replicates over ``shard_pg``. Otherwise only ``replicate_pg`` makes replicas.
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
    """The communicator of a process group, made on first use and kept as long as torch keeps `pg`.

    Collective over ``pg``. A group has one communicator for the CPU (``device`` None) and one for
    GPUs, for which each rank gives its own GPU's number. ``kind`` overrides ``FSDPC_COLLECTIVES``
    (ignored if the group has a communicator already). ``ValueError``: ``shm`` is chosen although
    the ranks are on several hosts, or the kind does not support this device's memory.
    ``MismatchError``: the ranks' environments differ. ``CommTimeout`` names the missing ranks;
    ``NotImplementedError``: no such GPU or no NCCL here; ``PeerError``: another rank has none.
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
    """A communicator for arrays in host memory: one that the group has, for whatever device, or a
    new one for the CPU. Collective over ``pg`` if it has none; errors as in ``comm_for_group``.
    """
    return next(iter(_comms.get(pg, {}).values()), None) or comm_for_group(pg)


def comm_beside(pg: dist.ProcessGroup) -> _C.Comm | None:
    """A new communicator of the same ranks, for another thread; ``None`` where the ranks do not
    share memory: the thread then needs a process group of its own. Collective over ``pg``, by the
    communicator that the group has for the CPU or gets now, which knows at once which rank is dead.
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
    """Whether the group was destroyed; torch's caches may keep the object. Local."""
    try:
        dist.get_backend(pg)
    except ValueError:
        return True
    return False


def set_collectives(kind: str, *, trust_order: bool = False) -> None:
    """How ranks exchange gathered values and gradients, for models sharded from now on.

    ``kind``: ``"auto"`` (shared memory among the ranks of a host, a wire otherwise),
    ``"shm"``, ``"wire"`` (torch's sends and receives, in the background), ``"c10d"`` (torch's
    blocking collectives, which its counters, debug modes, flight recorder and fake process groups
    see) or ``"nccl"``; GPUs use NCCL with ``"auto"`` and ``"nccl"``, and copies in host memory with
    the others. ``trust_order`` skips the small message beside each collective over a wire that
    detects ranks whose collectives are of different units; without the check such
    ranks get wrong values or hang. Sets ``FSDPC_COLLECTIVES`` and ``FSDPC_TRUST_ORDER``, which
    children inherit.

    Local, but every rank must do the same. ``ValueError``: no such kind. ``RuntimeError``: a model
    was sharded over a group by another kind already, which that group keeps.
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
    """Whether the check of the ranks' turns is off; read when a tree of units is made."""
    return os.environ.get("FSDPC_TRUST_ORDER") == "1"


@cache
def _alone(device: int | None) -> _C.Comm:
    """The communicator of one rank: the same for all groups, so that their units share a tree's
    slots.
    """
    if device is not None:
        _say_note(device)
    return _C.Comm.self_(device)


@cache
def _say_note(device: int) -> None:
    """Logs the note on a GPU, once a process."""
    note = _C.cuda_device(device)["note"]
    if note:
        logging.getLogger("fsdpc").warning(note)


def _numbered(pg: dist.ProcessGroup, kind: str | None, device: int | None) -> tuple[_C.Comm, str]:
    """As ``_make_comm``; errors also say by which numbers they call the group's ranks."""
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
    """The communicator, and the requested kind."""
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
    """What a rank sends to the others of its group before the rendezvous."""

    wanted: str
    timeout: str
    host: str
    pid: str
    name: str
    # Errors of this rank: a refusal fails all ranks, an obstacle only a group over shared memory.
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
    """Make memory that the ranks of each host share. Returns the name of this host's segment, or ""
    if some host cannot share memory: then none does.
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
    """Reports of the group's stalls, for as long as the communicator lives. ``None``: there are
    no reports, because another rank's board cannot be read.
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
    """This rank's offer, with its errors as text: the others get them from the collective, in which
    they would otherwise wait until the deadline.
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
    with suppress(OSError, _C.CommError):  # then tables of stalled ranks have less of this one
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
    """Makes and frees what a rank needs for the rendezvous: the segment, and as many descriptors as
    rank 0 has open meanwhile (a socket and a pidfd of each peer, the listener, the memory, the
    watcher's).
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
    """Return a communicator that stages GPU memory through host memory, over the group's CPU
    communicator, which is made here if there is none.
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
    """Seconds that a rank waits for others: ``FSDPC_TIMEOUT``, else 600, or less if torch's
    collectives give up earlier: their errors name no rank. Local.
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
    """Where this process runs: equal for processes that can share memory and see each other die."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        spaces = [f"{name}:{os.stat(f'/proc/self/ns/{name}').st_ino}" for name in ("pid", "net")]
    except OSError:  # no Linux procfs: no other process counts as being on this host
        return f"{socket.gethostname()} process {os.getpid()} {uuid.uuid4().hex}"
    return " ".join([os.environ.get("FSDPC_HOST") or socket.gethostname(), boot, *spaces])


# --- the end of the process ----------------------------------------------------------------------

_prepared_pid: int | None = None
# Called with an exception that ends the process, before its peers and the user get the text.
ON_UNCAUGHT: list[Callable[[BaseException], None]] = []


def _prepare_end() -> None:
    """Once in a process: let the peers learn how this process ends."""
    global _prepared_pid
    if _prepared_pid == os.getpid():
        return
    _prepared_pid = os.getpid()
    atexit.register(_leave)
    _chain_excepthook()
    from multiprocessing import parent_process, util

    if parent_process() is not None:  # children of multiprocessing run neither atexit nor the hook
        util.Finalize(None, _end_of_child, exitpriority=100)


def _own_comms() -> list[_C.Comm]:
    """Communicators that this process made and may break; in a forked child there are none."""
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
    # A rank that fails because of another one is no cause, but may be the first to see a death.
    cause = not follows(error) or " died while " in text
    for wire in list(wires) if cause and _prepared_pid == os.getpid() else []:
        wire.publish(text)
    for comm in _own_comms():
        comm.abort(text)


def _last_words(error: BaseException) -> str:
    """One line of the error, with the first line of its first note: the place of a shortage."""
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
    """Runs while the exception that ends a child process, if any, is still being handled."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch.multiprocessing turns exceptions into sys.exit(1)
        error = error.__context__ if error.code else None
    if error is None:
        _leave()
    else:
        _abort(error)
        _verdict.end()
